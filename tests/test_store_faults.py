"""Faults seen in public block pools, each named by its number in the list of faults, with the right value."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from store_cases import (
    LAYER,
    RING_LAYER,
    STATE_LAYER,
    feed,
    make_hybrid,
    make_store,
    prefill,
    ring,
    rows_for,
    snapshot,
    state,
    state_of,
    store_of,
    tokens_in,
)

import kvstore
from kvstore import CacheGroup, Item, KVStore, Namespace, OutOfBlocks
from kvstore.layers import full_attention
from kvstore.specs import LayerSpec


def attention(block_size: int = 16) -> LayerSpec:
    return full_attention(2, 8, dtype=torch.float32, block_size=block_size)


# The block pool


def test_o10_a_block_named_twice_in_one_release_is_freed_once() -> None:
    """Two sequences hold the same block; released in one call it is one block more, and goes to one sequence."""
    store = make_store(num_frames=4)
    first = prefill(store, range(5))
    second = store.open([range(5)]).seq_ids
    assert store._books.allocator.references[1] == 2
    with pytest.raises(kvstore.SequenceError, match="expected each sequence once"):
        store.release([*first, *first])
    store.release([*first, *second])
    store.check()
    assert (store.stats().free, store.stats().cached, store.stats().in_use) == (2, 1, 0)
    store.drop_prefixes()
    assert store.stats().free == 3
    opened = store.open([range(50, 54), range(60, 64), range(70, 74)]).seq_ids
    table = store.extend(opened, 4).block_table[0]
    assert sorted(table[:, 0].tolist()) == [1, 2, 3]


def test_o11_a_failed_extend_leaves_no_reference_behind() -> None:
    """5 free blocks, 2 of them this sequence's hits, and 4 new ones wanted: 3 remain."""
    store = make_store(num_frames=6)
    store.release(prefill(store, range(8)))
    opened = store.open([range(24)])
    assert opened.cached_tokens.tolist() == [8]
    before = snapshot(store)
    for _ in range(3):
        with pytest.raises(OutOfBlocks, match=r"wanted \[4\], free \[3\], evictable \[0\], fenced \[0\]"):
            store.extend(opened.seq_ids, 16)
        assert snapshot(store) == before
    store.extend(opened.seq_ids, 12)
    store.check()


def test_o12_no_hit_on_blocks_that_are_filled_in_the_same_step() -> None:
    """Two prompts of 512 equal tokens in one batch, block 256; later a third one is left one token to compute."""
    store = store_of({LAYER: attention(256)}, 16, max_length=600, max_tokens_per_step=2048)
    opened = store.open([range(512), range(512)])
    assert opened.cached_tokens.tolist() == [0, 0]
    batch = store.extend(opened.seq_ids, 512)
    assert store.open([range(512)]).cached_tokens.tolist() == [0]
    assert len(set(batch.block_table[0].flatten().tolist())) == 4
    store.write(LAYER, batch, rows_for([*range(512)] * 2), rows_for([*range(512)] * 2))
    store.commit(batch, [*range(512)] * 2)
    later = store.open([range(512)])
    assert later.cached_tokens.tolist() == [511]
    feed(store, later.seq_ids, [511])
    assert tokens_in(store, LAYER, later.seq_ids) == [*range(512)]


@pytest.mark.parametrize("late", ["commit", "nothing"])
def test_o13_rows_that_were_never_confirmed_are_not_hit(late: str) -> None:
    store = make_store(block_size=16)
    opened = store.open([range(16)])
    batch = store.extend(opened.seq_ids, 16)
    store.release(opened.seq_ids)
    if late == "commit":
        store.commit(batch, range(16))
    assert store.open([range(16), range(17)]).cached_tokens.tolist() == [0, 0]
    assert store.stats().cached == 0
    store.check()


def test_o14_a_wholly_cached_prompt_leaves_a_token_to_compute() -> None:
    """Block 16, 32 tokens: 31 are reused, 15 of them in a private copy of the last block."""
    store = make_store(block_size=16)
    first = store.open([range(32)]).seq_ids
    feed(store, first, range(32))
    opened = store.open([range(32)])
    assert opened.cached_tokens.tolist() == [31]
    batch = feed(store, opened.seq_ids, [31])
    assert batch.block_table[0].tolist() == [[1, 3]]
    assert tokens_in(store, LAYER, opened.seq_ids) == tokens_in(store, LAYER, first) == [*range(32)]


@pytest.mark.parametrize(("prompt", "hit"), [(31, 16), (32, 16), (33, 32), (48, 32)])
@pytest.mark.parametrize("saved", ["in a block of the batch", "by a chunk that ends there"])
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "released"])
def test_o15_a_state_is_saved_at_the_last_reusable_boundary(
    prompt: int, hit: int, saved: str, is_running: bool
) -> None:
    in_batch = saved == "in a block of the batch"
    store = store_of({LAYER: attention(), STATE_LAYER: state(16, checkpoint_blocks=int(in_batch))})
    group = store.plan.group_index(STATE_LAYER)
    first = store.open([range(prompt)]).seq_ids
    if in_batch:
        batch = feed(store, first, range(prompt))
        assert batch.state_checkpoints[group][0, 0].item() == hit
    else:
        feed(store, first, range(hit))
        feed(store, first, range(hit, prompt))
    if not is_running:
        store.release(first)
    opened = store.open([range(prompt)])
    assert opened.cached_tokens.tolist() == [hit]
    assert state_of(store, opened.seq_ids) == [sum(range(hit))]
    feed(store, opened.seq_ids, range(hit, prompt))
    assert state_of(store, opened.seq_ids) == [sum(range(prompt))]
    assert tokens_in(store, LAYER, opened.seq_ids) == [*range(prompt)]
    if is_running:
        assert state_of(store, first) == [sum(range(prompt))]


def test_o16_an_adapter_and_a_salt_of_one_name_are_two_things() -> None:
    store = make_store()
    spaces = [Namespace(adapter="X"), Namespace(salt="X"), Namespace(weights="X"), Namespace(), Namespace(adapter=b"X")]
    seq_ids = store.open([range(16)], spaces[0]).seq_ids
    store.commit(store.extend(seq_ids, 16), range(16))
    opened = store.open([range(16)] * 5, spaces)
    assert opened.cached_tokens.tolist() == [15, 0, 0, 0, 0]
    store.check()


@pytest.mark.parametrize(
    ("other", "hit"),
    [
        ((Item(6, 0xAAAA1234, 8),), 19),
        ((Item(6, 0xBBBB1234, 8),), 4),
        ((Item(7, 0xAAAA1234, 8),), 4),
        ((Item(6, 0xAAAA1234, 9),), 4),
        ((Item(6, "0xAAAA1234", 8),), 4),
        ((), 4),
    ],
    ids=["the same", "last digits equal", "another place", "another length", "another type", "no image"],
)
def test_o17_the_whole_identity_of_an_image_counts(other: tuple[Item, ...], hit: int) -> None:
    """Equal text of 20 tokens, an image over tokens 6 to 13: without the same image only block 0 is shared."""
    store = make_store()
    first = store.open([range(20)], Namespace(items=(Item(6, 0xAAAA1234, 8),))).seq_ids
    store.commit(store.extend(first, 20), range(20))
    assert store.open([range(20)], Namespace(items=other)).cached_tokens.tolist() == [hit]
    assert store.open([range(20)], Namespace(items=(Item(6, 0xAAAA1234, 8),))).cached_tokens.tolist() == [19]


@pytest.mark.parametrize(
    ("cached", "asked", "hit"),
    [((), (Item(5, "cat", 2),), 5), ((Item(5, "cat", 2),), (), 4), ((), (Item(4, "cat", 2),), 4), ((), (), 6)],
    ids=["an image in the last block", "an image that was there", "an image right behind", "no image"],
)
def test_o17_a_part_of_a_block_is_shared_up_to_the_image(
    cached: tuple[Item, ...], asked: tuple[Item, ...], hit: int
) -> None:
    """7 equal tokens in blocks of 4, an image somewhere in the second block."""
    store = make_store()
    first = store.open([range(8)], Namespace(items=cached)).seq_ids
    store.commit(store.extend(first, 8), range(8))
    assert store.open([range(7)], Namespace(items=asked)).cached_tokens.tolist() == [hit]


TWO_PROCESSES = """
from kvstore.digests import content_digests
from kvstore.namespaces import Namespace
from store_cases import make_hybrid, prefill
from kvstore import Namespace
print([row.tobytes().hex() for row in content_digests(range(256), 16)])
store = make_hybrid(num_frames=24)
for start in range(0, 90, 3):
    seq_ids = store.open([range(start, start + 9)], Namespace(adapter=str(start % 2), salt=start % 4)).seq_ids
    cached = int(store._books.state.committed[seq_ids[0] & 0xFF])
    batch = store.extend(seq_ids, 9 - cached)
    print(cached, seq_ids.tolist(), [table.tolist() for table in batch.block_table])
    store.commit(batch, range(start + cached, start + 9))
    store.release(seq_ids)
"""


def test_o18_digests_and_block_ids_are_equal_in_every_process() -> None:
    root = Path(__file__).parent.parent
    paths = f"{root}:{root / 'kernels'}:{root / 'tests'}"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", TWO_PROCESSES],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout
        for seed in ("0", "1", "random")
    }  # fmt: skip
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 31


@pytest.mark.parametrize("path", ["direct", "delayed"])
def test_o19_a_late_release_keeps_the_order_of_eviction(path: str) -> None:
    """Group A = blocks [1, 2], group B = [3, 4]: the tail first, group by group."""
    spec = attention(4)
    groups = [CacheGroup("A", {"a": spec}, 4, spec.retention), CacheGroup("B", {"b": spec}, 4, spec.retention)]
    store = KVStore(kvstore.plan_cache(groups, num_frames=5, layout="buckets"), None, max_sequences=2)
    seq_ids = prefill(store, range(8))
    assert [store._books.tables.table(g)[0, :2].tolist() for g in (0, 1)] == [[1, 2], [3, 4]]
    batch = store.extend(seq_ids, 0) if path == "delayed" else None
    store.release(seq_ids)
    assert store.stats().fenced == (4 if path == "delayed" else 0)
    if batch is not None:
        store.commit(batch, [], finish=False)
        store.finish(batch)
    store.check()
    assert store.stats().cached == 4
    assert [int(store._books.allocator.take([1, 0])[0][0]) for _ in range(4)] == [2, 1, 4, 3]


def test_o20_a_prefix_is_cut_at_multiples_of_the_block() -> None:
    """Block 3, a b c cached, then a b x: no block is shared; 2 rows are had from a copy, and a b c stays whole."""
    store = make_store(block_size=3)
    first = store.open([[1, 2, 3]]).seq_ids
    feed(store, first, [1, 2, 3])
    opened = store.open([[1, 2, 9]])
    report = store.explain_hit(opened.seq_ids[0])
    assert (report.cached_tokens, report.copied) == (2, 2)
    batch = feed(store, opened.seq_ids, [9])
    assert batch.block_table[0].tolist() == [[2]]
    assert tokens_in(store, LAYER, opened.seq_ids) == [1, 2, 9]
    assert tokens_in(store, LAYER, first) == [1, 2, 3]
    store.release(first)
    store._books.allocator.forget(np.array([1], np.int32))
    store._books.prefixes.index.tidy(2)
    store.check()
    assert store.open([[1, 2, 3, 4]]).cached_tokens.tolist() == [2]
    assert make_hybrid_hit([1, 2, 3, 4], [1, 2, 9, 4, 5]) == 0


def make_hybrid_hit(first: list[int], second: list[int]) -> int:
    """What a second prompt finds of a first one in a store with windows, which shares whole units only."""
    store = make_hybrid()
    prefill(store, first)
    return int(store.open([second]).cached_tokens[0])


def test_o21_rows_of_draft_tokens_are_reserved_before_the_step() -> None:
    """14 tokens stored, 1 + 4 written: 19 tokens, 2 blocks of 16; the step is refused where one is there."""
    for num_frames, fits in ((3, True), (2, False)):
        store = make_store(num_frames, block_size=16)
        seq_ids = prefill(store, range(14))
        if not fits:
            before = snapshot(store)
            with pytest.raises(OutOfBlocks, match=r"wanted \[1\], free \[0\]"):
                store.extend(seq_ids, 5)
            assert snapshot(store) == before
            continue
        batch = store.extend(seq_ids, 5)
        assert batch.seq_lens.tolist() == [19]
        assert batch.block_table[0].tolist() == [[1, 2]]
        assert batch.slot_mapping[0].tolist() == [30, 31, 32, 33, 34]
        store.commit(batch, [14, 15], num_committed=[2])
        store.check()
        assert store.stats().in_use == 1


@pytest.mark.parametrize("layout", ["buckets", "bestfit", "overlay", "frames"])
def test_o22_the_null_block_is_block_0_and_nobody_has_it(layout: str) -> None:
    layers = {LAYER: attention(4), "layers.1.attn": full_attention(1, 8, dtype=torch.float32, block_size=4)}
    groups = [CacheGroup(name, {name: spec}, 4, spec.retention) for name, spec in layers.items()]
    store = store_of(groups, 9, layout=layout, max_length=128)
    seq_ids, tables, length = store.open([range(128)]).seq_ids, [], 0
    while True:
        try:
            batch = store.extend(seq_ids, 4)
        except OutOfBlocks:
            break
        for layer, spec in layers.items():
            rows = torch.ones(4, spec.format.parts[0].num_heads, 8)
            store.write(layer, batch, rows, rows)
        store.commit(batch, range(length, length + 4))
        length += 4
        tables = [table[0, : length // 4].tolist() for table in batch.block_table]
    store.check()
    assert length >= 16
    assert 0 not in [block for table in tables for block in table]
    for layer in layers:
        assert not store.page_view(layer).tensor("k")[0].any()


@pytest.mark.parametrize("by", ["a namespace", "clearing", "a predicate"])
def test_o23_after_new_weights_nothing_old_is_hit(by: str) -> None:
    """Also not through a sequence of the old weights that goes on and is released later."""
    store = make_store()
    old, new = (Namespace(weights=1), Namespace(weights=2)) if by == "a namespace" else (Namespace(), Namespace())
    running = store.open([range(12)], old).seq_ids
    store.commit(store.extend(running, 12), range(12))
    released = store.open([range(50, 62)], old).seq_ids
    store.commit(store.extend(released, 12), range(50, 62))
    store.release(released)
    if by == "clearing":
        assert store.drop_prefixes() == 6
    elif by == "a predicate":
        assert store.invalidate(predicate=lambda known: known == old) == 6
    assert store.open([range(12), range(50, 62)], new).cached_tokens.tolist() == [0, 0]
    store.commit(store.extend(running, 8), range(12, 20))
    store.release(running)
    assert store.open([range(20)], new).cached_tokens.tolist() == [0]
    store.check()


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 9], ids=lambda step: f"{step} a step")
def test_o24_a_ring_is_read_in_order_through_every_wrap(step: int) -> None:
    """Ring of 4, 2 tokens stored, read 2: from row 0 on; and so for every length up to three times round."""
    store = store_of({RING_LAYER: ring(4)})
    seq_ids = store.open([range(40)]).seq_ids
    feed(store, seq_ids, [0, 1])
    batch = store.extend(seq_ids, 0)
    assert store.gather_starts(RING_LAYER, batch).tolist() == [0]
    assert tokens_in(store, RING_LAYER, seq_ids, batch) == [0, 1]
    store.commit(batch, [])
    for start in range(2, 14, step):
        feed(store, seq_ids, range(start, start + step))
        length = start + step
        assert tokens_in(store, RING_LAYER, seq_ids) == [*range(length - min(4, length), length)]
    assert store.stats().in_use == 1
