"""Several queries per sequence, each seeing its own rows: fp64 results, and the same calls one query at a time."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.attention_oracle import Exact, PagedBatch, attend


def with_queries(batch: PagedBatch, num_queries: int) -> PagedBatch:
    """The batch with that many random queries for each sequence: q [num_seqs, num_queries, num_heads, head_dim]."""
    num_seqs, *heads = batch.q.shape
    q = torch.randn(num_seqs, num_queries, *heads, generator=torch.Generator().manual_seed(3))
    return replace(batch, q=q.to(batch.q.dtype))


def causal_lens(row_lens: Sequence[int], num_queries: int) -> list[list[int]]:
    """What each query sees where a sequence has one length: the last query all rows, each before it one less."""
    return [[row_len - behind for behind in reversed(range(num_queries))] for row_len in row_lens]


def exact_queries(
    batch: PagedBatch, lens: Sequence[Sequence[int]], softmax_scale: float, window: int | None = None
) -> Exact:
    """What queries that see `lens` rows must give, [num_seqs, num_queries, ..], of rows that all exist."""
    num_seqs, num_queries = batch.q.shape[:2]
    spans = [
        (seq_idx, slice(0 if window is None else max(0, row_len - window), max(0, row_len)))
        for seq_idx, seq_lens in enumerate(lens)
        for row_len in seq_lens
    ]
    keys = [batch.keys[seq_idx][span] for seq_idx, span in spans]
    values = [batch.values[seq_idx][span] for seq_idx, span in spans]
    flat = attend(batch.q.flatten(0, 1), keys, values, softmax_scale)
    fields = (flat.out, flat.lse, flat.out_budget, flat.lse_budget)
    return Exact(*(field.unflatten(0, (num_seqs, num_queries)) for field in fields))
