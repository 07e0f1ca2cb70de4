"""Staging: the packed path of a GPU, run with CPU buffers."""

import numpy as np
import torch

from kvstore.staging import Staging

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.empty((0, 4), np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
]


def test_packed_arrays_keep_shape_dtype_and_content() -> None:
    tensors = Staging(torch.device("cpu"), 256, 2, packed=True).upload(ARRAYS)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_buffers_never_move_and_are_shared_by_no_two_batches_in_flight() -> None:
    staging = Staging(torch.device("cpu"), 256, 2, packed=True)
    first, second, third = (staging.upload(ARRAYS)[0].data_ptr() for _ in range(3))
    assert first == third != second


def test_on_a_cpu_arrays_are_not_copied() -> None:
    array = np.arange(4)
    (tensor,) = Staging(torch.device("cpu"), 0, 1).upload([array])
    assert tensor.data_ptr() == array.ctypes.data
