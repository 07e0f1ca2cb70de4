"""The attention reads in torch: one pass per sequence over its rows, copied out of their blocks or viewed in place.

The query heads that share rows are the query rows of one matrix product. A sequence's rows are cut to its length before
anything is computed: nothing needs a mask, and what lies behind the length is never read.
"""

import math

import torch

from kvstore_kernels.checks import cdiv
from kvstore_kernels.pages import PageView
from kvstore_kernels.reads import (
    allocate_outputs,
    expect_keys_and_values,
    expect_latent,
    expect_partials,
    expect_read,
    expect_window,
)


def gqa_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over rows of K and V; arguments, results and errors as the Triton launcher.

    `num_splits` is checked and otherwise ignored: nothing is split here.
    """
    key, value = expect_keys_and_values(view)
    if softmax_scale is None:
        softmax_scale = key.head_dim**-0.5
    expect_window(window)
    expect_read(view, block_table, row_lens, q, key, value.head_dim, softmax_scale, out, lse, num_splits)
    grouped = (key.num_heads, q.shape[1] // key.num_heads)
    return _attend(_RowReader(view, block_table, window), row_lens, q, grouped, softmax_scale, value.head_dim, out, lse)


def mla_decode(
    view: PageView,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    *,
    softmax_scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over latent rows; arguments, results and errors as the Triton launcher.

    `num_splits` is checked and otherwise ignored: nothing is split here.
    """
    latent, value_dim = expect_latent(view)
    expect_read(view, block_table, row_lens, q, latent, value_dim, softmax_scale, out, lse, num_splits)
    reader = _RowReader(view, block_table, None)
    return _attend(reader, row_lens, q, (1, q.shape[1]), softmax_scale, value_dim, out, lse)


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of keys; arguments, results and errors as the Triton launcher."""
    expect_partials(partial_out, partial_lse, out, lse)
    out, lse = allocate_outputs(partial_out[:, :, 0], partial_out.shape[3], out, lse)
    scores = torch.where(partial_lse == math.inf, -math.inf, partial_lse)
    highest = scores.amax(2, keepdim=True)
    weights = torch.exp(scores - torch.where(highest == -math.inf, 0.0, highest)).unsqueeze(3)
    total = weights.sum(2)
    # Selected, not multiplied away: what an empty part holds may be NaN.
    parts = torch.where(weights > 0, partial_out, 0.0)
    out.copy_((weights * parts).sum(2) / torch.where(total == 0, 1.0, total))
    lse.copy_((highest + total.log()).squeeze(2))
    return out, lse


class _RowReader:
    """The rows that the query of a sequence sees, in the order of their positions."""

    def __init__(self, view: PageView, block_table: torch.Tensor, window: int | None) -> None:
        self.view = view
        self.block_table = block_table
        self.window = window
        self.areas = [_Area(view, area) for area in range(len(view.format.area_pitches))]

    def read(self, seq_idx: int, row_len: int) -> list[torch.Tensor]:
        """[1, num_heads, num_rows, head_dim] for each part: views, of the pages where blocks adjoin, else of a copy."""
        rows_per_block, table_width = self.view.rows_per_block, self.block_table.shape[1]
        if self.window is None:
            begin, end = 0, min(row_len, table_width * rows_per_block)
        else:
            begin, end = max(0, row_len - self.window), row_len
        first, last = begin // rows_per_block, cdiv(end, rows_per_block)
        if first >= last:
            return []
        columns = self.block_table.select(0, seq_idx)
        if self.window is None:
            block_ids = columns.narrow(0, first, last - first)
        else:
            block_ids = columns[torch.arange(first, last) % table_width]
        return self._rows(block_ids, begin - first * rows_per_block, end - begin)

    def _rows(self, block_ids: torch.Tensor, skip: int, count: int) -> list[torch.Tensor]:
        known = block_ids.tolist()
        lowest, highest = min(known), max(known)
        if lowest < 0 or highest >= self.view.num_blocks:
            exists = (block_ids >= 0) & (block_ids < self.view.num_blocks)
            is_row = exists.repeat_interleave(self.view.rows_per_block)[skip : skip + count]
            return [part[:, :, is_row] for part in self._rows(block_ids.where(exists, 0), skip, count)]
        first_block = lowest if known == list(range(lowest, highest + 1)) else None
        return [part for area in self.areas for part in area.rows(block_ids, first_block, skip, count)]


class _Area:
    """The records of one area, in all pages."""

    def __init__(self, view: PageView, area: int) -> None:
        self.parts = [part for part in view.format.parts if part.area == area]
        self.pages = view.tensor(self.parts[0].name)
        self.block_stride, self.pitch = self.pages.stride(0), self.pages.stride(1)
        self.start = self.pages.storage_offset() - self.parts[0].offset_bytes // self.pages.element_size()
        self.is_dense = view.rows_per_block == 1 or self.block_stride == view.rows_per_block * self.pitch

    def rows(self, block_ids: torch.Tensor, first_block: int | None, skip: int, count: int) -> list[torch.Tensor]:
        """`count` rows behind the first `skip`, for each part; `first_block` is set where the block ids count up."""
        rows_per_block = self.pages.shape[1]
        if first_block is not None and self.is_dense:
            records, pitch = self.pages, self.block_stride // rows_per_block
            start = self.start + first_block * self.block_stride
        else:
            size, stride = (self.pages.shape[0], rows_per_block, self.pitch), (self.block_stride, self.pitch, 1)
            records, pitch = self.pages.as_strided(size, stride, self.start).index_select(0, block_ids), self.pitch
            start = 0
        return [
            records.as_strided(
                (1, part.num_heads, count, part.head_dim),
                (0, part.head_dim, pitch, 1),
                start + skip * pitch + part.offset_bytes // part.dtype.itemsize,
            )
            for part in self.parts
        ]


def _attend(
    reader: _RowReader,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    grouped: tuple[int, int],
    softmax_scale: float,
    value_dim: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped`: the heads as (heads of the rows, query heads for each of them)."""
    num_seqs, num_heads, head_dim = q.shape
    queries = q.contiguous().view(num_seqs, 1, *grouped, head_dim).unbind(0)
    results = [
        _attend_rows(queries[seq_idx], reader.read(seq_idx, row_len), softmax_scale, value_dim)
        for seq_idx, row_len in enumerate(row_lens.tolist())
    ]
    if out is None and lse is None and num_seqs == 1:
        return results[0][0].reshape(1, num_heads, value_dim), results[0][1].reshape(1, num_heads)
    out, lse = allocate_outputs(q, value_dim, out, lse)
    if results:
        torch.cat([result[0] for result in results], out=out.view(num_seqs, *grouped, value_dim))
        torch.cat([result[1] for result in results], out=lse.view(num_seqs, *grouped))
    return out, lse


def _attend_rows(
    q: torch.Tensor,  # [1, heads of the rows, queries, head_dim]
    parts: list[torch.Tensor],  # K, and V unless it is the leading columns of K; [1, heads, num_rows, dim]
    softmax_scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the rows' dtype and fp32 LSE; scores, sums and LSE are fp32 whatever the rows are."""
    if not parts or parts[0].shape[2] == 0:
        return q.new_zeros((*q.shape[:3], value_dim)), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    keys, values = parts[0], parts[-1]
    if keys.shape[3] == values.shape[3]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, scale=softmax_scale)
        return out[..., :value_dim], lse
    scores = torch.matmul(q.float(), keys.float().mT) * softmax_scale
    lse = torch.logsumexp(scores, 3)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(3)), values.float()).to(q.dtype), lse
