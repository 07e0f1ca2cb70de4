"""The length of a hit: examples worked out by hand, and every length tried one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.hits import GroupPath, Hit, Stop, common_length
from kvstore.specs import Retention

FULL = Retention("full")
STATE = Retention("state", blocks=2)
RING = Retention("ring")


def window(size: int) -> Retention:
    return Retention("sliding_window", window=size)


def chunked(size: int) -> Retention:
    return Retention("chunked", chunk=size)


def path(retention: Retention, block_size: int, valid: str, name: str = "a", draft: bool = False) -> GroupPath:
    """A group whose block i can be had when `valid[i]` is x."""
    blocks = np.array([mark == "x" for mark in valid], bool)
    return GroupPath(name, retention, block_size, lambda low, high: blocks[low:high], draft)


def hit(*groups: GroupPath, tokens: int, unit: int, replay: int = 0) -> tuple[int, list[tuple[int, str]]]:
    found = common_length(groups, tokens, unit, replay)
    assert [stop.group for stop in found.stops] == [group.name for group in groups]
    return found.length, [(stop.length, stop.reason) for stop in found.stops]


def test_o14_a_whole_prompt_in_the_cache_leaves_a_token_to_compute() -> None:
    """32 tokens cached in blocks of 16; the caller asks for at most 31 tokens, in whole blocks."""
    assert hit(path(FULL, 16, "xx"), tokens=31 // 16 * 16, unit=16) == (16, [(16, "end of match")])


@pytest.mark.parametrize(("prompt", "length"), [(31, 16), (32, 16), (33, 32), (48, 32), (49, 32)])
def test_o15_a_state_saved_at_the_last_reusable_boundary(prompt: int, length: int) -> None:
    """Block 16, snapshots at 16 and 32; the prompts came before, so their full blocks are all there."""
    tokens = (prompt - 1) // 16 * 16
    groups = path(FULL, 16, "xxx"), path(STATE, 16, "xx-")
    assert hit(*groups, tokens=tokens, unit=16)[0] == length


def test_o06_only_the_group_with_the_draft_layer_gives_up_a_block() -> None:
    full, draft, state = path(FULL, 16, "xxx"), path(FULL, 16, "xxx", draft=True), path(STATE, 16, "xxx")
    assert hit(full, state, tokens=48, unit=16) == (48, [(48, "end of match")] * 2)
    assert hit(draft, state, tokens=48, unit=16) == (32, [(32, "given to the drafter"), (48, "end of match")])
    rare = path(STATE, 16, "x-x")
    assert hit(draft, rare, tokens=48, unit=16)[0] == 16


def test_a_drafter_gives_up_a_block_once_and_not_for_each_round() -> None:
    """The state shortens the hit to 32 all alone; block 2, behind it, is there: nothing more is given up."""
    draft, state = path(FULL, 16, "xxxx", draft=True), path(STATE, 16, "-x--")
    assert hit(draft, state, tokens=64, unit=16) == (32, [(48, "given to the drafter"), (32, "no snapshot")])
    short = path(FULL, 16, "xx--", draft=True)
    assert hit(short, state, tokens=64, unit=16) == (0, [(16, "block gone"), (32, "no snapshot")])


def test_no_token_always_goes() -> None:
    for retention in (FULL, window(5), chunked(16), STATE):
        for draft in (False, True):
            assert hit(path(retention, 4, "", draft=draft), tokens=0, unit=4) == (0, [(0, "end of match")])
            assert hit(path(retention, 4, "--", draft=draft), tokens=8, unit=4)[0] == 0
    assert common_length([], 8, 4) == Hit(8, ())


def test_a_full_group_stops_at_the_first_block_gone() -> None:
    assert hit(path(FULL, 4, "xx-x"), tokens=16, unit=4) == (8, [(8, "block gone")])
    assert hit(path(FULL, 4, "xxx-"), tokens=16, unit=8) == (8, [(8, "block gone")])


@pytest.mark.parametrize(
    ("size", "valid", "length"),
    [(5, "---x", 16), (6, "---x", 0), (6, "--xx", 16), (1, "----", 16), (6, "xx-x", 8), (6, "x---", 4), (5, "-x--", 8)],
)
def test_a_window_needs_the_blocks_in_reach(size: int, valid: str, length: int) -> None:
    """The first new token sees itself and size - 1 tokens before it."""
    reason = "end of match" if length == 16 else "window incomplete"
    assert hit(path(window(size), 4, valid), tokens=16, unit=4) == (length, [(length, reason)])


@pytest.mark.parametrize(
    ("size", "valid", "length"), [(8, "----", 16), (12, "---x", 16), (12, "xx--", 12), (64, "xx--", 8), (64, "-xxx", 0)]
)
def test_a_chunk_needs_its_blocks_so_far(size: int, valid: str, length: int) -> None:
    reason = "end of match" if length == 16 else "chunk incomplete"
    assert hit(path(chunked(size), 4, valid), tokens=16, unit=4) == (length, [(length, reason)])


def test_a_ring_is_filled_again_from_further_back() -> None:
    """Ring of 4: the token at n - 4 is computed first, so a window of 5 reaches 4 tokens further, 2 blocks in all."""
    ring = path(RING, 4, "", "ring")
    assert hit(ring, tokens=16, unit=4) == (16, [(16, "end of match")])
    assert hit(path(window(5), 4, "-x-x"), ring, tokens=16, unit=4)[0] == 0
    assert hit(path(window(5), 4, "--xx"), ring, tokens=16, unit=4)[0] == 16
    assert hit(path(window(5), 4, "---x"), tokens=16, unit=4, replay=4)[0] == 0
    assert hit(path(chunked(8), 4, "--xx"), ring, tokens=16, unit=4)[0] == 16
    assert hit(path(chunked(8), 4, "---x"), ring, tokens=16, unit=4)[0] == 0


def test_with_a_ring_the_state_lies_where_computing_goes_on() -> None:
    state = path(STATE, 4, "-x-x")
    assert hit(state, tokens=16, unit=4)[0] == 16
    assert hit(state, path(RING, 4, ""), tokens=16, unit=4) == (12, [(12, "no snapshot"), (16, "end of match")])
    assert hit(state, tokens=16, unit=4, replay=8)[0] == 16
    assert hit(path(STATE, 4, "---x"), tokens=16, unit=4, replay=8)[0] == 8  # all 8 are computed again


def test_a_replay_that_ends_at_no_boundary_never_meets_a_state() -> None:
    assert hit(path(STATE, 4, "xxxx"), tokens=16, unit=4, replay=6)[0] == 4


def test_hits_are_whole_units() -> None:
    groups = path(FULL, 4, "xxxxx-"), path(window(2), 12, "xx")
    assert hit(*groups, tokens=24, unit=12) == (12, [(12, "block gone"), (24, "end of match")])


def test_a_group_that_agreed_is_asked_again() -> None:
    """The window is whole at 16; the full group shortens the hit to 12, where it is not, then the state to 4."""
    groups = path(window(5), 4, "xx-x"), path(FULL, 4, "xxx-"), path(STATE, 4, "x-xx")
    assert hit(*groups, tokens=16, unit=4) == (4, [(16, "end of match"), (12, "block gone"), (16, "end of match")])


def test_a_window_is_asked_for_no_more_than_it_needs() -> None:
    asked = []

    def valid(low: int, high: int) -> np.ndarray:
        asked.append((low, high))
        return np.ones(high - low, bool)

    found = common_length([GroupPath("w", window(9), 4, valid), GroupPath("r", RING, 4, valid)], 4000, 4)
    assert found.length == 4000
    assert asked == [(997, 1000)]


def test_patterns_that_disagree_everywhere_cost_each_group_one_look() -> None:
    """Snapshots at even boundaries here, at odd ones there: no walk from boundary to boundary."""
    asked = []

    def looker(which: int):
        def valid(low: int, high: int) -> np.ndarray:
            asked.append((low, high))
            return np.arange(low, high) % 2 == which

        return valid

    groups = [GroupPath(str(which), STATE, 4, looker(which)) for which in (0, 1)]
    assert common_length(groups, 4 * 8192, 4).length == 0
    assert sum(high - low > 1 for low, high in asked) == 2
    assert len(asked) <= 6


def brute_force(groups: list[tuple], tokens: int, unit: int, replay: int) -> tuple[int, list[int]]:
    """Every length, every token: the longest for all groups, and for each of them alone."""
    replay = max([replay, *(size for kind, _, size, _, _ in groups if kind == "ring")])

    def serves(group: tuple, n: int) -> bool:
        kind, reach, size, valid, draft = group
        if n == 0 or kind == "ring":
            return True
        first = {"full": 0, "sliding_window": n - (reach - 1) - replay, "chunked": max(n - replay, 0) // reach * reach}
        if kind == "state":
            needed = {n - replay - 1} if n > replay else set()
            if needed and (n - replay) % size:
                return False
        else:
            needed = set(range(max(first[kind], 0), n + draft))
        return (not draft or n + size <= tokens) and all(valid[token // size] for token in needed)

    lengths = range(0, tokens + 1, unit)
    alone = [max(n for n in lengths if serves(group, n)) for group in groups]
    return max(n for n in lengths if all(serves(group, n) for group in groups)), alone


@st.composite
def matches(draw: st.DrawFn) -> tuple[list[tuple], int, int, int]:
    """(kind, reach, block size, valid, draft) of each group, tokens, unit, replay."""
    kinds = st.sampled_from(["full", "sliding_window", "chunked", "state", "ring"])
    shapes = draw(
        st.lists(st.tuples(kinds, st.integers(1, 30), st.sampled_from([1, 2, 3, 4]), st.booleans()), max_size=5)
    )
    unit = math.lcm(*(size for kind, _, size, _ in shapes if kind != "ring"))
    tokens = unit * draw(st.integers(0, max(48 // unit, 3)))
    likely = draw(st.sampled_from([2, 5, 20]))
    groups = []
    for kind, reach, size, draft in shapes:
        blocks = draw(st.lists(st.integers(0, likely), min_size=tokens // size, max_size=tokens // size))
        groups.append((kind, reach, size, [block > 0 for block in blocks], draft))
    return groups, tokens, unit, draw(st.sampled_from([0, 0, 1, 2, 4, 12]))


RETENTIONS = {
    "full": lambda reach: FULL,
    "sliding_window": window,
    "chunked": chunked,
    "state": lambda reach: STATE,
    "ring": lambda reach: RING,
}


@settings(max_examples=400)
@given(matches())
def test_every_length_tried_one_by_one(match: tuple) -> None:
    groups, tokens, unit, replay = match
    paths = [
        path(RETENTIONS[kind](reach), size, "".join("x" if block else "-" for block in valid), str(i), draft)
        for i, (kind, reach, size, valid, draft) in enumerate(groups)
    ]
    length, alone = brute_force(groups, tokens, unit, replay)
    found = common_length(paths, tokens, unit, replay)
    assert found.length == length
    assert [stop.length for stop in found.stops] == alone
    for (kind, _, _, _, draft), stop in zip(groups, found.stops, strict=True):
        assert (stop.reason == "end of match") == (stop.length == tokens)
        assert stop.reason != "given to the drafter" or (draft and kind != "ring")


@pytest.mark.parametrize(
    ("tokens", "unit", "replay", "error", "message"),
    [
        (10, 4, 0, ValueError, "num_tokens: expected a multiple of the unit 4, got 10"),
        (-4, 4, 0, ValueError, "num_tokens: expected an integer >= 0, got -4"),
        (12, 0, 0, ValueError, "unit: expected an integer >= 1, got 0"),
        (12, 6, 0, ValueError, "unit: expected a multiple of block size 4 of 'a', got 6"),
        (12, 4, -1, ValueError, "replay: expected an integer >= 0, got -1"),
        (12, 4, 1.0, TypeError, "replay: expected an integer, got 1.0"),
    ],
)
def test_numbers_that_do_not_fit(tokens: int, unit: int, replay: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        common_length([path(FULL, 4, "xxx")], tokens, unit, replay)


def test_a_stop_names_its_group() -> None:
    found = common_length([path(FULL, 4, "x-", "layers.full")], 8, 4)
    assert found.stops == (Stop("layers.full", 4, "block gone"),)
