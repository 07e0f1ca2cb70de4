"""Sequence rows and block tables: which sequence holds which block. Host arrays; every call takes a whole batch."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.allocator import NULL_BLOCK_ID, Ids
from kvstore.errors import SequenceError

Rows = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]

GENERATION_SHIFT = 32  # a sequence handle is generation << 32 | row


def int_array(name: str, values: Any) -> npt.NDArray[np.int64]:
    """`values` as a flat int64 array.

    Raises: ValueError when they are not one-dimensional, not integers (bool counts as none), or do not fit.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: expected a flat array of integers, got {type(values).__name__}: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"{name}: expected a flat array of integers, got shape {list(array.shape)} of dtype {array.dtype}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected integers below 2**63, got {array.max()}")
    return array.astype(np.int64)  # a copy: what the caller does to theirs later must not reach the books


def ragged_arange(counts: Counts) -> Counts:
    """0 ... counts[0]-1, 0 ... counts[1]-1, and so on, in one flat array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


class SequenceRows:
    """Rows of the tables and the handles of the sequences in them.

    A handle carries the generation of its row, so that the handle of a released sequence is told from the next one's.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.generation = np.ones(max_sequences, np.int64)
        self.is_open = np.zeros(max_sequences, np.bool_)
        self.length = np.zeros(max_sequences, np.int64)  # tokens with reserved rows
        self.committed = np.zeros(max_sequences, np.int64)  # tokens whose rows are confirmed written
        self.in_flight = np.zeros(max_sequences, np.int64)  # batches extended and not committed
        self.num_commits = np.zeros(max_sequences, np.int64)
        self._free = np.arange(max_sequences - 1, -1, -1)
        self._num_free = max_sequences
        self._position = np.zeros(max_sequences, np.int64)  # scratch of the search for repeated handles

    @property
    def num_free(self) -> int:
        """Sequences that can still be opened."""
        return self._num_free

    @property
    def free(self) -> Rows:
        """The rows of no sequence."""
        return self._free[: self._num_free]

    def open(self, count: int) -> Rows:
        """Takes `count` rows; the caller has checked that there are so many."""
        rows = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.is_open[rows] = True
        self.length[rows] = self.committed[rows] = self.in_flight[rows] = self.num_commits[rows] = 0
        return rows

    def close(self, rows: Rows) -> None:
        """Gives rows back; handles to them are void from here on."""
        self.is_open[rows] = False
        self.generation[rows] += 1
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)

    def handles(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The handles of open rows."""
        return self.generation[rows] << GENERATION_SHIFT | rows

    def alive(self, seq_ids: npt.NDArray[np.int64], rows: Rows) -> npt.NDArray[np.bool_]:
        """Which of the handles still name the sequence in their row."""
        same: npt.NDArray[np.bool_] = self.generation[rows] == seq_ids >> GENERATION_SHIFT
        return self.is_open[rows] & same

    def resolve(self, seq_ids: Any) -> tuple[npt.NDArray[np.int64], Rows]:
        """The handles as an array, and their rows.

        Raises: ValueError when they are no flat array of integers; SequenceError for a handle that was never given
            out, one of a released sequence, or one that occurs twice.
        """
        ids = int_array("seq_ids", seq_ids)
        rows = ids & ((1 << GENERATION_SHIFT) - 1)
        known = (ids >= 0) & (rows < self.max_sequences)
        if not known.all():
            raise SequenceError(f"seq_ids: expected handles from open(), got {ids[int(known.argmin())]}")
        alive = self.alive(ids, rows)
        if not alive.all():
            first = int(alive.argmin())
            past = 0 < ids[first] >> GENERATION_SHIFT < self.generation[rows[first]]
            what = "which was released" if past else "which was never given out"
            raise SequenceError(f"seq_ids: expected open sequences, got {ids[first]}, {what}")
        order = np.arange(len(rows))
        self._position[rows] = order
        if not np.array_equal(self._position[rows], order):
            first = int(np.argmax(self._position[rows] != order))
            raise SequenceError(f"seq_ids: expected each sequence once, got {ids[first]} twice")
        return ids, rows


class GroupTable:
    """The block table of one group: int32 [max_sequences, width], unused entries NULL_BLOCK_ID.

    Block number i of a sequence (tokens i * block_size and on) is in column i % width. A full group is wide enough for
    max_length; a window group only for its reach and the steps in flight, so that its columns are used again.
    """

    def __init__(
        self, max_sequences: int, width: int, block_size: int, rows_per_block: int, window: int | None
    ) -> None:
        self.width = width
        self.block_size = block_size
        self.rows_per_block = rows_per_block
        self.tokens_per_row = block_size // rows_per_block
        self.window = window
        self.table = np.full((max_sequences, width), NULL_BLOCK_ID, np.int32)
        self.num_blocks = np.zeros(max_sequences, np.int64)  # blocks handed out, those freed since included
        self.first_block = np.zeros(max_sequences, np.int64)  # blocks before it have left the window

    def missing(self, rows: Rows, lengths: Counts) -> Counts:
        """How many more blocks each row needs to hold `lengths` tokens."""
        needed: Counts = -(-lengths // self.block_size) - self.num_blocks[rows]
        return np.maximum(needed, 0, out=needed)

    def append(self, rows: Rows, counts: Counts, ids: Ids) -> None:
        """Puts `counts[i]` of `ids` behind the blocks of row i."""
        if not ids.size:
            return
        which = np.repeat(rows, counts)
        columns = self.num_blocks[which] + ragged_arange(counts)
        self.table[which, columns % self.width] = ids
        self.num_blocks[rows] += counts

    def held(self, row: int) -> Ids:
        """The blocks of one row, first to last."""
        ids: Ids = self.table[row, np.arange(self.first_block[row], self.num_blocks[row]) % self.width]
        return ids

    def clear(self, row: int) -> None:
        """Empties a row: no entry of it names a block any more."""
        self.table[row] = NULL_BLOCK_ID
        self.num_blocks[row] = self.first_block[row] = 0

    def leave_window(self, rows: Rows, committed: Counts) -> Ids:
        """Removes the blocks that the first uncommitted token cannot reach, and returns them."""
        if self.window is None:
            return np.empty(0, np.int32)
        first = np.maximum(committed - self.window + 1, 0) // self.block_size
        first = np.maximum(first, self.first_block[rows])
        counts = first - self.first_block[rows]
        if not counts.any():
            return np.empty(0, np.int32)
        which = np.repeat(rows, counts)
        columns = (self.first_block[which] + ragged_arange(counts)) % self.width
        ids: Ids = self.table[which, columns]
        self.table[which, columns] = NULL_BLOCK_ID
        self.first_block[rows] = first
        return ids

    def slots(self, rows: Rows, positions: Counts) -> npt.NDArray[np.int64]:
        """The slot of each position; -1 where the position does not close a row of several tokens."""
        block = self.table[rows, positions // self.block_size % self.width].astype(np.int64)
        slots: npt.NDArray[np.int64]
        if self.tokens_per_row == 1:
            slots = block * self.rows_per_block + positions % self.block_size
            return slots
        slots = block * self.rows_per_block + positions % self.block_size // self.tokens_per_row
        slots[(positions + 1) % self.tokens_per_row != 0] = -1
        return slots

    def batch_table(self, rows: Rows, max_length: int) -> npt.NDArray[np.int32]:
        """A copy of the rows' entries, int32 [num_rows, width]; a full group's only as wide as `max_length` needs."""
        width = self.width if self.window is not None else max(1, -(-max_length // self.block_size))
        return self.table[:, :width].take(rows, axis=0)
