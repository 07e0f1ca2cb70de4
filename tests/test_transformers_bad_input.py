"""KVStoreCache and its helpers with what they cannot serve: said at once, in the user's words; nothing is left open."""

from typing import Any

import pytest
import torch
import transformers

import kvstore
from benchmarks.family_models import FAMILIES, VOCABULARY
from benchmarks.family_runs import model_of, padded, prompts_of, store_of
from kvstore import KVStore, PlanError, SequenceError
from kvstore.integrations.transformers import KVStoreCache, model_specs, plan_model, register_attention
from kvstore.integrations.transformers.attention import kvstore_attention

IDS, MASK = padded(prompts_of((8, 5), 0))


def own(family: str) -> Any:
    model = model_of(family)
    model.set_attn_implementation("eager" if family in ("gpt-oss", "deepseek-v4") else "sdpa")
    return model


def expect_empty(store: KVStore) -> None:
    store.check()
    assert store.stats().open_sequences == store.stats().in_use == 0


@pytest.mark.parametrize(
    ("input_ids", "mask", "message"),
    [
        ([1, 2], None, r"input_ids: expected integers \[rows, columns\], at least one of each, got shape \[2\]"),
        ([[]], None, r"input_ids: .* got shape \[1, 0\]"),
        (torch.ones(1, 3), None, r"input_ids: expected integers .* of float32"),
        (IDS, MASK[:, 1:], r"attention_mask: expected the shape \[2, 8\] of input_ids, got \[2, 7\]"),
        (IDS, MASK.flip(1), r"attention_mask: expected zeros on the left .*padding_side='left'\), got row 1: \[1, 1"),
        (IDS, MASK * 0, r"got row 0: \[0, 0, 0, 0, 0, 0, 0, 0\]"),
        (IDS, MASK * 2, r"got row 0: \[2, 2"),
        ([[-5, 2]], None, r"token_arrays\[0\]: expected token ids in \[0, 2147483647\], got -5"),
        ([[1] * 600], None, r"token_arrays\[0\]: expected 1 to 512 tokens \(max_length\), got 600"),
    ],
    ids=["flat", "empty", "floats", "shape", "right", "nothing", "twos", "negative", "long"],
)
def test_prompts(input_ids: Any, mask: Any, message: str) -> None:
    store = store_of("llama", "buckets")
    with pytest.raises(ValueError, match=message):
        KVStoreCache(store, input_ids, mask)
    expect_empty(store)


def test_a_store_is_needed_and_its_pages() -> None:
    with pytest.raises(TypeError, match="store: expected a KVStore, got CachePlan"):
        KVStoreCache(store_of("llama", "buckets").plan, IDS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device: this store keeps books only; give it a device"):
        KVStoreCache(KVStore(store_of("llama", "buckets").plan), IDS)
    with pytest.raises(ValueError, match=r"store: expected one that stores all rows .*, got stored='tail'"):
        KVStoreCache(store_of("gemma3", "buckets", stored="tail"), IDS)


def test_more_sequences_than_planned() -> None:
    store = store_of("llama", "buckets", max_sequences=3)
    with pytest.raises(SequenceError, match=r"at most 3 more sequences \(0 of max_sequences 3 are open; .*\), got 4"):
        KVStoreCache(store, torch.ones(4, 5, dtype=torch.long))
    expect_empty(store)
    with (
        KVStoreCache(store, IDS, MASK) as cache,
        pytest.raises(
            SequenceError, match=r"num_forks: expected at most 0 more sequences \(3 of max_sequences 3 .*, got 1"
        ),
    ):
        own("llama").generate(IDS, attention_mask=MASK, max_new_tokens=4, num_beams=4, cache=cache)
    expect_empty(store)


@pytest.mark.parametrize(
    ("planned", "run", "message"),
    [
        (
            "llama",
            "deepseek-v3",
            r"layer 'layers.0.attn' is planned for rows of 2 x 16 and 2 x 16 torch.float32, the mo",
        ),
        (
            "deepseek-v3",
            "llama",
            r"planned for rows of 1 x 40 torch.float32, the model's have 1 x 32 torch.float32: the",
        ),
        ("llama", "deepseek-v4", "the plan is of another config"),
        ("qwen3-next", "llama", "store: layer 0 keeps a recurrent state in the plan, and K and V in the model"),
        ("llama", "qwen3-next", "store: the plan has no recurrent state for layer 0: it is of another config"),
    ],
    ids=["latent", "heads", "V4", "state", "no state"],
)
def test_a_cache_of_another_family(planned: str, run: str, message: str) -> None:
    store = store_of(planned, "buckets")
    with KVStoreCache(store, IDS[:1]) as cache, pytest.raises(ValueError, match=message):
        own(run).generate(IDS[:1], max_new_tokens=2, cache=cache)
    expect_empty(store)


@pytest.mark.parametrize("layers", [3, 5])
def test_a_cache_for_another_number_of_layers(layers: int) -> None:
    specs = model_specs(model_of("llama"))
    specs = {f"layers.{i}.attn": specs["layers.0.attn"] for i in range(layers)}
    store = KVStore(kvstore.plan_cache(specs, memory="4MiB"), "cpu", max_sequences=4, max_length=64)
    message = "the model writes layer 3" if layers == 3 else "the last pass has not written .layers.4.attn."
    with KVStoreCache(store, IDS[:1]) as cache, pytest.raises(ValueError, match=f"the plan has {layers} .*{message}"):
        own("llama").generate(IDS[:1], max_new_tokens=4, cache=cache)
    expect_empty(store)


def test_a_dtype_that_the_plan_does_not_hold() -> None:
    store = KVStore(plan_model(model_of("llama"), memory="4MiB"), "cpu", max_sequences=4, max_length=64)
    half = FAMILIES["llama"]().to(torch.float16)
    with (
        KVStoreCache(store, IDS[:1]) as cache,
        pytest.raises(
            ValueError, match=r"planned for rows of 2 x 16 and 2 x 16 torch.float32, .* torch.float16: the pl"
        ),
    ):
        half.generate(IDS[:1], max_new_tokens=2, cache=cache)
    expect_empty(store)
    assert plan_model(half, memory="4MiB").spec("layers.0.attn").format.parts[0].dtype == torch.float16


def test_use_after_release() -> None:
    store = store_of("llama", "buckets")
    with KVStoreCache(store, IDS[:1]) as cache:
        pass
    calls = (
        lambda: own("llama").generate(IDS[:1], max_new_tokens=2, cache=cache),
        lambda: cache.commit(IDS[:1]),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"cache: it was released, by commit, .*: expected a new KVStoreCache"):
            call()


def test_padding_that_the_cache_was_not_told_of() -> None:
    """transformers takes tokens equal to pad_token_id for padding where no mask is given."""
    store = store_of("llama", "buckets")
    with (
        KVStoreCache(store, IDS) as cache,
        pytest.raises(
            ValueError, match="attention_mask: the model has the last token of row 1 at position 4, the cach"
        ),
    ):
        own("llama").generate(IDS, attention_mask=MASK, max_new_tokens=2, cache=cache)
    expect_empty(store)


def test_padding_of_deepseek_v4() -> None:
    store = store_of("deepseek-v4", "buckets")
    with pytest.raises(ValueError, match=r"attention_mask: DeepSeek V4 .*one length, got padding of \[0, 3\] tokens"):
        KVStoreCache(store, IDS, MASK)
    expect_empty(store)


def test_another_batch_than_the_cache_was_made_with() -> None:
    store = store_of("llama", "buckets")
    with (
        KVStoreCache(store, IDS) as cache,
        pytest.raises(ValueError, match="the cache is of 2 rows, the model's batch"),
    ):
        own("llama").generate(torch.ones(3, 9, dtype=torch.long), max_new_tokens=2, cache=cache)
    expect_empty(store)


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "deepseek-v4", "qwen3-next"])
def test_other_prompts_than_the_cache_was_made_with(family: str) -> None:
    """Two rows on a cache of one prompt are taken for beams of it, and these are copies."""
    store = store_of(family, "buckets")
    message = r"input_ids: the cache is of 1 prompts, and the model's batch has 2 rows that are no copies of them"
    with KVStoreCache(store, IDS[:1]) as cache, pytest.raises(ValueError, match=message):
        own(family).generate(torch.stack([IDS[0], IDS[0].flip(0)]), max_new_tokens=2, cache=cache)
    expect_empty(store)


def test_rows_per_prompt() -> None:
    store = store_of("llama", "buckets")
    with pytest.raises(ValueError, match="rows_per_prompt: expected an integer >= 1, got 0"):
        KVStoreCache(store, IDS, rows_per_prompt=0)
    with (
        KVStoreCache(store, IDS[:1], rows_per_prompt=2) as cache,
        pytest.raises(ValueError, match="the cache is of 1 rows times rows_per_prompt 2, the model's batch has 3"),
    ):
        own("llama").generate(IDS[:1], max_new_tokens=2, num_beams=3, cache=cache)
    expect_empty(store)


def test_outputs_of_another_call() -> None:
    store = store_of("llama", "buckets")
    with KVStoreCache(store, IDS, MASK) as cache:
        output = own("llama").generate(IDS, attention_mask=MASK, max_new_tokens=4, do_sample=False, cache=cache)
        wrong = (
            (output[:1], r"output_ids: expected integers \[2, at least 11\], .* got shape \[1, 12\] of int64"),
            (output[:, :9], r"got shape \[2, 9\]"),
            (output.float(), "of float32"),
            (output.flip(0), "output_ids: expected row 0 to begin with its prompt, got another one"),
        )
        for given, message in wrong:
            with pytest.raises(ValueError, match=message):
                cache.commit(given)
        cache.commit(output.tolist())
    expect_empty(store)


def test_crop_and_reset() -> None:
    store = store_of("llama", "buckets")
    with KVStoreCache(store, IDS[:1]) as cache:
        with pytest.raises(ValueError, match="tokens_to_remove: expected minus the number of tokens, got 3"):
            cache.crop(3)
        with pytest.raises(ValueError, match="reset: expected a new KVStoreCache for new prompts"):
            cache.reset()


def test_families_that_are_not_served() -> None:
    config = transformers.JambaConfig(num_hidden_layers=2, vocab_size=VOCABULARY, hidden_size=32)
    with pytest.raises(ValueError, match=r"model: expected one of the families llama, mistral, .*, got 'jamba'"):
        plan_model(config, memory="1MiB")
    with pytest.raises(TypeError, match="model: expected a transformers model or its config, got dict"):
        model_specs({"model_type": "llama"})
    with pytest.raises(PlanError, match="memory"):
        plan_model(model_of("llama"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {"layers.0.attn": kvstore.chunked_attention(2, 16, chunk=32)},
            r"store: layer 0 has caches that no supported family of transformers has: attn \(chunked\)",
        ),
        ({"attn": kvstore.full_attention(2, 16)}, "expected layers named 'layers.<number>.<cache>', got 'attn'"),
        ({"layers.1.attn": kvstore.full_attention(2, 16)}, "layer 0 has caches that no supported .* has: none"),
        (
            {"layers.0.state": kvstore.recurrent_state([("ssm", (2, 4), torch.float32)])},
            r"layer 'layers.0.state': expected a state of conv and recurrent, got \['ssm'\]",
        ),
        (
            {"layers.0.attn": kvstore.full_attention(2, 16), "layers.1.attn": kvstore.Alias("layers.0.attn")},
            r"layer 1 .* has: attn \(alias\)",
        ),
    ],
    ids=["chunked", "name", "gap", "state", "alias"],
)
def test_plans_that_no_model_of_transformers_has(layers: Any, message: str) -> None:
    store = KVStore(kvstore.plan_cache(layers, memory="1MiB"), "cpu", max_sequences=2, max_length=64)
    with pytest.raises(ValueError, match=message):
        KVStoreCache(store, IDS[:1])
    expect_empty(store)


def test_dropout() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"dropout: expected 0, pages are for inference, got 0\.1"):
        kvstore_attention(torch.nn.Identity(), q, q, q, None, dropout=0.1)


def test_the_attention_function_serves_other_caches_too() -> None:
    model = model_of("gpt-oss")
    expected = own("gpt-oss").generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False)
    model.set_attn_implementation(register_attention())
    assert torch.equal(model.generate(IDS, attention_mask=MASK, max_new_tokens=20, do_sample=False), expected)
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK, use_cache=False).logits
        assert torch.isfinite(logits[MASK.bool()]).all()
