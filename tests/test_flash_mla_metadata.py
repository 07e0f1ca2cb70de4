"""Arguments for FlashMLA: cache views byte by byte, and indices of rows."""

import numpy as np
import pytest
import torch
from reader_stores import BF16, FP8_ROWS, LATENT, latent_store, run
from store_cases import prefill, store_of

import kvstore
from kvstore import KVStore, LayerSpec
from kvstore.integrations.flash_mla import row_bytes_view
from kvstore.integrations.metadata import flash_mla_indices, flash_mla_metadata, flash_mla_sparse_metadata
from kvstore_kernels import PageView, dsv4_format, fp8_ds_mla_format


def test_flash_mla_takes_the_tensors_of_the_batch() -> None:
    store = latent_store()
    batch = store.extend(prefill(store, range(130), range(200, 203)), 2)
    meta = flash_mla_metadata(store, LATENT, batch)
    assert (tuple(meta.k_cache.shape), meta.k_cache.stride(), meta.k_cache.dtype) == (
        (40, 64, 1, 576),
        (65536, 576, 576, 1),
        BF16,
    )
    assert meta.block_table is batch.block_table[store.plan.group_index(LATENT)]
    assert (meta.block_table.dtype, meta.block_table.stride(1)) == (torch.int32, 1)
    assert (meta.cache_seqlens.tolist(), meta.cache_seqlens.dtype) == ([132, 5], torch.int32)
    assert (meta.s_q, meta.head_dim_v) == (2, 512)
    store.commit(batch, np.zeros(4, int))
    uneven = store.extend(batch.seq_ids, [2, 1])
    with pytest.raises(ValueError, match=r"batch: expected as many new tokens in each sequence, .*, got \[2, 1\]"):
        flash_mla_metadata(store, LATENT, uneven)


@pytest.mark.parametrize("rows", FP8_ROWS)
def test_sparse_caches_are_bytes_of_the_right_shape(rows: str) -> None:
    spec, (page, row_bytes, stride) = FP8_ROWS[rows]
    plan = kvstore.plan_cache({LATENT: spec}, num_frames=4)
    place = plan.placements[LATENT]
    assert place.block_stride_bytes == stride
    memory = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    cache = row_bytes_view(PageView(memory, place.offset_bytes, stride, 4, page, spec.format))
    assert (tuple(cache.shape), cache.stride(), cache.dtype) == (
        (4, page, 1, row_bytes),
        (stride, row_bytes, row_bytes, 1),
        torch.uint8,
    )


def test_a_sparse_cache_inside_a_shared_block_finds_its_bytes() -> None:
    """Anchors of the formats: 656 bytes, stride 41,984, page 2, token 1 starts at 84,624; and behind an offset."""
    memory = torch.zeros(8 * 62976, dtype=torch.uint8)
    dense = row_bytes_view(PageView(memory, 0, 41984, 4, 64, fp8_ds_mla_format()))
    assert dense[2, 1].data_ptr() - memory.data_ptr() == 84624
    shared = row_bytes_view(PageView(memory[16:], 48, 62976, 4, 64, fp8_ds_mla_format()))  # 96 rows a block
    assert shared[2, 1].data_ptr() - memory.data_ptr() == 16 + 48 + 2 * 62976 + 656


@pytest.fixture
def fp8_store(monkeypatch: pytest.MonkeyPatch) -> KVStore:
    """A store of 656-byte rows, 48 of them between two pages of 64. Its arena has no kernels for them, but bytes."""
    monkeypatch.setattr("kvstore.arena.ROW_DTYPES", (BF16, torch.float32, torch.float8_e4m3fn))
    spec = LayerSpec("latent", 64, fp8_ds_mla_format(), padded_page_bytes=112 * 656, block_stride_multiple=656)
    return store_of({LATENT: spec}, 20, max_length=512, max_tokens_per_step=512)


def test_sparse_indices_name_rows_and_pad_to_tiles(fp8_store: KVStore) -> None:
    store = fp8_store
    batch = store.extend(prefill(store, range(130), range(200, 203)), 1)
    meta = flash_mla_sparse_metadata(store, LATENT, batch)
    assert (tuple(meta.k_cache.shape), meta.k_cache.stride()) == ((20, 64, 1, 656), (73472, 656, 656, 1))
    rows = torch.tensor([[0, 65, 130, 131, -1], [3, 4, 1, -7, 0]], dtype=torch.int32)
    a, b, c = meta.block_table[0, :3].tolist()
    d = int(meta.block_table[1, 0])
    index = flash_mla_indices(store, LATENT, batch, rows)
    assert (tuple(index.shape), index.dtype) == ((2, 1, 64), torch.int32)
    assert index[0, 0].tolist() == [64 * a, 64 * b + 1, 64 * c + 2, -1, -1, *[-1] * 59]
    assert index[1, 0].tolist() == [64 * d + 3, -1, 64 * d + 1, -1, 64 * d, *[-1] * 59]
    assert torch.equal(index[:, 0, :5].long(), store.slots_of(LATENT, batch, rows))
    flat = flash_mla_indices(store, LATENT, batch, rows, flat=True)  # 112 rows from one block to the next
    assert flat[0, 0, :3].tolist() == [112 * a, 112 * b + 1, 112 * c + 2]
    many = flash_mla_indices(store, LATENT, batch, torch.zeros(2, 3, 65, dtype=torch.int64))
    assert tuple(many.shape) == (2, 3, 128)
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"rows: expected int32 or int64 \[2, s_q, k\], got "):
            flash_mla_indices(store, LATENT, batch, wrong)


def test_sparse_indices_of_a_window_and_of_a_stride_without_row_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.arena.ROW_DTYPES", (BF16, torch.uint8, torch.float8_e4m3fn))
    window = LayerSpec("latent_window", 64, dsv4_format(), window=100, block_stride_multiple=576)
    store = store_of({LATENT: window}, 40, max_length=1024, max_tokens_per_step=256, max_in_flight=1)
    seq_ids = prefill(store, range(250), range(300, 303))
    run(store, seq_ids[:1], 250, 250)
    batch = store.extend(seq_ids, [2, 2])  # 750 and 751 see 651 and on; the ring has used its columns again
    assert batch.block_table[0].shape[1] < 751 // 64
    rows = torch.tensor([[650, 651, 751, 752], [0, 4, 5, -1]])
    index = flash_mla_indices(store, LATENT, batch, rows[:, None].repeat(1, 2, 1))
    wanted = store.slots_of(LATENT, batch, rows)
    assert ((wanted >= 0).tolist(), wanted.shape) == ([[False, True, True, False], [True, True, False, False]], (2, 4))
    assert torch.equal(index[:, :, :4].long(), wanted[:, None].repeat(1, 2, 1))
