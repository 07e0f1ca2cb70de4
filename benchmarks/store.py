"""What the store's books cost the host: steps, prompts, forks, blocks, bytes. A wrong result gets no speed.

Stores without bytes (device=None), pools that are full. Times are of the store's calls alone, in one process that does
nothing else, with Python's garbage collector off.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import store_cases as steps
from benchmarks import store_memory as memory
from benchmarks import store_prompts as prompts
from benchmarks.kernels import cpu_name
from benchmarks.store_cases import FULL, GATED_SEQUENCES, QUICK, START, Measure, Sizes

Part = tuple[str, Callable[[], Iterator[Measure]]]
"""What a part is called where it fails, and what measures it."""

TIMES = ("min", "median", "worst", "worst_cpu")


def parts_of(case: str, sizes: Sizes) -> list[Part]:
    """What a case measures, one after the other; each part stands alone."""
    few_groups = (1, 5)
    num_sequences = GATED_SEQUENCES if sizes.gated else max(sizes.sequences)

    def each(measure: Callable[..., Iterator[Measure]], *choices: tuple[int, ...]) -> list[Part]:
        return [
            (f"{case} {', '.join(f'{number:,}' for number in choice)}".rstrip(), partial(measure, sizes, *choice))
            for choice in choices
        ]

    match case:
        case "decode":
            return each(steps.decode, *((groups, count) for groups in sizes.groups for count in sizes.sequences))
        case "changing":
            return each(steps.changing, *((groups, num_sequences) for groups in few_groups))
        case "prefill-between":
            return each(steps.alternating, *((groups, num_sequences) for groups in few_groups))
        case "calls":
            return each(steps.calls, *((groups,) for groups in few_groups))
        case "prefill" | "hit":
            measure = prompts.prefill if case == "prefill" else prompts.hit
            return each(measure, *((groups, length) for groups in few_groups for length in (sizes.short, sizes.long)))
        case "release":
            lengths = (START, sizes.short, sizes.long)
            return each(prompts.release, *((groups, length) for groups in few_groups for length in lengths))
        case "forks":
            return each(prompts.forks, *((groups,) for groups in few_groups))
        case "truncate":
            return each(prompts.truncate, *((groups,) for groups in few_groups))
        case "allocator":
            return each(prompts.allocator, ())
        case "books":
            return [*each(memory.books, (1,), (5,)), *each(memory.resident, ())]
    assert case == "frames"
    return [*each(memory.frames, ()), *each(memory.creep, ())]


CASES = (
    "decode",
    "changing",
    "prefill-between",
    "calls",
    "prefill",
    "hit",
    "release",
    "forks",
    "truncate",
    "allocator",
    "books",
    "frames",
)


def run(label: str, part: Callable[[], Iterator[Measure]]) -> list[Measure]:
    """The figures of a part; where it fails or its result is wrong, what is wrong instead."""
    try:
        return list(part())
    except Exception as error:  # whatever it is, the other parts have their say
        return [Measure(label, "wrong", f"{type(error).__name__}: {error}", "", "a right result", False)]


def machine() -> list[Measure]:
    """What the figures belong to."""
    facts = (
        ("cpu", cpu_name()),
        ("python", platform.python_version()),
        ("numpy", np.__version__),
        ("torch", str(torch.__version__)),
        ("load", " ".join(f"{load:.2f}" for load in os.getloadavg())),
    )
    return [Measure("machine", metric, value, "") for metric, value in facts]


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0 when every target is met, 1 when one is missed, 2 for a caller's mistake."""
    options = _parse(arguments)
    sizes = QUICK if options.quick else FULL
    facts = machine()
    measures: list[Measure] = []
    parts = [part for case in options.cases for part in parts_of(case, sizes)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(parts))
        for label, part in parts:
            progress.update(bar, description=label)
            measures += run(label, part)
            progress.advance(bar)
    lines = "\n".join(each.to_json() for each in (*facts, *measures))
    if options.json == "-":
        print(lines)
    else:
        console = Console()
        print_report(console if console.is_terminal else Console(width=140), facts, measures)
    try:
        if options.json not in (None, "-"):
            Path(options.json).write_text(lines + "\n", encoding="utf-8")
    except OSError as error:
        print(f"python -m benchmarks store: cannot write {options.json!r}: {error.strerror}", file=sys.stderr)
        return 2
    missed = [each for each in measures if each.ok is False]
    for each in missed:
        print(f"missed: {each.case}: {each.metric} {each.value} {each.unit} (target {each.target})", file=sys.stderr)
    return 1 if missed else 0


def print_report(console: Console, facts: Sequence[Measure], measures: Sequence[Measure]) -> None:
    """The machine, a line for each thing that was timed, and the other figures."""
    cpu, python, numpy_version, torch_version, load = (each.value for each in facts)
    console.print(
        f"{cpu} (load {load}); Python {python}, numpy {numpy_version}, torch {torch_version}\n", highlight=False
    )
    table = _table("Times in us", ("what",), ("min", "median", "worst", "worst, CPU", "targets", ""))
    others = _table("Figures", ("what", "figure"), ("value", "target", ""))
    cases: dict[str, dict[str, Measure]] = {}
    for each in measures:
        cases.setdefault(each.case, {})[each.metric] = each
    for case, figures in cases.items():
        if "min" in figures:
            timed = [figures[metric] for metric in TIMES if metric in figures]
            cells = [f"{figures[metric].value:,.1f}" if metric in figures else "" for metric in TIMES]
            table.add_row(case, *cells, *_verdict(timed))
        for metric, each in figures.items():
            if metric not in TIMES:
                value = f"{each.value:,}" if isinstance(each.value, int | float) else str(each.value)
                others.add_row(case, metric, f"{value} {each.unit}".rstrip(), *_verdict([each]))
    if table.row_count:
        console.print(table)
        console.print(
            "Decode: extend + commit of one token for each sequence. worst, CPU: the thread's own time, without what "
            "other processes took.\nThe garbage collector is off while a time is taken.\n",
            highlight=False,
        )
    if others.row_count:
        console.print(others)


def _verdict(figures: Sequence[Measure]) -> tuple[str, str]:
    """The targets of a row, and whether all of them are met."""
    gated = [each for each in figures if each.ok is not None]
    if not gated:
        return "", ""
    targets = ", ".join(
        f"{each.target:,}" if isinstance(each.target, int | float) else str(each.target) for each in gated
    )
    met = all(each.ok for each in gated)
    return targets, "[green]ok[/]" if met else "[red]missed[/]"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=column != "value")
    return table


class _Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, without the usage text, and names the options there are."""

    def error(self, message: str) -> NoReturn:
        known = ", ".join(name for action in self._actions for name in action.option_strings if name.startswith("--"))
        self.exit(2, f"{self.prog}: {message}; known: {known}\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks store", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("--cases", type=_cases, default=CASES, metavar="NAME,NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--quick", action="store_true", help="few sequences, few steps and no targets of speed: does it run at all"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="one JSON object per line, to FILE or instead of the tables",
    )
    return parser.parse_args(arguments)


def _cases(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"expected names out of {', '.join(CASES)}, got {name!r}")
    return names
