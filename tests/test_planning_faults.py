"""Faults seen in public planners, each named by its number in the list of faults, with the right value."""

import json

import pytest
import torch

from kvstore.allocator import BlockAllocator
from kvstore.choose import group_layers
from kvstore.errors import OutOfBlocks, PlanError
from kvstore.layers import full_attention, recurrent_state, sliding_window
from kvstore.plan import CachePlan
from kvstore.planner import plan_cache
from kvstore.specs import Alias, LayerSpec, NoCache
from kvstore.store import KVStore
from kvstore.unify import unify_pages
from kvstore.workers import plan_workers
from kvstore_kernels.formats import RowFormat, RowPart
from kvstore_kernels.quantised import bytes_format, indexer_format


def rows(row_bytes):
    return RowFormat("rows", (RowPart("row", torch.uint8, 1, row_bytes),), (row_bytes,))


def test_o01_an_attention_page_that_does_not_divide_the_state_page():
    attention = LayerSpec("full", 1, rows(12_416))
    state = recurrent_state([("s", (12_648_448,), torch.uint8)])
    assert 12_648_448 % 12_416 == 8_960
    for layout in ("buckets", "bestfit", "overlay", "frames", "auto"):
        plan_cache({"attention": attention, "state": state}, memory="1GiB", layout=layout)
    buckets = plan_cache({"attention": attention, "state": state}, memory="1GiB", layout="buckets")
    assert [slot.page_bytes for slot in buckets.layer_slots] == [12_416, 12_648_448]
    unified = unify_pages({"attention": attention, "state": state})
    assert {spec.page_bytes for spec in unified.values()} == {12_651_904}
    assert unified["attention"].block_size == 1_019
    assert unified["state"].block_size == state.block_size


def test_o02_a_state_page_is_padded_and_its_block_size_stays():
    state = recurrent_state([("s", (256,), torch.float32)])
    draft = LayerSpec("full", 16, rows(128))
    unified = unify_pages({"state": state, "draft": draft})
    assert (unified["state"].page_bytes, unified["state"].payload_bytes) == (2_048, 1_024)
    assert unified["state"].block_size == state.block_size
    assert unified["draft"] == draft


def test_o03_tokens_and_sequences_come_from_one_formula():
    """10 blocks of attention and 3 of states per sequence of 160 tokens; the null block is held back of 100."""
    state = recurrent_state([("s", (4096,), torch.float32)])
    specs = {"attention": full_attention(2, 128)} | {f"state{i}": state for i in range(3)}
    plan = plan_cache(specs, num_frames=100, grouping="equal", layout="buckets")
    fits = plan.capacity(160)
    assert (plan.num_blocks, fits.blocks, sum(fits.blocks)) == ((100,) * 4, (10, 1, 1, 1), 13)
    assert (fits.num_sequences, fits.num_tokens) == (99 // 13, 99 // 13 * 160)
    published = 100 / 13  # counts the null block too
    assert (round(published, 2), int(published * 160)) == (7.69, 1_230)


def test_o04_groups_are_dealt_round_so_that_stages_waste_no_slot():
    full, window = full_attention(1, 8), sliding_window(1, 8, window=64)
    stages = [
        {"full0": full, "win0": window, "win1": window},
        {"full1": full, "win2": window, "win3": window},
    ]
    plans = plan_workers(stages, num_frames=8, grouping="equal", layout="buckets")
    for plan in plans:
        assert [len(group.layers) for group in plan.groups] == [1, 1, 1]
        assert len(plan.layer_slots) == 1
    assert [list(group.layers) for group in group_layers(stages[0] | stages[1], "equal")] == [
        ["full0", "full1"],
        ["win0", "win2"],
        ["win1", "win3"],
    ]


@pytest.mark.parametrize("layout", ["buckets", "overlay"])
def test_o05_an_alias_has_its_owners_address_and_no_bytes(layout):
    spec = full_attention(1, 8)
    plan = plan_cache({"L0": spec, "L1": Alias("L0")}, num_frames=4, layout=layout)
    assert plan.arena_bytes == 4 * spec.page_bytes
    assert [list(group.layers) for group in plan.groups] == [["L0"]]
    assert (plan.owner("L1"), plan.group_index("L1"), plan.spec("L1")) == ("L0", 0, spec)
    assert CachePlan.from_json(plan.to_json()) == plan
    store = KVStore(plan, "cpu", max_sequences=1, max_length=16, max_tokens_per_step=16)
    assert store.page_view("L1") is store.page_view("L0")
    batch = store.extend(store.open([[1, 2]]).seq_ids, 2)
    key, value = torch.ones(2, 1, 8, dtype=torch.bfloat16), torch.ones(2, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="layer: 'L1' reads the cache of 'L0' and has none to write"):
        store.write("L1", batch, key, value)
    store.write("L0", batch, key, value)
    assert torch.equal(store.gather("L1", batch)[0], key)


def test_o06_exactly_the_groups_that_hold_a_draft_layer_are_marked():
    attention = full_attention(1, 8)
    state = recurrent_state([("s", (64,), torch.float32)])
    specs = {"layers.0.attn": attention, "layers.1.state": state, "draft.0.attn": attention}
    for grouping in ("auto", "uniform", "equal", "packed"):
        groups = group_layers(specs, grouping)
        assert [group.holds_draft for group in groups] == ["draft.0.attn" in group.layers for group in groups]
        assert sum(group.holds_draft for group in groups) == 1


def test_o07_side_caches_are_in_the_bytes():
    specs = {"main": LayerSpec("latent", 64, bytes_format(656)), "side": LayerSpec("latent", 64, indexer_format(132))}
    plan = plan_cache(specs, memory="1GiB")
    assert plan.frame_bytes == 64 * 788
    assert plan.arena_bytes == plan.num_frames * 64 * 788 <= 2**30


def test_o08_a_model_without_cached_layers_has_its_null_block():
    plan = plan_cache({"layers.0.attn": NoCache()}, memory=0)
    assert (plan.groups, plan.arena_bytes, plan.num_frames, plan.uncached) == ((), 0, 1, ("layers.0.attn",))
    assert plan.max_length() is None
    assert plan.blocks_needed([0, 10]).shape == (2, 0)
    allocator = BlockAllocator(plan.num_frames, [1])
    assert allocator.take([0])[0].size == 0


def test_o09_the_plan_the_arena_and_the_books_count_the_same_blocks():
    """Asking for 65,536 blocks where memory fits 45,056: there is one number, and one block more is refused."""
    spec = full_attention(1, 8, block_size=1)
    plan = plan_cache({"a": spec}, memory=45_056 * spec.page_bytes)
    assert plan.num_frames == 45_056
    store = KVStore(plan, None, max_sequences=2, max_length=65_536, max_tokens_per_step=65_536)
    opened = store.open([[1]])
    with pytest.raises(OutOfBlocks):
        store.extend(opened.seq_ids, 45_056)
    store.extend(opened.seq_ids, 45_055)
    assert store.stats().free == 0
    document = json.loads(plan.to_json()) | {"num_frames": 65_536}
    with pytest.raises(PlanError, match="num_bytes: expected 65536 frames"):
        CachePlan.from_json(json.dumps(document))
