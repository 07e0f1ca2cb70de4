"""gqa_decode over codes: fp8 with scales outside the cache, int8 and fp8 with one scale per token and head beside.

The budget of `attention_oracle` holds with the values that codes and scales mean. Products of codes are exact in fp32,
as those of bf16 are; of the head_dim + 2 roundings of a score the sum takes head_dim - 1, and the scale of K, the
softmax scale and their product take three. The scale of V rounds a weight and an output once more, which is 2 u32 of
the 2 (L + 16) u32 that the budget has for sums.
"""

import numpy as np
import pytest
import torch

from kvstore_kernels import PageView, RowFormat, RowPart, gqa_decode, kv_format, latent_format, token_head_format
from kvstore_kernels.formats import Quantised
from tests.attention_oracle import PagedBatch, attend, expect_within_budget
from tests.cases import BACKENDS, POISON, make_view, sparse_memory
from tests.quantised_rows import E4M3
from tests.query_cases import causal_lens, exact_queries, with_queries
from tests.test_sinks_and_caps import with_sinks

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
OUTSIDE = (0.01, 0.7)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def codes_of(view: PageView, part: str) -> torch.Tensor:
    """The codes of a part as bytes, [num_blocks, rows_per_block, num_heads, head_dim]."""
    return view.tensor(part).view(torch.uint8)


def quantised_batch(
    row_format: RowFormat,
    rows_per_block: int,
    row_lens: tuple[int, ...],
    num_heads: int,
    dtype: torch.dtype = BF16,
    *,
    window: int | None = None,
    outside: tuple[float, float] = OUTSIDE,
    largest_scale: float = 0.02,
    fill: int = POISON,
) -> PagedBatch:
    """Random codes and scales in blocks of random order, everything else NaN (int8: -1); what they mean in fp64."""
    random = np.random.default_rng(1)
    num_columns = [-(-row_len // rows_per_block) for row_len in row_lens]
    width = max(num_columns) + 1 if window is None else -(-window // rows_per_block) + 1
    num_used = [min(columns, width) for columns in num_columns]
    view = make_view(row_format, rows_per_block, sum(num_used) + 3, fill=fill)
    order = torch.randperm(view.num_blocks - 1, generator=torch.Generator().manual_seed(0)).int() + 1
    block_table = torch.zeros(len(row_lens), width, dtype=torch.int32)
    meanings: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for seq_idx, (row_len, blocks) in enumerate(zip(row_lens, order[: sum(num_used)].split(num_used), strict=True)):
        block_table[seq_idx, : len(blocks)] = blocks
        positions = torch.arange(0 if window is None else max(0, row_len - window), row_len)
        where = (block_table[seq_idx, positions // rows_per_block % width].long(), positions % rows_per_block)
        for name, outside_scale in zip("kv", outside, strict=True):
            part = row_format.part(name)
            codes = random.integers(0, 256, (row_len, part.num_heads, part.head_dim), dtype=np.uint8)
            codes[codes == 0] = 3  # the output of one row that is zero would have no budget
            if part.dtype == FP8:
                codes[(codes & 0x7F) % 0x7F == 0] = 0x31
                values = E4M3[codes]
            else:
                values = codes.view(np.int8).astype(np.float64)
            scales = np.full((row_len, part.num_heads, 1), outside_scale, np.float32)
            if len(row_format.parts) == 4:
                scales = random.uniform(largest_scale / 8, largest_scale, scales.shape).astype(np.float32)
                view.tensor(f"{name}_scales")[where] = torch.from_numpy(scales)[positions]
            codes_of(view, name)[where] = torch.from_numpy(codes)[positions]
            meanings[name].append(torch.from_numpy(values * scales.astype(np.float64)))
    q = torch.randn(len(row_lens), num_heads, row_format.part("k").head_dim, generator=torch.Generator().manual_seed(2))
    lens = torch.tensor(row_lens, dtype=torch.int32)
    return PagedBatch(view, block_table, lens, q.to(dtype), meanings["k"], meanings["v"])


def read(batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    outside = {} if len(batch.view.format.parts) == 4 else {"row_scales": OUTSIDE}
    return gqa_decode(batch.view, batch.block_table, batch.row_lens, batch.q, backend=backend, **{**outside, **options})


def scale_of(batch: PagedBatch) -> float:
    return batch.q.shape[-1] ** -0.5


FORMATS = {
    "fp8": kv_format(2, 64, dtype=FP8),
    "int8_token_head": token_head_format(2, 64),
    "fp8_token_head": token_head_format(2, 64, dtype=FP8),
}
every_format = pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)

# dtype of the query, rows per block, format, query heads
SHAPES = [
    (BF16, 16, kv_format(3, 64, 32, FP8), 9),
    (FP16, 1, kv_format(2, 72, dtype=FP8, packed=True), 2),
    (FP32, 48, kv_format(1, 9, 5, FP8, packed=True), 3),
    (BF16, 784, kv_format(1, 128, dtype=FP8), 70),
    (BF16, 16, token_head_format(3, 80, 64), 6),
    (FP16, 48, token_head_format(2, 64, 96), 8),
    (FP32, 64, token_head_format(1, 4, 12), 2),
    (BF16, 1, token_head_format(2, 64, dtype=FP8), 6),
    (FP16, 64, token_head_format(1, 72, 40, FP8), 20),
    (FP32, 16, token_head_format(5, 64, dtype=FP8), 5),
]


@pytest.mark.parametrize(
    ("dtype", "rows_per_block", "row_format", "num_heads"),
    [
        pytest.param(*shape, id=f"{shape[2].name}-{str(shape[0]).removeprefix('torch.')}-{shape[1]}rows")
        for shape in SHAPES
    ],
)
def test_every_format_dtype_and_head_size_is_within_budget(
    backend: str, dtype: torch.dtype, rows_per_block: int, row_format: RowFormat, num_heads: int
) -> None:
    batch = quantised_batch(row_format, rows_per_block, (70, 0), num_heads, dtype)
    got = read(batch, backend, num_splits=2)
    assert got[0].dtype is dtype
    assert got[1].dtype is FP32
    expect_within_budget(got, batch.exact(scale_of(batch)))


@every_format
def test_the_budget_tells_one_row_from_none_and_a_scale_from_its_neighbour(row_format: RowFormat) -> None:
    batch = quantised_batch(row_format, 16, (40,), 4)
    got = read(batch, "triton")
    one_less = attend(batch.q, [batch.keys[0][1:]], [batch.values[0][1:]], scale_of(batch))
    with pytest.raises(AssertionError, match="of the error budget used"):
        expect_within_budget(got, one_less)
    for which in (batch.keys, batch.values):
        which[0][7] *= 2
        with pytest.raises(AssertionError, match="of the error budget used"):
            expect_within_budget(got, batch.exact(scale_of(batch)))
        which[0][7] /= 2
    expect_within_budget(got, batch.exact(scale_of(batch)))


@every_format
@pytest.mark.parametrize("num_splits", [1, 3, 4])
def test_any_number_of_splits(row_format: RowFormat, num_splits: int) -> None:
    batch = quantised_batch(row_format, 16, (150, 1), 4)
    expect_within_budget(read(batch, "triton", num_splits=num_splits), batch.exact(scale_of(batch)))


@every_format
@pytest.mark.parametrize("row_len", [1, 20, 85], ids="{}rows".format)
def test_a_window_through_a_table_that_wraps(backend: str, row_format: RowFormat, row_len: int) -> None:
    batch = quantised_batch(row_format, 16, (row_len, 7), 4, window=20)
    expect_within_budget(read(batch, backend, window=20, num_splits=2), batch.exact(scale_of(batch), window=20))


@every_format
def test_sinks(backend: str, row_format: RowFormat) -> None:
    sinks = torch.tensor([0.0, 3.0, -torch.inf, 40.0])
    batch = quantised_batch(row_format, 16, (40, 0, 17), 4)
    expect_within_budget(read(batch, backend, sinks=sinks), with_sinks(batch.exact(scale_of(batch)), sinks))


@every_format
def test_a_soft_cap_caps_scores_in_the_scale_of_the_values(backend: str, row_format: RowFormat) -> None:
    """The rounding of the cap is added to the budget; tanh only shrinks differences."""
    batch = quantised_batch(row_format, 16, (70, 1), 4, FP32)
    soft_cap, scale = 2.0, 1.0
    plain = batch.exact(scale)
    out, lse = read(batch, backend, softmax_scale=scale, soft_cap=soft_cap, num_splits=2)
    for seq_idx, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        queries = batch.q[seq_idx].double().unflatten(0, (2, 2))
        scores = soft_cap * torch.tanh(scale * (queries @ keys.permute(1, 2, 0)) / soft_cap)
        own, weight = soft_cap * 2.0**-20, values.abs().max()
        lse_error = (lse[seq_idx] - scores.logsumexp(2).flatten()).abs()
        out_error = (out[seq_idx] - (scores.softmax(2) @ values.transpose(0, 1)).flatten(0, 1)).abs()
        assert (lse_error <= plain.lse_budget[seq_idx] + own).all()
        assert (out_error <= plain.out_budget[seq_idx] + (2 * own + 4e-6) * weight).all()


@every_format
@pytest.mark.parametrize("window", [None, 20])
def test_several_queries(backend: str, row_format: RowFormat, window: int | None) -> None:
    row_lens = (40, 2)
    batch = with_queries(quantised_batch(row_format, 16, row_lens, 4), 3)
    got = read(batch, backend, window=window)
    expect_within_budget(got, exact_queries(batch, causal_lens(row_lens, 3), scale_of(batch), window))


@every_format
def test_what_lies_in_rows_never_written_does_not_matter(backend: str, row_format: RowFormat) -> None:
    with_nan, with_zeros = (quantised_batch(row_format, 16, (13, 47, 0), 4, fill=fill) for fill in (POISON, 0))
    for one, other in zip(read(with_nan, backend), read(with_zeros, backend), strict=True):
        assert torch.equal(one, other)


@every_format
def test_what_lies_in_written_rows_does(backend: str, row_format: RowFormat) -> None:
    """NaN codes and NaN scales of rows that exist are seen, in the heads that read them and in no other."""
    names = [part.name for part in row_format.parts if part.dtype != torch.int8]
    for name in names:
        batch = quantised_batch(row_format, 16, (40,), 4)
        place = batch.view.tensor(name)[batch.block_table[0, 1].item(), 3, 1]
        place.view(torch.uint8)[-1] = POISON
        place.view(torch.uint8)[-2 if place.itemsize == 4 else -1] = POISON
        out, lse = read(batch, backend)
        assert out[0, 2:].isnan().any()
        assert lse[0, 2:].isnan().all() == name.startswith("k")
        assert not out[0, :2].isnan().any()


@every_format
@pytest.mark.parametrize("bad_id", [-1, 2**31 - 1, "num_blocks"])
def test_rows_of_an_entry_that_names_no_block_do_not_exist(
    backend: str, row_format: RowFormat, bad_id: int | str
) -> None:
    batch = quantised_batch(row_format, 16, (41, 5), 4)
    batch.block_table[0, 1] = batch.view.num_blocks if bad_id == "num_blocks" else bad_id
    batch.block_table[1, 0] = -1
    keep = torch.arange(41) // 16 != 1
    rows = [(rows[0][keep], rows[1][:0]) for rows in (batch.keys, batch.values)]
    expect_within_budget(read(batch, backend), attend(batch.q, *rows, scale_of(batch)))


@every_format
def test_o39_blocks_further_than_two_gibibytes_into_the_memory(backend: str, row_format: RowFormat) -> None:
    batch = quantised_batch(row_format, 16, (40,), 4)
    stride = 2**35 + 48  # block 5 is further than 2^31 units of 16 bytes away
    far = PageView(sparse_memory(48 + 6 * stride), 48, stride, 6, 16, row_format)
    for column, block_id in enumerate((5, 2, 3)):
        for part in row_format.parts:
            source, target = (view.tensor(part.name).view(torch.uint8) for view in (batch.view, far))
            target[block_id] = source[batch.block_table[0, column].item()]
        batch.block_table[0, column] = block_id
    far_batch = PagedBatch(far, batch.block_table, batch.row_lens, batch.q, batch.keys, batch.values)
    expect_within_budget(read(far_batch, backend), batch.exact(scale_of(batch)))


def test_scales_outside_may_lie_on_the_device(backend: str) -> None:
    batch = quantised_batch(FORMATS["fp8"], 16, (20,), 2)
    many = torch.tensor([[torch.nan, *OUTSIDE]])
    for scales in ((many[0, 1], many[0, 2]), (many[:, 1:2], many[0, 2:]), (OUTSIDE[0], many[0, 2])):
        expect_within_budget(read(batch, backend, row_scales=scales, num_splits=2), batch.exact(scale_of(batch)))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_scale_outside_that_is_nan_does_not_reach_a_sequence_without_rows(backend: str, num_splits: int) -> None:
    batch = quantised_batch(FORMATS["fp8"], 16, (0, 5), 2)
    for scales in (
        (0.01, torch.nan),
        (torch.nan, 1.0),
        (0.01, torch.inf),
        (torch.tensor(0.01), torch.tensor(torch.nan)),
    ):
        out, lse = read(batch, backend, row_scales=scales, num_splits=num_splits)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert torch.equal(lse[0], torch.full_like(lse[0], -torch.inf))
        assert not out[1].isfinite().all()


def test_without_row_scales_they_are_one(backend: str) -> None:
    batch = quantised_batch(FORMATS["fp8"], 16, (20,), 4)
    for one, other in zip(
        read(batch, backend, row_scales=None), read(batch, backend, row_scales=(1.0, 1.0)), strict=True
    ):
        assert torch.equal(one, other)


def test_small_scales_of_v_lose_nothing_in_fp16(backend: str) -> None:
    batch = quantised_batch(FORMATS["int8_token_head"], 16, (70,), 4, FP16, largest_scale=1e-5)
    batch.q.mul_(1e3)
    expect_within_budget(read(batch, backend), batch.exact(scale_of(batch)))


def test_the_same_call_gives_the_same_bits_anywhere_in_a_batch(backend: str) -> None:
    batch = quantised_batch(FORMATS["int8_token_head"], 16, (70, 3, 0), 2)
    order = torch.tensor([2, 0, 1])
    permuted = PagedBatch(batch.view, batch.block_table[order], batch.row_lens[order], batch.q[order], [], [])
    plain, other = (read(each, backend, num_splits=2) for each in (batch, permuted))
    assert torch.equal(plain[0][order], other[0])
    assert torch.equal(plain[1][order], other[1])


PLAIN = kv_format(2, 64)
E5M2 = kv_format(2, 64, dtype=torch.float8_e5m2)
TILED = RowFormat(
    "tiled",
    (
        RowPart("k", torch.int8, 1, 64),
        RowPart("k_scales", FP32, 1, 2, offset_bytes=64),
        RowPart("v", torch.int8, 1, 64, offset_bytes=72),
        RowPart("v_scales", FP32, 1, 2, offset_bytes=136),
    ),
    (144,),
    quantised=(Quantised("k", "k_scales", 32, "fp32"), Quantised("v", "v_scales", 32, "fp32")),
)


@pytest.mark.parametrize(
    ("row_format", "changes", "error", "message"),
    [
        (FORMATS["fp8"], {"row_scales": (1.0,)}, ValueError, "row_scales: expected one for each of k, v .*, got 1"),
        (FORMATS["fp8"], {"row_scales": "ab"}, TypeError, "row_scales: expected a .*, got str"),
        (FORMATS["fp8"], {"row_scales": ("a", 1.0)}, TypeError, "row_scales of k: expected a number or an fp32 tensor"),
        (FORMATS["fp8"], {"row_scales": (1.0, torch.ones(2))}, ValueError, "row_scales of v: expected one element"),
        (
            FORMATS["fp8"],
            {"row_scales": (1.0, torch.ones(1, dtype=BF16))},
            ValueError,
            "row_scales of v: expected dtype torch.float32, got torch.bfloat16",
        ),
        (
            FORMATS["int8_token_head"],
            {"row_scales": (1.0, 1.0)},
            ValueError,
            r"row_scales: expected None, for the scales lie in the rows \(format 'int8_token_head'\), got 2",
        ),
        (PLAIN, {"row_scales": (1.0, 1.0)}, ValueError, "row_scales: rows of format 'kv' have none, got"),
        (
            FORMATS["fp8"],
            {"q": torch.zeros(1, 4, 64, dtype=torch.float64)},
            ValueError,
            "q: expected dtype torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
        ),
        (FORMATS["fp8"], {"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
        (
            FORMATS["int8_token_head"],
            {"out": torch.zeros(1, 4, 64, dtype=FP16)},
            ValueError,
            "out: expected dtype torch.bfloat16, got torch.float16",
        ),
        (E5M2, {}, ValueError, "view: expected parts of .*, got 'k' of float8_e5m2 in format 'kv'"),
        (TILED, {}, ValueError, "view: expected rows of K and V .*, got format 'tiled'"),
        (latent_format(64, 64, FP8), {}, ValueError, "view: expected rows of K and V .*, got format 'latent'"),
    ],
)
def test_bad_arguments_name_themselves_and_nothing_is_written(
    backend: str, row_format: RowFormat, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    out, lse = torch.full((1, 4, 64), 7.0, dtype=BF16), torch.full((1, 4), 7.0)
    good = {
        "view": make_view(row_format),
        "block_table": torch.ones(1, 2, dtype=torch.int32),
        "row_lens": torch.tensor([20], dtype=torch.int32),
        "q": torch.zeros(1, 4, 64, dtype=BF16),
        "out": out,
        "lse": lse,
    }
    with pytest.raises(error, match=message):
        gqa_decode(**good | changes, backend=backend)
    assert (out == 7).all()
    assert (lse == 7).all()
