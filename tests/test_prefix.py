"""PrefixIndex: exact matches, splits, and paths cut by eviction, against a plain set of token tuples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix import PrefixIndex


def tokens_of(*units: int) -> np.ndarray:
    """Two tokens a unit: unit u is (u, u + 100)."""
    return np.array([token for unit in units for token in (unit, unit + 100)], np.int32)


class Fixture:
    """An index over units of two tokens, with one block a unit in group 0 and two in group 1."""

    def __init__(self) -> None:
        self.generations = np.zeros(1000, np.int32)
        self.index = PrefixIndex(2, (1, 2), self.generations)
        self.next_block = 1

    def insert(self, *units: int, row: int = 0, node=None, num_units: int = 0):
        blocks = [self.fresh(len(units)), self.fresh(2 * len(units))]
        node = self.index.root if node is None else node
        return *self.index.insert(node, num_units, tokens_of(*units), blocks, row), blocks

    def fresh(self, count: int) -> np.ndarray:
        self.next_block += count
        return np.arange(self.next_block - count, self.next_block, dtype=np.int32)

    def found(self, *units: int) -> int:
        _, (first, second) = self.index.match(tokens_of(*units), len(units))
        assert len(second) == 2 * len(first)
        return len(first)


def test_a_match_is_the_longest_run_of_whole_units() -> None:
    fixture = Fixture()
    _, taken, blocks = fixture.insert(1, 2, 3)
    assert [part.tolist() for part in taken] == [part.tolist() for part in blocks]
    _, found = fixture.index.match(tokens_of(1, 2, 9), 3)
    assert [part.tolist() for part in found] == [blocks[0][:2].tolist(), blocks[1][:4].tolist()]
    assert fixture.found(1, 2, 3, 4) == 3
    assert fixture.found(2, 3) == 0
    assert fixture.index.match(tokens_of(1, 2, 3), 1)[1][0].tolist() == [blocks[0][0]]


def test_half_a_unit_does_not_match() -> None:
    fixture = Fixture()
    fixture.insert(1, 2)
    _, found = fixture.index.match(np.array([1, 101, 2, 5], np.int32), 2)
    assert len(found[0]) == 1


def test_equal_tokens_keep_the_blocks_that_came_first() -> None:
    fixture = Fixture()
    _, _, first = fixture.insert(1, 2, row=0)
    _, taken, second = fixture.insert(1, 2, 3, row=1)
    assert taken[0].tolist() == [second[0][2]]
    _, found = fixture.index.match(tokens_of(1, 2, 3), 3)
    assert found[0].tolist() == [*first[0].tolist(), second[0][2]]


def test_a_row_appends_to_its_own_edge() -> None:
    fixture = Fixture()
    node, _, _ = fixture.insert(1, row=5)
    again, _, _ = fixture.insert(1, 2, 3, row=5, node=node, num_units=1)
    assert again is node
    assert fixture.found(1, 2, 3) == 3
    assert node.num_units == 3


def test_an_edge_that_others_end_at_is_not_grown() -> None:
    fixture = Fixture()
    node, _, _ = fixture.insert(1, 2, row=5)
    other, _ = fixture.index.match(tokens_of(1, 2, 7), 3)
    assert other is node
    child, _, _ = fixture.insert(1, 2, 3, row=5, node=node, num_units=2)
    assert child is not node
    fixture.insert(1, 2, 8, row=6, node=other, num_units=2)
    assert (fixture.found(1, 2, 3), fixture.found(1, 2, 8), fixture.found(1, 2, 9)) == (3, 3, 2)


def test_an_evicted_block_cuts_the_path_behind_it() -> None:
    fixture = Fixture()
    _, _, blocks = fixture.insert(1, 2, 3, row=0)
    fixture.insert(1, 2, 3, 4, row=1)
    fixture.generations[blocks[1][4]] += 1  # second block of unit 3 in group 1
    assert fixture.found(1, 2, 3, 4) == 2
    fixture.generations[blocks[0][0]] += 1
    assert fixture.found(1, 2) == 0
    assert not fixture.index.root.children


def test_a_row_whose_path_was_cut_starts_again_from_the_root() -> None:
    fixture = Fixture()
    node, _, blocks = fixture.insert(1, 2, 3, row=0)
    fixture.generations[blocks[0][1]] += 1
    assert fixture.found(1, 2, 3) == 1
    fixture.insert(1, 2, 3, 4, row=0, node=node, num_units=3)
    assert fixture.found(1, 2, 3, 4) == 4


def test_sweep_drops_what_cannot_be_reached() -> None:
    fixture = Fixture()
    _, _, first = fixture.insert(1, 2, row=0)
    fixture.insert(5, 6, row=1)
    fixture.generations[first[0]] += 1
    fixture.index.sweep()
    assert len(fixture.index.root.children) == 1
    assert fixture.found(5, 6) == 2


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_matches_are_those_of_a_plain_set(data: st.DataObject) -> None:
    """Rows grow unit by unit and evictions strike anywhere; a match is exact, and as long as the blocks last."""
    fixture = Fixture()
    rows: dict[int, tuple] = {}  # row -> units, blocks of group 0, blocks of group 1, node, units inserted
    content: dict[int, tuple[int, ...]] = {}  # block of group 0 -> the units up to and with its own
    evicted = False
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["grow", "grow", "grow", "new", "match", "evict"]))
        if action == "new" or not rows:
            rows[max(rows, default=-1) + 1] = ((), fixture.fresh(0), fixture.fresh(0), fixture.index.root, 0)
        elif action == "grow":
            row = data.draw(st.sampled_from(sorted(rows)))
            units, first, second, node, inserted = rows[row]
            more = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
            units += more
            first = np.concatenate([first, fixture.fresh(len(more))])
            second = np.concatenate([second, fixture.fresh(2 * len(more))])
            node, _ = fixture.index.insert(node, inserted, tokens_of(*units), [first, second], row)
            content.update((int(block), units[: place + 1]) for place, block in enumerate(first))
            rows[row] = (units, first, second, node, len(units))
        elif action == "match":
            query = tuple(data.draw(st.lists(st.integers(0, 2), max_size=6)))
            _, found = fixture.index.match(tokens_of(*query), len(query))
            for place, block in enumerate(found[0].tolist()):
                assert content[block] == query[: place + 1]
            if not evicted:
                expected = max(
                    (
                        sum(1 for size in range(1, len(query) + 1) if row[0][:size] == query[:size])
                        for row in rows.values()
                    ),
                    default=0,
                )
                assert len(found[0]) == expected
        elif content:
            evicted = True
            block = data.draw(st.sampled_from(sorted(content)))
            fixture.generations[block] += 1
            del content[block]
            for row, (_, first, *_) in list(rows.items()):
                if block in first.tolist():
                    del rows[row]  # a row whose block was evicted is no longer open


@pytest.mark.parametrize("count", [0, 1])
def test_no_tokens_or_no_units_match_nothing(count: int) -> None:
    fixture = Fixture()
    fixture.insert(1)
    node, found = fixture.index.match(tokens_of(1), 0) if count else fixture.index.match(tokens_of(), 5)
    assert node is fixture.index.root
    assert [part.tolist() for part in found] == [[], []]
