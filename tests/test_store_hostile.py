"""Faults that a hostile random engine found in the store, each cut down to the calls that show it."""

from typing import Any

import numpy as np
import pytest
import torch
from store_cases import (
    LAYER,
    RING_LAYER,
    STATE_LAYER,
    WINDOW_LAYER,
    feed,
    make_hybrid,
    make_store,
    prefill,
    ring,
    rows_for,
    state,
    state_of,
    store_of,
    tokens_in,
)

from kvstore import CacheGroup, KVStore, LayerSpec
from kvstore.events import BlocksRemoved, BlocksStored
from kvstore.layers import full_attention, sliding_window


def rows_at(store: KVStore, layer: str, slots: torch.Tensor) -> list[int | None]:
    """The tokens that the K rows in slots name; None for no slot."""
    pages = store.page_view(layer).tensor("k")
    size = pages.shape[1]
    return [None if slot < 0 else int(pages[slot // size, slot % size, 0, 0]) for slot in slots.reshape(-1).tolist()]


# Slots of a batch when the tables have moved on


def test_slots_of_a_committed_batch_stay_what_its_tables_say() -> None:
    """Window 6, blocks of 2: the commit of token 6 lets block 0 go, which the batch reaches until it is finished."""
    store = make_hybrid(window=6)
    seq_ids = store.open([range(9)]).seq_ids
    feed(store, seq_ids, range(6))
    batch = feed(store, seq_ids, [6], finish=False)
    assert store.gather_starts(WINDOW_LAYER, batch).tolist() == [1]
    assert tokens_in(store, WINDOW_LAYER, seq_ids, batch) == [1, 2, 3, 4, 5, 6]
    slots = store.slots_of(WINDOW_LAYER, batch, [[0, 1, 2, 6, 7]])
    assert rows_at(store, WINDOW_LAYER, slots) == [None, 1, 2, 6, None]
    store.finish(batch)


def test_slots_of_a_released_sequence_are_not_those_of_the_next_one() -> None:
    store = make_store()
    first = store.open([range(6)]).seq_ids
    batch = feed(store, first, range(6), commit=False)
    store.release(first)
    assert rows_at(store, LAYER, store.slots_of(LAYER, batch, [[0, 5]])) == [0, 5]
    second = store.open([range(50, 56)]).seq_ids
    feed(store, second, range(50, 56))
    assert rows_at(store, LAYER, store.slots_of(LAYER, batch, [[0, 5, 6]])) == [0, 5, None]
    store.commit(batch, range(6))
    store.check()


def test_slots_of_rings_and_of_rows_of_an_empty_batch() -> None:
    store = store_of({LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4), RING_LAYER: ring(3)})
    seq_ids = store.open([range(5)]).seq_ids
    batch = feed(store, seq_ids, range(5), commit=False)
    assert rows_at(store, RING_LAYER, store.slots_of(RING_LAYER, batch, [[-1, 1, 2, 3, 4, 5]])) == [
        None, None, 2, 3, 4, None,
    ]  # fmt: skip
    store.commit(batch, range(5))
    empty = store.extend([], [])
    assert store.slots_of(LAYER, empty, np.empty((0, 3), np.int64)).shape == (0, 3)
    store.commit(empty, [])


# Rings that are shared


@pytest.mark.parametrize("by", ["fork", "reorder"])
def test_a_ring_that_is_shared_is_copied_at_length_0_too(by: str) -> None:
    """A sequence that was taken back to no token still has its ring, together with the one it shares it with."""
    store = store_of({LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4), RING_LAYER: ring(4)})
    first, second = store.open([range(3), range(50, 53)]).seq_ids.tolist()
    feed(store, [first, second], range(3), range(50, 53))
    if by == "fork":
        store.release([second])
        (second,) = store.fork(first, 1).tolist()
    else:
        store.reorder([second], [first])
    store.truncate([second], 0)
    feed(store, [second], [70])
    feed(store, [first], [3])
    assert tokens_in(store, RING_LAYER, [second]) == [70]
    assert tokens_in(store, RING_LAYER, [first]) == [0, 1, 2, 3]
    table = store._books.tables.table(store.plan.group_index(RING_LAYER))
    assert len(set(table[[first & 0xFF, second & 0xFF], 0].tolist())) == 2
    assert store.stats().groups[store.plan.group_index(RING_LAYER)].in_use == 2


# Blocks of which only a part was stored


@pytest.mark.parametrize("window", [3, 7])
def test_a_tail_fills_the_block_that_an_earlier_step_began(window: int) -> None:
    """Blocks of 4: the step to token 6 begins block 1; the next, to token 16, needs of it only that a hit finds it."""
    layers = {
        LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4),
        WINDOW_LAYER: sliding_window(2, 8, dtype=torch.float32, block_size=4, window=window),
    }
    store = store_of(layers, stored="tail")
    seq_ids = store.open([range(17)]).seq_ids
    for start, end in ((0, 6), (6, 16), (16, 17)):
        feed(store, seq_ids, range(start, end))
    for prompt in ([*range(8), 99], [*range(12), 99], [*range(16), 99]):
        opened = store.open([prompt])
        cached = int(opened.cached_tokens[0])
        batch = store.extend(opened.seq_ids, 1)
        if cached == len(prompt) - 1:
            store.write(WINDOW_LAYER, batch, rows_for([99]), rows_for([99]))
            found = tokens_in(store, WINDOW_LAYER, opened.seq_ids, batch)
            assert found == prompt[max(0, cached - window + 1) :]
        store.commit(batch, prompt[cached : cached + 1])
        store.release(opened.seq_ids)
    assert store.stats().hit_tokens >= 8 + 16  # block 1 is found, whole
    store.check()


# States that are saved in one group and not in another


def test_a_state_without_checkpoints_has_no_snapshot_where_another_saves_one() -> None:
    """One step over tokens 3 to 9: the saved state stands at 8, the other one has been at 3 and is at 10 now."""
    specs = {STATE_LAYER: state(4), "layers.4.state": state(4, checkpoint_blocks=1)}
    groups = [CacheGroup(name, {name: spec}, 4, spec.retention) for name, spec in specs.items()]
    store = store_of(groups)
    seq_ids = store.open([range(1, 11)]).seq_ids
    feed(store, seq_ids, range(1, 8))
    feed(store, seq_ids, range(8, 11))  # passes over 8, in the block that stands at 7
    opened = store.open([range(1, 11)])
    cached = int(opened.cached_tokens[0])
    feed(store, opened.seq_ids, range(cached + 1, 11))
    for layer in specs:
        assert state_of(store, opened.seq_ids, layer) == [sum(range(1, 11))]
    assert cached == 0


# Events

WINDOW_1 = sliding_window(2, 8, dtype=torch.float32, block_size=1, window=9)


def follow(known: set[tuple[str, bytes]], store: KVStore) -> None:
    """What a follower does: a digest is told when it is new, and gone when it was told."""
    for event in store.take_events():
        assert isinstance(event, BlocksStored | BlocksRemoved)
        named = {(event.group, digest) for digest in event.digests}
        assert len(named) == len(event.digests)
        assert named.isdisjoint(known) if isinstance(event, BlocksStored) else named <= known
        known ^= named


def parting_store(second: LayerSpec = WINDOW_1, **limits: Any) -> KVStore:
    """Units of 4 tokens, one block of the first group, several of the second: prompts part inside a unit."""
    specs = {LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4), WINDOW_LAYER: second}
    return store_of(specs, device=None, max_events=10_000, **limits)


@pytest.mark.parametrize("second", [WINDOW_1, full_attention(2, 8, dtype=torch.float32, block_size=2)])
def test_a_digest_is_gone_with_the_last_of_its_blocks(second: LayerSpec) -> None:
    """Prompts 1 2 3 4 and 1 2 3 5 have two edges; of full groups the second prompt finds the blocks of the first."""
    store = parting_store(second)
    known: set[tuple[str, bytes]] = set()
    sequences = [prefill(store, [1, 2, 3, last]) for last in (4, 5)]
    follow(known, store)
    assert len(known) == 2 + (5 if second is WINDOW_1 else 3)
    for seq_ids in sequences:
        store.truncate(seq_ids, 0)  # the blocks are cached
    allocator = store._books.allocator
    for _ in range(allocator.num_cached):
        allocator.release(np.concatenate(allocator.take([0, allocator.num_free_frames + 1])))
        follow(known, store)
        assert bool(known) == bool(allocator.num_cached)
    store.check()


def test_a_block_is_told_gone_once_when_its_cell_is_given_up_twice() -> None:
    """What a window lets go is known to nobody until its sequence is released; its cell had been told before."""
    store = parting_store(num_frames=14, max_length=64)
    known: set[tuple[str, bytes]] = set()
    for start in range(0, 400, 100):
        seq_ids = store.open([range(start, start + 4)]).seq_ids
        store.commit(store.extend(seq_ids, 4), range(start, start + 4))
        for token in range(start + 4, start + 14):
            store.commit(store.extend(seq_ids, 1), [token])
        store.release(seq_ids)
        store.check()
    follow(known, store)
    store.drop_prefixes()


# Handles


def test_handles_stay_positive_when_the_generations_of_a_row_are_used_up() -> None:
    store = make_store()
    store._books.handles.generation[:] = 2**31 - 2
    for _ in range(4):
        seq_ids = prefill(store, range(9))
        assert seq_ids[0] > 0
        store.drop_prefixes()
        again = store.open([range(9)])
        assert again.cached_tokens.tolist() == [0]
        store.release([*seq_ids, *again.seq_ids])
        store.check()
