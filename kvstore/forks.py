"""Forks: sequences that share what others have computed (parallel sampling, beams), and taking tokens back."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvstore.books import Books
from kvstore.rules import NEVER
from kvstore.sequences import Counts, Rows, int_array
from kvstore_kernels.checks import expect_int


def fork(books: Books, seq_id: Any, num_forks: int) -> Rows:
    """Opens `num_forks` sequences that hold the same tokens and blocks as `seq_id`. Returns: their rows.

    Raises: as `KVStore.fork`.
    """
    ids, rows = books.handles.resolve([seq_id] if not isinstance(seq_id, np.ndarray) else seq_id.reshape(-1), "seq_id")
    if len(ids) != 1:
        raise ValueError(f"seq_id: expected one handle, got {len(ids)}")
    expect_int("num_forks", num_forks, 0)
    books.handles.expect_resident(ids, rows, "seq_id")
    books.flush()
    books.expect_settled(ids, rows, "seq_id")
    books.handles.expect_room("num_forks", num_forks)
    forks = books.handles.open(num_forks)
    _share(books, np.repeat(rows, num_forks), forks)
    return forks


def reorder(books: Books, seq_ids: Any, parents: Any) -> None:
    """Makes each sequence go on from what `parents[i]` holds; its own blocks are given back.

    Raises: as `KVStore.reorder`.
    """
    ids, rows = books.handles.resolve(seq_ids)
    parent_ids, parent_rows = books.handles.resolve(parents, "parents", repeats=True)
    if len(parent_ids) != len(ids):
        raise ValueError(f"parents: expected one per sequence, {len(ids)} in all, got {len(parent_ids)}")
    books.flush()
    for handles, where, name in ((ids, rows, "seq_ids"), (parent_ids, parent_rows, "parents")):
        books.handles.expect_resident(handles, where, name)
        books.expect_settled(handles, where, name)
    moved = rows != parent_rows
    if not moved.any():
        return
    rows, parent_rows = rows[moved], parent_rows[moved]
    # All sources are read before any row is written: a sequence may be the parent of one and the child of another.
    held = [[books.tables.held(books.state, row, g)[1] for row in rows.tolist()] for g in range(books.rules.num_groups)]
    touched = books.touched()
    _share(books, parent_rows, rows)
    for g in range(books.rules.num_groups):
        for row, old in zip(rows.tolist(), held[g], strict=True):
            last = books.next_serial - 1 if touched[row] else -1
            books.give_back(books.allocator.to_cells(old[::-1], g), last)


def truncate(books: Books, seq_ids: Any, lengths: Any) -> None:
    """Takes tokens back, reserved or committed ones.

    Raises: as `KVStore.truncate`.
    """
    ids, rows = books.handles.resolve(seq_ids)
    wanted = int_array("lengths", [lengths] * len(ids) if isinstance(lengths, int | np.integer) else lengths)
    if len(wanted) != len(ids):
        raise ValueError(f"lengths: expected one per sequence, {len(ids)} in all, got {len(wanted)}")
    books.handles.expect_resident(ids, rows)
    books.flush()
    books.expect_settled(ids, rows)
    state = books.state.take(rows)
    wrong = (wanted < 0) | (wanted > state.length)
    if wrong.any():
        worst = int(wrong.argmax())
        raise ValueError(
            f"lengths: expected 0 ... {state.length[worst]}, the length of sequence {ids[worst]}, got {wanted[worst]}"
        )
    shorter = wanted < state.length
    _check_rollback(books, ids[shorter], rows[shorter], wanted[shorter])
    if not shorter.any():
        return
    rows, wanted = rows[shorter], wanted[shorter]
    state = books.state.take(rows)
    unit = books.rules.unit
    np.minimum(state.replay_end, wanted, out=state.replay_end)
    np.copyto(state.length, wanted)
    np.copyto(state.committed, wanted)
    state.unknown[state.unknown >= wanted] = NEVER
    if books.prefixes is not None:
        known = state.indexed != NEVER
        state.indexed[known] = np.minimum(state.indexed, wanted // unit * unit)[known]
        for row in rows.tolist():
            books.prefixes.owners[row].digests = None
            books.prefixes.settle_tokens(row)  # before other tokens come in their place
    state.shared[:] = 1
    books.is_sharing = True
    touched = books.touched()
    books.cut_back(state, rows, wanted, books.next_serial - 1 if touched[rows].any() else -1)
    books.state.put(rows, state)
    books.tables_changed(rows)


_REMEDIES = {
    False: "a window keeps no more than its reach; give the store `rollback` tokens of it",
    True: "a step overwrites a ring or a state; fork before tokens that may be taken back",
}
"""By whether the group is a ring or a state."""


def _share(books: Books, sources: Rows, rows: Rows) -> None:
    """Makes `rows` copies of `sources`: numbers, tokens, table rows, and one more reference to every block."""
    state, tables = books.state, books.tables
    columns = state.take(sources)
    editions = state.edition[rows]
    for g in range(books.rules.num_groups):
        table = tables.table(g)
        for source in sources.tolist():
            books.allocator.retain(books.allocator.to_cells(tables.held(state, source, g)[1], g))
        table[rows] = table[sources]
    if books.prefixes is not None:
        for source in sources.tolist():
            books.prefixes.settle_tokens(source)
        books.prefixes.tokens[rows] = books.prefixes.tokens[sources]
        owners = [books.prefixes.owners[source] for source in sources.tolist()]
        for row, owner in zip(rows.tolist(), owners, strict=True):
            books.prefixes.owners[row] = replace(owner, digests=owner.digests and list(owner.digests))
        books.prefixes.ghosts.clear(rows)
    state.put(rows, columns)
    state.edition[rows] = editions
    state.shared[rows] = state.shared[sources] = 1
    books.is_sharing = True
    books.tables_changed(rows)


def _check_rollback(books: Books, ids: Rows, rows: Rows, lengths: Counts) -> None:
    """Raises ValueError where a group no longer has what the shorter sequence would need."""
    rules, state = books.rules, books.state
    for g in range(rules.num_groups):
        size, w = int(rules.block_size[g]), int(rules.window_of[g])
        committed = state.committed[rows]
        if rules.is_ring[g]:
            variant = rules.variants[rules.variants_of[g][0]]
            # After a hit the ring holds nothing of what lies before the replay.
            lost = (committed > variant.rows_per_block) | (state.replay_end[rows] > 0)
        elif rules.is_state[g]:
            lost = lengths < committed
        elif w >= 0:
            lost = state.first[w, rows] * size > rules.visible(w, lengths)
        else:
            continue
        if lost.any():
            worst = int(lost.argmax())
            remedy = _REMEDIES[bool(rules.is_ring[g] | rules.is_state[g])]
            raise ValueError(
                f"lengths: expected what group {rules.names[g]!r} ({rules.kinds[g]}) can roll back to, got "
                f"{lengths[worst]} for sequence {ids[worst]} of {committed[worst]} tokens: {remedy}"
            )
