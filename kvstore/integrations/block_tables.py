"""Block tables for kernels of others: vLLM's, FlashAttention's, and their kin."""

from dataclasses import dataclass

import torch

from kvstore import Batch, KVStore
from kvstore.allocator import NULL_BLOCK_ID
from kvstore.integrations.pages import layer_batch, logical_table


@dataclass(frozen=True, slots=True)
class VllmMetadata:
    """A batch as block tables. A padding sequence has one query token, length 0, null blocks and slot -1.

    Attributes:
        block_table: int32 [n, width]; rows i * page and on of a sequence lie in the block of column i.
        slot_mapping: int64 [T], block * page + row in block; -1 writes nothing.
        seq_lens: int32 [n], rows visible, the new ones included: tokens, where a row is a token.
        query_start_loc: int32 [n + 1], prefix sum of the new tokens.
        max_query_len: new tokens of one sequence at most.
        max_seq_len: rows of one sequence at most; of a graph's batch what the store can hold.
        num_actual_tokens: T without padding.
        window_left: rows before its own that a query sees, -1 for all: FlashAttention's window_size[0].
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    window_left: int


def vllm_metadata(
    store: KVStore,
    layer: str,
    batch: Batch,
    *,
    sentinel: int = NULL_BLOCK_ID,
    reader: str = "vllm",
    out: torch.Tensor | None = None,
) -> VllmMetadata:
    """What kernels with a block table take: vLLM's, FlashAttention's `flash_attn_with_kvcache`, and their kin.

    The table of a window is a ring in the store. Here its columns are unrolled: a block stands in column
    position // page, and columns of what the first new token does not see hold the sentinel. Kernels that step over
    rows in tiles wider than a page may load such columns and mask what they get: give those the null block, whose page
    exists and is never written, and -1 only to kernels that test for it.

    Allocates where columns have been used twice or the sentinel is -1, else the table is the batch's own.

    Args:
        sentinel: of unused columns: 0, the null block, or -1.
        reader: "vllm" or "flash_attention": whose demands are checked.
        out: int32 [n, width], to hold the table at a fixed address, as graphs with windows need it; `width` is the
            blocks of `max_seq_len` rows.

    Raises: ValueError for another reader or sentinel, a wrong `out`, a layer that the reader cannot read (with the
        reasons of `export_check`), a finished batch, a store without bytes, a batch of several tokens whose rows are
        not all stored, and one whose rows are several tokens each; TypeError for something else than a batch.
    """
    if reader not in ("vllm", "flash_attention"):
        raise ValueError(f"reader: expected 'vllm' or 'flash_attention', got {reader!r}")
    found = layer_batch(store, layer, batch, reader)
    return VllmMetadata(
        block_table=logical_table(found, sentinel, out),
        slot_mapping=found.slot_mapping,
        seq_lens=found.row_lens,
        query_start_loc=found.cu_seqlens_q,
        max_query_len=found.max_query_len,
        max_seq_len=found.max_rows,
        num_actual_tokens=found.num_actual_tokens,
        window_left=found.window_left,
    )
