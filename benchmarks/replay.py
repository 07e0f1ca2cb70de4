"""A small engine without a model: serves requests on the books of a store, and looks at the bytes while it is full.

First come, first served, continuous batching, prompts in chunks beside decodes. When blocks run out, the youngest
sequence is released and comes again later; what it has computed may still be cached then.
"""

import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.traces import Request, Tokens
from benchmarks.waste import Bytes, Ids, bytes_now, distinct_tokens, mean
from kvstore import CachePlan, KVStore, OutOfBlocks

MIN_SAMPLES = 8
"""Looks at a full pool that are worth a mean; with fewer, those at a pool that is not full count too."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How requests are served.

    Attributes:
        max_running: sequences at once.
        tokens_per_step: new tokens of one step.
        tokens_per_decode: tokens by which a sequence that generates goes on at once; more than one is a replay in fewer
            calls, which holds a little more in flight. Prompts go on by as many steps meanwhile.
        step_s: seconds of a step, for requests that arrive later than the first.
        stored: as `KVStore` has it: "tail" keeps of a chunk of a prompt only the rows that windows will read.
        sample_every: busy ticks from one look at the bytes to the next.
    """

    max_running: int = 1024
    tokens_per_step: int = 2048
    tokens_per_decode: int = 8
    step_s: float = 0.025
    stored: str = "all"
    sample_every: int = 3


@dataclass(slots=True)
class Served:
    """A request that is open or waits. `reached`: tokens that it had at most; what it lost since is computed again."""

    number: int
    request: Request
    tokens: Tokens
    seq_id: int = -1
    length: int = 0
    reached: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens that are known before they are computed."""
        return max(self.request.prompt_tokens, self.reached)

    @property
    def left(self) -> int:
        """Tokens up to the end."""
        return len(self.tokens) - self.length


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay held. Means are over the looks while requests wait, once the pool has filled; peaks over all looks.

    Attributes:
        sequences, tokens: running at once and their tokens, shared ones once for each; mean and peak.
        distinct_tokens: the same, shared ones once.
        places: the bytes of the arena, the mean of each place.
        num_samples: looks at the bytes, and whether the pool was full at them.
        num_steps, generated: steps, and tokens that they generated.
        evicted, preempted, refused: blocks, releases for want of blocks, requests that do not fit alone.
        hit_rate: part of the prompt tokens that were cached when a request was first opened.
    """

    sequences: tuple[float, int]
    tokens: tuple[float, int]
    distinct_tokens: tuple[float, int]
    places: Bytes
    num_samples: int
    is_full: bool
    num_steps: int
    generated: int
    evicted: int
    preempted: int
    refused: int
    hit_rate: float


@dataclass(slots=True)
class _Look:
    """One look at the bytes."""

    is_full: bool
    sequences: int
    tokens: int
    distinct_tokens: int
    places: Bytes


class WrongReplayError(AssertionError):
    """A replay that lost tokens or blocks: it has no figures."""


@dataclass(slots=True)
class Replay:
    """One replay: a plan's store and the requests that are not done."""

    plan: CachePlan
    engine: Engine
    store: KVStore
    waiting: deque[Served]
    due: int
    chunk_unit: int
    in_flight: tuple[int, int]
    running: list[Served] = field(default_factory=list)
    looks: list[_Look] = field(default_factory=list)
    num_ticks: int = 0
    num_busy: int = 0
    preempted: int = 0
    refused: int = 0
    asked: int = 0
    found: int = 0
    generated: int = 0
    may_admit: bool = True
    has_filled: bool = False

    @classmethod
    def of(cls, plan: CachePlan, requests: Sequence[Request], engine: Engine) -> "Replay":
        """A replay of requests in the order in which they arrive."""
        longest = max(each.prompt_tokens + each.output_tokens for each in requests)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="max_length")  # what does not fit alone is counted as refused
            store = KVStore(
                plan,
                device=None,
                max_sequences=engine.max_running,
                max_length=longest,
                max_tokens_per_step=engine.tokens_per_step + engine.max_running * engine.tokens_per_decode,
                max_in_flight=1,
                stored=engine.stored,
            )
        waiting = deque(Served(number, each, each.tokens(str(number))) for number, each in enumerate(requests))
        due = sum(each.output_tokens for each in requests)
        return cls(plan, engine, store, waiting, due, _chunk_unit(plan), _in_flight(plan, engine))

    @property
    def tick_s(self) -> float:
        """Seconds of a tick."""
        return self.engine.step_s * self.engine.tokens_per_decode

    @property
    def now_s(self) -> float:
        """Seconds since the first request."""
        return self.num_ticks * self.tick_s

    def run(self) -> Outcome:
        """Serves all requests.

        Raises: WrongReplayError when a token or a block is missing at the end.
        """
        while self.running or self.waiting:
            self._admit()
            if self.running:
                self._tick()
            self.num_ticks += 1
        self.store.check()
        stats = self.store.stats()
        if stats.in_use or stats.fenced or stats.open_sequences:
            raise WrongReplayError(f"{stats.in_use} blocks are in use when every sequence is released")
        if self.generated != self.due:
            raise WrongReplayError(f"expected {self.due} generated tokens, got {self.generated}")
        return self._outcome(stats.evicted)

    def _admit(self) -> None:
        """Opens waiting requests while there are seats and free or cached blocks for their prompts."""
        engine = self.engine
        if not self.running:
            self.may_admit = True
            if self.waiting and self.waiting[0].request.arrival_s > self.now_s:  # nothing to do until then
                self.num_ticks = math.ceil(self.waiting[0].request.arrival_s / self.tick_s)
        self.has_filled |= len(self.running) == engine.max_running
        while self.may_admit and self.waiting and len(self.running) < engine.max_running:
            sequence = self.waiting[0]
            wanted = sum(self._wanted(each) for each in self.running if _is_prompt(each))
            if wanted >= engine.tokens_per_step or sequence.request.arrival_s > self.now_s:
                return
            prompt = sequence.tokens[: sequence.prompt_length]
            if self.running and not self._has_room(prompt):
                self.has_filled = True
                return
            opened = self.store.open([prompt])
            sequence.seq_id, cached = int(opened.seq_ids[0]), int(opened.cached_tokens[0])
            if not sequence.reached:
                self.asked += len(prompt)
                self.found += cached
            sequence.length = cached
            self.running.append(self.waiting.popleft())

    def _has_room(self, prompt: Tokens) -> bool:
        """Whether a prompt fits beside what the running ones still want for theirs and for a step in flight."""
        stats = self.store.stats()
        room = stats.free * stats.frame_bytes - self._in_flight
        room += sum((group.cached + group.reserved) * group.block_stride_bytes for group in stats.groups)
        prompts = [(each.prompt_length, each.length) for each in self.running if _is_prompt(each)]
        if prompts:
            wanted, held = np.array(prompts).T
            room -= int((self._bytes_of(wanted) - self._bytes_of(held)).sum())
        if room < 0:
            return False
        whole, cached = self._bytes_of(np.array([len(prompt), int(self.store.lookup([prompt])[0])])).tolist()
        return bool(whole - cached <= room)

    def _bytes_of(self, lengths: Ids) -> Ids:
        """Bytes of the blocks that sequences of these lengths hold between steps; 0 for none."""
        blocks = self.plan.blocks_needed(np.maximum(lengths, 1).tolist())
        return (blocks * np.array(self.plan.block_strides)).sum(1) * (lengths > 0)

    @property
    def _in_flight(self) -> int:
        """Bytes of a step that it does not leave, with one more sequence."""
        of_chunk, of_sequence = self.in_flight
        return of_chunk + (len(self.running) + 1) * of_sequence

    def _wanted(self, sequence: Served) -> int:
        """Tokens by which a sequence goes on if nothing else wants any: its prompt, or some more generated ones."""
        if _is_prompt(sequence):
            return sequence.prompt_length - sequence.length
        return min(self.engine.tokens_per_decode, sequence.left)

    def _tick(self) -> None:
        """As many steps as a decode has tokens: all go on in the first, prompts alone in the others."""
        self._advance(self.running, looks=self.num_busy % self.engine.sample_every == 0)
        self.num_busy += 1
        for _ in range(self.engine.tokens_per_decode - 1):
            self._admit()
            prompts = [each for each in self.running if _is_prompt(each)]
            if not prompts:
                return
            self._advance(prompts, looks=False)

    def _advance(self, sequences: list[Served], looks: bool) -> None:
        """One step of some running sequences; where blocks run out, of fewer, and of the last one a smaller step."""
        budget = self.engine.tokens_per_step
        while True:
            counts = self._counts(sequences, budget)
            try:
                batch = self.store.extend([each.seq_id for each in sequences], counts)
                break
            except OutOfBlocks:
                if len(self.running) == 1 and counts[0] > 1:
                    budget = counts[0] // 2
                    continue
                self._take_back()
                sequences = [each for each in sequences if each in self.running]
                if not sequences:
                    return
        if looks:
            self._look(batch)
        new = [each.tokens[each.length : each.length + count] for each, count in zip(sequences, counts, strict=True)]
        self.store.commit(batch, np.concatenate(new))
        for each, count in zip(sequences, counts, strict=True):
            each.length += count
            self.generated += max(0, each.length - each.prompt_length)
            each.reached = max(each.reached, each.length)
        done = [each for each in sequences if not each.left]
        if done:
            self.store.release([each.seq_id for each in done])
            self.running = [each for each in self.running if each.left]
            self.may_admit = True

    def _take_back(self) -> None:
        """Releases the youngest sequence; it comes again, unless it did not fit alone."""
        youngest = self.running.pop()
        self.store.release([youngest.seq_id])
        if not self.running:
            self.refused += 1
            self.due -= youngest.request.output_tokens
            self.generated -= max(0, youngest.reached - youngest.request.prompt_tokens)
            return
        self.preempted += 1
        self.has_filled = True
        self.may_admit = False  # until a sequence is done: it would only be taken back again
        self.waiting.appendleft(youngest)

    def _counts(self, sequences: list[Served], budget: int) -> list[int]:
        """New tokens of each: one at least, decodes first, then prompts in order of arrival, `budget` tokens of them.

        A chunk ends where every group can be found if it reaches such a length, for states are kept only where a step
        has ended.
        """
        counts = [1] * len(sequences)
        for at in sorted(range(len(counts)), key=lambda at: _is_prompt(sequences[at])):
            sequence = sequences[at]
            if not _is_prompt(sequence):
                counts[at] = min(self._wanted(sequence), budget)
                continue
            count = max(1, min(self._wanted(sequence), budget))
            boundary = (sequence.length + count) // self.chunk_unit * self.chunk_unit
            counts[at] = max(boundary - sequence.length, 0) or count
            budget -= counts[at]
        return counts

    def _look(self, batch: object) -> None:
        stats = self.store.stats()
        places = bytes_now(self.plan, batch, stats)
        if abs(places.total - self.plan.arena_bytes) > 1:
            raise WrongReplayError(f"expected places of {self.plan.arena_bytes} bytes in all, got {places.total}")
        is_full = self.has_filled and bool(self.waiting) and self.waiting[0].request.arrival_s <= self.now_s
        tokens, distinct = int(batch.seq_lens.sum()), distinct_tokens(self.plan, batch)
        self.looks.append(_Look(is_full, len(self.running), tokens, distinct, places))

    def _outcome(self, evicted: int) -> Outcome:
        full = [look for look in self.looks if look.is_full]
        is_full = len(full) >= MIN_SAMPLES
        counted = full if is_full else self.looks
        if not counted:  # every request was refused in its first step
            counted = [_Look(False, 0, 0, 0, Bytes(free=self.plan.arena_bytes))]

        def mean_and_peak(figure: str) -> tuple[float, int]:
            peak = max(getattr(each, figure) for each in (*self.looks, *counted))
            return float(np.mean([getattr(each, figure) for each in counted])), peak

        return Outcome(
            sequences=mean_and_peak("sequences"),
            tokens=mean_and_peak("tokens"),
            distinct_tokens=mean_and_peak("distinct_tokens"),
            places=mean([each.places for each in counted]),
            num_samples=len(counted),
            is_full=is_full,
            num_steps=self.num_ticks * self.engine.tokens_per_decode,
            generated=self.generated,
            evicted=evicted,
            preempted=self.preempted,
            refused=self.refused,
            hit_rate=self.found / self.asked if self.asked else 0.0,
        )


def _is_prompt(sequence: Served) -> bool:
    return sequence.length < sequence.prompt_length


def _chunk_unit(plan: CachePlan) -> int:
    """A chunk that reaches a multiple of it should end there: prompts are found in whole blocks, and states at ends."""
    kinds = {group.retention.kind for group in plan.groups}
    sizes = [group.block_size for group in plan.groups if group.retention.kind in ("state", "full")]
    return math.lcm(*sizes) if "state" in kinds else 1


def _in_flight(plan: CachePlan, engine: Engine) -> tuple[int, int]:
    """Bytes that a step takes and does not leave: of a chunk, in windows; of each sequence, a block and its states."""
    tokens, strides = engine.tokens_per_step, np.array(plan.block_strides)
    kept = plan.blocks_needed([tokens])
    moving = plan.blocks_needed([tokens], in_flight=tokens, stored=engine.stored)
    is_state = np.array([group.retention.kind == "state" for group in plan.groups])
    return int(((moving - kept) * strides).sum()), int((strides * is_state).sum() + strides.max())
