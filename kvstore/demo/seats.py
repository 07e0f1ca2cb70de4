"""Seats: what an engine knows of the sequences that it has open, one array per quantity over the seats."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Seats:
    """A seat holds one open sequence. It is active, or suspended: then its blocks are in host memory.

    `known` counts the tokens of the prompt and those sampled, `computed` those that the store has. `width` is the
    number of samples that a sequence becomes when its prompt is computed, 1 from then on; the seats for these are kept.
    `adapter` is 0 for none. Sequences of less `age` came first.
    """

    def __init__(self, count: int, max_length: int) -> None:
        self.count = count
        self.tokens = np.zeros((count, max_length), np.int64)
        self.uniforms = np.zeros((count, max_length))
        self.temperature = np.zeros(count)
        self.active, self.suspended = np.zeros(count, bool), np.zeros(count, bool)
        self.request, self.sample, self.adapter, self.seq_id, self.age = (np.zeros(count, np.int64) for _ in range(5))
        self.known, self.computed, self.prompt_length, self.end = (np.zeros(count, np.int64) for _ in range(4))
        self.width = np.ones(count, np.int64)
        self._free = list(range(count))

    @property
    def num_free(self) -> int:
        """Seats of no sequence that are not kept for samples either."""
        return len(self._free) - int((self.width - 1).sum())

    @property
    def pending(self) -> Ints:
        """Of every seat, the tokens that the store does not have yet."""
        return self.known - self.computed

    def oldest_first(self, which: npt.NDArray[np.bool_]) -> Ints:
        """The seats that a mask names, in the order of their ages."""
        seats = np.flatnonzero(which)
        return seats[np.argsort(self.age[seats])]

    def take(self) -> int:
        """An active seat; the caller fills it."""
        seat = self._free.pop()
        self.active[seat] = True
        return seat

    def copy(self, seat: int) -> int:
        """Another active seat with the numbers and tokens of `seat`."""
        copy = self.take()
        for values in vars(self).values():
            if isinstance(values, np.ndarray):
                values[copy] = values[seat]
        return copy

    def vacate(self, seats: Ints) -> None:
        """Frees seats."""
        self.active[seats] = self.suspended[seats] = False
        self.width[seats] = 1
        self._free.extend(seats.tolist())

    def generated(self, seat: int) -> list[int]:
        """The tokens sampled so far."""
        tokens: list[int] = self.tokens[seat, self.prompt_length[seat] : self.known[seat]].tolist()
        return tokens

    def new_tokens(self, seats: Ints, counts: Ints) -> Ints:
        """The next `counts[i]` tokens to compute of each seat, flat."""
        starts = np.repeat(self.computed[seats] - np.cumsum(counts) + counts, counts)
        return self.tokens[np.repeat(seats, counts), starts + np.arange(len(starts))]
