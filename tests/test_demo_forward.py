"""The forward passes of the demo's hybrid models, step by step: logits, what is called, what is read."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVStore, plan_cache, specs_from_config
from kvstore.demo.deepseek_v4 import DeepseekV4, cache_specs
from kvstore.demo.tiny import TINY, VOCAB_SIZE

MAX_LENGTH = 320
GEMMA, V4 = "gemma3-tiny", "deepseek-v4-tiny"
CHUNKS = {
    GEMMA: [(16, 23, 1, 40), (9, 1, 1, 25), (1, 1, 8, 1), (1, 1, 15, 1), (7, 2, 1, 1)],
    V4: [(127, 24, 1, 130), (1, 1, 2, 126), (1, 7, 1, 1), (3, 1, 124, 1), (1, 101, 1, 5)],
}
"""Tokens of four prompts in each step: decoding beside chunks, around windows, blocks and compressed rows."""
READS = ("gather", "read", "gqa_decode", "sparse_mla_decode", "slots_of", "write")


class WatchedStore(KVStore):
    """Counts the calls that move rows, and passes over writes to layers whose name ends with `lost`."""

    lost: str | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: Counter[str] = Counter()
        for name in READS:
            setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(layer: str, *arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            if name == "write" and self.lost is not None and layer.endswith(self.lost):
                return None
            return call(layer, *arguments, **options)

        return counted


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products as small as these lose more to a second thread than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def references():
    return {name: tiny.reference(0) for name, tiny in TINY.items()}


def new_store(name: str, reference: Any) -> WatchedStore:
    plan = plan_cache(TINY[name].caches(reference.config, torch.float32), memory="16MiB", layout="overlay")
    return WatchedStore(plan, "cpu", max_sequences=8, max_length=MAX_LENGTH, max_tokens_per_step=500, debug=True)


def run(store: KVStore, model: Any, prompts: list[np.ndarray], chunks: list[tuple[int, ...]]) -> Any:
    """Yields prompt, position and logits of the last token of every chunk; decoding comes before prefill."""
    seq_ids, done = store.open(prompts).seq_ids, np.zeros(len(prompts), np.int64)
    for counts in map(np.array, chunks):
        parts = [rows for rows in (np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)) if rows.size]
        batches = [store.extend(seq_ids[rows], counts[rows]) for rows in parts]
        tokens = [np.concatenate([prompts[row][done[row] : done[row] + counts[row]] for row in rows]) for rows in parts]
        rows = np.concatenate(parts)
        wanted = torch.from_numpy(np.cumsum(counts[rows]) - 1)
        logits = model.forward(store, batches, torch.from_numpy(np.concatenate(tokens)), wanted)
        for batch, ids in zip(batches, tokens, strict=True):
            store.commit(batch, ids)
        done += counts
        yield from zip(rows.tolist(), (done[rows] - 1).tolist(), logits, strict=True)
    store.check()


def random_prompts(chunks: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, length) for length in np.sum(chunks, 0)]


def worst_error(name: str, reference: Any, lost: str | None = None) -> float:
    """The largest difference from transformers' logits of whole prompts, in units of the largest logit."""
    prompts, store = random_prompts(CHUNKS[name]), new_store(name, reference)
    store.lost = lost
    with torch.no_grad():
        expected = [reference(torch.from_numpy(prompt)[None]).logits[0] for prompt in prompts]
    steps = list(run(store, TINY[name].model(reference, MAX_LENGTH), prompts, CHUNKS[name]))
    assert len(steps) == len(prompts) * len(CHUNKS[name])
    errors = [(logits - expected[row][at]).abs().max() / expected[row].abs().max() for row, at, logits in steps]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", [GEMMA, V4])
def test_logits_equal_transformers(references, name):
    assert worst_error(name, references[name]) < 1e-5


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        (GEMMA, "0.attn"),
        (GEMMA, "2.attn"),
        (V4, "0.window"),
        (V4, "1.compressed"),
        (V4, "2.compressed"),
        (V4, "1.indexer"),
        (V4, "1.state"),
        (V4, "2.state"),
        (V4, "1.indexer_state"),
    ],
    ids=lambda value: value,
)
def test_rows_of_every_kind_are_read(references, name, lost):
    """Without its rows the logits are others: what the test above compares depends on them."""
    error = worst_error(name, references[name], lost)
    assert not error < 1e-3


@pytest.mark.parametrize("count", [1, 4], ids=["decode", "prefill"])
def test_a_step_makes_as_many_calls_of_the_store_for_any_number_of_sequences(references, count):
    for name, reference in references.items():
        calls = []
        for num_sequences in (2, 7):
            chunks = [(60,) * num_sequences, (count,) * num_sequences]
            store = new_store(name, reference)
            steps = run(store, TINY[name].model(reference, MAX_LENGTH), random_prompts(chunks), chunks)
            for _ in range(num_sequences):
                next(steps)
            store.calls.clear()
            next(steps)
            calls.append(dict(store.calls))
        assert calls[0] == calls[1]
        read = "sparse_mla_decode" if name == V4 else "gqa_decode" if count == 1 else "gather"
        assert calls[0][read] == reference.config.num_hidden_layers


def test_compressor_states_as_rings_are_refused(references):
    reference = references[V4]
    rings = specs_from_config(reference.config, block_size=128, kv_dtype="float32", ring_states=True)
    states = {layer: spec for layer, spec in rings.items() if layer.endswith("state")}
    plan = plan_cache(cache_specs(reference.config, torch.float32, 128) | states, memory="16MiB")
    store = KVStore(plan, "cpu", max_sequences=1, max_length=MAX_LENGTH, max_tokens_per_step=64)
    batch = store.extend(store.open([[1, 2, 3, 4]]).seq_ids, 4)
    with pytest.raises(ValueError, match=r"store: expected a window of rows, got 'layers\.1\.state' of kind 'ring'"):
        DeepseekV4(reference, MAX_LENGTH).forward(store, [batch], torch.tensor([1, 2, 3, 4]), torch.tensor([3]))
