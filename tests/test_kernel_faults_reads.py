"""Faults that reads of other stores have had, by number (O36 to O46), with the figures that triggered them."""

import math

import pytest
import torch

import kvstore
from kvstore import KVStore
from kvstore_kernels import (
    PageView,
    compute_slot_mapping,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    kv_format,
    latent_format,
    merge_partials,
    mla_decode,
    write_rows,
)
from tests.attention_oracle import PagedBatch, attend, expect_within_budget, paged_batch
from tests.cases import BACKENDS, POISON, make_view, random_parts, sparse_memory, to_bytes

FP32 = torch.float32
INF, NAN = math.inf, math.nan
FORMATS = {"gqa": kv_format(2, 16, dtype=FP32), "mla": latent_format(24, 16, FP32)}
SCALE = 0.25

reads = pytest.mark.parametrize("read", FORMATS)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def decode(read: str, batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    op = gqa_decode if read == "gqa" else mla_decode
    inputs = (batch.view, batch.block_table, batch.row_lens, batch.q)
    return op(*inputs, softmax_scale=SCALE, backend=backend, **options)


def gather(
    view: PageView, table: torch.Tensor, row_len: int, backend: str, start: int = 0, **options: object
) -> tuple[torch.Tensor, ...]:
    """The rows of the only sequence of a table."""
    return gather_rows(
        view,
        table,
        torch.tensor([0, row_len], dtype=torch.int32),
        num_rows=row_len,
        start=torch.tensor([start], dtype=torch.int32),
        backend=backend,
        **options,
    )


def table_of(*block_ids: int) -> torch.Tensor:
    return torch.tensor([block_ids], dtype=torch.int32)


@reads
def test_o36_nan_in_the_tail_of_the_last_page(read: str, backend: str) -> None:
    """Pages of 4, length 13: slots 13 to 15 hold NaN."""
    with_nan, with_zeros = (paged_batch(FORMATS[read], 4, (13,), 4, fill=fill) for fill in (POISON, 0))
    last_page = with_nan.view.tensor(FORMATS[read].parts[-1].name)[with_nan.block_table[0, 3].long()]
    assert last_page[1:].isnan().all()
    got = decode(read, with_nan, backend)
    assert got[0].isfinite().all()
    for one, other in zip(got, decode(read, with_zeros, backend), strict=True):
        assert torch.equal(one, other)


def test_o36_a_recycled_page_of_fp8_rows(backend: str) -> None:
    """The page held bytes that are NaN as e4m3 codes and as fp32 scales; 13 rows are written over them."""
    rows = torch.randn(13, 1, 576, generator=torch.Generator().manual_seed(0))
    fetched = []
    for fill in (POISON, 0):
        view = make_view(fp8_ds_mla_format(), 4, 5, fill=fill)
        write_rows(view, torch.arange(4, 17), rows, backend=backend)
        fetched.append(gather(view, table_of(1, 2, 3, 4), 13, backend)[0])
    assert fetched[0].isfinite().all()
    assert torch.equal(*fetched)


@pytest.mark.parametrize("num_parts", [2, 3, 20])
def test_o37_empty_parts_merge_into_an_empty_one(num_parts: int, backend: str) -> None:
    out, lse = merge_partials(torch.zeros(1, 1, num_parts, 4), torch.full((1, 1, num_parts), -INF), backend=backend)
    assert out.tolist() == [[[0.0] * 4]]
    assert lse.tolist() == [[-INF]]


@reads
def test_o38_a_read_of_nothing_leaves_the_other_part_as_it_is(read: str, backend: str) -> None:
    batch = paged_batch(FORMATS[read], 16, (20,), 4)
    real = decode(read, batch, backend)
    batch.row_lens[0] = 0
    empty = decode(read, batch, backend)
    assert not empty[0].any()
    assert (empty[1] == -INF).all()
    for parts in ((empty, real), (real, empty)):
        stacked = [torch.stack([part[idx] for part in parts], 2) for idx in (0, 1)]
        for merged, wanted in zip(merge_partials(*stacked, backend=backend), real, strict=True):
            assert torch.equal(merged, wanted)


def test_o39_page_7768_of_480_x_576_values(backend: str) -> None:
    """7,768 x 276,480 = 2,147,696,640 elements, past 2^31."""
    batch = paged_batch(latent_format(576, 512), 480, (485,), 1, gap_bytes=0)
    stride = batch.view.page_bytes
    assert 7_768 * stride // 2 == 2_147_696_640
    view = PageView(sparse_memory(7_769 * stride), 0, stride, 7_769, 480, batch.view.format)
    rows = batch.keys[0]
    view.tensor("latent")[7_768], view.tensor("latent")[3, :5] = rows[:480], rows[480:]
    table = table_of(7_768, 3)
    (got,) = gather(view, table, 485, backend)
    assert torch.equal(got, rows)
    far = PagedBatch(view, table, batch.row_lens, batch.q, batch.keys, batch.values)
    expect_within_budget(decode("mla", far, backend), batch.exact(SCALE))


@pytest.mark.parametrize("rows_per_block", [16, 544, 2048])
@reads
def test_o40_pages_of_544_and_2048_give_what_pages_of_16_give(read: str, rows_per_block: int, backend: str) -> None:
    batch = paged_batch(FORMATS[read], rows_per_block, (545,), 4)
    small = paged_batch(FORMATS[read], 16, (545,), 4)
    assert torch.equal(batch.keys[0], small.keys[0])
    assert torch.equal(batch.q, small.q)
    expect_within_budget(decode(read, batch, backend), small.exact(SCALE))


@pytest.mark.parametrize("rows_per_block", [1, 16, 64])
@reads
def test_o41_33_tokens_in_pages_of_1_16_and_64(read: str, rows_per_block: int, backend: str) -> None:
    batch = paged_batch(FORMATS[read], rows_per_block, (33,), 4)
    single = paged_batch(FORMATS[read], 1, (33,), 4)
    assert torch.equal(batch.keys[0], single.keys[0])
    fetched = gather(batch.view, batch.block_table, 33, backend)
    assert torch.equal(fetched[0], single.keys[0])
    assert torch.equal(fetched[-1][..., : single.values[0].shape[2]], single.values[0])
    expect_within_budget(decode(read, batch, backend), single.exact(SCALE))


def test_o42_a_gather_that_starts_behind_the_table(backend: str) -> None:
    """Table [1, 2], pages of 64, start 128, length 65: there is no column 2, though a block id lies there in memory."""
    view = make_view(kv_format(1, 16), 64, 4)
    table = table_of(1, 2, 3, 3)[:, :2]
    for part in gather(view, table, 65, backend, start=128):
        assert not part.any()
    k, v = gather(view, table, 3, backend, start=126)
    assert to_bytes(k[:2]).any(1).all()
    assert not k[2].any()
    assert not v[2].any()


@reads
def test_o42_a_read_past_the_table_sees_the_rows_there_are(read: str, backend: str) -> None:
    batch = paged_batch(FORMATS[read], 64, (193,), 4)
    cut = PagedBatch(batch.view, batch.block_table[:, :2], batch.row_lens, batch.q, batch.keys, batch.values)
    exact = attend(batch.q, [batch.keys[0][:128]], [batch.values[0][:128]], SCALE)
    expect_within_budget(decode(read, cut, backend), exact)


def test_o43_a_table_row_used_again_has_no_entries_of_its_last_user(backend: str) -> None:
    """Pages of 16: a row of 4,096 ids is freed and taken by a sequence of 4; position 64 lies in column 4."""
    specs = {"L0": kvstore.full_attention(1, 4, dtype=FP32, block_size=16)}
    num_tokens = 4_096 * 16
    limits = {"max_sequences": 2, "max_length": num_tokens, "max_tokens_per_step": num_tokens}
    store = KVStore(kvstore.plan_cache(specs, num_frames=4_200), "cpu", **limits)
    seq_ids = store.open([[1]]).seq_ids
    batch = store.extend(seq_ids, [num_tokens])
    assert (batch.block_table[0][0, :4_096] > 0).all()
    store.commit(batch, [1] * num_tokens)
    store.release(seq_ids)
    batch = store.extend(store.open([[2], [3]]).seq_ids, [64, 96])
    table = batch.block_table[0]
    assert (table > 0).sum(1).tolist() == [4, 6]
    assert table[0, 4:].tolist() == [0, 0]
    positions, seq_idx = torch.tensor([63, 64, 65]), torch.zeros(3, dtype=torch.int32)
    slots = compute_slot_mapping(table, positions, seq_idx, 16, backend=backend)
    assert slots.tolist() == [int(table[0, 3]) * 16 + 15, -1, -1]
    view = store.page_view("L0")
    before = view.memory.clone()
    write_rows(view, slots[1:], *random_parts(view.format, 2), backend=backend)
    assert torch.equal(view.memory, before)


@reads
def test_o43_a_read_ends_at_its_length_whatever_the_table_names_behind_it(read: str, backend: str) -> None:
    batch = paged_batch(FORMATS[read], 16, (64, 96), 4)
    wanted = decode(read, batch, backend)
    batch.block_table[0, 4:] = batch.block_table[1, : batch.block_table.shape[1] - 4]
    for one, other in zip(decode(read, batch, backend), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_splits", range(1, 9))
@reads
def test_o44_a_sink_counts_once_for_any_number_of_splits(read: str, num_splits: int, backend: str) -> None:
    """Sink and key have logit 0: the weight of the key is 1/2, and with a sink for each of two splits it were 1/3."""
    batch = paged_batch(FORMATS[read], 4, (1,), 4)
    batch.q.zero_()
    out, lse = decode(read, batch, backend, sinks=torch.zeros(4), num_splits=num_splits)
    value = batch.values[0][0].repeat_interleave(4 // batch.values[0].shape[1], 0)
    torch.testing.assert_close(out[0], value / 2, rtol=2.0**-20, atol=0)
    assert not lse.any()


@pytest.mark.parametrize("num_parts", range(1, 9))
def test_o44_parts_with_the_key_in_the_last_one(num_parts: int, backend: str) -> None:
    partial_out, partial_lse = torch.full((1, 1, num_parts, 2), NAN), torch.full((1, 1, num_parts), -INF)
    partial_out[0, 0, -1], partial_lse[0, 0, -1] = 1.0, 0.0
    out, lse = merge_partials(partial_out, partial_lse, sinks=torch.zeros(1), backend=backend)
    assert out.tolist() == [[[0.5, 0.5]]]
    assert lse.tolist() == [[0.0]]


@pytest.mark.parametrize("fill", ["nan", "loud"])
@reads
def test_o45_length_64_in_a_block_of_128(read: str, fill: str, backend: str) -> None:
    """Positions 64 to 127 hold NaN, or keys that would take all the weight."""
    batch = paged_batch(FORMATS[read], 128, (64,), 4)
    if fill == "loud":
        for part in FORMATS[read].parts:
            batch.view.tensor(part.name)[batch.block_table[0, 0].long(), 64:] = 1e3
    expect_within_budget(decode(read, batch, backend), batch.exact(SCALE))


@reads
def test_o46_padding_rows_of_the_batch_give_0_and_leave_no_nan(read: str, backend: str) -> None:
    """8 rows, lengths of rows 5 to 7 are 0, their queries NaN; the outputs held NaN before."""
    batch = paged_batch(FORMATS[read], 16, (9, 20, 1, 33, 16, 0, 0, 0), 4)
    exact = batch.exact(SCALE)
    batch.q[5:] = NAN
    out, lse = torch.full((8, 4, 16), NAN), torch.full((8, 4), NAN)
    before = batch.view.memory.clone()
    decode(read, batch, backend, out=out, lse=lse)
    expect_within_budget((out, lse), exact)
    assert not out[5:].any()
    assert (lse[5:] == -INF).all()
    assert torch.equal(batch.view.memory, before)
