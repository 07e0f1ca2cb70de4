"""lazy_zeros: what is not written takes no memory."""

import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.lazy import MAPPED_BYTES, lazy_zeros


@pytest.mark.parametrize("shape", [0, 7, (3, 5), MAPPED_BYTES // 4 - 1, (1024, MAPPED_BYTES // 1024)], ids=str)
def test_arrays_are_zero_and_writable(shape: int | tuple[int, ...]) -> None:
    array = lazy_zeros(shape, np.int32)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == np.int32
    assert not array.any()
    array += 1
    assert (array == 1).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_write_here_and_there_makes_little_resident() -> None:
    before = resident_bytes()
    table = lazy_zeros((1024, 65_536), np.int32)  # 256 MiB, a row in each 256 KiB
    table[:, 0] = 1
    assert resident_bytes() - before < 64 << 20
    assert int(table.sum()) == 1024


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")
