"""What is compiled ahead of time of the dequantising gather: its launch builders, with tensors without memory."""

import torch

from benchmarks.aot_cases import Case, meta, meta_view, thorough
from kvstore_kernels import PageView, RowFormat, kv_format, latent_format, token_head_format
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.quant_gather import dequantise_launch, read_launch
from kvstore_kernels.quantised import FORMATS, FP8

BF16 = torch.bfloat16


def gather_case(name: str, row_format: RowFormat, rows_per_block: int, dtype: torch.dtype = BF16) -> Case:
    """A gather of 1,000 rows of eight sequences."""

    def build(target: Target) -> Launch:
        return build_gather(meta_view(row_format, rows_per_block), target, dtype)

    return Case("gather_dequantised", f"{name} x {rows_per_block}", build)


def build_gather(
    view: PageView,
    target: Target,
    dtype: torch.dtype = BF16,
    num_seqs: int = 8,
    width: int = 32,
    num_rows: int = 1000,
    scale: float = 0.5,
) -> Launch:
    """The launch of a gather with a start per sequence."""
    table, lens = meta(num_seqs, width, dtype=torch.int32), meta(num_seqs + 1, dtype=torch.int32)
    start = meta(num_seqs, dtype=torch.int32)
    outside = [entry for entry in view.format.quantised if entry.scales is None]
    scales = (scale,) * len(outside) if outside else None
    launch, _ = dequantise_launch(view, table, lens, num_rows, start, False, dtype, scales, None, target)
    return launch


def read_case(name: str, row_format: RowFormat, rows_per_block: int, dtype: torch.dtype = BF16) -> Case:
    """A read of 1,000 slots."""

    def build(target: Target) -> Launch:
        view = meta_view(row_format, rows_per_block)
        return read_launch(view, meta(1000, dtype=torch.int64), dtype, None, None, target)[0]

    return Case("read_rows", f"{name} x {rows_per_block}", build)


QUANTISED = {
    **{name: FORMATS[name]() for name in ("fp8_ds_mla", "dsv4", "mxfp8_latent", "mxfp8_latent_split")},
    **{name: FORMATS[name]() for name in ("indexer_fp8", "indexer_mxfp4")},
    "kv fp8 8x128": kv_format(8, 128, dtype=FP8),
    "latent fp8 576": latent_format(576, 512, FP8),
    "int8_token_head 8x128": token_head_format(8, 128),
    "fp8_token_head 2x64": token_head_format(2, 64, dtype=FP8),
    **{name: FORMATS[name]() for name in ("nvfp4_latent", "nvfp4_latent_split", "nvfp4_ds_mla")},
}

QUICK = ("fp8_ds_mla", "dsv4", "nvfp4_ds_mla", "kv fp8 8x128", "int8_token_head 8x128")

CASES = (
    *(gather_case(name, QUANTISED[name], 64) for name in QUICK),
    *thorough(
        *(gather_case(name, row_format, 64) for name, row_format in QUANTISED.items() if name not in QUICK),
        gather_case("fp8_ds_mla", QUANTISED["fp8_ds_mla"], 1),
        gather_case("fp8_ds_mla to fp32", QUANTISED["fp8_ds_mla"], 64, torch.float32),
        gather_case("dsv4 to fp16", QUANTISED["dsv4"], 16, torch.float16),
    ),
    read_case("fp8_ds_mla", QUANTISED["fp8_ds_mla"], 64),
    read_case("latent 576 bf16", latent_format(576, 512), 64),
)


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides and sizes only: each family must be one compiled kernel."""
    views = [
        meta_view(QUANTISED["fp8_ds_mla"], 64, gap_bytes, num_blocks)
        for gap_bytes, num_blocks in ((0, 2), (16, 3), (48, 64), (1024, 777), (2**20, 64))
    ]
    gather = [
        build_gather(view, target, num_seqs=num_seqs, width=width, num_rows=num_rows)
        for view in views
        for num_seqs, width, num_rows in ((1, 1, 1), (2, 16, 16), (3, 7, 4097), (64, 33, 65536))
    ]
    kv = meta_view(QUANTISED["kv fp8 8x128"], 16)
    scaled = [build_gather(kv, target, scale=scale) for scale in (0.0, 0.5, 1.0, 16.0)]
    read = [
        read_launch(view, meta(num_rows, dtype=torch.int64), BF16, None, None, target)[0]
        for view in views
        for num_rows in (1, 16, 4097)
    ]
    return {"gather_dequantised": gather, "gather_dequantised, scales outside": scaled, "read_rows": read}
