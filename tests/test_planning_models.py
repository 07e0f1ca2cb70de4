"""Every model plan of the reference planner: groups, bytes, addresses, bounds, block counts, demand."""

import pytest
from planning_data import LAYOUT, MODELS, STRATEGY, assert_runs, kind_of, layers_of

from kvstore.choose import group_layers
from kvstore.errors import PlanError
from kvstore.placement import lower_bound_bytes, overlay_bytes, pool_bytes_per_block
from kvstore.planner import plan_cache
from kvstore.score import consider

PLANS = {
    f"{case['id']}-{plan['layout']}": (case, plan)
    for case in MODELS.values()
    for plan in case["plans"]
    if not plan.get("refused")
}
REFUSED = {case["id"]: case for case in MODELS.values() if any(plan.get("refused") for plan in case["plans"])}


@pytest.mark.parametrize("key", PLANS)
def test_named_strategies_reproduce_the_reference(key):
    case, expected = PLANS[key]
    layers = layers_of(case)
    names = list(layers)
    groups = group_layers(layers, STRATEGY[expected["layout"]])
    assert [[names.index(layer) for layer in group.layers] for group in groups] == [
        group["layers"] for group in expected["groups"]
    ]
    assert [(kind_of(group), group.block_size, group.block_bytes) for group in groups] == [
        (group["kind"], group["block_size"], group["bytes"]) for group in expected["groups"]
    ]
    layout = LAYOUT[expected["layout"]]
    for fits in expected["num_blocks"]:
        plan = plan_cache(groups, memory=fits["memory_bytes"], layout=layout)
        assert (plan.bytes_per_block, plan.num_frames) == (expected["bytes_per_block"], fits["num_blocks"])
        if fits["memory_bytes"] == 2**34:
            assert plan.arena_bytes == expected["placement"]["allocation_bytes"]
            assert_runs(plan, expected["placement"]["runs"], names.__getitem__)
    bounds = expected["bounds"]
    assert lower_bound_bytes(groups) == bounds["lower_bound"]
    assert pool_bytes_per_block(groups) == bounds["buckets"]
    assert consider(groups, "buckets", (1024,), None).frame_bytes == bounds["buckets"]
    assert consider(groups, "bestfit", (1024,), None).frame_bytes == bounds["bestfit"]
    assert max(group.payload_bytes for group in groups) == bounds["payload"]
    demand = case["demand"]
    assert plan.blocks_needed(demand["max_length"], in_flight=demand["in_flight"]).tolist() == [
        [group["blocks_per_sequence"] for group in expected["groups"]]
    ]


@pytest.mark.parametrize("key", REFUSED)
def test_latent_pages_that_do_not_divide_are_not_made_equal(key):
    """The reference has no plan here; buckets and bestfit hold such groups, at the bytes its bounds say."""
    layers = layers_of(REFUSED[key])
    with pytest.raises(
        PlanError, match=r"do not divide those of layer .* and latent pages are not padded: use grouping"
    ):
        group_layers(layers, "equal")
    assert plan_cache(layers, memory="16GiB", layout="bestfit").bytes_per_block


@pytest.mark.parametrize("key", PLANS)
def test_auto_never_allocates_more_than_the_reference(key):
    """At every length, and 1 % less in all where groups differ in width by more than that."""
    case, expected = PLANS[key]
    layers = layers_of(case)
    lengths = (512, 1024, 8192, 131072)
    ours = plan_cache(layers, memory="16GiB", lengths=lengths)
    groups = group_layers(layers, STRATEGY[expected["layout"]])
    theirs = consider(groups, "overlay", lengths, 2**34)
    taken = next(entry for entry in ours.considered if entry.layout == ours.layout)
    assert theirs.frame_bytes == overlay_bytes(groups)
    for mine, other in zip(taken.bytes_per_sequence, theirs.bytes_per_sequence, strict=True):
        assert mine <= other


def test_v4_flash_packed_groups_and_their_frames():
    """Groups of the reference with one MTP layer, and what frames save on the same groups."""
    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132-mtp1"])
    lengths = (512, 8192)
    overlay = plan_cache(layers, memory="64GiB", grouping="packed", layout="overlay", lengths=lengths)
    assert sorted(group.block_bytes for group in overlay.groups) == [656_640, 823_680, 823_680, 870_912, 1_002_240]
    assert overlay.bytes_per_block == 1_002_240
    assert [round(size / 2**20, 1) for size in overlay.considered[0].bytes_per_sequence] == [26.8, 55.4]
    frames = plan_cache(layers, memory="64GiB", grouping="packed", layout="frames", lengths=lengths)
    short, long = (
        mine / theirs
        for mine, theirs in zip(
            frames.considered[0].bytes_per_sequence, overlay.considered[0].bytes_per_sequence, strict=True
        )
    )
    assert short <= 0.78
    assert long <= 0.90


def test_equal_page_sizes_of_early_releases_and_the_gain_of_buckets():
    """Window and state pages padded to the main group's sizes: 1,051,776 B before PR #44454, 1,039,680 B with it."""
    from dataclasses import replace

    from kvstore.placement import bytes_before_buckets

    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132-mtp1"])
    main = sorted({spec.page_bytes for spec in layers.values() if spec.kind == "latent"})
    padded = {
        layer: replace(spec, padded_page_bytes=min(size for size in main if size >= spec.page_bytes))
        for layer, spec in layers.items()
    }
    plan = plan_cache(padded, memory="64GiB", grouping="packed", layout="buckets")
    assert (plan.bytes_per_block, bytes_before_buckets(plan.groups)) == (1_039_680, 1_051_776)
    before = 2**36 // 1_051_776
    assert round(100 * (plan.num_frames / before - 1), 2) == 1.16
