"""gqa_decode: attention over paged K and V, plain or quantised; the query heads of a KV head share its rows."""

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.kv_rows import (
    add_scaled_values,
    computed_part,
    expect_key_value_rows,
    expect_row_scales,
    key_value_constexprs,
    load_row_scales,
    load_values,
    scale_args,
)
from kvstore_kernels.launch import INTERPRETED, Launch, Target, current_target
from kvstore_kernels.merge import merge_launch
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import RowScales
from kvstore_kernels.reads import (
    MAX_INT32,
    allocate_outputs,
    allocate_partials,
    expect_read,
    expect_sinks,
    expect_soft_cap,
    expect_window,
    expect_workspace,
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
        "wrap_width",
        "max_rows",
        "num_blocks",
        "num_kv_heads",
        "queries_per_kv",
        "num_queries",
        "lens_per_query",
        "window",
        "offset_units",
        "block_stride_units",
    ],
    do_not_specialize_on_alignment=["table_ptr", "row_lens_ptr", "lse_ptr", "key_scale_ptr", "value_scale_ptr"],
)
def _gqa_kernel(
    memory_ptr,  # [memory elements] of the rows' dtype; uint8 where rows are codes
    table_ptr,  # [num_seqs, width] int32, rows table_stride apart; block i is in column i % wrap_width
    row_lens_ptr,  # [num_seqs] int32, or [num_seqs, num_queries] with lens_per_query
    q_ptr,  # [num_seqs, num_queries, num_heads, KEY_DIM], sequences q_stride * Q_UNIT elements apart
    out_ptr,  # [num_seqs, num_queries, num_heads, num_splits, VALUE_DIM]
    lse_ptr,  # [num_seqs, num_queries, num_heads, num_splits] fp32
    key_scale_ptr,  # [1] fp32, a factor on softmax_scale; None: 1
    value_scale_ptr,  # [1] fp32; None: value_scale
    q_stride: tl.int64,
    table_stride: tl.int64,
    wrap_width: tl.int32,
    max_rows: tl.int64,  # rows that the table has columns for, 2^31 - 1 where it wraps
    num_blocks: tl.int32,
    num_kv_heads: tl.int32,
    queries_per_kv: tl.int32,
    num_queries: tl.int32,
    lens_per_query: tl.int32,
    window: tl.int32,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    softmax_scale: tl.float32,
    value_scale: tl.float32,
    soft_cap: tl.float32,
    ROWS_PER_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_START: tl.constexpr,
    KEY_PITCH: tl.constexpr,
    KEY_HEAD_PITCH: tl.constexpr,
    KEY_SCALE_START: tl.constexpr,
    KEY_SCALE_PITCH: tl.constexpr,
    KEY_SCALE_HEAD_PITCH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_START: tl.constexpr,
    VALUE_PITCH: tl.constexpr,
    VALUE_HEAD_PITCH: tl.constexpr,
    VALUE_SCALE_START: tl.constexpr,
    VALUE_SCALE_PITCH: tl.constexpr,
    VALUE_SCALE_HEAD_PITCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
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
    if key_scale_ptr is not None:
        softmax_scale *= tl.load(key_scale_ptr)
    scale = softmax_scale * LOG2_E
    ends = visible_ends(row_lens_ptr, seq_idx, queries, in_heads, num_queries, lens_per_query)
    end = tl.minimum(tl.max(ends, 0).to(tl.int64), max_rows).to(tl.int32)
    begin = tl.maximum(tl.min(tl.where(ends > 0, ends, end), 0) - window, 0)
    first_tile, last_tile = split_tiles(begin, end, TILE_N)
    table_ptr += seq_idx * table_stride.to(tl.int64)
    block_ids = tile_blocks(first_tile, end, table_ptr, wrap_width, ROWS_PER_BLOCK, True, TILE_N)
    for tile in range(first_tile, last_tile):
        # One tile ahead, so that no load of rows waits for a load of their address.
        next_block_ids = tile_blocks(tile + 1, end, table_ptr, wrap_width, ROWS_PER_BLOCK, True, TILE_N)
        rows, exists = tile_rows(tile, begin, end, block_ids, num_blocks, ROWS_PER_BLOCK, TILE_N)
        page = page_start(block_ids, offset_units, block_stride_units, ELEMENT_BYTES)
        key_rows = memory_ptr + page + KEY_START + rows * KEY_PITCH + kv_head * KEY_HEAD_PITCH
        key_pointers, key_mask = key_rows[:, None] + key_columns[None, :], exists[:, None] & in_key[None, :]
        key = load_values(key_pointers, key_mask, q.dtype, KIND, INTERPRETED)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if SCALES == "inline":
            scale_page = page_start(block_ids, offset_units, block_stride_units, 4)
            starts = scale_page + KEY_SCALE_START + rows * KEY_SCALE_PITCH + kv_head * KEY_SCALE_HEAD_PITCH
            scores *= load_row_scales(memory_ptr, starts, exists)[None, :]
        scores = soften(scores * softmax_scale, soft_cap) * LOG2_E if SOFT_CAPPED else scores * scale
        scores = mask_scores(scores, tile, ends, window, exists, True, TILE_N)
        weights, running_max, running_sum, factor = softmax_step(scores, running_max, running_sum)
        value_rows = memory_ptr + page + VALUE_START + rows * VALUE_PITCH + kv_head * VALUE_HEAD_PITCH
        # Masked like the scores: a weight of zero times a NaN in a row nobody wrote would be NaN.
        value_pointers, value_mask = value_rows[:, None] + value_columns[None, :], exists[:, None] & in_value[None, :]
        value = load_values(value_pointers, value_mask, q.dtype, KIND, INTERPRETED)
        weighted_sum *= factor[:, None]
        if SCALES == "inline":
            starts = scale_page + VALUE_SCALE_START + rows * VALUE_SCALE_PITCH + kv_head * VALUE_SCALE_HEAD_PITCH
            value_scales = load_row_scales(memory_ptr, starts, exists)
            is_fp16: tl.constexpr = q_ptr.dtype.element_ty == tl.float16
            weighted_sum = add_scaled_values(weighted_sum, weights, value, value_scales, is_fp16)
        else:
            weighted_sum = tl.dot(weights.to(value.dtype), value, weighted_sum, input_precision="ieee")
        block_ids = next_block_ids

    out, lse = normalise(weighted_sum, running_max, running_sum)
    if SCALES == "outside":
        if value_scale_ptr is not None:
            value_scale = tl.load(value_scale_ptr)
        # A query without rows has output 0 whatever the scale is, NaN and infinity among them.
        out *= tl.where(running_sum == 0.0, 1.0, value_scale)[:, None]
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
    row_scales: RowScales | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or several queries per sequence over rows of K and V.

    Args:
        view: pages with parts "k" and "v".
        block_table: int32 [num_seqs, width]. Rows of an entry that names no block do not exist. Column of position p
            is p // rows_per_block: without `window` a column past the width does not exist, with it columns wrap.
        row_lens: int32 [num_seqs], rows visible to the last query, its own included, each query before it sees one
            less; or int32 [num_seqs, num_queries], rows visible to each. Whatever lies between the first and the last
            row that any query of a sequence sees must have been written.
        q: [num_seqs, num_heads, head_dim] or [num_seqs, num_queries, num_heads, head_dim] of the rows' dtype, or for
            rows of codes of bf16, fp16 or fp32; num_heads is a multiple of the KV heads.
        softmax_scale: factor on the scores; None: head_dim ** -0.5.
        window: a query that sees row_len rows is at position row_len - 1 and sees positions from row_len - window on;
            None: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None: as they are.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.
        row_scales: for codes whose scale lies outside the cache (fp8 per tensor), that of K and that of V: a number, or
            an fp32 tensor of one element on the view's device, which is read there; None: 1.0.
        out: the axes of q with head_dim_v columns, of q's dtype, contiguous; None: allocated.
        lse: fp32, the axes of q without the last, contiguous; None: allocated.
        num_splits: parts the rows are split into; None: from a table of host values.
        workspace: fp32 [n] for the results of the parts, n as `workspace_numel` says; None: allocated.

    Returns: out and lse (natural logarithm, of the rows without the sink); 0 and -inf for a query without rows.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, for a format without K and V, and for window or num_splits below 1 or too large.
    """
    key, value = expect_key_value_rows(view)
    value_dim = value.part.head_dim
    if softmax_scale is None:
        softmax_scale = key.part.head_dim**-0.5
    expect_window(window)
    expect_soft_cap(soft_cap)
    part = computed_part(key, q)
    expect_read(view, block_table, row_lens, q, part, value_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[-2], q.device)
    expect_workspace(workspace, q.device)
    scales = expect_row_scales(view, (key, value), row_scales)
    target = current_target(_gqa_kernel)
    if num_splits is None:
        num_rows = block_table.shape[1] * view.rows_per_block
        num_splits = choose_num_splits(
            q.shape[0] * part.num_heads, num_rows if window is None else min(window, num_rows), num_cores(q.device)
        )
    out, lse = allocate_outputs(q, value_dim, out, lse)
    merged = num_splits > 1 or sinks is not None
    partial_out, partial_lse = allocate_partials(out, lse, num_splits, merged=merged, workspace=workspace)
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
        row_scales=scales,
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
    row_scales: RowScales = (1.0, 1.0),
    target: Target,
) -> Launch:
    """The launch that attends to each part of the rows, of checked arguments; the tensors may be meta tensors."""
    key, value = expect_key_value_rows(view)
    key_dim, value_dim, num_kv_heads = key.part.head_dim, value.part.head_dim, key.part.num_heads
    num_heads, num_splits = partial_lse.shape[1:]
    heads_per_kv = q.shape[1:-1].numel() // num_kv_heads
    is_plain = key.scale_kind == "none"
    tile = key_value_tile(target, heads_per_kv, key_dim, value_dim, q.element_size(), view.rows_per_block)
    args, constexprs = read_args(view, block_table, row_lens, q, partial_out, partial_lse, softmax_scale)
    if not is_plain:
        args, constexprs = args | {"memory_ptr": view.memory}, constexprs | {"ELEMENT_BYTES": 1}
    width, wraps = args.pop("table_width"), window is not None
    return Launch(
        kernel=_gqa_kernel,
        grid=(q.shape[0] * num_kv_heads * cdiv(heads_per_kv, tile.heads), num_splits),
        args={
            **args,
            **query_args(q, row_lens),
            **scale_args(softmax_scale, row_scales),
            "num_kv_heads": num_kv_heads,
            "queries_per_kv": num_heads // num_kv_heads,
            "wrap_width": width if wraps else MAX_INT32,
            "max_rows": MAX_INT32 if wraps else width * view.rows_per_block,
            "window": window if wraps else MAX_INT32,
            "soft_cap": float(soft_cap or 1.0),
        },
        constexprs={
            **constexprs,
            **key_value_constexprs(view, key, value, constexprs["ELEMENT_BYTES"]),
            "SOFT_CAPPED": soft_cap is not None,
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
            "TILE_KEY": padded(key_dim),
            "TILE_VALUE": padded(value_dim),
            "INTERPRETED": INTERPRETED,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
