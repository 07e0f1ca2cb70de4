"""KVStore: what open, extend, commit, finish and release mean. Books and bytes, on the CPU reference backend."""

from typing import Any

import numpy as np
import pytest
import torch
from store_cases import LAYER, feed, make_hybrid, make_store, prefill, rows_for, tokens_in

import kvstore
from kvstore import KVStore, OutOfBlocks, SequenceError

# What a batch says


def test_a_batch_of_two_prefills() -> None:
    store = make_store()
    opened = store.open([range(5), range(9)])
    batch = store.extend(opened.seq_ids, [5, 9])
    assert batch.positions.tolist() == [*range(5), *range(9)]
    assert batch.positions.dtype == torch.int64
    assert batch.seq_lens.tolist() == [5, 9]
    assert batch.seq_lens.dtype == torch.int32
    assert batch.row_lens[0].tolist() == [5, 9]
    assert batch.cu_seqlens_q.tolist() == [0, 5, 14]
    assert batch.block_table[0].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert batch.block_table[0].dtype == torch.int32
    assert batch.slot_mapping[0].tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    assert batch.slot_mapping[0].dtype == torch.int64
    assert (batch.max_seq_len, batch.num_tokens, batch.num_sequences) == (9, 14, 2)
    assert not batch.is_decode


def test_a_prefill_and_a_decode_of_one_step_live_side_by_side() -> None:
    store = make_store()
    running = prefill(store, range(6))
    waiting = store.open([range(20, 25)]).seq_ids
    decode = store.extend(running, 1)
    chunk = store.extend(waiting, 5)
    for batch, tokens in ((decode, [6]), (chunk, range(20, 25))):
        store.write(LAYER, batch, rows_for(tokens), rows_for(tokens))
    assert store.gather(LAYER, decode)[0][6, 0, 0] == 6
    assert store.gather(LAYER, chunk)[0][:, 1, 7].tolist() == [20, 21, 22, 23, 24]
    store.commit(decode, [6])
    store.commit(chunk, range(20, 25))
    store.check()


def test_two_steps_of_a_sequence_may_be_in_flight() -> None:
    store = make_store()
    seq_ids = prefill(store, range(3))
    first, second = store.extend(seq_ids, 1), store.extend(seq_ids, 1)
    assert (first.positions.tolist(), second.positions.tolist()) == ([3], [4])
    assert first.block_table[0].data_ptr() != second.block_table[0].data_ptr()
    with pytest.raises(SequenceError, match=r"fewer than 2 uncommitted batches of a sequence \(max_in_flight\), got 2"):
        store.extend(seq_ids, 1)
    with pytest.raises(ValueError, match="expected the earliest uncommitted batch"):
        store.commit(second, [4])
    store.commit(first, [3])
    store.commit(second, [4])
    store.check()


def test_padding_for_graphs_writes_nothing_and_names_the_null_block() -> None:
    store = make_store()
    seq_ids = prefill(store, range(5), range(10, 13))
    batch = store.extend(seq_ids, 1, pad_to=4)
    assert batch.seq_lens.tolist() == [6, 4, 0, 0]
    assert batch.slot_mapping[0].tolist()[2:] == [-1, -1]
    assert batch.block_table[0][2:].tolist() == [[0, 0], [0, 0]]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    store.write(LAYER, batch, rows_for([5, 13, 7, 7]), rows_for([5, 13, 7, 7]))
    out, lse = store.gqa_decode(LAYER, batch, torch.ones(4, 2, 8))
    assert (out[2:] == 0).all()
    assert (lse[2:] == -torch.inf).all()
    assert not store.page_view(LAYER).tensor("k")[0].any()
    store.commit(batch, [5, 13])
    store.check()


def test_an_empty_batch_and_a_batch_of_no_tokens() -> None:
    store = make_store()
    seq_ids = prefill(store, range(5))
    empty = store.extend([], [])
    assert (empty.num_sequences, empty.num_tokens, empty.max_seq_len) == (0, 0, 0)
    idle = store.extend(seq_ids, 0)
    assert idle.slot_mapping[0].tolist() == []
    store.commit(empty, [])
    store.commit(idle, [])
    store.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_boundary_lengths_hold_just_the_blocks_they_need(length: int) -> None:
    store = make_store()
    prefill(store, range(length))
    assert store.stats().in_use == -(-length // 4)


# Prefixes


def test_o14_a_wholly_cached_prompt_leaves_a_token_to_compute() -> None:
    """28 tokens in blocks of its own, 3 in a block that is copied before token 31 is written to it."""
    store = make_store()
    store.release(prefill(store, range(32)))
    assert store.open([range(32)]).cached_tokens.tolist() == [31]
    assert store.open([range(33)]).cached_tokens.tolist() == [32]
    assert store.open([range(29)]).cached_tokens.tolist() == [28]


def test_the_last_block_of_a_wholly_cached_prompt_is_copied_and_not_touched() -> None:
    store = make_store()
    first = store.open([range(8)]).seq_ids
    feed(store, first, range(8))
    second = store.open([range(8)]).seq_ids
    assert store.explain_hit(second[0]).copied == 3
    batch = feed(store, second, [90])
    assert batch.block_table[0].tolist() == [[1, 3]]
    assert tokens_in(store, LAYER, first) == [*range(8)]
    assert tokens_in(store, LAYER, second) == [*range(7), 90]


def test_o12_equal_prompts_of_one_batch_do_not_hit_each_other() -> None:
    store = make_store()
    opened = store.open([range(8), range(8)])
    assert opened.cached_tokens.tolist() == [0, 0]
    store.extend(opened.seq_ids, 8)
    assert store.open([range(8)]).cached_tokens.tolist() == [0]


def test_o13_rows_that_were_never_confirmed_are_not_hit() -> None:
    store = make_store()
    opened = store.open([range(8)])
    batch = store.extend(opened.seq_ids, 8)
    store.release(opened.seq_ids)
    store.commit(batch, range(8))
    store.check()
    assert store.open([range(8)]).cached_tokens.tolist() == [0]
    assert store.stats().cached == 0


def test_a_running_sequence_is_hit_and_the_blocks_are_shared() -> None:
    store = make_store()
    prefill(store, range(10))
    opened = store.open([[*range(8), 50, 51]])
    assert opened.cached_tokens.tolist() == [8]
    assert store.stats().in_use == 3
    batch = store.extend(opened.seq_ids, 2)
    assert batch.block_table[0].tolist() == [[1, 2, 4]]
    assert batch.positions.tolist() == [8, 9]
    store.check()


def test_generated_tokens_are_hit_as_well() -> None:
    """From the release on: while the sequence runs, only what is committed of its prompt is found, whole blocks."""
    store = make_store()
    seq_ids = prefill(store, range(5))
    for token in range(5, 13):
        store.commit(store.extend(seq_ids, 1), [token])
    assert store.open([range(20)]).cached_tokens.tolist() == [4]
    store.release(seq_ids)
    assert store.open([range(20)]).cached_tokens.tolist() == [12]
    store.check()


def test_eviction_takes_the_tail_first() -> None:
    store = make_store(num_frames=9)
    store.release(prefill(store, range(16)))
    store.release(prefill(store, range(100, 112)))
    assert store.stats().cached == 7
    store.release(prefill(store, range(200, 212)))
    assert store.open([range(17)]).cached_tokens.tolist() == [8]
    assert store.stats().evicted == 2
    store.check()


def test_dropped_prefixes_are_missed_and_their_blocks_free() -> None:
    store = make_store()
    running = prefill(store, range(12))
    store.release(prefill(store, range(50, 62)))
    store.drop_prefixes()
    store.check()
    assert store.stats().cached == 0
    assert store.open([range(50, 62), range(12)]).cached_tokens.tolist() == [0, 0]
    store.commit(store.extend(running, 1), [12])
    store.release(running)
    store.check()
    assert store.open([range(13)]).cached_tokens.tolist() == [0]


def test_after_releasing_all_and_dropping_prefixes_the_store_is_as_new() -> None:
    store = make_store(num_frames=20)
    for start in (0, 4, 100):
        store.release(prefill(store, range(start, start + 13)))
    store.drop_prefixes()
    store.check()
    stats = store.stats()
    assert (stats.free, stats.cached, stats.in_use, stats.open_sequences) == (19, 0, 0, 0)


# Release, fences, withdrawal


def test_blocks_of_an_unfinished_step_are_fenced() -> None:
    store = make_store()
    seq_ids = prefill(store, range(6))
    other = prefill(store, range(40, 44))
    batch = store.extend(np.concatenate([seq_ids, other]), 1)
    store.release(seq_ids)
    store.check()
    assert store.stats().fenced == 2
    store.commit(batch, [6, 44])
    store.check()
    assert (store.stats().fenced, store.stats().cached) == (0, 1)


def test_finish_can_come_after_commit() -> None:
    store = make_store()
    seq_ids = prefill(store, range(6))
    batch = store.extend(seq_ids, 1)
    with pytest.raises(ValueError, match="expected a committed batch, got one that is not committed yet"):
        store.finish(batch)
    store.commit(batch, [6], finish=False)
    store.release(seq_ids)
    assert store.stats().fenced == 2
    store.check()
    store.finish(batch)
    assert store.stats().fenced == 0
    store.check()
    with pytest.raises(ValueError, match="got one that was committed and finished already"):
        store.finish(batch)


def test_out_of_blocks_tells_what_is_fenced() -> None:
    store = make_store(num_frames=4)
    seq_ids = prefill(store, range(8))
    waiting = store.open([range(70, 80)]).seq_ids
    batch = store.extend(seq_ids, 1)
    store.release(seq_ids)
    with pytest.raises(OutOfBlocks, match=r"wanted \[3\], free \[0\], evictable \[0\], fenced \[3\]"):
        store.extend(waiting, 10)
    store.commit(batch, [8])
    store.extend(waiting, 10)
    store.check()


def test_fewer_tokens_than_extended_withdraw_the_rest() -> None:
    store = make_store()
    seq_ids = prefill(store, range(14), range(20, 23))
    batch = store.extend(seq_ids, [5, 2])
    assert batch.block_table[0].shape == (2, 5)  # O21: the rows of draft tokens are reserved before the step
    store.commit(batch, [14, 15, 23], num_committed=[2, 1])
    store.check()
    again = store.extend(seq_ids, 1)
    assert again.positions.tolist() == [16, 4]
    store.commit(again, [60, 61])
    store.release(seq_ids)
    assert store.open([[*range(16), 60, 1]]).cached_tokens.tolist() == [16]


def test_withdrawing_under_a_later_batch_is_refused() -> None:
    store = make_store()
    seq_ids = prefill(store, range(4))
    first = store.extend(seq_ids, 3)
    store.extend(seq_ids, 1)
    with pytest.raises(ValueError, match="expected all tokens of a sequence that has a later batch in flight"):
        store.commit(first, [4], num_committed=1)
    store.commit(first, [4, 5, 6])
    store.check()


def test_o43_a_reused_row_names_no_block_of_the_sequence_before() -> None:
    store = make_store(max_sequences=1)
    store.release(prefill(store, range(60)))
    seq_ids = store.open([range(100, 103)]).seq_ids
    batch = store.extend(seq_ids, 3)
    assert batch.block_table[0].shape == (1, 1)
    assert np.count_nonzero(store._books.tables.table(0)) == 1


def test_o11_a_failed_extend_changes_nothing() -> None:
    store = make_store(num_frames=6)
    store.release(prefill(store, range(8)))
    opened = store.open([range(40)])
    before = store.stats()
    for _ in range(3):
        with pytest.raises(OutOfBlocks):
            store.extend(opened.seq_ids, 40 - 8)
        store.check()
        assert store.stats() == before
    store.extend(opened.seq_ids, 12)
    store.check()


def test_the_same_calls_give_the_same_ids() -> None:
    def run() -> list[Any]:
        store = make_store(num_frames=12)
        seen: list[Any] = []
        for start in range(0, 60, 3):
            seq_ids = prefill(store, range(start, start + 9))
            batch = store.extend(seq_ids, 1)
            seen += [seq_ids.tolist(), batch.block_table[0].tolist(), batch.slot_mapping[0].tolist()]
            store.commit(batch, [1])
            store.release(seq_ids)
        return seen

    assert run() == run()


# Devices


def test_a_store_without_a_device_keeps_books_only() -> None:
    plan = kvstore.plan_cache({LAYER: kvstore.full_attention(1, 8)}, num_frames=8)
    store = KVStore(plan)
    batch = store.extend(store.open([range(5)]).seq_ids, 5)
    assert batch.slot_mapping[0].tolist() == [16, 17, 18, 19, 20]
    with pytest.raises(ValueError, match="this store keeps books only"):
        store.write(LAYER, batch, torch.zeros(5, 1, 8), torch.zeros(5, 1, 8))


def test_planned_bytes_are_allocated_bytes() -> None:
    store = make_hybrid()
    assert store._arena is not None
    assert store._arena.memory.numel() == store.plan.arena_bytes == store.plan.num_frames * store.plan.frame_bytes


def test_a_plan_without_layers_has_a_store() -> None:
    """O08: nothing to cache is not an error."""
    store = KVStore(kvstore.plan_cache({}, num_frames=1), "cpu")
    batch = store.extend(store.open([range(5)]).seq_ids, 5)
    assert (batch.positions.tolist(), batch.block_table) == ([0, 1, 2, 3, 4], ())
    store.commit(batch, range(5))
    store.check()
