"""Models with K and V per layer, all alike but for windows: Llama, Mistral, Qwen2, Qwen3, MiniMax-M2.

A field that a config leaves out has the default of its model_type's class in transformers; null is a value.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvstore.errors import PlanError
from kvstore.models.caches import attention_layers, kv_shape
from kvstore.models.config import Fields, count, layer_types, num_layers_of, per_layer
from kvstore.models.options import ModelOptions
from kvstore.models.stages import Family
from kvstore.specs import AnySpec

FULL, SLIDING = "full_attention", "sliding_attention"


def _kv_layers(
    fields: Fields, options: ModelOptions, *, types: Callable[[Fields, int], Sequence[str]], defaults: Fields
) -> dict[str, AnySpec]:
    fields = {**defaults, **fields}
    return attention_layers(types(fields, num_layers_of(fields)), fields, options, kv_shape(fields))


def _all_full(fields: Fields, num_layers: int) -> Sequence[str]:
    return [FULL] * num_layers


def _one_window(fields: Fields, num_layers: int) -> Sequence[str]:
    """Every layer, unless `sliding_window` is null."""
    return [FULL if fields["sliding_window"] is None else SLIDING] * num_layers


def _one_window_if_used(fields: Fields, num_layers: int) -> Sequence[str]:
    """As `_one_window`, but off unless `use_sliding_window`."""
    return _one_window(fields, num_layers) if fields["use_sliding_window"] else _all_full(fields, num_layers)


def _some_windows(fields: Fields, num_layers: int) -> Sequence[str]:
    """Off unless `use_sliding_window`; then for the layers that `layer_types` names, or from `max_window_layers` on."""
    on = fields["use_sliding_window"] and fields["sliding_window"] is not None
    first = count(fields, "max_window_layers", minimum=0)
    default = [SLIDING if on and layer >= first else FULL for layer in range(num_layers)]
    types = layer_types(fields, num_layers, (FULL, SLIDING), default)
    if SLIDING in types and not on:
        layer = types.index(SLIDING)
        raise PlanError(f"layer_types: layer {layer} is {SLIDING!r}, but the config turns its window off")
    return types


def _all_softmax(fields: Fields, num_layers: int) -> Sequence[str]:
    """MiniMax-M2 has no linear attention; `attn_type_list` says 1 for every layer."""
    for layer, kind in enumerate(per_layer(fields, "attn_type_list", num_layers) or ()):
        if kind != 1:
            raise PlanError(f"attn_type_list: layer {layer}: expected 1 (softmax attention), got {kind!r}")
    return [FULL] * num_layers


_LLAMA = {"hidden_size": 4096, "num_attention_heads": 32}
_MISTRAL = {**_LLAMA, "num_key_value_heads": 8, "sliding_window": 4096}
_QWEN2 = {
    **_LLAMA,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_MOE = {**_QWEN2, "hidden_size": 2048, "num_key_value_heads": 4}
_MINIMAX_M2 = {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128}

MODEL_TYPES: Mapping[str, Family] = {
    "llama": partial(_kv_layers, types=_all_full, defaults=_LLAMA),
    "mistral": partial(_kv_layers, types=_one_window, defaults=_MISTRAL),
    "ministral3": partial(
        _kv_layers, types=_one_window, defaults={**_MISTRAL, "head_dim": 128, "sliding_window": None}
    ),
    "qwen2": partial(_kv_layers, types=_some_windows, defaults=_QWEN2),
    "qwen3": partial(_kv_layers, types=_some_windows, defaults={**_QWEN2, "head_dim": 128}),
    "qwen3_moe": partial(_kv_layers, types=_one_window_if_used, defaults=_QWEN3_MOE),
    "minimax_m2": partial(_kv_layers, types=_all_softmax, defaults=_MINIMAX_M2),
}
