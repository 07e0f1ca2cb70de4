"""Models with K and V per layer: Llama, Mistral, Qwen2, Qwen3. Some of their layers may see a window only.

A field that a config leaves out has the default of its model_type's class in transformers; null is a value.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kvstore.errors import PlanError
from kvstore.models.config import Fields, count
from kvstore.specs import LayerSpec, full_attention, sliding_window

Windows = list[int | None]
"""One entry per layer; None is full attention."""


def _kv_layers(
    fields: Fields,
    dtype: torch.dtype,
    block_size: int | None,
    tensor_parallel: int,
    *,
    windows: Callable[[Fields, int], Windows],
    defaults: Fields,
) -> dict[str, LayerSpec]:
    fields = {**defaults, **fields}
    num_layers = count(fields, "num_hidden_layers", minimum=0)
    num_heads = count(fields, "num_attention_heads")
    num_kv_heads = shard_heads(count(fields, "num_key_value_heads", num_heads), tensor_parallel)
    head_dim = count(fields, "head_dim") if fields.get("head_dim") is not None else _derived_head_dim(fields, num_heads)
    size = 16 if block_size is None else block_size
    return {
        f"layers.{layer}.attn": full_attention(num_kv_heads, head_dim, dtype=dtype, block_size=size)
        if window is None
        else sliding_window(num_kv_heads, head_dim, window=window, dtype=dtype, block_size=size)
        for layer, window in enumerate(windows(fields, num_layers))
    }


def _no_windows(fields: Fields, num_layers: int) -> Windows:
    return [None] * num_layers


def _one_window(fields: Fields, num_layers: int) -> Windows:
    return [_window(fields)] * num_layers


def _some_windows(fields: Fields, num_layers: int) -> Windows:
    """Off unless `use_sliding_window`; then for the layers that `layer_types` names, or from `max_window_layers` on."""
    window = _window(fields) if fields.get("use_sliding_window") else None
    types = fields.get("layer_types")
    if types is None:
        first = count(fields, "max_window_layers", minimum=0)
        return [window if layer >= first else None for layer in range(num_layers)]
    _check_types(types, num_layers, window)
    return [window if kind == "sliding_attention" else None for kind in types]


def _window(fields: Fields) -> int | None:
    return None if fields["sliding_window"] is None else count(fields, "sliding_window")


def _check_types(types: Any, num_layers: int, window: int | None) -> None:
    if not isinstance(types, Sequence) or isinstance(types, str) or len(types) != num_layers:
        raise PlanError(f"layer_types: expected a list of num_hidden_layers = {num_layers} entries, got {types!r}")
    for layer, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise PlanError(
                f"layer_types: layer {layer}: expected 'full_attention' or 'sliding_attention', got {kind!r}"
            )
        if kind == "sliding_attention" and window is None:
            raise PlanError(f"layer_types: layer {layer} is 'sliding_attention', but the config turns its window off")


def _derived_head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = count(fields, "hidden_size")
    if hidden_size % num_heads:
        raise PlanError(
            f"head_dim: none in the config, and hidden_size {hidden_size} is no multiple of the {num_heads} "
            "num_attention_heads"
        )
    return hidden_size // num_heads


def shard_heads(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank; with fewer heads than ranks a head is replicated.

    Raises: PlanError when neither number divides the other.
    """
    if num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads:
        raise PlanError(
            f"tensor_parallel: expected a divisor or a multiple of the {num_kv_heads} KV heads, got {tensor_parallel}"
        )
    return max(num_kv_heads // tensor_parallel, 1)


_QWEN2 = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

MODEL_TYPES = {
    "llama": partial(_kv_layers, windows=_no_windows, defaults={}),
    "mistral": partial(_kv_layers, windows=_one_window, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": partial(_kv_layers, windows=_some_windows, defaults=_QWEN2),
    "qwen3": partial(_kv_layers, windows=_some_windows, defaults={**_QWEN2, "head_dim": 128}),
}
