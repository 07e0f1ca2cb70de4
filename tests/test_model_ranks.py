"""Tensor-parallel ranks, pipeline stages and draft layers."""

import json
import re

import pytest

from kvstore.errors import PlanError
from kvstore.models import specs_from_config
from kvstore.models.bundled import CONFIGS
from kvstore.models.stages import stage_ranges

LLAMA = {"model_type": "llama", "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("tensor_parallel", "heads", "num_shards"), [(1, 4, None), (2, 2, None), (4, 1, None), (8, 1, 4), (16, 1, 4)]
)
def test_kv_heads_are_divided_or_replicated(tensor_parallel, heads, num_shards):
    for spec in specs_from_config(LLAMA, tensor_parallel=tensor_parallel).values():
        assert spec.format.parts[0].num_heads == heads
        assert spec.num_shards == num_shards


def test_a_replicated_head_of_several_widths_is_counted_per_layer():
    config = {"model_type": "mimo_v2_flash", "num_hidden_layers": 6}
    specs = specs_from_config(config, tensor_parallel=8)
    assert [(spec.kind, spec.num_shards) for spec in specs.values()][:2] == [("full", 4), ("sliding_window", None)]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3.2", "deepseek-v4-flash"])
def test_latent_rows_and_indexers_are_whole_on_every_rank(name):
    specs = specs_from_config(CONFIGS / f"{name}.json", tensor_parallel=8)
    assert specs == specs_from_config(CONFIGS / f"{name}.json")
    assert {spec.num_shards for spec in specs.values()} == {1}


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "state", "attention"),
    [
        ("qwen3-next-80b-a3b", 4, 3 * 2048 * 2 + 8 * 128 * 128 * 2, 16 * 1 * 512 * 2),
        ("nemotron-h-8b", 8, 3 * 1280 * 2 + 16 * 64 * 128 * 4, 16 * 1 * 256 * 2),
        ("nemotron-h-8b", 16, 3 * (512 + 256) * 2 + 8 * 64 * 128 * 4, 16 * 1 * 256 * 2),
        ("jamba-v0.1", 8, 3 * 1024 * 2 + 1024 * 16 * 2, 16 * 1 * 256 * 2),
    ],
)
def test_states_are_divided(name, tensor_parallel, state, attention):
    specs = specs_from_config(CONFIGS / f"{name}.json", tensor_parallel=tensor_parallel)
    pages = {spec.kind: spec.page_bytes for spec in specs.values()}
    assert pages == {"state": state, "full": attention}


def test_a_published_state_of_four_ranks():
    """The reference pads this state to 528 attention tokens of 1,024 bytes; 0.76 % of the page."""
    specs = specs_from_config(CONFIGS / "qwen3-next-80b-a3b.json", state_dtype="fp32", tensor_parallel=4)
    state, attention = specs["layers.0.state"].page_bytes, specs["layers.3.attn"].page_bytes
    assert (state, attention) == (536_576, 16 * 1024)
    assert 1 - state / 540_672 == pytest.approx(0.0076, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "message"),
    [
        ("qwen3-next-80b-a3b", 32, "expected a divisor of the 16 linear_num_key_heads, got 32"),
        ("nemotron-h-8b", 256, "expected a divisor of the 128 mamba_num_heads, got 256"),
        ("nemotron-h-8b", 3, "expected a divisor of the 128 mamba_num_heads, got 3"),
        ("jamba-v0.1", 24, "expected a divisor of the 8192 channels (mamba_expand * hidden_size), got 24"),
    ],
)
def test_states_that_do_not_divide_are_refused(name, tensor_parallel, message):
    config = {**json.loads((CONFIGS / f"{name}.json").read_text()), "num_key_value_heads": 1}
    with pytest.raises(PlanError, match=re.escape(f"tensor_parallel: {message}")):
        specs_from_config(config, tensor_parallel=tensor_parallel)


def test_groups_that_do_not_divide_are_refused():
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "n_groups": 6, "num_key_value_heads": 1}
    with pytest.raises(PlanError, match=re.escape("tensor_parallel: expected a divisor of the 6 n_groups, got 4")):
        specs_from_config(config, tensor_parallel=4)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"), [(7, 1, [7]), (7, 3, [3, 2, 2]), (8, 4, [2, 2, 2, 2]), (5, 4, [2, 1, 1, 1])]
)
def test_stages_are_contiguous_and_even(num_layers, num_stages, sizes):
    ranges = stage_ranges(num_layers, num_stages)
    assert [len(stage) for stage in ranges] == sizes
    assert [layer for stage in ranges for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_stages_together_are_the_model(path):
    whole = specs_from_config(path, num_draft_layers=2)
    stages = [specs_from_config(path, num_draft_layers=2, pipeline_stages=3, pipeline_stage=i) for i in range(3)]
    assert [item for stage in stages for item in stage.items()] == list(whole.items())
    assert [any(name.startswith("draft.") for name in stage) for stage in stages] == [False, False, True]
    assert specs_from_config(path, num_draft_layers=2, pipeline_stage=0) == whole


def test_layers_without_a_cache_count_when_a_model_is_split():
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M---M*"}
    stages = [specs_from_config(config, pipeline_stages=2, pipeline_stage=i) for i in range(2)]
    assert [list(stage) for stage in stages] == [["layers.0.state"], ["layers.4.state", "layers.5.attn"]]


@pytest.mark.parametrize(
    ("name", "caches", "like"),
    [
        ("llama-3.1-8b", ["attn"], ["layers.0.attn"]),
        ("minimax-m2", ["attn"], ["layers.0.attn"]),
        ("gemma-3-4b", ["attn"], ["layers.5.attn"]),
        ("gpt-oss-20b", ["attn"], ["layers.1.attn"]),
        ("llama-4-scout", ["attn"], ["layers.3.attn"]),
        ("qwen3-next-80b-a3b", ["attn"], ["layers.3.attn"]),
        ("nemotron-h-8b", ["attn"], ["layers.7.attn"]),
        ("deepseek-v3", ["attn"], ["layers.0.attn"]),
        ("deepseek-v3.2", ["indexer", "attn"], ["layers.0.indexer", "layers.0.attn"]),
        ("deepseek-v4-flash", ["window"], ["layers.0.window"]),
    ],
)
@pytest.mark.parametrize("num_draft_layers", [1, 3])
def test_draft_layers(name, caches, like, num_draft_layers):
    """More than the checkpoint has are fine: engines run one draft layer several times."""
    path = CONFIGS / f"{name}.json"
    whole, plain = specs_from_config(path, num_draft_layers=num_draft_layers), specs_from_config(path)
    names = [f"draft.{layer}.{cache}" for layer in range(num_draft_layers) for cache in caches]
    assert list(whole) == [*plain, *names]
    assert [whole[name] for name in names] == [plain[layer] for layer in like] * num_draft_layers


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "num_hidden_layers": 2},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-"},
    ],
)
def test_draft_layers_need_a_layer_of_full_attention_to_be_like(config):
    assert specs_from_config(config)
    message = "num_draft_layers: the model has no layer of full attention that a draft layer could be like, got 1"
    with pytest.raises(PlanError, match=message):
        specs_from_config(config, num_draft_layers=1)
