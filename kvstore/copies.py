"""Copies: what `extend` does to blocks that a sequence is about to write to and that others may know."""

import numpy as np

from kvstore.allocator import Ids
from kvstore.books import Books
from kvstore.sequences import Counts, Flags, Rows, SequenceState
from kvstore.tables import NO_ENTRIES, Entries, Numbers


def shared_tails(
    books: Books, state: SequenceState, rows: Rows, starts: Counts, counts: Counts
) -> tuple[Entries, Ids | None]:
    """The blocks that the next tokens go to and that another sequence or the index may know.

    Returns: those to replace by blocks of the sequence's own, because somebody else holds them; and those to withdraw
        from the index, because their only holder writes to them. Of several sequences that are all the holders of a
        block, the last keeps it. None where no sequence of the batch has a block to look at.
    """
    seq = np.flatnonzero((state.shared > 0) & (counts > 0))
    if not len(seq):
        return NO_ENTRIES, None
    tables, rules = books.tables, books.rules
    starts, first_row = starts[seq], np.maximum(starts, state.replay_end)[seq]
    groups, seqs, blocks, owned = [], [], [], []
    for g in range(rules.num_groups):
        size = int(rules.block_size[g])
        first_new = starts if rules.is_state[g] else first_row  # a state is computed again in a replay
        # A ring is written at any length, 0 included; there is none before the first step behind a hit.
        is_open = state.room[g, seq] > 0 if rules.is_ring[g] else first_new % size != 0
        mine, block = seq[is_open], np.maximum(first_new[is_open] - 1, 0) // size
        ids = tables.flat[tables.place(np.full_like(mine, g), rows[mine], block)]
        cells = books.allocator.to_cells(ids, g)
        last, holders = _last_of_each(cells)
        keeps = last & (holders == books.allocator.references[cells])
        groups.append(np.full(int((~keeps).sum()), g))
        seqs.append(mine[~keeps])
        blocks.append(block[~keeps])
        owned.append(cells[keeps])
    entries = Entries(np.concatenate(groups), np.concatenate(seqs), np.concatenate(blocks))
    return entries, np.concatenate(owned)


def _last_of_each(values: Ids) -> tuple[Flags, Numbers]:
    """For each entry: whether it is the last with its value, and how many there are with it."""
    _, first, which, counts = np.unique(values[::-1], return_index=True, return_inverse=True, return_counts=True)
    last = np.zeros(len(values), bool)
    last[len(values) - 1 - first] = True
    return last, counts[which.reshape(-1)][::-1]


def replace_blocks(books: Books, serial: int, rows: Rows, entries: Entries, ids: Ids) -> list[tuple[Ids, Ids]]:
    """Puts blocks in the place of others, which are given back once the step is finished.

    Returns: per group what to copy, from and to; a state is not copied, since its step reads the one and writes the
        other.
    """
    old = books.tables.remove(entries, rows)
    books.tables.set(entries, rows, ids)
    there = old != 0
    books.give_back(books.allocator.to_cells(old[there], entries.group[there]), serial)
    copies = []
    for g in range(books.rules.num_groups):
        mine = there & (entries.group == g) & (not books.rules.is_state[g])
        copies.append((old[mine], ids[mine]))
    return copies
