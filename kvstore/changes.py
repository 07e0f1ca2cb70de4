"""ChangeLog: what was written to the block tables lately, for mirrors that catch up when they are used."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

MAX_CHANGES = 1 << 16
"""Single changes that are kept at least; a reader that is further behind copies its tables anew."""


class Change(NamedTuple):
    """Entries that changed together: row, place in the tables, group, and block, None being the null block.

    `rows` are `batch_rows[seq]`; whoever shows the same batch need not look them up.
    """

    batch_rows: Numbers
    seq: Numbers
    rows: Numbers
    places: Numbers
    group: Numbers
    ids: npt.NDArray[np.int32] | None


class ChangeLog:
    """The last changes. `end` counts all there ever were."""

    def __init__(self) -> None:
        self.end = 0
        self._changes: deque[Change] = deque()
        self._num_kept = 0

    def append(self, change: Change) -> None:
        """Notes a change. Its arrays are kept and must not be written to any more."""
        self.end += 1
        self._changes.append(change)
        self._num_kept += len(change.rows)
        while self._num_kept > MAX_CHANGES and len(self._changes) > 1:
            self._num_kept -= len(self._changes.popleft().rows)

    def since(self, position: int) -> Sequence[Change] | None:
        """The changes from number `position` on, in order; None where some are no longer kept."""
        count = self.end - position
        if count > len(self._changes):
            return None
        if count == 1:
            return (self._changes[-1],)
        return [self._changes[at] for at in range(len(self._changes) - count, len(self._changes))]
