"""Shapes that the benchmark of the kernels runs, in code and from a file of JSON lines."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from benchmarks.options import read_objects
from benchmarks.record import UsageError
from kvstore_kernels import RowFormat, dsv4_format, fp8_ds_mla_format, kv_format, latent_format

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN, QUANTISED = ("latent", "kv"), ("fp8_ds_mla", "dsv4")
FORMATS_OF = {
    "write_rows": PLAIN + QUANTISED,
    "gather_rows": PLAIN + QUANTISED,
    "mla_decode": ("latent", *QUANTISED),
    "gqa_decode": ("kv",),
    "sparse_mla_decode": ("latent", *QUANTISED),
    "decode_step": ("kv",),
    "copy_blocks": ("latent",),
    "pack_blocks": ("latent",),
}
"""Op -> the formats whose results can be checked. decode_step: write_rows of a token for each sequence + gqa_decode."""
READS = ("mla_decode", "gqa_decode", "sparse_mla_decode", "decode_step")
ROPE = 64
"""Columns of a latent row behind those that V has too."""
LISTED = 2048
"""Rows that a query of sparse_mla_decode lists at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One op on tensors of one size.

    Attributes:
        op, format: of FORMATS_OF.
        rows: of one sequence, a multiple of `rows_per_block`.
        num_seqs: sequences.
        num_heads: query heads of a read.
        rows_per_block, stride: rows of a page, and pages from one block to the next (1: dense pages).
        kv_heads, head_dim, dtype: of plain rows. Latent rows have one head of `head_dim` columns, V all but 64 of them.
    """

    op: str
    format: str
    rows: int
    num_seqs: int = 1
    num_heads: int = 16
    rows_per_block: int = 64
    stride: int = 1
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        formats = FORMATS_OF.get(self.op, ()) if isinstance(self.op, str) else ()
        dtypes = ("bf16",) if self.format in QUANTISED else tuple(DTYPES)
        for name, known in (("op", tuple(FORMATS_OF)), ("format", formats), ("dtype", dtypes)):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name}: expected a whole number of at least 1, got {value!r}")
        if self.rows % self.rows_per_block:
            raise ValueError(f"rows: expected a multiple of rows_per_block = {self.rows_per_block}, got {self.rows}")
        if self.format == "latent" and self.head_dim <= ROPE:
            raise ValueError(f"head_dim: expected more than the {ROPE} columns without V, got {self.head_dim}")
        if self.op in ("gqa_decode", "decode_step") and self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads: expected a multiple of kv_heads = {self.kv_heads}, got {self.num_heads}")
        if self.op in ("copy_blocks", "pack_blocks") and self.num_rows // self.rows_per_block < 2:
            raise ValueError(f"rows: expected at least two blocks of {self.rows_per_block}, got {self.num_rows}")

    @property
    def num_rows(self) -> int:
        """Of all sequences."""
        return self.num_seqs * self.rows

    @property
    def row_format(self) -> RowFormat:
        """The format by its name."""
        if self.format == "kv":
            return kv_format(self.kv_heads, self.head_dim, dtype=DTYPES[self.dtype])
        if self.format == "latent":
            return latent_format(self.head_dim, self.head_dim - ROPE, DTYPES[self.dtype])
        return fp8_ds_mla_format() if self.format == "fp8_ds_mla" else dsv4_format()

    @property
    def name(self) -> str:
        """The shape in words, with what is not the usual."""
        rows = (
            f"{self.num_seqs} x {self.rows:,} rows" if self.num_seqs > 1 or self.op in READS else f"{self.rows:,} rows"
        )
        words = [self.op, self.format if self.format in QUANTISED else f"{self.format} {self.dtype}", rows]
        if self.op in READS:
            words.append(f"{self.num_heads} heads")
        if self.format in PLAIN and (self.kv_heads, self.head_dim) != USUAL[self.format]:
            words.append(f"{self.kv_heads} x {self.head_dim}" if self.format == "kv" else f"{self.head_dim} columns")
        words += [f"{self.rows_per_block} a block"] if self.rows_per_block != 64 else []
        words += [f"stride {self.stride} pages"] if self.stride > 1 else []
        return ", ".join(words)


USUAL = {"kv": (8, 128), "latent": (1, 576)}
LATENT = {"format": "latent", "kv_heads": 1, "head_dim": 576}


def default_shapes(quick: bool, on_gpu: bool) -> list[Shape]:
    """Moves of up to more bytes than a last cache holds, and reads as long as the device is made for."""
    if quick:
        moved, seqs, rows, quantised = [1024, 8192], 2, 512, 512
    else:
        moved, seqs, rows, quantised = [1024, 8192, 65_536, 262_144], 8, 1024, 16_384
    if on_gpu and not quick:
        seqs, rows, quantised = 64, 8192, 262_144
    heads = {"num_heads": 16}
    return [
        *(Shape(op, rows=size, **LATENT) for op in ("write_rows", "gather_rows") for size in moved),
        *(Shape(op, "kv", size // 2) for op in ("write_rows", "gather_rows") for size in moved[1:3]),
        *(Shape(op, rows=moved[-2], stride=4, **LATENT) for op in ("write_rows", "gather_rows")),
        *(Shape(op, name, quantised) for op in ("write_rows", "gather_rows") for name in QUANTISED),
        Shape("mla_decode", rows=rows, num_seqs=seqs, **LATENT, **heads),
        Shape("mla_decode", rows=8 * rows, **LATENT, **heads),
        Shape("mla_decode", "fp8_ds_mla", rows, seqs, **heads),
        *(Shape("sparse_mla_decode", rows=4 * rows, num_seqs=each, **LATENT, **heads) for each in (2, 8)),
        Shape("gqa_decode", "kv", rows // 4, seqs, num_heads=32),
        Shape("gqa_decode", "kv", rows, seqs, num_heads=32),
        *(Shape("decode_step", "kv", each, seqs, num_heads=32) for each in (rows // 4, rows)),
        *(Shape(op, rows=size, **LATENT) for op in ("copy_blocks", "pack_blocks") for size in moved[:3][-2:]),
    ]


def read_shapes(path: str) -> list[Shape]:
    """The shapes of a file, a JSON object with the fields of Shape on each line.

    Raises: UsageError that names the file, the line and what is wrong in it.
    """
    what = f"a JSON object with {_known()}"
    return [_shape(record, where) for record, where in read_objects(path, "--shapes", what)]


def _shape(record: dict[str, Any], where: str) -> Shape:
    if unknown := record.keys() - {field.name for field in fields(Shape)}:
        raise UsageError(f"{where}: expected fields out of {_known()}, got {', '.join(sorted(unknown))}")
    if missing := {"op", "format", "rows"} - record.keys():
        raise UsageError(f"{where}: expected the fields op, format and rows, got none of {', '.join(sorted(missing))}")
    if record["format"] == "latent":
        record = {**LATENT, **record}
    try:
        return Shape(**record)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from error


def _known() -> str:
    return ", ".join(field.name for field in fields(Shape))


def to_lines(shapes: Sequence[Shape]) -> str:
    """What `read_shapes` reads."""
    return "".join(json.dumps(asdict(shape)) + "\n" for shape in shapes)
