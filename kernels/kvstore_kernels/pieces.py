"""What a caller hands to a row move, checked: which run of a record each tensor holds.

a latent record of two pieces:  | nope: columns 0 ... 511 | rope: columns 512 ... 575 |
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore_kernels.checks import expect_bool, expect_device, expect_dtype, expect_int, expect_shape
from kvstore_kernels.formats import ALIGNMENT_BYTES, RowFormat, RowPart
from kvstore_kernels.pages import PageView

INTEGERS = {2: torch.int16, 4: torch.int32}
"""Element size -> the dtype that rows are moved as: raw bits, so that a NaN keeps its payload."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements that a caller's tensor and a record have in common: a whole row of the tensor.

    `layer_stride`: the elements to the same piece of the next layer, in a launch over several.
    """

    rows: torch.Tensor  # [num_rows, width] integers of the element size; elements of a row contiguous, row stride free
    area: int
    layer_stride: int = 0

    @property
    def width(self) -> int:
        """Elements of this piece in one row."""
        return self.rows.shape[1]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.rows.element_size()

    def stride_and_unit(self) -> tuple[int, int]:
        """The row stride as a count and the elements it counts: 16 bytes where both strides are multiples of them."""
        stride, unit = self.rows.stride(0), ALIGNMENT_BYTES // self.element_bytes
        return (stride // unit, unit) if stride % unit == self.layer_stride % unit == 0 else (stride, 1)

    @property
    def layer_stride_units(self) -> int:
        """The layer stride as a count of the same elements."""
        return self.layer_stride // self.stride_and_unit()[1]


def as_bits(tensor: torch.Tensor, element_bytes: int) -> torch.Tensor:
    """The same memory as integers of `element_bytes`; bytes behind the last whole one are left off a byte tensor."""
    if tensor.element_size() < element_bytes:
        tensor = tensor[: tensor.numel() // element_bytes * element_bytes]
    return tensor.view(INTEGERS[element_bytes])


def expect_movable(view: PageView) -> None:
    """Raises: TypeError when `view` is no PageView, ValueError when its rows are no one or two plain parts."""
    if not isinstance(view, PageView):
        raise TypeError(f"view: expected a PageView, got {type(view).__name__}")
    if not is_movable(view.format):
        raise ValueError(
            "view: expected a format of one or two dense parts of one element size, the second right behind the first "
            f"or alone in area 1, got {view.format.name!r}"
        )


def expect_index(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raises: ValueError when an index tensor has another dtype, another device or gaps between its last elements."""
    expect_dtype(name, tensor, dtype)
    expect_device(name, tensor, device)
    if not tensor.is_contiguous() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected elements one behind the other, got strides {tensor.stride()}")


def expect_slots(view: PageView, slot_mapping: torch.Tensor) -> int:
    """The number of slots. Raises: ValueError or TypeError when they are no int64 [num_rows] on the view's device."""
    expect_shape("slot_mapping", slot_mapping, (None,))
    expect_index("slot_mapping", slot_mapping, torch.int64, view.device)
    return slot_mapping.shape[0]


def expect_tables(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    num_rows: int,
    start: torch.Tensor | None,
    wraps: bool,
) -> None:
    """Raises: ValueError or TypeError unless the tables say which rows to gather; see `gather_rows`."""
    expect_bool("wraps", wraps)
    expect_shape("block_table", block_table, (None, None))
    num_seqs, width = block_table.shape
    expect_shape("cu_row_lens", cu_row_lens, (num_seqs + 1,))
    if start is not None:
        expect_shape("start", start, (num_seqs,))
    for name, tensor in (("block_table", block_table), ("cu_row_lens", cu_row_lens), ("start", start)):
        if tensor is not None:
            expect_index(name, tensor, torch.int32, view.device)
    expect_int("num_rows", num_rows, 0)
    if cu_row_lens.is_cpu:  # elsewhere a look would be a synchronisation
        sums = cu_row_lens.numpy()
        if sums[0] or (sums[1:] < sums[:-1]).any():
            raise ValueError(f"cu_row_lens: expected 0 and a running sum of lengths, got {sums[:8].tolist()} ...")
        if sums[-1] != num_rows:
            raise ValueError(f"num_rows: expected cu_row_lens[-1], which is {sums[-1]}, got {num_rows}")
    if wraps and num_rows and not width:
        raise ValueError("block_table: expected at least one column when it wraps, got none")


def source_parts(view: PageView, tensors: Sequence[torch.Tensor], num_rows: int) -> tuple[RowPart, ...]:
    """The parts of a row that `tensors`, each of at least `num_rows` rows, hold: one for each part of the format.

    A latent row may come as two tensors: its nope columns, `value_dim` of them, and the rope columns behind them.

    Raises: ValueError or TypeError when the tensors are others than these.
    """
    parts = view.format.parts
    if len(tensors) == 2 and len(parts) == 1:
        parts = _nope_and_rope(view.format) or parts
    if len(tensors) != len(parts):
        names = ", ".join(part.name for part in parts)
        raise ValueError(f"parts: expected one tensor for each of {names}, got {len(tensors)}")
    device = view.device
    for part, tensor in zip(parts, tensors, strict=True):
        _expect_rows(part.name, part, tensor, device)
        if tensor.shape[0] < num_rows:
            raise ValueError(
                f"slot_mapping: expected at most {tensor.shape[0]} slots, the number of rows in {part.name}, "
                f"got {num_rows}"
            )
    return parts


def make_pieces(parts: Sequence[RowPart], tensors: Sequence[torch.Tensor]) -> tuple[Piece, ...]:
    """The pieces of tensors that `source_parts` or `outputs` has checked."""
    return tuple(_piece(part, tensor) for part, tensor in zip(parts, tensors, strict=True))


def outputs(view: PageView, num_rows: int, out: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
    """The tensors a gather fills: those of `out`, checked, or new ones [num_rows, num_heads, head_dim]."""
    parts = view.format.parts
    if out is None:
        shapes = [(num_rows, part.num_heads, part.head_dim) for part in parts]
        return tuple(
            torch.empty(shape, dtype=part.dtype, device=view.device) for shape, part in zip(shapes, parts, strict=True)
        )
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"out: expected a tuple of tensors, got {type(out).__name__}")
    if len(out) != len(parts):
        raise ValueError(f"out: expected one tensor for each of {', '.join(p.name for p in parts)}, got {len(out)}")
    for part, tensor in zip(parts, out, strict=True):
        name = f"out of {part.name}"
        expect_shape(name, tensor, (num_rows, part.num_heads, part.head_dim))
        _expect_rows(name, part, tensor, view.device)
        if tensor.is_neg():
            raise ValueError(f"{name}: expected a plain tensor, got one that is negated lazily")
        if num_rows > 1 and tensor.stride(0) < part.width:
            raise ValueError(f"{name}: expected rows at least {part.width} elements apart, got {tensor.stride(0)}")
    return tuple(out)


def _expect_rows(name: str, part: RowPart, tensor: torch.Tensor, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.shape[1:] not in ((part.num_heads, part.head_dim), (part.width,)):
        expect_shape(name, tensor, (None, part.num_heads, part.head_dim))
    expect_dtype(name, tensor, part.dtype)
    expect_device(name, tensor, device)
    if tensor.is_contiguous():
        return
    _, *strides = tensor.stride()
    dense = (part.head_dim, 1) if tensor.ndim == 3 else (1,)
    if any(size > 1 and stride != want for size, stride, want in zip(tensor.shape[1:], strides, dense, strict=True)):
        raise ValueError(f"{name}: expected the elements of a row one behind the other, got strides {tensor.stride()}")


def _piece(part: RowPart, tensor: torch.Tensor) -> Piece:
    rows = tensor.detach().as_strided((tensor.shape[0], part.width), (tensor.stride(0), 1))
    return Piece(rows.view(INTEGERS[part.dtype.itemsize]), part.area)


def _nope_and_rope(row_format: RowFormat) -> tuple[RowPart, RowPart] | None:
    (latent,) = row_format.parts
    if row_format.value_dim is None or row_format.value_dim == latent.head_dim:
        return None
    nope = RowPart("nope", latent.dtype, 1, row_format.value_dim)
    rope = RowPart("rope", latent.dtype, 1, latent.head_dim - row_format.value_dim, offset_bytes=nope.num_bytes)
    return nope, rope


def is_movable(row_format: RowFormat) -> bool:
    """Whether rows are moved bit for bit: one or two dense parts, the second right behind the first or alone."""
    first, *rest = row_format.parts
    num_areas = len(row_format.area_pitches)
    if not all(part.is_dense for part in row_format.parts):
        return False
    if first.area or first.offset_bytes or first.dtype.itemsize not in INTEGERS or len(rest) > 1:
        return False
    if not rest:
        return num_areas == 1
    (second,) = rest
    behind_first = (num_areas, second.area, second.offset_bytes) == (1, 0, first.num_bytes)
    alone = (num_areas, second.area, second.offset_bytes) == (2, 1, 0)
    return second.dtype.itemsize == first.dtype.itemsize and (behind_first or alone)
