"""Staging: carries the host arrays of a batch to the device in one copy, through buffers that never move."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT_BYTES = 16


class Staging:
    """A ring of pinned host buffers and device buffers, one pair per batch in flight.

    On a CPU the arrays themselves become the tensors, without a copy. On a GPU a batch's arrays are packed into the
    next pinned buffer and cross in one asynchronous copy. A buffer is used again after `num_buffers` further batches.

    Args:
        device: where the tensors shall be.
        capacity_bytes: the most that one batch's arrays take, each rounded up to 16 bytes.
        num_buffers: batches that can be alive at once.
        packed: whether to use buffers; None decides by the device.
    """

    def __init__(self, device: torch.device, capacity_bytes: int, num_buffers: int, packed: bool | None = None) -> None:
        self.device = device
        self.packed = device.type != "cpu" if packed is None else packed
        self._next = 0
        self._events: list[Any] = [None] * num_buffers
        self._host: list[torch.Tensor] = []
        self._device: list[torch.Tensor] = []
        if self.packed:
            pin = device.type == "cuda"
            for _ in range(num_buffers):
                self._host.append(torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=pin))
                self._device.append(torch.empty(capacity_bytes, dtype=torch.uint8, device=device))

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Tensors on the device with the contents of `arrays`, in order; shapes and dtypes are kept."""
        if not self.packed:
            return [torch.from_numpy(array) for array in arrays]
        index = self._next
        self._next = (index + 1) % len(self._host)
        if self._events[index] is not None:
            self._events[index].synchronize()  # the copy out of this pinned buffer, many batches ago
        host, device = self._host[index], self._device[index]
        tensors = []
        start = 0
        for array in arrays:
            end = start + array.nbytes
            host.numpy()[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tensors.append(device[start:end].view(torch.from_numpy(array).dtype).view(array.shape))
            start = end + -end % ALIGNMENT_BYTES
        device[:start].copy_(host[:start], non_blocking=True)
        if self.device.type == "cuda":
            self._events[index] = torch.cuda.current_stream(self.device).record_event()
        return tensors
