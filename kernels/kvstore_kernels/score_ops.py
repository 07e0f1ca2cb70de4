"""The public op that scores the rows of a sparse indexer: it picks its backend and calls it."""

from typing import Any

import torch

from kvstore_kernels import indexer
from kvstore_kernels.choice import OPS, expect_view
from kvstore_kernels.index_checks import check_read, looks_at_indices
from kvstore_kernels.indexer_checks import allocate_scores
from kvstore_kernels.launch import resolve_backend
from kvstore_kernels.library import view_args
from kvstore_kernels.pages import PageView
from kvstore_kernels.reference import indexer as reference_indexer


def indexer_scores(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """How much each query wants each row, for top-k selection: sum over heads of weights * relu(q . k), in fp32.

    The best rows as the slots that `sparse_mla_decode` takes, where the latent rows lie in blocks of another table:

        scores = indexer_scores(keys_view, keys_table, row_lens, q, weights)  # [num_seqs, max_rows]
        top = scores.topk(k)
        positions = torch.where(top.values == -math.inf, -1, top.indices)  # fewer rows than k: no slot
        seq_idx = torch.arange(num_seqs, dtype=torch.int32).repeat_interleave(k)
        slots = compute_slot_mapping(latent_table, positions.flatten(), seq_idx, latent_view.rows_per_block)
        out, lse = sparse_mla_decode(latent_view, slots.view(num_seqs, k), latent_q, softmax_scale=scale)

    Args:
        view: pages of `indexer_format`, or of plain bf16 or fp16 keys with one head (`latent_format(128, 128)`).
        block_table: int32 [num_seqs, width], of the keys' blocks; rows of an entry that names no block do not exist.
        row_lens: int32 [num_seqs], rows that the last query of a sequence sees, each query before it sees one less; or
            int32 [num_seqs, num_queries], rows that each query sees.
        q: [num_seqs, num_heads, head_dim] or [num_seqs, num_queries, num_heads, head_dim], bf16 or fp16, for plain keys
            of their dtype.
        weights: fp32, the axes of q without the last, contiguous, of any sign; scales of q and of scores are in them.
        out: fp32, the axes of q before the heads and one of columns, contiguous; None: a new tensor with a column for
            every row of the table. Rows past its columns have no score, columns past the rows are -inf.
        backend: "triton", "reference", or None: Triton on a GPU, the reference elsewhere.

    Returns: fp32 scores [num_seqs, (num_queries,) columns]; -inf for a row that does not exist or that the query does
        not see, NaN for one whose key or scale is NaN.

    Raises: ValueError / TypeError that name the argument, what was expected and what came, before anything is written.
    """
    expect_view(view)
    chosen = resolve_backend(backend, view.device)
    if torch.compiler.is_compiling():
        out = allocate_scores(view, block_table, q, out)
        OPS.indexer_scores(*view_args(view), block_table, row_lens, q, weights, out, chosen)
        return out
    if looks_at_indices():
        check_read(view, block_table, row_lens, q)
    module: Any = reference_indexer if chosen == "reference" else indexer
    scores: torch.Tensor = module.indexer_scores(view, block_table, row_lens, q, weights, out=out)
    return scores
