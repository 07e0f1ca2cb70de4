"""What the store's benchmark times beside steps: prompts, releases, forks, tokens taken back; the allocator alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import Measure
from benchmarks.store_cases import (
    BLOCK,
    CHUNK,
    GATED_SEQUENCES,
    HIT_TARGET,
    MAX_TOKEN,
    RELEASE_TARGET,
    TAKE_TARGET,
    Ids,
    Sizes,
    World,
    expect,
    expect_slots,
    feed,
    make_plan,
    named,
    stopwatch,
    times,
)
from kvstore import KVStore
from kvstore.allocator import BlockAllocator

Tokens = npt.NDArray[np.int32]


def roomy(groups: int, length: int, copies: int, max_sequences: int = 8) -> KVStore:
    """A store for `copies` sequences of `length` tokens, windows included."""
    num_frames = copies * groups * (length // BLOCK + 2) + 64
    limits = {"max_sequences": max_sequences, "max_length": length + 64, "max_tokens_per_step": CHUNK}
    return KVStore(make_plan(groups, num_frames), None, **limits)


def first_blocks(store: KVStore, seq_ids: Ids, num_blocks: int) -> list[npt.NDArray[np.int32]]:
    """The first blocks of the full group of each sequence, as a batch without new tokens shows them."""
    batch = store.extend(seq_ids, 0)
    store.commit(batch, [])
    return [row[:num_blocks].copy() for row in batch.block_table[0].numpy()]


def prefill(sizes: Sizes, groups: int, length: int) -> Iterator[Measure]:
    """A prompt that nobody has: open, extend and commit chunks of 8,192 tokens, release."""
    name = f"prefill of {length:,} tokens, {named(groups)}"
    store, random = roomy(groups, length, 3), np.random.default_rng(length)

    def compute(prompt: Tokens) -> None:
        store.release([feed(store, prompt)])

    repeats = max(sizes.repeats * 8192 // max(length, 8192), 5)
    taken = stopwatch(repeats, compute, lambda: random.integers(0, MAX_TOKEN, length, dtype=np.int32), lambda: None)
    stats = store.stats()
    expect(stats.hit_tokens == 0 and stats.asked_tokens == repeats * length, "a prompt that nobody has was found")
    expect(stats.cached >= length // BLOCK and stats.in_use == 0, "blocks that stay cached")
    store.check()
    yield from times(name, taken)


def hit(sizes: Sizes, groups: int, length: int) -> Iterator[Measure]:
    """`open` of a prompt that is cached whole."""
    name = f"hit of {length:,} tokens, {named(groups)}"
    store = roomy(groups, length, 3)
    prompt = np.random.default_rng(length).integers(0, MAX_TOKEN, length, dtype=np.int32)
    seq_id = feed(store, prompt)
    num_blocks = (length - 1) // BLOCK
    (blocks,) = first_blocks(store, np.array([seq_id]), num_blocks)
    store.release([seq_id])
    opened: list[Any] = []
    reached = (
        length - 1 if groups == 1 else num_blocks * BLOCK
    )  # of full groups a part of a block can be had, as a copy

    def close() -> None:
        found = opened.pop()
        expect(found.cached_tokens.tolist() == [reached], f"{found.cached_tokens.tolist()} tokens found")
        store.release(found.seq_ids)

    taken = stopwatch(sizes.repeats, lambda given: opened.append(store.open([given])), lambda: prompt, close)
    again = store.open([prompt]).seq_ids
    (found,) = first_blocks(store, again, num_blocks)
    expect(np.array_equal(found, blocks), "blocks of the hit")
    store.check()
    is_gated = sizes.gated and groups == 1 and length == sizes.long
    yield from times(name, taken, HIT_TARGET if is_gated else None)


def release(sizes: Sizes, groups: int, length: int) -> Iterator[Measure]:
    """`release` of a sequence whose prompt is committed."""
    name = f"release of {length:,} tokens, {named(groups)}"
    store, random = roomy(groups, length, 3), np.random.default_rng(length)

    def start() -> list[int]:
        return [feed(store, random.integers(0, MAX_TOKEN, length, dtype=np.int32))]

    repeats = max(sizes.repeats * 8192 // max(length, 8192), 5)
    taken = stopwatch(repeats, store.release, start, lambda: None)
    stats = store.stats()
    expect(stats.in_use == 0 and stats.cached >= length // BLOCK, "blocks that stay cached")
    store.check()
    yield from times(name, taken)


def forks(sizes: Sizes, groups: int) -> Iterator[Measure]:
    """`fork` of a sequence into 4, and `reorder` of 4 beams."""
    length = sizes.short + 5
    store = roomy(groups, length + 4 * sizes.repeats, 3, max_sequences=16)
    random = np.random.default_rng(groups)
    seq_id = feed(store, random.integers(0, MAX_TOKEN, length, dtype=np.int32))
    num_blocks = length // BLOCK
    (blocks,) = first_blocks(store, np.array([seq_id]), num_blocks)
    made: list[Ids] = []

    def close() -> None:
        copies = made.pop()
        shown = first_blocks(store, copies, num_blocks)
        expect(len(shown) == 4 and all(np.array_equal(row, blocks) for row in shown), "blocks of the forks")
        store.release(copies)

    forked = stopwatch(sizes.repeats, lambda given: made.append(store.fork(given, 4)), lambda: seq_id, close)
    store.check()
    yield from times(f"fork of {sizes.short:,} tokens into 4, {named(groups)}", forked)

    beams = np.concatenate(([seq_id], store.fork(seq_id, 3)))
    order: list[Ids] = []
    before: list[npt.NDArray[np.int32]] = []

    def grow() -> Ids:
        batch = store.extend(beams, 1)
        store.commit(batch, random.integers(0, MAX_TOKEN, 4))
        before[:] = list(batch.block_table[0].numpy().copy())
        order[:] = [random.permutation([0, 0, 1, 3])]
        return beams[order[0]]

    def compare() -> None:
        full = int((before[0] != 0).sum()) - 1  # the last block may be copied before it is written
        shown = first_blocks(store, beams, full)
        expect(
            all(np.array_equal(row, before[parent][:full]) for row, parent in zip(shown, order[0], strict=True)),
            "blocks of the beams",
        )

    swapped = stopwatch(sizes.repeats, lambda parents: store.reorder(beams, parents), grow, compare)
    store.check()
    yield from times(f"reorder of 4 beams of {sizes.short:,} tokens, {named(groups)}", swapped)


def truncate(sizes: Sizes, groups: int) -> Iterator[Measure]:
    """`truncate` by 4 tokens of each sequence of a batch, as after speculation."""
    num_sequences = GATED_SEQUENCES if sizes.gated else max(sizes.sequences)
    name = f"truncate by 4 tokens, {named(groups)}, {num_sequences:,} sequences"
    world = World(groups, num_sequences, 8, rollback=4)
    store = world.store
    tokens = np.arange(4 * num_sequences)

    def grow() -> Ids:
        store.commit(store.extend(world.seq_ids, 4), tokens)
        return world.lengths

    taken = stopwatch(sizes.repeats, lambda lengths: store.truncate(world.seq_ids, lengths), grow, lambda: None)
    expect_slots(world.step(), world.lengths, np.arange(num_sequences))
    store.check()
    yield from times(name, taken)


# The allocator alone


def allocator(sizes: Sizes) -> Iterator[Measure]:
    """Takes and releases blocks: free ones, and cached ones, which are evicted."""
    count = sizes.taken
    blocks = BlockAllocator(4 * count + 1, (1,))
    held: list[Any] = []
    goals = (TAKE_TARGET, RELEASE_TARGET) if sizes.gated else (None, None)
    for name, is_cached in (("free blocks", False), ("cached blocks", True)):
        while is_cached and blocks.num_free_frames:
            (some,) = blocks.take([min(count, blocks.num_free_frames)])
            blocks.index(some)
            blocks.release(some)

        def give_back(is_cached: bool = is_cached) -> None:
            (ids,) = held.pop()
            expect(len(np.unique(ids)) == count and ids.min() > 0, "blocks handed out twice")
            if is_cached:
                blocks.index(ids)
            blocks.release(ids)

        def hold(is_cached: bool = is_cached) -> Any:
            (ids,) = blocks.take([count])
            if is_cached:
                blocks.index(ids)
            return ids

        before = blocks.num_evicted
        took = stopwatch(sizes.repeats, lambda _: held.append(blocks.take([count])), lambda: None, give_back)
        gave = stopwatch(sizes.repeats, blocks.release, hold, lambda: None)
        expect(blocks.num_evicted - before == (2 * sizes.repeats * count if is_cached else 0), "evictions")
        blocks.check()
        take_goal, release_goal = (None, None) if is_cached else goals
        yield from times(f"take {count:,} {name}", took, take_goal)
        yield from times(f"release {count:,} {name}", gave, release_goal)
        if is_cached:
            continue
        alone = stopwatch(sizes.repeats, lambda ids: blocks.release(ids, distinct=True), hold, lambda: None)
        yield from times(f"release {count:,} {name}, promised distinct", alone)
