"""Models of transformers on the store's pages, beside its own cache: tokens, logits, prefixes, memory.

Small random models in float32 generate 64 tokens greedily from prompts around windows, blocks and compressed rows; a
second batch goes on from the first. A run whose tokens differ, or whose logits differ more than sums in another order
do, is a failure.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import family_memory, family_runs
from benchmarks.family_models import FAMILIES
from benchmarks.family_runs import ATTENTIONS, LAYOUTS, LOGITS_BUDGET, NEW_TOKENS, Run

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """A family on one layout, through one attention function; the worst of its batches. `fault` is what went wrong."""

    family: str
    layout: str
    attention: str
    num_groups: int
    num_prompts: int
    run: Run | None
    seconds: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether all tokens are equal and all logits within the budget."""
        return self.run is not None and self.run.equal and self.run.error <= LOGITS_BUDGET


def rows_of(family: str, layouts: Sequence[str], quick: bool) -> Iterator[Row]:
    """Runs a family on each layout and through both attention functions."""
    batches = family_runs.lengths_of(family)
    if quick:
        batches = batches[-1:]
    for layout in layouts:
        num_groups = len(family_runs.store_of(family, layout).plan.groups)
        for attention in ATTENTIONS:
            begin, fault, worst = time.perf_counter(), "", None
            try:
                runs = [family_runs.compare(family, layout, attention, lengths) for lengths in batches]
                worst = Run(
                    equal=all(run.equal for run in runs),
                    error=max(run.error for run in runs),
                    cached=sum(run.cached for run in runs),
                    asked=sum(run.asked for run in runs),
                )
            except Exception as error:  # whatever it is, the other families have their say
                fault = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - begin
            yield Row(family, layout, attention, num_groups, sum(map(len, batches)), worst, seconds, fault)


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison. Returns 0 when all tokens are equal, 1 when some are not, 2 for a caller's mistake."""
    options = _parse(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # sums of several threads come in no fixed order
    layouts = LAYOUTS[:1] + LAYOUTS[-1:] if options.quick else LAYOUTS
    rows: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(options.families) * len(layouts) * len(ATTENTIONS))
        for family in options.families:
            progress.update(bar, description=family)
            for row in rows_of(family, layouts, options.quick):
                rows.append(row)
                progress.advance(bar)
    held = family_memory.measure() if "deepseek-v4" in options.families else []
    lines = "\n".join(map(json.dumps, (*_records(rows), *_held_records(held))))
    if options.json == "-":
        print(lines)
    else:
        console = Console()
        print_report(console if console.is_terminal else Console(width=120), rows, held)
    try:
        if options.json not in (None, "-"):
            Path(options.json).write_text(lines + "\n", encoding="utf-8")
    except OSError as error:
        print(f"python -m benchmarks families: cannot write {options.json!r}: {error.strerror}", file=sys.stderr)
        return 2
    wrong = [row for row in rows if not row.ok]
    for row in wrong:
        what = (
            row.fault or f"tokens equal: {row.run and row.run.equal}, logits differ by {row.run and row.run.error:.1e}"
        )
        print(f"wrong: {row.family}, {row.layout}, {row.attention}: {what}", file=sys.stderr)
    return 1 if wrong else 0


def print_report(console: Console, rows: Sequence[Row], held: Sequence[family_memory.Held]) -> None:
    """A line for each family, layout and attention function, and the memory of DeepSeek V4."""
    console.print(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}; "
        f"float32, one thread, {NEW_TOKENS} new tokens twice\n",
        highlight=False,
    )
    table = _table("On the store's pages, beside transformers' own cache")
    for name in ("family", "layout", "attention reads"):
        table.add_column(name)
    for name in ("groups", "prompts", "tokens", "logits differ", "found again", "s"):
        table.add_column(name, justify="right")
    for row in rows:
        run = row.run
        table.add_row(
            row.family,
            row.layout,
            row.attention,
            str(row.num_groups),
            str(row.num_prompts),
            "[red]failed[/]" if run is None else "[green]equal[/]" if run.equal else "[red]differ[/]",
            "" if run is None else f"{run.error:.0e}",
            "" if run is None else f"{run.cached:,} / {run.asked:,}",
            f"{row.seconds:.1f}",
        )
    console.print(table)
    console.print(
        f"logits differ: the most, as a part of the largest logit; budget {LOGITS_BUDGET:.0e}. found again: prompt "
        "tokens of the second batch.\n",
        highlight=False,
    )
    if held:
        _print_held(console, held)


def _print_held(console: Console, held: Sequence[family_memory.Held]) -> None:
    table = _table("DeepSeek-V4-Flash: MiB that one sequence holds")
    for name in ("tokens", "rows"):
        table.add_column(name)
    for name in ("in the store", "transformers' cache", "by group"):
        table.add_column(name, justify="right")
    for each in held:
        groups = ", ".join(f"{name} {size / MIB:.1f}" for name, size in each.by_group.items())
        theirs = "" if each.in_transformers is None else f"{each.in_transformers / MIB:.1f}"
        table.add_row(f"{each.length:,}", each.rows, f"{each.in_store / MIB:.1f}", theirs, groups)
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _records(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        case = f"{row.family}, {row.layout}, {row.attention}"
        shared = {"bench": "families", "case": case}
        if row.run is None:
            yield {**shared, "metric": "fault", "value": row.fault, "unit": "", "target": "none", "ok": False}
            continue
        yield {
            **shared,
            "metric": "tokens equal",
            "value": row.run.equal,
            "unit": "",
            "target": True,
            "ok": row.run.equal,
        }
        within = row.run.error <= LOGITS_BUDGET
        error = {"metric": "logits differ", "value": row.run.error, "unit": "of the largest", "target": LOGITS_BUDGET}
        yield {**shared, **error, "ok": within}
        yield {**shared, "metric": "found again", "value": row.run.cached, "unit": f"of {row.run.asked} tokens"}
        yield {**shared, "metric": "time", "value": row.seconds, "unit": "s"}


def _held_records(held: Sequence[family_memory.Held]) -> Iterator[dict[str, Any]]:
    for each in held:
        shared = {"bench": "families", "case": f"DeepSeek-V4-Flash, {each.length} tokens, {each.rows}", "unit": "B"}
        yield {**shared, "metric": "in the store", "value": each.in_store}
        if each.in_transformers is not None:
            yield {**shared, "metric": "in transformers' cache", "value": each.in_transformers}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks families", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--families", type=_families, default=tuple(FAMILIES), metavar="NAME,NAME", help=f"of {', '.join(FAMILIES)}"
    )
    parser.add_argument("--quick", action="store_true", help="two layouts, and of DeepSeek V4 one length only")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="one JSON object per line, to FILE or instead of the tables",
    )
    return parser.parse_args(arguments)


def _families(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in FAMILIES:
            raise argparse.ArgumentTypeError(f"expected names out of {', '.join(FAMILIES)}, got {name!r}")
    return names
