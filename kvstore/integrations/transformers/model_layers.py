"""From a plan to the layers of a cache: by the caches that it has for each layer of the model."""

from typing import TYPE_CHECKING, Any

from kvstore import CachePlan
from kvstore.integrations.transformers.compressed import CompressedLayer, WindowLayer
from kvstore.integrations.transformers.layers import IndexedLayer, LatentLayer, PagedLayer
from kvstore.integrations.transformers.states import StateLayer

if TYPE_CHECKING:
    from kvstore.integrations.transformers.cache import KVStoreCache


def make_layers(cache: "KVStoreCache", plan: CachePlan) -> list[Any]:
    """A layer of the cache for each layer of the model.

    Raises: ValueError for layers that are no pattern of the families.
    """
    caches: dict[int, list[str]] = {}
    for name in (*plan.layers, *plan.aliases):
        kind, _, rest = name.partition(".")
        number, _, what = rest.partition(".")
        if kind != "layers" or not number.isdigit():
            raise ValueError(f"store: expected layers named 'layers.<number>.<cache>', got {name!r}")
        caches.setdefault(int(number), []).append(what)
    return [_make_layer(cache, plan, index, caches.get(index, [])) for index in range(max(caches, default=-1) + 1)]


def _make_layer(cache: "KVStoreCache", plan: CachePlan, index: int, caches: list[str]) -> Any:
    name, has = f"layers.{index}", frozenset(caches)
    kinds = {what: plan.spec(f"{name}.{what}").kind for what in caches if f"{name}.{what}" in plan.layers}
    if has == {"attn"} and kinds.get("attn") in ("full", "sliding_window"):
        return PagedLayer(cache, index, f"{name}.attn")
    if has == {"attn"} and kinds.get("attn") == "latent":
        return LatentLayer(cache, index, f"{name}.attn")
    if has == {"attn", "indexer"}:
        return IndexedLayer(cache, index, f"{name}.attn", f"{name}.indexer")
    if has == {"state"}:
        return StateLayer(cache, index, f"{name}.state")
    if has == {"window"}:
        return WindowLayer(cache, index, f"{name}.window")
    compressed = {"window", "compressed", "state"}
    if has in (compressed, compressed | {"indexer", "indexer_state"}) and kinds["state"] == "latent_window":
        return CompressedLayer(cache, index, name, "indexer" in has)
    got = ", ".join(f"{what} ({kinds.get(what, 'alias')})" for what in sorted(has)) or "none"
    raise ValueError(f"store: layer {index} has caches that no supported family of transformers has: {got}")
