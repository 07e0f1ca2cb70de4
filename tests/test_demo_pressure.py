"""The demo's engine with samples, adapters and too little memory: the tokens are those of a store with room for all."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore import KVStore, Namespace, OutOfBlocks, StoreStats, plan_cache
from kvstore.demo import engine as demo_engine
from kvstore.demo.engine import Completion, Engine, Request
from kvstore.demo.model import Llama, LowRank
from kvstore.demo.sampling import draws, sample

VOCAB = 97
HIDDEN = 48
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 8, 6, 2
NUM_LAYERS = 2
MAX_LENGTH = 128
BLOCK_SIZE = 8
MAX_RUNNING = 12
ROOM, PRESSURE = 600, 40
"""Frames: the peak of a run with room is about 50 blocks, and the longest sequence alone needs 14."""

SEED = 18
"""Of the first 60 the one whose draws are farthest from a boundary between two tokens: 5e-5 in the logits, ten times
what rounding changes in them."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products as small as these lose more to a second thread, on a busy machine, than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def adapters():
    """Two adapters that change queries, keys and values by about as much as the weights are."""
    rng = torch.Generator().manual_seed(1)
    columns = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    return {
        name: [
            LowRank(torch.randn(HIDDEN, 2, generator=rng) * 0.1, torch.randn(2, columns, generator=rng))
            for _ in range(NUM_LAYERS)
        ]
        for name in ("formal", "terse")
    }


def mixed_requests(seed, count=64):
    """Prompts of 1 to 87 tokens, three of four with the beginning of one of three texts; a fifth of them greedy, half
    with four samples, each with no adapter or one of two."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, VOCAB, length).tolist() for length in (48, 37, 20)]
    requests = []
    for index in range(count):
        shared = texts[index % 3][: int(rng.integers(10, 49))] if index % 4 else []
        prompt = shared + rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
        requests.append(
            Request(
                prompt,
                max_tokens=int(rng.integers(4, 20)),
                temperature=0.8 if index % 5 else 0.0,
                seed=index,
                n=4 if index % 2 else 1,
                adapter=(None, "formal", "terse")[int(rng.integers(3))],
            )
        )
    return requests


@dataclass
class Outcome:
    """What a run did. `drawn` has the logits and the temperature of every token, by its random number."""

    completions: list[Completion] = field(default_factory=list)
    stats: StoreStats | None = None
    calls: dict[str, int] = field(default_factory=dict)
    drawn: dict[float, tuple[torch.Tensor, float]] = field(default_factory=dict)

    @property
    def tokens(self):
        return [completion.samples for completion in self.completions]

    @property
    def preemptions(self):
        return sum(completion.preemptions for completion in self.completions)


def new_store(reference, num_frames, max_sequences=MAX_RUNNING, block_size=BLOCK_SIZE):
    """In debug mode: what is read after it was given up is NaN, and `sample` refuses that."""
    plan = plan_cache(reference.config, num_frames=num_frames, kv_dtype="float32", block_size=block_size)
    return KVStore(plan, "cpu", max_sequences=max_sequences, max_length=MAX_LENGTH, max_tokens_per_step=32, debug=True)


def serve(reference, requests, num_frames=ROOM, preemption="recompute", max_running=MAX_RUNNING):
    """Runs the requests, proves the books every 16 commits, and leaves nothing held."""
    store, outcome = new_store(reference, num_frames, max_running), Outcome()

    def counted(name):
        call = getattr(store, name)

        def counting(*arguments, **options):
            result = call(*arguments, **options)
            outcome.calls[name] = outcome.calls.get(name, 0) + 1
            if name == "commit" and outcome.calls[name] % 16 == 0:
                store.check()
            return result

        return counting

    def recorded(logits, temperatures, uniforms):
        for row, temperature, uniform in zip(logits, temperatures.tolist(), uniforms.tolist(), strict=True):
            assert uniform not in outcome.drawn
            outcome.drawn[uniform] = row.double(), temperature
        return sample(logits, temperatures, uniforms)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("commit", "fork", "suspend", "resume"):
            patch.setattr(store, name, counted(name))
        patch.setattr(demo_engine, "sample", recorded)
        model = Llama(reference, MAX_LENGTH, adapters())
        engine = Engine(model, store, max_running=max_running, chunk=32, preemption=preemption)
        outcome.completions = engine.generate(requests)
    outcome.stats = store.stats()
    expect_clean(store)
    return outcome


def expect_clean(store):
    store.check()
    stats = store.stats()
    assert (stats.in_use, stats.fenced, stats.open_sequences, stats.suspended_sequences) == (0, 0, 0, 0)


@pytest.fixture(scope="module")
def roomy(reference):
    return serve(reference, mixed_requests(SEED))


def margin(logits, temperature, uniform):
    """By how much all logits may be off, in either direction, before another token is drawn.

    Greedy: half of what the largest is above the second. Else a boundary between two tokens is a cumulative
    probability c, and logits that are off by d move log(c / (1 - c)) by at most 2 d / temperature.
    """
    if not temperature:
        first, second = logits.topk(2).values.tolist()
        return (first - second) / 2
    bounds = torch.softmax(logits / temperature, -1).cumsum(-1)[:-1]
    distance = torch.logit(bounds) - torch.logit(torch.tensor(uniform, dtype=torch.float64))
    return float(distance.abs().min()) * temperature / 2


@pytest.mark.parametrize("preemption", ["recompute", "suspend"])
def test_tokens_under_pressure_equal_those_of_a_run_with_room(reference, roomy, preemption):
    """The same tokens, though not the same bits: other steps have other tokens beside a sequence's own, a matrix
    product of one row, the tail of a vector loop and a prefill round otherwise than many rows and a decode do. The
    random numbers are those for which every token is far from its neighbour by many times that rounding."""
    got = serve(reference, mixed_requests(SEED), PRESSURE, preemption)
    assert got.tokens == roomy.tokens
    assert [len(samples) for samples in got.tokens] == [request.n for request in mixed_requests(SEED)]

    assert (roomy.stats.evicted, roomy.preemptions) == (0, 0)
    assert got.stats.evicted > 0
    assert got.preemptions > 0
    assert got.stats.hit_tokens > 0
    assert got.calls["fork"] == sum(request.n > 1 for request in mixed_requests(SEED))
    suspends, resumes = got.calls.get("suspend", 0), got.calls.get("resume", 0)
    assert suspends == resumes == (got.preemptions if preemption == "suspend" else 0)

    assert got.drawn.keys() == roomy.drawn.keys()
    rounding = max(float((got.drawn[key][0] - row).abs().max()) for key, (row, _) in roomy.drawn.items())
    least = min(margin(*drawn, key) for key, drawn in roomy.drawn.items())
    assert 0 < rounding < least / 4, f"rounding {rounding:.1e}, least margin {least:.1e}: choose another SEED"


def test_share_between_adapters_would_change_the_tokens(reference, roomy, monkeypatch):
    monkeypatch.setattr(demo_engine, "Namespace", lambda adapter: Namespace())
    wrong = serve(reference, mixed_requests(SEED))
    assert wrong.stats.hit_tokens > roomy.stats.hit_tokens
    assert wrong.tokens != roomy.tokens


def test_share_between_sequences_after_a_preemption_is_needed(reference):
    """One request of which the samples alone do not fit beside each other, and have to take turns."""
    request = Request(list(range(61)), 40, 1.0, 3, n=4)
    expected = serve(reference, [request])
    for preemption in ("recompute", "suspend"):
        got = serve(reference, [request], 15, preemption, max_running=4)
        assert got.preemptions >= 3
        assert got.tokens == expected.tokens


def merged(reference, name):
    """The reference with an adapter added to its weights."""
    copy = LlamaForCausalLM(reference.config).eval()
    copy.load_state_dict(reference.state_dict())
    for layer, (down, up) in zip(copy.model.layers, adapters().get(name, ()), strict=False):
        change, start = (down @ up).t(), 0
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.data += change[start : start + len(projection.weight)]
            start += len(projection.weight)
    return copy


@pytest.mark.parametrize("adapter", [None, "formal", "terse"])
def test_samples_equal_those_of_transformers_with_the_adapter_merged(reference, adapter):
    """A prompt that ends with its block, one that does not, one of a single token."""
    rng = np.random.default_rng(5)
    requests = [
        Request(rng.integers(0, VOCAB, length).tolist(), 6, 1.0, 7 + length, n=3, adapter=adapter)
        for length in (16, 29, 1)
    ]
    model, expected = merged(reference, adapter), []
    for request in requests:
        texts = [list(request.prompt) for _ in range(request.n)]
        for number, text in enumerate(texts):
            for uniform in draws(request.seed, request.max_tokens, number):
                with torch.inference_mode():
                    logits = model(torch.tensor([text])).logits[0, -1:]
                text.append(int(sample(logits, np.ones(1), np.array([uniform]))[0]))
        expected.append([text[len(request.prompt) :] for text in texts])
    others = [Request(request.prompt, 6, 1.0, seed, adapter="terse") for seed, request in enumerate(requests)]
    assert serve(reference, requests + others).tokens[:3] == expected


def test_first_sample_is_that_of_a_request_for_one(reference):
    prompt = list(range(30))
    four = serve(reference, [Request(prompt, 10, 1.0, 4, n=4)]).completions[0]
    (one,) = serve(reference, [Request(prompt, 10, 1.0, 4)]).completions
    assert four.token_ids == four.samples[0] == one.token_ids
    assert len({tuple(tokens) for tokens in four.samples}) == 4


def test_samples_share_the_blocks_of_their_prompt(reference):
    """Seven full blocks are shared by all; each of four samples writes to its own eighth block."""
    outcome = serve(reference, [Request(list(range(60)), 3, 1.0, 4, n=4)])
    assert outcome.stats.peak_in_use == 7 + 4


def test_samples_end_one_by_one(reference):
    request = Request(list(range(21)), 20, 1.0, 2, n=4)
    (full,) = serve(reference, [request]).completions
    end = full.samples[1][3]
    store = new_store(reference, ROOM)
    engine = Engine(Llama(reference, MAX_LENGTH), store, max_running=4, chunk=32, eos_token_ids=[end])
    (cut,) = engine.generate([request])
    assert cut.samples == [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in full.samples]
    assert len({len(tokens) for tokens in cut.samples}) > 1
    expect_clean(store)


@pytest.mark.parametrize("preemption", ["recompute", "suspend"])
def test_step_that_fails_under_pressure_holds_nothing(reference, preemption, monkeypatch):
    store = new_store(reference, PRESSURE)
    engine = Engine(
        Llama(reference, MAX_LENGTH, adapters()), store, max_running=MAX_RUNNING, chunk=32, preemption=preemption
    )
    requests = mixed_requests(SEED)
    forward = engine.model.forward
    for number in (30, 60, 61, 90):
        steps = iter(range(number))

        def failing(*arguments, steps=steps):
            if next(steps, None) is None:
                raise RuntimeError("no memory")
            return forward(*arguments)

        monkeypatch.setattr(engine.model, "forward", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.generate(requests)
        expect_clean(store)
    monkeypatch.setattr(engine.model, "forward", forward)
    got = engine.generate(requests[:8])
    assert [len(completion.samples) for completion in got] == [request.n for request in requests[:8]]
    expect_clean(store)


def test_failed_fork_loses_no_seat(reference):
    """The store has room for three sequences, which the engine cannot know."""
    store = new_store(reference, ROOM, max_sequences=3)
    engine = Engine(Llama(reference, MAX_LENGTH), store, max_running=4, chunk=32)
    for _ in range(5):
        with pytest.raises(ValueError, match="max_sequences 3"):
            engine.generate([Request([1, 2, 3], 4, n=4)])
        expect_clean(store)
    assert len(engine.generate([Request([1, 2, 3], 4, n=3)])[0].samples) == 3


def test_sequence_that_does_not_fit_alone_is_refused(reference):
    for preemption in ("recompute", "suspend"):
        store = new_store(reference, 8)
        engine = Engine(Llama(reference, MAX_LENGTH), store, max_running=4, chunk=32, preemption=preemption)
        with pytest.raises(OutOfBlocks, match="wanted"):
            engine.generate([Request(list(range(50)), 20, 1.0, n=3)])
        expect_clean(store)


def test_draws_are_those_of_the_seed_and_the_sample_alone():
    assert draws(5, 4).tolist() == np.random.default_rng(5).random(4).tolist()
    assert draws(5, 9, 2)[:4].tolist() == draws(5, 4, 2).tolist()
    keys = [(5, 0), (5, 1), (6, 0), (2**32 + 5, 0), (2**32 + 5, 1), (5, 2**32 + 1)]
    assert len({draws(seed, 1, number)[0] for seed, number in keys}) == len(keys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n: expected an integer >= 1, got 0"),
        ({"n": True}, "n: expected an integer >= 1, got True"),
        ({"n": 1.5}, r"n: expected an integer >= 1, got 1\.5"),
        ({"adapter": 7}, "adapter: expected a name or None, got 7"),
    ],
)
def test_bad_request_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Request([1], 1, **options)


def test_what_the_engine_or_the_model_cannot_do_is_refused(reference):
    model, store = Llama(reference, MAX_LENGTH, adapters()), new_store(reference, 9)
    engine = Engine(model, store, max_running=4, chunk=32)
    with pytest.raises(ValueError, match=r"requests\[0\]: expected at most 4 samples \(max_running\), got 5"):
        engine.generate([Request([1], 1, n=5)])
    with pytest.raises(ValueError, match=r"requests\[1\]: expected an adapter of .* \(formal, terse\), got 'curt'"):
        engine.generate([Request([1], 1), Request([1], 1, adapter="curt")])
    with pytest.raises(ValueError, match="preemption: expected 'recompute' or 'suspend', got 'swap'"):
        Engine(model, store, max_running=4, chunk=32, preemption="swap")
    low_ranks = adapters()["terse"]
    with pytest.raises(ValueError, match=r"adapters\['terse'\]: expected one entry for each of 2 layers, got 1"):
        Llama(reference, MAX_LENGTH, {"terse": low_ranks[:1]})
    turned = [LowRank(up.t(), down.t()) for down, up in low_ranks]
    with pytest.raises(ValueError, match=r"expected \[48, rank\] and \[rank, 80\], got \[80, 2\] and \[2, 48\]"):
        Llama(reference, MAX_LENGTH, {"terse": turned})
