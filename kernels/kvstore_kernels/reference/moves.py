"""write_rows and gather_rows in torch."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from einops import rearrange

from kvstore_kernels.formats import RowPart
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import expect_movable, expect_slots, expect_tables, make_pieces, outputs, source_parts

WIDE_BYTES = 1 << 16
"""From this many bytes on, elements are written in words of 8 or 16 bytes: up to six times as fast, 2 us to set up."""

MANY_BYTES = 1 << 22
"""From this many bytes on, rows are gathered in words of 16 bytes by all threads; before, one alone is faster."""


def write_rows(view: PageView, slot_mapping: torch.Tensor, *parts: torch.Tensor) -> None:
    """Same as `kvstore_kernels.write_rows`."""
    expect_movable(view)
    num_rows = expect_slots(view, slot_mapping)
    row_parts = source_parts(view, parts, num_rows)
    if not num_rows:
        return
    slots = slot_mapping.numpy(force=True)
    kept = None
    # Unsigned, a negative slot is a huge one; as an index it would count from the end.
    if slots.view(np.uint64).max() >= view.num_slots:
        kept = np.flatnonzero(slots.view(np.uint64) < view.num_slots)
        slots = slots[kept]
    block_ids, rows_in_block = np.divmod(slots, view.rows_per_block)
    place = _index(block_ids, view), _index(rows_in_block, view)
    for part, tensor in zip(row_parts, parts, strict=True):
        records = view.tensor(part.name) if row_parts is view.format.parts else _latent_columns(view, part)
        rows = tensor.detach() if tensor.requires_grad else tensor
        rows = rows.resolve_neg()
        if rows.ndim == 2:
            rows = rearrange(rows, "row (head dim) -> row head dim", head=part.num_heads)
        if kept is not None:
            rows = rows[_index(kept, view)]
        elif rows.shape[0] != num_rows:
            rows = rows[:num_rows]
        if num_rows * part.num_bytes >= WIDE_BYTES:
            word = widest_word(records, rows)
            records, rows = records.view(word), rows.view(word)
        records[place] = rows


def gather_rows(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    *,
    num_rows: int,
    start: torch.Tensor | None = None,
    wraps: bool = False,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Same as `kvstore_kernels.gather_rows`."""
    expect_movable(view)
    expect_tables(view, block_table, cu_row_lens, num_rows, start, wraps)
    results = outputs(view, num_rows, out)
    if not num_rows:
        return results
    block_ids, rows_in_block = _locate(view, block_table, cu_row_lens, start, wraps)
    absent = np.flatnonzero(block_ids < 0)
    block_ids[absent] = 0
    for part, piece in zip(view.format.parts, make_pieces(view.format.parts, results), strict=True):
        records = view.tensor(part.name)
        block_stride, row_stride = records.stride()[:2]
        # A row starts at every common divisor of the strides: rows overlap, and one index names each of them.
        pitch = math.gcd(block_stride, row_stride)
        last = (view.num_blocks - 1) * block_stride + (view.rows_per_block - 1) * row_stride
        every_row = records.as_strided((last // pitch + 1, part.width), (pitch, 1)).view(piece.rows.dtype)
        index = _index(block_ids * (block_stride // pitch) + rows_in_block * (row_stride // pitch), view)
        word = widest_word(every_row, piece.rows) if num_rows * part.num_bytes >= MANY_BYTES else piece.rows.dtype
        if word == torch.complex128:
            torch.ops.aten.index.Tensor_out(every_row.view(word), [index], out=piece.rows.view(word))
        else:
            torch.index_select(every_row, 0, index, out=piece.rows)
        if len(absent):
            piece.rows[_index(absent, view)] = 0
    return results


def _locate(
    view: PageView,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    start: torch.Tensor | None,
    wraps: bool,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The block id, -1 where there is none, and the row in the block of every row to gather."""
    table, rows_per_block = block_table.numpy(force=True), view.rows_per_block
    first_rows = cu_row_lens.numpy(force=True).astype(np.int64)
    row_lens = first_rows[1:] - first_rows[:-1]
    begin = np.zeros_like(row_lens) if start is None else start.numpy(force=True).astype(np.int64)
    end = begin + row_lens
    # A piece is what a sequence wants of one block, nothing perhaps: a division for each row takes longer.
    first_column = begin // rows_per_block
    num_pieces = -(-end // rows_per_block) - first_column
    seq_idx = np.repeat(np.arange(len(num_pieces)), num_pieces)
    columns = np.arange(len(seq_idx)) + np.repeat(first_column - np.cumsum(num_pieces) + num_pieces, num_pieces)
    page_begin = columns * rows_per_block
    piece_begin = np.maximum(page_begin, begin[seq_idx])
    piece_lens = np.minimum(page_begin + rows_per_block, end[seq_idx]) - piece_begin
    exists = (columns >= 0) & (wraps | (columns < table.shape[1]))
    piece_ids = np.full(len(columns), -1, dtype=np.int64)
    piece_ids[exists] = table[seq_idx[exists], columns[exists] % table.shape[1] if wraps else columns[exists]]
    piece_ids[(piece_ids < 0) | (piece_ids >= view.num_blocks)] = -1
    behind_start = piece_begin - page_begin - np.cumsum(piece_lens) + piece_lens
    return np.repeat(piece_ids, piece_lens), np.arange(row_lens.sum()) + np.repeat(behind_start, piece_lens)


def _latent_columns(view: PageView, part: RowPart) -> torch.Tensor:
    """Strided view [num_blocks, rows_per_block, 1, width] of the nope or the rope columns of latent rows."""
    first_column = part.offset_bytes // part.dtype.itemsize
    return view.tensor(view.format.parts[0].name)[..., first_column : first_column + part.width]


def _index(values: npt.NDArray[np.int64], view: PageView) -> torch.Tensor:
    index = torch.from_numpy(values)
    return index if view.memory.is_cpu else index.to(view.device)


def widest_word(*tensors: torch.Tensor) -> torch.dtype:
    """The widest dtype as which all tensors can be viewed: their last axis contiguous, everything else aligned."""
    size = tensors[0].element_size()
    for word in (torch.complex128, torch.int64):
        if all(
            tensor.data_ptr() % word.itemsize == 0
            and all(count * size % word.itemsize == 0 for count in (tensor.shape[-1], *tensor.stride()[:-1]))
            and tensor.storage_offset() * size % word.itemsize == 0
            for tensor in tensors
        ):
            return word
    return tensors[0].dtype
