"""The demo's engine: the same tokens as transformers, however the requests are batched, chunked and preempted."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Tokenizer, LlamaConfig, LlamaForCausalLM

from kvstore import KVStore, OutOfBlocks, plan_cache
from kvstore.demo import run, weights
from kvstore.demo.engine import Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.sampling import draws, sample

VOCAB = 97
MAX_TOKENS = 14
LENGTHS = (43, 1, 90, 17, 42, 5)
"""Prompt lengths; the first and the fifth share 40 tokens."""


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    texts[4][:40] = texts[0][:40]
    return texts


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """The greedy continuations by transformers, one prompt at a time."""
    continuations = []
    for prompt in prompts:
        token_ids = torch.tensor([prompt])
        output = reference.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        continuations.append(output[0, len(prompt) :].tolist())
    return continuations


def serve(reference, requests, *, num_frames=64, chunk=32, max_running=4, eos_token_ids=()):
    plan = plan_cache(reference.config, num_frames=num_frames, kv_dtype="float32", block_size=16)
    store = KVStore(plan, "cpu", max_sequences=max_running, max_length=128, max_tokens_per_step=chunk)
    engine = Engine(Llama(reference, 128), store, max_running=max_running, chunk=chunk, eos_token_ids=eos_token_ids)
    completions = engine.generate(requests)
    store.check()
    assert store.stats().in_use == 0
    return completions


def engine_and_store(reference, max_sequences=4, max_tokens_per_step=32):
    plan = plan_cache(reference.config, num_frames=64, kv_dtype="float32", block_size=16)
    store = KVStore(plan, "cpu", max_sequences=max_sequences, max_length=128, max_tokens_per_step=max_tokens_per_step)
    return Engine(Llama(reference, 128), store, max_running=4, chunk=32), store


def greedy(prompts):
    return [Request(prompt, MAX_TOKENS) for prompt in prompts]


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(("chunk", "max_running"), [(32, 4), (7, 3), (128, 6), (1, 1)], ids=lambda value: str(value))
def test_tokens_equal_transformers(reference, prompts, expected, chunk, max_running):
    assert tokens_of(serve(reference, greedy(prompts), chunk=chunk, max_running=max_running)) == expected


def test_shared_prefix_is_computed_once(reference, prompts, expected):
    completions = serve(reference, greedy(prompts))
    assert [completion.cached_tokens for completion in completions] == [0, 0, 0, 0, 40, 0]
    assert tokens_of(completions) == expected


def test_prefix_outlives_its_sequence(reference, prompts, expected):
    plan = plan_cache(reference.config, num_frames=64, kv_dtype="float32", block_size=16)
    store = KVStore(plan, "cpu", max_sequences=1, max_length=128, max_tokens_per_step=32)
    engine = Engine(Llama(reference, 128), store, max_running=1, chunk=32)
    engine.generate(greedy(prompts[:1]))
    (again,) = engine.generate(greedy(prompts[:1]))
    assert (again.cached_tokens, again.token_ids) == (42, expected[0])


def test_preempted_sequences_continue_where_they_were(reference, prompts, expected):
    """Nine blocks: less than two of the longer requests need, so the younger ones have to give way."""
    completions = serve(reference, greedy(prompts), num_frames=10)
    assert max(completion.preemptions for completion in completions) > 0
    assert tokens_of(completions) == expected


def test_request_that_does_not_fit_alone_is_refused(reference, prompts):
    with pytest.raises(OutOfBlocks, match="wanted"):
        serve(reference, greedy(prompts), num_frames=5)


def test_store_is_left_clean_after_a_failure(reference, prompts):
    plan = plan_cache(reference.config, num_frames=6, kv_dtype="float32", block_size=16)
    store = KVStore(plan, "cpu", max_sequences=4, max_length=128, max_tokens_per_step=32)
    engine = Engine(Llama(reference, 128), store, max_running=4, chunk=32)
    with pytest.raises(OutOfBlocks):
        engine.generate(greedy(prompts))
    assert store.stats().open_sequences == 0
    store.check()
    assert len(engine.generate(greedy(prompts[1:2]))[0].token_ids) == MAX_TOKENS


def test_generation_stops_at_the_end_token(reference, prompts, expected):
    end = expected[2][6]
    cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
    assert tokens_of(serve(reference, greedy(prompts), eos_token_ids=[end])) == cut
    assert cut != expected


def test_sampling_depends_on_the_seed_and_on_no_other_request(reference, prompts):
    warm = [Request(prompt, MAX_TOKENS, 1.0, seed) for seed, prompt in enumerate(prompts)]
    together = tokens_of(serve(reference, warm))
    assert together == tokens_of(serve(reference, warm, num_frames=10, chunk=9))
    alone = [tokens_of(serve(reference, [request]))[0] for request in warm]
    assert together == alone
    reseeded = [Request(prompt, MAX_TOKENS, 1.0, seed + 100) for seed, prompt in enumerate(prompts)]
    assert all(a != b for a, b in zip(together, tokens_of(serve(reference, reseeded)), strict=True))


def test_greedy_and_sampled_requests_share_a_batch(reference, prompts, expected):
    mixed = [Request(prompt, MAX_TOKENS, float(index % 2), index) for index, prompt in enumerate(prompts)]
    assert tokens_of(serve(reference, mixed))[::2] == expected[::2]


def test_samples_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf]).expand(20_000, 4)
    tokens = sample(logits, np.full(20_000, 0.5), draws(3, 20_000))
    frequency = np.bincount(tokens, minlength=4) / 20_000
    # Three standard deviations of a frequency are at most 3 * 0.5 / sqrt(20,000) = 0.011.
    assert np.abs(frequency - torch.softmax(logits[0] / 0.5, -1).numpy()).max() < 0.011
    assert sample(logits[:1], np.ones(1), np.array([1 - 2**-53])).tolist() == [2]


@pytest.mark.parametrize("temperature", [1e-307, 5e-324, 1e-30])
def test_tiny_temperature_is_greedy(temperature):
    logits = torch.tensor([[3.0, 40.0, -torch.inf, 2.0]])
    assert sample(logits, np.array([temperature]), np.array([0.99])).tolist() == [1]


def test_infinite_temperature_draws_all_tokens_alike_but_those_ruled_out():
    logits = torch.tensor([[3.0, -torch.inf, 40.0, -torch.inf]]).expand(3, 4)
    assert sample(logits, np.full(3, np.inf), np.array([0.0, 0.49, 0.51])).tolist() == [0, 0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0.0, np.nan, 1.0], [0.0, np.inf, 1.0], [-np.inf] * 3], ids=["nan", "inf", "-inf"])
def test_logits_without_a_finite_largest_number_are_refused(bad, temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0], bad])
    with pytest.raises(ValueError, match=r"logits: expected rows with a finite largest number, got .* in row 1"):
        sample(logits, np.full(2, temperature), np.full(2, 0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "prompt: expected at least one token id, got none"),
        ((7, 1), "prompt: expected a sequence of token ids, got 7"),
        (({1, 2}, 1), r"prompt: expected a sequence of token ids, got \{1, 2\}"),
        (([1, -2, 3], 2), r"prompt: expected integers in \[0, 2147483647\], got -2"),
        (([1, 2**31], 2), r"prompt: expected integers in \[0, 2147483647\], got 2147483648"),
        (([1.0], 2), r"prompt: expected integers in \[0, 2147483647\], got 1\.0"),
        (("abc", 2), r"prompt: expected integers in \[0, 2147483647\], got 'a'"),
        (([True], 2), r"prompt: expected integers in \[0, 2147483647\], got True"),
        (([1], 0), "max_tokens: expected an integer >= 1, got 0"),
        (([1], 2.5), r"max_tokens: expected an integer >= 1, got 2\.5"),
        (([1], True), "max_tokens: expected an integer >= 1, got True"),
        (([1], 1, -0.5), "temperature: expected a number >= 0, got -0.5"),
        (([1], 1, float("nan")), "temperature: expected a number >= 0, got nan"),
        (([1], 1, "0.5"), r"temperature: expected a number >= 0, got '0\.5'"),
        (([1], 1, True), "temperature: expected a number >= 0, got True"),
        (([1, 2], 2, 1.0, -1), "seed: expected an integer >= 0, got -1"),
        (([1, 2], 2, 1.0, 0.5), r"seed: expected an integer >= 0, got 0\.5"),
    ],
)
def test_bad_request_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Request(*arguments)


def test_prompt_changed_behind_the_request_leaves_the_engine_clean(reference):
    engine, store = engine_and_store(reference)
    request = Request([1, 2], 1)
    request.prompt[1] = -2
    for _ in range(5):
        with pytest.raises(ValueError, match="expected token ids"):
            engine.generate([request])
    assert store.stats().open_sequences == 0
    assert len(engine.generate([Request(np.array([1, 2]), 3)])[0].token_ids) == 3


def test_token_outside_the_vocabulary_is_refused_and_changes_nothing(reference):
    engine, store = engine_and_store(reference)
    before = store.stats()
    with pytest.raises(ValueError, match=r"requests\[1\]: expected token ids below .* vocab_size 97, got 97"):
        engine.generate([Request([1], 1), Request([96, 97, 3], 1)])
    assert store.stats() == before


def test_step_that_fails_in_the_model_holds_no_block(reference, prompts, expected, monkeypatch):
    """A step of both a decode batch and a prefill batch fails; more often than there are seats, at that."""
    engine, store = engine_and_store(reference)
    forward = engine.model.forward

    def failing(store, batches, *arguments):
        if len(batches) == 2:
            raise RuntimeError("no memory")
        return forward(store, batches, *arguments)

    for _ in range(5):
        monkeypatch.setattr(engine.model, "forward", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.generate(greedy([prompts[1], *prompts]))
        stats = store.stats()
        assert (stats.in_use, stats.fenced, stats.open_sequences) == (0, 0, 0)
        store.check()
    monkeypatch.setattr(engine.model, "forward", forward)
    assert tokens_of(engine.generate(greedy(prompts))) == expected


@pytest.mark.parametrize(
    ("limits", "message"),
    [({"max_sequences": 2}, "max_sequences 2"), ({"max_tokens_per_step": 16}, "max_tokens_per_step")],
    ids=lambda value: str(value),
)
def test_store_of_lower_limits_than_the_engine_says_so_and_is_left_clean(reference, prompts, limits, message):
    engine, store = engine_and_store(reference, **limits)
    for _ in range(5):
        with pytest.raises(ValueError, match=message):
            engine.generate(greedy(prompts))
        stats = store.stats()
        assert (stats.in_use, stats.fenced, stats.open_sequences) == (0, 0, 0)
    assert len(engine.generate(greedy(prompts[1:2]))[0].token_ids) == MAX_TOKENS


def test_failed_draws_lose_no_seat(reference, prompts, monkeypatch):
    engine, store = engine_and_store(reference)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.demo.engine.draws", lambda seed, count, number: 1 / 0)
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                engine.generate(greedy(prompts))
            assert store.stats().open_sequences == 0
    assert len(engine.generate(greedy(prompts[1:2]))[0].token_ids) == MAX_TOKENS


def test_bad_engine_arguments_are_refused(reference, prompts):
    with pytest.raises(ValueError, match="chunk: expected at least max_running, got chunk 3, max_running 4"):
        serve(reference, [], chunk=3)
    with pytest.raises(ValueError, match=r"requests\[1\]: expected at most 128 tokens in all, got 190"):
        serve(reference, [Request([1], 1), Request(prompts[2], 100)])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random Llama and a tokenizer of single bytes, as transformers saves them."""
    folder = str(tmp_path_factory.mktemp("model"))
    alphabet = {chr(code): index for index, code in enumerate(range(33, 127))}
    vocab = {**alphabet, "Ġ": 94, "Ċ": 95, "<end>": 96}
    GPT2Tokenizer(
        vocab=vocab, merges=[], **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<end>")
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=96,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("explain", [False, True], ids=["in brief", "explained"])
def test_demo_prints_plan_verdict_and_texts(model_folder, capsys, explain):
    arguments = ["--model", model_folder, "--max-tokens", "5", "--memory", "4MiB", *["--explain"] * explain]
    assert run.main(arguments) == 0
    printed = capsys.readouterr().out
    verdict = "Same tokens as transformers: yes, in all 7 texts."
    parts = (verdict, "tokens per second", "blocks in use", "Texts", "cached")
    places = [printed.index(part) for part in parts]
    assert places == sorted(places)
    assert ("layer slot" in printed) == explain
    if not explain:
        assert printed[: places[0]].splitlines()[1:] == [
            "  1 group: full_b16 of 1 layer",
            "  layout buckets: 2,048 blocks of 2,048 B",
            "  longest sequence alone: 32,752 tokens",
            "  kvstore demo --explain shows what it was chosen from",
            "",
        ]


def test_demo_fails_when_a_text_differs(model_folder, capsys, monkeypatch):
    greedy_tokens = weights.LoadedModel.greedy

    def last_token_changed(self, prompts, max_tokens):
        *tokens, last = greedy_tokens(self, prompts, max_tokens)[0]
        return [[*tokens, last + 1]]

    monkeypatch.setattr(weights.LoadedModel, "greedy", last_token_changed)
    assert run.main(["--model", model_folder, "--max-tokens", "5", "--memory", "4MiB"]) == 1
    printed = capsys.readouterr().out
    assert "Prompt 7 differs from transformers' text after 4 equal tokens: expected [" in printed
    assert "Same tokens as transformers: no, 7 of 7 texts differ." in printed
    assert "yes" not in printed.partition("Texts")[0]


def test_demo_compares_no_sampled_text(model_folder, capsys):
    arguments = ["--model", model_folder, "--max-tokens", "3", "--memory", "4MiB", "--temperature", "0.8"]
    assert run.main(arguments) == 0
    assert "Same tokens as transformers: not compared, since they are sampled." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens: expected an integer >= 1, got '0'"),
        (["--temperature", "-1"], "--temperature: expected a number >= 0, got '-1'"),
        (["--temperature", "abc"], "--temperature: expected a number >= 0, got 'abc'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--model", "/nowhere"], "--model: expected a folder with a config.json, got /nowhere"),
    ],
)
def test_demo_answers_bad_arguments(arguments, message, capsys):
    assert run.main(arguments) == 2
    answer = capsys.readouterr().err
    assert message in answer
    assert answer.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1KiB"], "memory: one token needs"),
        (["--memory", "64KiB"], "out of blocks"),
        (["--chunk", "3"], "--chunk: expected at least 7, one token for each prompt, got 3"),
        (["--max-tokens", "2000"], "--max-tokens: expected at most 5"),
    ],
)
def test_demo_answers_what_does_not_fit(model_folder, arguments, message, capsys):
    assert run.main(["--model", model_folder, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt: expected a text to continue, got an empty one"),
        (["Hi", "--max-tokens", "0"], "--max-tokens: expected an integer >= 1, got '0'"),
    ],
)
def test_example_answers_bad_arguments(arguments, message):
    checkout = Path(__file__).parents[1]
    code = f"import sys, runpy; sys.path[:0] = ['.', 'kernels']; sys.argv[1:] = {arguments}; "
    code += "runpy.run_path('examples/generate.py')"
    result = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert (result.returncode, message in result.stderr, "Traceback" in result.stderr) == (2, True, False)
