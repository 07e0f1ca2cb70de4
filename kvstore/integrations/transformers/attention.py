"""The attention function "kvstore" of transformers: decode steps read pages, other steps the columns of the cache."""

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvstore.integrations.transformers.layers import PAGES

NAME = "kvstore"


def register_attention() -> str:
    """Makes `attn_implementation="kvstore"` known to transformers.

    Returns: the name, for `from_pretrained(..., attn_implementation=...)` or `model.set_attn_implementation(...)`.
    """
    AttentionInterface.register(NAME, kvstore_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def kvstore_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; with a `KVStoreCache`, a step of one new token per row reads pages.

    Args:
        query: [rows, num_heads, num_columns, head_dim].
        key, value: [rows, num_kv_heads, num_keys, head_dim]; of a step that reads pages the new column only.
        attention_mask: additive [rows, 1, num_columns, num_keys]; None: every query sees all keys.
        scaling: what scores are multiplied with; None: head_dim ** -0.5.
        softcap, s_aux: the bound of the scores, and the logit of each head's sink.
        indices: [rows, num_columns, k], the keys that an indexer leaves to each query.

    Returns: [rows, num_columns, num_heads, head_dim_v], and None: no weights.

    Raises: ValueError for a dropout, which is for training.
    """
    if dropout:
        raise ValueError(f"dropout: expected 0, pages are for inference, got {dropout}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = kwargs.get(PAGES)
    if layer is not None:
        reads_pages = layer.reads_pages and layer.cache.forward.reads_pages
        layer.reads_pages = True  # from the next step on; of this one the columns may be here already
        if reads_pages:
            mask = None if attention_mask is None else attention_mask.reshape(len(query), -1) == 0
            sinks = None if s_aux is None else s_aux.float()
            options = {"sinks": sinks, "soft_cap": softcap, "indices": indices, "visible": mask}
            return layer.decode(module, query, scale, **options), None
    if indices is not None:
        assert attention_mask is not None
        hidden = torch.ones_like(attention_mask, dtype=torch.bool).scatter(-1, indices.unsqueeze(1).long(), False)
        attention_mask = attention_mask.masked_fill(hidden, torch.finfo(attention_mask.dtype).min)
    return _attend(query, key, value, attention_mask, scale, softcap, s_aux).transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[rows, num_heads, num_columns, head_dim_v]."""
    if soft_cap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    queries_per_kv = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(queries_per_kv, dim=1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value
