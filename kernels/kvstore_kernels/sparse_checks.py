"""The arguments of sparse reads, checked: for the kernel and for the reference."""

from collections.abc import Sequence

import torch

from kvstore_kernels.checks import expect_device, expect_dtype, expect_int, expect_shape
from kvstore_kernels.latent_rows import LatentRow, latent_row
from kvstore_kernels.pages import PageView
from kvstore_kernels.reads import MAX_GRID, expect_output, expect_sinks, expect_softmax_scale

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
) -> tuple[list[LatentRow], int]:
    """How the rows of each list are read, and their value_dim.

    Raises: ValueError or TypeError, see `sparse_mla_decode`.
    """
    first, read = latent_row(lists[0][0]), list[LatentRow]()
    for name, rows in zip(("slots", "second"), lists, strict=False):
        if not isinstance(rows, tuple) or len(rows) != 2:
            raise TypeError(f"{name}: expected a pair of PageView and slots, got {type(rows).__name__}")
        view, slots = rows
        row = latent_row(view)
        if _kind(row) != _kind(first):
            raise ValueError(f"{name}: expected rows of {_described(first)}, got {_described(row)}")
        expect_shape("q", q, (None, None, first.latent_dim))
        expect_shape(f"{name}" if name == "slots" else "slots of second", slots, (q.shape[0], None))
        expect_dtype(name, slots, torch.int32, torch.int64)
        expect_device(name, slots, lists[0][0].device)
        if slots.shape[1] > 1 and slots.stride(1) != 1:
            raise ValueError(f"{name}: expected adjacent slots in a row, got strides {slots.stride()}")
        read.append(row)
    num_seqs, num_heads, _ = q.shape
    if num_heads == 0:
        raise ValueError("q: expected at least one head, got none")
    expect_dtype("q", q, *first.query_dtypes)
    expect_device("q", q, lists[0][0].device)
    expect_softmax_scale(softmax_scale)
    expect_sinks(sinks, num_heads, q.device)
    if num_splits is not None:
        expect_int("num_splits", num_splits, 1, MAX_GRID)
    if out is not None:
        expect_output("out", out, (num_seqs, num_heads, first.value_dim), q.dtype, q.device)
    if lse is not None:
        expect_output("lse", lse, (num_seqs, num_heads), torch.float32, q.device)
    return read, first.value_dim


def _kind(row: LatentRow) -> tuple[object, ...]:
    return row.latent_dim, row.value_dim, row.query_dtypes


def _described(row: LatentRow) -> str:
    """ "576 torch.bfloat16 with 512 as V"; the codes of quantised rows may differ."""
    dtype = "quantised columns" if row.is_quantised else str(row.query_dtypes[0])
    return f"{row.latent_dim} {dtype} with {row.value_dim} as V"
