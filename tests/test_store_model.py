"""Any order of calls against a plain model, with real pages that hold each token's own pattern."""

import zlib
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvstore
from kvstore import KVStore, OutOfBlocks

MAX_LENGTH = 40
MAX_SEQUENCES = 4

LAYERS = {
    "one full group": {
        "layers.0.attn": kvstore.full_attention(1, 8, dtype=torch.float32, block_size=4),
        "layers.1.attn": kvstore.full_attention(2, 8, dtype=torch.float32, block_size=4),
    },
    "two full groups": {
        "layers.0.attn": kvstore.full_attention(1, 8, dtype=torch.float32, block_size=4),
        "layers.1.attn": kvstore.latent(12, 8, dtype=torch.float32, block_size=6),
    },
    "full and window": {
        "layers.0.attn": kvstore.full_attention(1, 8, dtype=torch.float32, block_size=4),
        "layers.1.attn": kvstore.sliding_window(1, 8, dtype=torch.float32, block_size=2, window=5),
    },
}


def pattern(tokens: list[int]) -> float:
    """A number, exact in fp32, that tells the last of `tokens` with all that is before it."""
    return float(zlib.crc32(bytes(tokens)) % 2**22)


class Sequence:
    """What the model knows of an open sequence: every token with a reserved row, and how many are committed."""

    def __init__(self, prompt: list[int], cached: int) -> None:
        self.prompt = prompt
        self.tokens = prompt[:cached]
        self.committed = cached

    def next_tokens(self, count: int, salt: int) -> list[int]:
        start = len(self.tokens)
        given = self.prompt[start : start + count]
        return given + [(start + salt) % 2 for _ in range(count - len(given))]


class StoreMachine(RuleBasedStateMachine):
    """Opens, extends, commits in part, finishes late and releases, under a pool that overflows."""

    @initialize(layers=st.sampled_from(sorted(LAYERS)), num_frames=st.sampled_from([2, 12, 30, 400]))
    def make(self, layers: str, num_frames: int) -> None:
        plan = kvstore.plan_cache(LAYERS[layers], num_frames=num_frames)
        self.store = KVStore(plan, "cpu", MAX_SEQUENCES, MAX_LENGTH, max_tokens_per_step=24)
        self.unit = int(np.lcm.reduce([group.block_size for group in plan.groups]))
        self.finds_prefixes = layers != "full and window"
        self.roomy = num_frames == 400
        self.open: dict[int, Sequence] = {}
        self.pending: list[tuple[Any, list[int], list[list[int]]]] = []  # batch, its sequences, the tokens it wrote
        self.unfinished: list[Any] = []
        self.hittable: set[tuple[int, ...]] = set()  # whole-unit prefixes that were committed

    @precondition(lambda self: len(self.open) < MAX_SEQUENCES)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LENGTH))
    def open_one(self, prompt: list[int]) -> None:
        opened = self.store.open([prompt])
        cached = int(opened.cached_tokens[0])
        longest = max(
            (size for size in range(0, len(prompt), self.unit) if size == 0 or tuple(prompt[:size]) in self.hittable),
            default=0,
        )
        if self.roomy and self.finds_prefixes:
            assert cached == longest
        assert cached <= longest or not self.roomy
        assert cached == 0 or tuple(prompt[:cached]) in self.hittable
        assert cached < len(prompt)
        self.open[int(opened.seq_ids[0])] = Sequence(prompt, cached)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        busy = [ids for _, sequences, _ in self.pending for ids in sequences]
        ready = [seq_id for seq_id in self.open if busy.count(seq_id) < 2]
        chosen = data.draw(st.lists(st.sampled_from(ready), unique=True, max_size=3)) if ready else []
        counts = []
        for seq_id in chosen:
            room = min(8, MAX_LENGTH - len(self.open[seq_id].tokens))
            counts.append(data.draw(st.integers(0, room)))
        before = self.store.stats()
        try:
            batch = self.store.extend(chosen, counts)
        except OutOfBlocks:
            assert self.store.stats() == before
            return
        written = []
        for seq_id, count in zip(chosen, counts, strict=True):
            sequence = self.open[seq_id]
            written.append(sequence.next_tokens(count, salt=seq_id))
            sequence.tokens = sequence.tokens + written[-1]
        self.write_and_read_back(batch, chosen, written)
        self.pending.append((batch, chosen, written))

    def write_and_read_back(self, batch: Any, chosen: list[int], written: list[list[int]]) -> None:
        values = [
            pattern(self.open[seq_id].tokens[: len(self.open[seq_id].tokens) - len(tokens) + place + 1])
            for seq_id, tokens in zip(chosen, written, strict=True)
            for place in range(len(tokens))
        ]
        for layer in self.store.plan.placements:
            parts = self.store.plan.spec(layer).format.parts
            rows = [
                torch.tensor(values, dtype=torch.float32)[:, None, None].repeat(1, part.num_heads, part.head_dim)
                for part in parts
            ]
            self.store.write(layer, batch, *rows)
        for layer in self.store.plan.placements:
            starts = self.store.gather_starts(layer, batch).tolist()
            expected = [
                pattern(self.open[seq_id].tokens[: position + 1])
                for seq_id, start in zip(chosen, starts, strict=True)
                for position in range(start, len(self.open[seq_id].tokens))
            ]
            for rows in self.store.gather(layer, batch):
                assert rows[:, 0, 0].tolist() == expected
                assert rows[:, -1, -1].tolist() == expected

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), finish=st.booleans())
    def commit(self, data: st.DataObject, finish: bool) -> None:
        batch, chosen, written = self.pending.pop(0)
        later = {seq_id for _, sequences, _ in self.pending for seq_id in sequences}
        kept = [
            len(tokens) if seq_id in later else data.draw(st.integers(0, len(tokens)))
            for seq_id, tokens in zip(chosen, written, strict=True)
        ]
        tokens = [token for part, count in zip(written, kept, strict=True) for token in part[:count]]
        self.store.commit(batch, tokens, num_committed=kept, finish=finish)
        if not finish:
            self.unfinished.append(batch)
        for seq_id, part, count in zip(chosen, written, kept, strict=True):
            sequence = self.open.get(seq_id)
            if sequence is None:
                continue
            if count < len(part):
                sequence.tokens = sequence.tokens[: sequence.committed + count]
            sequence.committed += count
            for size in range(self.unit, sequence.committed + 1, self.unit):
                self.hittable.add(tuple(sequence.tokens[:size]))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.unfinished) - 1))
        self.store.finish(self.unfinished.pop(place))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True, min_size=1, max_size=3))
        self.store.release(chosen)
        for seq_id in chosen:
            del self.open[seq_id]

    @precondition(lambda self: self.open)
    @rule()
    def refuse_a_released_sequence(self) -> None:
        stale = next(iter(self.open)) - (1 << 32)
        before = self.store.stats()
        try:
            self.store.extend([stale], 1)
        except kvstore.SequenceError:
            assert self.store.stats() == before
        else:
            raise AssertionError("a stale handle was accepted")

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "store"):
            self.store.check()
            assert self.store.stats().open_sequences == len(self.open)

    def teardown(self) -> None:
        """After releasing all and dropping the prefixes the pool is as it was at first."""
        if not hasattr(self, "store"):
            return
        self.store.release(list(self.open))
        self.open = {}
        for batch, _, written in self.pending:
            self.store.commit(batch, [token for part in written for token in part])
        for batch in self.unfinished:
            self.store.finish(batch)
        self.store.drop_prefixes()
        self.store.check()
        stats = self.store.stats()
        assert stats.free == stats.num_blocks


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
