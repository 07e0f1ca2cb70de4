"""plan_cache: models, budgets and known figures; any plan it makes is safe."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MIXED, cache_groups

from kvstore.choose import group_layers
from kvstore.errors import OutOfBlocks, PlanError
from kvstore.layers import full_attention, sliding_window
from kvstore.memory import format_bytes
from kvstore.placement import bucket_layers_by_page_size, pool_bytes_per_block
from kvstore.plan import CachePlan
from kvstore.planner import plan_cache

DATA = Path(__file__).parent / "data"
CASES = {case["id"]: case for case in json.loads((DATA / "planning_cases.json").read_text())["cases"]}
LLAMA = "llama-3.1-8b"


@pytest.fixture
def plan():
    return plan_cache(MIXED, num_frames=10, layout="buckets", grouping="uniform")


@given(cache_groups(), st.integers(5, 9), st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_buckets_of_any_groups_fill_their_budget(groups, num_frames, spare):
    per_block = pool_bytes_per_block(groups)
    memory = num_frames * per_block + spare % per_block
    plan = plan_cache(groups, memory=memory, layout="buckets")
    assert plan.num_frames == num_frames
    assert plan.num_blocks == (num_frames,) * len(groups)
    assert plan.bytes_per_block == per_block >= plan.lower_bound == max(group.block_bytes for group in groups)
    assert plan.arena_bytes == num_frames * per_block <= memory < plan.arena_bytes + per_block
    assert plan == plan_cache(groups, num_frames=num_frames, layout="buckets")


@pytest.mark.parametrize("case", ["C1", "C2", "C4", "C8", "C12"])
def test_small_cases_of_the_reference_planner(case):
    case = CASES[case]
    makers = {"full": full_attention, "sliding_window": sliding_window}
    specs = {}
    for layer, name in case["layers"]:
        spec = case["specs"][name]
        window = {"window": spec["window"]} if "window" in spec else {}
        specs[layer] = makers[spec["kind"]](spec["kv_heads"], spec["head_dim"], dtype=torch.float32, **window)
    plan = plan_cache(specs, memory=case["memory_bytes"], layout="buckets")
    expect = case["expect"]
    assert plan.num_frames == expect["num_blocks"]
    assert plan.bytes_per_block == expect["bytes_per_block"]
    assert [list(group.layers) for group in plan.groups] == [group["layers"] for group in expect["groups"]]
    assert [group.block_bytes for group in plan.groups] == [group["bytes"] for group in expect["groups"]]
    assert plan.arena_bytes == expect.get("allocation_bytes", 0)
    for run in expect["runs"]:
        for index, layer in enumerate(run["layers"]):
            place = plan.placements[layer]
            start = plan.layer_slots[place.layer_slot].offset_bytes + place.offset_bytes
            assert start == run["offset_bytes"] + index * run["layer_stride_bytes"]
            assert place.block_stride_bytes == run["block_stride_bytes"]


def test_a_third_page_size_makes_buckets_of_different_length(plan):
    buckets = bucket_layers_by_page_size(plan.groups)
    assert {page: len(slots) for page, slots in buckets.items()} == {65_536: 1, 32_768: 1, 81_920: 1}
    specs = {**MIXED, "layers.4.attn": full_attention(8, 64)}
    wider = plan_cache(specs, num_frames=10, layout="buckets", grouping="uniform")
    assert [slot.page_bytes for slot in wider.layer_slots] == [65_536, 32_768, 32_768, 81_920]
    assert wider.bytes_per_block == 65_536 + 2 * 32_768 + 81_920 == plan.bytes_per_block + 32_768


def test_o07_planned_bytes_are_the_allocated_bytes():
    """A side cache of 132 B beside a main row of 656 B: both are in the bytes per token, and in the arena."""
    block = {"block_size": 64}
    main, side = (full_attention(1, size // 4, **block) for size in (656, 132))
    plan = plan_cache({"main": main, "side": side}, memory="1GiB")
    assert plan.bytes_per_block == 64 * 788
    assert sum(torch.empty(slot.num_bytes, dtype=torch.uint8, device="meta").numel() for slot in plan.layer_slots) == (
        plan.arena_bytes
    )
    assert plan.arena_bytes == plan.num_frames * 64 * 788 <= 2**30 < plan.arena_bytes + 64 * 788


@pytest.mark.parametrize("model", [{}, [], {"model_type": "llama", "num_hidden_layers": 0, "num_attention_heads": 1}])
@pytest.mark.parametrize("size", [{"memory": 0}, {"memory": "8GiB"}, {"num_frames": 1}, {"num_frames": 64}], ids=str)
def test_o08_no_layers_make_a_plan_with_its_null_block_only(model, size):
    if "model_type" in model:
        model |= {"hidden_size": 8}
    plan = plan_cache(model, **size)
    assert (plan.groups, plan.layer_slots, dict(plan.placements)) == ((), (), {})
    assert (plan.num_frames, plan.num_blocks, plan.arena_bytes, plan.bytes_per_block) == (1, (), 0, 0)
    assert CachePlan.from_json(plan.to_json()) == plan
    assert plan.explain() == "No layer keeps a cache: 0 B, 1 block (the null block)."


def test_the_smallest_budget_holds_one_token():
    """One token of MIXED holds a block of each of three groups, beside the null block."""
    per_block = pool_bytes_per_block(group_layers(MIXED))
    assert plan_cache(MIXED, memory=4 * per_block, layout="buckets").num_frames == 4
    message = (
        f"memory: one token needs 3 frames of {format_bytes(per_block)} (buckets), beside the null frame: "
        f"expected at least {format_bytes(4 * per_block)}, got {format_bytes(4 * per_block - 1)}"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_cache(MIXED, memory=4 * per_block - 1, layout="buckets")


def test_model_forms_agree(plan):
    groups = group_layers(MIXED, "uniform")
    assert plan_cache(groups, num_frames=10, layout="buckets") == plan
    assert plan_cache(tuple(groups), num_frames=10, layout="buckets") == plan
    assert plan_cache(MIXED, num_frames=10, grouping="uniform", layout="buckets") == plan
    from_file = plan_cache(LLAMA, num_frames=4, block_size=32, kv_dtype="fp16", tensor_parallel=2)
    specs = {f"layers.{i}.attn": full_attention(4, 128, block_size=32, dtype=torch.float16) for i in range(32)}
    assert from_file == plan_cache(specs, num_frames=4)


def test_plan_answers_for_a_layer(plan):
    assert [plan.group_index(layer) for layer in MIXED] == [0, 1, 0, 2]
    assert {layer: plan.spec(layer) for layer in MIXED} == MIXED
    for ask in (plan.group_index, plan.spec):
        with pytest.raises(PlanError, match=r"layer: expected one of the plan's 4 layers, got 'layers\.9\.attn'"):
            ask("layers.9.attn")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected exactly one of memory and num_frames, got None and None"),
        ({"memory": "1GiB", "num_frames": 4}, "expected exactly one of memory and num_frames, got '1GiB' and 4"),
        ({"num_frames": 1}, "num_frames: expected an integer >= 2, got 1"),
        ({"num_frames": 4.0}, "num_frames: expected an integer, got 4.0 of type float"),
        (
            {"num_frames": 2**31 + 1},
            "num_frames: expected an integer in [1, 2147483647], got 2147483649",
        ),
        ({"num_frames": 4, "layout": "tight"}, "layout: expected one of auto, buckets, bestfit, overlay, frames"),
        ({"num_frames": 4, "grouping": "tight"}, "grouping: expected one of auto, uniform, equal, packed, got 'tight'"),
        ({"num_frames": 4, "lengths": ()}, "lengths: expected at least one number of tokens, got ()"),
        ({"num_frames": 4, "lengths": "8k"}, "lengths: expected at least one number of tokens, got '8k'"),
        ({"num_frames": 4, "lengths": [0]}, "lengths: expected an integer in [1, 1099511627776], got 0"),
        ({"num_frames": 4, "lengths": [float("nan")]}, "lengths: expected an integer, got nan of type float"),
        ({"num_frames": 4, "max_tokens_in_flight": -1}, "max_tokens_in_flight: expected an integer >= 0, got -1"),
        ({"num_frames": 4, "frame_bytes": 4096}, "frame_bytes: expected only with layout 'frames', got 4096 and"),
        (
            {"num_frames": 4, "frame_bytes": 4096, "layout": "frames"},
            "frame_bytes: expected at least the 65536 B of a block of group 'window1024_b32' and a multiple of its "
            "stride demand, 16 B, got 4096",
        ),
        ({"num_frames": 4, "state_dtype": "fp32"}, "state_dtype: expected only with a model config, got 'fp32'"),
        ({"num_frames": 4, "kv_dtype": "fp16"}, "kv_dtype: expected only with a model config, got 'fp16'"),
        ({"num_frames": 4, "block_size": 1}, "block_size: expected only with a model config, got 1"),
        ({"num_frames": 4, "tensor_parallel": 2}, "tensor_parallel: expected only with a model config, got 2"),
        ({"num_frames": 4, "model": [MIXED]}, "groups: expected CacheGroups, got {"),
        ({"num_frames": 4, "model": {**MIXED, "x": 16}}, "layer 'x': expected a LayerSpec, got 16"),
        ({"num_frames": 4, "model": 16}, "config: expected a mapping, the path of a JSON file or folder"),
        (
            {"num_frames": 4, "model": group_layers(MIXED), "grouping": "uniform"},
            "grouping: expected 'auto' with groups that are given, got 'uniform'",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    model = arguments.pop("model", {"layers.0.attn": MIXED["layers.1.attn"]})
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_cache(model, **arguments)


def test_out_of_blocks_tells_the_counts_of_each_group():
    error = OutOfBlocks(wanted=[3, 0], free=[1, 1], evictable=[0, 1], fenced=[2, 2])
    assert (error.wanted, error.free, error.evictable, error.fenced) == ((3, 0), (1, 1), (0, 1), (2, 2))
    assert str(error) == (
        "out of blocks, counted per group: wanted [3, 0], free [1, 1], evictable [0, 1], fenced [2, 2]"
    )


def test_a_fixed_layout_may_grow_the_blocks_of_a_config_that_names_none():
    """Where frames are not allowed, 16-token blocks beside states of megabytes would take nine times their bytes."""
    config = "nemotron-h-8b"
    grown = plan_cache(config, memory="64GiB", layout="overlay")
    equal = plan_cache(config, memory="64GiB", layout="overlay", grouping="equal")
    assert grown == equal
    assert {group.block_size for group in grown.groups if group.retention.kind == "full"} == {1040}
    kept = plan_cache(config, memory="64GiB", layout="overlay", block_size=16)
    assert {group.block_size for group in kept.groups} == {16}
    assert kept.considered[0].score > 4 > 1.1 > grown.considered[0].score
    frames = plan_cache(config, memory="64GiB")
    assert (frames.layout, {group.block_size for group in frames.groups}) == ("frames", {16})


def test_a_plan_is_printed_in_one_line(plan):
    assert repr(plan) == (
        f"CachePlan(buckets, 3 groups, 4 layers, 10 frames of 180224 B, fingerprint {plan.fingerprint[:12]})"
    )
