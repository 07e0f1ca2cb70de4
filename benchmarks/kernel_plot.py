"""Bandwidth over size, with the roofline drawn: a panel for each op."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.drawing import GRID, save
from benchmarks.kernel_cases import COPY, OURS
from benchmarks.kernel_shapes import FORMATS_OF
from benchmarks.record import Measure
from benchmarks.tables import by_case

MARKS = "osD^vP*Xd<>h"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999933", "#999999")
"""Of Okabe and Ito, apart for every kind of colour vision; their yellow is too light for a line."""

ROOF = "roofline"

MIN_RANGE = 20.0
"""From the top of a panel to its bottom at least: small differences stay small."""

Point = tuple[float, float]
Lines = dict[tuple[str, str], list[Point]]
"""(who, "warm" or "cold") -> bytes and GB/s."""


def draw_bandwidth(measures: Sequence[Measure], path: Path) -> None:
    """Writes the picture; ops without a figure have no panel."""
    figures = by_case(measures)
    panels = [(op, lines) for op in FORMATS_OF if (lines := lines_of(op, figures))]
    columns = min(3, max(1, len(panels)))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 5.0 * rows + 0.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max(1, rows), columns, squeeze=False)
    for axes, (op, lines) in zip(grid.flat, panels, strict=False):
        _draw(axes, op, lines)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle("Bandwidth over the bytes that an op has to read and write", fontsize=14, fontweight="bold")
    save(figure, path)


def lines_of(op: str, figures: Mapping[str, Mapping[str, Measure]]) -> Lines:
    """Who did an op how fast at what size: a line for each format and stride, and the roofline of all."""
    lines: Lines = {}
    for case, of_case in figures.items():
        shape, _, by = case.partition(" | ")
        if shape.partition(",")[0] != op or by == COPY:
            continue
        for state, prefix in (("warm", ""), ("cold", "cold_")):
            speed, share = (of_case.get(prefix + metric) for metric in ("bandwidth", "roofline"))
            if speed is None:
                continue
            size, reached = float(of_case["bytes"].value), float(speed.value)
            lines.setdefault((f"{by or OURS}, {format_of(shape)}", state), []).append((size, reached))
            if share is not None and share.value:
                lines.setdefault((ROOF, state), []).append((size, reached / float(share.value)))
    return {key: sorted(set(points)) for key, points in lines.items()}


def format_of(shape: str) -> str:
    """ "write_rows, latent bf16, 1,024 rows, stride 4 pages" -> "latent bf16, stride 4 pages"."""
    words = shape.split(", ")[1:]
    return ", ".join([words[0], *(word for word in words[1:] if word.startswith("stride"))])


def _draw(axes: Axes, op: str, lines: Lines) -> None:
    names = sorted({who for who, _ in lines if who != ROOF}, key=lambda who: (not who.startswith(OURS), who))
    for state, style in (("warm", "_-"), ("cold", "_:")):
        axes.plot(*_split(lines.get((ROOF, state), [])), style, color="black", markersize=12, label=f"{ROOF}, {state}")
    for number, who in enumerate(names):
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        is_ours = who.startswith(OURS)
        style, width, size = (f"{mark}-", 1.8, 6) if is_ours else (f"{mark}--", 1.0, 5)
        warm = _split(lines[who, "warm"])
        axes.plot(*warm, style, color=colour, linewidth=width, markersize=size, label=who)
        if (who, "cold") in lines:
            axes.plot(*_split(lines[who, "cold"]), f"{mark}:", color=colour, linewidth=1.2, fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(op, loc="left", fontsize=12)
    axes.set_xlabel("bytes read and written", fontsize=9)
    axes.set_ylabel("GB/s", fontsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_name(value)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=14))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", **GRID)
    axes.tick_params(labelsize=8)
    axes.margins(x=0.08, y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / MIN_RANGE), high)
    axes.legend(
        fontsize=7.5, loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2, frameon=False,
        title="hollow and dotted: cold", title_fontsize=7.5,
    )  # fmt: skip


def size_name(num_bytes: float) -> str:
    """4,194,304 as "4 MiB"."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:g} {unit}"
    return f"{num_bytes:g} B"


def _split(points: Iterable[Point]) -> tuple[list[float], list[float]]:
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]
