"""Whether a step that lacks blocks could ever have them: what one of its sequences needs, against the whole plan."""

from collections.abc import Sequence

import numpy as np

from kvstore.books import Books
from kvstore.capacity import frames_of
from kvstore.errors import NeverFits, OutOfBlocks
from kvstore.groups import CacheGroup
from kvstore.sequences import Counts, Rows
from kvstore.tables import Entries


def judged(
    error: OutOfBlocks, books: Books, ids: Rows, rows: Rows, starts: Counts, ends: Counts, kinds: Sequence[Entries]
) -> OutOfBlocks:
    """The error, or NeverFits where a sequence holds and wants more than the plan has. `kinds`: the blocks wanted.

    What others hold with it, or a commit will let go of, is no reason: `least_blocks` bounds what counts.
    """
    plan, rules = books.plan, books.rules
    usable = plan.num_frames - 1
    # First a bound of all sequences at once, which nearly always suffices: a column for each block, and one to copy.
    most = np.minimum(-(-ends[:, None] // rules.block_size), books.tables.width) + 1
    per_frame = np.array(plan.blocks_per_frame, np.int64)
    suspects = np.flatnonzero((-(-most // per_frame)).sum(1) > usable)
    if not len(suspects):
        return error
    wanted = np.zeros((len(rows), rules.num_groups), np.int64)
    for entries in kinds:
        np.add.at(wanted, (entries.seq, entries.group), 1)
    books.flush()
    for seq in suspects.tolist():
        held = [len(books.tables.held(books.state, int(rows[seq]), g)[1]) for g in range(rules.num_groups)]
        least = [least_blocks(group, int(starts[seq]), int(ends[seq])) for group in plan.groups]
        needed = np.minimum(wanted[seq] + held, least).tolist()
        if frames_of(plan, needed) > usable:
            return NeverFits(error, int(ids[seq]), needed, (usable * per_frame).tolist())
    return error


def least_blocks(group: CacheGroup, start: int, end: int) -> int:
    """Blocks of a group without which a step from `start` to `end` tokens of one sequence cannot be made.

    As if the sequence were alone and every step before were committed.
    """
    retention, size = group.retention, group.block_size
    if retention.kind == "ring":
        return 1
    if retention.kind == "state":  # read from one block and written to another, unless both are the same
        return 1 + (start > 0 and (start - 1) // size != (end - 1) // size)
    first = 0
    if retention.window is not None:
        first = max(0, start - (retention.window - 1))
    elif retention.chunk is not None:
        first = start // retention.chunk * retention.chunk
    return -(-end // size) - first // size
