"""StepRows: which rows of DeepSeek V4's caches the tokens of one batch write and read, as slots of the store."""

import numpy as np
import numpy.typing as npt
import torch

from kvstore import Batch, KVStore


class StepRows:
    """The rows of one batch, of one new token per sequence or of several; nothing here loops over sequences.

    Args:
        store, batch: as `Model.forward` has them.
        tokens: where the batch's T tokens are among those of the step.

    Attributes:
        sequence, offset: int64 tensors [T], whose sequence a token is, and its number among that one's new tokens.
        positions: int64 tensor [T].
        max_new_tokens: of one sequence.
    """

    def __init__(self, store: KVStore, batch: Batch, tokens: slice) -> None:
        self.store, self.batch, self.tokens = store, batch, tokens
        counts = batch.num_new_tokens
        self._ends = batch.seq_lens.cpu().numpy().astype(np.int64)
        self._starts = self._ends - counts
        sequence = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._positions = self._starts[sequence] + offset
        self.max_new_tokens = int(counts.max())
        self.sequence, self.offset = self._to_device(sequence), self._to_device(offset)
        self.positions = batch.positions
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._closing: dict[int, torch.Tensor] = {}

    def closing(self, tokens_per_row: int) -> torch.Tensor:
        """int64 [w], the tokens with which a row of `tokens_per_row` tokens is complete."""
        if tokens_per_row not in self._closing:
            closing = np.flatnonzero((self._positions + 1) % tokens_per_row == 0)
            self._closing[tokens_per_row] = self._to_device(closing)
        return self._closing[tokens_per_row]

    def window(self, layer: str, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The rows that tokens see of a layer with a window: their own one last.

        Args:
            tokens: int64 [m]; None: all.

        Returns: slots int64 [m, window], -1 before the sequence begins.

        Raises: ValueError for a layer planned as a ring, which a long step writes over.
        """
        spec = self.store.plan.spec(layer)
        if spec.window is None:
            raise ValueError(f"store: expected a window of rows, got {layer!r} of kind {spec.kind!r}")
        columns = np.arange(spec.window - 1 + self.max_new_tokens)
        slots = self._slots_of(layer, (self._starts - spec.window + 1)[:, None] + columns)
        sequence = self.sequence if tokens is None else self.sequence[tokens]
        offset = self.offset if tokens is None else self.offset[tokens]
        seen = offset[:, None] + torch.arange(spec.window, device=slots.device)
        return slots[sequence[:, None], seen]

    def compressed(self, layer: str) -> torch.Tensor:
        """Slots int64 [n, r] of the rows that each sequence has of a compressed layer, -1 where others have more."""
        tokens_per_row = self.store.plan.spec(layer).tokens_per_row
        rows = np.arange(int(self._ends.max()) // tokens_per_row)
        return self._slots_of(layer, np.broadcast_to(rows, (len(self._ends), len(rows))))

    def num_visible(self, tokens_per_row: int) -> torch.Tensor:
        """int64 [T], how many compressed rows each token sees: those whose tokens are not after it."""
        return (self.positions + 1) // tokens_per_row

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...] as [n, max_new_tokens, ...], zero behind the tokens of shorter sequences."""
        result = values.new_zeros(len(self._ends), self.max_new_tokens, *values.shape[1:])
        result[self.sequence, self.offset] = values
        return result

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """[n, max_new_tokens, ...] as [T, ...]."""
        return values[self.sequence, self.offset]

    def _slots_of(self, layer: str, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Layers of one group have their rows in the same slots."""
        plan = self.store.plan
        key = (plan.group_index(layer), plan.spec(layer).tokens_per_row)
        if key not in self._slots:
            self._slots[key] = self.store.slots_of(layer, self.batch, rows)
        return self._slots[key]

    def _to_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.batch.positions.device)
