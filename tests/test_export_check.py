"""Which reader can read which pages in place, and in what words it is told why not."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store_cases import mixed_layers, store_of

import kvstore
from kvstore import LayerSpec
from kvstore.integrations.metadata import READERS, export_check
from kvstore_kernels import FORMATS, dsv4_format, fp8_ds_mla_format, latent_format, mxfp8_latent_format

ROOT = Path(__file__).parent.parent
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
LAYER = "layers.0.attn"


def check(spec: LayerSpec, reader: str, beside: LayerSpec | None = None, **more: Any) -> list[str]:
    """The reasons for a layer, alone or in a block with another one; of a store without bytes, as any format has it."""
    layers = {LAYER: spec} if beside is None else {LAYER: spec, "layers.1.attn": beside}
    store = store_of(layers, 8, device=None, **({} if beside is None else {"layout": "overlay"}), **more)
    return export_check(store, LAYER, reader)


KV = kvstore.full_attention(8, 128)
WINDOWED = kvstore.sliding_window(8, 128, window=100)
SPARSE = LayerSpec("latent", 64, fp8_ds_mla_format(), block_stride_multiple=656)

READABLE = {
    ("flashinfer", "full"): KV,
    ("flashinfer", "window"): WINDOWED,
    ("flashinfer", "page of 1"): kvstore.full_attention(8, 128, block_size=1),
    ("flashinfer", "packed"): kvstore.full_attention(8, 64, packed=True),
    ("flashinfer_mla", "latent"): kvstore.latent(),
    ("flashinfer_mla", "4 tokens a row"): kvstore.latent(tokens_per_row=4),
    ("flash_mla", "latent"): kvstore.latent(dtype=torch.float16),
    ("flash_mla", "without rope"): kvstore.latent(512, 512),
    ("flash_mla", "4 tokens a row"): kvstore.latent(block_size=256, tokens_per_row=4),
    ("flash_mla_sparse", "656"): SPARSE,
    ("flash_mla_sparse", "584"): LayerSpec("latent", 256, dsv4_format(), 128, block_stride_multiple=576),
    ("flash_mla_sparse", "584, window"): LayerSpec("latent_window", 64, dsv4_format(), window=128),
    ("flash_mla_sparse", "528"): LayerSpec("latent", 64, mxfp8_latent_format()),
    ("flash_attention", "full"): kvstore.full_attention(8, 128, block_size=256),
    ("flash_attention", "window"): kvstore.sliding_window(8, 80, window=100, block_size=512),
    ("vllm", "full"): KV,
    ("vllm", "window"): WINDOWED,
    ("vllm", "latent"): kvstore.latent(block_size=16),
    ("vllm", "fp32"): kvstore.full_attention(8, 512, dtype=F32, block_size=48),
    ("flex", "full"): kvstore.full_attention(3, 40, dtype=F32, block_size=3),
    ("flex", "window"): WINDOWED,
    ("flex", "chunked"): kvstore.chunked_attention(8, 128, chunk=100),
    ("flex", "latent"): kvstore.latent(tokens_per_row=4),
}


@pytest.mark.parametrize("case", READABLE, ids=": ".join)
def test_readable(case: tuple[str, str]) -> None:
    assert check(READABLE[case], case[0]) == []


def test_every_reader_has_a_layer_that_it_can_read_and_one_that_it_cannot() -> None:
    assert {reader for reader, _ in READABLE} == {reader for reader, *_ in REFUSED} == set(READERS)


ODD_PAGE = kvstore.sliding_window(8, 128, window=100, padded_page_bytes=65552)
"""A page whose size is a multiple of 16 bytes and of no row."""

REFUSED: dict[tuple[str, str], tuple[LayerSpec, LayerSpec | None, list[str]]] = {
    ("flashinfer", "latent"): (
        kvstore.latent(),
        None,
        [
            "kind: expected full or sliding_window, got latent",
            "format: expected rows of kv or kv_packed, got latent: plan the layer with another format",
        ],
    ),
    ("flashinfer", "chunked"): (
        kvstore.chunked_attention(8, 128, chunk=100),
        None,
        ["kind: expected full or sliding_window, got chunked: gather its rows with KVStore.gather"],
    ),
    ("flashinfer", "fp32, head dim 80"): (
        kvstore.full_attention(8, 80, dtype=F32),
        None,
        [
            "dtype: expected bfloat16 or float16 or float8_e4m3fn or float8_e5m2, got float32: full_attention(dtype=)",
            "head_dim: expected 64 or 128 or 256 or 512, got 80",
        ],
    ),
    ("flashinfer", "V narrower than K"): (
        kvstore.full_attention(8, 128, 64),
        None,
        ["K and V: expected equal strides, got (row, head) of (2048, 256) and (1024, 128) B: "
         "full_attention(head_dim_v=None)"],
    ),
    ("flashinfer", "codes with scales inline"): (
        LayerSpec("full", 16, FORMATS["int8_token_head"](8, 128)),
        None,
        [
            "format: expected rows of kv or kv_packed, got int8_token_head: plan the layer with another format",
            "dtype: expected bfloat16 or float16 or float8_e4m3fn or float8_e5m2, got int8: full_attention(dtype=)",
        ],
    ),
    ("flashinfer", "tokens per row"): (
        LayerSpec("full", 16, KV.format, 4), None, ["tokens_per_row: expected 1, got 4"],
    ),
    ("flashinfer_mla", "width"): (
        kvstore.latent(320, 256), None, ["latent: expected 576 (V: 512) columns, got 320 (V: 256)"],
    ),
    ("flashinfer_mla", "window"): (
        LayerSpec("latent", 64, latent_format(576, 512), window=100),
        None,
        ["window: expected none, got 100: name its rows to a sparse kernel"],
    ),
    ("flash_mla", "page of 16"): (
        kvstore.latent(block_size=16), None, ["page: expected 64 rows, got 16: latent(block_size=64)"],
    ),
    ("flash_mla", "page of 16 rows of 4 tokens, fp32"): (
        kvstore.latent(block_size=64, tokens_per_row=4, dtype=F32),
        None,
        [
            "dtype: expected bfloat16 or float16, got float32: latent(dtype=)",
            "page: expected 64 rows, got 16: latent(block_size=256)",
        ],
    ),
    ("flash_mla", "window"): (
        LayerSpec("latent_window", 64, latent_format(576, 512), window=100),
        None,
        ["kind: expected latent, got latent_window: name its rows to a sparse kernel, see flash_mla_indices"],
    ),
    ("flash_mla", "656"): (
        SPARSE, None, ["format: expected rows of latent, got fp8_ds_mla: plan the layer with another format"],
    ),
    ("flash_mla_sparse", "page of 32, odd stride"): (
        LayerSpec("latent", 32, fp8_ds_mla_format()),
        kvstore.full_attention(8, 128),
        [
            "page: expected 64 rows, got 32: latent(block_size=64)",
            "block stride: expected a multiple of 656 B, got 65536: LayerSpec(block_stride_multiple=656)",
        ],
    ),
    ("flash_mla_sparse", "584, odd stride"): (
        LayerSpec("latent", 64, dsv4_format()),
        kvstore.full_attention(8, 128),
        ["block stride: expected a multiple of 576 B, got 65536: LayerSpec(block_stride_multiple=576)"],
    ),
    ("flash_mla_sparse", "528, page-split"): (
        LayerSpec("latent", 64, mxfp8_latent_format(page_split=True)),
        None,
        ["format: expected rows of fp8_ds_mla or dsv4 or mxfp8_latent, got mxfp8_latent_split: "
         "plan the layer with another format"],
    ),
    ("flash_attention", "page of 16"): (
        KV, None, ["page: expected a multiple of 256 rows, got 16: full_attention(block_size=256)"],
    ),
    ("flash_attention", "head dims"): (
        kvstore.full_attention(8, 192, 128, block_size=256),
        None,
        ["head_dim: expected K and V of one head dim, got 192 and 128"],
    ),
    ("flash_attention", "head dim"): (
        kvstore.sliding_window(8, 260, window=100, block_size=256),
        None,
        ["head_dim: expected a multiple of 8 up to 256, got 260"],
    ),
    ("vllm", "page of 8"): (
        kvstore.sliding_window(8, 128, window=100, block_size=8),
        None,
        ["page: expected a multiple of 16 rows, got 8: sliding_window(block_size=16)"],
    ),
    ("vllm", "page of 10 rows of 4 tokens"): (
        kvstore.latent(block_size=40, tokens_per_row=4),
        None,
        ["page: expected a multiple of 16 rows, got 10: latent(block_size=64)"],
    ),
    ("flex", "odd stride"): (
        kvstore.full_attention(8, 128),
        ODD_PAGE,
        ["block stride: expected a whole number of rows of 2048 B, got 65552 B: "
         "LayerSpec(block_stride_multiple=2048)"],
    ),
    ("flex", "two pitches"): (
        kvstore.full_attention(8, 128, 64),
        None,
        ["rows: expected K and V of one pitch, got 2048 and 1024 B: full_attention(packed=True)"],
    ),
    ("flex", "656"): (
        SPARSE, None,
        ["format: expected rows of kv or kv_packed or latent, got fp8_ds_mla: plan the layer with another format"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=": ".join)
def test_refused_with_all_reasons(case: tuple[str, str]) -> None:
    spec, beside, reasons = REFUSED[case]
    found = check(spec, case[0], beside)
    assert [re.sub(r" \[[^\[]*\]$", "", reason) for reason in found] == reasons
    assert all(re.search(r" \[.*\d.*\]$| \[FlashInfer, .*\]$| \[mask_mod .*\]$", reason) for reason in found)


@pytest.mark.parametrize(
    "case", [case for case in REFUSED if "block_stride_multiple" in str(REFUSED[case][2])], ids=": ".join
)
def test_the_argument_that_a_reason_names_helps(case: tuple[str, str]) -> None:
    spec, beside, reasons = REFUSED[case]
    multiple = int(re.findall(r"block_stride_multiple=(\d+)", " ".join(reasons))[0])
    assert not any(
        "block stride" in reason for reason in check(replace(spec, block_stride_multiple=multiple), case[0], beside)
    )


@pytest.mark.parametrize("reader", READERS)
def test_rings_and_states_are_for_no_reader(reader: str) -> None:
    store = store_of(mixed_layers(), 60)
    for layer, hint in (("layers.2.state", "see KVStore.state_view"), ("layers.3.ring", "KVStore.gather")):
        first = export_check(store, layer, reader)[0]
        assert re.search(rf"kind: expected .*, got (state|ring): .*{hint}", first)


@pytest.mark.parametrize("reader", ["flashinfer", "flex"])
def test_a_store_that_fills_new_blocks_with_nan(reader: str) -> None:
    reason = check(KV, reader, debug=True)
    assert len(reason) == 1
    assert reason[0].startswith("store: expected pages without NaN behind their last row, got debug=True")
    assert "KVStore(zero_new=True)" in reason[0]
    assert check(KV, reader, debug=True, zero_new=True) == []


def test_unknown_readers_and_layers() -> None:
    store = store_of({LAYER: KV}, 8)
    known = "flashinfer, flashinfer_mla, flash_mla, flash_mla_sparse, flash_attention, vllm, flex"
    for reader in ("xformers", None, ["vllm"]):
        with pytest.raises(ValueError, match=re.escape(f"reader: expected one of {known}, got {reader!r}")):
            export_check(store, LAYER, reader)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"layer: expected a layer of the plan \(layers.0.attn, ...\), got 'layers.9.attn'"
    ):
        export_check(store, "layers.9.attn", "vllm")


def test_an_alias_is_judged_by_its_owner() -> None:
    store = store_of({LAYER: kvstore.full_attention(8, 80), "layers.1.attn": kvstore.Alias(LAYER)}, 8)
    assert export_check(store, "layers.1.attn", "flashinfer") == export_check(store, LAYER, "flashinfer") != []


def test_nothing_of_others_is_imported() -> None:
    names = ("flashinfer", "flash_mla", "flash_attn", "vllm", "transformers", "torch.nn.attention.flex_attention")
    code = (
        "import sys, kvstore\n"
        "before = [name for name in sys.modules if name.startswith('kvstore.integrations')]\n"
        "import kvstore.integrations.metadata\n"
        f"print(before, [name for name in {names!r} if name in sys.modules])"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.strip() == "[] []"
