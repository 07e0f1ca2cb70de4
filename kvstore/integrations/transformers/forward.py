"""Forward: one pass of a model over a batch whose rows are padded on the left, and the store's sequences behind it.

transformers sees columns: tokens of all rows side by side, padding first. The store sees positions: the tokens of each
sequence alone. Column c of a row with p tokens of padding is position c - p. All rows start a pass at one column; a
row that has found more in the prefix index than others computes some tokens again, and their rows are dropped.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore import Batch, KVStore

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Forward:
    """A pass that has begun: `num_columns` new columns from `start` on.

    Attributes:
        batch: one sequence per row of the model's batch, or per `width` equal rows of it (beams before they part).
        pads: int64 [n], tokens of padding of each sequence.
        begun: the layers of the model that have taken part.
        written: the layers of the plan whose rows are all there.
        has_shown_positions: whether a module has, and they were looked at.
    """

    store: KVStore
    batch: Batch
    start: int
    num_columns: int
    pads: Ints
    width: int
    begun: set[int] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    has_shown_positions: bool = False
    _chosen: torch.Tensor | None = field(init=False, default=None)
    _slots: dict[tuple[Any, ...], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        counts = self.batch.num_new_tokens
        if (counts < self.num_columns).any():
            row, column = np.nonzero(np.arange(self.num_columns) >= (self.num_columns - counts)[:, None])
            chosen = torch.from_numpy(row * self.num_columns + column)
            self._chosen = chosen.to(self.store.device)

    @property
    def end(self) -> int:
        """The column behind the last new one."""
        return self.start + self.num_columns

    @property
    def reads_pages(self) -> bool:
        """Whether decode kernels can serve it: one new token for each row."""
        return self.num_columns == 1 and self.batch.is_decode and self.width == 1

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows of the model's batch, ...] -> [n, ...]: one of each `width` equal ones."""
        return rows[:: self.width]

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [rows of the model's batch, ...]."""
        return rows if self.width == 1 else rows.repeat_interleave(self.width, dim=0)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """[rows, num_columns, ...] -> [T, ...], the tokens of the batch one sequence behind the other."""
        packed = self.narrow(states).flatten(0, 1)
        return packed.contiguous() if self._chosen is None else packed[self._chosen]

    def write(self, layer: str, *states: torch.Tensor) -> None:
        """Writes the rows of a layer: one tensor [rows, num_heads, num_columns, dim] per part.

        Raises: ValueError where they do not fit the plan.
        """
        self.expect_rows(layer, states)
        self.store.write(layer, self.batch, *(self.pack(part.transpose(1, 2)) for part in states))
        self.written.add(layer)

    def write_at(self, layer: str, first: int, rows: torch.Tensor) -> None:
        """Writes the rows `first` on of a layer without padding: [rows of the model's batch, count, dim]."""
        slots = self.slots(layer, first, rows.shape[1])
        self.store.write(layer, self.batch, self.narrow(rows).flatten(0, 1), slots=slots.reshape(-1))

    def read(self, layer: str, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """The rows of columns `first` on: [rows, num_heads, count, dim] per part; zeros where a sequence has none."""
        slots = self.slots(layer, first, count)
        parts = self.store.read(layer, self.batch, slots.reshape(-1))
        return tuple(self.widen(part.unflatten(0, (-1, count)).transpose(1, 2)) for part in parts)

    def slots(self, layer: str, first: int, count: int) -> torch.Tensor:
        """int64 [n, count], the slots of columns `first` on; -1 for padding and for rows that are not held.

        Of a layer whose rows hold several tokens, which nobody pads: the slots of rows `first` on.
        """
        spec = self.store.plan.spec(layer)
        key = (self.store.plan.group_index(layer), spec.tokens_per_row, first, count)
        found = self._slots.get(key)
        if found is None:
            rows = np.arange(first, first + count) - self.pads[:, None]
            found = self._slots[key] = self.store.slots_of(layer, self.batch, rows)
        return found

    def expect_rows(self, layer: str, states: tuple[torch.Tensor, ...]) -> None:
        """Raises ValueError for another shape or dtype than the plan's, and for rows that are no copies of a prompt."""
        spec = self.store.plan.spec(layer)
        if spec.format.value_dim is not None or len(spec.format.parts) == 1:
            wanted = [(1, spec.format.parts[0].width)]
            given = [(1, sum(part.shape[-1] for part in states))]
        else:
            wanted = [(part.num_heads, part.head_dim) for part in spec.format.parts]
            given = [(part.shape[1], part.shape[3]) for part in states]
        dtype = spec.format.parts[0].dtype
        if self.width > 1:
            for part in states:
                first = part[:: self.width].repeat_interleave(self.width, dim=0)
                if (part - first).abs().max() > 1e-2 * first.abs().max():
                    raise ValueError(
                        f"input_ids: the cache is of {len(self.pads)} prompts, and the model's batch has "
                        f"{len(part)} rows that are no copies of them: expected the input_ids that the cache was made "
                        "with"
                    )
        if given != wanted or states[0].dtype != dtype:
            raise ValueError(
                f"store: layer {layer!r} is planned for rows of {_shapes(wanted)} {dtype}, the model's have "
                f"{_shapes(given)} {states[0].dtype}: the plan is of another config, plan_model(model) makes its own"
            )


def _shapes(shapes: list[tuple[int, int]]) -> str:
    return " and ".join(f"{heads} x {dim}" for heads, dim in shapes)
