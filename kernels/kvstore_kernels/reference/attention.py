"""The attention reads in torch: one pass per sequence over its rows, copied out of their blocks or viewed in place.

The query heads that share rows are the query rows of one matrix product. A sequence's rows are cut to its length before
anything is computed: nothing needs a mask, and what lies behind the length is never read.
"""

import math
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from kvstore_kernels.checks import cdiv
from kvstore_kernels.pages import PageView
from kvstore_kernels.reads import (
    MAX_FP32,
    allocate_outputs,
    expect_keys_and_values,
    expect_latent,
    expect_partials,
    expect_read,
    expect_sinks,
    expect_soft_cap,
    expect_window,
)

COPY_BYTES = 1 << 22
"""Rows copied out of their pages at a time, unless a single sequence has more."""


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over rows of K and V; arguments, results and errors as the Triton launcher.

    `num_splits` is checked and otherwise ignored: nothing is split here.
    """
    key, value = expect_keys_and_values(view)
    if softmax_scale is None:
        softmax_scale = key.head_dim**-0.5
    expect_window(window)
    expect_soft_cap(soft_cap)
    expect_read(view, block_table, row_lens, q, key, value.head_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[1], q.device)
    grouped = (key.num_heads, q.shape[1] // key.num_heads)
    reader = _RowReader(view, block_table, row_lens, window)
    return with_sinks(_attend(reader, q, grouped, softmax_scale, value.head_dim, out, lse, soft_cap), sinks)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per sequence over latent rows; arguments, results and errors as the Triton launcher.

    `num_splits` is checked and otherwise ignored: nothing is split here.
    """
    latent, value_dim = expect_latent(view)
    expect_read(view, block_table, row_lens, q, latent, value_dim, softmax_scale, out, lse, num_splits)
    expect_sinks(sinks, q.shape[1], q.device)
    reader = _RowReader(view, block_table, row_lens, None)
    return with_sinks(_attend(reader, q, (1, q.shape[1]), softmax_scale, value_dim, out, lse), sinks)


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
    scores = torch.where(partial_lse == math.inf, -math.inf, partial_lse)
    highest = scores.amax(2, keepdim=True)
    weights = torch.exp(scores - torch.where(highest == -math.inf, 0.0, highest)).unsqueeze(3)
    total = weights.sum(2)
    # Selected, not multiplied away: what an empty part holds may be NaN.
    parts = torch.where(weights > 0, partial_out, 0.0)
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
    """e^lse / (e^lse + e^sink), fp32 [num_seqs, num_heads, 1]; 0 for a query that has seen no key."""
    share = torch.sigmoid(lse.detach() - sinks.detach())
    return torch.where(lse.detach() == -math.inf, 0.0, share).unsqueeze(2)


class _RowReader:
    """The rows that the query of each sequence sees, in the order of their positions."""

    def __init__(self, view: PageView, block_table: torch.Tensor, row_lens: torch.Tensor, window: int | None) -> None:
        self.view = view
        self.areas = [_Area(view, area) for area in range(len(view.format.area_pitches))]
        table, rows_per_block = block_table.numpy(force=True), view.rows_per_block
        self.spans: list[tuple[int, int]] = []  # first row behind the start of the first block, number of rows
        self.block_ids: list[npt.NDArray[np.int32]] = []
        for entries, row_len in zip(table, row_lens.tolist(), strict=True):
            if window is None:
                begin, end = 0, max(0, min(row_len, len(entries) * rows_per_block))
                self.block_ids.append(entries[: cdiv(end, rows_per_block)])
            else:
                begin, end = max(0, row_len - window), max(0, row_len)
                columns = np.arange(begin // rows_per_block, cdiv(end, rows_per_block))
                self.block_ids.append(entries[columns % len(entries)])
            self.spans.append((begin % rows_per_block, end - begin))

    def read(self) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Runs of sequences with equally many rows: the first, the last + 1, and their rows.

        Rows are one tensor [num_seqs, num_heads, num_rows, head_dim] for each part. They are views: of the pages,
        where the blocks of a lone sequence adjoin, or of a copy for as many sequences as COPY_BYTES have room for.
        """
        first, room = 0, COPY_BYTES
        for last, ids in enumerate(self.block_ids):
            room -= len(ids) * self.view.page_bytes
            if room < 0 and last > first:
                yield from self._read(first, last)
                first, room = last, COPY_BYTES - len(ids) * self.view.page_bytes
        yield from self._read(first, len(self.block_ids))

    def _read(self, first: int, last: int) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        every_id = np.concatenate(self.block_ids[first:last] or [np.empty(0, np.int32)])
        lowest, highest = (int(every_id.min()), int(every_id.max())) if every_id.size else (0, 0)
        if lowest < 0 or highest >= self.view.num_blocks:
            yield from ((seq_idx, seq_idx + 1, self._existing_rows(seq_idx)) for seq_idx in range(first, last))
            return
        adjoins = last - first == 1 and every_id.tolist() == list(range(lowest, highest + 1))
        index = torch.from_numpy(every_id).to(self.view.device)
        records = [area.records(index, lowest if adjoins else None) for area in self.areas]
        start = 0
        for (skip, count), run in groupby(self.spans[first:last]):
            num_seqs = len(list(run))
            copied_rows = len(self.block_ids[first]) * self.view.rows_per_block
            shape = (num_seqs, copied_rows, count)
            rows = [
                part_rows
                for area, (copied, base, pitch) in zip(self.areas, records, strict=True)
                for part_rows in area.rows(copied, base + (start + skip) * pitch, shape, pitch)
            ]
            yield first, first + num_seqs, rows
            first += num_seqs
            start += num_seqs * copied_rows

    def _existing_rows(self, seq_idx: int) -> list[torch.Tensor]:
        """The rows of a sequence whose entries name a block; the others do not exist."""
        ids, (skip, count) = self.block_ids[seq_idx], self.spans[seq_idx]
        exists = (ids >= 0) & (ids < self.view.num_blocks)
        is_row = np.repeat(exists, self.view.rows_per_block)[skip : skip + count]
        kept = torch.from_numpy(np.flatnonzero(is_row) + skip).to(self.view.device)
        index = torch.from_numpy(np.where(exists, ids, 0)).to(self.view.device)
        return [
            self.view.tensor(part.name).index_select(0, index).flatten(0, 1)[kept].transpose(0, 1).unsqueeze(0)
            for part in self.view.format.parts
        ]


class _Area:
    """The records of one area, in all pages."""

    def __init__(self, view: PageView, area: int) -> None:
        self.parts = [part for part in view.format.parts if part.area == area]
        self.pages = view.tensor(self.parts[0].name)
        self.block_stride, self.pitch = self.pages.stride(0), self.pages.stride(1)
        self.start = int(self.pages.storage_offset()) - self.parts[0].offset_bytes // self.pages.element_size()
        self.is_dense = view.rows_per_block == 1 or self.block_stride == view.rows_per_block * self.pitch

    def records(self, block_ids: torch.Tensor, first_block: int | None) -> tuple[torch.Tensor, int, int]:
        """The records of blocks one behind the other, where in the tensor they start, and their pitch.

        `first_block` is set where the ids count up from it: then the pages themselves will do, if they are dense.
        """
        rows_per_block = self.pages.shape[1]
        if first_block is not None and self.is_dense:
            pitch = self.block_stride // rows_per_block
            return self.pages, self.start + first_block * self.block_stride, pitch
        size, stride = (self.pages.shape[0], rows_per_block, self.pitch), (self.block_stride, self.pitch, 1)
        return self.pages.as_strided(size, stride, self.start).index_select(0, block_ids), 0, self.pitch

    def rows(self, records: torch.Tensor, start: int, shape: tuple[int, int, int], pitch: int) -> list[torch.Tensor]:
        """For each part, of `num_seqs` sequences that lie `copied_rows` apart, `count` rows from element `start` on."""
        num_seqs, copied_rows, count = shape
        return [
            records.as_strided(
                (num_seqs, part.num_heads, count, part.head_dim),
                (copied_rows * pitch, part.head_dim, pitch, 1),
                start + part.offset_bytes // part.dtype.itemsize,
            )
            for part in self.parts
        ]


def _attend(
    reader: _RowReader,
    q: torch.Tensor,
    grouped: tuple[int, int],
    softmax_scale: float,
    value_dim: int,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped`: the heads as (heads of the rows, query heads for each of them)."""
    num_seqs, num_heads, head_dim = q.shape
    queries = q.detach().contiguous().view(num_seqs, *grouped, head_dim)
    scale = float(softmax_scale)
    results = [
        _attend_rows(queries[first:last], rows, scale, value_dim, soft_cap) for first, last, rows in reader.read()
    ]
    if out is None and lse is None and len(results) == 1:
        return results[0][0].reshape(num_seqs, num_heads, value_dim), results[0][1].reshape(num_seqs, num_heads)
    out, lse = allocate_outputs(q, value_dim, out, lse)
    if results:
        torch.cat([result[0] for result in results], out=out.detach().view(num_seqs, *grouped, value_dim))
        torch.cat([result[1] for result in results], out=lse.detach().view(num_seqs, *grouped))
    return out, lse


def _attend_rows(
    q: torch.Tensor,  # [num_seqs, heads of the rows, queries, head_dim]
    parts: list[torch.Tensor],  # K, and V unless it is the leading columns of K; [num_seqs, heads, num_rows, dim]
    softmax_scale: float,
    value_dim: int,
    soft_cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the rows' dtype and fp32 LSE; scores, sums and LSE are fp32 whatever the rows are."""
    if parts[0].shape[2] == 0:
        return q.new_zeros((*q.shape[:3], value_dim)), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    keys, values = parts[0], parts[-1]
    if keys.shape[3] == values.shape[3] and soft_cap is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, scale=softmax_scale)
        if not lse.all():
            # Where every score is NaN or -inf, it gives 0 and 0.0. An LSE of 0.0 that is right is computed twice.
            again = _attend_in_steps(q, keys, values, softmax_scale)
            is_zero = lse == 0
            out, lse = torch.where(is_zero.unsqueeze(3), again[0], out), torch.where(is_zero, again[1], lse)
        return out[..., :value_dim], lse
    return _attend_in_steps(q, keys, values, softmax_scale, soft_cap)


def _attend_in_steps(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float, soft_cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(q.float(), keys.float().mT) * softmax_scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    lse = torch.logsumexp(scores, 3)
    # Clamped, because -inf - -inf is NaN: a query whose scores are all -inf has weights of 0.
    weights = torch.exp(scores - lse.clamp(min=-MAX_FP32).unsqueeze(3))
    return torch.matmul(weights, values.float()).to(q.dtype), lse
