"""LayerBatch: what the store knows of one layer in one batch, as the metadata of outside kernels is made of.

Everything here is a tensor of the batch or arithmetic on its device: nothing is read back to the host.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore import Batch, KVStore, LayerSpec
from kvstore.allocator import NULL_BLOCK_ID
from kvstore.integrations.readers import expect_readable
from kvstore_kernels import PageView
from kvstore_kernels.checks import cdiv

ROW_MASKED = ("flex", "flash_mla_sparse")
"""Readers that are told which rows each query sees, instead of working it out from lengths."""


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """One layer of a batch of n sequences with T new tokens.

    Attributes:
        spec, view: the layer's spec and pages.
        table: int32 [n, width], block i of a sequence in column i % width.
        seq_lens, row_lens: int32 [n], tokens and rows that are visible, the new ones included.
        cu_seqlens_q: int32 [n + 1].
        positions, slot_mapping: int64 [T].
        num_new_tokens: int64 ndarray, without padding.
        num_actual_tokens: T without padding.
        max_query_len: new tokens of a sequence at most, padding included.
        max_rows: rows of a sequence at most; in a graph of any that the store can hold, so that it never changes.
    """

    spec: LayerSpec
    view: PageView
    table: torch.Tensor
    seq_lens: torch.Tensor
    row_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_new_tokens: npt.NDArray[np.int64]
    num_actual_tokens: int
    max_query_len: int
    max_rows: int

    @property
    def rows_per_block(self) -> int:
        """Rows of one page."""
        return self.view.rows_per_block

    @property
    def window_left(self) -> int:
        """Rows before its own that a query sees: window - 1, or -1 for all."""
        return -1 if self.spec.window is None else self.spec.window - 1

    @property
    def is_bounded(self) -> bool:
        """Whether the layer lets go of blocks, so that columns of its table are used again."""
        return self.spec.retention.kind != "full"

    @property
    def num_columns(self) -> int:
        """Blocks of a sequence at most, counted from its first token."""
        return max(cdiv(self.max_rows, self.rows_per_block), 1)

    def block_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [n, 1] each: the first block that the first new token sees, and the one behind the last block."""
        last = (self.row_lens[:, None].long() + (self.rows_per_block - 1)) // self.rows_per_block
        if not self.is_bounded:
            return torch.zeros_like(last), last
        starts = (self.seq_lens - self.cu_seqlens_q.diff())[:, None].long()
        kept = self.spec.retention
        reach = starts // kept.chunk * kept.chunk if kept.chunk else starts - ((kept.window or 1) - 1)
        return reach.clamp(min=0) // self.rows_per_block, last


def layer_batch(store: KVStore, layer: str, batch: Batch, reader: str) -> LayerBatch:
    """What is known of a layer in a batch, for a reader that can read its pages.

    Raises: ValueError for a layer that the reader cannot read, a batch that is finished, a store without bytes, a batch
        of several tokens whose rows are not all stored, and one whose rows are no tokens, where a reader would apply
        its causal rule to rows; TypeError for something else than a batch.
    """
    expect_readable(store, layer, reader)
    view, variant = store._rows_of(layer, batch)
    rules, spec = store._books.rules, store.plan.spec(layer)
    group = rules.variants[variant].group
    if rules.tail_only[group] and not batch.is_decode:
        raise ValueError(
            f"batch: expected one new token per sequence, because stored='tail' leaves rows of a longer step out of "
            f"the pages of {layer!r}, got {batch.num_tokens} tokens: attend to KVStore.gather and to the new K and V"
        )
    if spec.tokens_per_row > 1 and reader not in ROW_MASKED and not batch.is_decode:
        raise ValueError(
            f"batch: expected one new token per sequence, because a row of {layer!r} stands for {spec.tokens_per_row} "
            f"tokens and {reader} counts causality in rows, got {batch.num_tokens} tokens"
        )
    step, counts = batch.step, batch.num_new_tokens
    max_length = batch.max_seq_len if batch.graph is None else store._books.limits.max_length
    padding = batch.num_sequences - len(counts)
    return LayerBatch(
        spec=spec,
        view=view,
        table=batch.block_table[group],
        seq_lens=batch.seq_lens,
        row_lens=batch.variant_lens[variant],
        cu_seqlens_q=batch.cu_seqlens_q,
        positions=batch.positions,
        slot_mapping=batch.variant_slots[variant],
        num_new_tokens=counts,
        num_actual_tokens=step.num_tokens,
        max_query_len=max(int(counts.max(initial=0)), int(padding > 0)),
        max_rows=max_length // spec.tokens_per_row,
    )


def logical_table(found: LayerBatch, sentinel: int = NULL_BLOCK_ID, out: torch.Tensor | None = None) -> torch.Tensor:
    """int32 [n, num_columns]: block i of a sequence in column i, `sentinel` where no block is held or needed.

    Where no column of the batch's table can have been used twice, it is that table, or a copy for the sentinel -1;
    otherwise a new tensor, or `out`.

    Raises: ValueError for another sentinel, or an `out` of another shape, dtype or device.
    """
    if sentinel not in (NULL_BLOCK_ID, -1):
        raise ValueError(f"sentinel: expected 0 or -1, got {sentinel!r}")
    table, width = found.table, found.num_columns
    if not found.is_bounded or width <= table.shape[1]:
        logical = table[:, :width]
        if sentinel != NULL_BLOCK_ID:
            logical = torch.where(logical == NULL_BLOCK_ID, sentinel, logical)
    else:
        number = torch.arange(width, device=table.device)
        first, last = found.block_range()
        block = table[:, number % table.shape[1]]
        is_held = (number >= first) & (number < last) & (block != NULL_BLOCK_ID)
        logical = torch.where(is_held, block, sentinel)
    if out is None:
        return logical
    if out.shape != logical.shape or out.dtype != torch.int32 or out.device != table.device:
        raise ValueError(
            f"out: expected int32 {list(logical.shape)} on {table.device}, "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    return out.copy_(logical)
