"""mla_decode: attention over paged latent rows; one load of a row serves as K and, its leading columns, as V."""

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.launch import INTERPRETED, Launch, Target, current_target
from kvstore_kernels.merge import merge_launch
from kvstore_kernels.pages import PageView
from kvstore_kernels.reads import (
    allocate_outputs,
    allocate_partials,
    expect_latent,
    expect_read,
    expect_sinks,
    part_start_and_pitch,
    query_args,
    read_args,
)
from kvstore_kernels.softmax import (
    LOG2_E,
    load_tile,
    mask_scores,
    normalise,
    softmax_step,
    split_tiles,
    store_tile,
    table_end,
    tile_blocks,
    tile_rows,
    visible_ends,
)
from kvstore_kernels.splits import ReadTile, choose_num_splits, latent_tile, num_cores, padded
from kvstore_kernels.tiles import page_start


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
    ]
)
def _mla_kernel(
    memory_ptr,  # [memory elements] of the rows' dtype
    table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart
    row_lens_ptr,  # [num_seqs] int32, or [num_seqs, num_queries] with lens_per_query
    q_ptr,  # [num_seqs, num_queries, num_heads, LATENT_DIM], sequences q_stride * Q_UNIT elements apart
    out_ptr,  # [num_seqs, num_queries, num_heads, num_splits, VALUE_DIM]
    lse_ptr,  # [num_seqs, num_queries, num_heads, num_splits] fp32
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
    ROWS_PER_BLOCK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROW_START: tl.constexpr,
    ROW_PITCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    Q_UNIT: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_NOPE: tl.constexpr,
    TILE_ROPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = (sequence and tile of heads; split of the rows). Head tiles of a sequence run together and share L2.

    The heads of a sequence are those of all its queries, one query behind the other.
    """
    heads_of_seq = num_queries * num_heads
    num_head_tiles = tl.cdiv(heads_of_seq, TILE_H)
    seq_idx = (tl.program_id(0) // num_head_tiles).to(tl.int64)
    heads = tl.program_id(0) % num_head_tiles * TILE_H + tl.arange(0, TILE_H)
    nope = tl.arange(0, TILE_NOPE)
    in_heads, in_nope = heads < heads_of_seq, nope < VALUE_DIM

    q_rows = q_ptr + seq_idx * q_stride.to(tl.int64) * Q_UNIT + heads[:, None] * LATENT_DIM
    q_nope = load_tile(q_rows + nope[None, :], in_heads[:, None] & in_nope[None, :], INTERPRETED)
    if LATENT_DIM > VALUE_DIM:
        rope = VALUE_DIM + tl.arange(0, TILE_ROPE)
        in_rope = rope < LATENT_DIM
        q_rope = load_tile(q_rows + rope[None, :], in_heads[:, None] & in_rope[None, :], INTERPRETED)

    running_max = tl.full([TILE_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE_H], tl.float32)
    weighted_sum = tl.zeros([TILE_H, TILE_NOPE], tl.float32)
    scale = softmax_scale * LOG2_E
    ends = visible_ends(row_lens_ptr, seq_idx, heads // num_heads, in_heads, num_queries, lens_per_query)
    end = table_end(tl.max(ends, 0), table_width, ROWS_PER_BLOCK)
    first_tile, last_tile = split_tiles(0, end, TILE_N)
    table_ptr += seq_idx * table_stride.to(tl.int64)
    block_ids = tile_blocks(first_tile, end, table_ptr, table_width, ROWS_PER_BLOCK, False, TILE_N)
    for tile in range(first_tile, last_tile):
        # One tile ahead, so that no load of rows waits for a load of their address.
        next_block_ids = tile_blocks(tile + 1, end, table_ptr, table_width, ROWS_PER_BLOCK, False, TILE_N)
        rows, exists = tile_rows(tile, 0, end, block_ids, num_blocks, ROWS_PER_BLOCK, TILE_N)
        page = page_start(block_ids, offset_units, block_stride_units, ELEMENT_BYTES)
        row_pointers = memory_ptr + page + ROW_START + rows * ROW_PITCH
        latent = load_tile(row_pointers[:, None] + nope[None, :], exists[:, None] & in_nope[None, :], INTERPRETED)
        scores = tl.dot(q_nope, tl.trans(latent), input_precision="ieee")
        if LATENT_DIM > VALUE_DIM:
            k_rope = load_tile(row_pointers[:, None] + rope[None, :], exists[:, None] & in_rope[None, :], INTERPRETED)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        scores = mask_scores(scores * scale, tile, ends, ends, exists, False, TILE_N)
        weights, running_max, running_sum, factor = softmax_step(scores, running_max, running_sum)
        weighted_sum = tl.dot(weights.to(latent.dtype), latent, weighted_sum * factor[:, None], input_precision="ieee")
        block_ids = next_block_ids

    out, lse = normalise(weighted_sum, running_max, running_sum)
    partial = (seq_idx * heads_of_seq + heads) * tl.num_programs(1) + tl.program_id(1)
    store_tile(
        out_ptr + partial[:, None] * VALUE_DIM + nope[None, :], out, in_heads[:, None] & in_nope[None, :], INTERPRETED
    )
    tl.store(lse_ptr + partial, lse, mask=in_heads)


def mla_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or several queries per sequence over latent rows: K is a row, V its first `value_dim` columns.

    Args:
        view: pages of latent rows.
        block_table: int32 [num_seqs, width]. Rows of an entry that names no block, or of a column past the width, do
            not exist.
        row_lens: int32 [num_seqs], rows visible to the last query, each query before it sees one less; or int32
            [num_seqs, num_queries], rows visible to each.
        q: [num_seqs, num_heads, latent_dim] or [num_seqs, num_queries, num_heads, latent_dim] of the rows' dtype.
        softmax_scale: factor on the scores.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.
        out: the axes of q with value_dim columns, of q's dtype, contiguous; None: allocated.
        lse: fp32, the axes of q without the last, contiguous; None: allocated.
        num_splits: parts the rows are split into; None: from a table of host values.

    Returns: out and lse (natural logarithm, of the rows without the sink); 0 and -inf for a query without rows.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, for a format that is not latent, and for num_splits below 1 or too large.
    """
    latent, value_dim = expect_latent(view)
    expect_read(view, block_table, row_lens, q, latent, value_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[-2], q.device)
    target = current_target(_mla_kernel)
    if num_splits is None:
        heads_of_seq = q.shape[1:-1].numel()
        num_programs = q.shape[0] * cdiv(heads_of_seq, _tile(view, heads_of_seq, target).heads)
        num_splits = choose_num_splits(num_programs, block_table.shape[1] * view.rows_per_block, num_cores(q.device))
    out, lse = allocate_outputs(q, value_dim, out, lse)
    merged = num_splits > 1 or sinks is not None
    partial_out, partial_lse = allocate_partials(out, lse, num_splits, merged=merged)
    mla_launch(
        view, block_table, row_lens, q, partial_out, partial_lse, softmax_scale=softmax_scale, target=target
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
    target: Target,
) -> Launch:
    """The launch that attends to each part of the rows, of checked arguments; the tensors may be meta tensors."""
    latent, value_dim = expect_latent(view)
    num_heads, num_splits = partial_lse.shape[1:]
    heads_of_seq = q.shape[1:-1].numel()
    tile = _tile(view, heads_of_seq, target)
    row_start, row_pitch = part_start_and_pitch(view, latent)
    args, constexprs = read_args(view, block_table, row_lens, q, partial_out, partial_lse, softmax_scale)
    return Launch(
        kernel=_mla_kernel,
        grid=(q.shape[0] * cdiv(heads_of_seq, tile.heads), num_splits),
        args={**args, **query_args(q, row_lens), "num_heads": num_heads},
        constexprs={
            **constexprs,
            "LATENT_DIM": latent.head_dim,
            "VALUE_DIM": value_dim,
            "ROW_START": row_start,
            "ROW_PITCH": row_pitch,
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
            "TILE_NOPE": padded(value_dim),
            "TILE_ROPE": padded(latent.head_dim - value_dim),
            "INTERPRETED": INTERPRETED,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _tile(view: PageView, num_heads: int, target: Target) -> ReadTile:
    latent, value_dim = expect_latent(view)
    return latent_tile(target, num_heads, latent.head_dim, value_dim, latent.dtype.itemsize, view.rows_per_block)
