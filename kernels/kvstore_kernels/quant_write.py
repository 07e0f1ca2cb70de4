"""write_quantised: rows of bf16, fp16 or fp32 into pages of fp8, int8 or fp4 codes, scales computed on the way."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore_kernels.casts import encode_fp8, hardware_cast_of
from kvstore_kernels.checks import cdiv, next_power_of_2
from kvstore_kernels.codec import (
    bf16_bits,
    decode_e4m3,
    encode_e2m1,
    finite_amax,
    load_float,
    power_of_two,
    scale_exponent,
)
from kvstore_kernels.copy import Layers, LayerTable, layer_table
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.launch import Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.layers import LayerSteps, first_layer, layer_args, load_pages
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_slots
from kvstore_kernels.quant_codes import e2m1_exponent, load_bf16_bits, locate, pack_pairs, store_bytes
from kvstore_kernels.quant_heads import NOT_SPECIALISED, head_constexprs, heads_kernel, scale_args
from kvstore_kernels.quant_rules import (
    HEAD_NAMES,
    TILE_RULES,
    QuantPiece,
    RowScale,
    expect_quantised,
    quant_pieces,
    row_scale_of,
)
from kvstore_kernels.tiles import page_start


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _tiles_kernel(
    memory_ptr,  # [num_bytes] uint8; None where there are layers
    layers_ptr,  # [num_layers, 4] int64, a LayerTable; None: one view
    slot_mapping_ptr,  # [num_rows] int64, of layers slot_layer_stride apart
    first_ptr,  # [num_rows, VALUES], rows first_stride * FIRST_UNIT elements apart
    second_ptr,  # [num_rows, TAIL] columns without a scale; None where the format has none
    first_stride: tl.int64,
    second_stride: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    num_slots: tl.int64,
    num_rows: tl.int64,
    slot_layer_stride: tl.int64,
    first_layer_stride: tl.int64,
    second_layer_stride: tl.int64,
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
    HARDWARE_CAST: tl.constexpr,  # None: the codec encodes e4m3, otherwise the chip's cast
    TOKENS: tl.constexpr,
):
    """Program = TOKENS rows, or (TOKENS rows, 1, layer): codes and scales of tiles, then columns without a scale."""
    if layers_ptr is not None:
        layer_idx = tl.program_id(2).to(tl.int64)
        slot_mapping_ptr += layer_idx * slot_layer_stride.to(tl.int64)
        first_ptr += layer_idx * first_layer_stride.to(tl.int64) * FIRST_UNIT
        if TAIL > 0:
            second_ptr += layer_idx * second_layer_stride.to(tl.int64) * SECOND_UNIT
        memory_ptr, block_stride_units = load_pages(layers_ptr, layer_idx, tl.uint8)
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
        scale_codes = encode_fp8(tl.maximum(tl.div_rn(amax, 6.0), 0.001953125), HARDWARE_CAST)
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
        tl.store(memory_ptr + records[:, None, None] + columns[None], encode_fp8(values, HARDWARE_CAST), mask=mask)

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
            codes = encode_fp8(load_float(tail_source, tail_mask), HARDWARE_CAST)
            tl.store(memory_ptr + tail_elements, codes, mask=tail_mask)
        else:
            bf16_ptr = memory_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
            tl.store(bf16_ptr + tail_elements, load_bf16_bits(tail_source, tail_mask), mask=tail_mask)


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
    quant_write_launch(view, slot_mapping, parts, current_target(heads_kernel), row_scales).run()


def write_layers(
    views: Layers,
    slot_mapping: torch.Tensor,
    *parts: torch.Tensor,
    row_scales: RowScale | Sequence[RowScale] | None = None,
) -> None:
    """`write_quantised` into every layer of `views` in one launch; see `kvstore_kernels.write_layers`."""
    target = current_target(heads_kernel)
    quant_layers_launch(layer_table(views), slot_mapping, parts, target, row_scales).run()


def quant_layers_launch(
    table: LayerTable,
    slot_mapping: torch.Tensor,
    parts: Sequence[torch.Tensor],
    target: Target,
    row_scales: RowScale | Sequence[RowScale] | None = None,
    hardware_cast: bool | None = None,
) -> Launch:
    """The launch of `write_layers` on `target`, as `quant_write_launch`."""
    steps, slots, rows = first_layer(table, slot_mapping, parts)
    return quant_write_launch(table.views[0], slots, rows, target, row_scales, hardware_cast, steps)


def quant_write_launch(
    view: PageView,
    slot_mapping: torch.Tensor,
    parts: Sequence[torch.Tensor],
    target: Target,
    row_scales: RowScale | Sequence[RowScale] | None = None,
    hardware_cast: bool | None = None,
    steps: LayerSteps | None = None,
) -> Launch:
    """The launch of `write_quantised` on `target`; the tensors may be meta tensors.

    `hardware_cast`: whether the chip's cast encodes e4m3, None: where it is known to give the codec's bytes. With
    `steps`, the launch of `write_layers`, and view, slots and parts are those of the first layer.

    Raises: as `write_quantised`, and ValueError for the cast of a chip that has none.
    """
    expect_quantised(view)
    num_rows = expect_slots(view, slot_mapping)
    num_layers = None if steps is None else steps.num_layers
    scales = row_scale_of(view.format, row_scales, view.device, num_layers)
    pieces = quant_pieces(view, parts, num_rows)
    if steps is not None:
        pieces = steps.apart(pieces)
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
        **layer_args(steps, pieces),
    }
    constexprs = {
        "ROWS_PER_BLOCK": view.rows_per_block,
        "FIRST_UNIT": first.stride_and_unit()[1],
        "SECOND_UNIT": second.stride_and_unit()[1] if second else 1,
        "HARDWARE_CAST": hardware_cast_of(target, hardware_cast),
    }
    if view.format.name in TILE_RULES:
        # Four rows for 32 lanes: the rope columns of one row would leave each lane 4 bytes.
        # Eight where a row has 64 bytes of codes.
        tokens = target.warp_size // (8 if first.part.num_bytes >= 128 else 4)
        constexprs |= {**_tile_constexprs(view, first, second), "TOKENS": tokens}
        return Launch(_tiles_kernel, _grid(num_rows, tokens, 1, steps), args, constexprs, num_warps=1)
    inside = view.format.name in HEAD_NAMES
    num_heads = first.part.num_heads if inside else 1
    tile = next_power_of_2(max(piece.rows.shape[1] // num_heads for piece in pieces))
    tokens = max(1, ALIGNMENT_BYTES * target.warp_size // tile)
    args |= scale_args(pieces, scales, num_layers)
    constexprs |= {**head_constexprs(view, pieces, scales, num_heads), "TILE": tile, "TOKENS": tokens}
    num_warps = lanes_of_16_bytes(tile * tokens, target)
    return Launch(heads_kernel, _grid(num_rows, tokens, num_heads, steps), args, constexprs, num_warps)


def _grid(num_rows: int, tokens: int, num_heads: int, steps: LayerSteps | None) -> tuple[int, ...]:
    heads = (cdiv(num_rows, tokens), num_heads)
    return heads if steps is None else (*heads, steps.num_layers)


def _tile_constexprs(view: PageView, values: QuantPiece, tail: QuantPiece | None) -> dict[str, Any]:
    entry, rule = values.entry, TILE_RULES[view.format.name]
    assert entry is not None, "the first part of these formats is quantised"
    assert entry.scales is not None, "and its scales lie in the rows"
    scales = view.format.part(entry.scales)
    return {
        "VALUES": values.width,
        "QUANT_TILE": entry.quant_tile,
        "NUM_TILES": next_power_of_2(scales.head_dim),
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
