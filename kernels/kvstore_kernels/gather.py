"""gather_rows: rows of many sequences out of their pages, packed one behind the other, bit for bit."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvstore_kernels.launch import Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_movable, expect_tables, make_pieces, outputs
from kvstore_kernels.tiles import page_args, page_start, piece_args, piece_constexprs, tile_bytes

TILE_BYTES = 8192
MAX_TILE_ROWS = 64
ACCESSES_PER_LANE = 4
"""A tile of several rows keeps this many 16-byte accesses of each lane in flight."""


@triton.jit
def _find_sequence(cu_row_lens_ptr, item, num_seqs, TILE_ROWS: tl.constexpr):
    """The sequence of a work item: sequence s owns items `cu_row_lens[s] // TILE_ROWS + s` up to that of s + 1."""
    low = item * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first_item = tl.load(cu_row_lens_ptr + middle) // TILE_ROWS + middle
        low = tl.where(first_item <= item, middle, low)
        high = tl.where(first_item <= item, high, middle)
    return low


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
    do_not_specialize_on_alignment=["block_table_ptr", "cu_row_lens_ptr", "start_ptr"],
)
def _gather_kernel(
    memory_ptr,  # [memory elements] integers of the rows' element size, like both outputs
    block_table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart
    cu_row_lens_ptr,  # [num_seqs + 1] int32
    start_ptr,  # [num_seqs] int32; None: every sequence from its row 0
    first_ptr,  # [num_rows, FIRST_WIDTH], rows first_stride * FIRST_UNIT elements apart
    second_ptr,  # [num_rows, SECOND_WIDTH]; None where a row has one piece
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
    ELEMENT_BYTES: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    FIRST_UNIT: tl.constexpr,
    SECOND_UNIT: tl.constexpr,
    FIRST_PITCH: tl.constexpr,
    SECOND_PITCH: tl.constexpr,
    SECOND_AREA: tl.constexpr,
    JOINED: tl.constexpr,
    WRAPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program = (sequence, tile of its rows). Rows without a block are stored as zeros."""
    item = tl.program_id(0)
    seq_idx = _find_sequence(cu_row_lens_ptr, item, num_seqs, TILE_ROWS)
    first_row = tl.load(cu_row_lens_ptr + seq_idx)
    row_len = tl.load(cu_row_lens_ptr + seq_idx + 1) - first_row
    first_tile_row = (item - first_row // TILE_ROWS - seq_idx) * TILE_ROWS
    if first_tile_row >= row_len:
        return
    rows = first_tile_row + tl.arange(0, TILE_ROWS)
    out_rows = first_row.to(tl.int64) + rows
    # The second bound keeps a store inside the output when num_rows and cu_row_lens disagree.
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
    page_ptrs = memory_ptr + page_start(block_ids, offset_units, block_stride_units, ELEMENT_BYTES)

    columns = tl.arange(0, TILE)[None, :]
    in_first = columns < FIRST_WIDTH
    first_ptrs = first_ptr + (out_rows * first_stride.to(tl.int64) * FIRST_UNIT)[:, None] + columns
    record_ptrs = (page_ptrs + rows_in_block * FIRST_PITCH)[:, None] + columns
    if SECOND_WIDTH == 0:
        values = tl.load(record_ptrs, mask=exists[:, None] & in_first, other=0)
        tl.store(first_ptrs, values, mask=is_row[:, None] & in_first)
    else:
        second_ptrs = second_ptr + (out_rows * second_stride.to(tl.int64) * SECOND_UNIT)[:, None] + columns
        if JOINED:
            in_record = columns < FIRST_WIDTH + SECOND_WIDTH
            values = tl.load(record_ptrs, mask=exists[:, None] & in_record, other=0)
            tl.store(first_ptrs, values, mask=is_row[:, None] & in_first)
            tl.store(second_ptrs - FIRST_WIDTH, values, mask=is_row[:, None] & in_record & (columns >= FIRST_WIDTH))
        else:
            in_second = columns < SECOND_WIDTH
            second_record_ptrs = (page_ptrs + SECOND_AREA + rows_in_block * SECOND_PITCH)[:, None] + columns
            first = tl.load(record_ptrs, mask=exists[:, None] & in_first, other=0)
            second = tl.load(second_record_ptrs, mask=exists[:, None] & in_second, other=0)
            tl.store(first_ptrs, first, mask=is_row[:, None] & in_first)
            tl.store(second_ptrs, second, mask=is_row[:, None] & in_second)


def gather_rows(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    *,
    num_rows: int,
    start: torch.Tensor | None = None,
    wraps: bool = False,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copies rows `start[s] ... start[s] + row_lens[s] - 1` of every sequence s out of their pages, as raw bits.

    Row position p of a sequence lies in block `block_table[s, p // rows_per_block]`. A row whose column lies behind
    the table, or whose block id is none of 0 ... num_blocks - 1, does not exist and comes out as zeros.

    Args:
        view: the pages to read.
        block_table: int32 [num_seqs, width]; the stride between its rows is free.
        cu_row_lens: int32 [num_seqs + 1], 0 and the running sum of the numbers of rows to gather. Looked at only on a
            CPU, where that costs no synchronisation; elsewhere wrong sums give wrong rows, but no access outside.
        num_rows: `cu_row_lens[-1]`.
        start: int32 [num_seqs], the first row position of each sequence; None: 0.
        wraps: block i of a sequence is in column i % width (window groups) instead of column i.
        out: for each part of the format a tensor [num_rows, num_heads, head_dim] to fill, any stride between rows;
            None: new tensors.

    Returns: one tensor [num_rows, num_heads, head_dim] per part: the sequences' rows one behind the other.

    Raises: ValueError or TypeError for a wrong shape, dtype, device or number.
    """
    target = current_target(_gather_kernel)
    launch, parts = gather_launch(view, block_table, cu_row_lens, num_rows, start, wraps, out, target)
    launch.run()
    return parts


def gather_launch(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    num_rows: int,
    start: torch.Tensor | None,
    wraps: bool,
    out: Sequence[torch.Tensor] | None,
    target: Target,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    """The launch of `gather_rows` on `target` and the tensors it fills; the tensors may be meta tensors."""
    expect_movable(view)
    expect_tables(view, block_table, cu_row_lens, num_rows, start, wraps)
    parts = outputs(view, num_rows, out)
    pieces = make_pieces(view.format.parts, parts)
    num_seqs, table_width = block_table.shape
    element_bytes, row_tile_bytes = pieces[0].element_bytes, tile_bytes(pieces)
    tile_rows = max(1, min(MAX_TILE_ROWS, TILE_BYTES // row_tile_bytes))
    launch = Launch(
        kernel=_gather_kernel,
        grid=(num_rows // tile_rows + num_seqs if num_rows else 0,),
        args={
            **page_args(view, element_bytes),
            **piece_args(pieces),
            "block_table_ptr": block_table,
            "cu_row_lens_ptr": cu_row_lens,
            "start_ptr": start,
            "table_stride": block_table.stride(0),
            "table_width": table_width,
            "num_seqs": num_seqs,
            "num_rows": num_rows,
            "num_blocks": view.num_blocks,
        },
        constexprs={
            **piece_constexprs(view, pieces),
            "WRAPS": wraps,
            "TILE_ROWS": tile_rows,
            "TILE": row_tile_bytes // element_bytes,
        },
        num_warps=lanes_of_16_bytes(tile_rows * row_tile_bytes // ACCESSES_PER_LANE, target),
    )
    return launch, parts
