"""What is compiled ahead of time of the reads of quantised K and V."""

import torch

from benchmarks.aot_cases import BF16, FP32, Case, meta, meta_view, partials, read_tensors, spill_limit, thorough
from kvstore_kernels import PageView, RowFormat, kv_format, token_head_format
from kvstore_kernels.gqa import gqa_launch
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.quant_reads import RowScales
from kvstore_kernels.quantised import FP8


def quant_gqa_case(
    name: str, num_heads: int, rows_per_block: int, row_format: RowFormat, dtype: torch.dtype = BF16
) -> Case:
    """A decode of eight sequences."""

    def build(target: Target) -> Launch:
        return build_quant_gqa(meta_view(row_format, rows_per_block), target, num_heads, dtype=dtype)

    group = num_heads // row_format.parts[0].num_heads
    limit = spill_limit(group, quantised=True)
    return Case("gqa_decode", f"{name} x {rows_per_block}", build, max_spill_bytes=limit, wgmma=group > 32)


def build_quant_gqa(
    view: PageView,
    target: Target,
    num_heads: int,
    *,
    dtype: torch.dtype = BF16,
    row_scales: RowScales = (0.5, 0.25),
    num_seqs: int = 8,
    width: int = 32,
    num_splits: int = 8,
) -> Launch:
    """The launch of a decode's first stage."""
    key, value = view.format.part("k"), view.format.part("v")
    q = meta(num_seqs, num_heads, key.head_dim, dtype=dtype)
    table, row_lens = read_tensors(num_seqs, width)
    out, lse = partials(q, value.head_dim, num_splits)
    scales = (1.0, 1.0) if view.format.part("k").head_pitch_bytes else row_scales
    return gqa_launch(
        view, table, row_lens, q, out, lse, softmax_scale=0.09, window=None, row_scales=scales, target=target
    )


CASES = (
    quant_gqa_case("fp8, 32/8 heads of 128", 32, 16, kv_format(8, 128, dtype=FP8)),
    quant_gqa_case("int8 token head, 32/8 of 128", 32, 16, token_head_format(8, 128)),
    quant_gqa_case("int8 token head, 64/1 of 128", 64, 64, token_head_format(1, 128)),
    *thorough(
        quant_gqa_case("fp8, 32/8 heads of 128", 32, 64, kv_format(8, 128, dtype=FP8)),
        quant_gqa_case("fp8, 64/1 of 128", 64, 64, kv_format(1, 128, dtype=FP8)),
        quant_gqa_case("fp8, 32/8 of 128, fp16", 32, 16, kv_format(8, 128, dtype=FP8), torch.float16),
        quant_gqa_case("int8 token head, 32/8 of 128, fp16", 32, 16, token_head_format(8, 128), torch.float16),
        quant_gqa_case("fp8 token head, 16/2 of 64", 16, 48, token_head_format(2, 64, dtype=FP8)),
    ),
)


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides, sizes and scales only: each family must be one compiled kernel."""
    shapes = [
        {"num_seqs": num_seqs, "width": width, "num_splits": num_splits}
        for num_seqs, width, num_splits in ((2, 16, 16), (3, 7, 5), (64, 33, 2))
    ]
    views = [meta_view(kv_format(8, 128, dtype=FP8), 16, gap_bytes) for gap_bytes in (0, 16, 2**20)]
    inline = [meta_view(token_head_format(8, 128), 16, gap_bytes) for gap_bytes in (0, 16, 2**20)]
    tensors = (meta(1, dtype=FP32), meta(8, dtype=FP32)[3])
    numbers = [
        build_quant_gqa(view, target, 32, row_scales=scales, **shape)
        for view in views
        for shape in shapes
        for scales in ((1.0, 1.0), (0.5, 16.0))
    ]
    on_device = [
        build_quant_gqa(view, target, 32, row_scales=scales, **shape)
        for view in views
        for shape in shapes
        for scales in (tensors, tensors[::-1])
    ]
    beside = [build_quant_gqa(view, target, 32, **shape) for view in inline for shape in shapes]
    return {
        "gqa_decode, fp8": numbers,
        "gqa_decode, fp8, scales on the device": on_device,
        "gqa_decode, token head": beside,
    }
