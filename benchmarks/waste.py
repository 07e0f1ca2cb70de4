"""Where the bytes of an arena are, cause by cause, while a step is in flight.

one block of a group       | rows that tokens need | tail of block | page padding | what wider groups need |
                             rows                    tail            padding        narrow
blocks that only the step in flight needs: in flight; the others: cached, free places in frames that a group has
taken (partly used frames), free frames, and the null frame
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kvstore import Batch, CacheGroup, CachePlan, StoreStats

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of an arena, each in one place; sums and shares of them.

    Attributes:
        rows: of rows that a token in reach of the next step has.
        tail: of rows of blocks in use that hold none: not filled yet, or left by a window within a block.
        padding: between the rows and the end of a page, and of pages that lie in a larger page of a layer slot.
        narrow: of blocks in use, what only other groups use: layer slots without a layer of the group, the end of a
            slab, a place in a frame.
        in_flight: of blocks that are held only until the step is committed.
        cached: of blocks that nobody holds and a prompt may find.
        partial: of free places in frames that belong to a group.
        free: of free frames.
        null: of the null frame.
    """

    rows: float = 0.0
    tail: float = 0.0
    padding: float = 0.0
    narrow: float = 0.0
    in_flight: float = 0.0
    cached: float = 0.0
    partial: float = 0.0
    free: float = 0.0
    null: float = 0.0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Bytes)))

    @property
    def total(self) -> float:
        """Of all places."""
        return float(sum(getattr(self, field.name) for field in fields(Bytes)))

    def shares(self) -> dict[str, float]:
        """Place -> its part of the total."""
        total = self.total
        return {field.name: getattr(self, field.name) / total for field in fields(Bytes)}


CAUSES = ("tail", "padding", "narrow", "in_flight", "partial", "null")
"""What is wasted: the rest holds rows, or can be had."""


def bytes_now(plan: CachePlan, batch: Batch, stats: StoreStats) -> Bytes:
    """The bytes of a plan's arena between `extend` and `commit` of a batch that has all open sequences.

    Args:
        batch: uncommitted; its tables are on the CPU.
        stats: of the store, now.

    Raises: AssertionError when a group holds fewer blocks than its sequences need.
    """
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    parts = Bytes(free=stats.free * plan.frame_bytes, null=plan.frame_bytes)
    for g, group in enumerate(plan.groups):
        held, stride = stats.groups[g], plan.block_strides[g]
        needed, used = needed_blocks(group, batch.block_table[g].numpy().astype(np.int64), seq_lens)
        assert needed <= held.in_use, f"{group.name}: {needed} blocks are needed and {held.in_use} in use"
        row_bytes = group.payload_bytes / group.block_size
        padding, narrow = block_waste(plan, group)
        parts += Bytes(
            rows=used * row_bytes,
            tail=(needed * group.block_size - used) * row_bytes,
            padding=needed * padding,
            narrow=needed * narrow,
            in_flight=(held.in_use - needed + held.fenced) * stride,
            cached=held.cached * stride,
            partial=held.reserved * stride,
        )
    return parts


def block_waste(plan: CachePlan, group: CacheGroup) -> tuple[int, int]:
    """Bytes of a group's block that are padding, and those that only other groups use. With the rows: its stride."""
    stride = plan.block_strides[plan.groups.index(group)]
    padding = group.block_bytes - group.payload_bytes
    if plan.layout in ("buckets", "bestfit"):  # a page of each slot tensor, or a smaller one
        for layer in group.layers:
            placement = plan.placements[layer]
            padding += placement.block_stride_bytes - group.layers[layer].page_bytes
    return padding, stride - group.payload_bytes - padding


def needed_blocks(group: CacheGroup, table: Ids, seq_lens: Ids) -> tuple[int, int]:
    """Blocks of a group that sequences need once their tokens are committed, and tokens of them in reach.

    A block that several sequences share counts once, with all tokens that one of them reaches. `table`: as in a batch,
    block i of a sequence in column i % width.
    """
    kind, size = group.retention.kind, group.block_size
    if group.retention.is_fixed:
        return len(seq_lens), int(np.minimum(seq_lens, size).sum()) if kind == "ring" else len(seq_lens) * size
    first = first_in_reach(group, seq_lens)
    first_block, last_block = first // size, -(-seq_lens // size)
    counts = np.maximum(last_block - first_block, 0)
    seq_idx = np.repeat(np.arange(len(seq_lens)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    number = first_block[seq_idx] + within
    ids = table[seq_idx, number % table.shape[1]]
    begins = np.maximum(first[seq_idx] - number * size, 0)
    ends = np.minimum(seq_lens[seq_idx] - number * size, size)
    lowest, highest = np.full(ids.max(initial=0) + 1, size), np.zeros(ids.max(initial=0) + 1, np.int64)
    np.minimum.at(lowest, ids, begins)
    np.maximum.at(highest, ids, ends)
    is_held = highest > 0
    return int(is_held.sum()), int((highest - lowest)[is_held].sum())


def distinct_tokens(plan: CachePlan, batch: Batch) -> int:
    """Tokens that the sequences of a batch hold, shared ones once; without a group that keeps all, once for each."""
    seq_lens = batch.seq_lens.numpy().astype(np.int64)
    for g, group in enumerate(plan.groups):
        if group.retention.kind == "full":
            return needed_blocks(group, batch.block_table[g].numpy().astype(np.int64), seq_lens)[1]
    return int(seq_lens.sum())


def first_in_reach(group: CacheGroup, seq_lens: Ids) -> Ids:
    """The first position that the next token of each sequence can reach."""
    retention = group.retention
    if retention.window is not None:
        return np.maximum(seq_lens - (retention.window - 1), 0)
    if retention.chunk is not None:
        return seq_lens // retention.chunk * retention.chunk
    return np.zeros_like(seq_lens)


def mean(samples: Sequence[Bytes]) -> Bytes:
    """The mean of each place."""
    total = sum(samples, Bytes())
    return Bytes(*(getattr(total, field.name) / len(samples) for field in fields(Bytes)))
