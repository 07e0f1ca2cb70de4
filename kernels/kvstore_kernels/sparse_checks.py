"""The arguments of sparse reads, checked: for the kernel and for the reference."""

from collections.abc import Sequence

import torch

from kvstore_kernels.checks import expect_device, expect_dtype, expect_int, expect_shape
from kvstore_kernels.formats import RowPart
from kvstore_kernels.pages import PageView
from kvstore_kernels.reads import MAX_GRID, expect_latent, expect_output, expect_sinks, expect_softmax_scale

Rows = tuple[PageView, torch.Tensor]
"""A cache, and slots int32 or int64 [num_seqs, num_slots] of the rows that each query attends to."""


def expect_sparse(
    lists: Sequence[Rows],
    q: torch.Tensor,
    softmax_scale: object,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    num_splits: int | None,
) -> tuple[RowPart, int]:
    """The latent part and value_dim that all lists share. Raises: ValueError or TypeError, see `sparse_mla_decode`."""
    latent, value_dim = expect_latent(lists[0][0])
    for name, rows in zip(("slots", "second"), lists, strict=False):
        if not isinstance(rows, tuple) or len(rows) != 2:
            raise TypeError(f"{name}: expected a pair of PageView and slots, got {rows!r}")
        view, slots = rows
        part, columns = expect_latent(view)
        if (part.head_dim, part.dtype, columns) != (latent.head_dim, latent.dtype, value_dim):
            raise ValueError(
                f"{name}: expected rows of {latent.head_dim} {latent.dtype} with {value_dim} as V, "
                f"got {part.head_dim} {part.dtype} with {columns}"
            )
        expect_shape("q", q, (None, None, latent.head_dim))
        expect_shape(f"{name}" if name == "slots" else "slots of second", slots, (q.shape[0], None))
        expect_dtype(name, slots, torch.int32, torch.int64)
        expect_device(name, slots, lists[0][0].device)
        if slots.shape[1] > 1 and slots.stride(1) != 1:
            raise ValueError(f"{name}: expected adjacent slots in a row, got strides {slots.stride()}")
    num_seqs, num_heads, _ = q.shape
    if num_heads == 0:
        raise ValueError("q: expected at least one head, got none")
    expect_dtype("q", q, latent.dtype)
    expect_device("q", q, lists[0][0].device)
    expect_softmax_scale(softmax_scale)
    expect_sinks(sinks, num_heads, q.device)
    if num_splits is not None:
        expect_int("num_splits", num_splits, 1, MAX_GRID)
    if out is not None:
        expect_output("out", out, (num_seqs, num_heads, value_dim), q.dtype, q.device)
    if lse is not None:
        expect_output("lse", lse, (num_seqs, num_heads), torch.float32, q.device)
    return latent, value_dim
