"""KVStore: what is refused of the calls beside open, extend and commit; nothing changes by it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import (
    CHUNK_LAYER,
    LAYER,
    RING_LAYER,
    STATE_LAYER,
    WINDOW_LAYER,
    feed,
    make_store,
    mixed_layers,
    prefill,
    refused,
    ring,
    rows_for,
    snapshot,
    state,
    store_of,
)

import kvstore
from kvstore import CacheGroup, Item, KeepTokens, KVStore, Namespace, OutOfBlocks, SequenceError
from kvstore.layers import full_attention, latent, sliding_window
from kvstore.specs import LayerSpec

# Handles

CALLS: dict[str, Callable[[KVStore, Any, Any], Any]] = {
    "extend": lambda store, wrong, good: store.extend([good, wrong], 1),
    "release": lambda store, wrong, good: store.release([good, wrong]),
    "truncate": lambda store, wrong, good: store.truncate([good, wrong], 1),
    "fork": lambda store, wrong, good: store.fork(wrong, 1),
    "reorder": lambda store, wrong, good: store.reorder([good, wrong], [good, good]),
    "reorder from": lambda store, wrong, good: store.reorder([good], [wrong]),
    "suspend": lambda store, wrong, good: store.suspend([good, wrong]),
    "resume": lambda store, wrong, good: store.resume([wrong]),
    "explain_hit": lambda store, wrong, good: store.explain_hit(wrong),
}


@pytest.mark.parametrize("handle", ["unknown", "negative", "released", "foreign", "no integer"])
@pytest.mark.parametrize("call", CALLS)
def test_a_handle_that_names_no_sequence_is_refused_in_every_call(call: str, handle: str) -> None:
    store, other = make_store(), make_store()
    good, gone = prefill(store, range(6), range(30, 35)).tolist()
    store.release([gone])
    foreign = other.open([[1]] * 5).seq_ids[-1].item()
    wrong, error, message = {
        "unknown": (
            12345,
            SequenceError,
            "expected handles of open sequences, got 12345, which is no handle from open",
        ),
        "negative": (-5, SequenceError, "expected handles of open sequences, got -5, which is no handle from open"),
        "released": (
            gone,
            SequenceError,
            f"expected handles of open sequences, got {gone}, a handle of a sequence that was released",
        ),
        "foreign": (
            foreign,
            SequenceError,
            f"expected handles of open .*, got {foreign}, which is no handle from open",
        ),
        "no integer": ("a", ValueError, "expected a flat array of integers"),
    }[handle]
    name = {"reorder from": "parents", "fork": "seq_id", "explain_hit": "seq_id"}.get(call, "seq_ids")
    refused(store, lambda: CALLS[call](store, wrong, good), error, f"^{name}: {message}")


@pytest.mark.parametrize("call", [call for call in CALLS if call not in ("release", "resume", "explain_hit")])
def test_a_suspended_sequence_is_refused(call: str) -> None:
    store = make_store()
    good, away = prefill(store, range(6), range(30, 35)).tolist()
    store.suspend([away])
    name = {"reorder from": "parents", "fork": "seq_id"}.get(call, "seq_ids")
    message = f"^{name}: expected sequences that are resident, got {away}, which is suspended"
    refused(store, lambda: CALLS[call](store, away, good), SequenceError, message)


def test_a_suspended_sequence_can_be_explained_and_released() -> None:
    store = make_store()
    (away,) = prefill(store, range(6)).tolist()
    store.suspend([away])
    assert store.explain_hit(away).num_tokens == 6
    store.release([away])
    store.check()
    assert store.stats().suspended_sequences == 0


@pytest.mark.parametrize("call", ["release", "truncate", "reorder", "suspend", "resume"])
def test_a_repeated_handle_is_refused(call: str) -> None:
    store = make_store()
    seq_id = prefill(store, range(6))[0]
    if call == "resume":
        store.suspend([seq_id])
    twice = [seq_id, seq_id]
    arguments = {"truncate": (twice, 1), "reorder": (twice, twice)}.get(call, (twice,))
    refused(
        store, lambda: getattr(store, call)(*arguments), SequenceError, f"expected each sequence once, got {seq_id}"
    )


@pytest.mark.parametrize("call", ["truncate", "fork", "reorder", "reorder from", "suspend"])
def test_a_sequence_with_an_uncommitted_batch_is_refused(call: str) -> None:
    store = make_store()
    good, busy = prefill(store, range(6), range(30, 35)).tolist()
    batch = store.extend([busy], 1)
    name = {"reorder from": "parents", "fork": "seq_id"}.get(call, "seq_ids")
    message = f"^{name}: expected sequences without uncommitted batches, got {busy} with 1"
    refused(store, lambda: CALLS[call](store, busy, good), SequenceError, message)
    store.commit(batch, [35])
    store.check()


# Fork, reorder, suspend

OTHERS: dict[str, tuple[Callable[[KVStore, list[int]], Any], type[Exception], str]] = {
    "forks beyond max_sequences": (
        lambda store, ids: store.fork(ids[0], 7),
        SequenceError,
        r"num_forks: expected at most 6 more sequences \(2 of max_sequences 8 are open; .*\), got 7",
    ),
    "negative forks": (lambda store, ids: store.fork(ids[0], -1), ValueError, "num_forks: expected an integer >= 0"),
    "half a fork": (lambda store, ids: store.fork(ids[0], 0.5), TypeError, "num_forks: expected an integer"),
    "true forks": (lambda store, ids: store.fork(ids[0], True), TypeError, "num_forks: expected an integer"),
    "fork of two": (lambda store, ids: store.fork(np.array(ids), 1), ValueError, "seq_id: expected one handle, got 2"),
    "few parents": (
        lambda store, ids: store.reorder(ids, ids[:1]),
        ValueError,
        "parents: expected one per sequence, 2 in all, got 1",
    ),
    "many parents": (
        lambda store, ids: store.reorder(ids[:1], ids),
        ValueError,
        "parents: expected one per sequence, 1 in all, got 2",
    ),
    "resume of a resident one": (
        lambda store, ids: store.resume(ids),
        SequenceError,
        r"seq_ids: expected suspended sequences, got \d+, which is not",
    ),
    "longer": (
        lambda store, ids: store.truncate(ids, [6, 6]),
        ValueError,
        r"lengths: expected 0 \.\.\. 5, the length of sequence \d+, got 6",
    ),
    "negative length": (
        lambda store, ids: store.truncate(ids, -1),
        ValueError,
        r"lengths: expected 0 \.\.\. 6, .* got -1",
    ),
    "few lengths": (
        lambda store, ids: store.truncate(ids, [3]),
        ValueError,
        "lengths: expected one per sequence, 2 in all, got 1",
    ),
    "half lengths": (lambda store, ids: store.truncate(ids, [0.5, 1]), ValueError, "lengths: expected a flat array of"),
    "bool length": (lambda store, ids: store.truncate(ids, True), ValueError, "lengths: expected a flat array of"),
    "invalidate nothing": (
        lambda store, ids: store.invalidate(),
        TypeError,
        "invalidate: expected a namespace or a predicate, one of the two",
    ),
    "invalidate twice": (
        lambda store, ids: store.invalidate(Namespace(), predicate=bool),
        TypeError,
        "invalidate: expected a namespace or a predicate, one of the two",
    ),
    "invalidate text": (
        lambda store, ids: store.invalidate("tenant"),
        TypeError,
        "namespace: expected a Namespace, got str",
    ),
    "predicate that fails": (
        lambda store, ids: store.invalidate(predicate=lambda known: {None: True}[known.adapter]),
        KeyError,
        "tuned",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_bad_calls_are_refused(name: str) -> None:
    store = make_store()
    ids = prefill(store, range(6), range(30, 35)).tolist()
    if name == "predicate that fails":
        (more,) = store.open([range(4)], Namespace(adapter="tuned")).seq_ids.tolist()
        store.commit(store.extend([more], 4), range(4))
    call, error, message = OTHERS[name]
    refused(store, lambda: call(store, ids), error, message)


@pytest.mark.parametrize(
    ("layers", "tokens", "rollback", "least"),
    [
        ({WINDOW_LAYER: sliding_window(2, 8, dtype=torch.float32, block_size=2, window=6)}, 16, 0, 15),
        ({WINDOW_LAYER: sliding_window(2, 8, dtype=torch.float32, block_size=2, window=6)}, 16, 3, 13),
        ({STATE_LAYER: state(4)}, 16, 0, 16),
        ({STATE_LAYER: state(4)}, 16, 3, 16),
        ({RING_LAYER: ring(4)}, 16, 0, 16),
        ({RING_LAYER: ring(4)}, 4, 0, 0),
        ({CHUNK_LAYER: mixed_layers()[CHUNK_LAYER]}, 19, 0, 16),
        ({CHUNK_LAYER: mixed_layers()[CHUNK_LAYER]}, 19, 5, 8),
        ({LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4)}, 16, 0, 0),
    ],
    ids=[
        "window", "window with rollback", "state", "state with rollback", "ring that wrapped", "ring not full yet",
        "chunk", "chunk with rollback", "full",
    ],
)  # fmt: skip
def test_truncate_goes_back_as_far_as_every_group_can(
    layers: dict[str, LayerSpec], tokens: int, rollback: int, least: int
) -> None:
    """A window of 6 in blocks of 2 at 16 tokens holds 11 ... 15 in blocks from token 10 on: enough for 15 tokens."""
    store = store_of(layers, rollback=rollback)
    seq_ids = prefill(store, range(tokens))
    name, kind = store.plan.groups[0].name, store.plan.groups[0].retention.kind
    for length in range(least):
        message = rf"lengths: expected what group {name!r} \({kind}\) can roll back to, got {length} for sequence"
        refused(store, lambda wanted=length: store.truncate(seq_ids, wanted), ValueError, message)
    store.truncate(seq_ids, least)
    store.check()
    assert store.extend(seq_ids, 1).positions.tolist() == [least]
    store.check()


# What is opened with

OPENS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "text": ({"namespace": "ab"}, TypeError, r"namespace\[0\]: expected a Namespace, got str"),
    "number": ({"namespace": 3}, TypeError, "namespace: expected a Namespace, or one per prompt, got int"),
    "too few namespaces": (
        {"namespace": [Namespace()]},
        ValueError,
        "namespace: expected one per prompt, 2 in all, got 1",
    ),
    "no namespace": ({"namespace": [None, "x"]}, TypeError, r"namespace\[1\]: expected a Namespace, got str"),
    "item past the end": (
        {"namespace": Namespace(items=(Item(3, "cat", 3),))},
        ValueError,
        r"namespace\[1\]: items: expected them inside the prompt of 5 tokens, got one that ends at 6",
    ),
    "text to keep": ({"retention": "ab"}, TypeError, r"retention\[0\]: expected a list of KeepTokens, got 'a'"),
    "one to keep": (
        {"retention": KeepTokens(0)},
        TypeError,
        "retention: expected KeepTokens, or a list .* got KeepTokens",
    ),
    "too few to keep": ({"retention": [[]]}, ValueError, "retention: expected one list per prompt, 2 in all, got 1"),
    "numbers to keep": (
        {"retention": [[], [1]]},
        TypeError,
        r"retention\[1\]: expected a list of KeepTokens, got \[1\]",
    ),
    "mixed to keep": ({"retention": [KeepTokens(0), []]}, TypeError, r"retention\[0\]: expected a list of KeepTokens"),
}


@pytest.mark.parametrize("name", OPENS)
def test_bad_namespaces_and_retentions_are_refused(name: str) -> None:
    arguments, error, message = OPENS[name]
    store = make_store()
    prefill(store, range(6))
    refused(store, lambda: store.open([range(6), range(5)], **arguments), error, message)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rollback": -1}, ValueError, r"rollback: expected an integer in \[0, 64\], got -1"),
        ({"rollback": 65}, ValueError, r"rollback: expected an integer in \[0, 64\], got 65"),
        ({"rollback": 1.0}, TypeError, "rollback: expected an integer, got 1.0"),
        ({"stored": "head"}, ValueError, "stored: expected 'all' or 'tail', got 'head'"),
        ({"stored": None}, ValueError, "stored: expected 'all' or 'tail', got None"),
        ({"max_events": -1}, ValueError, "max_events: expected an integer in .*, got -1"),
        ({"max_events": True}, TypeError, "max_events: expected an integer"),
        ({"debug": 1}, TypeError, "debug: expected True or False, got 1|debug: expected a bool, got 1"),
        ({"prefix_caching": "yes"}, TypeError, "prefix_caching: expected .*, got 'yes'"),
        ({"clock": 5}, TypeError, "clock: expected a function that returns seconds, got 5"),
        ({"zero_new": 1}, ValueError, "zero_new: expected True, False or 'auto', got 1"),
    ],
    ids=lambda value: "-".join(f"{name}={what}" for name, what in value.items()) if isinstance(value, dict) else "",
)
def test_bad_options_of_a_store_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_store(**arguments)


# The pool


def test_out_of_blocks_counts_per_group() -> None:
    """9 blocks for two groups: 2 + 2 held, 1 + 1 fenced, 1 + 1 cached, 1 free."""
    specs = {"A": full_attention(1, 8, block_size=4), "B": latent(12, 8, block_size=4)}
    groups = [CacheGroup(name, {name: spec}, 4, spec.retention) for name, spec in specs.items()]
    store = KVStore(kvstore.plan_cache(groups, num_frames=10, layout="overlay"), None, max_sequences=4)
    prefill(store, range(8))
    store.release(prefill(store, range(20, 24)))
    fenced = prefill(store, range(40, 42))
    batch = store.extend(fenced, 1)
    store.release(fenced)
    seq_ids = store.open([range(60, 80)]).seq_ids
    before = snapshot(store)
    with pytest.raises(OutOfBlocks) as caught:
        store.extend(seq_ids, 9)
    error = caught.value
    assert (error.wanted, error.free, error.evictable, error.fenced) == ((3, 3), (1, 1), (2, 2), (1, 1))
    assert str(error) == (
        "out of blocks, counted per group: wanted [3, 3], free [1, 1], evictable [2, 2], fenced [1, 1]; "
        "the groups share one pool, which lacks blocks for all of them together"
    )
    assert snapshot(store) == before
    store.commit(batch, [42])
    with pytest.raises(OutOfBlocks, match=r"free \[3, 3\], evictable \[2, 2\], fenced \[0, 0\]"):
        store.extend(seq_ids, 9)
    store.extend(seq_ids, 8)
    store.check()


def test_a_batch_whose_blocks_changed_hands_is_refused_in_debug_mode() -> None:
    store = make_store(num_frames=4, debug=True)
    seq_ids = prefill(store, range(6))
    batch = store.extend(seq_ids, 1)
    store.write(LAYER, batch, rows_for([6]), rows_for([6]))
    store._given_up[1] += 1
    with pytest.raises(
        ValueError, match=r"batch: expected blocks that are still the batch's own, got block 1 of group"
    ):
        store.gather(LAYER, batch)


@pytest.mark.parametrize("zero_new", [False, True], ids=["as it is", "cleared"])
def test_what_is_given_up_is_poisoned_in_debug_mode(zero_new: bool) -> None:
    store = make_store(num_frames=4, debug=True, zero_new=zero_new, prefix_caching=False)
    first = store.open([range(6)]).seq_ids
    feed(store, first, range(6))
    pages = store.page_view(LAYER).tensor("k")
    store.release(first)
    assert torch.isnan(pages[1:3]).all()
    batch = store.extend(store.open([range(6)]).seq_ids, 6)
    blocks = batch.block_table[0][0].long()
    assert torch.isnan(pages[blocks]).all() if not zero_new else not pages[blocks].any()
    assert not pages[0].any()
