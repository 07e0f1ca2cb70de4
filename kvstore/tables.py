"""BlockTables: which block holds which tokens of which sequence, for all groups at once.

    flat    | group 0: row 0, row 1, ... | group 1: row 0, row 1, ... | ...      int32, unused entries are NULL_BLOCK_ID
             width[0] columns each          width[1] columns each

Block number i of a sequence (tokens i * block_size and on) is in column i % width. A full group is wide enough for
max_length; the others only for their reach and the steps in flight, so that their columns are used again.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.allocator import NULL_BLOCK_ID, Ids
from kvstore.changes import Change, ChangeLog
from kvstore.lazy import lazy_zeros
from kvstore.rules import GroupRules
from kvstore.sequences import Counts, Rows, SequenceState, ragged_arange

Numbers = npt.NDArray[np.int64]


class Entries(NamedTuple):
    """Blocks of a batch, entry by entry, ordered by group: number `block` of sequence `seq` in group `group`."""

    group: Numbers
    seq: Numbers
    block: Numbers

    def counts(self, num_groups: int) -> Numbers:
        """Entries of each group."""
        if num_groups == 1:
            return np.array([len(self.group)])
        return np.bincount(self.group, minlength=num_groups)

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Entries":
        """Some of the entries."""
        return Entries(self.group[chosen], self.seq[chosen], self.block[chosen])


class Growth(NamedTuple):
    """What a batch lacks: `entries`, one new block each; and the places (group, sequence) that they belong to.

    `places` are indices into [group, sequence] arrays laid flat; `last` is the number of the last block of each place.
    """

    entries: Entries
    places: Numbers
    group: Numbers
    last: Numbers


NO_ENTRIES = Entries(*(np.empty(0, np.int64) for _ in range(3)))


class BlockTables:
    """The block tables of all groups.

    Args:
        rules: the groups.
        max_sequences: rows of each table.
    """

    def __init__(self, rules: GroupRules, max_sequences: int) -> None:
        self.rules = rules
        self.max_sequences = max_sequences
        self.width = np.array(rules.widths, np.int64).reshape(-1)
        ends = np.cumsum(self.width * max_sequences)
        self.base = ends - self.width * max_sequences
        self.flat = lazy_zeros(int(ends[-1]) if len(ends) else 0, np.int32)
        self.log = ChangeLog()
        self._variants_are_groups = tuple(variant.group for variant in rules.variants) == tuple(range(rules.num_groups))
        self._rows_per_block = np.array([variant.rows_per_block for variant in rules.variants], np.int64)
        self._odd_variants = [
            (v, variant) for v, variant in enumerate(rules.variants) if variant.is_ring or variant.tokens_per_row > 1
        ]
        self._has_rings = bool(rules.is_ring.any())
        self._tail_only = np.flatnonzero(rules.tail_only).tolist()
        # Plain numbers where there is one group, 0 where there are more.
        is_one = rules.num_groups == 1
        self._only_size = int(rules.block_size[0]) if is_one else 0
        self._only_width = int(self.width[0]) if is_one else 0
        self._only_rows = int(self._rows_per_block[0]) if is_one and len(rules.variants) == 1 else 0
        self._wraps = not rules.only_full
        self._zeros = np.zeros(max_sequences, np.int64)
        for array in (self._zeros, self.width, self.base):
            array.setflags(write=False)

    def table(self, group: int) -> Ids:
        """The table of one group, a view int32 [max_sequences, width]."""
        start, width = int(self.base[group]), int(self.width[group])
        return self.flat[start : start + self.max_sequences * width].reshape(self.max_sequences, width)

    def place(self, group: Numbers, rows: Rows, block: Numbers) -> Numbers:
        """Where entries stand in `flat`."""
        if self._only_size:
            columns: Numbers = block % self._only_width if self._wraps else block
            return rows * self._only_width + columns
        width = self.width.take(group)
        place: Numbers = self.base.take(group) + rows * width + block % width
        return place

    def missing(self, state: SequenceState, starts: Counts, ends: Counts, is_single: bool) -> Growth | None:
        """The blocks that sequences of a batch lack to grow from `starts` to `ends` tokens; None for none."""
        places, group, seq = self._split(ends > state.room)
        if not len(places):
            return None
        rules = self.rules
        size = self._only_size or rules.block_size.take(group)
        first = state.flat_room.take(places) // size
        if is_single:
            return Growth(Entries(group, seq, first), places, group, first)
        last = (ends.take(seq) - 1) // size
        for g in self._tail_only:
            mine = group == g
            stored = rules.stored_from(g, starts[seq[mine]], ends[seq[mine]])
            first[mine] = np.maximum(first[mine], stored // rules.block_size[g])
        counts = last - first + 1
        block = np.repeat(first, counts) + ragged_arange(counts)
        return Growth(Entries(np.repeat(group, counts), np.repeat(seq, counts), block), places, group, last)

    def grow(self, state: SequenceState, rows: Rows, growth: Growth, ids: Ids) -> None:
        """Puts the blocks `ids`, one for each entry of what `missing` returned, into the tables."""
        entries, places, group, last = growth
        self.set(entries, rows, ids)
        size = self._only_size or self.rules.block_size.take(group)
        state.flat_room[places] = (last + 1) * size
        if len(ids) != len(places):  # the last block of each place ends its run of entries
            ends = np.flatnonzero((np.diff(entries.seq) != 0) | (np.diff(entries.group) != 0))
            ids = ids[np.append(ends, -1)]
        self.set_tails(state, places, group, last, ids)

    def set(self, entries: Entries, rows: Rows, ids: Ids) -> None:
        """Names `ids` in the entries of the sequences `rows`."""
        which = rows.take(entries.seq)
        place = self.place(entries.group, which, entries.block)
        self.flat[place] = ids
        self.log.append(Change(rows, entries.seq, which, place, entries.group, ids))

    def set_tails(self, state: SequenceState, places: Numbers, group: Numbers, last: Numbers, ids: Ids) -> None:
        """Notes, for places (group, sequence), that block number `last` with the id `ids` is the last one."""
        if self._has_rings:
            last = np.where(self.rules.is_ring[group], 0, last)
        if self._variants_are_groups:
            rows_per_block = self._rows_per_block
            size = self._only_rows or rows_per_block.take(group)
            state.flat_tail[places] = (ids - last) * size
            return
        seq = places % state.room.shape[1]
        for v, variant in enumerate(self.rules.variants):
            mine = group == variant.group
            state.tail[v, seq[mine]] = (ids[mine] - last[mine]) * variant.rows_per_block

    def leaving(self, state: SequenceState, committed: Counts) -> Entries:
        """The blocks that the first uncommitted token cannot reach any more; notes that they are gone."""
        places, window, seq = self._split(state.due <= committed)
        if not len(places):
            return NO_ENTRIES
        rules = self.rules
        group = rules.windows.take(window)
        size = rules.block_size.take(group)
        due, first = state.flat_due, state.flat_first
        old = first.take(places)
        if not rules.has_chunks:
            next_due = due.take(places) + size
            if (next_due > committed.take(seq)).all():
                due[places] = next_due
                first[places] = old + 1
                return Entries(group, seq, old)
        new = rules.reach(window, committed[seq]) // size
        first[places] = new
        due[places] = rules.due(window, new)
        counts = new - old
        block = np.repeat(old, counts) + ragged_arange(counts)
        entries = Entries(np.repeat(group, counts), np.repeat(seq, counts), block)
        # Columns are used again: of a step that jumped far, only the last `width` blocks can still stand there.
        return entries.where(np.repeat(new, counts) - block <= self.width[entries.group])

    def _split(self, chosen: npt.NDArray[np.bool_]) -> tuple[Numbers, Numbers, Numbers]:
        """Where a [k, num_sequences] array is true: indices into it laid flat, and both coordinates."""
        places = chosen.reshape(-1).nonzero()[0]
        if chosen.shape[0] == 1:
            return places, self._zeros[: len(places)], places
        first = places // chosen.shape[1]
        return places, first, places - first * chosen.shape[1]

    def remove(self, entries: Entries, rows: Rows) -> Ids:
        """Empties entries. Returns: the block of each, NULL_BLOCK_ID where there was none."""
        which = rows.take(entries.seq)
        place = self.place(entries.group, which, entries.block)
        ids: Ids = self.flat.take(place)
        self.flat[place] = NULL_BLOCK_ID
        self.log.append(Change(rows, entries.seq, which, place, entries.group, None))
        return ids

    def excess(self, state: SequenceState, lengths: Counts) -> Entries:
        """The blocks behind those that `lengths` tokens need; notes that they are gone."""
        size = self.rules.block_size[:, None]
        needed = -(-np.maximum(lengths, state.replay_end) // size)
        counts = state.room // size - needed
        counts[self.rules.is_ring | self.rules.is_state] = 0
        group, seq = np.nonzero(counts > 0)
        counts = counts[group, seq]
        kept = needed[group, seq]
        state.room[group, seq] = kept * self.rules.block_size[group]
        block = np.repeat(kept, counts) + ragged_arange(counts)
        return Entries(np.repeat(group, counts), np.repeat(seq, counts), block)

    def refresh_tails(self, state: SequenceState, rows: Rows) -> None:
        """Works the tails out anew from the tables, for all groups."""
        num_groups, count = self.rules.num_groups, len(rows)
        last = np.maximum(state.room // self.rules.block_size[:, None] - 1, 0).reshape(-1)
        group = np.repeat(np.arange(num_groups), count)
        ids = self.flat[self.place(group, np.tile(rows, num_groups), last)]
        self.set_tails(state, np.arange(num_groups * count), group, last, ids)

    def tail_slots(self, state: SequenceState, positions: Counts) -> Numbers:
        """The slot of one position per sequence, in its last block: int64 [num_variants, num_sequences]."""
        slots: Numbers = state.tail + positions
        for v, variant in self._odd_variants:
            if variant.is_ring:
                np.add(state.tail[v], positions % variant.rows_per_block, out=slots[v])
            else:
                np.add(state.tail[v], positions // variant.tokens_per_row, out=slots[v])
                np.putmask(slots[v], (positions + 1) % variant.tokens_per_row != 0, -1)
        return slots

    def slots(self, variant_idx: int, rows: Rows, positions: Counts) -> Numbers:
        """The slot of any positions of `rows` whose blocks are held; -1 where one does not close a row."""
        variant = self.rules.variants[variant_idx]
        size = self.rules.block_size[variant.group]
        width = self.width[variant.group]
        place = self.base[variant.group] + rows * width + positions // size % width
        slots: Numbers = self.flat.take(place).astype(np.int64)
        slots *= variant.rows_per_block
        if variant.is_ring:
            slots += positions % variant.rows_per_block
            return slots
        slots += positions % size // variant.tokens_per_row
        if variant.tokens_per_row > 1:
            slots[(positions + 1) % variant.tokens_per_row != 0] = -1
        return slots

    def held(self, state: SequenceState, row: int, group: int) -> tuple[Numbers, Ids]:
        """The blocks of one row, first to last: their numbers and ids. `state` is that of all rows."""
        w = int(self.rules.window_of[group])
        first = int(state.first[w, row]) if w >= 0 else 0
        block = np.arange(first, int(state.room[group, row]) // int(self.rules.block_size[group]))
        width = int(self.width[group])
        block = block[-width:]
        ids: Ids = self.table(group)[row, block % width]
        there = ids != NULL_BLOCK_ID
        return block[there], ids[there]

    def attach(self, state: SequenceState, row: int, group: int, end: int, first: int, ids: Ids) -> None:
        """Gives an empty row the blocks `ids`, numbers `first` and on, up to block number `end`."""
        width = int(self.width[group])
        if first + len(ids) <= width:
            self.table(group)[row, first : first + len(ids)] = ids
        else:
            self.table(group)[row, np.arange(first, first + len(ids)) % width] = ids
        for v in self.rules.variants_of[group] if len(ids) else ():
            state.tail[v, row] = (int(ids[-1]) - (end - 1)) * self.rules.variants[v].rows_per_block
        state.room[group, row] = end * int(self.rules.block_size[group])
        w = int(self.rules.window_of[group])
        if w >= 0:
            state.first[w, row] = first
            state.due[w, row] = self.rules.due(np.array([w]), np.array([first]))[0]

    def clear(self, state: SequenceState, rows: Rows) -> None:
        """Empties rows: no entry of them names a block any more."""
        for g in range(self.rules.num_groups):
            table, width = self.table(g), int(self.width[g])
            for row in rows.tolist():
                table[row, self.held(state, row, g)[0] % width] = NULL_BLOCK_ID
        self.reset(state, rows)

    def reset(self, state: SequenceState, rows: Rows) -> None:
        """Notes that rows hold no blocks."""
        state.room[:, rows] = 0
        state.tail[:, rows] = 0
        state.first[:, rows] = 0
        everyone = np.arange(len(self.rules.windows))
        first_due = self.rules.due(everyone, np.zeros_like(everyone))
        state.due[:, rows] = first_due[:, None]
