"""mla_decode: attention over paged latent rows; one load of a row serves as K and, its leading columns, as V."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.latent_rows import (
    LatentRow,
    latent_row,
    outside_scale_of,
    row_args,
    row_constexprs,
    row_tile,
)
from kvstore_kernels.latent_tiles import load_columns, load_query, outside_scale, page_units, store_values
from kvstore_kernels.launch import Launch, Target, current_target
from kvstore_kernels.merge import merge_launch
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_rules import RowScale
from kvstore_kernels.reads import (
    allocate_outputs,
    allocate_partials,
    expect_read,
    expect_sinks,
    expect_workspace,
    query_args,
    read_args,
)
from kvstore_kernels.softmax import (
    LOG2_E,
    mask_scores,
    normalise,
    softmax_step,
    split_tiles,
    table_end,
    tile_blocks,
    tile_rows,
    visible_ends,
)
from kvstore_kernels.splits import ReadTile, choose_num_splits, num_cores


@triton.jit(
    do_not_specialize=[
        "q_stride",
        "table_stride",
        "table_width",
        "num_blocks",
        "num_heads",
        "num_queries",
        "lens_per_query",
        "offset_units",
        "block_stride_units",
    ],
    do_not_specialize_on_alignment=["table_ptr", "row_lens_ptr", "lse_ptr", "row_scale_ptr"],
)
def _mla_kernel(
    first_ptr,  # [memory words] of the first columns, see `latent_rows.Run`
    first_scales_ptr,  # [memory words] of their scales; None: no scales in the rows
    second_ptr,  # both the same of the second columns; None where a row has no such
    second_scales_ptr,
    table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart
    row_lens_ptr,  # [num_seqs] int32, or [num_seqs, num_queries] with lens_per_query
    q_ptr,  # [num_seqs, num_queries, num_heads, LATENT_DIM], sequences q_stride * Q_UNIT elements apart
    out_ptr,  # [num_seqs, num_queries, num_heads, num_splits, VALUE_DIM]
    lse_ptr,  # [num_seqs, num_queries, num_heads, num_splits] fp32
    row_scale_ptr,  # [1] fp32; None: row_scale
    q_stride: tl.int64,
    table_stride: tl.int64,
    table_width: tl.int32,
    num_blocks: tl.int32,
    num_heads: tl.int32,
    num_queries: tl.int32,
    lens_per_query: tl.int32,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    softmax_scale: tl.float32,
    row_scale: tl.float32,
    ROWS_PER_BLOCK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FIRST: tl.constexpr,  # latent_rows.Run
    FIRST_SCALES: tl.constexpr,  # latent_rows.Run or None, like the next two
    SECOND: tl.constexpr,
    SECOND_SCALES: tl.constexpr,
    SECOND_IS_VALUE: tl.constexpr,
    IS_SCALED_OUTSIDE: tl.constexpr,
    Q_UNIT: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = (sequence and tile of heads; split of the rows). Head tiles of a sequence run together and share L2.

    The heads of a sequence are those of all its queries, one query behind the other.
    """
    heads_of_seq = num_queries * num_heads
    num_head_tiles = tl.cdiv(heads_of_seq, TILE_H)
    seq_idx = (tl.program_id(0) // num_head_tiles).to(tl.int64)
    heads = tl.program_id(0) % num_head_tiles * TILE_H + tl.arange(0, TILE_H)
    in_heads = heads < heads_of_seq

    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_rows = q_ptr + seq_idx * q_stride.to(tl.int64) * Q_UNIT + heads[:, None] * LATENT_DIM
    q_first = load_query(q_rows, in_heads, FIRST, INTERPRETED)
    if SECOND is not None:
        q_second = load_query(q_rows, in_heads, SECOND, INTERPRETED)
    if SECOND_IS_VALUE:
        second_sum = tl.zeros([TILE_H, q_second.shape[1]], tl.float32)
    running_max = tl.full([TILE_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE_H], tl.float32)
    first_sum = tl.zeros([TILE_H, q_first.shape[1]], tl.float32)
    row_scale = outside_scale(row_scale, row_scale_ptr, IS_SCALED_OUTSIDE)
    scale = softmax_scale * row_scale * LOG2_E

    ends = visible_ends(row_lens_ptr, seq_idx, heads // num_heads, in_heads, num_queries, lens_per_query)
    end = table_end(tl.max(ends, 0), table_width, ROWS_PER_BLOCK)
    first_tile, last_tile = split_tiles(0, end, TILE_N)
    table_ptr += seq_idx * table_stride.to(tl.int64)
    block_ids = tile_blocks(first_tile, end, table_ptr, table_width, ROWS_PER_BLOCK, False, TILE_N)
    for tile in range(first_tile, last_tile):
        # One tile ahead, so that no load of rows waits for a load of their address.
        next_block_ids = tile_blocks(tile + 1, end, table_ptr, table_width, ROWS_PER_BLOCK, False, TILE_N)
        rows, exists = tile_rows(tile, 0, end, block_ids, num_blocks, ROWS_PER_BLOCK, TILE_N)
        pages = page_units(block_ids, offset_units, block_stride_units)
        first = load_columns(first_ptr, first_scales_ptr, dtype, pages, rows, exists, FIRST, FIRST_SCALES, INTERPRETED)
        scores = tl.dot(q_first, tl.trans(first), input_precision="ieee")
        if SECOND is not None:
            second = load_columns(
                second_ptr, second_scales_ptr, dtype, pages, rows, exists, SECOND, SECOND_SCALES, INTERPRETED
            )
            scores = tl.dot(q_second, tl.trans(second), scores, input_precision="ieee")
        scores = mask_scores(scores * scale, tile, ends, 0, exists, False, TILE_N)
        weights, running_max, running_sum, factor = softmax_step(scores, running_max, running_sum)
        weights = weights.to(first.dtype)
        first_sum = tl.dot(weights, first, first_sum * factor[:, None], input_precision="ieee")
        if SECOND_IS_VALUE:
            second_sum = tl.dot(weights, second, second_sum * factor[:, None], input_precision="ieee")
        block_ids = next_block_ids

    out, lse = normalise(first_sum, running_max, running_sum)
    if IS_SCALED_OUTSIDE:
        out = tl.where(lse[:, None] == float("-inf"), 0.0, out * row_scale)
    partial = (seq_idx * heads_of_seq + heads) * tl.num_programs(1) + tl.program_id(1)
    out_rows = out_ptr + partial[:, None] * VALUE_DIM
    store_values(out_rows, out, in_heads, VALUE_DIM, FIRST, INTERPRETED)
    if SECOND_IS_VALUE:
        out, lse = normalise(second_sum, running_max, running_sum)
        store_values(out_rows, out, in_heads, VALUE_DIM, SECOND, INTERPRETED)
    tl.store(lse_ptr + partial, lse, mask=in_heads)


def mla_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    row_scales: Sequence[RowScale] | RowScale | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or several queries per sequence over latent rows: K is a row, V its first `value_dim` columns.

    Args:
        view: pages of latent rows, plain or quantised. Codes times their scales are rounded to q's dtype.
        block_table: int32 [num_seqs, width]. Rows of an entry that names no block, or of a column past the width, do
            not exist.
        row_lens: int32 [num_seqs], rows visible to the last query, each query before it sees one less; or int32
            [num_seqs, num_queries], rows visible to each.
        q: [num_seqs, num_heads, latent_dim] or [num_seqs, num_queries, num_heads, latent_dim] of the rows' dtype; of
            quantised rows bf16, fp16 or fp32.
        softmax_scale: factor on the scores.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.
        row_scales: of quantised rows whose scale lies outside the cache a number, or an fp32 tensor of one element on
            the view's device, which is read there; None: 1.0.
        out: the axes of q with value_dim columns, of q's dtype, contiguous; None: allocated.
        lse: fp32, the axes of q without the last, contiguous; None: allocated.
        num_splits: parts the rows are split into; None: from a table of host values.
        workspace: fp32 [n] for the results of the parts, n as `workspace_numel` says; None: allocated.

    Returns: out and lse (natural logarithm, of the rows without the sink); 0 and -inf for a query without rows.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, for a format that is not latent, and for num_splits below 1 or too large.
    """
    row = latent_row(view)
    expect_read(view, block_table, row_lens, q, row.key(q), row.value_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[-2], q.device)
    expect_workspace(workspace, q.device)
    scale = outside_scale_of(view, row_scales)
    target = current_target(_mla_kernel)
    if num_splits is None:
        heads_of_seq = q.shape[1:-1].numel()
        num_programs = q.shape[0] * cdiv(heads_of_seq, _tile(row, view, q, target).heads)
        num_splits = choose_num_splits(num_programs, block_table.shape[1] * view.rows_per_block, num_cores(q.device))
    out, lse = allocate_outputs(q, row.value_dim, out, lse)
    merged = num_splits > 1 or sinks is not None
    partial_out, partial_lse = allocate_partials(out, lse, num_splits, merged=merged, workspace=workspace)
    mla_launch(
        view,
        block_table,
        row_lens,
        q,
        partial_out,
        partial_lse,
        softmax_scale=softmax_scale,
        row_scale=scale,
        target=target,
    ).run()
    if merged:
        merge_launch(partial_out, partial_lse, out, lse, sinks, target=target).run()
    return out, lse


def mla_launch(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    partial_out: torch.Tensor,  # [num_seqs * num_queries, num_heads, num_splits, value_dim]
    partial_lse: torch.Tensor,  # [num_seqs * num_queries, num_heads, num_splits] fp32
    *,
    softmax_scale: float,
    row_scale: RowScale = 1.0,
    target: Target,
) -> Launch:
    """The launch that attends to each part of the rows, of checked arguments; the tensors may be meta tensors."""
    row = latent_row(view)
    num_heads, num_splits = partial_lse.shape[1:]
    tile = _tile(row, view, q, target)
    args, constexprs = read_args(view, block_table, row_lens, q, partial_out, partial_lse, softmax_scale)
    return Launch(
        kernel=_mla_kernel,
        grid=(q.shape[0] * cdiv(q.shape[1:-1].numel(), tile.heads), num_splits),
        args={
            **{name: arg for name, arg in args.items() if name != "memory_ptr"},
            **row_args(row, view, row_scale),
            **query_args(q, row_lens),
            "num_heads": num_heads,
        },
        constexprs={
            **row_constexprs(row),
            "ROWS_PER_BLOCK": view.rows_per_block,
            "Q_UNIT": constexprs["Q_UNIT"],
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _tile(row: LatentRow, view: PageView, q: torch.Tensor, target: Target) -> ReadTile:
    return row_tile(row, q.shape[1:-1].numel(), q.element_size(), view.rows_per_block, target)
