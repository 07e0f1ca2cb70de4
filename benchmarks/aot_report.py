"""The gates of the ahead-of-time check, its table and its JSON lines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.aot_cases import Case
from benchmarks.aot_compile import SHARED_BYTES, Figures
from benchmarks.record import Measure
from benchmarks.tables import case_table, figure_table

ROW_ACCESS_BYTES = 16
NO_FIGURES = Figures(0, 0, 0, {}, {}, "")
COLUMNS = {
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "widest_access": "widest",
    "narrowest_access": "narrowest",
    "narrowest_row_access": "of rows",
    "narrow_stores": "narrow stores",
    "matrix_instruction": "matrix",
    "compile_errors": "errors",
    "error": "error",
}
"""Metrics -> headings of their columns."""


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
        errors = Measure(name, "compile_errors", 1, "", 0, False)
        return [errors, Measure(name, "error", result.error[:500])]
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


def show_kernels(console: Console, measures: Sequence[Measure]) -> None:
    """A table for each kernel with a line for each case and chip, then the variants."""
    compiled = sorted((each for each in measures if each.metric in COLUMNS), key=lambda each: each.case)
    for kernel in dict.fromkeys(each.case.partition(" ")[0] for each in compiled):
        of_kernel = [each for each in compiled if each.case.partition(" ")[0] == kernel]
        left = ("narrow_stores", "matrix_instruction", "error")
        console.print(case_table(kernel, of_kernel, COLUMNS, left=left, targets=False))
    console.print("Bytes; widest and narrowest: one lane's access to global memory; of rows: index loads left out.\n")
    if others := [each for each in measures if each.metric not in COLUMNS]:
        console.print(figure_table("Variants over strides and sizes", others))
    console.print(f"{len({each.case for each in compiled})} programs, {gates_in_words(measures)}\n")


def gates_in_words(measures: Iterable[Measure]) -> str:
    """ "12 gates: all hold", "12 gates: 1 missed"."""
    gates = [each.ok for each in measures if each.ok is not None]
    missed = gates.count(False)
    return f"{len(gates)} gates: {f'{missed} missed' if missed else 'all hold'}"
