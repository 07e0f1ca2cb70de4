"""audit: proves the books of a store, from the arrays alone."""

import numpy as np

from kvstore.allocator import NULL_BLOCK_ID
from kvstore.books import Books


def audit(books: Books) -> None:
    """Raises AssertionError when a block, a reference or a table entry does not add up; see `KVStore.check`."""
    allocator, sequences = books.allocator, books.sequences
    allocator.check()
    references = np.zeros_like(allocator.references)
    fences = np.zeros_like(allocator.fences)
    open_rows = np.flatnonzero(sequences.is_open).tolist()
    for group, table in enumerate(books.tables):
        entries = np.count_nonzero(table.table != NULL_BLOCK_ID, axis=1)
        assert np.array_equal(entries, table.num_blocks - table.first_block), "table entries that no row counts"
        assert not entries[~sequences.is_open].any(), "a closed row holds blocks"
        for row in open_rows:
            held = table.held(row)
            assert len(np.unique(held)) == len(held), f"row {row} holds a block twice"
            assert (allocator.group[held] == group).all(), f"row {row} holds blocks of another group than {group}"
            np.add.at(references, held, 1)
            covered = table.num_blocks[row] * table.block_size
            assert covered >= sequences.length[row], f"row {row} is longer than its blocks"
            if table.window is not None:
                first_needed = max(0, int(sequences.committed[row]) - table.window + 1) // table.block_size
                assert table.first_block[row] <= first_needed, f"row {row} lost a block inside its window"
    for _, ids in books.fences:
        np.add.at(references, ids, 1)
        np.add.at(fences, ids, 1)
    assert np.array_equal(references, allocator.references), "references that no table or fence accounts for"
    assert np.array_equal(fences, allocator.fences), "fences that no list accounts for"
    assert (sequences.committed <= sequences.length)[sequences.is_open].all(), "more committed than reserved"
    total = allocator.num_free + allocator.num_cached + allocator.num_held + 1
    assert total == allocator.num_blocks, f"{total} blocks counted of {allocator.num_blocks}"
