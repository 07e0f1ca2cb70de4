"""Models with recurrent states: their tensors, their dtypes, and which layers have one."""

import json
import re

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.layers import full_attention, latent, recurrent_state
from kvstore.models import specs_from_config
from kvstore.models.bundled import CONFIGS

QWEN = {"model_type": "qwen3_next", "num_hidden_layers": 4}
KIMI = {"model_type": "kimi_linear", "num_hidden_layers": 8}
KDA = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}
NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E"}
JAMBA = {"model_type": "jamba", "num_hidden_layers": 8}

FULL, LINEAR = "full_attention", "linear_attention"


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN, "full_attention_interval": 2},
        {**QWEN, "layer_types": [FULL, LINEAR, LINEAR, FULL], "dtype": "float32"},
        {**QWEN, "mamba_ssm_dtype": "float32", "linear_num_value_heads": 16, "linear_conv_kernel_dim": 3},
        KIMI,
        {**KIMI, "linear_attn_config": {**KDA, "head_dim": 64, "num_heads": 16, "short_conv_kernel_size": 3}},
        {**KIMI, "layer_types": [LINEAR] * 7 + [FULL], "linear_head_dim": 64},
        NEMOTRON,
        {**NEMOTRON, "mamba_n_groups": 4, "mamba_d_conv": 3, "attention_head_dim": 64},
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention"]},
        {**NEMOTRON, "mamba_ssm_cache_dtype": "bfloat16", "dtype": "float16"},
        {**JAMBA, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_expand": 4},
    ],
    ids=lambda config: "-".join(map(str, config.values()))[:60],
)
def test_a_transformers_object_gives_equal_specs(config):
    auto_config = pytest.importorskip("transformers").AutoConfig
    specs = specs_from_config(config)
    assert specs_from_config(auto_config.for_model(**config)) == specs
    assert {spec.kind for spec in specs.values()} >= {"state"}


def test_qwen3_next():
    specs = specs_from_config(QWEN)
    bfloat16 = torch.bfloat16
    state = recurrent_state([("conv", (3, 8192), bfloat16), ("recurrent", (32, 128, 128), bfloat16)])
    assert specs == {f"layers.{i}.state": state for i in range(3)} | {"layers.3.attn": full_attention(2, 256)}
    assert state.page_bytes == 1_097_728


def test_qwen3_5_wraps_a_text_model_of_the_same_shape():
    text = {"num_hidden_layers": 4, "num_key_value_heads": 2}
    specs = specs_from_config(QWEN)
    assert specs_from_config({"model_type": "qwen3_5", "text_config": text}) == specs
    assert specs_from_config({"model_type": "qwen3_5_moe", "text_config": text}) == specs


def test_kimi_linear_has_latent_rows_and_states():
    specs = specs_from_config({**KIMI, "linear_attn_config": KDA})
    conv, recurrent = ("conv", (3, 3 * 4096), torch.bfloat16), ("recurrent", (32, 128, 128), torch.float32)
    assert specs["layers.3.attn"] == latent()
    assert specs["layers.0.state"] == recurrent_state([conv, recurrent], block_size=64)
    assert [name for name in specs if name.endswith(".attn")] == ["layers.3.attn", "layers.7.attn"]
    assert specs["layers.0.state"].page_bytes == 3 * 3 * 4096 * 2 + 32 * 128 * 128 * 4
    assert specs_from_config(KIMI, kv_dtype="fp8_ds_mla")["layers.4.attn"].page_bytes == 64 * 656


def test_kimi_linear_states_follow_the_size_published_for_such_layers():
    """64 heads of 128 are published as 4,341,760 bytes."""
    config = {**KIMI, "linear_num_heads": 64}
    assert specs_from_config(config)["layers.0.state"].page_bytes == 4_341_760
    assert specs_from_config(config, tensor_parallel=2)["layers.0.state"].page_bytes == 4_341_760 // 2


def test_nemotron_h_mlp_and_moe_layers_have_no_cache():
    specs = specs_from_config(NEMOTRON)
    assert list(specs) == ["layers.0.state", "layers.2.state", "layers.3.attn"]
    conv, recurrent = ("conv", (3, 10240), torch.bfloat16), ("recurrent", (128, 64, 128), torch.float32)
    assert specs["layers.0.state"] == recurrent_state([conv, recurrent])
    assert specs["layers.3.attn"] == full_attention(8, 128)


def test_nemotron_h_pattern_and_list_say_the_same():
    named = {
        "model_type": "nemotron_h",
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe"],
    }
    assert specs_from_config(named) == specs_from_config(NEMOTRON)
    assert specs_from_config({**named, **NEMOTRON}) == specs_from_config(NEMOTRON)


def test_jamba_has_attention_once_per_period():
    specs = specs_from_config(JAMBA)
    assert [name for name in specs if name.endswith(".attn")] == ["layers.4.attn"]
    conv, recurrent = ("conv", (3, 8192), torch.bfloat16), ("recurrent", (8192, 16), torch.bfloat16)
    assert specs["layers.0.state"] == recurrent_state([conv, recurrent])


@pytest.mark.parametrize(
    ("config", "state_dtype", "dtypes"),
    [
        (QWEN, None, (torch.bfloat16, torch.bfloat16)),
        ({**QWEN, "dtype": "float16"}, None, (torch.float16, torch.float16)),
        ({**QWEN, "mamba_ssm_dtype": "float32"}, None, (torch.bfloat16, torch.float32)),
        ({**QWEN, "mamba_ssm_dtype": "float32"}, "bf16", (torch.bfloat16, torch.bfloat16)),
        (QWEN, "fp32", (torch.bfloat16, torch.float32)),
        (QWEN, torch.float32, (torch.bfloat16, torch.float32)),
        (NEMOTRON, None, (torch.bfloat16, torch.float32)),
        ({**NEMOTRON, "mamba_ssm_cache_dtype": "float16"}, None, (torch.bfloat16, torch.float16)),
        (NEMOTRON, "bf16", (torch.bfloat16, torch.bfloat16)),
        (JAMBA, None, (torch.bfloat16, torch.bfloat16)),
        (JAMBA, "fp32", (torch.bfloat16, torch.float32)),
        (KIMI, None, (torch.bfloat16, torch.float32)),
    ],
)
def test_state_dtypes(config, state_dtype, dtypes):
    """The rows of the attention layers have no say in it."""
    for kv_dtype in (None, "fp8"):
        specs = specs_from_config(config, state_dtype=state_dtype, kv_dtype=kv_dtype)
        state = next(spec for spec in specs.values() if spec.kind == "state")
        assert tuple(part.dtype for part in state.format.parts) == dtypes


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-h-8b", "jamba-v0.1"])
def test_a_block_size_adds_no_bytes_to_a_state(name):
    small, large = (specs_from_config(CONFIGS / f"{name}.json", block_size=size) for size in (16, 256))
    for layer, spec in small.items():
        assert (spec.block_size, large[layer].block_size) == (16, 256)
        assert large[layer].page_bytes == spec.page_bytes * (1 if spec.kind == "state" else 16)


FLAT = json.loads((CONFIGS / "nemotron-h-8b.json").read_text())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**QWEN, "layer_types": ["sliding_attention"] * 4},
            "layer_types: layer 0: expected 'full_attention' or 'linear_attention', got 'sliding_attention'",
        ),
        ({**QWEN, "layer_types": [FULL]}, "layer_types: expected a list of num_hidden_layers = 4 entries"),
        ({**QWEN, "full_attention_interval": 0}, "full_attention_interval: expected an integer >= 1, got 0"),
        ({**QWEN, "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected an integer >= 2, got 1"),
        ({**QWEN, "mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype: expected one of bfloat16, bf16,"),
        ({**QWEN, "dtype": "int8"}, "dtype: expected one of bfloat16, bf16,"),
        ({**KIMI, "linear_attn_config": [1]}, "linear_attn_config: expected a mapping, got [1]"),
        (
            {**KIMI, "linear_attn_config": {**KDA, "kda_layers": [1, 2, 3]}},
            "linear_attn_config: expected each of the layers 1 to 8 in full_attn_layers or kda_layers, got [4, 8] and",
        ),
        (
            {**KIMI, "linear_attn_config": {**KDA, "full_attn_layers": 4}},
            "linear_attn_config: expected each of the layers 1 to 8 in full_attn_layers or kda_layers, got 4 and [1",
        ),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": 4},
            "layers_block_type: expected it or hybrid_override_pattern in the config (model_type 'nemotron_h'), found",
        ),
        (
            {**NEMOTRON, "hybrid_override_pattern": "M-MX"},
            "hybrid_override_pattern: expected num_hidden_layers = 4 letters out of M*-E, got 'M-MX'",
        ),
        ({**NEMOTRON, "hybrid_override_pattern": 4}, "letters out of M*-E, got 4"),
        ({**FLAT, "num_hidden_layers": 51}, "hybrid_override_pattern: expected num_hidden_layers = 51 letters out of"),
        (
            {**NEMOTRON, "layers_block_type": ["mamba"] * 5},
            "hybrid_override_pattern: expected the same layers as layers_block_type, got 'M-M*E'",
        ),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mamba", "rnn"]},
            "layers_block_type: layer 1: expected 'linear_attention' or 'full_attention' or 'mlp' or 'moe', got 'rnn'",
        ),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mamba"], "num_hidden_layers": 2},
            "layers_block_type: expected a list of num_hidden_layers = 2 entries, got of 1: ['mamba']",
        ),
        ({**JAMBA, "attn_layer_offset": 8}, "attn_layer_offset: expected an integer in [0, 7], got 8"),
        ({**JAMBA, "mamba_d_state": 0}, "mamba_d_state: expected an integer >= 1, got 0"),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(config, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(config)


def test_rows_of_another_kind_of_layer_are_refused():
    with pytest.raises(PlanError, match="'fp8_ds_mla' rows are latent"):
        specs_from_config(QWEN, kv_dtype="fp8_ds_mla")
    with pytest.raises(PlanError, match="'int8_per_token_head' rows are of K and V"):
        specs_from_config(KIMI, kv_dtype="int8_per_token_head")
