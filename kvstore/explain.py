"""What a plan costs and why: figures about groups and their bytes, and the text that shows them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvstore.groups import CacheGroup
from kvstore.memory import format_bytes
from kvstore.placement import LayerSlot, bucket_layers_by_page_size
from kvstore_kernels.checks import cdiv

LENGTHS = (1024, 8192, 131072)
"""Sequence lengths, in tokens, at which capacity is shown."""


class Plan(Protocol):
    """The part of a CachePlan that is explained."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]: ...
    @property
    def layer_slots(self) -> tuple[LayerSlot, ...]: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def blocks_per_frame(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> str: ...
    @property
    def lower_bound(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many sequences of `length` tokens fit at once, and what one of them holds: `blocks` of each group."""

    length: int
    blocks: tuple[int, ...]
    frames: int
    num_bytes: int
    num_sequences: int


def capacity(plan: Plan, length: int) -> Capacity:
    """The capacity for sequences of `length` tokens between steps; the null frame holds none."""
    blocks = tuple(blocks_per_sequence(group, length) for group in plan.groups)
    frames = sum(cdiv(count, per_frame) for count, per_frame in zip(blocks, plan.blocks_per_frame, strict=True))
    num_sequences = (plan.num_frames - 1) // frames if frames else 0
    return Capacity(length, blocks, frames, frames * plan.frame_bytes, num_sequences)


def blocks_per_sequence(group: CacheGroup, length: int) -> int:
    """The most blocks a sequence of `length` tokens holds: all, or those its last window can touch.

    A window of w tokens need not begin on a block boundary and so touches at most ceil((w - 1) / block) + 1 blocks.
    """
    blocks, window = cdiv(length, group.block_size), group.retention.window
    return blocks if window is None else min(blocks, cdiv(window - 1, group.block_size) + 1)


def longest_sequence(plan: Plan) -> int | None:
    """The tokens of the longest sequence that fits alone; None when it can be of any length (windows only)."""
    usable = plan.num_frames - 1
    widths = [group.block_size * blocks for group, blocks in zip(plan.groups, plan.blocks_per_frame, strict=True)]
    at_least, too_long = 0, usable * max(widths, default=0) + 1
    if capacity(plan, too_long).frames <= usable:
        return None
    while too_long - at_least > 1:
        middle = (at_least + too_long) // 2
        if capacity(plan, middle).frames <= usable:
            at_least = middle
        else:
            too_long = middle
    return at_least


def bytes_before_buckets(groups: Sequence[CacheGroup]) -> int:
    """Bytes per block before vLLM pull request 44454: each page size has as many layer slots as the longest bucket."""
    buckets = bucket_layers_by_page_size(groups)
    return sum(buckets) * max(map(len, buckets.values()), default=0)


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Neighbouring layer slots `first` ... `last` of a bucket in which the same groups have a layer."""

    first: int
    last: int
    groups: tuple[str, ...]
    unused_by: tuple[str, ...]
    layers: tuple[str, ...]


def slot_runs(plan: Plan, page_bytes: int) -> list[SlotRun]:
    """The layer slots of one bucket as runs. A block of a group in `unused_by` wastes the pages of the run."""
    runs: list[SlotRun] = []
    for slot in plan.layer_slots:
        if slot.page_bytes != page_bytes:
            continue
        uses = {group.name: not group.layers.keys().isdisjoint(slot.layers) for group in plan.groups}
        groups = tuple(name for name, used in uses.items() if used)
        if runs and runs[-1].groups == groups:
            runs[-1] = replace(runs[-1], last=slot.index, layers=runs[-1].layers + slot.layers)
        else:
            unused_by = tuple(name for name, used in uses.items() if not used)
            runs.append(SlotRun(slot.index, slot.index, groups, unused_by, slot.layers))
    return runs


def bucket_sizes(plan: Plan) -> dict[int, int]:
    """Page bytes -> number of layer slots."""
    return Counter(slot.page_bytes for slot in plan.layer_slots)


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "1,024 layers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def reach(group: CacheGroup) -> str:
    """Which rows the group keeps: "full", "window 1,024"."""
    return "full" if group.retention.window is None else f"window {group.retention.window:,}"


def layer_range(layers: Sequence[str]) -> str:
    """One or two names as they are, more as "first ... last (how many)"."""
    return ", ".join(layers) if len(layers) <= 2 else f"{layers[0]} ... {layers[-1]} ({len(layers)})"


def slot_range(run: SlotRun) -> str:
    """The slots of a run by number: "0", "0 ... 7"."""
    return f"{run.first}" if run.first == run.last else f"{run.first} ... {run.last}"


def percent_over(value: int, base: int) -> str:
    """How far `value` lies above `base`: "+15.7 %"."""
    return f"{100 * (value - base) / base:+.1f} %" if base else "+0.0 %"


def explain_plan(plan: Plan) -> str:
    """Readable text: groups, buckets and layer slots, bytes per block beside their bounds, waste, capacity."""
    if not plan.groups:
        return f"No layer keeps a cache: {plan.arena_bytes} B, {plan.num_frames} block (the null block)."
    return "\n".join([*_groups(plan), "", *_buckets(plan), "", *_bytes(plan), "", *_capacity(plan)])


def _groups(plan: Plan) -> list[str]:
    lines = [f"Groups ({len(plan.groups)}): layers that allocate and free together"]
    for group in plan.groups:
        lines += [
            f"  {group.name}: {counted(len(group.layers), 'layer')}, {reach(group)}, {group.block_size} tokens a block",
            f"    {layer_range(list(group.layers))}",
            f"    pages of one block {group.block_bytes:,} B: rows {group.payload_bytes:,} B, "
            f"padding {group.block_bytes - group.payload_bytes:,} B; "
            f"waste {plan.frame_bytes - group.block_bytes:,} B of {plan.frame_bytes:,} B",
        ]
    return lines


def _buckets(plan: Plan) -> list[str]:
    lines = [
        f"Layout {plan.layout}: {counted(len(plan.layer_slots), 'layer slot')}, "
        f"each with a tensor of {plan.num_frames:,} pages"
    ]
    for page_bytes, num_slots in bucket_sizes(plan).items():
        lines.append(
            f"  bucket of {page_bytes:,} B pages x {counted(num_slots, 'layer slot')} = "
            f"{page_bytes * num_slots:,} B a block"
        )
        for run in slot_runs(plan, page_bytes):
            waste = (run.last - run.first + 1) * page_bytes
            unused = f"; waste {waste:,} B in blocks of {', '.join(run.unused_by)}" if run.unused_by else ""
            lines.append(
                f"    layer slot {slot_range(run)}: {layer_range(run.layers)} of {', '.join(run.groups)}{unused}"
            )
    return lines


def _bytes(plan: Plan) -> list[str]:
    before = bytes_before_buckets(plan.groups)
    return [
        "Bytes per block",
        f"  this layout ({plan.layout}): {plan.frame_bytes:,} B "
        f"({percent_over(plan.frame_bytes, plan.lower_bound)} over the lower bound)",
        f"  lower bound (the widest group): {plan.lower_bound:,} B",
        f"  rule before vLLM PR #44454 (every page size as often as the longest bucket): {before:,} B "
        f"({percent_over(before, plan.lower_bound)})",
    ]


def _capacity(plan: Plan) -> list[str]:
    longest = longest_sequence(plan)
    lines = [
        f"Capacity of {format_bytes(plan.arena_bytes)}: {plan.num_frames:,} blocks, of which 1 is the null block",
        "  longest sequence alone: " + ("any length" if longest is None else f"{longest:,} tokens"),
    ]
    for length in LENGTHS:
        fits = capacity(plan, length)
        lines.append(
            f"  {length:,} tokens: {counted(fits.num_sequences, 'sequence')} at once, each of "
            f"{counted(fits.frames, 'block')} ({' + '.join(f'{count:,}' for count in fits.blocks)}), "
            f"{format_bytes(fits.num_bytes)}"
        )
    return lines
