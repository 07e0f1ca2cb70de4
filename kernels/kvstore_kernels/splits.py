"""Host tables of the attention kernels: the tile for a chip and a row, and into how many parts the keys are split.

The tiles were chosen by what compiles without spills (Triton 3.7) and keeps a tile of rows in flight while another is
worked on; `python -m benchmarks aot` shows registers and shared memory of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore_kernels.checks import cdiv, next_power_of_2
from kvstore_kernels.launch import Target

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448, "gfx942": 65_536, "gfx950": 163_840}
"""Shared memory a program may use, by chip. The compiler does not check it."""
SMALLEST_SHARED_BYTES = 65_536
"""Every chip has this much; no more is used of a chip that SHARED_BYTES does not list."""

REDUCTION_BYTES = 1024
"""Shared memory for reductions over a tile and for barriers."""

MIN_DOT = 16
"""The least extent of a matrix operand on tensor cores."""
MIN_SPLIT_ROWS = 256
MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class ReadTile:
    """What a program of an attention kernel takes at a time: query heads x rows."""

    heads: int
    rows: int
    num_warps: int
    num_stages: int


def padded(extent: int) -> int:
    """The tile extent that covers `extent` columns: a power of two, enough for a tensor core."""
    return max(MIN_DOT, next_power_of_2(extent))


def latent_tile(
    target: Target, num_heads: int, latent_dim: int, value_dim: int, element_bytes: int, rows_per_block: int
) -> ReadTile:
    """The tile of `mla_decode`. Raises ValueError when a row is too wide for the chip's shared memory."""
    is_cuda = target.backend == "cuda"
    if element_bytes == 4:
        tiles = [ReadTile(16, 16, 8, 2) if is_cuda else ReadTile(16, 16, 4, 1)]
    elif num_heads <= 16:
        num_stages = 3 if is_cuda else 2 if target.arch == "gfx950" else 1
        tiles = [ReadTile(16, rows, 4, num_stages) for rows in (32, 16)]
    elif num_heads > 32 and target.arch in (90, 100):
        tiles = [ReadTile(64, rows, 8, 2) for rows in (64, 32, 16)]
    elif num_heads > 32 and target.arch == "gfx950":
        tiles = [ReadTile(64, 16, 8, 1)]
    else:
        tiles = [ReadTile(32, rows, 8, 2) if is_cuda else ReadTile(32, rows, 4, 1) for rows in (32, 16)]
    # A tile inside one block needs one table entry; a larger one needs an entry and an address per row.
    aligned = [tile for tile in tiles if rows_per_block % tile.rows == 0]
    row_bytes = (padded(value_dim) + (padded(latent_dim - value_dim) if latent_dim > value_dim else 0)) * element_bytes
    most = 16 if tiles[0].heads == 64 else 32
    tiles = aligned or [tile for tile in tiles if tile.rows <= most]
    return _first_that_fits(target, tiles, row_bytes, row_bytes, element_bytes)


def quantised_latent_tile(
    target: Target,
    num_heads: int,
    tile_columns: Sequence[int],
    code_bytes: int,
    element_bytes: int,
    rows_per_block: int,
) -> ReadTile:
    """The tile of reads of latent rows that are decoded, `code_bytes` of a row into `tile_columns` of products.

    Raises ValueError when a row is too wide for the chip's shared memory.
    """
    is_cuda = target.backend == "cuda"
    if element_bytes == 4:
        tiles = [ReadTile(16, 16, 8 if is_cuda else 4, 1)]
    elif num_heads > 16 and target.arch in (90, 100):
        # 64 rows would do under Triton 3.7, but spill more than 512 bytes under 3.9.
        tiles = [ReadTile(64, rows, 8, 2) for rows in (32, 16)]
    elif num_heads > 32 and target.arch == "gfx950":
        tiles = [ReadTile(64, 16, 8, 1)]
    elif num_heads > 16 and not is_cuda:
        tiles = [ReadTile(32, rows, 4, 1) for rows in (32, 16)]
    else:
        num_stages = 3 if is_cuda else 2 if target.arch == "gfx950" else 1
        tiles = [ReadTile(16, rows, 8 if is_cuda else 4, num_stages) for rows in (32, 16)]
    aligned = [tile for tile in tiles if rows_per_block % tile.rows == 0]
    row_bytes = sum(tile_columns) * element_bytes
    if not aligned or target.arch == "gfx942":  # an address for each row, or few registers
        aligned = [tile for tile in tiles if tile.rows == 16]
    return _first_that_fits(target, aligned, row_bytes, row_bytes, element_bytes, code_bytes)


def key_value_tile(
    target: Target, queries_per_kv: int, key_dim: int, value_dim: int, element_bytes: int, rows_per_block: int
) -> ReadTile:
    """The tile of `gqa_decode` for queries of `element_bytes`; rows are as wide, or are codes, which take less.

    Raises ValueError when a row is too wide for the chip's shared memory.
    """
    is_cuda = target.backend == "cuda"
    heads = min(padded(queries_per_kv), 64 if is_cuda and element_bytes == 2 else 16)
    width = max(padded(key_dim), padded(value_dim))
    num_warps = 4 if heads * width <= 8192 else 8
    if element_bytes == 4:
        tiles = [ReadTile(16, 16, 8, 2 if is_cuda else 1)] if width <= 256 else []
    else:
        most = 64 if width <= 128 else 32 if width <= 256 else 16
        if rows_per_block & (rows_per_block - 1):
            most = min(most, 32)  # to divide each position by such a number takes registers
        all_stages = (2,) if not is_cuda or (target.arch == 80 and most == 32) else (3, 2)
        tiles = [
            ReadTile(tile_heads, rows, num_warps, num_stages)
            for tile_heads in dict.fromkeys((heads, 16))
            for rows in (64, 32, 16)
            for num_stages in all_stages
            if rows <= most
        ]
    key_bytes, value_bytes = padded(key_dim) * element_bytes, padded(value_dim) * element_bytes
    return _first_that_fits(target, tiles, key_bytes + value_bytes, key_bytes, element_bytes)


def choose_num_splits(num_programs: int, max_rows: int, num_cores: int) -> int:
    """Into how many parts to split keys of up to `max_rows` rows, where `num_programs` programs share each part.

    Enough for two programs per core, but not so many that a part has less than MIN_SPLIT_ROWS rows.
    """
    wanted = 2 * num_cores // max(num_programs, 1)
    return max(1, min(wanted, cdiv(max_rows, MIN_SPLIT_ROWS), MAX_SPLITS))


def shared_bytes(
    target: Target, tile: ReadTile, row_bytes: int, query_bytes: int, element_bytes: int, code_bytes: int = 0
) -> int:
    """A bound of the shared memory that a tile takes; sizes of a row and of a query are those of their padded tiles.

    Rows that are decoded wait as codes, `code_bytes` of each, and lie there once as products take them.
    """
    is_cuda = target.backend == "cuda"
    buffers = tile.num_stages - 1
    if tile.heads == 64 and target.arch == 90:
        buffers += 1  # wgmma reads a tile from shared memory while the next one arrives
    if tile.heads == 64 and target.arch == 100:
        buffers += 3  # and tcgen05 does so with copies in another order
    one_operand = max(query_bytes, row_bytes - query_bytes)
    queries = tile.heads * query_bytes if is_cuda else 0
    weights = tile.heads * tile.rows * element_bytes
    waiting = row_bytes + (tile.num_stages - 1) * code_bytes if code_bytes else buffers * row_bytes
    loop = tile.rows * max(waiting, one_operand) + queries + weights + REDUCTION_BYTES
    # The sums change their layout on the way out, on NVIDIA chips as fp32.
    epilogue = tile.heads * one_operand * (4 // element_bytes if is_cuda else 1)
    return max(loop, epilogue)


def _first_that_fits(
    target: Target,
    tiles: Sequence[ReadTile],
    row_bytes: int,
    query_bytes: int,
    element_bytes: int,
    code_bytes: int = 0,
) -> ReadTile:
    limit = SHARED_BYTES.get(target.arch, SMALLEST_SHARED_BYTES)
    smallest = ReadTile(16, 16, 8 if target.backend == "cuda" else 4, 1)
    for tile in (*tiles, smallest):
        if shared_bytes(target, tile, row_bytes, query_bytes, element_bytes, code_bytes) <= limit:
            return tile
    raise ValueError(
        f"view: expected rows of which 16 fit into the {limit} bytes of shared memory of {target.backend} "
        f"{target.arch}, got rows of {row_bytes} bytes (padded to powers of two)"
    )


def num_cores(device: torch.device) -> int:
    """Multiprocessors of the device; those of an H200 where there is no GPU."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
