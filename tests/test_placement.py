"""Buckets, layer slots and slot tensors: the layout "buckets", to the letter and to known figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from strategies import cache_groups
from strategies import padded_group as group

from kvstore.choose import group_layers
from kvstore.errors import PlanError
from kvstore.layers import full_attention, latent
from kvstore.placement import (
    LayerSlot,
    Placement,
    bucket_layers_by_page_size,
    bytes_before_buckets,
    lower_bound_bytes,
    place_buckets,
    pool_bytes_per_block,
)
from kvstore.planner import plan_cache

K13 = next(
    case
    for case in json.loads((Path(__file__).parent / "data/planning_cases.json").read_text())["cases"]
    if case["id"] == "K13"
)


def v4_flash_groups(indexer, small_states, large_states):
    """DeepSeek-V4-Flash with MTP: pages of its five groups; rows of FlashMLA, `indexer` bytes of indexer page."""
    return [
        group("compressed", [37_440] * 21 + [indexer] * 21 + [1_728] * 20, block_size=256),
        group("window_a", [37_440] * 22, block_size=64, window=128),
        group("window_b", [37_440] * 22, block_size=64, window=128),
        group("states_4_", [large_states] * 21 + [small_states] * 21, block_size=4, window=8),
        group("states_128_", [large_states] * 20, block_size=8, window=128),
    ]


def test_one_page_size_gives_one_bucket_with_a_layer_of_each_group_in_a_slot():
    groups = [group("a", [512] * 3), group("b", [512] * 2, window=4), group("c", [512], block_size=32)]
    assert bucket_layers_by_page_size(groups) == {512: [["a0", "b0", "c0"], ["a1", "b1"], ["a2"]]}
    assert pool_bytes_per_block(groups) == 3 * 512 == lower_bound_bytes(groups)


def test_mixed_page_sizes_count_slots_per_group_and_size_in_insertion_order():
    groups = [group("a", [512, 256, 512, 1024]), group("b", [256, 512, 256, 256])]
    buckets = bucket_layers_by_page_size(groups)
    assert buckets == {512: [["a0", "b1"], ["a2"]], 256: [["a1", "b0"], ["b2"], ["b3"]], 1024: [["a3"]]}
    assert list(buckets) == [512, 256, 1024]
    assert pool_bytes_per_block(groups) == 2 * 512 + 3 * 256 + 1024


def test_no_groups_take_no_bytes():
    assert bucket_layers_by_page_size([]) == {}
    assert pool_bytes_per_block([]) == lower_bound_bytes([]) == 0


def test_case_k13():
    groups = [group(f"g{number}_", pages) for number, pages in enumerate(K13["group_pages"])]
    slots = {str(page): len(layers) for page, layers in bucket_layers_by_page_size(groups).items()}
    assert slots == K13["expect"]["slots"]
    assert pool_bytes_per_block(groups) == K13["expect"]["buckets"] == 216_576
    assert lower_bound_bytes(groups) == K13["expect"]["lower_bound"] == 187_200


@pytest.mark.parametrize(
    ("indexer", "small_states", "large_states", "expected"),
    [
        pytest.param(8_640, 8_640, 32_832, 1_729_152, id="exact-132-byte-indexer-rows"),
        pytest.param(4_608, 8_640, 32_832, 1_825_920, id="exact-68-byte-indexer-rows"),
        pytest.param(8_640, 8_640, 37_440, 1_039_680, id="padded-132-byte-indexer-rows"),
        pytest.param(4_608, 37_440, 37_440, 1_703_808, id="padded-68-byte-indexer-rows"),
    ],
)
def test_v4_flash(indexer, small_states, large_states, expected):
    assert pool_bytes_per_block(v4_flash_groups(indexer, small_states, large_states)) == expected


def test_v4_flash_slots_and_the_rule_before_the_pull_request():
    groups = v4_flash_groups(8_640, 8_640, 37_440)
    slots = {page: len(layers) for page, layers in bucket_layers_by_page_size(groups).items()}
    assert slots == {37_440: 22, 8_640: 21, 1_728: 20}
    before, now = bytes_before_buckets(groups), pool_bytes_per_block(groups)
    print(f"V4-Flash, bytes per block: buckets {now:,}, rule before {before:,}")
    assert (before, now) == ((37_440 + 8_640 + 1_728) * 22, 1_039_680)
    assert before == 1_051_776


def test_o01_pages_that_do_not_divide_take_a_bucket_each():
    groups = [group("attention", [12_416]), group("state", [12_648_448], window=8)]
    assert bucket_layers_by_page_size(groups) == {12_416: [["attention0"]], 12_648_448: [["state0"]]}
    plan = plan_cache(groups, num_frames=3)
    assert plan.arena_bytes == 3 * (12_416 + 12_648_448)


def test_o04_layers_dealt_round_leave_no_slot_empty():
    dealt = [group("full", [512]), group("window_a", [512], window=8), group("window_b", [512], window=8)]
    assert [len(slots) for slots in bucket_layers_by_page_size(dealt).values()] == [1]
    runs = [group("full", [512]), group("window", [512] * 2, window=8)]
    assert bucket_layers_by_page_size(runs) == {512: [["full0", "window0"], ["window1"]]}


def test_slot_tensors_lie_behind_one_another_with_dense_pages():
    groups = [group("a", [512, 512, 256]), group("b", [512], block_size=32)]
    layer_slots, placements = place_buckets(groups, 10)
    assert layer_slots == (
        LayerSlot(512, 0, ("a0", "b0"), 0, 5120),
        LayerSlot(512, 1, ("a1",), 5120, 5120),
        LayerSlot(256, 0, ("a2",), 10_240, 2560),
    )
    assert placements == {
        "a0": Placement(0, 0, 512),
        "b0": Placement(0, 0, 512),
        "a1": Placement(1, 0, 512),
        "a2": Placement(2, 0, 256),
    }


def test_groups_of_different_rows_share_a_slot_tensor_when_their_pages_are_equal():
    groups = group_layers({"kv": full_attention(2, 72, block_size=16), "latent": latent(144, 128, block_size=32)})
    assert bucket_layers_by_page_size(groups) == {9216: [["kv", "latent"]]}


@given(cache_groups())
@settings(max_examples=60, deadline=None)
def test_every_slot_holds_one_layer_per_group_of_its_page_size(groups):
    buckets = bucket_layers_by_page_size(groups)
    page_bytes = {layer: spec.page_bytes for group in groups for layer, spec in group.layers.items()}
    placed = [layer for slots in buckets.values() for layers in slots for layer in layers]
    assert sorted(placed) == sorted(page_bytes)
    for size, slots in buckets.items():
        most = max(sum(spec.page_bytes == size for spec in group.layers.values()) for group in groups)
        assert len(slots) == most
        for layers in slots:
            assert {page_bytes[layer] for layer in layers} == {size}
            assert all(len(group.layers.keys() & set(layers)) <= 1 for group in groups)
    assert pool_bytes_per_block(groups) == sum(size * len(slots) for size, slots in buckets.items())
    assert lower_bound_bytes(groups) <= pool_bytes_per_block(groups) <= bytes_before_buckets(groups)


@pytest.mark.parametrize(
    "act", [bucket_layers_by_page_size, pool_bytes_per_block, lambda groups: place_buckets(groups, 2)]
)
def test_a_layer_in_two_groups_is_refused(act):
    first = group("a", [512])
    with pytest.raises(PlanError, match="layer 'a0': expected in one group, got it in 'a' and 'b'"):
        act([first, replace(first, name="b")])


def test_no_frames_are_refused():
    with pytest.raises(PlanError, match="num_frames: expected an integer >= 1, got 0"):
        place_buckets([group("a", [512])], 0)
