"""Attention of DeepSeek V4 over a store: a window of rows, and compressed rows that a compressor makes on the way.

.state, .indexer_state   K and gate of the last tokens, fp32, which a compressor joins to one row when it is complete
.compressed              a row for 4 tokens (an indexer picks some for each query) or for 128 (all are read)
.indexer                 keys for the picking, a row for 4 tokens, made as the compressed rows are
.window                  a row for each of the last tokens; K and V are the same
"""

from typing import Any, NamedTuple

import torch

from kvstore.demo.deepseek_v4_rows import StepRows


class Rotary(NamedTuple):
    """Angles of tokens: [num_tokens, pairs] each, one for every two of the trailing columns."""

    cos: torch.Tensor
    sin: torch.Tensor

    def of(self, tokens: slice) -> "Rotary":
        """Those of some of the tokens."""
        return Rotary(self.cos[tokens], self.sin[tokens])

    def backwards(self) -> "Rotary":
        """The rotation that takes this one back."""
        return Rotary(self.cos, -self.sin)


def rotated(values: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """[num_tokens, ..., dim] with adjacent pairs of the trailing columns rotated, in fp32."""
    num_pairs = rotary.cos.shape[-1]
    shape = (len(values), *(1 for _ in values.shape[2:]), num_pairs)
    cos, sin = rotary.cos.reshape(shape), rotary.sin.reshape(shape)
    kept, turned = values.split([values.shape[-1] - 2 * num_pairs, 2 * num_pairs], -1)
    first, second = turned.float().unflatten(-1, (num_pairs, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([kept, pairs.flatten(-2).to(values.dtype)], -1)


def attention(module: Any, name: str, parts: list[StepRows], hidden: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Attention of one layer for all tokens of a step.

    Args:
        module: transformers' attention of the layer.
        name: "layers.{i}".
        parts: the batches of the step.
        hidden: [num_tokens, hidden_size], normed.
        rotary: of the layer's kind, at the positions of the tokens.

    Returns: [num_tokens, hidden_size].
    """
    residual = module.q_a_norm(module.q_a_proj(hidden))
    query = rotated(module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (-1, module.head_dim))), rotary)
    rows = rotated(module.kv_norm(module.kv_proj(hidden)), rotary)
    attended = []
    for part in parts:
        tokens, window = part.tokens, f"{name}.window"
        part.store.write(window, part.batch, rows[tokens])
        picked = None
        if module.compressor is not None:
            picked = _compressed(module.compressor, name, part, hidden[tokens], residual[tokens], rotary.of(tokens))
        out, _ = part.store.sparse_mla_decode(
            window,
            part.batch,
            query[tokens],
            part.window(window),
            module.scaling,
            second=None if picked is None else (f"{name}.compressed", picked),
            sinks=module.sinks.float(),
        )
        attended.append(out)
    # The rows are V as well, rotated to their positions: turned back by the query's, what is left is the distance.
    unturned = rotated(torch.cat(attended), rotary.backwards())
    grouped = module.o_a_proj(unturned.reshape(len(hidden), module.config.o_groups, -1))
    projected: torch.Tensor = module.o_b_proj(grouped.flatten(1))
    return projected


def _compressed(
    module: Any, name: str, part: StepRows, hidden: torch.Tensor, residual: torch.Tensor, rotary: Rotary
) -> torch.Tensor | None:
    """Makes the rows that this step completes. Returns the slots [T, k] that each token reads, None without any row.

    An indexer is a compressor too, of keys; it then picks.
    """
    _compress(module, f"{name}.state", f"{name}.compressed", part, hidden)
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        _compress(indexer, f"{name}.indexer_state", f"{name}.indexer", part, hidden)
    slots = part.compressed(f"{name}.compressed")
    num_rows = slots.shape[1]
    if num_rows == 0:
        return None
    visible = part.num_visible(module.compress_rate)[:, None]
    slots = slots[part.sequence]
    if indexer is None:
        return slots.masked_fill(torch.arange(num_rows, device=slots.device) >= visible, -1)
    scores = _scores(indexer, f"{name}.indexer", part, hidden, residual, rotary)
    scores = scores.masked_fill(torch.arange(num_rows, device=slots.device) >= visible, -torch.inf)
    best = scores.topk(min(indexer.index_topk, num_rows), dim=-1).indices
    return slots.gather(1, best).masked_fill(best >= visible, -1)


def _compress(module: Any, state: str, layer: str, part: StepRows, hidden: torch.Tensor) -> None:
    """Writes K and gate of the new tokens to `state`, and to `layer` the rows that they complete."""
    store, batch, rate = part.store, part.batch, module.compress_rate
    store.write(state, batch, torch.cat([module.kv_proj(hidden), module.gate_proj(hidden)], -1).float())
    closing = part.closing(rate)
    if len(closing) == 0:
        return
    slots = part.window(state, closing)  # [w, rate] or, where rows overlap, [w, 2 * rate]
    (read,) = store.read(state, batch, slots.flatten())
    values, gates = read.view(*slots.shape, -1).chunk(2, -1)
    gates = (gates.unflatten(1, (-1, rate)) + module.position_bias).flatten(1, 2)
    if slots.shape[1] > rate:
        values, gates = (_overlapped(each, rate, module.head_dim) for each in (values, gates))
        gates = gates.masked_fill(slots[..., None] < 0, -torch.inf)
    values = values.to(hidden.dtype)
    weights = gates.softmax(1, dtype=torch.float32).to(values.dtype)
    rows = module.kv_norm((values * weights).sum(1))
    # A compressed row stands where its first token does.
    positions = part.positions[closing] + 1 - rate
    cos, sin = module.rotary_emb(rows[None], position_ids=positions[None], layer_type=module.rope_layer_type)
    rows = rotated(rows, Rotary(cos[0], sin[0]))
    store.write(layer, batch, rows, slots=store.slot_mapping(layer, batch)[closing])


def _overlapped(values: torch.Tensor, rate: int, head_dim: int) -> torch.Tensor:
    """[w, 2 * rate, 2 * head_dim] as [w, 2 * rate, head_dim]: a token's first half counts in the row after its own."""
    return torch.cat([values[:, :rate, :head_dim], values[:, rate:, head_dim:]], 1)


def _scores(
    indexer: Any, layer: str, part: StepRows, hidden: torch.Tensor, residual: torch.Tensor, rotary: Rotary
) -> torch.Tensor:
    """[T, r], how much each token wants each compressed row of its sequence."""
    slots = part.compressed(layer)
    (keys,) = part.store.read(layer, part.batch, slots.flatten())
    query = rotated(indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim)), rotary)
    scores = indexer.scorer(part.padded(query), keys.view(*slots.shape, -1), part.padded(hidden))
    return part.packed(scores)
