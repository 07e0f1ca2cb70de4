"""What transformers caches of a model, as layer specs: every row in the dtype that its modules compute in."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from kvstore import CachePlan, LayerSpec, plan_cache, specs_from_config
from kvstore.specs import AnySpec
from kvstore_kernels.formats import dtype_name, latent_format

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "full attention",
        "mistral": "full attention, or a window in every layer",
        "qwen2": "full attention",
        "qwen3": "full attention",
        "gemma3_text": "windows and full attention",
        "gpt_oss": "windows and full attention with sinks",
        "deepseek_v2": "latent rows (MLA)",
        "deepseek_v3": "latent rows (MLA)",
        "deepseek_v32": "latent rows and an indexer",
        "deepseek_v4": "windows, compressed rows of 4 and 128 tokens, an indexer, compressor states",
        "qwen3_next": "recurrent states and full attention",
    }
)
"""The model types that `KVStoreCache` serves, and what their layers keep."""


def model_specs(model: Any, *, block_size: int | None = None) -> dict[str, AnySpec]:
    """The caches of a transformers model, in layer order, as `plan_cache` takes them.

    As `specs_from_config` in the model's dtype, but indexer keys are plain rows of that dtype, and recurrent tensors
    are fp32: transformers quantises neither.

    Args:
        model: a transformers model, or its config; a config without a dtype counts as bfloat16.
        block_size: tokens of a block; None: the family's own, 16, of latent rows 64, of DeepSeek V4 256.

    Raises: TypeError for something else than a model or its config; ValueError for a model type that is none of
        `FAMILIES`; PlanError as `specs_from_config`.
    """
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"model: expected a transformers model or its config, got {type(model).__name__}")
    text = config.get_text_config(decoder=True)
    if text.model_type not in FAMILIES:
        raise ValueError(f"model: expected one of the families {', '.join(FAMILIES)}, got {text.model_type!r}")
    dtype = next((d for d in (getattr(model, "dtype", None), text.dtype) if isinstance(d, torch.dtype)), torch.bfloat16)
    fields = {**text.to_dict(), "dtype": dtype_name(dtype)}
    index_head_dim = fields.get("index_head_dim")
    if index_head_dim is not None:
        fields["index_head_dim"] = 128  # the width of the packed rows, which are replaced below
    has_states = "linear_attention" in (getattr(text, "layer_types", None) or ())
    state_dtype = torch.float32 if has_states else None
    specs = specs_from_config(fields, kv_dtype=dtype, state_dtype=state_dtype, block_size=block_size)
    return {
        name: _plain_keys(spec, index_head_dim, dtype) if name.endswith(".indexer") else _own_width(name, spec, text)
        for name, spec in specs.items()
    }


def plan_model(model: Any, *, block_size: int | None = None, **options: Any) -> CachePlan:
    """`plan_cache` for what transformers caches of a model.

    Args:
        model, block_size: as `model_specs`.
        options: as `plan_cache`: memory or num_frames, layout, grouping, lengths, ...

    Raises: as `model_specs` and `plan_cache`.
    """
    return plan_cache(model_specs(model, block_size=block_size), **options)


def _plain_keys(spec: AnySpec, head_dim: int | None, dtype: torch.dtype) -> AnySpec:
    assert isinstance(spec, LayerSpec)
    assert head_dim is not None
    rows = replace(latent_format(head_dim, head_dim, dtype), page_alignment=spec.format.page_alignment)
    return replace(spec, format=rows)


def _own_width(name: str, spec: AnySpec, text: Any) -> AnySpec:
    """The state of an indexer's compressor as wide as its keys are."""
    if not name.endswith(".indexer_state"):
        return spec
    assert isinstance(spec, LayerSpec)
    (part,) = spec.format.parts
    part = replace(part, head_dim=part.head_dim // 128 * text.index_head_dim)
    return replace(spec, format=replace(spec.format, parts=(part,), area_pitches=(part.num_bytes,)))
