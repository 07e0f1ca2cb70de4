"""Staging: carries the host arrays of a batch to the device in one copy, through buffers that never move."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT_BYTES = 16


class Staging:
    """Pinned host buffers and device buffers, one pair per batch in flight.

    On a CPU the arrays themselves become the tensors, without a copy. On a GPU a batch's arrays are packed into a
    pinned buffer and cross in one asynchronous copy. A buffer belongs to its batch until that gives it back, so that
    batches in flight never share one; where more are in flight than foreseen, a pair is added.

    Args:
        device: where the tensors shall be.
        capacity_bytes: the most that one batch's arrays take, each rounded up to 16 bytes.
        num_buffers: pairs to allocate at once.
        packed: whether to use buffers; None decides by the device.
    """

    def __init__(self, device: torch.device, capacity_bytes: int, num_buffers: int, packed: bool | None = None) -> None:
        self.device = device
        self.packed = device.type != "cpu" if packed is None else packed
        self._capacity_bytes = capacity_bytes
        self._host: list[torch.Tensor] = []
        self._device: list[torch.Tensor] = []
        self._events: list[Any] = []
        self._free: list[int] = []
        for _ in range(num_buffers if self.packed else 0):
            self._add_pair()

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[torch.Tensor], int | None]:
        """Tensors on the device with the contents of `arrays`, in order; shapes and dtypes are kept.

        Returns: the tensors, and what to `give_back` once nobody needs them.
        """
        if not self.packed:
            return [torch.from_numpy(array) for array in arrays], None
        if not self._free:
            self._add_pair()
        lease = self._free.pop()
        if self._events[lease] is not None:
            self._events[lease].synchronize()  # the copy out of this pinned buffer, at least a batch ago
        host, device = self._host[lease], self._device[lease]
        tensors = []
        start = 0
        for array in arrays:
            end = start + array.nbytes
            host.numpy()[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors.append(device[start:end].view(torch.from_numpy(array).dtype).view(array.shape))
            start = end + -end % ALIGNMENT_BYTES
        device[:start].copy_(host[:start], non_blocking=True)
        if self.device.type == "cuda":
            self._events[lease] = torch.cuda.current_stream(self.device).record_event()
        return tensors, lease

    def give_back(self, lease: int | None) -> None:
        """Frees the buffers of a batch for a later one."""
        if lease is not None:
            self._free.append(lease)

    def _add_pair(self) -> None:
        size = self._capacity_bytes
        self._free.append(len(self._host))
        self._host.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
        self._device.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        self._events.append(None)
