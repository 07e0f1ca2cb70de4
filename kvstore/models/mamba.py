"""Models that mix full attention with Mamba layers: Nemotron-H and Nemotron-3 (Mamba 2), Jamba (Mamba 1)."""

from collections.abc import Mapping, Sequence

import torch

from kvstore.errors import PlanError
from kvstore.models.caches import KvShape, Tensors, divide, kv_heads, kv_layer, kv_shape, recurrent_dtype
from kvstore.models.config import Fields, count, layer_types, model_dtype, num_layers_of
from kvstore.models.linear import LINEAR, mixed_layers
from kvstore.models.options import ModelOptions
from kvstore.models.stages import Family
from kvstore.models.windowed import FULL
from kvstore.specs import AnySpec

PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`."""

_NEMOTRON_H = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
}
_JAMBA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def _nemotron_h(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    """Only Mamba and attention layers own a cache. The recurrent tensor is fp32 unless the config names another dtype.

    Older files call some fields differently: `attention_head_dim`, `mamba_n_groups`, `mamba_d_conv`.
    """
    older = {"head_dim": "attention_head_dim", "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"}
    renamed = {name: fields[old] for name, old in older.items() if fields.get(old) is not None}
    fields = {**_NEMOTRON_H, **fields, **renamed}

    def state() -> Tensors:
        num_heads = divide(count(fields, "mamba_num_heads"), "mamba_num_heads", options.tensor_parallel)
        head_dim, state_size = count(fields, "mamba_head_dim"), count(fields, "ssm_state_size")
        channels = num_heads * head_dim + 2 * _groups(fields, options.tensor_parallel) * state_size
        return [
            ("conv", (count(fields, "conv_kernel", minimum=2) - 1, channels), model_dtype(fields)),
            ("recurrent", (num_heads, head_dim, state_size), recurrent_dtype(fields, options, torch.float32)),
        ]

    heads = kv_heads(fields, "num_key_value_heads", count(fields, "num_attention_heads"))
    shape = KvShape(heads, count(fields, "head_dim"))
    return mixed_layers(_nemotron_types(fields), options, lambda: kv_layer("full", shape, options), state)


def _groups(fields: Fields, tensor_parallel: int) -> int:
    """Groups share their B and C; with fewer groups than ranks, several ranks hold the same one."""
    num_groups = count(fields, "n_groups")
    if tensor_parallel % num_groups == 0:
        return 1
    return divide(num_groups, "n_groups", tensor_parallel)


def _nemotron_types(fields: Fields) -> Sequence[str]:
    """From `layers_block_type`, or the letters of `hybrid_override_pattern`.

    Raises: PlanError when the config has neither, they differ, or they are no `num_hidden_layers` layers.
    """
    types, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    named = pattern if types is None else types
    if named is None:
        raise PlanError(
            f"layers_block_type: expected it or hybrid_override_pattern in the config "
            f"(model_type {fields.get('model_type')!r}), found none"
        )
    num_layers = count(fields, "num_hidden_layers", len(named) if isinstance(named, list | tuple | str) else 0, 0)
    letters = None if pattern is None else _from_letters(pattern, num_layers)
    if types is None:
        return letters or []
    checked = layer_types(fields, num_layers, tuple(PATTERN.values()), (), "layers_block_type")
    if letters is not None and letters != list(checked):
        raise PlanError(f"hybrid_override_pattern: expected the same layers as layers_block_type, got {pattern!r}")
    return checked


def _from_letters(pattern: object, num_layers: int) -> list[str]:
    if not isinstance(pattern, str) or len(pattern) != num_layers or not set(pattern) <= set(PATTERN):
        raise PlanError(
            f"hybrid_override_pattern: expected num_hidden_layers = {num_layers} letters out of {''.join(PATTERN)}, "
            f"got {pattern!r}"
        )
    return [PATTERN[letter] for letter in pattern]


def _jamba(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    """One layer of attention in each period. The recurrent tensor has the model's dtype unless the config names one."""
    fields = {**_JAMBA, **fields}
    period = count(fields, "attn_layer_period")
    offset = count(fields, "attn_layer_offset", minimum=0, maximum=period - 1)
    types = [FULL if layer % period == offset else LINEAR for layer in range(num_layers_of(fields))]

    def state() -> Tensors:
        channels = divide(
            count(fields, "mamba_expand") * count(fields, "hidden_size"),
            "channels (mamba_expand * hidden_size)",
            options.tensor_parallel,
        )
        dtype = model_dtype(fields)
        return [
            ("conv", (count(fields, "mamba_d_conv", minimum=2) - 1, channels), dtype),
            ("recurrent", (channels, count(fields, "mamba_d_state")), recurrent_dtype(fields, options, dtype)),
        ]

    return mixed_layers(types, options, lambda: kv_layer("full", kv_shape(fields), options), state)


MODEL_TYPES: Mapping[str, Family] = {"nemotron_h": _nemotron_h, "jamba": _jamba}
