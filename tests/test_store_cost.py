"""KVStore: what a decode step costs does not grow with the number of sequences, counted in calls."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from store_cases import make_hybrid, make_store, prefill

from kvstore import KVStore


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


@pytest.mark.parametrize("stagger", ["no block fills", "every block fills", "some blocks fill"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "full and window"])
def test_a_decode_step_makes_the_same_number_of_calls_for_64_and_1024_sequences(stagger: str, hybrid: bool) -> None:
    counts = {}
    for num_sequences in (64, 1024):
        make = make_hybrid if hybrid else make_store
        limits = {"max_sequences": num_sequences, "max_length": 64, "max_tokens_per_step": 16 * num_sequences}
        store = make(num_frames=20 * num_sequences, **limits)
        lengths = {"no block fills": [10], "every block fills": [11], "some blocks fill": [9, 10, 11, 12]}[stagger]
        prompts = [[7000 + row] * lengths[row % len(lengths)] for row in range(num_sequences)]
        seq_ids = prefill(store, *prompts)
        tokens = np.arange(num_sequences)

        def step(store: KVStore = store, seq_ids: np.ndarray = seq_ids, tokens: np.ndarray = tokens) -> None:
            store.commit(store.extend(seq_ids, 1), tokens)

        counts[num_sequences] = count_calls(step)
    assert counts[64] == counts[1024]
    assert counts[64] > 10
