"""MLA models: DeepSeek V2, V3 and V3.2, Mistral 4. Every layer caches one latent row, on V3.2 also an indexer's key."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from kvstore.errors import PlanError
from kvstore.models.caches import LATENT_BLOCK, indexer_rows, latent_layer
from kvstore.models.config import Fields, count, layer_types, num_layers_of
from kvstore.models.options import ModelOptions
from kvstore.models.stages import Family, LayerCaches, name_layers
from kvstore.specs import AnySpec, LayerSpec

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def mla_layer(fields: Fields, options: ModelOptions) -> LayerSpec:
    """The latent row of `kv_lora_rank` columns and the rope columns. Every rank holds it whole."""
    value_dim = count(fields, "kv_lora_rank")
    return latent_layer(value_dim + count(fields, "qk_rope_head_dim"), value_dim, options)


def _latent_layers(fields: Fields, options: ModelOptions, *, defaults: Fields) -> dict[str, AnySpec]:
    fields = {**defaults, **fields}
    if fields.get("compress_ratios") is not None:
        raise PlanError(
            f"compress_ratios: expected none (model_type {fields['model_type']!r}), got {fields['compress_ratios']!r}"
        )
    num_layers = num_layers_of(fields)
    layer: LayerCaches = {"attn": mla_layer(fields, options)}
    if fields.get("index_topk") is not None:
        layer_types(fields, num_layers, ("indexed_attention",), ())
        layer = _indexed_layer(fields, options)
    return name_layers([layer] * num_layers, layer, options)


def _indexed_layer(fields: Fields, options: ModelOptions) -> LayerCaches:
    """Sparse kernels index whole plain rows, so the distance between blocks has to be a number of rows."""
    rows = indexer_rows({**fields, "index_head_dim": fields.get("index_head_dim", 128)}, options, known=(132,))
    indexer = LayerSpec("latent", options.block(LATENT_BLOCK), rows, num_shards=1)
    attn = mla_layer(fields, options)
    if isinstance(options.rows, torch.dtype):
        attn = replace(attn, block_stride_multiple=attn.format.row_bytes)
    return {"indexer": indexer, "attn": attn}


MODEL_TYPES: Mapping[str, Family] = {
    "deepseek_v2": partial(_latent_layers, defaults=MLA),
    "deepseek_v3": partial(_latent_layers, defaults=MLA),
    "deepseek_v32": partial(_latent_layers, defaults={**MLA, "index_topk": 2048}),
    "mistral4": partial(_latent_layers, defaults={**MLA, "kv_lora_rank": 256}),
}
