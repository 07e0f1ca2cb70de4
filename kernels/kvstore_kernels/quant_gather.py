"""gather_dequantised and read_rows: rows out of their pages as numbers, those of quantised formats times their scales.

    value = decode(code) * scale in fp32, then rounded to nearest even; every NaN comes out as the positive quiet one

Parts that are already of the output's dtype are moved bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.gather import _find_sequence
from kvstore_kernels.launch import Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_tables
from kvstore_kernels.quant_reads import (
    KINDS,
    PERMUTED,
    RowScales,
    ValuePart,
    expect_read_slots,
    expect_scales,
    output_piece,
    value_outputs,
    value_parts,
)
from kvstore_kernels.quant_tiles import part_constexprs, read_part

TILE_VALUES = 8192
MAX_TILE_ROWS = 64
ACCESSES_PER_LANE = 4
"""Of 16 codes each, or 64 values: what a lane keeps in flight."""


@triton.jit(
    do_not_specialize=[
        "first_stride",
        "second_stride",
        "table_stride",
        "table_width",
        "num_seqs",
        "num_rows",
        "num_blocks",
        "offset_units",
        "block_stride_units",
    ],
    do_not_specialize_on_alignment=[
        "slots_ptr",
        "block_table_ptr",
        "cu_row_lens_ptr",
        "start_ptr",
        "first_scale_ptr",
        "second_scale_ptr",
    ],
)
def _read_kernel(
    memory_ptr,  # [memory bytes] uint8
    slots_ptr,  # [num_rows] int64; None: rows of sequences
    block_table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart; None with slots, like the next two
    cu_row_lens_ptr,  # [num_seqs + 1] int32
    start_ptr,  # [num_seqs] int32; None: every sequence from its row 0
    first_ptr,  # [num_rows, width] integers of the output's element size, rows first_stride * FIRST_UNIT apart
    second_ptr,  # the same of the second part, or the first output again; None where a row has one part
    first_scale_ptr,  # [1] fp32; None: first_scale
    second_scale_ptr,
    first_scale,
    second_scale,
    first_stride: tl.int64,
    second_stride: tl.int64,
    table_stride: tl.int64,
    table_width: tl.int32,
    num_seqs: tl.int32,
    num_rows: tl.int64,
    num_blocks: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    ROWS_PER_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    WRAPS: tl.constexpr,
    IS_PERMUTED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    FIRST_UNIT: tl.constexpr,
    SECOND_UNIT: tl.constexpr,
    FIRST_KIND: tl.constexpr,
    FIRST_SIZE: tl.constexpr,
    FIRST_OFFSET: tl.constexpr,
    FIRST_PITCH: tl.constexpr,
    FIRST_HEADS: tl.constexpr,
    FIRST_HEAD_ELEMENTS: tl.constexpr,
    FIRST_HEAD_PITCH: tl.constexpr,
    FIRST_PER_ELEMENT: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    FIRST_TILE_HEADS: tl.constexpr,
    FIRST_TILE_ELEMENTS: tl.constexpr,
    FIRST_SCALE_KIND: tl.constexpr,
    FIRST_SCALE_SIZE: tl.constexpr,
    FIRST_SCALE_OFFSET: tl.constexpr,
    FIRST_SCALE_PITCH: tl.constexpr,
    FIRST_SCALE_HEAD_PITCH: tl.constexpr,
    FIRST_SCALE_READS: tl.constexpr,
    FIRST_TILE_SCALES: tl.constexpr,
    SECOND_KIND: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    SECOND_OFFSET: tl.constexpr,
    SECOND_PITCH: tl.constexpr,
    SECOND_HEADS: tl.constexpr,
    SECOND_HEAD_ELEMENTS: tl.constexpr,
    SECOND_HEAD_PITCH: tl.constexpr,
    SECOND_PER_ELEMENT: tl.constexpr,
    SECOND_COLUMN: tl.constexpr,
    SECOND_TILE_HEADS: tl.constexpr,
    SECOND_TILE_ELEMENTS: tl.constexpr,
    SECOND_SCALE_KIND: tl.constexpr,
    SECOND_SCALE_SIZE: tl.constexpr,
    SECOND_SCALE_OFFSET: tl.constexpr,
    SECOND_SCALE_PITCH: tl.constexpr,
    SECOND_SCALE_HEAD_PITCH: tl.constexpr,
    SECOND_SCALE_READS: tl.constexpr,
    SECOND_TILE_SCALES: tl.constexpr,
):
    """Program = (sequence, tile of its rows), or a tile of slots. Rows without a block are stored as zeros."""
    item = tl.program_id(0)
    if slots_ptr is not None:
        out_rows = item.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row = out_rows < num_rows
        slots = tl.load(slots_ptr + out_rows, mask=is_row, other=-1)
        exists = (slots >= 0) & (slots < num_blocks.to(tl.int64) * ROWS_PER_BLOCK)
        slots = tl.where(exists, slots, 0)
        block_ids = slots // ROWS_PER_BLOCK
        rows_in_block = slots - block_ids * ROWS_PER_BLOCK
    else:
        seq_idx = _find_sequence(cu_row_lens_ptr, item, num_seqs, TILE_ROWS)
        first_row = tl.load(cu_row_lens_ptr + seq_idx)
        row_len = tl.load(cu_row_lens_ptr + seq_idx + 1) - first_row
        first_tile_row = (item - first_row // TILE_ROWS - seq_idx) * TILE_ROWS
        if first_tile_row >= row_len:
            return
        rows = first_tile_row + tl.arange(0, TILE_ROWS)
        out_rows = first_row.to(tl.int64) + rows
        # The last bound keeps a store inside the output when num_rows and cu_row_lens disagree.
        is_row = (rows < row_len) & (out_rows >= 0) & (out_rows < num_rows)
        positions = rows
        if start_ptr is not None:
            positions += tl.load(start_ptr + seq_idx)
        block_idx = positions // ROWS_PER_BLOCK
        table_columns = block_idx % table_width if WRAPS else block_idx
        exists = is_row & (positions >= 0) & (table_columns < table_width)
        table_ptr = block_table_ptr + seq_idx.to(tl.int64) * table_stride.to(tl.int64)
        block_ids = tl.load(table_ptr + table_columns, mask=exists, other=-1).to(tl.int64)
        exists = exists & (block_ids >= 0) & (block_ids < num_blocks)
        rows_in_block = (positions - block_idx * ROWS_PER_BLOCK).to(tl.int64)
    page_units = offset_units.to(tl.int64) + block_ids * block_stride_units.to(tl.int64)
    read_part(
        memory_ptr,
        page_units,
        rows_in_block,
        exists,
        is_row,
        first_ptr + out_rows * first_stride.to(tl.int64) * FIRST_UNIT,
        first_scale_ptr,
        first_scale,
        DTYPE,
        FIRST_KIND,
        FIRST_SIZE,
        FIRST_OFFSET,
        FIRST_PITCH,
        FIRST_HEADS,
        FIRST_HEAD_ELEMENTS,
        FIRST_HEAD_PITCH,
        FIRST_PER_ELEMENT,
        FIRST_COLUMN,
        FIRST_TILE_HEADS,
        FIRST_TILE_ELEMENTS,
        FIRST_SCALE_KIND,
        FIRST_SCALE_SIZE,
        FIRST_SCALE_OFFSET,
        FIRST_SCALE_PITCH,
        FIRST_SCALE_HEAD_PITCH,
        FIRST_SCALE_READS,
        FIRST_TILE_SCALES,
        IS_PERMUTED,
    )
    if NUM_PARTS == 2:
        read_part(
            memory_ptr,
            page_units,
            rows_in_block,
            exists,
            is_row,
            second_ptr + out_rows * second_stride.to(tl.int64) * SECOND_UNIT,
            second_scale_ptr,
            second_scale,
            DTYPE,
            SECOND_KIND,
            SECOND_SIZE,
            SECOND_OFFSET,
            SECOND_PITCH,
            SECOND_HEADS,
            SECOND_HEAD_ELEMENTS,
            SECOND_HEAD_PITCH,
            SECOND_PER_ELEMENT,
            SECOND_COLUMN,
            SECOND_TILE_HEADS,
            SECOND_TILE_ELEMENTS,
            SECOND_SCALE_KIND,
            SECOND_SCALE_SIZE,
            SECOND_SCALE_OFFSET,
            SECOND_SCALE_PITCH,
            SECOND_SCALE_HEAD_PITCH,
            SECOND_SCALE_READS,
            SECOND_TILE_SCALES,
            IS_PERMUTED,
        )


def gather_dequantised(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    *,
    num_rows: int,
    start: torch.Tensor | None = None,
    wraps: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    row_scales: RowScales | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gathers rows as `gather_rows` does, of a quantised format, as numbers: codes times their scales.

    Args:
        view: the pages to read, of a quantised format.
        block_table, cu_row_lens, num_rows, start, wraps: as `gather_rows`.
        dtype: of the result: bf16, fp16 or fp32. A part that is not quantised and of this dtype is moved bit for bit.
        row_scales: for each part whose scale lies outside the cache a number, or an fp32 tensor of one element on the
            view's device, which is read there; None: 1.0.
        out: the tensors to fill, any stride between rows; None: new tensors.

    Returns: of latent rows and keys of an indexer one tensor [num_rows, 1, columns], nope columns first; of K and V
        two [num_rows, num_heads, head_dim]. Rows that do not exist are zeros.

    Raises: ValueError or TypeError for a format that is not quantised or not readable, a wrong shape, dtype, device
        or number.
    """
    target = current_target(_read_kernel)
    launch, outputs = dequantise_launch(
        view, block_table, cu_row_lens, num_rows, start, wraps, dtype, row_scales, out, target
    )
    launch.run()
    return outputs


def read_rows(
    view: PageView,
    slots: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_scales: RowScales | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Reads the rows of explicit slots as numbers, quantised or plain.

    Args:
        view: the pages to read.
        slots: int64 [num_rows], block_id * rows_per_block + row; one that does not exist, such as -1, gives zeros.
        dtype, row_scales, out: as `gather_dequantised`.

    Returns, raises: as `gather_dequantised`.
    """
    launch, outputs = read_launch(view, slots, dtype, row_scales, out, current_target(_read_kernel))
    launch.run()
    return outputs


def dequantise_launch(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    num_rows: int,
    start: torch.Tensor | None,
    wraps: bool,
    dtype: torch.dtype,
    row_scales: RowScales | None,
    out: Sequence[torch.Tensor] | None,
    target: Target,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    """The launch of `gather_dequantised` on `target` and the tensors it fills; the tensors may be meta tensors."""
    parts = value_parts(view, quantised=True)
    expect_tables(view, block_table, cu_row_lens, num_rows, start, wraps)
    num_seqs, table_width = block_table.shape
    tile_rows = _tile_rows(parts)
    tables = {
        "slots_ptr": None,
        "block_table_ptr": block_table,
        "cu_row_lens_ptr": cu_row_lens,
        "start_ptr": start,
        "table_stride": block_table.stride(0),
        "table_width": table_width,
        "num_seqs": num_seqs,
    }
    grid = num_rows // tile_rows + num_seqs if num_rows else 0
    return _launch(view, parts, tables, grid, num_rows, wraps, dtype, row_scales, out, target)


def read_launch(
    view: PageView,
    slots: torch.Tensor,
    dtype: torch.dtype,
    row_scales: RowScales | None,
    out: Sequence[torch.Tensor] | None,
    target: Target,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    """The launch of `read_rows` on `target` and the tensors it fills; the tensors may be meta tensors."""
    parts = value_parts(view, quantised=False)
    num_rows = expect_read_slots(view, slots)
    tables = {
        "slots_ptr": slots,
        "block_table_ptr": None,
        "cu_row_lens_ptr": None,
        "start_ptr": None,
        "table_stride": 0,
        "table_width": 0,
        "num_seqs": 0,
    }
    grid = triton.cdiv(num_rows, _tile_rows(parts))
    return _launch(view, parts, tables, grid, num_rows, False, dtype, row_scales, out, target)


def _tile_rows(parts: Sequence[ValuePart]) -> int:
    return max(1, min(MAX_TILE_ROWS, TILE_VALUES // max(part.tile_values for part in parts)))


def _launch(
    view: PageView,
    parts: Sequence[ValuePart],
    tables: Mapping[str, torch.Tensor | int | None],
    grid: int,
    num_rows: int,
    wraps: bool,
    dtype: torch.dtype,
    row_scales: RowScales | None,
    out: Sequence[torch.Tensor] | None,
    target: Target,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    scales = expect_scales(view, parts, row_scales)
    outputs = value_outputs(view, parts, num_rows, dtype, out)
    args: dict[str, torch.Tensor | int | float | None] = {
        **tables,
        "memory_ptr": view.memory,
        "num_rows": num_rows,
        "num_blocks": view.num_blocks,
        "offset_units": view.offset_bytes // ALIGNMENT_BYTES,
        "block_stride_units": view.block_stride_bytes // ALIGNMENT_BYTES,
    }
    constexprs: dict[str, Any] = {
        "ROWS_PER_BLOCK": view.rows_per_block,
        "DTYPE": KINDS[dtype],
        "WRAPS": wraps,
        "IS_PERMUTED": view.format.name == PERMUTED,
        "TILE_ROWS": _tile_rows(parts),
        "NUM_PARTS": len(parts),
    }
    for which, idx in (("first", 0), ("second", len(parts) - 1)):
        part, scale = parts[idx], scales[idx]
        piece = output_piece(outputs[part.output])
        stride, unit = piece.stride_and_unit()
        args |= {
            f"{which}_ptr": piece.rows,
            f"{which}_stride": stride,
            f"{which}_scale_ptr": scale if isinstance(scale, torch.Tensor) else None,
            f"{which}_scale": 1.0 if isinstance(scale, torch.Tensor) else scale,
        }
        described = {"UNIT": unit, **part_constexprs(view, part)}
        constexprs |= {f"{which.upper()}_{name}": value for name, value in described.items()}
    num_warps = lanes_of_16_bytes(
        constexprs["TILE_ROWS"] * max(part.tile_values for part in parts) // ACCESSES_PER_LANE, target
    )
    return Launch(_read_kernel, (grid,), args, constexprs, num_warps), outputs
