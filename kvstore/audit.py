"""audit: proves the books of a store, from the arrays alone."""

import numpy as np

from kvstore.books import Books


def audit(books: Books, *, asleep: bool = False) -> None:
    """Raises AssertionError when a block, a reference or a table entry does not add up; see `KVStore.check`.

    Of a store that is `asleep` nothing may be held, findable or in flight.
    """
    books.flush()
    allocator = books.allocator
    allocator.check()
    if asleep:
        assert not books.handles.num_open, "a store sleeps with open sequences"
        assert not books.unfinished, "a store sleeps with unfinished batches"
        assert not allocator.num_held + allocator.num_cached, "a store sleeps with blocks in use or cached"
        assert books.prefixes is None or not books.prefixes.roots, "a store sleeps with prefixes"
    _audit_sequences(books)
    references = np.zeros_like(allocator.references)
    fences = np.zeros_like(allocator.fences)
    for group in range(books.rules.num_groups):
        _audit_table(books, group, references)
    oldest = min(books.unfinished, default=None)
    for serial, cells in books.fences:
        assert oldest is not None, "fences that no unfinished batch holds"
        assert serial >= oldest, "a fence outlived the batches it waited for"
        np.add.at(references, cells, 1)
        np.add.at(fences, cells, 1)
    assert np.array_equal(references, allocator.references), "references that no table or fence accounts for"
    assert np.array_equal(fences, allocator.fences), "fences that no list accounts for"


def _audit_sequences(books: Books) -> None:
    handles, state = books.handles, books.state
    is_open = handles.current[:-1] >= 0
    assert np.array_equal(np.sort(handles.free), np.flatnonzero(~is_open)), "free rows and closed rows"
    assert (handles.generation >= 1).all(), "a generation that was never given out"
    assert not (handles.suspended & ~is_open).any(), "a closed row is suspended"
    assert (state.committed <= state.length)[is_open].all(), "more committed than reserved"
    assert (state.committed >= 0).all(), "fewer than no tokens committed"
    assert (state.edition[is_open] > 0).all(), "an open row without an edition"
    assert len(np.unique(state.edition[is_open])) == is_open.sum(), "two rows with one edition"
    in_flight = np.zeros_like(state.length)
    for step in books.unfinished.values():
        in_flight[step.rows[handles.alive(step.seq_ids, step.rows)]] += not step.committed
    counted = (state.num_extends - state.num_commits)[is_open]
    assert np.array_equal(in_flight[is_open], counted), "batches in flight that are not there"


def _audit_table(books: Books, group: int, references: np.ndarray) -> None:
    """Checks the rows of one group, and counts the references they hold."""
    allocator, state, tables, rules = books.allocator, books.state, books.tables, books.rules
    table, size, w = tables.table(group), int(rules.block_size[group]), int(rules.window_of[group])
    num_blocks = books.plan.num_blocks[group]
    assert table.min(initial=0) >= 0, "a table entry that is no block"
    assert table.max(initial=0) < num_blocks, "a table entry that is no block"
    entries = np.count_nonzero(table, axis=1)
    is_open = books.handles.current[:-1] >= 0
    assert not entries[~is_open | books.handles.suspended].any(), "a closed or suspended row holds blocks"
    for row in np.flatnonzero(is_open & ~books.handles.suspended).tolist():
        _, held = tables.held(state, row, group)
        assert len(held) == entries[row], f"row {row} has table entries that nobody counts"
        cells = allocator.to_cells(held, group)
        assert len(np.unique(cells)) == len(cells), f"row {row} holds a block twice"
        assert (allocator.group[cells // allocator.cells_per_frame] == group).all(), (
            f"row {row} holds blocks of another group than {group}"
        )
        np.add.at(references, cells, 1)
        length = max(int(state.length[row]), int(state.replay_end[row]))
        if not rules.is_ring[group]:
            reached = max(int(state.length[row]), 0 if rules.is_state[group] else int(state.replay_end[row]))
            assert state.room[group, row] == -(-reached // size) * size, f"row {row} is not as long as its blocks"
        if w >= 0 and length:
            committed = np.array([state.committed[row]])
            needed = int(rules.visible(w, committed)[0]) // size
            assert state.first[w, row] <= needed, f"row {row} lost a block inside its window"
        if w < 0 and not rules.is_ring[group]:
            assert len(held) == -(-length // size), f"row {row} has a hole"
