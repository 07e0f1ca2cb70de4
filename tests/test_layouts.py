"""Any layers, in any layout: proved safe, found safe by brute force, and the bounds between the layouts."""

from dataclasses import replace
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_data import MODELS, layers_of
from strategies import brute_force_pages_do_not_touch, padded_group, specs_of_any_kind

from kvstore.arena import Arena
from kvstore.choose import GROUPINGS, MAX_GROUPS, group_layers
from kvstore.errors import PlanError
from kvstore.frames import FRAME_BLOCKS, FRAME_SHARE, max_frame_bytes
from kvstore.groups import CacheGroup
from kvstore.layers import full_attention, latent, recurrent_state, sliding_window
from kvstore.placement import lower_bound_bytes, place_frames
from kvstore.plan import CachePlan
from kvstore.planner import plan_cache
from kvstore.score import LAYOUTS, consider

LENGTHS = (1, 7, 100)


def grouped(specs, grouping):
    """Groups by the strategy, or None where it has none for these layers (latent pages that do not divide)."""
    try:
        return group_layers(specs, grouping, lengths=LENGTHS)
    except PlanError as error:
        if "latent pages are not padded" not in str(error):
            raise
        return None


def above(entry, reference):
    """Whether a sequence of some length allocates more."""
    return any(a > b for a, b in zip(entry.bytes_per_sequence, reference.bytes_per_sequence, strict=True))


@given(
    specs_of_any_kind(demands=True),
    st.sampled_from(GROUPINGS),
    st.sampled_from(LAYOUTS),
    st.integers(2, 6),
)
@settings(max_examples=150, deadline=None)
def test_pages_are_disjoint_inside_and_aligned_in_every_layout(specs, grouping, layout, num_frames):
    groups = grouped(specs, grouping)
    if groups is None:
        return
    plan = plan_cache(groups, num_frames=num_frames, layout=layout, lengths=LENGTHS)
    assert sorted(layer for group in plan.groups for layer in group.layers) == sorted(specs)
    brute_force_pages_do_not_touch(plan)
    for layer in specs:
        assert plan.placements[layer].block_stride_bytes % plan.spec(layer).block_stride_multiple == 0
    assert plan.arena_bytes == num_frames * plan.frame_bytes
    loaded = CachePlan.from_json(plan.to_json())
    assert loaded == plan
    assert (loaded.considered, loaded.lengths) == (plan.considered, plan.lengths)
    assert [list(group.layers) for group in loaded.groups] == [list(group.layers) for group in plan.groups]


@given(specs_of_any_kind(), st.integers(0, 2**20))
@settings(max_examples=120, deadline=None)
def test_without_demands_the_layouts_are_ordered(specs, spare):
    """Bound = overlay <= bestfit <= buckets; frames, below their cap, allocate no more than the overlay."""
    groups = group_layers(specs, "uniform")
    figures = {layout: consider(groups, layout, LENGTHS, None) for layout in LAYOUTS}
    bound = lower_bound_bytes(groups)
    assert bound == figures["overlay"].frame_bytes <= figures["bestfit"].frame_bytes <= figures["buckets"].frame_bytes
    memory = FRAME_SHARE * bound + spare
    frames = consider(groups, "frames", LENGTHS, memory)
    assert bound <= frames.frame_bytes <= max_frame_bytes(memory, bound)
    assert frames.score <= consider(groups, "overlay", LENGTHS, memory).score + 1e-9
    assert all(
        mine <= theirs
        for mine, theirs in zip(frames.bytes_per_sequence, figures["overlay"].bytes_per_sequence, strict=True)
    )


@given(specs_of_any_kind(demands=True))
@settings(max_examples=80, deadline=None)
def test_with_demands_the_bound_is_below_every_layout_of_whole_blocks(specs):
    groups = group_layers(specs, "uniform")
    for layout in ("buckets", "bestfit", "overlay"):
        assert lower_bound_bytes(groups) <= consider(groups, layout, LENGTHS, None).frame_bytes
    frames = consider(groups, "frames", LENGTHS, None)
    for group, blocks in zip(groups, frames.blocks_per_frame, strict=True):
        stride, rest = divmod(frames.frame_bytes, blocks)
        assert (rest, stride % group.stride_multiple) == (0, 0)
        assert stride >= group.block_bytes


@given(specs_of_any_kind(demands=True), st.integers(5, 40))
@settings(max_examples=100, deadline=None)
def test_auto_takes_the_least_or_an_earlier_layout_within_one_percent(specs, times):
    memory = times * sum(spec.page_bytes for spec in specs.values())
    try:
        plan = plan_cache(specs, memory=memory, lengths=LENGTHS)
    except PlanError as error:
        if "memory: one token needs" not in str(error):
            raise
        return
    packed = group_layers(specs, "packed")
    reference = consider(packed, "overlay", LENGTHS, memory)
    capped = sum(not group.retention.is_fixed for group in packed) > MAX_GROUPS
    near = [entry for entry in plan.considered if entry.score <= 1.01 * min(entry.score for entry in plan.considered)]
    types = {(spec.block_size, spec.retention) for spec in specs.values()}
    below = [entry for entry in near if not capped and len(types) > 1 and not above(entry, reference)]
    assert plan.layout == (below or near)[0].layout
    brute_force_pages_do_not_touch(plan)
    free = [group for group in plan.groups if not group.retention.is_fixed]
    types = {(group.block_size, group.retention) for group in free}
    assert len(free) <= max(MAX_GROUPS, len(types), sum(spec.kind == "hidden_state" for spec in specs.values()) + 8)
    for entry in plan.considered[:3]:
        uniform = consider(group_layers(specs, "uniform"), entry.layout, LENGTHS, memory)
        assert entry.score <= uniform.score + 1e-9


@given(specs_of_any_kind(demands=True), st.sampled_from(LAYOUTS), st.data())
@settings(max_examples=60, deadline=None)
def test_patterns_of_two_groups_distinct_blocks_survive_each_other(specs, layout, data):
    """Every page of a block of its own in each of two groups is written, then all are read back."""
    groups = group_layers(specs, "uniform")
    plan = plan_cache(groups, num_frames=4, layout=layout, lengths=LENGTHS)
    memory = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    frames = data.draw(st.permutations([1, 2, 3]))
    expected = []
    for number, group in enumerate(groups[:2]):
        per_frame = plan.blocks_per_frame[number]
        block = frames[number] * per_frame + data.draw(st.integers(0, per_frame - 1))
        for index, (layer, spec) in enumerate(group.layers.items()):
            place = plan.placements[layer]
            slot = plan.layer_slots[place.layer_slot]
            start = slot.offset_bytes + place.offset_bytes + block * place.block_stride_bytes
            page = memory[start : start + spec.page_bytes]
            page.fill_(1 + (37 * number + 5 * index) % 255)
            expected.append((page, page.clone()))
    assert all(torch.equal(page, pattern) for page, pattern in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_views_of_an_arena_find_the_pages_of_the_plan(layout):
    """Through the views that kernels get: rows of two groups, written and read in every layout."""
    specs = {
        "a": full_attention(2, 8, block_size=4),
        "b": full_attention(1, 8, block_size=4),
        "c": sliding_window(1, 8, window=8, block_size=4),
        "d": latent(24, 16, block_size=2),
    }
    plan = plan_cache(specs, num_frames=4, layout=layout, grouping="uniform")
    views = Arena(plan, torch.device("cpu")).views
    patterns = {}
    for number, layer in enumerate(specs):
        group = plan.group_index(layer)
        block = (group + 1) * plan.blocks_per_frame[group]  # frame number group + 1
        for part in plan.spec(layer).format.parts:
            tensor = views[layer].tensor(part.name)
            tensor[block] = number + torch.arange(tensor[block].numel()).reshape(tensor[block].shape)
            patterns[layer, part.name] = block, tensor[block].clone()
    for (layer, part), (block, pattern) in patterns.items():
        assert torch.equal(views[layer].tensor(part)[block], pattern), (layer, part)


def test_frames_of_equal_pages_waste_nothing():
    """Gemma-3-27B: 10 full and 52 window layers of one page size; 26 and 5 blocks fill a frame to the last byte."""
    layers = layers_of(MODELS["gemma-3-27b/bf16"])
    plan = plan_cache(layers, memory="64GiB", grouping="uniform", layout="frames")
    by_kind = dict(zip((group.retention.kind for group in plan.groups), plan.blocks_per_frame, strict=True))
    assert by_kind == {"sliding_window": 5, "full": 26}
    assert plan.block_strides == tuple(group.block_bytes for group in plan.groups)
    assert plan.frame_bytes == 260 * 131_072
    with pytest.raises(PlanError, match="bytes_per_block: blocks of this plan differ by group, see block_strides"):
        plan.bytes_per_block  # noqa: B018
    assert plan.num_blocks == tuple(plan.num_frames * blocks for blocks in plan.blocks_per_frame)


def test_a_frame_stays_below_its_share_of_the_memory():
    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132"])
    sizes = {}
    for gibibytes in (1, 4, 16, 64):
        plan = plan_cache(layers, memory=gibibytes * 2**30, layout="frames")
        widest = max(group.block_bytes for group in plan.groups)
        assert plan.frame_bytes <= max(gibibytes * 2**30 // FRAME_SHARE, widest)
        sizes[gibibytes] = plan.frame_bytes
    assert sizes[1] < sizes[16]
    assert max_frame_bytes(None, 100) == FRAME_BLOCKS * 100


def test_a_frame_may_be_given():
    groups = [padded_group("a", [128, 128]), padded_group("b", [96])]
    plan = plan_cache(groups, memory=8192, layout="frames", frame_bytes=768)
    assert (plan.frame_bytes, plan.blocks_per_frame, plan.num_frames) == (768, (3, 8), 10)
    with pytest.raises(PlanError, match="blocks_per_frame: expected a divisor of the frame of 768 B that leaves at"):
        place_frames(groups, 4, 768, (4, 8))


def test_small_attention_blocks_sit_beside_states_of_megabytes():
    """Qwen3-Next: blocks of 16 tokens beside 36 states of 2 MiB, at 2 % over their own bytes; others need 1,056."""
    state = recurrent_state([("conv", (3, 8192), torch.bfloat16), ("recurrent", (32, 128, 128), torch.float32)])
    attention = full_attention(2, 256)
    specs = {f"layers.{i}": attention if i % 4 == 3 else state for i in range(48)}
    for memory in ("16GiB", "64GiB"):
        plan = plan_cache(specs, memory=memory, lengths=(512, 8192))
        assert plan.layout == "frames"
        own = [36 * 2_146_304 + 12 * length * 2048 for length in (512, 8192)]
        allocated = plan.considered[-1].bytes_per_sequence
        assert [round(a / o, 2) for a, o in zip(allocated, own, strict=True)] == [1.0, 1.0]
        assert {group.block_size for group in plan.groups} == {16}
        assert sum(not group.retention.is_fixed for group in plan.groups) == 1


def test_one_odd_layer_costs_no_more_than_itself():
    """30 + 10 + 5 alike layers and one odd draft layer: the reference makes 46 groups of it."""
    kinds = {"full": full_attention(8, 128), "window": sliding_window(8, 128, window=1024)}
    kinds["short"] = sliding_window(8, 128, window=128)
    specs = {
        f"layers.{name}.{i}": kinds[name]
        for name, count in (("window", 30), ("full", 10), ("short", 5))
        for i in range(count)
    }
    odd = sliding_window(8, 128, window=512)
    lengths = (512, 1024, 8192, 131072)
    before = plan_cache(specs, memory="64GiB", lengths=lengths)
    after = plan_cache({**specs, "draft.0": odd}, memory="64GiB", lengths=lengths)
    assert len(group_layers({**specs, "draft.0": odd}, "equal")) == 46
    assert len(after.groups) <= len(before.groups) + 1
    own = [odd.page_bytes * count for count in (32, 33, 33, 33)]
    taken = [next(e for e in plan.considered if e.layout == plan.layout) for plan in (before, after)]
    for length, old, new, more in zip(
        lengths, taken[0].bytes_per_sequence, taken[1].bytes_per_sequence, own, strict=True
    ):
        assert (new - old) / length <= more / length * 1.02


def test_the_proof_refuses_a_stride_that_readers_cannot_use():
    group = padded_group("a", [64])
    wide = {layer: replace(spec, block_stride_multiple=96) for layer, spec in group.layers.items()}
    plan = plan_cache([CacheGroup("a", wide, 16, group.retention)], num_frames=3, layout="buckets")
    assert plan.frame_bytes == lcm(96, 16) == 96
    placement = {"a0": replace(plan.placements["a0"], block_stride_bytes=80)}
    with pytest.raises(PlanError, match="layer 'a0': block_stride_bytes: expected a multiple of 96, got 80"):
        replace(plan, placements=placement, fingerprint="")
