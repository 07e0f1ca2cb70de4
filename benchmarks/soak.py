"""Soak: a store under seeded random calls for a long time, beside the model of the tests (tests/store_world.py).

Worlds of all setups of tests/store_setups.py live one after the other, each for some thousand operations, then give
everything up, which must leave a store as new. Three in four keep books only, for speed; in the others every row is
written, read and compared.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.store_parts import Choices
from tests.store_setups import SETUPS
from tests.store_world import RULES, World

WORLD_OPERATIONS = 4_000
CHECK_EVERY = 400
LOOK_EVERY = 20  # operations between two looks at partly used frames
PAGES_EVERY = 4  # of so many worlds one has pages
NUM_PARTS = 10
NAMES = [name for name, (weight, _) in RULES.items() for _ in range(weight)]


@dataclass
class Report:
    """What a soak has seen so far."""

    operations: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    evicted: int = 0
    checks: int = 0
    memory_mib: list[float] = field(default_factory=list)  # resident, at the beginning and after each part
    partly_used: list[list[float]] = field(default_factory=lambda: [[] for _ in range(NUM_PARTS)])
    """Per part of the run: bytes of free places in frames of groups, as shares of the arena."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak. Returns: 0, or 1 when the store and the model differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000, help="calls to make (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    report, start = Report(), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    error = None
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("soak", total=options.operations)
        report.memory_mib.append(_resident_mib())
        for number, done in enumerate(range(0, options.operations, WORLD_OPERATIONS)):
            count = min(WORLD_OPERATIONS, options.operations - done)
            name, world = make_world(number, options.seed)
            try:
                live(world, count, random.Random(f"{options.seed} {number}"), report, done / options.operations)
            except Exception as problem:
                error = problem
                print(f"soak: world {number} of seed {options.seed} ({name}) fails", file=sys.stderr)
                break
            report.worlds["with pages" if world.has_pages else "books only"] += 1
            progress.update(task, advance=count, description=name[:28].ljust(28))
            if (done + count) * NUM_PARTS // options.operations >= len(report.memory_mib):
                report.memory_mib.append(_resident_mib())
    (print_json if options.json else print_tables)(report, time.perf_counter() - start)
    if error is not None:
        raise error
    return 0


def make_world(number: int, seed: int) -> tuple[str, World]:
    """The setup of a world by turns, its frames by chance."""
    names = sorted(SETUPS)
    name = names[number % len(names)]
    fewest = len(SETUPS[name].layers) + 2
    num_frames = random.Random(f"{seed} {number} frames").choice([fewest, 8, 14, 30, 60])
    return name, World(SETUPS[name], num_frames, None if number % PAGES_EVERY else "cpu")


def live(world: World, num_operations: int, rng: random.Random, report: Report, begin: float) -> None:
    """Makes calls on a world, and gives it up. `begin`: the share of the run before it."""
    part = report.partly_used[int(begin * NUM_PARTS)]
    for number in range(num_operations):
        name = rng.choice(NAMES)
        RULES[name][1](world, Choices(rng.randbytes(32)))
        report.operations[name] += 1
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            world.check()
            report.checks += 1
        if world.is_in_frames and number % LOOK_EVERY == 0:
            part.append(world.store.stats().fragmentation)
    report.evicted += world.store.stats().evicted
    world.close()
    report.checks += 1
    report.failures.update(world.failures)
    report.hits += world.num_hits


def print_tables(report: Report, seconds: float) -> None:
    """Counts by operation, then what the run cost and lost."""
    console = Console()
    total = report.operations.total()
    table = Table(title=f"{total:,} operations in {seconds:.0f} s ({seconds / max(total, 1) * 1e3:.2f} ms each)")
    table.add_column("operation")
    table.add_column("times", justify="right")
    for name, count in sorted(report.operations.items()):
        table.add_row(name, f"{count:,}")
    console.print(table)
    first, last = report.memory_mib[min(1, len(report.memory_mib) - 1)], report.memory_mib[-1]
    console.print(
        f"{report.checks:,} checks hold; {report.hits:,} hits, {report.evicted:,} blocks evicted; calls refused: "
        + (", ".join(f"{name} {count:,}" for name, count in sorted(report.failures.items())) or "none")
        + f"; worlds: {', '.join(f'{count:,} {name}' for name, count in sorted(report.worlds.items()))}"
    )
    console.print(
        f"resident memory: {first:.0f} MiB after the first tenth, {last:.0f} MiB at the end ({last - first:+.1f})"
    )
    table = Table(title="free places in frames that a group has, share of the arena (layout frames)")
    for column in ("tenth", "least", "mean", "most"):
        table.add_column(column, justify="right")
    for number, shares in enumerate(report.partly_used, 1):
        if shares:
            table.add_row(
                str(number), *(f"{share:.1%}" for share in (min(shares), float(np.mean(shares)), max(shares)))
            )
    console.print(table)


def print_json(report: Report, seconds: float) -> None:
    """One line per figure."""
    figures: list[tuple[str, Any, str]] = [("seconds", round(seconds, 1), "s"), ("checks", report.checks, "calls")]
    figures += [(f"calls of {name}", count, "calls") for name, count in sorted(report.operations.items())]
    figures += [(f"refused: {name}", count, "calls") for name, count in sorted(report.failures.items())]
    figures += [("hits", report.hits, "sequences"), ("evicted", report.evicted, "blocks")]
    figures += [(f"resident after part {part}", round(size, 1), "MiB") for part, size in enumerate(report.memory_mib)]
    for number, shares in enumerate(report.partly_used, 1):
        for metric, value in (("least", min), ("mean", np.mean), ("most", max)) if shares else ():
            figures.append(
                (f"partly used frames, tenth {number}, {metric}", round(float(value(shares)), 5), "of the arena")
            )
    for metric, value, unit in figures:
        print(json.dumps({"bench": "soak", "case": "all setups", "metric": metric, "value": value, "unit": unit}))


def _resident_mib() -> float:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0.0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
