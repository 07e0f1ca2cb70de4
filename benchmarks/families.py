"""Models of transformers on the store's pages, beside its own cache: tokens, logits, prefixes, memory.

Small random models in float32 generate 64 tokens greedily from prompts around windows, blocks and compressed rows; a
second batch goes on from the first. A run whose tokens differ, or whose logits differ more than sums in another order
do, is a failure.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import transformers
from rich.console import Console

from benchmarks import family_memory, family_runs
from benchmarks.family_models import FAMILIES
from benchmarks.family_runs import ATTENTIONS, LAYOUTS, LOGITS_BUDGET, NEW_TOKENS
from benchmarks.options import names_of, new_parser
from benchmarks.record import Measure, Part, Run
from benchmarks.tables import case_table

MIB = 2**20
COLUMNS = {
    "groups": "groups",
    "prompts": "prompts",
    "tokens equal": "tokens equal",
    "logits differ": "logits differ",
    "found again": "found again",
    "asked again": "of tokens",
    "time": "s",
    "wrong": "wrong",
}
"""Metrics -> headings of their columns."""
HELD = {"in the store": "in the store", "in transformers' cache": "transformers' cache", "by group": "by group"}


def parts_of(family: str, layouts: Sequence[str], quick: bool) -> list[Part]:
    """A family on each layout, through both attention functions."""
    batches = family_runs.lengths_of(family)
    return [
        (
            f"{family}, {layout}, {attention}",
            partial(measure, family, layout, attention, batches[-1:] if quick else batches),
        )
        for layout in layouts
        for attention in ATTENTIONS
    ]


def measure(family: str, layout: str, attention: str, batches: Sequence[tuple[int, ...]]) -> Iterator[Measure]:
    """The worst of the batches; where tokens or logits are wrong, no time."""
    case, begin = f"{family}, {layout}, {attention}", time.perf_counter()
    runs = [family_runs.compare(family, layout, attention, lengths) for lengths in batches]
    seconds = time.perf_counter() - begin
    equal, error = all(run.equal for run in runs), max(run.error for run in runs)
    yield Measure(case, "groups", len(family_runs.store_of(family, layout).plan.groups))
    yield Measure(case, "prompts", sum(map(len, batches)))
    yield Measure(case, "tokens equal", equal, "", True, equal)
    yield Measure(case, "logits differ", error, "of the largest", LOGITS_BUDGET, error <= LOGITS_BUDGET)
    if equal and error <= LOGITS_BUDGET:
        yield Measure(case, "found again", sum(run.cached for run in runs), "tokens")
        yield Measure(case, "asked again", sum(run.asked for run in runs), "tokens")
        yield Measure(case, "time", round(seconds, 2), "s")


def measure_held() -> Iterator[Measure]:
    """What one sequence of DeepSeek V4 holds."""
    for held in family_memory.measure():
        case = f"DeepSeek-V4-Flash, {held.length} tokens, {held.rows}"
        yield Measure(case, "in the store", held.in_store, "B")
        if held.in_transformers is not None:
            yield Measure(case, "in transformers' cache", held.in_transformers, "B")
        groups = ", ".join(f"{name} {size / MIB:.1f}" for name, size in held.by_group.items())
        yield Measure(case, "by group", groups, "MiB")


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison. Returns 0 when all tokens are equal, 1 when some are not, 2 for a caller's mistake."""
    options = _parse(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # sums of several threads come in no fixed order
    layouts = LAYOUTS[:1] + LAYOUTS[-1:] if options.quick else LAYOUTS
    parts = [part for family in options.families for part in parts_of(family, layouts, options.quick)]
    if "deepseek-v4" in options.families:
        parts.append(("DeepSeek-V4-Flash, memory", measure_held))
    with Run("families", options) as run:
        run.measure(parts)
    return run.finish(show)


def show(console: Console, measures: Sequence[Measure]) -> None:
    """A line for each family, layout and attention function, and the memory of DeepSeek V4."""
    title = "On the store's pages, beside transformers' own cache"
    console.print(case_table(title, measures, COLUMNS, left=("wrong",), case="family, layout, attention reads"))
    console.print(
        f"transformers {transformers.__version__}, float32, {NEW_TOKENS} new tokens twice. logits differ: the most, as "
        "a part of the\nlargest logit. found again: prompt tokens of the second batch.\n",
        highlight=False,
    )
    held = [
        Measure(each.case, each.metric, round(each.value / MIB, 1) if isinstance(each.value, int) else each.value)
        for each in measures
        if each.metric in HELD
    ]
    if held:
        console.print(case_table("MiB that one sequence holds", held, HELD, left=("by group",)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("families", __doc__, "two layouts, and of DeepSeek V4 one length only")
    parser.add_argument(
        "--families",
        type=names_of(FAMILIES),
        default=tuple(FAMILIES),
        metavar="NAME,NAME",
        help=f"of {', '.join(FAMILIES)}",
    )
    return parser.parse_args(arguments)
