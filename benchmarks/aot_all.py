"""`python -m benchmarks aot-all`: the ahead-of-time check under every Triton that the kernels have to compile on.

Each version is installed alone into a folder of its own (`--folder`, kept for the next time; about 2 GB in all) and
used by a process whose path begins with it. Everything else, torch too, is that of this environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.aot_report import gates_in_words
from benchmarks.options import new_parser
from benchmarks.record import Measure, Run, UsageError, new_table, shown
from benchmarks.tables import by_case

VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
FIGURES = ("registers", "spill_bytes", "shared_bytes")
ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str]) -> int:
    """Runs the check. Returns 0 when every gate holds under every version, 1 when one does not, 2 for a mistake."""
    parser = new_parser("aot-all", __doc__, "without the cases that take longest")
    parser.add_argument(
        "--versions", default=",".join(VERSIONS), metavar="NUMBER,NUMBER", help=f"default: {','.join(VERSIONS)}"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tritons", help="where they are installed")
    options = parser.parse_args(arguments)
    versions = options.versions.split(",")
    with Run("aot-all", options) as run:
        for version in versions:
            install(version, options.folder / version)
        for version in versions:
            part = partial(check_version, version, options.folder / version, options.quick)
            run.attempt(f"triton {version}", part)
    return run.finish(show)


def install(version: str, folder: Path) -> None:
    """Installs a version of Triton, unless it is there.

    Raises: UsageError when it cannot be installed.
    """
    if (folder / "triton").is_dir():
        return
    print(f"installing triton {version} into {folder}", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"triton=={version}"]
    if subprocess.run(pip, check=False).returncode:
        raise UsageError(f"expected triton {version} to be installable")


def check_version(version: str, folder: Path, quick: bool) -> Iterator[Measure]:
    """The figures of `python -m benchmarks aot` under one version of Triton, which their cases name, as they come.

    Raises: RuntimeError when the check does not run under it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, ROOT, ROOT / "kernels")))
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", "benchmarks", "aot", "--json", *(["--quick"] if quick else [])]
    print(f"compiling under triton {version}", file=sys.stderr)
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            fields = json.loads(line)
            name = f"{fields.pop('case')}, triton {version}"
            if fields.pop("bench") == "aot" and not name.startswith("machine,"):
                yield Measure(name, **fields)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"the check under triton {version} ended with status {run.returncode}")


def show(console: Console, measures: Sequence[Measure]) -> None:
    """One row per case and chip, one column of registers / spill / shared bytes per version; then what failed."""
    rows: dict[str, dict[str, str]] = {}
    for name, figures in by_case(measures).items():
        case, _, version = name.rpartition(", triton ")
        if "registers" in figures:
            values = [figures[metric].value for metric in FIGURES if metric in figures]
            rows.setdefault(case, {})[version] = " / ".join(map(shown, values))
    versions = list(dict.fromkeys(version for cells in rows.values() for version in cells))
    table = new_table("registers / spilled bytes / shared bytes", ("case",), [f"triton {each}" for each in versions])
    for case, cells in rows.items():
        table.add_row(case, *(cells.get(version, "-") for version in versions))
    console.print(table)
    console.print(gates_in_words(measures))
