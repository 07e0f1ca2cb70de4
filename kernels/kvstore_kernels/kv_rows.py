"""K and V as they lie in a row: plain numbers, codes with a scale outside the cache, or codes with one beside them.

    plain, outside:  | K of head 0 | K of head 1 | ...      and V in the same record or in another area
    beside:          | K of head 0 | its scale | V of head 0 | its scale | K of head 1 | ...

Codes are exact in every dtype of a query, so a scale never meets them: it joins the scores or the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import expect_dtype
from kvstore_kernels.formats import ROW_DTYPES, RowPart
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import RowScales, ValuePart, expect_scales, value_parts
from kvstore_kernels.quant_tiles import bytes_as, decode
from kvstore_kernels.reads import expect_keys_and_values
from kvstore_kernels.softmax import load_tile


@triton.jit
def load_values(pointers, mask, DTYPE: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """The masked numbers or decoded codes, zero elsewhere; codes as DTYPE."""
    if KIND == "plain":
        values = load_tile(pointers, mask, INTERPRETED)
    else:
        values = decode(tl.load(pointers, mask=mask, other=0), KIND).to(DTYPE)
    return values


@triton.jit
def load_row_scales(memory_ptr, places, exists):
    """The fp32 scales of a tile of rows at `places`, which count fp32 elements; 0 where no row exists."""
    raw = tl.load(bytes_as(memory_ptr, 4) + places, mask=exists, other=0)
    return raw.to(tl.float32, bitcast=True)


@triton.jit
def add_scaled_values(weighted_sum, weights, value, value_scales, IS_FP16: tl.constexpr):
    """weighted_sum + (weights x value_scales) . value, the weights rounded to the dtype of the values.

    fp16 has few exponents: there the scales of a tile are divided by their largest, which multiplies the product.
    """
    if IS_FP16:
        largest = tl.max(value_scales, 0)
        largest = tl.where(largest > 0.0, largest, 1.0)
        scaled = weights * (value_scales / largest)[None, :]
        weighted_sum += tl.dot(scaled.to(value.dtype), value, input_precision="ieee") * largest
    else:
        scaled = weights * value_scales[None, :]
        weighted_sum = tl.dot(scaled.to(value.dtype), value, weighted_sum, input_precision="ieee")
    return weighted_sum


def expect_key_value_rows(view: PageView) -> tuple[ValuePart, ValuePart]:
    """K and V of a format that `gqa_decode` reads.

    Raises: TypeError when `view` is no PageView, ValueError when its rows are no K and V of one kind and head count.
    """
    if not isinstance(view, PageView) or not view.format.quantised:
        expect_keys_and_values(view)
        key, value = value_parts(view, quantised=False)
        return key, value
    parts = value_parts(view, quantised=True)
    if view.format.value_dim is None and [part.part.name for part in parts] == ["k", "v"]:
        key, value = parts
        alike = (key.kind, key.scale_kind, key.part.num_heads) == (value.kind, value.scale_kind, value.part.num_heads)
        one_scale = key.scales_per_head == value.scales_per_head == 1
        if alike and one_scale and key.kind in ("e4m3", "int8") and key.scale_kind in ("outside", "fp32"):
            return key, value
    raise ValueError(
        "view: expected rows of K and V (parts k and v, equal in heads, of e4m3 or int8 with one fp32 scale outside "
        f"the cache or beside each head), got format {view.format.name!r}"
    )


def computed_part(key: ValuePart, q: torch.Tensor) -> RowPart:
    """K as the checks of a read take it: of the dtype of the query where the rows are codes.

    Raises: ValueError when a query of codes is none of bf16, fp16 and fp32.
    """
    part = key.part
    if key.scale_kind == "none":
        return part
    dtype = torch.bfloat16
    if isinstance(q, torch.Tensor):
        expect_dtype("q", q, *ROW_DTYPES)
        dtype = q.dtype
    return RowPart(part.name, dtype, part.num_heads, part.head_dim)


def expect_row_scales(
    view: PageView, parts: Sequence[ValuePart], row_scales: RowScales | None
) -> tuple[torch.Tensor | float, ...]:
    """The scales of K and V outside the cache, 1.0 where there are none.

    Raises: ValueError or TypeError unless there is one for each part that has its scale outside.
    """
    if not view.format.quantised and row_scales is not None:
        raise ValueError(f"row_scales: rows of format {view.format.name!r} have none, got {row_scales!r}")
    return expect_scales(view, parts, row_scales)


def scale_args(softmax_scale: float, row_scales: RowScales) -> dict[str, torch.Tensor | float | None]:
    """The run-time arguments of scales: K's as a factor on `softmax_scale`, V's as one on the output."""
    key_scale, value_scale = row_scales
    key_ptr = key_scale if isinstance(key_scale, torch.Tensor) else None
    value_ptr = value_scale if isinstance(value_scale, torch.Tensor) else None
    return {
        "softmax_scale": float(softmax_scale) * (1.0 if key_ptr is not None else float(key_scale)),
        "value_scale": 1.0 if value_ptr is not None else float(value_scale),
        "key_scale_ptr": key_ptr,
        "value_scale_ptr": value_ptr,
    }


def key_value_constexprs(view: PageView, key: ValuePart, value: ValuePart, element_bytes: int) -> dict[str, Any]:
    """The compile-time arguments that say where K, V and their scales lie, in elements and in fp32 elements."""
    inline = key.scales is not None
    described: dict[str, Any] = {
        "KIND": "plain" if key.scale_kind == "none" else key.kind,
        "SCALES": "inline" if inline else key.scale_kind,
    }
    for name, part in (("KEY", key), ("VALUE", value)):
        described |= {f"{name}_DIM": part.part.head_dim, **_place(view, name, part.part, element_bytes)}
        described |= _place(view, f"{name}_SCALE", part.scales, 4)
    return described


def _place(view: PageView, name: str, part: RowPart | None, size: int) -> dict[str, int]:
    """Where the first row of a part begins in a page, and the distances of its rows and heads; zeros without a part."""
    where = (0, 0, 0)
    if part is not None:
        start = view.format.area_offset_bytes(part.area, view.rows_per_block) + part.offset_bytes
        where = (start, view.format.area_pitches[part.area], part.pitch_bytes)
    return {f"{name}_{what}": at // size for what, at in zip(("START", "PITCH", "HEAD_PITCH"), where, strict=True)}
