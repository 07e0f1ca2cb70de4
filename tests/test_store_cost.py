"""KVStore: what a decode step costs does not grow with the number of sequences, counted in calls."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_cases import make_hybrid, make_store, mixed_layers, prefill, store_of

from kvstore import KVStore


def make_mixed(num_frames: int, **limits: Any) -> KVStore:
    """Five groups: full, window, state, ring and chunk."""
    return store_of(mixed_layers(), 3 * num_frames, **limits)


def count_calls(function: Callable[[], Any]) -> int:
    calls = 0

    def profile(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


STORES = {"one group": make_store, "full and window": make_hybrid, "five groups": make_mixed}


@pytest.mark.parametrize("stagger", ["no block fills", "every block fills", "some blocks fill"])
@pytest.mark.parametrize("groups", STORES)
def test_a_decode_step_makes_the_same_number_of_calls_for_64_and_1024_sequences(stagger: str, groups: str) -> None:
    counts = {}
    for num_sequences in (64, 1024):
        limits = {"max_sequences": num_sequences, "max_length": 64, "max_tokens_per_step": 16 * num_sequences}
        store = STORES[groups](num_frames=20 * num_sequences, **limits)
        lengths = {"no block fills": [10], "every block fills": [11], "some blocks fill": [9, 10, 11, 12]}[stagger]
        prompts = [[7000 + row] * lengths[row % len(lengths)] for row in range(num_sequences)]
        seq_ids = prefill(store, *prompts)
        tokens = np.arange(num_sequences)

        def step(store: KVStore = store, seq_ids: np.ndarray = seq_ids, tokens: np.ndarray = tokens) -> None:
            store.commit(store.extend(seq_ids, 1), tokens)

        counts[num_sequences] = [count_calls(step) for _ in range(5)]
        store.check()
    assert counts[64] == counts[1024]
    assert min(counts[64]) > 10


@pytest.mark.parametrize("groups", ["one group", "five groups"])
def test_steps_that_evict_make_about_as_many_calls(groups: str) -> None:
    """The pool is full of what released sequences left. Queues of cached blocks are cleaned a few pieces at a time."""
    counts = {}
    for num_sequences in (64, 512):
        limits = {"max_sequences": num_sequences, "max_length": 64, "max_tokens_per_step": 16 * num_sequences}
        store = STORES[groups](num_frames=7 * num_sequences, **limits)
        for wave in range(2):
            prompts = [[7000 + wave * num_sequences + row] * 16 for row in range(num_sequences)]
            store.release(prefill(store, *prompts))
        seq_ids = prefill(store, *([1_000_000 + row] * 11 for row in range(num_sequences)))
        tokens, evicted = np.arange(num_sequences), store.stats().evicted

        def steps(store: KVStore = store, seq_ids: np.ndarray = seq_ids, tokens: np.ndarray = tokens) -> None:
            for _ in range(6):
                store.commit(store.extend(seq_ids, 1), tokens)

        counts[num_sequences] = count_calls(steps)
        assert store.stats().evicted > evicted
    assert abs(counts[64] - counts[512]) < 32
    assert min(counts.values()) > 6 * 10
