"""Gemma 4: heads and widths by kind of layer, and layers that read the cache of another."""

import re

import pytest

from kvstore.errors import PlanError
from kvstore.layers import full_attention, sliding_window
from kvstore.models import specs_from_config
from kvstore.specs import Alias

GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8}
SHARED = {**GEMMA4, "num_kv_shared_layers": 4}

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, full_attention(8, 512)),
        ({"global_head_dim": 384}, full_attention(8, 384)),
        ({"num_global_key_value_heads": 2}, full_attention(8, 512)),
        ({"num_global_key_value_heads": 2, "attention_k_eq_v": True}, full_attention(2, 512)),
        ({"attention_k_eq_v": True}, full_attention(8, 512)),
    ],
)
def test_full_layers_have_a_shape_of_their_own(fields, full):
    """With `attention_k_eq_v` K and V share weights, not bytes: only K is rotated, and both are stored."""
    specs = list(specs_from_config({**GEMMA4, **fields}).values())
    windowed = sliding_window(8, 256, window=512)
    assert specs == [full if layer in (5, 11) else windowed for layer in range(12)]


@pytest.mark.parametrize(
    "fields",
    [
        {"global_head_dim": 384, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
        {"num_kv_shared_layers": 5},
        {"layer_types": [SLIDING] * 12},
        {"layer_types": [FULL, *[SLIDING] * 10, FULL], "num_kv_shared_layers": 3},
        {"use_bidirectional_attention": "all", "sliding_window": 1024},
        {"use_bidirectional_attention": "vision"},
        {"per_layer_config": {3: {"head_dim": 128}, 11: {"num_key_value_heads": 4}}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_transformers_object_gives_equal_specs(fields):
    auto_config = pytest.importorskip("transformers").AutoConfig
    config = {**GEMMA4, **fields}
    specs = specs_from_config(config)
    assert specs_from_config(auto_config.for_model(**config)) == specs
    wrapped = {"model_type": "gemma4", "text_config": config}
    assert specs_from_config(wrapped) == specs_from_config(auto_config.for_model(**wrapped)) == specs


def test_the_last_layer_is_full_whatever_the_config_says():
    specs = specs_from_config({**GEMMA4, "layer_types": [SLIDING] * 12})
    assert [spec.kind for spec in specs.values()] == ["sliding_window"] * 11 + ["full"]


def test_half_of_a_bidirectional_window_lies_ahead():
    specs = specs_from_config({**GEMMA4, "use_bidirectional_attention": "all", "sliding_window": 1024})
    assert specs["layers.0.attn"].window == 513


@pytest.mark.parametrize("keys", [(5, 11), ("5", "11"), ("05", "11")])
def test_single_layers_may_have_fields_of_their_own(keys):
    """As transformers writes a config out; nothing else then says how full layers differ."""
    override = {"head_dim": 128, "num_key_value_heads": 4}
    specs = specs_from_config({**GEMMA4, "per_layer_config": {keys[0]: override, keys[1]: {}}})
    assert specs["layers.5.attn"] == full_attention(4, 128)
    assert specs["layers.11.attn"] == full_attention(8, 256)


def test_the_last_layers_read_the_last_cache_of_their_type():
    specs = specs_from_config(SHARED)
    assert list(specs) == [f"layers.{layer}.attn" for layer in range(12)]
    shared = {name: spec for name, spec in specs.items() if isinstance(spec, Alias)}
    assert shared == {
        "layers.8.attn": Alias("layers.7.attn"),
        "layers.9.attn": Alias("layers.7.attn"),
        "layers.10.attn": Alias("layers.7.attn"),
        "layers.11.attn": Alias("layers.5.attn"),
    }
    whole = specs_from_config(GEMMA4)
    assert {name: spec for name, spec in specs.items() if name not in shared} == {
        name: spec for name, spec in whole.items() if name not in shared
    }


def test_owners_are_those_of_transformers():
    """`kv_sharing_modes` calls the owner of each type "store" and its readers "reuse"."""
    auto_config = pytest.importorskip("transformers").AutoConfig
    modes = auto_config.for_model(**SHARED).kv_sharing_modes
    specs = specs_from_config(SHARED)
    aliases = [spec for spec in specs.values() if isinstance(spec, Alias)]
    assert [isinstance(spec, Alias) for spec in specs.values()] == [mode == "reuse" for mode in modes]
    assert {alias.of for alias in aliases} == {f"layers.{i}.attn" for i, mode in enumerate(modes) if mode == "store"}


def test_a_draft_layer_is_like_a_full_layer_with_a_cache():
    specs = specs_from_config(SHARED, num_draft_layers=1)
    assert specs["draft.0.attn"] == full_attention(8, 512)


def test_readers_and_owners_of_a_cache_are_on_one_stage():
    message = (
        "pipeline_stages: 'layers.11.attn' on stage 1 reads the cache of 'layers.5.attn' on stage 0: "
        "expected both on one stage"
    )
    for stage in range(2):
        with pytest.raises(PlanError, match=re.escape(message)):
            specs_from_config(SHARED, pipeline_stages=2, pipeline_stage=stage)
    types = [SLIDING] * 6 + [FULL] * 2 + [SLIDING] * 3 + [FULL]
    split = {**GEMMA4, "layer_types": types, "num_kv_shared_layers": 1}
    assert specs_from_config(split, pipeline_stages=2, pipeline_stage=1)["layers.11.attn"] == Alias("layers.7.attn")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 13}, "num_kv_shared_layers: expected an integer in [0, 12], got 13"),
        (
            {"num_kv_shared_layers": 12},
            "num_kv_shared_layers: layer 0 is 'sliding_attention', and so is none of the 0 layers whose cache it could",
        ),
        (
            {"num_kv_shared_layers": 8},
            "num_kv_shared_layers: layer 5 is 'full_attention', and so is none of the 4 layers whose cache it could",
        ),
        ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of the 16 num_attention_heads, got 5"),
        ({"global_head_dim": 0}, "global_head_dim: expected an integer >= 1, got 0"),
        ({"per_layer_config": {12: {}}}, "per_layer_config: expected layers 0 to 11, got 12"),
        ({"per_layer_config": {"x": {}}}, "per_layer_config: expected a mapping of layer numbers to fields, got {'x'"),
        ({"per_layer_config": [{}]}, "per_layer_config: expected a mapping of layer numbers to fields, got [{}]"),
        ({"per_layer_config": {5: 512}}, "per_layer_config: expected a mapping of layer numbers to fields, got {5: 5"),
        ({"layer_types": [FULL] * 11}, "layer_types: expected a list of num_hidden_layers = 12 entries, got of 11"),
        ({"layer_types": ["linear_attention"] * 12}, "layer_types: layer 0: expected 'full_attention' or 'sliding_at"),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(fields, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config({**GEMMA4, **fields})
