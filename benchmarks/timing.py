"""Times of calls on a CPU or a GPU: warm and cold, the median and how far it scatters."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from benchmarks.machine import cache_bytes

Call = Callable[[], object]
CALLS_PER_GRAPH = 10
MIN_SAMPLE_S = 2e-4
"""A shorter call is repeated within a sample."""
MAX_REPEATS = 100


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call, a sample per round. `by`: "calls" of the host, a captured "graph", or "events" around calls
    that could not be captured."""

    samples: tuple[float, ...]
    by: str = "calls"

    @property
    def median(self) -> float:
        """The middle sample."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a part of the median: half of the samples lie in it."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median if self.median else 0.0


class Timer:
    """Times calls on one device. They take turns, so that all see the same machine.

    Warm: each call right behind a run of its own, so that none finds in the caches what another has left there. On a
    GPU it is a graph of several calls, and a call that cannot be captured is timed by events. Cold: behind a pass over
    memory twice as large as the last cache.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._swept = torch.zeros(2 * cache_bytes(device), dtype=torch.uint8, device=device)

    def warm(self, calls: Sequence[Call], rounds: int) -> list[Times]:
        """A sample of each call in each round."""
        if self.device.type == "cuda":
            return self._warm_on_gpu(calls, rounds)
        repeats = [_repeats(call) for call in calls]
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, times, kept in zip(calls, repeats, samples, strict=True):
                call()
                begin = time.perf_counter()
                for _ in range(times):
                    call()
                kept.append((time.perf_counter() - begin) / times)
        return [Times(tuple(kept)) for kept in samples]

    def cold(self, calls: Sequence[Call], rounds: int) -> list[Times]:
        """A sample of each call in each round; none of its bytes are in a cache."""
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, kept in zip(calls, samples, strict=True):
                self._swept.add_(1)
                kept.append(self._event_s(call, 1) if self.device.type == "cuda" else _host_s(call))
        return [Times(tuple(kept), "events" if self.device.type == "cuda" else "calls") for kept in samples]

    def _warm_on_gpu(self, calls: Sequence[Call], rounds: int) -> list[Times]:
        graphs = [self._captured(call) for call in calls]
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(rounds):
            for call, graph, kept in zip(calls, graphs, samples, strict=True):
                call()
                if graph is None:
                    kept.append(self._event_s(call, CALLS_PER_GRAPH) / CALLS_PER_GRAPH)
                else:
                    kept.append(self._event_s(graph.replay, 1) / CALLS_PER_GRAPH)
        return [
            Times(tuple(kept), "events" if graph is None else "graph")
            for kept, graph in zip(samples, graphs, strict=True)
        ]

    def _captured(self, call: Call) -> "torch.cuda.CUDAGraph | None":
        """A graph of CALLS_PER_GRAPH calls; None for a call that synchronises or cannot be captured otherwise."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(CALLS_PER_GRAPH):
                    call()
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            return None
        return graph

    def _event_s(self, call: Call, repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product, of bf16 or fp32 whichever is faster here."""
    size, rates = 8192 if device.type == "cuda" else 1024, []
    timer_rounds = 5
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        left @ right
        samples = []
        for _ in range(timer_rounds):
            _wait(device)
            begin = time.perf_counter()
            left @ right
            _wait(device)
            samples.append(time.perf_counter() - begin)
        rates.append(2 * size**3 / median(samples))
    return max(rates)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_s(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _repeats(call: Call) -> int:
    """How many calls make a sample long enough for the clock."""
    call()
    return max(1, min(MAX_REPEATS, int(MIN_SAMPLE_S / max(_host_s(call), 1e-9))))
