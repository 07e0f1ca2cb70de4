"""Gemma3: the forward pass of a Gemma 3 text model over a `KVStore`: layers with a window and layers without.

The transformers model keeps the weights, and its modules do what concerns one token alone, on the tokens of all
sequences at once. What reads other tokens is done here, over the store.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvstore import Batch, KVStore
from kvstore.demo.prefill import Prefill, prefills


class _Rotary(NamedTuple):
    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # likewise, with the sign of the rotation


class _Step:
    """What the layers of a step share: rotary tables by kind of layer, and how prefills lie in what is gathered."""

    def __init__(self, store: KVStore, batches: Sequence[Batch], rotary: dict[str, _Rotary]) -> None:
        self.store, self.rotary = store, rotary
        counts = [batch.num_tokens for batch in batches]
        tokens = [slice(sum(counts[:number]), sum(counts[: number + 1])) for number in range(len(counts))]
        self.parts = list(zip(batches, tokens, strict=True))
        self._prefills: dict[tuple[int | None, bytes], list[Prefill]] = {}

    def prefills(self, layer: str, batch: Batch, window: int | None) -> list[Prefill]:
        """Of the one batch of a step that has several tokens of a sequence."""
        starts = self.store.gather_starts(layer, batch)
        key = (window, starts.tobytes())
        if key not in self._prefills:
            self._prefills[key] = prefills(batch, starts, window)
        return self._prefills[key]


class Gemma3:
    """A transformers Gemma 3 text model that computes over a store.

    The store keeps all rows (`stored="all"`).

    Args:
        reference: a `Gemma3ForCausalLM`.
        max_length: tokens of the longest sequence.

    Raises: ValueError for a model of another family, one with soft caps or bidirectional attention, and a max_length
        beyond the model's positions.
    """

    adapters: tuple[str, ...] = ()

    def __init__(self, reference: Any, max_length: int) -> None:
        config = reference.config
        if config.model_type != "gemma3_text":
            raise ValueError(f"reference: expected a Gemma 3 text model, got {config.model_type}")
        for option in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if getattr(config, option):
                raise ValueError(f"reference: expected a model without {option}, got {getattr(config, option)}")
        if max_length > config.max_position_embeddings:
            raise ValueError(f"max_length: expected at most {config.max_position_embeddings}, got {max_length}")
        self.max_length = max_length
        self.vocab_size: int = config.vocab_size
        self.device: torch.device = reference.device
        self._model, self._head = reference.model, reference.lm_head
        self._kinds: list[str] = config.layer_types
        self._head_dim: int = config.head_dim

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
        positions = torch.cat([batch.positions for batch in batches])
        hidden = self._model.embed_tokens(token_ids)
        step = _Step(store, batches, {kind: self._rotary(hidden, positions, kind) for kind in set(self._kinds)})
        for index, layer in enumerate(self._model.layers):
            attended = self._attention(f"layers.{index}.attn", layer.self_attn, step, layer.input_layernorm(hidden))
            hidden = hidden + layer.post_attention_layernorm(attended)
            fed = layer.mlp(layer.pre_feedforward_layernorm(hidden))
            hidden = hidden + layer.post_feedforward_layernorm(fed)
        logits: torch.Tensor = self._head(self._model.norm(hidden[wanted]))
        return logits

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str) -> _Rotary:
        cos, sin = self._model.rotary_emb(hidden, positions[None], kind)
        half = self._head_dim // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return _Rotary(cos[0].unsqueeze(1), signed[0].unsqueeze(1))

    def _attention(self, name: str, module: Any, step: _Step, hidden: torch.Tensor) -> torch.Tensor:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        query, key, value = (proj(hidden).unflatten(1, (-1, self._head_dim)) for proj in projections)
        table = step.rotary[module.layer_type]
        query, key = _rotated(module.q_norm(query), table), _rotated(module.k_norm(key), table)
        attended = []
        for batch, tokens in step.parts:
            step.store.write(name, batch, key[tokens], value[tokens])
            if batch.is_decode:
                attended.append(step.store.gqa_decode(name, batch, query[tokens], module.scaling)[0])
            else:
                keys, values = step.store.gather(name, batch)
                attended += [
                    prefill.attention(query[tokens], keys, values, module.scaling)
                    for prefill in step.prefills(name, batch, module.sliding_window)
                ]
        projected: torch.Tensor = module.o_proj(torch.cat(attended).flatten(1))
        return projected


def _rotated(heads: torch.Tensor, table: _Rotary) -> torch.Tensor:
    """Rolling by half a head swaps the halves."""
    return torch.addcmul(heads * table.cos, heads.roll(heads.shape[-1] // 2, -1), table.sin)
