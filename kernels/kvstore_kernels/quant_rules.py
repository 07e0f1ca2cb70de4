"""What a quantising write does to each format, as data, and which columns the caller's tensors hold.

fp8_ds_mla, a tensor [n, 576] or two:   | nope: 512 columns, quantised | rope: 64 columns, cast to bf16 |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvstore_kernels.checks import MAX_FP32, expect_device, expect_dtype, expect_shape
from kvstore_kernels.formats import ALIGNMENT_BYTES, ROW_DTYPES, Quantised, RowFormat, RowPart
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_index

FP8 = torch.float8_e4m3fn
QMAX: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, FP8: 448.0})
"""What the largest value of a head becomes."""

HEAD_SCALE_FLOOR = 1e-6
MIN_FP32 = torch.finfo(torch.float32).tiny
RowScale = float | torch.Tensor


@dataclass(frozen=True, slots=True)
class TileRule:
    """How the tiles of a row get their scales.

    A power of two is 2^e with the smallest e >= `least` at which the tile's largest finite magnitude fits: at most 448
    for e4m3 codes and at most 6 for e2m1. An e4m3 scale is the code of max(amax / 6, 2^-9). `through_bf16`: values are
    rounded to bf16 first. `is_permuted`: the scale of tile s lies at byte 8 * (s % 4) + s // 4.
    """

    least: int = -22
    through_bf16: bool = False
    is_permuted: bool = False


TILE_RULES: Mapping[str, TileRule] = MappingProxyType(
    {
        "fp8_ds_mla": TileRule(least=-13),
        "dsv4": TileRule(through_bf16=True),
        "mxfp8_latent": TileRule(),
        "mxfp8_latent_split": TileRule(),
        "indexer_fp8": TileRule(),
        "indexer_mxfp4": TileRule(least=-126),
        "nvfp4_latent": TileRule(),
        "nvfp4_latent_split": TileRule(),
        "nvfp4_ds_mla": TileRule(is_permuted=True),
    }
)
"""Format name -> its rule, for the formats with several scales per row or one beside it."""

HEAD_NAMES = ("int8_token_head", "fp8_token_head")


@dataclass(frozen=True, slots=True)
class QuantPiece:
    """Columns of a row out of one tensor of the caller, and the part of the record that they become.

    `first_element` is where in the part they begin. `entry` is None for columns without a scale. `layer_stride`: the
    elements to the same columns of the next layer, in a launch over several.
    """

    rows: torch.Tensor  # [>= num_rows, num_heads * width] bf16, fp16 or fp32; a row contiguous, any stride between rows
    part: RowPart
    entry: Quantised | None
    width: int
    first_element: int = 0
    layer_stride: int = 0

    def stride_and_unit(self) -> tuple[int, int]:
        """The row stride as a count and the elements it counts: 16 bytes where both strides are multiples of them."""
        stride, unit = self.rows.stride(0), ALIGNMENT_BYTES // self.rows.element_size()
        return (stride // unit, unit) if stride % unit == self.layer_stride % unit == 0 else (stride, 1)

    @property
    def layer_stride_units(self) -> int:
        """The layer stride as a count of the same elements."""
        return self.layer_stride // self.stride_and_unit()[1]


def expect_quantised(view: PageView) -> None:
    """Raises: TypeError when `view` is no PageView, ValueError when no quantising write knows its format."""
    if not isinstance(view, PageView):
        raise TypeError(f"view: expected a PageView, got {type(view).__name__}")
    name, entries = view.format.name, view.format.quantised
    if is_quantising(view.format):
        return
    known = ", ".join((*TILE_RULES, *HEAD_NAMES))
    got = ", ".join(str(view.format.part(entry.values).dtype) for entry in entries) or "no quantised part"
    raise ValueError(f"view: expected a format of {known} or rows of {FP8}, got {name!r} with {got}")


def is_quantising(row_format: RowFormat) -> bool:
    """Whether a write quantises to this format."""
    return row_format.name in TILE_RULES or row_format.name in HEAD_NAMES or is_scaled_outside(row_format)


def is_scaled_outside(row_format: RowFormat) -> bool:
    """Whether every part is e4m3 codes with a scale outside the cache."""
    entries = row_format.quantised
    return len(entries) == len(row_format.parts) and all(
        entry.scales is None and row_format.part(entry.values).dtype == FP8 for entry in entries
    )


def quant_pieces(view: PageView, tensors: Sequence[torch.Tensor], num_rows: int) -> tuple[QuantPiece, ...]:
    """The columns that `tensors`, each of at least `num_rows` rows, hold: one tensor for each part without scales.

    The nope and rope columns of a latent row may come in one tensor or in two, whatever parts they become.

    Raises: ValueError or TypeError when the tensors are others than these.
    """
    row_format = view.format
    entries = {entry.values: entry for entry in row_format.quantised}
    scales = {entry.scales for entry in row_format.quantised}
    parts = [part for part in row_format.parts if part.name not in scales]
    widths = [part.head_dim * _packed(entries.get(part.name)) for part in parts]
    value_dim = row_format.value_dim
    if value_dim is not None and (len(tensors), len(parts)) == (1, 2):
        _expect_rows(" + ".join(part.name for part in parts), tensors[0], (1, sum(widths)), num_rows, view.device)
        row = _flat(tensors[0])
        columns = (row[:, : widths[0]], row[:, widths[0] :])
        return tuple(
            QuantPiece(rows, part, entries.get(part.name), width)
            for rows, part, width in zip(columns, parts, widths, strict=True)
        )
    if (len(tensors), len(parts)) == (2, 1) and value_dim is not None and value_dim < widths[0]:
        pieces = []
        for name, tensor, first, width in zip(
            ("nope", "rope"), tensors, (0, value_dim), (value_dim, widths[0] - value_dim), strict=True
        ):
            _expect_rows(name, tensor, (1, width), num_rows, view.device)
            pieces.append(QuantPiece(_flat(tensor), parts[0], entries.get(parts[0].name), width, first))
        return tuple(pieces)
    if len(tensors) != len(parts):
        names = ", ".join(part.name for part in parts)
        raise ValueError(f"parts: expected one tensor for each of {names}, got {len(tensors)}")
    for part, tensor, width in zip(parts, tensors, widths, strict=True):
        _expect_rows(part.name, tensor, (part.num_heads, width), num_rows, view.device)
    return tuple(
        QuantPiece(_flat(tensor), part, entries.get(part.name), width)
        for part, tensor, width in zip(parts, tensors, widths, strict=True)
    )


def row_scale_of(
    row_format: RowFormat,
    row_scales: RowScale | Sequence[RowScale] | None,
    device: torch.device,
    num_layers: int | None = None,
) -> dict[str, RowScale]:
    """The scale outside the cache of every part that has one, by the part's name.

    Raises: ValueError or TypeError unless `row_scales` is None (1.0), or one float or fp32 tensor of one element for
        each such part, or of [num_layers] where there are layers; without such parts it must be None.
    """
    names = [entry.values for entry in row_format.quantised if entry.scales is None]
    if row_scales is None:
        return dict.fromkeys(names, 1.0)
    if not names:
        raise ValueError(f"row_scales: expected None, for rows of {row_format.name!r} hold their scales, got some")
    entries = tuple(row_scales) if isinstance(row_scales, (tuple, list)) else (row_scales,)
    if len(entries) != len(names):
        raise ValueError(f"row_scales: expected one scale for each of {', '.join(names)}, got {len(entries)}")
    for name, scale in zip(names, entries, strict=True):
        where = f"row_scales of {name}"
        if isinstance(scale, torch.Tensor):
            expect_index(where, scale, torch.float32, device)
            if scale.numel() != 1 and scale.shape != (num_layers,):
                wanted = "of one element" if num_layers is None else f"of one element or of [{num_layers}]"
                raise ValueError(f"{where}: expected a tensor {wanted}, got shape {list(scale.shape)}")
        else:
            expect_scale(where, scale)
    # A float, because an integer argument would be compiled into the kernel.
    floats = [scale if isinstance(scale, torch.Tensor) else float(scale) for scale in entries]
    return dict(zip(names, floats, strict=True))


def expect_scale(name: str, scale: object) -> None:
    """Raises: TypeError when a scale is no number, ValueError unless it is positive and normal in fp32."""
    if isinstance(scale, bool) or not isinstance(scale, float | int):
        raise TypeError(f"{name}: expected a float or a torch.Tensor, got {type(scale).__name__}")
    if not 0 < scale < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {scale}")
    if not MIN_FP32 <= scale <= MAX_FP32:
        raise ValueError(f"{name}: expected a number from {MIN_FP32:.3g} to {MAX_FP32:.3g}, got {scale}")


def _packed(entry: Quantised | None) -> int:
    return 1 if entry is None else entry.values_per_element


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_heads * width], without a gradient and without a negation that its bits do not show."""
    tensor = tensor.detach().resolve_neg()
    return tensor.as_strided((tensor.shape[0], tensor.shape[1:].numel()), (tensor.stride(0), 1))


def _expect_rows(name: str, tensor: torch.Tensor, shape: tuple[int, int], num_rows: int, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.shape[1:] not in (shape, (shape[0] * shape[1],)):
        expect_shape(name, tensor, (None, *shape))
    expect_dtype(name, tensor, *ROW_DTYPES)
    expect_device(name, tensor, device)
    if tensor.shape[0] < num_rows:
        raise ValueError(
            f"slot_mapping: expected at most {tensor.shape[0]} slots, the number of rows in {name}, got {num_rows}"
        )
    dense = (shape[1], 1) if tensor.ndim == 3 else (1,)
    strides = tensor.stride()[1:]
    if any(size > 1 and have != want for size, have, want in zip(tensor.shape[1:], strides, dense, strict=True)):
        raise ValueError(f"{name}: expected the elements of a row one behind the other, got strides {tensor.stride()}")
