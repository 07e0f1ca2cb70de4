"""gqa_decode, Triton under the interpreter and the reference, against fp64 attention."""

import pytest
import torch

from kvstore_kernels import PageView, RowFormat, RowPart, gqa_decode, kv_format
from tests.attention_oracle import PagedBatch, attend, expect_within_budget, paged_batch
from tests.cases import BACKENDS, sparse_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def read(batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return gqa_decode(batch.view, batch.block_table, batch.row_lens, batch.q, backend=backend, **options)


def scale_of(batch: PagedBatch) -> float:
    return batch.q.shape[2] ** -0.5


def test_the_budget_tells_one_row_from_none() -> None:
    batch = paged_batch(kv_format(1, 64), 16, (200,), 2)
    one_less = attend(batch.q, [batch.keys[0][1:]], [batch.values[0][1:]], scale_of(batch))
    for backend in BACKENDS:
        with pytest.raises(AssertionError, match=r"lse: .* of the error budget used"):
            expect_within_budget(read(batch, backend), one_less)
    with pytest.raises(AssertionError, match=r"out: .* of the error budget used"):
        expect_within_budget((one_less.out, batch.exact(scale_of(batch)).lse), batch.exact(scale_of(batch)))


# dtype, rows per block, head dim of K and V, KV heads, queries per KV head, K and V in one row
SHAPES = [
    (BF16, 1, 64, 64, 3, 3, False),
    (FP32, 16, 64, 64, 3, 3, False),
    (FP16, 48, 72, 40, 2, 1, True),
    (BF16, 64, 80, 80, 1, 7, True),
    (FP32, 784, 96, 96, 2, 2, True),
    (FP16, 16, 128, 128, 1, 4, False),
    (BF16, 16, 192, 128, 1, 5, False),
    (BF16, 48, 576, 576, 1, 2, False),
    (FP32, 1, 9, 5, 1, 2, True),
    (FP16, 64, 64, 96, 1, 70, False),
]


@pytest.mark.parametrize(
    ("dtype", "rows_per_block", "dim_k", "dim_v", "num_kv_heads", "queries_per_kv", "packed"),
    [pytest.param(*shape, id="-".join(map(str, shape)).removeprefix("torch.")) for shape in SHAPES],
)
def test_every_head_size_dtype_and_block_size_is_within_budget(
    backend: str,
    dtype: torch.dtype,
    rows_per_block: int,
    dim_k: int,
    dim_v: int,
    num_kv_heads: int,
    queries_per_kv: int,
    packed: bool,
) -> None:
    row_format = kv_format(num_kv_heads, dim_k, dim_v, dtype, packed=packed)
    batch = paged_batch(row_format, rows_per_block, (70, 1, 33), num_kv_heads * queries_per_kv)
    got = read(batch, backend, num_splits=2)
    assert got[0].dtype is dtype
    assert got[1].dtype is FP32
    expect_within_budget(got, batch.exact(scale_of(batch)))


def test_a_format_may_leave_gaps_between_its_parts(backend: str) -> None:
    """Records of 16 + 128 + 32 + 64 + 16 bytes: K and V lie neither at the start nor next to each other."""
    parts = (RowPart("k", BF16, 2, 32, offset_bytes=16), RowPart("v", BF16, 2, 16, offset_bytes=176))
    batch = paged_batch(RowFormat("spaced", parts, (256,)), 16, (40,), 4)
    expect_within_budget(read(batch, backend), batch.exact(scale_of(batch)))


@pytest.mark.parametrize("rows_per_block", [1, 16, 48, 64, 544, 2048])
def test_o40_o41_the_block_size_does_not_change_the_result(backend: str, rows_per_block: int) -> None:
    batch = paged_batch(kv_format(2, 64, dtype=FP32), rows_per_block, (33, 130), 4)
    one_row_blocks = paged_batch(kv_format(2, 64, dtype=FP32), 1, (33, 130), 4)
    assert torch.equal(batch.keys[1], one_row_blocks.keys[1])
    expect_within_budget(read(batch, backend), one_row_blocks.exact(scale_of(batch)))


@pytest.mark.parametrize("row_len", [15, 16, 17, 63, 64, 65], ids="{}rows".format)
def test_o45_lengths_around_the_block_and_the_tile(backend: str, row_len: int) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (row_len,), 3)
    expect_within_budget(read(batch, backend), batch.exact(scale_of(batch)))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 6, 7, 8, None])
def test_any_number_of_splits_gives_the_same_output_and_lse(num_splits: int | None) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (300, 65, 0, 1), 3)
    expect_within_budget(read(batch, "triton", num_splits=num_splits), batch.exact(scale_of(batch)))


def test_the_reference_ignores_the_number_of_splits() -> None:
    batch = paged_batch(kv_format(1, 64), 16, (65, 3), 3)
    for one, other in zip(read(batch, "reference"), read(batch, "reference", num_splits=5), strict=True):
        assert torch.equal(one, other)


def test_o36_what_lies_in_rows_never_written_does_not_matter(backend: str) -> None:
    row_format = kv_format(2, 64)
    with_nan, with_zeros = (paged_batch(row_format, 16, (13, 47, 0), 4, fill=fill) for fill in (0xFF, 0))
    for one, other in zip(read(with_nan, backend), read(with_zeros, backend), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_o38_o46_a_sequence_without_rows_gives_zero_and_minus_infinity(backend: str, num_splits: int) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (0, 20, 0), 2)
    out = torch.full((3, 2, 64), torch.nan, dtype=BF16)
    lse = torch.full((3, 2), torch.nan)
    read(batch, backend, out=out, lse=lse, num_splits=num_splits)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 64, dtype=BF16))
    assert torch.equal(lse[[0, 2]], torch.full((2, 2), -torch.inf))
    expect_within_budget((out, lse), batch.exact(scale_of(batch)))


def test_a_negative_length_counts_as_none(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (0, 20), 2)
    batch.row_lens[0] = -5
    expect_within_budget(read(batch, backend), batch.exact(scale_of(batch)))
    expect_within_budget(read(batch, backend, window=64), batch.exact(scale_of(batch)))


def test_no_sequences(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (20,), 2)
    out, lse = gqa_decode(batch.view, batch.block_table[:0], batch.row_lens[:0], batch.q[:0], backend=backend)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


@pytest.mark.parametrize("bad_id", [-1, -(2**31), 2**31 - 1, "num_blocks"])
@pytest.mark.parametrize("rows_per_block", [16, 64])
def test_rows_of_an_entry_that_names_no_block_do_not_exist(
    backend: str, rows_per_block: int, bad_id: int | str
) -> None:
    batch = paged_batch(kv_format(1, 64), rows_per_block, (2 * rows_per_block + 9, 5), 2)
    batch.block_table[0, 1] = batch.view.num_blocks if bad_id == "num_blocks" else bad_id
    batch.block_table[1, 0] = -1
    keep = torch.arange(len(batch.keys[0])) // rows_per_block != 1
    rows = [(rows[0][keep], rows[1][:0]) for rows in (batch.keys, batch.values)]
    expect_within_budget(read(batch, backend), attend(batch.q, *rows, scale_of(batch)))


@pytest.mark.parametrize("rows_per_block", [16, 64])
def test_o42_rows_of_a_column_past_the_table_do_not_exist(backend: str, rows_per_block: int) -> None:
    batch = paged_batch(kv_format(1, 64), rows_per_block, (2 * rows_per_block + 9,), 2)
    wide = batch.block_table
    batch = PagedBatch(batch.view, wide[:, :2], batch.row_lens, batch.q, batch.keys, batch.values)
    cut = [[rows[0][: 2 * rows_per_block]] for rows in (batch.keys, batch.values)]
    expect_within_budget(read(batch, backend), attend(batch.q, *cut, scale_of(batch)))


def test_o43_what_a_row_of_the_table_holds_behind_its_sequence_does_not_matter(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (20, 70), 2)
    batch.block_table[0, 2:] = batch.block_table[1, : batch.block_table.shape[1] - 2]
    expect_within_budget(read(batch, backend), batch.exact(scale_of(batch)))


@pytest.mark.parametrize("row_len", [1, 19, 20, 21, 36, 85, 200], ids="{}rows".format)
@pytest.mark.parametrize("rows_per_block", [1, 16, 64])
def test_a_window_sees_its_last_rows_through_a_table_that_wraps(
    backend: str, rows_per_block: int, row_len: int
) -> None:
    batch = paged_batch(kv_format(1, 64), rows_per_block, (row_len, 7), 2, window=20)
    expect_within_budget(read(batch, backend, window=20, num_splits=2), batch.exact(scale_of(batch), window=20))


def test_a_window_as_long_as_the_sequence_changes_nothing(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (40,), 2)
    for one, other in zip(read(batch, backend), read(batch, backend, window=40), strict=True):
        assert torch.equal(one, other)


def test_a_sequence_gives_the_same_bits_anywhere_in_a_batch(backend: str) -> None:
    batch = paged_batch(kv_format(2, 64), 16, (70, 3, 0, 33), 4)
    order = torch.tensor([2, 0, 3, 1])
    permuted = PagedBatch(batch.view, batch.block_table[order], batch.row_lens[order], batch.q[order], [], [])
    plain, other = (read(each, backend, num_splits=3) for each in (batch, permuted))
    assert torch.equal(plain[0][order], other[0])
    assert torch.equal(plain[1][order], other[1])


def test_the_order_of_the_blocks_changes_no_bit() -> None:
    one, other = (paged_batch(kv_format(2, 64), 16, (70, 33), 4, block_seed=seed) for seed in (0, 1))
    assert not torch.equal(one.block_table, other.block_table)
    for left, right in zip(read(one, "triton", num_splits=2), read(other, "triton", num_splits=2), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("packed", [False, True], ids=["kv", "kv_packed"])
def test_adjoining_blocks_give_what_scattered_ones_give(packed: bool) -> None:
    batch = paged_batch(kv_format(2, 64, dtype=FP32, packed=packed), 16, (70,), 4, gap_bytes=0)
    order = batch.block_table[0, :5].long()
    for part in ("k", "v"):
        batch.view.tensor(part)[1:6] = batch.view.tensor(part)[order].clone()
    batch.block_table[0, :5] = torch.arange(1, 6)
    expect_within_budget(read(batch, "reference"), batch.exact(scale_of(batch)))


def test_o39_blocks_further_than_two_gibibytes_into_the_memory(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (40,), 2)
    stride = 2**33 + 48  # block 5 is 2^31 units of 16 bytes away, too
    far = PageView(sparse_memory(48 + 6 * stride), 48, stride, 6, 16, batch.view.format)
    for column, block_id in enumerate((5, 2, 3)):
        for part in ("k", "v"):
            far.tensor(part)[block_id] = batch.view.tensor(part)[batch.block_table[0, column]]
        batch.block_table[0, column] = block_id
    far_batch = PagedBatch(far, batch.block_table, batch.row_lens, batch.q, batch.keys, batch.values)
    expect_within_budget(read(far_batch, backend), batch.exact(scale_of(batch)))


@pytest.mark.parametrize("gap", [0, 8, 3], ids="gap{}".format)
def test_queries_may_be_a_slice_of_a_wider_tensor(backend: str, gap: int) -> None:
    batch = paged_batch(kv_format(2, 64), 16, (20, 33), 4)
    fused = torch.full((2, 4 * 64 + gap), torch.nan, dtype=BF16)
    q = fused[:, : 4 * 64].unflatten(1, (4, 64))
    q.copy_(batch.q)
    got = gqa_decode(batch.view, batch.block_table, batch.row_lens, q, backend=backend)
    expect_within_budget(got, batch.exact(scale_of(batch)))


def test_queries_need_not_be_contiguous(backend: str) -> None:
    batch = paged_batch(kv_format(2, 64), 16, (20, 33), 4)
    q = torch.full((2, 4, 128), torch.nan, dtype=BF16)[..., ::2]
    q.copy_(batch.q)
    got = gqa_decode(batch.view, batch.block_table, batch.row_lens, q, backend=backend)
    expect_within_budget(got, batch.exact(scale_of(batch)))


def test_the_table_may_be_a_slice_of_a_wider_one(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (20, 33), 2)
    wide = torch.full((2, 9), 1, dtype=torch.int32)
    wide[:, : batch.block_table.shape[1]] = batch.block_table
    table = wide[:, : batch.block_table.shape[1]]
    got = gqa_decode(batch.view, table, batch.row_lens, batch.q, backend=backend)
    expect_within_budget(got, batch.exact(scale_of(batch)))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_results_go_to_the_tensors_given(backend: str, num_splits: int) -> None:
    batch = paged_batch(kv_format(1, 64), 16, (20, 33), 2)
    out, lse = torch.empty(2, 2, 64, dtype=BF16), torch.empty(2, 2)
    got = read(batch, backend, out=out, lse=lse, num_splits=num_splits)
    assert got[0] is out
    assert got[1] is lse
    expect_within_budget((out, lse), batch.exact(scale_of(batch)))


def test_the_scale_is_the_callers(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64, dtype=FP32), 16, (33,), 2)
    expect_within_budget(read(batch, backend, softmax_scale=0.5), batch.exact(0.5))


def test_scores_of_hundreds_do_not_overflow(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64, dtype=FP32), 16, (33,), 2)
    expect_within_budget(read(batch, backend, softmax_scale=40.0), batch.exact(40.0))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("last", [2**31 - 1, 2**31 - 20])
def test_a_window_at_the_largest_length(backend: str, last: int, num_splits: int) -> None:
    """Rows at the end of the positions that 32 bits count, in a table of one column per block of the window."""
    row_format, window = kv_format(1, 64), 20
    batch = paged_batch(row_format, 16, (32,), 2)
    # Block i is in column i % 3: the positions of the last rows, one after the other, give their order.
    batch.block_table[0] = batch.block_table[0, [0, 1, 0]]
    positions = range(last - window, last)
    places = [(batch.block_table[0, p // 16 % 3].item(), p % 16) for p in positions]
    key, value = (torch.stack([batch.view.tensor(part)[place] for place in places]) for part in ("k", "v"))
    batch.row_lens[0] = last
    expected = attend(batch.q, [key], [value], scale_of(batch))
    expect_within_budget(read(batch, backend, window=window, num_splits=num_splits), expected)


@pytest.mark.parametrize("dim_v", [64, 48])
@pytest.mark.parametrize("row_len", [1, 20, 600])
def test_scores_that_are_nan_or_all_minus_infinity(backend: str, row_len: int, dim_v: int) -> None:
    batch = paged_batch(kv_format(1, 64, dim_v, dtype=FP32), 16, (row_len, row_len, row_len), 2)
    batch.q[:, :, 0] = 1.0
    keys = batch.view.tensor("k")
    blocks = batch.block_table[:, : -(-row_len // 16)].long()
    keys[blocks[0], :, :, 0] = -torch.inf
    keys[blocks[1, : 512 // 16], :, :, 0] = torch.nan
    out, lse = read(batch, backend)
    assert torch.equal(out[0], torch.zeros(2, dim_v))
    assert torch.equal(lse[0], torch.full((2,), -torch.inf))
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    plain = attend(batch.q[2:], batch.keys[2:], batch.values[2:], scale_of(batch))
    expect_within_budget((out[2:], lse[2:]), plain)


def test_an_lse_of_zero_that_is_right(backend: str) -> None:
    batch = paged_batch(kv_format(1, 64, dtype=FP32), 16, (1, 1), 2)
    batch.q[0] = 0.0
    out, lse = read(batch, backend)
    assert (lse[0] == 0).all()
    torch.testing.assert_close(out[0], batch.values[0][0].expand(2, -1))
