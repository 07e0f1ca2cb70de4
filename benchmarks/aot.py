"""`python -m benchmarks aot`: compiles every kernel for five chips, with none of them here, and holds it to gates.

Kernels that only move rows of 16-byte multiples spill nothing and touch rows 16 bytes at a time; every kernel fits
the chip's shared memory; other strides and sizes make no further variants.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import active_children, get_context

from rich.console import Console

from benchmarks.aot_compile import CHIPS, Figures, compile_launch, count_variants
from benchmarks.aot_peers import show_peers
from benchmarks.aot_registry import CASES, KERNELS, variant_families
from benchmarks.aot_report import NO_FIGURES, Result, measure, show_kernels
from benchmarks.options import count, names_of, new_parser
from benchmarks.record import Measure, Run, UsageError
from kvstore_kernels.launch import INTERPRETED

Advance = Callable[[str, int], None]


def main(arguments: Sequence[str]) -> int:
    """Runs the check. Returns 0 when every gate holds, 1 when one does not, 2 when it cannot run."""
    options = _parse(arguments)
    if INTERPRETED:
        raise UsageError("expected a process without TRITON_INTERPRET, for under it nothing compiles")
    wanted = wanted_cases(options.kernels, options.targets, options.quick)
    results: list[Result] = []
    with Run("aot", options) as run, run.progress(len(wanted) + len(options.targets)) as advance:

        def measures() -> Iterator[Measure]:
            for result in compile_all(wanted, options.jobs, advance):
                results.append(result)
                yield from measure(result)

        run.attempt("compiling", measures)
        for chip in options.targets:
            run.attempt(f"variants on {chip}", partial(measure_variants, chip, options.kernels))
            advance(f"variants on {chip}", 1)
    return run.finish(partial(show, results=results))


def wanted_cases(kernels: Sequence[str], chips: Sequence[str], quick: bool) -> list[tuple[int, str]]:
    """Every case of these kernels, by its number in the registry, on every chip it is for."""
    cases = [(idx, case) for idx, case in enumerate(CASES) if case.kernel in kernels and case.is_quick >= quick]
    return [(idx, chip) for idx, case in cases for chip in chips if case.is_for(chip)]


def compile_all(wanted: Sequence[tuple[int, str]], jobs: int, advance: Advance) -> Iterator[Result]:
    """Compiles cases side by side; they come as they are done, and compiler errors are results."""
    # Spawned, not forked: compilers and torch have threads.
    context = get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(wanted))), context, initializer=_leave_interrupts) as pool:
        futures = {pool.submit(compile_case, idx, chip): (idx, chip) for idx, chip in wanted}
        try:
            for future in as_completed(futures):
                idx, chip = futures[future]
                advance(f"{CASES[idx].kernel} on {chip}", 1)
                yield Result(CASES[idx], chip, *future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; here the one that has started them ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def compile_case(case_idx: int, chip: str) -> tuple[Figures, str]:
    """Compiles one case of the registry for one chip: its figures, or what the compiler said."""
    target = CHIPS[chip]
    try:
        return compile_launch(CASES[case_idx].build(target), target), ""
    except Exception as error:
        return NO_FIGURES, f"{type(error).__name__}: {error}"


def measure_variants(chip: str, kernels: Sequence[str]) -> Iterator[Measure]:
    """For each kernel with a family of strides and sizes, how many variants Triton compiles for it."""
    for kernel, launches in variant_families(CHIPS[chip]).items():
        if kernel.partition(",")[0] in kernels:
            found = count_variants(launches, CHIPS[chip])
            yield Measure(f"{kernel} on {chip}", "variants", found, "", 1, found == 1)


def show(console: Console, measures: Sequence[Measure], results: Sequence[Result]) -> None:
    """The kernels, and beside them public ones."""
    show_kernels(console, measures)
    show_peers(console, results)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("aot", __doc__, "without the cases that take longest")
    for option, known in (("--kernels", KERNELS), ("--targets", tuple(CHIPS))):
        parser.add_argument(
            option, type=names_of(known), default=known, metavar="NAME,NAME", help=f"of {', '.join(known)}"
        )
    parser.add_argument(
        "--jobs", type=count, default=os.cpu_count() or 1, metavar="N", help="processes to compile in (default: CPUs)"
    )
    return parser.parse_args(arguments)
