"""pack_blocks and unpack_blocks: the pages of blocks, all layers, into one staging buffer and back.

packed block:  | page of layer 0 | page of layer 1 | ... |    packed_bytes of the LayerTable
"""

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import expect_device, expect_dtype, expect_shape
from kvstore_kernels.copy import (
    Layers,
    LayerTable,
    expect_block_ids,
    expect_written_once,
    layer_table,
    load_layer,
    page_launch,
)
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.launch import Launch, Target, current_target


@triton.jit
def _packed_pointer(packed_ptr, row, packed_units):
    """Where a packed block begins, as words of 32 bits; counted in units of 16 bytes for 128-bit accesses."""
    words_ptr = tl.multiple_of(packed_ptr.to(tl.pointer_type(tl.int32)), 16)
    return words_ptr + row * packed_units.to(tl.int64) * 4


@triton.jit(do_not_specialize=["packed_units", "num_blocks"], do_not_specialize_on_alignment=["block_ids_ptr"])
def _pack_kernel(
    layers_ptr,  # [num_layers, 4] int64
    block_ids_ptr,  # [num_ids] int64
    packed_ptr,  # [num_ids, 16 * packed_units] uint8
    packed_units: tl.int64,
    num_blocks: tl.int64,
    TILE: tl.constexpr,
):
    """Program = (block, layer, tile of its page). Pages of blocks that do not exist are stored as zeros."""
    row = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids_ptr + row).to(tl.int64)
    exists = (block_id >= 0) & (block_id < num_blocks)
    pages_ptr, stride_words, page_words, packed_words = load_layer(layers_ptr, tl.program_id(1))
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_page = words < page_words
    values = tl.load(pages_ptr + block_id * stride_words + words, mask=in_page & exists, other=0)
    tl.store(_packed_pointer(packed_ptr, row, packed_units) + packed_words + words, values, mask=in_page)


@triton.jit(do_not_specialize=["packed_units", "num_blocks"], do_not_specialize_on_alignment=["block_ids_ptr"])
def _unpack_kernel(
    layers_ptr,  # [num_layers, 4] int64
    block_ids_ptr,  # [num_ids] int64
    packed_ptr,  # [num_ids, 16 * packed_units] uint8
    packed_units: tl.int64,
    num_blocks: tl.int64,
    TILE: tl.constexpr,
):
    """Program = (block, layer, tile of its page)."""
    row = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids_ptr + row).to(tl.int64)
    if (block_id < 0) | (block_id >= num_blocks):
        return
    pages_ptr, stride_words, page_words, packed_words = load_layer(layers_ptr, tl.program_id(1))
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_page = words < page_words
    source_ptr = _packed_pointer(packed_ptr, row, packed_units) + packed_words
    values = tl.load(source_ptr + words, mask=in_page, other=0)
    tl.store(pages_ptr + block_id * stride_words + words, values, mask=in_page)


def pack_blocks(views: Layers, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copies the pages of block `block_ids[i]`, one layer behind the other, to row i of a staging buffer.

    Args:
        views: the layers of one group, or their LayerTable.
        block_ids: int64 [num_ids]; an id that is none of 0 ... num_blocks - 1 gives a row of zeros.
        out: uint8 [num_ids, packed_bytes] to fill, contiguous, its address a multiple of 16; None: a new tensor.

    Returns: uint8 [num_ids, packed_bytes]; packed_bytes is the sum of the layers' page_bytes.

    Raises: ValueError or TypeError, before anything is written, for a wrong shape, dtype, device or address, and for
        views that are no layers of one group.
    """
    launch, packed = pack_launch(layer_table(views), block_ids, out, current_target(_pack_kernel))
    launch.run()
    return packed


def unpack_blocks(views: Layers, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copies row i of a staging buffer to the pages of block `block_ids[i]`: the reverse of `pack_blocks`.

    A block occurs once. On a CPU that is checked; elsewhere a look would be a synchronisation, and the content of a
    block that occurs twice is undefined.

    Args:
        views: the layers of one group, or their LayerTable.
        block_ids: int64 [num_ids]; ids that are none of 0 ... num_blocks - 1 are skipped.
        packed: uint8 [num_ids, packed_bytes], contiguous, its address a multiple of 16.

    Raises: as `pack_blocks`, and on a CPU ValueError for a block that occurs twice.
    """
    unpack_launch(layer_table(views), block_ids, packed, current_target(_unpack_kernel)).run()


def pack_launch(
    table: LayerTable, block_ids: torch.Tensor, out: torch.Tensor | None, target: Target
) -> tuple[Launch, torch.Tensor]:
    """The launch of `pack_blocks` on `target` and the tensor it fills; the tensors may be meta tensors."""
    packed = packed_output(table, block_ids, out)
    return page_launch(_pack_kernel, table, len(packed), _args(table, block_ids, packed), target), packed


def unpack_launch(table: LayerTable, block_ids: torch.Tensor, packed: torch.Tensor, target: Target) -> Launch:
    """The launch of `unpack_blocks` on `target`; the tensors may be meta tensors."""
    expect_unpack(table, block_ids, packed)
    return page_launch(_unpack_kernel, table, len(packed), _args(table, block_ids, packed), target)


def packed_output(table: LayerTable, block_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor that a pack fills: `out`, or a new one. Raises: ValueError or TypeError; see `pack_blocks`."""
    num_ids = expect_block_ids("block_ids", block_ids, table.device)
    if out is None:
        return torch.empty((num_ids, table.packed_bytes), dtype=torch.uint8, device=table.device)
    _expect_packed("out", out, num_ids, table)
    return out


def expect_unpack(table: LayerTable, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Raises: ValueError or TypeError unless the arguments are those of an unpack; see `unpack_blocks`."""
    num_ids = expect_block_ids("block_ids", block_ids, table.device)
    _expect_packed("packed", packed, num_ids, table)
    expect_written_once("block_ids", block_ids, table.num_blocks)


def _expect_packed(name: str, packed: torch.Tensor, num_ids: int, table: LayerTable) -> None:
    expect_shape(name, packed, (num_ids, table.packed_bytes))
    expect_dtype(name, packed, torch.uint8)
    expect_device(name, packed, table.device)
    is_meta = packed.device.type == "meta"
    if not packed.is_contiguous() or (not is_meta and packed.data_ptr() % ALIGNMENT_BYTES):
        raise ValueError(
            f"{name}: expected contiguous bytes whose address is a multiple of {ALIGNMENT_BYTES}, "
            f"got strides {packed.stride()} and address {packed.data_ptr():#x}"
        )


def _args(table: LayerTable, block_ids: torch.Tensor, packed: torch.Tensor) -> dict[str, torch.Tensor | int]:
    return {
        "block_ids_ptr": block_ids,
        "packed_ptr": packed,
        "packed_units": table.packed_bytes // ALIGNMENT_BYTES,
    }
