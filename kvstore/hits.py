"""How long a prefix hit may be: the one place where all groups must agree.

A hit of n tokens leaves rows [0, n) to the cache and computes on from token n; where a ring has to be filled again, it
computes on from token n - replay. Each group says which n it can serve:

    full            blocks over [0, n)
    sliding_window  blocks over [n - (window - 1) - replay, n)
    chunked         blocks over [c, n), c the start of the chunk that holds token n - replay
    state           a snapshot at n - replay, where computing goes on; none is needed at 0
    ring            every n: it is never hit, its capacity is the replay

A group with draft layers gives up its last block, because what a drafter wrote there depends on the token behind it:
it serves n only if its next block, or for a state the next boundary, belongs to the match as well. n = 0 always goes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.specs import Retention
from kvstore_kernels.checks import expect_int

END_OF_MATCH = "end of match"
GIVEN_TO_THE_DRAFTER = "given to the drafter"
REASONS = {
    "full": "block gone",
    "sliding_window": "window incomplete",
    "chunked": "chunk incomplete",
    "state": "no snapshot",
}
"""Why a group stops before the end of the match, by its kind."""

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int64])

Bools = npt.NDArray[np.bool_]

ValidRange = Callable[[int, int], Bools]
"""(low, high) -> bool [high - low]: which of the blocks [low, high) on the matched path can be had."""


@dataclass(frozen=True, slots=True)
class GroupPath:
    """One group's part of a match.

    `valid` tells of each block whether it can be had, for a state whether a snapshot lies at its end; a ring is never
    asked. `gives_up_last` marks the groups that hold draft layers, and only those.
    """

    name: str
    retention: Retention
    block_size: int
    valid: ValidRange
    gives_up_last: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """How far group `group` alone would have gone, in tokens, and why no further."""

    group: str
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Hit:
    """`length` tokens that every group can serve; one stop per group tells who shortened it."""

    length: int
    stops: tuple[Stop, ...]


def common_length(groups: Sequence[GroupPath], num_tokens: int, unit: int, replay: int = 0) -> Hit:
    """The longest hit that all groups can serve.

    Args:
        num_tokens: how far the tokens match, a multiple of `unit`.
        unit: the step of hit lengths, a multiple of the block size of every group but the rings.
        replay: tokens before the hit's end that are computed again; the largest ring may ask for more.

    A group is asked for the blocks it needs first, and for its whole path only when one of those is gone.

    Raises: TypeError, ValueError for numbers that are no integers or do not fit together.
    """
    rules = _rules(groups, num_tokens, unit, replay)
    length = num_tokens // unit
    common: Bools | None = None  # [length + 1]: the lengths that all groups asked for their whole path can serve
    stops, lazy = [], []
    for rule in rules:
        if rule.can_serve(rule.longest):
            own = rule.longest
            lazy.append(rule)
        else:
            lengths = rule.lengths()
            own = _last(lengths)
            common = lengths if common is None else common & lengths
        stops.append(Stop(rule.group.name, own * unit, rule.reason(own)))
        length = min(length, own)
    while True:
        if common is not None:
            length = _last(common[: length + 1])
        refusing = next((rule for rule in lazy if not rule.can_serve(length)), None)
        if refusing is None:
            return Hit(length * unit, tuple(stops))
        lazy.remove(refusing)
        common = refusing.lengths() if common is None else common & refusing.lengths()


class _Rule:
    """What one group can serve of a match. Lengths are in units."""

    __slots__ = ("ahead", "group", "longest", "num_tokens", "proved", "replay", "unit")

    def __init__(self, group: GroupPath, num_tokens: int, unit: int, replay: int) -> None:
        self.group = group
        self.num_tokens = num_tokens
        self.unit = unit
        self.replay = replay
        self.ahead = group.block_size if group.gives_up_last and group.retention.kind != "ring" else 0
        self.longest = max(num_tokens - self.ahead, 0) // unit
        self.proved = 0  # the last length that was found to be served

    def can_serve(self, length: int) -> bool:
        """Whether the group can serve one length, at most `longest`."""
        if length in (0, self.proved) or (length < self.proved and self.group.retention.kind in ("full", "ring")):
            return True
        served = self._has_rows(length * self.unit, self.ahead)
        if served:
            self.proved = length
        return served

    def lengths(self) -> Bools:
        """Which lengths the group can serve: bool [num_tokens // unit + 1]."""
        size = self.group.block_size
        tokens = np.arange(0, self.num_tokens + 1, self.unit)
        valid = self.group.valid(0, self.num_tokens // size)
        if self.group.retention.kind == "state":
            at = tokens - self.replay
            served: Bools = (at <= 0) | ((at % size == 0) & valid[np.maximum(at // size - 1, 0)])
        else:
            # gone[i]: the last of the blocks [0, i) that is gone, -1 for none
            gone = np.full(len(valid) + 1, -1)
            np.maximum.accumulate(np.where(valid, -1, np.arange(len(valid))), out=gone[1:])
            end = np.minimum(tokens + self.ahead, self.num_tokens) // size
            served = gone[end] < np.maximum(self._first_token(tokens) // size, 0)
        served[self.longest + 1 :] = False
        served[0] = True
        return served

    def reason(self, length: int) -> str:
        """Why the group alone would have stopped at `length`."""
        if length * self.unit == self.num_tokens:
            return END_OF_MATCH
        if self.ahead and self._has_rows(self.num_tokens, 0):
            return GIVEN_TO_THE_DRAFTER
        return REASONS[self.group.retention.kind]

    def _has_rows(self, tokens: int, ahead: int) -> bool:
        """Whether the rows that a hit of `tokens` > 0 takes are there, and those of `ahead` tokens behind it."""
        size, valid = self.group.block_size, self.group.valid
        match self.group.retention.kind:
            case "ring":
                return True
            case "state":
                at = tokens - self.replay
                return at <= 0 or (at % size == 0 and bool(valid(at // size - 1, at // size)[0]))
            case _:
                first, end = max(self._first_token(tokens) // size, 0), (tokens + ahead) // size
                return first == end or bool(valid(first, end).all())

    def _first_token(self, tokens: Tokens) -> Tokens:
        """The first token whose row a hit of `tokens` takes; negative is none before token 0."""
        retention = self.group.retention
        if retention.window is not None:
            return tokens - (retention.window - 1) - self.replay
        if retention.chunk is not None:
            return (tokens - self.replay) // retention.chunk * retention.chunk
        return 0 * tokens


def _rules(groups: Sequence[GroupPath], num_tokens: int, unit: int, replay: int) -> list[_Rule]:
    """One rule per group, with the replay that all need. Raises: as `common_length`."""
    expect_int("unit", unit, 1)
    expect_int("replay", replay, 0)
    if expect_int("num_tokens", num_tokens, 0) % unit:
        raise ValueError(f"num_tokens: expected a multiple of the unit {unit}, got {num_tokens}")
    for group in groups:
        if group.retention.kind == "ring":
            replay = max(replay, group.block_size)
        elif unit % group.block_size:
            raise ValueError(
                f"unit: expected a multiple of block size {group.block_size} of {group.name!r}, got {unit}"
            )
    return [_Rule(group, num_tokens, unit, replay) for group in groups]


def _last(lengths: Bools) -> int:
    """The largest length that is served; length 0 always is."""
    return len(lengths) - 1 - int(lengths[::-1].argmax())
