"""One part of a tile of rows as numbers: loaded, decoded, times its scales, rounded, stored."""

from typing import Any

import triton
import triton.language as tl

from kvstore_kernels.checks import next_power_of_2
from kvstore_kernels.codec import bf16_bits, decode_e4m3, decode_ue8m0
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import ValuePart

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""The size of elements; codes and pairs of codes are bytes."""


@triton.jit
def bytes_as(memory_ptr, SIZE: tl.constexpr):
    """A pointer to bytes as one to unsigned integers of SIZE bytes."""
    if SIZE == 2:
        typed_ptr = memory_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    elif SIZE == 4:
        typed_ptr = memory_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    else:
        typed_ptr = memory_ptr
    return typed_ptr


@triton.jit
def e4m3_values(codes):
    """What `codec.decode_e4m3` gives, in fewer instructions: sign and magnitude as the bits of a tiny fp32, scaled up.

    Needs fp32 subnormals, which Triton keeps: without them codes below 2^-6 would come out as zeros.
    """
    bits = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000  # 0x87F00000: the shift drags the sign along
    values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120 moves the bias from 127 to 7
    return tl.where(tl.abs(values) > 448.0, float("nan"), values)


@triton.jit
def e2m1_values(nibbles):
    """What `codec.decode_e2m1` gives for codes in the upper four bits of int32, whatever lies below."""
    bits = (nibbles >> 6) & -0x7E400000  # 0x81C00000
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def decode(codes, KIND: tl.constexpr):
    """Elements as they lie in a row, unsigned integers [rows, heads, elements] -> fp32; e2m1 gives twice as many."""
    if KIND == "e4m3":
        values = e4m3_values(codes)
    elif KIND == "e2m1":
        wide = codes.to(tl.int32)
        both = tl.join(e2m1_values(wide << 28), e2m1_values(wide << 24))
        values = tl.reshape(both, [codes.shape[0], codes.shape[1], codes.shape[2] * 2])
    elif KIND == "int8":
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "bf16":
        values = (codes.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        values = codes.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = codes.to(tl.float32, bitcast=True)
    return values


@triton.jit
def rounded_bits(values, DTYPE: tl.constexpr):
    """The bits of fp32 values in DTYPE, rounded to nearest even; NaN has one pattern on every device."""
    if DTYPE == "bf16":
        bits = bf16_bits(values)
    elif DTYPE == "fp16":
        halves = values.to(tl.float16).to(tl.uint16, bitcast=True)
        bits = tl.where(values == values, halves, 0x7E00).to(tl.uint16)
    else:
        bits = tl.where(values == values, values.to(tl.uint32, bitcast=True), 0x7FC00000).to(tl.uint32)
    return bits


@triton.jit
def load_scales(
    memory_ptr,
    page_units,
    rows_in_block,
    exists,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    PITCH: tl.constexpr,
    HEAD_PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    READS: tl.constexpr,
    TILE: tl.constexpr,
    IS_PERMUTED: tl.constexpr,
):
    """The scales of rows [rows, TILE_HEADS * TILE] in fp32; finite where no row exists, whose codes are zeros."""
    groups = tl.arange(0, TILE_HEADS * TILE)[None, :]
    heads, scales = groups // TILE, groups % TILE
    first = page_units * (16 // SIZE) + OFFSET + rows_in_block * PITCH
    pointers = bytes_as(memory_ptr, SIZE) + first[:, None] + (heads * HEAD_PITCH + scales)
    raw = tl.load(pointers, mask=exists[:, None] & (heads < HEADS) & (scales < READS), other=0)
    if IS_PERMUTED:  # byte 8 a + b holds the scale of tile 4 b + a
        raw = tl.reshape(tl.permute(tl.reshape(raw, [raw.shape[0], 4, TILE // 4]), [0, 2, 1]), [raw.shape[0], TILE])
    if KIND == "fp32":
        values = raw.to(tl.float32, bitcast=True)
    elif KIND == "ue8m0":
        values = decode_ue8m0(raw)
    else:
        values = decode_e4m3(raw)
    return values


@triton.jit
def read_part(
    memory_ptr,
    page_units,
    rows_in_block,
    exists,
    is_row,
    out_ptrs,
    scale_ptr,
    scale,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    PITCH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_ELEMENTS: tl.constexpr,
    HEAD_PITCH: tl.constexpr,
    PER_ELEMENT: tl.constexpr,
    COLUMN: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    SCALE_SIZE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALE_PITCH: tl.constexpr,
    SCALE_HEAD_PITCH: tl.constexpr,
    SCALE_READS: tl.constexpr,
    TILE_SCALES: tl.constexpr,
    IS_PERMUTED: tl.constexpr,
):
    """Stores one part of rows. Offsets and pitches count elements of SIZE and SCALE_SIZE bytes."""
    heads = tl.arange(0, TILE_HEADS)[None, :, None]
    elements = tl.arange(0, TILE_ELEMENTS)[None, None, :]
    first = page_units * (16 // SIZE) + OFFSET + rows_in_block * PITCH
    pointers = bytes_as(memory_ptr, SIZE) + first[:, None, None] + (heads * HEAD_PITCH + elements)
    inside = (heads < HEADS) & (elements < HEAD_ELEMENTS)
    codes = tl.load(pointers, mask=exists[:, None, None] & inside, other=0)

    head_values: tl.constexpr = HEAD_ELEMENTS * PER_ELEMENT
    tile_values: tl.constexpr = TILE_ELEMENTS * PER_ELEMENT
    columns = tl.arange(0, tile_values)[None, None, :]
    targets = out_ptrs[:, None, None] + (COLUMN + heads * head_values + columns)
    wanted = is_row[:, None, None] & (heads < HEADS) & (columns < head_values)
    if KIND == DTYPE:
        tl.store(targets, codes, mask=wanted)
    else:
        values = decode(codes, KIND)
        if SCALE_KIND == "outside":
            if scale_ptr is not None:
                scale = tl.load(scale_ptr)
            values *= tl.where(exists, scale, 0.0).to(tl.float32)[:, None, None]
        elif SCALE_KIND != "none":
            scales = load_scales(
                memory_ptr,
                page_units,
                rows_in_block,
                exists,
                SCALE_KIND,
                SCALE_SIZE,
                SCALE_OFFSET,
                SCALE_PITCH,
                SCALE_HEAD_PITCH,
                HEADS,
                TILE_HEADS,
                SCALE_READS,
                TILE_SCALES,
                IS_PERMUTED,
            )
            num_rows: tl.constexpr = codes.shape[0]
            tiles = tl.reshape(values, [num_rows, TILE_HEADS * TILE_SCALES, tile_values // TILE_SCALES])
            values = tl.reshape(tiles * scales[:, :, None], [num_rows, TILE_HEADS, tile_values])
        tl.store(targets, rounded_bits(values, DTYPE), mask=wanted)


def part_constexprs(view: PageView, part: ValuePart) -> dict[str, Any]:
    """The compile-time arguments of `read_part`."""
    where, size = part.part, ELEMENT_BYTES.get(part.kind, 1)
    start = view.format.area_offset_bytes(where.area, view.rows_per_block) + where.offset_bytes
    described: dict[str, Any] = {
        "KIND": part.kind,
        "SIZE": size,
        "OFFSET": start // size,
        "PITCH": view.format.area_pitches[where.area] // size,
        "HEADS": part.num_heads,
        "HEAD_ELEMENTS": part.head_elements,
        "HEAD_PITCH": where.pitch_bytes // size,
        "PER_ELEMENT": part.values_per_element,
        "COLUMN": part.column,
        "TILE_HEADS": next_power_of_2(part.num_heads),
        "TILE_ELEMENTS": next_power_of_2(part.head_elements),
        "SCALE_KIND": part.scale_kind,
    }
    scales = part.scales
    if scales is None:
        names = ("SIZE", "OFFSET", "PITCH", "HEAD_PITCH", "READS")
        return described | {f"SCALE_{name}": 1 for name in names} | {"TILE_SCALES": 1}
    size, pitch = scales.dtype.itemsize, view.format.area_pitches[scales.area]
    start = view.format.area_offset_bytes(scales.area, view.rows_per_block) + scales.offset_bytes
    tile = next_power_of_2(scales.head_dim)
    # Bytes behind the scales in the same record are read along where that leaves no part of an access unwanted.
    fits = part.num_heads == 1 and scales.offset_bytes + tile * size <= pitch
    return described | {
        "SCALE_SIZE": size,
        "SCALE_OFFSET": start // size,
        "SCALE_PITCH": pitch // size,
        "SCALE_HEAD_PITCH": scales.pitch_bytes // size,
        "SCALE_READS": tile if fits else scales.head_dim,
        "TILE_SCALES": tile,
    }
