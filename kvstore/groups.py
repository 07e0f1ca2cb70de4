"""CacheGroup: layers that allocate and free together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvstore.errors import PlanError, plan_int
from kvstore.specs import LayerSpec, Retention

GROUPINGS = ("auto", "uniform")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same block size and retention; they share one block table.

    `layers` maps layer names to specs, in the order in which the model creates its caches.

    Raises: PlanError that names the layer when it is unlike the group, and for a group without layers or names.
    """

    name: str
    layers: Mapping[str, LayerSpec]
    block_size: int
    retention: Retention

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"CacheGroup: name: expected a non-empty string, got {self.name!r}")
        plan_int(f"CacheGroup {self.name!r}: block_size", self.block_size, 1)
        if not isinstance(self.retention, Retention):
            raise PlanError(f"CacheGroup {self.name!r}: retention: expected a Retention, got {self.retention!r}")
        check_layers(f"CacheGroup {self.name!r}", self.layers)
        if not self.layers:
            raise PlanError(f"CacheGroup {self.name!r}: layers: expected at least one, got none")
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

    @property
    def block_bytes(self) -> int:
        """Sum of the layers' pages: what one block needs at least."""
        return sum(spec.page_bytes for spec in self.layers.values())

    @property
    def payload_bytes(self) -> int:
        """The same without padding."""
        return sum(spec.payload_bytes for spec in self.layers.values())


def check_layers(owner: str, layers: object) -> None:
    """Raises PlanError unless `layers` maps non-empty strings to LayerSpecs."""
    if not isinstance(layers, Mapping):
        raise PlanError(f"{owner}: layers: expected a mapping of layer names to LayerSpecs, got {layers!r}")
    for layer, spec in layers.items():
        if not isinstance(layer, str) or not layer:
            raise PlanError(f"{owner}: layer name: expected a non-empty string, got {layer!r}")
        if not isinstance(spec, LayerSpec):
            raise PlanError(f"{owner}: layer {layer!r}: expected a LayerSpec, got {spec!r}")


def group_layers(specs: Mapping[str, LayerSpec], grouping: str = "auto") -> list[CacheGroup]:
    """Groups of layers with equal block size, rows per block and retention ("uniform", as "auto"), in layer order.

    Raises: PlanError for an unknown grouping, or specs that are no mapping of names to LayerSpecs.
    """
    if grouping not in GROUPINGS:
        raise PlanError(f"grouping: expected one of {', '.join(GROUPINGS)}, got {grouping!r}")
    check_layers("group_layers", specs)
    alike: dict[tuple[int, int, Retention], dict[str, LayerSpec]] = {}
    for layer, spec in specs.items():
        alike.setdefault((spec.block_size, spec.tokens_per_row, spec.retention), {})[layer] = spec
    return [
        CacheGroup(_name(block_size, tokens_per_row, retention), layers, block_size, retention)
        for (block_size, tokens_per_row, retention), layers in alike.items()
    ]


def check_groups(groups: Sequence[CacheGroup]) -> None:
    """Raises PlanError when an entry is no CacheGroup, two have one name, or a layer is in two of them."""
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


def _name(block_size: int, tokens_per_row: int, retention: Retention) -> str:
    reach = "full" if retention.window is None else f"window{retention.window}"
    return f"{reach}_b{block_size}" + (f"_t{tokens_per_row}" if tokens_per_row > 1 else "")
