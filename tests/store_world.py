"""A store beside a model of plain Python: every call is made on both, and every row that is read is compared.

A row holds a number made from its token, all tokens before it, the namespace and the layer. So a row of another
sequence, prefix, namespace or layer is seen, and so is one of a block that was handed to somebody else.

The engine is played in full: rows are written some time between extend and commit, states are read from the one block
and written to the other, and before a late `finish` all that its batch could read is read once more.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore import Namespace, OutOfBlocks, SequenceError
from tests.store_engine import Engine
from tests.store_parts import Choices, Flight, Part, Running, marks_of
from tests.store_setups import MAX_LENGTH, MAX_SEQUENCES, MAX_TOKENS

NAMESPACES = (None, Namespace(adapter="tuned"))


class World(Engine):
    """One store and its model. Each rule takes `Choices`; `check` is for after each rule, `close` for the end."""

    def open(self, choices: Choices) -> None:
        if len(self.open_) == MAX_SEQUENCES:
            return
        text = choices.one([*self.texts, *(sequence.tokens or [0] for sequence in self.open_.values())])
        kept = text if choices.number(0, 1) else text[: choices.number(1, len(text))]
        more = [choices.number(0, 1) for _ in range(choices.number(0, 4))] * choices.number(1, 2)
        seq_id = self.open_prompt((kept + more)[:MAX_LENGTH], max(0, choices.number(0, 4) - 3))
        if choices.number(0, 2):
            self.compute(seq_id, choices)

    def open_prompt(self, prompt: list[int], namespace: int) -> int:
        opened = self.store.open([prompt], NAMESPACES[namespace])
        seq_id, cached = int(opened.seq_ids[0]), int(opened.cached_tokens[0])
        marks = marks_of(prompt, [], namespace)
        assert 0 <= cached < len(prompt)
        report = self.store.explain_hit(seq_id) if self.options["prefix_caching"] else None
        assert cached == (report.cached_tokens if report else 0)
        found = report.length if report else 0
        assert found < len(prompt) or "ring" in self.kinds
        assert found == 0 or marks[found - 1] in self.known[namespace], "a hit of tokens that nobody has committed"
        if self.is_roomy and self.kinds == {"full"} and report and not self.store.stats().evicted:
            assert cached >= self.promised_length(marks[:-1], namespace), "a hit that is too short"
        self.open_[seq_id] = Running(
            namespace, prompt, prompt[:cached], marks[:cached], cached, found if cached else 0,
            is_shared=cached % self.rules.unit != 0, highest=cached,
        )  # fmt: skip
        self.num_hits += cached > 0
        return seq_id

    def prefill(self, choices: Choices) -> None:
        """Computes what is left of a prompt, and more."""
        settled = self.settled()
        if settled:
            self.compute(choices.one(settled), choices)

    def compute(self, seq_id: int, choices: Choices) -> None:
        sequence = self.open_[seq_id]
        end = min(len(sequence.prompt) + choices.number(0, 3), MAX_LENGTH)
        while sequence.length < end:
            flight = self.reserve([seq_id], [min(MAX_TOKENS, end - sequence.length)], choices.number(0, 1))
            if flight is None:
                return
            self.settle(flight)

    def extend(self, choices: Choices) -> None:
        ready = self.ready()
        if not ready:
            return
        chosen = choices.some(ready, 3)
        left, counts = MAX_TOKENS, []
        for seq_id in chosen:
            count = choices.number(0, min(8, left, MAX_LENGTH - self.open_[seq_id].length))
            counts.append(count)
            left -= count
        flight = self.reserve(chosen, counts, choices.number(0, 1))
        if flight and choices.number(0, 2):
            self.write(flight)

    def decode(self, choices: Choices) -> None:
        """Some steps of the same sequences, one token each, as many in flight as may be."""
        chosen = [i for i in self.settled() if self.open_[i].length < MAX_LENGTH]
        if not chosen:
            return
        chosen = choices.some(chosen, 4)
        num_steps = min(choices.number(1, 8), MAX_LENGTH - max(self.open_[i].length for i in chosen))
        pad_to = choices.one([None, None, MAX_SEQUENCES])
        ids: Any = np.array(chosen, np.int64)
        mine: list[Flight] = []
        for _ in range(num_steps):
            flight = self.reserve(ids, 1, choices.number(0, 1), pad_to)
            if flight is None:
                break
            ids = flight.batch.seq_ids  # an engine hands the batch's own array back
            mine.append(flight)
            if len(mine) == self.options["max_in_flight"]:
                self.settle(mine.pop(0))
        for flight in mine:
            self.settle(flight)

    def settle(self, flight: Flight) -> None:
        self.pending.remove(flight)
        self.confirm(flight, [len(part.tokens) for part in flight.parts], finish=True)

    def pressure(self, choices: Choices) -> None:
        """A prompt that nobody else has takes what room there is, and is gone again."""
        if len(self.open_) == MAX_SEQUENCES:
            return
        prompt = [choices.number(2, 5) for _ in range(4)] * choices.number(1, MAX_LENGTH // 4)
        seq_id = self.open_prompt(prompt, 0)
        while self.open_[seq_id].length < len(prompt):
            count = min(MAX_TOKENS, len(prompt) - self.open_[seq_id].length)
            flight = self.reserve([seq_id], [count], 0)
            if flight is None:
                break
            self.settle(flight)
        self.give_up([seq_id])

    def reserve(self, chosen: Any, counts: Any, salt: int, pad_to: int | None = None) -> Flight | None:
        """Extends; None where there is no room."""
        with self.unless(OutOfBlocks) as attempt:
            batch = self.store.extend(chosen, counts, pad_to)
        if attempt.failed:
            return None
        parts = []
        for seq_id, count in zip(batch.seq_ids.tolist(), batch.num_new_tokens.tolist(), strict=True):
            sequence = self.open_[seq_id]
            start = sequence.length
            if count and sequence.is_shared:
                self.withdraw(sequence)
                sequence.is_shared = False
            tokens = sequence.next_tokens(count, salt)
            sequence.marks = sequence.marks + marks_of(tokens, sequence.marks, sequence.namespace)
            sequence.tokens = sequence.tokens + tokens
            sequence.highest = max(sequence.highest, sequence.length)
            parts.append(Part(seq_id, sequence, start, tokens, sequence.marks, sequence.changes))
        flight = Flight(batch, parts)
        self.pending.append(flight)
        return flight

    def commit(self, choices: Choices) -> None:
        waiting: set[int] = set()
        first = []
        for flight in self.pending:
            if not waiting & set(flight.ids):
                first.append(flight)
            waiting |= set(flight.ids)
        if not first:
            return
        flight = choices.one(first)
        self.pending.remove(flight)
        later = {seq_id for other in self.pending for seq_id in other.ids}
        kept = [len(part.tokens) for part in flight.parts]
        finish = bool(choices.number(0, 1))
        if choices.number(0, 1):
            kept = [
                count if part.seq_id in later else count - choices.number(0, count)
                for part, count in zip(flight.parts, kept, strict=True)
            ]
        self.confirm(flight, kept, finish)

    def confirm(self, flight: Flight, kept: list[int], finish: bool) -> None:
        """Commits; the flight is not pending any more."""
        if not flight.is_written:
            self.pending.insert(0, flight)
            self.write(flight)
            self.pending.remove(flight)
        sizes = [len(part.tokens) for part in flight.parts]
        tokens = [token for part, count in zip(flight.parts, kept, strict=True) for token in part.tokens[:count]]
        living = [
            kept_count < size
            for part, kept_count, size in zip(flight.parts, kept, sizes, strict=True)
            if part.seq_id in self.open_
        ]
        if any(living) and self.is_overwriting:
            with self.refused(ValueError):
                self.store.commit(flight.batch, tokens, kept)
            kept, tokens = sizes, [token for part in flight.parts for token in part.tokens]
        self.store.commit(flight.batch, tokens, None if kept == sizes else kept, finish=finish)
        if not finish:
            self.unfinished.append(flight)
        for part, count in zip(flight.parts, kept, strict=True):
            sequence = part.sequence
            if part.seq_id not in self.open_:
                continue
            end = part.start + count
            if count < len(part.tokens):
                sequence.tokens, sequence.marks = sequence.tokens[:end], sequence.marks[:end]
                sequence.changes += 1
            if sequence.is_findable:
                self.known[sequence.namespace].update(sequence.marks[:end])
                if part.start < len(sequence.prompt):
                    self.promise(sequence, min(end, len(sequence.prompt)))

    def finish(self, choices: Choices) -> None:
        if not self.unfinished:
            return
        flight = self.unfinished.pop(choices.number(0, len(self.unfinished) - 1))
        self.read(flight, late=True)
        self.store.finish(flight.batch)

    def release(self, choices: Choices) -> None:
        if self.open_:
            self.give_up(choices.some(list(self.open_), 3))

    def give_up(self, chosen: list[int]) -> None:
        in_flight = {part.seq_id: part.start for flight in reversed(self.pending) for part in flight.parts}
        self.store.release(chosen)
        for seq_id in chosen:
            sequence = self.open_.pop(seq_id)
            self.stale = seq_id
            committed = in_flight.get(seq_id, sequence.length)
            if sequence.is_findable and not sequence.is_suspended:
                self.promise(sequence, committed)
            if committed and committed < MAX_LENGTH:
                self.texts = [*self.texts, sequence.tokens[:committed]][-12:]

    def truncate(self, choices: Choices) -> None:
        settled = self.settled()
        if not settled:
            return
        chosen = choices.some(settled, 2)
        lengths = [self.open_[i].length - choices.number(0, min(self.open_[i].length, 9)) for i in chosen]
        with self.unless(ValueError) as attempt:
            self.store.truncate(chosen, lengths)
        if attempt.failed:
            assert self.kinds != {"full"}, "a full group can always roll back"
            kept = [
                length >= max(self.open_[i].cached, self.open_[i].highest - self.options["rollback"])
                or length == self.open_[i].length
                for i, length in zip(chosen, lengths, strict=True)
            ]
            assert self.kinds & {"ring", "state"} or not all(kept), "less was kept for rollback than promised"
            return
        self.shorten(chosen, lengths)

    def shorten(self, chosen: list[int], lengths: list[int]) -> None:
        """What `truncate` does to the model."""
        for seq_id, length in zip(chosen, lengths, strict=True):
            sequence = self.open_[seq_id]
            if length < sequence.length:
                sequence.tokens, sequence.marks = sequence.tokens[:length], sequence.marks[:length]
                sequence.replay_end = min(sequence.replay_end, length)
                sequence.changes += 1
                sequence.is_shared = True

    def fork(self, choices: Choices) -> None:
        settled = self.settled()
        if not settled or len(self.open_) == MAX_SEQUENCES:
            return
        parent = choices.one(settled)
        forks = self.store.fork(parent, choices.number(0, min(3, MAX_SEQUENCES - len(self.open_))))
        self.open_[parent].is_shared = True
        for seq_id in forks.tolist():
            self.open_[seq_id] = replace(self.open_[parent])

    def reorder(self, choices: Choices) -> None:
        settled = self.settled()
        if not settled:
            return
        chosen = choices.some(settled, 3)
        parents = [choices.one(settled) for _ in chosen]
        self.store.reorder(chosen, parents)
        before = {parent: self.open_[parent] for parent in parents}
        for seq_id, parent in zip(chosen, parents, strict=True):
            if seq_id != parent:
                before[parent].is_shared = True
        for seq_id, parent in zip(chosen, parents, strict=True):
            if seq_id != parent:
                self.open_[seq_id] = replace(before[parent], changes=self.open_[seq_id].changes + 1)

    def suspend(self, choices: Choices) -> None:
        settled = self.settled()
        if not settled:
            return
        chosen = choices.some(settled, 2)
        self.store.suspend(chosen)
        for seq_id in chosen:
            sequence = self.open_[seq_id]
            sequence.is_suspended = True
            if sequence.is_findable:
                self.known[sequence.namespace].update(sequence.marks)
                self.promise(sequence, sequence.length)

    def resume(self, choices: Choices) -> None:
        away = self.suspended()
        if not away:
            return
        chosen = choices.some(away, 2)
        with self.unless(OutOfBlocks) as attempt:
            self.store.resume(chosen)
        if not attempt.failed:
            for seq_id in chosen:
                self.open_[seq_id].is_suspended = False

    def drop_prefixes(self, choices: Choices) -> None:
        self.store.drop_prefixes()
        self.forget((0, 1))

    def invalidate(self, choices: Choices) -> None:
        namespace = choices.number(0, 1)
        self.store.invalidate(NAMESPACES[namespace] or Namespace())
        self.forget((namespace,))

    def refuse(self, choices: Choices) -> None:
        """A caller's mistakes."""
        some, settled, away = list(self.open_), self.settled(), self.suspended()
        busy = [flight.ids[0] for flight in self.pending if flight.ids[0] in self.open_]
        store = self.store
        wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
            (SequenceError, lambda: store.extend([self.stale], 1)),
            (SequenceError, lambda: store.release([*some, self.stale])),
            (SequenceError, lambda: store.open([[0]] * (MAX_SEQUENCES - len(some) + 1))),
            (ValueError, lambda: store.open([[0], []])),
        ]
        if settled:
            mine = settled[0]
            wrong += [
                (SequenceError, lambda: store.extend([mine, mine], 1)),
                (ValueError, lambda: store.extend([mine], MAX_TOKENS + 1)),
                (ValueError, lambda: store.truncate([mine], self.open_[mine].length + 1)),
                (SequenceError, lambda: store.fork(mine, MAX_SEQUENCES - len(some) + 1)),
                (SequenceError, lambda: store.resume([mine])),
                (SequenceError, lambda: store.reorder([mine], [self.stale])),
            ]
        if busy:
            taken = busy[0]
            calls = [lambda: store.suspend([taken]), lambda: store.truncate([taken], 0), lambda: store.fork(taken, 1)]
            wrong += [(SequenceError, call) for call in calls]
        if away:
            gone = away[0]
            calls = [lambda: store.extend([gone], 1), lambda: store.suspend([gone]), lambda: store.fork(gone, 0)]
            wrong += [(SequenceError, call) for call in calls]
        if self.pending:
            late = self.pending[-1]
            tokens = [token for part in late.parts for token in part.tokens]
            wrong += [
                (ValueError, lambda: store.commit(late.batch, [*tokens, 0])),
                (ValueError, lambda: store.commit(late.batch, [*tokens, 0], len(tokens) + 1)),
                (ValueError, lambda: store.finish(late.batch)),
            ]
        if self.unfinished:
            done = self.unfinished[0]
            written = [token for part in done.parts for token in part.tokens]
            wrong.append((ValueError, lambda: store.commit(done.batch, written)))
        error, call = choices.one(wrong)
        with self.refused(error):
            call()

    def close(self) -> None:
        """Gives everything up: the store is as at first."""
        nothing = Choices(b"")
        while self.pending:
            self.commit(nothing)
        while self.unfinished:
            self.finish(nothing)
        self.store.release(list(self.open_))
        self.open_ = {}
        self.store.drop_prefixes()
        self.check()
        stats, books = self.store.stats(), self.store._books
        assert (stats.free, stats.cached, stats.in_use, stats.fenced) == (stats.num_blocks, 0, 0, 0)
        assert not books.tables.flat.any(), "a table that still names a block"
        assert books.prefixes is None or books.prefixes.index.num_nodes == 0, "edges of the prefix index"
        assert not books.unfinished
        assert not books.fences
        assert not self.store._suspended


RULES: dict[str, tuple[int, Callable[[World, Choices], None]]] = {
    "open": (24, World.open),
    "prefill": (18, World.prefill),
    "extend": (18, World.extend),
    "decode": (12, World.decode),
    "commit": (18, World.commit),
    "finish": (9, World.finish),
    "release": (9, World.release),
    "truncate": (9, World.truncate),
    "fork": (6, World.fork),
    "reorder": (6, World.reorder),
    "suspend": (3, World.suspend),
    "resume": (9, World.resume),
    "pressure": (3, World.pressure),
    "refuse": (3, World.refuse),
    "invalidate": (1, World.invalidate),
    "drop_prefixes": (1, World.drop_prefixes),
}
"""Name -> (how often beside the others, the rule)."""
