"""Models whose layers alternate between full attention and a window or chunk: Gemma 3, gpt-oss, Olmo 3, Llama 4, MiMo.

Where a config names no `layer_types`, the pattern is that of its model_type's class in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvstore.errors import PlanError
from kvstore.models.caches import KvShape, attention_layers, kv_heads, kv_shape
from kvstore.models.config import Fields, count, layer_types, num_layers_of, per_layer
from kvstore.models.options import ModelOptions
from kvstore.models.stages import Family
from kvstore.specs import AnySpec

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def every_nth_full(num_layers: int, interval: int, other: str = SLIDING) -> list[str]:
    """`interval` - 1 layers of the other kind, then one of full attention, and so on."""
    return [other if (layer + 1) % interval else FULL for layer in range(num_layers)]


def bidirectional_window(window: int) -> int:
    """Half of the window lies ahead when all tokens see each other; the own token counts."""
    return window // 2 + 1


def _types(fields: Fields, default: Sequence[str], turned_off: str = "sliding_window") -> Sequence[str]:
    """The config's types, else the default; a layer with a window or chunk needs the field that says how long."""
    known = (FULL, SLIDING) if turned_off == "sliding_window" else (FULL, CHUNKED)
    types = layer_types(fields, len(default), known, default)
    if known[1] in types and fields[turned_off] is None:
        raise PlanError(f"layer_types: layer {types.index(known[1])} is {known[1]!r}, but {turned_off} is null")
    return types


def _gemma3(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    fields = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, **fields}
    default = every_nth_full(num_layers_of(fields), count(fields, "sliding_window_pattern", 6))
    types = _types(fields, default)
    if fields.get("use_bidirectional_attention") and SLIDING in types:
        fields = {**fields, "sliding_window": bidirectional_window(count(fields, "sliding_window"))}
    return attention_layers(types, fields, options, kv_shape(fields))


def _gpt_oss(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    defaults = {
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    }
    fields = {**defaults, **fields}
    types = _types(fields, every_nth_full(num_layers_of(fields), 2))
    return attention_layers(types, fields, options, kv_shape(fields))


def _olmo3(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    fields = {"hidden_size": 4096, "num_attention_heads": 32, "sliding_window": 4096, **fields}
    types = _types(fields, every_nth_full(num_layers_of(fields), 4))
    return attention_layers(types, fields, options, kv_shape(fields))


def _llama4(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    """Layers without rope are full attention; the others see their chunk, unless there is no chunk size."""
    defaults = {
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    }
    fields = {**defaults, **fields}
    num_layers = num_layers_of(fields)
    default = every_nth_full(num_layers, count(fields, "no_rope_layer_interval", 4), CHUNKED)
    if fields.get("no_rope_layers"):
        default = [CHUNKED if rope else FULL for rope in per_layer(fields, "no_rope_layers", num_layers) or ()]
    if fields["attention_chunk_size"] is None:
        default = [FULL] * num_layers
    types = _types(fields, default, "attention_chunk_size")
    return attention_layers(types, fields, options, kv_shape(fields))


def _mimo_v2(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    """V is narrower than K; a window layer has twice the KV heads of a full one, unless the config says otherwise."""
    defaults = {
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
    }
    fields = {**defaults, **fields}
    num_layers = num_layers_of(fields)
    if fields.get("sliding_window_size") is not None:
        fields = {**fields, "sliding_window": count(fields, "sliding_window_size") + 1}
    types = _types(fields, _mimo_pattern(fields, num_layers))
    full = replace(kv_shape(fields), head_dim_v=count(fields, "v_head_dim"))
    window = KvShape(
        kv_heads(fields, "swa_num_key_value_heads", 2 * full.num_kv_heads),
        count(fields, "swa_head_dim", full.head_dim),
        count(fields, "swa_v_head_dim", full.head_dim_v),
    )
    return attention_layers(types, fields, options, full, window)


def _mimo_pattern(fields: Fields, num_layers: int) -> list[str]:
    """`hybrid_layer_pattern`, 1 for a window; without it the first layer and every sixth are full.

    Raises: PlanError when the config's `layer_types` says something else.
    """
    pattern = per_layer(fields, "hybrid_layer_pattern", num_layers)
    if pattern is None:
        return [FULL, *every_nth_full(num_layers, 6)[1:]][:num_layers]
    types = [SLIDING if windowed else FULL for windowed in pattern]
    named = fields.get("layer_types")
    if named is not None and list(named) != types:
        raise PlanError(f"hybrid_layer_pattern: expected the same layers as layer_types, got {list(pattern)!r}")
    return types


MODEL_TYPES: Mapping[str, Family] = {
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "olmo3": _olmo3,
    "llama4_text": _llama4,
    "mimo_v2_flash": _mimo_v2,
}
