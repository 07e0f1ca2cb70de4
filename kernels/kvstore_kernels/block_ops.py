"""The public ops on all layers of a group, and the slots of new rows: each picks its backend and calls it.

Triton and the torch reference have one signature. The ops take the layers of one group at once, as views or as the
`LayerTable` made of them once: with a table, a call makes no tensor on the host and waits for nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kvstore_kernels import copy, fill, launch, pack, quant_write, slots, write
from kvstore_kernels.checks import expect_shape
from kvstore_kernels.choice import OPS, scale_tensors
from kvstore_kernels.copy import Layers, LayerTable, layer_table
from kvstore_kernels.index_checks import check_copy, check_ids, looks_at_indices
from kvstore_kernels.launch import resolve_backend
from kvstore_kernels.library import layer_args
from kvstore_kernels.quant_rules import RowScale, row_scale_of
from kvstore_kernels.reference import blocks as reference_blocks
from kvstore_kernels.reference import layers as reference_layers
from kvstore_kernels.reference import slots as reference_slots


def copy_blocks(views: Layers, src: torch.Tensor, dst: torch.Tensor, *, backend: str | None = None) -> None:
    """Copies the page of block `src[i]` to block `dst[i]` in every layer: payload, scales and padding of the format.

    A block is a destination once, and no destination is a source. On a CPU that is checked; elsewhere a look would be
    a synchronisation, and the content of a destination that breaks the rule is undefined.

    Args:
        views: the layers of one group: PageViews with equally many blocks on one device, or their LayerTable.
        src: int64 [num_copies], block ids; a block may occur several times.
        dst: int64 [num_copies], block ids. Where either id is none of 0 ... num_blocks - 1, the entry is skipped, and
            counts for nothing in the rule above.
        backend: "triton", "reference", or None: Triton on a GPU, the reference elsewhere.

    Raises: ValueError / TypeError that name the argument, what was expected and what came, before anything is written.
    """
    table = _table(views)
    if torch.compiler.is_compiling():
        OPS.copy_blocks(*layer_args(table), src, dst, resolve_backend(backend, table.device))
        return
    if looks_at_indices():
        check_copy(src, dst, table.num_blocks)
    _pick(backend, table, copy).copy_blocks(table, src, dst)


def fill_blocks(views: Layers, block_ids: torch.Tensor, value: int, *, backend: str | None = None) -> None:
    """Sets every byte of the pages of these blocks to `value` in every layer, and no byte beside them.

    Args:
        views: as `copy_blocks`.
        block_ids: int64 [num_ids]; ids that are none of 0 ... num_blocks - 1 are skipped.
        value: 0 ... 255. 0 is zero and 255 a NaN in every float dtype.
        backend: as `copy_blocks`.

    Raises: as `copy_blocks`.
    """
    table = _table(views)
    if torch.compiler.is_compiling():
        OPS.fill_blocks(*layer_args(table), block_ids, value, resolve_backend(backend, table.device))
        return
    if looks_at_indices():
        check_ids("block_ids", block_ids, table.num_blocks, what="block")
    _pick(backend, table, fill).fill_blocks(table, block_ids, value)


def pack_blocks(
    views: Layers, block_ids: torch.Tensor, out: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """Copies the pages of block `block_ids[i]`, one layer behind the other, to row i of a staging buffer.

    Args:
        views: as `copy_blocks`; their order is that of the pages in a row.
        block_ids: int64 [num_ids]; an id that is none of 0 ... num_blocks - 1 gives a row of zeros.
        out: uint8 [num_ids, packed_bytes] to fill, contiguous, its address a multiple of 16, no memory of the pages;
            None: a new tensor.
        backend: as `copy_blocks`.

    Returns: uint8 [num_ids, packed_bytes]; packed_bytes is the sum of the layers' page_bytes.

    Raises: as `copy_blocks`.
    """
    table = _table(views)
    if torch.compiler.is_compiling():
        shape = (block_ids.shape[0], table.packed_bytes)
        out = block_ids.new_empty(shape, dtype=torch.uint8) if out is None else out
        OPS.pack_blocks(*layer_args(table), block_ids, out, resolve_backend(backend, table.device))
        return out
    if looks_at_indices():
        check_ids("block_ids", block_ids, table.num_blocks, what="block")
    packed: torch.Tensor = _pick(backend, table, pack).pack_blocks(table, block_ids, out)
    return packed


def unpack_blocks(views: Layers, block_ids: torch.Tensor, packed: torch.Tensor, *, backend: str | None = None) -> None:
    """Copies row i of a staging buffer to the pages of block `block_ids[i]`: the reverse of `pack_blocks`.

    A block occurs once. On a CPU that is checked; elsewhere a look would be a synchronisation, and the content of a
    block that occurs twice is undefined.

    Args:
        views: as `copy_blocks`, in the order of the pages in a row.
        block_ids: int64 [num_ids]; ids that are none of 0 ... num_blocks - 1 are skipped.
        packed: uint8 [num_ids, packed_bytes], contiguous, its address a multiple of 16, no memory of the pages.
        backend: as `copy_blocks`.

    Raises: as `copy_blocks`.
    """
    table = _table(views)
    if torch.compiler.is_compiling():
        OPS.unpack_blocks(*layer_args(table), block_ids, packed, resolve_backend(backend, table.device))
        return
    if looks_at_indices():
        check_ids("block_ids", block_ids, table.num_blocks, what="block", written=True)
    _pick(backend, table, pack).unpack_blocks(table, block_ids, packed)


def write_layers(
    views: Layers,
    slot_mapping: torch.Tensor,
    *parts: torch.Tensor,
    row_scales: RowScale | Sequence[RowScale] | None = None,
    backend: str | None = None,
) -> None:
    """Writes one row per slot into every layer, in one launch: what `write_rows` does layer by layer.

    Args:
        views: layers of one row format and of equally many rows in a block; otherwise as `copy_blocks`.
        slot_mapping: int64 [num_rows], the slots in every layer, or [num_layers, num_rows], those of each. Slots as
            `write_rows`.
        parts: the tensors of `write_rows` with one axis more in front: [num_layers, at least num_rows, num_heads,
            head_dim], or flattened to three axes. The strides of layers and rows are free; 0 gives every layer the
            same rows.
        row_scales: as `write_rows`; an fp32 tensor may also be [num_layers], a scale for each layer.
        backend: as `copy_blocks`.

    Raises: as `write_rows`; what is wrong in one layer is said in the words of a write into it.
    """
    table = _table(views)
    first = table.views[0]
    if not first.format.quantised and row_scales is not None:
        raise ValueError(f"row_scales: rows of format {first.format.name!r} have none, got {row_scales!r}")
    if torch.compiler.is_compiling():
        row_scale_of(first.format, row_scales, table.device, len(table.views))
        scales, chosen = scale_tensors(row_scales, first.memory), resolve_backend(backend, table.device)
        OPS.write_layers(*layer_args(table), slot_mapping, parts, scales, chosen)
        return
    if looks_at_indices():
        check_ids("slot_mapping", slot_mapping, first.num_slots, what="slot", written=True)
    if not first.format.quantised:
        _pick(backend, table, write, reference_layers).write_layers(table, slot_mapping, *parts)
        return
    module = _pick(backend, table, quant_write, reference_layers)
    module.write_layers(table, slot_mapping, *parts, row_scales=row_scales)


def compute_slot_mapping(
    block_table: torch.Tensor,
    positions: torch.Tensor,
    seq_idx: torch.Tensor,
    block_size: int,
    tokens_per_row: int = 1,
    rows_per_block: int | None = None,
    wraps: bool = False,
    out: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """The slot of each token, on the device of the block table: what `write_rows` takes.

    A token has no slot, and gets -1, where its position is negative, does not close a row of several tokens or lies
    in a column behind the table, where the table names no block (an id of 0, the null block, or below), and where
    seq_idx is no row of the table.

    Args:
        block_table: int32 [num_seqs, width]; the stride between its rows is free.
        positions: int64 or int32 [num_tokens], each token's place in its sequence.
        seq_idx: int32 [num_tokens], each token's row of the table.
        block_size: tokens of a block.
        tokens_per_row: tokens that share a row, a divisor of `block_size`; the last of them writes it.
        rows_per_block: rows of a page; None: block_size // tokens_per_row, the fewest there may be.
        wraps: whether block i of a sequence is in column i % width (window groups) instead of column i.
        out: int64 [num_tokens] to fill, contiguous; None: a new tensor.
        backend: as `copy_blocks`.

    Returns: int64 [num_tokens], `block_id * rows_per_block + position % block_size // tokens_per_row` or -1.

    Raises: as `copy_blocks`.
    """
    expect_shape("block_table", block_table, (None, None))
    name = resolve_backend(backend, block_table.device)
    if torch.compiler.is_compiling():
        out = torch.empty_like(positions, dtype=torch.int64) if out is None else out
        made = (block_table, positions, seq_idx, block_size, tokens_per_row, rows_per_block, wraps, out)
        OPS.compute_slot_mapping(*made, name)
        return out
    if looks_at_indices():
        check_ids("seq_idx", seq_idx, block_table.shape[0], what="sequence")
        if not wraps and isinstance(block_size, int):
            check_ids("positions", positions, block_table.shape[1] * block_size, what="position")
    chosen: Any = reference_slots if name == "reference" else slots
    result: torch.Tensor = chosen.compute_slot_mapping(
        block_table, positions, seq_idx, block_size, tokens_per_row, rows_per_block, wraps, out
    )
    return result


def _table(views: Layers) -> LayerTable:
    if torch.compiler.is_compiling() and not isinstance(views, LayerTable):
        raise TypeError(f"views: expected a LayerTable inside torch.compile, got {type(views).__name__}")
    return layer_table(views)


def _pick(backend: str | None, table: LayerTable, triton_module: Any, reference_module: Any = reference_blocks) -> Any:
    if resolve_backend(backend, table.device) == "reference":
        return reference_module
    if launch.INTERPRETED and table.device.type != "cpu":
        # The interpreter brings tensors to the host, but it cannot bring what the addresses in a table name.
        raise ValueError(f"backend: expected layers on cpu under Triton's interpreter, got them on {table.device}")
    return triton_module
