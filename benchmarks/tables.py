"""Figures as tables: a line for each case, or a line for each figure."""

from collections.abc import Collection, Iterable, Mapping

from rich.markup import escape
from rich.table import Table

from benchmarks.record import Measure, new_table, shown

Figures = dict[str, Measure]
"""Metric -> figure of one case."""

MIN_CASE = 48
"""Characters of a case that no column of text takes away."""


def by_case(measures: Iterable[Measure]) -> dict[str, Figures]:
    """The figures of each case, in the order in which they were taken."""
    cases: dict[str, Figures] = {}
    for each in measures:
        cases.setdefault(each.case, {})[each.metric] = each
    return cases


def case_table(
    title: str,
    measures: Iterable[Measure],
    columns: Mapping[str, str],
    *,
    left: Collection[str] = (),
    case: str = "case",
    targets: bool = True,
) -> Table:
    """A line for each case that has one of the figures.

    Args:
        columns: metric -> heading; a column without a figure is left out.
        left: the metrics that are text.
        case: the heading of the cases.
        targets: whether they are shown, beside whether they are met.
    """
    rows = {name: figures for name, figures in by_case(measures).items() if not figures.keys().isdisjoint(columns)}
    known = set().union(*rows.values())
    columns = {metric: heading for metric, heading in columns.items() if metric in known}
    is_gated = any(figures[name].ok is not None for figures in rows.values() for name in columns if name in figures)
    table = new_table(title, (case,))
    table.columns[0].min_width = min(max(map(len, rows), default=0), MIN_CASE)
    for metric, heading in columns.items():
        is_left = metric in left
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=not is_left)
    if is_gated and targets:
        table.add_column("target", justify="right")
    if is_gated:
        table.add_column("", no_wrap=True)
    for name, figures in rows.items():
        gated = [figures[metric] for metric in columns if metric in figures and figures[metric].ok is not None]
        bounds = [", ".join(dict.fromkeys(_target(each) for each in gated))] if is_gated and targets else []
        ending = [*bounds, verdict(gated)] if is_gated else []
        table.add_row(escape(name), *(cell(figures.get(metric)) for metric in columns), *ending)
    return table


def figure_table(title: str, measures: Iterable[Measure]) -> Table:
    """A line for each figure: of what, the value, and what it is held to."""
    table = new_table(title, ("case", "figure"))
    for heading in ("value", "target"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for each in measures:
        value = f"{cell(each)} {each.unit}".rstrip()
        table.add_row(escape(each.case), each.metric, value, _target(each), verdict([each]))
    return table


def cell(figure: Measure | None) -> str:
    """The figure, in the colour of its verdict; nothing for none."""
    if figure is None:
        return ""
    text = escape(shown(figure.value))
    return text if figure.ok is None else f"[{'green' if figure.ok else 'red'}]{text}[/]"


def verdict(figures: Iterable[Measure]) -> str:
    """Whether all those that have a target meet it; nothing where none has one."""
    gated = [each for each in figures if each.ok is not None]
    if not gated:
        return ""
    return "[green]ok[/]" if all(each.ok for each in gated) else "[red]missed[/]"


def _target(figure: Measure) -> str:
    return "" if figure.target is None else escape(shown(figure.target))
