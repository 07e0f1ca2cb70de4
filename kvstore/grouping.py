"""From specs to groups: the named strategies, all of them pure functions.

    uniform  one group per block size and retention
    equal    equal pages first, then groups with equally many layers (vLLM's rule for layer-outermost pools)
    packed   groups as wide as each other, with mixed pages (vLLM's rule for block-outermost pools)

A layer's *type* is what must agree inside a group: block size and retention. Layers of one type are dealt out in turn
(`layers[i::n]`), so that every pipeline stage owns its share of every group. Tokens per row may differ: a slot mapping
belongs to the layers of a group that agree in them.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping

from kvstore.errors import plan_int
from kvstore.groups import CacheGroup
from kvstore.specs import LayerSpec, Retention
from kvstore.unify import unify_pages
from kvstore_kernels.checks import cdiv, round_up

Layers = dict[str, LayerSpec]
Deal = tuple[Layers, int]
"""Layers of one type, and the number of groups they are dealt to."""


def layers_by_type(specs: Mapping[str, LayerSpec]) -> list[Layers]:
    """Layers of one type together, in layer order; a hidden-state cache is a type of its own."""
    types: dict[Hashable, Layers] = {}
    for layer, spec in specs.items():
        types.setdefault((spec.block_size, spec.retention, _alone(layer, spec)), {})[layer] = spec
    return list(types.values())


def deal_groups(deals: Iterable[Deal]) -> list[CacheGroup]:
    """The groups of every deal, named by what they keep: "full_b16", "window1024_b16.0", "window1024_b16.1"."""
    parts = [deal_layers(layers, count) for layers, count in deals]
    names: Counter[str] = Counter()
    total = Counter(_name(next(iter(layers.values()))) for part in parts for layers in part)
    groups = []
    for layers in (layers for part in parts for layers in part):
        spec = next(iter(layers.values()))
        name = _name(spec)
        numbered = f"{name}.{names[name]}" if total[name] > 1 else name
        names[name] += 1
        groups.append(CacheGroup(numbered, layers, spec.block_size, spec.retention))
    return groups


def group_uniform(specs: Mapping[str, LayerSpec]) -> list[CacheGroup]:
    """One group per type."""
    return deal_groups((layers, 1) for layers in layers_by_type(specs))


def group_equal(specs: Mapping[str, LayerSpec]) -> list[CacheGroup]:
    """Groups of equally many layers with equal pages; facts from vLLM 0.33.

    One type stays one group. Else pages are made equal (`unify_pages`), layers of one spec form a bucket, and every
    bucket is cut into groups of the smallest bucket's size, or the largest's where that is below 1.5 times it.

    Raises: PlanError when pages cannot be made equal.
    """
    types = layers_by_type(specs)
    if len(types) <= 1:
        return deal_groups((layers, 1) for layers in types)
    buckets: dict[Hashable, Layers] = {}
    for layer, spec in unify_pages(specs).items():
        buckets.setdefault((spec, _alone(layer, spec)), {})[layer] = spec
    smallest, largest = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = largest if 2 * largest < 3 * smallest else smallest
    return deal_groups((layers, cdiv(len(layers), size)) for layers in buckets.values())


def group_packed(specs: Mapping[str, LayerSpec]) -> list[CacheGroup]:
    """Groups of about equal bytes with mixed pages; facts from vLLM 0.33.

    With one page size it is `group_equal`. A type is balanced when each of its page sizes occurs equally often, say n
    times: a repeat is one layer of each size. If a balanced type has several sizes, all balanced types are cut into
    groups of d repeats, with the d that rounds their n up by least in all. Types of state and ring layers, and without
    such a d those of windows, are cut until a group is no wider than the widest of the others. The rest stays whole.
    """
    types = layers_by_type(specs)
    if len(types) <= 1 or len({spec.page_bytes for spec in specs.values()}) == 1:
        return group_equal(specs)
    repeats = {index: n for index, layers in enumerate(types) if (n := _repeats(layers)) and not _is_fixed(layers)}
    mixed = [n for index, n in repeats.items() if n < len(types[index])]
    counts = [1] * len(types)
    if mixed:
        depth = min(
            range(max(repeats.values()), max(mixed) - 1, -1),
            key=lambda d: sum(round_up(n, d) - n for n in repeats.values()),
        )
        for index, n in repeats.items():
            counts[index] = cdiv(n, depth)
    narrow = [_is_fixed(layers) or (not mixed and _is_window(layers)) for layers in types]
    widest = max(
        (_widest(layers, count) for layers, count, cut in zip(types, counts, narrow, strict=True) if not cut), default=0
    )
    for index, layers in enumerate(types):
        if narrow[index] and widest:
            counts[index] = groups_within(layers, widest)
    return deal_groups(zip(types, counts, strict=True))


STRATEGIES: Mapping[str, Callable[[Mapping[str, LayerSpec]], list[CacheGroup]]] = {
    "uniform": group_uniform,
    "equal": group_equal,
    "packed": group_packed,
}


def groups_within(layers: Layers, max_bytes: int) -> int:
    """The fewest groups that layers are dealt to so that none has more than `max_bytes`; all, if one page has more."""
    sizes = Counter(spec.page_bytes for spec in layers.values())
    if max(sizes) > max_bytes:
        return len(layers)
    count = max(cdiv(sum(size * n for size, n in sizes.items()), max_bytes), 1)
    while (widest := _widest(layers, count)) > max_bytes:
        # A group has at most one page of each size more than its share: far from the goal, whole steps are safe.
        excess = widest - max_bytes - sum(sizes)
        count += max(count * excess // widest, 1)
    return count


def deal_layers(layers: Layers, count: int) -> list[Layers]:
    """Layers dealt in turn to `count` parts, page size by page size; each part in layer order."""
    if count == 1:
        return [layers]
    plan_int("groups of one type", count, 1, len(layers))
    sizes = Counter(spec.page_bytes for spec in layers.values())
    turn: Counter[int] = Counter()
    if len(set(sizes.values())) > 1 or count > len(layers) // len(sizes):
        first = 0
        for page_bytes, total in sizes.items():
            turn[page_bytes] = first  # a size goes on where the one before it ended, so that no part is short of all
            first += total
    owner = {}
    for layer, spec in layers.items():
        owner[layer] = turn[spec.page_bytes] % count
        turn[spec.page_bytes] += 1
    return [{layer: spec for layer, spec in layers.items() if owner[layer] == part} for part in range(count)]


def _alone(layer: str, spec: LayerSpec) -> str | None:
    """What keeps a hidden-state cache from sharing a group."""
    return layer if spec.kind == "hidden_state" else None


def _repeats(layers: Layers) -> int:
    """How often each page size occurs, 0 when that differs."""
    sizes = Counter(spec.page_bytes for spec in layers.values())
    return min(sizes.values()) if len(set(sizes.values())) == 1 else 0


def _widest(layers: Layers, count: int) -> int:
    return max(sum(spec.page_bytes for spec in part.values()) for part in deal_layers(layers, count))


def _is_fixed(layers: Layers) -> bool:
    return next(iter(layers.values())).retention.is_fixed


def _is_window(layers: Layers) -> bool:
    return next(iter(layers.values())).retention.kind == "sliding_window"


def _name(spec: LayerSpec) -> str:
    """What a group keeps, and its block size."""
    retention: Retention = spec.retention
    number = retention.window or retention.chunk or ""
    kind = {"sliding_window": "window", "chunked": "chunk"}.get(retention.kind, retention.kind)
    return f"{kind}{number}_b{spec.block_size}"
