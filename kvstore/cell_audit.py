"""audit_cells: proves that the arrays, counts, queues and free lists of an allocator agree."""

import numpy as np

from kvstore.eviction import DEFAULT_PRIORITY, NO_GROUP, PINNED, CellStates, Counts, Mask


def audit_cells(cells: CellStates) -> None:
    """Raises AssertionError when a cell is in no state or in two, or is not where its state says; see `check`."""
    held, known = cells.references > 0, cells.indexed
    cached = ~held & known
    assert ((cells.fences >= 0) & (cells.fences <= cells.references)).all(), "more fences than references"
    assert cells._num_held == np.count_nonzero(held), f"{held.sum()} cells in use, counted {cells._num_held}"
    assert cells._num_cached == np.count_nonzero(cached), f"{cached.sum()} cached cells, counted {cells._num_cached}"
    pinned = cached & (cells.priority == PINNED)
    assert cells._num_pinned == np.count_nonzero(pinned), "counts of pinned cells"
    assert (cells.priority[~known] == DEFAULT_PRIORITY).all(), "a priority of a cell that the index does not know"
    stack = cells._free[: cells._num_free]
    assert len(np.unique(stack)) == len(stack), "a frame is twice on the free stack"
    used = cells._by_frame(held | known)
    num_used = np.count_nonzero(used, axis=1)
    states = (num_used > 0).astype(np.int8)
    states[stack] += 1
    assert not states[:1].any(), "the null frame is free or in use"
    assert (states[1:] == 1).all(), f"frames in no state or in two: {np.flatnonzero(states[1:] != 1)[:8] + 1}"
    assert np.array_equal(cells.group != NO_GROUP, num_used > 0), "a free frame of a group, or a used one of none"
    places = np.append(cells._bpf, 0)[cells.group]
    outside = used & (np.arange(cells.cells_per_frame) >= places[:, None])
    assert not outside.any(), "a used place that the frame's group does not have"
    queued = [order.items() for order in cells._orders]
    assert np.array_equal(np.sort(np.concatenate(queued)), np.flatnonzero(cached)), "queues and cached cells"
    if not cells._single:
        _audit_frames(cells, num_used, held | pinned, num_used - places)


def _audit_frames(cells: CellStates, used: Counts, kept: Mask, lacking: Counts) -> None:
    """The same for frames of several cells."""
    num_kept = np.count_nonzero(cells._by_frame(kept), axis=1)
    assert np.array_equal(cells._used, used), "counts of used cells"
    assert np.array_equal(cells._kept, num_kept), "counts of cells that cannot be evicted"
    idle = (used > 0) & (num_kept == 0)
    code = np.where((used > 0) & (lacking < 0), 1 + 2 * cells.group + idle, 0)
    assert np.array_equal(cells._room_code, code), "frames with room"
    for column, of in ((0, (used > 0) & ~idle), (1, idle)):
        each = (used[of] > 0, -lacking[of], used[of] - num_kept[of])
        sums = [np.bincount(cells.group[of], of_frames, cells.num_groups) for of_frames in each]
        assert np.array_equal(cells._totals[:, :, column], sums), "counts of a group"
    queued = np.concatenate([order.items() for order in cells._idle_orders])
    assert np.array_equal(np.sort(queued), np.flatnonzero(idle)), "eviction queues and idle frames"
    inside = np.where(cells._by_frame(cells.indexed)[idle], cells._by_frame(cells.priority)[idle], 0).max(
        axis=1, initial=0
    )
    assert np.array_equal(cells._frame_priority[idle], inside), "priorities of idle frames"
