"""The best plan there is, by looking at all: every way to group, every layout, every size of a frame.

What is minimised is the mean over the lengths of bytes allocated / bytes of the sequence's own pages. Two bounds cut
the search, and neither loses a plan: a block takes no less than the widest group where a block is a frame, and no less
than its own pages, rounded up to the stride demand, where it is not.

Frames: with m blocks in a frame of F bytes a block takes F / m, and the most blocks that divide F leave the least
divisor of F that holds the pages. So every F is found from the block strides of one group, least stride first, as the
multiples of that stride up to the cap; once that stride alone costs more than the best plan, no F is left.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, lcm

import numpy as np
import numpy.typing as npt

from kvstore.choose import MAX_GROUPS
from kvstore.demand import blocks_of_sequence
from kvstore.frames import max_frame_bytes
from kvstore.grouping import Layers, deal_layers, layers_by_type
from kvstore.specs import LayerSpec
from kvstore_kernels.checks import cdiv, round_up

MAX_FIXED_GROUPS = 40
"""Groups that a type of rings or states is dealt to, at most; they do not count towards MAX_GROUPS."""

BETTER = 1 - 1e-12
"""A plan is better than another when its score is below this part of the other's: less is rounding."""

_CHUNKS = (1 << 12, 1 << 20)  # frames looked at together: few at first, since a good one makes the rest cheap

Numbers = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan: `score` is what was minimised, `counts` the number of groups of each type."""

    score: float
    layout: str
    counts: tuple[int, ...]
    frame_bytes: int


@dataclass(frozen=True)
class Group:
    """A group to be. `weight`: mean over the lengths of its blocks / bytes of the sequence's own pages."""

    specs: tuple[LayerSpec, ...]
    weight: float

    @cached_property
    def width(self) -> int:
        """Bytes of the pages of a block."""
        return sum(spec.page_bytes for spec in self.specs)

    @cached_property
    def multiple(self) -> int:
        """What its block stride must be a multiple of."""
        return lcm(*(spec.stride_multiple for spec in self.specs))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Groups of equal width and demand: a block takes `least` units of `unit_bytes` or more, each at a price."""

    unit_bytes: int
    least: int
    price: float

    @property
    def floor(self) -> float:
        return self.price * self.least


def ways_to_count(types: Sequence[Layers]) -> list[tuple[int, ...]]:
    """Every tuple of numbers of groups, one for each type."""
    fixed = [_first(layers).retention.is_fixed for layers in types]
    most = max(MAX_GROUPS, fixed.count(False))
    options = [
        range(1, min(len(layers), MAX_FIXED_GROUPS if is_fixed else most) + 1)
        for layers, is_fixed in zip(types, fixed, strict=True)
    ]
    return [
        counts
        for counts in product(*options)
        if sum(count for count, is_fixed in zip(counts, fixed, strict=True) if not is_fixed) <= most
    ]


def search(specs: Mapping[str, LayerSpec], lengths: Sequence[int], memory: int) -> Optimum:
    """The best of all plans of these layers for `memory` bytes, which caps the size of a frame."""
    types = layers_by_type(specs)
    weights = _weights(types, lengths)
    dealt: dict[tuple[int, int], list[Group]] = {}
    for index, layers in enumerate(types):
        for count in {way[index] for way in ways_to_count(types)}:
            parts = deal_layers(layers, count)
            dealt[index, count] = [Group(tuple(part.values()), weights[index]) for part in parts if part]
    ways = {counts: [group for key in enumerate(counts) for group in dealt[key]] for counts in ways_to_count(types)}
    best = Optimum(inf, "", (), 0)
    for counts, groups in ways.items():
        best = min(best, _best_in_blocks(groups, counts, best.score * BETTER), key=_score)
    for counts, groups in ways.items():
        best = min(best, _best_in_frames(groups, counts, best.score * BETTER, memory), key=_score)
    return best


def block_bytes(groups: Sequence[Group]) -> dict[str, int]:
    """Bytes of a block in each layout where a block is a frame."""
    ranked = [sorted(group.specs, key=lambda spec: (-spec.page_bytes, -spec.stride_multiple)) for group in groups]
    bestfit = 0
    for rank in range(max(map(len, ranked))):
        here = [specs[rank] for specs in ranked if rank < len(specs)]
        bestfit += round_up(max(spec.page_bytes for spec in here), lcm(*(spec.stride_multiple for spec in here)))
    slots: Counter[int] = Counter()
    for group in groups:
        slots |= Counter(round_up(spec.page_bytes, spec.stride_multiple) for spec in group.specs)
    return {
        "buckets": sum(size * count for size, count in slots.items()),
        "bestfit": bestfit,
        "overlay": round_up(max(group.width for group in groups), lcm(*(group.multiple for group in groups))),
    }


def _best_in_blocks(groups: Sequence[Group], counts: tuple[int, ...], limit: float) -> Optimum:
    """The best layout where a block is a frame; not worked out where the widest group alone exceeds the limit."""
    weight = sum(group.weight for group in groups)
    if weight * max(group.width for group in groups) >= limit:
        return Optimum(inf, "", counts, 0)
    layout, size = min(block_bytes(groups).items(), key=lambda entry: entry[1])
    return Optimum(weight * size, layout, counts, size)


def _best_in_frames(groups: Sequence[Group], counts: tuple[int, ...], limit: float, memory: int) -> Optimum:
    """The best frame, if there is one with a score below the limit."""
    weight_of: defaultdict[tuple[int, int], float] = defaultdict(float)
    for group in groups:
        weight_of[group.width, group.multiple] += group.weight
    kinds = [
        _Kind(multiple, cdiv(width, multiple), weight * multiple) for (width, multiple), weight in weight_of.items()
    ]
    lead, *others = sorted(kinds, key=lambda kind: -kind.floor)
    frame_unit = lcm(*(kind.unit_bytes for kind in kinds))
    best = Optimum(limit, "frames", counts, 0)
    most = max_frame_bytes(memory, max(group.width for group in groups)) // frame_unit
    rest = sum(kind.floor for kind in others)
    frames = _frames_by_stride(lead, frame_unit // lead.unit_bytes, most)
    for sizes, strides in frames:
        if lead.price * int(strides[0]) + rest >= best.score:
            break
        sizes, costs = _add_others(
            sizes, np.asarray(lead.price * strides + rest, dtype=np.float64), others, frame_unit, best.score
        )
        if len(costs) and costs.min() < best.score:
            at = int(costs.argmin())
            best = Optimum(float(costs[at]), "frames", counts, int(sizes[at]) * frame_unit)
    return best if best.frame_bytes else Optimum(inf, "", counts, 0)


def _frames_by_stride(lead: _Kind, ratio: int, most: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Frames of at most `most` units, and the leading group's stride in its own, `ratio` to a unit; strides ascend."""
    first, chunk = lead.least, _CHUNKS[0]
    while first <= most * ratio:
        strides = np.arange(first, min(first + chunk, most * ratio) + 1, dtype=np.int64)
        steps = strides // np.gcd(strides, ratio)
        counts = most // steps
        kept = max(int(np.searchsorted(np.cumsum(counts), chunk, side="right")), 1)
        strides, steps, counts = strides[:kept], steps[:kept], counts[:kept]
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        if len(nth):
            yield np.repeat(steps, counts) * nth, np.repeat(strides, counts)
        first, chunk = first + kept, min(4 * chunk, _CHUNKS[1])


def _add_others(
    sizes: Numbers, costs: Costs, kinds: Sequence[_Kind], frame_unit: int, limit: float
) -> tuple[Numbers, Costs]:
    """The frames below the limit and their costs, once every other group has the least stride that divides them."""
    alive = costs < limit
    sizes, costs = sizes[alive], costs[alive]
    for kind in kinds:
        units = sizes * (frame_unit // kind.unit_bytes)
        most = kind.least + ((limit - costs) / kind.price).astype(np.int64)
        blocks = units // kind.least
        found = np.zeros(len(units), dtype=bool)
        open_ = np.flatnonzero(blocks)
        while len(open_):
            divides = units[open_] % blocks[open_] == 0
            found[open_[divides]] = True
            open_ = open_[~divides]
            blocks[open_] -= 1
            open_ = open_[blocks[open_] * most[open_] >= units[open_]]  # 0 blocks are below it too
        sizes, units, blocks, costs = sizes[found], units[found], blocks[found], costs[found]
        costs = costs + kind.price * (units // blocks - kind.least)
        alive = costs < limit
        sizes, costs = sizes[alive], costs[alive]
    return sizes, costs


def _weights(types: Sequence[Layers], lengths: Sequence[int]) -> list[float]:
    blocks = [
        [blocks_of_sequence(_first(layers).retention, _first(layers).block_size, length) for length in lengths]
        for layers in types
    ]
    widths = [sum(spec.page_bytes for spec in layers.values()) for layers in types]
    own = [sum(row[index] * width for row, width in zip(blocks, widths, strict=True)) for index in range(len(lengths))]
    return [sum(count / size for count, size in zip(row, own, strict=True)) / len(own) for row in blocks]


def _first(layers: Layers) -> LayerSpec:
    return next(iter(layers.values()))


def _score(optimum: Optimum) -> float:
    return optimum.score
