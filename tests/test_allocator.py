"""BlockAllocator: states, references, fences, priorities and the order of eviction, where a frame is a block."""

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.allocator import BlockAllocator, Ids
from kvstore.errors import OutOfBlocks
from kvstore.eviction import PINNED


def cached(num_blocks: int, clock: Callable[[], float] = lambda: 0.0) -> tuple[BlockAllocator, Ids]:
    """A pool full of cached blocks. Returns: the pool, and its ids, the first released the first."""
    allocator = BlockAllocator(num_blocks + 1, (1,), clock)
    (ids,) = allocator.take([num_blocks])
    allocator.index(ids)
    allocator.release(ids)
    return allocator, ids


def test_ids_ascend_and_never_name_the_null_block() -> None:
    allocator = BlockAllocator(6, (1, 1))
    first, second = allocator.take([2, 3])
    assert first.tolist() == [1, 2]
    assert second.tolist() == [3, 4, 5]
    assert first.dtype == second.dtype == np.dtype(np.int32)
    assert allocator.group.tolist() == [-1, 0, 0, 1, 1, 1]
    allocator.check()


@pytest.mark.parametrize("num_frames", [1, 2])
def test_a_pool_of_one_or_two_blocks(num_frames: int) -> None:
    allocator = BlockAllocator(num_frames, (1,))
    assert allocator.take([0])[0].tolist() == []
    with pytest.raises(OutOfBlocks, match=rf"wanted \[{num_frames}\], free \[{num_frames - 1}\]"):
        allocator.take([num_frames])
    allocator.check()


def test_no_groups_take_nothing() -> None:
    allocator = BlockAllocator(4, ())
    assert allocator.take([]) == []
    allocator.check()


def test_a_failed_take_changes_nothing() -> None:
    allocator = BlockAllocator(8, (1, 1))
    held, _ = allocator.take([4, 0])
    allocator.index(held[:2])
    allocator.release(held[:2])
    arrays = ("references", "group", "generation", "indexed", "priority")
    before = [getattr(allocator, name).copy() for name in arrays]
    counts = allocator.num_free_frames, allocator.num_cached, allocator.num_held
    with pytest.raises(OutOfBlocks) as caught:
        allocator.take([3, 3])
    assert caught.value.wanted == (3, 3)
    assert caught.value.free == (3, 3)
    assert caught.value.evictable == (2, 2), "a cached block can go to any group"
    assert caught.value.fenced == (0, 0)
    assert all(np.array_equal(old, getattr(allocator, name)) for name, old in zip(arrays, before, strict=True))
    assert (allocator.num_free_frames, allocator.num_cached, allocator.num_held) == counts
    allocator.check()


def test_o10_a_second_release_is_refused() -> None:
    allocator = BlockAllocator(8, (1,))
    (ids,) = allocator.take([2])
    allocator.release(ids)
    for distinct in (False, True):
        with pytest.raises(ValueError, match=f"expected blocks in use, got block {ids[0]} without a reference"):
            allocator.release(ids, distinct=distinct)
        with pytest.raises(ValueError, match="got block 0 without a reference"):
            allocator.release(np.array([0], np.int32), distinct=distinct)
    assert allocator.num_free_frames == 7
    allocator.check()


def test_o10_a_block_named_more_often_than_it_is_held_is_refused() -> None:
    allocator = BlockAllocator(8, (1,))
    (ids,) = allocator.take([3])
    allocator.retain(ids[1:2])
    with pytest.raises(ValueError, match=f"expected blocks in use, got block {ids[1]} without a reference"):
        allocator.release(ids[[0, 1, 1, 2, 1]])
    assert allocator.references[ids].tolist() == [1, 2, 1]
    allocator.check()
    allocator.release(ids[[0, 1, 1, 2]])
    assert allocator.num_held == 0
    allocator.check()


def test_blocks_are_evicted_in_the_order_of_release() -> None:
    allocator = BlockAllocator(7, (1,))
    (ids,) = allocator.take([6])
    allocator.index(ids)
    allocator.release(ids[[5, 1]])
    allocator.release(ids[[0, 2, 3, 4]])
    assert allocator.num_cached == 6
    assert allocator.take([1])[0].tolist() == [ids[5]]
    assert allocator.take([2])[0].tolist() == [ids[1], ids[0]]
    assert allocator.num_evicted == 3
    allocator.check()


def test_a_block_named_twice_is_as_recent_as_its_last_mention() -> None:
    allocator = BlockAllocator(4, (1,))
    (ids,) = allocator.take([3])
    allocator.index(ids)
    allocator.retain(ids[[0, 0]])
    allocator.release(ids[[0, 1, 0, 2, 0]])
    allocator.check()
    assert allocator.take([3])[0].tolist() == ids[[1, 2, 0]].tolist()


def test_blocks_freed_last_are_taken_first() -> None:
    allocator = BlockAllocator(6, (1,))
    (ids,) = allocator.take([4])
    allocator.release(ids[[1, 3]])
    assert allocator.take([3])[0].tolist() == [ids[3], ids[1], 5]


def test_a_hit_saves_a_block_from_eviction() -> None:
    allocator, ids = cached(3)
    allocator.retain(ids[:1])
    assert allocator.num_cached == 2
    allocator.release(ids[:1])
    assert allocator.take([3])[0].tolist() == [ids[1], ids[2], ids[0]]
    allocator.check()


@pytest.mark.parametrize("distinct", [True, False])
def test_hits_count_blocks_and_not_references(distinct: bool) -> None:
    allocator, ids = cached(4)
    allocator.retain(ids[:2] if distinct else ids[[0, 1, 0, 0]], distinct=distinct)
    assert (allocator.num_cached, allocator.num_held, allocator.peak_held) == (2, 2, 4)
    allocator.check()


def test_an_evicted_block_has_another_generation() -> None:
    allocator, ids = cached(1)
    generation = int(allocator.generation[1])
    allocator.retain(ids)
    allocator.release(ids)
    assert allocator.generation[1] == generation
    allocator.take([1])
    assert allocator.generation[1] == generation + 1
    assert not allocator.indexed[1]


def test_a_block_no_index_knows_keeps_its_generation_but_in_debug() -> None:
    for debug in (False, True):
        allocator = BlockAllocator(4, (1,), debug=debug)
        (ids,) = allocator.take([3])
        allocator.index(ids[:1])
        allocator.release(ids)
        assert allocator.generation[ids].tolist() == [0, debug, debug]
        allocator.take([3])
        assert allocator.generation[ids].tolist() == [1, debug, debug]
        assert [cells.tolist() for cells in allocator.freed] == ([ids[1:].tolist(), ids[:1].tolist()] if debug else [])
        allocator.check()


def test_forgotten_blocks_are_freed_unless_in_use() -> None:
    allocator, ids = cached(4)
    allocator.retain(ids[:2])
    allocator.forget(ids[[0, 2]])
    allocator.forget(ids[[0, 2]])
    assert allocator.generation[ids].tolist() == [1, 0, 1, 0]
    assert (allocator.num_free_frames, allocator.num_cached, allocator.num_evicted) == (1, 1, 0)
    allocator.release(ids[:2])
    assert (allocator.num_free_frames, allocator.num_cached) == (2, 2)
    allocator.check()
    allocator.drop_cached()
    assert allocator.num_free_frames == 4
    assert allocator.generation[ids].tolist() == [1, 1, 1, 1]
    allocator.check()


def test_fenced_blocks_are_counted_and_not_handed_out() -> None:
    allocator = BlockAllocator(4, (1, 1))
    first, second = allocator.take([1, 2])
    allocator.fence(second)
    assert allocator.num_fenced().tolist() == [0, 2]
    with pytest.raises(OutOfBlocks, match=r"fenced \[0, 2\]"):
        allocator.take([1, 0])
    allocator.check()
    allocator.unfence(second)
    assert allocator.num_free_frames == 2
    assert allocator.num_fenced().tolist() == [0, 0]
    allocator.release(first)
    allocator.check()


def test_fences_add_up_and_cannot_be_dropped_twice() -> None:
    allocator = BlockAllocator(4, (1,))
    (ids,) = allocator.take([2])
    allocator.retain(ids[:1])
    allocator.fence(ids[[0, 0, 1]])
    allocator.unfence(ids[[1]])
    with pytest.raises(ValueError, match=f"expected fenced blocks, got block {ids[1]} without a fence"):
        allocator.unfence(ids[[0, 1]])
    assert allocator.fences[ids].tolist() == [2, 0]
    allocator.unfence(ids[[0, 0]])
    assert allocator.num_held == 0
    allocator.check()


def test_a_shared_block_stays_until_its_last_reference() -> None:
    allocator = BlockAllocator(3, (1,))
    (ids,) = allocator.take([1])
    allocator.retain(ids)
    allocator.release(ids)
    assert allocator.num_free_frames == 1
    allocator.release(ids)
    assert allocator.num_free_frames == 2


def test_every_block_is_counted_in_one_state() -> None:
    allocator = BlockAllocator(12, (1, 1))
    first, second = allocator.take([4, 5])
    allocator.index(second[:3])
    allocator.release(second[:2])
    allocator.fence(first[:1])
    states = {name: counts.tolist() for name, counts in allocator.counts_by_state().items()}
    assert states == {"in_use": [3, 3], "fenced": [1, 0], "cached": [0, 2], "free_in_partial": [0, 0]}
    assert allocator.num_free_frames == 2


# Long runs


def test_the_same_calls_give_the_same_ids() -> None:
    def ids() -> list[npt.NDArray[np.int32]]:
        chance = random.Random(3)
        allocator = BlockAllocator(20, (6, 1, 4))
        held: list[Ids] = []
        handed: list[Ids] = []
        for _ in range(300):
            try:
                taken = allocator.take([chance.randint(0, 8), chance.randint(0, 2), chance.randint(0, 5)])
            except OutOfBlocks:
                chance.shuffle(held)
                allocator.release(np.concatenate([held.pop() for _ in range((len(held) + 1) // 2)]))
                continue
            handed += taken
            cells = np.concatenate([allocator.to_cells(some, group) for group, some in enumerate(taken)])
            allocator.index(cells[::2])
            held.append(cells)
        return handed

    assert all(np.array_equal(one, other) for one, other in zip(ids(), ids(), strict=True))


def test_partly_used_frames_stay_few() -> None:
    """Short and long holders, mixed for long: holes are filled before frames are opened."""
    chance = random.Random(11)
    allocator = BlockAllocator(2_000, (6, 1, 4))
    held: list[tuple[int, Ids]] = []
    worst = 0.0
    for step in range(4_000):
        while held and held[0][0] <= step:
            allocator.release(held.pop(0)[1], distinct=True)
        taken = allocator.take([chance.randint(0, 36), chance.randint(0, 6), chance.randint(0, 24)])
        cells = np.concatenate([allocator.to_cells(some, group) for group, some in enumerate(taken)])
        life = chance.choice([3, 3, 3, 3, 30, 400])
        held.append((step + life, cells))
        held.sort(key=lambda each: each[0])
        if step > 1_500:
            worst = max(worst, float(allocator.partial_cells().sum()) / allocator.num_held)
    assert worst < 0.25, worst
    allocator.check()


# Priorities


def test_the_lowest_priority_is_evicted_first_and_the_pinned_never() -> None:
    allocator, ids = cached(6)
    allocator.set_priority(ids[[0]], 100)
    allocator.set_priority(ids[[1]], PINNED)
    allocator.set_priority(ids[[4, 2]], 10)
    allocator.check()
    with pytest.raises(OutOfBlocks, match=r"free \[0\], evictable \[5\]"):
        allocator.take([6])
    assert allocator.take([5])[0].tolist() == ids[[2, 4, 3, 5, 0]].tolist()
    allocator.check()


def test_a_priority_counts_when_a_block_is_cached_later_and_ends_with_its_content() -> None:
    allocator = BlockAllocator(4, (1,))
    (ids,) = allocator.take([3])
    allocator.set_priority(ids, 10)
    allocator.index(ids)
    allocator.set_priority(ids[1:2], 10)
    allocator.release(ids)
    allocator.check()
    assert allocator.take([1])[0].tolist() == [ids[1]], "the others were not indexed when their priority was set"
    allocator.index(ids[1:2])
    allocator.release(ids[1:2])
    assert allocator.take([1])[0].tolist() == [ids[0]]
    allocator.check()


def test_a_priority_that_ran_out_leaves_a_block_at_its_age() -> None:
    now = [0.0]
    allocator, ids = cached(4, lambda: now[0])
    allocator.set_priority(ids[:2], PINNED, ttl=10)
    allocator.set_priority(ids[1:2], PINNED, ttl=20)
    assert allocator.take([1])[0].tolist() == [ids[2]]
    now[0] = 9.9
    with pytest.raises(OutOfBlocks):
        allocator.take([2])
    now[0] = 10.0
    assert allocator.take([2])[0].tolist() == [ids[0], ids[3]], "the second block has a later end"
    now[0] = 20.0
    assert allocator.take([1])[0].tolist() == [ids[1]]
    allocator.check()


def test_the_end_of_a_priority_means_only_the_content_it_was_given_to() -> None:
    now = [0.0]
    allocator, ids = cached(2, lambda: now[0])
    allocator.set_priority(ids[:1], 90, ttl=10)
    allocator.forget(ids[:1])
    allocator.take([1])
    allocator.index(ids[:1])
    allocator.set_priority(ids[:1], 90)
    allocator.release(ids[:1])
    now[0] = 10.0
    assert allocator.take([2])[0].tolist() == [ids[1], ids[0]]


@pytest.mark.parametrize("priority", [-1, 102])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    allocator, ids = cached(1)
    with pytest.raises(ValueError, match=f"priority: expected 0 to 100 or PINNED \\(101\\), got {priority}"):
        allocator.set_priority(ids, priority)


# The check itself


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool.references.__setitem__(5, 1), "cells in use"),
        (lambda pool: pool.indexed.__setitem__(3, False), "cached cells"),
        (lambda pool: pool.fences.__setitem__(1, 2), "more fences than references"),
        (lambda pool: pool.group.__setitem__(6, 0), "a free frame of a group"),
        (lambda pool: pool._stamp.__setitem__(3, 0), "queues and cached cells"),
        (lambda pool: pool._free.__setitem__(0, pool._free[1]), "twice on the free stack"),
        (lambda pool: pool.priority.__setitem__(1, 9), "a priority of a cell"),
        (lambda pool: setattr(pool, "_num_pinned", 1), "pinned"),
    ],
)
def test_check_finds_what_is_wrong(spoil: Callable[[BlockAllocator], None], message: str) -> None:
    allocator = BlockAllocator(9, (1,))
    (ids,) = allocator.take([4])
    allocator.index(ids[2:])
    allocator.release(ids[2:])
    allocator.check()
    spoil(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check()
