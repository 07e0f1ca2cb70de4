"""Models with windows and chunks: which layers have one, and how long it is."""

import re

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.layers import chunked_attention, full_attention, sliding_window
from kvstore.models import specs_from_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "float16",
}
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
QWEN_MOE = {**QWEN, "model_type": "qwen3_moe"}
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 7}
LLAMA4 = {"model_type": "llama4_text", "num_hidden_layers": 6}
MIMO = {"model_type": "mimo_v2_flash", "num_hidden_layers": 7, "dtype": "bfloat16"}
OLMO = {"model_type": "olmo3", "num_hidden_layers": 5}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 4}

FULL, SLIDING = "full_attention", "sliding_attention"


def limited(specs):
    """Layers that do not keep everything."""
    return [layer for layer, spec in enumerate(specs.values()) if spec.kind != "full"]


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "num_key_value_heads": None},
        {**LLAMA, "model_type": "mistral"},
        {**LLAMA, "model_type": "mistral", "sliding_window": None},
        {**LLAMA, "model_type": "mistral", "use_sliding_window": False},
        {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"} | {"model_type": "mistral"},
        {**LLAMA, "model_type": "qwen2"},
        {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 30},
        {**QWEN, "max_window_layers": 3},
        {**QWEN, "layer_types": [SLIDING, FULL] * 2},
        {**LLAMA, "model_type": "qwen3"},
        {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 96},
        QWEN_MOE,
        {**QWEN_MOE, "use_sliding_window": False},
        {**QWEN_MOE, "sliding_window": None},
        {**GEMMA3, "layer_types": [SLIDING] * 7},
        {**GEMMA3, "sliding_window_pattern": 3, "use_bidirectional_attention": True},
        {**GEMMA3, "sliding_window": 1023, "use_bidirectional_attention": True},
        {**OLMO, "num_key_value_heads": 8},
        {**GPT_OSS, "num_key_value_heads": 4, "head_dim": 32},
        {**LLAMA4, "no_rope_layer_interval": 2},
        {**LLAMA4, "no_rope_layers": []},
        {**LLAMA4, "no_rope_layers": [0, 1, 0, 1, 1, 1]},
        {**LLAMA4, "attention_chunk_size": None},
        {**LLAMA4, "layer_types": ["chunked_attention", FULL] * 3},
        {**MIMO, "sliding_window_size": 128, "sliding_window": 128},
        {**MIMO, "v_head_dim": 64, "head_dim": 96, "num_key_value_heads": 8},
    ],
    ids=lambda config: "-".join(str(value) for value in config.values() if isinstance(value, str | int | None))[:60],
)
def test_a_transformers_object_gives_equal_specs(config):
    auto_config = pytest.importorskip("transformers").AutoConfig
    assert specs_from_config(auto_config.for_model(**config)) == specs_from_config(config)


def test_mistral_with_a_window_has_it_in_every_layer():
    specs = specs_from_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, block_size=32)
    windowed = sliding_window(2, 64, window=4096, dtype=torch.float16, block_size=32)
    assert specs == {"layers.0.attn": windowed, "layers.1.attn": windowed}


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, []),
        ({"max_window_layers": 0}, [0, 1, 2, 3]),
        ({"max_window_layers": 3}, [3]),
        ({"max_window_layers": 0, "use_sliding_window": False}, []),
        ({"max_window_layers": 0, "sliding_window": None}, []),
        ({"layer_types": [FULL, SLIDING] * 2, "max_window_layers": 0}, [1, 3]),
        ({"layer_types": [FULL] * 4, "use_sliding_window": False}, []),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type, fields, windowed):
    specs = specs_from_config({**QWEN, "model_type": model_type, "head_dim": 64, **fields})
    assert [layer for layer, spec in enumerate(specs.values()) if spec.window == 64] == windowed == limited(specs)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN_MOE, [0, 1, 2, 3]),
        ({**QWEN_MOE, "use_sliding_window": False}, []),
        (GEMMA3, [0, 1, 2, 3, 4, 6]),
        ({**GEMMA3, "sliding_window_pattern": 2}, [0, 2, 4, 6]),
        (OLMO, [0, 1, 2, 4]),
        (GPT_OSS, [0, 2]),
        ({**GPT_OSS, "layer_types": ["attention", SLIDING] * 2}, [1, 3]),
        (LLAMA4, [0, 1, 2, 4, 5]),
        ({**LLAMA4, "no_rope_layers": [0, 1, 0, 1, 1, 1]}, [1, 3, 4, 5]),
        ({**LLAMA4, "attention_chunk_size": None}, []),
        (MIMO, [1, 2, 3, 4, 6]),
        ({**MIMO, "hybrid_layer_pattern": [0, 1, 0, 1, 1, 1, 0]}, [1, 3, 4, 5]),
        ({**MIMO, "num_hidden_layers": 1}, []),
        ({**MIMO, "num_hidden_layers": 0}, []),
    ],
)
def test_layers_with_a_window_or_chunk(config, layers):
    assert limited(specs_from_config(config)) == layers


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (GEMMA3, 4096),
        ({**GEMMA3, "sliding_window": 512}, 512),
        ({**GEMMA3, "sliding_window": 512, "use_bidirectional_attention": True}, 257),
        (OLMO, 4096),
        (GPT_OSS, 128),
        (MIMO, 129),
        ({**MIMO, "sliding_window_size": 64}, 65),
    ],
)
def test_length_of_windows(config, window):
    assert {spec.window for spec in specs_from_config(config).values()} == {None, window}


def test_llama4_chunks():
    specs = specs_from_config({**LLAMA4, "attention_chunk_size": 1024})
    assert specs["layers.0.attn"] == chunked_attention(8, 128, chunk=1024)
    assert specs["layers.3.attn"] == full_attention(8, 128)


def test_mimo_has_narrow_values_and_more_heads_in_its_windows():
    specs = specs_from_config(MIMO)
    assert specs["layers.0.attn"] == full_attention(4, 192, 128)
    assert specs["layers.1.attn"] == sliding_window(8, 192, 128, window=129)
    named = {"swa_num_key_value_heads": 16, "swa_head_dim": 128, "swa_v_head_dim": 64}
    assert specs_from_config({**MIMO, **named})["layers.1.attn"] == sliding_window(16, 128, 64, window=129)
    assert specs_from_config({**MIMO, **named})["layers.0.attn"] == full_attention(4, 192, 128)


def test_rows_with_scales_keep_the_width_of_values():
    specs = specs_from_config(MIMO, kv_dtype="int8_per_token_head")
    assert specs["layers.1.attn"].page_bytes == 16 * 8 * (192 + 4 + 128 + 4)


TYPES = "expected 'full_attention' or 'sliding_attention'"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "mistral", "sliding_window": 0}, "sliding_window: expected an integer >= 1, got 0"),
        ({**QWEN, "layer_types": [FULL]}, "layer_types: expected a list of num_hidden_layers = 4 entries, got of 1: ["),
        ({**QWEN, "layer_types": "full"}, "layer_types: expected a list of num_hidden_layers = 4 entries, got 'full'"),
        ({**QWEN, "layer_types": 4}, "layer_types: expected a list of num_hidden_layers = 4 entries, got 4"),
        (
            {**QWEN, "layer_types": ["chunked_attention"] * 4},
            f"layer_types: layer 0: {TYPES}, got 'chunked_attention'",
        ),
        ({**QWEN, "layer_types": [FULL, [], FULL, FULL]}, f"layer_types: layer 1: {TYPES}, got []"),
        (
            {**QWEN, "layer_types": [SLIDING] * 4, "use_sliding_window": False},
            "layer_types: layer 0 is 'sliding_attention', but the config turns its window off",
        ),
        ({**GEMMA3, "layer_types": [FULL] * 6}, "layer_types: expected a list of num_hidden_layers = 7 entries"),
        (
            {**GEMMA3, "sliding_window": None},
            "layer_types: layer 0 is 'sliding_attention', but sliding_window is null",
        ),
        ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern: expected an integer >= 1, got 0"),
        (
            {**LLAMA4, "layer_types": [SLIDING] * 6},
            "layer_types: layer 0: expected 'full_attention' or 'chunked_attention', got 'sliding_attention'",
        ),
        (
            {**LLAMA4, "layer_types": ["chunked_attention"] * 6, "attention_chunk_size": None},
            "layer_types: layer 0 is 'chunked_attention', but attention_chunk_size is null",
        ),
        (
            {**LLAMA4, "no_rope_layers": [1, 0]},
            "no_rope_layers: expected a list of num_hidden_layers = 6 entries, got of 2: [1, 0]",
        ),
        (
            {**MIMO, "hybrid_layer_pattern": [0] * 7, "layer_types": [SLIDING] * 7},
            "hybrid_layer_pattern: expected the same layers as layer_types, got [0, 0, 0, 0, 0, 0, 0]",
        ),
        (
            {**MIMO, "swa_num_key_value_heads": 24},
            "swa_num_key_value_heads: expected a divisor of the 64 num_attention_heads, got 24",
        ),
        (
            {"model_type": "minimax_m2", "num_hidden_layers": 2, "attn_type_list": [1, 0]},
            "attn_type_list: layer 1: expected 1 (softmax attention), got 0",
        ),
        (
            {"model_type": "minimax_m2", "num_hidden_layers": 2, "attn_type_list": [1]},
            "attn_type_list: expected a list of num_hidden_layers = 2 entries, got of 1: [1]",
        ),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(config, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(config)
