"""write_quantised: rows of bf16, fp16 or fp32 into pages of fp8, int8 or fp4 codes, scales computed on the way."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv
from kvstore_kernels.codec import (
    bf16_bits,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    finite_amax,
    load_float,
    power_of_two,
    scale_exponent,
)
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.launch import Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_slots
from kvstore_kernels.quant_codes import e2m1_exponent, encode_int8, load_bf16_bits, locate, pack_pairs, store_bytes
from kvstore_kernels.quant_rules import (
    HEAD_NAMES,
    HEAD_SCALE_FLOOR,
    QMAX,
    TILE_RULES,
    QuantPiece,
    RowScale,
    expect_quantised,
    quant_pieces,
    row_scale_of,
)
from kvstore_kernels.tiles import page_start

NOT_SPECIALISED = [
    "first_stride",
    "second_stride",
    "offset_units",
    "block_stride_units",
    "num_slots",
    "num_rows",
]


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _tiles_kernel(
    memory_ptr,  # [num_bytes] uint8
    slot_mapping_ptr,  # [num_rows] int64
    first_ptr,  # [num_rows, VALUES], rows first_stride * FIRST_UNIT elements apart
    second_ptr,  # [num_rows, TAIL] columns without a scale; None where the format has none
    first_stride: tl.int64,
    second_stride: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    num_slots: tl.int64,
    num_rows: tl.int64,
    ROWS_PER_BLOCK: tl.constexpr,
    VALUES: tl.constexpr,
    QUANT_TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,  # a power of two; tiles behind the last value are empty
    PITCH: tl.constexpr,
    SCALE_START: tl.constexpr,
    SCALE_PITCH: tl.constexpr,
    ENCODING: tl.constexpr,
    LEAST: tl.constexpr,
    PACKED: tl.constexpr,
    THROUGH_BF16: tl.constexpr,
    PERMUTED: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_START: tl.constexpr,
    TAIL_BYTES: tl.constexpr,  # of one element: 2 for bf16, 1 for e4m3
    FIRST_UNIT: tl.constexpr,
    SECOND_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program = TOKENS rows: codes and scales of their tiles, then the columns that have no scale."""
    rows, keep, block_ids, rows_in_block = locate(slot_mapping_ptr, num_rows, num_slots, ROWS_PER_BLOCK, TOKENS)
    pages = page_start(block_ids, offset_units, block_stride_units, 1)
    records = pages + rows_in_block * PITCH
    tiles = tl.arange(0, NUM_TILES)
    columns = tiles[:, None] * QUANT_TILE + tl.arange(0, QUANT_TILE)[None, :]

    mask = keep[:, None, None] & (columns < VALUES)[None]
    starts = rows * first_stride.to(tl.int64) * FIRST_UNIT
    values = load_float(first_ptr + starts[:, None, None] + columns[None], mask)
    if THROUGH_BF16 and first_ptr.dtype.element_ty != tl.bfloat16:
        values = (bf16_bits(values).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    amax = finite_amax(values, 2)
    if ENCODING == "e4m3":
        scale_codes = encode_e4m3(tl.maximum(tl.div_rn(amax, 6.0), 0.001953125))
        values = tl.div_rn(values, decode_e4m3(scale_codes)[:, :, None])
    else:
        exponents = e2m1_exponent(amax, LEAST) if PACKED else scale_exponent(amax, LEAST)
        scale_codes = exponents + 127
        values = values * power_of_two(-exponents)[:, :, None]

    if PACKED:
        # In runs of 16 bytes, what a lane stores: a tile of 16 values is only half of one.
        NUM_RUNS: tl.constexpr = NUM_TILES * QUANT_TILE // 32
        pairs = tl.arange(0, NUM_RUNS)[:, None] * 16 + tl.arange(0, 16)[None, :]
        codes = pack_pairs(tl.reshape(encode_e2m1(values), (TOKENS, NUM_RUNS, 16, 2)))
        pair_mask = keep[:, None, None] & (pairs < VALUES // 2)[None]
        tl.store(memory_ptr + records[:, None, None] + pairs[None], codes, mask=pair_mask)
    else:
        tl.store(memory_ptr + records[:, None, None] + columns[None], encode_e4m3(values), mask=mask)

    scale_records = memory_ptr + (pages + SCALE_START + rows_in_block * SCALE_PITCH)
    if ENCODING == "fp32" or ENCODING == "fp32_pow2":
        scale_ptrs = scale_records[:, None] + tiles[None, :] * 4
        tl.store(
            scale_ptrs.to(tl.pointer_type(tl.uint32), bitcast=True),
            (scale_codes << 23).to(tl.uint32),
            mask=keep[:, None],
        )
    else:
        scale_codes = tl.where((tiles * QUANT_TILE < VALUES)[None, :], scale_codes, 0)
        store_bytes(scale_records, scale_codes, keep, TOKENS, NUM_TILES, PERMUTED)

    if TAIL > 0:
        tail = tl.arange(0, TAIL)
        tail_mask = keep[:, None]
        tail_source = second_ptr + (rows * second_stride.to(tl.int64) * SECOND_UNIT)[:, None] + tail[None, :]
        # In elements of the base pointer: through pointers to bytes, two apart, each would be a store of its own.
        tails = page_start(block_ids, offset_units, block_stride_units, TAIL_BYTES)
        tails += (rows_in_block * PITCH + TAIL_START) // TAIL_BYTES
        tail_elements = tails[:, None] + tail[None, :]
        if TAIL_BYTES == 1:
            tl.store(memory_ptr + tail_elements, encode_e4m3(load_float(tail_source, tail_mask)), mask=tail_mask)
        else:
            bf16_ptr = memory_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
            tl.store(bf16_ptr + tail_elements, load_bf16_bits(tail_source, tail_mask), mask=tail_mask)


@triton.jit
def _write_heads(
    memory_ptr,
    source_ptr,
    source_starts,
    records,
    keep,
    row_scale,
    WIDTH: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    QMAX: tl.constexpr,
    FLOOR: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head of one part of TOKENS rows: codes of value / scale; SCALE_OFFSET 0: `row_scale` is the scale."""
    columns = tl.arange(0, TILE)
    mask = keep[:, None] & (columns < WIDTH)[None, :]
    values = load_float(source_ptr + source_starts[:, None] + columns[None, :], mask)
    if SCALE_OFFSET == 0:
        values = tl.div_rn(values, row_scale)
    else:
        scales = tl.maximum(tl.div_rn(finite_amax(values, 1), QMAX), FLOOR)
        values = tl.div_rn(values, scales[:, None])
        scale_ptrs = (memory_ptr + (records + SCALE_OFFSET)).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scale_ptrs, scales, mask=keep)
    codes = encode_int8(values) if QMAX == 127.0 else encode_e4m3(values)
    tl.store(memory_ptr + records[:, None] + columns[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _heads_kernel(
    memory_ptr,  # [num_bytes] uint8
    slot_mapping_ptr,  # [num_rows] int64
    first_ptr,  # [num_rows, num_heads * FIRST_WIDTH], rows first_stride * FIRST_UNIT elements apart
    second_ptr,  # [num_rows, num_heads * SECOND_WIDTH]; None where a row has one piece
    first_scale,  # fp32, or a pointer to one; None where the scales lie in the rows
    second_scale,
    first_stride: tl.int64,
    second_stride: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    num_slots: tl.int64,
    num_rows: tl.int64,
    ROWS_PER_BLOCK: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    FIRST_START: tl.constexpr,  # in bytes of the page
    SECOND_START: tl.constexpr,
    FIRST_PITCH: tl.constexpr,
    SECOND_PITCH: tl.constexpr,
    HEAD_PITCH: tl.constexpr,
    FIRST_UNIT: tl.constexpr,
    SECOND_UNIT: tl.constexpr,
    FIRST_SCALE_LOADED: tl.constexpr,
    SECOND_SCALE_LOADED: tl.constexpr,
    SCALED_INSIDE: tl.constexpr,
    QMAX: tl.constexpr,
    FLOOR: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program = TOKENS rows of one head (of whole rows, where one scale serves all): first piece, then second."""
    rows, keep, block_ids, rows_in_block = locate(slot_mapping_ptr, num_rows, num_slots, ROWS_PER_BLOCK, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    heads = page_start(block_ids, offset_units, block_stride_units, 1) + head * HEAD_PITCH
    if FIRST_SCALE_LOADED:
        first_scale = tl.load(first_scale)
    starts = rows * first_stride.to(tl.int64) * FIRST_UNIT + head * FIRST_WIDTH
    records = heads + FIRST_START + rows_in_block * FIRST_PITCH
    FIRST_SCALE: tl.constexpr = FIRST_WIDTH if SCALED_INSIDE else 0
    _write_heads(memory_ptr, first_ptr, starts, records, keep, first_scale, FIRST_WIDTH, FIRST_SCALE, QMAX, FLOOR, TILE)
    if SECOND_WIDTH > 0:
        if SECOND_SCALE_LOADED:
            second_scale = tl.load(second_scale)
        starts = rows * second_stride.to(tl.int64) * SECOND_UNIT + head * SECOND_WIDTH
        records = heads + SECOND_START + rows_in_block * SECOND_PITCH
        SECOND_SCALE: tl.constexpr = SECOND_WIDTH if SCALED_INSIDE else 0
        _write_heads(
            memory_ptr, second_ptr, starts, records, keep, second_scale, SECOND_WIDTH, SECOND_SCALE, QMAX, FLOOR, TILE
        )


def write_quantised(
    view: PageView,
    slot_mapping: torch.Tensor,
    *parts: torch.Tensor,
    row_scales: RowScale | Sequence[RowScale] | None = None,
) -> None:
    """Quantises row i of `parts` and writes its codes and scales to slot `slot_mapping[i]`.

    Args:
        view: the pages to write to, of a quantised format.
        slot_mapping: int64 [num_rows], `block_id * rows_per_block + row_in_block`. Slots below 0 or from
            `view.num_slots` on are skipped. Equal slots in one call leave that row's content undefined.
        parts: for each part that holds no scales a tensor of bf16, fp16 or fp32, [>= num_rows, num_heads, head_dim]
            or [>= num_rows, num_heads * head_dim] in values (not in bytes of packed codes): the elements of a row
            contiguous, any stride between rows. Rows behind the last slot are ignored. The nope and rope columns of a
            latent row may come as one tensor or as two.
        row_scales: for rows whose scales lie outside the cache, one scale per part, values are divided by it: a
            float, or an fp32 tensor of one element that the kernel reads (no synchronisation). None: 1.0.

    NaN, infinities and rounding are as in `codec`; int8 has no NaN and stores 0. A tile of zeros gets the least scale.

    Raises: ValueError or TypeError, before anything is written, for a format that is not quantised, a wrong shape,
        dtype, device or number of parts or scales, and for more slots than rows.
    """
    quant_write_launch(view, slot_mapping, parts, current_target(_heads_kernel), row_scales).run()


def quant_write_launch(
    view: PageView,
    slot_mapping: torch.Tensor,
    parts: Sequence[torch.Tensor],
    target: Target,
    row_scales: RowScale | Sequence[RowScale] | None = None,
) -> Launch:
    """The launch of `write_quantised` on `target`; the tensors may be meta tensors."""
    expect_quantised(view)
    num_rows = expect_slots(view, slot_mapping)
    scales = row_scale_of(view.format, row_scales, view.device)
    pieces = quant_pieces(view, parts, num_rows)
    first, second = pieces[0], pieces[1] if len(pieces) == 2 else None
    args: dict[str, torch.Tensor | int | float | None] = {
        "memory_ptr": view.memory,
        "slot_mapping_ptr": slot_mapping,
        "first_ptr": first.rows,
        "second_ptr": second.rows if second else None,
        "first_stride": first.stride_and_unit()[0],
        "second_stride": second.stride_and_unit()[0] if second else 0,
        "offset_units": view.offset_bytes // ALIGNMENT_BYTES,
        "block_stride_units": view.block_stride_bytes // ALIGNMENT_BYTES,
        "num_slots": view.num_slots,
        "num_rows": num_rows,
    }
    constexprs = {
        "ROWS_PER_BLOCK": view.rows_per_block,
        "FIRST_UNIT": first.stride_and_unit()[1],
        "SECOND_UNIT": second.stride_and_unit()[1] if second else 1,
    }
    if view.format.name in TILE_RULES:
        # Four rows for 32 lanes: the rope columns of one row would leave each lane 4 bytes.
        # Eight where a row has 64 bytes of codes.
        tokens = target.warp_size // (8 if first.part.num_bytes >= 128 else 4)
        constexprs |= {**_tile_constexprs(view, first, second), "TOKENS": tokens}
        return Launch(_tiles_kernel, (cdiv(num_rows, tokens),), args, constexprs, num_warps=1)
    inside = view.format.name in HEAD_NAMES
    num_heads = first.part.num_heads if inside else 1
    tile = triton.next_power_of_2(max(piece.rows.shape[1] // num_heads for piece in pieces))
    tokens = max(1, ALIGNMENT_BYTES * target.warp_size // tile)
    args |= {
        "first_scale": scales.get(first.part.name),
        "second_scale": scales.get(second.part.name) if second else None,
    }
    constexprs |= {**_head_constexprs(view, pieces, scales, num_heads), "TILE": tile, "TOKENS": tokens}
    num_warps = lanes_of_16_bytes(tile * tokens, target)
    return Launch(_heads_kernel, (cdiv(num_rows, tokens), num_heads), args, constexprs, num_warps)


def _start(view: PageView, piece: QuantPiece) -> int:
    """Where in a page the piece of row 0 begins."""
    part = piece.part
    area = view.format.area_offset_bytes(part.area, view.rows_per_block)
    return area + part.offset_bytes + piece.first_element * part.dtype.itemsize


def _tile_constexprs(view: PageView, values: QuantPiece, tail: QuantPiece | None) -> dict[str, Any]:
    entry, rule = values.entry, TILE_RULES[view.format.name]
    assert entry is not None, "the first part of these formats is quantised"
    assert entry.scales is not None, "and its scales lie in the rows"
    scales = view.format.part(entry.scales)
    return {
        "VALUES": values.width,
        "QUANT_TILE": entry.quant_tile,
        "NUM_TILES": triton.next_power_of_2(scales.head_dim),
        "PITCH": view.format.area_pitches[values.part.area],
        "SCALE_START": view.format.area_offset_bytes(scales.area, view.rows_per_block) + scales.offset_bytes,
        "SCALE_PITCH": view.format.area_pitches[scales.area],
        "ENCODING": entry.encoding,
        "LEAST": rule.least,
        "PACKED": entry.values_per_element == 2,
        "THROUGH_BF16": rule.through_bf16,
        "PERMUTED": rule.is_permuted,
        "TAIL": tail.width if tail else 0,
        "TAIL_START": tail.part.offset_bytes if tail else 0,
        "TAIL_BYTES": tail.part.dtype.itemsize if tail else 1,
    }


def _head_constexprs(
    view: PageView, pieces: Sequence[QuantPiece], scales: dict[str, RowScale], num_heads: int
) -> dict[str, Any]:
    first, second = pieces[0], pieces[-1]
    return {
        "FIRST_WIDTH": first.rows.shape[1] // num_heads,
        "SECOND_WIDTH": second.rows.shape[1] // num_heads if len(pieces) == 2 else 0,
        "FIRST_START": _start(view, first),
        "SECOND_START": _start(view, second),
        "FIRST_PITCH": view.format.area_pitches[first.part.area],
        "SECOND_PITCH": view.format.area_pitches[second.part.area],
        "HEAD_PITCH": first.part.pitch_bytes,
        "FIRST_SCALE_LOADED": isinstance(scales.get(first.part.name), torch.Tensor),
        "SECOND_SCALE_LOADED": len(pieces) == 2 and isinstance(scales.get(second.part.name), torch.Tensor),
        "SCALED_INSIDE": not scales,
        "QMAX": QMAX[first.part.dtype],
        "FLOOR": HEAD_SCALE_FLOOR,
    }
