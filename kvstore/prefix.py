"""PrefixIndex: which blocks hold the rows of a given run of tokens. Exact: tokens are compared, never hashes.

A radix tree whose edges are runs of units; a unit is the least number of tokens that is whole blocks in every group.

    root --[tokens of 3 units | per group: blocks, generations]--> node --[...]--> node
                                                                    \\-[...]--> node

The tree does not own blocks. Each entry is a block and the generation it had, so a block that was evicted and handed
out again is a miss without anyone having to search the tree at eviction time; whoever computes the tokens again
renews the entry. A group may have no entry where another one has: a window's blocks are let go one by one, a state is
saved at a few boundaries. The compare of an edge is one memory compare.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.int32]
Valid = npt.NDArray[np.bool_]

NO_GENERATION = -1
DETACHED = -1
PARTIAL_CHILDREN = 64
"""Children of a node that are looked at for a part of a unit."""

FEW = 32

Run = tuple[int, int, bytes]
"""Units start ... end of a prompt and what is typed into their key beside tokens; see `namespaces.segments`."""


@dataclass(slots=True, eq=False)
class Node:
    """The end of an edge. `blocks[g]` and `generations[g]` belong to its tokens; capacity doubles as it grows."""

    tokens: Tokens
    blocks: list[Blocks]
    generations: list[Blocks]
    num_units: int
    start_units: int = 0  # units from the root to the beginning of this edge
    key: bytes = b""
    parent: "Node | None" = None
    children: dict[bytes, "Node"] = field(default_factory=dict)
    grown_by: int | None = None  # the sequence row that may append to this edge, if no other row ends here
    place: int = DETACHED  # in the index's list of nodes

    @property
    def end_units(self) -> int:
        """Units from the root to the end of this edge."""
        return self.start_units + self.num_units


@dataclass(frozen=True, slots=True)
class Path:
    """A walk down from a root: the nodes and how many units of each edge are equal, and what equals beyond them.

    `more_tokens` leading tokens of the unit behind equal unit number `more_unit` of the edge of `more_node`.
    """

    nodes: tuple[Node, ...]
    units: tuple[int, ...]
    more_node: Node | None = None
    more_unit: int = 0
    more_tokens: int = 0

    @property
    def num_units(self) -> int:
        """Units that are equal."""
        return sum(self.units)

    def tokens(self, num_units: int, unit: int) -> tuple[Tokens, ...]:
        """The tokens of the first units of the path, as the edges hold them; they stay what they are."""
        parts = []
        for node, units in zip(self.nodes, self.units, strict=True):
            parts.append(node.tokens[: min(units, num_units) * unit])
            num_units -= min(units, num_units)
        return tuple(parts)

    def entries(self, group: int, per_unit: int) -> tuple[Blocks, Blocks]:
        """Blocks and generations of a group along the path."""
        if len(self.nodes) == 1:
            held = self.units[0] * per_unit
            return self.nodes[0].blocks[group][:held], self.nodes[0].generations[group][:held]
        pairs = [
            (node.blocks[group][: units * per_unit], node.generations[group][: units * per_unit])
            for node, units in zip(self.nodes, self.units, strict=True)
        ]
        empty = np.empty(0, np.int32)
        return (
            np.concatenate([empty, *(blocks for blocks, _ in pairs)]),
            np.concatenate([empty, *(generations for _, generations in pairs)]),
        )


class PrefixIndex:
    """Finds and inserts runs of committed tokens.

    Args:
        unit: tokens of a unit, a multiple of every group's block size.
        blocks_per_unit: blocks of each group in a unit; 0 for a group that is never hit.
        is_valid: whether blocks of a group still have the generations given.
    """

    def __init__(
        self, unit: int, blocks_per_unit: Sequence[int], is_valid: Callable[[int, Blocks, Blocks], Valid]
    ) -> None:
        self.unit = unit
        self.blocks_per_unit = tuple(blocks_per_unit)
        self._is_valid = is_valid
        self._nodes: list[Node] = []
        self._next_tidy = 0
        self._equal = np.empty(0, np.bool_)  # scratch: large new arrays cost more than the compare

    @property
    def num_nodes(self) -> int:
        """Edges of the tree."""
        return len(self._nodes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that the edges hold."""
        return sum(
            node.tokens.nbytes + sum(part.nbytes for part in (*node.blocks, *node.generations)) for node in self._nodes
        )

    def new_root(self) -> Node:
        """The root of a namespace."""
        empty = np.empty(0, np.int32)
        return Node(empty, [empty for _ in self.blocks_per_unit], [empty for _ in self.blocks_per_unit], 0)

    def match(self, root: Node, tokens: Tokens, runs: Sequence[Run]) -> Path:
        """The longest path of equal tokens from `root`; `runs` cover the units to look at."""
        node = root
        nodes: list[Node] = []
        units: list[int] = []
        for start, end, key in runs:
            left = tokens[start * self.unit : end * self.unit]
            while len(left):
                child = node.children.get(key + left[: self.unit].tobytes())
                if child is None:
                    return self._with_more(nodes, units, node, None, 0, tokens[sum(units) * self.unit :], key)
                equal = self._common_units(child, left)
                nodes.append(child)
                units.append(equal)
                left = left[equal * self.unit :]
                if equal < child.num_units:
                    if len(left):
                        return self._with_more(nodes, units, node, child, equal, left, b"")
                    return self._with_more(nodes, units, node, child, equal, tokens[end * self.unit :], b"")
                node, key = child, b""
        return self._with_more(nodes, units, node, None, 0, tokens[sum(units) * self.unit :], b"")

    def cut(self, path: Path, root: Node, num_units: int) -> Node:
        """The node `num_units` down the path; an edge is split there when need be."""
        node = root
        for node, equal in zip(path.nodes, path.units, strict=True):
            if num_units <= equal:
                if num_units < node.num_units:
                    node = self._split(node, num_units)
                node.grown_by = None
                return node
            num_units -= equal
        return node

    def insert(
        self, node: Node, tokens: Tokens, runs: Sequence[Run], blocks: list[Blocks], generations: list[Blocks], row: int
    ) -> tuple[Node, list[Blocks]]:
        """Makes the whole units of `tokens`, which follow on `node`, findable for sequence row `row`.

        `blocks[g]` and `generations[g]` are entries of each unit, generation `NO_GENERATION` where there is none. Where
        the tree has a valid entry for equal tokens already, that one stays; `runs` count from `node`.

        Returns: the node at the new end, and per group the blocks that the tree took in.
        """
        taken: list[list[Blocks]] = [[] for _ in self.blocks_per_unit]
        for start, end, key in runs:
            done = start
            while done < end:
                left = tokens[done * self.unit : end * self.unit]
                parts = [
                    (part[done * per : end * per], made[done * per : end * per])
                    for part, made, per in zip(blocks, generations, self.blocks_per_unit, strict=True)
                ]
                child = node.children.get(key + left[: self.unit].tobytes())
                if child is None:
                    if not key and node.grown_by == row and not node.children and node.place != DETACHED:
                        self._append(node, left, parts)
                    else:
                        node = self._add_child(node, key, left, parts, row)
                    for into, (part, made) in zip(taken, parts, strict=True):
                        into.append(part[made != NO_GENERATION])
                    done = end
                else:
                    equal = self._common_units(child, left)
                    node = child if equal == child.num_units else self._split(child, equal)
                    node.grown_by = None
                    self._renew(node, parts, taken)
                    done += equal
                key = b""
        return node, [np.concatenate(parts) if parts else np.empty(0, np.int32) for parts in taken]

    def remove_tree(self, root: Node) -> list[tuple[list[Blocks], list[Blocks]]]:
        """Empties a namespace. Returns: blocks and generations per group of each edge that was there."""
        pending, removed = list(root.children.values()), []
        root.children = {}
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            held = [node.num_units * per for per in self.blocks_per_unit]
            removed.append(
                (
                    [part[:count] for part, count in zip(node.blocks, held, strict=True)],
                    [part[:count] for part, count in zip(node.generations, held, strict=True)],
                )
            )
            self._detach(node)
        return removed

    def tidy(self, num_nodes: int) -> None:
        """Looks at a few edges, in turn, and drops those that no block can be had from: bounds the tree's memory."""
        for _ in range(min(num_nodes, len(self._nodes))):
            self._next_tidy %= len(self._nodes)
            node = self._nodes[self._next_tidy]
            if node.children or self._has_valid(node):
                self._next_tidy += 1
                continue
            assert node.parent is not None
            del node.parent.children[node.key]
            self._detach(node)
            if not self._nodes:
                return

    def _has_valid(self, node: Node) -> bool:
        for group, per_unit in enumerate(self.blocks_per_unit):
            held = node.num_units * per_unit
            # Mostly the first blocks decide: the tail of a sequence is evicted before its head.
            for low, high in ((0, min(held, FEW)), (FEW, held)):
                blocks, made = node.blocks[group][low:high], node.generations[group][low:high]
                if high > low and self._is_valid(group, blocks, made).any():
                    return True
        return False

    def _with_more(
        self, nodes: list[Node], units: list[int], node: Node, edge: Node | None, unit: int, left: Tokens, key: bytes
    ) -> Path:
        """The path, and the part of one more unit: in the rest of `edge`, or in the best child of `node`."""
        want = left[: self.unit]
        best, best_edge = (False, 0), None  # what can still be had goes before what is longer
        if len(want) and not key:
            candidates = [edge] if edge is not None else list(node.children.values())[:PARTIAL_CHILDREN]
            for candidate in candidates:
                if edge is None and len(candidate.key) != self.unit * want.itemsize:
                    continue  # its key holds more than tokens
                start = unit * self.unit
                length = min(len(want), candidate.num_units * self.unit - start)
                equal = candidate.tokens[start : start + length] == want[:length]
                count = length if equal.all() else int(equal.argmin())
                if count and (True, count) > best and (self._has_unit(candidate, unit), count) > best:
                    best, best_edge = (self._has_unit(candidate, unit), count), candidate
        return Path(tuple(nodes), tuple(units), best_edge, unit, best[1])

    def _has_unit(self, node: Node, unit: int) -> bool:
        """Whether every group can still give the first block of a unit of the edge."""
        for group, per_unit in enumerate(self.blocks_per_unit):
            first = slice(unit * per_unit, unit * per_unit + min(per_unit, 1))
            if not self._is_valid(group, node.blocks[group][first], node.generations[group][first]).all():
                return False
        return True

    def _common_units(self, node: Node, tokens: Tokens) -> int:
        """How many leading units of the edge equal `tokens`."""
        length = min(node.num_units * self.unit, len(tokens))
        if len(self._equal) < length:
            self._equal = np.empty(2 * length, np.bool_)
        equal = self._equal[:length]
        np.equal(node.tokens[:length], tokens[:length], out=equal)
        first = int(equal.argmin())
        return (length if equal[first] else first) // self.unit

    def _split(self, node: Node, units: int) -> Node:
        """Puts a node in the middle of an edge. `node` stays the lower end, so that rows ending there still do."""
        parent = node.parent
        assert parent is not None
        cuts = [units * per_unit for per_unit in self.blocks_per_unit]
        upper = Node(
            node.tokens[: units * self.unit],
            [part[:cut] for part, cut in zip(node.blocks, cuts, strict=True)],
            [part[:cut] for part, cut in zip(node.generations, cuts, strict=True)],
            units,
            node.start_units,
            node.key,
            parent,
        )
        parent.children[upper.key] = upper
        self._attach(upper)
        node.tokens = node.tokens[units * self.unit :]
        node.blocks = [part[cut:] for part, cut in zip(node.blocks, cuts, strict=True)]
        node.generations = [part[cut:] for part, cut in zip(node.generations, cuts, strict=True)]
        node.num_units -= units
        node.start_units += units
        node.parent = upper
        node.key = node.tokens[: self.unit].tobytes()
        upper.children[node.key] = node
        return upper

    def _add_child(
        self, parent: Node, key: bytes, tokens: Tokens, parts: list[tuple[Blocks, Blocks]], row: int
    ) -> Node:
        node = Node(
            tokens.copy(),
            [part.copy() for part, _ in parts],
            [made.copy() for _, made in parts],
            len(tokens) // self.unit,
            parent.end_units,
            key + tokens[: self.unit].tobytes(),
            parent,
            grown_by=row,
        )
        parent.children[node.key] = node
        self._attach(node)
        return node

    def _append(self, node: Node, tokens: Tokens, parts: list[tuple[Blocks, Blocks]]) -> None:
        node.tokens = _extended(node.tokens, node.num_units * self.unit, tokens)
        for group, (per_unit, (part, made)) in enumerate(zip(self.blocks_per_unit, parts, strict=True)):
            held = node.num_units * per_unit
            node.blocks[group] = _extended(node.blocks[group], held, part)
            node.generations[group] = _extended(node.generations[group], held, made)
        node.num_units += len(tokens) // self.unit

    def _renew(self, node: Node, parts: list[tuple[Blocks, Blocks]], taken: list[list[Blocks]]) -> None:
        """Puts entries where those of an edge are no longer valid."""
        for group, (per_unit, (part, made)) in enumerate(zip(self.blocks_per_unit, parts, strict=True)):
            held = node.num_units * per_unit
            if not held:
                continue
            mine, old = part[:held], node.blocks[group][:held]
            renewed = (made[:held] != NO_GENERATION) & ~self._is_valid(group, old, node.generations[group][:held])
            if renewed.any():
                old[renewed] = mine[renewed]
                node.generations[group][:held][renewed] = made[:held][renewed]
                taken[group].append(mine[renewed])

    def _attach(self, node: Node) -> None:
        node.place = len(self._nodes)
        self._nodes.append(node)

    def _detach(self, node: Node) -> None:
        last = self._nodes.pop()
        if last is not node:
            self._nodes[node.place] = last
            last.place = node.place
        node.place = DETACHED
        node.children = {}


def _extended(array: npt.NDArray[np.int32], length: int, more: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`array[:length]` with `more` behind it; in place while the capacity lasts."""
    total = length + len(more)
    if total > len(array):
        grown = np.empty(max(total, 2 * len(array)), np.int32)
        grown[:length] = array[:length]
        array = grown
    array[length:total] = more
    return array
