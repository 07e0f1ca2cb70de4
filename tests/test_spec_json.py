"""Layer specs as JSON: every kind and format, and what is refused."""

import json
import re

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.layers import chunked_attention, full_attention, latent, recurrent_state, sliding_window
from kvstore.planner import plan_cache
from kvstore.spec_json import FIXED_FORMATS, NAMED_FORMATS, specs_from_dicts, specs_from_json, specs_to_dicts
from kvstore.specs import Alias, LayerSpec, NoCache
from kvstore_kernels import FORMATS
from kvstore_kernels.quantised import fp8_ds_mla_format, token_head_format

ROWS = {"block_size": 16, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}


def one(**fields):
    return specs_from_json([{"name": "a", **fields}])["a"]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"kind": "full", **ROWS}, full_attention(2, 64)),
        ({"kind": "full", **ROWS, "dtype": "bf16"}, full_attention(2, 64)),
        ({"kind": "full", **ROWS, "head_dim_v": 32}, full_attention(2, 64, 32)),
        ({"kind": "full", **ROWS, "format": "kv_packed"}, full_attention(2, 64, packed=True)),
        ({"kind": "sliding_window", **ROWS, "window": 8}, sliding_window(2, 64, window=8)),
        ({"kind": "chunked", **ROWS, "chunk": 8}, chunked_attention(2, 64, chunk=8)),
        (
            {"kind": "full", **ROWS, "format": "int8_token_head", "dtype": "int8"},
            LayerSpec("full", 16, token_head_format(2, 64)),
        ),
        (
            {"kind": "latent", "block_size": 64, "format": "fp8_ds_mla", "stride_alignment": 656},
            LayerSpec("latent", 64, fp8_ds_mla_format(), block_stride_multiple=656),
        ),
        (
            {
                "kind": "latent",
                "block_size": 64,
                "format": "latent",
                "head_dim": 576,
                "value_dim": 512,
                "dtype": "bfloat16",
                "tp_shards": 1,
            },
            latent(),
        ),
        (
            {"kind": "state", "block_size": 16, "state": [{"name": "s", "shape": [2, 3], "dtype": "float32"}]},
            recurrent_state([("s", (2, 3), torch.float32)]),
        ),
        ({"kind": "alias", "of": "b"}, Alias("b")),
        ({"kind": "none"}, NoCache()),
    ],
)
def test_fields_give_the_spec_of_the_constructor(fields, spec):
    assert one(**fields) == spec


def test_packed_rows_are_counted_per_head_and_pages_aligned():
    spec = one(kind="latent", block_size=64, kv_heads=1, row_bytes=584, alignment=576, page_bytes=37_440)
    assert (spec.payload_bytes, spec.page_bytes) == (37_376, 37_440)
    assert one(kind="latent", block_size=4, kv_heads=3, row_bytes=12).payload_bytes == 144


def test_every_row_format_has_a_name_here_but_those_of_other_fields():
    assert set(FORMATS) - set(NAMED_FORMATS) == {"bytes", "state"}
    for name in FIXED_FORMATS:
        assert one(kind="latent", block_size=16, format=name).format == FORMATS[name]()


def test_a_file_a_string_path_and_a_list_agree(tmp_path):
    layers = [{"name": "a", "kind": "full", **ROWS}, {"name": "b", "kind": "alias", "of": "a"}]
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(layers))
    assert specs_from_json(path) == specs_from_json(str(path)) == specs_from_json(layers)
    assert plan_cache(specs_from_json(path), num_frames=4).aliases == {"b": "a"}


def test_dicts_round_trip():
    specs = {"a": latent(), "b": Alias("a"), "c": NoCache(), "d": recurrent_state([("s", (2, 3), torch.float32)])}
    loaded = specs_from_dicts(json.loads(json.dumps(specs_to_dicts(specs))))
    assert loaded == specs
    assert list(loaded) == list(specs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "rotary", **ROWS},
            "layer 'a': kind: expected one of full, sliding_window, chunked,",
        ),
        ({"kind": None, **ROWS}, "layer 'a': kind: expected one of"),
        ({"kind": "full", **ROWS, "zzz": 3}, "layer 'a': unknown field 'zzz': expected one of name, kind,"),
        ({"kind": ["full"], **ROWS}, "layer 'a': kind: expected one of"),
        ({**ROWS}, "layer 'a': kind: expected one of"),
        ({"kind": "full", **ROWS, "heads": 3}, "layer 'a': unknown field 'heads': expected 'kv_heads'"),
        ({"kind": "full", **ROWS, "kv_heads": 0}, "layer 'a': kv_heads: expected an integer >= 1, got 0"),
        ({"kind": "full", **ROWS, "kv_heads": "2"}, "layer 'a': kv_heads: expected an integer, got '2' of type str"),
        ({"kind": "full", **ROWS, "head_dim": float("nan")}, "layer 'a': head_dim: expected an integer, got nan"),
        ({"kind": "full", "block_size": 16, "dtype": "bfloat16"}, "layer 'a': head_dim: expected an integer, got None"),
        ({"kind": "full", **ROWS, "dtype": "bf17"}, "layer 'a': dtype: expected the name of a torch dtype"),
        ({"kind": "full", **ROWS, "dtype": None}, "layer 'a': dtype: expected the name of a torch dtype"),
        ({"kind": "full", **ROWS, "format": "nf4"}, "layer 'a': format: expected one of kv, kv_packed, latent"),
        (
            {"kind": "full", **ROWS, "block_size": -16},
            "layer 'a': LayerSpec 'full': block_size: expected an integer in [1,",
        ),
        (
            {"kind": "full", **ROWS, "page_bytes": 4096},
            "page_bytes: expected the 8192 that its other fields give, got 4096",
        ),
        (
            {"kind": "full", **ROWS, "payload_bytes": 1},
            "payload_bytes: expected the 8192 that its other fields give, got 1",
        ),
        ({"kind": "full", **ROWS, "alignment": 0}, "layer 'a': alignment: expected an integer >= 1, got 0"),
        ({"kind": "full", **ROWS, "stride_alignment": "x"}, "block_stride_multiple: expected an integer, got 'x'"),
        ({"kind": "full", **ROWS, "padded_page_bytes": 16}, "padded_page_bytes: expected an integer >= 8192, got 16"),
        ({"kind": "sliding_window", **ROWS}, "window: expected an integer, got None"),
        ({"kind": "state", "block_size": 16}, "layer 'a': state: expected a list of objects with shape and dtype"),
        (
            {"kind": "state", "block_size": 16, "state": [{"shape": 3}]},
            "state: tensor 0: expected an object with shape",
        ),
        (
            {"kind": "state", "block_size": 16, "state": [{"shape": [0], "dtype": "int8"}]},
            "state: tensor 0: shape: expected an integer >= 1, got 0",
        ),
        ({"kind": "alias"}, "layer 'a': Alias: of: expected the name of a layer, got None"),
    ],
)
def test_fields_that_make_no_spec_are_refused(fields, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        one(**fields)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a": 1}, "specs: expected a list of objects, got dict"),
        (7, "specs: expected a list of objects, got int"),
        (["a"], "specs: layer 0: expected an object with fields, got 'a'"),
        ([{}], "specs: layer 0: name: expected a non-empty string, got None"),
        ([{"name": "a", "kind": "none"}] * 2, "specs: layer 1: name: expected another than that of a layer before it"),
        ("no/such/file.json", "specs: cannot read 'no/such/file.json': No such file or directory"),
    ],
)
def test_sources_that_hold_no_layers_are_refused(source, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        specs_from_json(source)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "specs.json"
    path.write_text("[{")
    with pytest.raises(PlanError, match="specs: expected JSON in "):
        specs_from_json(path)
