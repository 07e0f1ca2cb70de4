"""What every benchmark shares: figures, the file they go to line by line, and what is printed at the end."""

import argparse
import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.machine import facts

Value = int | float | str | bool
MOST = 1e300
"""A figure that is larger is none."""
FIELDS = ("bench", "case", "metric", "value", "unit", "target", "ok")
WIDTH = 150
"""Columns of a table that goes to no terminal."""

MET, MISSED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of one case; `target` is the bound it is held to, None where it is only reported."""

    case: str
    metric: str
    value: Value
    unit: str = ""
    target: Value | None = None
    ok: bool | None = None

    def fields(self, bench: str) -> dict[str, Any]:
        """The figure as one JSON object; `target` and `ok` only where there is a target."""
        gate = {} if self.ok is None else {"target": self.target, "ok": self.ok}
        return {
            "bench": bench,
            "case": self.case,
            "metric": self.metric,
            "value": self.value,
            "unit": self.unit,
            **gate,
        }


Part = tuple[str, Callable[[], Iterable[Measure]]]
"""What a part is called in the progress bar and where it fails, and what measures it."""


class UsageError(Exception):
    """A caller's mistake, in one line."""


class Run:
    """One run of a benchmark: a context in which figures are added and after which they are printed.

    Each figure is written to the files of `--json` and `--csv` as soon as it is there. Ctrl-C and an exception of a
    part cost what they interrupt and nothing else.

    Raises: UsageError when a file cannot be written, or the one to compare with cannot be read.
    """

    def __init__(self, bench: str, options: argparse.Namespace) -> None:
        self.bench, self.options = bench, options
        self.measures: list[Measure] = []
        self.machine = [Measure("machine", metric, value) for metric, value in facts().items()]
        self.is_interrupted = False
        self.to_stdout = options.json == "-"
        if options.plot is not None:
            _check_plot(Path(options.plot))
        self._old = None if options.compare is None else read_lines(options.compare)
        if options.csv is not None and options.csv == options.json:
            raise UsageError(f"--json and --csv: expected two files, got {options.csv!r} twice")
        self._json = None if options.json is None or self.to_stdout else _open(options.json)
        self._csv = None if options.csv is None else _open(options.csv)
        if self._csv is not None:
            self._writer = csv.DictWriter(self._csv, FIELDS)
            self._writer.writeheader()
        self.keep(each.fields(bench) for each in self.machine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_interrupted = kind is KeyboardInterrupt
        for file in (self._json, self._csv):
            if file is not None:
                file.close()
        return self.is_interrupted

    def add(self, measures: Iterable[Measure]) -> None:
        """Keeps figures, and writes each."""
        for each in measures:
            self.measures.append(each)
            self.keep([each.fields(self.bench)])

    def keep(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes figures as `--json` has them, those of another benchmark too."""
        for fields in lines:
            text = json.dumps({name: _json_value(value) for name, value in fields.items()}, allow_nan=False)
            if self.to_stdout:
                print(text, flush=True)
            try:
                if self._json is not None:
                    print(text, file=self._json, flush=True)
                if self._csv is not None:
                    self._writer.writerow({name: fields.get(name) for name in FIELDS})
                    self._csv.flush()
            except OSError as error:
                raise UsageError(f"cannot write the figures: {error.strerror}") from error

    def measure(self, parts: Sequence[Part]) -> None:
        """Runs parts one after the other, with a progress bar."""
        with self.progress(len(parts)) as advance:
            for label, part in parts:
                advance(label, 0)
                self.attempt(label, part)
                advance(label, 1)

    def attempt(self, label: str, part: Callable[[], Iterable[Measure]]) -> None:
        """Runs a part; where it fails the error is kept, and no figure behind it."""
        try:
            self.add(part())
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # whatever it is, the other parts have their say
            self.add([failure(label, error)])

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """A progress bar on stderr: `advance(what runs now, steps done since)`."""
        columns = (TextColumn(f"{self.bench}:"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
        with bar:
            task = bar.add_task("", total=total)
            yield lambda label, steps: bar.update(task, description=label, advance=steps)

    def finish(
        self,
        show: Callable[[Console, Sequence[Measure]], None],
        draw: Callable[[Sequence[Measure], Path], None] | None = None,
    ) -> int:
        """Prints the machine, the tables of `show`, the comparison and what missed its target, and draws the plot.

        Returns: the exit status, 0 when every target is met, 1 when one is missed, 130 after Ctrl-C.
        """
        if not self.to_stdout:
            console = wide_console()
            console.print(header(self.machine), highlight=False, markup=False)
            show(console, self.measures)
            if self._old is not None:
                show_comparison(console, self.bench, [*self.machine, *self.measures], self._old)
        if self.options.plot is not None and draw is not None and self.measures:
            draw(self.measures, Path(self.options.plot))
        missed = [each for each in self.measures if each.ok is False]
        for each in missed:
            figure = f"{each.metric} {each.value} {each.unit}".rstrip()
            print(f"missed: {each.case}: {figure} (target {each.target})", file=sys.stderr)
        if self.is_interrupted:
            print(f"{self.bench}: interrupted; these are the figures until then", file=sys.stderr)
            return INTERRUPTED
        return MISSED if missed else MET


def failure(label: str, error: BaseException) -> Measure:
    """What stands in the place of a part's figures when it fails."""
    return Measure(label, "wrong", f"{type(error).__name__}: {error}"[:500], "", "a right result", False)


def header(machine: Sequence[Measure]) -> str:
    """What the figures belong to, in two lines."""
    known = {each.metric: str(each.value) for each in machine}
    first = [known.pop(name) for name in ("device", "cpu") if name in known]
    return "\n".join(
        (", ".join(dict.fromkeys(first)), ", ".join(f"{name} {value}" for name, value in known.items()), "")
    )


def wide_console() -> Console:
    """Stdout; where it is no terminal, wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def new_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table with columns on the left that are text, and others that are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def read_lines(path: str) -> list[dict[str, Any]]:
    """The figures of an earlier `--json FILE`.

    Raises: UsageError for a file that cannot be read or holds something else.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"--compare: cannot read {path!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--compare: expected a file that --json has written, got {path!r}: {error}") from error
    for line in lines:
        if not isinstance(line, dict) or not set(FIELDS[:5]) <= line.keys():
            raise UsageError(f"--compare: expected lines with {', '.join(FIELDS[:5])} in {path!r}, got {line!r:.80}")
        is_named = all(isinstance(line[name], str) for name in ("bench", "case", "metric", "unit"))
        if (
            not is_named
            or not isinstance(line["value"], Value)
            or (is_number(line["value"]) and abs(line["value"]) > MOST)
        ):
            raise UsageError(f"--compare: expected names and a figure in each line of {path!r}, got {line!r:.80}")
    return lines


def show_comparison(
    console: Console, bench: str, measures: Sequence[Measure], old: Sequence[Mapping[str, Any]]
) -> None:
    """A row for each figure that both runs have, but for spreads. Says on what other machine the old run was."""
    then = {(line["case"], line["metric"]): line for line in old if line["bench"] == bench}
    now = {(each.case, each.metric): each for each in measures}
    table = new_table("Compared with the earlier run", (), ())
    for column in ("case", "metric", "unit"):
        table.add_column(column, no_wrap=True)
    for column in ("then", "now", "now / then"):
        table.add_column(column, justify="right", no_wrap=True)
    num_equal = 0
    for key, each in now.items():
        line = then.get(key)
        if line is None or line["unit"] != each.unit or each.case == "machine" or each.metric.endswith("spread"):
            continue
        if each.value == line["value"]:
            num_equal += 1
        elif is_number(each.value) and is_number(line["value"]):
            ratio = f"{each.value / line['value']:.3f}" if line["value"] else "-"
            table.add_row(*map(escape, key), each.unit, shown(line["value"]), shown(each.value), ratio)
        else:
            table.add_row(
                *map(escape, key), each.unit, escape(shown(line["value"])), escape(shown(each.value)), "differs"
            )
    console.print(table)
    for (case, metric), line in then.items():
        if (
            case == "machine"
            and metric != "load"
            and (case, metric) in now
            and now[case, metric].value != line["value"]
        ):
            console.print(f"other {metric} then: {line['value']}", style="yellow", highlight=False, markup=False)
    gone, new = then.keys() - now.keys(), now.keys() - then.keys()
    console.print(
        f"{num_equal} figures are equal, {len(gone)} were only then, {len(new)} are only now\n", highlight=False
    )


def is_number(value: object) -> bool:
    """Whether it has a ratio."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Value) -> str:
    """A figure for a table: four digits of a fraction, all of a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _json_value(value: Any) -> Any:
    """What strict readers of JSON take: infinity and NaN as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _open(path: str) -> TextIO:
    try:
        return Path(path).open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"cannot write {path!r}: {error.strerror}") from error


def _check_plot(path: Path) -> None:
    """Asked before anything is measured.

    Raises: UsageError where no picture can be drawn to that path.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("--plot: needs matplotlib: pip install 'paged-kvstore[plots]'")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--plot: cannot write {str(path)!r}")
