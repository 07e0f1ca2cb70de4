"""Engine: continuous batching with chunked prefill over a `KVStore`.

Every step runs all decoding sequences and as much of the waiting prompts as the token budget has room for. Running
sequences sit in seats (`Seats`), so a step works on whole batches. The prompt of a request with several samples is
computed once; then its sequence is forked, and the samples share the prompt's blocks until they write.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvstore import Batch, KVStore, Namespace, OutOfBlocks
from kvstore.demo.protocol import Model
from kvstore.demo.requests import Completion, Request
from kvstore.demo.sampling import draws, sample
from kvstore.demo.seats import Ints, Seats

__all__ = ["Completion", "Engine", "Request"]

PREEMPTIONS = ("recompute", "suspend")


class Engine:
    """Serves requests with one model and one store.

    Preemption takes the youngest sequence when nothing could run for lack of blocks. "recompute" closes it and opens
    it again later. Its blocks stay findable until they are evicted, so that only what others really needed is computed
    again, and what it shares with samples or prompts stays shared. "suspend" keeps the very bytes in host memory:
    nothing is computed twice, but all its rows are copied out and in again, the shared ones too, and it comes back
    with blocks of its own, which makes the pressure worse. Hence recompute is the default; suspend is for rows that
    cost more to compute than to copy (long sequences in a store that evicts at once, or one without prefix caching).

    Args:
        model: the forward pass.
        store: open for this engine alone.
        max_running: sequences open at once, those of samples and suspended ones included; at most the store's
            max_sequences.
        chunk: tokens of one step, decoding sequences and prompt chunks together; at least max_running, at most the
            store's max_tokens_per_step.
        eos_token_ids: a sequence ends with the first of these.
        preemption: "recompute" or "suspend", what becomes of sequences that give way to others.

    Raises: ValueError when chunk is below max_running, or for another preemption. The store does not tell its limits:
    where max_running or chunk is above them, `generate` passes on the store's error.
    """

    def __init__(
        self,
        model: Model,
        store: KVStore,
        *,
        max_running: int,
        chunk: int,
        eos_token_ids: Iterable[int] = (),
        preemption: str = "recompute",
    ) -> None:
        if not 1 <= max_running <= chunk:
            raise ValueError(f"chunk: expected at least max_running, got chunk {chunk}, max_running {max_running}")
        if preemption not in PREEMPTIONS:
            raise ValueError(f"preemption: expected 'recompute' or 'suspend', got {preemption!r}")
        self.model, self.store, self.chunk = model, store, chunk
        self.max_length = model.max_length
        self._suspends = preemption == "suspend"
        self._eos = np.array(sorted(eos_token_ids), np.int64)
        self._adapter_idx = {None: 0} | {name: number for number, name in enumerate(model.adapters, 1)}
        self._requests: Sequence[Request] = ()
        self._completions: list[Completion] = []
        self._queue: deque[tuple[int, int]] = deque()  # request and sample; a request's first until it is forked
        self._may_admit = False
        self._next_age = 0
        self._seats = Seats(max_running, self.max_length)
        self._batches: list[Batch] = []  # extended in this step and not committed

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Serves the requests to their ends and returns their completions in the same order.

        After an exception, also one from the model, no sequence is open and no block is held.

        Raises: ValueError when a request is longer than max_length, has a token outside the model's vocabulary or an
            adapter the model has not, or asks for more than max_running samples; OutOfBlocks when one sequence alone
            does not fit the store.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        self._requests = requests
        self._completions = [Completion([[] for _ in range(request.n)]) for request in requests]
        self._queue.extend((index, 0) for index in range(len(requests)))
        self._may_admit = True
        seats = self._seats
        try:
            while self._queue or seats.active.any() or seats.suspended.any():
                self._step()
        finally:
            self._queue.clear()
            # A batch left open by a failed step would keep the blocks of its sequences fenced for ever.
            while self._batches:
                self.store.commit(self._batches.pop(), [], num_committed=0)
            self._vacate(np.flatnonzero(seats.active | seats.suspended))
        return self._completions

    def _check(self, index: int, request: Request) -> None:
        length = len(request.prompt) + request.max_tokens
        if length > self.max_length:
            raise ValueError(f"requests[{index}]: expected at most {self.max_length} tokens in all, got {length}")
        if max(request.prompt) >= self.model.vocab_size:
            raise ValueError(
                f"requests[{index}]: expected token ids below the model's vocab_size {self.model.vocab_size}, "
                f"got {max(request.prompt)}"
            )
        if request.n > self._seats.count:
            raise ValueError(
                f"requests[{index}]: expected at most {self._seats.count} samples (max_running), got {request.n}"
            )
        if request.adapter not in self._adapter_idx:
            known = ", ".join(self.model.adapters) or "none"
            raise ValueError(f"requests[{index}]: expected an adapter of the model ({known}), got {request.adapter!r}")

    def _step(self) -> None:
        self._resume()
        self._admit()
        rows_of = self._reserve()
        batches, seats = list(self._batches), self._seats
        token_ids = [seats.new_tokens(rows, batch.num_new_tokens) for batch, rows in zip(batches, rows_of, strict=True)]
        rows = np.concatenate(rows_of)
        counts = np.concatenate([batch.num_new_tokens for batch in batches])
        seats.computed[rows] += counts
        ready = seats.pending[rows] == 0
        last_tokens = (np.cumsum(counts) - 1)[ready]
        logits = self.model.forward(
            self.store,
            batches,
            self._to_device(np.concatenate(token_ids)),
            self._to_device(last_tokens),
            self._to_device(np.repeat(seats.adapter[rows], counts)) if self.model.adapters else None,
        )
        for batch, ids in zip(batches, token_ids, strict=True):
            self.store.commit(batch, ids)
            self._batches.pop(0)
        if last_tokens.size:
            self._append(rows[ready], logits)

    def _resume(self) -> None:
        """Brings suspended sequences back, the oldest first, as long as there are blocks."""
        seats = self._seats
        if not self._may_admit:
            return
        for seat in seats.oldest_first(seats.suspended).tolist():
            try:
                self.store.resume(seats.seq_id[[seat]])
            except OutOfBlocks:
                if not seats.active.any():
                    raise
                self._may_admit = False
                return
            seats.active[seat], seats.suspended[seat] = True, False

    def _admit(self) -> None:
        """Seats waiting requests while the step has room for prompt tokens.

        A request is opened no earlier, so that it finds what requests before it have committed.
        """
        room = self.chunk - int(self._seats.pending[self._seats.active].sum())
        while self._queue and self._may_admit and room > 0:
            index, number = self._queue[0]
            width = 1 if self._completions[index].samples[number] else self._requests[index].n
            if width > self._seats.num_free:
                return
            self._queue.popleft()
            room -= self._seat(index, number, width)

    def _seat(self, index: int, number: int, width: int) -> int:
        """Opens a sequence for a request, or again for a preempted one. Returns the number of tokens to compute."""
        request, completion, seats = self._requests[index], self._completions[index], self._seats
        tokens = [*request.prompt, *completion.samples[number]]
        uniforms = draws(request.seed, request.max_tokens, number)
        opened = self.store.open([tokens], Namespace(adapter=request.adapter))
        # From here on nothing fails: an open sequence has a seat, and `generate` closes what is seated.
        seat = seats.take()
        if not completion.preemptions:
            completion.cached_tokens = int(opened.cached_tokens[0])
        seats.tokens[seat, : len(tokens)] = tokens
        seats.uniforms[seat, : request.max_tokens] = uniforms
        seats.temperature[seat], seats.adapter[seat] = request.temperature, self._adapter_idx[request.adapter]
        seats.request[seat], seats.sample[seat], seats.width[seat] = index, number, width
        seats.seq_id[seat] = opened.seq_ids[0]
        seats.known[seat], seats.computed[seat] = len(tokens), opened.cached_tokens[0]
        seats.prompt_length[seat], seats.end[seat] = len(request.prompt), len(request.prompt) + request.max_tokens
        seats.age[seat] = self._next_age
        self._next_age += width
        return len(tokens) - int(opened.cached_tokens[0])

    def _reserve(self) -> list[Ints]:
        """Extends the decoding sequences and, within the budget, those with more than one token to compute.

        Decoding goes first. Prompts wait where only they lack blocks; where nothing could run, the youngest sequence
        gives way until something can. Leaves the batches in `_batches`. Returns the seats of each.
        """
        while True:
            seats = self._seats.oldest_first(self._seats.active)
            pending = self._seats.pending[seats]
            decode, prefill = seats[pending == 1], seats[pending > 1]
            room = self.chunk - len(decode)
            before = np.cumsum(pending[pending > 1]) - pending[pending > 1]
            counts = np.clip(room - before, 0, pending[pending > 1])
            prefill, counts = prefill[counts > 0], counts[counts > 0]
            parts: list[Ints] = []
            try:
                for rows, new_tokens in ((decode, np.ones_like(decode)), (prefill, counts)):
                    if len(rows):
                        self._batches.append(self.store.extend(self._seats.seq_id[rows], new_tokens))
                        parts.append(rows)
            except OutOfBlocks:
                if not parts:
                    if len(seats) == 1:
                        raise
                    self._preempt(int(seats[-1]))
                    continue
            return parts

    def _preempt(self, seat: int) -> None:
        """Makes a sequence give way; it comes before all that wait, once another sequence has finished."""
        seats = self._seats
        index, number = int(seats.request[seat]), int(seats.sample[seat])
        self._may_admit = False
        if self._suspends:
            self.store.suspend(seats.seq_id[[seat]])
            seats.active[seat], seats.suspended[seat] = False, True
        else:
            self._completions[index].samples[number] = seats.generated(seat)
            self._vacate(np.array([seat]))
            self._queue.appendleft((index, number))
        self._completions[index].preemptions += 1

    def _append(self, rows: Ints, logits: torch.Tensor) -> None:
        """Adds one sampled token to each of the seats, and ends the sequences that are complete."""
        seats = self._seats
        wide = seats.width[rows]
        if (wide > 1).any():
            logits = logits[self._to_device(np.repeat(np.arange(len(rows)), wide))]
            rows = np.concatenate([self._fork(seat) for seat in rows.tolist()])
        known = seats.known[rows]
        uniforms = seats.uniforms[rows, known - seats.prompt_length[rows]]
        tokens = sample(logits, seats.temperature[rows], uniforms)
        seats.tokens[rows, known] = tokens
        seats.known[rows] = known + 1
        done = rows[(known + 1 == seats.end[rows]) | np.isin(tokens, self._eos)]
        for seat in done.tolist():
            self._completions[seats.request[seat]].samples[seats.sample[seat]] = seats.generated(seat)
        if done.size:
            self._vacate(done)
            self._may_admit = True

    def _fork(self, seat: int) -> Ints:
        """The seats of all samples of a sequence whose prompt is computed: its own, and new ones for the others."""
        seats = self._seats
        request, numbers = self._requests[seats.request[seat]], range(1, seats.width[seat])
        uniforms = [draws(request.seed, request.max_tokens, number) for number in numbers]
        seq_ids = self.store.fork(int(seats.seq_id[seat]), len(numbers)) if numbers else ()
        seats.width[seat] = 1
        samples = [seat]
        for number, uniform, seq_id in zip(numbers, uniforms, seq_ids, strict=True):
            copy = seats.copy(seat)
            seats.sample[copy], seats.seq_id[copy] = number, seq_id
            seats.uniforms[copy, : request.max_tokens] = uniform
            seats.age[copy] += number
            samples.append(copy)
        return np.array(samples)

    def _vacate(self, seats: Ints) -> None:
        self.store.release(self._seats.seq_id[seats])
        self._seats.vacate(seats)

    def _to_device(self, values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(self.model.device)
