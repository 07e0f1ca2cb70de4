"""Sequences: handles, and what the books know of each sequence, one column per row of the tables.

All numbers of a sequence stand in one matrix, so that those of a batch are gathered, and put back, in one call each.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import SequenceError

Rows = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

GENERATION_SHIFT = 32  # a sequence handle is generation << 32 | row
ROW_MASK = (1 << GENERATION_SHIFT) - 1
MAX_GENERATION = 2**31 - 1  # the next is 1 again: a handle is never negative
CLOSED = -1

FIELDS = (
    "length",  # tokens with reserved rows
    "committed",  # tokens whose rows are confirmed written
    "num_extends",  # batches extended so far
    "num_commits",  # batches committed so far; the difference is in flight
    "prompt",  # tokens of the prompt
    "indexed",  # tokens that the prefix index knows, whole units
    "unknown",  # the first committed token whose id is not known, NEVER for none
    "replay_end",  # tokens whose rows existed at a hit, although `length` is below it (ring replay)
    "shared",  # 1 when the block that holds the next token may have another holder
    "edition",  # changes whenever the table row is rewritten instead of appended to
)


class SequenceState:
    """Columns of the matrix: of all rows of the tables, or of the sequences of a batch.

    Beside `FIELDS`: `room[g]`, tokens that the blocks of group g reach to; `tail[v]`, what makes a position a slot in
    the last block of variant v; `first[w]` and `due[w]` of groups that let blocks go: the first block still held, and
    the committed length at which the next one goes.
    """

    length: Counts
    committed: Counts
    num_extends: Counts
    num_commits: Counts
    prompt: Counts
    indexed: Counts
    unknown: Counts
    replay_end: Counts
    shared: Counts
    edition: Counts

    def __init__(self, matrix: npt.NDArray[np.int64], sizes: tuple[int, int, int]) -> None:
        self.matrix = matrix
        self._sizes = sizes
        for number, name in enumerate(FIELDS):
            setattr(self, name, matrix[number])
        groups, variants, windows = sizes
        start = len(FIELDS)
        self.room = matrix[start : start + groups]
        self.tail = matrix[start + groups : start + groups + variants]
        start += groups + variants
        self.first = matrix[start : start + windows]
        self.due = matrix[start + windows : start + 2 * windows]
        # The same laid flat, for indices that are group * number of sequences + sequence.
        self.flat_room, self.flat_tail = self.room.reshape(-1), self.tail.reshape(-1)
        self.flat_first, self.flat_due = self.first.reshape(-1), self.due.reshape(-1)

    @classmethod
    def empty(cls, num_sequences: int, sizes: tuple[int, int, int]) -> "SequenceState":
        """All numbers 0."""
        groups, variants, windows = sizes
        shape = (len(FIELDS) + groups + variants + 2 * windows, num_sequences)
        return cls(np.zeros(shape, np.int64), sizes)

    def take(self, rows: Rows) -> "SequenceState":
        """A copy of the columns of `rows`."""
        return SequenceState(self.matrix.take(rows, axis=1), self._sizes)

    def put(self, rows: Rows, state: "SequenceState") -> None:
        """Puts the columns of `state` back to `rows`."""
        self.matrix[:, rows] = state.matrix


class Handles:
    """Which rows are open, and the handles to them.

    A handle carries the generation of its row, so that the handle of a released sequence is told from the next one's.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.generation = np.ones(max_sequences, np.int64)
        # The handle of each row. One entry more stands for all rows there are not, and equals no handle.
        self.current = np.full(max_sequences + 1, CLOSED, np.int64)
        self.current[max_sequences] = 0
        self.suspended = np.zeros(max_sequences, np.bool_)
        self._free = np.arange(max_sequences - 1, -1, -1)
        self._num_free = max_sequences
        self._seen = np.zeros(max_sequences, np.bool_)  # scratch of the search for repeated handles

    @property
    def num_open(self) -> int:
        """Open sequences, suspended ones included."""
        return self.max_sequences - self._num_free

    @property
    def free(self) -> Rows:
        """The rows of no sequence."""
        return self._free[: self._num_free]

    def expect_room(self, name: str, count: int) -> None:
        """Raises SequenceError when fewer than `count` sequences can be opened."""
        if count > self._num_free:
            raise SequenceError(
                f"{name}: expected at most {self._num_free} more sequences ({self.num_open} of max_sequences "
                f"{self.max_sequences} are open; release gives places back), got {count}"
            )

    def open(self, count: int) -> Rows:
        """Takes `count` rows; the caller has checked that there are so many."""
        rows = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.current[rows] = self.generation[rows] << GENERATION_SHIFT | rows
        return rows

    def close(self, rows: Rows) -> None:
        """Gives rows back; handles to them are void from here on."""
        self.current[rows] = CLOSED
        self.suspended[rows] = False
        self.generation[rows] = self.generation[rows] % MAX_GENERATION + 1
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)

    def alive(self, seq_ids: npt.NDArray[np.int64], rows: Rows) -> Flags:
        """Which of the handles still name the sequence in their row."""
        same: Flags = self.current.take(rows) == seq_ids
        return same

    def resolve(self, seq_ids: Any, name: str = "seq_ids", *, repeats: bool = False) -> tuple[Rows, Rows]:
        """The handles as an array, and their rows.

        Raises: ValueError when they are no flat array of integers; SequenceError for a handle that was never given
            out, one of a released sequence, or, without `repeats`, one that occurs twice.
        """
        ids = int_array(name, seq_ids)
        rows = ids & ROW_MASK
        named = self.current.take(rows, mode="clip") == ids
        if not named.all():
            raise SequenceError(self._complaint(name, int(ids[int(named.argmin())])))
        if not repeats:
            self._seen[rows] = True
            distinct = np.count_nonzero(self._seen) == len(rows)
            self._seen[rows] = False
            if not distinct:
                values, counts = np.unique(ids, return_counts=True)
                raise SequenceError(f"{name}: expected each sequence once, got {values[counts > 1][0]} twice")
        return ids, rows

    def expect_resident(self, ids: Rows, rows: Rows, name: str = "seq_ids") -> None:
        """Raises SequenceError for a suspended sequence."""
        away = self.suspended[rows]
        if away.any():
            raise SequenceError(
                f"{name}: expected sequences that are resident, got {ids[int(away.argmax())]}, which is suspended"
            )

    def _complaint(self, name: str, seq_id: int) -> str:
        row = seq_id & ROW_MASK
        if seq_id < 0 or row >= self.max_sequences:
            return f"{name}: expected handles of open sequences, got {seq_id}, which is no handle from open()"
        past = 0 < seq_id >> GENERATION_SHIFT < self.generation[row]
        what = "a handle of a sequence that was released" if past else "which is no handle from open()"
        return f"{name}: expected handles of open sequences, got {seq_id}, {what}"


def int_array(name: str, values: Any) -> npt.NDArray[np.int64]:
    """`values` as a flat int64 array of its own.

    Raises: ValueError when they are not one-dimensional, not integers (bool counts as none), or do not fit.
    """
    array = flat_integers(name, values)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected integers below 2**63, got {array.max()}")
    return array.astype(np.int64)  # a copy: what the caller does to theirs later must not reach the books


def flat_integers(name: str, values: Any) -> npt.NDArray[Any]:
    """`values` as a flat array of some integer dtype; not copied where it is one.

    Raises: ValueError when they are not one-dimensional or not integers (bool counts as none).
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: expected a flat array of integers, got {type(values).__name__}: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"{name}: expected a flat array of integers, got shape {list(array.shape)} of dtype {array.dtype}"
        )
    return array


MAX_TOKEN_ID = 2**31 - 1

UNKNOWN_TOKEN = -1
"""For a committed token whose id the caller does not know yet."""


def token_array(name: str, tokens: Any, *, skip_range: bool = False) -> npt.NDArray[np.int32]:
    """Token ids as a flat int32 array; the caller's own where it is one already.

    With `skip_range` such a one is not looked through: the caller does it with `expect_tokens`.

    Raises: ValueError when they are no integers in [0, 2**31).
    """
    is_plain = tokens.__class__ is np.ndarray and tokens.dtype == np.int64 and tokens.ndim == 1 and tokens.size
    if is_plain and tokens.view(np.uint64).max() <= MAX_TOKEN_ID:  # a negative number would be a very large one
        plain: npt.NDArray[np.int32] = tokens.astype(np.int32)
        return plain
    array = flat_integers(name, tokens)
    if not (skip_range and array.dtype == np.int32):
        expect_tokens(name, array)
    return array.astype(np.int32, copy=False)


def committed_tokens(name: str, tokens: Any) -> tuple[npt.NDArray[np.int32], bool]:
    """Token ids as `token_array`, and whether some of them are UNKNOWN_TOKEN.

    Raises: ValueError when they are no integers in [-1, 2**31).
    """
    array = flat_integers(name, tokens)
    if not array.size or array.min() >= 0:
        return token_array(name, tokens), False
    expect_tokens(name, np.where(array == UNKNOWN_TOKEN, 0, array))
    return array.astype(np.int32), True


def expect_tokens(name: str, array: npt.NDArray[Any]) -> None:
    """Raises ValueError for a number outside [0, 2**31)."""
    if array.size:
        least = array.min()
        if least < 0 or (array.dtype != np.int32 and array.max() > MAX_TOKEN_ID):
            wrong = least if least < 0 else array.max()
            raise ValueError(f"{name}: expected token ids in [0, {MAX_TOKEN_ID}], got {wrong}")


def ragged_arange(counts: Counts) -> Counts:
    """0 ... counts[0]-1, 0 ... counts[1]-1, and so on, in one flat array."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
