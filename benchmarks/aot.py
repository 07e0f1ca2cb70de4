"""`python -m benchmarks aot`: compiles every kernel for five chips, with none of them here, and holds it to gates.

Kernels that only move rows of 16-byte multiples spill nothing and touch rows 16 bytes at a time; every kernel fits
the chip's shared memory; other strides and sizes make no further variants.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from rich.console import Console
from rich.progress import Progress

from benchmarks.aot_compile import CHIPS, Figures, compile_launch, count_variants
from benchmarks.aot_peers import print_peers
from benchmarks.aot_registry import CASES, KERNELS, variant_families
from benchmarks.aot_report import NO_FIGURES, Measure, Result, measure, print_tables
from kvstore_kernels.launch import INTERPRETED


def main(arguments: Sequence[str]) -> int:
    """Runs the check. Returns 0 when every gate holds, 1 when one does not, 2 when it cannot run."""
    options = _parse(arguments)
    if INTERPRETED:
        print("aot: expected a process without TRITON_INTERPRET, for under it nothing compiles", file=sys.stderr)
        return 2
    results = compile_all(options.kernels, options.targets, options.jobs, options.quick)
    variants = [each for chip in options.targets for each in measure_variants(chip, options.kernels)]
    measures = [each for result in results for each in measure(result)] + variants
    if options.json:
        print(*(each.to_json() for each in measures), sep="\n")
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=150)
        print_tables(console, results, variants)
        print_peers(console, results)
    return 1 if any(each.ok is False for each in measures) else 0


def compile_all(kernels: Sequence[str], chips: Sequence[str], jobs: int, quick: bool) -> list[Result]:
    """Every case of these kernels on every chip it is for, as the registry orders them; compiler errors are results."""
    cases = [(idx, case) for idx, case in enumerate(CASES) if case.kernel in kernels and case.is_quick >= quick]
    wanted = [(idx, chip) for idx, case in cases for chip in chips if case.is_for(chip)]
    results = {}
    # Spawned, not forked: compilers and torch have threads.
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(max(1, min(jobs, len(wanted))), mp_context=get_context("spawn")) as pool,
    ):
        bar = progress.add_task("compiling", total=len(wanted))
        futures = {pool.submit(compile_case, idx, chip): (idx, chip) for idx, chip in wanted}
        for future in as_completed(futures):
            idx, chip = futures[future]
            results[idx, chip] = Result(CASES[idx], chip, *future.result())
            progress.advance(bar)
    return [results[key] for key in wanted]


def compile_case(case_idx: int, chip: str) -> tuple[Figures, str]:
    """Compiles one case of the registry for one chip: its figures, or what the compiler said."""
    target = CHIPS[chip]
    try:
        return compile_launch(CASES[case_idx].build(target), target), ""
    except Exception as error:
        return NO_FIGURES, f"{type(error).__name__}: {error}"


def measure_variants(chip: str, kernels: Sequence[str]) -> list[Measure]:
    """For each kernel with a family of strides and sizes, how many variants Triton compiles for it."""
    counts = {
        kernel: count_variants(launches, CHIPS[chip])
        for kernel, launches in variant_families(CHIPS[chip]).items()
        if kernel.partition(",")[0] in kernels
    }
    return [Measure(f"{kernel} on {chip}", "variants", count, "", 1, count == 1) for kernel, count in counts.items()]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks aot", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kernels", type=_names(KERNELS), default=KERNELS, help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--targets", type=_names(tuple(CHIPS)), default=tuple(CHIPS), help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to compile in")
    parser.add_argument("--quick", action="store_true", help="leave out the cases that take longest")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of the table")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"argument --jobs: expected at least 1, got {options.jobs}")
    return options


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(known)}, got {name!r}")
        return names

    return parse
