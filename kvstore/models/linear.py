"""Models that mix full attention with linear attention (a delta rule): Qwen3-Next, Qwen3.5, Kimi-Linear.

A linear layer keeps, per sequence, the last inputs of its convolution and one matrix per value head.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvstore.errors import PlanError
from kvstore.layers import recurrent_state
from kvstore.models.caches import (
    KV_BLOCK,
    LATENT_BLOCK,
    Tensors,
    divide,
    kv_layer,
    kv_shape,
    recurrent_dtype,
)
from kvstore.models.config import Fields, count, layer_types, model_dtype, num_layers_of
from kvstore.models.deepseek import MLA, mla_layer
from kvstore.models.options import ModelOptions
from kvstore.models.stages import Family, LayerCaches, name_layers
from kvstore.models.windowed import FULL, every_nth_full
from kvstore.specs import AnySpec, LayerSpec

LINEAR = "linear_attention"


def mixed_layers(
    types: Sequence[str],
    options: ModelOptions,
    attention: Callable[[], LayerSpec],
    state: Callable[[], Tensors],
    attention_block: int = KV_BLOCK,
) -> dict[str, AnySpec]:
    """Full layers have attention, linear ones a state, others nothing; a draft layer is like a full one."""
    caches: dict[str, LayerCaches] = {}
    if FULL in types:
        caches[FULL] = {"attn": attention()}
    if LINEAR in types:
        caches[LINEAR] = {"state": recurrent_state(state(), block_size=options.block(attention_block))}
    return name_layers([caches.get(kind, {}) for kind in types], caches.get(FULL, {}), options)


def _gated_delta_net(fields: Fields, options: ModelOptions, *, defaults: Fields) -> dict[str, AnySpec]:
    """The recurrent tensor has the model's dtype unless the config names another."""
    fields = {**_GATED_DELTA_NET, **defaults, **fields}
    num_layers = num_layers_of(fields)
    types = layer_types(
        fields,
        num_layers,
        (FULL, LINEAR),
        every_nth_full(num_layers, count(fields, "full_attention_interval", 4), LINEAR),
    )

    def state() -> Tensors:
        ranks = options.tensor_parallel
        key_dim, value_dim = count(fields, "linear_key_head_dim"), count(fields, "linear_value_head_dim")
        num_key_heads = divide(count(fields, "linear_num_key_heads"), "linear_num_key_heads", ranks)
        num_value_heads = divide(count(fields, "linear_num_value_heads"), "linear_num_value_heads", ranks)
        channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
        dtype = model_dtype(fields)
        return [
            ("conv", (count(fields, "linear_conv_kernel_dim", minimum=2) - 1, channels), dtype),
            ("recurrent", (num_value_heads, value_dim, key_dim), recurrent_dtype(fields, options, dtype)),
        ]

    return mixed_layers(types, options, lambda: kv_layer("full", kv_shape(fields), options), state)


def _kimi_linear(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    """Full layers are MLA; the convolutions of q, k and v lie side by side; the recurrent tensor is fp32."""
    fields = {**_KIMI_LINEAR, **fields, **_nested_linear_fields(fields)}
    num_layers = num_layers_of(fields)

    def state() -> Tensors:
        num_heads = divide(count(fields, "linear_num_heads"), "linear_num_heads", options.tensor_parallel)
        head_dim = count(fields, "linear_head_dim")
        kernel = count(fields, "linear_conv_kernel_dim", minimum=2)
        return [
            ("conv", (kernel - 1, 3 * num_heads * head_dim), model_dtype(fields)),
            ("recurrent", (num_heads, head_dim, head_dim), recurrent_dtype(fields, options, torch.float32)),
        ]

    types = layer_types(fields, num_layers, (FULL, LINEAR), _kimi_pattern(fields, num_layers))
    return mixed_layers(types, options, lambda: mla_layer(fields, options), state, LATENT_BLOCK)


def _nested_linear_fields(fields: Fields) -> dict[str, Any]:
    """Checkpoints nest what the class names flat."""
    nested = _linear_attn_config(fields)
    names = {
        "linear_head_dim": "head_dim",
        "linear_num_heads": "num_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    return {flat: nested[name] for flat, name in names.items() if name in nested}


def _linear_attn_config(fields: Fields) -> Fields:
    nested = fields.get("linear_attn_config") or {}
    if not isinstance(nested, Mapping):
        raise PlanError(f"linear_attn_config: expected a mapping, got {nested!r}")
    return nested


def _kimi_pattern(fields: Fields, num_layers: int) -> list[str]:
    """The two lists of a checkpoint, which count layers from 1; without them every fourth layer but the first is full.

    Raises: PlanError when a layer is in neither list or in both.
    """
    nested = _linear_attn_config(fields)
    if "full_attn_layers" not in nested or "kda_layers" not in nested:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(num_layers)]
    full, linear = nested["full_attn_layers"], nested["kda_layers"]
    lists = isinstance(full, list | tuple) and isinstance(linear, list | tuple)
    layers = range(1, num_layers + 1)
    if not lists or len(full) + len(linear) != num_layers or any(i not in full and i not in linear for i in layers):
        raise PlanError(
            f"linear_attn_config: expected each of the layers 1 to {num_layers} in full_attn_layers or kda_layers, "
            f"got {full!r} and {linear!r}"
        )
    return [FULL if layer + 1 in full else LINEAR for layer in range(num_layers)]


_GATED_DELTA_NET = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_KIMI_LINEAR = {**MLA, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}

MODEL_TYPES: Mapping[str, Family] = {
    "qwen3_next": partial(_gated_delta_net, defaults={}),
    "qwen3_5_text": partial(_gated_delta_net, defaults={"num_key_value_heads": 4}),
    "qwen3_5_moe_text": partial(_gated_delta_net, defaults={}),
    "kimi_linear": _kimi_linear,
}
