"""Tables for kernels of others: CSR pages, both sentinels, slots of chosen rows."""

import numpy as np
import pytest
import torch
from store_cases import make_store, prefill

import kvstore
from kvstore import KVStore

FULL, WINDOW, LATENT = "layers.0.attn", "layers.1.attn", "layers.2.attn"


def make() -> KVStore:
    specs = {
        FULL: kvstore.full_attention(1, 8, dtype=torch.float32, block_size=4),
        WINDOW: kvstore.sliding_window(1, 8, dtype=torch.float32, block_size=4, window=6),
        LATENT: kvstore.latent(8, 8, dtype=torch.float32, block_size=16, tokens_per_row=4),
    }
    return KVStore(kvstore.plan_cache(specs, num_frames=80, layout="overlay"), "cpu", 8, 64, 64)


def test_csr_lists_the_pages_of_each_sequence_oldest_first() -> None:
    store = make()
    seq_ids = prefill(store, range(13), range(20, 23))
    batch = store.extend(seq_ids, 1, pad_to=4)
    full = store.csr_table(FULL, batch)
    assert full.indptr.tolist() == [0, 4, 5, 5, 5]
    assert full.last_page_len.tolist() == [2, 4, 0, 0]
    table = batch.block_table[store.plan.group_index(FULL)]
    assert full.indices.tolist() == [*table[0, :4].tolist(), int(table[1, 0])]
    window = store.csr_table(WINDOW, batch)  # the token at 13 sees 8 ... 13: blocks 2 and 3; the one at 3 sees 0 ... 3
    table = batch.block_table[store.plan.group_index(WINDOW)]
    assert window.indptr.tolist() == [0, 2, 3, 3, 3]
    assert window.indices.tolist() == [int(table[0, 2]), int(table[0, 3]), int(table[1, 0])]
    latent = store.csr_table(LATENT, batch)  # 14 and 4 tokens are 3 rows and 1 row, 4 of which are a page
    assert latent.indptr.tolist() == [0, 1, 2, 2, 2]
    assert latent.last_page_len.tolist() == [3, 1, 0, 0]
    assert {tensor.dtype for tensor in (full.indptr, full.indices, full.last_page_len)} == {torch.int32}


def test_csr_of_a_window_whose_columns_are_used_again() -> None:
    store = make()
    (seq_id,) = prefill(store, range(3))
    for token in range(40):
        batch = store.extend([seq_id], 1)
        csr = store.csr_table(WINDOW, batch)
        rows = store.gather(WINDOW, batch)[0]
        view = store.page_view(WINDOW).tensor("k")
        pages = torch.cat([view[int(block)] for block in csr.indices])
        seen = int(batch.seq_lens[0]) - int(csr.last_page_len[0]) - 4 * (len(csr.indices) - 1)
        first = int(store.gather_starts(WINDOW, batch)[0]) - seen
        assert torch.equal(pages[first : first + len(rows)], rows)
        store.write(WINDOW, batch, *torch.full((2, 1, 1, 8), float(token)))
        store.commit(batch, [token])


def test_both_sentinels() -> None:
    store = make()
    batch = store.extend(prefill(store, range(9), range(20, 22)), 1)
    table = store.block_table(FULL, batch)
    marked = store.block_table(FULL, batch, sentinel=-1)
    assert table is batch.block_table[store.plan.group_index(FULL)]
    assert torch.equal(marked == -1, table == 0)
    assert torch.equal(marked[marked != -1], table[table != 0])
    with pytest.raises(ValueError, match="sentinel: expected 0 or -1, got 7"):
        store.block_table(FULL, batch, sentinel=7)


def test_slots_of_rows_that_are_held() -> None:
    store = make()
    batch = store.extend(prefill(store, range(13), range(20, 23)), 1)
    full = store.slots_of(FULL, batch, np.array([[0, 5, 13, 14, -1], [0, 3, 4, 99, 2]]))
    table = batch.block_table[store.plan.group_index(FULL)]
    assert full.tolist() == [
        [int(table[0, 0]) * 4, int(table[0, 1]) * 4 + 1, int(table[0, 3]) * 4 + 1, -1, -1],
        [int(table[1, 0]) * 4, int(table[1, 0]) * 4 + 3, -1, -1, int(table[1, 0]) * 4 + 2],
    ]
    window = store.slots_of(WINDOW, batch, torch.tensor([[7, 8], [0, 3]]))
    assert window[0, 0] == -1
    assert (window[0, 1:] >= 0).all()
    latent = store.slots_of(LATENT, batch, [[0, 2, 3], [0, 1, 2]])
    assert (latent >= 0).tolist() == [[True, True, False], [True, False, False]]


def test_one_group_with_two_kinds_of_rows_has_two_slot_mappings() -> None:
    specs = {
        name: kvstore.latent(8, 8, dtype=torch.float32, block_size=16, tokens_per_row=tokens)
        for name, tokens in (("layers.0.compressed", 4), ("layers.1.compressed", 8))
    }
    store = KVStore(kvstore.plan_cache(specs, num_frames=20), "cpu", 4, 64, 64)
    assert len(store.plan.groups) == 1
    opened = store.open([range(20)])
    batch = store.extend(opened.seq_ids, 20)
    block, other = batch.block_table[0][0, :2].tolist()
    fine, coarse = (store.slot_mapping(name, batch) for name in specs)
    assert fine[fine >= 0].tolist() == [4 * block, 4 * block + 1, 4 * block + 2, 4 * block + 3, 4 * other]
    assert coarse[coarse >= 0].tolist() == [2 * block, 2 * block + 1]
    assert torch.nonzero(coarse >= 0).flatten().tolist() == [7, 15]
    assert [store.row_lens(name, batch).tolist() for name in specs] == [[5], [2]]
    assert torch.equal(batch.slot_mapping[0], fine)
    store.write("layers.0.compressed", batch, torch.arange(20.0)[:, None, None].repeat(1, 1, 8))
    store.write("layers.1.compressed", batch, torch.arange(20.0)[:, None, None].repeat(1, 1, 8))
    assert store.gather("layers.0.compressed", batch)[0][:, 0, 0].tolist() == [3, 7, 11, 15, 19]
    assert store.gather("layers.1.compressed", batch)[0][:, 0, 0].tolist() == [7, 15]


def test_a_finished_batch_has_no_tables() -> None:
    store = make_store()
    seq_ids = prefill(store, range(5))
    batch = store.extend(seq_ids, 1)
    store.commit(batch, [1])
    for call in (store.csr_table, store.block_table, store.slot_mapping, store.row_lens):
        with pytest.raises(ValueError, match="batch: expected an unfinished batch"):
            call("layers.0.attn", batch)
