"""Reading the fields of a Hugging Face config, with errors that name the field."""

import json
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
from kvstore.models.bundled import bundled_config, bundled_models
from kvstore_kernels.formats import dtype_name

Fields = Mapping[str, Any]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
WRAPPERS = {
    "mistral3": "mistral",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Multimodal model types whose caches are those of their `text_config`, and the model type of one that names none."""

MAX_LAYERS = 10_000
"""Far above any model: a slip of the pen becomes an error, not a list of billions."""

LEGACY_LAYER_TYPES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""Names of older configs and what they are called now."""


def read_config(config: Any) -> Fields:
    """The fields of a mapping, a JSON file, a folder with a config.json, a bundled model, or an object with `to_dict`.

    Text is a path if that exists, else the name of a bundled model; a folder without a config.json hides none.

    Raises: PlanError when there is no such file or model, or no JSON object in it.
    """
    if isinstance(config, str):
        is_empty = os.path.isdir(config) and not os.path.exists(os.path.join(config, "config.json"))
        if not os.path.exists(config) or (is_empty and config in bundled_models()):
            return _read_file(bundled_config(config))
    if isinstance(config, str | Path):
        return _read_file(Path(config))
    is_object = hasattr(config, "to_dict") and not isinstance(config, type)
    fields = config.to_dict() if is_object else config
    if not isinstance(fields, Mapping):
        raise PlanError(
            "config: expected a mapping, the path of a JSON file or folder, the name of a bundled model, or a "
            "transformers config object, "
            f"got {config!r} of type {type(config).__name__}"
        )
    return fields


def _read_file(path: Path) -> Fields:
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"config: cannot read {str(file)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"config: expected JSON in {str(file)!r}: {error}") from error
    if not isinstance(fields, dict):
        raise PlanError(f"config: expected a JSON object in {str(file)!r}, got {type(fields).__name__}")
    return fields


def text_fields(outer: Fields, known: Container[str]) -> Fields:
    """The fields that describe the caches: those of `text_config` where a multimodal model nests them.

    A dtype that only the outer config names is taken over. Raises: PlanError for a wrapper without a `text_config`.
    """
    model_type = outer.get("model_type")
    wrapped = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if isinstance(model_type, str) and wrapped is None and model_type in known:
        return outer
    inner: Any = outer.get("text_config")
    inner = inner.to_dict() if hasattr(inner, "to_dict") else inner
    if not isinstance(inner, Mapping):
        if wrapped is None:
            return outer
        raise PlanError(f"text_config: expected a mapping (model_type {model_type!r}), got {inner!r}")
    inner_type = inner.get("model_type") or wrapped
    if wrapped is None and not (isinstance(inner_type, str) and inner_type in known):
        return outer
    named = inner if any(inner.get(key) is not None for key in DTYPE_KEYS) else outer
    dtypes = {key: named.get(key) for key in DTYPE_KEYS}
    return {**inner, "model_type": inner_type, **dtypes}


DTYPE_KEYS = ("dtype", "torch_dtype")


def named_dtype(field: str, value: Any, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    """The dtype of a name such as "bf16" or "torch.bfloat16", or a dtype of the known ones itself.

    Raises: PlanError when it is no known one.
    """
    name = dtype_name(value) if isinstance(value, torch.dtype) else value
    dtype = known.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise PlanError(f"{field}: expected one of {', '.join(known)}, got {value!r}")
    return dtype


def model_dtype(fields: Fields) -> torch.dtype:
    """The dtype that the config names as `dtype` or `torch_dtype`, else bfloat16."""
    for key in DTYPE_KEYS:
        if fields.get(key) is not None:
            return named_dtype(key, fields[key])
    return torch.bfloat16


def count(fields: Fields, name: str, default: int | None = None, minimum: int = 1, maximum: int | None = None) -> int:
    """An integer field; null and absent mean `default`.

    Raises: PlanError when the field is missing without a default, no integer, or out of range.
    """
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise PlanError(f"{name}: expected it in the config (model_type {fields.get('model_type')!r}), found none")
    return plan_int(name, value, minimum, maximum)


def num_layers_of(fields: Fields) -> int:
    """`num_hidden_layers`, the one field that has no default: a config without it describes no model."""
    return count(fields, "num_hidden_layers", minimum=0, maximum=MAX_LAYERS)


def per_layer(fields: Fields, name: str, num_layers: int) -> Sequence[Any] | None:
    """A field with one entry per layer, or None where the config has none.

    Raises: PlanError when it is no list of that length.
    """
    entries = fields.get(name)
    if entries is None:
        return None
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) != num_layers:
        length = f"of {len(entries)}: " if isinstance(entries, Sequence) and not isinstance(entries, str) else ""
        raise PlanError(f"{name}: expected a list of num_hidden_layers = {num_layers} entries, got {length}{entries!r}")
    return entries


def layer_types(
    fields: Fields, num_layers: int, known: Sequence[str], default: Sequence[str], name: str = "layer_types"
) -> Sequence[str]:
    """What each layer is: one of `known`, by today's names; `default` where the config does not say.

    Raises: PlanError for a list of another length, and for a layer of another type.
    """
    entries = per_layer(fields, name, num_layers)
    if entries is None:
        return default
    types = [LEGACY_LAYER_TYPES.get(entry, entry) if isinstance(entry, str) else entry for entry in entries]
    for layer, kind in enumerate(types):
        if kind not in known:
            raise PlanError(f"{name}: layer {layer}: expected {' or '.join(map(repr, known))}, got {kind!r}")
    return types
