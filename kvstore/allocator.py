"""BlockAllocator: which block is free, in use, cached or fenced. Arrays over cells, no object per block.

A frame is the memory that moves between groups: it belongs to one at a time. Group g puts `blocks_per_frame[g]` blocks
into it: block b lies in frame `b // blocks_per_frame[g]`, at place `b % blocks_per_frame[g]`. So that every block has
one entry in each array whatever its group, arrays go by cell, `frame * cells_per_frame + place`. Where all groups put
equally many blocks into a frame, a block's cell is its id.

    free      in a free frame, or a free place in a frame of its group
    in use    references > 0: held by block tables
    cached    no reference, but in the prefix index: can be hit, and is evicted when blocks run out
    fenced    held by nothing but fences: given back while a step that may touch it is unfinished
    null      frame 0, never handed out
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.cell_audit import audit_cells
from kvstore.errors import OutOfBlocks
from kvstore.eviction import DEFAULT_PRIORITY, MAX_PRIORITY, NO_GROUP, PINNED, CellStates, Clock, Counts, Ids

__all__ = ["NO_GROUP", "NULL_BLOCK_ID", "BlockAllocator", "Ids"]

NULL_BLOCK_ID = 0
_ONE = np.int32(1)  # of the arrays' own type: ufunc.at is 20 times slower where it must convert


class BlockAllocator(CellStates):
    """Hands out blocks to groups and takes them back, a whole batch per call.

    Args:
        num_frames: the null frame counted.
        blocks_per_frame: of each group.
        clock: seconds, by which priorities run out.
        debug: also `generation` of blocks that no index knew grows, and `freed` lists the cells that became free.

    The same calls give the same ids in every process. A failed call changes nothing. `distinct=True` is the caller's
    promise that no cell is named twice; it saves the search.
    """

    def __init__(
        self, num_frames: int, blocks_per_frame: Sequence[int], clock: Clock = time.monotonic, debug: bool = False
    ) -> None:
        super().__init__(num_frames, blocks_per_frame, clock)
        self.num_evicted = 0  # for lack of room
        self.peak_held = 0
        self.freed: list[Ids] = []
        self.given_up: list[Ids] | None = None  # a list: gets the cells that the index can no longer find
        self._debug = debug
        self._equal = all(count == self.cells_per_frame for count in self.blocks_per_frame)

    @property
    def num_free_frames(self) -> int:
        """Frames that no group has."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Cells without a reference that the prefix index still knows."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Cells with at least one reference, fences included."""
        return self._num_held

    def num_fenced(self) -> Counts:
        """Blocks held by nothing but fences, per group."""
        return self._per_group((self.fences > 0) & (self.fences == self.references))

    def partial_cells(self) -> Counts:
        """Free blocks in partly used frames, per group: no other group can have them."""
        return np.zeros(self.num_groups, np.int64) if self._single else self._room.sum(1)

    def counts_by_state(self) -> dict[str, Counts]:
        """Blocks per group: "in_use" by more than fences, "fenced", "cached", "free_in_partial" frames of its own.

        Another thread may ask meanwhile: all states are told from one copy of the references.
        """
        references = self.references.copy()
        fenced = (self.fences > 0) & (self.fences == references)
        return {
            "in_use": self._per_group((references > 0) & ~fenced),
            "fenced": self._per_group(fenced),
            "cached": self._per_group((references == 0) & self.indexed),
            "free_in_partial": self.partial_cells(),
        }

    def to_cells(self, ids: Ids, groups: int | npt.NDArray[np.integer]) -> Ids:
        """Cells of block ids; `groups` is one group, or one per id."""
        if self._equal:
            return ids
        per_frame = self._bpf[groups].astype(np.int32)
        cells: Ids = ids + ids // per_frame * (np.int32(self.cells_per_frame) - per_frame)
        return cells

    def to_ids(self, cells: Ids, groups: int | npt.NDArray[np.integer]) -> Ids:
        """Block ids of cells; `groups` is one group, or one per cell."""
        if self._equal:
            return cells
        unused = np.int32(self.cells_per_frame) - self._bpf[groups].astype(np.int32)
        ids: Ids = cells - cells // np.int32(self.cells_per_frame) * unused
        return ids

    def take(self, counts: Sequence[int]) -> list[Ids]:
        """Hands out `counts[g]` blocks to each group g with one reference each, all groups or none.

        Free places in the group's frames come first, then free frames, then eviction in the order of last use: of the
        group's cached blocks, and of idle frames. That order gives way where only another can serve all groups.

        Raises: OutOfBlocks when no choice of frames and evictions can.
        """
        if self._deadlines:
            self._expire()
        wanted = sum(counts)
        handed = self._take_frames(counts, wanted) if self._single else self._take_places(counts)
        self._num_held += wanted
        self.peak_held = max(self.peak_held, self._num_held)
        return handed

    def retain(self, cells: Ids, distinct: bool = False) -> None:
        """Adds a reference for each entry of `cells`, which are in use or cached."""
        at = cells.astype(np.intp)
        before = self.references[at]
        num_cached = len(at) - int(np.count_nonzero(before))
        if distinct:
            self.references[at] = before + _ONE
        else:
            np.add.at(self.references, at, _ONE)
        if num_cached and not (distinct and self._single and not self._ranked):
            revived = at[before == 0] if distinct else self._last_mentions(at[before == 0])
            num_cached = len(revived)
            self._num_pinned -= self._count_pinned(revived)
            self._recount_frames_of(revived)
        self._num_cached -= num_cached
        self._num_held += num_cached
        self.peak_held = max(self.peak_held, self._num_held)

    def release(self, cells: Ids, distinct: bool = False) -> None:
        """Drops a reference for each entry of `cells`.

        Those without a further reference become cached when the prefix index knows them, else free. The order of
        `cells` is the order of eviction, so that callers name the tail of a sequence first.

        Raises: ValueError for a block that has fewer references than entries, the null block among them.
        """
        at = cells.astype(np.intp)
        if distinct:
            after = self.references[at] - _ONE
        else:
            np.subtract.at(self.references, at, _ONE)
            after = self.references[at]
        if after.size and after.min() < 0:
            if not distinct:
                np.add.at(self.references, at, _ONE)
            raise ValueError(
                f"ids: expected blocks in use, got block {self._name(cells[after.argmin()])} without a reference"
            )
        if distinct:
            self.references[at] = after
        if np.count_nonzero(after):
            at = at[after == 0]
        if not distinct:
            at = self._last_mentions(at)
        if not at.size:
            return
        self._num_held -= len(at)
        known = self.indexed[at]
        num_known = np.count_nonzero(known)
        if num_known:
            self._put_cached(at if num_known == len(at) else at[known])
        if num_known < len(at):
            self._put_free(at[~known] if num_known else at)
        self._recount_frames_of(at)

    def fence(self, cells: Ids) -> None:
        """Turns one reference of each entry into a fence: the block stays held until `unfence`."""
        np.add.at(self.fences, cells.astype(np.intp), _ONE)

    def unfence(self, cells: Ids) -> None:
        """Drops fences, and the references they stand for. Raises: ValueError for a block with fewer fences."""
        at = cells.astype(np.intp)
        np.subtract.at(self.fences, at, _ONE)
        left = self.fences[at]
        if left.size and left.min() < 0:
            np.add.at(self.fences, at, _ONE)
            raise ValueError(
                f"ids: expected fenced blocks, got block {self._name(cells[left.argmin()])} without a fence"
            )
        self.release(cells)

    def index(self, cells: Ids) -> None:
        """Marks cells in use as known to the prefix index: they are cached instead of freed."""
        self.indexed[cells] = True

    def forget(self, cells: Ids, distinct: bool = True) -> None:
        """Takes cells from the prefix index: the cached become free. Those it does not know are ignored.

        Without `distinct` cells may be named twice.
        """
        at = cells[self.indexed[cells]].astype(np.intp)
        if not at.size:
            return
        if not distinct:
            at = self._last_mentions(at)
        idle = at[self.references[at] == 0]
        self._num_cached -= len(idle)
        self._num_pinned -= self._count_pinned(idle)
        self._give_up(at)
        self._put_free(idle, known=True)
        self._recount_frames_of(idle)

    def drop_cached(self) -> None:
        """Forgets every cell, in use or cached."""
        self.forget(np.flatnonzero(self.indexed).astype(np.int32))

    def set_priority(self, cells: Ids, priority: int, ttl: float | None = None) -> None:
        """Sets who is evicted first, 0 ... 100, or `PINNED`: never; cells that are not indexed are ignored.

        After `ttl` seconds the default holds again, as if it had all the time. So it does once the content is given up.
        """
        if not 0 <= priority <= PINNED:
            raise ValueError(f"priority: expected 0 to {MAX_PRIORITY} or PINNED ({PINNED}), got {priority}")
        self._rank(np.unique(cells[self.indexed[cells]]), priority, ttl)

    def _take_frames(self, counts: Sequence[int], wanted: int) -> list[Ids]:
        """What `take` does where a frame holds one cell."""
        from_free = min(wanted, self._num_free)
        if wanted - from_free > self._num_cached - self._num_pinned:
            raise self._out_of_blocks(counts)
        parts = []
        if from_free:
            self._num_free -= from_free
            parts.append(self._free[self._num_free : self._num_free + from_free][::-1])
        if from_free < wanted:
            parts.append(self._orders[0].oldest(wanted - from_free, remove=True))
        taken = np.concatenate(parts) if len(parts) > 1 else parts[0].copy() if parts else np.zeros(0, np.int32)
        at = taken.astype(np.intp)
        if from_free < wanted:
            self._evict(at[from_free:])
        self.references[at] = 1
        handed = []
        start = 0
        for group, count in enumerate(counts):
            self.group[at[start : start + count]] = group
            handed.append(taken[start : start + count])
            start += count
        return handed

    def _take_places(self, counts: Sequence[int]) -> list[Ids]:
        """What `take` does where a frame holds several cells.

        What a group finds in frames that stay, free places and evictable blocks, is its own; the rest of its wants
        takes whole frames, free and idle. If these suffice there are `spare` ones, by which the order of sources can
        be kept where a group could do without a frame.
        """
        missing = np.maximum(np.array(counts, np.int64) - self._room[:, 0] - self._evictable[:, 0], 0)
        needed = -(-missing // self._bpf)
        spare = self._num_free + int(self._num_frames[:, 1].sum() - needed.sum())
        if spare < 0:
            raise self._out_of_blocks(counts)
        handed = []
        claims: list[Ids] = []  # frames whose counts are behind
        for group, count in enumerate(counts):
            cells, num_frames = self._take_for(group, count, int(needed[group]) + spare, claims)
            spare -= max(0, num_frames - int(needed[group]))
            handed.append(self.to_ids(cells, group))
        self._recount(*claims)
        return handed

    def _take_for(self, group: int, count: int, budget: int, claims: list[Ids]) -> tuple[Ids, int]:
        """Cells for one group, from at most `budget` free or idle frames. Returns: the cells, and how many frames."""
        taken = [np.zeros(0, np.int32)]
        spent = 0
        for idle in (0, 1):
            if count and self._room[group, idle] and (not idle or budget):
                frames = np.flatnonzero(self._room_code == 1 + 2 * group + idle).astype(np.int32)
                frames = frames[np.argsort(-self._used[frames], kind="stable")]  # the fullest first
                taken.append(self._claim(frames[: budget if idle else count], group, count, claims))
                count -= len(taken[-1])
                spent += idle * len(claims[-1])
        opened = min(-(-count // self.blocks_per_frame[group]), self._num_free, budget - spent)
        lacking = count - opened * self.blocks_per_frame[group]
        frames = self._free[self._num_free - opened : self._num_free][::-1].copy()
        self._num_free -= opened
        if lacking > 0:
            self._recount(*claims)
            own, foreign, num_idle = self._choose_victims(group, lacking, budget - spent - opened)
            cells = self._cells_of(foreign, self.cells_per_frame)
            self._evict(np.concatenate((own, cells[self.indexed[cells]])))
            self.references[own] = 1
            taken.append(own)
            claims[:] = [self._frames_of(own)]
            count -= len(own)
            self._tally(foreign, -1)
            self._used[foreign] = self._room_code[foreign] = 0
            frames = np.concatenate((frames, foreign))
            spent += num_idle - len(foreign)
        if len(frames):
            self.group[frames] = group
            taken.append(self._claim(frames, group, count, claims))
        return np.concatenate(taken), spent + len(frames)

    def _claim(self, frames: Ids, group: int, count: int, claims: list[Ids]) -> Ids:
        """Takes up to `count` free places of a group's frames, in the order of `frames`."""
        cells = self._cells_of(frames, self.blocks_per_frame[group])
        taken: Ids = cells[(self.references[cells] == 0) & ~self.indexed[cells]][:count]
        self.references[taken] = 1
        owners = taken // np.int32(self.cells_per_frame)
        claims.append(owners[np.append(True, owners[1:] != owners[:-1])])
        return taken

    def _evict(self, cells: npt.NDArray[np.integer]) -> None:
        """Gives up cached cells for lack of room; the caller hands them on."""
        self._num_cached -= len(cells)
        self.num_evicted += len(cells)
        self._give_up(cells.astype(np.intp, copy=False))
        if self._debug:
            self.freed.append(cells.astype(np.int32))

    def _give_up(self, at: npt.NDArray[np.integer]) -> None:
        if self.given_up is not None:
            self.given_up.append(at.astype(np.int32))
        self.indexed[at] = False
        self.generation[at] += _ONE
        self._stamp[at] = 0
        if self._ranked:
            self.priority[at] = DEFAULT_PRIORITY

    def _put_free(self, cells: npt.NDArray[np.integer], known: bool = False) -> None:
        """Frees cells that nothing refers to; the generation of those that an index knew has grown already."""
        if self._debug:
            self.freed.append(cells.astype(np.int32))
            if not known:
                self.generation[cells] += _ONE
        if self._single:
            self._free[self._num_free : self._num_free + len(cells)] = cells
            self._num_free += len(cells)
            self.group[cells] = NO_GROUP

    def _put_cached(self, cells: npt.NDArray[np.integer]) -> None:
        stamps = self._stamps(len(cells))
        self._stamp[cells] = stamps
        self._num_cached += len(cells)
        self._num_pinned += self._count_pinned(cells)
        self._queue_cells(cells.astype(np.int32), stamps)

    def _name(self, cell: np.int32) -> int:
        group = int(self.group[cell // self.cells_per_frame])
        return int(cell) if group == NO_GROUP else int(self.to_ids(np.array([cell], np.int32), group)[0])

    def _out_of_blocks(self, counts: Sequence[int]) -> OutOfBlocks:
        if self._single:
            free = np.full(self.num_groups, self._num_free)
            evictable = np.full(self.num_groups, self._num_cached - self._num_pinned)
        else:
            free = self._room.sum(1) + self._num_free * self._bpf
            evictable = self._evictable[:, 0] + self._num_frames[:, 1].sum() * self._bpf - self._room[:, 1]
        fenced = self.num_fenced().tolist()
        return OutOfBlocks(wanted=counts, free=free.tolist(), evictable=evictable.tolist(), fenced=fenced)

    def check(self) -> None:
        """Proves that every cell is in exactly one state, and that counts, queues and free lists say the same.

        Raises: AssertionError, which is a fault of this library.
        """
        audit_cells(self)
