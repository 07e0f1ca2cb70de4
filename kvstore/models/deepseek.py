"""DeepSeek V2 and V3 (MLA): every layer caches one latent row per token."""

import torch

from kvstore.errors import PlanError
from kvstore.models.config import Fields, count
from kvstore.specs import LayerSpec, latent


def _latent_layers(
    fields: Fields, dtype: torch.dtype, block_size: int | None, tensor_parallel: int
) -> dict[str, LayerSpec]:
    """Every rank holds all layers whole, because all query heads read the same row."""
    for name in ("index_topk", "compress_ratios"):
        if fields.get(name) is not None:
            raise PlanError(f"{name}: indexer and compressed caches are not planned yet, got {fields[name]!r}")
    value_dim = count(fields, "kv_lora_rank")
    latent_dim = value_dim + count(fields, "qk_rope_head_dim")
    spec = latent(latent_dim, value_dim, dtype=dtype, block_size=64 if block_size is None else block_size)
    return {f"layers.{layer}.attn": spec for layer in range(count(fields, "num_hidden_layers", minimum=0))}


MODEL_TYPES = {"deepseek_v2": _latent_layers, "deepseek_v3": _latent_layers}
