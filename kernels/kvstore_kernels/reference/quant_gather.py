"""gather_dequantised and read_rows in torch."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange, repeat

from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_tables
from kvstore_kernels.quant_reads import (
    KINDS,
    PERMUTED,
    RowScales,
    ValuePart,
    expect_read_slots,
    expect_scales,
    output_piece,
    value_outputs,
    value_parts,
)
from kvstore_kernels.reference.codec import decode_e2m1, decode_e4m3, decode_ue8m0
from kvstore_kernels.reference.moves import _locate, widest_word

SCALE_POSITIONS = tuple(8 * (tile % 4) + tile // 4 for tile in range(32))
"""Where `nvfp4_ds_mla` keeps the scale of a tile."""

CHUNK_BYTES = 1 << 20
"""fp32 values that are decoded at a time: what they are made of stays in the caches."""


def gather_dequantised(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    *,
    num_rows: int,
    start: torch.Tensor | None = None,
    wraps: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    row_scales: RowScales | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Same as `kvstore_kernels.gather_dequantised`."""
    parts = value_parts(view, quantised=True)
    expect_tables(view, block_table, cu_row_lens, num_rows, start, wraps)
    scales = expect_scales(view, parts, row_scales)
    outputs = value_outputs(view, parts, num_rows, dtype, out)
    if num_rows:
        block_ids, rows_in_block = _locate(view, block_table, cu_row_lens, start, wraps)
        slots = np.where(block_ids < 0, -1, block_ids * view.rows_per_block + rows_in_block)
        _fill(view, parts, scales, outputs, torch.from_numpy(slots).to(view.device), dtype)
    return outputs


def read_rows(
    view: PageView,
    slots: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_scales: RowScales | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Same as `kvstore_kernels.read_rows`."""
    parts = value_parts(view, quantised=False)
    num_rows = expect_read_slots(view, slots)
    scales = expect_scales(view, parts, row_scales)
    outputs = value_outputs(view, parts, num_rows, dtype, out)
    if num_rows:
        _fill(view, parts, scales, outputs, slots, dtype)
    return outputs


def _fill(
    view: PageView,
    parts: Sequence[ValuePart],
    row_scales: Sequence[torch.Tensor | float],
    outputs: Sequence[torch.Tensor],
    slots: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    rows = [output_piece(output).rows for output in outputs]
    num_rows = max(1, CHUNK_BYTES // (4 * sum(row.shape[1] for row in rows)))
    for first, chunk in zip(range(0, len(slots), num_rows), slots.split(num_rows), strict=True):
        _fill_chunk(view, parts, row_scales, [row[first : first + num_rows] for row in rows], chunk, dtype)


def _fill_chunk(
    view: PageView,
    parts: Sequence[ValuePart],
    row_scales: Sequence[torch.Tensor | float],
    outputs: Sequence[torch.Tensor],
    slots: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """`outputs`: rows of raw bits."""
    absent = (slots < 0) | (slots >= view.num_slots)
    slots = slots.masked_fill(absent, 0)
    place = slots // view.rows_per_block, slots % view.rows_per_block
    for part, row_scale in zip(parts, row_scales, strict=True):
        rows = outputs[part.output]
        if part.kind == KINDS[dtype]:
            bits = _take(view.tensor(part.part.name), place).view(rows.dtype)
        else:
            bits = _rounded(_values(view, part, row_scale, place), dtype).view(rows.dtype)
        rows[:, part.column : part.column + part.width] = rearrange(bits, "row head dim -> row (head dim)")
    if absent.any():
        for rows in outputs:
            rows[absent] = 0


def _values(
    view: PageView, part: ValuePart, row_scale: torch.Tensor | float, place: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """fp32 [rows, heads, values of a head]: decoded, times their scales."""
    elements = view.tensor(part.part.name)
    if part.kind == "e4m3":
        values = decode_e4m3(_take(elements.view(torch.uint8), place))
    elif part.kind == "e2m1":
        codes = _take(elements, place)
        values = rearrange(
            [decode_e2m1(codes & 0xF), decode_e2m1(codes >> 4)], "half row head dim -> row head (dim half)"
        )
    else:
        values = _take(elements, place).float()
    if part.scale_kind == "outside":
        return values * torch.as_tensor(row_scale, dtype=torch.float32, device=view.device)
    if part.scales is None:
        return values
    per_value = repeat(_scales(view, part, place), "row head tile -> row head (tile value)", value=part.quant_tile)
    return values * per_value[..., : values.shape[-1]]


def _scales(view: PageView, part: ValuePart, place: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """fp32 [rows, heads, scales of a head] out of the rows."""
    assert part.scales is not None
    stored = view.tensor(part.scales.name)
    if part.scale_kind == "fp32":
        return _take(stored, place)
    codes = _take(stored.view(torch.uint8), place)
    if view.format.name == PERMUTED:
        codes = codes[..., list(SCALE_POSITIONS)]
    return decode_ue8m0(codes) if part.scale_kind == "ue8m0" else decode_e4m3(codes)


def _take(elements: torch.Tensor, place: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The rows at these blocks and rows in blocks: [rows, heads, elements of a head]."""
    return elements.view(widest_word(elements))[place].view(elements.dtype)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To `dtype`, rounded to nearest even; every NaN as the positive quiet one."""
    return values.to(dtype).nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf)
