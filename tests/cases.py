"""Page views with hostile layout, rows of random bits, and a byte-level model of where rows lie.

Every page has canaries before, between and behind it: memory starts as noise or poison, and tests compare all of it.
"""

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvstore_kernels.formats import RowFormat, kv_format, latent_format
from kvstore_kernels.pages import PageView

BACKENDS = ("triton", "reference")
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 72, 80, 96, 128, 192, 576)
FORMAT_NAMES = ("kv", "kv_packed", "latent")
# Moves know element sizes, not dtypes: fp16 is bf16 to them.
DTYPES_AND_BLOCKS = tuple(
    pytest.param(dtype, rows, id=f"{dtype}-{rows}rows".removeprefix("torch."))
    for dtype, all_rows in (
        (torch.bfloat16, (1, 16, 48, 64, 784)),
        (torch.float32, (1, 48)),
        (torch.float16, (16,)),
    )
    for rows in all_rows
)

POISON = 0xFF
"""The byte that makes NaN of every float dtype."""


def make_format(name: str, head_dim: int, dtype: torch.dtype, num_heads: int = 2) -> RowFormat:
    """A format of that name: K and V of two heads, V half as wide; or a latent row with 3 / 4 of it nope columns."""
    if name == "latent":
        return latent_format(head_dim, head_dim * 3 // 4, dtype)
    return kv_format(num_heads, head_dim, head_dim // 2, dtype, packed=name == "kv_packed")


def make_view(
    row_format: RowFormat,
    rows_per_block: int = 16,
    num_blocks: int = 4,
    *,
    fill: int | None = None,
    offset_bytes: int = 48,
    gap_bytes: int = 80,
    seed: int = 0,
) -> PageView:
    """Pages `gap_bytes` apart, from `offset_bytes` on, in a memory of noise or of the byte `fill`; 32 bytes behind."""
    stride = row_format.page_bytes(rows_per_block) + gap_bytes
    memory = torch.empty(offset_bytes + num_blocks * stride + 32, dtype=torch.uint8)
    if fill is None:
        memory.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)))
    else:
        memory.fill_(fill)
    return PageView(memory, offset_bytes, stride, num_blocks, rows_per_block, row_format)


def sparse_memory(num_bytes: int) -> torch.Tensor:
    """Zero bytes that are backed by memory only where they are touched, more of them than the machine has."""
    map_noreserve = 0x4000  # Linux; a constant of the mmap module from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def random_parts(row_format: RowFormat, num_rows: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """For each part a tensor [num_rows, num_heads, head_dim] of random bits, NaNs of every kind among them."""
    generator = np.random.default_rng(seed)
    parts = tuple(torch.empty(num_rows, part.num_heads, part.head_dim, dtype=part.dtype) for part in row_format.parts)
    for part in parts:
        part_bytes = part.view(torch.uint8)
        part_bytes.copy_(torch.from_numpy(generator.integers(0, 256, part_bytes.shape, dtype=np.uint8)))
    return parts


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, row by row: [num_rows, bytes of a row]."""
    return tensor.contiguous().view(torch.uint8).flatten(1).numpy()


def row_places(view: PageView, block_id: int, row_in_block: int) -> Iterator[slice]:
    """Where each part of one row lies in the memory, computed from the format's numbers alone."""
    page = view.offset_bytes + block_id * view.block_stride_bytes
    for part in view.format.parts:
        area = sum(view.rows_per_block * pitch for pitch in view.format.area_pitches[: part.area])
        first = page + area + row_in_block * view.format.area_pitches[part.area] + part.offset_bytes
        yield slice(first, first + part.num_heads * part.head_dim * part.dtype.itemsize)


def expected_memory(view: PageView, slots: Sequence[int], parts: Sequence[torch.Tensor]) -> np.ndarray:
    """All bytes of the memory after row i of `parts` went to slot i of `slots`, and nothing else changed."""
    memory = view.memory.numpy().copy()
    rows = [to_bytes(part) for part in parts]
    for row, slot in enumerate(slots):
        if 0 <= slot < view.num_blocks * view.rows_per_block:
            for place, part in zip(row_places(view, *divmod(slot, view.rows_per_block)), rows, strict=True):
                memory[place] = part[row]
    return memory


def expected_rows(
    view: PageView, table: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], wraps: bool = False
) -> list[np.ndarray]:
    """The bytes of the rows at `positions[s]` of every sequence s, packed: for each part [num_rows, bytes of a row]."""
    memory = view.memory.numpy()
    total = sum(map(len, positions))
    out = [np.zeros((total, part.num_bytes), dtype=np.uint8) for part in view.format.parts]
    packed = ((columns, position) for columns, seq in zip(table, positions, strict=True) for position in seq)
    for row, (columns, position) in enumerate(packed):
        column = position // view.rows_per_block
        column = column % len(columns) if wraps else column
        if position < 0 or column >= len(columns) or not 0 <= columns[column] < view.num_blocks:
            continue
        for place, part in zip(row_places(view, columns[column], position % view.rows_per_block), out, strict=True):
            part[row] = memory[place]
    return out
