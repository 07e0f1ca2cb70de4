"""All benchmarks one after the other, each in a process of its own: their tables, then what they took and missed.

The figures of all go to one file. What takes long is run in a short form unless `--full` is given; the whole then takes
less than ten minutes on two slow cores.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from benchmarks.options import names_of, new_parser
from benchmarks.record import FIELDS, INTERRUPTED, MET, Measure, Run, UsageError
from benchmarks.tables import case_table

NAMES = ("kernels", "store", "planner", "capacity", "engine", "families", "aot", "gpu")
SHORT = {
    "engine": ("--quick",),
    "families": ("--quick",),
    "aot": ("--quick", "--targets", "sm_90"),
}
"""How those that take longest are run unless all are asked for in full."""
PATIENT = ("engine", "families")
"""Run with threads that sleep while they wait: beside other work, waiting busily costs them ten times as long."""
DRAWN = ("kernels", "store", "planner", "capacity")
"""Can draw their figures."""
COLUMNS = {"seconds": "seconds", "figures": "figures", "missed": "missed", "status": "status"}
ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60
"""So long a benchmark may take to print what it has measured until Ctrl-C; a second Ctrl-C ends it at once."""

Lines = list[dict[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmarks. Returns 0 when all do, 1 when one does not, 2 for a caller's mistake, 130 after Ctrl-C."""
    options = _parse(arguments)
    chosen = [name for name in options.only or NAMES if name not in options.skip]
    if options.plot is not None:
        _make_folder(options.plot)
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        then = None
        if options.compare is not None and Path(options.compare).is_file():
            then = scratch / "then.jsonl"  # the file may be the one that is written now
            then.write_bytes(Path(options.compare).read_bytes())
        with _ended_as_by_ctrl_c(), Run("all", options) as run:
            for name in chosen:
                run_one(run, name, command_of(name, options, then), scratch / f"{name}.jsonl")
    return run.finish(show)


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Other signals that end a run do what Ctrl-C does: no benchmark goes on alone."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def command_of(name: str, options: argparse.Namespace, then: Path | None) -> list[str]:
    """How a benchmark is called; where its figures go is added by who calls it."""
    command = [sys.executable, "-m", "benchmarks", name]
    short = SHORT.get(name, ()) if not options.full else ()
    command += short or (("--quick",) if options.quick else ())
    if then is not None:
        command += ["--compare", str(then)]
    if options.plot is not None and name in DRAWN:
        command += ["--plot", str(Path(options.plot).resolve() / f"{name}.png")]
    return command


def run_one(run: Run, name: str, command: Sequence[str], file: Path) -> None:
    """Runs one benchmark, and keeps its figures also where it fails or is interrupted."""
    if name == "gpu" and not torch.cuda.is_available():
        run.add([Measure(name, "status", "none here")])
        return
    if not run.to_stdout:
        Console().print(f"[bold]== {name}[/]", highlight=False)
    sys.stdout.flush()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    if name in PATIENT:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    begin, is_interrupted = time.perf_counter(), False
    with subprocess.Popen(
        [*command, "--json", str(file)],
        env=environment,
        stdout=subprocess.DEVNULL if run.to_stdout else None,
        process_group=0,  # Ctrl-C of a terminal comes here alone, and goes on to it once
    ) as child:
        try:
            status = child.wait()
        except KeyboardInterrupt:
            is_interrupted = True
            status = _interrupt(child)
        except BaseException:
            child.kill()
            raise
    lines = read_figures(file)
    run.keep(lines)
    run.add(_summary(name, time.perf_counter() - begin, lines, status))
    if is_interrupted or status == INTERRUPTED:
        raise KeyboardInterrupt


def _interrupt(child: "subprocess.Popen[bytes]") -> int:
    """Asks a benchmark to stop and print what it has. Returns: its exit status."""
    try:
        os.killpg(child.pid, signal.SIGINT)
        return child.wait(PATIENCE_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired, ProcessLookupError):
        child.kill()
        return child.wait()


def _summary(name: str, seconds: float, lines: Lines, status: int) -> Iterator[Measure]:
    measured = [line for line in lines if line["case"] != "machine"]
    yield Measure(name, "seconds", round(seconds, 1), "s")
    yield Measure(name, "figures", len(measured))
    yield Measure(name, "missed", sum(line.get("ok") is False for line in measured))
    yield Measure(name, "status", status, "", MET, status == MET)


def read_figures(file: Path) -> Lines:
    """The figures that a benchmark has written so far; a line that it was ended in is left out."""
    if not file.exists():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and set(FIELDS[:5]) <= line.keys():
            lines.append(line)
    return lines


def show(console: Console, measures: Sequence[Measure]) -> None:
    """A line for each benchmark."""
    console.print(case_table("All benchmarks", measures, COLUMNS, case="benchmark", targets=False))


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plot: cannot make the folder {path!r}: {error.strerror}") from error


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("all", __doc__, "each with --quick, without targets of speed: does it run at all")
    parser.add_argument("--full", action="store_true", help=f"{', '.join(SHORT)} in full too (an hour)")
    for option, default, what in (("--only", None, "these alone, in this order"), ("--skip", (), "all but these")):
        parser.add_argument(
            option, type=names_of(NAMES), default=default, metavar="NAME,NAME", help=f"{what}; of {', '.join(NAMES)}"
        )
    parser.add_argument("--plot", metavar="DIR", help="a folder for a picture of each that can be drawn")
    options = parser.parse_args(arguments)
    if options.quick and options.full:
        parser.error("--quick and --full: expected one of them, got both")
    return options
