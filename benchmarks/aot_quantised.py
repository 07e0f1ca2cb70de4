"""Quantising writes to compile ahead of time: every format, every kind of source."""

import torch

from benchmarks.aot_cases import BF16, FP32, Case, meta, meta_view, thorough
from kvstore_kernels import (
    PageView,
    RowFormat,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    mxfp8_latent_format,
    nvfp4_ds_mla_format,
    nvfp4_latent_format,
    token_head_format,
)
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.quant_write import quant_write_launch

FP8 = torch.float8_e4m3fn


SCALE_STORES = {
    "fp8_ds_mla": {4: 1},
    "dsv4": {8: 1},
    "mxfp8_latent": {8: 1},
    "mxfp8_latent_split": {8: 1},
    "indexer_fp8": {4: 1},
    "indexer_mxfp4": {4: 1},
    "nvfp4_latent": {8: 1},
    "nvfp4_latent_split": {8: 1},
    "nvfp4_ds_mla": {8: 2},
    "int8_token_head": None,
    "fp8_token_head": None,
}
"""Stores of scales: of a record of 16 or 32 bytes each lane has a part. Scales beside heads leave no head aligned."""


def quant_case(
    name: str,
    row_format: RowFormat,
    widths: tuple[int, ...],
    rows_per_block: int = 64,
    dtype: torch.dtype = BF16,
    scale: str | None = None,
    large: bool = False,
) -> Case:
    """A quantising write; `widths`: columns of each source, `large`: pages over more than 2 GiB."""

    def build(target: Target) -> Launch:
        view = meta_view(row_format, rows_per_block, num_blocks=60_000 if large else 64)
        return build_quantised(view, target, widths, dtype, scale=scale)

    return Case("quant_write", f"{name} x {rows_per_block}", build, narrow_stores=SCALE_STORES.get(row_format.name, {}))


def build_quantised(
    view: PageView,
    target: Target,
    widths: tuple[int, ...],
    dtype: torch.dtype = BF16,
    num_rows: int = 8,
    gap: int = 0,
    scale: str | None = None,
) -> Launch:
    """The launch of a write whose source rows lie `gap` elements apart; `scale`: "float" or "tensor" per part."""
    parts = [meta(num_rows, width + gap, dtype=dtype)[:, :width] for width in widths]
    scales = {None: None, "float": [0.5] * len(view.format.parts)}.get(
        scale, [meta(1, dtype=FP32) for _ in view.format.parts]
    )
    return quant_write_launch(view, meta(num_rows, dtype=torch.int64), parts, target, scales)


QUANT_CASES = (
    quant_case("656", fp8_ds_mla_format(), (576,)),
    quant_case("584", dsv4_format(), (512,)),
    quant_case("528", mxfp8_latent_format(), (512,)),
    quant_case("132", indexer_format(132, 576), (128,)),
    quant_case("68", indexer_format(68, 576), (128,)),
    quant_case("352", nvfp4_ds_mla_format(), (576,)),
    quant_case("latent fp8", latent_format(576, 512, FP8), (576,), scale="tensor"),
    quant_case("kv fp8 8x128", kv_format(8, 128, dtype=FP8), (1024, 1024), 16, scale="tensor"),
    quant_case("int8 8x128", token_head_format(8, 128), (1024, 1024), 16),
    *thorough(
        quant_case("656 512 + 64", fp8_ds_mla_format(), (512, 64)),
        quant_case("656 fp32", fp8_ds_mla_format(), (576,), dtype=FP32),
        quant_case("656, over 2 GiB", fp8_ds_mla_format(), (576,), large=True),
        quant_case("584", dsv4_format(), (512,), rows_per_block=2),
        quant_case("584 fp32", dsv4_format(), (512,), dtype=FP32),
        quant_case("528 split", mxfp8_latent_format(page_split=True), (512,)),
        quant_case("288", nvfp4_latent_format(), (512,)),
        quant_case("288 split", nvfp4_latent_format(page_split=True), (512,)),
        quant_case("latent fp8 512 + 64", latent_format(576, 512, FP8), (512, 64), scale="float"),
        quant_case("fp8 2x72", token_head_format(2, 72, dtype=FP8), (144, 144), 48),
    ),
)


def quant_variant_family(target: Target) -> list[Launch]:
    """Launches that differ in strides and sizes only: one compiled kernel."""
    views = [
        meta_view(fp8_ds_mla_format(), 64, gap_bytes, num_blocks)
        for gap_bytes, num_blocks in ((0, 2), (16, 3), (48, 64), (2**20, 64))
    ]
    return [
        build_quantised(view, target, (576,), num_rows=num_rows, gap=gap)
        for view in views
        for num_rows, gap in ((1, 0), (2, 8), (16, 64), (4097, 1000))
    ]
