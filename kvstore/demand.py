"""How many blocks a sequence holds: one formula per retention rule, the only place where they stand."""

from kvstore.errors import PlanError
from kvstore.specs import Retention
from kvstore_kernels.checks import cdiv

STORED = ("all", "tail")
"""Which rows of a step are stored: all, or the tail that a later step can still read (windows and chunks)."""


def blocks_of_sequence(
    retention: Retention,
    block_size: int,
    length: int,
    in_flight: int = 0,
    *,
    stored: str = "all",
    prefix_caching: bool = True,
) -> int:
    """The most blocks that a sequence of `length` tokens holds while `in_flight` of them are scheduled, not settled.

    - full: those of all tokens.
    - sliding_window: the rows a query can reach and those in flight, window - 1 + in_flight in all, which need not
      begin at a block. With stored="tail" a step that writes more than a window keeps the old tail and the new one.
    - chunked: as a window of a chunk; it begins at a block where the chunk is a multiple of blocks.
    - ring: one. state: `Retention.blocks`, and with prefix caching one more to write to while a step is in flight.
    """
    if stored not in STORED:
        raise PlanError(f"stored: expected one of {', '.join(STORED)}, got {stored!r}")
    if length == 0:
        return 0
    every = cdiv(length, block_size)
    if retention.kind == "ring":
        return 1
    if retention.kind == "state":
        assert retention.blocks is not None
        return retention.blocks + (1 if prefix_caching and in_flight else 0)
    if retention.kind == "full":
        return every
    if retention.kind == "sliding_window":
        assert retention.window is not None
        tail, aligned = retention.window - 1, False
    else:
        assert retention.chunk is not None
        tail, aligned = retention.chunk - 1, retention.chunk % block_size == 0
    span = min(max(tail + in_flight, 1), length)
    needed = cdiv(span, block_size) if aligned else _touched(span, block_size)
    if stored == "tail":
        kept = cdiv(tail, block_size) if aligned else _touched(tail, block_size)
        needed = min(needed, 2 * max(kept, 1))
    return min(needed, every)


def _touched(span: int, block_size: int) -> int:
    """Most blocks that `span` consecutive tokens touch, wherever they begin."""
    return cdiv(span - 1, block_size) + 1 if span else 0
