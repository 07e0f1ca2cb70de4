"""The exceptions of this package, and the integer check of the planner half."""

from collections.abc import Sequence

import numpy as np

from kvstore_kernels.checks import expect_int


class PlanError(ValueError):
    """A spec, group, config or plan that cannot be; the message names the layer, the numbers and the rule."""


class SequenceError(ValueError):
    """A sequence handle that is unknown, released, or used out of turn."""


class OutOfBlocks(RuntimeError):  # noqa: N818 - the state of the pool, not a mistake of the caller
    """A request for blocks that the pool cannot meet now; nothing was changed.

    An engine releases or suspends a sequence, or waits for a `finish`, and tries again. Free and evictable blocks are
    the same ones for all groups where a frame is a block: what all groups want together counts.

    Attributes:
        wanted: blocks of each group that the call asked for.
        free: blocks of each group that it could take.
        evictable: cached blocks that nobody holds.
        fenced: blocks that an unfinished step may touch, until it is finished.
    """

    def __init__(
        self, *, wanted: Sequence[int], free: Sequence[int], evictable: Sequence[int], fenced: Sequence[int]
    ) -> None:
        self.wanted = tuple(wanted)
        self.free = tuple(free)
        self.evictable = tuple(evictable)
        self.fenced = tuple(fenced)
        counts = zip(self.wanted, self.free, self.evictable, strict=True)
        alone = all(wanted <= free + evictable for wanted, free, evictable in counts)
        super().__init__(
            f"out of blocks, counted per group: wanted {list(self.wanted)}, free {list(self.free)}, "
            f"evictable {list(self.evictable)}, fenced {list(self.fenced)}"
            + ("; the groups share one pool, which lacks blocks for all of them together" if alone else "")
        )


class NeverFits(OutOfBlocks):
    """A request for blocks that the pool could not meet if it held nothing else; nothing was changed.

    One sequence of the call holds and asks for more blocks than the plan has. No release and no waiting helps: an
    engine ends the request, or steps through its prompt with fewer tokens at once where windows are what lacks room.

    Attributes:
        seq_id: handle of the sequence.
        needed: blocks of each group that it holds and asks for.
        total: blocks of each group that the plan has; where a frame is a block, the groups share them.
        wanted, free, evictable, fenced: as of OutOfBlocks.
    """

    def __init__(self, error: OutOfBlocks, seq_id: int, needed: Sequence[int], total: Sequence[int]) -> None:
        super().__init__(wanted=error.wanted, free=error.free, evictable=error.evictable, fenced=error.fenced)
        self.seq_id = seq_id
        self.needed = tuple(needed)
        self.total = tuple(total)
        shared = ", which the groups share" if len(self.total) > 1 else ""
        self.args = (
            f"{self}; sequence {seq_id} never fits: alone it needs {list(self.needed)} blocks, and the plan has "
            f"{list(self.total)}{shared}",
        )


def plan_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """`expect_int` for a plan, numpy integers included. Raises: PlanError for a wrong type as for a wrong range."""
    try:
        number = int(value) if isinstance(value, np.integer) else value
        return expect_int(name, number, minimum, maximum)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from None
