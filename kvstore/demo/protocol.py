"""Model: what the engine asks of a forward pass, whatever the model caches."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kvstore import Batch, KVStore


class Model(Protocol):
    """A model that computes new tokens over a store. `Llama`, `Gemma3` and `DeepseekV4` are three.

    Attributes:
        max_length: tokens of the longest sequence.
        vocab_size: token ids are below it.
        adapters: names that a request may ask for; empty for a model without any.
        device: where `token_ids` and the logits are.
    """

    @property
    def max_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def adapters(self) -> Sequence[str]: ...

    @property
    def device(self) -> torch.device: ...

    def forward(
        self,
        store: KVStore,
        batches: Sequence[Batch],
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        adapter_idx: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the rows of the batches' tokens, in every layer, and reads them.

        Args:
            store: what the batches were extended in.
            batches: at most one of one new token per sequence (decode), and then one of several (prefill).
            token_ids: int64 [num_tokens], the new tokens of all batches in turn.
            wanted: int64 [m], indices of the tokens whose logits are returned.
            adapter_idx: int64 [num_tokens], 0 for none, from 1 on in the order of `adapters`. None: none anywhere.

        Returns: logits [m, vocab_size].
        """
        ...
