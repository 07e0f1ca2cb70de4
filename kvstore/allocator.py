"""BlockAllocator: which block is free, in use, cached or fenced. Arrays over blocks, no object per block.

A block here is a frame: its id is the same number in every group, and it belongs to one group at a time.

    free      on the stack of free ids
    in use    references > 0: held by block tables
    cached    no reference, but in the prefix index: can be hit, and is evicted when blocks run out
    fenced    held by nothing but fences: given back while a step that may touch it is unfinished
    null      block 0, never handed out
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import OutOfBlocks

Ids = npt.NDArray[np.int32]

NULL_BLOCK_ID = 0
NO_GROUP = -1


class BlockAllocator:
    """Hands out blocks to groups and takes them back, a whole batch per call.

    Args:
        num_blocks: number of ids, the null block counted.
        num_groups: groups that share the ids.

    The same calls give the same ids in every process. A failed call changes nothing.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.references = np.zeros(num_blocks, np.int32)
        self.fences = np.zeros(num_blocks, np.int32)  # how many of the references are fences
        self.group = np.full(num_blocks, NO_GROUP, np.int16)
        self.generation = np.zeros(num_blocks, np.int32)  # grows whenever the content of a block is given up
        self.indexed = np.zeros(num_blocks, np.bool_)  # in the prefix index
        self.peak_held = 0
        self.num_evicted = 0  # blocks evicted so far
        self._free = np.arange(
            num_blocks - 1, 0, -1, dtype=np.int32
        )  # a stack; its top, the last entry, is taken first
        self._num_free = num_blocks - 1
        self._num_cached = 0
        # Cached blocks in the order of eviction. An entry counts while its stamp is the block's own: a block that
        # was hit, and perhaps cached again, leaves a stale entry behind, which costs less than a removal.
        self._queue = np.zeros(2 * num_blocks + 16, np.int32)
        self._queue_stamps = np.zeros(len(self._queue), np.int64)
        self._queue_head = 0
        self._queue_tail = 0
        self._stamp = np.zeros(num_blocks, np.int64)  # 0: not cached
        self._next_stamp = 1

    @property
    def num_free(self) -> int:
        """Blocks on the free stack."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks without a reference that the prefix index still knows."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference, fences included."""
        return self.num_blocks - 1 - self._num_free - self._num_cached

    def num_fenced(self) -> npt.NDArray[np.int64]:
        """Blocks held by nothing but fences, per group."""
        fenced = (self.fences > 0) & (self.fences == self.references)
        return np.bincount(self.group[fenced], minlength=self.num_groups)

    def take(self, counts: Sequence[int]) -> list[Ids]:
        """Hands out `counts[g]` blocks to each group g with one reference each; evicts cached blocks when it must.

        Raises: OutOfBlocks when fewer are free or evictable than wanted in all.
        """
        wanted = sum(counts)
        if wanted > self._num_free + self._num_cached:
            raise OutOfBlocks(
                wanted=counts,
                free=(self._num_free,) * self.num_groups,
                evictable=self._evictable_per_group(),
                fenced=self.num_fenced().tolist(),
            )
        if wanted > self._num_free:
            self._evict(wanted - self._num_free)
        taken = self._free[self._num_free - wanted : self._num_free][::-1].copy()
        self._num_free -= wanted
        self.references[taken] = 1
        handed = []
        start = 0
        for group, count in enumerate(counts):
            ids = taken[start : start + count]
            self.group[ids] = group
            handed.append(ids)
            start += count
        self.peak_held = max(self.peak_held, self.num_held)
        return handed

    def retain(self, ids: Ids) -> None:
        """Adds a reference to each of the distinct blocks `ids`, which are in use or cached."""
        cached = self.references[ids] == 0
        self._num_cached -= int(np.count_nonzero(cached))
        self._stamp[ids[cached]] = 0
        self.references[ids] += 1
        self.peak_held = max(self.peak_held, self.num_held)

    def release(self, ids: Ids) -> None:
        """Drops a reference of each of the distinct blocks `ids`.

        Those without a further reference become cached when the prefix index knows them, else free. The order of
        `ids` is the order of eviction, so that callers name the tail of a sequence first.

        Raises: ValueError for a block that has no reference to drop, the null block among them.
        """
        before = self.references[ids]
        if before.size and before.min() <= 0:
            raise ValueError(f"ids: expected blocks in use, got block {ids[int(before.argmin())]} without a reference")
        self.references[ids] -= 1
        idle = ids[before == 1]
        if not idle.size:
            return
        known = self.indexed[idle]
        self._put_free(idle[~known])
        self._put_cached(idle[known])

    def fence(self, ids: Ids) -> None:
        """Turns one reference of each block into a fence: the block stays held until `unfence`."""
        self.fences[ids] += 1

    def unfence(self, ids: Ids) -> None:
        """Drops fences, and the references they stand for."""
        self.fences[ids] -= 1
        self.release(ids)

    def index(self, ids: Ids) -> None:
        """Marks blocks in use as known to the prefix index: they are cached instead of freed."""
        self.indexed[ids] = True

    def drop_cached(self) -> None:
        """Frees every cached block and takes the mark of the index from all others."""
        self.indexed[:] = False
        evicted = self.num_evicted
        self._evict(self._num_cached)
        self.num_evicted = evicted  # given up on purpose, not for lack of room

    def check(self) -> None:
        """Proves that every block is in exactly one state and that the counts are those of the arrays.

        Raises: AssertionError, which is a fault of this library.
        """
        stack = self._free[: self._num_free]
        free = np.zeros(self.num_blocks, np.bool_)
        free[stack] = True
        held = self.references > 0
        cached = self._stamp > 0
        assert len(np.unique(stack)) == len(stack), "a block is twice on the free stack"
        assert not (free | held | cached)[NULL_BLOCK_ID], "the null block is in use"
        states = free.astype(np.int8) + held + cached
        assert (states[1:] == 1).all(), f"blocks in no state or in two: {np.flatnonzero(states[1:] != 1)[:8] + 1}"
        assert int(cached.sum()) == self._num_cached, f"{cached.sum()} cached blocks, counted {self._num_cached}"
        assert (self.group[free] == NO_GROUP).all(), "a free block of a group"
        assert (self.group[held | cached] != NO_GROUP).all(), "a block of no group is not free"
        assert self.indexed[cached].all(), "a cached block that the index does not know"
        assert not self.indexed[free].any(), "a free block that the index knows"
        assert ((self.fences >= 0) & (self.fences <= self.references)).all(), "more fences than references"
        live = self._live_entries(self._queue_head, self._queue_tail)
        assert np.array_equal(np.sort(self._queue[live]), np.flatnonzero(cached)), "eviction queue and cached blocks"

    def _put_free(self, ids: Ids) -> None:
        count = len(ids)
        self._free[self._num_free : self._num_free + count] = ids
        self._num_free += count
        self.group[ids] = NO_GROUP
        self.indexed[ids] = False
        self.generation[ids] += 1

    def _put_cached(self, ids: Ids) -> None:
        count = len(ids)
        if self._queue_tail + count > len(self._queue):
            self._compact_queue()
        stamps = np.arange(self._next_stamp, self._next_stamp + count)
        self._next_stamp += count
        self._stamp[ids] = stamps
        self._queue[self._queue_tail : self._queue_tail + count] = ids
        self._queue_stamps[self._queue_tail : self._queue_tail + count] = stamps
        self._queue_tail += count
        self._num_cached += count

    def _evict(self, count: int) -> None:
        """Frees the `count` blocks that have been cached longest."""
        while count:
            window = min(self._queue_head + max(2 * count, 64), self._queue_tail)
            live = self._live_entries(self._queue_head, window)[:count]
            if len(live) == count:
                window = int(live[-1]) + 1
            ids = self._queue[live]
            self._stamp[ids] = 0
            self._num_cached -= len(ids)
            self.num_evicted += len(ids)
            self._queue_head = window
            self._put_free(ids[::-1])
            count -= len(ids)

    def _live_entries(self, start: int, end: int) -> npt.NDArray[np.int64]:
        return start + np.flatnonzero(self._stamp[self._queue[start:end]] == self._queue_stamps[start:end])

    def _compact_queue(self) -> None:
        live = self._live_entries(self._queue_head, self._queue_tail)
        self._queue[: len(live)] = self._queue[live]
        self._queue_stamps[: len(live)] = self._queue_stamps[live]
        self._queue_head, self._queue_tail = 0, len(live)

    def _evictable_per_group(self) -> list[int]:
        counts: list[int] = np.bincount(self.group[self._stamp > 0], minlength=self.num_groups).tolist()
        return counts
