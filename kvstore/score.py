"""What groups cost in a layout: bytes per sequence, and the score by which choices are compared.

    score = mean over the lengths of (bytes allocated / bytes of the pages) + GROUP_PRICE x groups + share held back

The last term is the null frame and, where several blocks share a frame, half a frame per group, as a share of the
memory: frames that are only partly used.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf, lcm

import numpy as np

from kvstore.demand import MAX_TOKENS, blocks_of_sequence
from kvstore.errors import PlanError, plan_int
from kvstore.frames import blocks_in_frame, choose_frame, held_back
from kvstore.grouping import Layers
from kvstore.groups import CacheGroup
from kvstore.placement import rank_order
from kvstore.specs import LayerSpec
from kvstore_kernels.checks import round_up

LAYOUTS = ("buckets", "bestfit", "overlay", "frames")
"""In the order of preference: within `LAYOUT_TOLERANCE` of the least score the earlier one is taken."""

LENGTHS = (1024, 8192, 131072)
"""Sequence lengths, in tokens, for which a plan is made unless others are named."""

GROUP_PRICE = 0.002
"""What one more group has to save, as a share of the bytes of the pages: each costs host time in every step."""

LAYOUT_TOLERANCE = 1.01

MAX_DEMAND_BYTES = 2**40
"""Up to which stride demands may combine."""


@dataclass(frozen=True, slots=True)
class Considered:
    """One layout at its best: how many groups, what a frame takes, and what a sequence of each length allocates.

    `bytes_per_sequence` counts blocks x block stride between steps; `score` is what was compared.
    """

    layout: str
    num_groups: int
    frame_bytes: int
    blocks_per_frame: tuple[int, ...]
    bytes_per_sequence: tuple[int, ...]
    score: float

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise PlanError(f"Considered: layout: expected one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        for name in ("num_groups", "frame_bytes"):
            plan_int(f"Considered: {name}", getattr(self, name), 0)
        for number in (*self.blocks_per_frame, *self.bytes_per_sequence):
            plan_int("Considered: blocks_per_frame, bytes_per_sequence", number, 0)
        if not isinstance(self.score, float) or not 0 <= self.score < inf:
            raise PlanError(f"Considered: score: expected a number >= 0, got {self.score!r}")


@dataclass(frozen=True)
class Part:
    """The figures of a group to be: pages by size, and the blocks of a sequence of each length."""

    layers: Layers
    is_fixed: bool
    blocks: tuple[int, ...]

    @cached_property
    def width(self) -> int:
        return sum(spec.page_bytes for spec in self.layers.values())

    @cached_property
    def ranks(self) -> list[tuple[int, int, int]]:
        """Runs of equal layers in rank order: (first rank behind it, page bytes, stride demand)."""
        counts = Counter(sorted(map(rank_order, self.layers.values())))
        ends = accumulate(counts.values())
        return [(end, -page, -multiple) for end, (page, multiple) in zip(ends, counts, strict=True)]

    @cached_property
    def strides(self) -> Counter[int]:
        return Counter(spec.dense_stride_bytes for spec in self.layers.values())

    @cached_property
    def multiple(self) -> int:
        return lcm(*(spec.stride_multiple for spec in self.layers.values()))


def preferred(considered: Sequence[Considered], reference: Considered | None = None) -> Considered:
    """Of those within `LAYOUT_TOLERANCE` of the least score the first, in the order of layouts.

    With a `reference`: the first that at no length allocates more than it, if there is one.
    """
    near = within_tolerance(considered)
    return next((entry for entry in near if reference and is_below(entry, reference)), near[0])


def within_tolerance(considered: Sequence[Considered]) -> list[Considered]:
    """Those whose score is within `LAYOUT_TOLERANCE` of the least."""
    least = min(entry.score for entry in considered)
    return [entry for entry in considered if entry.score <= least * LAYOUT_TOLERANCE]


def is_below(entry: Considered, reference: Considered) -> bool:
    """Whether a sequence of no length allocates more."""
    pairs = zip(entry.bytes_per_sequence, reference.bytes_per_sequence, strict=True)
    return all(mine <= theirs for mine, theirs in pairs)


def consider(
    groups: Sequence[CacheGroup],
    layout: str,
    lengths: Sequence[int],
    memory: int | None,
    frame_bytes: int | None = None,
) -> Considered:
    """The figures of given groups in one layout; in "frames" with frames of `frame_bytes`, if that is given.

    Raises: PlanError when a frame of that size does not hold one block of each group, or breaks a stride demand.
    """
    parts = parts_of(groups, lengths)
    if frame_bytes is not None:
        return figures(parts, layout, frame_bytes, blocksin_frames(groups, frame_bytes), memory)
    return in_frames(parts, memory) if layout == "frames" else in_blocks(parts, layout, memory)


def parts_of(groups: Sequence[CacheGroup], lengths: Sequence[int]) -> list[Part]:
    """The figures of groups that are settled. Raises: PlanError as `check_demands`."""
    check_demands(spec for group in groups for spec in group.layers.values())
    return [
        Part(
            dict(group.layers),
            group.retention.is_fixed,
            tuple(blocks_of_sequence(group.retention, group.block_size, length) for length in lengths),
        )
        for group in groups
    ]


def blocksin_frames(groups: Sequence[CacheGroup], frame_bytes: int) -> tuple[int, ...]:
    """The most blocks of each group in a frame of that size. Raises: PlanError as `consider`."""
    for group in groups:
        if frame_bytes < group.block_bytes or frame_bytes % group.stride_multiple:
            raise PlanError(
                f"frame_bytes: expected at least the {group.block_bytes} B of a block of group {group.name!r} and a "
                f"multiple of its stride demand, {group.stride_multiple} B, got {frame_bytes}"
            )
    return tuple(blocks_in_frame(frame_bytes, group.block_bytes, group.stride_multiple) for group in groups)


def in_blocks(parts: Sequence[Part], layout: str, memory: int | None, own: Sequence[int] | None = None) -> Considered:
    """The figures of a layout in which a block is a frame."""
    return figures(parts, layout, _BLOCK_BYTES[layout](parts), (1,) * len(parts), memory, own)


def in_frames(parts: Sequence[Part], memory: int | None) -> Considered:
    """The figures of the best frame."""
    frame = choose_frame([part.width for part in parts], [part.multiple for part in parts], weights(parts), memory)
    return figures(parts, "frames", frame.frame_bytes, frame.blocks_per_frame, memory)


def figures(
    parts: Sequence[Part],
    layout: str,
    frame_bytes: int,
    blocks_per_frame: tuple[int, ...],
    memory: int | None,
    own: Sequence[int] | None = None,
) -> Considered:
    """What sequences of each length allocate, and the score; see `score_of`."""
    allocated, score = score_of(parts, frame_bytes, blocks_per_frame, memory, own)
    return Considered(layout, len(parts), frame_bytes, blocks_per_frame, allocated, score)


def score_of(
    parts: Sequence[Part],
    frame_bytes: int,
    blocks_per_frame: tuple[int, ...],
    memory: int | None,
    own: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], float]:
    """Bytes allocated per length and the score, over `own` bytes per length, else the parts' own pages."""
    strides = [frame_bytes // blocks for blocks in blocks_per_frame]
    own = own_bytes(parts) if own is None else own
    allocated = tuple(
        sum(part.blocks[length] * stride for part, stride in zip(parts, strides, strict=True))
        for length in range(len(own))
    )
    excess = sum(a / o if o else 1.0 for a, o in zip(allocated, own, strict=True)) / len(own)
    held = held_back(memory, frame_bytes, len(parts), max(blocks_per_frame))
    return allocated, excess + GROUP_PRICE * num_counted(parts) + held


def weights(parts: Sequence[Part]) -> list[list[float]]:
    """Per length and group: the blocks of a sequence, as shares of its own pages; see `choose_frame`."""
    return [[part.blocks[length] / (own or 1) for part in parts] for length, own in enumerate(own_bytes(parts))]


def own_bytes(parts: Sequence[Part]) -> list[int]:
    """Bytes of the pages that a sequence of each length holds."""
    return [sum(part.blocks[length] * part.width for part in parts) for length in range(len(parts[0].blocks))]


def num_counted(parts: Sequence[Part]) -> int:
    """Groups that count toward the cap and the price."""
    return sum(not part.is_fixed for part in parts)


def _buckets_bytes(parts: Sequence[Part]) -> int:
    most: dict[int, int] = {}
    for part in parts:
        for size, count in part.strides.items():
            most[size] = max(most.get(size, 0), count)
    return sum(size * count for size, count in most.items())


def _bestfit_bytes(parts: Sequence[Part]) -> int:
    """Sum over runs of ranks in which every group stays with one kind of page."""
    total = begin = 0
    for end in sorted({end for part in parts for end, _, _ in part.ranks}):
        here = [next((run for run in part.ranks if run[0] >= end), None) for part in parts]
        widest = max(run[1] for run in here if run is not None)
        total += (end - begin) * round_up(widest, lcm(*(run[2] for run in here if run is not None)))
        begin = end
    return total


def _overlay_bytes(parts: Sequence[Part]) -> int:
    return round_up(max(part.width for part in parts), lcm(*(part.multiple for part in parts)))


_BLOCK_BYTES = {"buckets": _buckets_bytes, "bestfit": _bestfit_bytes, "overlay": _overlay_bytes}


def check_demands(specs: Iterable[LayerSpec]) -> None:
    """Raises PlanError when the stride demands of all layers together leave no block of sensible size."""
    demands = sorted({spec.stride_multiple for spec in specs})
    if lcm(*demands) > MAX_DEMAND_BYTES:
        raise PlanError(
            f"block_stride_multiple: the demands {', '.join(map(str, demands))} B have no common multiple up to "
            f"{MAX_DEMAND_BYTES} B"
        )


def check_lengths(lengths: object) -> tuple[int, ...]:
    """Lengths in tokens, at least one, as ints. Raises: PlanError for anything but a sequence or array of them."""
    if isinstance(lengths, np.ndarray):
        lengths = lengths.tolist()
    if isinstance(lengths, str | bytes) or not isinstance(lengths, Sequence) or not len(lengths):
        raise PlanError(f"lengths: expected at least one number of tokens, got {lengths!r}")
    return tuple(plan_int("lengths", length, 1, MAX_TOKENS) for length in lengths)
