"""The rows that queries see, out of their pages: views, copies of their blocks, or numbers where they are codes."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from kvstore_kernels.checks import cdiv
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import RowScales, value_parts
from kvstore_kernels.reference.moves import widest_word
from kvstore_kernels.reference.quant_gather import read_rows

COPY_BYTES = 1 << 24
"""Rows copied out of their pages at a time, unless a single sequence has more.

A thread keeps the memory that it copies to: fresh memory is a page fault for every 4 KiB, which takes longer.
"""


_scratch = threading.local()


@dataclass(frozen=True, slots=True)
class Run:
    """The rows of sequences `first` ... `last` - 1, which have equally many.

    `parts`: K and V, or the latent row, [num_seqs, num_heads, num_rows, head_dim]. `begins`: [num_seqs], the position
    of the first row of each; `kept`: how far behind it each row lies, None: 0, 1, 2, ...
    """

    first: int
    last: int
    parts: list[torch.Tensor]
    begins: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64] | None = None

    def positions(self) -> npt.NDArray[np.int64]:
        """[num_seqs, num_rows]."""
        behind = np.arange(self.parts[0].shape[2]) if self.kept is None else self.kept
        return self.begins[:, None] + behind


def visible_lens(row_lens: torch.Tensor, num_queries: int) -> npt.NDArray[np.int64]:
    """[num_seqs, num_queries]: the rows that each query sees; of a length per sequence, each query one less."""
    lens = row_lens.numpy(force=True).astype(np.int64)
    return lens if lens.ndim == 2 else lens[:, None] - np.arange(num_queries - 1, -1, -1)


class RowReader:
    """The rows that the queries of each sequence see, in the order of their positions."""

    def __init__(
        self,
        view: PageView,
        block_table: torch.Tensor,
        lens: npt.NDArray[np.int64],
        window: int | None,
        row_scales: RowScales | None = None,
    ) -> None:
        """`row_scales`: for each part of values the scale outside the cache, or any number where it has none."""
        self.view = view
        table, rows_per_block = block_table.numpy(force=True), view.rows_per_block
        ends = np.maximum(lens.max(1, initial=0), 0)
        if window is None:
            begins, ends = np.zeros_like(ends), np.minimum(ends, table.shape[1] * rows_per_block)
        else:
            begins = np.where(lens > 0, np.maximum(lens - window, 0), ends[:, None]).min(1, initial=2**31)
        if view.format.quantised:
            parts = value_parts(view, quantised=True)
            scales = (1.0,) * len(parts) if row_scales is None else row_scales
            outside = [scale for part, scale in zip(parts, scales, strict=False) if part.scale_kind == "outside"]
            self.row_scales = outside or None
            self.bytes_per_block = 4 * rows_per_block * sum(part.width for part in parts)
        else:
            self.areas = [_Area(view, area) for area in range(len(view.format.area_pitches))]
            self.bytes_per_block = view.page_bytes
        self.spans: list[tuple[int, int]] = []  # the first row behind the start of the first block, number of rows
        self.block_ids: list[npt.NDArray[np.int32]] = []
        self.begins = begins
        for entries, begin, end in zip(table, begins.tolist(), ends.tolist(), strict=True):
            first, last = begin // rows_per_block, cdiv(end, rows_per_block)
            wraps = last > len(entries)
            self.block_ids.append(entries[np.arange(first, last) % len(entries)] if wraps else entries[first:last])
            self.spans.append((begin % rows_per_block, max(end - begin, 0)))

    def read(self) -> Iterator[Run]:
        """The rows of all sequences in runs, in their order; valid until the next is asked for.

        Plain rows are views: of the pages, where the blocks of a lone sequence adjoin, or of a copy for as many
        sequences as fit into COPY_BYTES. Codes become fp32 numbers.
        """
        first, room = 0, COPY_BYTES
        for last, ids in enumerate(self.block_ids):
            room -= len(ids) * self.bytes_per_block
            if room < 0 and last > first:
                yield from self._read(first, last)
                first, room = last, COPY_BYTES - len(ids) * self.bytes_per_block
        yield from self._read(first, len(self.block_ids))

    def _read(self, first: int, last: int) -> Iterator[Run]:
        every_id = np.concatenate(self.block_ids[first:last] or [np.empty(0, np.int32)])
        lowest, highest = (int(every_id.min()), int(every_id.max())) if every_id.size else (0, 0)
        if lowest < 0 or highest >= self.view.num_blocks:
            yield from (self._existing_rows(seq_idx) for seq_idx in range(first, last))
        elif self.view.format.quantised:
            yield from self._decode_runs(first, last)
        else:
            adjoins = last - first == 1 and bool((every_id == np.arange(lowest, lowest + len(every_id))).all())
            yield from self._view_runs(first, last, every_id, lowest if adjoins else None)

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Of each run of equal spans its first sequence, the last + 1, skipped rows and rows."""
        for (skip, count), run in groupby(self.spans[first:last]):
            end = first + len(list(run))
            yield first, end, skip, count
            first = end

    def _view_runs(
        self, first: int, last: int, every_id: npt.NDArray[np.int32], adjoining: int | None
    ) -> Iterator[Run]:
        index = torch.from_numpy(every_id).to(self.view.device)
        records = [area.records(index, adjoining) for area in self.areas]
        start = 0
        for run_first, run_last, skip, count in self._runs(first, last):
            copied_rows = len(self.block_ids[run_first]) * self.view.rows_per_block
            shape = (run_last - run_first, copied_rows, count)
            rows = [
                part_rows
                for area, (copied, base, pitch) in zip(self.areas, records, strict=True)
                for part_rows in area.rows(copied, base + (start + skip) * pitch, shape, pitch)
            ]
            yield Run(run_first, run_last, rows, self.begins[run_first:run_last])
            start += (run_last - run_first) * copied_rows

    def _decode_runs(self, first: int, last: int) -> Iterator[Run]:
        slots = [self._slots(seq_idx) for seq_idx in range(first, last)]
        decoded = self._decode(np.concatenate(slots or [np.empty(0, np.int64)]))
        start = 0
        for run_first, run_last, _, count in self._runs(first, last):
            num_seqs = run_last - run_first
            rows = [part[start : start + num_seqs * count] for part in decoded]
            shaped = [part.view(num_seqs, count, *part.shape[1:]).transpose(1, 2) for part in rows]
            yield Run(run_first, run_last, shaped, self.begins[run_first:run_last])
            start += num_seqs * count

    def _slots(self, seq_idx: int) -> npt.NDArray[np.int64]:
        ids, (skip, count), rows_per_block = self.block_ids[seq_idx], self.spans[seq_idx], self.view.rows_per_block
        slots: npt.NDArray[np.int64] = ids.astype(np.int64)[:, None] * rows_per_block + np.arange(rows_per_block)
        return slots.reshape(-1)[skip : skip + count]

    def _decode(self, slots: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """fp32 [num_rows, num_heads, head_dim] of K and V, or of the latent row."""
        index = torch.from_numpy(slots).to(self.view.device)
        return read_rows(self.view, index, dtype=torch.float32, row_scales=self.row_scales)

    def _existing_rows(self, seq_idx: int) -> Run:
        """The rows of a sequence whose entries name a block; the others do not exist."""
        ids, (skip, count) = self.block_ids[seq_idx], self.spans[seq_idx]
        exists = (ids >= 0) & (ids < self.view.num_blocks)
        kept = np.flatnonzero(np.repeat(exists, self.view.rows_per_block)[skip : skip + count])
        if self.view.format.quantised:
            parts = self._decode(self._slots(seq_idx)[kept])
        else:
            rows = torch.from_numpy(kept + skip).to(self.view.device)
            index = torch.from_numpy(np.where(exists, ids, 0)).to(self.view.device)
            pages = (self.view.tensor(part.name) for part in self.view.format.parts)
            parts = tuple(page.index_select(0, index).flatten(0, 1)[rows] for page in pages)
        shaped = [part.transpose(0, 1).unsqueeze(0) for part in parts]
        return Run(seq_idx, seq_idx + 1, shaped, self.begins[seq_idx : seq_idx + 1], kept)


class _Area:
    """The records of one area, in all pages."""

    def __init__(self, view: PageView, area: int) -> None:
        self.idx = area
        self.parts = [part for part in view.format.parts if part.area == area]
        self.pages = view.tensor(self.parts[0].name)
        self.block_stride, self.pitch = self.pages.stride(0), self.pages.stride(1)
        self.start = int(self.pages.storage_offset()) - self.parts[0].offset_bytes // self.pages.element_size()
        self.is_dense = view.rows_per_block == 1 or self.block_stride == view.rows_per_block * self.pitch
        size, stride = (self.pages.shape[0], view.rows_per_block * self.pitch), (self.block_stride, 1)
        self.blocks = self.pages.as_strided(size, stride, self.start)

    def records(self, block_ids: torch.Tensor, first_block: int | None) -> tuple[torch.Tensor, int, int]:
        """The records of blocks one behind the other, where in the tensor they start, and their pitch.

        `first_block` is set where the ids count up from it: then the pages themselves will do, if they are dense.
        Otherwise they are copied over those of the call before.
        """
        if first_block is not None and self.is_dense:
            pitch = self.block_stride // self.pages.shape[1]
            return self.pages, self.start + first_block * self.block_stride, pitch
        num_bytes = len(block_ids) * self.blocks.shape[1] * self.blocks.element_size()
        copied = _room(self.idx, num_bytes, self.pages.device).view(self.blocks.dtype).view(-1, self.blocks.shape[1])
        word = widest_word(self.blocks, copied)
        torch.ops.aten.index.Tensor_out(self.blocks.view(word), [block_ids], out=copied.view(word))
        return copied, 0, self.pitch

    def rows(self, records: torch.Tensor, start: int, shape: tuple[int, int, int], pitch: int) -> list[torch.Tensor]:
        """For each part, of sequences that lie `copied_rows` apart, `count` rows from element `start` on."""
        num_seqs, copied_rows, count = shape
        return [
            records.as_strided(
                (num_seqs, part.num_heads, count, part.head_dim),
                (copied_rows * pitch, part.head_dim, pitch, 1),
                start + part.offset_bytes // part.dtype.itemsize,
            )
            for part in self.parts
        ]


def _room(area: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] to copy rows to, of each area the same for every call of a thread."""
    if device.type != "cpu" or num_bytes > COPY_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    room: torch.Tensor | None = getattr(_scratch, f"area_{area}", None)
    if room is None or len(room) < num_bytes:
        with torch.inference_mode(False):  # a tensor made inside could not be written to outside
            room = torch.empty(num_bytes, dtype=torch.uint8)
        setattr(_scratch, f"area_{area}", room)
    return room[:num_bytes]
