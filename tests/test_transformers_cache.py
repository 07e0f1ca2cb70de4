"""KVStoreCache under `generate`: beams, samples, drafts, padding, several turns, and calls that fail on their way."""

from typing import Any

import pytest
import torch

from benchmarks import family_runs
from benchmarks.family_runs import ATTENTIONS, model_of, padded, prompts_of, store_of
from kvstore import KVStore, Namespace, OutOfBlocks, full_attention, plan_cache
from kvstore.integrations.transformers import KVStoreCache, plan_model, register_attention

V4 = "deepseek-v4"
CROPPABLE = ["llama", "gemma3", "deepseek-v3", "deepseek-v3.2"]


def use(family: str, attention: str = "columns") -> Any:
    """The model of a family with one of the two attention functions."""
    model = model_of(family)
    own = "eager" if family in ("gpt-oss", V4) else "sdpa"
    model.set_attn_implementation(register_attention() if attention == "pages" else own)
    return model


def expect_empty(store: KVStore) -> None:
    store.check()
    assert store.stats().open_sequences == store.stats().in_use == store.stats().fenced == 0


def batch_for(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    return padded(prompts_of((40, 40) if family == V4 else (40, 23), 0))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", [*CROPPABLE, "gpt-oss", "qwen3-next", V4])
def test_beam_search(family: str, attention: str) -> None:
    input_ids, mask = batch_for(family)
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "num_beams": 4}
    expected = use(family).generate(input_ids, num_return_sequences=2, **options)
    store = store_of(family, "frames")
    with KVStoreCache(store, input_ids, mask) as cache:
        output = use(family, attention).generate(input_ids, num_return_sequences=2, cache=cache, **options)
        store.check()
        assert store.stats().open_sequences == 8
        with pytest.raises(ValueError, match=r"output_ids: a beam search returns other sequences .*release\(\) keeps"):
            cache.commit(output)
    assert torch.equal(output, expected)
    expect_empty(store)
    if family in ("llama", "gemma3", "gpt-oss"):  # others have larger blocks, or saved nothing at 40 tokens
        assert store.lookup([[*input_ids[0].tolist(), 2]])[0] > 0


def test_beams_share_the_blocks_of_their_prompt() -> None:
    input_ids, mask = padded(prompts_of((160,), 0))
    store = store_of("llama", "buckets")
    with KVStoreCache(store, input_ids, mask) as cache:
        use("llama").generate(input_ids, max_new_tokens=3, do_sample=False, num_beams=4, cache=cache)
        assert 10 < store.stats().in_use <= 10 + 4  # of 16 tokens: the prompt once, and last blocks of the beams


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next", V4])
def test_several_samples_of_a_prompt(family: str) -> None:
    input_ids, mask = batch_for(family)
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": True, "num_return_sequences": 3}
    model = use(family)
    torch.manual_seed(3)
    expected = model.generate(input_ids, **options)
    store = store_of(family, "overlay")
    model = use(family, "pages")
    torch.manual_seed(3)
    with KVStoreCache(store, input_ids, mask) as cache:
        output = model.generate(input_ids, cache=cache, **options)
        cache.commit(output)
    assert torch.equal(output, expected)
    expect_empty(store)


def test_beams_that_go_on_from_a_recurrent_state() -> None:
    """A state is handed out before the module shows how many rows it has: the cache has to be told."""
    prompts = prompts_of((33, 33), 0)
    input_ids, mask = padded(prompts)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    model = use("qwen3-next")
    expected = model.generate(input_ids, **options)
    store = store_of("qwen3-next", "frames")
    family_runs.through_store("qwen3-next", store, "columns", prompts, prefill_chunk_size=16)
    message = (
        r"rows_per_prompt: the state that was found is for 2 rows, the model's batch has 6: expected KVStoreCache\("
    )
    with KVStoreCache(store, input_ids, mask) as cache, pytest.raises(ValueError, match=message):
        model.generate(input_ids, cache=cache, **options)
    expect_empty(store)
    with KVStoreCache(store, input_ids, mask, rows_per_prompt=3) as cache:
        assert cache.cached_tokens.tolist() == [16, 16]  # the state at 32 is left: two tokens are computed at least
        output = model.generate(input_ids, cache=cache, **options)
    assert torch.equal(output, expected)
    expect_empty(store)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", CROPPABLE)
def test_assisted_generation(family: str, attention: str) -> None:
    """Drafts by lookup in the prompt, and by a model that agrees always or never; twice, the second time with a hit."""
    input_ids, _ = padded([prompts_of((30,), 0)[0] * 2])
    options = {"max_new_tokens": 50, "do_sample": False, "attention_mask": torch.ones_like(input_ids)}
    expected = use(family).generate(input_ids, **options)
    other = "llama" if family != "llama" else "mistral"
    drafts = ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model_of(other)})
    for draft in drafts:
        store = store_of(family, "buckets")
        for _ in range(2):
            with KVStoreCache(store, input_ids) as cache:
                output = use(family, attention).generate(input_ids, cache=cache, **options, **draft)
                assert cache.length == output.shape[1] - 1
                cache.commit(output)
            assert torch.equal(output, expected)
            expect_empty(store)
        assert store.lookup([output[0].tolist()])[0] >= 64  # what was verified is found, drafts are not


def test_recurrent_models_refuse_drafts_before_they_compute() -> None:
    input_ids, _ = batch_for("qwen3-next")
    store = store_of("qwen3-next", "buckets")
    with (
        KVStoreCache(store, input_ids[:1]) as cache,
        pytest.raises(ValueError, match="not supported with stateful models"),
    ):
        use("qwen3-next").generate(input_ids[:1], max_new_tokens=4, cache=cache, prompt_lookup_num_tokens=2)
    assert not cache.is_croppable
    expect_empty(store)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", "deepseek-v3.2"])
def test_rows_that_found_more_than_others(family: str, attention: str) -> None:
    """A row of a batch begins where the one that found least does; what it computes again changes nothing."""
    long, short, new = prompts_of((100, 50, 70), 1)
    store = store_of(family, "frames")
    for prompt in (long, short):
        family_runs.through_store(family, store, attention, [prompt])
    prompts = [[*long, 7], [*short, 9], new]
    expected = family_runs.generate(use(family), prompts)
    with KVStoreCache(store, *padded(prompts)) as cache:
        found = cache.cached_tokens.tolist()
        assert found[0] > 0
        assert found[1:] == [max(cache.length - 50, 0), 0]  # 50 and 31 tokens of padding
    texts, cached = family_runs.through_store(family, store, attention, prompts)
    assert cached == sum(found)
    assert torch.equal(texts.output_ids, expected.output_ids)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3.2", "qwen3-next"])
def test_chunks_that_are_nothing_but_padding_for_some_rows(family: str) -> None:
    prompts = prompts_of((60, 3, 23), 1)
    expected = family_runs.generate(use(family), prompts)
    store = store_of(family, "overlay")
    for chunk in (1, 7, 20):
        texts, _ = family_runs.through_store(family, store, "pages", prompts, prefill_chunk_size=chunk)
        assert torch.equal(texts.output_ids, expected.output_ids)


def test_a_hit_leaves_one_token_to_compute() -> None:
    """The whole prompt is known: a first pass of one column, which is a decode step."""
    prompts = prompts_of((48,), 0)
    expected = family_runs.generate(use("gemma3"), prompts)
    store = store_of("gemma3", "buckets")
    for again in (0, 32):
        texts, cached = family_runs.through_store("gemma3", store, "pages", prompts)
        assert cached == again
        assert torch.equal(texts.output_ids, expected.output_ids)
    prompts = [[*prompts[0], *expected.output_ids[0, 48:].tolist()][:49]]
    texts, cached = family_runs.through_store("gemma3", store, "pages", prompts)
    assert cached == 48
    assert torch.equal(texts.output_ids[0, 49:], family_runs.generate(use("gemma3"), prompts).output_ids[0, 49:])


def test_one_cache_over_several_calls_of_generate() -> None:
    """As with transformers' own caches: the next call gives all ids, and goes on behind what is computed."""
    model = use("gemma3")
    first, more = prompts_of((30, 12), 0)
    input_ids = torch.tensor([first])
    store = store_of("gemma3", "buckets")
    with KVStoreCache(store, input_ids) as cache:
        output = model.generate(input_ids, max_new_tokens=10, do_sample=False, cache=cache)
        longer = torch.cat([output, torch.tensor([more])], dim=1)
        mask = torch.ones_like(longer)
        output = model.generate(longer, attention_mask=mask, max_new_tokens=10, do_sample=False, cache=cache)
        cache.commit(output)
    assert torch.equal(output, model.generate(longer, attention_mask=mask, max_new_tokens=10, do_sample=False))
    assert store.lookup([output[0].tolist()]).tolist() == [48]


def test_release_keeps_prompts_and_forgets_what_was_generated() -> None:
    prompt = prompts_of((40,), 0)[0]
    store = store_of("llama", "buckets")
    input_ids = torch.tensor([prompt])
    with KVStoreCache(store, input_ids) as cache:
        output = use("llama").generate(input_ids, max_new_tokens=40, do_sample=False, cache=cache)
    cache.release()
    assert store.lookup([output[0].tolist()]).tolist() == [32]
    assert store.lookup([[*prompt, *[0] * 40]]).tolist() == [32]


def test_namespaces() -> None:
    prompts = prompts_of((40,), 0)
    store = store_of("llama", "buckets")
    family_runs.through_store("llama", store, "columns", prompts)
    tuned = Namespace(adapter="tuned")
    with KVStoreCache(store, *padded(prompts), namespace=tuned) as cache:
        assert cache.cached_tokens.tolist() == [0]
    with KVStoreCache(store, *padded(prompts)) as cache:
        assert cache.cached_tokens.tolist() == [39]


def test_a_pool_that_runs_out_leaves_a_store_that_works() -> None:
    plan = plan_model(model_of("gemma3"), num_frames=9, layout="buckets")
    store = KVStore(plan, "cpu", max_sequences=4, max_length=256)
    input_ids = torch.tensor(prompts_of((60,), 0))
    model = use("gemma3")
    with KVStoreCache(store, input_ids) as cache, pytest.raises(OutOfBlocks):
        model.generate(input_ids, max_new_tokens=64, do_sample=False, cache=cache)
    expect_empty(store)
    with KVStoreCache(store, input_ids) as cache:
        output = model.generate(input_ids, max_new_tokens=4, do_sample=False, cache=cache)
    assert torch.equal(output, model.generate(input_ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next", V4])
def test_a_pass_that_fails_half_way_leaves_nothing_to_find(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = use(family)
    input_ids = torch.tensor(prompts_of((128,), 0))
    store = store_of(family, "frames")

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("layer 2 fails")

    with KVStoreCache(store, input_ids) as cache, monkeypatch.context() as patch:
        patch.setattr(model.model.layers[2], "forward", fail)
        with pytest.raises(RuntimeError, match="layer 2 fails"):
            model.generate(input_ids, max_new_tokens=4, do_sample=False, cache=cache)
    expect_empty(store)
    assert store.lookup([[*input_ids[0].tolist(), 3]]).tolist() == [0]


def test_rows_can_be_repeated_and_chosen() -> None:
    """What search methods outside transformers do with a cache."""
    model, store = use("gemma3"), store_of("gemma3", "overlay")
    input_ids, mask = padded(prompts_of((40, 23), 0))
    with KVStoreCache(store, input_ids, mask) as cache, torch.no_grad():
        model(input_ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        store.check()
        tokens = torch.tensor([[5], [6]])
        wide = torch.cat([mask[[1, 0]], torch.ones(2, 1, dtype=torch.long)], dim=1)
        places = torch.tensor([[23], [40]])
        logits = model(tokens, attention_mask=wide, position_ids=places, cache=cache).logits
    whole = torch.cat([input_ids[[1, 0]], tokens], dim=1)
    with torch.no_grad():
        expected = model(whole, attention_mask=wide, position_ids=(wide.cumsum(1) - 1).clamp(min=0)).logits[:, -1:]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    expect_empty(store)


def test_only_the_store_limits_length() -> None:
    store = KVStore(plan_cache({"layers.0.attn": full_attention(2, 16)}, memory="1MiB"), "cpu", max_length=64)
    with KVStoreCache(store, [[1, 2, 3]]) as cache:
        assert cache.get_max_length() == -1
        assert not cache.is_compileable
        assert cache.get_mask_sizes(5, 0) == (5, 0)
