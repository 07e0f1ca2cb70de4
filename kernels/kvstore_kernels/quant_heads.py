"""Writes of rows whose heads have a scale each, or whose scale lies outside the cache: the kernel and its constants."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore_kernels.casts import encode_fp8
from kvstore_kernels.codec import finite_amax, load_float
from kvstore_kernels.layers import load_pages
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_codes import encode_int8, locate
from kvstore_kernels.quant_rules import HEAD_SCALE_FLOOR, QMAX, QuantPiece, RowScale
from kvstore_kernels.tiles import page_start

NOT_SPECIALISED = [
    *("first_stride", "second_stride", "offset_units", "block_stride_units", "num_slots", "num_rows"),
    *("slot_layer_stride", "first_layer_stride", "second_layer_stride"),
]


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
    HARDWARE_CAST: tl.constexpr,
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
    codes = encode_int8(values) if QMAX == 127.0 else encode_fp8(values, HARDWARE_CAST)
    tl.store(memory_ptr + records[:, None] + columns[None, :], codes, mask=mask)


@triton.jit(
    do_not_specialize=[*NOT_SPECIALISED, "first_scale_step", "second_scale_step"],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "first_scale", "second_scale"],
)
def heads_kernel(
    memory_ptr,  # [num_bytes] uint8; None where there are layers
    layers_ptr,  # [num_layers, 4] int64, a LayerTable; None: one view
    slot_mapping_ptr,  # [num_rows] int64, of layers slot_layer_stride apart
    first_ptr,  # [num_rows, num_heads * FIRST_WIDTH], rows first_stride * FIRST_UNIT elements apart
    second_ptr,  # [num_rows, num_heads * SECOND_WIDTH]; None where a row has one piece
    first_scale,  # fp32, or a pointer to one or one per layer; None where the scales lie in the rows
    second_scale,
    first_stride: tl.int64,
    second_stride: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    num_slots: tl.int64,
    num_rows: tl.int64,
    slot_layer_stride: tl.int64,
    first_layer_stride: tl.int64,
    second_layer_stride: tl.int64,
    first_scale_step: tl.int64,  # from one layer to the next, 0: they share one
    second_scale_step: tl.int64,
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
    HARDWARE_CAST: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program = (TOKENS rows, head) or (TOKENS rows, head, layer): first piece, then second.

    Where one scale serves all heads, a whole row counts as one.
    """
    if layers_ptr is not None:
        layer_idx = tl.program_id(2).to(tl.int64)
        slot_mapping_ptr += layer_idx * slot_layer_stride.to(tl.int64)
        first_ptr += layer_idx * first_layer_stride.to(tl.int64) * FIRST_UNIT
        if SECOND_WIDTH > 0:
            second_ptr += layer_idx * second_layer_stride.to(tl.int64) * SECOND_UNIT
        if FIRST_SCALE_LOADED:
            first_scale += layer_idx * first_scale_step.to(tl.int64)
        if SECOND_SCALE_LOADED:
            second_scale += layer_idx * second_scale_step.to(tl.int64)
        memory_ptr, block_stride_units = load_pages(layers_ptr, layer_idx, tl.uint8)
    rows, keep, block_ids, rows_in_block = locate(slot_mapping_ptr, num_rows, num_slots, ROWS_PER_BLOCK, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    heads = page_start(block_ids, offset_units, block_stride_units, 1) + head * HEAD_PITCH
    if FIRST_SCALE_LOADED:
        first_scale = tl.load(first_scale)
    starts = rows * first_stride.to(tl.int64) * FIRST_UNIT + head * FIRST_WIDTH
    records = heads + FIRST_START + rows_in_block * FIRST_PITCH
    FIRST_SCALE: tl.constexpr = FIRST_WIDTH if SCALED_INSIDE else 0
    _write_heads(
        *(memory_ptr, first_ptr, starts, records, keep, first_scale),
        *(FIRST_WIDTH, FIRST_SCALE, QMAX, FLOOR, HARDWARE_CAST, TILE),
    )
    if SECOND_WIDTH > 0:
        if SECOND_SCALE_LOADED:
            second_scale = tl.load(second_scale)
        starts = rows * second_stride.to(tl.int64) * SECOND_UNIT + head * SECOND_WIDTH
        records = heads + SECOND_START + rows_in_block * SECOND_PITCH
        SECOND_SCALE: tl.constexpr = SECOND_WIDTH if SCALED_INSIDE else 0
        _write_heads(
            *(memory_ptr, second_ptr, starts, records, keep, second_scale),
            *(SECOND_WIDTH, SECOND_SCALE, QMAX, FLOOR, HARDWARE_CAST, TILE),
        )


def scale_args(
    pieces: Sequence[QuantPiece], scales: Mapping[str, RowScale], num_layers: int | None
) -> dict[str, RowScale | int | None]:
    """The run-time arguments of the scales outside the cache; `num_layers` None: one view."""
    found = [scales.get(piece.part.name) for piece in pieces]
    first, second = found[0], found[1] if len(pieces) == 2 else None
    return {
        "first_scale": first,
        "second_scale": second,
        "first_scale_step": int(isinstance(first, torch.Tensor) and first.shape == (num_layers,)),
        "second_scale_step": int(isinstance(second, torch.Tensor) and second.shape == (num_layers,)),
    }


def head_constexprs(
    view: PageView, pieces: Sequence[QuantPiece], scales: Mapping[str, RowScale], num_heads: int
) -> dict[str, Any]:
    """The compile-time arguments of `heads_kernel` but the size of its tiles."""
    first, second = pieces[0], pieces[-1]
    loaded = {name: scale for name, scale in scales.items() if isinstance(scale, torch.Tensor)}
    return {
        "FIRST_WIDTH": first.rows.shape[1] // num_heads,
        "SECOND_WIDTH": second.rows.shape[1] // num_heads if len(pieces) == 2 else 0,
        "FIRST_START": _start(view, first),
        "SECOND_START": _start(view, second),
        "FIRST_PITCH": view.format.area_pitches[first.part.area],
        "SECOND_PITCH": view.format.area_pitches[second.part.area],
        "HEAD_PITCH": first.part.pitch_bytes,
        "FIRST_SCALE_LOADED": first.part.name in loaded,
        "SECOND_SCALE_LOADED": len(pieces) == 2 and second.part.name in loaded,
        "SCALED_INSIDE": not scales,
        "QMAX": QMAX[first.part.dtype],
        "FLOOR": HEAD_SCALE_FLOOR,
    }


def _start(view: PageView, piece: QuantPiece) -> int:
    """Where in a page the piece of row 0 begins."""
    part = piece.part
    area = view.format.area_offset_bytes(part.area, view.rows_per_block)
    return area + part.offset_bytes + piece.first_element * part.dtype.itemsize
