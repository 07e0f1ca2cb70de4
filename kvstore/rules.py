"""GroupRules: what the books must know of each group of a plan, as numbers over groups.

    full      keeps every block; column i of its table is block i
    window    keeps what the next token reaches: a sliding window, or a chunk
    state     a window of one token: the state after token p stands in block p // block_size, and nothing before it
    ring      one block for ever

A layer of a window-like group with tokens_per_row > 1 does not occur. Layers of a full group may differ in it: then the
group has a *variant*, a slot mapping of its own, for each.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
import numpy.typing as npt

from kvstore.capacity import prefix_units
from kvstore.groups import CacheGroup
from kvstore.plan import CachePlan
from kvstore.specs import LayerSpec

Numbers = npt.NDArray[np.int64]

NEVER = 2**62
"""More tokens than a sequence can have."""

RING_BLOCK = 2**40
"""The block size of a ring, whose only block holds tokens of any position: more than a sequence can have."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Layers of one group with equally many tokens per row: they share a slot mapping."""

    group: int
    tokens_per_row: int
    rows_per_block: int
    is_ring: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store was made for; see `KVStore`."""

    max_sequences: int
    max_length: int
    max_tokens_per_step: int
    max_in_flight: int
    rollback: int = 0


class GroupRules:
    """The groups of a plan as arrays over groups g, variants v, and groups w that let blocks go (windows and states).

    Args:
        plan: any plan.
        limits: of the store.
        tail_only: whether windows store only the rows of a step that a later step can read.
    """

    def __init__(self, plan: CachePlan, limits: Limits, tail_only: bool) -> None:
        groups = plan.groups
        self.names = tuple(group.name for group in groups)
        self.kinds = tuple(group.retention.kind for group in groups)
        self.num_groups = len(groups)
        self.blocks_per_frame = plan.blocks_per_frame
        self.is_ring = np.array([kind == "ring" for kind in self.kinds], bool)
        self.is_state = np.array([kind == "state" for kind in self.kinds], bool)
        self.has_states = bool(self.is_state.any())
        self.is_checkpointed = self.is_state & np.array(
            [any(spec.checkpoint_blocks for spec in group.layers.values()) for group in groups], bool
        )
        sizes = [
            RING_BLOCK if kind == "ring" else group.block_size for kind, group in zip(self.kinds, groups, strict=True)
        ]
        self.block_size = np.array(sizes, np.int64).reshape(-1)
        self.replay = max((group.block_size for group in groups if group.retention.kind == "ring"), default=0)
        self.holds_draft = tuple(group.holds_draft for group in groups)

        self.windows = np.array([g for g, kind in enumerate(self.kinds) if kind not in ("full", "ring")], np.int64)
        self.window_of = np.full(self.num_groups, -1, np.int64)
        self.window_of[self.windows] = np.arange(len(self.windows))
        # The first token in reach of position c is (c - span) // chunk * chunk, chunk being 1 for a window.
        self.span = np.array([_span(groups[g], limits.rollback) for g in self.windows], np.int64)
        self.rollback = limits.rollback
        self.chunk = np.array([groups[g].retention.chunk or 1 for g in self.windows], np.int64)
        self.has_chunks = bool((self.chunk > 1).any())
        self.tail_only = np.array([tail_only or kind == "state" for kind in self.kinds], bool)
        self.tail_only &= self.window_of >= 0

        self.variants = tuple(variant for g, group in enumerate(groups) for variant in _variants(g, group))
        self.variants_of = tuple(
            tuple(v for v, variant in enumerate(self.variants) if variant.group == g) for g in range(self.num_groups)
        )
        self.variant_of_layer = {
            layer: self._variant(g, spec) for g, group in enumerate(groups) for layer, spec in group.layers.items()
        }
        self.widths = tuple(self._width(g, limits) for g in range(self.num_groups))
        cacheable = [group.block_size for group in groups if group.retention.kind != "ring"]
        self.unit = prefix_units(groups)[0] if not self.is_ring.any() else lcm(*cacheable)
        self.row_unit = lcm(*(variant.tokens_per_row for variant in self.variants))
        self.blocks_per_unit = tuple(
            0 if ring else self.unit // int(size) for ring, size in zip(self.is_ring, self.block_size, strict=True)
        )
        self.only_full = all(kind == "full" for kind in self.kinds)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Groups, variants, and groups that let blocks go."""
        return self.num_groups, len(self.variants), len(self.windows)

    def reach(self, windows: Numbers, committed: Numbers) -> Numbers:
        """The first token that position `committed` can reach, in each of the window groups `windows`."""
        reached: Numbers = committed - self.span[windows]
        if self.has_chunks:
            chunk = self.chunk[windows]
            reached = reached // chunk * chunk
        return np.maximum(reached, 0, out=reached)

    def visible(self, window: int, positions: Numbers) -> Numbers:
        """The first token that each position sees; `reach` without what is kept for taking tokens back."""
        is_state = self.is_state[self.windows[window]]
        seen = self.reach(np.full_like(positions, window), positions + (0 if is_state else self.rollback))
        return np.minimum(seen, positions, out=seen)

    def due(self, windows: Numbers, first: Numbers) -> Numbers:
        """The committed length at which block `first` goes: the next token then reaches no token of it."""
        chunk = self.chunk[windows]
        end = (first + 1) * self.block_size[self.windows[windows]]
        due: Numbers = -(-end // chunk) * chunk + self.span[windows]
        return due

    def stored_from(self, group: int, starts: Numbers, ends: Numbers) -> Numbers:
        """The first position of a step whose row is stored: all of them, or in tail-only groups what can be read later.

        At least the last row of a step is stored, and all rows of each block: a hit counts on whole ones. So are those,
        before the first, that fill a block which an earlier step began.
        """
        if not self.tail_only[group]:
            return starts
        window = np.broadcast_to(self.window_of[group], ends.shape)
        first, size = np.minimum(self.reach(window, ends), ends - 1), self.block_size[group]
        stored: Numbers = np.maximum(starts, first // size * size)
        return stored

    def _width(self, g: int, limits: Limits) -> int:
        if self.is_ring[g]:
            return 1
        size = int(self.block_size[g])
        reach, w = limits.max_length, int(self.window_of[g])
        if w >= 0:
            span = int(self.span[w] + self.chunk[w]) - 1
            reach = min(reach, span + limits.max_in_flight * limits.max_tokens_per_step + size)
        return -(-reach // size)

    def _variant(self, g: int, spec: LayerSpec) -> int:
        return next(
            (v for v in self.variants_of[g] if self.variants[v].tokens_per_row == spec.tokens_per_row), NO_VARIANT
        )


NO_VARIANT = -1
"""Of layers with a state, which have no slots."""


def _span(group: CacheGroup, rollback: int) -> int:
    """How many tokens before position c the window of c reaches back; `rollback` may be taken back from c."""
    retention = group.retention
    if retention.kind == "sliding_window":
        assert retention.window is not None
        return retention.window - 1 + rollback
    return rollback if retention.kind == "chunked" else 1


def _variants(g: int, group: CacheGroup) -> list[Variant]:
    if group.retention.kind == "state":
        return []
    is_ring = group.retention.kind == "ring"
    found: dict[int, Variant] = {}
    for spec in group.layers.values():
        found.setdefault(spec.tokens_per_row, Variant(g, spec.tokens_per_row, spec.rows_per_block, is_ring))
    if not found:
        found[1] = Variant(g, 1, group.block_size, is_ring)  # a group without layers still counts blocks
    return [found[tokens] for tokens in sorted(found)]
