"""Cache views, tables and row indices for FlashMLA's decode kernels."""

from dataclasses import dataclass

import torch

from kvstore import Batch, KVStore
from kvstore.allocator import NULL_BLOCK_ID
from kvstore.integrations.pages import LayerBatch, layer_batch
from kvstore_kernels import PageView
from kvstore_kernels.checks import round_up

TOPK_TILE = 64
"""FlashMLA's sparse kernels take indices in tiles of so many."""

SPARSE_PAD = -1
"""What FlashMLA's sparse decode skips."""


@dataclass(frozen=True, slots=True)
class FlashMlaMetadata:
    """A batch for FlashMLA's `flash_mla_with_kvcache`; queries are [n, s_q, heads, 576].

    Attributes:
        k_cache: view [blocks, 64, 1, width] of the dtype of the rows; sparse rows are uint8, `width` their bytes.
        block_table: int32 [n, width].
        cache_seqlens: int32 [n], rows visible, the new ones included.
        s_q: new tokens of each sequence.
        head_dim_v: leading columns that are V.
    """

    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    s_q: int
    head_dim_v: int


def flash_mla_metadata(store: KVStore, layer: str, batch: Batch) -> FlashMlaMetadata:
    """What FlashMLA's dense decode takes. Allocates nothing: all tensors are the batch's and the store's own.

    Raises: ValueError for a batch whose sequences differ in their number of new tokens, and as `vllm_metadata`.
    """
    found = layer_batch(store, layer, batch, "flash_mla")
    return _flash_mla(found, found.view.tensor("latent"))


def flash_mla_sparse_metadata(store: KVStore, layer: str, batch: Batch) -> FlashMlaMetadata:
    """What FlashMLA's sparse decode takes beside the indices, which `flash_mla_indices` makes. Allocates nothing.

    Raises: ValueError as `flash_mla_metadata`.
    """
    found = layer_batch(store, layer, batch, "flash_mla_sparse")
    return _flash_mla(found, row_bytes_view(found.view))


def row_bytes_view(view: PageView) -> torch.Tensor:
    """uint8 [blocks, page, 1, row bytes] of rows of any format, as FlashMLA's sparse kernels take their cache.

    Of a page-split format the last two extents are a size only: a row is not one range of bytes.
    """
    row_bytes = view.format.row_bytes
    return view.memory.as_strided(
        (view.num_blocks, view.rows_per_block, 1, row_bytes),
        (view.block_stride_bytes, row_bytes, row_bytes, 1),
        view.memory.storage_offset() + view.offset_bytes,
    )


def flash_mla_indices(
    store: KVStore, layer: str, batch: Batch, rows: torch.Tensor, *, flat: bool = False
) -> torch.Tensor:
    """The indices that FlashMLA's sparse decode takes, from row numbers such as an indexer's top k.

    Works on the device alone, unlike `KVStore.slots_of`. Allocates the result and its temporaries.

    Args:
        rows: int32 or int64 [n, s_q, k] on the store's device, row numbers of this layer in each sequence; below 0 is
            none. In a batch with one new token per sequence [n, k] will do, s_q being 1.
        flat: for readers that see the cache as rows one pitch apart (vLLM's sparse path): block * (stride / row) + row
            in block, instead of block * page + row in block.

    Returns: int32 [n, s_q, k rounded up to 64]; -1 for none, rows that are not held, and the added ones.

    Raises: ValueError for `rows` of another shape, dtype or device, with `flat` for a block stride that is no whole
        number of rows, and as `vllm_metadata`.
    """
    found = layer_batch(store, layer, batch, "flash_mla_sparse")
    table, per_block = found.table, found.rows_per_block
    wanted = rows[:, None] if rows.ndim == 2 else rows
    if wanted.ndim != 3 or wanted.shape[0] != table.shape[0] or rows.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"rows: expected int32 or int64 [{table.shape[0]}, s_q, k], got {rows.dtype} {list(rows.shape)}"
        )
    if rows.device != table.device:
        raise ValueError(f"rows: expected a tensor on {table.device}, got one on {rows.device}")
    pitch = per_block
    if flat:
        pitch, rest = divmod(found.view.block_stride_bytes, found.view.format.area_pitches[0])
        if rest:
            raise ValueError(
                f"flat: expected a block stride of whole rows of {found.view.format.area_pitches[0]} B, "
                f"got {found.view.block_stride_bytes} B"
            )
    is_held = (wanted >= 0) & (wanted < found.row_lens[:, None, None])
    if found.is_bounded:
        starts = found.seq_lens - found.cu_seqlens_q.diff()
        is_held &= wanted >= (starts - found.window_left)[:, None, None]
    row = torch.where(is_held, wanted, 0).long()
    column = (row // per_block % table.shape[1]).flatten(1)
    block = table.gather(1, column).view_as(row)
    index = torch.where(is_held & (block != NULL_BLOCK_ID), block * pitch + row % per_block, SPARSE_PAD)
    num_indices = index.shape[2]
    index = index.to(torch.int32)
    return torch.nn.functional.pad(index, (0, round_up(num_indices, TOPK_TILE) - num_indices), value=SPARSE_PAD)


def _flash_mla(found: LayerBatch, k_cache: torch.Tensor) -> FlashMlaMetadata:
    counts = found.num_new_tokens
    if len(counts) and (counts != found.max_query_len).any():
        raise ValueError(
            f"batch: expected as many new tokens in each sequence, which is FlashMLA's s_q, got {counts.tolist()}"
        )
    assert found.view.format.value_dim is not None
    return FlashMlaMetadata(
        k_cache=k_cache,
        block_table=found.table,
        cache_seqlens=found.row_lens,
        s_q=found.max_query_len,
        head_dim_v=found.view.format.value_dim,
    )
