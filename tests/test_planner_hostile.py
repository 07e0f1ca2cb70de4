"""Hostile and odd input to the planner: each of these once gave another exception, a wrong plan, or a long wait."""

import copy
import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvstore as k
from kvstore import grouping
from kvstore.cli import main
from kvstore.demand import InFlight, blocks_of_sequence
from kvstore.explain import why_taken
from kvstore.grouping import deal_groups, groups_within
from kvstore.plan import _digest
from kvstore.specs import Retention

FULL = k.full_attention(2, 64)
HIDDEN = k.LayerSpec("hidden_state", 16, FULL.format)


@pytest.fixture
def plan():
    return k.plan_cache({"a": FULL, "b": k.sliding_window(2, 64, window=64)}, num_frames=8, layout="overlay")


def test_a_much_better_layout_is_not_passed_over_for_one_length():
    def full(heads):
        return k.full_attention(heads, 128, block_size=32)

    def window(heads):
        return k.sliding_window(heads, 128, block_size=32, window=1024)

    specs = {"a": full(4), "b": full(2), "c": full(8), "d": window(8), "e": window(2), "g": window(8)}
    plan = k.plan_cache(specs, memory="64MiB")
    frames = k.plan_cache(specs, memory="64MiB", layout="frames")
    assert plan == frames
    assert plan.max_length() > 7_000
    assert why_taken(plan) == "frames, the least score"
    assert plan.explain().count(" *") == 1 + plan.explain().count("  * taken")


@pytest.mark.parametrize("grouping", ["auto", "uniform", "equal", "packed"])
def test_hidden_states_never_share_a_group(grouping):
    layers = {"a": HIDDEN, "b": HIDDEN, "c": FULL}
    assert sorted(map(list, (group.layers for group in k.group_layers(layers, grouping)))) == [["a"], ["b"], ["c"]]


def test_numpy_numbers_are_numbers(plan):
    assert (plan.blocks_needed(np.array([16, 17])) == plan.blocks_needed([16, 17])).all()
    assert (plan.blocks_needed(np.int64(16)) == plan.blocks_needed(16)).all()
    assert plan.capacity(np.int32(16)) == plan.capacity(16)
    assert k.plan_cache({"a": FULL}, num_frames=4, lengths=np.array([512])).lengths == (512,)


def test_every_step_in_flight_has_a_tail_of_its_own():
    window = Retention("sliding_window", window=1024)
    assert blocks_of_sequence(window, 16, 10**5, InFlight(2 * 8192, "tail")) == 2 * 65
    assert blocks_of_sequence(window, 16, 10**5, InFlight(2 * 8192, "tail", num_steps=2)) == 3 * 65
    assert blocks_of_sequence(Retention("sliding_window", window=2), 1, 9, InFlight(4, "tail", num_steps=2)) == 3


def test_layers_without_a_cache_pass_through_promotion():
    specs = {"a": FULL, "b": k.sliding_window(2, 64, window=8), "c": k.Alias("b"), "d": k.NoCache()}
    promoted = k.promote_windows(specs)
    assert list(promoted) == list(specs)
    assert (promoted["c"], promoted["d"], promoted["b"].retention) == (specs["c"], specs["d"], Retention("full"))
    with pytest.raises(k.PlanError, match="expected a LayerSpec, got 5"):
        k.promote_windows({"a": 5})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": FULL, "b": k.Alias("a")}, {"b": FULL}),
        ({"a": FULL, "d": FULL, "b": k.Alias("a")}, {"a": FULL, "d": FULL, "b": k.Alias("d")}),
        ({"b": k.NoCache()}, {"b": FULL}),
    ],
)
def test_ranks_that_differ_in_aliases_contradict_each_other(one, other):
    with pytest.raises(k.PlanError, match="layer 'b': expected one spec, rank 0 and rank 1 differ in kind"):
        k.plan_workers([one, other], num_frames=4)


def test_the_search_for_a_width_deals_few_times(monkeypatch):
    """Once a deal per number of groups: minutes for thousands of layers."""
    dealt = []
    deal = grouping.deal_layers
    monkeypatch.setattr(grouping, "deal_layers", lambda layers, count: dealt.append(count) or deal(layers, count))
    windows = {f"w{i}": k.sliding_window(1 + i % 5, 64, window=64) for i in range(1_500)}
    full = {f"full{i}": k.full_attention(16, 64, block_size=16) for i in range(4)}
    k.group_layers(full | windows, "packed")
    states = {f"state{i}": k.recurrent_state([("s", (1 + i % 7, 100), torch.float32)]) for i in range(500)}
    k.plan_cache({"full0": FULL} | states, memory="64GiB")
    assert len(dealt) < 200


def test_the_fewest_groups_within_a_width():
    layers = {f"l{i}": k.full_attention(1 + i % 3, 64) for i in range(40)}
    for most in (3, 4, 7, 20, 60, 200):
        count = groups_within(layers, most * 4096)
        widths = [sum(s.page_bytes for s in g.layers.values()) for g in _dealt(layers, count)]
        assert max(widths) <= most * 4096
        assert count == 1 or max(sum(s.page_bytes for s in g.layers.values()) for g in _dealt(layers, count - 1)) > (
            most * 4096
        )
    assert groups_within(layers, 4096) == 40


def _dealt(layers, count):
    return deal_groups([(layers, count)])


def test_block_ids_stay_in_int32_however_large_the_memory():
    plan = k.plan_cache({"a": k.full_attention(1, 4, block_size=1)}, memory="64GiB")
    assert plan.num_frames == 2**31
    assert plan.arena_bytes < 2**36


def test_plans_keep_no_list_of_a_caller(plan):
    groups = list(plan.groups)
    twin = replace(plan, groups=groups, blocks_per_frame=list(plan.blocks_per_frame), fingerprint="")
    groups.clear()
    assert twin == plan
    assert hash(twin) == hash(plan)
    group = pickle.loads(pickle.dumps(plan.groups[0]))
    assert group == copy.deepcopy(plan.groups[0]) == plan.groups[0]


def reseal(document, **changes):
    document = {**document, **changes}
    document.pop("checksum")
    return json.dumps(document | {"checksum": _digest(document)})


def test_resealed_nonsense_is_refused(plan):
    document = json.loads(plan.to_json())
    k.CachePlan.from_json(reseal(document))
    entry = document["considered"][0]
    for considered in ([entry | {"score": float("nan")}], [entry | {"score": float("inf")}], [entry | {"layout": "x"}]):
        with pytest.raises(k.PlanError):
            k.CachePlan.from_json(reseal(document, considered=considered))
    with pytest.raises(k.PlanError, match="field twice"):
        k.CachePlan.from_json('{"num_frames":77,' + plan.to_json()[1:])


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: plan.blocks_needed(10**30),
        lambda plan: plan.blocks_needed(None),
        lambda plan: plan.blocks_needed(1.5),
        lambda plan: plan.blocks_needed(b"x"),
        lambda plan: plan.blocks_needed(4, num_steps=0),
        lambda plan: k.plan_cache({"a": FULL}, memory=10**30),
        lambda plan: k.plan_cache({"a": FULL}, memory="99999999999999999999999999TiB"),
        lambda plan: k.plan_cache({"a": FULL}, memory="\u0661GiB"),
        lambda plan: k.plan_cache({"a": FULL}, num_frames=4, lengths=np.array(5)),
        lambda plan: k.plan_cache({"a": FULL}, num_frames=4, lengths=[10**320]),
        lambda plan: k.plan_cache({"a": FULL}, num_frames=4, tensor_parallel=True),
        lambda plan: k.plan_cache({}, num_frames=-7),
        lambda plan: k.plan_cache({}, num_frames="abc"),
        lambda plan: k.plan_cache({"a": FULL, "": k.Alias("a")}, num_frames=4),
        lambda plan: k.plan_cache({"a\ud800": FULL}, num_frames=4),
        lambda plan: k.group_layers({"a": FULL}, lengths=[]),
        lambda plan: k.group_layers({"a": FULL}, lengths=["x"]),
        lambda plan: k.group_layers({"a": FULL}, lengths=None),
        lambda plan: k.group_layers({"a": FULL}, lengths=b"x"),
        lambda plan: k.group_layers({"a": FULL}, memory=-1),
        lambda plan: k.group_layers({"a": FULL}, memory=True),
        lambda plan: k.group_layers({"a": FULL}, memory=1.5),
        lambda plan: k.bucket_layers_by_page_size(None),
        lambda plan: k.pool_bytes_per_block(None),
        lambda plan: k.recurrent_state([(b"x", (4,), torch.float32)]),
        lambda plan: k.specs_from_config("x" * 300),
        lambda plan: k.specs_from_config(type("Config", (), {"to_dict": lambda self: {}})),
        lambda plan: k.specs_from_json([{"name": "a", "kind": "alias", "of": "b", "block_size": "junk"}]),
        lambda plan: replace(plan, considered=(5,), fingerprint=""),
        lambda plan: replace(plan, lengths=5, fingerprint=""),
        lambda plan: replace(plan, groups=None, fingerprint=""),
        lambda plan: replace(plan, placements={"a": 5}, fingerprint=""),
        lambda plan: replace(plan, uncached=("x",), aliases={"x": "a"}, fingerprint=""),
    ],
)
def test_mistakes_are_plan_errors(plan, call):
    with pytest.raises(k.PlanError):
        call(plan)


def test_a_plot_of_a_plan_that_holds_nothing_long_is_drawn(tmp_path):
    specs = tmp_path / "specs.json"
    layer = {"name": "a", "kind": "full", "block_size": 16, "kv_heads": 2, "head_dim": 64, "dtype": "bf16"}
    specs.write_text(json.dumps([layer]))
    out = tmp_path / "plan.svg"
    assert main(["plan", "--specs", str(specs), "--frames", "2", "--plot", str(out)]) == 0
    assert re.search("no sequence fits", out.read_text())
