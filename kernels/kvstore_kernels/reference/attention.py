"""The attention reads in torch: one pass per sequence over its rows, copied out of their blocks or viewed in place.

The query heads that share rows are the query rows of one matrix product. A sequence's rows are cut to its length before
anything is computed: what lies behind the length is never read, and only several queries of a sequence need a mask.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from einops import rearrange

from kvstore_kernels.checks import MAX_FP32
from kvstore_kernels.kv_rows import computed_part, expect_key_value_rows, expect_row_scales
from kvstore_kernels.latent_rows import latent_row, outside_scale_of
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import RowScales
from kvstore_kernels.reads import (
    allocate_outputs,
    expect_partials,
    expect_read,
    expect_sinks,
    expect_soft_cap,
    expect_window,
    expect_workspace,
)
from kvstore_kernels.reference.rows import RowReader, Run, visible_lens


def gqa_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    row_scales: RowScales | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over rows of K and V; arguments, results and errors as the Triton launcher.

    `num_splits` and `workspace` are checked and otherwise ignored: nothing is split here.
    """
    key, value = expect_key_value_rows(view)
    value_dim = value.part.head_dim
    if softmax_scale is None:
        softmax_scale = key.part.head_dim**-0.5
    expect_window(window)
    expect_soft_cap(soft_cap)
    expect_read(view, block_table, row_lens, q, computed_part(key, q), value_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[-2], q.device)
    expect_workspace(workspace, q.device)
    lens = visible_lens(row_lens, q.shape[:-2][1:].numel())
    reader = RowReader(view, block_table, lens, window, expect_row_scales(view, (key, value), row_scales))
    result = _attend(reader, q, lens, key.part.num_heads, softmax_scale, value_dim, out, lse, window, soft_cap)
    return with_sinks(result, sinks)


def mla_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    row_scales: RowScales | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over latent rows; arguments, results and errors as the Triton launcher.

    `num_splits` and `workspace` are checked and otherwise ignored: nothing is split here.
    """
    row = latent_row(view)
    expect_read(view, block_table, row_lens, q, row.key(q), row.value_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[-2], q.device)
    expect_workspace(workspace, q.device)
    lens = visible_lens(row_lens, q.shape[:-2][1:].numel())
    scale = outside_scale_of(view, row_scales)
    reader = RowReader(view, block_table, lens, None, (scale,))
    return with_sinks(_attend(reader, q, lens, 1, softmax_scale, row.value_dim, out, lse), sinks)


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of keys; arguments, results and errors as the Triton launcher."""
    expect_partials(partial_out, partial_lse, out, lse)
    expect_sinks(sinks, partial_out.shape[1], partial_out.device)
    partial_out, partial_lse = partial_out.detach(), partial_lse.detach()
    out, lse = allocate_outputs(partial_out[:, :, 0], partial_out.shape[3], out, lse)
    is_empty = partial_lse.isinf()
    scores = torch.where(is_empty, -math.inf, partial_lse)
    highest = scores.amax(2, keepdim=True)
    weights = torch.exp(scores - torch.where(highest == -math.inf, 0.0, highest)).unsqueeze(3)
    total = weights.sum(2)
    # Selected, not multiplied away: what an empty part holds may be NaN.
    parts = torch.where(is_empty.unsqueeze(3), 0.0, partial_out)
    merged = (weights * parts).sum(2) / torch.where(total == 0, 1.0, total)
    lse.detach().copy_((highest + total.log()).squeeze(2))
    out.detach().copy_(merged if sinks is None else merged * _keep_of_sinks(lse, sinks))
    return out, lse


def with_sinks(
    result: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with one more key per head, without a value, in the denominator."""
    out, lse = result
    if sinks is not None:
        out.detach().copy_(out.detach().float() * _keep_of_sinks(lse, sinks))
    return out, lse


def _keep_of_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """e^lse / (e^lse + e^sink), fp32 [.., num_heads, 1]; 0 for a query that has seen no key."""
    share = torch.sigmoid(lse.detach() - sinks.detach())
    return torch.where(lse.detach() == -math.inf, 0.0, share).unsqueeze(-1)


def _attend(
    reader: RowReader,
    q: torch.Tensor,  # [num_seqs, (num_queries,) num_heads, head_dim]
    lens: npt.NDArray[np.int64],  # [num_seqs, num_queries]
    kv_heads: int,
    softmax_scale: float,
    value_dim: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads that read one head of the rows, of all queries of a sequence, are the rows of one matrix product."""
    num_seqs, num_queries = lens.shape
    group = q.shape[-2] // kv_heads
    queries = q.detach().reshape(num_seqs, num_queries, kv_heads, group, q.shape[-1])
    queries = queries.transpose(1, 2).reshape(num_seqs, kv_heads, num_queries * group, q.shape[-1]).contiguous()
    scale, results = float(softmax_scale), []
    for run in reader.read():
        seen = None if num_queries == 1 else _seen(run, lens, window, group).to(q.device)
        run_q = queries[run.first : run.last].to(run.parts[0].dtype)
        results.append(_attend_rows(run_q, run.parts, scale, value_dim, soft_cap, seen))
    if out is None and lse is None and len(results) == 1 and num_queries == 1:
        flat_out, flat_lse = results[0]
        return flat_out.reshape(*q.shape[:-1], value_dim).to(q.dtype), flat_lse.reshape(q.shape[:-1])
    out, lse = allocate_outputs(q, value_dim, out, lse)
    if num_queries == 1 and num_seqs:
        torch.cat([result[0] for result in results], out=out.detach().view(num_seqs, kv_heads, group, value_dim))
        torch.cat([result[1] for result in results], out=lse.detach().view(num_seqs, kv_heads, group))
    elif q.numel():
        order = {"pattern": "seq head (query group) dim -> seq query head group dim", "query": num_queries}
        out.detach().copy_(rearrange(torch.cat([result[0] for result in results]), **order).reshape(out.shape))
        lse_column = torch.cat([result[1] for result in results]).unsqueeze(3)
        lse.detach().copy_(rearrange(lse_column, **order).reshape(lse.shape))
    return out, lse


def _seen(run: Run, lens: npt.NDArray[np.int64], window: int | None, group: int) -> torch.Tensor:
    """bool [num_seqs, 1, queries x group, rows]: which rows each query of a run sees."""
    ends, positions = lens[run.first : run.last, :, None], run.positions()[:, None]
    seen = positions < ends if window is None else (positions < ends) & (positions >= ends - window)
    return torch.from_numpy(seen.repeat(group, 1)).unsqueeze(1)


def _attend_rows(
    q: torch.Tensor,  # [num_seqs, heads of the rows, queries, head_dim]
    parts: list[torch.Tensor],  # K, and V unless it is the leading columns of K; [num_seqs, heads, num_rows, dim]
    softmax_scale: float,
    value_dim: int,
    soft_cap: float | None,
    seen: torch.Tensor | None,  # [num_seqs, 1, queries, num_rows] bool; None: all
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the rows' dtype and fp32 LSE; scores, sums and LSE are fp32 whatever the rows are."""
    if parts[0].shape[2] == 0:
        return q.new_zeros((*q.shape[:3], value_dim)), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    keys, values = parts[0], parts[-1]
    if keys.shape[3] == values.shape[3] and soft_cap is None and seen is None and q.is_cpu:
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = attention(q, keys, values, scale=softmax_scale)
        if not lse.numpy().all():  # numpy: no threads for a few numbers
            # Where every score is NaN or -inf, it gives 0 and 0.0. An LSE of 0.0 that is right is computed twice.
            again = _attend_in_steps(q, keys, values, softmax_scale)
            is_zero = lse == 0
            out, lse = torch.where(is_zero.unsqueeze(3), again[0], out), torch.where(is_zero, again[1], lse)
        return out[..., :value_dim], lse
    return _attend_in_steps(q, keys, values[..., :value_dim], softmax_scale, soft_cap, seen)


def logsumexp(scores: torch.Tensor) -> torch.Tensor:
    """Over the last axis, NaN for a score of infinity as in the kernels: merges take infinity for no rows."""
    lse = torch.logsumexp(scores, -1)
    return torch.where(lse == math.inf, math.nan, lse)


def _attend_in_steps(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    soft_cap: float | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(q.float(), keys.float().mT) * softmax_scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if seen is not None:
        scores = scores.masked_fill_(~seen, -math.inf)
    lse = logsumexp(scores)
    # Clamped, because -inf - -inf is NaN: a query whose scores are all -inf has weights of 0.
    weights = torch.exp(scores - lse.clamp(min=-MAX_FP32).unsqueeze(3))
    return torch.matmul(weights, values.float()).to(q.dtype), lse
