"""Speed of the ops on the CPU, each beside torch doing the same work; a wrong result gets no speed."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import triton
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.kernel_cases import CASES, FULL, QUICK, Call, Case

ROUNDS, QUICK_ROUNDS = 9, 3
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of one case; `target` is the bound it is held to, None where it is only reported."""

    case: str
    metric: str
    value: Value
    unit: str
    target: Value | None = None
    ok: bool | None = None

    def to_json(self) -> str:
        """One line; `target` and `ok` only where there is a target."""
        gate = {} if self.ok is None else {"target": self.target, "ok": self.ok}
        fields = {"bench": "kernels", "case": self.case, "metric": self.metric, "value": self.value, "unit": self.unit}
        return json.dumps({**fields, **gate})


def machine() -> list[Measure]:
    """What the figures belong to."""
    facts = (
        ("cpu", cpu_name()),
        ("threads", torch.get_num_threads()),
        ("torch", str(torch.__version__)),
        ("triton", str(triton.__version__)),
    )
    return [Measure("machine", metric, value, "") for metric, value in facts]


def cpu_name() -> str:
    """The processor as Linux names it, and how many of it there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def find_difference(case: Case) -> Measure | None:
    """Runs the op once; what is wrong with its result, None when nothing is."""
    results, expected = case.run(), case.expected()
    for result, (wanted, allowed) in zip(results, expected, strict=True):
        if allowed is None:
            differs = result.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)
            if count := int(differs.sum()):
                return Measure(case.name, "difference", count, "B", 0, False)
            continue
        share = ((result.double() - wanted).abs() / allowed).nan_to_num(nan=torch.inf).max().item()
        if share > 1:
            return Measure(case.name, "difference", round(share, 3), "x what rounding may change", 1, False)
    return None


def fastest(calls: Sequence[Call], rounds: int, advance: Callable[[], None]) -> list[float]:
    """The least time of each call in seconds; they take turns, so that all see the same machine.

    Each is timed right behind a run of its own: none finds in the caches what another has left there.
    """
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for idx, call in enumerate(calls):
            call()
            begin = time.perf_counter()
            call()
            least[idx] = min(least[idx], time.perf_counter() - begin)
        advance()
    return least


def measure(case: Case, rounds: int, is_gated: bool, advance: Callable[[], None]) -> Iterator[Measure]:
    """Every figure of a case, or its difference alone."""
    if (wrong := find_difference(case)) is not None:
        yield wrong
        return
    ours, *others = fastest([case.run, *case.rivals.values()], rounds, advance)
    yield Measure(case.name, "time", round(1e3 * ours, 4), "ms")
    if case.num_bytes:
        yield Measure(case.name, "speed", round(case.num_bytes / ours / 1e9, 2), "GB/s")
    if not others:
        return
    rival_time, rival = min(zip(others, case.rivals, strict=True))
    ratio = round(rival_time / ours, 3)
    yield Measure(case.name, "rival", rival, "")
    yield Measure(case.name, "rival_time", round(1e3 * rival_time, 4), "ms")
    if case.target is None or not is_gated:
        yield Measure(case.name, "ratio", ratio, "x")
    else:
        yield Measure(case.name, "ratio", ratio, "x", case.target, ratio >= case.target)


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0 when every target is met, 1 when one is missed, 2 for a caller's mistake."""
    options = _parse(arguments)
    sizes, rounds = (QUICK, QUICK_ROUNDS) if options.quick else (FULL, ROUNDS)
    facts, measures = machine(), []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=rounds * len(options.cases))
        for done, name in enumerate(options.cases):
            progress.update(bar, description=name, completed=rounds * done)
            case = CASES[name](sizes)
            measures += measure(case, rounds, not options.quick, lambda: progress.advance(bar))
    lines = "\n".join(each.to_json() for each in (*facts, *measures))
    if options.json == "-":
        print(lines)
    else:
        console = Console()
        print_report(console if console.is_terminal else Console(width=120), facts, measures, rounds)
    try:
        if options.json not in (None, "-"):
            Path(options.json).write_text(lines + "\n", encoding="utf-8")
    except OSError as error:
        print(f"python -m benchmarks kernels: cannot write {options.json!r}: {error.strerror}", file=sys.stderr)
        return 2
    missed = [each for each in measures if each.ok is False]
    for each in missed:
        print(f"missed: {each.case}: {each.metric} {each.value} {each.unit} (target {each.target})", file=sys.stderr)
    return 1 if missed else 0


def print_report(console: Console, facts: Sequence[Measure], measures: Sequence[Measure], rounds: int) -> None:
    """The machine and a line for each case."""
    cpu, threads, torch_version, triton_version = (each.value for each in facts)
    console.print(f"{cpu}, {threads} threads; torch {torch_version}, triton {triton_version}\n", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("case", "beside"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "GB/s", "its ms", "ratio", "target"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in dict.fromkeys(each.case for each in measures):
        figures = {each.metric: each for each in measures if each.case == case}
        if "difference" in figures:
            wrong = figures["difference"]
            table.add_row(case, f"[red]wrong: differs by {wrong.value} {wrong.unit}[/]")
            continue
        ratio = figures.get("ratio")
        shown = "" if ratio is None else f"{ratio.value:.2f}"
        if ratio is not None and ratio.ok is not None:
            shown = f"[{'green' if ratio.ok else 'red'}]{shown}[/]"
        table.add_row(
            case,
            _shown(figures.get("rival")),
            *(_shown(figures.get(metric)) for metric in ("time", "speed", "rival_time")),
            shown,
            "" if ratio is None or ratio.target is None else f"{ratio.target:.1f}",
        )
    console.print(table)
    console.print(
        f"Least of {rounds} alternated runs, after a check of the result. GB/s: bytes read and written. ratio: time of "
        "what stands beside it / time of the op.",
        highlight=False,
    )


def _shown(figure: Measure | None) -> str:
    if figure is None:
        return ""
    return f"{figure.value:,.2f}" if isinstance(figure.value, float) else str(figure.value)


class _Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, without the usage text, and names the options there are."""

    def error(self, message: str) -> NoReturn:
        known = ", ".join(name for action in self._actions for name in action.option_strings if name.startswith("--"))
        self.exit(2, f"{self.prog}: {message}; known: {known}\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m benchmarks kernels", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--cases", type=_cases, default=tuple(CASES), metavar="NAME,NAME", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rows, three rounds and no targets: does it run at all"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="one JSON object per line, to FILE or instead of the table",
    )
    return parser.parse_args(arguments)


def _cases(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"expected names out of {', '.join(CASES)}, got {name!r}")
    return names
