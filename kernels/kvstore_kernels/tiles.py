"""What the kernels that move rows share: the address rule, the width of a tile, the arguments that describe a row."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import next_power_of_2
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import Piece, as_bits


@triton.jit
def page_start(block_id, offset_units, block_stride_units, ELEMENT_BYTES: tl.constexpr):
    """The element at which a block's page begins. Units of 16 bytes keep accesses at 128 bit for every stride."""
    units = offset_units.to(tl.int64) + block_id.to(tl.int64) * block_stride_units.to(tl.int64)
    return units * (16 // ELEMENT_BYTES)


def is_joined(pieces: Sequence[Piece]) -> bool:
    """Whether the pieces lie in one record, one behind the other."""
    return pieces[-1].area == 0


def page_args(view: PageView, element_bytes: int) -> dict[str, torch.Tensor | int]:
    """The kernel arguments of rule (1): the memory as integers of the element size, offset and stride in 16 bytes."""
    return {
        "memory_ptr": as_bits(view.memory, element_bytes),
        "offset_units": view.offset_bytes // ALIGNMENT_BYTES,
        "block_stride_units": view.block_stride_bytes // ALIGNMENT_BYTES,
    }


def piece_args(pieces: Sequence[Piece]) -> dict[str, torch.Tensor | int | None]:
    """The kernel arguments of the caller's one or two tensors."""
    first, second = pieces[0], pieces[1] if len(pieces) == 2 else None
    return {
        "first_ptr": first.rows,
        "second_ptr": second.rows if second else None,
        "first_stride": first.stride_and_unit()[0],
        "second_stride": second.stride_and_unit()[0] if second else 0,
    }


def piece_constexprs(view: PageView, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The compile-time arguments that say where the pieces lie in a page, in elements."""
    first, second = pieces[0], pieces[1] if len(pieces) == 2 else None
    pitches = [pitch // first.element_bytes for pitch in view.format.area_pitches]
    second_area = second.area if second else 0
    return {
        "ROWS_PER_BLOCK": view.rows_per_block,
        "ELEMENT_BYTES": first.element_bytes,
        "FIRST_WIDTH": first.width,
        "SECOND_WIDTH": second.width if second else 0,
        "FIRST_UNIT": first.stride_and_unit()[1],
        "SECOND_UNIT": second.stride_and_unit()[1] if second else 1,
        "FIRST_PITCH": pitches[0],
        "SECOND_PITCH": pitches[second_area],
        "SECOND_AREA": view.format.area_offset_bytes(second_area, view.rows_per_block) // first.element_bytes,
        "JOINED": is_joined(pieces),
    }


def tile_bytes(pieces: Sequence[Piece]) -> int:
    """The bytes of a tile over the widest record among the pieces: a power of two, at least one access."""
    widths = [piece.width for piece in pieces]
    record_bytes = (sum(widths) if is_joined(pieces) else max(widths)) * pieces[0].element_bytes
    return max(next_power_of_2(record_bytes), ALIGNMENT_BYTES)
