"""Llama: the forward pass of a Llama-family model over a `KVStore`, in plain torch."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from kvstore import Batch, KVStore
from kvstore.demo.prefill import Prefill, prefills


class LowRank(NamedTuple):
    """What an adapter adds to the query, key and value weights of one layer: a product of two thin matrices (LoRA)."""

    down: torch.Tensor  # [hidden_size, rank]
    up: torch.Tensor  # [rank, (num_heads + 2 * num_kv_heads) * head_dim]


class _Layer(NamedTuple):
    """The weights of one layer. Matrices are [in, out]: for few tokens a CPU multiplies by them a third faster."""

    name: str
    input_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    low_ranks: tuple[LowRank, ...]  # of each adapter


class _Step(NamedTuple):
    """What all layers of a step share. A part is a batch, its tokens in the step, and its prefills (None: decode).

    `adapted` names of each adapter in use its number and its tokens.
    """

    store: KVStore
    parts: list[tuple[Batch, slice, list[Prefill] | None]]
    cos: torch.Tensor
    sin: torch.Tensor
    adapted: list[tuple[int, torch.Tensor]]


class Llama:
    """The weights of a transformers Llama model, fused for inference; the model itself is left as it is.

    Args:
        reference: a `LlamaForCausalLM`.
        max_length: tokens of the longest sequence.
        adapters: by name, what each adds to the layers in turn.

    Raises: ValueError for a model of another family, or one with biases, and for an adapter of other shapes.
    """

    def __init__(
        self, reference: Any, max_length: int, adapters: Mapping[str, Sequence[LowRank]] | None = None
    ) -> None:
        config = reference.config
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
            raise ValueError(f"reference: expected a Llama model with SiLU and no biases, got {config.model_type}")
        if max_length > config.max_position_embeddings:
            raise ValueError(f"max_length: expected at most {config.max_position_embeddings}, got {max_length}")
        self.max_length = max_length
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.eps: float = config.rms_norm_eps
        state = {name: weight.detach() for name, weight in reference.state_dict().items()}
        self.embedding = state["model.embed_tokens.weight"]
        self.vocab_size = len(self.embedding)
        self.norm = state["model.norm.weight"]
        self.head = state["lm_head.weight"].t().contiguous()
        self.adapters = tuple(adapters or ())
        columns = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        for name, low_ranks in (adapters or {}).items():
            _check_adapter(name, low_ranks, config.num_hidden_layers, config.hidden_size, columns)
        self.layers = [
            _fused_layer(state, index, tuple(low_ranks[index] for low_ranks in (adapters or {}).values()))
            for index in range(config.num_hidden_layers)
        ]
        self.device = self.embedding.device
        # The model's own table, so that every kind of rotary scaling comes out as transformers has it.
        cos, sin = reference.model.rotary_emb(self.embedding, torch.arange(max_length, device=self.device)[None])
        half = self.head_dim // 2
        self.cos = cos.reshape(max_length, 1, self.head_dim)
        self.sin = torch.cat([-sin[..., :half], sin[..., half:]], -1).reshape(max_length, 1, self.head_dim)

    @torch.inference_mode()
    def forward(
        self,
        store: KVStore,
        batches: Sequence[Batch],
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        adapter_idx: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs one step: the batches' tokens go through every layer together, attention is each batch's own.

        Args:
            store: what the batches were extended in; K and V of the new tokens are written to it.
            batches: decode batches (one new token per sequence) and prefill batches, in the order of `token_ids`.
            token_ids: int64 [num_tokens], the new tokens of all batches.
            wanted: int64 [m], indices of the tokens whose logits are returned.
            adapter_idx: int64 [num_tokens], 0 for none, from 1 on in the order of `adapters`. None: none anywhere.

        Returns: logits [m, vocab_size].
        """
        positions = torch.cat([batch.positions for batch in batches])
        parts, first = [], 0
        for batch in batches:
            last = first + batch.num_tokens
            parts.append((batch, slice(first, last), None if batch.is_decode else prefills(batch)))
            first = last
        adapted = []
        if adapter_idx is not None:
            used = [int(number) for number in adapter_idx.unique() if number]
            adapted = [(number - 1, torch.nonzero(adapter_idx == number).squeeze(1)) for number in used]
        step = _Step(store, parts, self.cos[positions], self.sin[positions], adapted)
        hidden = functional.embedding(token_ids, self.embedding)
        for layer in self.layers:
            hidden = self._mlp(layer, self._attention(layer, step, hidden))
        return torch.mm(self._rms_norm(hidden[wanted], self.norm), self.head)

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.eps)

    def _attention(self, layer: _Layer, step: _Step, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._rms_norm(hidden, layer.input_norm)
        qkv = torch.mm(normed, layer.qkv)
        for number, adapted in step.adapted:
            down, up = layer.low_ranks[number]
            qkv.index_add_(0, adapted, normed[adapted] @ down @ up)
        qkv = qkv.unflatten(1, (-1, self.head_dim))
        rotated, value = qkv.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        # Rolling by half a head swaps the halves; the sign of the rotation is in the table of sines.
        rotated = torch.addcmul(rotated * step.cos, rotated.roll(self.head_dim // 2, -1), step.sin)
        query, key = rotated.split([self.num_heads, self.num_kv_heads], dim=1)
        attended = []
        for batch, tokens, of_sequences in step.parts:
            step.store.write(layer.name, batch, key[tokens], value[tokens])
            if of_sequences is None:
                attended.append(step.store.gqa_decode(layer.name, batch, query[tokens])[0])
            else:
                keys, values = step.store.gather(layer.name, batch)
                attended += [prefill.attention(query[tokens], keys, values) for prefill in of_sequences]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended)
        return torch.addmm(hidden, joined.reshape(len(hidden), -1), layer.out)

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = torch.mm(self._rms_norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down)


def _check_adapter(name: str, low_ranks: Sequence[LowRank], num_layers: int, hidden_size: int, columns: int) -> None:
    """Raises ValueError where an adapter does not fit the model."""
    if len(low_ranks) != num_layers:
        raise ValueError(
            f"adapters[{name!r}]: expected one entry for each of {num_layers} layers, got {len(low_ranks)}"
        )
    for down, up in low_ranks:
        if (len(down), up.shape[-1]) != (hidden_size, columns) or down.shape[-1] != len(up):
            raise ValueError(
                f"adapters[{name!r}]: expected [{hidden_size}, rank] and [rank, {columns}], "
                f"got {list(down.shape)} and {list(up.shape)}"
            )


def _fused_layer(state: dict[str, torch.Tensor], index: int, low_ranks: tuple[LowRank, ...]) -> _Layer:
    def matrix(*names: str) -> torch.Tensor:
        return torch.cat([state[f"model.layers.{index}.{name}_proj.weight"] for name in names]).t().contiguous()

    return _Layer(
        name=f"layers.{index}.attn",
        input_norm=state[f"model.layers.{index}.input_layernorm.weight"],
        qkv=matrix("self_attn.q", "self_attn.k", "self_attn.v"),
        out=matrix("self_attn.o"),
        mlp_norm=state[f"model.layers.{index}.post_attention_layernorm.weight"],
        gate_up=matrix("mlp.gate", "mlp.up"),
        down=matrix("mlp.down"),
        low_ranks=low_ranks,
    )
