"""HostCopies: the bytes of suspended sequences, in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import kvstore_kernels as kernels
from kvstore.allocator import Ids
from kvstore_kernels import LayerTable

MAX_PIN_BYTES = 2**36
"""Pinned at once. One driver refuses 2**39 bytes in one call (vLLM issue 51080)."""

Pin = Callable[[int], torch.Tensor]
"""Makes a pinned uint8 tensor of so many bytes, which is unpinned when it is dropped. RuntimeError: cannot be."""


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows in host memory: `pieces`, uint8 [n, row_bytes] each, one behind the other; all of them pinned, or none."""

    pieces: tuple[torch.Tensor, ...]
    is_pinned: bool


class HostCopies:
    """Saves the blocks of a group, all layers of a block in one row, and puts them back elsewhere.

    Args:
        layer_tables: of each group, None for a group without layers.
        device: of the layers.
        backend: of the kernels.
        pin: None: torch's on a GPU, else nothing is pinned.
        max_pin_bytes: the most to pin in one call.
    """

    def __init__(
        self,
        layer_tables: Sequence[LayerTable | None],
        device: torch.device,
        backend: str,
        pin: Pin | None = None,
        max_pin_bytes: int = MAX_PIN_BYTES,
    ) -> None:
        self._layer_tables = tuple(layer_tables)
        self._device, self._backend = device, backend
        self._pin = _pinned if pin is None and device.type == "cuda" else pin
        self._max_pin_bytes = max_pin_bytes

    def save(self, ids: Sequence[Ids]) -> list[HostRows | None]:
        """Host rows of the blocks `ids[g]` of each group; the copy is ordered behind earlier work on the device.

        Returns: rows of packed_bytes per group, readable once the device is synchronised, and by `load` at any time;
            None for a group without layers.
        """
        saved: list[HostRows | None] = []
        for table, blocks in zip(self._layer_tables, ids, strict=True):
            if table is None:
                saved.append(None)
                continue
            packed = kernels.pack_blocks(table, self._ids(blocks), backend=self._backend)
            if self._pin is None and self._device.type == "cpu":
                saved.append(HostRows((packed,), False))
                continue
            rows = host_rows(len(blocks), table.packed_bytes, self._pin, self._max_pin_bytes)
            for piece, part in zip(rows.pieces, packed.split([len(piece) for piece in rows.pieces]), strict=True):
                piece.copy_(part, non_blocking=True)
            saved.append(rows)
        return saved

    def load(self, saved: Sequence[HostRows | None], ids: Sequence[Ids]) -> None:
        """Puts saved rows into the blocks `ids[g]` of each group, ordered behind earlier work on them."""
        for table, rows, blocks in zip(self._layer_tables, saved, ids, strict=True):
            if table is None or rows is None:
                continue
            start = 0
            for piece in rows.pieces:
                end = start + len(piece)
                if end > start:
                    packed = piece.to(self._device, non_blocking=True)
                    kernels.unpack_blocks(table, self._ids(blocks[start:end]), packed, backend=self._backend)
                start = end

    def _ids(self, blocks: Ids) -> torch.Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._device)


def host_rows(num_rows: int, row_bytes: int, pin: Pin | None, max_pin_bytes: int = MAX_PIN_BYTES) -> HostRows:
    """Host memory for `num_rows` rows: pinned in pieces of at most `max_pin_bytes`, or in one pageable piece.

    Where one piece cannot be pinned none stays pinned, and `is_pinned` says so. Without `pin` nothing is pinned.
    """
    rows_per_piece = max_pin_bytes // row_bytes
    pieces: list[torch.Tensor] = []
    if pin is not None and rows_per_piece and num_rows:
        try:
            for start in range(0, num_rows, rows_per_piece):
                count = min(rows_per_piece, num_rows - start)
                pieces.append(pin(count * row_bytes).view(count, row_bytes))
            return HostRows(tuple(pieces), True)
        except RuntimeError:
            pieces.clear()  # a pageable copy is slower, not wrong
    return HostRows((torch.empty(num_rows, row_bytes, dtype=torch.uint8),), False)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
