"""Attention of a prefill batch over K and V gathered from the store, one sequence at a time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvstore import Batch


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence of a prefill batch: its tokens in the batch, its rows in a gather, and what each token may see."""

    tokens: slice
    rows: slice
    mask: torch.Tensor | None  # [num_tokens, num_rows] bool; None where causality says it all

    def attention(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float | None = None
    ) -> torch.Tensor:
        """Attention of this sequence's tokens.

        Args:
            query: [num_tokens, num_heads, head_dim], of the whole batch.
            keys, values: [num_rows, num_kv_heads, head_dim], as gathered for the whole batch.
            softmax_scale: None: head_dim ** -0.5.

        Returns: [tokens of this sequence, num_heads, head_dim].
        """
        attended = functional.scaled_dot_product_attention(
            query[self.tokens].transpose(0, 1)[None],
            keys[self.rows].transpose(0, 1)[None],
            values[self.rows].transpose(0, 1)[None],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=softmax_scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


def prefills(batch: Batch, starts: npt.NDArray[np.int64] | None = None, window: int | None = None) -> list[Prefill]:
    """How the sequences of a batch lie in its tokens and in a gather of their rows.

    Args:
        starts: int64 [n], the first gathered row of each sequence, from `KVStore.gather_starts`. None: 0.
        window: tokens that a query sees, its own included. None: all.
    """
    result, first_token, first_row = [], 0, 0
    ends = batch.seq_lens.tolist()
    first_rows = [0] * len(ends) if starts is None else starts.tolist()
    for num_tokens, end, start in zip(batch.num_new_tokens.tolist(), ends, first_rows, strict=True):
        num_rows, mask = end - start, None
        if num_rows > num_tokens or (window is not None and num_rows > window):
            visible = torch.ones(num_tokens, num_rows, dtype=torch.bool, device=batch.seq_lens.device)
            mask = visible.tril(num_rows - num_tokens)
            if window is not None:
                mask = mask.triu(num_rows - num_tokens - window + 1)
        tokens = slice(first_token, first_token + num_tokens)
        rows = slice(first_row, first_row + num_rows)
        result.append(Prefill(tokens, rows, mask))
        first_token, first_row = tokens.stop, rows.stop
    return result
