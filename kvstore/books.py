"""Books: which sequence holds which block, from open to release. Host only, whole batches, no bytes and no torch.

The numbers of the sequences of the last batch are kept gathered (`Roster`): a decode loop that comes back with the
same sequences works on them in place, and they are put back when somebody else asks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.allocator import BlockAllocator, Ids
from kvstore.announcer import Announcer
from kvstore.errors import SequenceError
from kvstore.events import EventLog
from kvstore.namespaces import Namespace
from kvstore.plan import CachePlan
from kvstore.prefixes import Found, HitReport, Owner, Prefixes
from kvstore.prompts import keeps_of, most_cached, namespaces_of, prompt_arrays
from kvstore.retain import KeepTokens
from kvstore.rules import NEVER, GroupRules, Limits
from kvstore.sequences import FIELDS, Counts, Flags, Handles, Rows, SequenceState, expect_tokens, token_array
from kvstore.tables import BlockTables, Numbers


class UnfinishedStep(Protocol):
    """What the books must know of a `steps.Step` that is not finished."""

    seq_ids: npt.NDArray[np.int64]
    rows: Rows
    committed: bool


UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Roster:
    """The sequences of a batch: handles, rows, and a copy of their numbers that is ahead of the books'.

    `num_extends` and `num_commits` count the batches since the numbers were gathered, on top of those of `state`.
    """

    ids: npt.NDArray[np.int64]
    id_bytes: bytes
    rows: Rows
    state: SequenceState
    row_starts: Numbers  # of each row in the flat token history
    ones: Counts
    num_before: Counts  # batches of each sequence before the numbers were gathered
    in_flight: int  # the most uncommitted batches of a sequence
    was_idle: bool  # no sequence had any when the numbers were gathered
    in_prompt: bool  # whether a sequence may have uncommitted tokens of its prompt
    longest: int = UNKNOWN  # tokens of the longest sequence; UNKNOWN after some were taken back
    num_extends: int = 0
    num_commits: int = 0


class Books:
    """The bookkeeping half of a KVStore. A failed call changes nothing.

    Args:
        plan: any plan.
        limits: what the store is made for.
        prefix_caching: whether committed blocks can be hit.
        tail_only: as of `GroupRules`.
        debug: whether blocks get a new generation whenever they are given back.
        clock: seconds, for times to live.
        events: where to tell what enters and leaves the prefix index.
    """

    def __init__(
        self,
        plan: CachePlan,
        limits: Limits,
        *,
        prefix_caching: bool = True,
        tail_only: bool = False,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog | None = None,
    ) -> None:
        self.plan = plan
        self.limits = limits
        self.rules = GroupRules(plan, limits, tail_only)
        self.allocator = BlockAllocator(plan.num_frames, plan.blocks_per_frame, clock, debug)
        self.handles = Handles(limits.max_sequences)
        self.state = SequenceState.empty(limits.max_sequences, self.rules.sizes)
        self.tables = BlockTables(self.rules, limits.max_sequences)
        self.tables.reset(self.state, np.arange(limits.max_sequences))
        self.unfinished: dict[int, UnfinishedStep] = {}
        self.fences: list[tuple[int, Ids]] = []  # (serial of the last step that may touch the blocks, cells)
        self.prefixes: Prefixes | None = None
        if prefix_caching and plan.groups:
            announcer = None if events is None else Announcer(events, self.rules, self.allocator)
            length = limits.max_length
            self.prefixes = Prefixes(plan.groups, self.rules, self.tables, self.allocator, length, announcer)
        self.roster: Roster | None = None
        self.next_serial = 0
        self._next_edition = 1
        self.is_sharing = False
        self.checkpointed = np.flatnonzero(self.rules.is_checkpointed).tolist()
        self.in_fixed_blocks = np.flatnonzero(self.rules.is_ring | self.rules.is_state).tolist()

    # Opening

    def open(
        self,
        token_arrays: Sequence[Any],
        namespace: Namespace | Sequence[Namespace | None] | None = None,
        retention: Sequence[KeepTokens] | Sequence[Sequence[KeepTokens]] | None = None,
        max_cached_tokens: Any = None,
    ) -> tuple[Rows, Counts]:
        """Opens one sequence per prompt. Returns: their rows, and the tokens each found in the prefix index."""
        prompts = prompt_arrays(token_arrays, self.limits.max_length)
        namespaces = namespaces_of(namespace, prompts)
        keeps = keeps_of(retention, len(prompts))
        most = most_cached(max_cached_tokens, len(prompts))
        self.handles.expect_room("token_arrays", len(prompts))
        found: Found | None = None
        if len(prompts) == 1:
            # What equals tokens of the index needs no look: of a long hit only the rest is searched for wrong numbers.
            found = self.prefixes.find(prompts[0], namespaces[0], most[0]) if self.prefixes is not None else None
            expect_tokens("token_arrays[0]", prompts[0][found.report.matched if found is not None else 0 :])
        self.flush()
        rows = self.handles.open(len(prompts))
        state = self.state
        state.matrix[: len(FIELDS), rows] = 0
        state.unknown[rows] = NEVER
        self.renew(rows)
        if self.prefixes is None:
            state.indexed[rows] = NEVER
            for row, prompt in zip(rows.tolist(), prompts, strict=True):
                state.prompt[row] = len(prompt)
            return rows, state.committed[rows]
        for row, prompt, names, keep, limit in zip(rows.tolist(), prompts, namespaces, keeps, most, strict=True):
            if found is None or len(prompts) > 1:
                found = self.prefixes.find(prompt, names, limit)
            self.prefixes.attach(state, row, prompt, found, Owner(names, keeps=keep))
            self.is_sharing |= found.report.copied > 0
        return rows, state.committed[rows]

    def lookup(
        self,
        token_arrays: Sequence[Any],
        namespace: Namespace | Sequence[Namespace | None] | None = None,
        max_cached_tokens: Any = None,
    ) -> Counts:
        """How many tokens of each prompt `open` would find; see `KVStore.lookup`."""
        prompts = prompt_arrays(token_arrays, self.limits.max_length)
        for index, prompt in enumerate(prompts):
            expect_tokens(f"token_arrays[{index}]", prompt)
        namespaces = namespaces_of(namespace, prompts)
        most = most_cached(max_cached_tokens, len(prompts))
        if self.prefixes is None:
            return np.zeros(len(prompts), np.int64)
        find = self.prefixes.find
        reports = [find(*asked).report for asked in zip(prompts, namespaces, most, strict=True)]
        return np.array([report.cached_tokens for report in reports], np.int64)

    def name_tokens(self, seq_ids: Any, token_arrays: Sequence[Any]) -> None:
        """Tells the tokens that were committed as unknown; see `KVStore.name_tokens`."""
        _, rows = self.handles.resolve(seq_ids)
        arrays = [token_array(f"token_arrays[{index}]", tokens) for index, tokens in enumerate(token_arrays)]
        if len(arrays) != len(rows):
            raise ValueError(f"token_arrays: expected one per sequence, {len(rows)} in all, got {len(arrays)}")
        self.flush()
        for index, (row, tokens) in enumerate(zip(rows.tolist(), arrays, strict=True)):
            committed = int(self.state.committed[row])
            if len(tokens) != committed:
                raise ValueError(
                    f"token_arrays[{index}]: expected the {committed} committed tokens of the sequence, "
                    f"got {len(tokens)}"
                )
            if self.prefixes is not None:
                self.prefixes.settle_tokens(row)
                known = min(int(self.state.unknown[row]), committed)
                wrong = np.flatnonzero(self.prefixes.tokens[row, :known] != tokens[:known])
                if wrong.size:
                    at = int(wrong[0])
                    raise ValueError(
                        f"token_arrays[{index}]: expected the tokens that were committed, "
                        f"{self.prefixes.tokens[row, at]} at position {at}, got {tokens[at]}"
                    )
        for row, tokens in zip(rows.tolist(), arrays, strict=True):
            if self.prefixes is not None:
                self.prefixes.tokens[row, : len(tokens)] = tokens
            self.state.unknown[row] = NEVER

    def report(self, row: int) -> HitReport | None:
        """What the sequence of a row found when it was opened."""
        return self.prefixes.owners[row].report if self.prefixes is not None else None

    def release(self, seq_ids: Any) -> None:
        """Closes sequences; see `KVStore.release`."""
        _, rows = self.handles.resolve(seq_ids)
        self.flush()
        touched = self.touched()
        for row in rows.tolist():
            self.let_go_of_row(row, touched)
        if self.prefixes is not None:
            self.prefixes.close(rows)
        self.tables.clear(self.state, rows)
        self.handles.close(rows)

    def forget_prefixes(self, matches: Callable[[Namespace], bool] | None = None) -> int:
        """Forgets the prefixes of some namespaces, or all. Returns: blocks given up."""
        if self.prefixes is None:
            return 0
        self.flush()
        rows = np.flatnonzero(self.handles.current[:-1] >= 0)
        given_up = self.prefixes.forget(matches, self.state, rows)
        if matches is None:
            self.allocator.drop_cached()
            if self.prefixes.announcer is not None:
                self.prefixes.announcer.cleared(None)
        return given_up

    # What the calls beside open, extend, commit and release need (forks, rollback, swap)

    def flush(self) -> None:
        """Puts the numbers of the last batch back: `state` is true from here on."""
        roster = self.roster
        if roster is not None:
            roster.state.num_extends += roster.num_extends
            roster.state.num_commits += roster.num_commits
            self.state.put(roster.rows, roster.state)
            self.roster = None

    def renew(self, rows: Rows) -> None:
        """Gives rows a new edition: whoever mirrors the tables copies them whole."""
        self.state.edition[rows] = np.arange(self._next_edition, self._next_edition + len(rows))
        self._next_edition += len(rows)

    def tables_changed(self, rows: Rows) -> None:
        """To call after table rows were rewritten: tails are worked out and mirrors are told. The roster is empty."""
        self.renew(rows)
        state = self.state.take(rows)
        self.tables.refresh_tails(state, rows)
        self.state.put(rows, state)

    def expect_settled(self, ids: npt.NDArray[np.int64], rows: Rows, name: str = "seq_ids") -> None:
        """Raises SequenceError for a sequence with uncommitted batches. The roster is empty."""
        in_flight = self.state.num_extends[rows] - self.state.num_commits[rows]
        if in_flight.any():
            worst = int(in_flight.argmax())
            raise SequenceError(
                f"{name}: expected sequences without uncommitted batches, got {ids[worst]} with {in_flight[worst]}"
            )

    def give_back(self, cells: Ids, last_serial: int) -> None:
        """Releases blocks that steps up to `last_serial` may touch, once the last of these is finished."""
        if not len(cells):
            return
        if self.unfinished and self.oldest_unfinished() <= last_serial:
            self.allocator.fence(cells)
            self.fences.append((last_serial, cells))
        else:
            self.allocator.release(cells)

    def touched(self) -> Flags:
        """Of every row: whether an unfinished batch has its sequence."""
        touched = np.zeros(self.limits.max_sequences, np.bool_)
        for step in self.unfinished.values():
            touched[step.rows[self.handles.alive(step.seq_ids, step.rows)]] = True
        return touched

    def let_go_of_row(self, row: int, touched: Flags) -> None:
        """Makes a row's committed blocks findable and gives all its blocks back, the tail first, group by group."""
        if self.prefixes is not None and not self.handles.suspended[row]:
            self.prefixes.update(self.state, row, row, int(self.state.committed[row]))
        last = self.next_serial - 1 if touched[row] else -1
        for g in range(self.rules.num_groups):
            _, ids = self.tables.held(self.state, row, g)
            self.give_back(self.allocator.to_cells(ids[::-1], g), last)

    def cut_back(self, state: SequenceState, rows: Rows, lengths: Counts, serial: int) -> None:
        """Gives back the blocks that `lengths` tokens do not need."""
        entries = self.tables.excess(state, lengths)
        if len(entries.seq):
            ids = self.tables.remove(entries, rows)
            there = ids != 0
            self.give_back(self.allocator.to_cells(ids[there], entries.group[there])[::-1], serial)
            self.tables.refresh_tails(state, rows)

    def roster_of(self, seq_ids: Any) -> Roster:
        """The sequences of a batch with their numbers gathered; the last batch's again where it has the same ones.

        Raises: ValueError / SequenceError for handles that are wrong, or of a suspended sequence.
        """
        roster = self.roster
        is_array = seq_ids.__class__ is np.ndarray and seq_ids.dtype == np.int64 and seq_ids.ndim == 1
        if roster is not None and is_array and seq_ids.tobytes() == roster.id_bytes:
            return roster
        ids, rows = self.handles.resolve(seq_ids)
        self.handles.expect_resident(ids, rows)
        if roster is not None and ids.tobytes() == roster.id_bytes:
            return roster
        return self.load(ids, rows)

    def load(self, ids: npt.NDArray[np.int64], rows: Rows) -> Roster:
        """Gathers the numbers of sequences; the roster before is put back."""
        self.flush()
        ones = np.ones(len(ids), np.int64)
        for array in (ids, ones):  # batches show both to the engine
            array.setflags(write=False)
        state = self.state.take(rows)
        in_flight = int((state.num_extends - state.num_commits).max(initial=0))
        in_prompt, row_starts = False, rows
        if self.prefixes is not None:
            in_prompt = bool((state.committed < state.prompt).any())
            row_starts = rows * self.prefixes.tokens.shape[1]
        self.roster = Roster(
            ids,
            ids.tobytes(),
            rows,
            state,
            row_starts,
            ones,
            state.num_extends.copy(),
            in_flight,
            in_flight == 0,
            in_prompt,
        )
        return self.roster

    def oldest_unfinished(self) -> int:
        """The serial of the oldest unfinished step, or of the next one."""
        return next(iter(self.unfinished), self.next_serial)  # serials enter in order
