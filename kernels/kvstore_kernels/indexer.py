"""indexer_scores: how much each query wants each row, from the small keys of a sparse indexer; top-k selects by it."""

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.codec import decode_ue8m0
from kvstore_kernels.indexer_checks import allocate_scores, expect_indexer, expect_indexer_keys
from kvstore_kernels.launch import INTERPRETED, Launch, Target, current_target
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_tiles import bytes_as, e2m1_values, e4m3_values
from kvstore_kernels.reads import MAX_INT32, query_args, read_args
from kvstore_kernels.softmax import load_tile, table_end, tile_blocks, tile_rows, visible_ends
from kvstore_kernels.splits import SHARED_BYTES, SMALLEST_SHARED_BYTES, ReadTile, padded
from kvstore_kernels.tiles import page_start

TILE_QUERIES = 4
"""Queries of a sequence that share a load of keys."""


@triton.jit(
    do_not_specialize=[
        "q_stride",
        "table_stride",
        "table_width",
        "num_blocks",
        "num_heads",
        "num_queries",
        "lens_per_query",
        "num_columns",
        "offset_units",
        "block_stride_units",
    ],
    do_not_specialize_on_alignment=["table_ptr", "row_lens_ptr", "weights_ptr"],
)
def _indexer_kernel(
    memory_ptr,  # [memory elements] of the keys' dtype; uint8 where keys are codes
    table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart
    row_lens_ptr,  # [num_seqs] int32, or [num_seqs, num_queries] with lens_per_query
    q_ptr,  # [num_seqs, num_queries, num_heads, HEAD_DIM], sequences q_stride * Q_UNIT elements apart
    weights_ptr,  # [num_seqs, num_queries, num_heads] fp32
    out_ptr,  # [num_seqs, num_queries, num_columns] fp32
    q_stride: tl.int64,
    table_stride: tl.int64,
    table_width: tl.int32,
    num_blocks: tl.int32,
    num_heads: tl.int32,
    num_queries: tl.int32,
    lens_per_query: tl.int32,
    num_columns: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    ROWS_PER_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_START: tl.constexpr,
    KEY_PITCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    SCALE_START: tl.constexpr,
    SCALE_PITCH: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    Q_UNIT: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = (sequence and tile of its queries, tile of rows). Tiles of rows run together and share q."""
    num_tiles = tl.cdiv(num_columns.to(tl.int64), TILE_N).to(tl.int32)
    tile = tl.program_id(0) % num_tiles
    query_tile = tl.program_id(0) // num_tiles
    num_query_tiles = tl.cdiv(num_queries, TILE_Q)
    seq_idx = (query_tile // num_query_tiles).to(tl.int64)
    first_query = query_tile % num_query_tiles * TILE_Q
    queries = first_query + tl.arange(0, TILE_Q)
    ends = visible_ends(row_lens_ptr, seq_idx, queries, queries < num_queries, num_queries, lens_per_query)
    end = table_end(tl.max(ends, 0), table_width, ROWS_PER_BLOCK)

    table_ptr += seq_idx * table_stride.to(tl.int64)
    block_ids = tile_blocks(tile, end, table_ptr, table_width, ROWS_PER_BLOCK, False, TILE_N)
    rows, exists = tile_rows(tile, 0, end, block_ids, num_blocks, ROWS_PER_BLOCK, TILE_N)
    page = page_start(block_ids, offset_units, block_stride_units, ELEMENT_BYTES)
    key_rows = memory_ptr + page + KEY_START + rows * KEY_PITCH
    elements = tl.arange(0, TILE_K // 2 if KIND == "e2m1" else TILE_K)
    in_row = elements < (HEAD_DIM // 2 if KIND == "e2m1" else HEAD_DIM)
    pointers, mask = key_rows[:, None] + elements[None, :], exists[:, None] & in_row[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if KIND == "plain":
        keys = load_tile(pointers, mask, INTERPRETED)
    else:
        codes = tl.load(pointers, mask=mask, other=0)
        scale_page = page_start(block_ids, offset_units, block_stride_units, 4 if KIND == "e4m3" else 1)
        scale_rows = bytes_as(memory_ptr, 4 if KIND == "e4m3" else 1) + scale_page + SCALE_START + rows * SCALE_PITCH
    if KIND == "e4m3":
        keys = narrow(e4m3_values(codes), dtype, INTERPRETED)
        scales = tl.load(scale_rows, mask=exists, other=0).to(tl.float32, bitcast=True)
    elif KIND == "e2m1":
        wide = codes.to(tl.int32)
        both = tl.join(e2m1_values(wide << 28), e2m1_values(wide << 24))
        tiles = tl.reshape(both, [TILE_N, NUM_SCALES, TILE_K // NUM_SCALES])
        scale_pointers = scale_rows[:, None] + tl.arange(0, NUM_SCALES)[None, :]
        tiles *= decode_ue8m0(tl.load(scale_pointers, mask=exists[:, None], other=0))[:, :, None]
        # Exact in bf16, whose exponents are those of the scales; fp16 has too few.
        keys = narrow(tl.reshape(tiles, [TILE_N, TILE_K]), tl.bfloat16, INTERPRETED)

    positions = tile.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    dims = tl.arange(0, TILE_K)
    for query in range(first_query, tl.minimum(first_query + TILE_Q, num_queries)):
        seen = tl.max(tl.where(queries == query, ends, 0), 0)
        first_head = (seq_idx * num_queries + query) * num_heads
        scores = tl.zeros([TILE_N], tl.float32)
        # A tile behind the rows of a query needs no products.
        for head_tile in range(0, tl.where(tile * TILE_N < seen, tl.cdiv(num_heads, TILE_H), 0)):
            heads = head_tile * TILE_H + tl.arange(0, TILE_H)
            in_heads = heads < num_heads
            q_heads = (query * num_heads + heads).to(tl.int64)
            q_rows = q_ptr + seq_idx * q_stride.to(tl.int64) * Q_UNIT + q_heads * HEAD_DIM
            q_pointers, q_mask = q_rows[:, None] + dims[None, :], in_heads[:, None] & (dims < HEAD_DIM)[None, :]
            q = load_tile(q_pointers, q_mask, INTERPRETED)
            weights = tl.load(weights_ptr + first_head + heads, mask=in_heads, other=0.0)
            logits = products(keys, q)
            # Compared this way round so that a NaN stays one.
            logits = tl.where((logits < 0.0) | (heads >= num_heads)[None, :], 0.0, logits)
            scores += tl.sum(logits * weights[None, :], 1)
        if KIND == "e4m3":
            scores *= scales
        scores = tl.where(exists & (positions < seen), scores, float("-inf"))
        out_row = out_ptr + (seq_idx * num_queries + query) * num_columns.to(tl.int64)
        tl.store(out_row + positions, scores, mask=positions < num_columns)


@triton.jit
def narrow(values, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 values that are exact in DTYPE; fp32 in the interpreter."""
    return values if INTERPRETED else values.to(DTYPE)


@triton.jit
def products(keys, q):
    """fp32 [rows, heads] of keys [rows, dims] and q [heads, dims]; fp16 queries meet bf16 keys in two exact halves."""
    if keys.dtype == tl.bfloat16 and q.dtype == tl.float16:
        high = q.to(tl.bfloat16)
        low = (q.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        logits = tl.dot(keys, tl.trans(low))
        logits = tl.dot(keys, tl.trans(high), logits)
    else:
        logits = tl.dot(keys, tl.trans(q), input_precision="ieee")
    return logits


def indexer_scores(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scores of every row for every query: sum over heads of weights * relu(q . k), in fp32.

    Args:
        view: pages of `indexer_format` (codes and their scales), or of plain keys with one head.
        block_table: int32 [num_seqs, width]; rows of an entry that names no block do not exist.
        row_lens: int32 [num_seqs], rows visible to the last query, each query before it sees one less; or int32
            [num_seqs, num_queries], rows visible to each.
        q: [num_seqs, num_heads, head_dim] or [num_seqs, num_queries, num_heads, head_dim], bf16 or fp16, for plain keys
            of their dtype.
        weights: fp32, the axes of q without the last, contiguous, of any sign; scales of q and of scores are in them.
        out: fp32, the axes of q before the heads and one of columns, contiguous; None: allocated with a column for
            every row of the table. Rows past its columns have no score, columns past the rows are -inf.

    Returns: out; -inf for rows that do not exist or that the query does not see.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, and for a format without such keys.
    """
    expect_indexer(view, block_table, row_lens, q, weights, out)
    out = allocate_scores(view, block_table, q, out)
    indexer_launch(view, block_table, row_lens, q, weights, out, target=current_target(_indexer_kernel)).run()
    return out


def indexer_launch(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    target: Target,
) -> Launch:
    """The launch that scores rows, of checked arguments; the tensors may be meta tensors.

    Raises: ValueError for keys too wide for the chip's shared memory, and for more programs than a launch may have.
    """
    key = expect_indexer_keys(view)
    in_halves = key.kind == "e2m1" and q.dtype == torch.float16
    tile = _tile(target, key.head_values, 32 if in_halves else 64)
    shared_args, constexprs = read_args(view, block_table, row_lens, q, out, weights, 1.0)
    args = {name: value for name, value in shared_args.items() if name not in ("lse_ptr", "softmax_scale")}
    is_plain = key.scale_kind == "none"
    if not is_plain:
        args["memory_ptr"], constexprs["ELEMENT_BYTES"] = view.memory, 1
    starts = {"KEY": key.part, "SCALE": key.scales}
    for name, part in starts.items():
        size, start, pitch = 1, 0, 0
        if part is not None:
            size, pitch = part.dtype.itemsize, view.format.area_pitches[part.area]
            start = view.format.area_offset_bytes(part.area, view.rows_per_block) + part.offset_bytes
        constexprs |= {f"{name}_START": start // size, f"{name}_PITCH": pitch // size}
    num_seqs, num_queries = q.shape[0], q.shape[1] if q.ndim == 4 else 1
    num_programs = num_seqs * cdiv(num_queries, TILE_QUERIES) * cdiv(out.shape[-1], tile.rows)
    if num_programs > MAX_INT32:
        raise ValueError(
            f"out: expected scores for which {MAX_INT32} programs are enough, got shape {list(out.shape)}, "
            f"which needs {num_programs}"
        )
    return Launch(
        kernel=_indexer_kernel,
        grid=(num_programs,),
        args={
            **args,
            **query_args(q, row_lens),
            "weights_ptr": weights,
            "num_heads": q.shape[-2],
            "num_columns": out.shape[-1],
        },
        constexprs={
            **constexprs,
            "KIND": "plain" if is_plain else key.kind,
            "HEAD_DIM": key.head_values,
            "NUM_SCALES": key.scales_per_head,
            "TILE_Q": TILE_QUERIES,
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
            "TILE_K": padded(key.head_values),
            "INTERPRETED": INTERPRETED,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _tile(target: Target, head_dim: int, max_heads: int) -> ReadTile:
    limit = SHARED_BYTES.get(target.arch, SMALLEST_SHARED_BYTES)
    row_bytes = padded(head_dim) * 2
    for extent, num_stages in ((64, 2), (32, 2), (16, 2), (16, 1)):
        # Queries of one tile of heads arrive while those of another meet the keys.
        if (extent * num_stages + extent) * row_bytes <= limit:
            return ReadTile(min(extent, max_heads), extent, 4, num_stages)
    raise ValueError(
        f"view: expected keys of which 16 fit into the {limit} bytes of shared memory of {target.backend} "
        f"{target.arch}, got keys of {row_bytes} bytes (padded to powers of two)"
    )
