"""The gates of the ahead-of-time check, its table and its JSON lines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.aot_cases import Case
from benchmarks.aot_compile import SHARED_BYTES, Figures

ROW_ACCESS_BYTES = 16
NO_FIGURES = Figures(0, 0, 0, {}, {}, "")


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of one case; `target` is the bound it is held to, None where it is only reported."""

    case: str
    metric: str
    value: int | str
    unit: str
    target: int | str | None = None
    ok: bool | None = None

    def to_json(self) -> str:
        """One line; `target` and `ok` only where there is a gate."""
        fields = {"bench": "aot", "case": self.case, "metric": self.metric, "value": self.value, "unit": self.unit}
        if self.ok is not None:
            fields |= {"target": self.target, "ok": self.ok}
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class Result:
    """One case compiled for one chip; `error` is what was said instead of figures."""

    case: Case
    chip: str
    figures: Figures = NO_FIGURES
    error: str = ""

    @property
    def name(self) -> str:
        """Kernel, case and chip in one string."""
        return f"{self.case.kernel} {self.case.name} on {self.chip}"


def narrowest_row_access(result: Result) -> int:
    """The bytes of the narrowest access that cannot be one of the index loads allowed; 0 when there is none."""
    allowed, figures = result.case.index_loads or {}, result.figures
    rows = [width for width, count in figures.loads.items() if count > allowed.get(width, 0)]
    return min(rows + list(figures.stores)) if rows and figures.stores else 0


def measure(result: Result) -> list[Measure]:
    """Every figure of a result, with a verdict where there is a gate."""
    name, figures = result.name, result.figures
    if result.error:
        return [Measure(name, "compile_errors", 1, "", target=0, ok=False)]
    case, most_spilt = result.case, result.case.max_spill_bytes
    limit, accesses = SHARED_BYTES[result.chip], [*figures.loads, *figures.stores]
    measures = [
        Measure(name, "registers", figures.registers, ""),
        Measure(name, "spill_bytes", figures.spill_bytes, "B", most_spilt, figures.spill_bytes <= most_spilt),
        Measure(name, "shared_bytes", figures.shared_bytes, "B", limit, figures.shared_bytes <= limit),
        Measure(name, "widest_access", max(accesses, default=0), "B"),
        Measure(name, "narrowest_access", min(accesses, default=0), "B"),
    ]
    if case.wgmma and result.chip == "sm_90":
        has_it = figures.matrix.startswith("wgmma")
        measures.append(Measure(name, "matrix_instruction", figures.matrix, "", "wgmma", has_it))
    else:
        measures.append(Measure(name, "matrix_instruction", figures.matrix, ""))
    if case.narrow_stores is not None:
        narrow = {width: count for width, count in figures.stores.items() if width < ROW_ACCESS_BYTES}
        widths, wanted = _histogram(narrow), _histogram(case.narrow_stores)
        measures.append(Measure(name, "narrow_stores", widths, "", wanted, widths == wanted))
    if case.index_loads is None:
        return measures
    narrowest = narrowest_row_access(result)
    is_wide = narrowest >= ROW_ACCESS_BYTES
    return [*measures, Measure(name, "narrowest_row_access", narrowest, "B", ROW_ACCESS_BYTES, is_wide)]


def _histogram(counts: Mapping[int, int]) -> str:
    """{4: 1, 8: 2} -> "1 x 4 B, 2 x 8 B"."""
    return ", ".join(f"{count} x {width} B" for width, count in sorted(counts.items())) or "none"


def failures(measures: Sequence[Measure]) -> Iterator[str]:
    """What missed its gate, in words."""
    for each in measures:
        if each.ok is False:
            yield f"{each.metric} {each.value} {each.unit}".rstrip() + f" (gate {each.target})"


def print_tables(console: Console, results: Sequence[Result], variants: Sequence[Measure]) -> None:
    """A table for each kernel with a line for each case and chip, then the variants and whatever missed its gate."""
    for kernel in dict.fromkeys(result.case.kernel for result in results):
        _print_table(console, kernel, [result for result in results if result.case.kernel == kernel])
    console.print("Bytes; widest and narrowest: one lane's access to global memory; of rows: index loads left out.\n")
    for each in variants:
        variants_made = "1 variant" if each.value == 1 else f"{each.value} variants"
        console.print(f"{each.case}: {variants_made} over strides and sizes", style=_style(each.ok))
    for result in results:
        for what in failures(measure(result)):
            console.print(f"{result.name}: {what} {result.error}", style="red", markup=False)
    gates = [each for result in results for each in measure(result) if each.ok is not None] + list(variants)
    missed = sum(each.ok is False for each in gates)
    console.print(f"{len(results)} programs, {len(gates)} gates: {f'{missed} missed' if missed else 'all hold'}\n")


def _print_table(console: Console, kernel: str, results: Sequence[Result]) -> None:
    table = Table(title=kernel, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("case", "chip"):
        table.add_column(column, no_wrap=True)
    for column in ("regs", "spill", "shared", "widest", "narrowest", "of rows"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("matrix", "verdict"):
        table.add_column(column, no_wrap=True)
    metrics = ("registers", "spill_bytes", "shared_bytes", "widest_access", "narrowest_access", "narrowest_row_access")
    previous = ""
    for result in results:
        measures = measure(result)
        values = {each.metric: str(each.value) for each in measures}
        ok = not any(failures(measures))
        table.add_row(
            "" if result.case.name == previous else result.case.name,
            result.chip,
            *(values.get(metric, "") for metric in metrics),
            values.get("matrix_instruction", ""),
            Text("ok" if ok else "FAILED", style=_style(ok)),
        )
        previous = result.case.name
    console.print(table)


def _style(ok: bool | None) -> str:
    return "red" if ok is False else "green"
