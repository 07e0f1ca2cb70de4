"""PrefixIndex: which blocks hold the rows of a given run of tokens. Exact: tokens are compared, never hashes.

A radix tree whose edges are runs of units; a unit is the least number of tokens that is whole blocks in every group.

    root --[tokens of 3 units | blocks of each group]--> node --[...]--> node
                                                         \\-[...]--> node

The tree does not own blocks. Each edge remembers the generation of its blocks, so a block that was evicted and handed
out again makes the rest of its path a miss without anyone having to search the tree at eviction time. The compare of
an edge is one memory compare, so a long hit costs little more than reading the tokens.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

DETACHED = -1

Tokens = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Node:
    """The end of an edge. `blocks[g]` and `generations[g]` belong to its tokens; capacity doubles as it grows."""

    tokens: Tokens
    blocks: list[Blocks]
    generations: list[npt.NDArray[np.int32]]
    num_units: int
    end_units: int  # units from the root to the end of this edge; DETACHED once the node has left the tree
    parent: "Node | None" = None
    children: dict[bytes, "Node"] = field(default_factory=dict)
    grown_by: int | None = None  # the sequence row that may append to this edge, if no other row ends here


class PrefixIndex:
    """Finds and inserts runs of committed tokens.

    Args:
        unit: tokens of a unit, a multiple of every group's block size.
        blocks_per_unit: blocks of each group in a unit.
        generations: int32 [num_blocks], the allocator's live array.
    """

    def __init__(self, unit: int, blocks_per_unit: tuple[int, ...], generations: npt.NDArray[np.int32]) -> None:
        self.unit = unit
        self.blocks_per_unit = blocks_per_unit
        self._generations = generations
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.root = self._node(np.empty(0, np.int32), [np.empty(0, np.int32) for _ in self.blocks_per_unit])

    def match(self, tokens: Tokens, max_units: int) -> tuple[Node, list[Blocks]]:
        """The longest indexed prefix of `tokens`, at most `max_units` units.

        Returns: the node at its end (an edge is split there when need be), and per group the blocks of the prefix.
        """
        node, left = self.root, tokens[: max_units * self.unit]
        found: list[list[Blocks]] = [[] for _ in self.blocks_per_unit]
        while len(left) and (child := self._child(node, left)) is not None:
            length = self._common_units(child, left)
            if length == 0:
                break
            node = child if length == child.num_units else self._split(child, length)
            node.grown_by = None
            for blocks, part, per_unit in zip(found, node.blocks, self.blocks_per_unit, strict=True):
                blocks.append(part[: length * per_unit])
            left = left[length * self.unit :]
        return node, [np.concatenate(parts) if parts else np.empty(0, np.int32) for parts in found]

    def insert(
        self, node: Node, num_units: int, tokens: Tokens, blocks: list[Blocks], row: int
    ) -> tuple[Node, list[Blocks]]:
        """Makes the whole units of `tokens`, the rows that sequence row `row` has written so far, findable.

        `node` is where an earlier call for this row ended, `num_units` the units it had then: a starting point that
        spares the way from the root, as long as the path to it is whole. Where the tree holds equal tokens already,
        its blocks stay and the given ones are not taken in.

        Returns: the node at the new end, and per group the blocks that the tree took in.
        """
        if node.end_units != num_units:
            node, num_units = self.root, 0
        tokens = tokens[num_units * self.unit :]
        blocks = [part[num_units * per_unit :] for part, per_unit in zip(blocks, self.blocks_per_unit, strict=True)]
        while len(tokens):
            child = self._child(node, tokens)
            if child is None:
                if node.grown_by == row and not node.children:
                    self._append(node, tokens, blocks)
                else:
                    node = self._add_child(node, tokens, blocks, row)
                return node, blocks
            length = self._common_units(child, tokens)
            node = child if length == child.num_units else self._split(child, length)
            node.grown_by = None
            tokens = tokens[length * self.unit :]
            blocks = [part[length * per_unit :] for part, per_unit in zip(blocks, self.blocks_per_unit, strict=True)]
        return node, blocks

    def sweep(self) -> None:
        """Drops every path that evicted blocks have made unreachable, so that the tree's memory is bounded."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            for key, child in list(node.children.items()):
                if self._prune(child) == 0:
                    self._detach(node.children.pop(key))
                else:
                    pending.append(child)

    def _node(self, tokens: Tokens, blocks: list[Blocks], parent: Node | None = None) -> Node:
        generations = [self._generations[part] for part in blocks]
        num_units = len(tokens) // self.unit
        end_units = num_units + (parent.end_units if parent is not None else 0)
        return Node(tokens.copy(), [part.copy() for part in blocks], generations, num_units, end_units, parent)

    def _child(self, node: Node, tokens: Tokens) -> Node | None:
        """The child whose edge begins with the first unit of `tokens`, if its first unit is still there."""
        key = tokens[: self.unit].tobytes()
        child = node.children.get(key)
        if child is not None and self._prune(child) == 0:
            self._detach(node.children.pop(key))
            return None
        return child

    def _common_units(self, node: Node, tokens: Tokens) -> int:
        """How many leading units of the edge equal `tokens`."""
        length = min(node.num_units * self.unit, len(tokens))
        equal = node.tokens[:length] == tokens[:length]
        first = int(equal.argmin())
        return (length if equal[first] else first) // self.unit

    def _prune(self, node: Node) -> int:
        """Cuts the edge before its first evicted block, and everything below it. Returns the units that are left."""
        for blocks, generations, per_unit in zip(node.blocks, node.generations, self.blocks_per_unit, strict=True):
            held = node.num_units * per_unit
            stale = self._generations[blocks[:held]] != generations[:held]
            if stale.any():
                kept = int(stale.argmax()) // per_unit
                node.end_units -= node.num_units - kept
                node.num_units = kept
                node.grown_by = None
                for child in node.children.values():
                    self._detach(child)
                node.children.clear()
        return node.num_units

    @staticmethod
    def _detach(node: Node) -> None:
        """Tells the rows that end in this part of the tree to start again from the root."""
        pending = [node]
        while pending:
            node = pending.pop()
            node.end_units = DETACHED
            pending.extend(node.children.values())

    def _split(self, node: Node, units: int) -> Node:
        """Puts a node in the middle of an edge. `node` stays the lower end, so that rows ending there still do."""
        parent = node.parent
        assert parent is not None
        cuts = [units * per_unit for per_unit in self.blocks_per_unit]
        upper = Node(
            node.tokens[: units * self.unit].copy(),
            [part[:cut].copy() for part, cut in zip(node.blocks, cuts, strict=True)],
            [part[:cut].copy() for part, cut in zip(node.generations, cuts, strict=True)],
            units,
            node.end_units - node.num_units + units,
            parent,
        )
        parent.children[upper.tokens[: self.unit].tobytes()] = upper
        node.tokens = node.tokens[units * self.unit :].copy()
        node.blocks = [part[cut:].copy() for part, cut in zip(node.blocks, cuts, strict=True)]
        node.generations = [part[cut:].copy() for part, cut in zip(node.generations, cuts, strict=True)]
        node.num_units -= units
        node.parent = upper
        upper.children[node.tokens[: self.unit].tobytes()] = node
        return upper

    def _add_child(self, parent: Node, tokens: Tokens, blocks: list[Blocks], row: int) -> Node:
        node = self._node(tokens, blocks, parent)
        node.grown_by = row
        parent.children[node.tokens[: self.unit].tobytes()] = node
        return node

    def _append(self, node: Node, tokens: Tokens, blocks: list[Blocks]) -> None:
        node.tokens = _extended(node.tokens, node.num_units * self.unit, tokens)
        for group, per_unit in enumerate(self.blocks_per_unit):
            held = node.num_units * per_unit
            node.blocks[group] = _extended(node.blocks[group], held, blocks[group])
            node.generations[group] = _extended(node.generations[group], held, self._generations[blocks[group]])
        node.num_units += len(tokens) // self.unit
        node.end_units += len(tokens) // self.unit


def _extended(array: npt.NDArray[np.int32], length: int, more: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`array[:length]` with `more` behind it; in place while the capacity lasts."""
    total = length + len(more)
    if total > len(array):
        grown = np.empty(max(total, 2 * len(array)), np.int32)
        grown[:length] = array[:length]
        array = grown
    array[length:total] = more
    return array
