"""Plans of every model of the test data: bytes per sequence, beside a reference planner and the best plan there is.

The reference is vLLM 0.33: its grouping in the layout that it takes for the model. Bytes allocated are blocks x block
stride between steps; rows are the same blocks without padding. The best plan is found by an exhaustive search.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.options import new_parser
from benchmarks.planner_search import Optimum, search
from benchmarks.record import Measure, Part, Run, Value, new_table
from benchmarks.tables import by_case, case_table, cell, figure_table
from benchmarks.timing import Times
from kvstore import CachePlan, plan_cache, pool_bytes_per_block, specs_from_config
from kvstore.capacity import blocks_per_group
from kvstore.choose import MAX_GROUPS
from kvstore.frames import held_back
from kvstore.grouping import STRATEGIES
from kvstore.groups import cached_layers
from kvstore.placement import bytes_before_buckets
from kvstore.score import Considered, consider
from kvstore.spec_json import spec_from_fields
from kvstore.specs import LayerSpec

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
MEMORY = 64 << 30
LENGTHS = (512, 1024, 8192, 131072)
RUNS, RUNS_OF_MIX = 20, 50

MAX_RATIO = 1.0
MAX_EXCESS = 0.02
MAX_MIX_MS = 20.0

V4_FLASH = "deepseek-v4-flash/fp8_ds_mla-idx132"
V4_GROUPS = (1_002_240, 870_912, 823_680, 823_680, 656_640)
V4_LAYERS = {
    4: ("window", "indexer", "indexer_state", "compressed_4", "state_4"),
    128: ("window", "compressed_128", "state_128"),
}
"""Caches of a layer of DeepSeek V4, by its compression ratio."""

VLLM_LAYOUTS = {"layer_outermost": ("equal", "buckets"), "block_outermost": ("packed", "overlay")}
"""Layout of the reference -> the strategy that groups for it, and the layout of ours that places pages as it does."""

Specs = dict[str, LayerSpec]
PLANS = {
    "layout": "layout",
    "blocks_per_frame": "blocks a frame",
    "groups": "groups",
    "frame_bytes": "frame B",
    "held_back": "held",
    "excess_over_search": "excess",
    "planning_time": "ms",
    "planning_median": "median",
    "planning_spread": "+- %",
}
"""Metrics of a plan -> headings of their columns."""


@dataclass(frozen=True, slots=True)
class Case:
    """Layers to plan, and what the reference makes of the model: `reference_bytes` is its block as recorded."""

    name: str
    specs: Specs
    reference: Considered
    reference_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """The plan of a case; bytes of a sequence of each length: allocated, of its rows, of its own pages."""

    case: Case
    plan: CachePlan
    planning: Times
    allocated: tuple[int, ...]
    rows: tuple[int, ...]
    pages: tuple[int, ...]
    optimum: Optimum | None = None

    @property
    def ratios(self) -> list[float]:
        """Bytes allocated / those of the reference."""
        reference = self.case.reference.bytes_per_sequence
        return [ours / theirs for ours, theirs in zip(self.allocated, reference, strict=True)]

    @property
    def score(self) -> float:
        """What the exhaustive search minimises."""
        return sum(ours / own for ours, own in zip(self.allocated, self.pages, strict=True)) / len(self.pages)

    @property
    def excess(self) -> float | None:
        """How far the score lies above the least one, None where that was not searched for."""
        return None if self.optimum is None else self.score / self.optimum.score - 1

    @property
    def held_back(self) -> float:
        """Share of the memory in the null frame and, as expected, in partly used frames."""
        return held_back(MEMORY, self.plan.frame_bytes, len(self.plan.groups), max(self.plan.blocks_per_frame))


def recorded() -> list[dict[str, Any]]:
    """The cases of the reference planner."""
    cases: list[dict[str, Any]] = json.loads((DATA / "planning_models.json").read_text(encoding="utf-8"))["cases"]
    return cases


def listed_specs(case: Mapping[str, Any]) -> Specs:
    """The layers of a recorded case, as the reference has them."""
    kinds = {name: spec_from_fields(name, fields) for name, fields in case["specs"].items()}
    return cached_layers({name: kinds[kind] for name, _, kind in case["layers"]}).owners


def config_specs(case: Mapping[str, Any], block_size: int | None) -> Specs:
    """The layers that we make of the case's config."""
    options = {name: value for name, value in case["options"].items() if name != "block_step"}
    return cached_layers(specs_from_config(case["config"], block_size=block_size, **options)).owners


def cases_of(case: Mapping[str, Any]) -> list[Case]:
    """What is planned for a recorded case: with our blocks and, for models with states, with the reference's too."""
    listed = {  # a state at rest on both sides: the reference may hold one more for a checkpoint
        layer: replace(spec, checkpoint_blocks=0) for layer, spec in listed_specs(case).items()
    }
    has_states = any(spec.kind == "state" for spec in listed.values())  # the reference takes blocks as large as those
    sizes = {spec.block_size for spec in listed.values()}
    ours = config_specs(case, sizes.pop() if len(sizes) == 1 and not has_states else None)
    default = next(plan for plan in case["plans"] if plan["vllm_default"])
    grouping, layout = VLLM_LAYOUTS[default["layout"]]
    reference = consider(STRATEGIES[grouping](listed), layout, LENGTHS, MEMORY)
    made = Case(case["id"], ours, reference, default["bytes_per_block"])
    if has_states:
        return [made, replace(made, name=f"{made.name}, its blocks", specs=listed)]
    is_same = [_facts(spec) for spec in ours.values()] == [_facts(spec) for spec in listed.values()]
    return [made if is_same else replace(made, specs=listed)]  # else: a demand of one chip, which no config names


def _facts(spec: LayerSpec) -> tuple[object, ...]:
    return spec.page_bytes, spec.payload_bytes, spec.block_size, spec.retention, spec.stride_multiple


def plan_case(case: Case) -> Result:
    """Plans a case, and times it."""
    plan, planning = timed(case.specs, RUNS)
    blocks = [blocks_per_group(plan.groups, length) for length in LENGTHS]

    def total(each: Sequence[int]) -> tuple[int, ...]:
        return tuple(sum(count * size for count, size in zip(row, each, strict=True)) for row in blocks)

    rows, pages = zip(*((group.payload_bytes, group.block_bytes) for group in plan.groups), strict=True)
    return Result(case, plan, planning, total(plan.block_strides), total(rows), total(pages))


def timed(specs: Specs, runs: int) -> tuple[CachePlan, Times]:
    """The plan of these layers, and how long each run took."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        plan = plan_cache(specs, memory=MEMORY, lengths=LENGTHS)
        seconds.append(time.perf_counter() - start)
    return plan, Times(tuple(seconds))


def planning_figures(case: str, planning: Times, target: float | None = None) -> Iterator[Measure]:
    """The least, the median and the spread of planning times."""
    least = 1000 * min(planning.samples)
    ok = None if target is None else least <= target
    yield Measure(case, "planning_time", round(least, 3), "ms", target, ok)
    yield Measure(case, "planning_median", round(1000 * planning.median, 3), "ms")
    yield Measure(case, "planning_spread", round(100 * planning.spread, 1), "%")


def mixed_layers() -> Specs:
    """243 caches as of DeepSeek V4: 61 layers, compression ratios 128 and 4 in turn."""
    fields = next(case["specs"] for case in recorded() if case["id"] == V4_FLASH)
    names = [(layer, kind) for layer in range(61) for kind in V4_LAYERS[4 if layer % 2 else 128]]
    specs = {f"layers.{layer}.{kind}": spec_from_fields(kind, fields[kind]) for layer, kind in names}
    return cached_layers(specs).owners


def measure(result: Result) -> Iterator[Measure]:
    """Every figure of a case."""
    name, plan, reference = result.case.name, result.plan, result.case.reference
    yield Measure(name, "groups", len(plan.groups), "")
    yield Measure(name, "layout", plan.layout, "")
    yield Measure(name, "frame_bytes", plan.frame_bytes, "B")
    yield Measure(name, "blocks_per_frame", _counts(plan), "")
    for index, length in enumerate(LENGTHS):
        yield Measure(name, f"allocated_at_{length}", result.allocated[index], "B")
        yield Measure(name, f"rows_at_{length}", result.rows[index], "B")
        yield Measure(name, f"reference_at_{length}", reference.bytes_per_sequence[index], "B")
        ratio = result.ratios[index]
        yield Measure(name, f"ratio_to_reference_at_{length}", round(ratio, 6), "x", MAX_RATIO, ratio <= MAX_RATIO)
    yield check(name, "reference_block", reference.frame_bytes, result.case.reference_bytes)
    yield Measure(name, "held_back", round(result.held_back, 6), "of memory")
    yield from planning_figures(name, result.planning)
    if result.optimum is not None and result.excess is not None:
        yield Measure(name, "least_score", round(result.optimum.score, 6), "x")
        excess = round(result.excess, 6)
        yield Measure(name, "excess_over_search", excess, "", MAX_EXCESS, excess <= MAX_EXCESS)


def check(case: str, metric: str, value: Value, expected: Value, unit: str = "B") -> Measure:
    """A figure that has to be what is expected."""
    return Measure(case, metric, value, unit, expected, value == expected)


def measure_case(case: Case, quick: bool) -> Iterator[Measure]:
    """Plans a case, and unless `quick` looks for the best plan there is."""
    result = plan_case(case)
    yield from measure(result if quick else replace(result, optimum=search(case.specs, LENGTHS, MEMORY)))


def measure_mix() -> Iterator[Measure]:
    """Planning time of many caches with mixed pages: all groupings and layouts compared, the best placed and proved."""
    specs = mixed_layers()
    plan, planning = timed(specs, RUNS_OF_MIX)
    name = f"{len(specs)} caches of mixed pages"
    yield Measure(name, "plan", f"{plan.layout}, {len(plan.groups)} groups")
    yield from planning_figures(name, planning, MAX_MIX_MS)


def measure_v4() -> list[Measure]:
    """DeepSeek V4-Flash with its MTP layer, in the reference's groups: figures known from elsewhere."""
    name, padded_name = "V4-Flash, packed groups", "V4-Flash, pages padded"
    specs = listed_specs(next(case for case in recorded() if case["id"] == f"{V4_FLASH}-mtp1"))
    groups = STRATEGIES["packed"](specs)
    sizes = sorted((group.block_bytes for group in groups), reverse=True)
    measures = [
        check(name, "groups", len(groups), len(V4_GROUPS), ""),
        *(check(name, f"group_{rank}", *pair) for rank, pair in enumerate(zip(sizes, V4_GROUPS, strict=False))),
        check(name, "overlay", consider(groups, "overlay", LENGTHS, MEMORY).frame_bytes, max(V4_GROUPS)),
    ]
    for length, mib, least in ((512, 26.8, 0.22), (8192, 55.4, 0.10)):
        overlay, frames = (
            consider(groups, layout, LENGTHS, MEMORY).bytes_per_sequence[LENGTHS.index(length)]
            for layout in ("overlay", "frames")
        )
        saved = 1 - frames / overlay
        measures += [
            check(name, f"overlay_at_{length}", round(overlay / 2**20, 1), mib, "MiB"),
            Measure(name, f"saved_by_frames_at_{length}", round(saved, 4), "", least, saved >= least),
        ]
    padded = STRATEGIES["packed"](pad_to_full_pages(specs))
    now, before = pool_bytes_per_block(padded), bytes_before_buckets(padded)
    return [
        *measures,
        check(padded_name, "buckets", now, 1_039_680),
        check(padded_name, "rule_before_buckets", before, 1_051_776),
        check(padded_name, "more_tokens", round(100 * (before / now - 1), 2), 1.16, "%"),
    ]


def pad_to_full_pages(specs: Specs) -> Specs:
    """Pages of windows rounded up to the next page size of the layers that keep every row, as vLLM did at first."""
    sizes = sorted({spec.page_bytes for spec in specs.values() if spec.retention.kind == "full"})
    return {
        layer: replace(spec, padded_page_bytes=next(size for size in sizes if size >= spec.page_bytes))
        for layer, spec in specs.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0 when every target is met, 1 when one is missed, 2 for a caller's mistake."""
    options = _parse(arguments)
    chosen = [case for entry in recorded() if _is_named(entry["id"], options.models) for case in cases_of(entry)]
    parts: list[Part] = [(case.name, partial(measure_case, case, options.quick)) for case in chosen]
    with Run("planner", options) as run:
        run.measure([*parts, ("mixed pages", measure_mix), ("V4-Flash, known figures", measure_v4)])
    return run.finish(show, draw)


def show(console: Console, measures: Sequence[Measure]) -> None:
    """The plans, the bytes of a sequence of each length, and the checks that no model belongs to."""
    console.print(f"Plans for {MEMORY >> 30} GiB and sequences of {', '.join(map('{:,}'.format, LENGTHS))} tokens\n")
    cases = {name: figures for name, figures in by_case(measures).items() if "layout" in figures}
    plans = [each for each in measures if each.case in cases]
    console.print(case_table("Plans", plans, PLANS, left=("layout", "blocks_per_frame")))
    console.print(
        "held: share of the memory in the null frame and, as expected, in partly used frames; ms: least of "
        f"{RUNS}; +-: distance of the quartiles.\nexcess: of the bytes per sequence over the least of an exhaustive "
        f"search over all groupings into at most {MAX_GROUPS} groups,\nall layouts and all frame sizes.\n",
        highlight=False,
    )
    sequences = new_table("A sequence", ("case",), ("tokens", "allocated MiB", "rows MiB", "reference MiB", "ratio"))
    for name, figures in cases.items():
        for length in LENGTHS:
            sizes = [float(figures[f"{what}_at_{length}"].value) for what in ("allocated", "rows", "reference")]
            sequences.add_row(
                name if length == LENGTHS[0] else "",
                f"{length:,}",
                *(f"{size / 2**20:,.2f}" for size in sizes),
                cell(figures[f"ratio_to_reference_at_{length}"]),
                end_section=length == LENGTHS[-1],
            )
    console.print(sequences)
    console.print(figure_table("Checks", [each for each in measures if each.case not in cases]))


def draw(measures: Sequence[Measure], path: Path) -> None:
    """Imported only here: matplotlib is an extra."""
    from benchmarks.planner_plot import draw_ratios

    draw_ratios(measures, LENGTHS, path)


def _counts(plan: CachePlan) -> str:
    """Blocks per frame, equal neighbours as one: "1", "20, 33 x 2, 50"."""
    runs = [(number, len(list(run))) for number, run in groupby(plan.blocks_per_frame)]
    return ", ".join(f"{number} x {count}" if count > 1 else str(number) for number, count in runs)


def _is_named(case: str, models: Sequence[str] | None) -> bool:
    return models is None or case in models or case.partition("/")[0] in models


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("planner", __doc__, "without the exhaustive search", plots=True)
    parser.add_argument("--models", type=_models, metavar="NAME,NAME", help="models, or cases of them: MODEL/CASE")
    return parser.parse_args(arguments)


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    cases = [case["id"] for case in recorded()]
    for name in names:
        if not any(_is_named(case, (name,)) for case in cases):
            models = ", ".join(dict.fromkeys(case.partition("/")[0] for case in cases))
            raise argparse.ArgumentTypeError(f"expected names out of {models}, got {name!r}")
    return names
