"""Mirrors: the block tables of a batch on the device, in buffers that never move, kept up to date by what changed.

A mirror has a row for each place in a batch. Where the same sequence stands in the same place as before, only the
blocks it got or lost since are written; another sequence's row is copied whole.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.allocator import Ids
from kvstore.books import Roster
from kvstore.lazy import lazy_zeros
from kvstore.sequences import Rows, SequenceState, ragged_arange
from kvstore.staging import ALIGNMENT_BYTES, Staging
from kvstore.tables import BlockTables, Numbers

UNKNOWN = -1  # edition of a place whose entries nobody vouches for
EMPTY = 0  # edition of a place with null blocks only
MOST_AT_ONCE = 3  # mirrors to make before one is used for another kind of batch
UPLOAD_ENTRIES = 1 << 16  # entries that cross to a device at once


class Mirror:
    """The tables of one batch in flight: per group an int32 tensor [max_sequences, width]."""

    def __init__(self, tables: BlockTables, device: torch.device, packed: bool) -> None:
        self._tables = tables
        self._flat: npt.NDArray[np.int32] | None = None
        if packed:
            self._tensor = torch.zeros(len(tables.flat), dtype=torch.int32, device=device)
            self._staging = Staging(device, 12 * UPLOAD_ENTRIES + 2 * ALIGNMENT_BYTES, 1, packed=True)
        else:
            self._flat = lazy_zeros(len(tables.flat), np.int32)
            self._tensor = torch.from_numpy(self._flat)
        num_rows, num_groups = tables.max_sequences, tables.rules.num_groups
        self._widths, self._sizes = tables.width.tolist(), tables.rules.block_size.tolist()
        self._views = [
            self._tensor[base : base + num_rows * width].view(num_rows, width)
            for base, width in zip(tables.base.tolist(), tables.width.tolist(), strict=True)
        ]
        self._shown: list[tuple[tuple[int, int], torch.Tensor]] = [((0, 0), view[:0, :0]) for view in self._views]
        self._editions = np.zeros(num_rows, np.int64)
        self._rows = np.full(num_rows, -1, np.int64)  # the row in each place
        self._place_of_row = np.full(num_rows, -1, np.int64)
        # The numbers of the blocks that each place names, per group; UNKNOWN where another batch has changed it.
        self._first = np.zeros((num_groups, num_rows), np.int64)
        self._last = np.zeros((num_groups, num_rows), np.int64)
        self._roster: Roster | None = None  # shown last
        self.buffers: object = None  # what a batch maker keeps with it
        self._log_end = tables.log.end
        self._is_full = np.array([kind in ("full", "ring") for kind in tables.rules.kinds], bool)

    @property
    def num_shown(self) -> int:
        """Sequences of the batch shown last."""
        return 0 if self._roster is None else len(self._roster.rows)

    def show(self, roster: Roster, max_length: int, padding: int) -> tuple[torch.Tensor, ...]:
        """The tables of a batch, then `padding` rows of null blocks; a full group's as wide as `max_length` needs.

        Returns: int32 [num_sequences, width] per group, views of buffers that stay where they are.
        """
        self._catch_up()
        if roster is not self._roster:
            self._enter(roster)
        count = len(roster.rows)
        if padding:
            stale = count + np.flatnonzero(self._editions[count : count + padding] != EMPTY)
            if len(stale):
                self._clear(stale)
                self._editions[stale] = EMPTY
        shown = []
        for g, view in enumerate(self._views):
            width = self._widths[g]
            if self._is_full[g]:
                width = min(width, max(1, -(-max_length // self._sizes[g])))
            shape = (count + padding, width)
            if self._shown[g][0] != shape:
                self._shown[g] = (shape, view[: shape[0], :width])
            shown.append(self._shown[g][1])
        return tuple(shown)

    def _enter(self, roster: Roster) -> None:
        """Brings the places of another batch in."""
        self._note_extents()
        same = self._editions[: len(roster.rows)] == roster.state.edition
        if not same.all():
            self._copy(np.flatnonzero(~same), roster.state, roster.rows)
        self._roster = roster

    def _note_extents(self) -> None:
        """Notes which blocks the places of the batch shown last name by now."""
        roster = self._roster
        if roster is None:
            return
        count, rules = len(roster.rows), self._tables.rules
        last = roster.state.room // rules.block_size[:, None]
        first = np.zeros_like(last)
        first[rules.windows] = roster.state.first
        known = self._last[:, :count] != UNKNOWN
        np.copyto(self._last[:, :count], last, where=known)
        np.copyto(self._first[:, :count], np.maximum(first, last - self._tables.width[:, None]), where=known)

    def _catch_up(self) -> None:
        """Writes what changed in the tables since the last time, for the rows that have a place."""
        log = self._tables.log
        if log.end == self._log_end:
            return
        changes = log.since(self._log_end)
        self._log_end = log.end
        if changes is None:
            self._editions[self._editions != EMPTY] = UNKNOWN
            self._last[:] = UNKNOWN
            self._roster = None
            return
        shown = None if self._roster is None else self._roster.rows
        for change in changes:
            places, rows, group, ids = change.places, change.rows, change.group, change.ids
            position = change.seq
            if change.batch_rows is not shown:
                position = self._place_of_row.take(rows)
                here = position >= 0
                places, rows, group, position = places[here], rows[here], group[here], position[here]
                ids = None if ids is None else ids[here]
                self._last[group, position] = UNKNOWN
            width = self._widths[0] if len(self._widths) == 1 else self._tables.width.take(group)
            self._write(places + (position - rows) * width, ids)

    def _copy(self, where: Numbers, state: SequenceState, rows: Rows) -> None:
        """Copies the table rows of the batch's places `where` whole."""
        tables, rules = self._tables, self._tables.rules
        mine = rows[where]
        self._clear(where)
        displaced = self._rows[where]
        displaced = displaced[displaced >= 0]
        self._place_of_row[displaced] = -1
        before = self._place_of_row[mine]
        before = before[before >= 0]
        self._editions[before] = UNKNOWN
        self._rows[before] = -1
        self._rows[where], self._place_of_row[mine], self._editions[where] = mine, where, state.edition[where]
        for g in range(rules.num_groups):
            size, width, w = int(rules.block_size[g]), int(tables.width[g]), int(rules.window_of[g])
            last = state.room[g, where] // size
            first = np.maximum(state.first[w, where] if w >= 0 else 0, last - width)
            counts = np.maximum(last - first, 0)
            block = (np.repeat(first, counts) + ragged_arange(counts)) % width
            base = int(tables.base[g])
            ids = tables.flat[base + np.repeat(mine, counts) * width + block]
            self._write(base + np.repeat(where, counts) * width + block, ids)
            self._first[g, where], self._last[g, where] = first, np.maximum(last, first)

    def _clear(self, where: Numbers) -> None:
        """Empties places; afterwards they are those of no row."""
        tables = self._tables
        for g in range(tables.rules.num_groups):
            width = int(tables.width[g])
            is_known = self._last[g, where] != UNKNOWN
            first = np.where(is_known, self._first[g, where], 0)
            counts = np.where(is_known, self._last[g, where], width) - first
            columns = (np.repeat(first, counts) + ragged_arange(counts)) % width
            self._write(int(tables.base[g]) + np.repeat(where, counts) * width + columns, None)
            self._first[g, where] = self._last[g, where] = 0
        gone = self._rows[where]
        self._place_of_row[gone[gone >= 0]] = -1
        self._rows[where] = -1

    def _write(self, places: Numbers, values: Ids | None) -> None:
        if self._flat is not None:
            self._flat[places] = 0 if values is None else values
            return
        values = np.zeros(len(places), np.int32) if values is None else values
        for start in range(0, len(places), UPLOAD_ENTRIES):
            part = slice(start, start + UPLOAD_ENTRIES)
            (where, what), lease = self._staging.upload([places[part], values[part]])
            self._tensor.index_copy_(0, where, what)
            self._staging.give_back(lease)


class Mirrors:
    """One mirror for each batch in flight. One that showed as many sequences the last time is taken first: a decode
    loop and the prefills between its steps stay apart, and find their places as they left them.
    """

    def __init__(self, tables: BlockTables, device: torch.device, packed: bool) -> None:
        self._make: Any = lambda: Mirror(tables, device, packed)
        self._free: list[Mirror] = []
        self._num_made = 0

    def take(self, num_sequences: int) -> Mirror:
        """A mirror that no batch uses."""
        for at in range(len(self._free) - 1, -1, -1):
            if self._free[at].num_shown == num_sequences:
                return self._free.pop(at)
        if self._free and self._num_made >= MOST_AT_ONCE:
            return self._free.pop()
        self._num_made += 1
        made: Mirror = self._make()
        return made

    def give_back(self, mirror: Mirror | None) -> None:
        """Frees the mirror of a batch for a later one."""
        if mirror is not None:
            self._free.append(mirror)
