"""From a Hugging Face config to layer specs: one small file per family of models."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
from kvstore.models import deepseek, llama
from kvstore.models.config import WRAPPERS, Fields, read_config, row_dtype, text_fields
from kvstore.specs import LayerSpec

Family = Callable[[Fields, torch.dtype, int | None, int], dict[str, LayerSpec]]

FAMILIES: Mapping[str, Family] = {**llama.MODEL_TYPES, **deepseek.MODEL_TYPES}
"""model_type -> the function (fields, dtype of rows, block size or None, tensor-parallel ranks) -> {layer: spec}."""


def specs_from_config(
    config: Any, *, kv_dtype: str | torch.dtype | None = None, block_size: int | None = None, tensor_parallel: int = 1
) -> dict[str, LayerSpec]:
    """The caches of a model as one of `tensor_parallel` ranks holds them: {"layers.{i}.attn": spec}, in layer order.

    `config` is a Hugging Face config: a mapping, the path of a JSON file or of a folder with a config.json, or a
    transformers config object. Rows take `kv_dtype`, else the config's `dtype` or `torch_dtype`, else bfloat16. A
    block takes `block_size` tokens, by default 16, of latent rows 64. Draft (MTP) layers are left out.

    Raises: PlanError for an unreadable config, an unknown model_type, and a field that is missing or out of range.
    """
    plan_int("tensor_parallel", tensor_parallel, 1)
    if block_size is not None:
        plan_int("block_size", block_size, 1)
    outer = read_config(config)
    fields = text_fields(outer)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        later = model_type in ("deepseek_v32", "deepseek_v4")
        hint = ": indexer and compressed caches are not planned yet" if later else ""
        raise PlanError(
            f"model_type: expected one of {', '.join(FAMILIES)}, or {', '.join(WRAPPERS)} around one; "
            f"got {model_type!r}{hint}"
        )
    return FAMILIES[model_type](fields, row_dtype(kv_dtype, fields, outer), block_size, tensor_parallel)
