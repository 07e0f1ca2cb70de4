"""Reading the fields of a Hugging Face config, with errors that name the field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
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
WRAPPERS = ("mistral3",)
"""Multimodal model types whose caches are those of their `text_config`."""


def read_config(config: Any) -> Fields:
    """The fields of a mapping, a JSON file, a folder with a config.json, or an object with `to_dict`.

    Raises: PlanError when there is no such file, or no JSON object in it.
    """
    if isinstance(config, str | Path):
        return _read_file(Path(config))
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise PlanError(
            "config: expected a mapping, the path of a JSON file or folder, or a transformers config object, "
            f"got {config!r} of type {type(config).__name__}"
        )
    return fields


def _read_file(path: Path) -> Fields:
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"config: cannot read {str(file)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"config: expected JSON in {str(file)!r}: {error}") from error
    if not isinstance(fields, dict):
        raise PlanError(f"config: expected a JSON object in {str(file)!r}, got {type(fields).__name__}")
    return fields


def text_fields(fields: Fields) -> Fields:
    """The fields that describe the caches: those of `text_config` where a multimodal model nests them."""
    if fields.get("model_type") not in WRAPPERS:
        return fields
    inner = fields.get("text_config")
    if not isinstance(inner, Mapping):
        raise PlanError(f"text_config: expected a mapping (model_type {fields['model_type']!r}), got {inner!r}")
    return inner


def row_dtype(kv_dtype: str | torch.dtype | None, *configs: Fields) -> torch.dtype:
    """The dtype asked for, else the first that a config names as `dtype` or `torch_dtype`, else bfloat16.

    Raises: PlanError when it is none of bfloat16, float16, float32.
    """
    named = [("kv_dtype", kv_dtype)] + [
        (key, config.get(key)) for config in configs for key in ("dtype", "torch_dtype")
    ]
    field, value = next(((field, value) for field, value in named if value is not None), ("", torch.bfloat16))
    name = dtype_name(value) if isinstance(value, torch.dtype) else value
    dtype = DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    if dtype is None:
        raise PlanError(f"{field}: expected one of {', '.join(DTYPES)}, got {value!r}")
    return dtype


def count(fields: Fields, name: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer field; null and absent mean `default`.

    Raises: PlanError when the field is missing without a default, no integer, or below `minimum`.
    """
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise PlanError(f"{name}: expected it in the config (model_type {fields.get('model_type')!r}), found none")
    return plan_int(name, value, minimum)
