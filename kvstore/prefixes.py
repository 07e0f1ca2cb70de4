"""Prefixes: what sequences find when they are opened, and what they leave behind for others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvstore.allocator import BlockAllocator, Ids
from kvstore.announcer import Announcer, Digests
from kvstore.digests import DIGEST_BYTES
from kvstore.ghosts import Ghosts
from kvstore.groups import CacheGroup
from kvstore.hits import GroupPath, Hit, Stop, common_length
from kvstore.lazy import lazy_zeros
from kvstore.namespaces import Namespace, segments
from kvstore.prefix import DETACHED, NO_GENERATION, Node, Path, PrefixIndex, Run
from kvstore.retain import DEFAULT_PRIORITY, KeepTokens, block_priorities
from kvstore.rules import NEVER, GroupRules
from kvstore.sequences import Rows, SequenceState
from kvstore.tables import BlockTables

Tokens = npt.NDArray[np.int32]

TIDY_NODES = 8
"""Edges that each update looks at to drop what eviction has left unreachable: more than it can add."""

TOKENS_PER_LINE = 16

PLAIN = Namespace()


@dataclass(frozen=True, slots=True)
class HitReport:
    """What a sequence found at `open`.

    Attributes:
        num_tokens: tokens of the prompt.
        matched: leading tokens that equal those of an earlier sequence.
        length: leading tokens whose rows every group could give.
        copied: how many of these, the last ones, lie in blocks that are copied before they are written.
        replayed: how many of these are computed again for rings.
        stops: of each group how far it alone would have gone, and why no further.
    """

    num_tokens: int
    matched: int
    length: int
    copied: int
    replayed: int
    stops: tuple[Stop, ...]

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need not be computed."""
        return self.length - self.replayed

    def __str__(self) -> str:
        if not self.matched:
            return f"0 of {self.num_tokens} tokens cached; nothing cached begins like this prompt in its namespace"
        parts = [f"{stop.group}: {stop.length} ({stop.reason})" for stop in self.stops]
        return (
            f"{self.cached_tokens} of {self.num_tokens} tokens cached; tokens equal up to {self.matched}"
            + (f", {self.copied} in copied blocks" if self.copied else "")
            + (f", {self.replayed} replayed for rings" if self.replayed else "")
            + ("; " + ", ".join(parts) if parts else "")
        )


@dataclass(slots=True)
class Owner:
    """What Python keeps of one open sequence."""

    namespace: Namespace = PLAIN
    root: Node | None = None
    cursor: Node | None = None
    keeps: tuple[KeepTokens, ...] = ()
    report: HitReport | None = None
    digests: list[Digests] | None = None  # per group, of the blocks told of so far
    found_tokens: tuple[Tokens, ...] = ()  # of a hit, as the index holds them: copied when somebody asks


@dataclass(slots=True)
class Found:
    """A hit that is not attached to a sequence yet."""

    report: HitReport
    root: Node | None
    path: Path | None
    parts: list[tuple[int, int, Ids]] = field(default_factory=list)  # per group: first block, end block, ids


class Prefixes:
    """The prefix index of a store, the tokens of its open sequences, and their places in the index."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        rules: GroupRules,
        tables: BlockTables,
        allocator: BlockAllocator,
        max_length: int,
        announcer: Announcer | None = None,
    ) -> None:
        self.announcer = announcer
        self.rules, self.tables, self.allocator = rules, tables, allocator
        self._groups = groups
        num_rows = tables.max_sequences
        # An odd number of cache lines a row: with a power of two the tokens of a step would fall on few cache sets.
        lines = -(-max_length // TOKENS_PER_LINE) | 1
        self.tokens = lazy_zeros((num_rows, lines * TOKENS_PER_LINE), np.int32)
        self.owners = [Owner() for _ in range(num_rows)]
        self.ghosts = Ghosts(rules, allocator, num_rows)
        self.index = PrefixIndex(rules.unit, rules.blocks_per_unit, self._is_valid)
        self.roots: dict[bytes, tuple[Namespace, Node]] = {}
        self.hit_tokens = self.asked_tokens = 0

    # What a prompt finds

    def find(self, prompt: Tokens, namespace: Namespace, most: int = NEVER) -> Found:
        """The longest prefix of a prompt, short of all of it and of at most `most` tokens, that all groups can give."""
        most = min(most, len(prompt) - 1)
        known = self.roots.get(namespace.key)
        unit, rules = self.rules.unit, self.rules
        if known is None:
            stops = tuple(Stop(name, 0, "end of match") for name in rules.names)
            return Found(HitReport(len(prompt), 0, 0, 0, 0, stops), None, None)
        root = known[1]
        runs = segments(namespace.items, most, unit)
        path = self.index.match(root, prompt, runs)
        matched = path.num_units * unit
        entries = [path.entries(g, per) for g, per in enumerate(rules.blocks_per_unit)]
        paths = [
            GroupPath(group.name, group.retention, group.block_size, self._valid_range(g, *entries[g]), draft)
            for g, (group, draft) in enumerate(zip(self._groups, rules.holds_draft, strict=True))
        ]
        hit = common_length(paths, matched, unit, rules.replay)
        length = hit.length if hit.length > rules.replay else 0
        parts = [self._part(g, entries[g][0], length) for g in range(rules.num_groups)]
        more = self._more(most, namespace, path, hit, parts) if length == matched else 0
        replayed = rules.replay if length else 0
        report = HitReport(len(prompt), matched + path.more_tokens, length + more, more, replayed, hit.stops)
        return Found(report, root, path, parts)

    def attach(self, state: SequenceState, row: int, prompt: Tokens, found: Found, owner: Owner) -> None:
        """Gives an empty row what `find` found for its prompt. `state` is that of all rows."""
        report, unit = found.report, self.rules.unit
        self.owners[row] = owner
        owner.root, owner.report = found.root, report
        owner.cursor = found.root
        state.prompt[row] = len(prompt)
        state.length[row] = state.committed[row] = report.cached_tokens
        state.replay_end[row] = report.length if report.replayed else 0
        self.asked_tokens += len(prompt)
        self.hit_tokens += report.cached_tokens
        if not report.length:
            return
        assert found.path is not None
        assert found.root is not None
        units = (report.length - report.copied) // unit
        owner.found_tokens = found.path.tokens(units, unit)
        self.tokens[row, units * unit : report.length] = prompt[units * unit : report.length]
        owner.cursor = self.index.cut(found.path, found.root, units)
        state.indexed[row] = units * unit
        state.shared[row] = report.copied > 0
        for g, (first, end, ids) in enumerate(found.parts):
            if self.rules.is_ring[g]:
                continue
            self.allocator.retain(self.allocator.to_cells(ids, g), distinct=True)
            self.tables.attach(state, row, g, end, first, ids)
            if owner.keeps:  # what the prompt asks for holds for blocks that others have computed, too
                self._keep(owner.keeps, g, first * int(self.rules.block_size[g]), ids, np.ones(len(ids), np.bool_))

    def _part(self, group: int, blocks: Ids, length: int) -> tuple[int, int, Ids]:
        """First block, end block and blocks that a hit of `length` tokens takes of a group."""
        rules = self.rules
        if rules.is_ring[group] or not length:
            return 0, 0, blocks[:0]
        size, w = int(rules.block_size[group]), int(rules.window_of[group])
        at = length - rules.replay
        end = at // size if rules.is_state[group] else length // size
        first = 0 if w < 0 else int(rules.visible(w, np.array([at]))[0]) // size
        return first, end, blocks[first:end]

    def _more(self, most: int, namespace: Namespace, path: Path, hit: Hit, parts: list[tuple[int, int, Ids]]) -> int:
        """How many tokens of the next unit can be had from blocks to copy; adds those blocks to `parts`."""
        rules, unit = self.rules, self.rules.unit
        node = path.more_node
        if node is None or not rules.only_full or any(rules.holds_draft):
            return 0
        begin = path.num_units * unit
        more = min(path.more_tokens, most - begin)
        for item in namespace.items:
            if item.end > begin:
                more = min(more, max(item.start - begin, 0))
        spans = []
        for g, per in enumerate(rules.blocks_per_unit):
            held = slice(path.more_unit * per, (path.more_unit + 1) * per)
            blocks, generations = node.blocks[g][held], node.generations[g][held]
            valid = self._is_valid(g, blocks, generations)
            usable = per if valid.all() else int(valid.argmin())
            more = min(more, usable * int(rules.block_size[g]))
            spans.append(blocks)
        more = more // rules.row_unit * rules.row_unit
        if more:
            for g, blocks in enumerate(spans):
                first, end, ids = parts[g]
                count = -(-more // int(rules.block_size[g]))
                parts[g] = (first, end + count, np.concatenate([ids, blocks[:count]]))
        return more

    def _is_valid(self, group: int, blocks: Ids, generations: Ids) -> npt.NDArray[np.bool_]:
        cells = self.allocator.to_cells(blocks, group)
        valid: npt.NDArray[np.bool_] = self.allocator.generation.take(cells) == generations
        return valid

    def _valid_range(self, group: int, blocks: Ids, made: Ids) -> Callable[[int, int], npt.NDArray[np.bool_]]:
        return lambda low, high: self._is_valid(group, blocks[low:high], made[low:high])

    # What a sequence leaves

    def update(self, state: SequenceState, seq: int, row: int, tokens: int, exact: int = 0) -> None:
        """Makes the whole units of the first `tokens` committed tokens of a row findable, as far as they are known.

        `seq` is the row's column in `state`. A state is a snapshot where it stands at `committed`, or at `exact`.
        """
        unit = self.rules.unit
        indexed = int(state.indexed[seq])
        end = min(tokens, int(state.unknown[seq])) // unit * unit
        if end <= indexed:
            return
        owner = self.owners[row]
        root = self._root_of(owner.namespace)
        if owner.root is not root:
            owner.root = owner.cursor = root
        cursor, start = owner.cursor, indexed
        is_whole = cursor is owner.root or (cursor is not None and cursor.place != DETACHED)
        if cursor is None or not is_whole or cursor.end_units * unit != indexed:
            cursor, start = owner.root, 0
            self.settle_tokens(row)
        runs = _runs_from(segments(owner.namespace.items, end, unit), start // unit)
        entries = [self._entries(state, seq, row, g, start, end, exact) for g in range(self.rules.num_groups)]
        node, taken = self.index.insert(
            cursor, self.tokens[row, start:end], runs, [ids for ids, _ in entries], [made for _, made in entries], row
        )
        owner.cursor = node
        state.indexed[seq] = end
        self.index.tidy(TIDY_NODES)
        for g, ids in enumerate(taken):
            if ids.size:
                self.allocator.index(self.allocator.to_cells(ids, g))
        if self.announcer is not None:
            if owner.digests is None:
                owner.digests = [np.empty((0, DIGEST_BYTES), np.uint8) for _ in taken]
            self.settle_tokens(row)
            told = self.tokens[row, :end], owner.namespace, start, [ids for ids, _ in entries]
            self.announcer.stored(*told, taken, owner.digests)
        if owner.keeps:
            for g, (ids, _) in enumerate(entries):
                self._keep(owner.keeps, g, start, ids, np.isin(ids, taken[g]) & (ids != 0))

    def _root_of(self, names: Namespace) -> Node:
        """The root of a namespace, made when it is not there; a few that have become empty make room for it."""
        known = self.roots.get(names.key)
        if known is not None:
            return known[1]
        for key in list(islice(self.roots, TIDY_NODES)):
            entry = self.roots.pop(key)
            if entry[1].children:
                self.roots[key] = entry  # behind the others: next time these are looked at
        root = self.index.new_root()
        self.roots[names.key] = (Namespace(names.adapter, names.salt, names.weights), root)
        return root

    def settle_tokens(self, row: int) -> None:
        """Copies the tokens of a row's hit, which only the index has held so far, to `tokens`."""
        owner, start = self.owners[row], 0
        for part in owner.found_tokens:
            self.tokens[row, start : start + len(part)] = part
            start += len(part)
        owner.found_tokens = ()

    def forget(self, matches: Callable[[Namespace], bool] | None, state: SequenceState, open_rows: Rows) -> int:
        """Gives up what some namespaces hold, or all; `state` is that of all rows. Returns: blocks given up."""
        known = {key: namespace for key, (namespace, _) in self.roots.items()}
        for row in open_rows.tolist():
            names = self.owners[row].namespace
            known.setdefault(names.key, Namespace(names.adapter, names.salt, names.weights))
        chosen = {key for key, namespace in known.items() if matches is None or matches(namespace)}
        given_up = 0
        if self.announcer is not None:
            self.announcer.catch_up()
        for key in [key for key in self.roots if key in chosen]:
            namespace, root = self.roots.pop(key)
            for blocks, made in self.index.remove_tree(root):
                for g, (ids, generations) in enumerate(zip(blocks, made, strict=True)):
                    cells = self.allocator.to_cells(ids, g)[self._is_valid(g, ids, generations)]
                    given_up += len(cells)
                    self.allocator.forget(cells)
            if self.announcer is not None and matches is not None:
                self.announcer.cleared(namespace)
        for row in open_rows.tolist():
            owner = self.owners[row]
            if owner.namespace.key in chosen:
                state.indexed[row] = NEVER
                owner.root = owner.cursor = None
                self.ghosts.clear(np.array([row]), forget=True)
        return given_up

    def close(self, rows: Rows) -> None:
        """Forgets the open sequences of rows; what they left in the index stays."""
        self.ghosts.clear(rows)
        for row in rows.tolist():
            self.owners[row] = Owner()

    def _entries(
        self, state: SequenceState, seq: int, row: int, group: int, start: int, end: int, exact: int
    ) -> tuple[Ids, Ids]:
        """Blocks and generations of a group for tokens [start, end) of a row; NO_GENERATION where it has none."""
        rules, tables = self.rules, self.tables
        if rules.is_ring[group]:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        size, w = int(rules.block_size[group]), int(rules.window_of[group])
        low, high = start // size, end // size
        if w < 0:
            ids = tables.table(group)[row, low:high].copy()
            return ids, self.allocator.generation[self.allocator.to_cells(ids, group)]
        ids = np.zeros(high - low, np.int32)
        made = np.full(high - low, NO_GENERATION, np.int32)
        number = np.arange(low, high)
        first, last = int(state.first[w, seq]), int(state.room[group, seq]) // size
        held = number[max(first - low, 0) : max(last - low, 0)]
        if rules.is_state[group]:
            committed = int(state.committed[seq])
            saved = exact if rules.is_checkpointed[group] else committed
            held = held[((held + 1) * size == committed) | ((held + 1) * size == saved)]
        held = held[held >= last - int(tables.width[group])]
        found = tables.table(group)[row, held % int(tables.width[group])]
        held, found = held[found != 0], found[found != 0]
        gone = number[: max(first - low, 0)][-int(rules.blocks_per_unit[group]) - 2 :]
        there, ghosts = self.ghosts.find(row, group, gone)
        for at, some in ((held, found), (gone[there], ghosts[there])):
            ids[at - low] = some
            made[at - low] = self.allocator.generation[self.allocator.to_cells(some, group)]
        return ids, made

    def _keep(
        self, keeps: tuple[KeepTokens, ...], group: int, start: int, ids: Ids, mine: npt.NDArray[np.bool_]
    ) -> None:
        """Ranks those of the blocks `ids`, from token `start` on, that are `mine` to rank."""
        if self.rules.is_ring[group] or not len(ids):
            return
        size = int(self.rules.block_size[group])
        priorities, ttls = block_priorities(keeps, size, start // size, len(ids))
        mine = mine & (priorities != DEFAULT_PRIORITY)
        cells = self.allocator.to_cells(ids, group)
        for priority, ttl in sorted(set(zip(priorities[mine].tolist(), ttls[mine].tolist(), strict=True))):
            chosen = mine & (priorities == priority) & (ttls == ttl)
            self.allocator.set_priority(cells[chosen], int(priority), None if np.isinf(ttl) else float(ttl))


def _runs_from(runs: list[Run], start: int) -> list[Run]:
    """The part of `runs` from unit `start` on, counted from there. The rest of a run that began before has no key."""
    if not start:
        return runs
    return [
        (max(low - start, 0), high - start, key if low >= start else b"") for low, high, key in runs if high > start
    ]
