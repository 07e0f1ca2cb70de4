"""specs_from_config: reading a config, dtypes and options, and what is refused. Families have files of their own."""

import json
import re

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.layers import full_attention
from kvstore.models import FAMILIES, specs_from_config
from kvstore.models.bundled import CONFIGS
from kvstore.models.config import WRAPPERS

MODELS = sorted(CONFIGS.glob("*.json"))

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "float16",
}


def without(name):
    return {key: value for key, value in LLAMA.items() if key != name}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_config_as_mapping_file_and_folder_gives_equal_specs(path, tmp_path):
    text = path.read_text()
    (tmp_path / "config.json").write_text(text)
    specs = specs_from_config(path)
    assert specs_from_config(json.loads(text)) == specs_from_config(str(path)) == specs
    assert specs_from_config(tmp_path) == specs


@pytest.fixture(scope="module")
def auto_config():
    return pytest.importorskip("transformers").AutoConfig


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_transformers_object_gives_equal_specs(path, auto_config):
    made = auto_config.for_model(**json.loads(path.read_text()))
    specs = specs_from_config(path)
    assert specs_from_config(made) == specs
    assert list(specs_from_config(made)) == list(specs)
    assert specs_from_config(made.to_dict()) == specs


@pytest.mark.parametrize("model_type", FAMILIES)
def test_class_defaults_are_those_of_transformers(model_type, auto_config):
    made = auto_config.for_model(model_type)
    silent = {"model_type": model_type, "num_hidden_layers": made.num_hidden_layers}
    if model_type == "nemotron_h":
        silent["hybrid_override_pattern"] = "ME*-"
    assert specs_from_config(silent) == specs_from_config(made)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_a_text_config_without_a_model_type_has_that_of_its_wrapper(model_type, auto_config):
    config = {"model_type": model_type, "text_config": {"num_hidden_layers": 12}}
    specs = specs_from_config(config)
    assert specs_from_config(auto_config.for_model(**config)) == specs
    assert specs_from_config({"model_type": WRAPPERS[model_type], "num_hidden_layers": 12}) == specs


def test_any_model_type_around_a_known_text_config_is_read():
    config = {"model_type": "unheard_of", "text_config": LLAMA}
    assert specs_from_config(config) == specs_from_config(LLAMA)


def test_a_text_config_may_be_an_object():
    class Text:
        def to_dict(self):
            return LLAMA

    assert specs_from_config({"model_type": "mistral3", "text_config": Text()}) == specs_from_config(LLAMA)


def test_a_wrapper_lends_its_dtype():
    config = {"model_type": "mistral3", "torch_dtype": "float32", "text_config": {**LLAMA, "torch_dtype": None}}
    assert specs_from_config(config)["layers.0.attn"] == full_attention(2, 64, dtype=torch.float32)
    config["text_config"]["dtype"] = "bfloat16"
    assert specs_from_config(config)["layers.0.attn"] == full_attention(2, 64, dtype=torch.bfloat16)


def test_llama_derives_what_its_config_leaves_out():
    spec = full_attention(2, 64, dtype=torch.float16)
    assert specs_from_config(LLAMA) == {"layers.0.attn": spec, "layers.1.attn": spec}
    silent = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "torch_dtype")}
    assert specs_from_config(silent)["layers.1.attn"] == full_attention(8, 64, dtype=torch.bfloat16)
    assert specs_from_config({**LLAMA, "head_dim": 72})["layers.0.attn"] == full_attention(2, 72, dtype=torch.float16)
    assert specs_from_config(without("hidden_size"))["layers.0.attn"] == full_attention(2, 512, dtype=torch.float16)


@pytest.mark.parametrize(
    ("kv_dtype", "fields", "dtype"),
    [
        (None, {"torch_dtype": None}, torch.bfloat16),
        (None, {"dtype": "float32"}, torch.float32),
        (None, {"torch_dtype": torch.float32}, torch.float32),
        (None, {"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ("bf16", {}, torch.bfloat16),
        ("bfloat16", {}, torch.bfloat16),
        ("fp32", {"torch_dtype": "float8_e4m3fn"}, torch.float32),
        (torch.float32, {}, torch.float32),
        ("fp8", {}, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, {}, torch.float8_e4m3fn),
    ],
)
def test_row_dtype(kv_dtype, fields, dtype):
    spec = specs_from_config({**LLAMA, **fields}, kv_dtype=kv_dtype)["layers.0.attn"]
    assert spec == full_attention(2, 64, dtype=dtype)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"), [("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.float8_e4m3fn)]
)
def test_rows_with_a_scale_per_token_and_head(kv_dtype, dtype):
    spec = specs_from_config(LLAMA, kv_dtype=kv_dtype)["layers.0.attn"]
    assert (spec.kind, spec.block_size) == ("full", 16)
    assert spec.page_bytes == 16 * 2 * (64 + 4 + 64 + 4)
    assert dtype in {part.dtype for part in spec.format.parts}


KNOWN = "model_type: expected one of llama, mistral,"
DTYPES = "bfloat16, bf16, float16, fp16, float32, fp32"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, KNOWN),
        ({"model_type": "gpt2"}, "jamba, or a text_config of one; got 'gpt2'"),
        ({}, "got None"),
        ({"model_type": ["llama"]}, "got ['llama']"),
        ({"model_type": "gpt2", "text_config": {"model_type": "gpt3"}}, "got 'gpt2'"),
        ({"model_type": "gpt2", "text_config": {"model_type": ["llama"]}}, "got 'gpt2'"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gpt2"}}, "got 'gpt2'"),
        ({"model_type": "mistral3"}, "text_config: expected a mapping (model_type 'mistral3'), got None"),
        (
            {"model_type": "llama4", "text_config": [1]},
            "text_config: expected a mapping (model_type 'llama4'), got [1]",
        ),
        (without("num_hidden_layers"), "num_hidden_layers: expected it in the config (model_type 'llama'), found none"),
        ({**LLAMA, "hidden_size": None}, "hidden_size: expected it in the config (model_type 'llama'), found none"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers: expected an integer in [0, 10000], got -1"),
        ({**LLAMA, "num_hidden_layers": "2"}, "num_hidden_layers: expected an integer, got '2' of type str"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads: expected an integer >= 1, got 0"),
        (
            {**LLAMA, "num_key_value_heads": 3},
            "num_key_value_heads: expected a divisor of the 8 num_attention_heads, got 3",
        ),
        ({**LLAMA, "head_dim": 0}, "head_dim: expected an integer >= 1, got 0"),
        (
            {**LLAMA, "hidden_size": 500},
            "head_dim: none in the config, and hidden_size 500 is no multiple of the 8 num_attention_heads",
        ),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, f"torch_dtype: expected one of {DTYPES}, got 'float8_e4m3fn'"),
        ({**LLAMA, "dtype": 16}, f"dtype: expected one of {DTYPES}, got 16"),
        ({**LLAMA, "per_layer_config": {"0": {}}}, "per_layer_config: expected none (model_type 'llama')"),
        (16, "the name of a bundled model, or a transformers config object, got 16 of type int"),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(config, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(config)


ROWS = f"{DTYPES}, fp8, float8_e4m3fn, int8_per_token_head, fp8_per_token_head, fp8_ds_mla"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "fp4"}, f"kv_dtype: expected one of {ROWS}, got 'fp4'"),
        ({"kv_dtype": torch.int8}, "kv_dtype: expected one of"),
        ({"kv_dtype": "fp8_ds_mla"}, "kv_dtype: 'fp8_ds_mla' rows are latent, but the model has layers of K and V"),
        ({"state_dtype": "fp8"}, f"state_dtype: expected one of {DTYPES}, got 'fp8'"),
        ({"state_dtype": "fp32"}, "state_dtype: the model has no recurrent states"),
        ({"block_size": 0}, "block_size: expected an integer >= 1, got 0"),
        ({"block_size": "16"}, "block_size: expected an integer, got '16' of type str"),
        ({"indexer_row_bytes": 132}, "indexer_row_bytes: the model has no indexers"),
        ({"ring_states": True}, "ring_states: the model has no compressor states"),
        ({"ring_states": 1}, "ring_states: expected a bool, got 1"),
        ({"num_draft_layers": -1}, "num_draft_layers: expected an integer in [0, 10000], got -1"),
        ({"tensor_parallel": 0}, "tensor_parallel: expected an integer >= 1, got 0"),
        ({"tensor_parallel": 3}, "tensor_parallel: expected a divisor or a multiple of the 2 KV heads, got 3"),
        ({"pipeline_stages": 0}, "pipeline_stages: expected an integer >= 1, got 0"),
        (
            {"pipeline_stages": 3, "pipeline_stage": 0},
            "pipeline_stages: expected at most the 2 layers of the model, got 3",
        ),
        (
            {"pipeline_stages": 2},
            "pipeline_stage: expected 0 to 1, one of the 2 pipeline_stages, got None",
        ),
        ({"pipeline_stages": 2, "pipeline_stage": 2}, "pipeline_stage: expected an integer in [0, 1], got 2"),
        ({"pipeline_stage": 1}, "pipeline_stage: expected"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_config(LLAMA, **options)


def test_a_row_that_its_format_cannot_hold_is_refused():
    with pytest.raises(PlanError, match="head_dim"):
        specs_from_config({**LLAMA, "head_dim": 63}, kv_dtype="int8_per_token_head")


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
