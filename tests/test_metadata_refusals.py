"""Calls that have no metadata to give: layers, batches and stores that a reader cannot read."""

import numpy as np
import pytest
import torch
from reader_stores import BF16, FP8_ROWS, FULL, WINDOW, gqa_store
from store_cases import mixed_layers, prefill, store_of

import kvstore
from kvstore.integrations.metadata import (
    flash_mla_metadata,
    flash_mla_sparse_metadata,
    flashinfer_metadata,
    flashinfer_mla_metadata,
    flex_metadata,
    vllm_metadata,
)

CALLS = {
    "vllm": vllm_metadata,
    "flashinfer": flashinfer_metadata,
    "flashinfer_mla": flashinfer_mla_metadata,
    "flash_mla": flash_mla_metadata,
    "flash_mla_sparse": flash_mla_sparse_metadata,
    "flex": flex_metadata,
}


@pytest.mark.parametrize("reader", CALLS)
def test_bad_calls(reader: str) -> None:
    store = store_of(mixed_layers(), 60)
    batch = store.extend(prefill(store, range(3)), 1)
    with pytest.raises(ValueError, match=r"layer: expected a layer of the plan \(.*\), got 'nowhere'"):
        CALLS[reader](store, "nowhere", batch)
    with pytest.raises(
        ValueError,
        match=rf"layer: 'layers.2.state' cannot be read by {reader}: kind: expected .*, got state: it has no rows",
    ):
        CALLS[reader](store, "layers.2.state", batch)
    with pytest.raises(ValueError, match=rf"cannot be read by {reader}: kind: expected .*, got ring: gather its rows"):
        CALLS[reader](store, "layers.3.ring", batch)


GOOD = {
    "vllm": kvstore.full_attention(2, 64, dtype=BF16),
    "flashinfer": kvstore.full_attention(2, 64, dtype=BF16),
    "flashinfer_mla": kvstore.latent(),
    "flash_mla": kvstore.latent(),
    "flash_mla_sparse": FP8_ROWS["656"][0],
    "flex": kvstore.full_attention(2, 64, dtype=BF16),
}


@pytest.mark.parametrize("reader", CALLS)
def test_finished_batches_other_things_and_stores_without_bytes(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.arena.ROW_DTYPES", (BF16, torch.float32, torch.float8_e4m3fn))
    store = store_of({FULL: GOOD[reader]}, 20, max_length=128)
    batch = store.extend(prefill(store, range(3)), 1)
    CALLS[reader](store, FULL, batch)
    with pytest.raises(TypeError, match=r"batch: expected a Batch from extend\(\), got dict"):
        CALLS[reader](store, FULL, {})
    store.commit(batch, [0])
    with pytest.raises(ValueError, match="batch: expected an unfinished batch"):
        CALLS[reader](store, FULL, batch)
    books = store_of({FULL: GOOD[reader]}, 20, device=None, max_length=128)
    batch = books.extend(prefill(books, range(3)), 1)
    with pytest.raises(ValueError, match="device: this store keeps books only"):
        CALLS[reader](books, FULL, batch)


@pytest.mark.parametrize("reader", ["vllm", "flashinfer", "flex"])
def test_rows_that_only_the_batch_has_are_not_in_the_pages(reader: str) -> None:
    store = gqa_store(stored="tail")
    seq_ids = prefill(store, range(60), range(100, 103))
    batch = store.extend(seq_ids, [40, 1])
    with pytest.raises(
        ValueError, match=r"stored='tail' leaves rows of a longer step out of the pages .*, got 41 tokens"
    ):
        CALLS[reader](store, WINDOW, batch)
    CALLS[reader](store, FULL, batch)
    store.commit(batch, np.zeros(41, int))
    CALLS[reader](store, WINDOW, store.extend(seq_ids, 1))


def test_arguments() -> None:
    store = gqa_store()
    batch = store.extend(prefill(store, range(3)), 1)
    with pytest.raises(ValueError, match="sentinel: expected 0 or -1, got 7"):
        vllm_metadata(store, FULL, batch, sentinel=7)
    with pytest.raises(ValueError, match="reader: expected 'vllm' or 'flash_attention', got 'flex'"):
        vllm_metadata(store, FULL, batch, reader="flex")
    with pytest.raises(
        ValueError, match=r"cannot be read by flash_attention: page: expected a multiple of 256 rows, got 16"
    ):
        vllm_metadata(store, FULL, batch, reader="flash_attention")
    with pytest.raises(ValueError, match="kv_layout: expected 'NHD' or 'HND', got 'NHDC'"):
        flashinfer_metadata(store, FULL, batch, "NHDC")


def test_an_alias_reads_the_pages_of_its_owner() -> None:
    specs = {FULL: kvstore.full_attention(2, 64, dtype=BF16), WINDOW: kvstore.Alias(FULL)}
    store = store_of(specs, 20)
    batch = store.extend(prefill(store, range(20)), 1)
    mine, other = (flashinfer_metadata(store, layer, batch).paged_kv[0] for layer in specs)
    assert mine.data_ptr() == other.data_ptr()
