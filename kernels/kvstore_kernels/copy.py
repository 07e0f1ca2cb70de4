"""copy_blocks: whole pages from block to block, in every layer of a group; and LayerTable, the layers as one launch.

entries of a table, one line for each layer; units are 16 bytes:
| address of block 0's page | block stride, units | page, units | first unit in a packed block |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv, expect_shape
from kvstore_kernels.formats import ALIGNMENT_BYTES
from kvstore_kernels.launch import Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_index

TILE_BYTES = 8192
"""Bytes of a page that one program moves. The same for all pages: one compiled kernel serves every layout."""

ACCESSES_PER_LANE = 4

MAX_LAYERS = MAX_TILES = 65_535
"""What a grid has room for on its second and third axis."""


_handles = count(1)
_tables: "WeakValueDictionary[int, LayerTable]" = WeakValueDictionary()


def table_of_handle(handle: int) -> "LayerTable":
    """The table with that handle. Raises: ValueError when there is none any more."""
    try:
        return _tables[handle]
    except KeyError:
        raise ValueError(f"layers: expected the handle of a LayerTable that is alive, got {handle}") from None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerTable:
    """The layers of one group, described on their device, so that one launch serves them all.

    Made once for a group, it spares every later call a tensor and a copy to the device. It holds addresses: it is
    valid as long as the memory of its views stays where it is, which it keeps alive.

    Raises: ValueError / TypeError when `views` is no tuple of one or more PageViews with equally many blocks on one
        device, or has more layers or larger pages than a launch has room for.
    """

    views: tuple[PageView, ...]
    entries: torch.Tensor = field(init=False, repr=False)  # [num_layers, 4] int64, see the module's picture
    packed_bytes: int = field(init=False)
    """Bytes of one block's pages, one layer behind the other."""
    handle: int = field(init=False, repr=False)
    """The number by which torch's ops find the table again."""
    is_uniform: bool = field(init=False)
    """Whether all layers have one row format and equally many rows in a block: what writes of rows ask for."""

    def __post_init__(self) -> None:
        if not isinstance(self.views, tuple):
            raise TypeError(f"views: expected a tuple of PageViews, got {type(self.views).__name__}")
        for view in self.views:
            if not isinstance(view, PageView):
                raise TypeError(f"views: expected PageViews, got {type(view).__name__}")
        if not 0 < len(self.views) <= MAX_LAYERS:
            raise ValueError(f"views: expected 1 to {MAX_LAYERS} PageViews, got {len(self.views)}")
        entries = []
        packed_bytes = 0
        for layer_idx, view in enumerate(self.views):
            if view.num_blocks != self.num_blocks:
                raise ValueError(
                    f"views: expected {self.num_blocks} blocks in every layer, got {view.num_blocks} in {layer_idx}"
                )
            if view.device != self.device:
                raise ValueError(f"views: expected every layer on {self.device}, got {layer_idx} on {view.device}")
            if view.page_bytes > MAX_TILES * TILE_BYTES:
                raise ValueError(
                    f"views: expected pages of at most {MAX_TILES * TILE_BYTES} bytes, "
                    f"got {view.page_bytes} in {layer_idx}"
                )
            address = view.memory.data_ptr() + view.offset_bytes
            counts = (view.block_stride_bytes, view.page_bytes, packed_bytes)
            entries.append([address, *(num_bytes // ALIGNMENT_BYTES for num_bytes in counts)])
            packed_bytes += view.page_bytes
        object.__setattr__(self, "entries", torch.tensor(entries, dtype=torch.int64, device=self.device))
        object.__setattr__(self, "packed_bytes", packed_bytes)
        object.__setattr__(self, "handle", next(_handles))
        _tables[self.handle] = self
        first = self.views[0]
        is_uniform = all(
            view.rows_per_block == first.rows_per_block and view.format == first.format for view in self.views
        )
        object.__setattr__(self, "is_uniform", is_uniform)

    def __reduce__(self) -> tuple[type, tuple[tuple[PageView, ...]]]:
        """A copy is made anew, for it holds addresses."""
        return LayerTable, (self.views,)

    @property
    def num_blocks(self) -> int:
        """Blocks 0 ... num_blocks - 1 exist in every layer; other ids are skipped by every kernel."""
        return self.views[0].num_blocks

    @property
    def device(self) -> torch.device:
        """The device of all layers."""
        return self.views[0].device


Layers: TypeAlias = Sequence[PageView] | LayerTable
"""The layers of one group as the block ops take them: views, or the table made of them."""


def layer_table(views: Layers) -> LayerTable:
    """The table of `views`, which are the layers of one group: formats, offsets, strides and memory may differ.

    A table is returned as it is. On a GPU, making one copies its entries there and waits for that.

    Raises: TypeError when `views` is no list or tuple of PageViews; ValueError when there are none, or they differ in
        the number of blocks or the device.
    """
    if isinstance(views, LayerTable):
        return views
    if not isinstance(views, (list, tuple)):
        raise TypeError(f"views: expected a list or tuple of PageViews, or a LayerTable, got {type(views).__name__}")
    return LayerTable(tuple(views))


def expect_block_ids(name: str, block_ids: torch.Tensor, device: torch.device) -> int:
    """The number of ids. Raises: ValueError or TypeError when they are no int64 [n] on the device of the layers."""
    expect_shape(name, block_ids, (None,))
    expect_index(name, block_ids, torch.int64, device)
    return block_ids.shape[0]


def expect_written_once(name: str, block_ids: torch.Tensor, num_blocks: int) -> None:
    """Raises: ValueError when a block occurs twice. Looks on a CPU only: elsewhere that is a synchronisation."""
    if block_ids.is_cpu:
        ids = block_ids.numpy()
        unique, counts = np.unique(ids[(ids >= 0) & (ids < num_blocks)], return_counts=True)
        if len(unique) and counts.max() > 1:
            raise ValueError(f"{name}: expected every block at most once, got {unique[counts > 1][:8].tolist()} again")


def expect_copy(table: LayerTable, src: torch.Tensor, dst: torch.Tensor) -> int:
    """The number of copies. Raises: ValueError or TypeError unless the ids are those of a copy; see `copy_blocks`."""
    num_copies = expect_block_ids("src", src, table.device)
    expect_block_ids("dst", dst, table.device)
    expect_shape("dst", dst, (num_copies,))
    if src.is_cpu:
        sources, targets = src.numpy(), dst.numpy()
        is_copied = (np.minimum(sources, targets) >= 0) & (np.maximum(sources, targets) < table.num_blocks)
        expect_written_once("dst", torch.from_numpy(targets[is_copied]), table.num_blocks)
        both = np.intersect1d(sources[is_copied], targets[is_copied])
        if len(both):
            raise ValueError(f"dst: expected no block that is a source too, got {both[:8].tolist()}")
    return num_copies


@triton.jit
def load_layer(layers_ptr, layer_idx):
    """A layer's first page as words of 32 bits; its block stride, its page and its place in a packed block, in words.

    The address becomes a pointer before it gets its hint: on the integer the hint would be lost. Counts come in units
    of 16 bytes, so that the compiler knows what they are multiples of and accesses stay 128 bits wide.
    """
    entry_ptr = layers_ptr + layer_idx * 4
    pages_ptr = tl.multiple_of(tl.load(entry_ptr).to(tl.pointer_type(tl.int32)), 16)
    stride_words = tl.load(entry_ptr + 1).to(tl.int64) * 4
    page_words = tl.load(entry_ptr + 2).to(tl.int64) * 4
    packed_words = tl.load(entry_ptr + 3).to(tl.int64) * 4
    return pages_ptr, stride_words, page_words, packed_words


def page_launch(kernel: Any, table: LayerTable, num_ids: int, args: Mapping[str, Any], target: Target) -> Launch:
    """The launch of a kernel whose program is one tile of one layer's page for one entry of the id lists."""
    max_page_bytes = max(view.page_bytes for view in table.views)
    return Launch(
        kernel=kernel,
        grid=(num_ids, len(table.views), cdiv(max_page_bytes, TILE_BYTES)),
        args={**args, "layers_ptr": table.entries, "num_blocks": table.num_blocks},
        constexprs={"TILE": TILE_BYTES // 4},
        num_warps=lanes_of_16_bytes(TILE_BYTES // ACCESSES_PER_LANE, target),
    )


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def _copy_kernel(
    layers_ptr,  # [num_layers, 4] int64
    src_ptr,  # [num_copies] int64
    dst_ptr,  # [num_copies] int64
    num_blocks: tl.int64,
    TILE: tl.constexpr,
):
    """Program = (copy, layer, tile of its page)."""
    copy_idx = tl.program_id(0).to(tl.int64)
    src_id = tl.load(src_ptr + copy_idx).to(tl.int64)
    dst_id = tl.load(dst_ptr + copy_idx).to(tl.int64)
    if (src_id < 0) | (src_id >= num_blocks) | (dst_id < 0) | (dst_id >= num_blocks):
        return
    pages_ptr, stride_words, page_words, _ = load_layer(layers_ptr, tl.program_id(1))
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_page = words < page_words
    values = tl.load(pages_ptr + src_id * stride_words + words, mask=in_page, other=0)
    tl.store(pages_ptr + dst_id * stride_words + words, values, mask=in_page)


def copy_blocks(views: Layers, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copies the page of block `src[i]`, all of its bytes, to block `dst[i]` in every layer, in one launch.

    A block is a destination once, and no destination is a source. On a CPU that is checked; elsewhere a look would be
    a synchronisation, and the content of a destination that breaks the rule is undefined.

    Args:
        views: the layers of one group, or their LayerTable.
        src: int64 [num_copies], block ids; a block may occur several times.
        dst: int64 [num_copies], block ids. Where either id is none of 0 ... num_blocks - 1, the entry is skipped, and
            counts for nothing in the rule above.

    Raises: ValueError or TypeError, before anything is written, for a wrong shape, dtype or device, for views that
        are no layers of one group and, on a CPU, for destinations that occur twice or are sources.
    """
    copy_launch(layer_table(views), src, dst, current_target(_copy_kernel)).run()


def copy_launch(table: LayerTable, src: torch.Tensor, dst: torch.Tensor, target: Target) -> Launch:
    """The launch of `copy_blocks` on `target`; the tensors may be meta tensors."""
    num_copies = expect_copy(table, src, dst)
    return page_launch(_copy_kernel, table, num_copies, {"src_ptr": src, "dst_ptr": dst}, target)
