"""The public ops: each picks its backend, Triton or the torch reference, and calls it. Both have one signature."""

from collections.abc import Sequence
from typing import Any

import torch

from kvstore_kernels import gather, gqa, library, merge, mla, quant_gather, quant_write, reference, sparse, write
from kvstore_kernels.checks import expect_shape
from kvstore_kernels.launch import resolve_backend
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_rules import RowScale


def write_rows(
    view: PageView,
    slot_mapping: torch.Tensor,
    *parts: torch.Tensor,
    row_scales: RowScale | Sequence[RowScale] | None = None,
    backend: str | None = None,
) -> None:
    """Writes one row per slot into the pages of a view: plain rows bit for bit, others quantised by their format.

    Args:
        view: where the pages lie, and their format.
        slot_mapping: int64 [num_rows], block_id * rows_per_block + row_in_block. A slot below 0 or past the last is
            skipped. Equal slots in one call leave the content of that row undefined.
        parts: one tensor per part of the format, [at least num_rows, num_heads, head_dim] or flattened to two axes,
            of the part's dtype, the row stride free. A latent row may also come as two tensors, nope and rope. Parts
            of a quantised format are bf16, fp16 or fp32, one for each part that holds no scales.
        row_scales: for quantised rows whose scale lies outside the cache (fp8 per tensor): what values are divided by,
            per part a float or an fp32 tensor of one element; None: 1.0.
        backend: "triton", "reference", or None: Triton on a GPU, the reference elsewhere.

    Raises: ValueError / TypeError that name the argument, what was expected and what came.
    """
    _expect_view(view)
    if not view.format.quantised and row_scales is not None:
        raise ValueError(f"row_scales: rows of format {view.format.name!r} have none, got {row_scales!r}")
    if torch.compiler.is_compiling():
        scales = _scale_tensors(row_scales, view.memory)
        chosen = resolve_backend(backend, view.device)
        _OPS.write_rows(view.memory, slot_mapping, parts, scales, view.handle, chosen)
    elif view.format.quantised:
        _module(backend, view, quant_write).write_quantised(view, slot_mapping, *parts, row_scales=row_scales)
    else:
        _module(backend, view, write).write_rows(view, slot_mapping, *parts)


def gather_rows(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    *,
    num_rows: int,
    start: torch.Tensor | None = None,
    wraps: bool = False,
    dtype: torch.dtype | None = None,
    row_scales: Sequence[RowScale] | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copies rows of many sequences out of their pages, packed one sequence behind the other.

    Args:
        view: where the pages lie, and their format.
        block_table: int32 [num_seqs, width].
        cu_row_lens: int32 [num_seqs + 1], prefix sum of the rows to fetch per sequence.
        num_rows: its last entry, known to the host.
        start: int32 [num_seqs], the first row to fetch per sequence; None: 0.
        wraps: whether block i of a sequence is in column i % width (window groups) instead of column i.
        dtype: of the result of quantised rows, which come as numbers: bf16 (None), fp16 or fp32.
        row_scales: of quantised rows whose scale lies outside the cache, as `write_rows`.
        out: tensors to write to, one per part.
        backend: as `write_rows`.

    Returns: one tensor [num_rows, num_heads, head_dim] per part; of quantised latent rows and indexer keys one
        [num_rows, 1, columns], nope columns first, of quantised K and V two. A row without a block (an entry that
        names none, a column past the table) is zero.

    Raises: as `write_rows`.
    """
    _expect_view(view)
    if view.format.quantised:
        read: tuple[torch.Tensor, ...] = _module(backend, view, quant_gather).gather_dequantised(
            view,
            block_table,
            cu_row_lens,
            num_rows=num_rows,
            start=start,
            wraps=wraps,
            dtype=torch.bfloat16 if dtype is None else dtype,
            row_scales=row_scales,
            out=out,
        )
        return read
    for name, given in (("dtype", dtype), ("row_scales", row_scales)):
        if given is not None:
            raise ValueError(f"{name}: rows of format {view.format.name!r} are moved as they are, got {given!r}")
    if torch.compiler.is_compiling():
        parts = view.format.parts
        made = tuple(view.memory.new_empty((num_rows, p.num_heads, p.head_dim), dtype=p.dtype) for p in parts)
        results = made if out is None else out
        chosen = resolve_backend(backend, view.device)
        _OPS.gather_rows(view.memory, block_table, cu_row_lens, start, num_rows, wraps, results, view.handle, chosen)
        return results
    result: tuple[torch.Tensor, ...] = _module(backend, view, gather).gather_rows(
        view,
        block_table,
        cu_row_lens,
        num_rows=num_rows,
        start=start,
        wraps=wraps,
        out=out,
    )
    return result


def read_rows(
    view: PageView,
    slots: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_scales: Sequence[RowScale] | None = None,
    out: tuple[torch.Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """The rows of explicit slots as numbers, quantised or plain.

    Args:
        view: where the pages lie, and their format.
        slots: int64 [num_rows]; one that names no row gives zeros.
        dtype: of the result: bf16, fp16 or fp32. Plain rows of that dtype are moved bit for bit.
        row_scales, out, backend: as `gather_rows`.

    Returns: tensors as `gather_rows` gives of quantised rows.

    Raises: as `write_rows`.
    """
    result: tuple[torch.Tensor, ...] = _module(backend, view, quant_gather).read_rows(
        view, slots, dtype=dtype, row_scales=row_scales, out=out
    )
    return result


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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence over paged K and V.

    Args:
        view: pages with parts "k" and "v".
        block_table: int32 [num_seqs, width].
        row_lens: int32 [num_seqs], rows the query sees, its own included.
        q: [num_seqs, num_heads, head_dim] in the rows' dtype; num_heads is a multiple of the KV heads.
        softmax_scale: None: head_dim ** -0.5.
        window: the query at position row_len - 1 sees positions >= row_len - window; block i is in column i % width.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        sinks: fp32 [num_heads], the score of one more key per head that has no value: e^sink joins the denominator.
        out, lse: tensors to write to.
        num_splits: parts the keys are split into, merged afterwards; None: from a table of host values.
        backend: as `write_rows`.

    Returns: out [num_seqs, num_heads, head_dim_v] in q's dtype; lse [num_seqs, num_heads] fp32, natural logarithm,
        of the rows without the sink. A sequence without rows gives 0 and -inf.

    Raises: as `write_rows`.
    """
    if torch.compiler.is_compiling():
        key, value = view.format.parts
        scale = key.head_dim**-0.5 if softmax_scale is None else softmax_scale
        out, lse = _outputs(q, value.head_dim, out, lse)
        _OPS.gqa_decode(
            *(view.memory, block_table, row_lens, q, scale, window, soft_cap, sinks, out, lse, num_splits),
            *(view.handle, resolve_backend(backend, view.device)),
        )
        return out, lse
    result: tuple[torch.Tensor, torch.Tensor] = _module(backend, view, gqa).gqa_decode(
        view,
        block_table,
        row_lens,
        q,
        softmax_scale=softmax_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        out=out,
        lse=lse,
        num_splits=num_splits,
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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence over paged latent rows; K is the row, V its leading value_dim columns.

    Args:
        view: pages of a format with a `value_dim`.
        q: [num_seqs, num_heads, latent_dim] in the rows' dtype, the absorbed query, nope columns first.
        softmax_scale: of the model; it cannot be told from the latent row.
        block_table, row_lens, sinks, out, lse, num_splits, backend: as `gqa_decode`.

    Returns: out [num_seqs, num_heads, value_dim] and lse, as `gqa_decode`.

    Raises: as `write_rows`.
    """
    if torch.compiler.is_compiling():
        assert view.format.value_dim is not None
        out, lse = _outputs(q, view.format.value_dim, out, lse)
        _OPS.mla_decode(
            *(view.memory, block_table, row_lens, q, softmax_scale, sinks, out, lse, num_splits),
            *(view.handle, resolve_backend(backend, view.device)),
        )
        return out, lse
    result: tuple[torch.Tensor, torch.Tensor] = _module(backend, view, mla).mla_decode(
        view,
        block_table,
        row_lens,
        q,
        softmax_scale=softmax_scale,
        sinks=sinks,
        out=out,
        lse=lse,
        num_splits=num_splits,
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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence over the latent rows that a list of slots names (top-k).

    Args:
        view: pages of a format with a `value_dim`.
        slots: int32 or int64 [num_seqs, num_listed], block_id * rows_per_block + row_in_block. A slot below 0 or past
            the last is skipped; one listed twice counts twice.
        q: [num_seqs, num_heads, latent_dim] in the rows' dtype.
        second: another cache with rows of the same kind, and its slots: both lists are attended to as one.
        softmax_scale, sinks, out, lse, num_splits, backend: as `mla_decode`; each list is split into `num_splits`.

    Returns: out [num_seqs, num_heads, value_dim] and lse, as `mla_decode`.

    Raises: as `write_rows`.
    """
    if torch.compiler.is_compiling():
        assert view.format.value_dim is not None
        out, lse = _outputs(q, view.format.value_dim, out, lse)
        other, other_slots, handle = (
            (None, None, 0) if second is None else (second[0].memory, second[1], second[0].handle)
        )
        _OPS.sparse_mla_decode(
            *(view.memory, slots, q, softmax_scale, other, other_slots, sinks, out, lse, num_splits),
            *(view.handle, resolve_backend(backend, view.device), handle),
        )
        return out, lse
    result: tuple[torch.Tensor, torch.Tensor] = _module(backend, view, sparse).sparse_mla_decode(
        view,
        slots,
        q,
        softmax_scale=softmax_scale,
        second=second,
        sinks=sinks,
        out=out,
        lse=lse,
        num_splits=num_splits,
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
    if torch.compiler.is_compiling():
        out, lse = _outputs(partial_out[:, :, 0], partial_out.shape[3], out, lse)
        _OPS.merge_partials(partial_out, partial_lse, sinks, out, lse, resolve_backend(backend, partial_out.device))
        return out, lse
    expect_shape("partial_out", partial_out, (None, None, None, None))
    chosen = reference if resolve_backend(backend, partial_out.device) == "reference" else merge
    result: tuple[torch.Tensor, torch.Tensor] = chosen.merge_partials(partial_out, partial_lse, out, lse, sinks=sinks)
    return result


_OPS = getattr(torch.ops, library.NAMESPACE)
"""The same ops as torch's compiler knows them; called directly, they would only cost a dispatch more."""


def _scale_tensors(row_scales: RowScale | Sequence[RowScale] | None, memory: torch.Tensor) -> list[torch.Tensor]:
    """Scales as tensors of one element, as the registered op takes them."""
    given: list[Any] = list(row_scales) if isinstance(row_scales, tuple | list) else [row_scales]
    return [
        scale if isinstance(scale, torch.Tensor) else memory.new_full((1,), scale, dtype=torch.float32)
        for scale in given
        if scale is not None
    ]


def _outputs(
    q: torch.Tensor, value_dim: int, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        q.new_empty((*q.shape[:2], value_dim)) if out is None else out,
        q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse,
    )


def _expect_view(view: object) -> None:
    if not isinstance(view, PageView):
        raise TypeError(f"view: expected a PageView, got {type(view).__name__}")


def _module(backend: str | None, view: PageView, triton_module: Any) -> Any:
    _expect_view(view)
    return reference if resolve_backend(backend, view.device) == "reference" else triton_module
