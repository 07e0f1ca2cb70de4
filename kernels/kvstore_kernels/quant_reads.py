"""How rows become numbers: which parts of a format are values, by which scales, and where they go in an output.

fp8_ds_mla:  | nope, e4m3 | scales | rope, bf16 |   ->   out [num_rows, 1, 576]:  | nope x scales | rope |
"""

import ctypes
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore_kernels.checks import MAX_FP32, cdiv, expect_device, expect_dtype, expect_shape, next_power_of_2
from kvstore_kernels.formats import ROW_DTYPES, Quantised, RowFormat, RowPart, dtype_name
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import Piece, expect_index

KINDS = {
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "int8",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""The dtype of a part -> what its elements are. Parts of uint8 are e2m1 where two values share an element."""

SCALE_KINDS = {"fp32": "fp32", "fp32_pow2": "fp32", "ue8m0": "ue8m0", "e4m3": "e4m3"}
"""The encoding of scales -> how they are read: a reader accepts any fp32."""

PERMUTED = "nvfp4_ds_mla"
"""The format that keeps the scale of tile s at byte 8 * (s % 4) + s // 4."""

RowScales = Sequence[torch.Tensor | float]
BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class ValuePart:
    """One part of values: what its elements are, its scales, and the columns of an output that it fills.

    `kind` is one of e4m3, e2m1, int8, bf16, fp16, fp32; `scale_kind` one of fp32, ue8m0, e4m3, outside, none. A dense
    part without scales per head counts as one head. Sizes of a head are counted in elements of the part.
    """

    part: RowPart
    kind: str
    scale_kind: str
    scales: RowPart | None
    quant_tile: int
    output: int
    column: int

    @property
    def values_per_element(self) -> int:
        """Two where two codes share a byte."""
        return 2 if self.kind == "e2m1" else 1

    @property
    def width(self) -> int:
        """Values of this part in one row."""
        return self.part.width * self.values_per_element

    @property
    def num_heads(self) -> int:
        """Heads that are addressed one by one."""
        return 1 if self.scales is None and self.part.is_dense else self.part.num_heads

    @property
    def head_elements(self) -> int:
        """Elements of one such head."""
        return self.part.width // self.num_heads

    @property
    def head_values(self) -> int:
        """Values of one such head."""
        return self.head_elements * self.values_per_element

    @property
    def scales_per_head(self) -> int:
        """Scales of one such head."""
        return 1 if self.scales is None else self.scales.head_dim

    @property
    def tile_values(self) -> int:
        """Values of one row in a tile of powers of two."""
        return next_power_of_2(self.num_heads) * next_power_of_2(self.head_values)


def value_parts(view: PageView, *, quantised: bool) -> tuple[ValuePart, ...]:
    """The one or two parts of values of a view's rows; with `quantised` some must be codes.

    Raises: TypeError when `view` is no PageView, ValueError when its rows are no numbers that can be read.
    """
    if not isinstance(view, PageView):
        raise TypeError(f"view: expected a PageView, got {type(view).__name__}")
    row_format = view.format
    if quantised and not row_format.quantised:
        raise ValueError(f"view: expected a quantised format, got {row_format.name!r}, whose rows are plain")
    by_values = {entry.values: entry for entry in row_format.quantised}
    scale_names = {entry.scales for entry in row_format.quantised}
    parts = [part for part in row_format.parts if part.name not in scale_names]
    joined = len(parts) == 1 or row_format.value_dim is not None
    found: list[ValuePart] = []
    for part in parts:
        column = sum(other.width for other in found) if joined else 0
        found.append(_value_part(row_format, part, by_values.get(part.name), 0 if joined else len(found), column))
    if len(found) > 2:
        raise ValueError(f"view: expected a format with one or two parts of values, got {row_format.name!r}")
    return tuple(found)


def _value_part(row_format: RowFormat, part: RowPart, entry: Quantised | None, output: int, column: int) -> ValuePart:
    kind = KINDS.get(part.dtype)
    if entry is not None and entry.values_per_element == 2 and part.dtype == torch.uint8:
        kind = "e2m1"
    elif entry is not None and entry.values_per_element != 1:
        kind = None
    is_code = kind in ("e4m3", "e2m1", "int8")
    if kind is None or part.shape is not None or (entry is not None) > is_code:
        raise ValueError(
            f"view: expected parts of {', '.join(map(dtype_name, KINDS))} or pairs of e2m1, "
            f"got {part.name!r} of {dtype_name(part.dtype)} in format {row_format.name!r}"
        )
    scales = None if entry is None or entry.scales is None else row_format.part(entry.scales)
    scale_kind = "none" if entry is None else "outside" if scales is None else SCALE_KINDS[entry.encoding]
    tile = 1 if entry is None else entry.quant_tile
    if scales is not None and scales.head_dim > 1 and tile & (tile - 1):
        raise ValueError(
            f"view: expected a power of two of values to a scale, got {tile} in format {row_format.name!r}"
        )
    return ValuePart(part, kind, scale_kind, scales, tile, output, column)


def expect_scales(
    view: PageView, parts: Sequence[ValuePart], row_scales: RowScales | torch.Tensor | float | None
) -> tuple[torch.Tensor | float, ...]:
    """For every part its scale outside the cache: a float, or an fp32 tensor of one element; 1.0 where there is none.

    Raises: ValueError or TypeError unless there is one for each part that has its scale outside.
    """
    outside = [part.part.name for part in parts if part.scale_kind == "outside"]
    if row_scales is None:
        return (1.0,) * len(parts)
    if isinstance(row_scales, torch.Tensor | numbers.Real):
        row_scales = (row_scales,)
    if not isinstance(row_scales, tuple | list):
        raise TypeError(f"row_scales: expected a number, a tensor or a tuple of them, got {type(row_scales).__name__}")
    if len(row_scales) != len(outside):
        why = "for the scales lie in the rows" if view.format.quantised else "for the rows are plain"
        which = f"one for each of {', '.join(outside)}" if outside else f"None, {why}"
        raise ValueError(f"row_scales: expected {which} (format {view.format.name!r}), got {len(row_scales)} scales")
    checked = iter([_row_scale(view, name, scale) for name, scale in zip(outside, row_scales, strict=True)])
    return tuple(next(checked) if part.scale_kind == "outside" else 1.0 for part in parts)


def _row_scale(view: PageView, name: str, scale: object) -> torch.Tensor | float:
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise ValueError(f"row_scales of {name}: expected one element, got shape {list(scale.shape)}")
        expect_dtype(f"row_scales of {name}", scale, torch.float32)
        expect_device(f"row_scales of {name}", scale, view.device)
        return scale.detach()
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"row_scales of {name}: expected a number or an fp32 tensor, got {type(scale).__name__}")
    if MAX_FP32 < abs(scale) < math.inf:  # type: ignore[operator]
        raise ValueError(f"row_scales of {name}: expected a number that fits fp32, got {scale!r}")
    return ctypes.c_float(float(scale)).value  # rounded to fp32, also where a launch would not


def value_outputs(
    view: PageView,
    parts: Sequence[ValuePart],
    num_rows: int,
    dtype: torch.dtype,
    out: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:
    """The tensors to fill: those of `out`, checked, or new ones [num_rows, num_heads, head_dim] of `dtype`.

    Raises: ValueError or TypeError when dtype or `out` are others than a reader can fill.
    """
    if dtype not in ROW_DTYPES:
        raise ValueError(f"dtype: expected {' or '.join(map(str, ROW_DTYPES))}, got {dtype}")
    joined = _by_output(parts)
    shapes = [(num_rows, group[0].part.num_heads, _head_dim(group)) for group in joined]
    if out is None:
        return tuple(torch.empty(shape, dtype=dtype, device=view.device) for shape in shapes)
    if not isinstance(out, tuple | list):
        raise TypeError(f"out: expected a tuple of tensors, got {type(out).__name__}")
    names = [" and ".join(part.part.name for part in group) for group in joined]
    if len(out) != len(shapes):
        raise ValueError(f"out: expected one tensor for each of {', '.join(names)}, got {len(out)}")
    for name, shape, tensor in zip(names, shapes, out, strict=True):
        _expect_output(f"out of {name}", shape, dtype, tensor, view.device)
    return tuple(out)


def value_shapes(view: PageView, num_rows: int) -> list[tuple[int, int, int]]:
    """The shapes of the tensors that a read of that many rows fills. Raises: as `value_parts`."""
    joined = _by_output(value_parts(view, quantised=False))
    return [(num_rows, group[0].part.num_heads, _head_dim(group)) for group in joined]


def _by_output(parts: Sequence[ValuePart]) -> list[list[ValuePart]]:
    joined: dict[int, list[ValuePart]] = {}
    for part in parts:
        joined.setdefault(part.output, []).append(part)
    return list(joined.values())


def _head_dim(group: Sequence[ValuePart]) -> int:
    return cdiv(sum(part.width for part in group), group[0].part.num_heads)


def _expect_output(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, tensor: torch.Tensor, device: torch.device
) -> None:
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, dtype)
    expect_device(name, tensor, device)
    num_rows, num_heads, head_dim = shape
    row_stride, *strides = tensor.stride()
    if any(
        size > 1 and stride != want
        for size, stride, want in zip((num_heads, head_dim), strides, (head_dim, 1), strict=True)
    ):
        raise ValueError(f"{name}: expected the elements of a row one behind the other, got strides {tensor.stride()}")
    if num_rows > 1 and row_stride < num_heads * head_dim:
        raise ValueError(f"{name}: expected rows at least {num_heads * head_dim} elements apart, got {row_stride}")
    if tensor.is_neg():
        raise ValueError(f"{name}: expected a plain tensor, got one that is negated lazily")


def output_piece(tensor: torch.Tensor) -> Piece:
    """An output that `value_outputs` has returned as rows of raw bits."""
    rows = tensor.detach().as_strided((tensor.shape[0], tensor.shape[1] * tensor.shape[2]), (tensor.stride(0), 1))
    return Piece(rows.view(BITS[tensor.element_size()]), 0)


def expect_read_slots(view: PageView, slots: torch.Tensor) -> int:
    """The number of slots. Raises: ValueError or TypeError when they are no int64 [num_rows] on the view's device."""
    expect_shape("slots", slots, (None,))
    expect_index("slots", slots, torch.int64, view.device)
    return slots.shape[0]
