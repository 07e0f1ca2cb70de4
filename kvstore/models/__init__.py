"""From a Hugging Face config to layer specs: one small file per family of models."""

from collections.abc import Mapping
from typing import Any

import torch

from kvstore.errors import PlanError
from kvstore.models import deepseek, deepseek_v4, gemma4, linear, llama, mamba, windowed
from kvstore.models.config import model_dtype, named_dtype, read_config, text_fields
from kvstore.models.options import ModelOptions, rows_from
from kvstore.models.stages import Family
from kvstore.specs import AnySpec

FAMILIES: Mapping[str, Family] = {
    **llama.MODEL_TYPES,
    **windowed.MODEL_TYPES,
    **gemma4.MODEL_TYPES,
    **deepseek.MODEL_TYPES,
    **deepseek_v4.MODEL_TYPES,
    **linear.MODEL_TYPES,
    **mamba.MODEL_TYPES,
}
"""model_type -> the function (fields of a config, ModelOptions) -> {layer: spec}."""


def specs_from_config(
    config: Any,
    *,
    kv_dtype: str | torch.dtype | None = None,
    state_dtype: str | torch.dtype | None = None,
    block_size: int | None = None,
    indexer_row_bytes: int | None = None,
    num_draft_layers: int = 0,
    tensor_parallel: int = 1,
    pipeline_stages: int = 1,
    pipeline_stage: int | None = None,
    ring_states: bool = False,
) -> dict[str, AnySpec]:
    """The caches of a model as one rank holds them, in layer order: "layers.{i}.attn" and the like, "draft.{i}.attn".

    `config` is a Hugging Face config: a mapping, the path of a JSON file or of a folder with a config.json, the name of
    a bundled model (`bundled_models`), or a transformers config object. A field that it leaves out has the default of
    its class in transformers, except the number of layers. Caches beside "attn": "state" (recurrent), "indexer"
    (DeepSeek V3.2 and V4), and V4's "window", "compressed", "state" and "indexer_state" (of its compressors). Layers
    without a cache are left out; layers that read the cache of another are Alias.

    Args:
        config: as above.
        kv_dtype: rows as they are ("bf16", "fp16", "fp32", "fp8", or a torch dtype; default: the config's dtype, else
            bfloat16), with a scale per token and KV head ("int8_per_token_head", "fp8_per_token_head"), or DeepSeek's
            packed latent rows ("fp8_ds_mla").
        state_dtype: dtype of the recurrent tensor of a state; default: the config's, else the family's.
        block_size: tokens of a block, by default 16, of latent rows 64, on V4 256 (its windows a quarter of it).
        indexer_row_bytes: bytes of an indexer's key: 132 (default), or 68 on V4.
        num_draft_layers: draft (MTP) layers that a speculative engine runs, as many as it likes.
        tensor_parallel: ranks among which KV heads and the channels of states are divided. With fewer KV heads than
            ranks they are replicated, as latent rows always are.
        pipeline_stages, pipeline_stage: contiguous ranges of layers, and which one (from 0); draft layers are on the
            last.
        ring_states: V4's compressor states as rings, one block per sequence.

    Raises: PlanError for an unreadable config, an unknown model_type, a field that is missing, out of range or in
        contradiction to another, and an option that the model has no use for.
    """
    outer = read_config(config)
    fields = text_fields(outer, FAMILIES)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise PlanError(
            f"model_type: expected one of {', '.join(FAMILIES)}, or a text_config of one; got {model_type!r}"
        )
    if fields.get("per_layer_config") is not None and model_type not in gemma4.MODEL_TYPES:
        raise PlanError(f"per_layer_config: expected none (model_type {model_type!r})")
    options = ModelOptions(
        rows=model_dtype(fields) if kv_dtype is None else rows_from(kv_dtype),
        state_dtype=None if state_dtype is None else named_dtype("state_dtype", state_dtype),
        block_size=block_size,
        indexer_row_bytes=indexer_row_bytes,
        num_draft_layers=num_draft_layers,
        tensor_parallel=tensor_parallel,
        pipeline_stages=pipeline_stages,
        pipeline_stage=pipeline_stage,
        ring_states=ring_states,
    )
    return FAMILIES[model_type](fields, options)
