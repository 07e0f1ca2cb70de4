"""sparse_mla_decode: attention over the latent rows that a list of slots names, in one cache or in two."""

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.formats import ALIGNMENT_BYTES, RowPart
from kvstore_kernels.launch import INTERPRETED, Launch, Target, current_target
from kvstore_kernels.merge import merge_launch
from kvstore_kernels.pages import PageView
from kvstore_kernels.reads import allocate_outputs, allocate_partials, expect_latent, part_start_and_pitch
from kvstore_kernels.softmax import LOG2_E, load_tile, normalise, softmax_step, split_tiles, store_tile
from kvstore_kernels.sparse_checks import Rows, expect_sparse
from kvstore_kernels.splits import ReadTile, choose_num_splits, latent_tile, num_cores, padded
from kvstore_kernels.tiles import page_start


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
    ]
)
def _sparse_mla_kernel(
    memory_ptr,  # [memory elements] of the rows' dtype
    slots_ptr,  # [num_seqs, num_listed] int32 or int64, rows slots_stride apart
    q_ptr,  # [num_seqs, num_heads, LATENT_DIM], sequences q_stride elements apart
    out_ptr,  # [num_seqs, num_heads, total_splits, VALUE_DIM]
    lse_ptr,  # [num_seqs, num_heads, total_splits] fp32
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
    ROWS_PER_BLOCK: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROW_START: tl.constexpr,
    ROW_PITCH: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_NOPE: tl.constexpr,
    TILE_ROPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = (sequence and tile of heads; split of the listed slots). Slots that name no row count for nothing."""
    num_head_tiles = tl.cdiv(num_heads, TILE_H)
    seq_idx = (tl.program_id(0) // num_head_tiles).to(tl.int64)
    heads = tl.program_id(0) % num_head_tiles * TILE_H + tl.arange(0, TILE_H)
    nope = tl.arange(0, TILE_NOPE)
    in_heads, in_nope = heads < num_heads, nope < VALUE_DIM

    q_rows = q_ptr + seq_idx * q_stride.to(tl.int64) + heads[:, None] * LATENT_DIM
    q_nope = load_tile(q_rows + nope[None, :], in_heads[:, None] & in_nope[None, :], INTERPRETED)
    if LATENT_DIM > VALUE_DIM:
        rope = VALUE_DIM + tl.arange(0, TILE_ROPE)
        in_rope = rope < LATENT_DIM
        q_rope = load_tile(q_rows + rope[None, :], in_heads[:, None] & in_rope[None, :], INTERPRETED)

    running_max = tl.full([TILE_H], float("-inf"), tl.float32)
    running_sum = tl.zeros([TILE_H], tl.float32)
    weighted_sum = tl.zeros([TILE_H, TILE_NOPE], tl.float32)
    scale = softmax_scale * LOG2_E
    slots_ptr += seq_idx * slots_stride.to(tl.int64)
    first_tile, last_tile = split_tiles(0, num_listed, TILE_N)
    for tile in range(first_tile, last_tile):
        listed = tl.cast(tile, tl.int32) * TILE_N + tl.arange(0, TILE_N)
        slots = tl.load(slots_ptr + listed, mask=listed < num_listed, other=-1).to(tl.int64)
        # Before the division, which truncates towards zero: slot -1 would become row 0 of block 0.
        exists = (slots >= 0) & (slots < num_slots)
        block_ids = slots // ROWS_PER_BLOCK
        page = page_start(block_ids, offset_units, block_stride_units, ELEMENT_BYTES)
        row_pointers = memory_ptr + page + ROW_START + (slots - block_ids * ROWS_PER_BLOCK) * ROW_PITCH
        latent = load_tile(row_pointers[:, None] + nope[None, :], exists[:, None] & in_nope[None, :], INTERPRETED)
        scores = tl.dot(q_nope, tl.trans(latent), input_precision="ieee")
        if LATENT_DIM > VALUE_DIM:
            k_rope = load_tile(row_pointers[:, None] + rope[None, :], exists[:, None] & in_rope[None, :], INTERPRETED)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        scores = tl.where(exists[None, :], scores * scale, float("-inf"))
        weights, running_max, running_sum, factor = softmax_step(scores, running_max, running_sum)
        weighted_sum = tl.dot(weights.to(latent.dtype), latent, weighted_sum * factor[:, None], input_precision="ieee")

    out, lse = normalise(weighted_sum, running_max, running_sum)
    partial = (seq_idx * num_heads + heads) * total_splits + first_split + tl.program_id(1)
    store_tile(
        out_ptr + partial[:, None] * VALUE_DIM + nope[None, :], out, in_heads[:, None] & in_nope[None, :], INTERPRETED
    )
    tl.store(lse_ptr + partial, lse, mask=in_heads)


def sparse_mla_decode(
    view: PageView,
    slots: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    second: Rows | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over the latent rows of a list of slots.

    Args:
        view: pages of latent rows: K is a row, V its first `value_dim` columns.
        slots: int32 or int64 [num_seqs, num_listed], `block_id * rows_per_block + row_in_block`; a slot below 0 or past
            the last is skipped, and one listed twice counts twice.
        q: [num_seqs, num_heads, latent_dim] of the rows' dtype.
        softmax_scale: factor on the scores.
        second: another cache of the same latent_dim, value_dim and dtype, with its own pages, and its slots (DeepSeek
            V4: the window beside the compressed rows); attended to as if its rows stood in one list with the first's.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.
        out: [num_seqs, num_heads, value_dim] of q's dtype, contiguous; None: allocated.
        lse: fp32 [num_seqs, num_heads], contiguous; None: allocated.
        num_splits: parts that each list is split into; None: from a table of host values.

    Returns: out and lse (natural logarithm, of the rows without the sink); 0 and -inf where no slot names a row.

    Raises: ValueError or TypeError, before anything is written, for an argument of wrong type, shape, dtype, device or
        strides, for a format that is not latent, and for two caches whose rows differ.
    """
    lists = [(view, slots)] if second is None else [(view, slots), second]
    latent, value_dim = expect_sparse(lists, q, softmax_scale, sinks, out, lse, num_splits)
    target = current_target(_sparse_mla_kernel)
    splits = [num_splits or _num_splits(rows, q, latent, value_dim, target) for rows in lists]
    out, lse = allocate_outputs(q, value_dim, out, lse)
    merged = sum(splits) > 1 or sinks is not None
    partial_out, partial_lse = allocate_partials(out, lse, sum(splits), merged=merged)
    first_split = 0
    for rows, count in zip(lists, splits, strict=True):
        sparse_launch(
            rows, q, partial_out, partial_lse, first_split, count, softmax_scale=softmax_scale, target=target
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
    target: Target,
) -> Launch:
    """The launch that attends to one list, as parts `first_split` and on; the tensors may be meta tensors."""
    view, slots = rows
    latent, value_dim = expect_latent(view)
    num_seqs, num_heads, total_splits = partial_lse.shape
    tile = _tile(num_heads, latent, value_dim, target)
    row_start, row_pitch = part_start_and_pitch(view, latent)
    size = latent.dtype.itemsize
    q = q.contiguous()
    return Launch(
        kernel=_sparse_mla_kernel,
        grid=(num_seqs * cdiv(num_heads, tile.heads), num_splits),
        args={
            "memory_ptr": view.memory[: view.memory.numel() // size * size].view(latent.dtype),
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
            "ROWS_PER_BLOCK": view.rows_per_block,
            "LATENT_DIM": latent.head_dim,
            "VALUE_DIM": value_dim,
            "ROW_START": row_start,
            "ROW_PITCH": row_pitch,
            "ELEMENT_BYTES": size,
            "TILE_H": tile.heads,
            "TILE_N": tile.rows,
            "TILE_NOPE": padded(value_dim),
            "TILE_ROPE": padded(latent.head_dim - value_dim),
            "INTERPRETED": INTERPRETED,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _num_splits(rows: Rows, q: torch.Tensor, latent: RowPart, value_dim: int, target: Target) -> int:
    num_programs = q.shape[0] * cdiv(q.shape[1], _tile(q.shape[1], latent, value_dim, target).heads)
    return choose_num_splits(num_programs, rows[1].shape[1], num_cores(q.device))


def _tile(num_heads: int, latent: RowPart, value_dim: int, target: Target) -> ReadTile:
    """The tile for rows that may lie anywhere, as in blocks of one row."""
    return latent_tile(target, num_heads, latent.head_dim, value_dim, latent.dtype.itemsize, 1)
