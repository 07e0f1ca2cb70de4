"""Staging: the packed path of a GPU, run with CPU buffers."""

import numpy as np
import torch
from store_cases import LAYER, make_hybrid, make_store, prefill, rows_for

from kvstore import KVStore
from kvstore.batch import BatchMaker, batch_bytes
from kvstore.mirrors import Mirrors
from kvstore.staging import Staging

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.empty((0, 4), np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
]


def test_packed_arrays_keep_shape_dtype_and_content() -> None:
    tensors, _ = Staging(torch.device("cpu"), 256, 2, packed=True).upload(ARRAYS)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_buffers_are_used_again_once_they_are_given_back() -> None:
    staging = Staging(torch.device("cpu"), 256, 2, packed=True)
    first, lease = staging.upload(ARRAYS)
    second, _ = staging.upload(ARRAYS)
    third, _ = staging.upload(ARRAYS)  # none is free: a pair is added
    assert len({tensors[0].data_ptr() for tensors in (first, second, third)}) == 3
    staging.give_back(lease)
    assert staging.upload(ARRAYS)[0][0].data_ptr() == first[0].data_ptr()


def test_on_a_cpu_arrays_are_not_copied() -> None:
    array = np.arange(4)
    (tensor,), lease = Staging(torch.device("cpu"), 0, 1).upload([array])
    assert tensor.data_ptr() == array.ctypes.data
    assert lease is None


def packed(store: KVStore) -> KVStore:
    """The store with the buffers of a GPU, on the CPU."""
    books = store._books
    limits = books.limits
    size = batch_bytes(books.rules, limits.max_sequences, limits.max_tokens_per_step)
    store._staging = Staging(store.device, size, 2 * limits.max_in_flight, packed=True)
    store._mirrors = Mirrors(books.tables, store.device, packed=True)
    store._maker = BatchMaker(books, store._staging)
    return store


def test_batches_in_flight_never_share_buffers() -> None:
    """Six sequences with a batch each: more than the store keeps buffers for."""
    store = packed(make_store())
    seq_ids = store.open([[token] * 4 for token in range(1, 7)]).seq_ids
    batches = [store.extend(seq_ids[row : row + 1], 4) for row in range(6)]
    for token, batch in enumerate(batches, 1):
        store.write(LAYER, batch, rows_for([token] * 4), rows_for([token] * 4))
    assert [store.gather(LAYER, batch)[0][0, 0, 0].item() for batch in batches] == [1, 2, 3, 4, 5, 6]
    for token, batch in enumerate(batches, 1):
        store.commit(batch, [token] * 4)
    store.check()


def test_padding_beyond_the_tokens_of_a_step_fits_the_buffers() -> None:
    store = packed(make_store(max_sequences=64, max_tokens_per_step=2, max_length=16))
    batch = store.extend(store.open([[1]]).seq_ids, 1, pad_to=64)
    assert batch.slot_mapping[0].tolist() == [4] + [-1] * 63


def test_a_long_run_over_the_same_buffers_keeps_its_rows() -> None:
    store = packed(make_hybrid(window=6))
    seq_ids = prefill(store, range(9))
    for token in range(9, 40):
        batch = store.extend(seq_ids, 1)
        store.write("layers.1.attn", batch, rows_for([token]), rows_for([token]))
        store.commit(batch, [token])
        if token > 14:
            again = store.extend(seq_ids, 0)
            assert store.gather("layers.1.attn", again)[0][:, 0, 0].tolist() == list(range(token - 4, token + 1))
            store.commit(again, [])
