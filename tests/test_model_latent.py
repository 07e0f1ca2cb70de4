"""DeepSeek: latent rows, indexers, compressed caches and the states of their compressors."""

import json
import re

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.layers import latent
from kvstore.models import specs_from_config
from kvstore.models.bundled import CONFIGS
from kvstore.specs import LayerSpec
from kvstore_kernels.quantised import dsv4_format, fp8_ds_mla_format, indexer_format

V2 = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "num_attention_heads": 16,
    "dtype": "bfloat16",
}
V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
V32 = {"model_type": "deepseek_v32", "num_hidden_layers": 2}
V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
FLASH = json.loads((CONFIGS / "deepseek-v4-flash.json").read_text())

WINDOW_ONLY, RATIO_4, RATIO_128 = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@pytest.mark.parametrize(
    "config",
    [
        V2,
        V3,
        {**V3, "index_topk": 2048},
        V32,
        {**V32, "layer_types": ["deepseek_sparse_attention"] * 2},
        {key: V4[key] for key in V4 if key != "compress_ratios"},
        V4,
        {**V4, "layer_types": [WINDOW_ONLY, RATIO_4, RATIO_128]},
        {"model_type": "deepseek_v4", "num_hidden_layers": 3, "layer_types": [RATIO_128, RATIO_4, WINDOW_ONLY]},
        {"model_type": "deepseek_v4", "num_hidden_layers": 1, "head_dim": 256, "sliding_window": 64},
    ],
    ids=lambda config: "-".join(map(str, config.values()))[:60],
)
def test_a_transformers_object_gives_equal_specs(config):
    auto_config = pytest.importorskip("transformers").AutoConfig
    assert specs_from_config(auto_config.for_model(**config)) == specs_from_config(config)


def test_rows_are_latent_and_hold_values_and_rope():
    row = latent(288, 256, dtype=torch.bfloat16, block_size=64)
    assert list(specs_from_config(V2).values()) == [row] * 3
    assert specs_from_config(V2, block_size=16)["layers.2.attn"].page_bytes == 16 * 288 * 2
    assert specs_from_config(V3, kv_dtype="fp8")["layers.0.attn"] == latent(dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("config", [V3, {**V2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}])
def test_packed_rows_serve_every_model_of_512_and_64_columns(config):
    spec = specs_from_config(config, kv_dtype="fp8_ds_mla")["layers.0.attn"]
    assert spec == LayerSpec("latent", 64, fp8_ds_mla_format(), num_shards=1)
    assert spec.page_bytes == 64 * 656


@pytest.mark.parametrize("config", [V32, {**V3, "index_topk": 2048}])
def test_an_indexer_comes_before_its_layer(config):
    specs = specs_from_config(config)
    assert list(specs) == ["layers.0.indexer", "layers.0.attn", "layers.1.indexer", "layers.1.attn"]
    assert specs["layers.1.indexer"] == LayerSpec("latent", 64, indexer_format(132, 16), num_shards=1)
    assert specs["layers.1.indexer"].page_bytes == 8448
    assert specs_from_config(config, block_size=128)["layers.0.indexer"].page_bytes == 128 * 132


@pytest.mark.parametrize(
    ("kv_dtype", "multiple"), [("bf16", 1152), ("fp16", 1152), ("fp32", 2304), ("fp8", 576), ("fp8_ds_mla", 16)]
)
def test_plain_rows_beside_an_indexer_demand_a_stride_of_whole_rows(kv_dtype, multiple):
    specs = specs_from_config(V32, kv_dtype=kv_dtype)
    assert specs["layers.0.attn"].block_stride_multiple == multiple
    assert specs["layers.0.indexer"].block_stride_multiple == 16
    assert specs_from_config(V3)["layers.0.attn"].block_stride_multiple == 16


@pytest.mark.parametrize(
    ("kv_dtype", "row_bytes", "alignment"),
    [("fp8_ds_mla", 584, 576), ("fp8", 512, 512), ("bf16", 1024, 512), (None, 1024, 512)],
)
def test_v4_rows_and_the_alignment_of_every_page(kv_dtype, row_bytes, alignment):
    specs = specs_from_config(V4, kv_dtype=kv_dtype)
    assert {name.split(".")[2] for name in specs} == {"window", "indexer", "indexer_state", "compressed", "state"}
    assert {spec.format.page_alignment for spec in specs.values()} == {alignment}
    assert all(spec.page_bytes % alignment == 0 for spec in specs.values())
    rows = {spec.format.row_bytes for name, spec in specs.items() if name.endswith((".window", ".compressed"))}
    assert rows == {row_bytes}


def test_v4_packed_rows_and_indexers_have_their_formats():
    specs = specs_from_config(V4, kv_dtype="fp8_ds_mla", indexer_row_bytes=68)
    assert specs["layers.0.window"].format == dsv4_format()
    assert specs["layers.1.indexer"].format == indexer_format(68, 576)
    assert specs["layers.1.compressed"].tokens_per_row == 4
    assert specs["layers.2.compressed"].tokens_per_row == 128


@pytest.mark.parametrize("block_size", [128, 256, 512])
def test_v4_blocks_scale_but_those_of_the_states(block_size):
    specs = specs_from_config(V4, block_size=block_size)
    sizes = {name.split(".", 1)[1]: spec.block_size for name, spec in specs.items()}
    assert sizes == {
        "0.window": block_size // 4,
        "1.indexer": block_size,
        "1.indexer_state": 4,
        "1.window": block_size // 4,
        "1.compressed": block_size,
        "1.state": 4,
        "2.window": block_size // 4,
        "2.compressed": block_size,
        "2.state": 8,
    }


def test_v4_states_as_windows_and_as_rings():
    """A ring holds the same rows, all of them in one block per sequence."""
    windows, rings = specs_from_config(V4), specs_from_config(V4, ring_states=True)
    assert list(windows) == list(rings)
    states = [name for name in windows if name.endswith("state")]
    assert {name: (spec.kind, spec.block_size, spec.page_bytes) for name, spec in rings.items() if name in states} == {
        "layers.1.indexer_state": ("ring", 8, 8 * 2048),
        "layers.1.state": ("ring", 8, 8 * 8192),
        "layers.2.state": ("ring", 128, 128 * 4096),
    }
    for name, spec in windows.items():
        if name in states:
            assert (spec.kind, spec.window) == ("latent_window", rings[name].block_size)
            assert spec.format == rings[name].format
            assert spec.format.parts[0].dtype == torch.float32
        else:
            assert spec == rings[name]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({**V2, "kv_lora_rank": None}, {}, "kv_lora_rank: expected it in the config (model_type 'deepseek_v2')"),
        (
            V2,
            {"kv_dtype": "fp8_ds_mla"},
            "kv_dtype: 'fp8_ds_mla' rows are 512 + 64 columns, but the model has 256 + 32 (kv_lora_rank + qk_rope",
        ),
        (V3, {"kv_dtype": "int8_per_token_head"}, "kv_dtype: 'int8_per_token_head' rows are of K and V, but the model"),
        (V4, {"kv_dtype": "fp8_per_token_head"}, "kv_dtype: 'fp8_per_token_head' rows are of K and V, but the model"),
        (V3, {"indexer_row_bytes": 132}, "indexer_row_bytes: the model has no indexers"),
        (V32, {"indexer_row_bytes": 68}, "indexer_row_bytes: expected 132 (model_type 'deepseek_v32'), got 68"),
        (V4, {"indexer_row_bytes": 64}, "indexer_row_bytes: expected 132 or 68 (model_type 'deepseek_v4'), got 64"),
        (V32, {"ring_states": True}, "ring_states: the model has no compressor states"),
        (V4, {"state_dtype": "bf16"}, "state_dtype: the model has no recurrent states"),
        ({**V32, "index_head_dim": 64}, {}, "index_head_dim: expected 128, the width of an indexer row, got 64"),
        ({**V32, "layer_types": ["full_attention"] * 2}, {}, "layer_types: layer 0: expected 'indexed_attention', got"),
        ({**V3, "compress_ratios": [0]}, {}, "compress_ratios: expected none (model_type 'deepseek_v3'), got [0]"),
        (V4, {"block_size": 64}, "block_size: expected a multiple of 128 (model_type 'deepseek_v4'), got 64"),
        (
            {**V4, "head_dim": 256},
            {"kv_dtype": "fp8_ds_mla"},
            "'fp8_ds_mla' rows are 448 + 64 columns, but the model has",
        ),
        (
            {**V4, "compress_ratios": [0, 4]},
            {},
            "compress_ratios: expected a list of num_hidden_layers = 3 entries, and at most 1 more for "
            "num_nextn_predict_layers, got [0, 4]",
        ),
        (
            {**V4, "compress_ratios": [0] * 5},
            {},
            "and at most 1 more for num_nextn_predict_layers, got [0, 0, 0, 0, 0]",
        ),
        ({**V4, "compress_ratios": "004"}, {}, "compress_ratios: expected a list of num_hidden_layers = 3 entries"),
        ({**V4, "compress_ratios": [0, 2, 4]}, {}, "compress_ratios: layer 1: expected 0, 4 or 128, got 2"),
        ({**V4, "compress_ratios": [0, [], 4]}, {}, "compress_ratios: layer 1: expected 0, 4 or 128, got []"),
        (
            {**V4, "compress_ratios": [0, 4, 4, 4]},
            {"num_draft_layers": 1},
            "compress_ratios: draft layer 0: expected 0 (window only), got 4",
        ),
        (
            {**V4, "layer_types": [WINDOW_ONLY] * 3},
            {},
            "compress_ratios: expected the same layers as layer_types, got [0, 4, 128, 0]",
        ),
        ({**V4, "layer_types": [WINDOW_ONLY] * 4}, {}, "layer_types: expected a list of num_hidden_layers = 3 entries"),
        (
            {**V4, "compress_rates": {RATIO_4: 8}},
            {},
            "compress_rates: 'compressed_sparse_attention': expected 4, got 8",
        ),
        (
            {**V4, "compress_rate_hca": 64},
            {},
            "compress_rates: 'heavily_compressed_attention': expected 128, got 64",
        ),
        ({**V4, "compress_rates": [4]}, {}, "compress_rates: expected a mapping of layer types to ratios, got [4]"),
    ],
)
def test_what_cannot_be_planned_is_refused(config, options, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(config, **options)


def test_a_ratio_of_a_draft_layer_is_no_matter_without_draft_layers():
    assert len(specs_from_config({**V4, "compress_ratios": [0, 4, 4, 4]})) == 11


def test_v4_flash_has_167_caches_and_one_more_per_draft_layer():
    assert len(specs_from_config(FLASH)) == 167
    assert len(specs_from_config(FLASH, num_draft_layers=3)) == 170
