"""Making unlike layers alike, for pools and engines that know one page size or one kind of group only."""

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

from kvstore.errors import PlanError
from kvstore.groups import cached_layers
from kvstore.specs import AnySpec, LayerSpec


def unify_pages(specs: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Specs with one page size, the largest: larger blocks where that divides, else padded pages.

    Pages of states and rings do not grow with the block, so they are padded. Where such a page is the largest, it is
    first rounded up to whole pages of the others. Latent pages are not padded, since sparse readers count whole rows.

    Raises: PlanError that names a latent layer whose page does not divide the largest.
    """
    if not specs:
        return {}
    largest = max(specs, key=lambda layer: specs[layer].page_bytes)
    target = specs[largest].page_bytes
    if specs[largest].retention.is_fixed:
        whole = lcm(*(spec.page_bytes for spec in specs.values() if not spec.retention.is_fixed))
        if whole <= target:
            target = -(-target // whole) * whole
    return {layer: _with_page(layer, spec, target, largest) for layer, spec in specs.items()}


def _with_page(layer: str, spec: LayerSpec, target: int, largest: str) -> LayerSpec:
    if spec.page_bytes == target:
        return spec
    if spec.retention.is_fixed:
        return replace(spec, padded_page_bytes=target)
    times, rest = divmod(target, spec.page_bytes)
    if not rest:
        padded = target if spec.padded_page_bytes is not None else None
        grown = replace(spec, block_size=spec.block_size * times, padded_page_bytes=padded)
        return grown if grown.page_bytes == target else replace(grown, padded_page_bytes=target)
    if spec.kind in ("latent", "latent_window"):
        raise PlanError(
            f"layer {layer!r}: pages of {spec.page_bytes} B do not divide those of layer {largest!r}, {target} B, and "
            "latent pages are not padded: use grouping 'packed', 'uniform' or 'auto', which mix page sizes"
        )
    return replace(spec, padded_page_bytes=target)


def promote_windows(specs: Mapping[str, AnySpec]) -> dict[str, AnySpec]:
    """Specs for an engine with one group: windows and chunks keep every row, in blocks of the largest block size.

    A promoted layer remembers its window, which still bounds what is read. Aliases and layers without a cache stay.

    Raises: PlanError when the layers do not become one kind: windows beside chunks without a full layer to follow,
    windows of different reach likewise, and states or rings beside attention.
    """
    owners = cached_layers(specs).owners
    kinds = {spec.retention for spec in owners.values()}
    if len(kinds) <= 1:
        return dict(specs)
    unlike = [layer for layer, spec in owners.items() if spec.retention.is_fixed]
    if unlike:
        raise PlanError(f"layer {unlike[0]!r}: kind {owners[unlike[0]].kind!r} cannot be kept like attention")
    if not any(retention.kind == "full" for retention in kinds):
        names = ", ".join(f"{layer!r} ({spec.kind})" for layer, spec in list(owners.items())[:4])
        raise PlanError(f"layers {names}: no full layer to follow, and their reach differs")
    block_size = max(spec.block_size for spec in owners.values())
    return {
        layer: _promoted(spec, block_size) if isinstance(spec, LayerSpec) else spec for layer, spec in specs.items()
    }


def _promoted(spec: LayerSpec, block_size: int) -> LayerSpec:
    if spec.retention.kind == "full" and spec.block_size == block_size:
        return spec
    kind = {"latent": "latent", "latent_window": "latent", "hidden_state": "hidden_state"}.get(spec.kind, "full")
    return replace(spec, kind=kind, block_size=block_size, chunk=None, padded_page_bytes=None)
