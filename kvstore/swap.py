"""Swap: which blocks of a sequence go to host memory and back. The bytes are the store's business."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.allocator import Ids
from kvstore.books import Books
from kvstore.errors import SequenceError
from kvstore.rules import NEVER
from kvstore.sequences import Rows
from kvstore.tables import Numbers


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks that a sequence held when it was suspended: per group their numbers and ids."""

    numbers: tuple[Numbers, ...]
    ids: tuple[Ids, ...]


def suspending(books: Books, seq_ids: Any) -> tuple[Rows, Rows, list[Held]]:
    """Handles, rows and blocks of sequences that may be suspended; changes nothing.

    Raises: as `KVStore.suspend`.
    """
    ids, rows = books.handles.resolve(seq_ids)
    books.handles.expect_resident(ids, rows)
    books.flush()
    books.expect_settled(ids, rows)
    groups = range(books.rules.num_groups)
    held = []
    for row in rows.tolist():
        pairs = [books.tables.held(books.state, row, g) for g in groups]
        held.append(Held(tuple(numbers for numbers, _ in pairs), tuple(ids for _, ids in pairs)))
    return ids, rows, held


def suspend(books: Books, rows: Rows) -> None:
    """Gives back the blocks of rows; what is committed of them stays findable. The bytes have been saved."""
    touched = books.touched()
    for row in rows.tolist():
        books.let_go_of_row(row, touched)
    if books.prefixes is not None:
        books.prefixes.ghosts.clear(rows)
    for g in range(books.rules.num_groups):
        for row in rows.tolist():
            numbers, _ = books.tables.held(books.state, row, g)
            books.tables.table(g)[row, numbers % int(books.tables.width[g])] = 0
    books.handles.suspended[rows] = True
    books.renew(rows)


def resume(books: Books, seq_ids: Any, held_by_row: dict[int, Held]) -> list[tuple[int, tuple[Ids, ...]]]:
    """Gives suspended sequences new blocks, all of them or none.

    Returns: each row, and the new ids of each group, in the order of its `Held`.

    Raises: as `KVStore.resume`.
    """
    ids, rows = books.handles.resolve(seq_ids)
    away = books.handles.suspended[rows]
    if not away.all():
        raise SequenceError(f"seq_ids: expected suspended sequences, got {ids[int(away.argmin())]}, which is not")
    books.flush()
    groups = range(books.rules.num_groups)
    counts = np.array([[len(held_by_row[row].ids[g]) for g in groups] for row in rows.tolist()], np.int64)
    taken = books.allocator.take(counts.reshape(len(rows), len(groups)).sum(axis=0).tolist())
    used = [0] * len(groups)
    placed: list[tuple[int, tuple[Ids, ...]]] = []
    for row in rows.tolist():
        mine: list[Ids] = []
        for g in groups:
            numbers = held_by_row[row].numbers[g]
            new = taken[g][used[g] : used[g] + len(numbers)]
            used[g] += len(numbers)
            books.tables.table(g)[row, numbers % int(books.tables.width[g])] = new
            mine.append(new)
        placed.append((row, tuple(mine)))
    books.handles.suspended[rows] = False
    books.state.shared[rows] = 0
    # The blocks are others than those the index may have known: it gets these when it is told the next time.
    known = books.state.indexed[rows]
    books.state.indexed[rows] = np.where(known < NEVER, 0, known)
    books.tables_changed(rows)
    return placed


def undo_resume(books: Books, placed: list[tuple[int, tuple[Ids, ...]]]) -> None:
    """Suspends rows again that `resume` placed a moment ago, because their bytes could not be brought back."""
    books.flush()
    rows = np.array([row for row, _ in placed], np.int64)
    for g in range(books.rules.num_groups):
        books.tables.table(g)[rows] = 0
        for _, ids in placed:
            books.allocator.release(books.allocator.to_cells(ids[g][::-1], g))
    books.handles.suspended[rows] = True
    books.renew(rows)
