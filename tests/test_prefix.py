"""PrefixIndex: exact matches, splits, parts of a unit, and paths cut by eviction, against a plain set of tuples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix import DETACHED, NO_GENERATION, Node, PrefixIndex

BLOCKS_PER_UNIT = (1, 2)


def tokens_of(*units: int) -> np.ndarray:
    """Two tokens a unit: unit u is (u, u + 100)."""
    return np.array([token for unit in units for token in (unit, unit + 100)], np.int32)


class Fixture:
    """An index over units of two tokens, with one block a unit in group 0 and two in group 1."""

    def __init__(self) -> None:
        self.generations = np.zeros(1000, np.int32)
        self.index = PrefixIndex(2, BLOCKS_PER_UNIT, lambda _, blocks, made: self.generations[blocks] == made)
        self.root = self.index.new_root()
        self.next_block = 1

    def insert(self, *units: int, row: int = 0, node: Node | None = None, num_units: int = 0, key: bytes = b""):
        """Inserts `units` from number `num_units` on, which is where `node` ends, under fresh blocks."""
        count = len(units) - num_units
        blocks = [self.fresh(count), self.fresh(2 * count)]
        made = [self.generations[part] for part in blocks]
        runs = [(0, count, key)] if count else []
        end, taken = self.index.insert(node or self.root, tokens_of(*units[num_units:]), runs, blocks, made, row)
        return end, taken, blocks

    def fresh(self, count: int) -> np.ndarray:
        self.next_block += count
        return np.arange(self.next_block - count, self.next_block, dtype=np.int32)

    def match(self, tokens: np.ndarray, key: bytes = b""):
        return self.index.match(self.root, tokens, [(0, len(tokens) // 2, key)] if len(tokens) > 1 else [])

    def blocks(self, *units: int) -> list[list[int]]:
        """The blocks of the longest match that can still be had, whole units from the front, per group."""
        path = self.match(tokens_of(*units))
        usable, per_group = path.num_units, []
        for group, per in enumerate(BLOCKS_PER_UNIT):
            blocks, made = path.entries(group, per)
            assert len(blocks) == len(made) == path.num_units * per
            valid = self.generations[blocks] == made
            usable = min(usable, (len(valid) if valid.all() else int(valid.argmin())) // per)
            per_group.append(blocks)
        return [blocks[: usable * per].tolist() for blocks, per in zip(per_group, BLOCKS_PER_UNIT, strict=True)]

    def found(self, *units: int) -> int:
        first, second = self.blocks(*units)
        assert len(second) == 2 * len(first)
        return len(first)


def test_a_match_is_the_longest_run_of_whole_units() -> None:
    fixture = Fixture()
    _, taken, blocks = fixture.insert(1, 2, 3)
    assert [part.tolist() for part in taken] == [part.tolist() for part in blocks]
    assert fixture.blocks(1, 2, 9) == [blocks[0][:2].tolist(), blocks[1][:4].tolist()]
    assert fixture.found(1, 2, 3, 4) == 3
    assert fixture.found(2, 3) == 0
    assert fixture.blocks(1)[0] == [blocks[0][0]]


def test_half_a_unit_does_not_match() -> None:
    """But it is told: one token of the unit behind the first one is equal."""
    fixture = Fixture()
    node, _, _ = fixture.insert(1, 2)
    path = fixture.match(np.array([1, 101, 2, 5], np.int32))
    assert path.num_units == 1
    assert (path.more_node, path.more_unit, path.more_tokens) == (node, 1, 1)


def test_half_a_unit_is_found_among_the_children_of_a_node() -> None:
    fixture = Fixture()
    fixture.insert(1, 2, row=0)
    fixture.insert(1, 3, row=1)
    path = fixture.match(np.array([1, 101, 3, 5], np.int32))
    assert (path.num_units, path.more_unit, path.more_tokens) == (1, 0, 1)
    assert path.more_node is not None
    assert path.more_node.tokens[:2].tolist() == [3, 103]
    assert fixture.match(np.array([1, 101, 4, 5], np.int32)).more_tokens == 0


def test_what_an_item_keys_is_no_part_of_a_unit() -> None:
    """Under an edge whose key holds more than tokens nothing is offered to a prompt of tokens alone."""
    fixture = Fixture()
    fixture.insert(1, 2, key=b"cat")
    assert fixture.found(1, 2) == 0
    assert fixture.match(tokens_of(1, 2)).more_tokens == 0
    assert fixture.match(tokens_of(1, 2), key=b"dog").num_units == 0
    assert fixture.match(tokens_of(1, 2), key=b"cat").num_units == 2


def test_equal_tokens_keep_the_blocks_that_came_first() -> None:
    fixture = Fixture()
    _, _, first = fixture.insert(1, 2, row=0)
    _, taken, second = fixture.insert(1, 2, 3, row=1)
    assert taken[0].tolist() == [second[0][2]]
    assert fixture.blocks(1, 2, 3)[0] == [*first[0].tolist(), second[0][2]]


def test_a_row_appends_to_its_own_edge() -> None:
    fixture = Fixture()
    node, _, _ = fixture.insert(1, row=5)
    again, _, _ = fixture.insert(1, 2, 3, row=5, node=node, num_units=1)
    assert again is node
    assert fixture.found(1, 2, 3) == 3
    assert (node.num_units, fixture.index.num_nodes) == (3, 1)


def test_an_edge_that_others_end_at_is_not_grown() -> None:
    fixture = Fixture()
    node, _, _ = fixture.insert(1, 2, row=5)
    path = fixture.match(tokens_of(1, 2, 7))
    other = fixture.index.cut(path, fixture.root, 2)
    assert other is node
    child, _, _ = fixture.insert(1, 2, 3, row=5, node=node, num_units=2)
    assert child is not node
    fixture.insert(1, 2, 8, row=6, node=other, num_units=2)
    assert (fixture.found(1, 2, 3), fixture.found(1, 2, 8), fixture.found(1, 2, 9)) == (3, 3, 2)


def test_a_cut_inside_an_edge_splits_it_and_its_row_goes_on() -> None:
    """O20: an edge is cut between units only."""
    fixture = Fixture()
    node, _, blocks = fixture.insert(1, 2, 3, row=5)
    upper = fixture.index.cut(fixture.match(tokens_of(1, 9)), fixture.root, 1)
    assert (upper.num_units, upper.start_units, node.num_units, node.start_units) == (1, 0, 2, 1)
    assert fixture.blocks(1, 2, 3) == [part.tolist() for part in blocks]
    again, _, _ = fixture.insert(1, 2, 3, 4, row=5, node=node, num_units=3)
    assert again is node
    assert fixture.found(1, 2, 3, 4) == 4


def test_an_evicted_block_cuts_the_path_behind_it() -> None:
    fixture = Fixture()
    _, _, blocks = fixture.insert(1, 2, 3, row=0)
    fixture.insert(1, 2, 3, 4, row=1)
    fixture.generations[blocks[1][4]] += 1  # first block of unit 3 in group 1
    assert fixture.found(1, 2, 3, 4) == 2
    fixture.generations[blocks[0][0]] += 1
    assert fixture.found(1, 2) == 0


def test_equal_tokens_renew_what_was_evicted() -> None:
    """The entries that are gone get the new blocks, the others stay; nobody else's blocks are taken in."""
    fixture = Fixture()
    _, _, blocks = fixture.insert(1, 2, 3, row=0)
    fixture.generations[blocks[0][1]] += 1
    assert fixture.found(1, 2, 3) == 1
    _, taken, again = fixture.insert(1, 2, 3, row=1)
    assert [part.tolist() for part in taken] == [[again[0][1]], []]
    assert fixture.blocks(1, 2, 3) == [[blocks[0][0], again[0][1], blocks[0][2]], blocks[1].tolist()]


def test_a_group_may_lack_an_entry_and_get_it_later() -> None:
    fixture = Fixture()
    blocks = [fixture.fresh(1), fixture.fresh(2)]
    made = [np.zeros(1, np.int32), np.array([NO_GENERATION, 0], np.int32)]
    _, taken = fixture.index.insert(fixture.root, tokens_of(1), [(0, 1, b"")], blocks, made, 0)
    assert [part.tolist() for part in taken] == [blocks[0].tolist(), [blocks[1][1]]]
    assert fixture.found(1) == 0
    _, taken, again = fixture.insert(1, row=1)
    assert [part.tolist() for part in taken] == [[], [again[1][0]]]
    assert fixture.found(1) == 1


def test_a_row_whose_path_was_cut_starts_again_from_the_root() -> None:
    fixture = Fixture()
    node, _, blocks = fixture.insert(1, 2, 3, row=0)
    for part in blocks:
        fixture.generations[part] += 1
    fixture.index.tidy(1)
    assert (node.place, fixture.found(1, 2, 3)) == (DETACHED, 0)
    fixture.insert(1, 2, 3, 4, row=0)
    assert fixture.found(1, 2, 3, 4) == 4


def test_tidy_drops_what_cannot_be_reached() -> None:
    """An edge is dropped once no block can be had from it; those above it go when they come round again."""
    fixture = Fixture()
    _, _, first = fixture.insert(1, 2, row=0)
    _, _, longer = fixture.insert(1, 2, 3, row=7)
    fixture.insert(5, 6, row=1)
    for part in (*first, *longer):
        fixture.generations[part] += 1
    assert (fixture.index.num_nodes, len(fixture.root.children)) == (3, 2)
    for _ in range(3):
        fixture.index.tidy(3)
    assert (fixture.index.num_nodes, len(fixture.root.children)) == (1, 1)
    assert fixture.found(5, 6) == 2


def test_memory_does_not_grow_with_what_was_evicted() -> None:
    fixture = Fixture()
    most = 0
    for unit in range(200):
        _, _, blocks = fixture.insert(unit, row=0)
        fixture.next_block = 1
        for part in blocks:
            fixture.generations[part] += 1
        fixture.index.tidy(2)
        most = max(most, fixture.index.num_bytes)
    assert fixture.index.num_nodes <= 2
    assert most <= 2 * 4 * (2 + 2 * 3)  # two edges of 2 tokens and of 3 blocks with their generations, int32


def test_a_removed_namespace_gives_back_all_its_blocks() -> None:
    fixture = Fixture()
    _, _, first = fixture.insert(1, 2, row=0)
    _, _, second = fixture.insert(1, 3, row=1)
    removed = fixture.index.remove_tree(fixture.root)
    gone = {int(block) for blocks, _ in removed for part in blocks for block in part}
    kept_first = {int(block) for part in first for block in part}
    assert gone == kept_first | {int(second[0][1]), *second[1][2:].tolist()}
    assert (fixture.index.num_nodes, fixture.found(1, 2)) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_matches_are_those_of_a_plain_set(data: st.DataObject) -> None:
    """Rows grow unit by unit and evictions strike anywhere; a match is exact, and as long as the blocks last."""
    fixture = Fixture()
    rows: dict[int, tuple] = {}  # row -> units, blocks of group 0, node, units inserted
    content: dict[int, tuple[int, ...]] = {}  # block of group 0 -> the units up to and with its own
    evicted = False
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["grow", "grow", "grow", "new", "match", "cut", "tidy", "evict"]))
        if action == "new" or not rows:
            rows[max(rows, default=-1) + 1] = ((), (), fixture.root)
        elif action == "grow":
            row = data.draw(st.sampled_from(sorted(rows)))
            units, first, node = rows[row]
            more = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
            if node is not fixture.root and node.place == DETACHED:
                units, first, node = (), (), fixture.root
            before = len(units)
            units += more
            node, _, blocks = fixture.insert(*units, row=row, node=node, num_units=before)
            content.update((int(block), units[: before + place + 1]) for place, block in enumerate(blocks[0]))
            rows[row] = (units, (*first, *blocks[0].tolist()), node)
        elif action in ("match", "cut"):
            query = tuple(data.draw(st.lists(st.integers(0, 2), max_size=6)))
            found = fixture.blocks(*query)[0]
            for place, block in enumerate(found):
                assert content[block] == query[: place + 1]
            if not evicted:
                sizes = range(1, len(query) + 1)
                equal = (sum(1 for size in sizes if row[0][:size] == query[:size]) for row in rows.values())
                assert len(found) == max(equal, default=0)
            path = fixture.match(tokens_of(*query))
            if action == "cut" and path.num_units:
                units_down = data.draw(st.integers(1, path.num_units))
                node = fixture.index.cut(path, fixture.root, units_down)
                assert node.end_units == units_down
                rows[max(rows) + 1] = (query[:units_down], (), node)
        elif action == "tidy":
            fixture.index.tidy(3)
        elif content:
            evicted = True
            block = data.draw(st.sampled_from(sorted(content)))
            fixture.generations[block] += 1
            del content[block]
            for row, (_, first, *_) in list(rows.items()):
                if block in first:
                    del rows[row]  # a row whose block was evicted is no longer open


@pytest.mark.parametrize("tokens", [tokens_of(), tokens_of(1)[:1]], ids=["no tokens", "no whole unit"])
def test_no_tokens_or_no_units_match_nothing(tokens: np.ndarray) -> None:
    fixture = Fixture()
    fixture.insert(1)
    path = fixture.match(tokens)
    assert (path.nodes, path.num_units, path.more_tokens) == ((), 0, len(tokens))
    assert [part.tolist() for part in path.entries(0, 1)] == [[], []]
    assert fixture.index.cut(path, fixture.root, 0) is fixture.root
