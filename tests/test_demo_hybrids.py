"""Hybrid models in the demo engine: continuous batching, chunked prefill, prefixes and preemption, token for token.

A Gemma-3-shaped model (two windows of 24, then a full layer) and a DeepSeek-V4-shaped one (windows, compressed rows of
4 and of 128 tokens, an indexer, compressor states), each beside transformers' own generate of every prompt alone.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hybrid_demo import expected, make_engine, make_store, prompts, reference, serve

from kvstore.cli import main as kvstore_main
from kvstore.demo.deepseek_v4 import DeepseekV4, cache_specs
from kvstore.demo.engine import Request
from kvstore.demo.gemma import Gemma3
from kvstore.demo.tiny import TINY

GEMMA, V4 = "gemma3-tiny", "deepseek-v4-tiny"
LENGTHS = {GEMMA: (2, 15, 17, 23, 24, 25, 47, 49, 64), V4: (3, 4, 5, 23, 24, 25, 130, 255)}
"""Around the window, the blocks, and the compressed rows; beside the prompts that `Tiny.prompts` has."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products as small as these lose more to a second thread than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", ["buckets", "bestfit", "overlay", "frames"])
@pytest.mark.parametrize("name", [GEMMA, V4])
def test_many_requests_together_and_again(name: str, layout: str) -> None:
    """Prompts of all lengths, in chunks of 100 tokens; the second round finds what the first has computed."""
    given, texts = prompts(name, LENGTHS[name]), expected(name, LENGTHS[name])
    engine = make_engine(name, make_store(name, layout, "64MiB", 100), 100)
    first = serve(engine, given)
    assert [each.token_ids for each in first] == texts
    size = TINY[name].block_size
    assert first[6].cached_tokens == 2 * size  # shares two and a half blocks with the first prompt
    again = serve(engine, given)
    assert [each.token_ids for each in again] == texts
    assert [each.cached_tokens for each in again] == [(len(prompt) - 1) // size * size for prompt in given]


@pytest.mark.parametrize(("name", "chunk"), [(GEMMA, 8), (GEMMA, 37), (GEMMA, 400), (V4, 37), (V4, 400)])
def test_chunks_of_any_size(name: str, chunk: int) -> None:
    engine = make_engine(name, make_store(name, "frames", "64MiB", chunk), chunk)
    assert [each.token_ids for each in serve(engine, prompts(name, LENGTHS[name]))] == expected(name, LENGTHS[name])


@pytest.mark.parametrize("preemption", ["recompute", "suspend"])
@pytest.mark.parametrize(("name", "num_frames"), [(GEMMA, 34), (V4, 82)])
def test_a_pool_that_is_too_small_for_all(name: str, num_frames: int, preemption: str) -> None:
    given, texts = prompts(name, LENGTHS[name]), expected(name, LENGTHS[name])
    store = make_store(name, "overlay", num_frames, 100)
    engine = make_engine(name, store, 100, preemption=preemption)
    completions = serve(engine, given)
    assert [each.token_ids for each in completions] == texts
    assert sum(each.preemptions for each in completions) > 0
    assert store.stats().evicted > 0


@pytest.mark.parametrize("name", [GEMMA, V4])
def test_samples_share_the_blocks_of_a_prompt(name: str) -> None:
    given, texts = prompts(name, ())[-2:], expected(name, ())[-2:]
    engine = make_engine(name, make_store(name, "frames", "64MiB", 100), 100)
    for completion, text in zip(serve(engine, given, samples=3), texts, strict=True):
        assert completion.samples == [text] * 3


def test_texts_are_worth_comparing() -> None:
    """Neither one token for ever, nor a choice that rounding could turn."""
    for name in (GEMMA, V4):
        texts = expected(name, LENGTHS[name])
        assert len({token for text in texts for token in text}) > 50
        with torch.no_grad():
            for prompt, text in zip(prompts(name, LENGTHS[name]), texts, strict=True):
                logits = reference(name)(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
                best, second = logits.topk(2).values.unbind(-1)
                assert (best - second).min() > 2e-5 * logits.abs().max()


@pytest.mark.parametrize("model", [Gemma3, DeepseekV4])
def test_models_that_cannot_be_run_are_refused(model: Any) -> None:
    own, other = (GEMMA, V4) if model is Gemma3 else (V4, GEMMA)
    with pytest.raises(ValueError, match=r"reference: expected a .* model, got "):
        model(reference(other), 64)
    with pytest.raises(ValueError, match="max_length: expected at most 2048, got 4096"):
        model(reference(own), 4096)


def test_gemma_options_that_are_not_served() -> None:
    changed = TINY[GEMMA].reference(0)
    changed.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"expected a model without final_logit_softcapping, got 30\.0"):
        Gemma3(changed, 64)


def test_an_adapter_that_a_hybrid_does_not_have() -> None:
    engine = make_engine(GEMMA, make_store(GEMMA, "frames", "1MiB", 64), 64)
    with pytest.raises(ValueError, match=r"requests\[0\]: expected an adapter of the model \(none\), got 'tuned'"):
        engine.generate([Request([1, 2], 1, adapter="tuned")])


def test_rows_of_deepseek_v4_have_the_dtypes_of_the_model() -> None:
    specs = cache_specs(reference(V4).config, torch.float32, block_size=128)
    kinds = {name.rpartition(".")[2]: spec.format.parts[0].dtype for name, spec in specs.items()}
    assert set(kinds) == {"window", "compressed", "indexer", "state", "indexer_state"}
    assert set(kinds.values()) == {torch.float32}
    half = cache_specs(reference(V4).config, torch.bfloat16, block_size=128)
    assert half["layers.1.indexer"].format.parts[0].dtype == torch.bfloat16
    assert half["layers.1.state"].format.parts[0].dtype == torch.float32


@pytest.mark.parametrize("name", [GEMMA, V4])
def test_the_demo_of_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvstore_main(["demo", "--model", name, "--max-tokens", "12", "--memory", "32MiB"]) == 0
    shown = capsys.readouterr().out
    assert f"The plan for {name}, float32, 32MiB" in shown
    assert "Same tokens as transformers: yes, in all 7 texts." in shown
    assert len(shown.partition("Same tokens")[0].splitlines()) == 6
    assert max(map(len, shown.partition("Prompts")[2].splitlines())) < 40


def test_a_model_that_the_demo_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvstore_main(["demo", "--model", "gemma4-tiny"]) == 2
    assert "gemma4-tiny" in capsys.readouterr().err
