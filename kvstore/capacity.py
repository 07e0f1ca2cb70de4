"""How much fits: blocks, sequences, tokens. All figures come from `blocks_of_sequence`, the null frame held back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Protocol

from kvstore.demand import AT_REST, InFlight, blocks_of_sequence
from kvstore.errors import PlanError, plan_int
from kvstore.groups import CacheGroup
from kvstore_kernels.checks import cdiv


class Plan(Protocol):
    """The part of a CachePlan that says how much fits."""

    @property
    def groups(self) -> tuple[CacheGroup, ...]: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def blocks_per_frame(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences of `length` tokens that fit at once.

    Attributes:
        length: tokens of each.
        blocks: blocks of each group that one of them holds between steps.
        num_bytes: bytes that these take, blocks x block stride.
        frames: frames that one takes alone, partly used ones counted whole.
        num_sequences: how many fit, one of them with its tokens in flight.
    """

    length: int
    blocks: tuple[int, ...]
    num_bytes: int
    frames: int
    num_sequences: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.num_sequences * self.length


def blocks_per_group(groups: Sequence[CacheGroup], length: int, in_flight: InFlight = AT_REST) -> tuple[int, ...]:
    """Blocks of each group that one sequence holds; see `blocks_of_sequence`."""
    return tuple(blocks_of_sequence(group.retention, group.block_size, length, in_flight) for group in groups)


def frames_of(plan: Plan, blocks: Sequence[int]) -> int:
    """Frames that hold so many blocks of each group, the last of each group perhaps partly used."""
    return sum(cdiv(count, per_frame) for count, per_frame in zip(blocks, plan.blocks_per_frame, strict=True))


def capacity(plan: Plan, length: int, in_flight: InFlight = AT_REST) -> Capacity:
    """Sequences of `length` tokens that fit at once while one of them has tokens in flight."""
    blocks = blocks_per_group(plan.groups, length)
    busy = blocks_per_group(plan.groups, length, in_flight)
    strides = [plan.frame_bytes // per_frame for per_frame in plan.blocks_per_frame]
    usable = plan.num_frames - 1

    def fits(count: int) -> bool:
        held = [(count - 1) * rest + most for rest, most in zip(blocks, busy, strict=True)]
        return frames_of(plan, held) <= usable

    most = usable * max(plan.blocks_per_frame, default=0) if any(blocks) else 0
    num_sequences = last_true(fits, most) if most and fits(1) else 0
    num_bytes = sum(count * stride for count, stride in zip(blocks, strides, strict=True))
    return Capacity(length, blocks, num_bytes, frames_of(plan, blocks), num_sequences)


def longest_sequence(plan: Plan, num_frames: int, in_flight: InFlight = AT_REST) -> int | None:
    """The tokens of the longest sequence that fits alone in `num_frames`, the null frame counted.

    `in_flight` of its tokens, or all if it has fewer, are not settled. None when it can be of any length (no full
    group), 0 when not one token fits.
    """
    usable = num_frames - 1
    too_long = 1 + usable * max(
        (group.block_size * blocks for group, blocks in zip(plan.groups, plan.blocks_per_frame, strict=True)), default=0
    )

    def fits(length: int) -> bool:
        needed = blocks_per_group(plan.groups, length, replace(in_flight, tokens=min(in_flight.tokens, length)))
        return frames_of(plan, needed) <= usable

    if fits(too_long):
        return None
    return last_true(fits, too_long) if fits(1) else 0


def prefix_units(groups: Sequence[CacheGroup], unit: int | None = None) -> tuple[int, int]:
    """(tokens of a step's unit, tokens of a prefix hit's unit): lcm of all block sizes, gcd of the cacheable groups'.

    Rings keep no prefix and do not count for hits. A `unit` for hits may be asked for.

    Raises: PlanError for one that does not divide those blocks, or ends inside a row of several tokens.
    """
    cacheable = [group for group in groups if group.retention.kind != "ring"]
    step = lcm(*(group.block_size for group in groups))
    if unit is None:
        return step, gcd(*(group.block_size for group in cacheable)) or 1
    plan_int("unit", unit, 1)
    for group in cacheable:
        if group.block_size % unit:
            raise PlanError(f"unit: expected a divisor of {group.block_size}, the block of {group.name!r}, got {unit}")
        for layer, spec in group.layers.items():
            if unit % spec.tokens_per_row:
                raise PlanError(
                    f"unit: expected a multiple of the {spec.tokens_per_row} tokens a row of {layer!r}, got {unit}"
                )
    return step, unit


def last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest number in 1 ... `most` for which `holds`, given that it does for 1 and, once it fails, stays so."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
