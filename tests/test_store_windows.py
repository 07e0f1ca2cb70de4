"""KVStore: groups that let blocks go, and groups of different dtypes on the same bytes."""

import numpy as np
import torch
from store_cases import LAYER, WINDOW_LAYER, feed, make_hybrid, prefill, rows_for, tokens_in

import kvstore


def test_a_window_group_lets_go_of_what_the_next_token_cannot_reach() -> None:
    store = make_hybrid(window=6)
    seq_ids = store.open([range(16)]).seq_ids
    store.commit(store.extend(seq_ids, 16), range(16))
    store.check()
    assert store.stats().in_use == 4 + 3  # positions 11 ... 15 are in reach of token 16: blocks 5, 6, 7 of two tokens
    for token in range(16, 40):
        batch = store.extend(seq_ids, 1)
        for layer, dtype in ((LAYER, torch.float16), (WINDOW_LAYER, torch.float32)):
            store.write(layer, batch, rows_for([token], dtype), rows_for([token], dtype))
        if token >= 21:
            assert store.gather_starts(WINDOW_LAYER, batch).tolist() == [token - 5]
            assert store.gather(WINDOW_LAYER, batch)[0][:, 0, 0].tolist() == list(range(token - 5, token + 1))
        store.commit(batch, [token])
        store.check()


def test_window_attention_reads_the_window_only() -> None:
    store = make_hybrid(window=3)
    seq_ids = store.open([range(16)]).seq_ids
    batch = store.extend(seq_ids, 16)
    store.write(WINDOW_LAYER, batch, torch.zeros(16, 2, 8), rows_for(range(16)))
    store.commit(batch, range(16))
    for token in range(16, 30):
        batch = store.extend(seq_ids, 1)
        store.write(WINDOW_LAYER, batch, torch.zeros(1, 2, 8), rows_for([token]))
        out, lse = store.gqa_decode(WINDOW_LAYER, batch, torch.ones(1, 2, 8))
        torch.testing.assert_close(out, torch.full_like(out, token - 1.0))
        torch.testing.assert_close(lse, torch.full_like(lse, float(np.log(3))))
        store.commit(batch, [token])


def test_a_store_with_windows_finds_prefixes() -> None:
    """Of 12 tokens 8 are whole units short of the last token; a hit of 8 wants tokens 3 ... 7 of a window of 6."""
    store = make_hybrid(window=6)
    first = store.open([range(12)]).seq_ids
    batch = feed(store, first, range(12))
    full, window = (table[0].tolist() for table in batch.block_table)
    assert (full, window[:6]) == ([1, 2, 3], [4, 5, 6, 7, 8, 9])
    opened = store.open([range(12)])
    assert opened.cached_tokens.tolist() == [8]
    batch = feed(store, opened.seq_ids, [70, 71, 72, 73])
    assert batch.block_table[0].tolist() == [[1, 2, 10]]
    assert batch.block_table[1][0, :6].tolist() == [0, 5, 6, 7, 11, 12]
    assert tokens_in(store, LAYER, opened.seq_ids) == [*range(8), 70, 71, 72, 73]
    assert tokens_in(store, WINDOW_LAYER, opened.seq_ids) == [7, 70, 71, 72, 73]
    assert tokens_in(store, WINDOW_LAYER, first) == [7, 8, 9, 10, 11]


def test_a_window_without_its_block_shortens_the_hit() -> None:
    """5 blocks of 2 and 2 of 4 are cached for 8 tokens; the pool is used up, and a window's last block goes first."""
    store = make_hybrid(window=6)
    store.release(prefill(store, range(12)))
    window = store._books.rules.names[1]
    gone = store._books.prefixes.roots[kvstore.Namespace().key][1].children[np.arange(4, dtype=np.int32).tobytes()]
    store._books.allocator.forget(gone.blocks[1][3:4])  # tokens 6 and 7
    opened = store.open([range(12)])
    assert opened.cached_tokens.tolist() == [4]
    report = store.explain_hit(opened.seq_ids[0])
    assert [(stop.group, stop.length, stop.reason) for stop in report.stops][1] == (window, 4, "window incomplete")


def test_blocks_are_cleared_where_dtypes_share_bytes() -> None:
    """A recycled block of the fp16 group must not show its bytes to the fp32 group."""
    store = make_hybrid(num_frames=5)
    assert store.page_view(LAYER).memory.data_ptr() == store.page_view(WINDOW_LAYER).memory.data_ptr()
    first = store.open([range(6)]).seq_ids
    batch = store.extend(first, 4)
    store.page_view(LAYER).memory.fill_(0xFF)
    store.commit(batch, range(4))
    store.release(first)
    batch = store.extend(store.open([range(4)]).seq_ids, 4)
    for layer, group in ((LAYER, 0), (WINDOW_LAYER, 1)):
        blocks = batch.block_table[group][0].long()
        blocks = blocks[blocks > 0]
        assert blocks.numel()
        assert not store.page_view(layer).tensor("k")[blocks].any()
