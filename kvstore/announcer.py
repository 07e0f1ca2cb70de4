"""Announcer: turns what the prefix index takes in, and what the allocator gives up, into events."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.allocator import BlockAllocator, Ids
from kvstore.digests import DIGEST_BYTES, content_digests, extend_digests, root_digest
from kvstore.events import BlocksRemoved, BlocksStored, EventLog, PrefixesCleared
from kvstore.namespaces import Namespace
from kvstore.rules import GroupRules

Tokens = npt.NDArray[np.int32]
Digests = npt.NDArray[np.uint8]


class Announcer:
    """Knows the content digest of every block that can be hit.

    What is given up is told before anything that is stored later, and at `catch_up`. Several blocks may have one
    digest, where prompts part inside a unit: it is told with the first of them, and gone with the last.
    """

    def __init__(self, log: EventLog, rules: GroupRules, allocator: BlockAllocator) -> None:
        self.log = log
        self._rules, self._allocator = rules, allocator
        num_cells = len(allocator.references)
        self._digest = np.zeros((num_cells, DIGEST_BYTES), np.uint8)
        self._group = np.full(num_cells, NOBODY, np.int16)  # whose block the index knows in a cell
        self._num_cells: list[dict[bytes, int]] = [{} for _ in rules.names]  # per group, of each digest told
        allocator.given_up = []

    def stored(
        self,
        tokens: Tokens,
        namespace: Namespace,
        start: int,
        blocks: Sequence[Ids],
        taken: Sequence[Ids],
        known: list[Digests],
    ) -> None:
        """Tells which of a sequence's blocks the index took in.

        Args:
            tokens: all of the sequence up to the end of `blocks`.
            start: the first token of `blocks[g]`.
            blocks, taken: ids of each group, and those of them that were taken in.
            known: of each group the digests of the sequence worked out so far; those that were missing are added.
        """
        self.catch_up()
        for g, name in enumerate(self._rules.names):
            if not len(taken[g]):
                continue
            size = int(self._rules.block_size[g])
            known[g] = _more_digests(known[g], tokens, size, namespace, name)
            numbers = start // size + np.flatnonzero(np.isin(blocks[g], taken[g]))
            cells = self._allocator.to_cells(blocks[g][numbers - start // size], g)
            untold = self._group[cells] != g  # others are in a part of a unit that was found, and are taken in again
            numbers, cells = numbers[untold], cells[untold]
            self._digest[cells], self._group[cells] = known[g][numbers], g
            numbers = numbers[self._count(g, known[g][numbers])]
            if not len(numbers):
                continue
            for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
                low, high = int(run[0]), int(run[-1]) + 1
                self.log.append(
                    BlocksStored(
                        name,
                        tuple(digest.tobytes() for digest in known[g][low:high]),
                        known[g][low - 1].tobytes() if low else None,
                        tokens[low * size : high * size],
                        size,
                        namespace,
                    )
                )

    def cleared(self, namespace: Namespace | None) -> None:
        """Tells that a namespace, or everything, was forgotten; its blocks are not told one by one."""
        self._take_given_up()
        if namespace is None:
            self._num_cells = [{} for _ in self._num_cells]
        self.log.append(PrefixesCleared(namespace))

    def catch_up(self) -> None:
        """Tells which blocks were given up since the last time."""
        for g, digests in enumerate(self._take_given_up()):
            if digests:
                self.log.append(BlocksRemoved(self._rules.names[g], tuple(digests)))

    def _count(self, group: int, digests: Digests) -> npt.NDArray[np.bool_]:
        """Notes one more block for each digest. Returns: which ones are its first."""
        counts = self._num_cells[group]
        is_first = np.zeros(len(digests), np.bool_)
        for at, row in enumerate(digests):
            digest = row.tobytes()
            counts[digest] = counts.get(digest, 0) + 1
            is_first[at] = counts[digest] == 1
        return is_first

    def _take_given_up(self) -> list[list[bytes]]:
        """Notes which blocks were given up since the last time. Returns: per group the digests that are gone by it."""
        gone: list[list[bytes]] = [[] for _ in self._rules.names]
        if not self._allocator.given_up:
            return gone
        cells = np.concatenate(self._allocator.given_up)
        self._allocator.given_up.clear()
        # Each once, in order: a cell may have held, untold, a block that its next owner's window let go.
        cells = cells[np.sort(np.unique(cells, return_index=True)[1])]
        for g, counts in enumerate(self._num_cells):
            for row in self._digest[cells[self._group[cells] == g]]:
                digest = row.tobytes()
                counts[digest] -= 1
                if not counts[digest]:
                    del counts[digest]
                    gone[g].append(digest)
        self._group[cells] = NOBODY
        return gone


NOBODY = -1


def _more_digests(known: Digests, tokens: Tokens, size: int, namespace: Namespace, group: str) -> Digests:
    """`known`, and the digests of the whole blocks of `tokens` behind those."""
    if len(known) * size + size > len(tokens):
        return known
    if namespace.items:
        return content_digests(tokens, size, namespace, group)
    parent = known[-1].tobytes() if len(known) else root_digest(size, namespace, group)
    return np.concatenate([known, extend_digests(parent, tokens[len(known) * size :], size)])
