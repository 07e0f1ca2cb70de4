"""What is compiled ahead of time: each op's own launch builder, called with tensors that have no memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvstore_kernels import PageView, RowFormat, kv_format, latent_format
from kvstore_kernels.gather import ACCESSES_PER_LANE, gather_launch
from kvstore_kernels.gqa import gqa_launch
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.merge import merge_launch
from kvstore_kernels.mla import mla_launch
from kvstore_kernels.write import write_launch

BF16, FP32 = torch.bfloat16, torch.float32
LATENT = latent_format(576, 512)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to compile.

    `index_loads` is set for kernels that only move rows of 16-byte multiples: the bytes of an index load and the
    most there may be of them in a program. Everything else must be 16 bytes wide. `max_spill_bytes` is what a program
    may spill on any chip: nothing but for a tile of more than 16 heads. `narrow_stores`: width -> the stores of less
    than 16 bytes, those of records of scales; None: any. `wgmma`: whether sm_90 has to multiply with it, as it does
    tiles of 64 heads. `chips`: those that have what the kernel needs, None: all. `is_quick`: compiled by `--quick` too,
    which has of each kernel all kinds of rows.
    """

    kernel: str
    name: str
    build: Callable[[Target], Launch]
    index_loads: Mapping[int, int] | None = None
    max_spill_bytes: int = 0
    chips: tuple[str, ...] | None = None
    is_quick: bool = True
    narrow_stores: Mapping[int, int] | None = None
    wgmma: bool = False

    def is_for(self, chip: str) -> bool:
        """Whether the kernel is compiled for this chip."""
        return self.chips is None or chip in self.chips


def spill_limit(heads_per_row: int, *, quantised: bool = False) -> int:
    """The bytes that a read may spill, by the query heads that share a row."""
    return 0 if heads_per_row <= 16 else 512 if quantised else 272


def thorough(*cases: Case) -> Iterator[Case]:
    """The same, left out by `--quick`."""
    return (replace(case, is_quick=False) for case in cases)


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_view(row_format: RowFormat, rows_per_block: int, gap_bytes: int = 48, num_blocks: int = 64) -> PageView:
    """Pages with a gap between them, 16 bytes into a memory of their size."""
    stride = row_format.page_bytes(rows_per_block) + gap_bytes
    memory = meta(16 + num_blocks * stride, dtype=torch.uint8)
    return PageView(memory, 16, stride, num_blocks, rows_per_block, row_format)


def write_case(name: str, row_format: RowFormat, rows_per_block: int, split: bool = False, large: bool = False) -> Case:
    """A write of eight rows; `split`: a latent row from two tensors, `large`: pages over more than 2 GiB."""

    def build(target: Target) -> Launch:
        view = meta_view(row_format, rows_per_block, num_blocks=60_000 if large else 64)
        return build_write(view, target, split)

    return Case("write", f"{name} x {rows_per_block}", build, index_loads={8: 1})


def build_write(view: PageView, target: Target, split: bool = False, num_rows: int = 8, gap: int = 0) -> Launch:
    """The launch of a write whose source rows lie `gap` elements apart."""
    widths = [part.width for part in view.format.parts]
    if split:
        assert view.format.value_dim is not None
        widths = [view.format.value_dim, widths[0] - view.format.value_dim]
    dtype = view.format.parts[0].dtype
    parts = [meta(num_rows, width + gap, dtype=dtype)[:, :width] for width in widths]
    if not split:
        parts = [
            rows.unflatten(1, (part.num_heads, part.head_dim))
            for rows, part in zip(parts, view.format.parts, strict=True)
        ]
    return write_launch(view, meta(num_rows, dtype=torch.int64), parts, target)


def gather_case(
    name: str, row_format: RowFormat, rows_per_block: int, wraps: bool = False, large: bool = False
) -> Case:
    """A gather of 1,000 rows of eight sequences."""

    def build(target: Target) -> Launch:
        return build_gather(meta_view(row_format, rows_per_block, num_blocks=60_000 if large else 64), target, wraps)

    # Two ends of a sequence, its start, one step of the search, and a block id for each row that a lane meets.
    return Case("gather", f"{name} x {rows_per_block}", build, {4: 4 + ACCESSES_PER_LANE})


def build_gather(
    view: PageView, target: Target, wraps: bool = False, num_seqs: int = 8, width: int = 32, num_rows: int = 1000
) -> Launch:
    """The launch of a gather with a start per sequence."""
    table, lens = meta(num_seqs, width, dtype=torch.int32), meta(num_seqs + 1, dtype=torch.int32)
    start = meta(num_seqs, dtype=torch.int32)
    launch, _ = gather_launch(view, table, lens, num_rows, start, wraps, None, target)
    return launch


def mla_case(name: str, num_heads: int, rows_per_block: int, row_format: RowFormat = LATENT, **options: Any) -> Case:
    """An MLA decode of eight sequences; options as in `build_mla`."""

    def build(target: Target) -> Launch:
        return build_mla(meta_view(row_format, rows_per_block), target, num_heads, **options)

    return Case(
        "mla_decode", f"{name} x {rows_per_block}", build, max_spill_bytes=spill_limit(num_heads), wgmma=num_heads > 32
    )


def build_mla(
    view: PageView, target: Target, num_heads: int, num_seqs: int = 8, width: int = 32, num_splits: int = 8
) -> Launch:
    """The launch of an MLA decode's first stage."""
    (latent,), value_dim = view.format.parts, view.format.value_dim
    assert value_dim is not None
    q = meta(num_seqs, num_heads, latent.head_dim, dtype=latent.dtype)
    table, row_lens = read_tensors(num_seqs, width)
    out, lse = partials(q, value_dim, num_splits)
    return mla_launch(view, table, row_lens, q, out, lse, softmax_scale=0.07, target=target)


def gqa_case(name: str, num_heads: int, rows_per_block: int, row_format: RowFormat, **options: Any) -> Case:
    """A GQA decode of eight sequences; options as in `build_gqa`."""

    def build(target: Target) -> Launch:
        return build_gqa(meta_view(row_format, rows_per_block), target, num_heads, **options)

    group = num_heads // row_format.parts[0].num_heads
    limit = spill_limit(group)
    return Case("gqa_decode", f"{name} x {rows_per_block}", build, max_spill_bytes=limit, wgmma=group > 32)


def build_gqa(
    view: PageView,
    target: Target,
    num_heads: int,
    window: int | None = None,
    soft_cap: float | None = None,
    num_seqs: int = 8,
    width: int = 32,
    num_splits: int = 8,
) -> Launch:
    """The launch of a GQA decode's first stage."""
    key, value = view.format.parts
    q = meta(num_seqs, num_heads, key.head_dim, dtype=key.dtype)
    table, row_lens = read_tensors(num_seqs, width)
    out, lse = partials(q, value.head_dim, num_splits)
    return gqa_launch(
        view, table, row_lens, q, out, lse, softmax_scale=0.09, window=window, soft_cap=soft_cap, target=target
    )


def merge_case(dim: int, num_splits: int, *, sinks: bool = False) -> Case:
    """The merge of eight sequences of 16 heads into bf16."""

    def build(target: Target) -> Launch:
        q = meta(8, 16, dim, dtype=BF16)
        out, lse = partials(q, dim, num_splits)
        sink = meta(16, dtype=FP32) if sinks else None
        return merge_launch(out, lse, q, meta(8, 16, dtype=FP32), sink, target=target)

    return Case("merge", f"{num_splits} parts of {dim}{', sinks' * sinks}", build)


def read_tensors(num_seqs: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A block table and the row lengths."""
    return meta(num_seqs, width, dtype=torch.int32), meta(num_seqs, dtype=torch.int32)


def partials(q: torch.Tensor, value_dim: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first stage writes: fp32 where a merge follows, otherwise the result itself."""
    shape = (*q.shape[:2], num_splits)
    return meta(*shape, value_dim, dtype=FP32 if num_splits > 1 else q.dtype), meta(*shape, dtype=FP32)


MOVES = {
    "latent 576": (LATENT, (64, 1, 784)),
    "latent 576 fp32": (latent_format(576, 512, FP32), (64,)),
    "kv 8x128": (kv_format(8, 128), (16, 48)),
    "kv 1x64": (kv_format(1, 64), (16,)),
    "kv 3x64 fp32": (kv_format(3, 64, dtype=FP32), (16,)),
    "kv 2x72": (kv_format(2, 72), (48,)),
    "kv 2x80": (kv_format(2, 80), (64,)),
    "kv 4x192/128": (kv_format(4, 192, 128), (1,)),
    "kv_packed 8x128": (kv_format(8, 128, packed=True), (16,)),
    "kv_packed 2x96": (kv_format(2, 96, packed=True), (784,)),
}

CASES = (
    *(write_case(name, row_format, rows) for name, (row_format, blocks) in MOVES.items() for rows in blocks),
    write_case("latent 512 + 64", LATENT, 64, split=True),
    write_case("latent 512 + 64 fp32", latent_format(576, 512, FP32), 48, split=True),
    write_case("latent 576, over 2 GiB", LATENT, 64, large=True),
    *(gather_case(name, row_format, rows) for name, (row_format, blocks) in MOVES.items() for rows in blocks),
    gather_case("latent 576, over 2 GiB", LATENT, 64, large=True),
    gather_case("kv 8x128 window", kv_format(8, 128), 16, wraps=True),
    *(mla_case(f"{num_heads} heads", num_heads, 64) for num_heads in (16, 128)),
    *thorough(
        mla_case("32 heads", 32, 64),
        mla_case("16 heads", 16, 1),
        mla_case("128 heads", 128, 48),
        mla_case("16 heads, one split", 16, 64, num_splits=1),
    ),
    mla_case("16 heads fp32", 16, 64, latent_format(576, 512, FP32)),
    gqa_case("32/8 heads of 128", 32, 16, kv_format(8, 128)),
    gqa_case("32/8 of 128, window", 32, 48, kv_format(8, 128), window=4096),
    gqa_case("8/4 of 256, soft cap", 8, 16, kv_format(4, 256), soft_cap=50.0),
    gqa_case("64/1 of 128, packed", 64, 64, kv_format(1, 128, packed=True)),
    gqa_case("9/3 of 64 fp32", 9, 16, kv_format(3, 64, dtype=FP32)),
    *thorough(
        gqa_case("16/2 of 80", 16, 784, kv_format(2, 80)),
        gqa_case("16/4 of 192/128", 16, 1, kv_format(4, 192, 128)),
        gqa_case("8/1 of 576", 8, 64, kv_format(1, 576)),
    ),
    merge_case(512, 8),
    merge_case(128, 64),
    merge_case(80, 3),
    merge_case(64, 1, sinks=True),
)


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides and sizes only: each family must be one compiled kernel."""
    views = [
        meta_view(LATENT, 64, gap_bytes, num_blocks)
        for gap_bytes, num_blocks in ((0, 2), (16, 3), (48, 64), (1024, 777), (2**20, 64))
    ]
    write = [
        build_write(view, target, num_rows=num_rows, gap=gap)
        for view in views
        for num_rows, gap in ((1, 0), (2, 8), (16, 64), (4097, 1000))
    ]
    gather = [
        build_gather(view, target, num_seqs=num_seqs, width=width, num_rows=num_rows)
        for view in views
        for num_seqs, width, num_rows in ((1, 1, 1), (2, 16, 16), (3, 7, 4097), (64, 33, 65536))
    ]
    shapes = [
        {"num_seqs": num_seqs, "width": width, "num_splits": num_splits}
        for num_seqs, width, num_splits in ((2, 16, 16), (3, 7, 5), (64, 33, 2))
    ]
    mla = [build_mla(view, target, 16, **shape) for view in views for shape in shapes]
    kv_views = [meta_view(kv_format(8, 128), 16, gap_bytes) for gap_bytes in (0, 16, 2**20)]
    gqa = [
        build_gqa(view, target, 32, window, **shape) for view in kv_views for shape in shapes for window in (100, 4096)
    ]
    return {"write": write, "gather": gather, "mla_decode": mla, "gqa_decode": gqa}
