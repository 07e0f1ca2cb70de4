"""specs_from_config: from the fields of a Hugging Face config to layer specs, against a reference planner."""

import json
import re
from pathlib import Path

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.explain import blocks_per_sequence
from kvstore.models import FAMILIES, specs_from_config
from kvstore.planner import plan_cache
from kvstore.specs import full_attention, latent, sliding_window

DATA = Path(__file__).parent / "data"
MODELS = sorted((DATA / "models").glob("*.json"))
REFERENCE = json.loads((DATA / "planning_models.json").read_text())["models"]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "float16",
}
QWEN = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4}
DEEPSEEK = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "num_attention_heads": 16,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["id"])
def test_models_against_the_reference_planner(case):
    config = DATA / "models" / case["config"]
    specs = specs_from_config(config, kv_dtype="bf16", block_size=case["block_size"])
    assert [next(iter(specs)), list(specs)[-1], len(specs)] == [*case["layers"], case["num_layers"]]
    assert {(spec.kind, spec.page_bytes) for spec in specs.values()} == {(case["kind"], case["page_bytes"])}
    for memory, num_blocks in case["num_blocks"].items():
        plan = plan_cache(config, memory=int(memory), kv_dtype="bf16", block_size=case["block_size"])
        assert plan.bytes_per_block == plan.lower_bound == case["bytes_per_block"]
        assert plan.num_blocks == (num_blocks,)
    assert blocks_per_sequence(plan.groups[0], case["max_length"]) == case["blocks_per_sequence"]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_config_as_mapping_file_and_folder_gives_equal_specs(path, tmp_path):
    text = path.read_text()
    (tmp_path / "config.json").write_text(text)
    specs = specs_from_config(path)
    assert specs_from_config(json.loads(text)) == specs_from_config(str(path)) == specs
    assert specs_from_config(tmp_path) == specs
    assert {spec.format.parts[0].dtype for spec in specs.values()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def auto_config():
    return pytest.importorskip("transformers").AutoConfig


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_transformers_object_gives_equal_specs(path, auto_config):
    config = json.loads(path.read_text())
    made = auto_config.for_model(**config)
    assert specs_from_config(made) == specs_from_config(path)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "num_key_value_heads": None},
        {**LLAMA, "model_type": "mistral"},
        {**LLAMA, "model_type": "mistral", "sliding_window": None},
        {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"} | {"model_type": "mistral"},
        {**LLAMA, "model_type": "qwen2"},
        {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 30},
        {**QWEN, "max_window_layers": 3},
        {**QWEN, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {**LLAMA, "model_type": "qwen3"},
        {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"} | {"model_type": "qwen3", "hidden_size": 96},
        DEEPSEEK,
    ],
    ids=lambda config: "-".join(str(value) for value in config.values() if isinstance(value, str | int | None))[:60],
)
def test_class_defaults_are_those_of_transformers(config, auto_config):
    assert specs_from_config(auto_config.for_model(**config)) == specs_from_config(config)


def test_llama_derives_what_its_config_leaves_out():
    spec = full_attention(2, 64, dtype=torch.float16)
    assert specs_from_config(LLAMA) == {"layers.0.attn": spec, "layers.1.attn": spec}
    silent = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "torch_dtype")}
    assert specs_from_config(silent)["layers.1.attn"] == full_attention(8, 64, dtype=torch.bfloat16)
    assert specs_from_config({**LLAMA, "head_dim": 72})["layers.0.attn"] == full_attention(2, 72, dtype=torch.float16)


@pytest.mark.parametrize(
    ("kv_dtype", "fields", "dtype"),
    [
        (None, {"torch_dtype": None}, torch.bfloat16),
        (None, {"dtype": "float32"}, torch.float32),
        (None, {"torch_dtype": torch.float32}, torch.float32),
        (None, {"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ("bf16", {}, torch.bfloat16),
        ("fp32", {"torch_dtype": "float8_e4m3fn"}, torch.float32),
        (torch.float32, {}, torch.float32),
    ],
)
def test_row_dtype(kv_dtype, fields, dtype):
    specs = specs_from_config({**LLAMA, **fields}, kv_dtype=kv_dtype)
    assert specs["layers.0.attn"].format.parts[0].dtype == dtype


def test_mistral_with_a_window_has_it_in_every_layer():
    specs = specs_from_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, block_size=32)
    windowed = sliding_window(2, 64, window=4096, dtype=torch.float16, block_size=32)
    assert specs == {"layers.0.attn": windowed, "layers.1.attn": windowed}
    plan = plan_cache({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, num_frames=600)
    assert [(group.name, group.retention.window) for group in plan.groups] == [("window4096_b16", 4096)]


def test_mistral3_reads_its_text_config_and_takes_the_dtype_from_outside():
    config = {"model_type": "mistral3", "torch_dtype": "float32", "text_config": {**LLAMA, "torch_dtype": None}}
    assert specs_from_config(config)["layers.0.attn"] == full_attention(2, 64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, []),
        ({"max_window_layers": 0}, [0, 1, 2, 3]),
        ({"max_window_layers": 3}, [3]),
        ({"max_window_layers": 0, "use_sliding_window": False}, []),
        ({"max_window_layers": 0, "sliding_window": None}, []),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "max_window_layers": 0}, [1, 3]),
        ({"layer_types": ["full_attention"] * 4, "use_sliding_window": False}, []),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type, fields, windowed):
    specs = specs_from_config({**QWEN, "model_type": model_type, "head_dim": 64, **fields})
    assert [i for i, spec in enumerate(specs.values()) if spec.window == 64] == windowed
    assert {spec.kind for spec in specs.values()} <= {"full", "sliding_window"}


def test_deepseek_rows_are_latent_and_replicated():
    row = latent(288, 256, dtype=torch.bfloat16, block_size=64)
    assert list(specs_from_config(DEEPSEEK).values()) == [row] * 3
    assert specs_from_config(DEEPSEEK, tensor_parallel=8) == specs_from_config(DEEPSEEK)
    assert specs_from_config(DEEPSEEK, block_size=16)["layers.2.attn"].page_bytes == 16 * 288 * 2


@pytest.mark.parametrize(("tensor_parallel", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_kv_heads_are_divided_or_replicated(tensor_parallel, heads):
    specs = specs_from_config({**LLAMA, "num_key_value_heads": 4}, tensor_parallel=tensor_parallel)
    assert specs["layers.0.attn"].format.parts[0].num_heads == heads


def without(name):
    return {key: value for key, value in LLAMA.items() if key != name}


KNOWN = "llama, mistral, qwen2, qwen3, deepseek_v2, deepseek_v3, or mistral3 around one"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma3"}, f"model_type: expected one of {KNOWN}; got 'gemma3'"),
        ({}, f"model_type: expected one of {KNOWN}; got None"),
        ({"model_type": ["llama"]}, f"model_type: expected one of {KNOWN}; got ['llama']"),
        ({"model_type": "deepseek_v32"}, "got 'deepseek_v32': indexer and compressed caches are not planned yet"),
        ({"model_type": "deepseek_v4"}, "got 'deepseek_v4': indexer and compressed caches are not planned yet"),
        ({**DEEPSEEK, "index_topk": 2048}, "index_topk: indexer and compressed caches are not planned yet, got 2048"),
        ({**DEEPSEEK, "compress_ratios": [0]}, "compress_ratios: indexer and compressed caches are not planned yet"),
        ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank: expected it in the config (model_type 'deepseek_v2')"),
        ({"model_type": "mistral3"}, "text_config: expected a mapping (model_type 'mistral3'), got None"),
        (without("num_hidden_layers"), "num_hidden_layers: expected it in the config (model_type 'llama'), found none"),
        (without("hidden_size"), "hidden_size: expected it in the config (model_type 'llama'), found none"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers: expected an integer >= 0, got -1"),
        ({**LLAMA, "num_hidden_layers": "2"}, "num_hidden_layers: expected an integer, got '2' of type str"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads: expected an integer >= 1, got 0"),
        ({**LLAMA, "head_dim": 0}, "head_dim: expected an integer >= 1, got 0"),
        (
            {**LLAMA, "hidden_size": 500},
            "head_dim: none in the config, and hidden_size 500 is no multiple of the 8 num_attention_heads",
        ),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "torch_dtype: expected one of bfloat16, bf16, float16, fp16"),
        ({**LLAMA, "dtype": 16}, "dtype: expected one of bfloat16, bf16, float16, fp16, float32, fp32, got 16"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 0}, "sliding_window: expected an integer >= 1, got 0"),
        ({**QWEN, "layer_types": ["full_attention"]}, "layer_types: expected a list of num_hidden_layers = 4 entries"),
        ({**QWEN, "layer_types": "full"}, "layer_types: expected a list of num_hidden_layers = 4 entries, got 'full'"),
        (
            {**QWEN, "layer_types": ["chunked_attention"] * 4},
            "layer_types: layer 0: expected 'full_attention' or 'sliding_attention', got 'chunked_attention'",
        ),
        (
            {**QWEN, "layer_types": ["sliding_attention"] * 4, "use_sliding_window": False},
            "layer_types: layer 0 is 'sliding_attention', but the config turns its window off",
        ),
        (16, "config: expected a mapping, the path of a JSON file or folder, or a transformers config object, got 16"),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(config, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype: expected one of bfloat16, bf16, float16, fp16, float32, fp32, got 'fp8'"),
        ({"kv_dtype": torch.int8}, "kv_dtype: expected one of"),
        ({"block_size": 0}, "block_size: expected an integer >= 1, got 0"),
        ({"block_size": "16"}, "block_size: expected an integer, got '16' of type str"),
        ({"tensor_parallel": 0}, "tensor_parallel: expected an integer >= 1, got 0"),
        ({"tensor_parallel": 3}, "tensor_parallel: expected a divisor or a multiple of the 2 KV heads, got 3"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(LLAMA, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config: expected JSON in"), ("[1]", "config: expected a JSON object in"), (None, "config: cannot read")],
)
def test_files_that_hold_no_config_are_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    for config in (path, tmp_path):
        with pytest.raises(PlanError, match=f"{re.escape(message)} .*config.json"):
            specs_from_config(config)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="config: expected JSON in"):
        specs_from_config(tmp_path / "model.bin")


def test_every_family_is_tested_here():
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3"}
