"""Arguments for kernels of others: tables, page lists and strides, with numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from store_cases import mixed_layers, prefill, store_of

import kvstore
from kvstore import KVStore, LayerSpec
from kvstore.integrations.flash_mla import row_bytes_view
from kvstore.integrations.metadata import (
    flash_mla_indices,
    flash_mla_metadata,
    flash_mla_sparse_metadata,
    flashinfer_metadata,
    flashinfer_mla_metadata,
    flex_metadata,
    vllm_metadata,
)
from kvstore_kernels import PageView, dsv4_format, fp8_ds_mla_format, mxfp8_latent_format

BF16 = torch.bfloat16
FULL, WINDOW, LATENT = "layers.0.attn", "layers.1.attn", "layers.2.attn"


def gqa_store(**limits: Any) -> KVStore:
    """Pages of 16 rows: a full layer, and a window of 20; 64 new tokens at most, so the window's ring has 7 columns."""
    specs = {
        FULL: kvstore.full_attention(2, 64, dtype=BF16),
        WINDOW: kvstore.sliding_window(2, 64, dtype=BF16, window=20),
    }
    defaults = {"max_length": 512, "max_tokens_per_step": 64, "max_in_flight": 1, "layout": "overlay"}
    return store_of(specs, 120, **{**defaults, **limits})


def run(store: KVStore, seq_ids: np.ndarray, *counts: Any) -> None:
    for count in counts:
        batch = store.extend(seq_ids, count)
        store.commit(batch, np.zeros(batch.num_tokens, int))


def latent_store(spec: LayerSpec | None = None, **limits: Any) -> KVStore:
    """Pages of 64 latent rows, behind those of a wider layer in blocks of one slot tensor."""
    specs = {LATENT: spec or kvstore.latent(), FULL: kvstore.full_attention(2, 128, dtype=BF16, block_size=128)}
    return store_of(specs, 40, **{"max_length": 512, "max_tokens_per_step": 512, "layout": "overlay", **limits})


# vLLM and FlashAttention


def test_vllm_metadata_is_the_batch_itself() -> None:
    store = gqa_store()
    batch = store.extend(prefill(store, range(40), range(100, 117)), [3, 1])
    meta = vllm_metadata(store, FULL, batch)
    group = store.plan.group_index(FULL)
    assert meta.block_table.data_ptr() == batch.block_table[group].data_ptr()
    assert meta.block_table.shape == (2, 3)
    assert (meta.block_table[1, 2], meta.block_table.dtype) == (0, torch.int32)
    assert meta.slot_mapping is batch.slot_mapping[group]
    assert (meta.seq_lens.tolist(), meta.seq_lens.dtype) == ([43, 18], torch.int32)
    assert (meta.query_start_loc.tolist(), meta.query_start_loc.dtype) == ([0, 3, 4], torch.int32)
    assert (meta.max_query_len, meta.max_seq_len, meta.num_actual_tokens, meta.window_left) == (3, 43, 4, -1)
    slot = int(meta.slot_mapping[3])  # position 17: row 1 of the second block
    assert (slot // 16, slot % 16) == (int(meta.block_table[1, 1]), 1)
    marked = vllm_metadata(store, FULL, batch, sentinel=-1).block_table
    assert marked.tolist() == [meta.block_table[0].tolist(), [*meta.block_table[1, :2].tolist(), -1]]


@pytest.mark.parametrize("sentinel", [0, -1])
def test_the_table_of_a_window_is_unrolled_into_logical_columns(sentinel: int) -> None:
    store = gqa_store()
    seq_ids = prefill(store, range(60), range(100, 103))
    run(store, seq_ids[:1], 50, 60)
    batch = store.extend(seq_ids, [3, 1])  # 173 and 4 tokens: 11 columns of 16, in a ring of 7
    assert batch.block_table[store.plan.group_index(WINDOW)].shape == (2, 7)
    meta = vllm_metadata(store, WINDOW, batch, sentinel=sentinel)
    assert (meta.block_table.shape, meta.block_table.dtype) == ((2, 11), torch.int32)
    # Position 170 sees 151 and on: blocks 9 and 10. The new rows 170, 171 and 172 lie in block 10.
    slots = store.slots_of(WINDOW, batch, np.array([[151, 160], [0, 3]]))
    assert meta.block_table[0].tolist() == [sentinel] * 9 + (slots[0] // 16).tolist()
    assert meta.block_table[1].tolist() == [int(slots[1, 0]) // 16, *[sentinel] * 10]
    assert meta.window_left == 19
    assert [slot // 16 for slot in meta.slot_mapping.tolist()] == [int(meta.block_table[0, 10])] * 3 + [
        int(meta.block_table[1, 0])
    ]


def test_every_step_of_a_window_finds_its_rows_by_column() -> None:
    store = gqa_store()
    (seq_id,) = prefill(store, range(3))
    view = store.page_view(WINDOW).tensor("k")
    for token in range(0, 200, 7):
        batch = store.extend([seq_id], 7)
        store.write(WINDOW, batch, *torch.arange(token, token + 7).to(BF16)[:, None, None].repeat(2, 1, 2, 64)[:, :7])
        table = vllm_metadata(store, WINDOW, batch).block_table[0]
        position = np.arange(int(store.gather_starts(WINDOW, batch)[0]), int(batch.seq_lens[0]))
        rows = view[table[position // 16].long(), position % 16]
        assert torch.equal(rows.view(torch.int16), store.gather(WINDOW, batch)[0].view(torch.int16))
        store.commit(batch, np.zeros(7, int))


def test_lengths_count_rows_where_a_row_is_several_tokens() -> None:
    spec = kvstore.latent(block_size=64, tokens_per_row=4, dtype=BF16)
    store = store_of({LATENT: spec}, 40, max_length=512, max_tokens_per_step=512)
    seq_ids = prefill(store, range(70), range(100, 103))
    batch = store.extend(seq_ids, 1)
    meta = vllm_metadata(store, LATENT, batch)
    assert (meta.seq_lens.tolist(), meta.max_seq_len, meta.block_table.shape) == ([17, 1], 17, (2, 2))
    assert meta.slot_mapping.tolist() == [-1, int(meta.block_table[1, 0]) * 16]  # only token 3 closes a row
    store.commit(batch, [0, 0])
    batch = store.extend(seq_ids, 2)
    with pytest.raises(
        ValueError, match=r"a row of 'layers.2.attn' stands for 4 tokens and vllm counts .*, got 4 tokens"
    ):
        vllm_metadata(store, LATENT, batch)


@pytest.mark.parametrize("layer", [FULL, WINDOW])
def test_the_tensors_of_a_graph_stay_where_they_are(layer: str) -> None:
    store = gqa_store()
    seq_ids = prefill(store, range(60), range(100, 103))
    graph, seen, table = store.graph_batch(4), [], torch.zeros(4, 32, dtype=torch.int32)
    for _ in range(140):
        batch = store.extend(seq_ids, 1, graph=graph)
        meta = vllm_metadata(store, layer, batch, out=table)
        fixed = (meta.block_table, meta.slot_mapping, meta.seq_lens, meta.query_start_loc)
        seen.append([(tensor.data_ptr(), tensor.shape) for tensor in fixed])
        assert (meta.max_query_len, meta.max_seq_len, meta.num_actual_tokens) == (1, 512, 2)
        assert (meta.seq_lens[2:].tolist(), meta.slot_mapping[2:].tolist()) == ([0, 0], [-1, -1])
        assert not meta.block_table[2:].any()
        store.commit(batch, [0, 0])
    assert all(entry == seen[0] for entry in seen)
    batch = store.extend(seq_ids, 1, graph=graph)
    if layer == FULL:
        plain = vllm_metadata(store, layer, batch).block_table
        assert plain.data_ptr() == batch.block_table[store.plan.group_index(FULL)].data_ptr()
    with pytest.raises(ValueError, match=r"out: expected int32 \[4, 32\] on cpu, got torch.int32 \[4, 31\] on cpu"):
        vllm_metadata(store, layer, batch, out=table[:, 1:])


# FlashInfer


def test_flashinfer_lists_pages_and_hands_out_strided_views() -> None:
    store = gqa_store()
    batch = store.extend(prefill(store, range(40), range(100, 117)), [3, 1])
    meta = flashinfer_metadata(store, FULL, batch)
    table = batch.block_table[store.plan.group_index(FULL)]
    assert meta.qo_indptr.tolist() == [0, 3, 4]
    assert meta.paged_kv_indptr.tolist() == [0, 3, 5]
    assert meta.paged_kv_indices.tolist() == [*table[0, :3].tolist(), *table[1, :2].tolist()]
    assert (meta.paged_kv_last_page_len.tolist(), meta.page_size, meta.window_left) == ([11, 2], 16, -1)
    assert (meta.batch_indices.tolist(), meta.positions.tolist()) == ([0, 0, 0, 1], [40, 41, 42, 17])
    index = (meta.qo_indptr, meta.paged_kv_indptr, meta.paged_kv_indices, meta.paged_kv_last_page_len)
    assert {tensor.dtype for tensor in (*index, meta.batch_indices, meta.positions)} == {torch.int32}
    # A row of K is 2 * 64 * 2 = 256 B; a page 16 of K, then 16 of V, 8,192 B: 4,096 elements to the next block.
    keys, values = meta.paged_kv
    assert (tuple(keys.shape), keys.stride()) == ((120, 16, 2, 64), (4096, 128, 64, 1))
    assert (tuple(values.shape), values.stride()) == ((120, 16, 2, 64), (4096, 128, 64, 1))
    assert values.data_ptr() - keys.data_ptr() == 4096
    head_major = flashinfer_metadata(store, FULL, batch, "HND")
    assert head_major.kv_layout == "HND"
    assert [tensor.stride() for tensor in head_major.paged_kv] == [(4096, 64, 128, 1)] * 2
    assert tuple(head_major.paged_kv[0].shape) == (120, 2, 16, 64)
    assert head_major.paged_kv[1].data_ptr() == values.data_ptr()


def test_in_a_wider_block_the_page_stride_is_the_block() -> None:
    specs = {
        FULL: kvstore.full_attention(2, 64, dtype=BF16),
        WINDOW: kvstore.sliding_window(8, 64, dtype=BF16, window=20),
    }
    store = store_of(specs, 30, layout="overlay")
    batch = store.extend(prefill(store, range(20)), 1)
    keys, values = flashinfer_metadata(store, FULL, batch).paged_kv
    assert keys.stride() == values.stride() == (16384, 128, 64, 1)  # the other layer's page has 32,768 B


def test_flashinfer_appends_where_the_store_would_write() -> None:
    """The append kernel's address rule: page indices[indptr[b] + position // page], row position % page."""
    store = gqa_store()
    seq_ids = prefill(store, range(60), range(100, 103))
    run(store, seq_ids[:1], 50, 60)
    batch = store.extend(seq_ids, [9, 2])
    for layer, first in ((FULL, 170), (WINDOW, 170 - 144)):  # position 170 sees 151 and on, in the page from 144 on
        meta = flashinfer_metadata(store, layer, batch)
        assert meta.positions.tolist() == [*range(first, first + 9), 3, 4]
        page = meta.paged_kv_indptr[meta.batch_indices.long()] + meta.positions // 16
        slots = meta.paged_kv_indices[page.long()].long() * 16 + meta.positions % 16
        assert torch.equal(slots, store.slot_mapping(layer, batch))
        lengths = (meta.paged_kv_indptr.diff() - 1) * 16 + meta.paged_kv_last_page_len
        assert lengths.tolist() == [first + 9, 5]
    store.commit(batch, np.zeros(11, int))
    padded = flashinfer_metadata(store, WINDOW, store.extend(seq_ids, 1, pad_to=4))
    assert padded.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert padded.paged_kv_indptr.diff().tolist() == [2, 1, 0, 0]  # position 179 sees 160 and on
    assert padded.paged_kv_last_page_len.tolist() == [4, 6, 0, 0]
    assert (padded.batch_indices.tolist(), padded.positions.tolist()) == ([0, 1], [19, 5])


def test_flashinfer_mla_sees_nope_and_rope_of_one_row() -> None:
    store = latent_store()
    batch = store.extend(prefill(store, range(130), range(200, 203)), 1)
    meta = flashinfer_mla_metadata(store, LATENT, batch)
    table = batch.block_table[store.plan.group_index(LATENT)]
    assert (meta.qo_indptr.tolist(), meta.kv_indptr.tolist()) == ([0, 1, 2], [0, 3, 4])
    assert meta.kv_indices.tolist() == [*table[0, :3].tolist(), int(table[1, 0])]
    assert (meta.kv_len_arr.tolist(), meta.kv_len_arr.dtype, meta.page_size) == ([131, 4], torch.int32, 64)
    # The other page has 128 rows of 2 * 2 * 128 * 2 B = 131,072 B: 65,536 bf16 elements.
    assert (tuple(meta.ckv.shape), meta.ckv.stride()) == ((40, 64, 512), (65536, 576, 1))
    assert (tuple(meta.kpe.shape), meta.kpe.stride()) == ((40, 64, 64), (65536, 576, 1))
    assert meta.kpe.data_ptr() - meta.ckv.data_ptr() == 1024


# FlashMLA


def test_flash_mla_takes_the_tensors_of_the_batch() -> None:
    store = latent_store()
    batch = store.extend(prefill(store, range(130), range(200, 203)), 2)
    meta = flash_mla_metadata(store, LATENT, batch)
    assert (tuple(meta.k_cache.shape), meta.k_cache.stride(), meta.k_cache.dtype) == (
        (40, 64, 1, 576),
        (65536, 576, 576, 1),
        BF16,
    )
    assert meta.block_table is batch.block_table[store.plan.group_index(LATENT)]
    assert (meta.block_table.dtype, meta.block_table.stride(1)) == (torch.int32, 1)
    assert (meta.cache_seqlens.tolist(), meta.cache_seqlens.dtype) == ([132, 5], torch.int32)
    assert (meta.s_q, meta.head_dim_v) == (2, 512)
    store.commit(batch, np.zeros(4, int))
    uneven = store.extend(batch.seq_ids, [2, 1])
    with pytest.raises(ValueError, match=r"batch: expected as many new tokens in each sequence, .*, got \[2, 1\]"):
        flash_mla_metadata(store, LATENT, uneven)


FP8_ROWS = {
    "656": (LayerSpec("latent", 64, fp8_ds_mla_format(), block_stride_multiple=656), (64, 656, 41984)),
    "584": (LayerSpec("latent", 64, dsv4_format(), block_stride_multiple=576), (64, 584, 37440)),
    "584, 2 rows": (LayerSpec("latent", 256, dsv4_format(), 128, block_stride_multiple=576), (2, 584, 1728)),
    "528": (LayerSpec("latent", 64, mxfp8_latent_format(), block_stride_multiple=528), (64, 528, 33792)),
}


@pytest.mark.parametrize("rows", FP8_ROWS)
def test_sparse_caches_are_bytes_of_the_right_shape(rows: str) -> None:
    spec, (page, row_bytes, stride) = FP8_ROWS[rows]
    plan = kvstore.plan_cache({LATENT: spec}, num_frames=4)
    place = plan.placements[LATENT]
    assert place.block_stride_bytes == stride
    memory = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    cache = row_bytes_view(PageView(memory, place.offset_bytes, stride, 4, page, spec.format))
    assert (tuple(cache.shape), cache.stride(), cache.dtype) == (
        (4, page, 1, row_bytes),
        (stride, row_bytes, row_bytes, 1),
        torch.uint8,
    )


def test_a_sparse_cache_inside_a_shared_block_finds_its_bytes() -> None:
    """Anchors of the formats: 656 bytes, stride 41,984, page 2, token 1 starts at 84,624; and behind an offset."""
    memory = torch.zeros(8 * 62976, dtype=torch.uint8)
    dense = row_bytes_view(PageView(memory, 0, 41984, 4, 64, fp8_ds_mla_format()))
    assert dense[2, 1].data_ptr() - memory.data_ptr() == 84624
    shared = row_bytes_view(PageView(memory[16:], 48, 62976, 4, 64, fp8_ds_mla_format()))  # 96 rows a block
    assert shared[2, 1].data_ptr() - memory.data_ptr() == 16 + 48 + 2 * 62976 + 656


@pytest.fixture
def fp8_store(monkeypatch: pytest.MonkeyPatch) -> KVStore:
    """A store of 656-byte rows, 48 of them between two pages of 64. Its arena has no kernels for them, but bytes."""
    monkeypatch.setattr("kvstore.arena.ROW_DTYPES", (BF16, torch.float32, torch.float8_e4m3fn))
    spec = LayerSpec("latent", 64, fp8_ds_mla_format(), padded_page_bytes=112 * 656, block_stride_multiple=656)
    return store_of({LATENT: spec}, 20, max_length=512, max_tokens_per_step=512)


def test_sparse_indices_name_rows_and_pad_to_tiles(fp8_store: KVStore) -> None:
    store = fp8_store
    batch = store.extend(prefill(store, range(130), range(200, 203)), 1)
    meta = flash_mla_sparse_metadata(store, LATENT, batch)
    assert (tuple(meta.k_cache.shape), meta.k_cache.stride()) == ((20, 64, 1, 656), (73472, 656, 656, 1))
    rows = torch.tensor([[0, 65, 130, 131, -1], [3, 4, 1, -7, 0]], dtype=torch.int32)
    a, b, c = meta.block_table[0, :3].tolist()
    d = int(meta.block_table[1, 0])
    index = flash_mla_indices(store, LATENT, batch, rows)
    assert (tuple(index.shape), index.dtype) == ((2, 1, 64), torch.int32)
    assert index[0, 0].tolist() == [64 * a, 64 * b + 1, 64 * c + 2, -1, -1, *[-1] * 59]
    assert index[1, 0].tolist() == [64 * d + 3, -1, 64 * d + 1, -1, 64 * d, *[-1] * 59]
    assert torch.equal(index[:, 0, :5].long(), store.slots_of(LATENT, batch, rows))
    flat = flash_mla_indices(store, LATENT, batch, rows, flat=True)  # 112 rows from one block to the next
    assert flat[0, 0, :3].tolist() == [112 * a, 112 * b + 1, 112 * c + 2]
    many = flash_mla_indices(store, LATENT, batch, torch.zeros(2, 3, 65, dtype=torch.int64))
    assert tuple(many.shape) == (2, 3, 128)
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"rows: expected int32 or int64 \[2, s_q, k\], got "):
            flash_mla_indices(store, LATENT, batch, wrong)


def test_sparse_indices_of_a_window_and_of_a_stride_without_row_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.arena.ROW_DTYPES", (BF16, torch.uint8, torch.float8_e4m3fn))
    window = LayerSpec("latent_window", 64, dsv4_format(), window=100, block_stride_multiple=576)
    store = store_of({LATENT: window}, 40, max_length=1024, max_tokens_per_step=256, max_in_flight=1)
    seq_ids = prefill(store, range(250), range(300, 303))
    run(store, seq_ids[:1], 250, 250)
    batch = store.extend(seq_ids, [2, 2])  # 750 and 751 see 651 and on; the ring has used its columns again
    assert batch.block_table[0].shape[1] < 751 // 64
    rows = torch.tensor([[650, 651, 751, 752], [0, 4, 5, -1]])
    index = flash_mla_indices(store, LATENT, batch, rows[:, None].repeat(1, 2, 1))
    wanted = store.slots_of(LATENT, batch, rows)
    assert ((wanted >= 0).tolist(), wanted.shape) == ([[False, True, True, False], [True, True, False, False]], (2, 4))
    assert torch.equal(index[:, :, :4].long(), wanted[:, None].repeat(1, 2, 1))


# Refusals


CALLS = {
    "vllm": vllm_metadata,
    "flashinfer": flashinfer_metadata,
    "flashinfer_mla": flashinfer_mla_metadata,
    "flash_mla": flash_mla_metadata,
    "flash_mla_sparse": flash_mla_sparse_metadata,
    "flex": flex_metadata,
}


@pytest.mark.parametrize("reader", CALLS)
def test_bad_calls(reader: str) -> None:
    store = store_of(mixed_layers(), 60)
    batch = store.extend(prefill(store, range(3)), 1)
    with pytest.raises(ValueError, match=r"layer: expected a layer of the plan \(.*\), got 'nowhere'"):
        CALLS[reader](store, "nowhere", batch)
    with pytest.raises(
        ValueError,
        match=rf"layer: 'layers.2.state' cannot be read by {reader}: kind: expected .*, got state: it has no rows",
    ):
        CALLS[reader](store, "layers.2.state", batch)
    with pytest.raises(ValueError, match=rf"cannot be read by {reader}: kind: expected .*, got ring: gather its rows"):
        CALLS[reader](store, "layers.3.ring", batch)


GOOD = {
    "vllm": kvstore.full_attention(2, 64, dtype=BF16),
    "flashinfer": kvstore.full_attention(2, 64, dtype=BF16),
    "flashinfer_mla": kvstore.latent(),
    "flash_mla": kvstore.latent(),
    "flash_mla_sparse": FP8_ROWS["656"][0],
    "flex": kvstore.full_attention(2, 64, dtype=BF16),
}


@pytest.mark.parametrize("reader", CALLS)
def test_finished_batches_other_things_and_stores_without_bytes(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.arena.ROW_DTYPES", (BF16, torch.float32, torch.float8_e4m3fn))
    store = store_of({FULL: GOOD[reader]}, 20, max_length=128)
    batch = store.extend(prefill(store, range(3)), 1)
    CALLS[reader](store, FULL, batch)
    with pytest.raises(TypeError, match=r"batch: expected a Batch from extend\(\), got dict"):
        CALLS[reader](store, FULL, {})
    store.commit(batch, [0])
    with pytest.raises(ValueError, match="batch: expected an unfinished batch"):
        CALLS[reader](store, FULL, batch)
    books = store_of({FULL: GOOD[reader]}, 20, device=None, max_length=128)
    batch = books.extend(prefill(books, range(3)), 1)
    with pytest.raises(ValueError, match="device: this store keeps books only"):
        CALLS[reader](books, FULL, batch)


@pytest.mark.parametrize("reader", ["vllm", "flashinfer", "flex"])
def test_rows_that_only_the_batch_has_are_not_in_the_pages(reader: str) -> None:
    store = gqa_store(stored="tail")
    seq_ids = prefill(store, range(60), range(100, 103))
    batch = store.extend(seq_ids, [40, 1])
    with pytest.raises(
        ValueError, match=r"stored='tail' leaves rows of a longer step out of the pages .*, got 41 tokens"
    ):
        CALLS[reader](store, WINDOW, batch)
    CALLS[reader](store, FULL, batch)
    store.commit(batch, np.zeros(41, int))
    CALLS[reader](store, WINDOW, store.extend(seq_ids, 1))


def test_arguments() -> None:
    store = gqa_store()
    batch = store.extend(prefill(store, range(3)), 1)
    with pytest.raises(ValueError, match="sentinel: expected 0 or -1, got 7"):
        vllm_metadata(store, FULL, batch, sentinel=7)
    with pytest.raises(ValueError, match="reader: expected 'vllm' or 'flash_attention', got 'flex'"):
        vllm_metadata(store, FULL, batch, reader="flex")
    with pytest.raises(
        ValueError, match=r"cannot be read by flash_attention: page: expected a multiple of 256 rows, got 16"
    ):
        vllm_metadata(store, FULL, batch, reader="flash_attention")
    with pytest.raises(ValueError, match="kv_layout: expected 'NHD' or 'HND', got 'NHDC'"):
        flashinfer_metadata(store, FULL, batch, "NHDC")


def test_an_alias_reads_the_pages_of_its_owner() -> None:
    specs = {FULL: kvstore.full_attention(2, 64, dtype=BF16), WINDOW: kvstore.Alias(FULL)}
    store = store_of(specs, 20)
    batch = store.extend(prefill(store, range(20)), 1)
    mine, other = (flashinfer_metadata(store, layer, batch).paged_kv[0] for layer in specs)
    assert mine.data_ptr() == other.data_ptr()
