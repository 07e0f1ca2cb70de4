"""What the store's benchmark weighs: bytes of the books, and memory that moves between groups in frames."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.planner import V4_FLASH, listed_specs, recorded
from benchmarks.record import Measure
from benchmarks.store_cases import BLOCK, MAX_TOKEN, Sizes, at_most, expect, make_plan, named
from kvstore import CacheGroup, KVStore, OutOfBlocks, plan_cache
from kvstore.grouping import STRATEGIES

RSS_TARGET_MIB = 1024.0
FRAMES_TARGET = 1.2
CREEP_TARGET = 1.25
"""The last three tenths of the churn lose at most so many times what tenths two to four lost."""
SHORT, LONG = 512, (8192, 32768)
TENTHS = 10
BIG_GROUPS = 5


def books(_: Sizes, groups: int) -> Iterator[Measure]:
    """Bytes of all arrays of a store, per block of the pool and per sequence of `max_sequences` (8,192 tokens each)."""

    def weigh(num_blocks: int, num_sequences: int) -> int:
        limits = {"max_sequences": num_sequences, "max_length": 8192, "max_tokens_per_step": 8192}
        return array_bytes(KVStore(make_plan(groups, num_blocks), None, **limits))

    least, more_blocks, more_sequences = weigh(4096, 64), weigh(4096 + 65536, 64), weigh(4096, 64 + 256)
    name = f"books, {named(groups)}"
    yield Measure(name, "bytes_per_block", round((more_blocks - least) / 65536, 1), "B")
    yield Measure(name, "bytes_per_sequence", round((more_sequences - least) / 256, 1), "B")


def array_bytes(root: object) -> int:
    """Bytes of all numpy and torch arrays that an object reaches, each memory once."""
    seen: set[int] = set()
    memory: dict[int, int] = {}
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            memory[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, np.ndarray):
            while isinstance(each.base, np.ndarray):
                each = each.base
            memory[each.__array_interface__["data"][0]] = each.nbytes
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list | tuple | set):
            waiting += each
        elif type(each).__module__.startswith("kvstore"):
            names = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [*vars(each).values()] if hasattr(each, "__dict__") else []
            waiting += [getattr(each, name) for name in names if hasattr(each, name)]
    return sum(memory.values())


def resident(sizes: Sizes) -> Iterator[Measure]:
    """What a process grows by, in memory, when it makes a large store and fills it."""
    held = sizes.pool_sequences * sizes.pool_length
    name = f"{sizes.pool:,} blocks, {sizes.pool_sequences:,} sequences, {named(BIG_GROUPS)}"
    checkout = Path(__file__).resolve().parent.parent
    made = subprocess.run(
        [sys.executable, "-c", "from benchmarks.store_memory import grow; grow()"],
        input=json.dumps([sizes.pool, sizes.pool_sequences, sizes.pool_length]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (checkout, checkout / "kernels")))},
        cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    expect(made.returncode == 0, f"the process ended with {made.returncode}: {made.stderr.strip()[-300:]}")
    grown = json.loads(made.stdout)
    expect(grown["tokens"] == held, f"{grown['tokens']:,} tokens held")
    yield Measure(name, "tokens_held", held, "")
    target = RSS_TARGET_MIB if sizes.gated else None
    yield at_most(name, "rss_of_empty_store", grown["empty_kib"] / 1024, "MiB", None)
    yield at_most(name, "rss_growth", grown["full_kib"] / 1024, "MiB", target)


def grow() -> None:
    """The process of `resident`: sizes on its standard input, what it grew by on its standard output."""
    num_blocks, num_sequences, length = json.load(sys.stdin)
    random = np.random.default_rng(0)
    before = _resident_kib()
    limits = {"max_sequences": num_sequences, "max_length": 131072, "max_tokens_per_step": 8192}
    store = KVStore(make_plan(BIG_GROUPS, num_blocks), None, **limits)
    empty = _resident_kib()
    tokens = 0
    for _ in range(0, num_sequences, 2):
        prompts = random.integers(0, MAX_TOKEN, (2, length), dtype=np.int32)
        batch = store.extend(store.open(list(prompts)).seq_ids, length)
        store.commit(batch, prompts.reshape(-1))
        tokens += batch.num_tokens
    full = _resident_kib()
    store.check()
    assert store.stats().groups[0].in_use == num_sequences * -(-length // BLOCK)
    print(json.dumps({"tokens": tokens, "empty_kib": empty - before, "full_kib": full - before}))


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


# Frames


@cache
def v4_groups() -> list[CacheGroup]:
    """The groups of DeepSeek V4-Flash as the reference has them: windows, compressed rows and indexer, states."""
    case = next(case for case in recorded() if case["id"] == V4_FLASH)
    groups: list[CacheGroup] = STRATEGIES["packed"](listed_specs(case))
    return groups


class Churn:
    """Short and long sequences of V4-Flash that come and go in a full store.

    One operation is a sequence opened, extended by a batch and committed, or released.
    """

    def __init__(self, memory: int, layout: str, prefix_caching: bool = True) -> None:
        self.plan = plan_cache(v4_groups(), memory=memory, layout=layout, lengths=(SHORT, 8192, 32768))
        limits = {"max_sequences": 2048, "max_length": 2 * LONG[1], "max_tokens_per_step": 8192}
        self.store = KVStore(self.plan, None, **limits, stored="tail", prefix_caching=prefix_caching)
        self.random = np.random.default_rng(7)
        self.seq_ids = np.empty(0, np.int64)
        self.operations = 0
        self.refused = 0

    def add(self, length: int) -> bool:
        """Opens a sequence and feeds its prompt. Returns: whether there was room for it."""
        prompt = self.random.integers(0, MAX_TOKEN, length, dtype=np.int32)
        opened = self.store.open([prompt]).seq_ids
        self.operations += 1
        try:
            for start in range(0, length, 8192):
                part = prompt[start : start + 8192]
                self.store.commit(self.store.extend(opened, len(part)), part)
                self.operations += 1
        except OutOfBlocks:
            self.store.release(opened)
            self.refused += 1
            return False
        self.seq_ids = np.concatenate((self.seq_ids, opened))
        return True

    def drop(self, count: int) -> None:
        """Releases sequences, whichever."""
        chosen = self.random.permutation(len(self.seq_ids))
        self.store.release(self.seq_ids[chosen[:count]])
        self.seq_ids = self.seq_ids[np.sort(chosen[count:])]
        self.operations += count

    def decode(self) -> None:
        """A token for every sequence; where there is no room for it, fewer sequences."""
        while True:
            try:
                batch = self.store.extend(self.seq_ids, 1)
                break
            except OutOfBlocks:
                self.refused += 1
                self.drop(max(1, len(self.seq_ids) // 50))
        self.store.commit(batch, self.random.integers(0, MAX_TOKEN, len(self.seq_ids)))
        self.operations += len(self.seq_ids)

    def round(self) -> None:
        """Sequences come, one in eight a long one, until the store is full; all take some steps; some go."""
        while self.add(int(self.random.integers(*LONG)) if self.random.random() < 0.125 else SHORT):
            pass
        for _ in range(16):
            self.decode()
        self.drop(max(1, len(self.seq_ids) // 16))

    def fill(self) -> int:
        """Puts short sequences in the place of all others. Returns: how many there is room for."""
        self.drop(len(self.seq_ids))
        while self.add(SHORT):
            pass
        return len(self.seq_ids)


def frames(sizes: Sizes) -> Iterator[Measure]:
    """How many short sequences the same memory holds after a churn of short and long ones, frames beside overlay."""
    name = f"V4-Flash, {sizes.frame_memory >> 30} GiB"
    held = {}
    for layout in ("frames", "overlay"):
        churn = Churn(sizes.frame_memory, layout)
        for _ in range(8 if sizes.gated else 2):
            churn.round()
        expect(churn.refused > 0, "the store was never full")
        held[layout] = churn.fill()
        churn.store.check()
        if layout == "frames":
            yield Measure(name, "blocks_per_frame", ", ".join(map(str, churn.plan.blocks_per_frame)), "")
        yield Measure(name, f"sequences_in_{layout}", held[layout], "of 512 tokens")
    ratio = round(held["frames"] / held["overlay"], 3)
    target = FRAMES_TARGET if sizes.gated else None
    yield Measure(name, "frames_to_overlay", ratio, "x", target, None if target is None else ratio >= target)


def creep(sizes: Sizes) -> Iterator[Measure]:
    """The memory lost in partly used frames while sequences come and go, in each tenth of the operations."""
    churn = Churn(sizes.frame_memory, "frames")
    name = f"V4-Flash, {sizes.operations:,} operations"
    lost = []
    for tenth in range(1, TENTHS + 1):
        samples = []
        while not samples or churn.operations < sizes.operations * tenth // TENTHS:
            churn.round()
            samples.append(churn.store.stats().partly_used_bytes)
        churn.store.check()
        lost.append(float(np.mean(samples)) / 2**20)
        yield Measure(name, f"partly_used_in_tenth_{tenth}", round(lost[-1], 2), "MiB")
    expect(churn.store.stats().evicted > 0 and churn.refused > 0, "the store was never full")
    growth = round(float(np.mean(lost[-3:]) / np.mean(lost[1:4])), 3)
    target = CREEP_TARGET if sizes.gated else None
    yield at_most(name, "last_tenths_to_first", growth, "x", target)
