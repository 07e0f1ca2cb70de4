"""sparse_mla_decode in torch."""

import torch
from einops import rearrange

from kvstore_kernels.checks import MAX_FP32
from kvstore_kernels.latent_rows import outside_scales_of
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import RowScales
from kvstore_kernels.reads import allocate_outputs, expect_workspace
from kvstore_kernels.reference.attention import logsumexp, with_sinks
from kvstore_kernels.reference.quant_gather import read_rows
from kvstore_kernels.sparse_checks import Rows, expect_sparse


def sparse_mla_decode(
    view: PageView,
    slots: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    second: Rows | None = None,
    sinks: torch.Tensor | None = None,
    row_scales: RowScales | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over listed rows; arguments, results and errors as the Triton launcher."""
    lists = [(view, slots)] if second is None else [(view, slots), second]
    _, value_dim = expect_sparse(lists, q, softmax_scale, sinks, out, lse, num_splits)
    expect_workspace(workspace, q.device)
    outside_scales_of([cache for cache, _ in lists], row_scales)
    out, lse = allocate_outputs(q, value_dim, out, lse)
    read = [_read(*rows, row_scales) for rows in lists]
    rows = torch.cat([each[0] for each in read], 1)  # [num_seqs, num_listed, latent_dim] fp32
    exists = torch.cat([each[1] for each in read], 1)
    scores = torch.matmul(q.detach().float(), rearrange(rows, "seq row dim -> seq dim row")) * float(softmax_scale)
    scores.masked_fill_(~exists[:, None], -torch.inf)
    lse.detach().copy_(logsumexp(scores) if rows.shape[1] else torch.full_like(lse, -torch.inf))
    # Clamped, because -inf - -inf is NaN: a query that sees no row has weights of 0.
    weights = torch.exp(scores - lse.detach().clamp(min=-MAX_FP32).unsqueeze(2))
    out.detach().copy_(torch.matmul(weights, rows[..., :value_dim]))
    return with_sinks((out, lse), sinks)


def _read(view: PageView, slots: torch.Tensor, row_scales: RowScales | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The listed rows as fp32, zero where a slot names none, and which exist."""
    places = slots.long()
    scales = row_scales if any(entry.scales is None for entry in view.format.quantised) else None
    (rows,) = read_rows(view, places.reshape(-1).contiguous(), dtype=torch.float32, row_scales=scales)
    return rows.view(*slots.shape, rows.shape[2]), (places >= 0) & (places < view.num_slots)
