"""The time of a decode step over the number of sequences: a line for each number of groups, and the targets."""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.drawing import COLOURS, GRID, MARKS, new_figure, save
from benchmarks.record import Measure
from benchmarks.store_cases import GATED_SEQUENCES, STEP_TARGETS, named
from benchmarks.tables import by_case

DECODE = re.compile(r"decode, (\d+) groups?, ([\d,]+) sequences")
Steps = dict[int, list[tuple[int, float, float]]]
"""Number of groups -> number of sequences, the least step and the median one in microseconds."""


def draw_steps(measures: Sequence[Measure], path: Path) -> None:
    """Writes the picture."""
    figure, axes = new_figure(9, 6, "A decode step of the store's books: extend + commit, one token a sequence")
    steps = steps_of(measures)
    for number, (groups, taken) in enumerate(steps.items()):
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        counts, least, median = zip(*sorted(taken), strict=True)
        axes.plot(counts, least, f"{mark}-", color=colour, linewidth=1.8, markersize=7, label=named(groups))
        axes.plot(counts, median, f"{mark}:", color=colour, fillstyle="none")
        if groups in STEP_TARGETS:
            axes.plot(GATED_SEQUENCES, STEP_TARGETS[groups][0], "_", color=colour, markersize=30, markeredgewidth=3)
    targets = ", ".join(f"{named(groups)} {least:g} us" for groups, (least, _) in STEP_TARGETS.items())
    for style, label in (("-", "least of the steps"), (":", "median"), ("", f"target of the least: {targets}")):
        axes.plot([], [], style or "_", color="black", markersize=14, markeredgewidth=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({count for taken in steps.values() for count, _, _ in taken} | {GATED_SEQUENCES}))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, **GRID)
    axes.set_xlabel("sequences")
    axes.set_ylabel("microseconds")
    axes.legend(fontsize=9, loc="best")
    save(figure, path)


def steps_of(measures: Sequence[Measure]) -> Steps:
    """The decode steps among the figures."""
    steps: Steps = {}
    for name, figures in by_case(measures).items():
        if (found := DECODE.fullmatch(name)) and {"min", "median"} <= figures.keys():
            groups, count = int(found[1]), int(found[2].replace(",", ""))
            steps.setdefault(groups, []).append((count, float(figures["min"].value), float(figures["median"].value)))
    return steps
