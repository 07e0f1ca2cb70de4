"""The engine beside the model of a store: it writes and reads what batches name, and proves what no call may break."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvstore import KVStore, LayerSpec
from tests.store_parts import ANYTHING, Flight, Part, Running, values_of
from tests.store_setups import MAX_SEQUENCES, ROOMY, Setup


class Attempt:
    """Whether a call failed."""

    failed = False


class Engine:
    """A store with pages or without, what it should hold, and the proofs."""

    def __init__(self, setup: Setup, num_frames: int, device: str | None = "cpu") -> None:
        self.store: KVStore = setup.store(num_frames, device)
        self.has_pages = device is not None
        self.rules = self.store._books.rules
        self.options = {"prefix_caching": True, "stored": "all", "rollback": 0, "max_in_flight": 2} | setup.options
        self.is_roomy = num_frames == ROOMY
        self.specs: dict[str, LayerSpec] = {layer: self.store.plan.spec(layer) for layer in self.store.plan.placements}
        self.kinds = {spec.retention.kind for spec in self.specs.values()}
        tail_windows = self.options["stored"] == "tail" and self.kinds & {"sliding_window", "chunked"}
        self.is_overwriting = bool(self.kinds & {"ring", "state"}) or bool(tail_windows)
        self.open_: dict[int, Running] = {}
        self.pending: list[Flight] = []
        self.unfinished: list[Flight] = []
        self.known: list[set[int]] = [set(), set()]  # per namespace the marks of committed tokens that may be hit
        self.promised: list[list[list[int]]] = [[], []]  # per namespace: marks of whole units that must be hit
        self.texts: list[list[int]] = [[0] * 8, [1, 0] * 8]  # beginnings of prompts
        self.stale = -1
        self.is_in_frames = self.store.plan.layout == "frames"
        self.has_withdrawn = False
        self.num_hits = 0
        self.failures: Counter[str] = Counter()

    # What there is to choose from

    def settled(self) -> list[int]:
        busy = {seq_id for flight in self.pending for seq_id in flight.ids}
        return [i for i, sequence in self.open_.items() if i not in busy and not sequence.is_suspended]

    def ready(self) -> list[int]:
        busy = Counter(seq_id for flight in self.pending for seq_id in flight.ids)
        most = self.options["max_in_flight"]
        return [i for i, sequence in self.open_.items() if busy[i] < most and not sequence.is_suspended]

    def suspended(self) -> list[int]:
        return [i for i, sequence in self.open_.items() if sequence.is_suspended]

    # Steps

    def write(self, flight: Flight) -> None:
        """Does what the engine's step does: first those before it of the same sequences."""
        for earlier in self.pending:
            if earlier is flight:
                break
            if not earlier.is_written and set(earlier.ids) & set(flight.ids):
                self.write(earlier)
        if not flight.is_written:
            self.run(flight)

    def run(self, flight: Flight) -> None:
        """Writes a batch, and reads all that it can read."""
        flight.is_written = True
        if not self.has_pages:
            return
        marks = [part.marks[at] for part in flight.parts for at in range(part.start, part.end)]
        is_replayed = [at < part.sequence.replay_end for part in flight.parts for at in range(part.start, part.end)]
        closes = [at + 1 for part in flight.parts for at in range(part.start, part.end)]
        padding = flight.batch.num_tokens - len(marks)
        for number, (layer, spec) in enumerate(self.specs.items()):
            if spec.kind == "state":
                self._run_state(layer, number, flight)
                continue
            parts = spec.format.parts
            values = values_of(marks, number, parts[0].dtype)
            if spec.kind != "ring":
                values[is_replayed] = ANYTHING
            values[np.array(closes, np.int64) % spec.tokens_per_row != 0] = ANYTHING
            values = np.append(values, [ANYTHING] * padding)
            rows = [
                torch.from_numpy(values).to(part.dtype)[:, None, None].repeat(1, part.num_heads, part.head_dim)
                for part in parts
            ]
            self.store.write(layer, flight.batch, *rows)
        self.read(flight)

    def read(self, flight: Flight, late: bool = False) -> None:
        """Gathers every layer of a batch. What was taken back since, and overwritten rings, are passed over."""
        if not self.has_pages:
            return
        for number, (layer, spec) in enumerate(self.specs.items()):
            if spec.kind == "state" or (late and spec.kind == "ring"):
                continue
            starts = self.store.gather_starts(layer, flight.batch).tolist()
            wanted: list[np.ndarray] = []
            for part, start in zip(flight.parts, starts, strict=False):
                first, end = self._visible(spec, part, flight)
                assert start == first, f"{layer}: rows from {start} on, not from {first}"
                per_row = spec.tokens_per_row
                rows = values_of(part.marks[per_row - 1 : end : per_row][first:], number, spec.format.parts[0].dtype)
                if late and part.sequence.changes != part.changes:
                    rows[:] = ANYTHING
                if spec.kind == "ring" and part.end < part.sequence.replay_end:
                    rows[: max(0, part.sequence.cached - first)] = ANYTHING  # computed again, but not all of it yet
                wanted.append(rows)
            expected = np.concatenate([*wanted, np.empty(0)])
            matters = ~np.isnan(expected)
            for rows in self.store.gather(layer, flight.batch):
                for place in (0, -1):
                    got = rows[:, place, place].numpy().astype(np.float64)
                    assert len(got) == len(expected), f"{layer}: {len(got)} rows, not {len(expected)}"
                    assert (got == expected)[matters].all(), f"{layer}: {got} instead of {expected}"

    def _visible(self, spec: LayerSpec, part: Part, flight: Flight) -> tuple[int, int]:
        """First row and the token behind the last row that a gather of a layer gives."""
        end = part.end
        if spec.retention.kind == "ring":
            return max(0, end - spec.block_size), end
        if spec.retention.kind == "full":
            return 0, end
        window, chunk = spec.retention.window, spec.retention.chunk
        first = max(0, part.start - window + 1) if window else part.start // chunk * chunk
        is_single = all(len(each.tokens) == 1 for each in flight.parts)
        return first, part.start if self.options["stored"] == "tail" and not is_single else end

    def _run_state(self, layer: str, number: int, flight: Flight) -> None:
        """Reads states and writes the next ones, and those that are to be saved beside."""
        group = self.store.plan.group_index(layer)
        blocks, saves = flight.batch.state_blocks[group], flight.batch.state_checkpoints[group]
        assert blocks is not None
        tensors = self.store.state_view(layer).values()
        for part, (source, _) in zip(flight.parts, blocks.tolist(), strict=False):
            assert (source == 0) == (part.start == 0), f"{layer}: reads block {source} at token {part.start}"
            for tensor in tensors if source else ():
                want = values_of(part.marks[part.start - 1 : part.start], number, tensor.dtype)[0]
                assert (tensor[source] == want).all(), f"{layer}: {tensor[source]} instead of {want}"
        writes = [
            (part.end if part.tokens else 0, target)
            for part, (_, target) in zip(flight.parts, blocks.tolist(), strict=False)
        ]
        saved = [] if saves is None else saves.tolist()
        for part, (length, block) in [*zip(flight.parts, writes, strict=True), *zip(flight.parts, saved, strict=False)]:
            assert (length == 0) == (block == 0), f"{layer}: {length} tokens in block {block}"
            for tensor in tensors if block else ():
                tensor[block] = values_of(part.marks[length - 1 : length], number, tensor.dtype)[0]

    # Proofs

    def check(self) -> None:
        self.store.check()
        stats = self.store.stats()
        assert stats.open_sequences == len(self.open_)
        assert stats.suspended_sequences == len(self.suspended())
        lengths = self.store._books.state.length[[seq_id & 0xFFFFFFFF for seq_id in self.open_]]
        assert lengths.tolist() == [sequence.length for sequence in self.open_.values()]

    @contextmanager
    def refused(self, error: type[Exception]) -> Iterator[None]:
        """The call inside raises `error` and changes nothing."""
        before = self.snapshot()
        try:
            yield
        except error:
            self._expect_unchanged(before)
        else:
            raise AssertionError(f"a call that should raise {error.__name__} did not")

    @contextmanager
    def unless(self, error: type[Exception]) -> Iterator[Attempt]:
        """The call inside may raise `error`; if so, it changes nothing."""
        attempt, before = Attempt(), self.snapshot()
        try:
            yield attempt
        except error as reason:
            attempt.failed = True
            self.failures[type(reason).__name__] += 1
            self._expect_unchanged(before)

    def snapshot(self) -> dict[str, Any]:
        """All that a call may change, without putting anything back."""
        books = self.store._books
        allocator, handles = books.allocator, books.handles
        twin = copy.copy(books)
        twin.state = books.state.take(np.arange(MAX_SEQUENCES))
        if books.roster is not None:
            twin.roster = copy.copy(books.roster)
            twin.roster.state = books.roster.state.take(np.arange(len(books.roster.ids)))
            twin.flush()
        arrays = {
            "references": allocator.references, "indexed": allocator.indexed, "generation": allocator.generation,
            "fences": allocator.fences, "tables": books.tables.flat, "handles": handles.current,
            "handle generations": handles.generation, "suspended": handles.suspended, "matrix": twin.state.matrix,
        }  # fmt: skip
        num_nodes = 0 if books.prefixes is None else books.prefixes.index.num_nodes
        return {name: array.tobytes() for name, array in arrays.items()} | {
            "stats": self.store.stats(), "serial": books.next_serial, "steps": list(books.unfinished),
            "fences listed": len(books.fences), "nodes": num_nodes, "saved": list(self.store._suspended),
        }  # fmt: skip

    def _expect_unchanged(self, before: dict[str, Any]) -> None:
        after = self.snapshot()
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, f"a failed call changed {changed}"

    # What hits are promised

    def promised_length(self, marks: list[int], namespace: int) -> int:
        """Tokens of a prompt, its last left out, that a store of full groups must find."""
        longest = 0
        for known in self.promised[namespace]:
            equal = next(
                (at for at, (a, b) in enumerate(zip(known, marks, strict=False)) if a != b), min(len(known), len(marks))
            )
            longest = max(longest, equal)
        # Of equal parts of a unit the store looks at one, which may be that of a withdrawn block.
        step = self.rules.unit if self.has_withdrawn else self.rules.row_unit
        return longest // step * step

    def promise(self, sequence: Running, num_tokens: int) -> None:
        """What a running sequence has committed of its prompt, or all of a released one, can be hit in whole units."""
        whole = num_tokens // self.rules.unit * self.rules.unit
        if whole and self.is_roomy and sequence.marks[:whole] not in self.promised[sequence.namespace]:
            self.promised[sequence.namespace].append(sequence.marks[:whole])

    def withdraw(self, sequence: Running) -> None:
        """The sequence writes where others could have hit: what they find may end at its last whole unit."""
        unit, promised = self.rules.unit, self.promised[sequence.namespace]
        whole = sequence.length // unit * unit
        if whole != sequence.length:
            self.has_withdrawn = True
            self.promised[sequence.namespace] = [
                known[:whole] if known[:whole] == sequence.marks[:whole] else known for known in promised
            ]

    def forget(self, namespaces: Sequence[int]) -> None:
        for namespace in namespaces:
            self.known[namespace], self.promised[namespace] = set(), []
        for sequence in self.open_.values():
            if sequence.namespace in namespaces:
                sequence.is_findable = False
