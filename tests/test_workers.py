"""Plans for several workers: same groups, same blocks per frame, same number of frames; contradictions refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_data import MODELS, layers_of
from strategies import brute_force_pages_do_not_touch, specs_of_any_kind

from kvstore.errors import PlanError
from kvstore.layers import full_attention, latent, sliding_window
from kvstore.plan import CachePlan
from kvstore.planner import plan_cache
from kvstore.score import LAYOUTS
from kvstore.spec_json import specs_to_dicts
from kvstore.specs import Alias, NoCache
from kvstore.workers import count_replicas, plan_workers

ROOT = Path(__file__).parent.parent
FULL, WINDOW = full_attention(2, 8), sliding_window(2, 8, window=64)


def assert_alike(plans):
    """What one rank's books need of the others'."""
    first = plans[0]
    for plan in plans:
        assert [(g.name, g.block_size, g.retention) for g in plan.groups] == [
            (g.name, g.block_size, g.retention) for g in first.groups
        ]
        assert (plan.num_frames, plan.blocks_per_frame, plan.layout) == (
            first.num_frames,
            first.blocks_per_frame,
            first.layout,
        )


@given(specs_of_any_kind(demands=True), st.integers(1, 4), st.sampled_from(["auto", *LAYOUTS]), st.data())
@settings(max_examples=80, deadline=None)
def test_any_layers_over_any_ranks(specs, num_ranks, layout, data):
    ranks = [{} for _ in range(num_ranks)]
    for layer, spec in specs.items():
        for rank in data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1)):
            ranks[rank][layer] = spec
    plans = plan_workers(ranks, num_frames=4, layout=layout, lengths=(1, 30))
    assert_alike(plans)
    for rank, plan in zip(ranks, plans, strict=True):
        assert set(plan.layers) == set(rank)
        brute_force_pages_do_not_touch(plan)
        assert CachePlan.from_json(plan.to_json()) == plan
        plan.explain()


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipeline_stages_of_a_model_with_groups_of_unlike_width(stages):
    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132"])
    ranks = [{} for _ in range(stages)]
    for layer, spec in layers.items():
        ranks[int(layer.split(".")[1]) * stages // 43][layer] = spec
    plans = plan_workers(ranks, memory="16GiB", lengths=(512, 8192, 131072))
    assert_alike(plans)
    assert plans[0].layout == "frames"
    assert all(plan.arena_bytes <= 2**34 for plan in plans)
    alone = [plan_cache(rank, memory="16GiB", lengths=(512, 8192, 131072)).capacity(8192) for rank in ranks]
    assert plans[0].capacity(8192).num_tokens >= 0.95 * min(fits.num_tokens for fits in alone)


def test_the_least_memory_decides_for_all():
    plans = plan_workers([{"a": FULL}, {"b": FULL}], memory=["1MiB", 10 * FULL.page_bytes])
    assert [plan.num_frames for plan in plans] == [10, 10]
    assert plans[0].arena_bytes == 10 * FULL.page_bytes


def test_a_rank_without_layers_counts_blocks_and_has_no_bytes():
    plans = plan_workers([{"a": FULL, "b": WINDOW}, {"x": NoCache()}], memory="1MiB")
    assert_alike(plans)
    assert (plans[1].arena_bytes, plans[1].num_blocks, plans[1].uncached) == (0, plans[0].num_blocks, ("x",))
    assert plans[1].capacity(100).num_sequences == plans[0].capacity(100).num_sequences


def test_models_without_layers_at_all():
    for plan in plan_workers([{}, {}], memory=0):
        assert (plan.num_frames, plan.groups) == (1, ())


def test_aliases_stay_on_the_rank_of_their_owner():
    plans = plan_workers([{"a": FULL, "b": Alias("a")}, {"c": FULL}], num_frames=4)
    assert [dict(plan.aliases) for plan in plans] == [{"b": "a"}, {}]


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ([], {"num_frames": 4}, "models: expected a list with the specs of each rank"),
        ({"a": FULL}, {"num_frames": 4}, "models: expected a list with the specs of each rank"),
        (
            [{"a": FULL}, {"a": WINDOW}],
            {"num_frames": 4},
            "rank 0 and rank 1 differ in kind 'full' and 'sliding_window'",
        ),
        (
            [{"a": FULL}, {"b": FULL}, {"b": replace(FULL, block_size=32)}],
            {"num_frames": 4},
            "layer 'b': expected one spec, rank 1 and rank 2 differ in block_size 16 and 32",
        ),
        ([{"a": FULL}, {"b": Alias("a")}], {"num_frames": 4}, "got 'a'; layer 'a' lies on rank 0"),
        ([{"a": FULL}, {"b": 16}], {"num_frames": 4}, "rank 1: specs: layer 'b': expected a LayerSpec, got 16"),
        ([{"a": FULL}], {"memory": ["1GiB", "1GiB"]}, "memory: expected one budget or one per rank, 1 in all, got 2"),
        ([{"a": FULL}, {"b": FULL}], {"memory": ["1GiB", 0]}, "rank 1: memory: one token needs 1 frames of"),
        ([{"a": FULL}], {}, "expected exactly one of memory and num_frames"),
        ([{"a": FULL}], {"num_frames": 4, "layout": "tight"}, "layout: expected one of auto"),
    ],
)
def test_ranks_that_contradict_are_refused(models, options, message):
    with pytest.raises(PlanError) as refused:
        plan_workers(models, **options)
    assert message in str(refused.value)


def test_replicas_follow_from_shards():
    gqa = replace(FULL, num_shards=2)
    assert count_replicas({"a": latent()}, 8) == 8
    assert count_replicas({"a": latent(), "b": gqa}, 8) == 4
    assert count_replicas({"a": latent(), "b": FULL}, 8) == 1
    assert count_replicas({}, 8) == 1
    with pytest.raises(PlanError, match="tensor_parallel: expected an integer >= 1, got 0"):
        count_replicas({}, 0)


WORKER = """
import json, sys
import torch.distributed as distributed
import kvstore
from kvstore.spec_json import specs_from_dicts
rank, size, rendezvous, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
distributed.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=size)
model = specs_from_dicts(json.load(open(f"{folder}/specs{rank}.json")))
answers = [kvstore.plan_distributed(model, memory=2**20 * (8 - rank), lengths=[64, 512]).to_json()]
unlike = {"layout": "overlay" if rank else "buckets"}
for specs, options in ((dict(model, x=7) if rank == 2 else model, {}), (model, unlike)):
    try:
        kvstore.plan_distributed(specs, memory=2**20, **options)
        answers.append("no error")
    except kvstore.PlanError as error:
        answers.append(str(error))
json.dump(answers, open(f"{folder}/answer{rank}.json", "w"))
distributed.destroy_process_group()
"""


def test_four_processes_agree_over_gloo(tmp_path):
    """Two stages of two ranks; one unreadable model and unequal options are refused on all of them, none hangs."""
    stages = [{"a": FULL, "b": WINDOW, "c": WINDOW}, {"d": FULL, "e": WINDOW, "f": WINDOW}]
    models = [stages[0], stages[0], stages[1], stages[1]]
    for rank, model in enumerate(models):
        (tmp_path / f"specs{rank}.json").write_text(json.dumps(specs_to_dicts(model)))
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), "4", str(tmp_path / "rendezvous"), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    answers = [json.loads((tmp_path / f"answer{rank}.json").read_text()) for rank in range(4)]
    plans = [CachePlan.from_json(answer[0]) for answer in answers]
    assert plans == plan_workers(models, memory=[2**20 * (8 - rank) for rank in range(4)], lengths=[64, 512])
    assert_alike(plans)
    for answer in answers:
        assert answer[1] == "rank 2: layer 'x': expected a LayerSpec, Alias or NoCache, got 7"
        assert answer[2].startswith("options: expected equal ones on every rank, got ")
