"""lazy_zeros: large arrays whose memory is only used where it is written."""

import mmap
import sys
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

MAPPED_BYTES = 1 << 22
"""From here on numpy asks the kernel for huge pages, of which one written byte makes 2 MiB resident."""


def lazy_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`numpy.zeros` in small pages, for tables that are wide enough for the longest sequence and mostly empty."""
    shape = (shape,) if isinstance(shape, int) else shape
    num_bytes = prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < MAPPED_BYTES or not sys.platform.startswith("linux"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes)
    with suppress(AttributeError, OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
