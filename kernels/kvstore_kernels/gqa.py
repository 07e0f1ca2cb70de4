"""gqa_decode: attention of one query per sequence over paged K and V; the query heads of a KV head share its rows."""

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
    expect_keys_and_values,
    expect_read,
    expect_sinks,
    expect_soft_cap,
    expect_window,
    part_start_and_pitch,
    query_args,
    read_args,
)
from kvstore_kernels.softmax import (
    LOG2_E,
    load_tile,
    mask_scores,
    normalise,
    soften,
    softmax_step,
    split_tiles,
    store_tile,
    table_end,
    tile_blocks,
    tile_rows,
    visible_ends,
)
from kvstore_kernels.splits import choose_num_splits, key_value_tile, num_cores, padded
from kvstore_kernels.tiles import page_start


@triton.jit(
    do_not_specialize=[
        "q_stride",
        "table_stride",
        "table_width",
        "num_blocks",
        "num_kv_heads",
        "queries_per_kv",
        "num_queries",
        "lens_per_query",
        "window",
        "offset_units",
        "block_stride_units",
    ]
)
def _gqa_kernel(
    memory_ptr,  # [memory elements] of the rows' dtype
    table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart
    row_lens_ptr,  # [num_seqs] int32, or [num_seqs, num_queries] with lens_per_query
    q_ptr,  # [num_seqs, num_queries, num_heads, KEY_DIM], sequences q_stride * Q_UNIT elements apart
    out_ptr,  # [num_seqs, num_queries, num_heads, num_splits, VALUE_DIM]
    lse_ptr,  # [num_seqs, num_queries, num_heads, num_splits] fp32
    q_stride: tl.int64,
    table_stride: tl.int64,
    table_width: tl.int32,
    num_blocks: tl.int32,
    num_kv_heads: tl.int32,
    queries_per_kv: tl.int32,
    num_queries: tl.int32,
    lens_per_query: tl.int32,
    window: tl.int32,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    softmax_scale: tl.float32,
    soft_cap: tl.float32,
    ROWS_PER_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_START: tl.constexpr,
    KEY_PITCH: tl.constexpr,
    VALUE_START: tl.constexpr,
    VALUE_PITCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFT_CAPPED: tl.constexpr,
    Q_UNIT: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_KEY: tl.constexpr,
    TILE_VALUE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = (sequence, KV head and tile of its heads; split of the keys).

    The heads of a KV head are those of all queries of a sequence, one query behind the other.
    """
    heads_per_kv = num_queries * queries_per_kv
    num_head_tiles = tl.cdiv(heads_per_kv, TILE_H)
    seq_idx = (tl.program_id(0) // (num_kv_heads * num_head_tiles)).to(tl.int64)
    kv_head = tl.program_id(0) // num_head_tiles % num_kv_heads
    tile_heads = tl.program_id(0) % num_head_tiles * TILE_H + tl.arange(0, TILE_H)
    queries = tile_heads // queries_per_kv
    heads = (queries * num_kv_heads + kv_head) * queries_per_kv + tile_heads % queries_per_kv
    key_columns, value_columns = tl.arange(0, TILE_KEY), tl.arange(0, TILE_VALUE)
    in_heads, in_key, in_value = tile_heads < heads_per_kv, key_columns < KEY_DIM, value_columns < VALUE_DIM

    q_pointers = q_ptr + seq_idx * q_stride.to(tl.int64) * Q_UNIT + heads[:, None] * KEY_DIM + key_columns[None, :]
    q = load_tile(q_pointers, in_heads[:, None] & in_key[None, :], INTERPRETED)
    running_max = tl.full([TILE_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE_H], tl.float32)
    weighted_sum = tl.zeros([TILE_H, TILE_VALUE], tl.float32)
    scale = softmax_scale * LOG2_E
    ends = visible_ends(row_lens_ptr, seq_idx, queries, in_heads, num_queries, lens_per_query)
    begins, begin, end = ends, 0, tl.max(ends, 0)
    if WINDOWED:
        begins = tl.maximum(ends - window, 0)
        begin = tl.min(tl.where(in_heads, begins, end), 0)
    else:
        end = table_end(end, table_width, ROWS_PER_BLOCK)
    first_tile, last_tile = split_tiles(begin, end, TILE_N)
    table_ptr += seq_idx * table_stride.to(tl.int64)
    block_ids = tile_blocks(first_tile, end, table_ptr, table_width, ROWS_PER_BLOCK, WINDOWED, TILE_N)
    for tile in range(first_tile, last_tile):
        # One tile ahead, so that no load of rows waits for a load of their address.
        next_block_ids = tile_blocks(tile + 1, end, table_ptr, table_width, ROWS_PER_BLOCK, WINDOWED, TILE_N)
        rows, exists = tile_rows(tile, begin, end, block_ids, num_blocks, ROWS_PER_BLOCK, TILE_N)
        page = page_start(block_ids, offset_units, block_stride_units, ELEMENT_BYTES)
        key_rows = memory_ptr + page + KEY_START + rows * KEY_PITCH + kv_head * KEY_DIM
        key = load_tile(key_rows[:, None] + key_columns[None, :], exists[:, None] & in_key[None, :], INTERPRETED)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        scores = soften(scores * softmax_scale, soft_cap) * LOG2_E if SOFT_CAPPED else scores * scale
        scores = mask_scores(scores, tile, begins, ends, exists, WINDOWED, TILE_N)
        weights, running_max, running_sum, factor = softmax_step(scores, running_max, running_sum)
        value_rows = memory_ptr + page + VALUE_START + rows * VALUE_PITCH + kv_head * VALUE_DIM
        # Masked like the scores: a weight of zero times a NaN in a row nobody wrote would be NaN.
        value = load_tile(
            value_rows[:, None] + value_columns[None, :], exists[:, None] & in_value[None, :], INTERPRETED
        )
        weighted_sum = tl.dot(weights.to(value.dtype), value, weighted_sum * factor[:, None], input_precision="ieee")
        block_ids = next_block_ids

    out, lse = normalise(weighted_sum, running_max, running_sum)
    partial = (seq_idx * num_kv_heads * heads_per_kv + heads) * tl.num_programs(1) + tl.program_id(1)
    out_pointers = out_ptr + partial[:, None] * VALUE_DIM + value_columns[None, :]
    store_tile(out_pointers, out, in_heads[:, None] & in_value[None, :], INTERPRETED)
    tl.store(lse_ptr + partial, lse, mask=in_heads)


def gqa_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or several queries per sequence over rows of K and V.

    Args:
        view: pages with parts "k" and "v".
        block_table: int32 [num_seqs, width]. Rows of an entry that names no block do not exist. Column of position p
            is p // rows_per_block: without `window` a column past the width does not exist, with it columns wrap.
        row_lens: int32 [num_seqs], rows visible to the last query, its own included, each query before it sees one
            less; or int32 [num_seqs, num_queries], rows visible to each.
        q: [num_seqs, num_heads, head_dim] or [num_seqs, num_queries, num_heads, head_dim] of the rows' dtype;
            num_heads is a multiple of the KV heads.
        softmax_scale: factor on the scores; None: head_dim ** -0.5.
        window: a query that sees row_len rows is at position row_len - 1 and sees positions from row_len - window on;
            None: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: as they are.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.
        out: the axes of q with head_dim_v columns, of q's dtype, contiguous; None: allocated.
        lse: fp32, the axes of q without the last, contiguous; None: allocated.
        num_splits: parts the rows are split into; None: from a table of host values.

    Returns: out and lse (natural logarithm, of the rows without the sink); 0 and -inf for a query without rows.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, for a format without K and V, and for window or num_splits below 1 or too large.
    """
    key, value = expect_keys_and_values(view)
    if softmax_scale is None:
        softmax_scale = key.head_dim**-0.5
    expect_window(window)
    expect_soft_cap(soft_cap)
    expect_read(view, block_table, row_lens, q, key, value.head_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[-2], q.device)
    target = current_target(_gqa_kernel)
    if num_splits is None:
        num_rows = block_table.shape[1] * view.rows_per_block
        num_splits = choose_num_splits(
            q.shape[0] * key.num_heads, num_rows if window is None else min(window, num_rows), num_cores(q.device)
        )
    out, lse = allocate_outputs(q, value.head_dim, out, lse)
    merged = num_splits > 1 or sinks is not None
    partial_out, partial_lse = allocate_partials(out, lse, num_splits, merged=merged)
    gqa_launch(
        view,
        block_table,
        row_lens,
        q,
        partial_out,
        partial_lse,
        softmax_scale=softmax_scale,
        window=window,
        soft_cap=soft_cap,
        target=target,
    ).run()
    if merged:
        merge_launch(partial_out, partial_lse, out, lse, sinks, target=target).run()
    return out, lse


def gqa_launch(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    partial_out: torch.Tensor,  # [num_seqs * num_queries, num_heads, num_splits, head_dim_v]
    partial_lse: torch.Tensor,  # [num_seqs * num_queries, num_heads, num_splits] fp32
    *,
    softmax_scale: float,
    window: int | None,
    soft_cap: float | None = None,
    target: Target,
) -> Launch:
    """The launch that attends to each part of the rows, of checked arguments; the tensors may be meta tensors."""
    key, value = view.format.parts
    num_heads, num_splits = partial_lse.shape[1:]
    heads_per_kv = q.shape[1:-1].numel() // key.num_heads
    tile = key_value_tile(target, heads_per_kv, key.head_dim, value.head_dim, key.dtype.itemsize)
    args, constexprs = read_args(view, block_table, row_lens, q, partial_out, partial_lse, softmax_scale)
    key_start, key_pitch = part_start_and_pitch(view, key)
    value_start, value_pitch = part_start_and_pitch(view, value)
    return Launch(
        kernel=_gqa_kernel,
        grid=(q.shape[0] * key.num_heads * cdiv(heads_per_kv, tile.heads), num_splits),
        args={
            **args,
            **query_args(q, row_lens),
            "num_kv_heads": key.num_heads,
            "queries_per_kv": num_heads // key.num_heads,
            "window": window or 0,
            "soft_cap": float(soft_cap or 1.0),
        },
        constexprs={
            **constexprs,
            "KEY_DIM": key.head_dim,
            "VALUE_DIM": value.head_dim,
            "KEY_START": key_start,
            "KEY_PITCH": key_pitch,
            "VALUE_START": value_start,
            "VALUE_PITCH": value_pitch,
            "WINDOWED": window is not None,
            "SOFT_CAPPED": soft_cap is not None,
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
            "TILE_KEY": padded(key.head_dim),
            "TILE_VALUE": padded(value.head_dim),
            "INTERPRETED": INTERPRETED,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
