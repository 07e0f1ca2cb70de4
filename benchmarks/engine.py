"""The demo's engine against transformers' generate: SmolLM2-135M, same weights, dtype and threads, in one process.

Prompts are random tokens and no end token stops a text, so both sides generate the same number of tokens. Times cover
all of a request, its prompt included. Rounds alternate between the two sides; every round has prompts of its own, so
that no round finds the prompts of an earlier one in the prefix cache.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvstore import KVStore, plan_cache
from kvstore.demo.engine import Engine, Request
from kvstore.demo.model import Llama
from kvstore.demo.run import parse_count
from kvstore.demo.weights import DemoError, LoadedModel, load

MAX_RUNNING = 8
CHUNK = 256
MAX_LENGTH = 640

Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """`requests(round)` are what both sides serve; `target` is the least ratio of their speeds."""

    name: str
    target: float
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


def measure(case: Case, engine: Engine, loaded: LoadedModel, rounds: int) -> dict[str, float] | None:
    """Median tokens per second of both sides and their ratio; None when the texts of the first round differ."""
    requests = case.requests(0)
    if serve_ours(engine, requests) != serve_transformers(loaded, requests):
        return None
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(1, rounds + 1):
        print(f"{case.name}: round {number} of {rounds}", file=sys.stderr)
        requests = case.requests(number)
        for side, serve in enumerate((partial(serve_ours, engine), partial(serve_transformers, loaded))):
            start = time.perf_counter()
            serve(requests)
            seconds[side].append(time.perf_counter() - start)
    num_tokens = sum(request.max_tokens for request in requests)
    ours, theirs = (num_tokens / statistics.median(times) for times in seconds)
    return {"engine": ours, "transformers": theirs, "ratio": ours / theirs}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, or 1 when a text differs from transformers', 2 for a caller's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one short round, for a look; its figures mean little")
    parser.add_argument("--threads", type=parse_count, help="CPU threads (default: torch's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        loaded = load(None, getattr(torch, options.dtype))
    except DemoError as error:
        print(f"benchmarks engine: {error}", file=sys.stderr)
        return 2
    loaded.reference.generation_config.eos_token_id = None
    new_tokens, count, rounds = (16, 8, 1) if options.quick else (96, 32, 5)
    cases = (
        Case("batch 1", 0.95, equal_lengths(1, 64, new_tokens)),
        Case("batch 8", 0.95, equal_lengths(8, 64, new_tokens)),
        Case(f"{count} requests, at most {MAX_RUNNING} at once", 1.5, mixed_lengths(count)),
    )
    results = {}
    for case in cases:
        print(f"{case.name}: comparing the texts", file=sys.stderr)
        results[case] = measure(case, new_engine(loaded, options.dtype), loaded, rounds)
    (print_json if options.json else print_table)(results, options.dtype)
    return 0 if all(results.values()) else 1


def new_engine(loaded: LoadedModel, dtype: str) -> Engine:
    """An engine with an empty store that holds MAX_RUNNING of the longest sequences."""
    plan = plan_cache(loaded.reference.config, num_frames=1 + MAX_RUNNING * MAX_LENGTH // 16, kv_dtype=dtype)
    store = KVStore(
        plan, "cpu", max_sequences=MAX_RUNNING, max_length=MAX_LENGTH, max_tokens_per_step=CHUNK, max_in_flight=1
    )
    return Engine(Llama(loaded.reference, MAX_LENGTH), store, max_running=MAX_RUNNING, chunk=CHUNK)


def print_json(results: dict[Case, dict[str, float] | None], dtype: str) -> None:
    """One line per figure; `ok` is false and `value` null where the texts differ."""
    for case, figures in results.items():
        for metric in ("engine", "transformers", "ratio"):
            line = {
                "bench": "engine",
                "case": f"{case.name}, {dtype}",
                "metric": metric,
                "value": figures and round(figures[metric], 3),
                "unit": "x" if metric == "ratio" else "tokens/s",
            }
            if metric == "ratio":
                line |= {"target": case.target, "ok": bool(figures and figures["ratio"] >= case.target)}
            print(json.dumps(line))


def print_table(results: dict[Case, dict[str, float] | None], dtype: str) -> None:
    """Speeds side by side."""
    import transformers

    table = Table(
        title=f"SmolLM2-135M {dtype} on {torch.get_num_threads()} CPU threads, useful tokens per second "
        f"(Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__})",
        title_justify="left",
    )
    for column in ("case", "engine", "transformers", "ratio", "target", ""):
        table.add_column(column, justify="left" if column in ("case", "") else "right")
    for case, figures in results.items():
        if figures is None:
            table.add_row(case.name, "-", "-", "-", f"{case.target:.2f}", "[red]texts differ[/red]")
            continue
        reached = "[green]ok[/green]" if figures["ratio"] >= case.target else "[red]missed[/red]"
        speeds = (f"{figures['engine']:.1f}", f"{figures['transformers']:.1f}", f"{figures['ratio']:.2f}")
        table.add_row(case.name, *speeds, f"{case.target:.2f}", reached)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
