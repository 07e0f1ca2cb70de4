"""RowFormat: the bytes of one cached row, as data.

A page of R rows is a sequence of areas, each holding one record of every row:

    | area 0: R x area_pitches[0] | area 1: R x area_pitches[1] | ... | padding to page_alignment |

One area is a row-interleaved format (a latent row; K and V in one row). Several areas keep things apart: K and V
pages, or payload and scales. A reader or writer needs nothing but this record to find a byte.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch

from kvstore_kernels.checks import expect_int, round_up

ALIGNMENT_BYTES = 16
"""Pages, block strides and offsets are multiples of it, so that a GPU lane can move 16 bytes."""

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """ "bfloat16" -> `torch.bfloat16`. Raises ValueError for a name that is no torch dtype."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected the name of a torch dtype such as 'bfloat16', got {name!r}")
    return dtype


@dataclass(frozen=True, slots=True)
class RowPart:
    """One named piece of a row: `num_heads` vectors of `head_dim` elements, one behind the other.

    `offset_bytes` counts from the start of the row's record in area number `area`.
    """

    name: str
    dtype: torch.dtype
    num_heads: int
    head_dim: int
    area: int = 0
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"RowPart {self.name!r}: dtype: expected a torch.dtype, got {self.dtype!r}")
        for field, minimum in (("num_heads", 1), ("head_dim", 1), ("area", 0), ("offset_bytes", 0)):
            expect_int(f"RowPart {self.name!r}: {field}", getattr(self, field), minimum)
        if self.offset_bytes % self.dtype.itemsize:
            raise ValueError(
                f"RowPart {self.name!r}: offset_bytes: expected a multiple of {self.dtype.itemsize}, "
                f"the size of {self.dtype}, got {self.offset_bytes}"
            )

    @property
    def width(self) -> int:
        """Elements of this part in one row."""
        return self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of this part in one row."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The layout of a row and of a page of rows; see the module's picture.

    `value_dim` is set for latent rows: their leading columns that are also read as V (MLA). Formats are equal when
    every field is; two stores with different formats must not exchange bytes.

    Raises: TypeError for parts or pitches that are no tuples of RowPart and int; ValueError for parts that overlap,
        leave their record, name an area that does not exist or are not in the order of their bytes, for an area
        without parts, and for a value_dim of rows with several heads.
    """

    name: str
    parts: tuple[RowPart, ...]
    area_pitches: tuple[int, ...]
    page_alignment: int = ALIGNMENT_BYTES
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for field in ("parts", "area_pitches"):
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
        if self.value_dim is not None:
            expect_int(f"RowFormat {self.name!r}: value_dim", self.value_dim, 1, self.parts[0].head_dim)
            if self.parts[0].num_heads != 1:
                raise ValueError(
                    f"RowFormat {self.name!r}: value_dim: expected a first part with one head, "
                    f"got {self.parts[0].num_heads} heads"
                )

    def _check_parts(self) -> None:
        places = [(part.area, part.offset_bytes) for part in self.parts]
        if places != sorted(places):
            raise ValueError(
                f"RowFormat {self.name!r}: parts: expected them in the order of (area, offset_bytes), got {places}"
            )
        ends = [0] * len(self.area_pitches)
        for part in self.parts:
            if part.area >= len(self.area_pitches):
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r}: expected an area below {len(self.area_pitches)}, "
                    f"got {part.area}"
                )
            if part.offset_bytes < ends[part.area]:
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r} starts at byte {part.offset_bytes}, "
                    f"inside the part before it, which ends at {ends[part.area]}"
                )
            ends[part.area] = part.offset_bytes + part.num_bytes
            if ends[part.area] > self.area_pitches[part.area]:
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r} ends at byte {ends[part.area]}, "
                    f"behind the record of {self.area_pitches[part.area]} bytes"
                )
            if self.area_pitches[part.area] % part.dtype.itemsize:
                raise ValueError(
                    f"RowFormat {self.name!r}: part {part.name!r} of {part.dtype} in an area with a pitch of "
                    f"{self.area_pitches[part.area]} bytes: expected a multiple of {part.dtype.itemsize}"
                )
        if 0 in ends:
            raise ValueError(
                f"RowFormat {self.name!r}: area_pitches: expected parts in every area, got none in {ends.index(0)}"
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
        fields["parts"] = [{**part, "dtype": dtype_name(part["dtype"])} for part in fields["parts"]]
        fields["area_pitches"] = list(self.area_pitches)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "RowFormat":
        """The format that `to_dict` wrote. Raises ValueError or TypeError when the fields are not a format's."""
        for name in ("parts", "area_pitches"):
            if name not in fields:
                raise ValueError(f"RowFormat: expected the field {name!r}, got the fields {sorted(fields)}")
        parts = tuple(RowPart(**{**part, "dtype": dtype_from_name(part.get("dtype"))}) for part in fields["parts"])
        return cls(**{**fields, "parts": parts, "area_pitches": tuple(fields["area_pitches"])})


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
    one row per token: K of all heads, then V of all heads. `head_dim_v` defaults to `head_dim`.
    """
    key = RowPart("k", dtype, num_kv_heads, head_dim)
    width_v = head_dim if head_dim_v is None else head_dim_v
    if packed:
        value = RowPart("v", dtype, num_kv_heads, width_v, area=0, offset_bytes=key.num_bytes)
        return RowFormat("kv_packed", (key, value), (key.num_bytes + value.num_bytes,))
    value = RowPart("v", dtype, num_kv_heads, width_v, area=1)
    return RowFormat("kv", (key, value), (key.num_bytes, value.num_bytes))


def latent_format(latent_dim: int, value_dim: int, dtype: torch.dtype = torch.bfloat16) -> RowFormat:
    """One latent row per token (MLA): `value_dim` nope columns, then the rope columns; V is the nope columns.

    DeepSeek V2 / V3: latent_dim 576, value_dim 512. The row is replicated over tensor-parallel ranks.
    """
    expect_int("latent_dim", latent_dim, 1)
    expect_int("value_dim", value_dim, 1, latent_dim)
    latent = RowPart("latent", dtype, 1, latent_dim)
    return RowFormat("latent", (latent,), (latent.num_bytes,), value_dim=value_dim)


FORMATS: Mapping[str, Callable[..., RowFormat]] = MappingProxyType(
    {
        "kv": kv_format,
        "kv_packed": lambda *args, **kwargs: kv_format(*args, **kwargs, packed=True),
        "latent": latent_format,
    }
)
"""Format name -> the function that makes the format for given heads, head sizes and dtype."""
