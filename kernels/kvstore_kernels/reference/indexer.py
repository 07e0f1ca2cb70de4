"""indexer_scores in torch: the keys of one sequence at a time as fp32, and one product for all its queries."""

import math

import torch
from einops import einsum, rearrange

from kvstore_kernels.indexer_checks import allocate_scores, expect_indexer
from kvstore_kernels.pages import PageView
from kvstore_kernels.reference.quant_gather import read_rows

CHUNK_LOGITS = 1 << 24
"""Logits that are held at a time: those of all heads of all queries of a sequence for a run of rows."""


def indexer_scores(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scores of every row for every query; arguments, results and errors as the Triton launcher."""
    key = expect_indexer(view, block_table, row_lens, q, weights, out)
    out = allocate_scores(view, block_table, q, out)
    num_seqs, num_heads, head_dim = q.shape[0], q.shape[-2], key.head_values
    num_queries = q.shape[1] if q.ndim == 4 else 1
    queries = q.detach().float().reshape(num_seqs, num_queries, num_heads, head_dim)
    factors = weights.detach().reshape(num_seqs, num_queries, num_heads)
    scores = out.detach().view(num_seqs, num_queries, out.shape[-1])
    scores.fill_(-math.inf)
    lens = row_lens.detach().long()
    if lens.ndim == 1:
        lens = lens[:, None] - torch.arange(num_queries - 1, -1, -1, device=lens.device)
    num_rows = min(out.shape[-1], block_table.shape[1] * view.rows_per_block)
    ends = lens.amax(1).clamp(0, num_rows).tolist() if num_queries else []
    step = max(1, CHUNK_LOGITS // max(1, num_queries * num_heads))
    for seq_idx, end in enumerate(ends):
        for first in range(0, end, step):
            rows = torch.arange(first, min(end, first + step), device=view.device)
            block_ids = block_table[seq_idx, rows // view.rows_per_block].long()
            exists = (block_ids >= 0) & (block_ids < view.num_blocks)
            slots = torch.where(exists, block_ids * view.rows_per_block + rows % view.rows_per_block, -1)
            keys = rearrange(read_rows(view, slots, dtype=torch.float32)[0], "row 1 column -> row column")
            logits = einsum(queries[seq_idx], keys, "query head column, row column -> query head row").relu_()
            found = einsum(factors[seq_idx], logits, "query head, query head row -> query row")
            is_seen = exists & (rows < rearrange(lens[seq_idx], "query -> query 1"))
            scores[seq_idx, :, first : first + len(rows)] = torch.where(is_seen, found, -math.inf)
    return out
