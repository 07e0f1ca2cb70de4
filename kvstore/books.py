"""Books: which sequence holds which block, from open to release. Host only, whole batches, no bytes and no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.allocator import BlockAllocator, Ids
from kvstore.errors import SequenceError
from kvstore.plan import CachePlan
from kvstore.prefix import Node, PrefixIndex
from kvstore.tables import Counts, GroupTable, Rows, SequenceRows, int_array, ragged_arange
from kvstore_kernels.checks import expect_int

MAX_TOKEN_ID = 2**31 - 1
NEVER = 2**62  # more units than a sequence can have: its rows are not to be found


@dataclass(slots=True, eq=False)
class Step:
    """What `Books.extend` reserved: rows of the tables, tokens before and new, and the blocks handed out per group."""

    serial: int
    seq_ids: npt.NDArray[np.int64]
    rows: Rows
    starts: Counts
    counts: Counts
    order: Counts  # how many batches of each sequence come before it
    new_blocks: list[Ids]
    committed: bool = False

    def positions(self) -> Counts:
        """The position of every new token in its sequence, flat."""
        return _positions(self.starts, self.counts)


SERVED_KINDS = ("full", "sliding_window", "latent", "hidden_state")
"""Kinds of layers whose blocks the books can keep."""


class Books:
    """The bookkeeping half of a KVStore. A failed call changes nothing.

    Args: as of `KVStore`.

    Raises: ValueError for a plan whose group mixes layers of different `tokens_per_row`, has a layer of another kind
        than `SERVED_KINDS`, or puts several blocks into a frame.
    """

    def __init__(
        self, plan: CachePlan, max_sequences: int, max_length: int, max_tokens_per_step: int, max_in_flight: int
    ) -> None:
        self.plan = plan
        self.max_length = max_length
        self.max_tokens_per_step = max_tokens_per_step
        self.max_in_flight = max_in_flight
        self.sequences = SequenceRows(max_sequences)
        self.allocator = BlockAllocator(plan.num_frames, len(plan.groups))
        self.tables = [self._table(group) for group in range(len(plan.groups))]
        self.unfinished: dict[int, Step] = {}
        self.fences: list[tuple[int, Ids]] = []  # (serial of the last step that may touch the blocks, blocks)
        self.num_unfinished = np.zeros(max_sequences, np.int64)
        self._next_serial = 0
        self._unit = lcm(*(group.block_size for group in plan.groups))
        self._index = self._make_index()
        self._cursors: list[Node] = [self._index.root] * max_sequences if self._index else []
        self._indexed_units = np.zeros(max_sequences, np.int64)
        self._tokens = np.zeros((max_sequences if self._index else 0, max_length), np.int32)
        self._evicted_at_sweep = 0

    def open(self, token_arrays: Sequence[Any]) -> tuple[Rows, Counts]:
        """Opens one sequence per prompt. Returns: their rows, and the tokens each found in the prefix index."""
        if not isinstance(token_arrays, Iterable) or isinstance(token_arrays, str | bytes):
            raise ValueError(f"token_arrays: expected a sequence of prompts, got {token_arrays!r}")
        prompts = [self._prompt(index, tokens) for index, tokens in enumerate(token_arrays)]
        if len(prompts) > self.sequences.num_free:
            raise SequenceError(
                f"token_arrays: expected at most {self.sequences.num_free} more sequences "
                f"(max_sequences {self.sequences.max_sequences}), got {len(prompts)}"
            )
        if self._index is not None:
            self._update_index(self._index)
        rows = self.sequences.open(len(prompts))
        self.num_unfinished[rows] = 0
        if self._index is not None:
            for row, prompt in zip(rows.tolist(), prompts, strict=True):
                self._attach_prefix(self._index, row, prompt)
        return rows, self.sequences.committed[rows]

    def extend(self, seq_ids: Any, num_new_tokens: Any, pad_to: int | None = None) -> Step:
        """Reserves rows for the next tokens of each sequence, for all of them or for none; `pad_to` is only checked."""
        ids, rows = self.sequences.resolve(seq_ids)
        counts = self._counts("num_new_tokens", num_new_tokens, len(rows))
        starts = self.sequences.length[rows]
        if pad_to is not None:
            self._check_padding(pad_to, counts)
        self._check_extend(ids, rows, starts, counts)
        ends = starts + counts
        order = self.sequences.num_commits[rows] + self.sequences.in_flight[rows]
        missing = [table.missing(rows, ends) for table in self.tables]
        new_blocks = self.allocator.take([int(count.sum()) for count in missing])
        for table, count, blocks in zip(self.tables, missing, new_blocks, strict=True):
            table.append(rows, count, blocks)
        self.sequences.length[rows] = ends
        self.sequences.in_flight[rows] += 1
        self.num_unfinished[rows] += 1
        for array in (ids, counts):
            array.setflags(write=False)  # a batch shows them to the engine
        step = Step(self._next_serial, ids, rows, starts, counts, order, new_blocks)
        self.unfinished[step.serial] = step
        self._next_serial += 1
        return step

    def commit(self, step: Step, token_ids: Any, num_committed: Any = None, finish: bool = True) -> None:
        """Confirms written rows; see `KVStore.commit`."""
        self.expect_uncommitted(step)
        rows, starts, counts, order = step.rows, step.starts, step.counts, step.order
        if num_committed is not None:
            counts = self._counts("num_committed", num_committed, len(rows))
            if (counts > step.counts).any():
                raise ValueError(
                    f"num_committed: expected at most the extended {step.counts.tolist()}, got {counts.tolist()}"
                )
        positions = _positions(starts, counts)
        tokens = token_array("token_ids", token_ids)
        if len(tokens) != len(positions):
            raise ValueError(f"token_ids: expected {len(positions)} tokens, got {len(tokens)}")
        alive = self.sequences.alive(step.seq_ids, rows)
        if not alive.all():
            kept = np.repeat(alive, counts)
            tokens, positions = tokens[kept], positions[kept]
            rows, starts, counts, order = rows[alive], starts[alive], counts[alive], order[alive]
        withdrawn = counts < (step.counts if alive.all() else step.counts[alive])
        self._check_commit(rows, order, withdrawn)

        ends = starts + counts
        if self._index is not None:
            self._tokens[np.repeat(rows, counts), positions] = tokens
        self.sequences.committed[rows] = ends
        self.sequences.length[rows[withdrawn]] = ends[withdrawn]
        self.sequences.in_flight[rows] -= 1
        self.sequences.num_commits[rows] += 1
        step.committed = True
        if finish:
            self.finish(step)
        for table in self.tables:
            left = table.leave_window(rows, ends)
            if left.size:
                self._give_back(left, step.serial)

    def finish(self, step: Step) -> None:
        """Gives back what is fenced for this step, if no earlier one is unfinished; see `KVStore.finish`."""
        if self.unfinished.get(step.serial) is not step:
            raise ValueError("batch: expected an unfinished batch of this store, got a finished or a foreign one")
        if not step.committed:
            raise ValueError("batch: expected a committed batch, got one that is not committed yet")
        del self.unfinished[step.serial]
        self.num_unfinished[step.rows[self.sequences.alive(step.seq_ids, step.rows)]] -= 1
        due = [ids for serial, ids in self.fences if serial < self._oldest_unfinished()]
        self.fences = [(serial, ids) for serial, ids in self.fences if serial >= self._oldest_unfinished()]
        for ids in due:
            self.allocator.unfence(ids)

    def release(self, seq_ids: Any) -> None:
        """Closes sequences; see `KVStore.release`."""
        _, rows = self.sequences.resolve(seq_ids)
        for row in rows.tolist():
            if self._index is not None:
                self._update_index_of(self._index, row)
                self._cursors[row] = self._index.root
                self._indexed_units[row] = 0
            touched = self.num_unfinished[row] > 0
            for table in self.tables:
                ids = table.held(row)[::-1]  # the tail first: without its head a prefix is worth nothing
                if touched:
                    self._give_back(ids, self._next_serial - 1)
                else:
                    self.allocator.release(ids)
                table.clear(row)
        self.sequences.close(rows)

    def drop_prefixes(self) -> None:
        """Forgets every prefix: cached blocks become free, and open sequences are not hit any more."""
        if self._index is not None:
            self._index.clear()
            self._cursors = [self._index.root] * self.sequences.max_sequences
            self._indexed_units[:] = NEVER
        self.allocator.drop_cached()

    def expect_uncommitted(self, step: Step) -> None:
        """Raises ValueError unless the step is of these books and not committed."""
        if self.unfinished.get(step.serial) is not step:
            raise ValueError("batch: expected an unfinished batch of this store, got a finished or a foreign one")
        if step.committed:
            raise ValueError("batch: expected a batch that is not committed, got a committed one")

    # Fences

    def _oldest_unfinished(self) -> int:
        return min(self.unfinished, default=self._next_serial)

    def _give_back(self, ids: Ids, last_serial: int) -> None:
        """Releases blocks that steps up to `last_serial` may touch, once the last of these is finished."""
        if self._oldest_unfinished() <= last_serial:
            self.allocator.fence(ids)
            self.fences.append((last_serial, ids))
        else:
            self.allocator.release(ids)

    # Prefixes

    def _make_index(self) -> PrefixIndex | None:
        """None where a group forgets rows: a window's hit rule is not built yet, and a wrong hit is wrong output."""
        groups = self.plan.groups
        if not groups or any(group.retention.kind != "full" for group in groups):
            return None
        blocks_per_unit = tuple(self._unit // group.block_size for group in groups)
        return PrefixIndex(self._unit, blocks_per_unit, self.allocator.generation)

    def _attach_prefix(self, index: PrefixIndex, row: int, prompt: npt.NDArray[np.int32]) -> None:
        """Gives a new row the blocks of the longest prefix known, short of the whole prompt."""
        node, blocks = index.match(prompt, (len(prompt) - 1) // self._unit)
        self._cursors[row] = node
        self._indexed_units[row] = node.end_units
        length = node.end_units * self._unit
        self.sequences.length[row] = self.sequences.committed[row] = length
        self._tokens[row, :length] = prompt[:length]
        for table, ids in zip(self.tables, blocks, strict=True):
            self.allocator.retain(ids)
            table.table[row, : len(ids)] = ids
            table.num_blocks[row] = len(ids)

    def _update_index(self, index: PrefixIndex) -> None:
        """Makes every full committed block of the open sequences findable.

        Done when someone looks instead of when a block fills, so that a decode step does nothing per sequence.
        """
        if self.allocator.num_evicted - self._evicted_at_sweep > max(1024, self.plan.num_frames):
            index.sweep()
            self._evicted_at_sweep = self.allocator.num_evicted
        units = self.sequences.committed // self._unit
        for row in np.flatnonzero(self.sequences.is_open & (units > self._indexed_units)).tolist():
            self._update_index_of(index, row)

    def _update_index_of(self, index: PrefixIndex, row: int) -> None:
        units = int(self.sequences.committed[row]) // self._unit
        indexed = int(self._indexed_units[row])
        if units <= indexed:
            return
        tokens = self._tokens[row, : units * self._unit]
        blocks = [
            table.table[row, : units * per_unit]
            for table, per_unit in zip(self.tables, index.blocks_per_unit, strict=True)
        ]
        self._cursors[row], taken = index.insert(self._cursors[row], indexed, tokens, blocks, row)
        self._indexed_units[row] = units
        for ids in taken:
            self.allocator.index(ids)

    # Tables and checks

    def _table(self, group_index: int) -> GroupTable:
        group = self.plan.groups[group_index]
        if self.plan.blocks_per_frame[group_index] != 1:
            raise ValueError(
                f"plan: group {group.name!r}: expected blocks that are frames, got {self.plan.blocks_per_frame} blocks "
                "per frame: make the plan with plan_cache(..., layout='overlay'), 'bestfit' or 'buckets'"
            )
        unserved = [name for name, spec in group.layers.items() if spec.kind not in SERVED_KINDS]
        if unserved:
            raise ValueError(
                f"plan: layer {unserved[0]!r}: expected one of the kinds {', '.join(SERVED_KINDS)}, "
                f"got {group.layers[unserved[0]].kind!r}, which this store does not serve"
            )
        rows_per_block = {spec.rows_per_block for spec in group.layers.values()}
        if len(rows_per_block) != 1:
            raise ValueError(
                f"plan: group {group.name!r}: expected layers with equal rows per block, got {sorted(rows_per_block)}"
            )
        window = group.retention.window
        reach = self.max_length
        if window is not None:
            reach = min(reach, window - 1 + self.max_in_flight * self.max_tokens_per_step + group.block_size)
        width = -(-reach // group.block_size)
        return GroupTable(self.sequences.max_sequences, width, group.block_size, rows_per_block.pop(), window)

    def _prompt(self, index: int, tokens: Any) -> npt.NDArray[np.int32]:
        name = f"token_arrays[{index}]"
        prompt = token_array(name, tokens)
        if not 1 <= len(prompt) <= self.max_length:
            raise ValueError(f"{name}: expected 1 to {self.max_length} tokens (max_length), got {len(prompt)}")
        return prompt

    def _counts(self, name: str, counts: Any, num_sequences: int) -> Counts:
        if isinstance(counts, int | np.integer) and not isinstance(counts, bool):
            counts = [counts] * num_sequences
        array = int_array(name, counts)
        if len(array) != num_sequences:
            raise ValueError(f"{name}: expected one count per sequence, {num_sequences} in all, got {len(array)}")
        if array.size and array.min() < 0:
            raise ValueError(f"{name}: expected counts >= 0, got {array.min()}")
        return array

    def _check_extend(self, ids: npt.NDArray[np.int64], rows: Rows, starts: Counts, counts: Counts) -> None:
        if not rows.size:
            return
        # One count at a time before their sum, which could leave int64.
        if counts.max() > self.max_tokens_per_step or counts.sum() > self.max_tokens_per_step:
            raise ValueError(
                f"num_new_tokens: expected at most {self.max_tokens_per_step} in all (max_tokens_per_step), "
                f"got {sum(counts.tolist())}"
            )
        ends = starts + counts
        if ends.max() > self.max_length:
            worst = int(ends.argmax())
            raise ValueError(
                f"num_new_tokens: expected sequences of at most {self.max_length} tokens (max_length), "
                f"got {ends[worst]} for sequence {ids[worst]}"
            )
        in_flight = self.sequences.in_flight[rows]
        if in_flight.max() >= self.max_in_flight:
            raise SequenceError(
                f"seq_ids: expected fewer than {self.max_in_flight} uncommitted batches of a sequence "
                f"(max_in_flight), got {in_flight.max()} of sequence {ids[int(in_flight.argmax())]}"
            )

    def _check_padding(self, pad_to: int, counts: Counts) -> None:
        if (counts != 1).any():
            raise ValueError(f"pad_to: expected a batch with one new token per sequence, got {counts.tolist()}")
        expect_int("pad_to", pad_to, len(counts), self.sequences.max_sequences)

    def _check_commit(self, rows: Rows, order: Counts, withdrawn: npt.NDArray[np.bool_]) -> None:
        if not np.array_equal(self.sequences.num_commits[rows], order):
            raise ValueError("batch: expected the earliest uncommitted batch of its sequences, got a later one")
        if (withdrawn & (self.sequences.in_flight[rows] > 1)).any():
            raise ValueError("num_committed: expected all tokens of a sequence that has a later batch in flight")


def token_array(name: str, tokens: Any) -> npt.NDArray[np.int32]:
    """Token ids as a flat int32 array. Raises: ValueError when they are no integers in [0, 2**31)."""
    array = int_array(name, tokens)
    if array.size and (array.min() < 0 or array.max() > MAX_TOKEN_ID):
        wrong = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{name}: expected token ids in [0, {MAX_TOKEN_ID}], got {wrong}")
    return array.astype(np.int32)


def _positions(starts: Counts, counts: Counts) -> Counts:
    return np.repeat(starts, counts) + ragged_arange(counts)
