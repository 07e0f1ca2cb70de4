"""torch's flex_attention over the pages where they lie: K and V as one axis of rows, and a mask that knows the tables.

    row number of row r in block b = b * block_rows + r        block_rows = block stride / row pitch

    | block 0: rows 0 ... R - 1 | what else lies in a block | block 1: rows 0 ... R - 1 | ...

A block that several sequences share has the same number in each of them, so one array says which number a block has,
and the block table says whose it is: a row belongs to a sequence when the entry of its block's number names the block.
The mask asks both, then causality and the layer's window or chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import torch

from kvstore import Batch, KVStore
from kvstore.allocator import NULL_BLOCK_ID
from kvstore.integrations.pages import LayerBatch, layer_batch
from kvstore_kernels.checks import cdiv, expect_int

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

UNHELD = -1
"""The number of a block that no sequence of the batch holds."""


@dataclass(frozen=True, slots=True)
class FlexMetadata:
    """Arguments of `flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)`.

    Queries are [1, num_heads, T, head_dim], all sequences' new tokens one behind the other, as the batch has them.
    A query that sees nothing (padding) gives 0.

    Attributes:
        key: view [1, num_kv_heads, num_page_rows, head_dim] of the slot tensor.
        value: view [1, num_kv_heads, num_page_rows, head_dim_v]; of latent rows the leading columns of `key`.
        block_mask: which tiles of queries and rows to look at, with `mask_mod` inside them.
        mask_mod: (batch, head, query, row) -> whether the query sees the row.
        block_rows: row numbers from one block to the next.
    """

    key: torch.Tensor
    value: torch.Tensor
    block_mask: "BlockMask"
    mask_mod: MaskMod
    block_rows: int


def flex_metadata(
    store: KVStore, layer: str, batch: Batch, *, q_tile: int = 128, kv_tile: int | None = None
) -> FlexMetadata:
    """What flex_attention needs to read the pages of a layer in place, for any mix of prefill and decode.

    flex_attention multiplies every row of a tile with its weight, also with 0, and 0 times NaN is NaN. Compiled, it
    looks at the tiles of the block mask alone; with the default `kv_tile` these hold rows of the batch's own pages
    only, which must be finite up to their end. A store with zero_new=True keeps them so, and one whose layers share
    their memory with layers of the same dtype only. Eager, it looks at every row of the slot tensor: pass
    `flex_finite_value` as the value.

    Computed on the device from tensors of the batch alone; nothing waits for it. Allocates, among others, a byte and an
    int32 for each tile of queries and rows. A compiled flex_attention serves all layers and steps of equal shapes and
    strides; another T is another shape.

    Args:
        q_tile: queries of a tile of the block mask.
        kv_tile: rows of a tile of the block mask, a multiple of what the GPU kernel takes at once (BLOCK_N of
            `kernel_options`). None: the most that a page and a block are a multiple of, so that no tile reaches into
            foreign bytes.

    Raises: ValueError / TypeError for tiles that are no positive integers, and as `vllm_metadata`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    expect_int("q_tile", q_tile, 1)
    if kv_tile is not None:
        expect_int("kv_tile", kv_tile, 1)
    found = layer_batch(store, layer, batch, "flex")
    key, value, block_rows = _row_axes(found)
    tile = gcd(block_rows, found.rows_per_block) if kv_tile is None else kv_tile
    number, is_held = _held(found)
    mask_mod = _mask_mod(found, block_rows, _number_of_block(found, number, is_held))
    is_used = _used_tiles(found, number, is_held, key.shape[2], block_rows, q_tile, tile)
    block_mask = BlockMask.from_kv_blocks(
        is_used.sum(1, dtype=torch.int32)[None, None],
        torch.argsort(is_used.to(torch.uint8), dim=1, descending=True, stable=True).to(torch.int32)[None, None],
        BLOCK_SIZE=(q_tile, tile),
        mask_mod=mask_mod,
        seq_lengths=(found.positions.shape[0], key.shape[2]),
    )
    return FlexMetadata(key, value, block_mask, mask_mod, block_rows)


def flex_finite_value(store: KVStore, layer: str, batch: Batch) -> torch.Tensor:
    """V as of `flex_metadata`, with zeros in all rows that no sequence of the batch has: for eager flex_attention.

    A copy of every row of the slot tensor, for tests and for stores that leave NaN in their pages.

    Raises: as `vllm_metadata`.
    """
    found = layer_batch(store, layer, batch, "flex")
    _, value, block_rows = _row_axes(found)
    number, is_held = _held(found)
    rows = (found.row_lens[:, None] - number * found.rows_per_block).clamp(max=found.rows_per_block)
    block = torch.where(is_held, found.table, NULL_BLOCK_ID).long().flatten()
    held_rows = torch.zeros(found.view.num_blocks, dtype=rows.dtype, device=rows.device)
    held_rows.scatter_reduce_(0, block, torch.where(is_held, rows, 0).flatten(), "amax")
    row = torch.arange(value.shape[2], device=value.device)
    is_row = row % block_rows < held_rows[row // block_rows]
    return torch.where(is_row[:, None], value, torch.zeros((), dtype=value.dtype, device=value.device))


def _row_axes(found: LayerBatch) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K and V [1, heads, rows, dim] in place, and the rows from one block to the next."""
    view = found.view
    names = ("k", "v") if view.format.value_dim is None else ("latent",)
    axes = []
    for pages in (view.tensor(name) for name in names):
        num_blocks, per_block, num_heads, dim = pages.shape
        block_stride, pitch, head_stride, _ = pages.stride()
        block_rows = block_stride // pitch
        num_rows = (num_blocks - 1) * block_rows + per_block
        shape, strides = (1, num_heads, num_rows, dim), (num_rows * pitch, head_stride, pitch, 1)
        axes.append(pages.as_strided(shape, strides, pages.storage_offset()))
    value = axes[-1] if view.format.value_dim is None else axes[0][..., : view.format.value_dim]
    return axes[0], value, block_rows


def _held(found: LayerBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n, width], the number of the block in each column of the table; and whether the new tokens see it."""
    first, last = found.block_range()
    table = found.table
    column = torch.arange(table.shape[1], device=table.device)
    number = column.expand(table.shape)
    if found.is_bounded:
        number = last - 1 - (last - 1 - column) % table.shape[1]
    return number, (number >= first) & (number < last) & (table != NULL_BLOCK_ID)


def _number_of_block(found: LayerBatch, number: torch.Tensor, is_held: torch.Tensor) -> torch.Tensor:
    """int64 [num_blocks]: which number a block has in the sequences that hold it, UNHELD for the others."""
    of_block = torch.full((found.view.num_blocks,), UNHELD, dtype=torch.int64, device=number.device)
    of_block.scatter_(0, torch.where(is_held, found.table, NULL_BLOCK_ID).long().flatten(), number.flatten())
    of_block[NULL_BLOCK_ID] = UNHELD
    return of_block


def _mask_mod(found: LayerBatch, block_rows: int, of_block: torch.Tensor) -> MaskMod:
    table, positions, kept = found.table, found.positions, found.spec.retention
    per_block, tokens_per_row, width = found.rows_per_block, found.spec.tokens_per_row, found.table.shape[1]
    window, chunk = found.spec.window, kept.chunk
    token = torch.arange(len(positions), device=table.device, dtype=torch.int32)
    seq_idx = torch.searchsorted(found.cu_seqlens_q, token, right=True) - 1

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        block = row // block_rows
        row_in_block = row - block * block_rows
        number = of_block[block]
        column = number.clamp(min=0) % width
        seen = (number >= 0) & (row_in_block < per_block) & (table[seq_idx[query], column] == block)
        position = (number * per_block + row_in_block + 1) * tokens_per_row - 1  # of the row's last token
        last = positions[query]
        seen = seen & (position <= last)
        if window is not None:
            seen = seen & (position > last - window * tokens_per_row)
        if chunk is not None:
            seen = seen & (position >= last // chunk * chunk)
        return seen

    return sees


def _used_tiles(
    found: LayerBatch,
    number: torch.Tensor,
    is_held: torch.Tensor,
    num_rows: int,
    block_rows: int,
    q_tile: int,
    kv_tile: int,
) -> torch.Tensor:
    """bool [query tiles, row tiles]: whether any query of a tile may see any row of a tile."""
    table, device = found.table, found.table.device
    num_q_tiles, num_kv_tiles = max(cdiv(len(found.positions), q_tile), 1), cdiv(num_rows, kv_tile)
    tile_start = torch.arange(num_q_tiles, device=device)[:, None] * q_tile
    begin, end = found.cu_seqlens_q[:-1].long(), found.cu_seqlens_q[1:].long()
    # The queries of a sequence inside a tile, first and behind the last, as positions.
    to_position = (found.seq_lens - found.cu_seqlens_q[1:]).long()
    first = torch.maximum(begin, tile_start) + to_position
    stop = torch.minimum(end, tile_start + q_tile) + to_position
    tokens_per_row = found.spec.tokens_per_row
    block_tokens = found.rows_per_block * tokens_per_row
    is_used = is_held & (number * block_tokens + tokens_per_row <= stop[..., None]) & (first < stop)[..., None]
    if found.spec.window is not None:
        reach = first - found.spec.window * tokens_per_row + 1
        is_used &= (number + 1) * block_tokens > reach[..., None]
    used = torch.zeros(num_q_tiles, num_kv_tiles + 1, dtype=torch.bool, device=device)  # the last one is nobody's
    start = table.long() * block_rows
    for tile in range(cdiv(found.rows_per_block + kv_tile - 1, kv_tile)):
        row = (start // kv_tile + tile) * kv_tile
        touched = is_used & (row < start + found.rows_per_block)
        used.scatter_(1, torch.where(touched, row // kv_tile, num_kv_tiles).flatten(1), True)
    return used[:, :num_kv_tiles]
