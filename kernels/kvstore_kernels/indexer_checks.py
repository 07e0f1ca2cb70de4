"""The arguments of `indexer_scores`, checked: for the kernel and for the reference."""

import torch

from kvstore_kernels.checks import expect_dtype, expect_shape
from kvstore_kernels.formats import RowPart
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import ValuePart, value_parts
from kvstore_kernels.reads import expect_output, expect_read

QUERY_DTYPES = (torch.bfloat16, torch.float16)


def expect_indexer_keys(view: PageView) -> ValuePart:
    """The one part of keys of a format, plain, e4m3 with one fp32 scale, or pairs of e2m1 with UE8M0 scales.

    Raises: TypeError when `view` is no PageView, ValueError when its rows are no such keys.
    """
    parts = value_parts(view, quantised=False)
    key = parts[0]
    quantised = (key.kind, key.scale_kind)
    whole_tiles = key.scales_per_head * key.quant_tile == key.head_values == key.tile_values
    is_key = (
        (quantised == ("e4m3", "fp32") and key.scales_per_head == 1)
        or (quantised == ("e2m1", "ue8m0") and whole_tiles)
        or (key.part.dtype in QUERY_DTYPES and key.scale_kind == "none")
    )
    if len(parts) != 1 or key.part.num_heads != 1 or not is_key:
        raise ValueError(
            "view: expected keys of an indexer (one part with one head, of bfloat16, float16, e4m3 with one fp32 scale "
            f"in the row, or pairs of e2m1 with UE8M0 scales), got format {view.format.name!r}"
        )
    return key


def expect_indexer(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None,
) -> ValuePart:
    """The part of keys. Raises: ValueError or TypeError unless the arguments fit each other; see `indexer_scores`."""
    key = expect_indexer_keys(view)
    dtype = key.part.dtype
    if isinstance(q, torch.Tensor) and key.scale_kind != "none":
        expect_dtype("q", q, *QUERY_DTYPES)
        dtype = q.dtype
    as_read = RowPart("k", dtype, 1, key.head_values)
    expect_read(view, block_table, row_lens, q, as_read, 1, 1.0, None, None, None)
    expect_output("weights", weights, tuple(q.shape[:-1]), torch.float32, view.device)
    if out is not None:
        expect_shape("out", out, (*q.shape[:-2], None))
        expect_output("out", out, tuple(out.shape), torch.float32, view.device)
    return key


def allocate_scores(
    view: PageView, block_table: torch.Tensor, q: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """The caller's tensor, or a new one for every row that the table has columns for."""
    if out is not None:
        return out
    max_rows = block_table.shape[1] * view.rows_per_block
    return torch.empty((*q.shape[:-2], max_rows), dtype=torch.float32, device=q.device)
