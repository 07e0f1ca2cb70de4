"""Soak: a store under seeded random calls for a long time, beside the model of the tests (tests/store_world.py).

Worlds of all setups of tests/store_setups.py live one after the other, each for some thousand operations, then give
everything up, which must leave a store as new. Three in four keep books only, for speed; in the others every row is
written, read and compared.
"""

import argparse
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from benchmarks.options import count, new_parser
from benchmarks.record import Measure, Run, failure
from benchmarks.tables import figure_table
from tests.store_parts import Choices
from tests.store_setups import SETUPS
from tests.store_world import RULES, World

OPERATIONS, QUICK_OPERATIONS = 1_000_000, 20_000
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


def main(arguments: Sequence[str]) -> int:
    """Runs the soak. Returns: 0, 1 when the store and the model differ, 2 for a caller's mistake, 130 after Ctrl-C."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    report, start = Report(), time.perf_counter()
    with Run("soak", options) as run:
        try:
            _live_all(
                run, report, options.operations or (QUICK_OPERATIONS if options.quick else OPERATIONS), options.seed
            )
        finally:
            run.add(figures(report, time.perf_counter() - start))
    return run.finish(show)


def _live_all(run: Run, report: Report, num_operations: int, seed: int) -> None:
    """Worlds one after the other, until one fails."""
    with run.progress(num_operations) as advance:
        report.memory_mib.append(_resident_mib())
        for number, done in enumerate(range(0, num_operations, WORLD_OPERATIONS)):
            operations = min(WORLD_OPERATIONS, num_operations - done)
            name, world = make_world(number, seed)
            try:
                live(world, operations, random.Random(f"{seed} {number}"), report, done / num_operations)
            except Exception as error:
                traceback.print_exc()
                run.add([failure(f"world {number} of seed {seed} ({name})", error)])
                return
            report.worlds["with pages" if world.has_pages else "books only"] += 1
            advance(name, operations)
            if (done + operations) * NUM_PARTS // num_operations >= len(report.memory_mib):
                report.memory_mib.append(_resident_mib())


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


def figures(report: Report, seconds: float) -> Iterator[Measure]:
    """What the run has done, lost and cost."""

    def figure(metric: str, value: int | float, unit: str) -> Measure:
        return Measure("all setups", metric, value, unit)

    yield figure("seconds", round(seconds, 1), "s")
    yield figure("checks", report.checks, "calls")
    for name, number in sorted(report.operations.items()):
        yield figure(f"calls of {name}", number, "calls")
    for name, number in sorted(report.failures.items()):
        yield figure(f"refused: {name}", number, "calls")
    for name, number in sorted(report.worlds.items()):
        yield figure(f"worlds {name}", number, "worlds")
    yield figure("hits", report.hits, "sequences")
    yield figure("evicted", report.evicted, "blocks")
    for part, size in enumerate(report.memory_mib):
        yield figure(f"resident after part {part}", round(size, 1), "MiB")
    for number, shares in enumerate(report.partly_used, 1):
        for metric, value in (("least", min), ("mean", np.mean), ("most", max)) if shares else ():
            share = round(float(value(shares)), 5)
            yield figure(f"partly used frames, tenth {number}, {metric}", share, "of the arena")


def show(console: Console, measures: Sequence[Measure]) -> None:
    """A line for each figure."""
    console.print(figure_table("Soak", measures))
    console.print("Partly used frames: free places in frames that a group has (layout frames).\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("soak", __doc__, f"{QUICK_OPERATIONS:,} operations")
    parser.add_argument("--operations", type=count, metavar="N", help=f"calls to make (default {OPERATIONS:,})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is random (default 0)")
    return parser.parse_args(arguments)


def _resident_mib() -> float:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0.0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
