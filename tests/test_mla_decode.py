"""mla_decode, Triton under the interpreter and the reference, against fp64 attention."""

import pytest
import torch

from kvstore_kernels import PageView, RowFormat, RowPart, latent_format, mla_decode
from tests.attention_oracle import PagedBatch, attend, expect_within_budget, paged_batch
from tests.cases import BACKENDS, sparse_memory

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = latent_format(48, 32)
SCALE = 0.2


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def read(batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return mla_decode(
        batch.view, batch.block_table, batch.row_lens, batch.q, backend=backend, **{"softmax_scale": SCALE} | options
    )


# dtype, rows per block, latent dim, value dim, heads
SHAPES = [
    (BF16, 64, 576, 512, 16),
    (BF16, 16, 320, 256, 5),
    (FP16, 48, 512, 512, 20),
    (FP32, 1, 576, 512, 2),
    (BF16, 784, 72, 48, 70),
    (FP16, 1, 80, 72, 1),
    (FP32, 64, 96, 64, 33),
    (BF16, 1, 9, 5, 17),
]


@pytest.mark.parametrize(
    ("dtype", "rows_per_block", "latent_dim", "value_dim", "num_heads"),
    [pytest.param(*shape, id="-".join(map(str, shape)).removeprefix("torch.")) for shape in SHAPES],
)
def test_every_latent_size_dtype_and_block_size_is_within_budget(
    backend: str, dtype: torch.dtype, rows_per_block: int, latent_dim: int, value_dim: int, num_heads: int
) -> None:
    batch = paged_batch(latent_format(latent_dim, value_dim, dtype), rows_per_block, (70, 1, 33), num_heads)
    got = read(batch, backend, num_splits=2, softmax_scale=latent_dim**-0.5)
    assert got[0].shape == (3, num_heads, value_dim)
    assert got[0].dtype is dtype
    assert got[1].dtype is FP32
    expect_within_budget(got, batch.exact(latent_dim**-0.5))


def test_a_row_may_have_padding_around_it(backend: str) -> None:
    part = RowPart("latent", BF16, 1, 48, offset_bytes=16)
    batch = paged_batch(RowFormat("padded", (part,), (128,), value_dim=32), 16, (40,), 4)
    expect_within_budget(read(batch, backend), batch.exact(SCALE))


@pytest.mark.parametrize("rows_per_block", [1, 16, 48, 64, 544, 2048])
def test_o40_o41_the_block_size_does_not_change_the_result(backend: str, rows_per_block: int) -> None:
    batch = paged_batch(latent_format(48, 32, FP32), rows_per_block, (33, 130), 3)
    one_row_blocks = paged_batch(latent_format(48, 32, FP32), 1, (33, 130), 3)
    assert torch.equal(batch.keys[1], one_row_blocks.keys[1])
    expect_within_budget(read(batch, backend), one_row_blocks.exact(SCALE))


@pytest.mark.parametrize("row_len", [15, 16, 17, 31, 32, 33], ids="{}rows".format)
def test_o45_lengths_around_the_block_and_the_tile(backend: str, row_len: int) -> None:
    batch = paged_batch(SMALL, 16, (row_len,), 3)
    expect_within_budget(read(batch, backend), batch.exact(SCALE))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 6, 7, 8, None])
def test_any_number_of_splits_gives_the_same_output_and_lse(num_splits: int | None) -> None:
    batch = paged_batch(SMALL, 16, (150, 33, 0, 1), 3)
    expect_within_budget(read(batch, "triton", num_splits=num_splits), batch.exact(SCALE))


def test_the_reference_ignores_the_number_of_splits() -> None:
    batch = paged_batch(SMALL, 16, (65, 3), 3)
    for one, other in zip(read(batch, "reference"), read(batch, "reference", num_splits=5), strict=True):
        assert torch.equal(one, other)


def test_o36_what_lies_in_rows_never_written_does_not_matter(backend: str) -> None:
    with_nan, with_zeros = (paged_batch(SMALL, 16, (13, 47, 0), 4, fill=fill) for fill in (0xFF, 0))
    for one, other in zip(read(with_nan, backend), read(with_zeros, backend), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_o38_o46_a_sequence_without_rows_gives_zero_and_minus_infinity(backend: str, num_splits: int) -> None:
    batch = paged_batch(SMALL, 16, (0, 20, 0), 2)
    out = torch.full((3, 2, 32), torch.nan, dtype=BF16)
    lse = torch.full((3, 2), torch.nan)
    read(batch, backend, out=out, lse=lse, num_splits=num_splits)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 32, dtype=BF16))
    assert torch.equal(lse[[0, 2]], torch.full((2, 2), -torch.inf))
    expect_within_budget((out, lse), batch.exact(SCALE))


def test_no_sequences(backend: str) -> None:
    batch = paged_batch(SMALL, 16, (20,), 2)
    out, lse = mla_decode(
        batch.view, batch.block_table[:0], batch.row_lens[:0], batch.q[:0], softmax_scale=SCALE, backend=backend
    )
    assert out.shape == (0, 2, 32)
    assert lse.shape == (0, 2)


@pytest.mark.parametrize("bad_id", [-1, 2**31 - 1, "num_blocks"])
@pytest.mark.parametrize("rows_per_block", [1, 16, 64])
def test_rows_of_an_entry_that_names_no_block_do_not_exist(
    backend: str, rows_per_block: int, bad_id: int | str
) -> None:
    batch = paged_batch(SMALL, rows_per_block, (2 * rows_per_block + 9, 5), 2)
    batch.block_table[0, 1] = batch.view.num_blocks if bad_id == "num_blocks" else bad_id
    keep = torch.arange(len(batch.keys[0])) // rows_per_block != 1
    rows = [(rows[0][keep], rows[1]) for rows in (batch.keys, batch.values)]
    expect_within_budget(read(batch, backend), attend(batch.q, *rows, SCALE))


def test_o42_rows_of_a_column_past_the_table_do_not_exist(backend: str) -> None:
    batch = paged_batch(SMALL, 16, (41,), 2)
    batch = PagedBatch(batch.view, batch.block_table[:, :2], batch.row_lens, batch.q, batch.keys, batch.values)
    cut = [[rows[0][:32]] for rows in (batch.keys, batch.values)]
    expect_within_budget(read(batch, backend), attend(batch.q, *cut, SCALE))


def test_a_sequence_gives_the_same_bits_anywhere_in_a_batch(backend: str) -> None:
    batch = paged_batch(SMALL, 16, (70, 3, 0, 33), 4)
    order = torch.tensor([2, 0, 3, 1])
    permuted = PagedBatch(batch.view, batch.block_table[order], batch.row_lens[order], batch.q[order], [], [])
    plain, other = (read(each, backend, num_splits=3) for each in (batch, permuted))
    assert torch.equal(plain[0][order], other[0])
    assert torch.equal(plain[1][order], other[1])


def test_the_order_of_the_blocks_changes_no_bit() -> None:
    one, other = (paged_batch(SMALL, 16, (70, 33), 4, block_seed=seed) for seed in (0, 1))
    assert not torch.equal(one.block_table, other.block_table)
    for left, right in zip(read(one, "triton", num_splits=2), read(other, "triton", num_splits=2), strict=True):
        assert torch.equal(left, right)


def test_adjoining_blocks_give_what_scattered_ones_give() -> None:
    batch = paged_batch(latent_format(48, 32, FP32), 16, (70,), 4, gap_bytes=0)
    latent = batch.view.tensor("latent")
    latent[1:6] = latent[batch.block_table[0, :5].long()].clone()
    batch.block_table[0, :5] = torch.arange(1, 6)
    expect_within_budget(read(batch, "reference"), batch.exact(SCALE))


def test_o39_blocks_further_than_two_gibibytes_into_the_memory(backend: str) -> None:
    """Pages of 480 x 576 values; at block 7,768 the element offset passes 2^31."""
    batch = paged_batch(latent_format(576, 512), 480, (500,), 2)
    stride = batch.view.page_bytes + 16
    far = PageView(sparse_memory(48 + 7770 * stride), 48, stride, 7770, 480, batch.view.format)
    for column, block_id in enumerate((7768, 3884)):
        far.tensor("latent")[block_id] = batch.view.tensor("latent")[batch.block_table[0, column]]
        batch.block_table[0, column] = block_id
    far_batch = PagedBatch(far, batch.block_table, batch.row_lens, batch.q, batch.keys, batch.values)
    expect_within_budget(read(far_batch, backend), batch.exact(SCALE))


def test_queries_may_be_a_slice_of_a_wider_tensor(backend: str) -> None:
    batch = paged_batch(SMALL, 16, (20, 33), 4)
    fused = torch.full((2, 4, 64), torch.nan, dtype=BF16)
    q = fused[..., :48]
    q.copy_(batch.q)
    got = mla_decode(batch.view, batch.block_table, batch.row_lens, q, softmax_scale=SCALE, backend=backend)
    expect_within_budget(got, batch.exact(SCALE))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_results_go_to_the_tensors_given(backend: str, num_splits: int) -> None:
    batch = paged_batch(SMALL, 16, (20, 33), 2)
    out, lse = torch.empty(2, 2, 32, dtype=BF16), torch.empty(2, 2)
    got = read(batch, backend, out=out, lse=lse, num_splits=num_splits)
    assert got[0] is out
    assert got[1] is lse
    expect_within_budget((out, lse), batch.exact(SCALE))
