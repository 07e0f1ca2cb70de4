"""Gemma 4: full layers have heads and widths of their own, and the last layers may read the caches of earlier ones."""

from collections.abc import Mapping, Sequence

from kvstore.errors import PlanError
from kvstore.models.caches import KvShape, kv_heads, kv_layer
from kvstore.models.config import Fields, count, layer_types, num_layers_of
from kvstore.models.options import ModelOptions
from kvstore.models.stages import Family, LayerCaches, name_layers
from kvstore.models.windowed import FULL, SLIDING, bidirectional_window, every_nth_full
from kvstore.specs import Alias, AnySpec, LayerSpec

_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
}


def _gemma4(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    """The last layer is full attention, whatever the config says. Both K and V are stored, even with shared weights."""
    fields = {**_DEFAULTS, **fields}
    num_layers = num_layers_of(fields)
    types = [*layer_types(fields, num_layers, (FULL, SLIDING), every_nth_full(num_layers, 6))]
    if types:
        types[-1] = FULL
    if fields.get("use_bidirectional_attention") == "all":
        fields = {**fields, "sliding_window": bidirectional_window(count(fields, "sliding_window"))}
    overrides = _overrides(fields, types)
    num_owners = num_layers - count(fields, "num_kv_shared_layers", minimum=0, maximum=num_layers)
    owners = [
        _own_cache(kind, {**fields, **overrides.get(layer, {})}, options)
        for layer, kind in enumerate(types[:num_owners])
    ]
    readers = [_alias(layer, types, num_owners) for layer in range(num_owners, num_layers)]
    caches: list[AnySpec] = [*owners, *readers]
    draft: LayerCaches = {"attn": owners[types.index(FULL)]} if FULL in types[:num_owners] else {}
    return name_layers([{"attn": spec} for spec in caches], draft, options)


def _own_cache(kind: str, fields: Fields, options: ModelOptions) -> LayerSpec:
    heads = kv_heads(fields, "num_key_value_heads", count(fields, "num_attention_heads"))
    shape = KvShape(heads, count(fields, "head_dim"))
    if kind == SLIDING:
        return kv_layer("sliding_window", shape, options, window=count(fields, "sliding_window"))
    return kv_layer("full", shape, options)


def _alias(layer: int, types: Sequence[str], num_owners: int) -> Alias:
    """The last layer of the same type that stores its K and V."""
    owners = [owner for owner in range(num_owners) if types[owner] == types[layer]]
    if not owners:
        raise PlanError(
            f"num_kv_shared_layers: layer {layer} is {types[layer]!r}, and so is none of the {num_owners} layers "
            "whose cache it could read"
        )
    return Alias(f"layers.{owners[-1]}.attn")


def _overrides(fields: Fields, types: Sequence[str]) -> Mapping[int, Fields]:
    """What single layers have instead of the common fields; `per_layer_config` says it all, if the config has one."""
    given = fields.get("per_layer_config")
    if given is None:
        full: dict[str, int] = {"head_dim": count(fields, "global_head_dim")}
        if fields["attention_k_eq_v"] and fields["num_global_key_value_heads"] is not None:
            full["num_key_value_heads"] = count(fields, "num_global_key_value_heads")
        return {layer: full for layer, kind in enumerate(types) if kind == FULL}
    try:
        overrides = {int(layer): dict(values) for layer, values in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise PlanError(f"per_layer_config: expected a mapping of layer numbers to fields, got {given!r}") from None
    for layer in overrides:
        if not 0 <= layer < len(types):
            raise PlanError(f"per_layer_config: expected layers 0 to {len(types) - 1}, got {layer}")
    return overrides


MODEL_TYPES: Mapping[str, Family] = {"gemma4_text": _gemma4}
