"""What a plan costs and why: figures about its choices, and the text that shows them."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from kvstore import capacity as capacity_of
from kvstore import placement
from kvstore.capacity import blocks_per_group, capacity, longest_sequence
from kvstore.choose import group_layers
from kvstore.demand import STORED, InFlight
from kvstore.errors import PlanError
from kvstore.frames import FRAME_SHARE
from kvstore.grouping import STRATEGIES
from kvstore.groups import DRAFT_PREFIX, CacheGroup
from kvstore.memory import format_bytes
from kvstore.placement import LayerSlot, Placement
from kvstore.score import LAYOUT_TOLERANCE, LAYOUTS, Considered, consider, within_tolerance
from kvstore.specs import LayerSpec
from kvstore.wording import aligned, counted, group_range, layer_range, percent_over, reach, rows_of, stem


class Plan(capacity_of.Plan, Protocol):
    """The part of a CachePlan that is explained."""

    @property
    def layer_slots(self) -> tuple[LayerSlot, ...]: ...
    @property
    def placements(self) -> Mapping[str, Placement]: ...
    @property
    def block_strides(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> str: ...
    @property
    def lower_bound(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def considered(self) -> tuple[Considered, ...]: ...
    @property
    def grouping(self) -> str: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def uncached(self) -> tuple[str, ...]: ...
    @property
    def max_tokens_in_flight(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Neighbouring layer slots `first` ... `last` of one size that the same groups use in the same way.

    `waste` has (bytes of the run that a block leaves unused, names of the groups of such blocks).
    """

    first: int
    last: int
    page_bytes: int
    groups: tuple[str, ...]
    layers: tuple[str, ...]
    waste: tuple[tuple[int, tuple[str, ...]], ...]


PageRun = tuple[int, int, list[str], LayerSpec]
"""Layers of one spec whose pages lie behind one another: first byte in a block, byte behind the last, layers, spec."""

Column = tuple[str, Considered]
"""A name and the figures under it, side by side with others."""


def slot_runs(plan: Plan) -> list[SlotRun]:
    """The layer slots of a plan in "buckets" or "bestfit" as runs, in the order of the arena."""

    def use(slot: LayerSlot) -> tuple[int, ...]:
        held = set(slot.layers)
        pages = [[spec.page_bytes for layer, spec in g.layers.items() if layer in held] for g in plan.groups]
        return (slot.page_bytes, *(page[0] if page else 0 for page in pages))

    runs, names = [], [group.name for group in plan.groups]
    for (page_bytes, *pages), slots in groupby(plan.layer_slots, key=use):
        members = list(slots)
        unused: dict[int, list[str]] = {}
        for name, page in zip(names, pages, strict=True):
            unused.setdefault((page_bytes - page) * len(members), []).append(name)
        waste = tuple((waste, tuple(groups)) for waste, groups in unused.items() if waste)
        users = tuple(name for name, page in zip(names, pages, strict=True) if page)
        layers = tuple(layer for slot in members for layer in slot.layers)
        runs.append(SlotRun(members[0].index, members[-1].index, page_bytes, users, layers, waste))
    return runs


def page_runs(plan: Plan, index: int) -> list[PageRun]:
    """The pages of a block of group `index` in "overlay" or "frames", by their bytes."""
    specs, runs = plan.groups[index].layers, list[PageRun]()
    for layer in sorted(specs, key=lambda layer: plan.placements[layer].offset_bytes):
        first = plan.placements[layer].offset_bytes
        if not runs or (runs[-1][1], runs[-1][3]) != (first, specs[layer]):
            runs.append((first, first, [], specs[layer]))
        runs[-1] = (runs[-1][0], first + specs[layer].page_bytes, [*runs[-1][2], layer], specs[layer])
    return runs


def alike(plan: Plan) -> list[list[int]]:
    """The groups by number, neighbours that differ only in which layers they hold together."""

    def looks(index: int) -> object:
        group, drafts = plan.groups[index], plan.groups[index].holds_draft
        kinds = Counter(group.layers.values())
        return stem(group.name), group.retention, group.block_size, kinds, drafts, plan.blocks_per_frame[index]

    return [list(run) for _, run in groupby(range(len(plan.groups)), key=looks)]


def regrouped(plan: Plan) -> tuple[list[Column], list[str]]:
    """The plan's own groups in "overlay" and those of the named strategies; and why others cannot be, one line each."""

    def place_in_model(layer: str) -> tuple[bool, list[int]]:
        return layer.startswith(DRAFT_PREFIX), [int(number) for number in re.findall(r"\d+", layer)[:1]]

    specs = {layer: spec for group in plan.groups for layer, spec in group.layers.items()}
    specs = {layer: specs[layer] for layer in sorted(specs, key=place_in_model)}
    columns, problems = [("its groups", consider(plan.groups, "overlay", plan.lengths, None))], []
    for name in STRATEGIES:
        try:
            columns.append((name, consider(group_layers(specs, name), "overlay", plan.lengths, None)))
        except PlanError as error:
            problems.append(f"{name}: cannot be, {str(error).split(': use ')[0]}")
    return columns, problems


def worth_comparing(columns: Sequence[Column], problems: Sequence[str]) -> bool:
    """Whether groupings differ in anything, or one of them cannot be."""
    return bool(problems) or len({(e.num_groups, e.frame_bytes, e.bytes_per_sequence) for _, e in columns}) > 1


def bounds(groups: Sequence[CacheGroup]) -> list[tuple[str, int]]:
    """(name, bytes per block) of the lower bound and of every rule by which a block is a frame."""
    widest = max(groups, key=lambda group: group.block_bytes)
    return [
        ("lower bound: pages of the widest group", placement.lower_bound_bytes(groups)),
        ("its rows alone", widest.payload_bytes),
        ("overlay", placement.overlay_bytes(groups)),
        ("bestfit", sum(size for size, _ in placement.slots_by_rank(groups))),
        ("buckets (vLLM PR #44454)", placement.pool_bytes_per_block(groups)),
        ("the rule before that PR", placement.bytes_before_buckets(groups)),
    ]


def sequence_bytes(plan: Plan, length: int) -> tuple[int, int]:
    """Bytes of the pages of one sequence, and of their rows without padding."""
    blocks = blocks_per_group(plan.groups, length)
    held = list(zip(plan.groups, blocks, strict=True))
    return sum(n * group.block_bytes for group, n in held), sum(n * group.payload_bytes for group, n in held)


def why_taken(plan: Plan) -> str:
    """The layout of the plan and the reason for it."""
    if len(plan.considered) < 2:
        return f"{plan.layout}, the only one looked at"
    least = min(plan.considered, key=lambda entry: entry.score)
    near = within_tolerance(plan.considered)
    within = f"within {100 * (LAYOUT_TOLERANCE - 1):.0f} % of the least score"
    if near[0].layout != plan.layout:
        return f"{plan.layout}, {within} and at no length above packed groups in an overlay, which {near[0].layout} is"
    if least.layout == plan.layout:
        same = [entry.score for entry in plan.considered].count(least.score) > 1
        return f"{plan.layout}, the least score" + " and the first in the list that has it" * same
    return f"{plan.layout}, {within} ({least.layout}) and earlier in the list"


def compared(plan: Plan, columns: Sequence[Column], show: Callable[[int, int], str]) -> list[list[str]]:
    """Columns side by side; `show` writes (bytes of a sequence, bytes of its pages in the plan's groups)."""
    entries = [entry for _, entry in columns]
    own = [sequence_bytes(plan, length)[0] for length in plan.lengths]
    return [
        ["", *(name for name, _ in columns)],
        ["groups", *(f"{entry.num_groups:,}" for entry in entries)],
        ["frame bytes", *(f"{entry.frame_bytes:,}" for entry in entries)],
        *(
            [counted(length, "token"), *(show(entry.bytes_per_sequence[at], own[at]) for entry in entries)]
            for at, length in enumerate(plan.lengths)
        ),
        ["score", *(f"{entry.score:.4f}" for entry in entries)],
    ]


def looked_at(plan: Plan) -> list[Column]:
    """The layouts looked at; the one taken has a star."""
    return [(f"{entry.layout}{' *' * (entry.layout == plan.layout)}", entry) for entry in plan.considered]


def slot_range(run: SlotRun) -> str:
    """The slots of a run by number: "0", "0 ... 7"."""
    return f"{run.first}" if run.first == run.last else f"{run.first} ... {run.last}"


def blocks_text(plan: Plan, blocks: Sequence[int]) -> str:
    """Blocks of each group, "64 + 32 + 16"; of groups that are alike once, "36 x 1"."""
    runs = [(f"{len(run)} x " if len(run) > 1 else "", blocks[run[0]]) for run in alike(plan)]
    return " + ".join(f"{times}{count:,}" for times, count in runs)


def borrowed(plan: Plan) -> list[str]:
    """Layers without a cache of their own, one line for each layer that lends it, and one for those without any."""
    readers: dict[str, list[str]] = {}
    for layer, owner in plan.aliases.items():
        readers.setdefault(owner, []).append(layer)
    lines = [f"{layer_range(layers)} read the cache of {owner}" for owner, layers in readers.items()]
    if len(lines) > 6:
        lines[5:] = [f"... and {len(lines) - 5} more layers whose cache others read"]
    return lines + [f"no cache: {layer_range(plan.uncached)}"] * bool(plan.uncached)


def explain_plan(plan: Plan) -> str:
    """Readable text: groups, their places, every layout and grouping compared, bounds, waste, capacity."""
    if not plan.placements:
        blocks = "1 block (the null block)" if plan.num_frames == 1 else f"{plan.num_frames:,} blocks counted"
        what = f"No layer keeps a cache: {plan.arena_bytes} B, {blocks}."
        empty = [f"  group {group.name}: no layer here" for group in plan.groups]
        return "\n".join([what, *empty, *(f"  {line}" for line in borrowed(plan))])
    parts = (_groups, _layout, _layouts_compared, _groupings_compared, _bytes, _capacity)
    return "\n\n".join("\n".join(lines) for part in parts if (lines := part(plan)))


def _groups(plan: Plan) -> list[str]:
    lines = [f"Groups ({len(plan.groups)}, grouping {plan.grouping}): layers that allocate and free together"]
    for run in alike(plan):
        group, stride = plan.groups[run[0]], plan.block_strides[run[0]]
        layers = [layer for index in run for layer in plan.groups[index].layers]
        each = f"{len(run)} groups, each of " if len(run) > 1 else ""
        lines.append(
            f"  {group_range([plan.groups[index].name for index in run])}: {each}"
            f"{counted(len(group.layers), 'layer')}, {reach(group)}, {group.block_size} tokens a block"
        )
        if not layers:
            lines.append(f"    no layer here, and a block of it takes {stride:,} B all the same")
            continue
        lines += [
            f"    {layer_range(layers)}; rows {rows_of(group.layers.values())}{'; draft' * group.holds_draft}",
            f"    pages of one block {group.block_bytes:,} B: rows {group.payload_bytes:,} B, padding "
            f"{group.block_bytes - group.payload_bytes:,} B; waste {stride - group.block_bytes:,} B of {stride:,} B "
            f"({(stride - group.block_bytes) / stride:.1%})",
        ]
    return lines + [f"  {line}" for line in borrowed(plan)]


def _layout(plan: Plan) -> list[str]:
    if plan.layout in ("buckets", "bestfit"):
        return _slots(plan)
    unit = "frames" if plan.layout == "frames" else "blocks"
    lines = [
        f"Layout {plan.layout}: 1 slot tensor of {plan.num_frames:,} {unit} of {plan.frame_bytes:,} B, "
        "the pages of a group dense from byte 0 of its block"
    ]
    if plan.layout == "frames":
        share = f"1/{FRAME_SHARE} of the memory ({plan.arena_bytes // FRAME_SHARE:,} B)"
        lines.append(f"  a frame takes at most {share}, or one block of the widest group where that is more")
    for run in alike(plan):
        group, stride, per_frame = plan.groups[run[0]], plan.block_strides[run[0]], plan.blocks_per_frame[run[0]]
        many = f"{counted(per_frame, 'block')} a frame, " if plan.layout == "frames" else ""
        lines.append(f"  {group_range([plan.groups[index].name for index in run])}: {many}block stride {stride:,} B")
        for first, end, layers, spec in page_runs(plan, run[0]):
            pages = f"pages of {spec.page_bytes:,} B, {rows_of([spec])}"
            lines.append(f"    bytes {first:,} ... {end - 1:,}: {layer_range(layers)}, {pages}")
        if group.block_bytes < stride:
            lines.append(f"    bytes {group.block_bytes:,} ... {stride - 1:,}: unused")
    return lines


def _slots(plan: Plan) -> list[str]:
    lines = [
        f"Layout {plan.layout}: {counted(len(plan.layer_slots), 'layer slot')}, "
        f"each with a tensor of {plan.num_frames:,} pages"
    ]
    noun = "bucket" if plan.layout == "buckets" else "ranks"
    for page_bytes, runs in groupby(slot_runs(plan), key=lambda run: run.page_bytes):
        members = list(runs)
        many = sum(run.last - run.first + 1 for run in members)
        pages = f"{noun} of {page_bytes:,} B pages x {counted(many, 'layer slot')}"
        lines.append(f"  {pages} = {page_bytes * many:,} B a block")
        for run in members:
            waste = "".join(f"; waste {waste:,} B in blocks of {group_range(names)}" for waste, names in run.waste)
            users = f"{layer_range(run.layers)} of {group_range(run.groups)}"
            lines.append(f"    layer slot {slot_range(run)}: {users}{waste}")
    return lines


def _exact(num_bytes: int, own: int) -> str:
    return f"{num_bytes:,} B ({percent_over(num_bytes, own)})"


def _layouts_compared(plan: Plan) -> list[str]:
    if not plan.considered:
        return []
    missing = [layout for layout in LAYOUTS if layout not in {entry.layout for entry in plan.considered}]
    return [
        "Layouts compared: bytes of one sequence, over its own pages",
        *aligned(compared(plan, looked_at(plan), _exact)),
        f"  * taken: {why_taken(plan)}",
        *([f"  not looked at: {', '.join(missing)}"] if missing else []),
    ]


def _groupings_compared(plan: Plan) -> list[str]:
    columns, problems = regrouped(plan)
    if not worth_comparing(columns, problems):
        return []
    return [
        "Groupings compared: the plan's layers in the layout overlay, bytes of one sequence, over its own pages",
        *aligned(compared(plan, columns, _exact)[:-1]),
        *(f"  {line}" for line in problems),
    ]


def _bytes(plan: Plan) -> list[str]:
    strides = sorted(set(plan.block_strides))
    this = f"{strides[0]:,} B" + (f" ... {strides[-1]:,} B, by group" if len(strides) > 1 else "")
    return [
        "Bytes per block of these groups, over the lower bound",
        *aligned([[name, f"{size:,} B", percent_over(size, plan.lower_bound)] for name, size in bounds(plan.groups)]),
        f"  this layout ({plan.layout}): {this} ({percent_over(strides[-1], plan.lower_bound)})",
    ]


def _capacity(plan: Plan) -> list[str]:
    flight = plan.max_tokens_in_flight
    longest = longest_sequence(plan, plan.num_frames, InFlight(flight))
    unit = "frame" if plan.layout == "frames" else "block"
    lines = [
        f"Capacity of {format_bytes(plan.arena_bytes)}: {counted(plan.num_frames, unit)}, one of them the null {unit}"
        + (f"; while a step has up to {counted(flight, 'token')} of one sequence in flight" if flight else ""),
        "  longest sequence alone: " + ("any length" if longest is None else counted(longest, "token")),
    ]
    for length in plan.lengths:
        fits = capacity(plan, length, InFlight(flight))
        lines += [
            f"  {counted(length, 'token')}: {counted(fits.num_sequences, 'sequence')} at once "
            f"({counted(fits.num_tokens, 'token')}), each of {counted(sum(fits.blocks), 'block')} "
            f"({blocks_text(plan, fits.blocks)})",
            f"    one takes {format_bytes(fits.num_bytes)}, its rows {format_bytes(sequence_bytes(plan, length)[1])}",
        ]
        for stored in STORED if flight else ():
            busy = blocks_per_group(plan.groups, length, InFlight(flight, stored))
            held = f"{counted(sum(busy), 'block')} ({blocks_text(plan, busy)})"
            lines.append(f"    with {min(flight, length):,} of its tokens in flight, stored {stored!r}: {held}")
    return lines
