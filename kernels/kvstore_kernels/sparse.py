"""sparse_mla_decode: attention over the latent rows that a list of slots names, in one cache or in two."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.latent_rows import (
    LatentRow,
    latent_row,
    outside_scales_of,
    row_args,
    row_constexprs,
    row_tile,
)
from kvstore_kernels.latent_tiles import load_columns, load_query, outside_scale, page_units, store_values
from kvstore_kernels.launch import Launch, Target, current_target
from kvstore_kernels.merge import merge_launch
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_rules import RowScale
from kvstore_kernels.reads import allocate_outputs, allocate_partials, expect_workspace
from kvstore_kernels.softmax import LOG2_E, normalise, softmax_step, split_tiles
from kvstore_kernels.sparse_checks import Rows, expect_sparse
from kvstore_kernels.splits import ReadTile, choose_num_splits, num_cores


@triton.jit(
    do_not_specialize=[
        "q_stride",
        "slots_stride",
        "num_listed",
        "num_slots",
        "num_heads",
        "first_split",
        "total_splits",
        "offset_units",
        "block_stride_units",
    ],
    do_not_specialize_on_alignment=["slots_ptr", "lse_ptr", "row_scale_ptr"],
)
def _sparse_mla_kernel(
    first_ptr,  # [memory words] of the first columns, see `latent_rows.Run`
    first_scales_ptr,  # [memory words] of their scales; None: no scales in the rows
    second_ptr,  # both the same of the second columns; None where a row has no such
    second_scales_ptr,
    slots_ptr,  # [num_seqs, num_listed] int32 or int64, rows slots_stride apart
    q_ptr,  # [num_seqs, num_heads, LATENT_DIM], sequences q_stride elements apart
    out_ptr,  # [num_seqs, num_heads, total_splits, VALUE_DIM]
    lse_ptr,  # [num_seqs, num_heads, total_splits] fp32
    row_scale_ptr,  # [1] fp32; None: row_scale
    q_stride: tl.int64,
    slots_stride: tl.int64,
    num_listed: tl.int32,
    num_slots: tl.int64,
    num_heads: tl.int32,
    first_split: tl.int32,
    total_splits: tl.int32,
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
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = (sequence and tile of heads; split of the listed slots). Slots that name no row count for nothing."""
    num_head_tiles = tl.cdiv(num_heads, TILE_H)
    seq_idx = (tl.program_id(0) // num_head_tiles).to(tl.int64)
    heads = tl.program_id(0) % num_head_tiles * TILE_H + tl.arange(0, TILE_H)
    in_heads = heads < num_heads

    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_rows = q_ptr + seq_idx * q_stride.to(tl.int64) + heads[:, None] * LATENT_DIM
    q_first = load_query(q_rows, in_heads, FIRST, INTERPRETED)
    first_sum = tl.zeros([TILE_H, q_first.shape[1]], tl.float32)
    if SECOND is not None:
        q_second = load_query(q_rows, in_heads, SECOND, INTERPRETED)
    if SECOND_IS_VALUE:
        second_sum = tl.zeros([TILE_H, q_second.shape[1]], tl.float32)
    running_max = tl.full([TILE_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE_H], tl.float32)
    row_scale = outside_scale(row_scale, row_scale_ptr, IS_SCALED_OUTSIDE)
    scale = softmax_scale * row_scale * LOG2_E

    slots_ptr += seq_idx * slots_stride.to(tl.int64)
    first_tile, last_tile = split_tiles(0, num_listed, TILE_N)
    for tile in range(first_tile, last_tile):
        listed = tl.cast(tile, tl.int32) * TILE_N + tl.arange(0, TILE_N)
        slots = tl.load(slots_ptr + listed, mask=listed < num_listed, other=-1).to(tl.int64)
        # Before the division, which truncates towards zero: slot -1 would become row 0 of block 0.
        exists = (slots >= 0) & (slots < num_slots)
        block_ids = slots // ROWS_PER_BLOCK
        rows = slots - block_ids * ROWS_PER_BLOCK
        pages = page_units(block_ids, offset_units, block_stride_units)
        first = load_columns(first_ptr, first_scales_ptr, dtype, pages, rows, exists, FIRST, FIRST_SCALES, INTERPRETED)
        scores = tl.dot(q_first, tl.trans(first), input_precision="ieee")
        if SECOND is not None:
            second = load_columns(
                second_ptr, second_scales_ptr, dtype, pages, rows, exists, SECOND, SECOND_SCALES, INTERPRETED
            )
            scores = tl.dot(q_second, tl.trans(second), scores, input_precision="ieee")
        scores = tl.where(exists[None, :], scores * scale, float("-inf"))
        weights, running_max, running_sum, factor = softmax_step(scores, running_max, running_sum)
        weights = weights.to(first.dtype)
        first_sum = tl.dot(weights, first, first_sum * factor[:, None], input_precision="ieee")
        if SECOND_IS_VALUE:
            second_sum = tl.dot(weights, second, second_sum * factor[:, None], input_precision="ieee")

    out, lse = normalise(first_sum, running_max, running_sum)
    if IS_SCALED_OUTSIDE:
        out = tl.where(lse[:, None] == float("-inf"), 0.0, out * row_scale)
    partial = (seq_idx * num_heads + heads) * total_splits + first_split + tl.program_id(1)
    out_rows = out_ptr + partial[:, None] * VALUE_DIM
    store_values(out_rows, out, in_heads, VALUE_DIM, FIRST, INTERPRETED)
    if SECOND_IS_VALUE:
        out, lse = normalise(second_sum, running_max, running_sum)
        store_values(out_rows, out, in_heads, VALUE_DIM, SECOND, INTERPRETED)
    tl.store(lse_ptr + partial, lse, mask=in_heads)


def sparse_mla_decode(
    view: PageView,
    slots: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    second: Rows | None = None,
    sinks: torch.Tensor | None = None,
    row_scales: Sequence[RowScale] | RowScale | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over the latent rows of a list of slots.

    Args:
        view: pages of latent rows, plain or quantised: K is a row, V its first `value_dim` columns. Codes times their
            scales are rounded to q's dtype.
        slots: int32 or int64 [num_seqs, num_listed], `block_id * rows_per_block + row_in_block`; a slot below 0 or past
            the last is skipped, and one listed twice counts twice.
        q: [num_seqs, num_heads, latent_dim] of the rows' dtype; of quantised rows bf16, fp16 or fp32.
        softmax_scale: factor on the scores.
        second: another cache of the same latent_dim and value_dim, with its own pages, and its slots (DeepSeek V4: the
            window beside the compressed rows); attended to as if its rows stood in one list with the first's. Its rows
            are plain and of the same dtype where the first are, quantised in any format where those are.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.
        row_scales: of quantised rows whose scale lies outside the cache a number, or an fp32 tensor of one element on
            the view's device, which is read there, for both caches; None: 1.0.
        out: [num_seqs, num_heads, value_dim] of q's dtype, contiguous; None: allocated.
        lse: fp32 [num_seqs, num_heads], contiguous; None: allocated.
        num_splits: parts that each list is split into; None: from a table of host values.
        workspace: fp32 [n] for the results of the parts, n as `workspace_numel` says; None: allocated.

    Returns: out and lse (natural logarithm, of the rows without the sink); 0 and -inf where no slot names a row.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, for a format that is not latent, and for two caches whose rows differ.
    """
    lists = [(view, slots)] if second is None else [(view, slots), second]
    read, value_dim = expect_sparse(lists, q, softmax_scale, sinks, out, lse, num_splits)
    expect_workspace(workspace, q.device)
    scales = outside_scales_of([cache for cache, _ in lists], row_scales)
    target = current_target(_sparse_mla_kernel)
    splits = [num_splits or _num_splits(row, slots, q, target) for row, (_, slots) in zip(read, lists, strict=True)]
    out, lse = allocate_outputs(q, value_dim, out, lse)
    merged = sum(splits) > 1 or sinks is not None
    partial_out, partial_lse = allocate_partials(out, lse, sum(splits), merged=merged, workspace=workspace)
    first_split = 0
    for rows, scale, count in zip(lists, scales, splits, strict=True):
        sparse_launch(
            rows,
            q,
            partial_out,
            partial_lse,
            first_split,
            count,
            softmax_scale=softmax_scale,
            row_scale=scale,
            target=target,
        ).run()
        first_split += count
    if merged:
        merge_launch(partial_out, partial_lse, out, lse, sinks, target=target).run()
    return out, lse


def sparse_launch(
    rows: Rows,
    q: torch.Tensor,
    partial_out: torch.Tensor,  # [num_seqs, num_heads, total_splits, value_dim]
    partial_lse: torch.Tensor,  # [num_seqs, num_heads, total_splits] fp32
    first_split: int,
    num_splits: int,
    *,
    softmax_scale: float,
    row_scale: RowScale = 1.0,
    target: Target,
) -> Launch:
    """The launch that attends to one list, as parts `first_split` and on; the tensors may be meta tensors."""
    view, slots = rows
    row = latent_row(view)
    num_seqs, num_heads, total_splits = partial_lse.shape
    tile = _tile(row, q, target)
    q = q.contiguous()
    return Launch(
        kernel=_sparse_mla_kernel,
        grid=(num_seqs * cdiv(num_heads, tile.heads), num_splits),
        args={
            **row_args(row, view, row_scale),
            "slots_ptr": slots,
            "q_ptr": q,
            "out_ptr": partial_out,
            "lse_ptr": partial_lse,
            "q_stride": q.stride(0),
            "slots_stride": slots.stride(0),
            "num_listed": slots.shape[1],
            "num_slots": view.num_slots,
            "num_heads": num_heads,
            "first_split": first_split,
            "total_splits": total_splits,
            "offset_units": view.offset_bytes // ALIGNMENT_BYTES,
            "block_stride_units": view.block_stride_bytes // ALIGNMENT_BYTES,
            "softmax_scale": float(softmax_scale),
        },
        constexprs={
            **row_constexprs(row),
            "ROWS_PER_BLOCK": view.rows_per_block,
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _num_splits(row: LatentRow, slots: torch.Tensor, q: torch.Tensor, target: Target) -> int:
    num_programs = q.shape[0] * cdiv(q.shape[1], _tile(row, q, target).heads)
    return choose_num_splits(num_programs, slots.shape[1], num_cores(q.device))


def _tile(row: LatentRow, q: torch.Tensor, target: Target) -> ReadTile:
    """The tile for rows that may lie anywhere, as in blocks of one row."""
    return row_tile(row, q.shape[1], q.element_size(), 1, target)
