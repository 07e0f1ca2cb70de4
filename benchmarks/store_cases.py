"""What the store's benchmark times: decode steps and the allocator. A result is checked before it counts."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import Measure
from benchmarks.timing import Times
from kvstore import Batch, CachePlan, KVStore, full_attention, plan_cache, sliding_window

Ids = npt.NDArray[np.int64]
Microseconds = npt.NDArray[np.float64]

BLOCK = 16
WINDOWS = {1: (), 2: (256,), 5: (64, 128, 256, 512), 7: (64, 128, 192, 256, 384, 512)}
"""Groups -> the windows beside one group that keeps everything, each of them a group."""

PROMPT, START = 32, 576
"""Tokens of a prompt, and of a sequence when its steps are timed: what windows let go of from there on is generated."""

FILL, CHUNK = 4096, 8192
MAX_TOKEN = 2**31 - 1
STEP_TARGETS = {1: (60.0, 100.0), 5: (300.0, 400.0)}
"""Groups -> microseconds of the least and of the worst step of `GATED_SEQUENCES` sequences."""
GATED_SEQUENCES = 1024
HIT_TARGET = 150.0
TAKE_TARGET, RELEASE_TARGET = 40.0, 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything is measured; times are held to their targets only where `gated`."""

    groups: tuple[int, ...]
    sequences: tuple[int, ...]
    steps: int
    warm_up: int
    short: int
    long: int
    repeats: int
    taken: int
    pool: int
    pool_sequences: int
    pool_length: int
    frame_memory: int
    operations: int
    gated: bool


FULL = Sizes(
    (1, 2, 5, 7), (256, 1024, 4096), 300, 20, 8192, 131072, 50, 4096, 2_000_000, 4096, 4096, 8 << 30, 10**6, True
)
QUICK = Sizes((1, 5), (64,), 40, 20, 1024, 8192, 5, 256, 50_000, 64, 1024, 1 << 30, 5_000, False)


class WrongResultError(AssertionError):
    """What was timed did not do what it should: its times mean nothing."""


def expect(holds: bool, what: str) -> None:
    """Raises WrongResultError unless it holds."""
    if not holds:
        raise WrongResultError(what)


def at_most(case: str, metric: str, value: float, unit: str, target: float | None) -> Measure:
    """A figure with an upper bound, or with none."""
    rounded = round(value, 2)
    return Measure(case, metric, rounded, unit, target, None if target is None else rounded <= target)


def times(case: str, taken: Microseconds, target: float | None = None) -> Iterator[Measure]:
    """The least of times in microseconds, the median, how far they scatter, and the worst."""
    spread = Times(tuple(taken.tolist())).spread
    yield at_most(case, "min", float(taken.min()), "us", target)
    yield Measure(case, "median", round(float(np.median(taken)), 2), "us")
    yield Measure(case, "spread", round(100 * spread, 1), "%")
    yield Measure(case, "worst", round(float(taken.max()), 2), "us")


def stopwatch(
    repeats: int, act: Callable[[Any], object], prepare: Callable[[], Any], after: Callable[[], object]
) -> Microseconds:
    """Microseconds of `act(prepare())`, with `after()` behind each; the garbage collector is off."""
    taken = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            given = prepare()
            begin = time.perf_counter_ns()
            act(given)
            taken.append(time.perf_counter_ns() - begin)
            after()
    finally:
        gc.enable()
    return np.array(taken) / 1e3


# Worlds


def make_plan(groups: int, num_frames: int) -> CachePlan:
    """A full group and windows beside it, one layer each, blocks of 16 tokens."""
    layers = {"layers.0.attn": full_attention(8, 128, block_size=BLOCK)}
    layers |= {
        f"layers.{number}.attn": sliding_window(8, 128, window=window, block_size=BLOCK)
        for number, window in enumerate(WINDOWS[groups], 1)
    }
    plan = plan_cache(layers, num_frames=num_frames, grouping="packed", layout="overlay")
    assert len(plan.groups) == groups
    return plan


class World:
    """A store whose pool is full: open sequences, the rest cached prompts of released ones.

    With `fill_first` these are older than all that windows have let go of, so that evictions meet nothing but them.
    """

    def __init__(
        self, groups: int, num_sequences: int, steps: int, rollback: int = 0, fill_first: bool = False
    ) -> None:
        self.groups, self.num_sequences = groups, num_sequences
        self.random = np.random.default_rng(num_sequences)
        per_sequence = (START + steps) // BLOCK + 8 + sum(window // BLOCK + 8 for window in WINDOWS[groups])
        num_frames = num_sequences * per_sequence + 4 * groups * FILL // BLOCK
        limits = {"max_sequences": num_sequences + 4, "max_length": 8192, "max_tokens_per_step": 16384}
        self.store = KVStore(make_plan(groups, num_frames), None, **limits, rollback=rollback)
        if fill_first:
            self._fill()
        starts = START + np.arange(num_sequences) % BLOCK
        parts = [self._start(starts[first : first + 16]) for first in range(0, num_sequences, 16)]
        self.seq_ids = np.concatenate(parts)
        self.lengths = starts
        self.tokens = np.arange(num_sequences)
        self._fill()

    def _fill(self) -> None:
        while self.store.stats().free:
            self.leave(FILL)

    def _start(self, lengths: Ids) -> Ids:
        prompts = self.prompts(len(lengths), PROMPT)
        seq_ids = self.store.open(list(prompts)).seq_ids
        self.store.commit(self.store.extend(seq_ids, PROMPT), prompts.reshape(-1))
        more = lengths - PROMPT
        self.store.commit(self.store.extend(seq_ids, more), self.prompts(1, int(more.sum()))[0])
        return seq_ids

    def prompts(self, count: int, length: int) -> npt.NDArray[np.int32]:
        """Random prompts, no two with a common block."""
        return self.random.integers(0, MAX_TOKEN, (count, length), dtype=np.int32)

    def leave(self, length: int) -> None:
        """Leaves a cached prompt."""
        prompt = self.prompts(1, length)[0]
        self.store.release([feed(self.store, prompt)])

    def step(self) -> Batch:
        """One token for every sequence."""
        batch = self.store.extend(self.seq_ids, 1)
        self.store.commit(batch, self.tokens)
        return batch

    def replace(self, idx: int, length: int) -> tuple[Ids, npt.NDArray[np.int32]]:
        """Another sequence in the place of one of the batch, of which nothing is computed yet."""
        self.store.release(self.seq_ids[idx : idx + 1])
        prompt = self.prompts(1, length)
        opened = self.store.open(list(prompt)).seq_ids
        self.seq_ids = np.concatenate((self.seq_ids[:idx], opened, self.seq_ids[idx + 1 :]))
        self.lengths = self.lengths.copy()
        self.lengths[idx] = length
        return opened, prompt[0]

    def num_crossing(self) -> int:
        """Blocks that the next step hands out: in each group one for each sequence whose last block is full."""
        return self.groups * int((self.lengths % BLOCK == 0).sum())

    def num_free(self) -> int:
        """Free blocks now, without the cost of `stats`."""
        return int(self.store._books.allocator.num_free_frames)


def feed(store: KVStore, prompt: npt.NDArray[np.int32], chunk: int = CHUNK) -> int:
    """Opens a prompt and commits all that is not cached. Returns: the handle."""
    opened = store.open([prompt])
    for start in range(int(opened.cached_tokens[0]), len(prompt), chunk):
        part = prompt[start : start + chunk]
        store.commit(store.extend(opened.seq_ids, len(part)), part)
    return int(opened.seq_ids[0])


def expect_slots(batch: Batch, lengths: Ids, sample: Ids) -> None:
    """The slots and positions of a decode batch, worked out anew from its tables for some sequences."""
    positions = lengths[sample]
    expect(np.array_equal(batch.positions.numpy()[sample], positions), "positions of new tokens")
    expect(np.array_equal(batch.seq_lens.numpy()[sample], positions + 1), "lengths of sequences")
    for group, (table, slots) in enumerate(zip(batch.block_table, batch.slot_mapping, strict=True)):
        assert slots is not None
        rows = table.numpy()
        blocks = rows[sample, positions // BLOCK % rows.shape[1]].astype(np.int64)
        expect(bool((blocks > 0).all()), f"a null block in group {group}")
        expect(len(np.unique(blocks)) == len(blocks), f"a block of two sequences in group {group}")
        right = blocks * BLOCK + positions % BLOCK
        expect(np.array_equal(slots.numpy()[sample], right), f"slots of group {group}")


# Decode steps


def decode(sizes: Sizes, groups: int, num_sequences: int) -> Iterator[Measure]:
    """extend + commit of one token for each sequence; every block comes from a window or an eviction."""
    name = f"decode, {named(groups)}, {num_sequences:,} sequences"
    world = World(groups, num_sequences, sizes.steps + sizes.warm_up)
    store = world.store
    sample = np.arange(0, num_sequences, 7)
    for _ in range(sizes.warm_up):
        expect_slots(world.step(), world.lengths, sample)
        world.lengths = world.lengths + 1
    before, handed, from_free = store.stats(), 0, 0
    wall, cpu = np.zeros(sizes.steps), np.zeros(sizes.steps)
    gc.collect()
    gc.disable()
    for number in range(sizes.steps):
        crossing, free = world.num_crossing(), world.num_free()
        handed, from_free = handed + crossing, from_free + min(crossing, free)
        begin_cpu = time.thread_time_ns()
        begin = time.perf_counter_ns()
        batch = world.step()
        wall[number] = time.perf_counter_ns() - begin
        cpu[number] = time.thread_time_ns() - begin_cpu
        if number % 64 == 0:
            expect_slots(batch, world.lengths, sample)
        world.lengths = world.lengths + 1
    gc.enable()
    after = store.stats()
    evicted = after.evicted - before.evicted
    expect(evicted > 0, "no block was evicted: the pool was not full")
    expect(evicted == handed - from_free, f"{handed} handed out, {from_free} of them free, but {evicted} evicted")
    expect_slots(world.step(), world.lengths, sample)
    expect(all(group.in_use > 0 for group in after.groups), "a group without blocks")
    store.check()
    least, worst = STEP_TARGETS.get(groups, (None, None)) if _is_gated(sizes, num_sequences) else (None, None)
    yield from times(name, wall / 1e3, least)
    yield at_most(name, "worst_cpu", float(cpu.max()) / 1e3, "us", worst)
    yield Measure(name, "handed_out", handed, "blocks")
    yield Measure(name, "evicted", evicted, "blocks")


def changing(sizes: Sizes, groups: int, num_sequences: int) -> Iterator[Measure]:
    """The same step where one sequence is released and another opened before each; its prefill is not timed."""
    name = f"batch changes every step, {named(groups)}, {num_sequences:,} sequences"
    world = World(groups, num_sequences, sizes.steps + sizes.warm_up)
    store = world.store
    steps, changes = [], []
    gc.collect()
    gc.disable()
    for number in range(sizes.steps + sizes.warm_up):
        idx, length = number * 37 % num_sequences, START + number % BLOCK
        begin = time.perf_counter_ns()
        opened, prompt = world.replace(idx, length)
        middle = time.perf_counter_ns()
        store.commit(store.extend(opened, length), prompt)
        changes.append(middle - begin)
        begin = time.perf_counter_ns()
        batch = world.step()
        steps.append(time.perf_counter_ns() - begin)
        if number % 16 == 0:
            expect_slots(batch, world.lengths, np.arange(num_sequences))
        world.lengths = world.lengths + 1
    gc.enable()
    store.check()
    taken, changed = (np.array(each[sizes.warm_up :]) / 1e3 for each in (steps, changes))
    yield from times(name, taken)
    yield from times(f"{name}, + open, release", taken + changed)


def alternating(sizes: Sizes, groups: int, num_sequences: int) -> Iterator[Measure]:
    """The same step with a batch of 32 tokens of another sequence's prompt behind each."""
    name = f"decode and 32 prompt tokens, {named(groups)}, {num_sequences:,} sequences"
    world = World(groups, num_sequences, sizes.steps + sizes.warm_up)
    store = world.store
    decodes, both = [], []
    prompt, other, start = world.prompts(1, FILL)[0], store.open([[0]]).seq_ids, FILL
    gc.collect()
    gc.disable()
    for number in range(sizes.steps + sizes.warm_up):
        if start == FILL:
            store.release(other)
            prompt, start = world.prompts(1, FILL)[0], 0
            other = store.open([prompt]).seq_ids
        part = prompt[start : start + 32]
        begin = time.perf_counter_ns()
        batch = world.step()
        decodes.append(time.perf_counter_ns() - begin)
        if number % 16 == 0:
            expect_slots(batch, world.lengths, np.arange(num_sequences))
        begin = time.perf_counter_ns()
        store.commit(store.extend(other, 32), part)
        both.append(decodes[-1] + time.perf_counter_ns() - begin)
        world.lengths = world.lengths + 1
        start += 32
    gc.enable()
    store.check()
    yield from times(f"{name}, decode alone", np.array(decodes[sizes.warm_up :]) / 1e3)
    yield from times(name, np.array(both[sizes.warm_up :]) / 1e3)


def calls(sizes: Sizes, groups: int) -> Iterator[Measure]:
    """Python and C calls of extend + commit, the median step: as many for few sequences as for many."""
    counts = {}
    for num_sequences in (64, 1024):
        world = World(groups, num_sequences, BLOCK, fill_first=True)
        world.step()
        counts[num_sequences] = sorted(_count_calls(world.step) for _ in range(15))[7]
    name = f"calls in a step, {named(groups)}"
    yield Measure(name, "calls_64", counts[64], "")
    yield Measure(name, "calls_1024", counts[1024], "", counts[64], counts[1024] == counts[64])


def _count_calls(function: Callable[[], object]) -> int:
    count = 0

    def profile(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def named(groups: int) -> str:
    """A number of groups in words."""
    return "1 group" if groups == 1 else f"{groups} groups"


def _is_gated(sizes: Sizes, num_sequences: int) -> bool:
    return sizes.gated and num_sequences == GATED_SEQUENCES
