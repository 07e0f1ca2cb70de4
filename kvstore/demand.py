"""How many blocks a sequence holds: one formula per retention rule, the only place where they stand."""

from dataclasses import dataclass

from kvstore.errors import PlanError, plan_int
from kvstore.specs import Retention
from kvstore_kernels.checks import cdiv

STORED = ("all", "tail")
"""Which rows of a step are stored: all, or the tail that a later step can still read (windows and chunks)."""


MAX_TOKENS = 2**40
"""Tokens that a plan is asked about, at most."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Tokens of a sequence that are scheduled and not settled, and what is kept for them.

    `stored` says which of their rows windows and chunks keep: "all", or the "tail" of each of `num_steps` steps that a
    later one can still read. With `prefix_caching` a state in flight takes one more block, since the one it starts
    from stays.

    Raises: PlanError for a number out of range and another value of `stored`.
    """

    tokens: int = 0
    stored: str = "all"
    num_steps: int = 1
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        plan_int("in_flight", self.tokens, 0, MAX_TOKENS)
        plan_int("num_steps", self.num_steps, 1, MAX_TOKENS)
        if self.stored not in STORED:
            raise PlanError(f"stored: expected one of {', '.join(STORED)}, got {self.stored!r}")


AT_REST = InFlight()
"""Between steps: every token is settled."""


def blocks_of_sequence(retention: Retention, block_size: int, length: int, in_flight: InFlight = AT_REST) -> int:
    """The most blocks that a sequence of `length` tokens holds while some of them are in flight.

    - full: those of all tokens.
    - sliding_window: the rows a query can reach and those in flight, window - 1 + in_flight in all, which need not
      begin at a block. Where the tail only is stored, the old one and one for each step in flight.
    - chunked: as a window of a chunk; it begins at a block where the chunk is a multiple of blocks.
    - ring: one. state: `Retention.blocks`, and with prefix caching one more to write to while a step is in flight.
    """
    if length == 0:
        return 0
    every = cdiv(length, block_size)
    if retention.kind == "ring":
        return 1
    if retention.kind == "state":
        assert retention.blocks is not None
        return retention.blocks + (1 if in_flight.prefix_caching and in_flight.tokens else 0)
    if retention.kind == "full":
        return every
    if retention.kind == "sliding_window":
        assert retention.window is not None
        tail, aligned = retention.window - 1, False
    else:
        assert retention.chunk is not None
        tail, aligned = retention.chunk - 1, retention.chunk % block_size == 0
    span = min(max(tail + in_flight.tokens, 1), length)
    needed = cdiv(span, block_size) if aligned else _touched(span, block_size)
    if in_flight.stored == "tail":
        kept = cdiv(tail, block_size) if aligned else _touched(tail, block_size)
        needed = min(needed, (1 + in_flight.num_steps) * max(kept, 1))
    return min(needed, every)


def _touched(span: int, block_size: int) -> int:
    """Most blocks that `span` consecutive tokens touch, wherever they begin."""
    return cdiv(span - 1, block_size) + 1 if span else 0
