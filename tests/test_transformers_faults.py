"""KVStoreCache where something went wrong: nothing false is found afterwards, and no sequence stays open."""

from typing import Any

import pytest
import torch

from benchmarks import family_runs
from benchmarks.family_runs import model_of, padded, prompts_of, store_of
from kvstore import KVStore, SequenceError
from kvstore.integrations.transformers import KVStoreCache, register_attention

V4 = "deepseek-v4"


def use(family: str, attention: str = "columns") -> Any:
    model = model_of(family)
    own = "eager" if family in ("gpt-oss", V4) else "sdpa"
    model.set_attn_implementation(register_attention() if attention == "pages" else own)
    return model


def expect_empty(store: KVStore) -> None:
    store.check()
    assert store.stats().open_sequences == store.stats().in_use == store.stats().fenced == 0


@pytest.mark.parametrize(
    ("family", "number"),
    [("llama", 1), ("deepseek-v3.2", 1), ("deepseek-v3.2", 2), (V4, 1), (V4, 2), (V4, 3), ("qwen3-next", 1)],
)
def test_a_pass_that_fails_in_its_last_layer(family: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer has begun, but not all of its rows are there: the prompt must not be found."""
    store = store_of(family, "frames")
    input_ids = torch.tensor(prompts_of((256,), 0))
    writes: list[str] = []
    write = store.write

    def failing(layer: str, *args: Any, **kwargs: Any) -> None:
        if layer.startswith(last):
            writes.append(layer)
            if len(writes) == number:
                raise RuntimeError("no memory")
        write(layer, *args, **kwargs)

    last = f"layers.{len(model_of(family).model.layers) - 1}."
    monkeypatch.setattr(store, "write", failing)
    with KVStoreCache(store, input_ids) as cache, pytest.raises(RuntimeError, match="no memory"):
        use(family).generate(input_ids, max_new_tokens=2, do_sample=False, cache=cache)
    expect_empty(store)
    assert store.lookup([[*input_ids[0].tolist(), 5]]).tolist() == [0]


def test_the_same_cache_after_a_failed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = use("llama"), store_of("llama", "buckets")
    input_ids = torch.tensor(prompts_of((20,), 0))
    with KVStoreCache(store, input_ids) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[2], "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(input_ids, cache=cache)
        with pytest.raises(
            ValueError, match=r"the last pass has not written 'layers.2.attn': it failed on its way, or"
        ):
            model(input_ids, cache=cache)
    expect_empty(store)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3"])
def test_a_mask_with_holes_behind_the_prompts(family: str) -> None:
    """A second turn whose mask hides what a row generated after its end: the store has no such holes."""
    model, store = use(family, "pages"), store_of(family, "buckets")
    input_ids, mask = padded(prompts_of((12, 12), 0))
    with KVStoreCache(store, input_ids, mask) as cache:
        output = model.generate(input_ids, attention_mask=mask, max_new_tokens=6, do_sample=False, cache=cache)
        longer = torch.cat([output, input_ids[:, :3]], dim=1)
        holes = torch.ones_like(longer)
        holes[1, 14:18] = 0
        with pytest.raises(
            ValueError, match="attention_mask: the model has the last token of row 1 at position 16, the"
        ):
            model.generate(longer, attention_mask=holes, max_new_tokens=3, do_sample=False, cache=cache)
    expect_empty(store)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "deepseek-v3.2"])
def test_a_hole_that_positions_do_not_show(family: str) -> None:
    model, store = use(family, "pages"), store_of(family, "buckets")
    input_ids, mask = padded(prompts_of((12, 7), 0))
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with KVStoreCache(store, input_ids, mask) as cache, torch.no_grad():
        model(input_ids, attention_mask=mask, position_ids=places, cache=cache)
        wide = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        token, place = torch.tensor([[5], [6]]), torch.tensor([[12], [7]])
        wide[1, 9] = 0
        with pytest.raises(
            ValueError, match=r"attention_mask: expected ones .*, got 7 visible tokens of 8 in row 1: pages"
        ):
            model(token, attention_mask=wide, position_ids=place, cache=cache)
    expect_empty(store)


def test_padding_is_looked_for_in_models_that_begin_with_a_state() -> None:
    store = store_of("qwen3-next", "buckets")
    input_ids, mask = padded(prompts_of((40, 23), 0))
    with (
        KVStoreCache(store, input_ids) as cache,
        pytest.raises(ValueError, match="attention_mask: the model has the last"),
    ):
        use("qwen3-next").generate(input_ids, attention_mask=mask, max_new_tokens=2, do_sample=False, cache=cache)
    expect_empty(store)
    assert store.lookup(input_ids.tolist()).tolist() == [0, 0]


def test_other_tokens_behind_a_crop_into_the_prompt() -> None:
    model, store = use("llama"), store_of("llama", "buckets")
    prompt, other = prompts_of((64, 64), 0)
    with KVStoreCache(store, [prompt]) as cache, torch.no_grad():
        model(torch.tensor([prompt]), cache=cache)
        cache.crop(-40)
        model(torch.tensor([other[24:]]), cache=cache)
    expect_empty(store)
    store.drop_prefixes()
    with KVStoreCache(store, [prompt]) as cache, torch.no_grad():
        model(torch.tensor([prompt[:30]]), cache=cache)
        cache.crop(-20)
        model(torch.tensor([other[10:]]), cache=cache)
    expect_empty(store)
    assert store.lookup([[*prompt, 5]])[0] <= 16  # never the other's tokens under the prompt's
    texts = family_runs.generate(model, [prompt])
    assert torch.equal(family_runs.through_store("llama", store, "columns", [prompt])[0].output_ids, texts.output_ids)


def test_other_ids_than_the_cache_was_made_with() -> None:
    """It shows at commit only; what had been found under the wrong prompt is forgotten."""
    model, store = use("llama"), store_of("llama", "buckets")
    prompt, other = prompts_of((40, 40), 0)
    with KVStoreCache(store, [prompt]) as cache:
        output = model.generate(torch.tensor([other]), max_new_tokens=4, do_sample=False, cache=cache)
        with pytest.raises(ValueError, match="output_ids: expected row 0 to begin with its prompt, got another one"):
            cache.commit(output)
    expect_empty(store)
    assert store.lookup([[*prompt, 5], [*other, 5]]).tolist() == [0, 0]


def test_forks_that_do_not_fit_leave_nothing_open() -> None:
    model, store = use("llama"), store_of("llama", "buckets", max_sequences=5)
    input_ids, mask = padded(prompts_of((20, 20), 0))
    with KVStoreCache(store, input_ids, mask) as cache, pytest.raises(SequenceError, match=r"max_sequences 5"):
        model.generate(input_ids, attention_mask=mask, max_new_tokens=4, num_beams=3, cache=cache)
    expect_empty(store)


def test_a_cache_closes_without_the_rows_that_it_would_need_to_go_on() -> None:
    model, store = use("llama"), store_of("llama", "buckets", max_sequences=2)
    input_ids, mask = padded(prompts_of((20, 20), 0))
    options = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 3}
    with KVStoreCache(store, input_ids, mask) as cache:
        model.generate(input_ids, attention_mask=mask, cache=cache, **options)
    expect_empty(store)
    assert store.lookup([[*input_ids[0].tolist(), 5]]).tolist() == [16]


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next", V4])
def test_a_row_may_be_chosen_several_times(family: str) -> None:
    model, store = use(family), store_of(family, "overlay")
    input_ids = torch.tensor(prompts_of((30, 30), 0))
    with KVStoreCache(store, input_ids) as cache, torch.no_grad():
        model(input_ids, cache=cache)
        cache.batch_select_indices(torch.tensor([1, 1]))
        store.check()
        logits = model(torch.tensor([[5], [5]]), cache=cache).logits
    assert torch.equal(logits[0], logits[1])
    whole = torch.cat([input_ids[1:], torch.tensor([[5]])], dim=1)
    with torch.no_grad():
        expected = model(whole).logits[0, -1]
    assert (logits[0, -1] - expected).abs().max() < 1e-4 * expected.abs().max()
    expect_empty(store)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), r"beam_idx: expected rows 0 ... 1, got \[0, 2\]"),
        (lambda cache: cache.reorder_cache(torch.tensor([0])), "beam_idx: expected one row for each of 2, got 1"),
        (lambda cache: cache.batch_select_indices(torch.tensor([-1])), r"indices: expected rows 0 ... 1, got \[-1\]"),
        (lambda cache: cache.batch_repeat_interleave(0), "repeats: expected an integer >= 1, got 0"),
    ],
    ids=["beam", "beams", "select", "repeat"],
)
def test_rows_that_there_are_not(call: Any, message: str) -> None:
    store = store_of("llama", "buckets")
    with KVStoreCache(store, prompts_of((9, 9), 0)) as cache, pytest.raises(ValueError, match=message):
        call(cache)
    expect_empty(store)
    with pytest.raises(ValueError, match=r"input_ids: expected integers \[rows, columns\], got list: "):
        KVStoreCache(store, [[1, 2], [3]])
