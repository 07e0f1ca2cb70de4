"""Engine: continuous batching with chunked prefill over a `KVStore`.

Every step runs all decoding sequences and as much of the waiting prompts as the token budget has room for. Running
sequences sit in seats; their state is one array per quantity over the seats, so a step works on whole batches.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore import Batch, KVStore, OutOfBlocks
from kvstore.demo.model import Llama
from kvstore.demo.sampling import draws, sample

Ints = npt.NDArray[np.int64]
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue by at most `max_tokens` tokens.

    Temperature 0 is greedy, infinity draws all tokens alike.

    Raises: ValueError that names the argument.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        prompt: Any = self.prompt
        if not isinstance(prompt, Sequence) and not np.ndim(prompt):
            raise ValueError(f"prompt: expected a sequence of token ids, got {prompt!r}")
        if not len(prompt):
            raise ValueError("prompt: expected at least one token id, got none")
        for token in prompt:
            if not _is_int(token) or not 0 <= token <= MAX_TOKEN_ID:
                raise ValueError(f"prompt: expected integers in [0, {MAX_TOKEN_ID}], got {token!r}")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected an integer >= 1, got {self.max_tokens!r}")
        is_number = _is_int(self.temperature) or isinstance(self.temperature, float | np.floating)
        if not is_number or not self.temperature >= 0:
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature!r}")
        if not _is_int(self.seed) or self.seed < 0:
            raise ValueError(f"seed: expected an integer >= 0, got {self.seed!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(slots=True)
class Completion:
    """What became of a request: its new tokens, the prompt tokens that were cached, and how often it was preempted."""

    token_ids: list[int]
    cached_tokens: int = 0
    preemptions: int = 0


class Engine:
    """Serves requests with one model and one store.

    Args:
        model: the forward pass.
        store: open for this engine alone.
        max_running: sequences running at once; at most the store's max_sequences.
        chunk: tokens of one step, decoding sequences and prompt chunks together; at least max_running, at most the
            store's max_tokens_per_step.
        eos_token_ids: a sequence ends with the first of these.

    Raises: ValueError when chunk is below max_running. The store does not tell its limits: where max_running or chunk
    is above them, `generate` passes on the store's error.
    """

    def __init__(
        self,
        model: Llama,
        store: KVStore,
        *,
        max_running: int,
        chunk: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        if not 1 <= max_running <= chunk:
            raise ValueError(f"chunk: expected at least max_running, got chunk {chunk}, max_running {max_running}")
        self.model, self.store, self.chunk = model, store, chunk
        self.max_length = model.max_length
        self._eos = np.array(sorted(eos_token_ids), np.int64)
        self._requests: Sequence[Request] = ()
        self._completions: list[Completion] = []
        self._queue: deque[int] = deque()
        self._may_admit = False
        self._next_age = 0
        self._free_seats = list(range(max_running))
        self._batches: list[Batch] = []  # extended in this step and not committed
        # Per seat: `known` counts the tokens of the prompt and those sampled, `computed` those that the store has.
        self._tokens = np.zeros((max_running, self.max_length), np.int64)
        self._uniforms = np.zeros((max_running, self.max_length))
        self._temperature = np.zeros(max_running)
        self._active = np.zeros(max_running, bool)
        self._request, self._seq_id, self._known, self._computed, self._prompt_length, self._end, self._age = (
            np.zeros(max_running, np.int64) for _ in range(7)
        )

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Serves the requests to their ends and returns their completions in the same order.

        After an exception, also one from the model, no sequence is open and no block is held.

        Raises: ValueError when a request is longer than max_length or has a token outside the model's vocabulary;
            OutOfBlocks when one alone does not fit the store.
        """
        for index, request in enumerate(requests):
            length = len(request.prompt) + request.max_tokens
            if length > self.max_length:
                raise ValueError(f"requests[{index}]: expected at most {self.max_length} tokens in all, got {length}")
            if max(request.prompt) >= self.model.vocab_size:
                raise ValueError(
                    f"requests[{index}]: expected token ids below the model's vocab_size {self.model.vocab_size}, "
                    f"got {max(request.prompt)}"
                )
        self._requests = requests
        self._completions = [Completion([]) for _ in requests]
        self._queue.extend(range(len(requests)))
        self._may_admit = True
        try:
            while self._queue or self._active.any():
                self._step()
        finally:
            self._queue.clear()
            # A batch left open by a failed step would keep the blocks of its sequences fenced for ever.
            while self._batches:
                self.store.commit(self._batches.pop(), [], num_committed=0)
            self._vacate(np.flatnonzero(self._active))
        return self._completions

    def _step(self) -> None:
        self._admit()
        seats = self._reserve()
        batches = list(self._batches)
        token_ids = [self._new_tokens(batch, rows) for batch, rows in zip(batches, seats, strict=True)]
        rows = np.concatenate(seats)
        counts = np.concatenate([batch.num_new_tokens for batch in batches])
        self._computed[rows] += counts
        ready = self._computed[rows] == self._known[rows]
        last_tokens = (np.cumsum(counts) - 1)[ready]
        logits = self.model.forward(
            self.store, batches, self._to_device(np.concatenate(token_ids)), self._to_device(last_tokens)
        )
        for batch, ids in zip(batches, token_ids, strict=True):
            self.store.commit(batch, ids)
            self._batches.pop(0)
        if last_tokens.size:
            self._append(rows[ready], logits)

    def _admit(self) -> None:
        """Seats waiting requests while the step has room for prompt tokens.

        A request is opened no earlier, so that it finds what requests before it have committed.
        """
        running = np.flatnonzero(self._active)
        room = self.chunk - int((self._known - self._computed)[running].sum())
        while self._queue and self._free_seats and self._may_admit and room > 0:
            room -= self._seat(self._queue.popleft())

    def _seat(self, index: int) -> int:
        """Opens a sequence for a request, or again for a preempted one. Returns the number of tokens to compute."""
        request, completion = self._requests[index], self._completions[index]
        tokens = [*request.prompt, *completion.token_ids]
        uniforms = draws(request.seed, request.max_tokens)
        opened = self.store.open([tokens])
        # From here on nothing fails: an open sequence has a seat, and `generate` closes what is seated.
        seat = self._free_seats.pop()
        if not completion.preemptions:
            completion.cached_tokens = int(opened.cached_tokens[0])
        self._tokens[seat, : len(tokens)] = tokens
        self._uniforms[seat, : request.max_tokens] = uniforms
        self._temperature[seat] = request.temperature
        self._request[seat], self._seq_id[seat] = index, opened.seq_ids[0]
        self._known[seat], self._computed[seat] = len(tokens), opened.cached_tokens[0]
        self._prompt_length[seat], self._end[seat] = len(request.prompt), len(request.prompt) + request.max_tokens
        self._age[seat], self._active[seat] = self._next_age, True
        self._next_age += 1
        return len(tokens) - int(opened.cached_tokens[0])

    def _reserve(self) -> list[Ints]:
        """Extends the decoding sequences and, within the budget, those with more than one token to compute.

        Decoding goes first. Prompts wait where only they lack blocks; where nothing could run, the youngest sequence
        gives way until something can. Leaves the batches in `_batches`. Returns the seats of each.
        """
        while True:
            seats = np.flatnonzero(self._active)
            seats = seats[np.argsort(self._age[seats])]
            pending = (self._known - self._computed)[seats]
            decode, prefill = seats[pending == 1], seats[pending > 1]
            room = self.chunk - len(decode)
            before = np.cumsum(pending[pending > 1]) - pending[pending > 1]
            counts = np.clip(room - before, 0, pending[pending > 1])
            prefill, counts = prefill[counts > 0], counts[counts > 0]
            parts: list[Ints] = []
            try:
                for rows, new_tokens in ((decode, np.ones_like(decode)), (prefill, counts)):
                    if len(rows):
                        self._batches.append(self.store.extend(self._seq_id[rows], new_tokens))
                        parts.append(rows)
            except OutOfBlocks:
                if not parts:
                    if len(seats) == 1:
                        raise
                    self._preempt(int(seats[-1]))
                    continue
            return parts

    def _preempt(self, seat: int) -> None:
        """Sends a sequence back to the head of the queue; nobody is seated until another one has finished."""
        index = int(self._request[seat])
        generated = self._tokens[seat, self._prompt_length[seat] : self._known[seat]]
        self._completions[index].token_ids = generated.tolist()
        self._completions[index].preemptions += 1
        self._vacate(np.array([seat]))
        self._queue.appendleft(index)
        self._may_admit = False

    def _new_tokens(self, batch: Batch, rows: Ints) -> Ints:
        counts = batch.num_new_tokens
        starts = np.repeat(self._computed[rows] - np.cumsum(counts) + counts, counts)
        return self._tokens[np.repeat(rows, counts), starts + np.arange(len(starts))]

    def _append(self, seats: Ints, logits: torch.Tensor) -> None:
        """Adds one sampled token to each of the seats, and ends the sequences that are complete."""
        known = self._known[seats]
        uniforms = self._uniforms[seats, known - self._prompt_length[seats]]
        tokens = sample(logits, self._temperature[seats], uniforms)
        self._tokens[seats, known] = tokens
        self._known[seats] = known + 1
        done = seats[(known + 1 == self._end[seats]) | np.isin(tokens, self._eos)]
        for seat in done.tolist():
            generated = self._tokens[seat, self._prompt_length[seat] : self._known[seat]]
            self._completions[self._request[seat]].token_ids = generated.tolist()
        if done.size:
            self._vacate(done)
            self._may_admit = True

    def _vacate(self, seats: Ints) -> None:
        self.store.release(self._seq_id[seats])
        self._active[seats] = False
        self._free_seats.extend(seats.tolist())

    def _to_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self.model.device)
