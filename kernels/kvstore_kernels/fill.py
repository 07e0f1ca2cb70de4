"""fill_blocks: one byte over whole pages, in every layer of a group."""

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import expect_int
from kvstore_kernels.copy import Layers, LayerTable, expect_block_ids, layer_table, load_layer, page_launch
from kvstore_kernels.launch import Launch, Target, current_target


@triton.jit(do_not_specialize=["word", "num_blocks"], do_not_specialize_on_alignment=["block_ids_ptr"])
def _fill_kernel(
    layers_ptr,  # [num_layers, 4] int64
    block_ids_ptr,  # [num_ids] int64
    word: tl.int32,
    num_blocks: tl.int64,
    TILE: tl.constexpr,
):
    """Program = (block, layer, tile of its page)."""
    block_id = tl.load(block_ids_ptr + tl.program_id(0).to(tl.int64)).to(tl.int64)
    if (block_id < 0) | (block_id >= num_blocks):
        return
    pages_ptr, stride_words, page_words, _ = load_layer(layers_ptr, tl.program_id(1))
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    values = tl.zeros([TILE], tl.int32) + word.to(tl.int32)
    tl.store(pages_ptr + block_id * stride_words + words, values, mask=words < page_words)


def fill_blocks(views: Layers, block_ids: torch.Tensor, value: int) -> None:
    """Sets every byte of the pages of these blocks to `value` in every layer, and no byte beside them.

    Args:
        views: the layers of one group, or their LayerTable.
        block_ids: int64 [num_ids]; ids that are none of 0 ... num_blocks - 1 are skipped.
        value: 0 ... 255. 0 is zero and 255 a NaN in every float dtype.

    Raises: ValueError or TypeError, before anything is written, for a wrong shape, dtype, device or value, and for
        views that are no layers of one group.
    """
    fill_launch(layer_table(views), block_ids, value, current_target(_fill_kernel)).run()


def fill_launch(table: LayerTable, block_ids: torch.Tensor, value: int, target: Target) -> Launch:
    """The launch of `fill_blocks` on `target`; the tensors may be meta tensors."""
    num_ids = expect_block_ids("block_ids", block_ids, table.device)
    word = repeated_byte(value, 4)
    return page_launch(_fill_kernel, table, num_ids, {"block_ids_ptr": block_ids, "word": word}, target)


def repeated_byte(value: int, num_bytes: int) -> int:
    """The signed integer of `num_bytes` bytes that all are `value`. Raises: ValueError or TypeError for no byte."""
    return int.from_bytes(bytes([expect_int("value", value, 0, 255)]) * num_bytes, "little", signed=True)
