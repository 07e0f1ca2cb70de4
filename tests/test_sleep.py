"""sleep and wake: a store gives its pages away, forgets what they held, and has zeroed ones again."""

from typing import Any

import numpy as np
import pytest
import torch
from store_cases import (
    LAYER,
    STATE_LAYER,
    expect_rows,
    feed,
    make_hybrid,
    make_store,
    mixed_layers,
    prefill,
    refused,
    rows_for,
    store_of,
)

import kvstore
from kvstore import BlocksStored, KVStore, PrefixesCleared, SequenceError
from kvstore.sleep import SleepOps

PROMPT = list(range(9))  # two whole blocks of 4, and a token


def with_prefix(**limits: Any) -> KVStore:
    """A store that holds the prompt's blocks as prefixes, and no open sequence."""
    store = make_store(**limits)
    store.release(prefill(store, PROMPT))
    assert store.lookup([PROMPT]).tolist() == [8]
    return store


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
@pytest.mark.parametrize("layout", ["overlay", "frames"])
def test_sleep_frees_and_wake_serves_all_kinds_of_layers_again(layout: str, debug: bool) -> None:
    store = store_of(mixed_layers(), layout=layout, debug=debug)
    plan, num_free = store.plan, store.stats().free
    for tokens in ([3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8]):
        (seq_id,) = store.open([tokens]).seq_ids
        feed(store, [seq_id], tokens)
        expect_rows(store, {int(seq_id): tokens})
        store.release([seq_id])
        assert store.stats().cached
        store.sleep()
        assert store.is_asleep
        store.check()
        store.wake()
        assert not store.is_asleep
        store.release([])  # in debug mode: what was given up before must not be poisoned now
        assert (store.plan, store.stats().free, store.stats().cached) == (plan, num_free, 0)
        assert not store.page_view(LAYER).memory.any()
        store.check()


def test_the_bytes_are_freed_although_somebody_has_page_views() -> None:
    store = with_prefix()
    view = store.page_view(LAYER)
    storage = view.memory.untyped_storage()
    assert storage.nbytes() >= store.plan.arena_bytes
    store.sleep()
    assert storage.nbytes() == 0
    assert [view.memory.numel(), view.tensor("k").numel(), view.tensor("v").numel()] == [0, 0, 0]
    store.wake()
    assert storage.nbytes() == 0
    assert store.page_view(LAYER) is not view
    assert store.page_view(LAYER).memory.untyped_storage().nbytes() >= store.plan.arena_bytes


def test_bytes_that_a_numpy_array_shares_stay_as_long_as_the_array() -> None:
    store = with_prefix()
    array = store.page_view(LAYER).memory.numpy()
    before = array.copy()
    store.sleep()
    assert np.array_equal(array, before)


def test_it_says_how_many_blocks_it_forgot_and_tells_it_as_events() -> None:
    store = with_prefix(max_events=8)
    assert [type(event) for event in store.take_events()] == [BlocksStored]
    assert store.sleep() == 2
    assert store.take_events() == [PrefixesCleared(None)]
    store.wake()
    assert store.lookup([PROMPT]).tolist() == [0]
    assert store.sleep() == 0


def test_blocks_pinned_for_ever_go_too() -> None:
    store = make_store(num_frames=4)
    keep = kvstore.KeepTokens(0, 8, priority=100)
    (seq_id,) = store.open([PROMPT], retention=[keep]).seq_ids
    store.commit(store.extend([seq_id], 9), PROMPT)
    store.release([seq_id])
    store.sleep()
    store.wake()
    prefill(store, range(20, 32))  # all three blocks of the pool


@pytest.mark.parametrize("seq_count", [1, 3])
def test_refused_while_sequences_are_open(seq_count: int) -> None:
    store = make_store()
    seq_ids = prefill(store, *([token] for token in range(seq_count)))
    store.suspend(seq_ids[:1])
    refused(store, store.sleep, SequenceError, rf"sleep: expected no open sequences, got {seq_count}$")
    assert not store.is_asleep
    store.release(seq_ids)
    store.sleep()


def test_refused_while_batches_are_unfinished() -> None:
    store = make_store()
    seq_ids = prefill(store, [1, 2, 3], [4])
    batch = store.extend(seq_ids, 1)
    store.commit(batch, [5, 6], finish=False)
    store.release(seq_ids)
    refused(store, store.sleep, ValueError, r"sleep: expected no unfinished batches, got 1$")
    store.finish(batch)
    store.sleep()
    store.check()


def test_twice_is_an_error() -> None:
    store = make_store()
    with pytest.raises(ValueError, match=r"^wake: expected a store that sleeps, got one that is awake$"):
        store.wake()
    store.sleep()
    with pytest.raises(ValueError, match=r"^the store sleeps: call wake\(\)$"):
        store.sleep()
    assert store.is_asleep


CALLS = {
    "open": lambda store, seq_ids, batch: store.open([[1, 2]]),
    "open nothing": lambda store, seq_ids, batch: store.open([]),
    "extend": lambda store, seq_ids, batch: store.extend(seq_ids, 1),
    "extend nothing": lambda store, seq_ids, batch: store.extend([], 1),
    "page_view": lambda store, seq_ids, batch: store.page_view(LAYER),
    "state_view": lambda store, seq_ids, batch: store.state_view(STATE_LAYER),
    "write": lambda store, seq_ids, batch: store.write(LAYER, batch, rows_for([1]), rows_for([1])),
    "gather": lambda store, seq_ids, batch: store.gather(LAYER, batch),
    "gqa_decode": lambda store, seq_ids, batch: store.gqa_decode(LAYER, batch, torch.zeros(1, 2, 8)),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_need_pages_or_sequences_say_that_the_store_sleeps(call: str) -> None:
    store = store_of(mixed_layers())
    seq_ids = store.open([[1]]).seq_ids
    batch = feed(store, seq_ids, [1])
    store.release(seq_ids)
    store.sleep()
    with pytest.raises(ValueError, match=r"^the store sleeps: call wake\(\)$"):
        CALLS[call](store, seq_ids, batch)
    store.check()


def test_what_needs_no_pages_works_in_sleep() -> None:
    store = with_prefix()
    store.sleep()
    assert store.lookup([PROMPT]).tolist() == [0]
    assert (store.drop_prefixes(), store.stats().cached, store.stats().open_sequences) == (0, 0, 0)
    store.check()


def test_handles_of_before_stay_void() -> None:
    store = make_store()
    seq_ids = prefill(store, [1, 2, 3])
    store.release(seq_ids)
    store.sleep()
    store.wake()
    fresh = prefill(store, [1, 2, 3])
    assert fresh.tolist() != seq_ids.tolist()
    with pytest.raises(SequenceError, match="seq_ids: expected"):
        store.extend(seq_ids, 1)


def test_suspend_and_resume_after_wake_move_the_new_bytes() -> None:
    store = with_prefix()
    store.sleep()
    store.wake()
    (seq_id,) = store.open([PROMPT]).seq_ids
    feed(store, [seq_id], PROMPT)
    store.suspend([seq_id])
    store.resume([seq_id])
    expect_rows(store, {int(seq_id): PROMPT})


def test_new_blocks_of_groups_that_share_bytes_are_zeroed_after_wake_as_before() -> None:
    store = make_hybrid(num_frames=3)
    store.sleep()
    store.wake()
    store.page_view(LAYER).memory.fill_(0xFF)
    batch = store.extend(store.open([[1]]).seq_ids, 1)
    for layer in store.plan.layers:
        (block,) = batch.block_table[store.plan.group_index(layer)][0, :1].tolist()
        assert not store.page_view(layer).tensor("k")[block].any()


def test_a_graph_batch_of_before_is_usable_at_the_same_addresses() -> None:
    store = make_store()
    graph = store.graph_batch(2)
    addresses = []
    for token in (5, 6):
        seq_ids = store.open([[token]]).seq_ids
        feed(store, seq_ids, [token])
        batch = store.extend(seq_ids, 1, graph=graph)
        addresses.append([batch.positions.data_ptr(), batch.block_table[0].data_ptr(), batch.seq_lens.data_ptr()])
        row = rows_for([token + 1, 0])
        store.write(LAYER, batch, row, row)
        assert store.gather(LAYER, batch)[0][:, 0, 0].tolist() == [token, token + 1]
        store.commit(batch, [token + 1])
        store.release(seq_ids)
        store.check()
        store.sleep()
        store.wake()
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefixes", "none"])
def test_a_store_without_a_device_sleeps_too(prefix_caching: bool) -> None:
    store = make_store(device=None, prefix_caching=prefix_caching)
    store.release(prefill(store, PROMPT))
    assert store.sleep() == (2 if prefix_caching else 0)
    with pytest.raises(ValueError, match=r"^the store sleeps: call wake\(\)$"):
        store.open([PROMPT])
    store.wake()
    assert store.open([PROMPT]).cached_tokens.tolist() == [0]
    with pytest.raises(ValueError, match="device: this store keeps books only"):
        store.page_view(LAYER)
    store.check()


def test_a_wake_without_memory_leaves_the_store_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    store = with_prefix()
    store.sleep()

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.sleep.Arena", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            store.wake()
    assert store.is_asleep
    store.check()
    store.wake()
    prefill(store, PROMPT)


def test_the_audit_of_a_store_that_sleeps_can_fail() -> None:
    for rows in ([PROMPT], []):
        store = with_prefix()
        if rows:
            store.open(rows)
        store._is_asleep = True
        with pytest.raises(AssertionError, match="a store sleeps with"):
            store.check()


def test_ids_are_equal_in_stores_that_see_the_same_calls() -> None:
    tables = []
    for _ in range(2):
        store = with_prefix(num_frames=8)
        store.sleep()
        store.wake()
        batch = store.extend(store.open([PROMPT, PROMPT]).seq_ids, 9)
        tables.append(batch.block_table[0].numpy().copy())
    assert np.array_equal(*tables)
    assert isinstance(store, SleepOps)
