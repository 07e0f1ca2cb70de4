"""The demo's engine against transformers' generate: SmolLM2-135M, same weights, dtype and threads, in one process.

Prompts are random tokens and no end token stops a text, so both sides generate the same number of tokens. Times cover
all of a request, its prompt included. Rounds alternate between the two sides; every round has prompts of its own, so
that no round finds the prompts of an earlier one in the prefix cache.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from rich.console import Console

from benchmarks.options import count, new_parser
from benchmarks.record import Measure, Run, UsageError
from benchmarks.tables import case_table
from benchmarks.timing import Times
from kvstore import KVStore, plan_cache
from kvstore.demo.engine import Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.weights import DemoError, LoadedModel, load

MAX_RUNNING = 8
CHUNK = 256
MAX_LENGTH = 640

COLUMNS = {
    "engine": "engine",
    "engine_spread": "+- %",
    "transformers": "transformers",
    "transformers_spread": "+- %",
    "ratio": "ratio",
    "difference": "differs",
}
"""Metrics -> headings of their columns."""

Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """`requests(round)` are what both sides serve; `target` is the least ratio of their speeds, None without one."""

    name: str
    target: float | None
    requests: Callable[[int], list[Request]]


def equal_lengths(batch: int, prompt_tokens: int, new_tokens: int) -> Callable[[int], list[Request]]:
    """`batch` requests of the same prompt length and number of new tokens."""

    def requests(number: int) -> list[Request]:
        rng = np.random.default_rng([batch, number])
        return [Request(rng.integers(0, 49152, prompt_tokens).tolist(), new_tokens) for _ in range(batch)]

    return requests


def mixed_lengths(count: int) -> Callable[[int], list[Request]]:
    """Prompts of 16 to 512 tokens and 8 to 128 new tokens, the same lengths in every round."""
    lengths = np.random.default_rng(32)
    prompt_tokens, new_tokens = lengths.integers(16, 513, count), lengths.integers(8, 129, count)

    def requests(number: int) -> list[Request]:
        rng = np.random.default_rng([32, number])
        return [
            Request(rng.integers(0, 49152, prompt).tolist(), new)
            for prompt, new in zip(prompt_tokens.tolist(), new_tokens.tolist(), strict=True)
        ]

    return requests


def serve_ours(engine: Engine, requests: Sequence[Request]) -> Texts:
    """Continuous batching, at most MAX_RUNNING at once."""
    return [completion.token_ids for completion in engine.generate(requests)]


def serve_transformers(loaded: LoadedModel, requests: Sequence[Request]) -> Texts:
    """Static batching: MAX_RUNNING requests at a time, in order of arrival, each batch to its longest text's end."""
    texts: Texts = []
    for first in range(0, len(requests), MAX_RUNNING):
        batch = requests[first : first + MAX_RUNNING]
        generated = loaded.greedy([request.prompt for request in batch], max(request.max_tokens for request in batch))
        texts += [tokens[: request.max_tokens] for tokens, request in zip(generated, batch, strict=True)]
    return texts


def measure(
    case: Case, name: str, engine: Engine, loaded: LoadedModel, rounds: int, advance: Callable[[], None]
) -> Iterator[Measure]:
    """Median tokens per second of both sides and their ratio; where the texts of the first round differ, how."""
    requests = case.requests(0)
    if what := difference(serve_ours(engine, requests), serve_transformers(loaded, requests)):
        yield Measure(name, "difference", what, "", "none", False)
        return
    advance()
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(1, rounds + 1):
        requests = case.requests(number)
        for side, serve in enumerate((partial(serve_ours, engine), partial(serve_transformers, loaded))):
            start = time.perf_counter()
            serve(requests)
            seconds[side].append(time.perf_counter() - start)
        advance()
    num_tokens = sum(request.max_tokens for request in requests)
    ours, theirs = (Times(tuple(taken)) for taken in seconds)
    for metric, times in (("engine", ours), ("transformers", theirs)):
        yield Measure(name, metric, round(num_tokens / times.median, 3), "tokens/s")
        yield Measure(name, f"{metric}_spread", round(100 * times.spread, 1), "%")
    ratio = theirs.median / ours.median
    ok = None if case.target is None else ratio >= case.target
    yield Measure(name, "ratio", round(ratio, 3), "x", case.target, ok)


def difference(ours: Texts, theirs: Texts) -> str:
    """Where two answers to the same requests begin to differ, in words; "" where they are equal."""
    for request, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            pairs = zip(mine, other, strict=False)
            at = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(mine), len(other)))
            return f"request {request}, token {at}: {mine[at : at + 1]}, not {other[at : at + 1]}"
    return ""


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0 when every target is met, 1 when one is missed, 2 for a caller's mistake."""
    options = _parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    new_tokens, num_requests, rounds = (16, 4, 1) if options.quick else (96, 32, 5)
    cases = (
        Case("batch 1", None if options.quick else 0.95, equal_lengths(1, 64, new_tokens)),
        Case("batch 8", None if options.quick else 0.95, equal_lengths(8, 64, new_tokens)),
        Case(
            f"{num_requests} requests, at most {MAX_RUNNING} at once",
            None if options.quick else 1.5,
            mixed_lengths(num_requests),
        ),
    )
    with Run("engine", options) as run:
        loaded = _load(options.dtype)
        with run.progress(len(cases) * (1 + rounds)) as advance:
            for case in cases:
                advance(case.name, 0)
                name = f"{case.name}, {options.dtype}"
                engine = new_engine(loaded, options.dtype)
                step = partial(advance, case.name, 1)
                run.attempt(name, partial(measure, case, name, engine, loaded, rounds, step))
    return run.finish(show)


def new_engine(loaded: LoadedModel, dtype: str) -> Engine:
    """An engine with an empty store that holds MAX_RUNNING of the longest sequences."""
    plan = plan_cache(loaded.reference.config, num_frames=1 + MAX_RUNNING * MAX_LENGTH // 16, kv_dtype=dtype)
    store = KVStore(
        plan, "cpu", max_sequences=MAX_RUNNING, max_length=MAX_LENGTH, max_tokens_per_step=CHUNK, max_in_flight=1
    )
    return Engine(Llama(loaded.reference, MAX_LENGTH), store, max_running=MAX_RUNNING, chunk=CHUNK)


def show(console: Console, measures: Sequence[Measure]) -> None:
    """Speeds side by side."""
    import transformers

    title = f"SmolLM2-135M beside transformers {transformers.__version__}, useful tokens per second"
    console.print(case_table(title, measures, COLUMNS, left=("difference",)))
    console.print("Medians of alternated rounds, texts equal; +-: distance of the quartiles.\n", highlight=False)


def _load(dtype: str) -> LoadedModel:
    try:
        loaded = load(None, getattr(torch, dtype))
    except DemoError as error:
        raise UsageError(str(error)) from error
    loaded.reference.generation_config.eos_token_id = None
    return loaded


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("engine", __doc__, "one short round without targets: its figures mean little")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    return parser.parse_args(arguments)
