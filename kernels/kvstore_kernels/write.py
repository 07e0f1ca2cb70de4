"""write_rows: new rows into the pages that their slots name, bit for bit; write_layers: into those of many layers."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvstore_kernels.copy import Layers, LayerTable, layer_table
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.launch import Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.layers import LayerSteps, first_layer, layer_args, load_pages
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_movable, expect_slots, make_pieces, source_parts
from kvstore_kernels.tiles import page_args, page_start, piece_args, piece_constexprs, tile_bytes

NOT_SPECIALISED = [
    *("first_stride", "second_stride", "offset_units", "block_stride_units", "num_slots"),
    *("slot_layer_stride", "first_layer_stride", "second_layer_stride"),
]


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_kernel(
    memory_ptr,  # [memory elements] integers of the rows' element size, like both sources; None where there are layers
    layers_ptr,  # [num_layers, 4] int64, a LayerTable; None: one view
    slot_mapping_ptr,  # [num_rows] int64, of layers slot_layer_stride apart
    first_ptr,  # [num_rows, FIRST_WIDTH], rows first_stride * FIRST_UNIT elements apart
    second_ptr,  # [num_rows, SECOND_WIDTH]; None where a row has one piece
    first_stride: tl.int64,
    second_stride: tl.int64,
    offset_units: tl.int64,
    block_stride_units: tl.int64,
    num_slots: tl.int64,
    slot_layer_stride: tl.int64,
    first_layer_stride: tl.int64,
    second_layer_stride: tl.int64,
    ROWS_PER_BLOCK: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    FIRST_UNIT: tl.constexpr,
    SECOND_UNIT: tl.constexpr,
    FIRST_PITCH: tl.constexpr,
    SECOND_PITCH: tl.constexpr,
    SECOND_AREA: tl.constexpr,
    JOINED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program = row, or (row, layer).

    JOINED: both pieces lie in one record and leave in one store; otherwise each has its own area.
    """
    row = tl.program_id(0).to(tl.int64)
    if layers_ptr is not None:
        layer_idx = tl.program_id(1).to(tl.int64)
        slot_mapping_ptr += layer_idx * slot_layer_stride.to(tl.int64)
        first_ptr += layer_idx * first_layer_stride.to(tl.int64) * FIRST_UNIT
        if SECOND_WIDTH > 0:
            second_ptr += layer_idx * second_layer_stride.to(tl.int64) * SECOND_UNIT
        memory_ptr, block_stride_units = load_pages(layers_ptr, layer_idx, first_ptr.dtype.element_ty)
    slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
    # Before the division, which truncates towards zero: slot -1 would become row 0 of block 0.
    if (slot < 0) | (slot >= num_slots):
        return
    block_id = slot // ROWS_PER_BLOCK
    row_in_block = slot - block_id * ROWS_PER_BLOCK
    page_ptr = memory_ptr + page_start(block_id, offset_units, block_stride_units, ELEMENT_BYTES)
    columns = tl.arange(0, TILE)

    in_first = columns < FIRST_WIDTH
    first = tl.load(first_ptr + row * first_stride.to(tl.int64) * FIRST_UNIT + columns, mask=in_first, other=0)
    if SECOND_WIDTH == 0:
        tl.store(page_ptr + row_in_block * FIRST_PITCH + columns, first, mask=in_first)
    else:
        second_row_ptr = second_ptr + row * second_stride.to(tl.int64) * SECOND_UNIT
        if JOINED:
            in_row = columns < FIRST_WIDTH + SECOND_WIDTH
            second = tl.load(second_row_ptr + (columns - FIRST_WIDTH), mask=in_row & (columns >= FIRST_WIDTH), other=0)
            tl.store(page_ptr + row_in_block * FIRST_PITCH + columns, tl.where(in_first, first, second), mask=in_row)
        else:
            in_second = columns < SECOND_WIDTH
            second = tl.load(second_row_ptr + columns, mask=in_second, other=0)
            tl.store(page_ptr + row_in_block * FIRST_PITCH + columns, first, mask=in_first)
            tl.store(page_ptr + SECOND_AREA + row_in_block * SECOND_PITCH + columns, second, mask=in_second)


def write_rows(view: PageView, slot_mapping: torch.Tensor, *parts: torch.Tensor) -> None:
    """Writes row i of `parts` to slot `slot_mapping[i]`, as raw bits.

    Args:
        view: the pages to write to.
        slot_mapping: int64 [num_rows], `block_id * rows_per_block + row_in_block`. Slots below 0 or from
            `view.num_slots` on are skipped. Equal slots in one call leave that row's content undefined.
        parts: for each part of the format a tensor of its dtype, [>= num_rows, num_heads, head_dim] or
            [>= num_rows, num_heads * head_dim]: the elements of a row contiguous, any stride between rows. Rows
            behind the last slot are ignored. A latent row may come as two: nope [.., value_dim] and rope columns.

    Raises: ValueError or TypeError, before anything is written, for a wrong shape, dtype, device or number of parts,
        and for more slots than rows.
    """
    write_launch(view, slot_mapping, parts, current_target(_write_kernel)).run()


def write_layers(views: Layers, slot_mapping: torch.Tensor, *parts: torch.Tensor) -> None:
    """`write_rows` into every layer of `views` in one launch; see `kvstore_kernels.write_layers`."""
    write_layers_launch(layer_table(views), slot_mapping, parts, current_target(_write_kernel)).run()


def write_layers_launch(
    table: LayerTable, slot_mapping: torch.Tensor, parts: Sequence[torch.Tensor], target: Target
) -> Launch:
    """The launch of `write_layers` on `target`; the tensors may be meta tensors."""
    steps, slots, rows = first_layer(table, slot_mapping, parts)
    return write_launch(table.views[0], slots, rows, target, steps)


def write_launch(
    view: PageView,
    slot_mapping: torch.Tensor,
    parts: Sequence[torch.Tensor],
    target: Target,
    steps: LayerSteps | None = None,
) -> Launch:
    """The launch of `write_rows` on `target`; the tensors may be meta tensors.

    With `steps`, the launch of `write_layers`, and view, slots and parts are those of the first layer.
    """
    expect_movable(view)
    num_rows = expect_slots(view, slot_mapping)
    row_parts = source_parts(view, parts, num_rows)
    # A lazily negated tensor has other bits in memory than it has elements.
    pieces = make_pieces(row_parts, [part.resolve_neg() for part in parts])
    if steps is not None:
        pieces = steps.apart(pieces)
    # At least one warp of 16-byte lanes: a short row leaves lanes idle instead of narrowing their accesses.
    num_bytes = max(tile_bytes(pieces), ALIGNMENT_BYTES * target.warp_size)
    element_bytes = pieces[0].element_bytes
    return Launch(
        kernel=_write_kernel,
        grid=(num_rows,) if steps is None else (num_rows, steps.num_layers),
        args={
            **page_args(view, element_bytes),
            **piece_args(pieces),
            "slot_mapping_ptr": slot_mapping,
            "num_slots": view.num_slots,
            **layer_args(steps, pieces),
        },
        constexprs={**piece_constexprs(view, pieces), "TILE": num_bytes // element_bytes},
        num_warps=lanes_of_16_bytes(num_bytes, target),
    )
