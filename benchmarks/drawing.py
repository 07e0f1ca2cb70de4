"""What pictures of figures share. Needs matplotlib (extra "plots"); imported only to draw."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999")
"""Of Okabe and Ito: apart for every kind of colour vision."""
MARKS = "os^Dv"
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.6}


def new_figure(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A picture of one panel; width and height in inches at 100 pixels each."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Writes it in the format that the path's suffix names."""
    figure.savefig(path, format=path.suffix[1:].lower())
