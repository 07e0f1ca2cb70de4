"""KVStore: calls that are refused, in words, and change nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import (
    LAYER,
    WINDOW_LAYER,
    make_hybrid,
    make_store,
    mixed_layers,
    prefill,
    snapshot,
    store_of,
)

import kvstore
from kvstore import KVStore, SequenceError
from kvstore_kernels import RowFormat, RowPart


def bad_extend(**changes: Any) -> Callable[[KVStore, np.ndarray], Any]:
    return lambda store, seq_ids: store.extend(**{"seq_ids": seq_ids, "num_new_tokens": 1, **changes})


BAD_CALLS: dict[str, tuple[Callable[[KVStore, np.ndarray], Any], type[Exception], str]] = {
    "empty prompt": (lambda s, i: s.open([[]]), ValueError, r"token_arrays\[0\]: expected 1 to 64 tokens .*, got 0"),
    "long prompt": (
        lambda s, i: s.open([[1], range(65)]),
        ValueError,
        r"token_arrays\[1\]: expected 1 to 64 .* got 65",
    ),
    "float tokens": (lambda s, i: s.open([[1.5]]), ValueError, r"token_arrays\[0\]: expected a flat array of integers"),
    "bool tokens": (lambda s, i: s.open([[True]]), ValueError, "expected a flat array of integers, .* dtype bool"),
    "text tokens": (lambda s, i: s.open(["abc"]), ValueError, "expected a flat array of integers"),
    "nested tokens": (lambda s, i: s.open([[[1, 2]]]), ValueError, r"integers, got shape \[1, 2\]"),
    "ragged tokens": (lambda s, i: s.open([[[1], [2, 3]]]), ValueError, "expected a flat array of integers"),
    "negative token": (lambda s, i: s.open([[1, -1]]), ValueError, r"token ids in \[0, 2147483647\], got -1"),
    "huge token": (lambda s, i: s.open([[2**31]]), ValueError, r"token ids in \[0, 2147483647\], got 2147483648"),
    "huger token": (
        lambda s, i: s.open([[2**63]]),
        ValueError,
        r"token ids in \[0, 2147483647\], got 9223372036854775808",
    ),
    "too many": (
        lambda s, i: s.open([[1]] * 7),
        SequenceError,
        r"at most 6 more sequences \(2 of max_sequences 8 are open; release gives .*\), got 7",
    ),
    "unknown": (
        bad_extend(seq_ids=[12345]),
        SequenceError,
        "expected handles of open sequences, got 12345, which is no handle",
    ),
    "negative handle": (
        bad_extend(seq_ids=[-1]),
        SequenceError,
        "expected handles of open sequences, got -1, which is no handle",
    ),
    "future handle": (bad_extend(seq_ids=[(99 << 32) | 1]), SequenceError, "which is no handle from open"),
    "float handle": (bad_extend(seq_ids=[1.0]), ValueError, "seq_ids: expected a flat array of integers"),
    "repeated": (
        lambda s, i: s.extend([i[0], i[1], i[0]], 1),
        SequenceError,
        "expected each sequence once, got .* twice",
    ),
    "too many tokens": (
        lambda s, i: s.extend(i, [15, 14]),
        ValueError,
        r"at most 20 in all \(max_tokens_per_step\), got 29",
    ),
    "negative count": (bad_extend(num_new_tokens=[1, -2]), ValueError, "num_new_tokens: expected counts >= 0, got -2"),
    "counts short": (bad_extend(num_new_tokens=[1]), ValueError, "expected one count per sequence, 2 in all, got 1"),
    "bool count": (bad_extend(num_new_tokens=True), ValueError, "num_new_tokens: expected a flat array of integers"),
    "small pad": (bad_extend(pad_to=1), ValueError, r"pad_to: expected an integer in \[2, 8\], got 1"),
    "large pad": (bad_extend(pad_to=9), ValueError, r"pad_to: expected an integer in \[2, 8\], got 9"),
    "padded prefill": (
        bad_extend(pad_to=4, num_new_tokens=[1, 2]),
        ValueError,
        "pad_to: expected a batch with one new",
    ),
    "release twice": (lambda s, i: s.release([i[0], i[0]]), SequenceError, "expected each sequence once"),
    "release unknown": (
        lambda s, i: s.release([3]),
        SequenceError,
        r"expected handles of open sequences, got 3, which is no handle from open\(\)",
    ),
    "no prompts": (lambda s, i: s.open(5), ValueError, "token_arrays: expected a sequence of prompts, got 5"),
    "text for prompts": (lambda s, i: s.open("ab"), ValueError, "token_arrays: expected a sequence of prompts"),
    "overflow": (
        lambda s, i: s.extend(i, [2**63 - 1, 1]),
        ValueError,
        r"num_new_tokens: expected at most 20 in all \(max_tokens_per_step\), got 9223372036854775808",
    ),
    "no handles": (bad_extend(seq_ids=5, pad_to=4), ValueError, "seq_ids: expected a flat array of integers"),
    "ragged padded": (
        bad_extend(num_new_tokens=[1, [2]], pad_to=4),
        ValueError,
        "num_new_tokens: expected a flat array",
    ),
    "no batch": (lambda s, i: s.commit("batch", [1]), TypeError, "batch: expected a Batch from extend.*, got str"),
    "unknown layer": (
        lambda s, i: s.page_view("layers.9.attn"),
        ValueError,
        r"layer: expected a layer of the plan \(layers",
    ),
    "no layer": (lambda s, i: s.page_view(["k"]), ValueError, "layer: expected a layer of the plan"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused_by_name_and_change_nothing(name: str) -> None:
    call, error, message = BAD_CALLS[name]
    store = make_store(max_tokens_per_step=20)
    seq_ids = prefill(store, range(6), range(30, 35))
    before = snapshot(store)
    with pytest.raises(error, match=message):
        call(store, seq_ids)
    store.check()
    assert snapshot(store) == before


BAD_COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "few tokens": ({"token_ids": [1]}, "token_ids: expected 4 tokens, got 1"),
    "many tokens": ({"token_ids": range(5)}, "token_ids: expected 4 tokens, got 5"),
    "float tokens": ({"token_ids": [1.0] * 4}, "token_ids: expected a flat array of integers"),
    "negative token": ({"token_ids": [1, 2, 3, -4]}, "token_ids: expected token ids in"),
    "more than extended": (
        {"token_ids": range(5), "num_committed": [3, 2]},
        r"at most the extended \[2, 2\], got \[3, 2\]",
    ),
    "negative committed": ({"token_ids": [], "num_committed": [-1, 1]}, "num_committed: expected counts >= 0, got -1"),
    "short committed": ({"token_ids": [1], "num_committed": [1]}, "num_committed: expected one count per sequence"),
}


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_bad_commits_are_refused_and_change_nothing(name: str) -> None:
    arguments, message = BAD_COMMITS[name]
    store = make_store()
    batch = store.extend(store.open([range(6), range(30, 35)]).seq_ids, 2)
    before = snapshot(store)
    with pytest.raises(ValueError, match=message):
        store.commit(batch, **arguments)
    assert snapshot(store) == before
    assert store._books.state.committed.sum() == 0
    store.commit(batch, range(4))
    store.check()


@pytest.mark.parametrize("kind", ["ring", "state", "tails"])
def test_fewer_tokens_are_refused_where_a_step_overwrites(kind: str) -> None:
    layers = mixed_layers()
    names = {"ring": "layers.3.ring", "state": "layers.2.state", "tails": WINDOW_LAYER}
    kept = {name: spec for name, spec in layers.items() if name in (LAYER, names[kind])}
    store = store_of(kept, stored="tail" if kind == "tails" else "all")
    batch = store.extend(store.open([range(6)]).seq_ids, 6)
    group = store.plan.groups[store.plan.group_index(names[kind])].name
    before = snapshot(store)
    message = f"num_committed: expected all tokens, got fewer: groups {group!r} keep rings, states or tails"
    with pytest.raises(ValueError, match=message):
        store.commit(batch, range(5), num_committed=[5])
    assert snapshot(store) == before
    store.commit(batch, range(6), num_committed=[6])
    store.check()


def test_a_released_sequence_is_refused() -> None:
    store = make_store()
    seq_ids = prefill(store, range(4))
    store.release(seq_ids)
    for call in (lambda: store.extend(seq_ids, 1), lambda: store.release(seq_ids)):
        with pytest.raises(SequenceError, match=f"got {seq_ids[0]}, a handle of a sequence that was released"):
            call()
    reused = store.open([range(4)]).seq_ids
    assert reused[0] != seq_ids[0]
    with pytest.raises(SequenceError, match="a handle of a sequence that was released"):
        store.extend(seq_ids, 1)


def test_decode_wants_one_token_per_sequence() -> None:
    store = make_store()
    batch = store.extend(store.open([range(4)]).seq_ids, 4)
    with pytest.raises(ValueError, match="expected one new token per sequence, got 4 tokens of 1 sequences"):
        store.gqa_decode(LAYER, batch, torch.zeros(1, 2, 8))


@pytest.mark.parametrize("start", [[-1], [5], [0, 0], [0.5]])
def test_a_gather_start_outside_the_sequence_is_refused(start: Any) -> None:
    store = make_store()
    batch = store.extend(store.open([range(4)]).seq_ids, 4)
    with pytest.raises(ValueError, match="start: expected"):
        store.gather(LAYER, batch, start=start)
    assert store.gather(LAYER, batch, start=[4])[0].shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"plan": "plan"}, TypeError, "plan: expected a CachePlan, got str"),
        ({"max_sequences": 0}, ValueError, r"max_sequences: expected an integer in \[1, .*, got 0"),
        ({"max_length": -1}, ValueError, "max_length: expected an integer"),
        ({"max_tokens_per_step": 1.5}, TypeError, "max_tokens_per_step: expected an integer, got 1.5"),
        ({"max_in_flight": True}, TypeError, "max_in_flight: expected an integer"),
        ({"zero_new": "yes"}, ValueError, "zero_new: expected True, False or 'auto', got 'yes'"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of triton, reference or None, got 'cuda'"),
        ({"device": "tpu"}, ValueError, "device: expected a torch device such as 'cpu' or 'cuda', got 'tpu'"),
        ({"device": "meta"}, ValueError, "device: expected 'cpu', a CUDA device or None, got 'meta'"),
        (
            {"device": "cuda:99"},
            ValueError,
            r"device: expected one that torch sees \(\d+ CUDA devices\), got 'cuda:99'",
        ),
    ],
)
def test_a_store_with_bad_limits_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    plan = kvstore.plan_cache({LAYER: kvstore.full_attention(1, 8)}, num_frames=8)
    with pytest.raises(error, match=message):
        KVStore(**{"plan": plan, "device": "cpu", **arguments})


def test_batches_are_committed_in_order_even_when_one_has_no_tokens() -> None:
    store = make_store()
    seq_ids = store.open([[1, 2, 3]]).seq_ids
    empty, full = store.extend(seq_ids, 0), store.extend(seq_ids, 3)
    with pytest.raises(ValueError, match="expected the earliest uncommitted batch of its sequences, got a later one"):
        store.commit(full, [1, 2, 3])
    store.commit(empty, [])
    store.commit(full, [1, 2, 3])
    store.release(seq_ids)
    store.check()
    assert store.stats().fenced == 0


def test_what_the_caller_does_to_its_arrays_later_does_not_reach_the_books() -> None:
    store = make_store()
    store.release(store.open([[1]]).seq_ids)
    seq_ids, counts = store.open([[1, 2, 3], [4]]).seq_ids, np.array([3, 1])
    batch = store.extend(seq_ids, counts)
    seq_ids[:] = seq_ids[::-1].copy()
    counts[:] = 1
    batch.positions.zero_()
    for array in (batch.seq_ids, batch.num_new_tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    store.commit(batch, [1, 2, 3, 4])
    store.check()
    assert sorted(store._books.state.committed.tolist())[-2:] == [1, 3]
    assert store._books.prefixes.tokens[batch.step.rows[0], :3].tolist() == [1, 2, 3]


def test_rows_that_have_left_the_window_are_not_gathered() -> None:
    store = make_hybrid(window=6)
    seq_ids = prefill(store, range(16))
    batch = store.extend(seq_ids, 1)
    with pytest.raises(ValueError, match=r"start: expected one row per sequence, from the first in reach \[11\]"):
        store.gather(WINDOW_LAYER, batch, start=[10])


def test_a_plan_with_several_blocks_per_frame_is_refused() -> None:
    plan = kvstore.plan_cache({LAYER: kvstore.full_attention(1, 8)}, num_frames=8)
    with pytest.raises(kvstore.PlanError, match="blocks_per_frame: expected 1 for every group in the layout 'buckets'"):
        dataclasses.replace(plan, blocks_per_frame=(2,), fingerprint="")


def test_a_layer_whose_rows_no_kernel_moves_is_refused() -> None:
    rows = RowFormat("bytes", (RowPart("x", torch.uint8, 1, 16),), (16,))
    plan = kvstore.plan_cache({LAYER: kvstore.LayerSpec("full", 4, rows)}, num_frames=4)
    with pytest.raises(ValueError, match=r"plan: layer 'layers.0.attn': expected rows of .* got torch.uint8"):
        KVStore(plan, "cpu")


def put(array: str, place: Any, value: Any) -> Callable[[Any], None]:
    """Overwrites one entry of an array of the books, named by its path."""

    def corrupt(books: Any) -> None:
        *path, last = array.split(".")
        for name in path:
            books = getattr(books, name)
        held = getattr(books, last)
        assert held[place] != value
        held[place] = value

    return corrupt


def put_entry(column: int, block: int) -> Callable[[Any], None]:
    return lambda books: books.tables.table(0).__setitem__((0, column), block)


CORRUPTIONS: dict[str, Callable[[Any], None]] = {
    "free row twice": put("handles.free", 0, 6),
    "free row that is open": put("handles.free", 0, 1),
    "open flag": put("handles.current", 0, -1),
    "closed row with a handle": put("handles.current", 6, 1 << 32 | 6),
    "generation of a row": put("handles.generation", 5, 0),
    "suspended row with blocks": put("handles.suspended", 0, True),
    "closed row suspended": put("handles.suspended", 7, True),
    "edition of a row": put("state.edition", 0, 0),
    "one edition twice": lambda books: put("state.edition", 0, books.state.edition[1])(books),
    "batches in flight": put("state.num_extends", 0, 5),
    "batches committed": put("state.num_commits", 0, 0),
    "committed": put("state.committed", 0, -1),
    "more committed than reserved": put("state.committed", 0, 8),
    "length past the blocks": put("state.length", 0, 9),
    "length short of the blocks": put("state.length", 0, 4),
    "room past the blocks": put("state.room", (0, 0), 12),
    "room short of the blocks": put("state.room", (0, 0), 4),
    "table entry of another sequence": put_entry(0, 3),
    "table entry out of range": put_entry(0, 9999),
    "table entry below 0": put_entry(0, -1),
    "table entry of a free block": put_entry(0, 60),
    "table entry gone": put_entry(0, 0),
    "entry behind the blocks": put_entry(9, 2),
    "entry of a closed row": lambda books: books.tables.table(0).__setitem__((7, 0), 2),
    "reference": put("allocator.references", 1, 2),
    "reference gone": put("allocator.references", 1, 0),
    "reference to the null block": put("allocator.references", 0, 1),
    "owner": put("allocator.group", 1, -1),
    "owner of a free block": put("allocator.group", 60, 0),
    "fence": put("allocator.fences", 1, 1),
    "fence below 0": put("allocator.fences", 60, -1),
    "indexed flag of a free block": put("allocator.indexed", 60, True),
    "priority of a block that is not indexed": put("allocator.priority", 60, 7),
    "forgotten batch": lambda books: books.unfinished.clear(),
    "fence list without a batch": lambda books: books.fences.append((99, np.array([1], np.int32))),
    "free block": lambda books: books.allocator._free.__setitem__(0, 1),
    "free block twice": lambda books: books.allocator._free.__setitem__(0, books.allocator._free[1]),
    "null block free": lambda books: books.allocator._free.__setitem__(0, 0),
    "count of free blocks": lambda books: setattr(books.allocator, "_num_free", books.allocator._num_free - 1),
    "count of cached blocks": lambda books: setattr(books.allocator, "_num_cached", 1),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_notices_a_corrupted_book(name: str) -> None:
    store = make_store()
    seq_ids = prefill(store, range(6), range(30, 35))
    store.extend(seq_ids, 1)
    store.check()
    CORRUPTIONS[name](store._books)
    with pytest.raises(AssertionError):
        store.check()


WINDOW_CORRUPTIONS: dict[str, Callable[[Any], None]] = {
    "a block inside the window is gone": lambda books: books.state.first.__setitem__((0, 0), 5),
    "a block behind the window is claimed": lambda books: books.tables.table(1).__setitem__((0, 1), 9),
    "a block held twice": lambda books: books.tables.table(1).__setitem__((0, 4), books.tables.table(1)[0, 5]),
    "a block of another group": lambda books: books.tables.table(1).__setitem__((0, 5), books.tables.table(0)[0, 0]),
    "a hole in the full group": lambda books: books.tables.table(0).__setitem__((0, 1), 0),
}


@pytest.mark.parametrize("name", WINDOW_CORRUPTIONS)
def test_check_notices_a_corrupted_window(name: str) -> None:
    store = make_hybrid(window=6)
    prefill(store, range(12))  # of the window tokens 6 ... 11 are held: blocks 3 to 5
    assert store._books.state.first[0, 0] == 3
    WINDOW_CORRUPTIONS[name](store._books)
    with pytest.raises(AssertionError):
        store.check()


def test_check_notices_an_indexed_flag_that_came_and_went() -> None:
    """A cached block whose flag is gone is in no state; one in use may be known to the index or not."""
    store = make_store()
    store.release(prefill(store, range(8)))
    store.check()
    store._books.allocator.indexed[1] = False
    with pytest.raises(AssertionError):
        store.check()


def test_a_sequence_beyond_max_length_is_refused() -> None:
    store = make_store()
    seq_ids = prefill(store, range(6), range(30, 35))
    with pytest.raises(ValueError, match=rf"at most 64 tokens \(max_length\), got 66 for sequence {seq_ids[0]}"):
        store.extend(seq_ids, [60, 1])
    store.commit(store.extend(seq_ids, [58, 1]), range(59))
    store.check()
