"""What is compiled ahead of time of writes into many layers, and of writes that encode e4m3 with the chip's cast."""

import torch

from benchmarks.aot_cases import BF16, FP32, LATENT, MOVES, Case, meta, meta_view, thorough
from kvstore_kernels import (
    PageView,
    RowFormat,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    layer_table,
    nvfp4_ds_mla_format,
    token_head_format,
)
from kvstore_kernels.casts import cast_check_launch
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.quant_write import quant_layers_launch, quant_write_launch
from kvstore_kernels.write import write_layers_launch

FP8 = torch.float8_e4m3fn
CAST_CHIPS = ("sm_90", "sm_100", "gfx950")


def layers_case(
    name: str, row_format: RowFormat, rows_per_block: int, widths: tuple[int, ...] | None = None, large: bool = False
) -> Case:
    """A write of eight rows into three layers; `large`: of pages over more than 2 GiB."""

    def build(target: Target) -> Launch:
        views = [meta_view(row_format, rows_per_block, num_blocks=60_000 if large else 64)] * 3
        return build_layers(views, target, widths)

    # Two loads of a layer: its address and its block stride.
    return Case("write_layers", f"{name} x {rows_per_block}", build, index_loads={8: 1 + 2})


def quant_layers_case(
    name: str, row_format: RowFormat, widths: tuple[int, ...], rows_per_block: int = 64, scale: str | None = None
) -> Case:
    """A quantising write of eight rows into three layers; `scale`: "float", or "tensor" of one per layer."""

    def build(target: Target) -> Launch:
        return build_layers([meta_view(row_format, rows_per_block)] * 3, target, widths, scale=scale)

    return Case("quant_write_layers", f"{name} x {rows_per_block}", build)


def build_layers(
    views: list[PageView],
    target: Target,
    widths: tuple[int, ...] | None = None,
    num_rows: int = 8,
    gap: int = 0,
    scale: str | None = None,
    own_slots: bool = True,
) -> Launch:
    """The launch of a write from rows `gap` elements apart, layers `gap` more; `widths`: None: those of the parts."""
    row_format, num_layers = views[0].format, len(views)
    widths = widths or tuple(part.width for part in row_format.parts)
    dtype = BF16 if row_format.quantised else row_format.parts[0].dtype
    parts = [
        meta(num_layers, num_rows * (width + gap) + gap, dtype=dtype)[:, : num_rows * (width + gap)].unflatten(
            1, (num_rows, width + gap)
        )[..., :width]
        for width in widths
    ]
    slots = meta(*((num_layers, num_rows) if own_slots else (num_rows,)), dtype=torch.int64)
    if not row_format.quantised:
        return write_layers_launch(layer_table(views), slots, parts, target)
    scales = {None: None, "float": [0.5] * len(row_format.parts)}.get(
        scale, [meta(num_layers, dtype=FP32) for _ in row_format.parts]
    )
    return quant_layers_launch(layer_table(views), slots, parts, target, scales)


def cast_case(name: str, row_format: RowFormat, width: int, dtype: torch.dtype = BF16) -> Case:
    """A quantising write of eight rows whose codes come from the chip's cast."""

    def build(target: Target) -> Launch:
        rows = meta(8, width, dtype=dtype)
        view = meta_view(row_format, 64)
        return quant_write_launch(view, meta(8, dtype=torch.int64), (rows,), target, hardware_cast=True)

    return Case("quant_write", f"{name} by cast x 64", build, chips=CAST_CHIPS)


def build_cast_check(target: Target) -> Launch:
    """The launch that compares the chip's cast with the codec."""
    return cast_check_launch(meta(2, 4, 65_536, dtype=torch.uint8), target)


CASES = (
    *(layers_case(name, row_format, blocks[0]) for name, (row_format, blocks) in MOVES.items()),
    layers_case("latent 512 + 64", LATENT, 64, (512, 64)),
    layers_case("latent 576, over 2 GiB", LATENT, 64, large=True),
    quant_layers_case("656", fp8_ds_mla_format(), (576,)),
    quant_layers_case("int8 8x128", token_head_format(8, 128), (1024, 1024), 16),
    *thorough(
        quant_layers_case("584", dsv4_format(), (512,)),
        quant_layers_case("132", indexer_format(132, 576), (128,)),
        quant_layers_case("352", nvfp4_ds_mla_format(), (576,)),
        quant_layers_case("latent fp8 512 + 64", latent_format(576, 512, FP8), (512, 64), scale="float"),
        quant_layers_case("kv fp8 8x128", kv_format(8, 128, dtype=FP8), (1024, 1024), 16, scale="tensor"),
    ),
    cast_case("584", dsv4_format(), 512),
    cast_case("584 fp32", dsv4_format(), 512, FP32),
    cast_case("656", fp8_ds_mla_format(), 576),
    cast_case("352", nvfp4_ds_mla_format(), 576),
    Case("cast_check", "every bf16 code, cast", build_cast_check, chips=CAST_CHIPS),
)


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in layers, strides and sizes only: each family must be one compiled kernel."""
    groups = [
        (gap_bytes, num_blocks, num_layers)
        for gap_bytes, num_blocks, num_layers in ((0, 1, 1), (16, 3, 2), (48, 64, 16), (2**20, 777, 61))
    ]
    rows = [(1, 0, True), (2, 8, False), (16, 64, True), (4097, 1000, False)]
    families = {}
    for kernel, row_format, widths in (
        ("write_layers", LATENT, None),
        ("quant_write_layers", fp8_ds_mla_format(), (576,)),
    ):
        views = [
            [meta_view(row_format, 64, gap_bytes, num_blocks)] * num_layers
            for gap_bytes, num_blocks, num_layers in groups
        ]
        families[kernel] = [
            build_layers(each, target, widths, num_rows, gap, own_slots=own_slots)
            for each in views
            for num_rows, gap, own_slots in rows
        ]
    return families
