"""The default grouping and layout: the least bytes per sequence, plus a price per group.

Layers of one type (`layers_by_type`) may be dealt to several groups, because narrower groups fit each other better
where a block is a frame. Every way to do that with at most `MAX_GROUPS` groups is looked at, in every layout. Groups
whose sequences hold the same few blocks for ever (rings, states) are cut as the others force and do not count.

    score = mean over the lengths of (bytes allocated / bytes of the pages) + GROUP_PRICE x groups + share held back

The last term is the null frame and, where several blocks share a frame, half a frame per group, as a share of the
memory: frames that are only partly used.

No single odd layer can blow this up: it is a type of its own, and the number of groups of the others is free. A layout
that allocates more than vLLM's own rule, within the cap, at any of the lengths is passed over, even when its mean is
less.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, product
from math import lcm

from kvstore.demand import blocks_of_sequence
from kvstore.errors import PlanError, plan_int
from kvstore.frames import blocks_in_frame, choose_frame, held_back, max_frame_bytes
from kvstore.grouping import STRATEGIES, Layers, deal_groups, deal_layers, groups_within, layers_by_type
from kvstore.groups import CacheGroup, cached_layers
from kvstore.placement import rank_order
from kvstore.specs import AnySpec, LayerSpec
from kvstore_kernels.checks import round_up

LAYOUTS = ("buckets", "bestfit", "overlay", "frames")
"""In the order of preference: within `LAYOUT_TOLERANCE` of the least score the earlier one is taken."""

GROUPINGS = ("auto", *STRATEGIES)

LENGTHS = (1024, 8192, 131072)
"""Sequence lengths, in tokens, for which a plan is made unless others are named."""

MAX_GROUPS = 8
"""Groups that `auto` makes at most, those with a fixed number of blocks aside; more types than that stay apart."""

GROUP_PRICE = 0.002
"""What one more group has to save, as a share of the bytes of the pages: each costs host time in every step."""

LAYOUT_TOLERANCE = 1.01

MAX_DEMAND_BYTES = 2**40
"""Up to which stride demands may combine."""

BOUND = "bound"
"""Stands for a layout in figures that only bound those of a layout."""


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
        if self.layout not in LAYOUTS and self.layout != BOUND:
            raise PlanError(f"Considered: layout: expected one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        for name in ("num_groups", "frame_bytes"):
            plan_int(f"Considered: {name}", getattr(self, name), 0)
        for number in (*self.blocks_per_frame, *self.bytes_per_sequence):
            plan_int("Considered: blocks_per_frame, bytes_per_sequence", number, 0)
        if not isinstance(self.score, float) or self.score < 0:
            raise PlanError(f"Considered: score: expected a number >= 0, got {self.score!r}")


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups and the layout taken, and every layout that was looked at, in the order of `LAYOUTS`."""

    groups: tuple[CacheGroup, ...]
    taken: Considered
    considered: tuple[Considered, ...]


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


def group_layers(
    specs: Mapping[str, AnySpec],
    grouping: str = "auto",
    *,
    lengths: Sequence[int] = LENGTHS,
    layout: str = "auto",
    memory: int | None = None,
) -> list[CacheGroup]:
    """Groups of the layers that own a cache, by a named strategy of `kvstore.grouping` or, with "auto", the best.

    `lengths` (tokens), `layout` and `memory` (bytes) belong to "auto": the groups are those of the plan that
    `plan_cache` makes for them.

    Raises: PlanError for an unknown grouping or layout, and specs that are no mapping of names to specs.
    """
    owners = cached_layers(specs).owners
    if grouping not in GROUPINGS:
        raise PlanError(f"grouping: expected one of {', '.join(GROUPINGS)}, got {grouping!r}")
    if layout not in ("auto", *LAYOUTS):
        raise PlanError(f"layout: expected one of auto, {', '.join(LAYOUTS)}, got {layout!r}")
    if grouping != "auto":
        return STRATEGIES[grouping](owners)
    if not owners:
        return []
    return list(choose(owners, LAYOUTS if layout == "auto" else (layout,), lengths, memory).groups)


def choose(
    specs: Mapping[str, LayerSpec], layouts: Sequence[str], lengths: Sequence[int], memory: int | None
) -> Choice:
    """The grouping and layout with the least score. `memory` in bytes caps the size of a frame."""
    check_demands(specs.values())
    types = layers_by_type(specs)
    dealer = _Dealer(types, lengths)
    best: dict[str, Found] = {}
    for layout in layouts:
        best[layout] = (
            _best_in_frames(dealer, memory) if layout == "frames" else _best_in_blocks(dealer, layout, memory)
        )
    considered = tuple(entry for entry, _ in best.values())
    reference, groups = _reference(specs, lengths, memory)
    below = [entry for entry in considered if not reference or _is_below(entry, reference)]
    if not below and reference and reference.layout in layouts:
        return Choice(tuple(groups), reference, (*considered, reference))
    taken = preferred(below or considered)
    counts = best[taken.layout][1]
    return Choice(tuple(deal_groups(zip(types, counts, strict=True))), taken, considered)


def _reference(
    specs: Mapping[str, LayerSpec], lengths: Sequence[int], memory: int | None
) -> tuple[Considered | None, list[CacheGroup]]:
    """What the rule of vLLM 0.33 allocates: packed groups in an overlay.

    None with one type, where all rules agree, and when these groups are more than the cap.
    """
    groups = STRATEGIES["packed"](specs) if len(layers_by_type(specs)) > 1 else []
    if not groups or sum(not group.retention.is_fixed for group in groups) > MAX_GROUPS:
        return None, []
    return consider(groups, "overlay", lengths, memory), groups


def _is_below(entry: Considered, reference: Considered) -> bool:
    """Whether a sequence of no length allocates more."""
    pairs = zip(entry.bytes_per_sequence, reference.bytes_per_sequence, strict=True)
    return all(mine <= theirs for mine, theirs in pairs)


def check_demands(specs: Iterable[LayerSpec]) -> None:
    """Raises PlanError when the stride demands of all layers together leave no block of sensible size."""
    demands = sorted({spec.stride_multiple for spec in specs})
    if lcm(*demands) > MAX_DEMAND_BYTES:
        raise PlanError(
            f"block_stride_multiple: the demands {', '.join(map(str, demands))} B have no common multiple up to "
            f"{MAX_DEMAND_BYTES} B"
        )


def preferred(considered: Sequence[Considered]) -> Considered:
    """The least score; of those within `LAYOUT_TOLERANCE` of it the earliest layout."""
    least = min(entry.score for entry in considered)
    return next(entry for entry in considered if entry.score <= least * LAYOUT_TOLERANCE)


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
        return figures(parts, layout, frame_bytes, blocks_in_frames(groups, frame_bytes), memory)
    return _in_frames(parts, memory) if layout == "frames" else _in_blocks(parts, layout, memory)


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


def blocks_in_frames(groups: Sequence[CacheGroup], frame_bytes: int) -> tuple[int, ...]:
    """The most blocks of each group in a frame of that size. Raises: PlanError as `consider`."""
    for group in groups:
        if frame_bytes < group.block_bytes or frame_bytes % group.stride_multiple:
            raise PlanError(
                f"frame_bytes: expected at least the {group.block_bytes} B of a block of group {group.name!r} and a "
                f"multiple of its stride demand, {group.stride_multiple} B, got {frame_bytes}"
            )
    return tuple(blocks_in_frame(frame_bytes, group.block_bytes, group.stride_multiple) for group in groups)


Found = tuple[Considered, tuple[int, ...]]
"""The figures of a way to group, and its number of groups of each type."""


class _Dealer:
    """Parts of every (type, number of groups), each worked out once."""

    def __init__(self, types: Sequence[Layers], lengths: Sequence[int]) -> None:
        self.types = types
        self.fixed = [next(iter(layers.values())).retention.is_fixed for layers in types]
        self._blocks = [
            tuple(blocks_of_sequence(spec.retention, spec.block_size, length) for length in lengths)
            for spec in (next(iter(layers.values())) for layers in types)
        ]
        self._parts: dict[tuple[int, int], list[Part]] = {}

    def parts(self, counts: Sequence[int]) -> list[Part]:
        """The groups to be when type t is dealt to `counts[t]` of them."""
        return [part for index, count in enumerate(counts) for part in self._of_type(index, count)]

    def _of_type(self, index: int, count: int) -> list[Part]:
        key = (index, count)
        if key not in self._parts:
            self._parts[key] = [
                Part(layers, self.fixed[index], self._blocks[index]) for layers in deal_layers(self.types[index], count)
            ]
        return self._parts[key]

    @cached_property
    def ways(self) -> list[tuple[int, ...]]:
        """Numbers of groups for each type; 1 stands for those of fixed types, which are cut later."""
        free = self.fixed.count(False)
        spare = max(MAX_GROUPS - free, 0) if len(self.types) > 1 else 0
        options = [
            (1,) if fixed else range(1, min(len(layers), 1 + spare) + 1)
            for layers, fixed in zip(self.types, self.fixed, strict=True)
        ]
        return [counts for counts in product(*options) if sum(counts) <= len(counts) + spare]

    @cached_property
    def bounds(self) -> list[tuple[float, tuple[int, ...]]]:
        """Every way, with fixed types whole and cut to the others' width, and the best its widest group allows."""
        cut = set(self.ways)
        if any(self.fixed):
            for way in self.ways:
                widest = max((part.width for part in self.parts(way) if not part.is_fixed), default=0)
                cut.add(self.cut_fixed(way, widest))
        found = []
        for counts in cut:
            parts = self.parts(counts)
            block_bytes = max(part.width for part in parts)
            found.append((figures(parts, BOUND, block_bytes, (1,) * len(parts), None).score, counts))
        return sorted(found)

    def cut_fixed(self, counts: Sequence[int], most_bytes: int) -> tuple[int, ...]:
        """The same with types of rings and states cut until a group has at most `most_bytes`."""
        return tuple(
            groups_within(layers, most_bytes) if fixed and most_bytes else count
            for layers, fixed, count in zip(self.types, self.fixed, counts, strict=True)
        )


def _best_in_blocks(dealer: _Dealer, layout: str, memory: int | None) -> Found:
    """The best way in a layout where a block is a frame; ways that the widest group rules out are not worked out."""
    found: Found | None = None
    for bound, counts in dealer.bounds:
        if found is not None and bound >= found[0].score:
            break
        entry = _in_blocks(dealer.parts(counts), layout, memory)
        if found is None or entry.score < found[0].score:
            found = entry, counts
    assert found is not None
    return found


def _best_in_frames(dealer: _Dealer, memory: int | None) -> Found:
    """The best way in frames. More groups only smooth the rounding, so the search ends when they no longer gain."""
    found: Found | None = None
    for _, ways in groupby(sorted(dealer.ways, key=sum), key=sum):
        here = []
        for way in ways:
            widest = max((part.width for part in dealer.parts(way) if not part.is_fixed), default=0)
            counts = dealer.cut_fixed(way, max_frame_bytes(memory, widest))
            here.append((_in_frames(dealer.parts(counts), memory), counts))
        best = min(here, key=lambda entry: entry[0].score)
        if found is not None and best[0].score >= found[0].score:
            break
        found = best
    assert found is not None
    return found


def _in_blocks(parts: Sequence[Part], layout: str, memory: int | None) -> Considered:
    return figures(parts, layout, _BLOCK_BYTES[layout](parts), (1,) * len(parts), memory)


def _in_frames(parts: Sequence[Part], memory: int | None) -> Considered:
    frame = choose_frame([part.width for part in parts], [part.multiple for part in parts], weights(parts), memory)
    return figures(parts, "frames", frame.frame_bytes, frame.blocks_per_frame, memory)


def figures(
    parts: Sequence[Part], layout: str, frame_bytes: int, blocks_per_frame: tuple[int, ...], memory: int | None
) -> Considered:
    """What sequences of each length allocate, and the score."""
    strides = [frame_bytes // blocks for blocks in blocks_per_frame]
    own = _own_bytes(parts)
    allocated = tuple(
        sum(part.blocks[length] * stride for part, stride in zip(parts, strides, strict=True))
        for length in range(len(own))
    )
    excess = sum(a / o if o else 1.0 for a, o in zip(allocated, own, strict=True)) / len(own)
    held = held_back(memory, frame_bytes, len(parts), max(blocks_per_frame))
    return Considered(
        layout, len(parts), frame_bytes, blocks_per_frame, allocated, excess + GROUP_PRICE * _counted(parts) + held
    )


def weights(parts: Sequence[Part]) -> list[list[float]]:
    """Per length and group: the blocks of a sequence, as shares of its own pages; see `choose_frame`."""
    return [[part.blocks[length] / (own or 1) for part in parts] for length, own in enumerate(_own_bytes(parts))]


def _own_bytes(parts: Sequence[Part]) -> list[int]:
    """Bytes of the pages that a sequence of each length holds."""
    return [sum(part.blocks[length] * part.width for part in parts) for length in range(len(parts[0].blocks))]


def _counted(parts: Sequence[Part]) -> int:
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
