"""Faults seen in public planners that reach a store, each named by its number in the list of faults."""

from typing import Any

import pytest
import torch
from store_cases import LAYER, STATE_LAYER, feed, prefill, rows_for, snapshot, state, store_of, tokens_in

import kvstore
from kvstore import KVStore, OutOfBlocks
from kvstore.layers import full_attention, latent
from kvstore.specs import Alias, LayerSpec, NoCache


def attention(block_size: int = 16) -> LayerSpec:
    return full_attention(2, 8, dtype=torch.float32, block_size=block_size)


def test_o03_as_many_sequences_fit_as_the_plan_says() -> None:
    """10 blocks of attention and 3 of states for 160 tokens, 99 blocks: 7 sequences, and the store holds just them."""
    layers = {LAYER: attention()} | {f"layers.{i}.state": state(16) for i in (1, 2, 3)}
    store = store_of(layers, 100, max_length=160, max_tokens_per_step=160, grouping="equal", layout="buckets")
    fits = store.plan.capacity(160)
    assert (fits.blocks, fits.num_sequences) == ((10, 1, 1, 1), 7)
    for number in range(7):
        prefill(store, range(number * 1000, number * 1000 + 160))
    assert [group.in_use for group in store.stats().groups] == [70, 7, 7, 7]
    eighth = store.open([range(9000, 9160)]).seq_ids
    with pytest.raises(OutOfBlocks, match=r"wanted \[10, 1, 1, 1\], free \[8, 8, 8, 8\]"):
        store.extend(eighth, 160)


@pytest.mark.parametrize("layout", ["buckets", "overlay", "frames"])
def test_o05_an_alias_has_one_address_and_no_bytes_of_its_own(layout: str) -> None:
    store = store_of({"L0": attention(4), "L1": Alias("L0")}, 8, layout=layout)
    assert store._arena is not None
    assert store._arena.memory.numel() == 8 * attention(4).page_bytes
    assert store.page_view("L1").tensor("k").data_ptr() == store.page_view("L0").tensor("k").data_ptr()
    batch = store.extend(store.open([range(6)]).seq_ids, 6)
    before = snapshot(store)
    with pytest.raises(ValueError, match="layer: 'L1' reads the cache of 'L0' and has none to write"):
        store.write("L1", batch, rows_for(range(6)), rows_for(range(6)))
    assert snapshot(store) == before
    store.write("L0", batch, rows_for(range(6)), rows_for(range(6)))
    assert tokens_in(store, "L1", None, batch) == [*range(6)]
    assert torch.equal(store.slot_mapping("L1", batch), store.slot_mapping("L0", batch))


@pytest.mark.parametrize(("draft", "hit"), [(False, 64), (True, 48)], ids=["no drafter", "drafter"])
def test_o06_only_the_group_with_the_draft_layer_gives_up_a_block(draft: bool, hit: int) -> None:
    """States stand at each of the four boundaries of 64 tokens; the draft layer's group gives up 16."""
    layers = {LAYER: attention(), STATE_LAYER: state(16)} | ({"draft.0.attn": attention()} if draft else {})
    store = store_of(layers, max_length=80)
    assert sum(store._books.rules.holds_draft) == draft
    first = store.open([range(65)]).seq_ids
    for start in range(0, 64, 16):
        feed(store, first, range(start, start + 16))
    opened = store.open([range(65)])
    assert opened.cached_tokens.tolist() == [hit]
    reasons = {stop.reason for stop in store.explain_hit(opened.seq_ids[0]).stops}
    assert ("given to the drafter" in reasons) == draft


def test_o07_planned_bytes_are_allocated_bytes() -> None:
    """A main entry of 656 bytes and a side entry of 132 per token: 788, as rows that the store moves."""
    specs = {"main": latent(328, 256), "side": latent(66, 64)}
    assert [spec.format.row_bytes for spec in specs.values()] == [656, 132]
    plan = kvstore.plan_cache(specs, memory="2MiB")
    store = KVStore(plan, "cpu", max_sequences=1, max_length=64, max_tokens_per_step=64)
    assert store._arena is not None
    assert plan.num_frames == 2**21 // (64 * 788) == 41
    assert store._arena.memory.numel() == plan.arena_bytes == 41 * 64 * 788


@pytest.mark.parametrize("layers", [{}, {"layers.0.attn": NoCache()}], ids=["no layer", "encoder only"])
def test_o08_a_model_without_cached_layers_has_a_store(layers: dict[str, Any]) -> None:
    store = store_of(layers, 1)
    assert (store.stats().num_blocks, store.stats().groups) == (0, ())
    seq_ids = store.open([range(5)]).seq_ids
    for count in (0, 5):
        batch = store.extend(seq_ids, count)
        assert (batch.num_tokens, batch.block_table, batch.slot_mapping) == (count, (), ())
        store.commit(batch, range(count))
        store.check()
    store.suspend(seq_ids)
    store.resume(seq_ids)
    (twin,) = store.fork(seq_ids[0], 1).tolist()
    store.truncate([twin], 2)
    store.check()
    assert store.open([range(5)]).cached_tokens.tolist() == [0]
    store.release([*seq_ids, twin])
    store.check()


def test_o09_the_plan_the_arena_and_the_books_count_the_same_blocks() -> None:
    store = store_of({LAYER: attention(1)}, 46, max_length=64)
    assert store.page_view(LAYER).num_blocks == store.plan.num_blocks[0] == store.stats().num_blocks + 1 == 46
    seq_ids = store.open([range(60)]).seq_ids
    with pytest.raises(OutOfBlocks) as caught:
        store.extend(seq_ids, 46)
    assert (caught.value.wanted, caught.value.free) == ((46,), (45,))
    batch = store.extend(seq_ids, 45)
    assert sorted(batch.block_table[0][0].tolist()) == [*range(1, 46)]
