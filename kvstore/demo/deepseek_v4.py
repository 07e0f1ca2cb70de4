"""DeepseekV4: the forward pass of a DeepSeek V4 model over a `KVStore`, and what its layers cache.

The transformers model keeps the weights, and its modules do what concerns one token alone, on the tokens of all
sequences at once. What reads other tokens is done in `deepseek_v4_attention`, over the store.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvstore import Batch, KVStore, LayerSpec, specs_from_config
from kvstore.demo.deepseek_v4_attention import Rotary, attention
from kvstore.demo.deepseek_v4_rows import StepRows
from kvstore_kernels import latent_format


def cache_specs(config: Any, dtype: torch.dtype, block_size: int) -> dict[str, Any]:
    """What to plan for `DeepseekV4`: rows as they are, those of the indexers too, and compressor states as windows.

    Args:
        config: a `DeepseekV4Config`.
        dtype: of the rows; compressor states are fp32.
        block_size: tokens of a block of compressed rows, a multiple of 128; a prefix is found by whole blocks of it.

    Raises: PlanError as `specs_from_config`.
    """
    specs = specs_from_config(config, kv_dtype=dtype, block_size=block_size)
    keys = latent_format(config.index_head_dim, config.index_head_dim, dtype)
    for name, spec in specs.items():
        if name.endswith(".indexer") and isinstance(spec, LayerSpec):
            specs[name] = replace(spec, format=replace(keys, page_alignment=spec.format.page_alignment))
    return dict(specs)


class DeepseekV4:
    """A transformers DeepSeek V4 model that computes over a store.

    The store keeps all rows (`stored="all"`), planned by `cache_specs`.

    Args:
        reference: a `DeepseekV4ForCausalLM`.
        max_length: tokens of the longest sequence.

    Raises: ValueError for a model of another family, and a max_length beyond the model's positions.
    """

    adapters: tuple[str, ...] = ()

    def __init__(self, reference: Any, max_length: int) -> None:
        config = reference.config
        if config.model_type != "deepseek_v4":
            raise ValueError(f"reference: expected a DeepSeek V4 model, got {config.model_type}")
        if max_length > config.max_position_embeddings:
            raise ValueError(f"max_length: expected at most {config.max_position_embeddings}, got {max_length}")
        self.max_length = max_length
        self.vocab_size: int = config.vocab_size
        self.device: torch.device = reference.device
        self._model, self._head = reference.model, reference.lm_head
        self._num_streams: int = config.hc_mult

    @torch.inference_mode()
    def forward(
        self,
        store: KVStore,
        batches: Sequence[Batch],
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        adapter_idx: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step, see `kvstore.demo.protocol.Model`; `adapter_idx` is None, as there are no adapters."""
        parts, first = [], 0
        for batch in batches:
            parts.append(StepRows(store, batch, slice(first, first + batch.num_tokens)))
            first += batch.num_tokens
        positions = torch.cat([batch.positions for batch in batches])[None]
        embedded = self._model.embed_tokens(token_ids[None])
        rotary = {kind: self._rotary(embedded, positions, kind) for kind in self._model.rotary_emb.layer_types}
        streams = embedded.unsqueeze(2).expand(-1, -1, self._num_streams, -1).contiguous()
        for index, layer in enumerate(self._model.layers):
            post, comb, hidden = layer.attn_hc(streams)
            turned = rotary[layer.self_attn.rope_layer_type]
            normed = layer.input_layernorm(hidden)[0]
            streams = _mixed(streams, post, comb, attention(layer.self_attn, f"layers.{index}", parts, normed, turned))
            post, comb, hidden = layer.ffn_hc(streams)
            fed = layer.mlp(layer.post_attention_layernorm(hidden), input_ids=token_ids[None])
            streams = _mixed(streams, post, comb, fed[0])
        logits: torch.Tensor = self._head(self._model.norm(self._model.hc_head(streams[:, wanted])))[0]
        return logits

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> Rotary:
        cos, sin = self._model.rotary_emb(hidden, position_ids=positions, layer_type=kind)
        return Rotary(cos[0], sin[0])


def _mixed(streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """The streams [1, T, s, hidden_size] mixed with each other, and a block's output [T, hidden_size] spread over."""
    dtype = streams.dtype
    spread = post.to(dtype).unsqueeze(-1) * added[None].unsqueeze(-2)
    return spread + torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
