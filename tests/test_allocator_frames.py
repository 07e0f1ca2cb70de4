"""BlockAllocator where frames hold several blocks, and any sequence of calls against a model of plain dicts."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.allocator import NO_GROUP, BlockAllocator, Ids
from kvstore.errors import OutOfBlocks
from kvstore.eviction import DEFAULT_PRIORITY, PINNED


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cells_of(*cells: int) -> Ids:
    return np.array(cells, np.int32)


def cache(allocator: BlockAllocator, ids: Ids, group: int) -> Ids:
    """Indexes and releases blocks of a group. Returns: their cells."""
    cells = allocator.to_cells(ids, group)
    allocator.index(cells)
    allocator.release(cells)
    return cells


def snapshot(value: Any) -> Any:
    """A copy of everything an allocator knows, down to its queues."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, list | tuple):
        return [snapshot(each) for each in value]
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if type(value).__module__.startswith("kvstore"):
        return snapshot(vars(value))
    return value if isinstance(value, int | float | bool | str | None) else None


# Ids and cells


def test_blocks_of_a_group_lie_in_its_frames() -> None:
    allocator = BlockAllocator(8, (2, 3))
    first, second = allocator.take([3, 4])
    assert first.tolist() == [2, 3, 4]
    assert second.tolist() == [9, 10, 11, 12]
    assert allocator.group.tolist() == [-1, 0, 0, 1, 1, -1, -1, -1]
    assert allocator.partial_cells().tolist() == [1, 2]
    assert allocator.num_free_frames == 3
    allocator.check()


def test_ids_and_cells_are_one_to_one() -> None:
    allocator = BlockAllocator(5, (2, 3, 1))
    for group, per_frame in enumerate(allocator.blocks_per_frame):
        ids = np.arange(per_frame, 5 * per_frame, dtype=np.int32)
        cells = allocator.to_cells(ids, group)
        assert cells.dtype == np.int32
        assert np.array_equal(cells, ids // per_frame * 3 + ids % per_frame)
        assert np.array_equal(allocator.to_ids(cells, group), ids)
    groups = np.array([0, 1, 2, 1], np.int16)
    ids = cells_of(3, 5, 4, 14)
    assert allocator.to_cells(ids, groups).tolist() == [4, 5, 12, 14]
    assert allocator.to_ids(allocator.to_cells(ids, groups), groups).tolist() == ids.tolist()


@pytest.mark.parametrize("blocks_per_frame", [(1, 1), (4, 4), ()])
def test_equal_groups_are_not_converted(blocks_per_frame: tuple[int, ...]) -> None:
    ids = cells_of(4, 5)
    allocator = BlockAllocator(5, blocks_per_frame)
    assert allocator.to_cells(ids, 0) is ids
    assert allocator.to_ids(ids, 0) is ids


# Frames


def test_a_frame_goes_back_with_its_last_block() -> None:
    allocator = BlockAllocator(3, (2, 3))
    ids, _ = allocator.take([4, 0])
    cells = allocator.to_cells(ids, 0)
    allocator.release(cells[:3])
    assert (allocator.num_free_frames, allocator.partial_cells().tolist()) == (1, [1, 0])
    allocator.release(cells[3:])
    assert (allocator.num_free_frames, allocator.partial_cells().tolist()) == (2, [0, 0])
    assert (allocator.group == NO_GROUP).all()
    allocator.check()


def test_free_places_come_before_free_frames_and_the_fullest_frame_first() -> None:
    allocator = BlockAllocator(9, (4,))
    (ids,) = allocator.take([12])
    allocator.release(ids[[0, 1, 4, 8, 9, 10]])
    assert sorted(allocator.take([3])[0].tolist()) == sorted(ids[[4, 0, 1]].tolist())
    allocator.check()


def test_a_cached_frame_moves_to_another_group() -> None:
    allocator = BlockAllocator(3, (2, 3))
    ids, _ = allocator.take([4, 0])
    cache(allocator, ids, 0)
    generations = allocator.generation.copy()
    _, moved = allocator.take([0, 2])
    assert moved.tolist() == [3, 4], "the frame that was used longest ago"
    assert allocator.group.tolist() == [-1, 1, 0]
    assert (allocator.generation - generations).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert (allocator.num_cached, allocator.num_evicted) == (2, 2)
    allocator.check()


def test_a_frame_with_a_held_block_stays_and_serves_its_own_group() -> None:
    allocator = BlockAllocator(2, (2, 3))
    ids, _ = allocator.take([2, 0])
    cache(allocator, ids[:1], 0)
    with pytest.raises(OutOfBlocks) as caught:
        allocator.take([0, 1])
    assert (caught.value.free, caught.value.evictable) == ((0, 0), (1, 0))
    assert allocator.take([1, 0])[0].tolist() == ids[:1].tolist()
    allocator.check()


def test_a_group_leaves_the_last_frame_to_the_one_that_cannot_do_without() -> None:
    """Group 0 could take the free frame, but has a cached block in a frame that cannot move."""
    allocator = BlockAllocator(3, (2, 3))
    ids, _ = allocator.take([2, 0])
    cache(allocator, ids[:1], 0)
    first, second = allocator.take([1, 3])
    assert first.tolist() == ids[:1].tolist()
    assert second.tolist() == [6, 7, 8]
    allocator.check()


def test_a_free_place_in_an_idle_frame_is_left_where_the_frame_must_move() -> None:
    allocator = BlockAllocator(3, (2, 3))
    ids, _ = allocator.take([4, 0])
    cells = allocator.to_cells(ids, 0)
    allocator.index(cells[[0, 2]])
    allocator.release(cells[:3])  # the first frame: a cached block and a free place; the second: cached and held
    allocator.check()
    first, second = allocator.take([1, 3])
    assert first.tolist() == ids[2:3].tolist()
    assert second.tolist() == [3, 4, 5]
    allocator.check()


def test_an_idle_frame_that_moved_has_no_room_for_its_old_group() -> None:
    allocator = BlockAllocator(5, (1, 2))
    _, ids = allocator.take([0, 8])
    cells = allocator.to_cells(ids, 1)
    allocator.index(cells[[0, 2, 4, 5, 6, 7]])
    allocator.release(cells)  # all idle; the first two frames have a cached block and a free place each
    first, second = allocator.take([1, 2])
    assert (first.tolist(), second.tolist()) == ([1], [5, 4])
    allocator.check()


def test_a_frame_to_spare_is_spared_once() -> None:
    """Two groups could do without a frame, one cannot; two frames are free."""
    allocator = BlockAllocator(5, (2, 2, 3))
    first, second, _ = allocator.take([2, 2, 0])
    cache(allocator, first[:1], 0)
    cache(allocator, second[:1], 1)
    handed = [ids.tolist() for ids in allocator.take([1, 1, 3])]
    assert handed == [[6], second[:1].tolist(), [12, 13, 14]]
    allocator.check()


# Against a model


class Model:
    """Plain dicts of what each cell is, and feasibility by trying."""

    def __init__(self, allocator: BlockAllocator, clock: Clock) -> None:
        self.allocator = allocator
        self.clock = clock
        self.references: dict[int, int] = {}
        self.fences: dict[int, int] = {}
        self.indexed: set[int] = set()
        self.priority: dict[int, tuple[int, float]] = {}  # and until when
        self.owner: dict[int, int] = {}  # of used frames
        self.freed_generations: dict[int, int] = {}

    def used(self) -> set[int]:
        return {cell for cell, count in self.references.items() if count} | self.indexed

    def frame(self, cell: int) -> int:
        return cell // self.allocator.cells_per_frame

    def is_pinned(self, cell: int) -> bool:
        priority, until = self.priority.get(cell, (DEFAULT_PRIORITY, 0.0))
        return priority == PINNED and self.clock.now < until

    def cached(self) -> list[int]:
        return sorted(cell for cell in self.indexed if not self.references.get(cell))

    def can_take(self, counts: list[int]) -> bool:
        """Tries every way to give idle and free frames to the groups."""
        allocator = self.allocator
        used = self.used()
        frames = {self.frame(cell) for cell in used}
        kept = {self.frame(cell) for cell in used if self.references.get(cell) or self.is_pinned(cell)}
        own = [0] * allocator.num_groups
        for frame in kept:
            group = self.owner[frame]
            own[group] += allocator.blocks_per_frame[group]
            own[group] -= sum(
                self.frame(cell) == frame and bool(self.references.get(cell) or self.is_pinned(cell)) for cell in used
            )
        movable = allocator.num_frames - 1 - len(kept)
        assert allocator.num_free_frames == allocator.num_frames - 1 - len(frames)
        ways = product(range(movable + 1), repeat=allocator.num_groups)
        return any(
            sum(way) <= movable
            and all(
                own[group] + frames_more * allocator.blocks_per_frame[group] >= counts[group]
                for group, frames_more in enumerate(way)
            )
            for way in ways
        )

    def take(self, counts: list[int]) -> None:
        allocator = self.allocator
        feasible = self.can_take(counts)
        pinned = {cell for cell in self.cached() if self.is_pinned(cell)}
        if not feasible:
            allocator._expire() if allocator._deadlines else None  # what is due falls back, whether or not it fails
            before = snapshot(allocator)
            with pytest.raises(OutOfBlocks) as caught:
                allocator.take(counts)
            assert snapshot(allocator) == before
            self.check_message(caught.value)
            return
        generation = allocator.generation.copy()
        handed = allocator.take(counts)
        taken: list[int] = []
        for group, ids in enumerate(handed):
            assert len(ids) == counts[group]
            taken += allocator.to_cells(ids, group).tolist()
        assert len(set(taken)) == len(taken)
        assert not any(self.references.get(cell) for cell in taken), "a held block was handed out"
        changed = set(np.flatnonzero(allocator.generation != generation).tolist())
        assert not changed & pinned
        assert changed <= set(self.cached())
        assert set(taken) & self.indexed <= changed
        self.indexed -= changed
        for cell in changed:
            self.priority.pop(cell, None)
        for group, ids in enumerate(handed):
            for cell in allocator.to_cells(ids, group).tolist():
                self.references[cell] = 1
                self.owner[self.frame(cell)] = group

    def check_message(self, error: OutOfBlocks) -> None:
        for group in range(self.allocator.num_groups):
            alone = [0] * self.allocator.num_groups
            alone[group] = error.free[group] + error.evictable[group]
            assert self.can_take(alone), "free and evictable together are what a group alone could have"
            alone[group] += 1
            assert not self.can_take(alone)
        assert sum(error.fenced) == sum(
            0 < count == self.fences.get(cell, 0) for cell, count in self.references.items()
        )

    def drop(self, cells: list[int]) -> None:
        for cell in cells:
            self.references[cell] -= 1

    def compare(self) -> None:
        allocator = self.allocator
        allocator.check()
        references = np.zeros(allocator.num_frames * allocator.cells_per_frame, np.int64)
        for cell, count in self.references.items():
            references[cell] = count
        assert np.array_equal(allocator.references, references)
        assert set(np.flatnonzero(allocator.indexed).tolist()) == self.indexed
        assert allocator.num_held == np.count_nonzero(references)
        assert allocator.num_cached == len(self.cached())
        states = allocator.counts_by_state()
        assert states["in_use"].sum() + states["fenced"].sum() == allocator.num_held
        assert states["cached"].sum() == allocator.num_cached
        assert np.array_equal(states["free_in_partial"], allocator.partial_cells())


ACTIONS = ["take", "take", "take", "release", "release", "index", "index", "retain", "fence", "unfence"]
ACTIONS += ["forget", "set_priority", "wait", "drop_cached"]


def run(model: Model, actions: list[tuple[str, int]]) -> None:
    allocator = model.allocator
    for action, seed in actions:
        chance = random.Random(seed)
        held = sorted(cell for cell, count in model.references.items() if count > model.fences.get(cell, 0))
        some = chance.sample(held, chance.randint(0, min(len(held), chance.choice([6, 99]))))
        cells = np.array(some, np.int32)
        if action == "take":
            most = chance.choice([2, 6, 12])
            model.take([chance.randint(0, most) for _ in range(allocator.num_groups)])
        elif action == "release":
            spare = [cell for cell in some for _ in range(model.references[cell] - model.fences.get(cell, 0))]
            chance.shuffle(spare)
            before = snapshot(allocator)
            with pytest.raises(ValueError, match="without a reference"):
                allocator.release(np.array([*spare, *held[:2], 0], np.int32))
            assert snapshot(allocator) == before
            named = spare if chance.random() < 0.7 else some
            allocator.release(np.array(named, np.int32), distinct=named is some)
            model.drop(named)
        elif action == "index":
            some = held if chance.random() < 0.7 else some
            allocator.index(np.array(some, np.int32))
            model.indexed |= set(some)
        elif action == "retain":
            usable = sorted(set(held) | set(model.cached()))
            some = chance.choices(usable, k=chance.randint(0, 6)) if usable else []
            allocator.retain(np.array(some, np.int32), distinct=len(set(some)) == len(some))
            for cell in some:
                model.references[cell] += 1
        elif action == "fence":
            allocator.fence(cells)
            for cell in some:
                model.fences[cell] = model.fences.get(cell, 0) + 1
        elif action == "unfence":
            fenced = [cell for cell, count in sorted(model.fences.items()) for _ in range(count)]
            fenced = chance.sample(fenced, chance.randint(0, len(fenced)))
            allocator.unfence(np.array(fenced, np.int32))
            for cell in fenced:
                model.fences[cell] -= 1
            model.drop(fenced)
        elif action == "forget":
            some = chance.sample(sorted(model.used()), min(len(model.used()), chance.randint(0, 4)))
            generation = allocator.generation.copy()
            allocator.forget(np.array(some, np.int32))
            grown = np.flatnonzero(allocator.generation != generation).tolist()
            assert grown == sorted(set(some) & model.indexed)
            model.indexed -= set(some)
            for cell in some:
                model.priority.pop(cell, None)
        elif action == "set_priority":
            some = chance.sample(sorted(model.used()), min(len(model.used()), chance.randint(0, 6)))
            priority = chance.choice([0, 20, DEFAULT_PRIORITY, 100, PINNED, PINNED])
            ttl = chance.choice([None, 1.0, 3.0])
            allocator.set_priority(np.array(some, np.int32), priority, ttl)
            until = float("inf") if ttl is None else model.clock.now + ttl
            model.priority.update((cell, (priority, until)) for cell in some if cell in model.indexed)
        elif action == "wait":
            model.clock.now += 1.0
        else:
            allocator.drop_cached()
            model.indexed.clear()
            model.priority.clear()
        model.compare()


@settings(max_examples=120, deadline=None)
@given(
    num_frames=st.integers(1, 8),
    blocks_per_frame=st.sampled_from([(1,), (1, 1), (2, 3), (3, 3), (6, 1, 4), (1, 2, 3, 2)]),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 10**6)), max_size=40),
)
def test_any_sequence_of_calls_is_that_of_the_model(
    num_frames: int, blocks_per_frame: tuple[int, ...], actions: list[tuple[str, int]]
) -> None:
    clock = Clock()
    run(Model(BlockAllocator(num_frames, blocks_per_frame, clock), clock), actions)


@pytest.mark.parametrize("blocks_per_frame", [(1,), (1, 1), (2, 3), (6, 1, 4)])
def test_long_runs_are_those_of_the_model(blocks_per_frame: tuple[int, ...]) -> None:
    chance = random.Random(7)
    clock = Clock()
    model = Model(BlockAllocator(8, blocks_per_frame, clock), clock)
    weighted = [action for action in ACTIONS if action != "drop_cached"] * 8 + ["drop_cached"]
    run(model, [(chance.choice(weighted), chance.randrange(10**6)) for _ in range(400)])


def test_stamps_are_renumbered_before_they_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.eviction.MAX_STAMP", 60)
    chance = random.Random(5)
    for blocks_per_frame in ((1, 1), (2, 3)):
        clock = Clock()
        model = Model(BlockAllocator(8, blocks_per_frame, clock), clock)
        run(model, [(chance.choice(ACTIONS), chance.randrange(10**6)) for _ in range(300)])
        assert model.allocator._next_stamp <= 60
