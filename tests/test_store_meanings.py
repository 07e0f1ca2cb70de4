"""KVStore: what design.md says that the calls mean, sentence by sentence, with real pages."""

import numpy as np
import pytest
import torch
from store_cases import (
    CHUNK_LAYER,
    LAYER,
    RING_LAYER,
    STATE_LAYER,
    WINDOW_LAYER,
    expect_rows,
    feed,
    make_hybrid,
    make_store,
    mixed_layers,
    prefill,
    ring,
    rows_for,
    state,
    store_of,
    tokens_in,
)

from kvstore import CacheGroup
from kvstore.layers import full_attention, latent

# Rows


def test_rows_of_several_tokens_have_a_slot_where_they_close() -> None:
    """Rows of 4 tokens beside rows of one, in one group with blocks of 8: slots of 2 and of 8 rows a block."""
    plain = full_attention(2, 8, dtype=torch.float32, block_size=8)
    compressed = latent(12, 8, dtype=torch.float32, block_size=8, tokens_per_row=4)
    store = store_of([CacheGroup("both", {LAYER: plain, "layers.0.indexer": compressed}, 8, plain.retention)])
    seq_ids = store.open([range(30)]).seq_ids
    batch = store.extend(seq_ids, 10)
    assert store.slot_mapping(LAYER, batch).tolist() == [*range(8, 18)]
    assert store.slot_mapping("layers.0.indexer", batch).tolist() == [-1, -1, -1, 2, -1, -1, -1, 3, -1, -1]
    assert store.row_lens("layers.0.indexer", batch).tolist() == [2]
    assert store.row_lens(LAYER, batch).tolist() == batch.seq_lens.tolist() == [10]
    store.commit(batch, range(10))
    for token in range(10, 13):
        batch = store.extend(seq_ids, 1)
        closes = (token + 1) % 4 == 0
        assert store.slot_mapping("layers.0.indexer", batch).tolist() == [4 if closes else -1]
        store.commit(batch, [token])


def test_states_and_rings_have_a_block_to_read_and_one_to_write() -> None:
    """A ring reads and writes one block for ever; a state reads where the last token is, writes where the new is."""
    store = store_of({STATE_LAYER: state(4), RING_LAYER: ring(4)})
    states, rings = store.plan.group_index(STATE_LAYER), store.plan.group_index(RING_LAYER)
    seq_ids = store.open([range(20)]).seq_ids
    seen = []
    for count in (3, 1, 1, 4, 0):
        batch = store.extend(seq_ids, count)
        seen.append([batch.state_blocks[g][0].tolist() for g in (states, rings)])
        store.commit(batch, range(count))
        store.check()
    first, ring_block = seen[0][0][1], seen[0][1][1]
    assert seen[0] == [[0, first], [ring_block, ring_block]]
    assert seen[1] == [[first, first], [ring_block, ring_block]]
    second, third = seen[2][0][1], seen[3][0][1]
    assert [blocks for blocks, _ in seen[2:]] == [[first, second], [second, third], [third, 0]]
    assert len({first, second, third, ring_block}) >= 3
    assert store.stats().in_use == 2


def test_tables_of_windows_are_small_and_their_columns_are_used_again() -> None:
    """Window 6 in blocks of 2, two steps of 16 in flight: 5 + 32 + 2 tokens of reach are 20 columns, not 2,048."""
    store = make_hybrid(num_frames=1100, window=6, max_length=4096, max_sequences=1)
    assert store._books.rules.widths == (1024, 20)
    seq_ids = store.open([range(4000)]).seq_ids
    for start in range(0, 160, 16):
        feed(store, seq_ids, range(start, start + 16))
    batch = store.extend(seq_ids, 1)
    assert batch.block_table[1].shape == (1, 20)
    table = batch.block_table[1][0].tolist()
    held = {block % 20: table[block % 20] for block in range(155 // 2, 81)}
    assert 0 not in held.values()
    assert sum(1 for entry in table if entry) == len(held)
    assert store.gather_starts(WINDOW_LAYER, batch).tolist() == [155]
    store.write(WINDOW_LAYER, batch, rows_for([160]), rows_for([160]))
    assert store.gather(WINDOW_LAYER, batch)[0][:, 0, 0].tolist() == [*range(155, 161)]


def test_tails_only_are_stored_and_read_before_the_step() -> None:
    """Window 6, blocks of 2: of 16 new tokens the blocks in reach of token 16 are stored; a step reads the old tail."""
    store = make_hybrid(window=6, stored="tail")
    seq_ids = store.open([range(40)]).seq_ids
    batch = feed(store, seq_ids, range(16), commit=False)
    slots = store.slot_mapping(WINDOW_LAYER, batch).tolist()
    assert [slot >= 0 for slot in slots] == [False] * 10 + [True] * 6
    assert store.gather(WINDOW_LAYER, batch)[0].shape[0] == 0
    assert store.stats().in_use == 4 + 3
    store.commit(batch, range(16))
    batch = feed(store, seq_ids, range(16, 30), commit=False)
    assert tokens_in(store, LAYER, seq_ids, batch) == [*range(30)]
    assert tokens_in(store, WINDOW_LAYER, seq_ids, batch) == [*range(11, 16)]
    store.commit(batch, range(16, 30))
    for token in range(30, 36):
        batch = feed(store, seq_ids, [token], commit=False)
        assert tokens_in(store, WINDOW_LAYER, seq_ids, batch) == [*range(token - 5, token + 1)]
        store.commit(batch, [token])
        store.check()


# Steps


def test_batches_in_flight_share_no_buffer_and_windows_go_by_what_is_committed() -> None:
    """Three steps of 8 run ahead; at each commit the window of 6 lets go what the next token cannot reach."""
    store = make_hybrid(window=6, max_in_flight=3)
    seq_ids = store.open([range(60)]).seq_ids
    batches = [feed(store, seq_ids, range(start, start + 8), commit=False) for start in (0, 8, 16)]
    tensors = [(batch.positions, batch.seq_lens, *batch.block_table, *batch.slot_mapping) for batch in batches]
    assert len({tensor.data_ptr() for each in tensors for tensor in each}) == 3 * len(tensors[0])
    assert [group.in_use for group in store.stats().groups] == [6, 12]
    for number, batch in enumerate(batches):
        start = 8 * number
        assert tokens_in(store, WINDOW_LAYER, seq_ids, batch) == [*range(max(start - 5, 0), start + 8)]
        store.commit(batch, range(start, start + 8))
        store.check()
        gone = max(start + 8 - 5, 0) // 2
        assert [group.in_use for group in store.stats().groups] == [6, 12 - gone]


def test_a_block_that_others_hold_is_copied_before_it_is_written() -> None:
    """And the source stays until the step that copies it is finished, even when nobody else wants it any more."""
    store = make_store()
    parent = store.open([range(6)]).seq_ids
    feed(store, parent, range(6))
    (child,) = store.fork(parent[0], 1).tolist()
    assert store.stats().in_use == 2
    batch = store.extend([child], 1)
    assert batch.block_table[0].tolist() == [[1, 3]]
    store.write(LAYER, batch, rows_for([70]), rows_for([70]))
    store.release(parent)
    assert (store.stats().in_use, store.stats().fenced) == (2, 1)
    store.commit(batch, [70], finish=False)
    store.check()
    assert store.stats().fenced == 1
    store.finish(batch)
    assert store.stats().fenced == 0
    assert tokens_in(store, LAYER, [child]) == [*range(6), 70]


def test_the_only_holder_of_an_indexed_block_withdraws_it_and_writes() -> None:
    """Cut back into a block that the index knows, alone: no copy is made, and nobody finds the block any more."""
    store = make_store()
    seq_ids = store.open([range(8)]).seq_ids
    feed(store, seq_ids, range(8))
    store.truncate(seq_ids, 6)
    assert store.open([range(9)]).cached_tokens.tolist() == [8]
    store.release(store._books.handles.current[1:2].copy())
    batch = feed(store, seq_ids, [70])
    assert batch.block_table[0].tolist() == [[1, 2]]
    assert store.open([range(9)]).cached_tokens.tolist() == [4]
    assert tokens_in(store, LAYER, seq_ids) == [*range(6), 70]


def test_a_block_that_a_hit_holds_is_copied_and_stays_indexed() -> None:
    store = make_store()
    seq_ids = store.open([range(8)]).seq_ids
    feed(store, seq_ids, range(8))
    other = store.open([range(9)]).seq_ids
    store.truncate(seq_ids, 6)
    feed(store, seq_ids, [70])
    expect_rows(store, {int(seq_ids[0]): [*range(6), 70], int(other[0]): [*range(8)]})
    assert store.open([range(9)]).cached_tokens.tolist() == [8]


@pytest.mark.parametrize("window", [5, 6])
def test_a_hit_with_a_ring_computes_its_rows_again(window: int) -> None:
    """Ring of 4: of a hit of 20 tokens the last 4 are computed again; rows that exist are not written."""
    store = store_of(mixed_layers(window))
    first = store.open([range(22)]).seq_ids
    for start in (0, 4, 8, 12, 16):
        feed(store, first, range(start, start + 4))
    opened = store.open([range(22)])
    assert opened.cached_tokens.tolist() == [16]
    report = store.explain_hit(opened.seq_ids[0])
    assert (report.length, report.replayed) == (20, 4)
    batch = feed(store, opened.seq_ids, range(16, 22))
    for layer in (LAYER, WINDOW_LAYER, CHUNK_LAYER):
        assert [slot >= 0 for slot in store_slots(store, layer, batch)] == [False] * 4 + [True] * 2
    assert all(slot >= 0 for slot in store_slots(store, RING_LAYER, batch)[2:])
    expect_rows(store, {int(first[0]): [*range(20)], int(opened.seq_ids[0]): [*range(22)]})


def store_slots(store, layer, batch):
    return batch.variant_slots[store._books.rules.variant_of_layer[layer]].tolist()


def test_a_ring_hit_wants_more_of_a_window_than_the_window() -> None:
    """Window 6 and ring 4: a hit of 20 takes tokens 11 ... 19; without tokens 10 and 11 it would be shorter."""
    store = store_of(mixed_layers(6))
    first = store.open([range(22)]).seq_ids
    for start in (0, 4, 8, 12, 16):
        feed(store, first, range(start, start + 4))
    store.release(first)
    group = store.plan.group_index(WINDOW_LAYER)
    found = store._books.prefixes.find(np.arange(22, dtype=np.int32), store._books.prefixes.owners[0].namespace)
    assert found.parts[group][:2] == (5, 10)
    store._books.allocator.forget(found.parts[group][2][:1])
    report = store._books.prefixes.find(np.arange(22, dtype=np.int32), store._books.prefixes.owners[0].namespace).report
    assert report.stops[group].reason == "window incomplete"
    assert report.length < 20


@pytest.mark.parametrize("zero_new", [True, False, "auto"])
def test_new_blocks_are_cleared_where_asked_for_or_needed(zero_new: bool | str) -> None:
    """auto: a full layer alone needs it not; a state does; layers of two dtypes on the same bytes do."""
    for make, needed in ((make_store, False), (lambda **more: store_of({STATE_LAYER: state(4)}, **more), True)):
        store = make(num_frames=4, zero_new=zero_new)
        store._arena.memory.fill_(0xFF)
        batch = store.extend(store.open([range(4)]).seq_ids, 4)
        (layer, *_) = store.plan.layers
        cleared = not store.page_view(layer).tensor(store.plan.spec(layer).format.parts[0].name)[1].isnan().any()
        assert cleared == (needed if zero_new == "auto" else zero_new)
        store.commit(batch, range(4))


# Forks, beams, taking back, in a store with groups of every kind


def test_forks_share_until_they_write() -> None:
    store = store_of(mixed_layers(), 100)
    parent = int(store.open([range(30)]).seq_ids[0])
    tokens = {parent: [*range(10)]}
    feed(store, [parent], range(10))
    held = store.stats().in_use
    for seq_id in store.fork(parent, 3).tolist():
        tokens[seq_id] = [*range(10)]
    assert store.stats().in_use == held
    store.check()
    for step in range(12):
        new = {seq_id: [100 * (number + 1) + step] * (1 + number % 2) for number, seq_id in enumerate(tokens)}
        feed(store, list(tokens), *new.values())
        tokens = {seq_id: part + new[seq_id] for seq_id, part in tokens.items()}
        expect_rows(store, tokens)
    full = store.plan.group_index(LAYER)
    assert len({int(block) for block in store._books.tables.table(full)[:4, :2].flatten()}) == 2  # tokens 0 to 7
    store.release(list(tokens))
    store.drop_prefixes()
    store.check()
    assert store.stats().free == store.stats().num_blocks


def test_a_fork_of_a_fork_of_a_prompt_at_a_block_border_copies_nothing() -> None:
    store = make_store()
    parent = int(prefill(store, range(8))[0])
    (child,) = store.fork(parent, 1).tolist()
    (grandchild,) = store.fork(child, 1).tolist()
    assert store.fork(parent, 0).tolist() == []
    batch = store.extend([parent, child, grandchild], 1)
    assert batch.block_table[0].tolist() == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert not any(len(copies) for _, copies in batch.step.copies)


@pytest.mark.parametrize(
    "parents", [(1, 0, 2), (1, 2, 0), (0, 0, 0), (2, 2, 1), (0, 1, 2)], ids=lambda parents: "".join(map(str, parents))
)
def test_reorder_reads_all_parents_before_it_changes_any(parents: tuple[int, ...]) -> None:
    store = store_of(mixed_layers(), 100)
    root = int(store.open([range(30)]).seq_ids[0])
    feed(store, [root], range(6))
    beams = [root, *store.fork(root, 2).tolist()]
    tokens = {seq_id: [*range(6)] for seq_id in beams}
    for step in range(9):
        new = [[10 * (number + 1) + step] for number in range(3)]
        feed(store, beams, *new)
        tokens = {seq_id: tokens[seq_id] + new[number] for number, seq_id in enumerate(beams)}
        expect_rows(store, tokens)
        if step % 2:
            store.reorder(beams, [beams[parent] for parent in parents])
            tokens = {seq_id: list(tokens[beams[parents[number]]]) for number, seq_id in enumerate(beams)}
            expect_rows(store, tokens)
    store.release(beams)
    store.drop_prefixes()
    store.check()
    assert store.stats().free == store.stats().num_blocks


def test_reorder_fences_what_an_unfinished_step_reads() -> None:
    store = make_store()
    beams = store.open([range(6), range(20, 26)]).seq_ids
    batch = feed(store, beams, range(6), range(20, 26), commit=False)
    store.commit(batch, [*range(6), *range(20, 26)], finish=False)
    store.reorder(beams, beams[[0, 0]])
    store.check()
    assert (store.stats().fenced, store.stats().in_use) == (2, 2)
    store.finish(batch)
    assert store.stats().fenced == 0
    expect_rows(store, {int(beams[0]): [*range(6)], int(beams[1]): [*range(6)]})


def test_truncated_sequences_go_on_from_where_they_were_cut() -> None:
    """Up to 4 tokens back from the longest that a sequence has been."""
    layers = {name: spec for name, spec in mixed_layers().items() if name in (LAYER, WINDOW_LAYER, CHUNK_LAYER)}
    store = store_of(layers, 100, rollback=4)
    seq_ids = store.open([range(60), range(60)]).seq_ids.tolist()
    tokens = {seq_id: [] for seq_id in seq_ids}
    for step, (counts, cuts) in enumerate([((9, 4), (0, 1)), ((5, 6), (4, 3)), ((1, 1), (0, 2)), ((7, 3), (1, 3))] * 2):
        new = [[1000 * step + 100 * number + at for at in range(count)] for number, count in enumerate(counts)]
        feed(store, seq_ids, *new)
        for seq_id, part, cut in zip(seq_ids, new, cuts, strict=True):
            tokens[seq_id] = (tokens[seq_id] + part)[: len(tokens[seq_id]) + len(part) - cut]
        store.truncate(seq_ids, [len(part) for part in tokens.values()])
        expect_rows(store, tokens)
    store.truncate(seq_ids[:1], len(tokens[seq_ids[0]]))  # as long as it is: nothing happens
    expect_rows(store, tokens)


def test_a_fork_right_after_a_hit_has_no_ring_to_copy() -> None:
    """A hit of 20 tokens brings no ring: each fork fills one of its own, from the 4 tokens that are computed again."""
    store = store_of(mixed_layers(), 100)
    first = store.open([range(22)]).seq_ids
    for start in (0, 4, 8, 12, 16):
        feed(store, first, range(start, start + 4))
    hit = int(store.open([range(22)]).seq_ids[0])
    family = [hit, *store.fork(hit, 2).tolist()]
    batch = feed(store, family, *[range(16, 22)] * 3)
    assert not any(len(copies) for _, copies in batch.step.copies)
    expect_rows(store, {seq_id: [*range(22)] for seq_id in family} | {int(first[0]): [*range(20)]})


def test_a_hit_can_be_suspended_or_become_a_parent_before_its_first_step() -> None:
    store = store_of(mixed_layers(), 100)
    first = store.open([range(22)]).seq_ids
    for start in (0, 4, 8, 12, 16):
        feed(store, first, range(start, start + 4))
    hits = store.open([range(22), range(50, 60)]).seq_ids
    feed(store, hits[1:], range(50, 60))
    store.suspend(hits[:1])
    store.resume(hits[:1])
    store.reorder(hits[1:], hits[:1])
    store.check()
    feed(store, hits, *[range(16, 22)] * 2)
    expect_rows(store, {int(seq_id): [*range(22)] for seq_id in hits})
