"""Arguments for kernels with block tables or page lists: numbers and strides worked out by hand."""

import numpy as np
import pytest
import torch
from reader_stores import BF16, FULL, LATENT, WINDOW, gqa_store, latent_store, run
from store_cases import prefill, store_of

import kvstore
from kvstore import LayerSpec
from kvstore.integrations.metadata import flashinfer_metadata, flashinfer_mla_metadata, vllm_metadata
from kvstore_kernels import kv_format

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


@pytest.mark.parametrize(("sentinel", "rollback", "width"), [(0, 0, 7), (-1, 0, 7), (0, 40, 9)])
def test_the_table_of_a_window_is_unrolled_into_logical_columns(sentinel: int, rollback: int, width: int) -> None:
    store = gqa_store(rollback=rollback)  # with it, blocks are held that no token sees any more
    seq_ids = prefill(store, range(60), range(100, 103))
    run(store, seq_ids[:1], 50, 60)
    batch = store.extend(seq_ids, [3, 1])  # 173 and 4 tokens: 11 columns of 16, in a ring of fewer
    assert batch.block_table[store.plan.group_index(WINDOW)].shape == (2, width)
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


def test_the_table_of_a_window_is_the_batch_s_own_while_it_has_not_wrapped() -> None:
    store = gqa_store()
    batch = store.extend(prefill(store, range(60)), 3)
    table = vllm_metadata(store, WINDOW, batch).block_table
    assert (table.data_ptr(), table.shape) == (batch.block_table[store.plan.group_index(WINDOW)].data_ptr(), (1, 4))


def test_a_batch_of_padding_alone() -> None:
    store = gqa_store()
    batch = store.extend(np.zeros(0, np.int64), 1, pad_to=3)
    meta = vllm_metadata(store, FULL, batch)
    assert (meta.max_query_len, meta.max_seq_len, meta.num_actual_tokens) == (1, 0, 0)
    assert (meta.seq_lens.tolist(), meta.slot_mapping.tolist()) == ([0, 0, 0], [-1, -1, -1])
    assert not meta.block_table.any()
    pages = flashinfer_metadata(store, FULL, batch)
    assert (pages.paged_kv_indptr.tolist(), pages.positions.tolist()) == ([0, 0, 0, 0], [])


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


def test_a_window_over_rows_that_are_all_kept_counts_positions_from_the_first_token() -> None:
    spec = LayerSpec("full", 16, kv_format(2, 64, dtype=BF16), window=20)
    store = store_of({FULL: spec}, 20)
    meta = flashinfer_metadata(store, FULL, store.extend(prefill(store, range(60)), 1))
    assert (meta.paged_kv_indptr.tolist(), meta.positions.tolist(), meta.window_left) == ([0, 4], [60], 19)


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
