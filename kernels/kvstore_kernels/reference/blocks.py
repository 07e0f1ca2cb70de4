"""copy_blocks, fill_blocks, pack_blocks and unpack_blocks in torch: a few calls for each layer, whatever the ids."""

import torch

from kvstore_kernels.copy import Layers, LayerTable, expect_block_ids, expect_copy, layer_table
from kvstore_kernels.fill import repeated_byte
from kvstore_kernels.pack import expect_unpack, packed_output
from kvstore_kernels.pages import PageView

WORD = torch.complex128
"""What pages are moved as, 16 bytes that nothing computes with: up to twice as fast as in words of 8."""

FILL_WORD = torch.int64
"""What pages are filled with; in a complex number a NaN might not keep its bits."""


def copy_blocks(views: Layers, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Same as `kvstore_kernels.copy_blocks`."""
    table = layer_table(views)
    expect_copy(table, src, dst)
    is_copied = _exists(table, src) & _exists(table, dst)
    src, dst = src[is_copied], dst[is_copied]
    for view in table.views:
        pages = _pages(view, _word(WORD, view.memory))
        pages[dst] = pages[src]


def fill_blocks(views: Layers, block_ids: torch.Tensor, value: int) -> None:
    """Same as `kvstore_kernels.fill_blocks`."""
    table = layer_table(views)
    expect_block_ids("block_ids", block_ids, table.device)
    values = {word: repeated_byte(value, word.itemsize) for word in (FILL_WORD, torch.int8)}
    block_ids = block_ids[_exists(table, block_ids)]
    for view in table.views:
        word = _word(FILL_WORD, view.memory)
        _pages(view, word).index_fill_(0, block_ids, values[word])


def pack_blocks(views: Layers, block_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Same as `kvstore_kernels.pack_blocks`."""
    table = layer_table(views)
    packed = packed_output(table, block_ids, out)
    exists = _exists(table, block_ids)
    block_ids = torch.where(exists, block_ids, 0)
    for view, columns in _layers(table, packed):
        word = _word(WORD, view.memory, packed)
        torch.index_select(_pages(view, word), 0, block_ids, out=columns.view(word))
    if not exists.all():
        packed[~exists] = 0
    return packed


def unpack_blocks(views: Layers, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Same as `kvstore_kernels.unpack_blocks`."""
    table = layer_table(views)
    expect_unpack(table, block_ids, packed)
    exists = _exists(table, block_ids)
    if not exists.all():
        block_ids, packed = block_ids[exists], packed[exists]
    for view, columns in _layers(table, packed):
        word = _word(WORD, view.memory, packed)
        _pages(view, word)[block_ids] = columns.view(word)


def _exists(table: LayerTable, block_ids: torch.Tensor) -> torch.Tensor:
    return (block_ids >= 0) & (block_ids < table.num_blocks)


def _word(widest: torch.dtype, *tensors: torch.Tensor) -> torch.dtype:
    """The dtype as which all of these bytes can be viewed: `widest`, or bytes where it does not fit their storage."""
    fits = all(tensor.storage_offset() % widest.itemsize == 0 for tensor in tensors)
    return widest if fits else torch.int8


def _pages(view: PageView, word: torch.dtype) -> torch.Tensor:
    """The pages of a layer as words, [num_blocks, words of a page]; no copy."""
    size = word.itemsize
    words = view.memory[: view.memory.numel() // size * size].view(word)
    return words.as_strided(
        (view.num_blocks, view.page_bytes // size),
        (view.block_stride_bytes // size, 1),
        words.storage_offset() + view.offset_bytes // size,
    )


def _layers(table: LayerTable, packed: torch.Tensor) -> list[tuple[PageView, torch.Tensor]]:
    """Each layer and its columns of a staging buffer."""
    columns = packed.split([view.page_bytes for view in table.views], dim=1)
    return list(zip(table.views, columns, strict=True))
