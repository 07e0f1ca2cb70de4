"""What a latent row is to a read: one or two runs of columns, each taken as one tile of numbers, and which are V.

latent:       | first: 512 bf16            | second: 64 bf16 |    V: the first
fp8_ds_mla:   | first: 512 e4m3 x 4 fp32   | second: 64 bf16 |    V: the first
dsv4:         | first: 448 e4m3 x 7 UE8M0  | second: 64 bf16 |    V: both
nvfp4_latent: | first: 512 e2m1 x 32 e4m3  |                      V: the first
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvstore_kernels.formats import ROW_DTYPES, RowPart
from kvstore_kernels.launch import INTERPRETED, Target
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_reads import PERMUTED, ValuePart, expect_scales, value_parts
from kvstore_kernels.quant_rules import RowScale
from kvstore_kernels.reads import expect_latent
from kvstore_kernels.splits import ReadTile, latent_tile, padded, quantised_latent_tile

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODE_BITS = {"e4m3": 8, "int8": 8, "ue8m0": 8, "e2m1": 4}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The dtype of words of so many bytes, which hold codes."""


class Run(NamedTuple):
    """Values of a row that lie one behind the other, as a compile-time argument: `width` of a tile of `tile`.

    `kind` is one of FLOATS, an element a word, or of CODE_BITS, `per_word` codes of `bits` bits in a word. Words are
    of `size` bytes; `offset` in a page and `pitch` of rows count words. A tile has `tile_words`, of which `num_words`
    are read. `column`: of the row, the first of these; 0 for scales.
    """

    kind: str
    bits: int
    size: int
    per_word: int
    offset: int
    pitch: int
    num_words: int
    tile_words: int
    column: int
    width: int
    tile: int
    is_permuted: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the words."""
        return FLOATS.get(self.kind, WORDS[self.size])


@dataclass(frozen=True, slots=True)
class LatentRow:
    """K is all `latent_dim` columns, V the first `value_dim`; `second` is None for a row of one run of columns.

    Scales are None where columns have none in the row; `is_scaled_outside`: one scale serves all rows.
    `query_dtypes`: those that queries may have, which are those of the products.
    """

    latent_dim: int
    value_dim: int
    first: Run
    first_scales: Run | None
    second: Run | None
    second_scales: Run | None
    is_scaled_outside: bool
    query_dtypes: tuple[torch.dtype, ...]

    @property
    def is_quantised(self) -> bool:
        """Whether the rows hold codes."""
        return len(self.query_dtypes) > 1

    @property
    def columns(self) -> tuple[Run, ...]:
        """The one or two runs of columns."""
        return (self.first,) if self.second is None else (self.first, self.second)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a row in a tile as it is loaded, scales too."""
        runs = (self.first, self.first_scales, self.second, self.second_scales)
        return sum(run.tile_words * run.size for run in runs if run is not None)

    def key(self, q: object) -> RowPart:
        """A row as K, in the dtype of `q` where that may read these rows."""
        dtype = q.dtype if isinstance(q, torch.Tensor) and q.dtype in self.query_dtypes else self.query_dtypes[0]
        return RowPart("row", dtype, 1, self.latent_dim)


def latent_row(view: PageView) -> LatentRow:
    """How the rows of a view are read.

    Raises: TypeError when `view` is no PageView, ValueError when its rows are neither plain nor quantised latent rows.
    """
    if not isinstance(view, PageView) or not view.format.quantised or view.format.value_dim is None:
        latent, value_dim = expect_latent(view)
        query_dtypes: tuple[torch.dtype, ...] = (latent.dtype,)
    else:
        value_dim, query_dtypes = view.format.value_dim, ROW_DTYPES
    parts = value_parts(view, quantised=False)
    if len(parts) == 2 and any(part.scale_kind == "outside" for part in parts):
        raise ValueError(
            f"view: expected one part of values where their scale lies outside the cache, "
            f"got two in format {view.format.name!r}"
        )
    part = parts[0]
    if len(parts) == 1 and part.scales is None and part.values_per_element == 1 and value_dim < part.width:
        ranges = [(part, 0, value_dim), (part, value_dim, part.width)]
    else:
        ranges = [(part, 0, part.width) for part in parts]
    columns, scales = [_columns(view, *each) for each in ranges], [_scales(view, each[0]) for each in ranges]
    return LatentRow(
        latent_dim=sum(part.width for part in parts),
        value_dim=value_dim,
        first=columns[0],
        first_scales=scales[0],
        second=columns[1] if len(columns) == 2 else None,
        second_scales=scales[1] if len(scales) == 2 else None,
        is_scaled_outside=part.scale_kind == "outside",
        query_dtypes=query_dtypes,
    )


def outside_scale_of(view: PageView, row_scales: Sequence[RowScale] | RowScale | None) -> RowScale:
    """The scale outside the cache of a view's rows; 1.0 where there is none.

    Raises: ValueError or TypeError unless there is one for rows that have it outside, and None for others.
    """
    return expect_scales(view, value_parts(view, quantised=False), row_scales)[0]


def outside_scales_of(views: Sequence[PageView], row_scales: Sequence[RowScale] | RowScale | None) -> list[RowScale]:
    """The same for several views: those whose rows have their scale outside share it.

    Raises: as `outside_scale_of`; `row_scales` must be None where no rows have their scale outside.
    """
    outside = [any(part.scale_kind == "outside" for part in value_parts(view, quantised=False)) for view in views]
    if row_scales is not None and not any(outside):
        return [outside_scale_of(view, row_scales) for view in views]  # which says what is wrong
    return [outside_scale_of(view, row_scales if own else None) for view, own in zip(views, outside, strict=True)]


def row_args(row: LatentRow, view: PageView, row_scale: RowScale) -> dict[str, torch.Tensor | float | None]:
    """The run-time arguments of a read of latent rows: the memory, and the scale outside the cache.

    The memory is passed once for each type of word, because a pointer that changes its type in a kernel costs
    registers on AMD chips.
    """
    is_tensor = isinstance(row_scale, torch.Tensor)
    return {
        "first_ptr": _words(view, row.first),
        "first_scales_ptr": _words(view, row.first_scales),
        "second_ptr": _words(view, row.second),
        "second_scales_ptr": _words(view, row.second_scales),
        "row_scale_ptr": row_scale if is_tensor else None,
        "row_scale": 1.0 if is_tensor else row_scale,
    }


def row_constexprs(row: LatentRow) -> dict[str, Any]:
    """The compile-time arguments that describe a row."""
    return {
        "LATENT_DIM": row.latent_dim,
        "VALUE_DIM": row.value_dim,
        "FIRST": row.first,
        "FIRST_SCALES": row.first_scales,
        "SECOND": row.second,
        "SECOND_SCALES": row.second_scales,
        "SECOND_IS_VALUE": row.second is not None and row.second.column < row.value_dim,
        "IS_SCALED_OUTSIDE": row.is_scaled_outside,
        "INTERPRETED": INTERPRETED,
    }


def row_tile(row: LatentRow, num_heads: int, element_bytes: int, rows_per_block: int, target: Target) -> ReadTile:
    """The tile for `num_heads` heads that share the rows, and products of elements of that size."""
    if not row.is_quantised:
        return latent_tile(target, num_heads, row.latent_dim, row.value_dim, element_bytes, rows_per_block)
    tile_columns = [run.tile for run in row.columns]
    return quantised_latent_tile(target, num_heads, tile_columns, row.tile_bytes, element_bytes, rows_per_block)


def _words(view: PageView, run: Run | None) -> torch.Tensor | None:
    if run is None:
        return None
    memory, size = view.memory, run.dtype.itemsize
    return memory[: memory.numel() // size * size].view(run.dtype)


def _columns(view: PageView, part: ValuePart, begin: int, end: int) -> Run:
    """The columns `begin` ... `end` - 1 of a part."""
    width = end - begin
    run = _run(view, part.part, part.kind, begin, width, padded(width))
    return run._replace(column=part.column + begin, width=width)


def _scales(view: PageView, part: ValuePart) -> Run | None:
    scales = part.scales
    if scales is None:
        return None
    tile = 1 if scales.head_dim == 1 else padded(part.width) // part.quant_tile
    # Bytes behind the scales in the same record are read along, so that one access takes them all.
    fits = scales.offset_bytes + tile * scales.dtype.itemsize <= view.format.area_pitches[scales.area]
    run = _run(view, scales, part.scale_kind, 0, tile if fits else scales.head_dim, tile)
    return run._replace(width=scales.head_dim, is_permuted=view.format.name == PERMUTED)


def _run(view: PageView, part: RowPart, kind: str, begin: int, width: int, tile: int) -> Run:
    """`width` values of a part, from number `begin` on, of a tile of `tile`."""
    bits, size = CODE_BITS.get(kind, 0), part.dtype.itemsize
    page_start = view.format.area_offset_bytes(part.area, view.rows_per_block) + part.offset_bytes
    start, pitch = page_start + begin * size, view.format.area_pitches[part.area]
    if bits:
        size = math.gcd(4, start, pitch, width * bits // 8, tile * bits // 8, view.memory.storage_offset())
    per_word = 8 * size // bits if bits else 1
    return Run(
        kind=kind,
        bits=bits,
        size=size,
        per_word=per_word,
        offset=start // size,
        pitch=pitch // size,
        num_words=width // per_word,
        tile_words=tile // per_word,
        column=0,
        width=width,
        tile=tile,
        is_permuted=False,
    )
