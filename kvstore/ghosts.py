"""Ghosts: blocks that a running sequence has let go, remembered until the prefix index may take them in.

What a sequence generates enters the prefix index at its release. By then its windows have let go of blocks that a hit
at the last boundary needs, and its states have moved on. So what leaves is cached, and the last few of each sequence
stand here; one that is too old to matter is freed, lest useless blocks push out useful ones.
"""

import numpy as np
import numpy.typing as npt

from kvstore.allocator import BlockAllocator, Ids
from kvstore.rules import GroupRules
from kvstore.sequences import Flags, Rows
from kvstore.tables import Entries, Numbers

NO_BLOCK = -1


class Ghosts:
    """The last `unit // block_size + 2` blocks that each window group of each sequence has let go."""

    def __init__(self, rules: GroupRules, allocator: BlockAllocator, max_sequences: int) -> None:
        self._rules, self._allocator = rules, allocator
        self._width = np.array([rules.blocks_per_unit[g] + 2 for g in rules.windows], np.int64).reshape(-1)
        ends = np.cumsum(self._width * max_sequences)
        self._base = ends - self._width * max_sequences
        size = int(ends[-1]) if len(ends) else 0
        self._block = np.full(size, NO_BLOCK, np.int32)
        self._ids = np.zeros(size, np.int32)
        self._generations = np.zeros(size, np.int32)

    def add(self, entries: Entries, rows: Rows, ids: Ids) -> None:
        """Remembers blocks in use that are about to be released; those they displace are freed if nobody uses them."""
        window = self._rules.window_of[entries.group]
        place = self._base[window] + rows * self._width[window] + entries.block % self._width[window]
        cells = self._allocator.to_cells(ids, entries.group)
        before = self._block[place]
        self._block[place] = entries.block
        kept = self._block[place] == entries.block  # of more than there is room for, the last ones
        displaced = kept & (before != NO_BLOCK)
        if displaced.any():
            old = place[displaced]
            self._forget(self._ids[old], entries.group[displaced], self._generations[old])
        place, cells = place[kept], cells[kept]
        self._allocator.index(cells)
        self._ids[place] = ids[kept]
        self._generations[place] = self._allocator.generation[cells]

    def find(self, row: int, group: int, blocks: Numbers) -> tuple[Flags, Ids]:
        """Which of the blocks number `blocks` of a row can still be had, and their ids."""
        window = self._rules.window_of[group]
        place = self._base[window] + row * self._width[window] + blocks % self._width[window]
        ids: Ids = self._ids[place]
        there = self._block[place] == blocks
        there &= self._generations[place] == self._allocator.generation[self._allocator.to_cells(ids, group)]
        return there, ids

    def clear(self, rows: Rows, *, forget: bool = False) -> None:
        """Forgets the ghosts of rows; with `forget` their blocks are freed, otherwise they stay cached."""
        for window, group in enumerate(self._rules.windows.tolist()):
            width = int(self._width[window])
            place = (self._base[window] + rows[:, None] * width + np.arange(width)).reshape(-1)
            if forget:
                kept = place[self._block[place] != NO_BLOCK]
                self._forget(self._ids[kept], np.full(len(kept), group), self._generations[kept])
            self._block[place] = NO_BLOCK

    def _forget(self, ids: Ids, group: Numbers, generations: npt.NDArray[np.int32]) -> None:
        allocator = self._allocator
        cells = allocator.to_cells(ids, group)
        idle = (allocator.generation[cells] == generations) & (allocator.references[cells] == 0)
        allocator.forget(cells[idle], distinct=False)  # forks remember the same blocks
