"""SequenceOps: what can be done to sequences beside the steps: fork, take back, move to the host; and to prefixes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import forks, swap
from kvstore.arena import Arena
from kvstore.books import Books
from kvstore.events import Event
from kvstore.hostcopy import HostCopies, HostRows
from kvstore.namespaces import Namespace
from kvstore.prefixes import HitReport


class SequenceOps:
    """The part of a KVStore that moves whole sequences; see `KVStore`."""

    _books: Books
    _arena: Arena | None
    _host: HostCopies
    _suspended: dict[int, tuple[swap.Held, list[HostRows | None] | None]]

    def lookup(
        self,
        token_arrays: Sequence[Any],
        namespace: Namespace | Sequence[Namespace | None] | None = None,
        *,
        max_cached_tokens: Any = None,
    ) -> npt.NDArray[np.int64]:
        """How many tokens of each prompt `open` would find now; nothing changes.

        Returns: int64, one number per prompt.

        Raises: as `open`.
        """
        return self._books.lookup(token_arrays, namespace, max_cached_tokens)

    def name_tokens(self, seq_ids: Any, token_arrays: Sequence[Any]) -> None:
        """Tells the tokens of sequences, some of which were committed as -1: all of them can be found from then on.

        Args:
            token_arrays: per sequence all its committed tokens, from the first on.

        Raises: ValueError for another number of tokens, and tokens that differ from those committed; SequenceError for
            handles that are unknown or released.
        """
        self._books.name_tokens(seq_ids, token_arrays)

    def truncate(self, seq_ids: Any, lengths: Any) -> None:
        """Takes tokens back: each sequence goes on from `lengths` tokens, one for all or one per sequence.

        Raises: ValueError for a length that is none of 0 ... the sequence's, or below what a window (see `rollback`), a
            ring or a state still has; SequenceError for handles as `extend`, and sequences with uncommitted batches.
        """
        forks.truncate(self._books, seq_ids, lengths)
        self._poison()

    def fork(self, seq_id: int, num_forks: int) -> npt.NDArray[np.int64]:
        """Opens `num_forks` sequences that go on from where `seq_id` is, and share its blocks until they write.

        Returns: int64 [num_forks], the handles.

        Raises: SequenceError for a handle as of `extend`, a sequence with uncommitted batches, and more sequences than
            are left of max_sequences.
        """
        return self._books.handles.current[forks.fork(self._books, seq_id, num_forks)]

    def reorder(self, seq_ids: Any, parents: Any) -> None:
        """Makes sequence `seq_ids[i]` go on from what `parents[i]` holds: the step of a beam search.

        All parents are read before any sequence changes; one may occur several times. Handles stay what they are.

        Raises: SequenceError / ValueError for handles as of `extend`, other than one parent per sequence, and
            sequences with uncommitted batches.
        """
        forks.reorder(self._books, seq_ids, parents)
        self._poison()

    def suspend(self, seq_ids: Any) -> None:
        """Moves the bytes of sequences to host memory and gives their blocks back; `resume` brings them back.

        Raises: SequenceError for handles as of `extend`, and sequences with uncommitted batches.
        """
        _, rows, held = swap.suspending(self._books, seq_ids)
        saved = [None if self._arena is None else self._host.save(blocks.ids) for blocks in held]
        swap.suspend(self._books, rows)
        self._suspended.update(zip(rows.tolist(), zip(held, saved, strict=True), strict=True))
        self._poison()

    def resume(self, seq_ids: Any) -> None:
        """Gives suspended sequences blocks with their bytes again, all of them or none.

        Raises: SequenceError for handles that are unknown or not suspended; OutOfBlocks.
        """
        held = {row: blocks for row, (blocks, _) in self._suspended.items()}
        placed = swap.resume(self._books, seq_ids, held)
        try:
            for row, ids in placed:
                saved = self._suspended[row][1]
                if saved is not None:
                    self._host.load(saved, ids)
        except BaseException:
            swap.undo_resume(self._books, placed)
            raise
        for row, _ in placed:
            del self._suspended[row]

    def explain_hit(self, seq_id: int) -> HitReport:
        """What the sequence found when it was opened, and where and why each group stopped; `str()` reads well.

        Raises: SequenceError for an unknown handle; ValueError for a store without prefix caching.
        """
        _, rows = self._books.handles.resolve([seq_id], "seq_id")
        report = self._books.report(int(rows[0]))
        if report is None:
            raise ValueError("prefix_caching: this store finds no prefixes")
        return report

    def drop_prefixes(self) -> int:
        """Forgets all prefixes, as after a change of weights: no sequence opened so far is hit from here on.

        Returns: the number of blocks given up.
        """
        return self._books.forget_prefixes()

    def invalidate(
        self, namespace: Namespace | None = None, *, predicate: Callable[[Namespace], bool] | None = None
    ) -> int:
        """Forgets the prefixes of one namespace, or of those a predicate picks, while sequences run on.

        Args:
            namespace: its adapter, salt and weights count, its items do not.
            predicate: called with each namespace known.

        Returns: the number of blocks given up.

        Raises: TypeError unless exactly one of the two is given.
        """
        if (namespace is None) == (predicate is None):
            raise TypeError("invalidate: expected a namespace or a predicate, one of the two")
        if predicate is not None:
            return self._books.forget_prefixes(predicate)
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace: expected a Namespace, got {type(namespace).__name__}")
        return self._books.forget_prefixes(lambda known: known.key == namespace.key)

    def take_events(self) -> list[Event]:
        """What entered and left the prefix index since the last call, oldest first; see `max_events`.

        Returns: `BlocksStored`, `BlocksRemoved` and `PrefixesCleared`; `EventsLost` first where some were dropped.
        """
        announcer = self._books.prefixes.announcer if self._books.prefixes is not None else None
        if announcer is None:
            return []
        announcer.catch_up()
        return announcer.log.take()

    def _poison(self) -> None:
        """Of a store in debug mode: fills what was given up with NaN."""
