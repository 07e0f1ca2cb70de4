"""The default grouping and layout: the least bytes per sequence, plus a price per group.

Layers of one type (`layers_by_type`) may be dealt to several groups, because narrower groups fit each other better
where a block is a frame. Every way to do that with at most `MAX_GROUPS` groups is looked at, in every layout. Groups
whose sequences hold the same few blocks for ever (rings, states) are cut as the others force and do not count.

What is compared is the score of `kvstore.score`. Where the layout "frames" is not among those compared and nobody
named a block size, groups with equal pages compete too (grouping "equal"): larger blocks are then the lesser evil.

No single odd layer can blow this up: it is a type of its own, and the number of groups of the others is free. The
packed groups of vLLM's own rule compete too. Of layouts within 1 % of the least score, the first that at none of the
lengths allocates more than that rule is taken, else the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

from kvstore.demand import blocks_of_sequence
from kvstore.errors import PlanError
from kvstore.frames import max_frame_bytes
from kvstore.grouping import STRATEGIES, Layers, deal_groups, deal_layers, groups_within, layers_by_type
from kvstore.groups import CacheGroup, cached_layers
from kvstore.memory import parse_memory
from kvstore.score import (
    LAYOUTS,
    LENGTHS,
    Considered,
    Part,
    check_demands,
    check_lengths,
    consider,
    in_blocks,
    in_frames,
    own_bytes,
    parts_of,
    preferred,
    score_of,
)
from kvstore.specs import AnySpec, LayerSpec

GROUPINGS = ("auto", *STRATEGIES)

MAX_GROUPS = 8
"""Groups that `auto` makes at most, those with a fixed number of blocks aside; more types than that stay apart."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups and the layout taken, and every layout that was looked at, in the order of `LAYOUTS`."""

    groups: tuple[CacheGroup, ...]
    taken: Considered
    considered: tuple[Considered, ...]


def group_layers(
    specs: Mapping[str, AnySpec],
    grouping: str = "auto",
    *,
    lengths: Sequence[int] = LENGTHS,
    layout: str = "auto",
    memory: int | str | None = None,
) -> list[CacheGroup]:
    """Groups of the layers that own a cache, by a named strategy or, with "auto", the best.

    Args:
        specs: layer names with their specs.
        grouping: "uniform" one group per block size and retention; "equal" groups of equally many layers with equal
            pages, and "packed" groups of about equal bytes with mixed pages, as vLLM 0.33 makes them; or "auto", the
            groups of the plan that `plan_cache` makes for the arguments below.
        lengths: tokens of the sequences that are expected.
        layout: as `plan_cache`.
        memory: bytes, or text such as "80GiB"; None: it does not matter.

    Raises: PlanError for an unknown grouping or layout, and specs that are no mapping of names to specs.
    """
    owners = cached_layers(specs).owners
    lengths = check_lengths(lengths)
    budget = None if memory is None else parse_memory(memory)
    if grouping not in GROUPINGS:
        raise PlanError(f"grouping: expected one of {', '.join(GROUPINGS)}, got {grouping!r}")
    if layout not in ("auto", *LAYOUTS):
        raise PlanError(f"layout: expected one of auto, {', '.join(LAYOUTS)}, got {layout!r}")
    if grouping != "auto":
        return STRATEGIES[grouping](owners)
    if not owners:
        return []
    return list(choose(owners, LAYOUTS if layout == "auto" else (layout,), lengths, budget).groups)


def choose(
    specs: Mapping[str, LayerSpec],
    layouts: Sequence[str],
    lengths: Sequence[int],
    memory: int | None,
    *,
    may_grow_blocks: bool = False,
) -> Choice:
    """The grouping and layout with the least score. `memory` in bytes caps the size of a frame.

    With `may_grow_blocks` groups with equal pages compete where "frames" is not among the layouts.
    """
    check_demands(specs.values())
    types = layers_by_type(specs)
    dealer = _Dealer(types, lengths)
    best: dict[str, Found] = {}
    for layout in layouts:
        best[layout] = (
            _best_in_frames(dealer, memory) if layout == "frames" else _best_in_blocks(dealer, layout, memory)
        )
    packed, equal = _within_cap("packed", specs), []
    if may_grow_blocks and "frames" not in layouts:
        equal = _within_cap("equal", specs)
    whole: dict[str, list[CacheGroup]] = {}
    own = own_bytes(dealer.parts((1,) * len(types)))
    for groups in filter(None, (packed, equal)):
        parts = parts_of(groups, lengths)
        for layout in (layout for layout in layouts if layout != "frames"):
            entry = in_blocks(parts, layout, memory, own)
            if entry.score < best[layout][0].score:
                best[layout], whole[layout] = (entry, ()), groups
    considered = tuple(entry for entry, _ in best.values())
    reference = consider(packed, "overlay", lengths, memory) if packed else None
    taken = preferred(considered, reference)
    groups = whole.get(taken.layout) or deal_groups(zip(types, best[taken.layout][1], strict=True))
    return Choice(tuple(groups), taken, considered)


def _within_cap(strategy: str, specs: Mapping[str, LayerSpec]) -> list[CacheGroup]:
    """The groups of a named strategy; none with one type, where all rules agree, if they are too many, or cannot be."""
    if len(layers_by_type(specs)) <= 1:
        return []
    try:
        groups = STRATEGIES[strategy](specs)
    except PlanError:
        return []
    return groups if sum(not group.retention.is_fixed for group in groups) <= MAX_GROUPS else []


Found = tuple[Considered, tuple[int, ...]]
"""The figures of a way to group, and its number of groups of each type; () stands for a named strategy's groups."""


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
            found.append((score_of(parts, block_bytes, (1,) * len(parts), None)[1], counts))
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
        entry = in_blocks(dealer.parts(counts), layout, memory)
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
            here.append((in_frames(dealer.parts(counts), memory), counts))
        best = min(here, key=lambda entry: entry[0].score)
        if found is not None and best[0].score >= found[0].score:
            break
        found = best
    assert found is not None
    return found
