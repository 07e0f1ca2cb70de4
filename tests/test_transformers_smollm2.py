"""A real model, SmolLM2-135M: beam search and assisted generation on the store's pages give transformers' own texts."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore import KVStore
from kvstore.demo.weights import load
from kvstore.integrations.transformers import KVStoreCache, plan_model, register_attention

PROMPTS = ("The three states of water are", "Once upon a time, in a small village by the sea,")
REPETITIVE = "one two three four five six seven. one two three four five six seven. one two three"


@pytest.fixture(scope="module")
def smollm2() -> Any:
    loaded = load(None, torch.float32)
    loaded.tokenizer.padding_side = "left"
    return loaded.reference, loaded.tokenizer


def store_for(model: Any) -> KVStore:
    return KVStore(plan_model(model, memory="64MiB"), "cpu", max_sequences=8, max_length=256, max_tokens_per_step=1024)


@pytest.mark.parametrize("attention", ["sdpa", "kvstore"])
def test_beam_search_4(smollm2: Any, attention: str) -> None:
    model, tokenizer = smollm2
    register_attention()
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    options = {"max_new_tokens": 20, "num_beams": 4, "do_sample": False}
    model.set_attn_implementation("sdpa")
    expected = model.generate(**inputs, **options)
    store = store_for(model)
    model.set_attn_implementation(attention)
    with KVStoreCache(store, inputs.input_ids, inputs.attention_mask) as cache:
        output = model.generate(**inputs, cache=cache, **options)
    assert tokenizer.batch_decode(output) == tokenizer.batch_decode(expected)
    store.check()
    assert store.stats().in_use == 0


@pytest.mark.parametrize("attention", ["sdpa", "kvstore"])
@pytest.mark.parametrize("drafter", ["prompt lookup", "model"])
def test_assisted_generation(smollm2: Any, drafter: str, attention: str) -> None:
    model, tokenizer = smollm2
    register_attention()
    inputs = tokenizer(REPETITIVE, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    model.set_attn_implementation("sdpa")
    expected = model.generate(**inputs, **options)
    if drafter == "model":  # one that knows nothing: every draft is taken back
        torch.manual_seed(0)
        small = LlamaConfig(
            vocab_size=model.config.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=model.config.bos_token_id,
            eos_token_id=model.config.eos_token_id,
        )
        options["assistant_model"] = LlamaForCausalLM(small).eval()
    else:
        options["prompt_lookup_num_tokens"] = 5
    store = store_for(model)
    model.set_attn_implementation(attention)
    steps = []
    with KVStoreCache(store, inputs.input_ids) as cache:
        crop = cache.crop
        cache.crop = lambda tokens: (steps.append(-tokens), crop(tokens))[1]  # type: ignore[method-assign]
        output = model.generate(**inputs, cache=cache, **options)
        cache.commit(output)
    assert tokenizer.decode(output[0]) == tokenizer.decode(expected[0])
    assert len(steps) < 24 if drafter == "prompt lookup" else sum(steps) > 0  # drafts were kept, or taken back
    store.check()
    assert store.lookup(output.tolist()).tolist() == [(output.shape[1] - 1) // 16 * 16]
