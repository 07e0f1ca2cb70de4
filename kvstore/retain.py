"""KeepTokens: what a range of a sequence's tokens is worth to the cache, and what follows for its blocks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_kernels.checks import cdiv, expect_bool, expect_int

DEFAULT_PRIORITY = 50

MAX_PRIORITY = 100

PINNED = 101
"""Above every priority: not evicted at all."""


@dataclass(frozen=True, slots=True)
class KeepTokens:
    """What tokens [start, end) are worth; without `end` all from `start` on, those still to come included.

    `priority` 0 goes first, 100 last. After `ttl` seconds of the store's clock the priority lapses, None is never. A
    pinned range is not evicted at all, so a priority says nothing about it.

    Raises: TypeError for another type; ValueError for start < 0, an empty range, a priority outside 0 to 100 or next
    to `pinned`, a ttl that is not a finite number above 0.
    """

    start: int
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    ttl: float | None = None
    pinned: bool = False

    def __post_init__(self) -> None:
        expect_int("KeepTokens: start", self.start, 0)
        if self.end is not None:
            expect_int("KeepTokens: end", self.end, self.start + 1)
        expect_int("KeepTokens: priority", self.priority, 0, MAX_PRIORITY)
        expect_bool("KeepTokens: pinned", self.pinned)
        if self.pinned and self.priority != DEFAULT_PRIORITY:
            raise ValueError(
                f"KeepTokens: priority: expected the default {DEFAULT_PRIORITY} for a pinned range, got {self.priority}"
            )
        if self.ttl is None:
            return
        if isinstance(self.ttl, bool) or not isinstance(self.ttl, (int, float)):
            raise TypeError(f"KeepTokens: ttl: expected seconds or None, got {self.ttl!r}")
        if not (math.isfinite(self.ttl) and self.ttl > 0):
            raise ValueError(f"KeepTokens: ttl: expected a finite number of seconds above 0, got {self.ttl}")

    @property
    def rank(self) -> int:
        """The priority; 101, above every priority, for a pinned range."""
        return PINNED if self.pinned else self.priority


def block_priorities(
    keeps: Iterable[KeepTokens], block_size: int, first_block: int, num_blocks: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float64]]:
    """What the blocks [first_block, first_block + num_blocks) of a sequence are worth.

    A block takes the highest priority of the ranges that touch it, with that range's ttl, the longest among equals. A
    block that none touches has DEFAULT_PRIORITY and no ttl.

    Returns: priorities int8 [num_blocks], 0 to 100 or PINNED; ttls float64 [num_blocks] in seconds, inf for never.
    """
    priorities = np.full(num_blocks, DEFAULT_PRIORITY, np.int8)
    ttls = np.full(num_blocks, math.inf)
    for keep in sorted(keeps, key=_worth):
        low = max(keep.start // block_size - first_block, 0)
        high = num_blocks if keep.end is None else max(cdiv(keep.end, block_size) - first_block, 0)
        priorities[low:high], ttls[low:high] = _worth(keep)
    return priorities, ttls


def _worth(keep: KeepTokens) -> tuple[int, float]:
    return keep.rank, math.inf if keep.ttl is None else keep.ttl
