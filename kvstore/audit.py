"""audit: proves the books of a store, from the arrays alone."""

import numpy as np

from kvstore.allocator import NULL_BLOCK_ID
from kvstore.books import Books
from kvstore.tables import GroupTable


def audit(books: Books) -> None:
    """Raises AssertionError when a block, a reference or a table entry does not add up; see `KVStore.check`."""
    allocator = books.allocator
    allocator.check()
    _audit_sequences(books)
    references = np.zeros_like(allocator.references)
    fences = np.zeros_like(allocator.fences)
    for group, table in enumerate(books.tables):
        _audit_table(books, group, table, references)
    oldest = min(books.unfinished, default=None)
    for serial, ids in books.fences:
        assert oldest is not None, "fences that no unfinished batch holds"
        assert serial >= oldest, "a fence outlived the batches it waited for"
        np.add.at(references, ids, 1)
        np.add.at(fences, ids, 1)
    assert np.array_equal(references, allocator.references), "references that no table or fence accounts for"
    assert np.array_equal(fences, allocator.fences), "fences that no list accounts for"
    total = allocator.num_free + allocator.num_cached + allocator.num_held + 1
    assert total == allocator.num_blocks, f"{total} blocks counted of {allocator.num_blocks}"


def _audit_sequences(books: Books) -> None:
    sequences = books.sequences
    assert np.array_equal(np.sort(sequences.free), np.flatnonzero(~sequences.is_open)), "free rows and closed rows"
    is_open = sequences.is_open
    assert (sequences.generation >= 1).all(), "a generation that was never given out"
    assert (sequences.committed <= sequences.length)[is_open].all(), "more committed than reserved"
    assert (sequences.committed >= 0).all(), "fewer than no tokens committed"
    in_flight, unfinished = np.zeros_like(sequences.in_flight), np.zeros_like(sequences.in_flight)
    for step in books.unfinished.values():
        rows = step.rows[sequences.alive(step.seq_ids, step.rows)]
        unfinished[rows] += 1
        in_flight[rows] += not step.committed
    assert np.array_equal(in_flight[is_open], sequences.in_flight[is_open]), "batches in flight that are not there"
    assert np.array_equal(unfinished[is_open], books.num_unfinished[is_open]), "unfinished batches that are not there"


def _audit_table(books: Books, group: int, table: GroupTable, references: np.ndarray) -> None:
    """Checks the rows of one group, and counts the references they hold."""
    allocator, sequences = books.allocator, books.sequences
    entries = np.count_nonzero(table.table != NULL_BLOCK_ID, axis=1)
    assert table.table.min(initial=0) >= 0, "a table entry that is no block"
    assert table.table.max(initial=0) < allocator.num_blocks, "a table entry that is no block"
    assert np.array_equal(entries, table.num_blocks - table.first_block), "table entries that no row counts"
    assert not entries[~sequences.is_open].any(), "a closed row holds blocks"
    for row in np.flatnonzero(sequences.is_open).tolist():
        held = table.held(row)
        assert len(np.unique(held)) == len(held), f"row {row} holds a block twice"
        assert (allocator.group[held] == group).all(), f"row {row} holds blocks of another group than {group}"
        np.add.at(references, held, 1)
        covered = table.num_blocks[row] * table.block_size
        assert covered >= sequences.length[row], f"row {row} is longer than its blocks"
        if table.window is not None:
            first_needed = max(0, int(sequences.committed[row]) - table.window + 1) // table.block_size
            assert table.first_block[row] <= first_needed, f"row {row} lost a block inside its window"
