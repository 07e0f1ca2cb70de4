"""The public ops on rows: each picks its backend, Triton or the torch reference. Both have one signature."""

from collections.abc import Sequence
from typing import Any

import torch

from kvstore_kernels import gather, quant_gather, quant_write, write
from kvstore_kernels.choice import OPS, expect_view, module_for, scale_tensors
from kvstore_kernels.index_checks import check_ids, check_lens, check_rows, looks_at_indices
from kvstore_kernels.launch import resolve_backend
from kvstore_kernels.library import view_args
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import value_shapes
from kvstore_kernels.quant_rules import RowScale, row_scale_of


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
            of a quantised format are bf16, fp16 or fp32, one for each part that holds no scales. They must not lie in
            the pages that are written.
        row_scales: for quantised rows whose scale lies outside the cache (fp8 per tensor): what values are divided by,
            per part a float or an fp32 tensor of one element; None: 1.0.
        backend: "triton", "reference", or None: Triton on a GPU, the reference elsewhere.

    Raises: ValueError / TypeError that name the argument, what was expected and what came.
    """
    expect_view(view)
    if not view.format.quantised and row_scales is not None:
        raise ValueError(f"row_scales: rows of format {view.format.name!r} have none, got {row_scales!r}")
    if torch.compiler.is_compiling():
        row_scale_of(view.format, row_scales, view.device)
        scales = scale_tensors(row_scales, view.memory)
        OPS.write_rows(*view_args(view), slot_mapping, parts, scales, resolve_backend(backend, view.device))
        return
    if looks_at_indices():
        check_ids("slot_mapping", slot_mapping, view.num_slots, what="slot", written=True)
    if view.format.quantised:
        module_for(backend, view, quant_write).write_quantised(view, slot_mapping, *parts, row_scales=row_scales)
    else:
        module_for(backend, view, write).write_rows(view, slot_mapping, *parts)


def gather_rows(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    *,
    num_rows: int,
    start: torch.Tensor | None = None,
    wraps: bool = False,
    dtype: torch.dtype | None = None,
    row_scales: RowScale | Sequence[RowScale] | None = None,
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
    expect_view(view)
    quantised = bool(view.format.quantised)
    for name, given in (("dtype", dtype), ("row_scales", row_scales)):
        if given is not None and not quantised:
            raise ValueError(f"{name}: rows of format {view.format.name!r} are moved as they are, got {given!r}")
    if quantised and dtype is None:
        dtype = torch.bfloat16
    if torch.compiler.is_compiling():
        results = out or _new_rows(view, num_rows, dtype)
        scales = scale_tensors(row_scales, view.memory)
        chosen = resolve_backend(backend, view.device)
        OPS.gather_rows(
            *view_args(view), block_table, cu_row_lens, num_rows, start, wraps, dtype, scales, results, chosen
        )
        return results
    if looks_at_indices():
        lens = cu_row_lens.diff()
        check_lens("cu_row_lens", lens)
        begins = torch.zeros_like(lens) if start is None else start
        check_rows(view, block_table, begins, begins + lens, wraps, "cu_row_lens")
    read = {"num_rows": num_rows, "start": start, "wraps": wraps, "out": out}
    if quantised:
        values = module_for(backend, view, quant_gather).gather_dequantised
        result: tuple[torch.Tensor, ...] = values(
            view, block_table, cu_row_lens, dtype=dtype, row_scales=row_scales, **read
        )
    else:
        result = module_for(backend, view, gather).gather_rows(view, block_table, cu_row_lens, **read)
    return result


def read_rows(
    view: PageView,
    slots: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    row_scales: RowScale | Sequence[RowScale] | None = None,
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
    expect_view(view)
    if torch.compiler.is_compiling():
        results = out or _new_rows(view, slots.shape[0], dtype)
        scales = scale_tensors(row_scales, view.memory)
        OPS.read_rows(*view_args(view), slots, dtype, scales, results, resolve_backend(backend, view.device))
        return results
    if looks_at_indices():
        check_ids("slots", slots, view.num_slots, what="slot")
    module: Any = module_for(backend, view, quant_gather)
    result: tuple[torch.Tensor, ...] = module.read_rows(view, slots, dtype=dtype, row_scales=row_scales, out=out)
    return result


def _new_rows(view: PageView, num_rows: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
    """What the op would make, where it must be given: of `dtype`, or without one of the parts' own."""
    if dtype is None:
        shapes = [((num_rows, part.num_heads, part.head_dim), part.dtype) for part in view.format.parts]
    else:
        shapes = [(shape, dtype) for shape in value_shapes(view, num_rows)]
    return tuple(view.memory.new_empty(shape, dtype=part_dtype) for shape, part_dtype in shapes)
