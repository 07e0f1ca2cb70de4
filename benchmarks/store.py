"""What the store's books cost the host: steps, prompts, forks, blocks, bytes. A wrong result gets no speed.

Stores without bytes (device=None), pools that are full. Times are of the store's calls alone, in one process that does
nothing else, with Python's garbage collector off.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import store_cases as steps
from benchmarks import store_memory as memory
from benchmarks import store_prompts as prompts
from benchmarks.options import names_of, new_parser
from benchmarks.record import Measure, Part, Run
from benchmarks.store_cases import BLOCK, FULL, GATED_SEQUENCES, QUICK, START, Sizes
from benchmarks.store_peers import store_peers
from benchmarks.tables import case_table, figure_table

TIMES = {"min": "min", "median": "median", "spread": "+- %", "worst": "worst", "worst_cpu": "worst, CPU"}
"""Metrics that are times -> headings of their columns."""


def parts_of(case: str, sizes: Sizes) -> list[Part]:
    """What a case measures, one after the other; each part stands alone."""
    few_groups = (1, 5)
    num_sequences = GATED_SEQUENCES if sizes.gated else max(sizes.sequences)

    def each(measure: Callable[..., Iterator[Measure]], *choices: tuple[int, ...]) -> list[Part]:
        return [
            (f"{case} {', '.join(f'{number:,}' for number in choice)}".rstrip(), partial(measure, sizes, *choice))
            for choice in choices
        ]

    match case:
        case "decode":
            return each(steps.decode, *((groups, count) for groups in sizes.groups for count in sizes.sequences))
        case "peers":
            return [("peers", partial(store_peers, num_sequences, START, BLOCK))]
        case "changing":
            return each(steps.changing, *((groups, num_sequences) for groups in few_groups))
        case "prefill-between":
            return each(steps.alternating, *((groups, num_sequences) for groups in few_groups))
        case "calls":
            return each(steps.calls, *((groups,) for groups in few_groups))
        case "prefill" | "hit":
            measure = prompts.prefill if case == "prefill" else prompts.hit
            return each(measure, *((groups, length) for groups in few_groups for length in (sizes.short, sizes.long)))
        case "release":
            lengths = (START, sizes.short, sizes.long)
            return each(prompts.release, *((groups, length) for groups in few_groups for length in lengths))
        case "forks":
            return each(prompts.forks, *((groups,) for groups in few_groups))
        case "truncate":
            return each(prompts.truncate, *((groups,) for groups in few_groups))
        case "allocator":
            return each(prompts.allocator, ())
        case "books":
            return [*each(memory.books, (1,), (5,)), *each(memory.resident, ())]
    assert case == "frames"
    return [*each(memory.frames, ()), *each(memory.creep, ())]


CASES = (
    "decode",
    "peers",
    "changing",
    "prefill-between",
    "calls",
    "prefill",
    "hit",
    "release",
    "forks",
    "truncate",
    "allocator",
    "books",
    "frames",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0 when every target is met, 1 when one is missed, 2 for a caller's mistake."""
    options = _parse(arguments)
    sizes = QUICK if options.quick else FULL
    with Run("store", options) as run:
        run.measure([part for case in options.cases for part in parts_of(case, sizes)])
    return run.finish(show, draw)


def show(console: Console, measures: Sequence[Measure]) -> None:
    """A line for each thing that was timed, and the other figures."""
    table = case_table("Times in us", measures, TIMES, case="what")
    if table.row_count:
        console.print(table)
        console.print(
            "Decode: extend + commit of one token for each sequence. +-: distance of the quartiles. worst, CPU: the "
            "thread's own time,\nwithout what other processes took. The garbage collector is off. Behind a bar: the "
            "same step in another library's books.\n",
            highlight=False,
        )
    if others := [each for each in measures if each.metric not in TIMES]:
        console.print(figure_table("Figures", others))


def draw(measures: Sequence[Measure], path: Path) -> None:
    """Imported only here: matplotlib is an extra."""
    from benchmarks.store_plot import draw_steps

    draw_steps(measures, path)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    quick = "few sequences, few steps and no targets of speed: does it run at all"
    parser = new_parser("store", __doc__, quick, plots=True)
    parser.add_argument(
        "--cases", type=names_of(CASES), default=CASES, metavar="NAME,NAME", help=f"of {', '.join(CASES)}"
    )
    options = parser.parse_args(arguments)
    if options.plot is not None and "decode" not in options.cases:
        parser.error(f"--plot: draws the case decode, got --cases {','.join(options.cases)}")
    return options
