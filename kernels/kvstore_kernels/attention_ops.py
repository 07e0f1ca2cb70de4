"""The public reads with attention, and the merge: each picks its backend and calls it."""

from collections.abc import Sequence
from typing import Any

import torch

from kvstore_kernels import gqa, merge, mla, reference, sparse
from kvstore_kernels.checks import expect_shape
from kvstore_kernels.choice import OPS, expect_view, module_for, scale_tensors
from kvstore_kernels.index_checks import check_ids, check_read, looks_at_indices
from kvstore_kernels.launch import resolve_backend
from kvstore_kernels.library import view_args
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_rules import RowScale
from kvstore_kernels.reads import allocate_outputs


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
    row_scales: RowScale | Sequence[RowScale] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one or several query tokens per sequence over paged K and V, plain or quantised.

    Args:
        view: pages of K and V.
        block_table: int32 [num_seqs, width].
        row_lens: int32 [num_seqs], rows that the last query of a sequence sees, its own included; each query before it
            sees one less (speculative decoding). Or int32 [num_seqs, num_queries], rows that each query sees: whatever
            lies between the first and the last row that any query of a sequence sees must have been written.
        q: [num_seqs, num_heads, head_dim] or [num_seqs, num_queries, num_heads, head_dim] in the rows' dtype, over
            quantised rows in bf16, fp16 or fp32; num_heads is a multiple of the KV heads. Numbers of quantised rows
            become numbers of q's dtype: of fp16, infinite above 65,504.
        softmax_scale: None: head_dim ** -0.5.
        window: the query at position p sees positions > p - window; block i is in column i % width.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        sinks: fp32 [num_heads], the score of one more key per head that has no value: e^sink joins the denominator.
        row_scales: of rows whose scales lie outside the cache, for K and for V, as `write_rows`.
        out, lse: tensors to write to.
        num_splits: parts the keys are split into, merged afterwards; None: from a table of host values.
        workspace: fp32 [n] for the results of the parts, n at least `workspace_numel(...)`; None: allocated. With it,
            `out` and `lse` nothing is allocated.
        backend: as `write_rows`.

    Returns: out, the axes of q with head_dim_v columns, in q's dtype; lse, the axes of q without the last, fp32,
        natural logarithm, of the rows without the sink. A query without rows gives 0 and -inf.

    Raises: as `write_rows`.
    """
    expect_view(view)
    if torch.compiler.is_compiling():
        scale = view.format.part("k").head_dim ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = allocate_outputs(q, view.format.part("v").head_dim, out, lse)
        scales = scale_tensors(row_scales, view.memory)
        shared = (sinks, scales, out, lse, num_splits, workspace, resolve_backend(backend, view.device))
        OPS.gqa_decode(*view_args(view), block_table, row_lens, q, scale, window, soft_cap, *shared)
        return out, lse
    if looks_at_indices():
        check_read(view, block_table, row_lens, q, window)
    result: tuple[torch.Tensor, torch.Tensor] = module_for(backend, view, gqa).gqa_decode(
        view,
        block_table,
        row_lens,
        q,
        softmax_scale=softmax_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        row_scales=row_scales,
        out=out,
        lse=lse,
        num_splits=num_splits,
        workspace=workspace,
    )
    return result


def mla_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    row_scales: RowScale | Sequence[RowScale] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over paged latent rows, plain or quantised; K is the row, V its leading value_dim columns.

    Args:
        view: pages of a format with a `value_dim`.
        q: [num_seqs, num_heads, latent_dim] or [num_seqs, num_queries, num_heads, latent_dim] in the rows' dtype, over
            quantised rows in bf16, fp16 or fp32: the absorbed query, nope columns first.
        softmax_scale: of the model; it cannot be told from the latent row.
        block_table, row_lens, sinks, row_scales, out, lse, num_splits, workspace, backend: as `gqa_decode`.

    Returns: out, the axes of q with value_dim columns, and lse, as `gqa_decode`.

    Raises: as `write_rows`.
    """
    expect_view(view)
    if torch.compiler.is_compiling():
        out, lse = allocate_outputs(q, _value_dim(view), out, lse)
        scales = scale_tensors(row_scales, view.memory)
        shared = (sinks, scales, out, lse, num_splits, workspace, resolve_backend(backend, view.device))
        OPS.mla_decode(*view_args(view), block_table, row_lens, q, softmax_scale, *shared)
        return out, lse
    if looks_at_indices():
        check_read(view, block_table, row_lens, q)
    result: tuple[torch.Tensor, torch.Tensor] = module_for(backend, view, mla).mla_decode(
        view,
        block_table,
        row_lens,
        q,
        softmax_scale=softmax_scale,
        sinks=sinks,
        row_scales=row_scales,
        out=out,
        lse=lse,
        num_splits=num_splits,
        workspace=workspace,
    )
    return result


def sparse_mla_decode(
    view: PageView,
    slots: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    second: tuple[PageView, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    row_scales: RowScale | Sequence[RowScale] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query tokens over the latent rows that a list of slots names for each (top-k).

    Args:
        view: pages of a format with a `value_dim`, plain or quantised.
        slots: int32 or int64 [num_tokens, num_listed], block_id * rows_per_block + row_in_block. A slot below 0 or past
            the last is skipped; one listed twice counts twice.
        q: [num_tokens, num_heads, latent_dim], as `mla_decode`. Several queries of a sequence are tokens of their own,
            for each has its own list.
        second: another cache with rows of the same columns, and its slots: both lists are attended to as one.
        softmax_scale, sinks, row_scales, out, lse, num_splits, workspace, backend: as `mla_decode`; each list is split
            into `num_splits`, so that a workspace for two lists is twice as large.

    Returns: out [num_tokens, num_heads, value_dim] and lse, as `mla_decode`.

    Raises: as `write_rows`.
    """
    expect_view(view)
    if torch.compiler.is_compiling():
        out, lse = allocate_outputs(q, _value_dim(view), out, lse)
        scales = scale_tensors(row_scales, view.memory)
        other = (None, 0, None) if second is None else (*view_args(second[0]), second[1])
        shared = (sinks, scales, out, lse, num_splits, workspace, resolve_backend(backend, view.device))
        OPS.sparse_mla_decode(*view_args(view), slots, q, softmax_scale, *other, *shared)
        return out, lse
    if looks_at_indices():
        check_ids("slots", slots, view.num_slots, what="slot")
        if second is not None:
            check_ids("slots of second", second[1], second[0].num_slots, what="slot")
    result: tuple[torch.Tensor, torch.Tensor] = module_for(backend, view, sparse).sparse_mla_decode(
        view,
        slots,
        q,
        softmax_scale=softmax_scale,
        second=second,
        sinks=sinks,
        row_scales=row_scales,
        out=out,
        lse=lse,
        num_splits=num_splits,
        workspace=workspace,
    )
    return result


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of keys into attention over all of them.

    Args:
        partial_out: fp32 [num_seqs, num_heads, num_splits, dim].
        partial_lse: fp32 [num_seqs, num_heads, num_splits], natural logarithm; -inf (or +inf) marks an empty part,
            whose output is not read.
        out, lse: tensors to write to.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; it is not in the LSE.
        backend: as `write_rows`.

    Returns: out [num_seqs, num_heads, dim] and lse [num_seqs, num_heads] fp32; 0 and -inf where all parts are empty.

    Raises: as `write_rows`.
    """
    expect_shape("partial_out", partial_out, (None, None, None, None))
    chosen = resolve_backend(backend, partial_out.device)
    if torch.compiler.is_compiling():
        out, lse = allocate_outputs(partial_out[:, :, 0], partial_out.shape[3], out, lse)
        OPS.merge_partials(partial_out, partial_lse, sinks, out, lse, chosen)
        return out, lse
    module: Any = reference if chosen == "reference" else merge
    result: tuple[torch.Tensor, torch.Tensor] = module.merge_partials(partial_out, partial_lse, out, lse, sinks=sinks)
    return result


def _value_dim(view: PageView) -> int:
    if view.format.value_dim is None:
        raise ValueError(f"view: expected latent rows (a format with a value_dim), got {view.format.name!r}")
    return view.format.value_dim
