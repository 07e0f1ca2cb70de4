"""The queues of eviction: order, dead entries, growth, and what a look costs."""

import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.allocator import BlockAllocator
from kvstore.errors import OutOfBlocks
from kvstore.eviction import DEFAULT_PRIORITY, PINNED, EvictionOrder, Ids, LruQueue


class Owner:
    """The arrays that say which entries are alive; counts the entries that a queue asks about."""

    def __init__(self, num_items: int) -> None:
        self.stamp = np.zeros(num_items, np.int32)
        self.level = np.full(num_items, 50, np.int8)
        self.looked_at = 0
        self.calls = 0

    def is_alive(self, items: Ids, stamps: Ids, priority: int) -> npt.NDArray[np.bool_]:
        self.looked_at += len(items)
        self.calls += 1
        alive: npt.NDArray[np.bool_] = (self.stamp[items] == stamps) & (self.level[items] == priority)
        return alive


def array(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


def filled(num_items: int, capacity: int = 8) -> tuple[Owner, LruQueue]:
    owner = Owner(num_items)
    owner.stamp[:] = np.arange(1, num_items + 1)
    queue = LruQueue(capacity, owner.is_alive)
    queue.add(np.arange(num_items, dtype=np.int32), owner.stamp.copy())
    return owner, queue


def test_the_oldest_come_first_and_dead_entries_are_passed_over() -> None:
    owner, queue = filled(10)
    owner.stamp[[0, 2, 3]] = 0
    assert queue.oldest(3).tolist() == [1, 4, 5]
    assert queue.oldest(3).tolist() == [1, 4, 5]
    assert queue.pop(2).tolist() == [1, 4]
    assert queue.oldest(99).tolist() == [5, 6, 7, 8, 9]
    assert queue.items().tolist() == [5, 6, 7, 8, 9]


def test_an_empty_queue_has_nothing() -> None:
    _, queue = filled(0)
    assert queue.oldest(4).tolist() == []
    assert queue.pop(0).tolist() == []
    owner, queue = filled(3)
    owner.stamp[:] = 0
    assert queue.oldest(1).tolist() == []


def test_an_older_item_goes_between_the_others() -> None:
    owner = Owner(10)
    owner.stamp[:] = np.arange(10, 110, 10)
    queue = LruQueue(4, owner.is_alive)
    queue.add(array(2, 4, 6), owner.stamp[[2, 4, 6]])
    queue.add(array(0, 1, 5), owner.stamp[[0, 1, 5]])
    queue.add(array(3, 9), owner.stamp[[3, 9]])
    assert queue.items().tolist() == [0, 1, 2, 3, 4, 5, 6, 9]


def test_an_item_that_comes_back_at_its_age_is_there_once() -> None:
    owner, queue = filled(6)
    owner.level[[1, 4]] = 80
    assert queue.items().tolist() == [0, 2, 3, 5]
    owner.level[[1, 4]] = 50
    queue.add(array(1, 4), owner.stamp[[1, 4]])
    assert queue.items().tolist() == [0, 1, 2, 3, 4, 5]
    owner.level[[1, 4]] = 80
    queue.oldest(6)  # drops the dead ones
    owner.level[[1, 4]] = 50
    queue.add(array(1, 4), owner.stamp[[1, 4]])
    assert queue.items().tolist() == [0, 1, 2, 3, 4, 5]


def test_a_dead_head_is_looked_at_once() -> None:
    owner, queue = filled(100_000)
    owner.stamp[:90_000] = 0
    assert queue.oldest(4).tolist() == [90_000, 90_001, 90_002, 90_003]
    owner.looked_at = 0
    for _ in range(100):
        queue.oldest(4)
    assert owner.looked_at == 400


def test_dead_entries_in_the_middle_are_looked_at_once() -> None:
    """The oldest entry stays alive before a long dead stretch, as a block does that its group cannot evict."""
    owner, queue = filled(100_000)
    owner.stamp[1:90_000] = 0
    for _ in range(3):
        assert queue.oldest(2).tolist() == [0, 90_000]
    owner.looked_at = 0
    for _ in range(100):
        queue.oldest(2)
    assert owner.looked_at == 200


def test_a_look_costs_no_more_than_what_died() -> None:
    """Additions, hits anywhere and looks, mixed for long: entries looked at per entry added stay few."""
    chance = random.Random(1)
    owner, queue = filled(4_000, 8_000)
    next_stamp, added = 5_000, 0
    owner.looked_at = 0
    for _ in range(4_000):
        items = np.array(chance.sample(range(4_000), 16), np.int32)
        owner.stamp[items] = np.arange(next_stamp, next_stamp + 16)
        queue.add(items, owner.stamp[items])
        next_stamp, added = next_stamp + 16, added + 16
        queue.oldest(32)
    assert owner.looked_at < 10 * added


def test_dead_entries_are_dropped_once_per_capacity_additions() -> None:
    capacity = 1_000
    owner = Owner(capacity)
    queue = LruQueue(2 * capacity, owner.is_alive)
    for start in range(0, 200 * capacity, 50):
        items = (np.arange(50, dtype=np.int32) + start) % capacity
        owner.stamp[items] = np.arange(start + 1, start + 51)
        queue.add(items, owner.stamp[items])
    assert owner.calls <= 200
    assert len(queue._items) <= 4 * capacity
    assert queue.items().tolist() == list(range(capacity))


def test_priorities_go_before_age_and_the_pinned_stay() -> None:
    owner = Owner(8)
    owner.stamp[:] = np.arange(1, 9)
    order = EvictionOrder(4, owner.is_alive)
    for priority, items in ((50, array(0, 3, 7)), (PINNED, array(1)), (90, array(2)), (10, array(4, 5, 6))):
        owner.level[items] = priority
        order.add(items, owner.stamp[items], priority)
    assert order.oldest(99).tolist() == [4, 5, 6, 0, 3, 7, 2]
    assert order.oldest(2, remove=True).tolist() == [4, 5]
    assert order.oldest(3).tolist() == [6, 0, 3]
    assert sorted(order.items().tolist()) == [0, 1, 2, 3, 6, 7]


@settings(max_examples=150, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(["add", "hit", "older", "oldest", "pop"]), st.integers(0, 10**6))))
def test_any_sequence_of_calls_is_that_of_a_sorted_list(calls: list[tuple[str, int]]) -> None:
    owner = Owner(40)
    queue = LruQueue(4, owner.is_alive)
    next_stamp = 1_000
    for call, seed in calls:
        chance = random.Random(seed)
        items = np.array(chance.sample(range(40), chance.randint(1, 8)), np.int32)
        expected = sorted(np.flatnonzero(owner.stamp).tolist(), key=lambda item: int(owner.stamp[item]))
        if call == "add":
            owner.stamp[items] = np.arange(next_stamp, next_stamp + len(items))
            queue.add(items, owner.stamp[items])
            next_stamp += len(items)
        elif call == "hit":
            owner.stamp[items] = 0
        elif call == "older":
            fresh = items[owner.stamp[items] == 0]
            free = sorted(set(range(1, 1_000)) - set(owner.stamp.tolist()))
            owner.stamp[fresh] = sorted(chance.sample(free, len(fresh)))
            if len(fresh):
                queue.add(fresh, owner.stamp[fresh])
        elif call == "oldest":
            assert queue.oldest(len(items)).tolist() == expected[: len(items)]
        else:
            popped = queue.pop(len(items)).copy()
            assert popped.tolist() == expected[: len(items)]
            owner.stamp[popped] = 0
    assert queue.items().tolist() == sorted(
        np.flatnonzero(owner.stamp).tolist(), key=lambda item: int(owner.stamp[item])
    )


# In an allocator, where frames hold several blocks


def cache(allocator: BlockAllocator, ids: Ids, group: int) -> Ids:
    """Indexes and releases blocks of a group. Returns: their cells."""
    cells = allocator.to_cells(ids, group)
    allocator.index(cells)
    allocator.release(cells)
    return cells


def test_eviction_goes_by_last_use_over_own_blocks_and_frames_of_others() -> None:
    allocator = BlockAllocator(4, (2, 2))
    first, second = allocator.take([4, 2])
    cache(allocator, first[:1], 0)
    cache(allocator, second, 1)
    cache(allocator, first[2:], 0)
    taken, _ = allocator.take([2, 0])
    assert taken.tolist() == [int(first[0]), int(second[0])], "its own oldest block, then the frame of the other"
    assert allocator.group.tolist() == [-1, 0, 0, 0]
    allocator.check()


def test_a_frame_has_the_priority_of_its_best_block() -> None:
    now = [0.0]
    allocator = BlockAllocator(3, (2, 1), lambda: now[0])
    ids, _ = allocator.take([4, 0])
    cells = cache(allocator, ids, 0)
    allocator.set_priority(cells[:1], 80, ttl=5)
    allocator.set_priority(cells[1:2], 10)
    allocator.check()
    assert allocator.take([0, 1])[1].tolist() == [2], "the second frame, though it was used later"
    allocator.release(allocator.to_cells(array(2), 1))
    now[0] = 5.0
    assert allocator.take([0, 2])[1].tolist() == [2, 1]
    allocator.check()


def test_priorities_of_idle_frames_keep_their_age() -> None:
    allocator = BlockAllocator(5, (2, 1))
    ids, _ = allocator.take([8, 0])
    cells = cache(allocator, ids, 0)
    allocator.set_priority(cells, 70)
    allocator.set_priority(cells[[4, 5]], DEFAULT_PRIORITY)
    allocator.set_priority(cells[[2, 3]], DEFAULT_PRIORITY)
    allocator.set_priority(cells[[4, 5]], 70)
    allocator.set_priority(cells[[4, 5]], DEFAULT_PRIORITY)
    allocator.check()
    handed = [allocator.take([0, 1])[1].tolist() for _ in range(4)]
    assert handed == [[2], [3], [1], [4]]
    allocator.check()


def test_forgetting_a_block_lowers_the_priority_of_its_frame() -> None:
    allocator = BlockAllocator(3, (2, 1))
    ids, _ = allocator.take([4, 0])
    cells = cache(allocator, ids, 0)
    allocator.set_priority(cells[:1], 80)
    allocator.forget(cells[:1])
    allocator.check()
    assert allocator.take([0, 1])[1].tolist() == [1]
    allocator.check()


def test_a_pinned_block_keeps_its_frame() -> None:
    allocator = BlockAllocator(2, (2, 3))
    ids, _ = allocator.take([2, 0])
    cells = cache(allocator, ids, 0)
    allocator.set_priority(cells[:1], PINNED)
    allocator.check()
    with pytest.raises(OutOfBlocks, match=r"evictable \[1, 0\]"):
        allocator.take([0, 1])
    allocator.set_priority(cells, DEFAULT_PRIORITY)
    allocator.check()
    assert len(allocator.take([0, 3])[1]) == 3
    allocator.check()
