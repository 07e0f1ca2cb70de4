"""warm_up: every kernel variant that an engine will launch, compiled and loaded before a CUDA graph is captured.

The first launch of a variant compiles it and loads it onto the device, which stalls a step and breaks a capture. Here
every op is launched once for each way it is compiled, with arguments that name no row: slots and tables of -1. Nothing
is written into the pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kvstore_kernels.attention_ops import gqa_decode, mla_decode, sparse_mla_decode
from kvstore_kernels.block_ops import (
    compute_slot_mapping,
    copy_blocks,
    fill_blocks,
    pack_blocks,
    unpack_blocks,
    write_layers,
)
from kvstore_kernels.checks import expect_int
from kvstore_kernels.copy import layer_table
from kvstore_kernels.formats import ROW_DTYPES, RowFormat, dtype_name
from kvstore_kernels.index_checks import index_checks
from kvstore_kernels.ops import gather_rows, read_rows, write_rows
from kvstore_kernels.pages import PageView
from kvstore_kernels.pieces import is_movable
from kvstore_kernels.quant_reads import value_shapes
from kvstore_kernels.quant_rules import is_quantising
from kvstore_kernels.reads import expect_window
from kvstore_kernels.score_ops import indexer_scores


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layout of pages, and what of the rows the ops take."""

    view: PageView
    dtype: torch.dtype
    backend: str | None

    @property
    def row_format(self) -> RowFormat:
        return self.view.format

    @property
    def is_read(self) -> bool:
        """Whether the rows are numbers, and not bytes or states that only their owner knows."""
        return is_quantising(self.row_format) if self.row_format.quantised else is_movable(self.row_format)

    @property
    def scales(self) -> list[tuple[float | torch.Tensor, ...] | None]:
        """The kinds of scales outside the cache: numbers, and tensors."""
        outside = [entry for entry in self.row_format.quantised if entry.scales is None]
        if not outside:
            return [None]
        return [(1.0,) * len(outside), (self.made(1, dtype=torch.float32),) * len(outside)]

    @property
    def sources(self) -> list[list[torch.Tensor]]:
        """One new row in each of the ways it may come."""
        shapes = [shape[1:] for shape in value_shapes(self.view, 1)]
        dtypes = [self.dtype] * len(shapes)
        if not self.row_format.quantised:
            dtypes = [part.dtype for part in self.row_format.parts]
            shapes = [(part.num_heads, part.head_dim) for part in self.row_format.parts]
        whole = [self.made(1, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if len(whole) > 1 or not 0 < (nope := self._nope_columns()) < whole[0].shape[2]:
            return [whole]
        width = whole[0].shape[2]
        return [whole, [self.made(1, 1, columns, dtype=dtypes[0]) for columns in (nope, width - nope)]]

    def _nope_columns(self) -> int:
        """The columns that may come as a tensor of their own, 0 for none."""
        if self.row_format.value_dim is None:
            return 0
        scales = {entry.scales for entry in self.row_format.quantised}
        first, *others = [part for part in self.row_format.parts if part.name not in scales]
        return first.head_dim if others else self.row_format.value_dim

    def made(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device of the pages."""
        return torch.zeros(shape, dtype=dtype, device=self.view.device)

    def absent(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Slots, blocks or table entries that name nothing."""
        return torch.full(shape, -1, dtype=dtype, device=self.view.device)


def warm_up(
    views: Sequence[PageView],
    *,
    num_heads: Sequence[int] = (),
    num_queries: Sequence[int] = (1,),
    windows: Sequence[int | None] = (None,),
    soft_cap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    tokens_per_row: Sequence[int] = (1,),
    backend: str | None = None,
) -> int:
    """Compiles and loads the kernel variants that steps over these pages launch. Call it before capturing a graph.

    Strides, batch, table width, number of splits, softmax scale and length of a window make no variants: what counts
    is the row format, the rows per block and what is named here. Indices, lengths and scales may lie anywhere. What
    else would make a variant, a step should not do: new rows, queries or outputs that do not start at 16-byte
    boundaries or whose rows are no multiples of 16 bytes apart, unless that is so in a row itself; scales of which
    some are numbers and some tensors; partial results merged into fp32; plain rows read as another dtype than `dtype`.

    Args:
        views: pages of the layers; equal layouts are warmed once.
        num_heads: query heads of the reads, for each number that the engine uses on these views; none: no reads with
            attention. Views whose heads do not divide a number are passed over.
        num_queries: queries per sequence of the reads.
        windows: what `gqa_decode` gets: None, a window, or both where layers differ.
        soft_cap, sinks: what the reads get.
        dtype: of new rows and queries where rows are quantised.
        tokens_per_row: of the layers, for their slot mappings (1, and more for compressed caches).
        backend: as `write_rows`; the reference has nothing to compile.

    Returns: how many calls were made.

    Raises: ValueError or TypeError for a view that is none, numbers below 1, or another dtype.
    """
    if not isinstance(views, list | tuple):
        raise TypeError(f"views: expected a list or tuple of PageViews, got {type(views).__name__}")
    for view in views:
        if not isinstance(view, PageView):
            raise TypeError(f"views: expected PageViews, got {type(view).__name__}")
    for name, numbers in (("num_heads", num_heads), ("num_queries", num_queries), ("tokens_per_row", tokens_per_row)):
        for number in _expect_several(name, numbers):
            expect_int(name, number, 1)
    for window in _expect_several("windows", windows):
        expect_window(window)
    if dtype not in ROW_DTYPES:
        raise ValueError(f"dtype: expected {' or '.join(map(dtype_name, ROW_DTYPES))}, got {dtype}")
    layouts = {(view.device, view.format, view.rows_per_block): view for view in views}
    layers = [_Layer(view, dtype, backend) for view in layouts.values()]
    wraps = (False, True)[: 1 + any(window is not None for window in windows)]
    with index_checks(False):
        return sum(
            sum(1 for _ in calls)
            for layer in layers
            for calls in (
                _moves(layer, wraps),
                _slot_mappings(layer, wraps, tokens_per_row),
                _blocks(layer),
                _reads(layer, num_heads, num_queries, windows, soft_cap, sinks),
            )
        )


def _expect_several(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name}: expected a list or tuple, got {values!r}")
    return values


def _moves(layer: _Layer, wraps: Sequence[bool]) -> Iterator[None]:
    view, backend = layer.view, layer.backend
    if not layer.is_read:
        return
    slots, table = layer.absent(1), layer.absent(1, 1, dtype=torch.int32)
    for parts, scales in product(layer.sources, layer.scales):
        write_rows(view, slots, *parts, row_scales=scales, backend=backend)
        yield
        stacked = [part[None] for part in parts]
        write_layers([view], slots, *stacked, row_scales=scales, backend=backend)
        yield
    lens = torch.arange(2, dtype=torch.int32, device=view.device)
    starts = (None, layer.made(1, dtype=torch.int32))
    kinds = layer.scales if view.format.quantised else [None]
    for start, columns_wrap, scales in product(starts, wraps, kinds):
        options = {"dtype": layer.dtype, "row_scales": scales} if view.format.quantised else {}
        gather_rows(
            view,
            table,
            lens,
            num_rows=1,
            start=start,
            wraps=columns_wrap,
            backend=backend,
            **options,  # type: ignore[arg-type]
        )
        yield
    for scales in layer.scales:
        read_rows(view, slots, dtype=layer.dtype, row_scales=scales, backend=backend)
        yield


def _slot_mappings(layer: _Layer, wraps: Sequence[bool], tokens_per_row: Sequence[int]) -> Iterator[None]:
    if not layer.is_read:
        return
    rows, table = layer.view.rows_per_block, layer.absent(1, 1, dtype=torch.int32)
    for columns_wrap, tokens, dtype in product(wraps, tokens_per_row, (torch.int64, torch.int32)):
        positions, seqs = layer.absent(1, dtype=dtype), layer.made(1, dtype=torch.int32)
        compute_slot_mapping(table, positions, seqs, rows * tokens, tokens, rows, columns_wrap, backend=layer.backend)
        yield


def _blocks(layer: _Layer) -> Iterator[None]:
    table, ids, backend = layer_table([layer.view]), layer.absent(1), layer.backend
    copy_blocks(table, ids, ids, backend=backend)
    yield
    fill_blocks(table, ids, 0, backend=backend)
    yield
    unpack_blocks(table, ids, pack_blocks(table, ids, backend=backend), backend=backend)
    yield


def _reads(
    layer: _Layer,
    num_heads: Sequence[int],
    num_queries: Sequence[int],
    windows: Sequence[int | None],
    soft_cap: float | None,
    sinks: bool,
) -> Iterator[None]:
    view, backend, row_format = layer.view, layer.backend, layer.view.format
    if not layer.is_read:
        return
    names = [part.name for part in row_format.parts]
    is_latent, is_kv = row_format.value_dim is not None, {"k", "v"} <= set(names)
    kv_heads = row_format.parts[0].num_heads
    table = layer.absent(1, 1, dtype=torch.int32)
    q_dtype = layer.dtype if row_format.quantised else row_format.parts[0].dtype
    columns = value_shapes(view, 1)[0][2]
    for heads, queries, scales in product(num_heads, num_queries, layer.scales):
        if heads % kv_heads:
            continue
        axes = (1, heads, columns) if queries == 1 else (1, queries, heads, columns)
        q, lens = layer.made(*axes, dtype=q_dtype), layer.made(1, dtype=torch.int32)
        sink = layer.made(heads, dtype=torch.float32) if sinks else None
        for splits in (1, 2):
            if is_kv:
                for window in windows:
                    gqa_decode(
                        view,
                        table,
                        lens,
                        q,
                        window=window,
                        soft_cap=soft_cap,
                        sinks=sink,
                        row_scales=scales,
                        num_splits=splits,
                        backend=backend,
                    )
                    yield
            elif is_latent:
                mla_decode(
                    view,
                    table,
                    lens,
                    q,
                    softmax_scale=1.0,
                    sinks=sink,
                    row_scales=scales,
                    num_splits=splits,
                    backend=backend,
                )
                yield
        if is_latent and queries == 1:
            for slots, splits in product((layer.absent(1, 1), layer.absent(1, 1, dtype=torch.int32)), (1, 2)):
                sparse_mla_decode(
                    view,
                    slots,
                    q,
                    softmax_scale=1.0,
                    sinks=sink,
                    row_scales=scales,
                    num_splits=splits,
                    backend=backend,
                )
                yield
        if not is_kv and not is_latent and kv_heads == 1:
            weights = layer.made(*axes[:-1], dtype=torch.float32)
            indexer_scores(view, table, lens, q, weights, backend=backend)
            yield
