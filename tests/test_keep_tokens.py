"""KeepTokens: what ranges of tokens are worth, and the blocks they touch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.retain import DEFAULT_PRIORITY, PINNED, KeepTokens, block_priorities


def test_the_numbers_that_the_allocator_shares() -> None:
    assert (DEFAULT_PRIORITY, PINNED) == (50, 101)
    assert KeepTokens(0) == KeepTokens(0, None, 50, None, False)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"start": -1}, ValueError, "KeepTokens: start: expected an integer >= 0, got -1"),
        ({"start": 1.0}, TypeError, "KeepTokens: start: expected an integer, got 1.0"),
        ({"start": 4, "end": 4}, ValueError, "KeepTokens: end: expected an integer >= 5, got 4"),
        (
            {"start": 0, "priority": 101},
            ValueError,
            r"KeepTokens: priority: expected an integer in \[0, 100\], got 101",
        ),
        ({"start": 0, "priority": True}, TypeError, "KeepTokens: priority: expected an integer, got True"),
        ({"start": 0, "pinned": 1}, TypeError, "KeepTokens: pinned: expected True or False, got 1"),
        (
            {"start": 0, "pinned": True, "priority": 90},
            ValueError,
            "KeepTokens: priority: expected the default 50 for a pinned range, got 90",
        ),
        ({"start": 0, "ttl": 0}, ValueError, "KeepTokens: ttl: expected a finite number of seconds above 0, got 0"),
        ({"start": 0, "ttl": math.nan}, ValueError, "KeepTokens: ttl: expected a finite number"),
        ({"start": 0, "ttl": math.inf}, ValueError, "KeepTokens: ttl: expected a finite number"),
        ({"start": 0, "ttl": True}, TypeError, "KeepTokens: ttl: expected seconds or None, got True"),
        ({"start": 0, "ttl": "60"}, TypeError, "KeepTokens: ttl: expected seconds or None, got '60'"),
    ],
)
def test_bad_ranges_are_refused(fields: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KeepTokens(**fields)


def values(keeps: list[KeepTokens], *where: int) -> tuple[list[int], list[float]]:
    priorities, ttls = block_priorities(keeps, *where)
    assert (priorities.dtype, ttls.dtype) == (np.int8, np.float64)
    return priorities.tolist(), ttls.tolist()


def test_blocks_that_no_range_touches_are_ordinary() -> None:
    assert values([], 4, 0, 3) == ([50] * 3, [math.inf] * 3)
    assert values([KeepTokens(40, 50, 90)], 4, 0, 3) == ([50] * 3, [math.inf] * 3)
    assert values([KeepTokens(0, 8, 90)], 4, 2, 3) == ([50] * 3, [math.inf] * 3)
    assert values([KeepTokens(0, 8, 90)], 4, 0, 0) == ([], [])


def test_a_range_touches_its_first_and_last_block() -> None:
    assert values([KeepTokens(3, 9, 90, ttl=7)], 4, 0, 4)[0] == [90, 90, 90, 50]
    assert values([KeepTokens(4, 8, 90, ttl=7)], 4, 0, 4) == ([50, 90, 50, 50], [math.inf, 7, math.inf, math.inf])


def test_without_an_end_later_blocks_belong_to_the_range() -> None:
    assert values([KeepTokens(9, priority=0)], 4, 0, 4)[0] == [50, 50, 0, 0]
    assert values([KeepTokens(9, priority=0)], 4, 100, 2)[0] == [0, 0]


def test_the_highest_priority_counts_with_its_ttl() -> None:
    keeps = [KeepTokens(0, 8, 90, ttl=5), KeepTokens(0, 4, pinned=True, ttl=3), KeepTokens(4, 16, 10)]
    for order in (keeps, keeps[::-1]):
        assert values(order, 4, 0, 4) == ([PINNED, 90, 10, 10], [3, 5, math.inf, math.inf])


def test_among_equal_priorities_the_longest_ttl_counts() -> None:
    keeps = [KeepTokens(0, 4, 90, ttl=5), KeepTokens(0, 8, 90, ttl=9), KeepTokens(8, 12, 90), KeepTokens(8, 12, 90, 1)]
    for order in (keeps, keeps[::-1]):
        assert values(order, 4, 0, 3) == ([90] * 3, [9, 9, math.inf])


RANGES = st.builds(
    lambda start, length, priority, ttl: KeepTokens(start, length and start + length, priority, ttl),
    st.integers(0, 30),
    st.none() | st.integers(1, 20),
    st.integers(0, 100),
    st.none() | st.integers(1, 3),
)


@given(st.lists(RANGES, max_size=5), st.integers(1, 5), st.integers(0, 6), st.integers(0, 8))
def test_every_block_against_a_token_by_token_answer(keeps, block_size: int, first: int, count: int) -> None:
    expected = []
    for block in range(first, first + count):
        tokens = range(block * block_size, (block + 1) * block_size)
        touching = [
            (keep.priority, keep.ttl or math.inf)
            for keep in keeps
            if any(keep.start <= token < (keep.end or 1000) for token in tokens)
        ]
        expected.append(max(touching, default=(50, math.inf)))
    priorities, ttls = values(keeps, block_size, first, count)
    assert list(zip(priorities, ttls, strict=True)) == expected
