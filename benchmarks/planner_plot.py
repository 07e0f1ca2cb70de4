"""Bytes per sequence beside the reference planner's: a row for each case that differs, a mark for each length."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.drawing import COLOURS, GRID, MARKS, new_figure, save
from benchmarks.record import Measure
from benchmarks.tables import by_case

ROW, TEXT_LINE = 0.3, 0.17
"""Inches."""
COLUMNS = 150
"""Characters of a line of the text below."""
SIZES = (12.5, 8.5, 7.5, 6)
"""Points of a mark: those that lie on each other are all seen."""


def draw_ratios(measures: Sequence[Measure], lengths: Sequence[int], path: Path) -> None:
    """Writes the picture; the models of which every case equals the reference at all lengths are named below."""
    rows = rows_of(measures, lengths)
    equal = [", ".join(names) for ratios, names in rows if set(ratios) == {1.0}]
    shown = sorted((row for row in rows if set(row[0]) != {1.0}), key=lambda row: sum(row[0]), reverse=True)
    note = fill(f"1.0 at every length: {'; '.join(equal)}" if equal else "", COLUMNS)
    height = 1.7 + ROW * max(len(shown), 1) + TEXT_LINE * note.count("\n")
    figure, axes = new_figure(11, height, "Bytes that one sequence takes, over those in vLLM 0.33's plan")
    for number, (ratios, _) in enumerate(shown):
        axes.plot((min(ratios), max(ratios)), (number, number), color="#bbbbbb", linewidth=1.5, zorder=1)
    for idx, length in enumerate(lengths):
        axes.plot(
            [ratios[idx] for ratios, _ in shown],
            range(len(shown)),
            MARKS[idx % len(MARKS)],
            color=COLOURS[idx % len(COLOURS)],
            markersize=SIZES[idx % len(SIZES)],
            markeredgecolor="white",
            markeredgewidth=0.6,
            label=f"{length:,} tokens",
        )
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.set_yticks(range(len(shown)), [", ".join(names) for _, names in shown], fontsize=9)
    axes.set_ylim(-0.7, max(len(shown), 1) - 0.3)
    axes.grid(True, **GRID)
    axes.set_xlabel("bytes allocated / bytes of the reference; left of 1 is less memory", fontsize=9)
    axes.legend(loc="best", fontsize=9, markerscale=0.8)
    figure.supxlabel(note, fontsize=8.5)
    save(figure, path)


def rows_of(measures: Sequence[Measure], lengths: Sequence[int]) -> list[tuple[tuple[float, ...], list[str]]]:
    """Ratios of each length, and the cases that have them: of one model as "model/one, another"."""
    rows: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for name, figures in by_case(measures).items():
        found = [figures.get(f"ratio_to_reference_at_{length}") for length in lengths]
        ratios = tuple(float(each.value) for each in found if each is not None)
        if len(ratios) == len(lengths):
            model, _, case = name.partition("/")
            rows.setdefault((model, ratios), []).append(case.replace(", its blocks", " in its blocks"))
    return [(ratios, [f"{model}/{cases[0]}", *cases[1:]]) for (model, ratios), cases in rows.items()]
