"""The size of a frame: how many blocks of each group go into one, so that narrow groups waste little.

With m blocks of a group in a frame of F bytes, a block takes F / m: no less than the group's pages, and a multiple of
its stride demand. So F is a multiple of every m x demand, and for given numbers of blocks the smallest such F that
holds them all is the best. What is searched are the numbers: those of the widest group, and for each of the others
the few that fit beside it.

A frame belongs to one group at a time, so a partly used one is waste of its own. Its expected share of the memory,
half a frame per group, and the null frame are part of the cost, and `FRAME_SHARE` caps the size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm

import numpy as np
import numpy.typing as npt

from kvstore_kernels.checks import cdiv, round_up

FRAME_SHARE = 256
"""A frame takes at most one part in this many of the memory, unless one block of a group is wider than that."""

FRAME_BLOCKS = 8
"""The cap where no memory is named: this many blocks of the widest group."""

_WIDEST = 24  # blocks of the widest group in a frame, at most
_NEAR = {1: (0,), 2: range(-1, 4), 3: range(-1, 4), 4: range(-1, 4), 5: range(-1, 3), 6: range(-1, 2), 7: (0, 1)}
"""By number of different widths: how far below the number that fits beside the widest group the others are tried."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes of a frame, and how many blocks of each group go into it."""

    frame_bytes: int
    blocks_per_frame: tuple[int, ...]


def max_frame_bytes(memory: int | None, widest: int) -> int:
    """The cap on frame bytes for `memory` (bytes or None) and the widest group's block."""
    share = FRAME_BLOCKS * widest if memory is None else memory // FRAME_SHARE
    return max(share, widest)


def held_back(memory: int | None, frame_bytes: int, num_groups: int, most_blocks: int) -> float:
    """The share of the memory that no sequence gets: the null frame, and half a frame per group if partly used."""
    if memory is None:
        return 0.0
    return (1 + (num_groups / 2 if most_blocks > 1 else 0)) * frame_bytes / max(memory, 1)


def choose_frame(
    widths: Sequence[int], multiples: Sequence[int], weights: Sequence[Sequence[float]], memory: int | None
) -> Frame:
    """The frame with the least bytes per sequence, what is held back included.

    `widths` are the bytes of one block of each group, `multiples` their stride demands. `weights[length][group]` are
    the blocks that a sequence of that length holds, as shares of its own pages: the sum over weight x width is 1. What
    counts is the mean over the lengths of the sum over weight x block stride.

    One block of every group per frame, the overlay, is among the candidates, and at no length is the choice worse. An
    empty group (width 0) takes as little as any: the most blocks per frame that another group has.
    """
    most_bytes = max_frame_bytes(memory, max(widths))
    kinds = sorted({pair for pair in zip(widths, multiples, strict=True) if pair[0]}, reverse=True)
    wide, demand = (np.array(column, dtype=np.int64) for column in zip(*kinds, strict=True))
    blocks = _numbers_of_blocks(wide, most_bytes)
    step = np.ones(len(blocks), dtype=np.int64)
    for kind in range(len(kinds)):
        step = _capped_lcm(step, blocks[:, kind] * demand[kind], most_bytes)
    sizes = -(-(blocks * wide).max(axis=1) // step) * step
    fits = (step <= most_bytes) & (sizes <= most_bytes)
    overlay = round_up(int(wide[0]), lcm(*multiples))
    sizes, blocks = np.append(overlay, sizes[fits]), np.vstack([np.ones_like(wide), blocks[fits]])
    by_kind = np.zeros((len(weights), len(kinds)))
    for group, pair in enumerate(zip(widths, multiples, strict=True)):
        if pair[0]:
            by_kind[:, kinds.index(pair)] += [of_length[group] for of_length in weights]
    costs = (sizes[:, None] / blocks) @ by_kind.T  # [candidates, lengths]
    room = most_bytes * FRAME_SHARE if memory is None else memory
    held = [held_back(room, 1, len(widths), most) for most in (1, 2)]
    score = costs.mean(axis=1) + sizes * np.where((blocks > 1).any(axis=1), held[1], held[0])
    score[(costs > costs[0]).any(axis=1)] = np.inf
    best = int(np.argmin(score))
    count_of = dict(zip(kinds, blocks[best].tolist(), strict=True))
    most_blocks = int(blocks[best].max())
    counts = tuple(count_of.get(kind, most_blocks) for kind in zip(widths, multiples, strict=True))
    return Frame(int(sizes[best]), counts)


def blocks_in_frame(frame_bytes: int, width: int, multiple: int) -> int:
    """The most blocks of `width` bytes at a stride of `multiple` that divide a frame of that size; 1 for width 0."""
    if not width:
        return 1
    units = frame_bytes // multiple
    return next((count for count in range(units // cdiv(width, multiple), 1, -1) if units % count == 0), 1)


def _capped_lcm(one: Table, other: Table, most: int) -> Table:
    """The least common multiples, those above `most` as `most` + 1; without overflow on the way."""
    factor = one // np.gcd(one, other)
    common: Table = np.where(factor > most // other, most + 1, factor * np.minimum(other, most))
    return common


def _numbers_of_blocks(wide: Table, most_bytes: int) -> Table:
    """int64 [candidates, widths]: numbers of blocks that may share a frame; widths come widest first."""
    leading = np.arange(1, min(_WIDEST, max(most_bytes // int(wide[0]), 1)) + 1, dtype=np.int64)
    fit = leading[:, None] * wide[0] // wide
    near = _NEAR.get(len(wide), (0,))
    below = np.array(list(product((0,), *[near] * (len(wide) - 1))), dtype=np.int64)
    whole = fit // leading[:, None] * leading[:, None]  # whole multiples of the leading number keep the lcm small
    tried = np.vstack([(fit[:, None] - below).reshape(-1, len(wide)), whole])
    numbers: Table = np.maximum(tried, 1)
    return numbers
