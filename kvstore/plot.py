"""A plan as a picture: where the bytes of a block lie, and how many sequences fit. Needs matplotlib (extra "plots")."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvstore.capacity import capacity
from kvstore.choose import group_layers
from kvstore.errors import PlanError
from kvstore.explain import alike, page_runs
from kvstore.groups import CacheGroup
from kvstore.memory import format_bytes
from kvstore.plan import CachePlan
from kvstore.score import consider
from kvstore.specs import LayerSpec
from kvstore.wording import counted, group_range, rows_of

SUFFIXES = (".svg", ".png")

MAX_CELLS = 40
"""So many blocks of a frame are drawn one by one; more are one bar with their number."""

MANY_BARS = 9
"""More bars than that are drawn small."""

MAX_BARS = 16
"""Groups drawn; of more, a line says how many are left out."""

MAX_KINDS = 9
"""Kinds of page in the legend."""

_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee9944",
    "#999933",
    "#882255",
    "#44aa99",
)
_DASHES = ("solid", "dashed", "dashdot", "dotted", (0, (5, 1)), (0, (1, 1)))
_UNITS = ((2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_UNUSED: dict[str, Any] = {"facecolor": "#eeeeee", "edgecolor": "#aaaaaa", "hatch": "////", "linewidth": 0.0}


@dataclass(frozen=True, slots=True)
class Trial:
    """As much of a plan as says how much fits."""

    groups: tuple[CacheGroup, ...]
    frame_bytes: int
    num_frames: int
    blocks_per_frame: tuple[int, ...]


def plot_plan(plan: CachePlan, path: str | Path) -> None:
    """Writes the picture to `path`, an SVG or a PNG of 1400 x 700 pixels, by its suffix.

    Raises: PlanError for another suffix and a plan without a cache; OSError when the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PlanError(f"plot: expected a path that ends in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not plan.placements:
        raise PlanError("plot: expected a plan with a layer that keeps a cache, got one without")
    figure = draw_plan(plan)
    figure.savefig(path, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else None)


def draw_plan(plan: CachePlan) -> Figure:
    """The picture: on the left the bytes of a frame by group, on the right what fits over the length."""
    figure = Figure(figsize=(14, 7), dpi=100)
    FigureCanvasAgg(figure)
    unit = "frames" if plan.layout == "frames" else "blocks"
    figure.text(
        0.02,
        0.945,
        f"Layout {plan.layout}, {counted(len(plan.groups), 'group')} (grouping {plan.grouping}): "
        f"{plan.num_frames:,} {unit} of {format_bytes(plan.frame_bytes)}, {_brief(plan.arena_bytes)} in all",
        fontsize=14,
        fontweight="bold",
    )
    _draw_bytes(figure.add_axes((0.145, 0.27, 0.45, 0.6)), plan)
    sequences = figure.add_axes((0.665, 0.5, 0.32, 0.37))
    _draw_capacity(sequences, figure.add_axes((0.665, 0.085, 0.32, 0.37), sharex=sequences), plan)
    return figure


def _draw_bytes(axes: Axes, plan: CachePlan) -> None:
    """One bar per group, of its pages in one frame or, in "buckets" and "bestfit", in a page of each layer slot."""
    scale, scale_name = next(pair for pair in _UNITS if plan.frame_bytes >= 4 * pair[0] or pair[0] == 1)
    colours = _colours(plan)
    bars = alike(plan)
    for row, run in enumerate(bars[:MAX_BARS]):
        _draw_bar(axes, plan, run[0], row, scale, colours, len(bars) > MANY_BARS)
    shown = min(len(bars), MAX_BARS)
    axes.set_xlim(0, plan.frame_bytes / scale)
    axes.set_ylim(shown - 0.45, -0.75)
    small = shown > MANY_BARS
    places = [row + 0.15 * small for row in range(shown)]
    axes.set_yticks(places, [_label(plan, run, small) for run in bars[:shown]], fontsize=7 if small else 9)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    what = unit = "frame" if plan.layout == "frames" else "block"
    if plan.layout in ("buckets", "bestfit"):
        what += f": one page of each of its {counted(len(plan.layer_slots), 'layer slot')}, side by side"
    more = f"; {counted(len(bars) - shown, 'more kind')} of group not shown" if len(bars) > shown else ""
    axes.set_xlabel(f"{scale_name} of one {what}{more}", fontsize=9)
    axes.set_title(f"Bytes of one {unit}, by the group that holds it", fontsize=11, loc="left")
    axes.tick_params(axis="x", labelsize=9)
    kinds = list(colours)
    patches = [Patch(facecolor=colours[kind], label=kind) for kind in kinds[:MAX_KINDS]]
    if len(kinds) > MAX_KINDS:
        patches.append(Patch(facecolor="none", label=f"and {counted(len(kinds) - MAX_KINDS, 'more kind')} of page"))
    patches.append(Patch(label="unused", **_UNUSED))
    legend = axes.legend(
        handles=patches, loc="upper left", bbox_to_anchor=(-0.28, -0.11), ncols=2, fontsize=9, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_bar(
    axes: Axes, plan: CachePlan, index: int, row: int, scale: int, colours: dict[str, str], small: bool
) -> None:
    group, stride, per_frame = plan.groups[index], plan.block_strides[index], plan.blocks_per_frame[index]
    pages = _pages(plan, index)
    bottom, height = (row - 0.05, 0.42) if small else (row - 0.28, 0.56)

    def rectangle(first: float, width: float, **style: Any) -> None:
        axes.add_patch(Rectangle((first / scale, bottom), width / scale, height, **style))

    note = f"waste {(stride - group.block_bytes) / stride:.1%}"
    if plan.layout == "frames":
        note = f"{counted(per_frame, 'block')} of {stride:,} B, {note} of each"
    rectangle(0, plan.frame_bytes, **_UNUSED)
    if per_frame > MAX_CELLS:
        edges = np.cumsum([0, *(width for _, width, _ in pages)]) * per_frame
        rectangle(0, float(edges[-1]), facecolor="white", linewidth=0.0)
        for (first, last), (_, _, kind) in zip(pairwise(edges), pages, strict=True):
            rectangle(first, last - first, facecolor=colours[kind], alpha=0.7, linewidth=0.0)
        note += ", summed up: too many to draw one by one"
    else:
        for block in range(per_frame):
            for first, width, kind in pages:
                gap = 0.4 if width * 150 >= plan.frame_bytes else 0.0
                rectangle(block * stride + first, width, facecolor=colours[kind], edgecolor="white", linewidth=gap)
            if per_frame > 1:
                rectangle(block * stride, stride, facecolor="none", edgecolor="black", linewidth=0.6)
    rectangle(0, plan.frame_bytes, facecolor="none", edgecolor="black", linewidth=0.9)
    left = plan.frame_bytes / scale / 300
    axes.text(left, bottom - 0.04, note, fontsize=6.5 if small else 8, va="bottom", ha="left", color="#333333")


def _pages(plan: CachePlan, index: int) -> list[tuple[int, int, str]]:
    """First byte, bytes and kind of every page of a block, or of a run of them where there are many."""
    group = plan.groups[index]
    if plan.layout in ("buckets", "bestfit"):
        begin = np.cumsum([0, *(slot.page_bytes for slot in plan.layer_slots)])
        places = ((plan.placements[layer].layer_slot, spec) for layer, spec in group.layers.items())
        return sorted((int(begin[slot]), spec.page_bytes, _kind(spec)) for slot, spec in places)
    pages = []
    for first, end, layers, spec in page_runs(plan, index):
        many = len(group.layers) * plan.blocks_per_frame[index] > 130
        size = end - first if many else (end - first) // len(layers)
        pages += [(at, size, _kind(spec)) for at in range(first, end, size)]
    return pages


def _colours(plan: CachePlan) -> dict[str, str]:
    """A colour for every kind of page; after the last one they begin again."""
    kinds = dict.fromkeys(_kind(spec) for group in plan.groups for spec in group.layers.values())
    return {kind: _COLOURS[number % len(_COLOURS)] for number, kind in enumerate(kinds)}


def _kind(spec: LayerSpec) -> str:
    return f"{spec.kind}: {rows_of([spec])}, pages of {spec.page_bytes:,} B"


def _label(plan: CachePlan, run: Sequence[int], small: bool) -> str:
    group = plan.groups[run[0]]
    names = group_range([plan.groups[index].name for index in run]).replace(" ... ", " ...\n")
    lines = [line if len(line) <= 24 else f"{line[:23]}\N{HORIZONTAL ELLIPSIS}" for line in names.splitlines()]
    many = counted(len(group.layers), "layer")
    return ", ".join([*lines, many]) if small else "\n".join([*lines, many])


def trials(plan: CachePlan) -> list[tuple[str, Trial]]:
    """The plan, every other layout looked at with groups of its own, and two groupings of vLLM's in "overlay".

    All in the memory of the plan. A grouping that is not possible is left out.
    """
    memory = plan.arena_bytes
    specs = {layer: spec for group in plan.groups for layer, spec in group.layers.items()}
    found = [
        (f"{plan.layout} (this plan)", Trial(plan.groups, plan.frame_bytes, plan.num_frames, plan.blocks_per_frame))
    ]
    ways = [(entry.layout, "", entry.layout) for entry in plan.considered if entry.layout != plan.layout]
    ways += [(f"{grouping}/overlay", grouping, "overlay") for grouping in ("packed", "equal")]
    for name, grouping, layout in ways:
        try:
            if grouping or plan.grouping == "auto":
                groups = group_layers(specs, grouping or "auto", lengths=plan.lengths, layout=layout, memory=memory)
            else:
                groups = list(plan.groups)
            entry = consider(groups, layout, plan.lengths, memory)
        except PlanError:
            continue
        frames = memory // entry.frame_bytes
        found.append((name, Trial(tuple(groups), entry.frame_bytes, frames, entry.blocks_per_frame)))
    return found


def _draw_capacity(sequences: Axes, tokens: Axes, plan: CachePlan) -> None:
    lengths = np.unique(np.geomspace(256, 2**20, 49).round().astype(np.int64))
    curves: dict[tuple[int, ...], list[str]] = {}
    for name, trial in trials(plan):
        fits = tuple(capacity(trial, int(length)).num_sequences if trial.num_frames else 0 for length in lengths)
        curves.setdefault(fits, []).append(name)
    for number, (fits, names) in enumerate(curves.items()):
        counts = np.array(fits, dtype=np.float64)
        counts[counts < 1] = np.nan
        style: dict[str, Any] = {
            "color": "black" if not number else _COLOURS[(number - 1) % len(_COLOURS)],
            "linestyle": _DASHES[number % len(_DASHES)],
            "linewidth": 2.2 if not number else 1.4,
            "zorder": 3 if not number else 2,
        }
        sequences.plot(lengths, counts, label=fill(" = ".join(names), 38), **style)
        tokens.plot(lengths, counts * lengths, **style)
    for axes, title in ((sequences, "Sequences at once, over their length"), (tokens, "Tokens of all of them")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        if not any(map(any, curves)):
            axes.set_ylim(1, 10)
            axes.text(0.5, 0.5, "no sequence fits", transform=axes.transAxes, ha="center", fontsize=10)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.set_title(title, fontsize=11, loc="left")
        axes.tick_params(labelsize=9)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        axes.yaxis.set_minor_formatter(NullFormatter())
    sequences.tick_params(labelbottom=False)
    tokens.set_xticks([2**power for power in range(8, 21, 2)])
    tokens.set_xlim(256, 2**20)
    tokens.xaxis.set_major_formatter(FuncFormatter(lambda length, _: _tokens(length)))
    tokens.set_xlabel("tokens of one sequence", fontsize=9)
    sequences.legend(loc="lower left", fontsize=9, framealpha=0.9)


def _short(value: float, _: object) -> str:
    """1,500 as "1.5k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _tokens(length: float) -> str:
    """4,096 as "4k": lengths are counted in powers of two."""
    return f"{length:g}" if length < 1024 else f"{length / 1024:g}k" if length < 2**20 else f"{length / 2**20:g}M"


def _brief(num_bytes: int) -> str:
    return format_bytes(num_bytes).partition("(")[2].removesuffix(")") or format_bytes(num_bytes)
