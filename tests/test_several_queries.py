"""Several queries per sequence, of gqa_decode and mla_decode: against fp64, and against calls of one query each."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from kvstore_kernels import RowFormat, gqa_decode, kv_format, latent_format, mla_decode
from tests.attention_oracle import Exact, PagedBatch, expect_within_budget, paged_batch
from tests.cases import BACKENDS
from tests.query_cases import causal_lens, exact_queries, with_queries
from tests.test_sinks_and_caps import with_sinks

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
SCALE = 0.125
OPS: dict[str, tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], RowFormat]] = {
    "gqa_decode": (gqa_decode, kv_format(2, 64, 48)),
    "mla_decode": (mla_decode, latent_format(64, 48)),
}
every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def read(batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    op = "gqa_decode" if batch.view.format.value_dim is None else "mla_decode"
    arguments = {name: getattr(batch, name) for name in ("view", "block_table", "row_lens", "q")}
    return OPS[op][0](**arguments | {"softmax_scale": SCALE} | options, backend=backend)


def batch_of(op: str, row_lens: Sequence[int], num_queries: int, num_heads: int = 4, **options: object) -> PagedBatch:
    return with_queries(paged_batch(OPS[op][1], 16, row_lens, num_heads, **options), num_queries)


def lens_tensor(lens: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor(lens, dtype=INT32)


def expect_like_one_query_each(
    batch: PagedBatch,
    lens: Sequence[Sequence[int]],
    got: tuple[torch.Tensor, torch.Tensor],
    exact: Exact,
    backend: str,
    **options: object,
) -> None:
    """Fails unless every query differs from a call of its own by at most what two calls may err."""
    for query in range(batch.q.shape[1]):
        alone = replace(batch, q=batch.q[:, query], row_lens=lens_tensor(lens)[:, query].contiguous())
        out, lse = read(alone, backend, **options)
        rows = exact.lse[:, query] > -torch.inf
        assert torch.equal(got[1][:, query] > -torch.inf, rows)
        assert torch.equal(lse > -torch.inf, rows)
        assert ((got[1][:, query] - lse)[rows].abs() <= 2 * exact.lse_budget[:, query][rows]).all()
        assert ((got[0][:, query].double() - out.double()).abs() <= 2 * exact.out_budget[:, query]).all()


@every_op
@pytest.mark.parametrize(("num_queries", "num_splits"), [(2, 1), (5, 2)])
def test_each_query_before_the_last_sees_one_row_less(backend: str, op: str, num_queries: int, num_splits: int) -> None:
    row_lens = (70, 33, 4)
    batch = batch_of(op, row_lens, num_queries)
    lens = causal_lens(row_lens, num_queries)
    exact = exact_queries(batch, lens, SCALE)
    got = read(batch, backend, num_splits=num_splits)
    assert got[0].shape == (3, num_queries, 4, 48)
    assert got[1].shape == (3, num_queries, 4)
    expect_within_budget(got, exact)
    expect_like_one_query_each(batch, lens, got, exact, backend)


@every_op
def test_the_budget_tells_a_query_from_its_neighbour(op: str) -> None:
    batch = batch_of(op, (40,), 3)
    for backend in BACKENDS:
        got = read(batch, backend)
        for wrong in ([[40, 40, 40]], [[39, 39, 40]], [[38, 39, 39]], [[40, 39, 38]]):
            with pytest.raises(AssertionError, match="of the error budget used"):
                expect_within_budget(got, exact_queries(batch, wrong, SCALE))


@every_op
@pytest.mark.parametrize("num_splits", [1, 3, 4])
def test_each_query_may_see_its_own_number_of_rows(backend: str, op: str, num_splits: int | None) -> None:
    lens = [[70, 0, 16, 65], [1, 33, -3, 32], [0, -1, 0, -(2**31)]]
    batch = batch_of(op, (70, 33, 0), 4)
    got = read(batch, backend, row_lens=lens_tensor(lens), num_splits=num_splits)
    expect_within_budget(got, exact_queries(batch, lens, SCALE))


@every_op
def test_lengths_of_queries_that_count_down_by_one_change_no_bit(backend: str, op: str) -> None:
    row_lens = (70, 2, 33)
    batch = batch_of(op, row_lens, 3)
    by_query = read(batch, backend, row_lens=lens_tensor(causal_lens(row_lens, 3)), num_splits=2)
    for one, other in zip(read(batch, backend, num_splits=2), by_query, strict=True):
        assert torch.equal(one, other)


@every_op
@pytest.mark.parametrize("num_splits", [1, 2])
def test_one_query_on_an_axis_gives_the_same_bits_as_none(backend: str, op: str, num_splits: int) -> None:
    batch = batch_of(op, (70, 0, 33), 1)
    got = read(batch, backend, num_splits=num_splits)
    by_query = read(batch, backend, row_lens=batch.row_lens[:, None], num_splits=num_splits)
    alone = read(replace(batch, q=batch.q[:, 0]), backend, num_splits=num_splits)
    for with_axis, with_lens, without in zip(got, by_query, alone, strict=True):
        assert torch.equal(with_axis[:, 0], without)
        assert torch.equal(with_lens[:, 0], without)


@every_op
def test_fewer_rows_than_queries_leave_zeros_and_minus_infinity(backend: str, op: str) -> None:
    batch = batch_of(op, (2, 0), 4)
    out, lse = torch.full((2, 4, 4, 48), torch.nan, dtype=BF16), torch.full((2, 4, 4), torch.nan)
    got = read(batch, backend, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out[0, :2], torch.zeros(2, 4, 48, dtype=BF16))
    assert torch.equal(lse[0, :2], torch.full((2, 4), -torch.inf))
    expect_within_budget(got, exact_queries(batch, [[-1, 0, 1, 2], [-3, -2, -1, 0]], SCALE))


@every_op
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("per_query", [False, True])
def test_no_sequences_or_no_queries(backend: str, op: str, shape: tuple[int, int], per_query: bool) -> None:
    batch = batch_of(op, (20, 5), 1)
    got = read(
        batch,
        backend,
        block_table=batch.block_table[: shape[0]],
        row_lens=torch.zeros(shape if per_query else shape[0], dtype=INT32),
        q=torch.zeros(*shape, 4, 64, dtype=BF16),
    )
    assert got[0].shape == (*shape, 4, 48)
    assert got[1].shape == (*shape, 4)


# op, dtype, rows per block, format, heads, queries: more rows of a product than a tile of 16 or 64 has
MANY = [
    (FP16, 16, kv_format(1, 64, dtype=FP16), 5, 15),
    (FP32, 1, kv_format(2, 64, dtype=FP32), 6, 7),
    (BF16, 64, kv_format(3, 72), 9, 2),
    (BF16, 16, kv_format(1, 64, packed=True), 70, 1),
    (BF16, 16, latent_format(72, 64), 5, 15),
    (FP32, 1, latent_format(72, 64, FP32), 3, 7),
    (BF16, 64, latent_format(576, 512), 2, 9),
]


@pytest.mark.parametrize(
    ("dtype", "rows_per_block", "row_format", "num_heads", "num_queries"),
    [pytest.param(*each, id=f"{each[2].name}-{each[0]}-{each[3]}x{each[4]}".replace("torch.", "")) for each in MANY],
)
def test_heads_of_all_queries_fill_several_tiles(
    backend: str, dtype: torch.dtype, rows_per_block: int, row_format: RowFormat, num_heads: int, num_queries: int
) -> None:
    row_lens = (40, 3)
    batch = with_queries(paged_batch(row_format, rows_per_block, row_lens, num_heads), num_queries)
    got = read(batch, backend)
    assert got[0].dtype is dtype
    expect_within_budget(got, exact_queries(batch, causal_lens(row_lens, num_queries), SCALE))


@pytest.mark.parametrize("row_lens", [(85,), (200,), (20, 23), (21, 2)], ids=str)
@pytest.mark.parametrize(("rows_per_block", "num_splits"), [(16, 1), (5, 3)])
def test_a_window_is_each_querys_own(
    backend: str, row_lens: tuple[int, ...], rows_per_block: int, num_splits: int
) -> None:
    """The table has room for the window and the queries behind its first, and wraps."""
    window, num_queries = 20, 4
    batch = paged_batch(kv_format(1, 64), rows_per_block, row_lens, 2, window=window + num_queries - 1)
    batch = with_queries(batch, num_queries)
    lens = causal_lens(row_lens, num_queries)
    got = read(batch, backend, window=window, num_splits=num_splits)
    exact = exact_queries(batch, lens, SCALE, window)
    expect_within_budget(got, exact)
    with pytest.raises(AssertionError, match="of the error budget used"):
        expect_within_budget(got, exact_queries(batch, lens, SCALE, window - 1))
    if row_lens == (21, 2):
        expect_like_one_query_each(batch, lens, got, exact, backend, window=window)


def test_windows_of_queries_that_see_their_own_rows(backend: str) -> None:
    window = 20
    lens = [[70, 66, 71, 0], [1, 33, -5, 20]]
    batch = with_queries(paged_batch(kv_format(1, 64), 16, (71, 33), 2), 4)
    got = read(batch, backend, row_lens=lens_tensor(lens), window=window, num_splits=2)
    expect_within_budget(got, exact_queries(batch, lens, SCALE, window))


@every_op
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks_join_every_query(backend: str, op: str, num_splits: int) -> None:
    row_lens = (70, 2)
    sinks = torch.tensor([0.0, 3.0, -torch.inf, 40.0])
    batch = batch_of(op, row_lens, 3)
    exact = exact_queries(batch, causal_lens(row_lens, 3), SCALE)
    expect_within_budget(read(batch, backend, sinks=sinks, num_splits=num_splits), with_sinks(exact, sinks))


@pytest.mark.parametrize("window", [None, 20])
def test_soft_caps(backend: str, window: int | None) -> None:
    """A cap only shrinks differences of scores, so the budget of plain scores holds for the difference of two calls."""
    row_lens = (70, 2)
    batch = with_queries(paged_batch(kv_format(1, 64, dtype=FP32), 16, row_lens, 2), 3)
    lens = causal_lens(row_lens, 3)
    options = {"soft_cap": 2.0, "window": window, "softmax_scale": 1.0}
    got = read(batch, backend, **options, num_splits=2)
    exact = exact_queries(batch, lens, 1.0, window)
    own = 2.0 * 2.0**-20
    exact = replace(
        exact, lse_budget=exact.lse_budget + own, out_budget=exact.out_budget + 10 * own, lse=got[1].double()
    )
    expect_like_one_query_each(batch, lens, got, exact, backend, **options)


@every_op
def test_queries_may_lie_anywhere(backend: str, op: str) -> None:
    """Sequences apart, queries apart, columns apart, and queries before sequences."""
    batch = batch_of(op, (20, 33), 3)
    exact = exact_queries(batch, causal_lens((20, 33), 3), SCALE)
    layouts = (
        torch.full((2, 3 * 4 * 64 + 8), torch.nan, dtype=BF16)[:, : 3 * 4 * 64].unflatten(1, (3, 4, 64)),
        torch.full((2, 3 * 4 * 64 + 3), torch.nan, dtype=BF16)[:, : 3 * 4 * 64].unflatten(1, (3, 4, 64)),
        torch.full((2, 3, 9, 64), torch.nan, dtype=BF16)[:, :, 5:],
        torch.full((2, 3, 4, 128), torch.nan, dtype=BF16)[..., ::2],
        torch.full((3, 2, 4, 64), torch.nan, dtype=BF16).transpose(0, 1),
        torch.full((2, 4, 3, 64), torch.nan, dtype=BF16).transpose(1, 2),
    )
    for q in layouts:
        q.copy_(batch.q)
        expect_within_budget(read(batch, backend, q=q), exact)


@every_op
def test_rows_of_an_entry_that_names_no_block_do_not_exist_for_any_query(backend: str, op: str) -> None:
    batch = batch_of(op, (41,), 3)
    batch.block_table[0, 1] = -1
    keep = torch.arange(41) // 16 != 1
    kept = replace(batch, keys=[batch.keys[0][keep]], values=[batch.values[0][keep]])
    expect_within_budget(read(batch, backend), exact_queries(kept, [[23, 24, 25]], SCALE))


@every_op
@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_lies_behind_the_last_query_does_not_matter(backend: str, op: str, num_splits: int) -> None:
    with_nan, with_zeros = (batch_of(op, (13, 66), 3, fill=fill) for fill in (0xFF, 0))
    options = {"num_splits": num_splits}
    for one, other in zip(read(with_nan, backend, **options), read(with_zeros, backend, **options), strict=True):
        assert torch.equal(one, other)


BAD = {
    "lens-columns": (
        {"row_lens": torch.zeros(2, 4, dtype=INT32)},
        r"row_lens: expected shape \[2, 3\], got \[2, 4\]",
    ),
    "lens-rows": ({"row_lens": torch.zeros(3, dtype=INT32)}, r"row_lens: expected shape \[2\], got \[3\]"),
    "lens-axes": ({"row_lens": torch.zeros(2, 3, 1, dtype=INT32)}, r"row_lens: expected shape \[2\], got \[2, 3, 1\]"),
    "lens-dtype": (
        {"row_lens": torch.zeros(2, 3, dtype=torch.int64)},
        "row_lens: expected dtype torch.int32, got torch.int64",
    ),
    "lens-strides": (
        {"row_lens": torch.zeros(3, 2, dtype=INT32).T},
        r"row_lens: expected a contiguous tensor, got strides \(1, 2\)",
    ),
    "lens-of-one-query": (
        {"q": torch.zeros(2, 4, 64, dtype=BF16), "row_lens": torch.zeros(2, 3, dtype=INT32), "out": None, "lse": None},
        r"row_lens: expected shape \[2\], got \[2, 3\]",
    ),
    "out-shape": (
        {"out": torch.zeros(2, 4, 48, dtype=BF16)},
        r"out: expected shape \[2, 3, 4, 48\], got \[2, 4, 48\]",
    ),
    "out-strides": (
        {"out": torch.zeros(2, 4, 3, 48, dtype=BF16).transpose(1, 2)},
        "out: expected a contiguous tensor, got strides",
    ),
    "lse-shape": ({"lse": torch.zeros(6, 4)}, r"lse: expected shape \[2, 3, 4\], got \[6, 4\]"),
    "q-axes": (
        {"q": torch.zeros(1, 2, 3, 4, 64, dtype=BF16)},
        r"q: expected shape \[any, any, 64\], got \[1, 2, 3, 4, 64\]",
    ),
    "q-dim": (
        {"q": torch.zeros(2, 3, 4, 32, dtype=BF16)},
        r"q: expected shape \[any, any, any, 64\], got \[2, 3, 4, 32\]",
    ),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks: expected shape \[4\], got \[3\]"),
}


@every_op
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_name_themselves_and_nothing_is_written(backend: str, op: str, case: str) -> None:
    changes, message = BAD[case]
    batch = batch_of(op, (20, 33), 3)
    out, lse = torch.full((2, 3, 4, 48), 7.0, dtype=BF16), torch.full((2, 3, 4), 7.0)
    with pytest.raises(ValueError, match=message):
        read(batch, backend, **{"out": out, "lse": lse} | changes)
    assert (out == 7).all()
    assert (lse == 7).all()
