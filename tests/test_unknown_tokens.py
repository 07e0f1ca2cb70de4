"""Tokens that an engine commits before it knows their ids, prompts that are only looked up, and bounded hits."""

import numpy as np
import pytest
import torch

import kvstore
from kvstore import KVStore

FULL = kvstore.full_attention(1, 8, dtype=torch.float32)
WINDOW = kvstore.sliding_window(1, 8, window=20, dtype=torch.float32)


def make_store(*specs: kvstore.LayerSpec, **options: object) -> KVStore:
    layers = {f"layers.{i}.attn": spec for i, spec in enumerate(specs or (FULL,))}
    plan = kvstore.plan_cache(layers, num_frames=64)
    return KVStore(plan, None, **({"max_sequences": 8, "max_length": 256, "max_tokens_per_step": 256} | options))


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def run(store: KVStore, prompt: list[int], unknown: int) -> int:
    """Computes a prompt, and `unknown` tokens whose ids it does not tell. Returns: the handle."""
    (seq_id,) = store.open([prompt]).seq_ids
    cached = store.lookup([prompt])[0]
    store.commit(store.extend([seq_id], len(prompt) - cached), prompt[cached:])
    for _ in range(unknown):
        store.commit(store.extend([seq_id], 1), [-1])
        store.check()
    return int(seq_id)


def test_unknown_tokens_are_not_found_until_they_are_named() -> None:
    prompt, more = tokens(0, 20), tokens(100, 30)
    store = make_store()
    store.release([run(store, prompt, 30)])
    assert store.lookup([[*prompt, *more]]).tolist() == [16]  # the whole block of the prompt, nothing behind it
    seq_id = run(store, prompt, 30)
    store.name_tokens([seq_id], [[*prompt, *more]])
    store.release([seq_id])
    assert store.lookup([[*prompt, *more]]).tolist() == [48]
    assert store.lookup([[*prompt, *tokens(200, 30)]]).tolist() == [20]  # and part of a block, by copy
    store.check()


def test_placeholders_are_never_content() -> None:
    store = make_store()
    store.release([run(store, tokens(0, 16), 32)])
    assert store.lookup([[*tokens(0, 16), *[0] * 32]]).tolist() == [16]


def test_tokens_known_and_unknown_in_one_batch() -> None:
    prompt = tokens(0, 40)
    store = make_store()
    (seq_id,) = store.open([prompt]).seq_ids
    store.commit(store.extend([seq_id], 48), [*prompt, *[-1] * 8])
    store.commit(store.extend([seq_id], 16), tokens(300, 16))  # known, but behind unknown ones
    assert store.lookup([[*prompt, 1]]).tolist() == [32]
    store.release([seq_id])
    assert store.lookup([[*prompt, *[7] * 8, *tokens(300, 16), 1]]).tolist() == [32]


def test_tokens_taken_back_need_no_name() -> None:
    prompt = tokens(0, 16)
    store = make_store()
    seq_id = run(store, prompt, 10)
    store.truncate([seq_id], 16)
    store.commit(store.extend([seq_id], 17), tokens(50, 17))
    store.release([seq_id])
    assert store.lookup([[*prompt, *tokens(50, 17)]]).tolist() == [32]


def test_a_withdrawn_draft_leaves_no_unknown_token() -> None:
    store = make_store()
    seq_id = run(store, tokens(0, 16), 0)
    store.commit(store.extend([seq_id], 4), [60], num_committed=1)
    store.commit(store.extend([seq_id], 3), [-1], num_committed=1)
    store.name_tokens([seq_id], [[*tokens(0, 16), 60, 61]])
    store.commit(store.extend([seq_id], 14), tokens(62, 14))
    store.release([seq_id])
    assert store.lookup([[*tokens(0, 16), *tokens(60, 16), 1]]).tolist() == [32]


def test_a_fork_does_not_know_more_than_its_parent() -> None:
    prompt = tokens(0, 16)
    store = make_store()
    seq_id = run(store, prompt, 8)
    (fork,) = store.fork(seq_id, 1).tolist()
    for ids in ([seq_id], [fork]):
        store.commit(store.extend(ids, 8), tokens(90, 8))
    store.name_tokens([fork], [[*prompt, *tokens(40, 8), *tokens(90, 8)]])
    store.release([seq_id, fork])
    assert store.lookup([[*prompt, *tokens(40, 8), *tokens(90, 8), 1]]).tolist() == [32]
    assert store.lookup([[*prompt, *tokens(41, 8), *tokens(90, 8), 1]]).tolist() == [16]


def test_windows_move_on_without_names() -> None:
    prompt = tokens(0, 32)
    store = make_store(FULL, WINDOW)
    seq_id = run(store, prompt, 64)
    store.name_tokens([seq_id], [[*prompt, *tokens(500, 64)]])
    store.release([seq_id])
    assert store.lookup([[*prompt, *tokens(500, 64), 1]]).tolist() == [96]
    store.check()


def test_a_bounded_hit() -> None:
    prompt = tokens(0, 65)
    store = make_store(FULL, WINDOW)
    store.release([run(store, prompt, 0)])
    asked = [prompt] * 4
    assert store.lookup(asked, max_cached_tokens=[0, 31, 32, 100]).tolist() == [0, 16, 32, 64]
    opened = store.open(asked, max_cached_tokens=[0, 31, 32, 100])
    assert opened.cached_tokens.tolist() == [0, 16, 32, 64]
    store.check()
    store.release(opened.seq_ids)
    assert make_store(prefix_caching=False).lookup([prompt]).tolist() == [0]


def test_a_lookup_changes_nothing() -> None:
    store = make_store()
    store.release([run(store, tokens(0, 40), 0)])
    before = store.stats()
    assert store.lookup([tokens(0, 40), tokens(5, 40)]).tolist() == [32, 0]
    assert store.stats() == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, i: s.commit(s.extend([i], 1), [-2]), r"token_ids: expected token ids in \[0, 2147483647\], got -2"),
        (
            lambda s, i: s.name_tokens([i], [tokens(0, 17)]),
            r"token_arrays\[0\]: expected the 18 committed tokens of the sequence, got 17",
        ),
        (
            lambda s, i: s.name_tokens([i], [[0, 9, *tokens(2, 16)]]),
            r"token_arrays\[0\]: expected the tokens that were committed, 1 at position 1, got 9",
        ),
        (lambda s, i: s.name_tokens([i], []), "token_arrays: expected one per sequence, 1 in all, got 0"),
        (lambda s, i: s.name_tokens([i], [[-1] * 18]), r"token_arrays\[0\]: expected token ids in \[0, "),
        (lambda s, i: s.name_tokens([i + 1], [[1]]), "seq_ids: expected handles of open sequences"),
        (
            lambda s, i: s.lookup([[1]], max_cached_tokens=-1),
            "max_cached_tokens: expected a number >= 0, or one per prompt, 1 in all, got -1",
        ),
        (lambda s, i: s.open([[1]], max_cached_tokens=[1, 2]), r"1 in all, got \[1, 2\]"),
        (lambda s, i: s.open([[1]], max_cached_tokens=True), "max_cached_tokens: expected a flat array of integers"),
        (lambda s, i: s.lookup([[-1]]), r"token_arrays\[0\]: expected token ids in"),
    ],
    ids=["id", "count", "other", "none", "unnamed", "handle", "negative", "two", "bool", "prompt"],
)
def test_bad_calls_change_nothing(call: object, message: str) -> None:
    store = make_store()
    seq_id = run(store, tokens(0, 16), 2)
    with pytest.raises(ValueError, match=message):
        call(store, seq_id)  # type: ignore[operator]
    store.check()
    store.name_tokens([seq_id], [np.arange(18)])
