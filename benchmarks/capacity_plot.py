"""Where the memory goes, layout by layout: a panel for each model and mix."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.capacity_tables import PLACES, by_setting
from benchmarks.drawing import save
from benchmarks.record import Measure

COLOURS = {
    "rows": "#0072b2",
    "cached": "#56b4e9",
    "free": "#eeeeee",
    "tail": "#f0e442",
    "padding": "#999999",
    "narrow": "#d55e00",
    "in_flight": "#e69f00",
    "partial": "#cc79a7",
    "null": "#000000",
}
"""Of Okabe and Ito, apart for every kind of colour vision; what is wasted is warm."""
MEANINGS = {
    "rows": "rows of tokens",
    "cached": "cached prefixes",
    "free": "free",
    "tail": "tail of block",
    "padding": "padding in pages",
    "narrow": "narrow group",
    "in_flight": "in flight",
    "partial": "partly used frames",
    "null": "null frame",
}


def draw_places(measures: Sequence[Measure], path: Path) -> None:
    """Writes the picture: bars of the places, with the sequences and tokens that were held."""
    settings = by_setting(measures)
    models = list(dict.fromkeys(model for mix in settings.values() for model in mix))
    rows, columns = max(1, len(models)), max(1, len(settings))
    figure = Figure(figsize=(7.6 * columns, 2.3 * rows + 1.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for column, (mix, of_mix) in enumerate(settings.items()):
        for row, model in enumerate(models):
            _draw(grid[row, column], f"{model}, {mix}", of_mix.get(model, {}))
    patches = [Patch(facecolor=COLOURS[place], edgecolor="#777777", label=MEANINGS[place]) for place in PLACES]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9, frameon=False)
    figure.suptitle("Memory while requests wait, by what it is used for, and what it holds", fontweight="bold")
    save(figure, path)


def _draw(axes: Axes, title: str, layouts: Mapping[str, Mapping[str, Measure]]) -> None:
    memory = max((float(figures["memory"].value) for figures in layouts.values() if "memory" in figures), default=0.0)
    axes.set_title(f"{title}: {memory / 2**30:,.1f} GiB", loc="left", fontsize=10)
    labels = []
    for at, (layout, figures) in enumerate(layouts.items()):
        is_auto = "plan" in figures and str(figures["plan"].value).endswith("auto")
        labels.append(layout + " *" * is_auto)
        if "sequences" not in figures:
            axes.text(1, at, next(iter(figures)), va="center", fontsize=8.5, fontstyle="italic")
            continue
        left = 0.0
        for place in PLACES:
            share = float(figures[place].value)
            axes.barh(at, share, left=left, color=COLOURS[place], edgecolor="#777777", linewidth=0.3, height=0.72)
            left += share
        held = f"{figures['sequences'].value:,.1f} seqs, {figures['tokens'].value:,} tokens"
        axes.text(101, at, held, va="center", fontsize=8.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, 138)
    axes.set_xticks(range(0, 101, 20), [f"{share} %" for share in range(0, 101, 20)], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
