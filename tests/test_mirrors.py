"""Mirrors: whoever was in a place before, a batch sees the blocks of its own sequences and nothing else."""

import contextlib
import random

import numpy as np
import pytest
from store_cases import make_hybrid, make_store, prefill
from test_staging import packed

import kvstore
from kvstore import Batch, KVStore


def expect_tables_of_the_books(store: KVStore, batch: Batch) -> None:
    tables = store._books.tables
    for group, shown in enumerate(batch.block_table):
        wanted = tables.table(group)[batch.step.rows, : shown.shape[1]]
        assert np.array_equal(shown.numpy()[: len(wanted)], wanted), f"group {group}"
        assert not shown[len(wanted) :].any()


def test_a_row_that_grew_in_another_batch_leaves_nothing_behind() -> None:
    store = make_store()
    grows, long, other = prefill(store, range(3), range(100, 124), range(200, 203))
    store.commit(store.extend([grows, long], 1), [1, 2])  # in the mirror of two: place 0 names one block
    store.commit(store.extend([grows], 20), range(20))  # in the mirror of one: five blocks more
    batch = store.extend([other, long], 1)  # the mirror of two hears of them, and then gives place 0 to another
    expect_tables_of_the_books(store, batch)
    store.commit(batch, [1, 2])


@pytest.mark.parametrize("as_packed", [False, True], ids=["cpu", "packed"])
@pytest.mark.parametrize("kept_changes", [5, 1 << 16], ids=["a log too short to follow", "a long log"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_of_any_sequences_in_any_order(
    as_packed: bool, kept_changes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.changes.MAX_CHANGES", kept_changes)
    draw = random.Random(seed)
    store = make_hybrid(num_frames=200, window=6, max_tokens_per_step=24)
    store = packed(store) if as_packed else store
    seq_ids: list[int] = []
    for step in range(150):
        if len(seq_ids) < 7 and draw.random() < 0.4:
            seq_ids += store.open([[draw.randrange(9) for _ in range(draw.randrange(1, 12))]]).seq_ids.tolist()
        chosen = draw.sample(seq_ids, draw.randrange(len(seq_ids) + 1))
        single = draw.random() < 0.6
        with contextlib.suppress(ValueError, kvstore.OutOfBlocks):  # a sequence is as long as it can be
            if single:
                batch = store.extend(chosen, 1, pad_to=draw.choice([None, 8]))
            else:
                batch = store.extend(chosen, [draw.randrange(8) for _ in chosen])
            expect_tables_of_the_books(store, batch)
            store.commit(batch, [step % 9] * int(batch.num_new_tokens.sum()))
        if seq_ids and draw.random() < 0.1:
            store.release([seq_ids.pop(draw.randrange(len(seq_ids)))])
    store.check()
