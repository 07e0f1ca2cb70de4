"""The arguments of an attention read, checked, and the tensors it writes to."""

import numbers
from typing import Any

import torch

from kvstore_kernels.checks import MAX_FP32, expect_device, expect_dtype, expect_int, expect_shape
from kvstore_kernels.formats import ALIGNMENT_BYTES, ROW_DTYPES, RowFormat, RowPart, dtype_name
from kvstore_kernels.pages import PageView

MAX_GRID = 65_535
"""Programs on the second axis of a launch, which counts splits."""
MAX_INT32 = 2**31 - 1


def expect_latent(view: PageView) -> tuple[RowPart, int]:
    """The one part of a latent format, and how many of its columns are V.

    Raises: TypeError when `view` is no PageView, ValueError when its rows are not latent.
    """
    row_format = _format_of(view)
    part = row_format.parts[0]
    if row_format.value_dim is None or len(row_format.parts) != 1 or part.dtype not in ROW_DTYPES or not part.is_dense:
        raise ValueError(
            "view: expected latent rows (a format with a value_dim, quantised or with one dense part in a dtype of "
            f"{', '.join(map(dtype_name, ROW_DTYPES))}), got format {_described(row_format)}"
        )
    return part, row_format.value_dim


def expect_keys_and_values(view: PageView) -> tuple[RowPart, RowPart]:
    """The parts "k" and "v" of a format.

    Raises: TypeError when `view` is no PageView, ValueError when its rows are not K and V of one dtype and head count.
    """
    row_format = _format_of(view)
    if row_format.value_dim is None and [part.name for part in row_format.parts] == ["k", "v"]:
        key, value = row_format.parts
        alike = key.dtype == value.dtype and key.num_heads == value.num_heads
        if alike and key.dtype in ROW_DTYPES and key.is_dense and value.is_dense:
            return key, value
    raise ValueError(
        "view: expected rows of K and V (dense parts k and v, equal in heads and in a dtype of "
        f"{', '.join(map(dtype_name, ROW_DTYPES))}), got format {_described(row_format)}"
    )


def _described(row_format: RowFormat) -> str:
    return f"{row_format.name!r} of {', '.join(dict.fromkeys(dtype_name(part.dtype) for part in row_format.parts))}"


def expect_window(window: int | None) -> None:
    """Raises TypeError or ValueError unless `window` is None or a number of rows."""
    if window is not None:
        expect_int("window", window, 1, MAX_INT32)


def expect_sinks(sinks: torch.Tensor | None, num_heads: int, device: torch.device) -> None:
    """Raises TypeError or ValueError unless `sinks` is None or contiguous fp32 [num_heads] on the device."""
    if sinks is not None:
        expect_output("sinks", sinks, (num_heads,), torch.float32, device)


def expect_softmax_scale(softmax_scale: object) -> None:
    """Raises TypeError or ValueError unless the scale is a finite number."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, float | int | numbers.Real):
        raise TypeError(f"softmax_scale: expected a number, got {softmax_scale!r}")
    if not _fits_fp32(softmax_scale):
        raise ValueError(f"softmax_scale: expected a finite fp32 number, got {softmax_scale!r}")


def expect_soft_cap(soft_cap: object) -> None:
    """Raises TypeError or ValueError unless `soft_cap` is None or a positive finite number."""
    if soft_cap is None:
        return
    if isinstance(soft_cap, bool) or not isinstance(soft_cap, float | int | numbers.Real):
        raise TypeError(f"soft_cap: expected a number or None, got {soft_cap!r}")
    if not 0 < soft_cap <= MAX_FP32:  # type: ignore[operator]
        raise ValueError(f"soft_cap: expected a positive finite fp32 number, got {soft_cap!r}")


def expect_read(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    key: RowPart,
    value_dim: int,
    softmax_scale: object,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    num_splits: int | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments fit each other; shapes as in the launchers' docstrings."""
    queries = expect_queries(q, key)
    (num_seqs, *_), num_heads = queries, q.shape[-2]
    if num_heads == 0 or num_heads % key.num_heads:
        raise ValueError(f"q: expected a number of heads that is a multiple of {key.num_heads}, got {num_heads}")
    expect_dtype("q", q, key.dtype)
    expect_shape("block_table", block_table, (num_seqs, None))
    expect_dtype("block_table", block_table, torch.int32)
    if block_table.shape[1] == 0:
        raise ValueError("block_table: expected at least one column, got none")
    if not block_table.is_contiguous() and block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise ValueError(f"block_table: expected adjacent entries in a row, got strides {block_table.stride()}")
    per_query = isinstance(row_lens, torch.Tensor) and row_lens.ndim == len(queries)
    expect_shape("row_lens", row_lens, queries if per_query else (num_seqs,))
    expect_dtype("row_lens", row_lens, torch.int32)
    _expect_contiguous("row_lens", row_lens)
    expect_softmax_scale(softmax_scale)
    if num_splits is not None:
        expect_int("num_splits", num_splits, 1, MAX_GRID)
    for name, tensor in (("q", q), ("block_table", block_table), ("row_lens", row_lens)):
        expect_device(name, tensor, view.device)
    if out is not None:
        expect_output("out", out, (*queries, num_heads, value_dim), q.dtype, view.device)
    if lse is not None:
        expect_output("lse", lse, (*queries, num_heads), torch.float32, view.device)


def expect_queries(q: torch.Tensor, key: RowPart) -> tuple[int, ...]:
    """The axes of `q` before the heads: (num_seqs,) or (num_seqs, num_queries).

    Raises: TypeError when `q` is no tensor, ValueError for another number of axes or another head_dim.
    """
    num_axes = 4 if isinstance(q, torch.Tensor) and q.ndim == 4 else 3
    expect_shape("q", q, (*(None,) * (num_axes - 1), key.head_dim))
    return tuple(q.shape[:-2])


def query_args(q: torch.Tensor, row_lens: torch.Tensor) -> dict[str, int]:
    """The run-time arguments that say how many queries a sequence has, and whether each has a length of its own."""
    return {"num_queries": q.shape[1] if q.ndim == 4 else 1, "lens_per_query": int(row_lens.ndim == 2)}


def expect_partials(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Raises ValueError or TypeError unless the arguments of `merge_partials` fit each other."""
    expect_shape("partial_out", partial_out, (None, None, None, None))
    num_seqs, num_heads, num_splits, dim = partial_out.shape
    if num_splits == 0 or dim == 0:
        raise ValueError(f"partial_out: expected at least one part and one column, got shape {list(partial_out.shape)}")
    expect_output("partial_out", partial_out, partial_out.shape, torch.float32, partial_out.device)
    expect_output("partial_lse", partial_lse, (num_seqs, num_heads, num_splits), torch.float32, partial_out.device)
    if out is not None:
        expect_shape("out", out, (num_seqs, num_heads, dim))
        expect_dtype("out", out, *ROW_DTYPES)
        expect_output("out", out, out.shape, out.dtype, partial_out.device)
    if lse is not None:
        expect_output("lse", lse, (num_seqs, num_heads), torch.float32, partial_out.device)


def expect_output(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError or TypeError unless the tensor is contiguous and of that shape, dtype and device."""
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, dtype)
    expect_device(name, tensor, device)
    _expect_contiguous(name, tensor)


def read_args(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    softmax_scale: float,
) -> tuple[dict[str, torch.Tensor | int | float], dict[str, int]]:
    """The run-time and compile-time arguments that both attention kernels have."""
    size = q.element_size()
    unit = ALIGNMENT_BYTES // size
    q = q if q.ndim == 3 else q.flatten(1, 2)
    # The kernels take adjacent heads, and strides in 16 bytes so that any stride gives wide loads.
    if not (q.stride(2) == 1 and q.stride(1) == q.shape[2] and q.stride(0) % unit == 0):
        q = q.contiguous()
        unit = unit if q.stride(0) % unit == 0 else 1
    memory = view.memory
    if not view.format.quantised:
        memory = memory[: memory.numel() // size * size].view(q.dtype)
    return {
        "memory_ptr": memory,
        "table_ptr": block_table,
        "row_lens_ptr": row_lens,
        "q_ptr": q,
        "out_ptr": partial_out,
        "lse_ptr": partial_lse,
        "q_stride": q.stride(0) // unit,
        "table_stride": block_table.stride(0),
        "table_width": block_table.shape[1],
        "num_blocks": view.num_blocks,
        "offset_units": view.offset_bytes // ALIGNMENT_BYTES,
        "block_stride_units": view.block_stride_bytes // ALIGNMENT_BYTES,
        "softmax_scale": float(softmax_scale),
    }, {"ROWS_PER_BLOCK": view.rows_per_block, "ELEMENT_BYTES": size, "Q_UNIT": unit}


def allocate_outputs(
    q: torch.Tensor, value_dim: int, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller's tensors, or new ones where it gave none."""
    return (
        torch.empty((*q.shape[:-1], value_dim), dtype=q.dtype, device=q.device) if out is None else out,
        torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse is None else lse,
    )


def workspace_numel(num_tokens: int, num_heads: int, value_dim: int, num_splits: int) -> int:
    """The fp32 elements that a read with `out`, `lse` and `workspace` needs of the latter, so as to allocate nothing.

    Args:
        num_tokens: query tokens, those of all sequences.
        num_heads: query heads.
        value_dim: columns of the output.
        num_splits: what the read is given; of a sparse read over two lists twice that.

    Raises: nothing; the read says what is wrong with its workspace.
    """
    return num_tokens * num_heads * num_splits * (value_dim + 1)


def expect_workspace(workspace: torch.Tensor | None, device: torch.device) -> None:
    """Raises TypeError or ValueError unless `workspace` is None or contiguous fp32 [n] on the device."""
    if workspace is not None:
        expect_shape("workspace", workspace, (None,))
        expect_output("workspace", workspace, tuple(workspace.shape), torch.float32, device)


def allocate_partials(
    out: torch.Tensor, lse: torch.Tensor, num_splits: int, *, merged: bool, workspace: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each part's result goes, one query behind the other: [num_seqs * num_queries, num_heads, num_splits, ..].

    Unmerged, the one part is the result. Otherwise the parts lie in the workspace, or in new tensors without one.

    Raises: ValueError for a workspace that is too small.
    """
    out, lse = out.detach().flatten(0, -3), lse.detach().flatten(0, -2)
    if not merged:
        return out.unsqueeze(2), lse.unsqueeze(2)
    num_tokens, num_heads, value_dim = out.shape
    shape, needed = (num_tokens, num_heads, num_splits), workspace_numel(num_tokens, num_heads, value_dim, num_splits)
    if workspace is None:
        partial_out = torch.empty((*shape, value_dim), dtype=torch.float32, device=out.device)
        return partial_out, torch.empty(shape, dtype=torch.float32, device=out.device)
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace: expected at least {needed} elements for {num_splits} splits, got {workspace.numel()}"
        )
    num_parts = num_tokens * num_heads * num_splits
    columns, lses = workspace.detach()[:needed].split([num_parts * value_dim, num_parts])
    return columns.view(*shape, value_dim), lses.view(shape)


def _format_of(view: PageView) -> RowFormat:
    if not isinstance(view, PageView):
        raise TypeError(f"view: expected a PageView, got {type(view).__name__}")
    return view.format


def _fits_fp32(number: Any) -> bool:
    """Whether fp32 has finite numbers around it; NaN has not. An integer may be too large for any float."""
    return bool(-MAX_FP32 <= number <= MAX_FP32)


def _expect_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
