"""write_quantised in torch: the same bytes."""

import math
from collections.abc import Sequence

import torch
from einops import rearrange

from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_slots
from kvstore_kernels.quant_rules import (
    HEAD_SCALE_FLOOR,
    QMAX,
    TILE_RULES,
    QuantPiece,
    RowScale,
    TileRule,
    expect_quantised,
    quant_pieces,
    row_scale_of,
)
from kvstore_kernels.reference.codec import (
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    finite_amax,
    power_of_two,
    scale_exponent,
)
from kvstore_kernels.reference.moves import widest_word

CHUNK_BYTES = 1 << 20
"""fp32 values that are quantised at a time: what becomes of them on the way stays in the caches."""


def write_quantised(
    view: PageView,
    slot_mapping: torch.Tensor,
    *parts: torch.Tensor,
    row_scales: RowScale | Sequence[RowScale] | None = None,
) -> None:
    """Same as `kvstore_kernels.write_quantised`."""
    expect_quantised(view)
    num_rows = expect_slots(view, slot_mapping)
    outside = row_scale_of(view.format, row_scales, view.device)
    pieces = quant_pieces(view, parts, num_rows)
    kept = ((slot_mapping >= 0) & (slot_mapping < view.num_slots)).nonzero().flatten()
    if not len(kept):
        return
    row_bytes = 4 * sum(piece.rows.shape[1] for piece in pieces)
    for chunk in kept.split(max(1, CHUNK_BYTES // row_bytes)):
        _write_chunk(view, slot_mapping[chunk], pieces, chunk, outside)


def _write_chunk(
    view: PageView, slots: torch.Tensor, pieces: Sequence[QuantPiece], kept: torch.Tensor, outside: dict[str, RowScale]
) -> None:
    """Quantises the rows `kept` of all pieces and writes them to `slots`, which exist."""
    # Bytes between the parts of a record are zero: the eighth scale byte of dsv4.
    records = [
        torch.zeros(len(kept), pitch, dtype=torch.uint8, device=view.device) for pitch in view.format.area_pitches
    ]
    for piece in pieces:
        for name, first_byte, written in _encode(view, piece, piece.rows[kept], outside):
            part = view.format.part(name)
            record = records[part.area][:, part.offset_bytes + first_byte :]
            shape = (len(kept), part.num_heads, written.shape[-1])
            record.as_strided(shape, (record.stride(0), part.pitch_bytes, 1)).copy_(written)
    block_ids, rows_in_block = slots // view.rows_per_block, slots % view.rows_per_block
    for area, record in enumerate(records):
        rows = _area(view, area)
        word = widest_word(rows, record)
        rows.view(word)[block_ids, rows_in_block] = record.view(word)


def e2m1_exponent(amax: torch.Tensor, least: int) -> torch.Tensor:
    """The smallest int32 e >= least with amax / 2^e <= 6, from the bits of a finite fp32 amax."""
    bits = amax.float().contiguous().view(torch.int32)
    return ((bits >> 23) - 127 - 2 + ((bits & 0x7FFFFF) > 0x400000).int()).clamp(min=least)


def encode_int8(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> int8 -127 ... 127 as uint8: saturating, nearest, halves away from zero, NaN as 0."""
    magnitude = values.abs().nan_to_num(0.0, posinf=127.0).clamp(max=127.0)
    whole = magnitude.int()
    whole += magnitude - whole >= 0.5
    return torch.where(values < 0, -whole, whole).to(torch.int8).view(torch.uint8)


def bf16_bits(values: torch.Tensor) -> torch.Tensor:
    """Values as the bits of bf16 in int16: those of bf16 as they are, others rounded, their NaN as 0x7FC0."""
    rounded = values.bfloat16()
    if values.dtype != torch.bfloat16:
        rounded = rounded.nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    return rounded.view(torch.int16)


def _encode(
    view: PageView, piece: QuantPiece, rows: torch.Tensor, outside: dict[str, RowScale]
) -> list[tuple[str, int, torch.Tensor]]:
    """What a piece becomes: (part, first byte in each of its heads, bytes [num_rows, num_heads, count])."""
    values = rearrange(rows, "row (head column) -> row head column", column=piece.width)
    name, entry = piece.part.name, piece.entry
    if entry is None:
        stored = encode_e4m3(values.float()) if piece.part.dtype.itemsize == 1 else _as_bytes(bf16_bits(values))
        return [(name, 0, stored)]
    if entry.scales is None:
        scale = torch.as_tensor(outside[name], dtype=torch.float32, device=rows.device).reshape(())
        return [(name, piece.first_element, encode_e4m3(values.float() / scale))]
    if view.format.name in TILE_RULES:
        codes, scales = _quantise_tiles(view, piece, values)
    else:
        largest = finite_amax(values)
        # By a tensor: some devices multiply by the reciprocal of a number.
        head_scales = (largest / torch.full_like(largest, QMAX[piece.part.dtype])).clamp(min=HEAD_SCALE_FLOOR)
        encode = encode_int8 if piece.part.dtype == torch.int8 else encode_e4m3
        codes, scales = encode(values.float() / head_scales[..., None]), _as_bytes(head_scales[..., None])
    return [(name, 0, codes), (entry.scales, 0, scales)]


def _quantise_tiles(view: PageView, piece: QuantPiece, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    entry, rule = piece.entry, TILE_RULES[view.format.name]
    assert entry is not None
    if rule.through_bf16:
        values = bf16_bits(values).view(torch.bfloat16)
    tiles = rearrange(values.float(), "row head (tile column) -> row head tile column", column=entry.quant_tile)
    largest = finite_amax(tiles)
    is_packed = entry.values_per_element == 2
    if entry.encoding == "e4m3":
        scales = encode_e4m3((largest / torch.full_like(largest, 6.0)).clamp(min=2.0**-9))
        tiles = tiles / decode_e4m3(scales)[..., None]
    else:
        exponents = (e2m1_exponent if is_packed else scale_exponent)(largest, rule.least)
        tiles = tiles * power_of_two(-exponents)[..., None]
        is_byte = entry.encoding == "ue8m0"
        scales = (exponents + 127).to(torch.uint8) if is_byte else _as_bytes(power_of_two(exponents))
    encode = encode_e2m1 if is_packed else encode_e4m3
    codes = rearrange(encode(tiles), "row head tile column -> row head (tile column)")
    if is_packed:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, _permuted(scales, rule)


def _permuted(scales: torch.Tensor, rule: TileRule) -> torch.Tensor:
    if not rule.is_permuted:
        return scales
    return rearrange(scales, "row head (eight four) -> row head (four eight)", four=4)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _area(view: PageView, area: int) -> torch.Tensor:
    """Strided view [num_blocks, rows_per_block, pitch] of the bytes of an area."""
    pitch = view.format.area_pitches[area]
    first = view.memory.storage_offset() + view.offset_bytes + view.format.area_offset_bytes(area, view.rows_per_block)
    shape = (view.num_blocks, view.rows_per_block, pitch)
    return view.memory.as_strided(shape, (view.block_stride_bytes, pitch, 1), first)
