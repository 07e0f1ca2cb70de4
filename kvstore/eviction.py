"""What can be evicted, and in which order: queues that are cleaned when someone looks, not when an entry dies."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Clock = Callable[[], float]  # seconds
IsAlive = Callable[[Ids, Ids, int], Mask]  # of entries (items, stamps) under a priority

NO_GROUP = -1
DEFAULT_PRIORITY = 50
MAX_PRIORITY = 100
PINNED = MAX_PRIORITY + 1  # never evicted
MAX_STAMP = 2**31 - 1


class LruQueue:
    """Items in ascending order of their stamps, some of them dead.

    An entry is alive while `is_alive` says so, by arrays that the owner keeps: a hit costs the queue nothing. Dead
    entries are dropped the first time somebody looks at them, so every entry is looked at O(1) times.

    Args:
        capacity: entries that fit at first; the queue grows when more than half of them are alive.
        priority: what `is_alive` is asked for.
    """

    def __init__(self, capacity: int, is_alive: IsAlive, priority: int = DEFAULT_PRIORITY) -> None:
        self._items = np.zeros(capacity, np.int32)
        self._stamps = np.zeros(capacity, np.int32)
        self._head = 0
        self._tail = 0
        self._is_alive = is_alive
        self._priority = priority

    def add(self, items: Ids, stamps: Ids) -> None:
        """Adds items in ascending order of `stamps`, at the end or in between."""
        if self._head < self._tail and stamps[0] <= self._stamps[self._tail - 1]:
            self._insert(items, stamps)
            return
        if self._tail + len(items) > len(self._items):
            self._make_room(len(items))
        end = self._tail + len(items)
        self._items[self._tail : end] = items
        self._stamps[self._tail : end] = stamps
        self._tail = end

    def oldest(self, count: int) -> Ids:
        """The oldest live items, `count` of them or all there are. A view, good until the next call."""
        start, end = self._head, min(self._head + count, self._tail)
        alive = self._is_alive(self._items[start:end], self._stamps[start:end], self._priority)
        found = int(np.count_nonzero(alive))
        if found == end - start:
            return self._items[start:end]
        looked_at = [start + np.flatnonzero(alive)]
        while found < count and end < self._tail:
            start, end = end, min(end + max(64, 2 * (end - self._head)), self._tail)
            looked_at.append(self._alive(start, end))
            found += len(looked_at[-1])
        at = np.concatenate(looked_at)
        self._head = end - found  # the dead ones are squeezed out of what was looked at
        self._items[self._head : end] = self._items[at]
        self._stamps[self._head : end] = self._stamps[at]
        return self._items[self._head : self._head + min(count, found)]

    def pop(self, count: int) -> Ids:
        """As `oldest`, and removes them."""
        items = self.oldest(count)
        self._head += len(items)
        return items

    def restamp(self, stamps: Ids) -> None:
        """Reads all stamps anew, by item, after the owner renumbered them in the same order; each entry is alive."""
        self._stamps[self._head : self._tail] = stamps[self._items[self._head : self._tail]]

    def items(self) -> Ids:
        """All live items, oldest first."""
        return self._items[self._alive(self._head, self._tail)]

    def _insert(self, items: Ids, stamps: Ids) -> None:
        """Adds items between the others. One whose entry is still there has come alive again by it."""
        if len(items) > self._head:
            self._make_room(0, front=len(items))
        present = self._stamps[self._head : self._tail]
        at = np.searchsorted(present, stamps)
        missing = np.ones(len(items), np.bool_)
        inside = at < len(present)
        missing[inside] = present[at[inside]] != stamps[inside]
        items, stamps, at = items[missing], stamps[missing], at[missing]
        if not len(items):
            return
        start, end = self._head - len(items), self._head + int(at[-1])  # what is newer than all of them stays
        self._items[start:end] = np.insert(self._items[self._head : end], at, items)
        self._stamps[start:end] = np.insert(self._stamps[self._head : end], at, stamps)
        self._head = start

    def _alive(self, start: int, end: int) -> npt.NDArray[np.intp]:
        alive = self._is_alive(self._items[start:end], self._stamps[start:end], self._priority)
        return start + np.flatnonzero(alive)

    def _make_room(self, count: int, front: int = 0) -> None:
        """Drops dead entries, and grows where they were few, so that the next time is as many additions away."""
        at = self._alive(self._head, self._tail)
        items, stamps = self._items[at], self._stamps[at]
        needed = front + len(at) + count
        if 2 * needed > len(self._items):
            self._items = np.zeros(2 * needed, np.int32)
            self._stamps = np.zeros(2 * needed, np.int32)
        self._head, self._tail = front, front + len(at)
        self._items[self._head : self._tail] = items
        self._stamps[self._head : self._tail] = stamps


class EvictionOrder:
    """A queue per priority: the lowest priority goes first, the least recently used first inside.

    Args:
        capacity: of the queue of the default priority; the others start small.
    """

    def __init__(self, capacity: int, is_alive: IsAlive) -> None:
        self._is_alive = is_alive
        self._queues = {DEFAULT_PRIORITY: LruQueue(capacity, is_alive)}
        self._evictable = list(self._queues.values())  # in the order of eviction, without the pinned

    def add(self, items: Ids, stamps: Ids, priority: int) -> None:
        """Files items, in ascending order of `stamps`, under a priority."""
        if priority not in self._queues:
            self._queues[priority] = LruQueue(64, self._is_alive, priority)
            self._evictable = [queue for level, queue in sorted(self._queues.items()) if level != PINNED]
        self._queues[priority].add(items, stamps)

    def oldest(self, count: int, remove: bool = False) -> Ids:
        """The first `count` items in the order of eviction, or all there are; none that is pinned."""
        found: list[Ids] = []
        for queue in self._evictable:
            found.append(queue.pop(count) if remove else queue.oldest(count))
            count -= len(found[-1])
            if not count:
                break
        return found[0] if len(found) == 1 else np.concatenate(found)

    def items(self) -> Ids:
        """All live items, the pinned too."""
        return np.concatenate([queue.items() for queue in self._queues.values()])

    def clean(self) -> None:
        """Drops every dead entry."""
        for queue in self._queues.values():
            queue.oldest(MAX_STAMP)

    def restamp(self, stamps: Ids) -> None:
        """Reads all stamps anew, by item; each entry is alive."""
        for queue in self._queues.values():
            queue.restamp(stamps)


class CellStates:
    """The arrays by cell and by frame, and who would be evicted next: the half of the allocator that counts.

    Where a frame holds one cell, the cells are all there is. Else frames are counted too: a frame is idle while nothing
    in it is referenced or pinned, and only an idle one can be evicted whole.
    """

    def __init__(self, num_frames: int, blocks_per_frame: Sequence[int], clock: Clock) -> None:
        self.num_frames = num_frames
        self.blocks_per_frame = tuple(blocks_per_frame)
        self.num_groups = len(self.blocks_per_frame)
        self.cells_per_frame = max(self.blocks_per_frame, default=1)
        num_cells = num_frames * self.cells_per_frame
        self.references = np.zeros(num_cells, np.int32)
        self.fences = np.zeros(num_cells, np.int32)  # how many of the references are fences
        self.generation = np.zeros(num_cells, np.int32)  # grows whenever the content of an indexed cell is given up
        self.indexed = np.zeros(num_cells, np.bool_)  # in the prefix index
        self.priority = np.full(num_cells, DEFAULT_PRIORITY, np.int8)
        self.group = np.full(num_frames, NO_GROUP, np.int16)
        self._bpf = np.array(self.blocks_per_frame, np.int64)
        self._single = self.cells_per_frame == 1  # a cell is a frame: no counts per frame
        self._ranked = False  # some priority was set
        self._free = np.arange(num_frames - 1, 0, -1, dtype=np.int32)  # frames; the last entry is taken first
        self._num_free = len(self._free)
        self._num_held = 0  # cells with references
        self._num_cached = 0
        self._num_pinned = 0  # of the cached
        self._clock = clock
        self._deadlines: list[tuple[float, int, Ids, Ids]] = []  # a heap: (when, its number, cells, generations)
        self._deadline_of = np.zeros(num_cells, np.int32)  # the number that counts of a cell
        self._next_deadline = 1
        self._stamp = np.zeros(num_cells, np.int32)  # when it was last cached; 0: no queue has it
        self._next_stamp = 1
        orders, capacity = (1, 2 * num_cells) if self._single else (self.num_groups, 64)
        self._orders = [EvictionOrder(capacity, self._is_alive) for _ in range(orders)]
        self._idle_orders = [EvictionOrder(64, self._is_idle)]  # of frames, whatever their groups
        num_counted = 0 if self._single else num_frames
        self._used = np.zeros(num_counted, np.int16)  # cells that are not free
        self._kept = np.zeros(num_counted, np.int16)  # cells that cannot be evicted: referenced or pinned
        self._room_code = np.zeros(num_counted, np.int16)  # 1 + 2 * group + idle of frames with free places, else 0
        self._frame_stamp = np.zeros(num_counted, np.int32)  # when it became idle
        self._frame_priority = np.full(num_counted, DEFAULT_PRIORITY, np.int8)  # the highest inside, while idle
        # Per group, of its frames that are not idle and of those that are: frames, free places, evictable cells.
        self._totals = np.zeros((3, self.num_groups, 2), np.int64)
        self._num_frames, self._room, self._evictable = self._totals

    # Order

    def _stamps(self, count: int) -> Ids:
        """New stamps, ascending; renumbers all of them before they run out."""
        if self._next_stamp + count > MAX_STAMP:
            self._renumber()
        self._next_stamp += count
        return np.arange(self._next_stamp - count, self._next_stamp, dtype=np.int32)

    def _renumber(self) -> None:
        orders = [(order, self._stamp) for order in self._orders]
        orders += [(order, self._frame_stamp) for order in self._idle_orders]
        for order, _ in orders:
            order.clean()
        items = [order.items() for order, _ in orders]
        stamps = np.concatenate([of[some] for some, (_, of) in zip(items, orders, strict=True)])
        ranks = np.argsort(np.argsort(stamps)).astype(np.int32) + 1
        for _, of in orders:
            of[:] = 0
        start = 0
        for some, (order, of) in zip(items, orders, strict=True):
            of[some] = ranks[start : start + len(some)]
            order.restamp(of)
            start += len(some)
        self._next_stamp = len(ranks) + 1

    def _last_mentions(self, at: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Each cell once, where it is named last. None may be in a queue: stamps serve to tell the entries apart."""
        stamps = self._stamps(len(at))
        self._stamp[at] = stamps
        last = self._stamp[at] == stamps
        return at if np.count_nonzero(last) == len(at) else at[last]

    def _is_alive(self, cells: Ids, stamps: Ids, priority: int) -> Mask:
        at = cells.astype(np.intp)
        alive: Mask = self._stamp[at] == stamps
        alive &= self.references[at] == 0
        if self._ranked:
            alive &= self.priority[at] == priority
        return alive

    def _is_idle(self, frames: Ids, stamps: Ids, priority: int) -> Mask:
        alive: Mask = (self._frame_stamp[frames] == stamps) & (self._kept[frames] == 0) & (self._used[frames] > 0)
        alive &= self._frame_priority[frames] == priority
        return alive

    def _queue_cells(self, cells: Ids, stamps: Ids) -> None:
        """Queues cached cells in ascending order of `stamps`."""
        if self._single and not self._ranked:
            self._orders[0].add(cells, stamps, DEFAULT_PRIORITY)
        else:
            group = 0 if self._single else self.group[cells // self.cells_per_frame].astype(np.int64)
            self._queue(self._orders, cells, stamps, group * 128 + self.priority[cells])

    def _rank(self, cells: Ids, priority: int, ttl: float | None = None) -> None:
        """Gives distinct indexed cells a priority, those that are cached at the age they have."""
        self._ranked = True
        self._deadline_of[cells] = 0 if ttl is None else self._next_deadline
        if ttl is not None:
            heappush(self._deadlines, (self._clock() + ttl, self._next_deadline, cells, self.generation[cells]))
            self._next_deadline += 1
        cached = cells[self.references[cells] == 0]
        self._num_pinned += (len(cached) if priority == PINNED else 0) - self._count_pinned(cached)
        self.priority[cells] = priority
        cached = cached[np.argsort(self._stamp[cached])]
        self._queue_cells(cached, self._stamp[cached])
        self._recount_frames_of(cached)

    def _count_pinned(self, cells: npt.NDArray[np.integer]) -> int:
        return int(np.count_nonzero(self.priority[cells] == PINNED)) if self._ranked else 0

    def _expire(self) -> None:
        """Gives the default priority back to cells whose time is up."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, cells, generations = heappop(self._deadlines)
            due = (self.generation[cells] == generations) & (self._deadline_of[cells] == number)
            self._rank(cells[due], DEFAULT_PRIORITY)

    @staticmethod
    def _queue(orders: list[EvictionOrder], items: Ids, stamps: Ids, keys: npt.NDArray[np.integer]) -> None:
        """Queues items by key, `index of the order * 128 + priority`."""
        for key in np.unique(keys).tolist():
            chosen = keys == key
            orders[key // 128].add(items[chosen], stamps[chosen], key % 128)

    # Counts per frame

    def _frames_of(self, cells: npt.NDArray[np.integer]) -> Ids:
        return np.unique(cells // self.cells_per_frame).astype(np.int32)

    def _cells_of(self, frames: Ids, num_places: int) -> Ids:
        cells: Ids = np.add.outer(frames * self.cells_per_frame, np.arange(num_places, dtype=np.int32)).reshape(-1)
        return cells

    def _per_group(self, cells: Mask) -> Counts:
        group = self.group[np.flatnonzero(cells) // self.cells_per_frame]
        group = group[group >= 0]  # none is below 0, unless another thread is at work
        return np.bincount(group, minlength=self.num_groups)

    def _by_frame(self, array: npt.NDArray[np.generic]) -> npt.NDArray[Any]:
        """An array over cells as a view with a row per frame."""
        return array.reshape(self.num_frames, self.cells_per_frame)

    def _recount_frames_of(self, cells: npt.NDArray[np.integer]) -> None:
        if not self._single:
            self._recount(self._frames_of(cells))

    def _recount(self, *changed: Ids) -> None:
        """Counts the cells of distinct frames anew, after they changed; frees empty ones, queues idle ones."""
        frames = np.concatenate(changed or (np.zeros(0, np.int32),))
        if not frames.size:
            return
        was_idle = self._tally(frames, -1)
        kept = self._by_frame(self.references)[frames] > 0
        known = self._by_frame(self.indexed)[frames]
        used = np.count_nonzero(kept | known, axis=1)
        if self._ranked:
            kept |= known & (self._by_frame(self.priority)[frames] == PINNED)
        self._used[frames] = used
        self._kept[frames] = np.count_nonzero(kept, axis=1)
        is_idle = self._tally(frames, 1)
        group = self.group[frames]
        has_room = (used > 0) & (used < self._bpf[group])
        self._room_code[frames] = np.where(has_room, 1 + 2 * group + is_idle, 0)
        empty = frames[used == 0]
        self._free[self._num_free : self._num_free + len(empty)] = empty
        self._num_free += len(empty)
        self.group[empty] = NO_GROUP
        if is_idle.any():
            self._queue_idle(frames[is_idle], ~was_idle[is_idle])

    def _tally(self, frames: Ids, sign: int) -> Mask:
        """Adds or takes away what frames contribute to the counts of their groups. Returns: which are idle."""
        used, kept = self._used[frames].astype(np.int64), self._kept[frames]
        is_used = used > 0
        is_idle: Mask = (kept == 0) & is_used
        group = self.group[frames].astype(np.int64)
        column = np.where(is_used, 2 * group + is_idle, 2 * self.num_groups)
        for totals, each in zip(self._totals, (None, self._bpf[group] - used, used - kept), strict=True):
            sums = np.bincount(column, each, 2 * self.num_groups + 1)[:-1].reshape(-1, 2)
            totals += sign * sums.astype(np.int64)
        return is_idle

    def _queue_idle(self, frames: Ids, is_new: Mask) -> None:
        """Queues idle frames: the new ones as the newest, by their last used cell; the others, at the age they have,
        where the highest priority inside is another now.
        """
        known = self._by_frame(self.indexed)[frames]
        priorities = np.full(len(frames), DEFAULT_PRIORITY, np.int8)
        if self._ranked:
            priorities = np.where(known, self._by_frame(self.priority)[frames], np.int8(0)).max(axis=1)
        new = frames[is_new]
        if new.size:
            last_used = np.where(known[is_new], self._by_frame(self._stamp)[new], 0).max(axis=1)
            self._frame_stamp[new] = 0  # else renumbering could find them in their old places
            self._frame_stamp[new[np.argsort(last_used)]] = self._stamps(len(new))
        changed = is_new | (priorities != self._frame_priority[frames])
        frames, priorities = frames[changed], priorities[changed]
        self._frame_priority[frames] = priorities
        order = np.argsort(self._frame_stamp[frames])
        frames = frames[order]
        self._queue(self._idle_orders, frames, self._frame_stamp[frames], priorities[order])

    def _choose_victims(self, group: int, count: int, budget: int) -> tuple[Ids, Ids, int]:
        """Whom to evict for `count` blocks of a group, in the order of priority and last use, but not from more than
        `budget` idle frames. Returns: its own cells, idle frames of other groups, and how many idle frames all cost.
        """
        per_frame = self.blocks_per_frame[group]
        # Idle frames of the group itself yield as much as others, so none beyond these can be wanted.
        idle = self._idle_orders[0].oldest(min(-(-count // per_frame), budget))
        foreign = idle[self.group[idle] != group]
        for limit in (count, self._num_cached):  # all of its cells only where the budget forbids the oldest ones
            own = self._orders[group].oldest(limit)
            frames = np.concatenate((own // np.int32(self.cells_per_frame), foreign))
            age = np.concatenate((self._stamp[own], self._frame_stamp[foreign])).astype(np.int64)
            age += np.concatenate((self.priority[own], self._frame_priority[foreign])).astype(np.int64) << 32
            order = np.argsort(age)
            frames, is_own = frames[order], order < len(own)
            is_idle = self._kept[frames] == 0
            yields = np.where(is_own, 1, per_frame)
            if len(frames) > budget:
                _, first, place = np.unique(frames, return_index=True, return_inverse=True)
                cost = np.zeros(len(order), np.int64)
                cost[first] = is_idle[first]
                yields *= ~is_idle | (cost.cumsum()[first][place] <= budget)
            before = yields.cumsum() - yields
            if before[-1] + yields[-1] >= count:
                break
        chosen = (yields > 0) & (before < count)
        return own[order[chosen & is_own]], frames[chosen & ~is_own], len(np.unique(frames[chosen & is_idle]))
