"""What fits and what is wasted when plans serve a mix of requests: layouts side by side, model by model.

Requests are replayed on the books of a store by a small engine without a model. Bytes are looked at while a step is in
flight and requests wait for room. Nothing is reported of a replay that lost a token or a block.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.capacity_tables import show
from benchmarks.options import count, names_of, new_parser
from benchmarks.record import Measure, Run, UsageError
from benchmarks.replay import Engine, Outcome, Replay
from benchmarks.traces import MIXES, Request, draw, read_trace, to_lines
from benchmarks.waste import CAUSES, block_waste
from kvstore import CachePlan, PlanError, plan_cache
from kvstore.memory import parse_memory

MODELS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma-3-27b": {},
        "deepseek-v4-flash": {"kv_dtype": "fp8_ds_mla"},
        "qwen3-next-80b-a3b": {"state_dtype": "fp32"},
        "gpt-oss-20b": {},
        "llama-3.1-8b": {},
    }
)
"""The usual models, and how they are planned."""

OF_VLLM = ("equal/buckets", "packed/overlay")
LAYOUTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "equal/buckets": {"grouping": "equal", "layout": "buckets"},
        "packed/overlay": {"grouping": "packed", "layout": "overlay"},
        "buckets": {"layout": "buckets"},
        "bestfit": {"layout": "bestfit"},
        "overlay": {"layout": "overlay"},
        "frames": {"layout": "frames"},
    }
)
"""Rows of the tables. Those of OF_VLLM group as vLLM does (up to 0.26 with PR #44454, and since)."""

USUAL = ("chat", "long")
NUM_REQUESTS = {"chat": 400, "long": 100, "batch": 1000}
NUM_SEQUENCES = {"chat": 64, "long": 8, "batch": 64}
"""Prompts of a mix that the usual memory holds."""
LEAST = 1e-4
"""Of requests per second and of milliseconds."""
MAX_RUNNING = 65_536
OF_FILE = "trace"
"""What a mix from a file is called."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A model with a mix: `memory` bytes are planned in each layout."""

    model: str
    mix: str
    requests: Sequence[Request]
    memory: int
    engine: Engine


class Replays:
    """Replays plans; two that hold the same are replayed once."""

    def __init__(self) -> None:
        self._known: dict[object, Outcome] = {}

    def outcome(self, plan: CachePlan, setting: Setting) -> Outcome:
        """What a plan held."""
        groups = tuple((tuple(group.layers), group.block_size, block_waste(plan, group)) for group in plan.groups)
        shape = (plan.block_strides, plan.blocks_per_frame, plan.num_frames)
        key = (setting.model, setting.mix, setting.engine, groups, shape)
        if key not in self._known:
            self._known[key] = Replay.of(plan, setting.requests, setting.engine).run()
        return self._known[key]


def measure(setting: Setting, layout: str, replays: Replays) -> Iterator[Measure]:
    """Every figure of a layout; of one that cannot plan the model, why."""
    case = f"{setting.model}, {setting.mix}, {layout}"
    lengths = sorted({each.prompt_tokens + each.output_tokens for each in setting.requests})
    usual = tuple(lengths[len(lengths) * at // 4] for at in (1, 2, 3))
    options = {**MODELS.get(setting.model, {}), "memory": setting.memory, "lengths": usual}
    try:
        plan = plan_in(layout, setting.model, options)
        auto = plan_cache(setting.model, **options)
    except PlanError as error:
        yield Measure(case, "absent", str(error)[:200])
        return
    held = replays.outcome(plan, setting)
    if held.refused == len(setting.requests):
        yield Measure(case, "absent", f"none of {held.refused} requests fits, with a step in flight, even alone")
        return
    is_auto = (plan.layout, plan.groups, plan.frame_bytes) == (auto.layout, auto.groups, auto.frame_bytes)
    yield Measure(case, "plan", f"{len(plan.groups)} groups" + (", auto" if is_auto else ""))
    yield Measure(case, "memory", plan.arena_bytes, "B")
    yield Measure(case, "sequences", round(held.sequences[0], 2))
    yield Measure(case, "peak_sequences", held.sequences[1])
    yield Measure(case, "tokens", round(held.tokens[0]))
    yield Measure(case, "peak_tokens", held.tokens[1])
    yield Measure(case, "distinct_tokens", round(held.distinct_tokens[0]))
    yield Measure(case, "peak_distinct_tokens", held.distinct_tokens[1])
    yield Measure(case, "steps", held.num_steps)
    yield Measure(case, "hit_rate", round(100 * held.hit_rate, 2), "% of prompt tokens")
    yield Measure(case, "evicted", held.evicted, "blocks")
    yield Measure(case, "preempted", held.preempted, "times")
    yield Measure(case, "refused", held.refused, "requests")
    yield Measure(case, "looks", held.num_samples, "while full" if held.is_full else "of all steps")
    for place, share in held.places.shares().items():
        yield Measure(case, place, round(100 * share, 3), "% of memory")
    yield Measure(case, "wasted", round(100 * sum(held.places.shares()[cause] for cause in CAUSES), 3), "% of memory")


def plan_in(layout: str, model: str, options: Mapping[str, Any]) -> CachePlan:
    """The plan of a row. With states vLLM makes all pages equal: attention and states take blocks of as many tokens.

    Raises: PlanError where the layout cannot plan the model.
    """
    plan = plan_cache(model, **options, **LAYOUTS[layout])
    if layout not in OF_VLLM or all(group.retention.kind != "state" for group in plan.groups):
        return plan
    equal = plan_cache(model, **options, grouping="equal", layout=plan.layout)
    block_size = max(group.block_size for group in equal.groups)
    return plan_cache(model, **options, grouping="equal", layout=plan.layout, block_size=block_size)


def memory_for(model: str, requests: Sequence[Request], sequences: int, engine: Engine) -> int:
    """Bytes in which "overlay" holds about so many of these requests, each at the end of its prompt, and a step.

    Raises: UsageError for a model that cannot be planned.
    """
    lengths = [each.prompt_tokens for each in requests]
    try:
        plan = plan_cache(model, memory=1 << 40, layout="overlay", **MODELS.get(model, {}))
        settled, moving = (
            plan.blocks_needed([max(lengths)], in_flight=each, stored=engine.stored)
            for each in (0, min(max(lengths), engine.tokens_per_step))
        )
    except PlanError as error:
        raise UsageError(f"--models: {model}: {error}") from error
    strides = np.array(plan.block_strides)
    each = float((plan.blocks_needed(lengths) * strides).sum(1).mean())
    largest = int((settled * strides).sum())
    return int(max(sequences * each, largest) + ((moving - settled) * strides).sum()) // 2**20 * 2**20 + 2**20


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0, 1 when a replay went wrong, 2 for a caller's mistake."""
    options = _parse(arguments)
    if options.quick:
        options.models, options.sequences = options.models[:2], 8
    engine = Engine(
        max_running=options.max_running,
        tokens_per_step=options.tokens_per_step,
        tokens_per_decode=options.tokens_per_decode,
        step_s=options.step_ms / 1000,
        stored=options.stored,
    )
    mixes = requests_of(options)
    if options.save_trace:
        if len(mixes) != 1:
            raise UsageError(f"--save-trace: expected one of --mixes, got {', '.join(mixes)}")
        save(next(iter(mixes.values())), options.save_trace)
    settings = [
        Setting(
            model,
            mix,
            each,
            options.memory or memory_for(model, each, options.sequences or NUM_SEQUENCES.get(mix, 32), engine),
            engine,
        )
        for mix, each in mixes.items()
        for model in options.models
    ]
    replays = Replays()
    parts = [
        (f"{setting.model}, {setting.mix}, {layout}", partial(measure, setting, layout, replays))
        for setting in settings
        for layout in options.layouts
    ]
    with Run("capacity", options) as run:
        run.measure(parts)
    return run.finish(partial(show, engine=engine), draw_plot)


def requests_of(options: argparse.Namespace) -> dict[str, list[Request]]:
    """Mix -> its requests."""
    if options.trace is not None:
        return {OF_FILE: read_trace(options.trace)}
    counts = {mix: options.requests or NUM_REQUESTS[mix] // (8 if options.quick else 1) for mix in options.mixes}
    return {mix: draw(mix, number, options.seed, options.rate) for mix, number in counts.items()}


def save(requests: Sequence[Request], path: str) -> None:
    """Writes a trace. Raises: UsageError when it cannot."""
    try:
        Path(path).write_text(to_lines(requests), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--save-trace: cannot write {path!r}: {error.strerror}") from error


def draw_plot(measures: Sequence[Measure], path: Path) -> None:
    """Imported only here: matplotlib is an extra."""
    from benchmarks.capacity_plot import draw_places

    draw_places(measures, path)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("capacity", __doc__, "two models and few requests", plots=True)
    parser.add_argument(
        "--models",
        type=_models,
        default=tuple(MODELS),
        metavar="NAME,NAME",
        help="names that kvstore plan --list shows, or paths",
    )
    parser.add_argument(
        "--mixes", type=names_of(MIXES), metavar="NAME,NAME", help=f"of {', '.join(MIXES)} (default: {','.join(USUAL)})"
    )
    parser.add_argument(
        "--layouts",
        type=names_of(LAYOUTS),
        default=tuple(LAYOUTS),
        metavar="NAME,NAME",
        help=f"of {', '.join(LAYOUTS)}",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="requests from a file, a JSON object on each line, in the place of mixes"
    )
    parser.add_argument("--save-trace", metavar="FILE", help="write the requests of a mix (--mixes NAME)")
    parser.add_argument("--requests", type=count, metavar="N", help="of each mix")
    parser.add_argument("--seed", type=_seed, metavar="N", help="of the mixes (default: 0)")
    parser.add_argument(
        "--rate", type=_positive, metavar="R", help="requests per second (default: all wait from the start)"
    )
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="as 64GiB (default: for --sequences)")
    parser.add_argument("--sequences", type=count, metavar="N", help="memory for so many prompts of the mix")
    parser.add_argument(
        "--max-running", type=_seats, default=1024, metavar="N", help="sequences at once (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens-per-step", type=count, default=2048, metavar="N", help="new tokens of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens-per-decode",
        type=count,
        default=8,
        metavar="N",
        help="of a sequence that generates (default: %(default)s)",
    )
    parser.add_argument(
        "--step-ms",
        type=_positive,
        default=25.0,
        metavar="MS",
        help="what a step takes; matters with arrivals (default: %(default)s)",
    )
    parser.add_argument(
        "--stored",
        choices=("all", "tail"),
        default="all",
        help="rows of a prompt's chunk that windows store (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.trace is not None:
        for name in ("mixes", "requests", "seed", "rate"):
            if getattr(options, name) is not None:
                parser.error(f"--{name}: expected none with --trace, whose requests are as they are")
    options.mixes = options.mixes or USUAL
    options.seed = options.seed or 0
    return options


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        try:
            plan_cache(name, num_frames=2, **MODELS.get(name, {}))
        except PlanError as error:
            raise argparse.ArgumentTypeError(f"{error}".replace("\n", " ")) from error
    return names


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not LEAST <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from {LEAST} on, got {text!r}")
    return number


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def _seats(text: str) -> int:
    number = count(text)
    if number > MAX_RUNNING:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_RUNNING:,}, got {text!r}")
    return number


def _size(text: str) -> int:
    try:
        return parse_memory(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
