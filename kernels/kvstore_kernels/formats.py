"""RowFormat: the bytes of one cached row, as data.

A page of R rows is a sequence of areas, each holding one record of every row:

    | area 0: R x area_pitches[0] | area 1: R x area_pitches[1] | ... | padding to page_alignment |

One area is a row-interleaved format (a latent row; K and V in one row). Several areas keep things apart: K and V
pages, or payload and scales. A reader or writer needs nothing but this record to find a byte. The formats by name are
in `quantised`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from kvstore_kernels.checks import cdiv, expect_int, round_up

ALIGNMENT_BYTES = 16
"""Pages, block strides and offsets are multiples of it, so that a GPU lane can move 16 bytes."""

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
"""Rows of these are codes: a scale outside the cache turns them into values."""

SCALE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "fp32_pow2": torch.float32, "ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
)
"""How scales may be encoded -> the dtype of a part that holds them."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: object) -> torch.dtype:
    """ "bfloat16" -> `torch.bfloat16`. Raises ValueError for a name that is no torch dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected the name of a torch dtype such as 'bfloat16', got {name!r}")
    return dtype


@dataclass(frozen=True, slots=True)
class RowPart:
    """One named piece of a row: `num_heads` vectors of `head_dim` elements, `head_pitch_bytes` apart.

    `offset_bytes` counts from the start of the row's record in area number `area`. Without a pitch the vectors lie one
    behind the other; with one, other parts may lie between them. `shape` is set for a part that is no matrix of heads,
    such as a recurrent state: its dimensions in one row, dense, the last one fastest.

    Raises: TypeError for a dtype that is none, a shape that is no tuple, a number that is no integer; ValueError for
        a number out of range, an offset or pitch that is no multiple of the element, and a shape of another size.
    """

    name: str
    dtype: torch.dtype
    num_heads: int
    head_dim: int
    area: int = 0
    offset_bytes: int = 0
    head_pitch_bytes: int | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"RowPart {self.name!r}: dtype: expected a torch.dtype, got {self.dtype!r}")
        for field, minimum in (("num_heads", 1), ("head_dim", 1), ("area", 0), ("offset_bytes", 0)):
            expect_int(f"RowPart {self.name!r}: {field}", getattr(self, field), minimum)
        if self.head_pitch_bytes is not None:
            expect_int(f"RowPart {self.name!r}: head_pitch_bytes", self.head_pitch_bytes, self.head_bytes)
        for field in ("offset_bytes", "head_pitch_bytes"):
            if (getattr(self, field) or 0) % self.dtype.itemsize:
                raise ValueError(
                    f"RowPart {self.name!r}: {field}: expected a multiple of {self.dtype.itemsize}, "
                    f"the size of {self.dtype}, got {getattr(self, field)}"
                )
        if self.shape is not None:
            self._check_shape(self.shape)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if not isinstance(shape, tuple):
            raise TypeError(f"RowPart {self.name!r}: shape: expected a tuple, got {type(shape).__name__}")
        for size in shape:
            expect_int(f"RowPart {self.name!r}: shape", size, 1)
        if not shape or math.prod(shape) != self.width:
            raise ValueError(
                f"RowPart {self.name!r}: shape: expected dimensions of {self.width} elements, "
                f"num_heads * head_dim, got {shape}"
            )
        if self.head_pitch_bytes is not None:
            raise ValueError(
                f"RowPart {self.name!r}: head_pitch_bytes: expected None beside a shape, got {self.head_pitch_bytes}"
            )

    @property
    def width(self) -> int:
        """Elements of this part in one row."""
        return self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of this part in one row, those of other parts between its heads not counted."""
        return self.width * self.dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's vector."""
        return self.head_dim * self.dtype.itemsize

    @property
    def pitch_bytes(self) -> int:
        """Bytes from one head's vector to the next: `head_pitch_bytes`, or `head_bytes` where there is none."""
        return self.head_bytes if self.head_pitch_bytes is None else self.head_pitch_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from the first of this part to the end of its last head; more than `num_bytes` between other parts."""
        return (self.num_heads - 1) * self.pitch_bytes + self.head_bytes

    @property
    def is_dense(self) -> bool:
        """Whether the part is one run of bytes, [num_heads, head_dim] as most kernels take it."""
        return self.shape is None and self.span_bytes == self.num_bytes

    def runs(self) -> list[tuple[int, int]]:
        """The (start, end) of every run of adjacent bytes in the record, in ascending order."""
        if self.span_bytes == self.num_bytes:
            return [(self.offset_bytes, self.offset_bytes + self.num_bytes)]
        starts = (self.offset_bytes + head * self.pitch_bytes for head in range(self.num_heads))
        return [(start, start + self.head_bytes) for start in starts]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Which part holds codes, and which the scales that turn them into values; `value = code * scale`.

    One scale covers `quant_tile` values of one head, the first tile at its first value; a last tile may be short.
    `scales` is None when one scale serves all rows and lies outside the cache. `encoding` is a key of `SCALE_DTYPES`:
    any fp32, fp32 that is a power of two, the biased exponent of a power of two (ue8m0), or e4m3.
    `values_per_element` is 2 where two e2m1 codes share a byte, the one of the lower index in the low nibble.

    Raises: TypeError for names that are no str or numbers that are no integers; ValueError for a number below 1 and an
        unknown encoding.
    """

    values: str
    scales: str | None
    quant_tile: int
    encoding: str
    values_per_element: int = 1

    def __post_init__(self) -> None:
        for field, known in (("values", (str,)), ("scales", (str, type(None))), ("encoding", (str,))):
            if not isinstance(getattr(self, field), known):
                got = type(getattr(self, field)).__name__
                raise TypeError(f"Quantised: {field}: expected {' or '.join(t.__name__ for t in known)}, got {got}")
        for field in ("quant_tile", "values_per_element"):
            expect_int(f"Quantised: {field}", getattr(self, field), 1)
        if self.encoding not in SCALE_DTYPES:
            raise ValueError(f"Quantised: encoding: expected one of {', '.join(SCALE_DTYPES)}, got {self.encoding!r}")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of a row and of a page of rows; see the module's picture.

    `value_dim` is set for latent rows: their leading columns that are also read as V (MLA). The columns of a row are
    the values of its parts without scales, in order: those 512 of nope 448 and rope 64 may all be V, and 256 bytes of
    two codes each are 512 columns. `quantised` says which parts are codes. Formats are equal when every field is; two
    stores with different formats must not exchange bytes.

    Raises: TypeError for parts, pitches or quantised that are no tuples of RowPart, int and Quantised; ValueError for
        parts that overlap, leave their record, name an area that does not exist or are not in the order of their
        bytes, for an area without parts, for a value_dim of rows with several heads or fewer columns, and for
        quantised parts that do not exist, occur twice or have another number or dtype of scales.
    """

    name: str
    parts: tuple[RowPart, ...]
    area_pitches: tuple[int, ...]
    page_alignment: int = ALIGNMENT_BYTES
    value_dim: int | None = None
    quantised: tuple[Quantised, ...] = ()

    def __post_init__(self) -> None:
        for field in ("parts", "area_pitches", "quantised"):
            if not isinstance(getattr(self, field), tuple):
                got = type(getattr(self, field)).__name__
                raise TypeError(f"RowFormat {self.name!r}: {field}: expected a tuple, got {got}")
        for part in self.parts:
            if not isinstance(part, RowPart):
                raise TypeError(f"RowFormat {self.name!r}: parts: expected RowPart, got {type(part).__name__}")
        if not self.parts:
            raise ValueError(f"RowFormat {self.name!r}: parts: expected at least one, got none")
        if len({part.name for part in self.parts}) != len(self.parts):
            names = [part.name for part in self.parts]
            raise ValueError(f"RowFormat {self.name!r}: parts: expected distinct names, got {names}")
        for pitch in self.area_pitches:
            expect_int(f"RowFormat {self.name!r}: area pitch", pitch, 1)
        alignment = expect_int(f"RowFormat {self.name!r}: page_alignment", self.page_alignment, 1)
        if alignment % ALIGNMENT_BYTES:
            raise ValueError(
                f"RowFormat {self.name!r}: page_alignment: expected a multiple of {ALIGNMENT_BYTES}, got {alignment}"
            )
        self._check_parts()
        self._check_overlap()
        self._check_quantised()
        if self.value_dim is not None:
            self._check_value_dim(self.value_dim)

    def _check_parts(self) -> None:
        places = [(part.area, part.offset_bytes) for part in self.parts]
        if places != sorted(places):
            raise ValueError(
                f"RowFormat {self.name!r}: parts: expected them in the order of (area, offset_bytes), got {places}"
            )
        for part in self.parts:
            if part.area >= len(self.area_pitches):
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r}: expected an area below {len(self.area_pitches)}, "
                    f"got {part.area}"
                )
            pitch, end = self.area_pitches[part.area], part.offset_bytes + part.span_bytes
            if end > pitch:
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r} ends at byte {end}, "
                    f"behind the record of {pitch} bytes"
                )
            if pitch % part.dtype.itemsize:
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r} of {part.dtype} in an area with a pitch of "
                    f"{pitch} bytes: expected a multiple of {part.dtype.itemsize}"
                )
        empty = set(range(len(self.area_pitches))) - {part.area for part in self.parts}
        if empty:
            raise ValueError(
                f"RowFormat {self.name!r}: area_pitches: expected parts in every area, got none in {min(empty)}"
            )

    def _check_overlap(self) -> None:
        runs = sorted((part.area, start, end, part.name) for part in self.parts for start, end in part.runs())
        for (area, _, end, _), (next_area, start, _, name) in pairwise(runs):
            if area == next_area and start < end:
                raise ValueError(
                    f"RowFormat {self.name!r}: part {name!r} starts at byte {start}, "
                    f"inside the part before it, which ends at {end}"
                )

    def _check_quantised(self) -> None:
        where = f"RowFormat {self.name!r}: quantised"
        for entry in self.quantised:
            if not isinstance(entry, Quantised):
                raise TypeError(f"{where}: expected Quantised, got {type(entry).__name__}")
        used = [name for entry in self.quantised for name in (entry.values, entry.scales) if name is not None]
        parts = {part.name: part for part in self.parts}
        for name in used:
            if name not in parts:
                raise ValueError(f"{where}: expected the name of a part ({', '.join(parts)}), got {name!r}")
        if len(set(used)) != len(used):
            raise ValueError(f"{where}: expected every part at most once, as values or as scales, got {used}")
        for entry in self.quantised:
            if entry.scales is None:
                continue
            values, scales = parts[entry.values], parts[entry.scales]
            if scales.dtype != SCALE_DTYPES[entry.encoding]:
                raise ValueError(
                    f"{where}: scales {scales.name!r}: expected {SCALE_DTYPES[entry.encoding]}, "
                    f"the dtype of {entry.encoding}, got {scales.dtype}"
                )
            num_values = values.head_dim * entry.values_per_element
            wanted = (values.num_heads, cdiv(num_values, entry.quant_tile))
            if (scales.num_heads, scales.head_dim) != wanted:
                raise ValueError(
                    f"{where}: scales {scales.name!r}: expected heads and scales per head {wanted}, one scale for "
                    f"{entry.quant_tile} of {num_values} values, got {(scales.num_heads, scales.head_dim)}"
                )

    def _check_value_dim(self, value_dim: int) -> None:
        scales = {entry.scales for entry in self.quantised}
        per_element = {entry.values: entry.values_per_element for entry in self.quantised}
        latent = [part for part in self.parts if part.name not in scales]
        columns = sum(part.width * per_element.get(part.name, 1) for part in latent)
        expect_int(f"RowFormat {self.name!r}: value_dim", value_dim, 1, columns)
        for part in latent:
            if part.num_heads != 1:
                which = "a first part" if part is latent[0] else "parts"
                raise ValueError(
                    f"RowFormat {self.name!r}: value_dim: expected {which} with one head, got {part.num_heads} heads"
                )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all areas."""
        return sum(self.area_pitches)

    def page_bytes(self, rows: int) -> int:
        """Bytes of a page of `rows` rows: all areas, rounded up to the page alignment."""
        return round_up(rows * self.row_bytes, self.page_alignment)

    def area_offset_bytes(self, area: int, rows: int) -> int:
        """Where area number `area` begins in a page of `rows` rows."""
        return rows * sum(self.area_pitches[:area])

    def part(self, name: str) -> RowPart:
        """The part of that name. Raises ValueError that lists the names there are."""
        for part in self.parts:
            if part.name == name:
                return part
        known = ", ".join(part.name for part in self.parts)
        raise ValueError(f"part: expected one of {known} (format {self.name!r}), got {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        fields = asdict(self)
        fields["parts"] = [
            {**part, "dtype": dtype_name(part["dtype"]), "shape": part["shape"] and list(part["shape"])}
            for part in fields["parts"]
        ]
        return {**fields, "area_pitches": list(self.area_pitches), "quantised": list(fields["quantised"])}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RowFormat":
        """The format that `to_dict` wrote. Raises ValueError or TypeError when the fields are not a format's."""
        for name in ("parts", "area_pitches"):
            if name not in fields:
                raise ValueError(f"RowFormat: expected the field {name!r}, got the fields {sorted(fields)}")
        return cls(
            **{
                **fields,
                "parts": tuple(_part_from_dict(part) for part in fields["parts"]),
                "area_pitches": tuple(fields["area_pitches"]),
                "quantised": tuple(Quantised(**entry) for entry in fields.get("quantised", ())),
            }
        )


def _part_from_dict(fields: Mapping[str, Any]) -> RowPart:
    part = dict(fields)
    shape = part.pop("shape", None)
    return RowPart(
        **{**part, "dtype": dtype_from_name(part.get("dtype")), "shape": None if shape is None else tuple(shape)}
    )


def kv_format(
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    packed: bool = False,
) -> RowFormat:
    """Rows of K and V, token-major (NHD).

    A page holds all K rows and behind them all V rows, each [rows, num_kv_heads, head_dim]; with `packed` it holds
    one row per token: K of all heads, then V of all heads. `head_dim_v` defaults to `head_dim`. Rows of an fp8 dtype
    are codes, K and V with one fp32 scale each outside the cache.

    Raises: TypeError or ValueError for numbers out of range, TypeError for a dtype that is none.
    """
    key = RowPart("k", dtype, num_kv_heads, head_dim)
    width_v = head_dim if head_dim_v is None else head_dim_v
    if packed:
        value = RowPart("v", dtype, num_kv_heads, width_v, area=0, offset_bytes=key.num_bytes)
        pitches: tuple[int, ...] = (key.num_bytes + value.num_bytes,)
    else:
        value = RowPart("v", dtype, num_kv_heads, width_v, area=1)
        pitches = (key.num_bytes, value.num_bytes)
    return RowFormat("kv_packed" if packed else "kv", (key, value), pitches, quantised=_scaled_outside(key, value))


def latent_format(latent_dim: int, value_dim: int, dtype: torch.dtype = torch.bfloat16) -> RowFormat:
    """One latent row per token (MLA): `value_dim` nope columns, then the rope columns; V is the nope columns.

    DeepSeek V2 / V3: latent_dim 576, value_dim 512. The row is replicated over tensor-parallel ranks. Rows of an fp8
    dtype are codes with one fp32 scale outside the cache.

    Raises: TypeError or ValueError for numbers out of range, TypeError for a dtype that is none.
    """
    expect_int("latent_dim", latent_dim, 1)
    expect_int("value_dim", value_dim, 1, latent_dim)
    latent = RowPart("latent", dtype, 1, latent_dim)
    return RowFormat("latent", (latent,), (latent.num_bytes,), value_dim=value_dim, quantised=_scaled_outside(latent))


def _scaled_outside(*parts: RowPart) -> tuple[Quantised, ...]:
    return tuple(Quantised(part.name, None, part.width, "fp32") for part in parts if part.dtype in FP8_DTYPES)
