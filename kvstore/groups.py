"""CacheGroup: layers that allocate and free together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Any

from kvstore.errors import PlanError, plan_int
from kvstore.specs import Alias, AnySpec, LayerSpec, NoCache, Retention
from kvstore_kernels.formats import ALIGNMENT_BYTES

DRAFT_PREFIX = "draft."
"""Names of the layers of a draft model (MTP) begin with it."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same block size and retention; they share one block table.

    A group may be empty: of several workers, one may own none of a group's layers, and the group still counts blocks
    there.

    Attributes:
        name: text that the plan, its tables and errors use; unlike those of other groups.
        layers: layer names with their specs, in the order in which the model creates its caches.
        block_size: tokens of a block, those of every layer's spec.
        retention: which rows are kept, that of every layer's spec.

    Raises: PlanError that names the layer when it is unlike the group, and for a group without a name.
    """

    name: str
    layers: Mapping[str, LayerSpec]
    block_size: int
    retention: Retention

    def __post_init__(self) -> None:
        check_name("CacheGroup: name", self.name)
        plan_int(f"CacheGroup {self.name!r}: block_size", self.block_size, 1)
        if not isinstance(self.retention, Retention):
            raise PlanError(f"CacheGroup {self.name!r}: retention: expected a Retention, got {self.retention!r}")
        check_layers(f"CacheGroup {self.name!r}", self.layers)
        for layer, spec in self.layers.items():
            if spec.block_size != self.block_size:
                raise PlanError(
                    f"CacheGroup {self.name!r}: layer {layer!r}: expected the group's block size {self.block_size}, "
                    f"got {spec.block_size}"
                )
            if spec.retention != self.retention:
                raise PlanError(
                    f"CacheGroup {self.name!r}: layer {layer!r}: expected the group's {self.retention}, "
                    f"got {spec.retention}"
                )
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheGroup, (self.name, dict(self.layers), self.block_size, self.retention)

    @property
    def block_bytes(self) -> int:
        """Bytes of the layers' pages of one block: what it needs at least."""
        return sum(spec.page_bytes for spec in self.layers.values())

    @property
    def payload_bytes(self) -> int:
        """Bytes of the layers' rows of one block, without padding."""
        return sum(spec.payload_bytes for spec in self.layers.values())

    @property
    def stride_multiple(self) -> int:
        """What the distance between blocks must be a multiple of when all layers share it."""
        return lcm(ALIGNMENT_BYTES, *(spec.stride_multiple for spec in self.layers.values()))

    @property
    def holds_draft(self) -> bool:
        """Whether a layer of a draft model is in the group; only such groups give up a block to the drafter."""
        return any(layer.startswith(DRAFT_PREFIX) for layer in self.layers)


def check_name(what: str, name: object) -> None:
    """Raises PlanError unless `name` is a non-empty string that UTF-8 can write."""
    if not isinstance(name, str) or not name or any("\ud800" <= character <= "\udfff" for character in name):
        raise PlanError(f"{what}: expected a non-empty string, got {name!r}")


def check_layers(owner: str, layers: object) -> None:
    """Raises PlanError unless `layers` maps non-empty strings to LayerSpecs."""
    if not isinstance(layers, Mapping):
        raise PlanError(f"{owner}: layers: expected a mapping of layer names to LayerSpecs, got {layers!r}")
    for layer, spec in layers.items():
        check_name(f"{owner}: layer name", layer)
        if not isinstance(spec, LayerSpec):
            raise PlanError(f"{owner}: layer {layer!r}: expected a LayerSpec, got {spec!r}")


def check_groups(groups: Sequence[CacheGroup]) -> None:
    """Raises PlanError when an entry is no CacheGroup, two have one name, or a layer is in two of them."""
    if not isinstance(groups, Iterable):
        raise PlanError(f"groups: expected CacheGroups, got {groups!r}")
    owners: dict[str, str] = {}
    names: set[str] = set()
    for group in groups:
        if not isinstance(group, CacheGroup):
            raise PlanError(f"groups: expected CacheGroups, got {group!r}")
        if group.name in names:
            raise PlanError(f"groups: expected distinct names, got {group.name!r} twice")
        names.add(group.name)
        for layer in group.layers:
            if layer in owners:
                raise PlanError(
                    f"layer {layer!r}: expected in one group, got it in {owners[layer]!r} and {group.name!r}"
                )
            owners[layer] = group.name


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """The layers of a model by what they do: own a cache, read that of another (`aliases`), or keep none."""

    owners: dict[str, LayerSpec]
    aliases: dict[str, str]
    uncached: tuple[str, ...]


def cached_layers(specs: Mapping[str, AnySpec]) -> CachedLayers:
    """Sorts specs; a chain of aliases ends at the layer that owns the bytes.

    Raises: PlanError for specs that are no mapping of names to specs, and an alias of no layer that owns a cache.
    """
    owners = {
        layer: spec
        for layer, spec in (specs.items() if isinstance(specs, Mapping) else ())
        if not isinstance(spec, Alias | NoCache)
    }
    check_layers("specs", owners if isinstance(specs, Mapping) else specs)
    aliases: dict[str, str] = {}
    for layer, spec in specs.items():
        check_name("specs: layer name", layer)
        seen, owner = {layer}, spec
        while isinstance(owner, Alias):
            target = owner.of
            if target in seen or target not in specs or isinstance(specs[target], NoCache):
                raise PlanError(f"layer {layer!r}: alias: expected the name of a layer with a cache, got {target!r}")
            seen.add(target)
            owner, aliases[layer] = specs[target], target
    return CachedLayers(owners, aliases, tuple(layer for layer, spec in specs.items() if isinstance(spec, NoCache)))
