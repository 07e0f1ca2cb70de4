"""Block tables in the forms that outside kernels take: pages in a row with offsets (CSR), or -1 for no block."""

from dataclasses import dataclass

import numpy as np
import torch

from kvstore.batch import Batch
from kvstore.rules import GroupRules
from kvstore.sequences import ragged_arange


@dataclass(frozen=True, slots=True)
class CsrTable:
    """The pages of a batch one behind the other, as FlashInfer's `plan` takes them. All int32 on the store's device.

    Attributes:
        indptr: [n + 1], where the pages of each sequence begin in `indices`.
        indices: [num_pages], block ids, oldest first; of a window the pages that the first new token reaches.
        last_page_len: [n], rows in the last page, 1 ... rows_per_block; 0 for a sequence without pages.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def csr_table(batch: Batch, rules: GroupRules, variant_idx: int) -> CsrTable:
    """The CSR form of a batch's block table, for layers of one variant; padding sequences have no pages."""
    variant, step = rules.variants[variant_idx], batch.step
    table = batch.block_table[variant.group]
    rows = step.ends // variant.tokens_per_row
    per_block, w = variant.rows_per_block, int(rules.window_of[variant.group])
    first = np.zeros_like(rows) if w < 0 else rules.visible(w, step.starts) // per_block
    last = np.minimum(rows, 1) if variant.is_ring else -(-rows // per_block)
    counts = np.maximum(last - first, 0)
    last_page_len = np.minimum(rows, per_block) if variant.is_ring else rows - (last - 1) * per_block
    padding = (0, batch.num_sequences - len(rows))
    counts, last_page_len = np.pad(counts, padding), np.pad(np.where(counts > 0, last_page_len, 0), padding)
    sequence = np.repeat(np.arange(len(counts)), counts)
    column = (np.repeat(np.pad(first, padding), counts) + ragged_arange(counts)) % int(table.shape[1])
    where = (torch.from_numpy(sequence).to(table.device), torch.from_numpy(column).to(table.device))
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return CsrTable(
        torch.from_numpy(indptr).to(table.device),
        table[where],
        torch.from_numpy(last_page_len.astype(np.int32)).to(table.device),
    )
