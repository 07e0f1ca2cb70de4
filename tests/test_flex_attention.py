"""flex_attention over pages in place: against attention in fp64 over the rows written, and the store's own reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_oracle import expect_within_budget
from flex_world import F32, FULL, LAYOUTS, OTHER, WINDOW, eager, expect_flex, layers, make
from store_cases import store_of

import kvstore
from kvstore import Batch, KVStore, LayerSpec
from kvstore.integrations.metadata import FlexMetadata, export_check, flex_metadata
from kvstore_kernels.formats import latent_format


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_decode_of_full_and_window_layers_in_one_memory(layout: str) -> None:
    world = make(layout)
    seq_ids = world.open(21, 8, 3)
    world.step(seq_ids[:2], [21, 8])
    for layer in layers():
        assert export_check(world.store, layer, "flex") == []
    mixed = world.extend(seq_ids, [30, 1, 3])
    for layer in (FULL, WINDOW):
        expect_flex(world, layer, mixed)
    world.store.commit(mixed, np.arange(34))
    world.step(seq_ids[:1], [31])  # 82 tokens: the window's 15 columns of 4 have been used again
    batch = world.extend(seq_ids, 1)
    for layer in (OTHER, WINDOW):
        q = expect_flex(world, layer, batch)
        expect_within_budget(world.store.gqa_decode(layer, batch, q), world.exact(layer, batch, q))


def test_layers_that_share_a_slot_tensor_do_share_it() -> None:
    world = make("overlay")
    batch = world.extend(world.open(5), 5)
    keys = {layer: flex_metadata(world.store, layer, batch).key for layer in layers()}
    assert len({key.untyped_storage().data_ptr() for key in keys.values()}) == 1
    # Rows of 2 * 16 * 4 = 128 B; the block of 4,096 B of the largest page is 32 of them, pages of 8, 16 and 4 rows.
    assert {layer: flex_metadata(world.store, layer, batch).block_rows for layer in layers()} == dict.fromkeys(keys, 32)
    assert {layer: tuple(key.shape) for layer, key in keys.items()} == {
        FULL: (1, 2, 59 * 32 + 8, 16),
        OTHER: (1, 2, 59 * 32 + 16, 16),
        WINDOW: (1, 2, 59 * 32 + 4, 16),
    }
    assert {tuple(key.stride()[1:]) for key in keys.values()} == {(16, 32, 1)}


def mask_of(meta: FlexMetadata, num_tokens: int) -> torch.Tensor:
    """bool [T, rows], the mask asked for every pair."""
    query, row = torch.arange(num_tokens)[:, None], torch.arange(meta.key.shape[2])[None]
    return meta.mask_mod(torch.tensor(0), torch.tensor(0), query, row).expand(num_tokens, -1)


def wanted_mask(store: KVStore, layer: str, batch: Batch, block_rows: int) -> torch.Tensor:
    """The same from slots and from what the kind of the layer says, row by row."""
    spec, per_block = store.plan.spec(layer), store.plan.spec(layer).rows_per_block
    longest = int(batch.seq_lens.max()) // spec.tokens_per_row
    num_real = len(batch.seq_ids)
    slots = store.slots_of(layer, batch, torch.arange(longest).expand(num_real, -1)).tolist()
    num_blocks = store.plan.num_blocks[store.plan.group_index(layer)]
    mask = torch.zeros(batch.num_tokens, (num_blocks - 1) * block_rows + per_block, dtype=torch.bool)
    token = 0
    for seq_idx, count in enumerate(batch.num_new_tokens.tolist()):
        for _ in range(count):
            position = int(batch.positions[token])
            end = (position + 1) // spec.tokens_per_row
            first = 0 if spec.window is None else max(end - spec.window, 0)
            if spec.chunk:
                first = position // spec.chunk * spec.chunk
            for slot in slots[seq_idx][first:end]:
                assert slot >= 0
                mask[token, slot // per_block * block_rows + slot % per_block] = True
            token += 1
    return mask


def expect_mask(store: KVStore, layer: str, batch: Batch, *, q_tile: int = 4, kv_tile: int | None = None) -> None:
    """The mask is the wanted one, and the block mask leads to its tiles; to no others where a tile is a page."""
    meta = flex_metadata(store, layer, batch, q_tile=q_tile, kv_tile=kv_tile)
    mask = wanted_mask(store, layer, batch, meta.block_rows)
    assert torch.equal(mask_of(meta, batch.num_tokens), mask)
    dense = meta.block_mask.to_dense()[0, 0].bool()
    num_q, num_kv = dense.shape
    height, width = meta.block_mask.BLOCK_SIZE
    padded = torch.zeros(num_q * height, num_kv * width, dtype=torch.bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    needed = padded.view(num_q, height, num_kv, width).any(3).any(1)
    assert (dense | ~needed).all(), "a tile with visible rows is left out"
    spec = store.plan.spec(layer)
    if width == spec.rows_per_block and spec.chunk is None:
        assert torch.equal(dense, needed), "a tile without visible rows is looked at"


KINDS = {
    "full": kvstore.full_attention(2, 8, dtype=F32, block_size=4),
    "full, packed": replace(
        kvstore.full_attention(2, 8, 4, dtype=F32, block_size=4, packed=True), block_stride_multiple=96
    ),
    "full, one row": kvstore.full_attention(2, 8, dtype=F32, block_size=1),
    "full, window": LayerSpec("full", 4, kvstore.full_attention(2, 8, dtype=F32).format, window=7),
    "window": kvstore.sliding_window(2, 8, dtype=F32, block_size=2, window=5),
    "window of one": kvstore.sliding_window(2, 8, dtype=F32, block_size=4, window=1),
    "chunked": kvstore.chunked_attention(2, 8, dtype=F32, block_size=4, chunk=6),
    "latent": kvstore.latent(16, 8, dtype=F32, block_size=4),
    "latent, 4 tokens a row": kvstore.latent(16, 8, dtype=F32, block_size=8, tokens_per_row=4),
    "latent window": LayerSpec("latent_window", 4, latent_format(16, 8, F32), window=6),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["overlay", "frames"])
def test_the_mask_is_what_the_kind_of_the_layer_says(kind: str, layout: str) -> None:
    wide = kvstore.full_attention(2, 8, dtype=F32, block_size=16)
    limits = {"max_tokens_per_step": 12, "max_in_flight": 1}
    store = store_of({"layer": KINDS[kind], "wide": wide}, 100, layout=layout, **limits)
    seq_ids = store.open([range(9), range(100, 101), range(200, 206)]).seq_ids
    for counts in ([9, 1, 0], [2, 1, 6], [4, 0, 1], [1, 7, 1], [1, 1, 1], [9, 1, 2], [8, 1, 3], [9, 0, 1], [7, 2, 2]):
        batch = store.extend(seq_ids, counts)
        expect_mask(store, "layer", batch)
        store.commit(batch, np.zeros(sum(counts), int))
    batch = store.extend(seq_ids[[2, 0]], 1, pad_to=5)
    expect_mask(store, "layer", batch, q_tile=2)
    expect_mask(store, "layer", batch, kv_tile=32)


def test_tiles_that_no_query_needs_are_not_looked_at() -> None:
    store = store_of({FULL: KINDS["full"], WINDOW: KINDS["window"]}, 60, layout="overlay", max_in_flight=1)
    seq_ids = store.open([range(16), range(100, 108)]).seq_ids
    batch = store.extend(seq_ids, [16, 8])
    full = flex_metadata(store, FULL, batch, q_tile=8).block_mask
    assert full.kv_num_blocks.tolist() == [[[2, 4, 2]]]  # tokens 0 ... 7 and 8 ... 15 of one, 0 ... 7 of the other
    table = batch.block_table[store.plan.group_index(FULL)]
    tiles = [sorted(row[:count]) for row, count in zip(full.kv_indices[0, 0].tolist(), (2, 4, 2), strict=True)]
    per_block = flex_metadata(store, FULL, batch).block_rows // 4
    assert tiles == [sorted(per_block * table[seq, :n].long()) for seq, n in ((0, 2), (0, 4), (1, 2))]
    window = flex_metadata(store, WINDOW, batch, q_tile=8).block_mask  # of 5: tokens 8 ... 15 see 4 ... 15
    assert window.kv_num_blocks.tolist() == [[[4, 6, 4]]]


def test_shared_blocks_belong_to_each_sequence_that_has_them() -> None:
    world = make(specs={FULL: layers()[FULL], WINDOW: layers()[WINDOW]})
    (seq_id,) = world.open(21)
    world.step(np.array([seq_id]), 21)
    seq_ids = np.array([seq_id, *world.fork(seq_id, 2)])
    batch = world.extend(seq_ids, [1, 2, 3])
    table = batch.block_table[world.store.plan.group_index(FULL)]
    assert table[0, 0] == table[1, 0] == table[2, 0]
    for layer in (FULL, WINDOW):
        expect_mask(world.store, layer, batch)
    expect_flex(world, FULL, batch)
    world.store.commit(batch, np.arange(6))
    found = world.store.open([[*range(21), 7]])  # a hit: blocks of a sequence that is not in the batch beside its own
    assert found.cached_tokens[0] == 16
    other = world.store.extend(found.seq_ids, 6)
    expect_mask(world.store, FULL, other)


@pytest.mark.parametrize("graph", [False, True], ids=["pad_to", "graph"])
def test_padding_sees_nothing_and_gives_zeros(graph: bool) -> None:
    world = make()
    seq_ids = world.open(9, 17)
    world.step(seq_ids, [9, 17])
    more = {"graph": world.store.graph_batch(5)} if graph else {"pad_to": 5}
    batch = world.extend(seq_ids, 1, **more)
    for layer in (FULL, WINDOW):
        q = expect_flex(world, layer, batch)
        out, lse = eager(world, layer, batch, q)
        assert not out[2:].any()
        assert (lse[2:] == -torch.inf).all()


def test_padding_does_not_see_the_null_block_where_tables_have_one_column() -> None:
    world = make()
    batch = world.extend(world.open(1), 1, pad_to=3)
    assert batch.block_table[world.store.plan.group_index(FULL)].shape == (3, 1)
    assert not mask_of(flex_metadata(world.store, FULL, batch), 3)[1:].any()


def test_chunks_and_latent_rows() -> None:
    world = make(specs={"chunked": KINDS["chunked"], "latent": KINDS["latent"]})
    seq_ids = world.open(13, 2)
    world.step(seq_ids[:1], [13])
    batch = world.extend(seq_ids, [4, 2])
    for layer in world.store.plan.layers:
        expect_flex(world, layer, batch)
    meta = flex_metadata(world.store, "latent", batch)
    assert (meta.value.shape[3], meta.value.data_ptr()) == (8, meta.key.data_ptr())


def test_pages_that_are_no_axis_of_rows_are_refused() -> None:
    odd = kvstore.sliding_window(2, 16, dtype=F32, block_size=4, window=9, padded_page_bytes=1040)
    store = store_of({FULL: kvstore.full_attention(2, 16, dtype=F32, block_size=4), OTHER: odd}, layout="overlay")
    batch = store.extend(store.open([range(3)]).seq_ids, 3)
    reason = (
        r"block stride: expected a whole number of rows of 128 B, got 1040 B: LayerSpec\(block_stride_multiple=128\)"
    )
    with pytest.raises(ValueError, match=f"layer: '{FULL}' cannot be read by flex: {reason}"):
        flex_metadata(store, FULL, batch)
    uneven = store_of({FULL: kvstore.full_attention(2, 16, 8, dtype=F32, block_size=4)})
    assert export_check(uneven, FULL, "flex") == [
        "rows: expected K and V of one pitch, got 128 and 64 B: full_attention(packed=True) "
        "[torch 2.13, one index for key and value]"
    ]
    for name in ("q_tile", "kv_tile"):
        with pytest.raises(ValueError, match=f"{name}: expected an integer >= 1, got 0"):
            flex_metadata(make().store, FULL, None, **{name: 0})  # type: ignore[arg-type]
