"""compute_slot_mapping in torch."""

import torch

from kvstore_kernels.slots import BlockRows, slots_output


def compute_slot_mapping(
    block_table: torch.Tensor,
    positions: torch.Tensor,
    seq_idx: torch.Tensor,
    block_size: int,
    tokens_per_row: int = 1,
    rows_per_block: int | None = None,
    wraps: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same as `kvstore_kernels.compute_slot_mapping`."""
    rows = BlockRows(block_size, tokens_per_row, rows_per_block)
    slots = slots_output(block_table, positions, seq_idx, wraps, out)
    num_seqs, width = block_table.shape
    if not len(slots) or not block_table.numel():
        return slots.fill_(-1)
    block_idx, in_block = positions.long() // block_size, positions.long() % block_size
    columns = block_idx % width if wraps else block_idx
    exists = (positions >= 0) & (columns < width) & (seq_idx >= 0) & (seq_idx < num_seqs)
    exists &= in_block % tokens_per_row == tokens_per_row - 1
    block_ids = block_table[torch.where(exists, seq_idx.long(), 0), torch.where(exists, columns, 0)].long()
    found = block_ids * rows.page_rows + in_block // tokens_per_row
    return slots.copy_(torch.where(exists & (block_ids > 0), found, -1))
