"""The tables of the capacity benchmark."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from benchmarks.record import Measure
from benchmarks.replay import Engine
from benchmarks.tables import new_table

PLACES = {
    "rows": "rows",
    "cached": "cached",
    "free": "free",
    "tail": "tail",
    "padding": "padding",
    "narrow": "narrow",
    "in_flight": "in flight",
    "partial": "partial",
    "null": "null",
}
EXPLANATION = """\
Means while requests wait, once the memory has filled; tokens that sequences share count for each, in distinct once.
hits: of the prompt tokens. preempted: taken back for want of blocks. rows: what tokens in reach have; cached: what a
prompt may find; tail: unfilled, or out of the window, within a block; padding: in pages; narrow: what only wider groups
use of a block; in flight: only until the step is committed; partial: free places in frames of a group; null: the null
frame; wasted: the last six before it.
"""


def by_setting(measures: Sequence[Measure]) -> dict[str, dict[str, dict[str, dict[str, Measure]]]]:
    """Mix -> model -> layout -> metric -> figure."""
    found: dict[str, dict[str, dict[str, dict[str, Measure]]]] = {}
    for each in measures:
        model, mix, layout = each.case.rsplit(", ", 2)
        found.setdefault(mix, {}).setdefault(model, {}).setdefault(layout, {})[each.metric] = each
    return found


def show(console: Console, measures: Sequence[Measure], engine: Engine) -> None:
    """Two tables for each mix: what was held, and where the bytes were. Layouts that hold the same share a row."""
    held = (
        "sequences",
        "peak_sequences",
        "tokens",
        "peak_tokens",
        "distinct_tokens",
        "hit_rate",
        "evicted",
        "preempted",
        "refused",
        "steps",
    )
    names = ("seqs", "peak", "tokens", "peak", "distinct", "hits %", "evicted", "preempted", "refused", "steps")
    for mix, models in by_setting(measures).items():
        for title, columns, metrics in (
            (f"{mix}: what is held", names, held),
            (f"{mix}: % of the memory", (*PLACES.values(), "wasted"), (*PLACES, "wasted")),
        ):
            table = new_table(title, ())
            for column in ("model", "layout"):
                table.add_column(column, no_wrap=True)
            for column in columns:
                table.add_column(column, justify="right", no_wrap=True)
            for model, layouts in models.items():
                rows = rows_of(layouts, metrics)
                for number, (layout, cells) in enumerate(rows):
                    table.add_row("" if number else model, layout, *cells, end_section=number == len(rows) - 1)
            console.print(table)
        for model, layouts in models.items():
            _show_remarks(console, model, layouts)
        console.print()
    console.print(
        EXPLANATION + f"*: what auto takes. Steps of {engine.tokens_per_step:,} prompt tokens; "
        f"{engine.tokens_per_decode} generated tokens at once.\n",
        highlight=False,
    )


def rows_of(layouts: Mapping[str, Mapping[str, Measure]], metrics: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Names of layouts and their cells, those with the same figures together."""
    rows: dict[tuple[object, ...], list[str]] = {}
    for layout, figures in layouts.items():
        if "sequences" not in figures:
            failed = next(iter(figures.values()))
            values: tuple[object, ...] = (f"[{'red' if failed.ok is False else 'yellow'}]{failed.metric}[/]",)
        else:
            values = tuple(figures[metric].value for metric in metrics)
        is_auto = "plan" in figures and str(figures["plan"].value).endswith("auto")
        rows.setdefault(values, []).append(layout + " *" * is_auto)
    together = {key: "all" if len(names) == len(layouts) > 1 else _lines(names) for key, names in rows.items()}
    return [(together[key], [_cell(value) for value in key]) for key in rows]


def _lines(names: Sequence[str]) -> str:
    """Two names to a line."""
    return ",\n".join(", ".join(names[at : at + 2]) for at in range(0, len(names), 2))


def _cell(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _show_remarks(console: Console, model: str, layouts: Mapping[str, Mapping[str, Measure]]) -> None:
    memory = [float(figures["memory"].value) for figures in layouts.values() if "memory" in figures]
    if memory:
        console.print(f"{model}: {max(memory) / 2**30:,.2f} GiB", highlight=False)
    for layout, figures in layouts.items():
        if "sequences" not in figures:
            console.print(f"  {layout}: {next(iter(figures.values())).value}", style="red", markup=False)
            continue
        if figures["refused"].value:
            console.print(f"  {layout}: {figures['refused'].value} requests do not fit even alone", style="yellow")
        if figures["looks"].unit != "while full":
            console.print(f"  {layout}: the memory is never full for long; means over all steps", style="yellow")
