"""New rows of several layers in one launch: what lies between one layer and the next.

Pages stand in a LayerTable; slots and rows of the layers lie at even distances, which may be 0:
| slots or rows of layer 0 | layer stride | those of layer 1 | layer stride | those of layer 2 | ...
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import expect_shape
from kvstore_kernels.copy import LayerTable
from kvstore_kernels.pieces import Piece
from kvstore_kernels.quant_rules import QuantPiece

AnyPiece = TypeVar("AnyPiece", Piece, QuantPiece)


@dataclass(frozen=True, slots=True, eq=False)
class LayerSteps:
    """The pages of several layers, and the elements between the slots and between the rows of one and the next."""

    table: LayerTable
    slots: int
    parts: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the launch."""
        return len(self.table.views)

    def apart(self, pieces: Sequence[AnyPiece]) -> tuple[AnyPiece, ...]:
        """The pieces of layer 0 with their layer stride; two pieces may lie in the rows of one tensor."""
        strides = self.parts if len(self.parts) == len(pieces) else self.parts * len(pieces)
        return tuple(replace(piece, layer_stride=stride) for piece, stride in zip(pieces, strides, strict=True))


def first_layer(
    table: LayerTable, slot_mapping: torch.Tensor, parts: Sequence[torch.Tensor]
) -> tuple[LayerSteps, torch.Tensor, tuple[torch.Tensor, ...]]:
    """The steps between the layers, and the slots and parts of the first: what a write into one view takes.

    Raises: ValueError or TypeError when the layers differ in format or rows per block, or slots or a part have no or
        another number of layers. Everything that one layer tells is left to the write into it.
    """
    _expect_alike(table)
    num_layers = len(table.views)
    slot_stride = 0
    if not isinstance(slot_mapping, torch.Tensor) or slot_mapping.ndim != 1:
        expect_shape("slot_mapping", slot_mapping, (num_layers, None))
        slot_stride = slot_mapping.stride(0) if num_layers > 1 else 0
        slot_mapping = slot_mapping[0]
    rows = []
    for part_idx, part in enumerate(parts):
        axes = 3 if isinstance(part, torch.Tensor) and part.ndim == 3 else 4
        expect_shape(f"parts[{part_idx}]", part, (num_layers, *[None] * (axes - 1)))
        # A lazily negated tensor has other bits in memory than it has elements.
        rows.append(part.detach().resolve_neg())
    strides = tuple(part.stride(0) if num_layers > 1 else 0 for part in rows)
    return LayerSteps(table, slot_stride, strides), slot_mapping, tuple(part[0] for part in rows)


def _expect_alike(table: LayerTable) -> None:
    if table.is_uniform:
        return
    first = table.views[0]
    for layer_idx, view in enumerate(table.views):
        if view.rows_per_block != first.rows_per_block:
            raise ValueError(
                f"views: expected {first.rows_per_block} rows per block in every layer, "
                f"got {view.rows_per_block} in {layer_idx}"
            )
        if view.format != first.format:
            raise ValueError(f"views: expected {first.format} in every layer, got {view.format} in {layer_idx}")


def layer_args(
    steps: LayerSteps | None, pieces: Sequence[Piece] | Sequence[QuantPiece]
) -> dict[str, torch.Tensor | int | None]:
    """The kernel arguments of a launch over layers, to be merged over those of the first; without layers, as absent."""
    args: dict[str, torch.Tensor | int | None] = {
        "layers_ptr": None,
        "slot_layer_stride": 0,
        "first_layer_stride": pieces[0].layer_stride_units,
        "second_layer_stride": pieces[1].layer_stride_units if len(pieces) == 2 else 0,
    }
    if steps is not None:
        args |= {"layers_ptr": steps.table.entries, "slot_layer_stride": steps.slots}
        args |= {"memory_ptr": None, "offset_units": 0, "block_stride_units": 0}
    return args


@triton.jit
def load_pages(layers_ptr, layer_idx, ELEMENT: tl.constexpr):
    """A layer's first page as a pointer to ELEMENTs, and its block stride in units of 16 bytes.

    The address becomes a pointer before it gets its hint: on the integer the hint would be lost.
    """
    entry_ptr = layers_ptr + layer_idx * 4
    pages_ptr = tl.multiple_of(tl.load(entry_ptr).to(tl.pointer_type(ELEMENT)), 16)
    return pages_ptr, tl.load(entry_ptr + 1).to(tl.int64)
