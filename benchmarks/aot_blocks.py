"""What is compiled ahead of time of the ops on whole blocks, and of the slot mapping."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.aot_cases import FP32, LATENT, Case, meta, meta_view
from kvstore_kernels import PageView, bytes_format, kv_format, latent_format
from kvstore_kernels.copy import copy_launch, layer_table
from kvstore_kernels.fill import fill_launch
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.pack import pack_launch, unpack_launch
from kvstore_kernels.slots import BlockRows, slots_launch

BlockLaunch = Callable[[list[PageView], int, Target], Launch]

TABLE_LOADS = 4
"""What a program may read of 8 bytes of a layer: its address and three counts."""


def build_copy(views: list[PageView], num_ids: int, target: Target) -> Launch:
    """The launch of a copy of `num_ids` blocks."""
    return copy_launch(layer_table(views), _ids(num_ids), _ids(num_ids), target)


def build_fill(views: list[PageView], num_ids: int, target: Target, value: int = 255) -> Launch:
    """The launch of a fill of `num_ids` blocks."""
    return fill_launch(layer_table(views), _ids(num_ids), value, target)


def build_pack(views: list[PageView], num_ids: int, target: Target) -> Launch:
    """The launch of a pack of `num_ids` blocks."""
    launch, _ = pack_launch(layer_table(views), _ids(num_ids), None, target)
    return launch


def build_unpack(views: list[PageView], num_ids: int, target: Target) -> Launch:
    """The launch of an unpack of `num_ids` blocks."""
    table = layer_table(views)
    return unpack_launch(table, _ids(num_ids), meta(num_ids, table.packed_bytes, dtype=torch.uint8), target)


def build_slots(
    rows: BlockRows,
    wraps: bool,
    target: Target,
    *,
    num_seqs: int = 8,
    width: int = 32,
    num_tokens: int = 1000,
    gap: int = 0,
    dtype: torch.dtype = torch.int64,
) -> Launch:
    """The launch of a slot mapping from a table whose rows lie `gap` entries apart."""
    table = meta(num_seqs, width + gap, dtype=torch.int32)[:, :width]
    positions, seq_idx = meta(num_tokens, dtype=dtype), meta(num_tokens, dtype=torch.int32)
    launch, _ = slots_launch(table, positions, seq_idx, rows, wraps, None, target)
    return launch


def block_cases() -> list[Case]:
    """The cases of `copy_blocks`, `fill_blocks`, `pack_blocks`, `unpack_blocks` and `compute_slot_mapping`.

    A fill reads no rows and a slot mapping moves none: neither has a bound on the loads of a program.
    """
    layers = {
        "8 latent layers": [meta_view(LATENT, 64)] * 8,
        "3 unlike layers": [
            meta_view(kv_format(8, 128), 16),
            meta_view(latent_format(576, 512, FP32), 1, gap_bytes=0),
            meta_view(bytes_format(132), 7, gap_bytes=2**20),
        ],
    }
    moves: dict[str, tuple[BlockLaunch, Mapping[int, int] | None]] = {
        "copy_blocks": (build_copy, {8: 2 + TABLE_LOADS}),
        "fill_blocks": (build_fill, None),
        "pack_blocks": (build_pack, {8: 1 + TABLE_LOADS}),
        "unpack_blocks": (build_unpack, {8: 1 + TABLE_LOADS}),
    }
    mappings = {
        "blocks of 64": (BlockRows(64, 1, None), False),
        "blocks of 48, window": (BlockRows(48, 1, None), True),
        "blocks of 784, 4 a row": (BlockRows(784, 4, 256), False),
    }
    return [
        *(
            Case(kernel, name, partial(build, views, 4), index_loads)
            for kernel, (build, index_loads) in moves.items()
            for name, views in layers.items()
        ),
        *(Case("slot_mapping", name, partial(build_slots, rows, wraps)) for name, (rows, wraps) in mappings.items()),
    ]


def block_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in pages, strides and sizes only: each family must be one compiled kernel."""
    groups = [
        [meta_view(row_format, rows, gap_bytes, num_blocks)] * num_layers
        for row_format, rows, gap_bytes, num_blocks, num_layers in (
            (LATENT, 64, 0, 1, 1),
            (LATENT, 1, 16, 16, 3),
            (kv_format(8, 128), 48, 2**20, 777, 16),
            (kv_format(1, 72), 5, 1008, 60_000, 61),
        )
    ]
    moves: dict[str, BlockLaunch] = {
        "copy_blocks": build_copy,
        "pack_blocks": build_pack,
        "unpack_blocks": build_unpack,
    }
    families = {
        kernel: [build(views, num_ids, target) for views in groups for num_ids in (1, 2, 16, 333)]
        for kernel, build in moves.items()
    }
    families["fill_blocks"] = [
        build_fill(views, num_ids, target, value)
        for views in groups
        for num_ids in (1, 16)
        for value in (0, 1, 16, 255)
    ]
    families["slot_mapping"] = [
        build_slots(
            BlockRows(64, 1, None), False, target, num_seqs=num_seqs, width=width, num_tokens=num_tokens, gap=gap
        )
        for num_seqs, width, num_tokens in ((1, 1, 1), (2, 16, 16), (3, 7, 4097), (64, 33, 65536))
        for gap in (0, 16, 1)
    ]
    return families


def _ids(num_ids: int) -> torch.Tensor:
    return meta(num_ids, dtype=torch.int64)
