"""`python -m benchmarks aot-all`: the ahead-of-time check under every Triton that the kernels have to compile on.

Each version is installed alone into a folder of its own (`--folder`, kept for the next time; about 2 GB in all) and
used by a process whose path begins with it. Everything else, torch too, is that of this environment.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

VERSIONS = ("3.6.0", "3.7.1", "3.9.0")
FIGURES = ("registers", "spill_bytes", "shared_bytes")
ROOT = Path(__file__).parent.parent


def main(arguments: Sequence[str]) -> int:
    """Runs the check. Returns 0 when every gate holds under every version, 1 when one does not, 2 for a mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks aot-all", allow_abbrev=False)
    parser.add_argument("--versions", default=",".join(VERSIONS), help=f"default: {','.join(VERSIONS)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tritons", help="where they are installed")
    parser.add_argument("--json", action="store_true", help="print one object per line instead of tables")
    options = parser.parse_args(arguments)
    measures: list[dict[str, Any]] = []
    for version in options.versions.split(","):
        try:
            measures += check_version(version, options.folder / version)
        except RuntimeError as error:
            print(f"aot-all: {error}", file=sys.stderr)
            return 2
    failed = [each for each in measures if each.get("ok") is False]
    if options.json:
        print(*map(json.dumps, measures), sep="\n")
    else:
        show(measures, failed)
    return 1 if failed else 0


def check_version(version: str, folder: Path) -> list[dict[str, Any]]:
    """The measures of `python -m benchmarks aot --json` under one version of Triton.

    Raises: RuntimeError when it cannot be installed, or the check does not run under it.
    """
    if not (folder / "triton").is_dir():
        print(f"installing triton {version} into {folder}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"triton=={version}"]
        if subprocess.run(pip, check=False).returncode:
            raise RuntimeError(f"expected triton {version} to be installable")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (folder, ROOT, ROOT / "kernels")))
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    print(f"compiling under triton {version}", file=sys.stderr)
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "aot", "--json"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode not in (0, 1) or not lines:
        raise RuntimeError(f"the check under triton {version} ended with status {run.returncode}")
    return [{"triton": version, **line} for line in lines]


def show(measures: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]]) -> None:
    """One row per case and chip, one column of registers / spill / shared bytes per version; then what failed."""
    versions = list(dict.fromkeys(each["triton"] for each in measures))
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for each in measures:
        cells.setdefault(each["case"], {}).setdefault(each["triton"], {})[each["metric"]] = each["value"]
    table = Table(box=box.SIMPLE_HEAD, title="registers / spilled bytes / shared bytes", title_justify="left")
    table.add_column("case", no_wrap=True)
    for version in versions:
        table.add_column(f"triton {version}", justify="right", no_wrap=True)
    for case, by_version in cells.items():
        row = [by_version.get(version, {}) for version in versions]
        if any("registers" in figures for figures in row):
            table.add_row(case, *(" / ".join(f"{f.get(name, '-'):,}" if f else "-" for name in FIGURES) for f in row))
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    console.print(table)
    for each in failed:
        target = f"expected {each['target']}" if each.get("target") is not None else "gate"
        console.print(f"triton {each['triton']}: {each['case']}: {each['metric']} {each['value']}, {target}")
    console.print(f"{len(failed)} of {sum('ok' in each for each in measures)} gates do not hold")
