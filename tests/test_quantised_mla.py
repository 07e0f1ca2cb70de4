"""mla_decode over quantised latent rows, Triton under the interpreter and the reference, against fp64 attention.

The rows of the fp64 result are what `read_rows` says of the pages in fp32, so the error budget is that of plain rows
(`attention_oracle`). Codes times powers of two, and e2m1 codes times e4m3 scales, are numbers of bf16 and fp16:
rounding them to the dtype of the queries changes nothing. Scales that are no powers of two add the term that
`latent_cases.with_rounded_rows` derives.
"""

from dataclasses import replace

import pytest
import torch

from kvstore_kernels import (
    PageView,
    Quantised,
    RowFormat,
    RowPart,
    indexer_format,
    latent_format,
    mla_decode,
    read_rows,
)
from kvstore_kernels.quantised import FP8
from tests.attention_oracle import PagedBatch, attend
from tests.cases import BACKENDS, make_view, sparse_memory
from tests.latent_cases import LATENT_FORMATS, expect_close, quantised_batch, scales_of, with_rounded_rows
from tests.query_cases import causal_lens, exact_queries, with_queries
from tests.test_sinks_and_caps import with_sinks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALE = 0.05
V32, V4 = LATENT_FORMATS["fp8_ds_mla"], LATENT_FORMATS["dsv4"]
SMALL = latent_format(40, 24, FP8)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def read(batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"softmax_scale": SCALE, **scales_of(batch.view.format)} | options
    return mla_decode(batch.view, batch.block_table, batch.row_lens, batch.q, backend=backend, **arguments)


# rows per block, heads, dtype of the queries
SHAPES = {
    "fp8_ds_mla": [(64, 16, BF16), (1, 3, FP16), (48, 2, FP32)],
    "dsv4": [(2, 5, BF16), (64, 17, BF16), (16, 3, FP16), (48, 2, FP32)],
    "mxfp8_latent": [(16, 4, BF16), (1, 2, FP16)],
    "mxfp8_latent_split": [(48, 4, BF16), (2, 2, FP16)],
    "nvfp4_latent": [(64, 4, BF16), (2, 2, FP32)],
    "nvfp4_latent_split": [(16, 4, FP16), (1, 2, BF16)],
    "nvfp4_ds_mla": [(48, 4, BF16), (64, 2, FP16)],
    "latent_fp8": [(64, 4, BF16), (16, 2, FP16), (1, 2, FP32)],
}


@pytest.mark.parametrize(
    ("name", "rows_per_block", "num_heads", "dtype"),
    [
        pytest.param(name, *shape, id=f"{name}-{shape[0]}rows-{shape[1]}heads-{str(shape[2])[6:]}")
        for name, shapes in SHAPES.items()
        for shape in shapes
    ],
)
def test_every_format_dtype_and_block_size_is_within_budget(
    backend: str, name: str, rows_per_block: int, num_heads: int, dtype: torch.dtype
) -> None:
    row_lens = (max(35, rows_per_block + 2), 1)
    batch = quantised_batch(LATENT_FORMATS[name], rows_per_block, row_lens, num_heads, dtype)
    got = read(batch, backend, num_splits=2)
    assert got[0].shape == (2, num_heads, 512)
    assert got[0].dtype is dtype
    assert got[1].dtype is FP32
    expect_close(got, batch.exact(SCALE))


@pytest.mark.parametrize("dims", [(9, 5), (70, 34), (40, 40)], ids=str)
def test_codes_that_fill_no_words_of_four(backend: str, dims: tuple[int, int]) -> None:
    batch = quantised_batch(latent_format(*dims, FP8), 16, (37, 2), 3)
    expect_close(read(batch, backend), batch.exact(SCALE))


ONE_SCALE = RowFormat(
    "one_scale",
    (
        RowPart("latent", torch.uint8, 1, 24),
        RowPart("scales", FP32, 1, 1, offset_bytes=24),
        RowPart("rope", torch.float16, 1, 10, offset_bytes=28),
    ),
    (48,),
    value_dim=40,
    quantised=(Quantised("latent", "scales", 48, "fp32", 2),),
)
THREE_SCALES = RowFormat(
    "three_scales",
    (RowPart("latent", FP8, 1, 48), RowPart("scales", torch.uint8, 1, 3, offset_bytes=48)),
    (51,),
    value_dim=48,
    quantised=(Quantised("latent", "scales", 16, "ue8m0"),),
)


@pytest.mark.parametrize("row_format", [ONE_SCALE, THREE_SCALES], ids=lambda row_format: row_format.name)
def test_formats_of_ones_own(backend: str, row_format: RowFormat) -> None:
    """Any bytes are codes here; V ends inside the codes, and scales without room behind them lie at odd bytes."""
    view = make_view(row_format, 16, 4, seed=2)
    if row_format is THREE_SCALES:
        latent, scales = view.tensor("latent"), view.tensor("scales")
        latent.copy_(torch.randn(latent.shape, generator=torch.Generator().manual_seed(0)).to(FP8))
        scales.copy_(torch.randint(120, 130, scales.shape, generator=torch.Generator().manual_seed(0)))
    else:
        view.tensor("scales").copy_(torch.rand(4, 16, 1, 1, generator=torch.Generator().manual_seed(0)))
        view.tensor("rope").copy_(torch.randn(4, 16, 1, 10, generator=torch.Generator().manual_seed(0)))
    columns = 58 if row_format is ONE_SCALE else 48
    table, slots = (
        torch.tensor([[3, 0, 2]], dtype=torch.int32),
        torch.cat([torch.arange(s, s + 16) for s in (48, 0, 32)]),
    )
    (keys,) = read_rows(view, slots, dtype=FP32, backend="reference")
    q = torch.randn(1, 3, columns, generator=torch.Generator().manual_seed(1)).to(FP16)
    lens = torch.tensor([37], dtype=torch.int32)
    batch = PagedBatch(view, table, lens, q, [keys[:37]], [keys[:37, :, : row_format.value_dim]])
    exact = with_rounded_rows(batch.exact(SCALE), batch, SCALE)
    expect_close(read(batch, backend), exact)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_scales_that_are_no_powers_of_two(backend: str, dtype: torch.dtype) -> None:
    batch = quantised_batch(V32, 16, (40, 3), 4, dtype, stretch=1.37)
    scales = batch.view.tensor("scales")[batch.block_table[0, 0].item(), 0].flatten()
    assert (scales.frexp().mantissa != 0.5).all()
    exact = batch.exact(SCALE)
    expect_close(read(batch, backend), exact if dtype is FP32 else with_rounded_rows(exact, batch, SCALE))


@pytest.mark.parametrize("row_len", [15, 16, 17, 31, 32, 33, 63, 64, 65], ids="{}rows".format)
def test_o45_lengths_around_the_block_and_the_tile(backend: str, row_len: int) -> None:
    batch = quantised_batch(SMALL, 16, (row_len,), 3)
    expect_close(read(batch, backend), batch.exact(SCALE))


@pytest.mark.parametrize(
    ("row_format", "num_splits"),
    [(SMALL, 1), (SMALL, 2), (SMALL, 7), (SMALL, None), (V4, 3)],
    ids=["1", "2", "7", "table", "dsv4-3"],
)
def test_any_number_of_splits(row_format: RowFormat, num_splits: int | None) -> None:
    batch = quantised_batch(row_format, 16, (110, 0, 1), 3)
    expect_close(read(batch, "triton", num_splits=num_splits), batch.exact(SCALE))


@pytest.mark.parametrize("row_format", [V32, V4], ids=lambda row_format: row_format.name)
def test_sinks(backend: str, row_format: RowFormat) -> None:
    batch = quantised_batch(row_format, 16, (40, 0, 5), 4)
    sinks = torch.tensor([0.5, -torch.inf, 3.0, 0.0])
    expect_close(read(batch, backend, sinks=sinks), with_sinks(batch.exact(SCALE), sinks))


@pytest.mark.parametrize("own_lens", [False, True], ids=["causal", "own-lens"])
@pytest.mark.parametrize("row_format", [V32, V4], ids=lambda row_format: row_format.name)
def test_several_queries_of_a_sequence(backend: str, row_format: RowFormat, own_lens: bool) -> None:
    batch = with_queries(quantised_batch(row_format, 16, (37, 2), 4), 3)
    lens = [[5, 37, 0], [2, 1, 2]] if own_lens else causal_lens((37, 2), 3)
    if own_lens:
        batch = replace(batch, row_lens=torch.tensor(lens, dtype=torch.int32))
    expect_close(read(batch, backend, num_splits=2), exact_queries(batch, lens, SCALE))


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_o36_what_lies_in_rows_never_written_does_not_matter(backend: str, name: str) -> None:
    with_nan, with_zeros = (quantised_batch(LATENT_FORMATS[name], 16, (13, 0, 20), 2, fill=fill) for fill in (0xFF, 0))
    for one, other in zip(read(with_nan, backend), read(with_zeros, backend), strict=True):
        assert torch.equal(one, other)


def test_what_lies_behind_the_scales_of_a_row_does_not_matter(backend: str) -> None:
    """Seven UE8M0 scales and a byte that is read along with them: 0xFF there would be a NaN."""
    batch = quantised_batch(V4, 16, (20,), 2)
    want = read(batch, backend)
    scales = batch.view.tensor("scales")
    behind = scales.as_strided((*scales.shape[:3], 1), scales.stride(), scales.storage_offset() + 7)
    assert not behind[batch.block_table[0, 0].item()].any()
    behind.fill_(0xFF)
    for one, other in zip(read(batch, backend), want, strict=True):
        assert torch.equal(one, other)


def test_a_nan_in_a_row_that_is_seen_shows_where_it_is_seen(backend: str) -> None:
    batch = quantised_batch(V32, 16, (20, 20), 2)
    batch.view.tensor("nope").view(torch.uint8)[batch.block_table[1, 0].item(), 3, 0, 7] = 0x7F
    out, lse = read(batch, backend)
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert lse[1].isnan().all()


@pytest.mark.parametrize("bad_id", [-1, 2**31 - 1, "num_blocks"])
@pytest.mark.parametrize("rows_per_block", [2, 64])
def test_rows_of_an_entry_that_names_no_block_do_not_exist(
    backend: str, rows_per_block: int, bad_id: int | str
) -> None:
    batch = quantised_batch(V4, rows_per_block, (rows_per_block + 9, 5), 2)
    batch.block_table[0, 1] = batch.view.num_blocks if bad_id == "num_blocks" else bad_id
    keep = torch.arange(len(batch.keys[0])) // rows_per_block != 1
    rows = [(rows[0][keep], rows[1]) for rows in (batch.keys, batch.values)]
    expect_close(read(batch, backend), attend(batch.q, *rows, SCALE))


@pytest.mark.parametrize("row_format", [SMALL, V32, V4], ids=lambda row_format: row_format.name)
def test_neither_the_batch_nor_the_order_of_blocks_changes_a_bit(row_format: RowFormat) -> None:
    batch, moved = (quantised_batch(row_format, 16, (40, 3, 0, 17), 4, block_seed=seed) for seed in (0, 1))
    assert not torch.equal(batch.block_table, moved.block_table)
    order = torch.tensor([2, 0, 3, 1])
    permuted = PagedBatch(batch.view, batch.block_table[order], batch.row_lens[order], batch.q[order], [], [])
    plain, again, other = (read(each, "triton", num_splits=2) for each in (batch, moved, permuted))
    for want, same, shuffled in zip(plain, again, other, strict=True):
        assert torch.equal(want, same)
        assert torch.equal(want[order], shuffled)


def test_o39_blocks_further_than_two_gibibytes_into_the_memory(backend: str) -> None:
    """Pages of 480 x 656 bytes: at block 6,822 the byte offset passes 2^31, at 27,285 that of words does."""
    batch = quantised_batch(V32, 480, (500,), 2)
    stride = batch.view.page_bytes + 16
    far = PageView(sparse_memory(48 + 27_300 * stride), 48, stride, 27_300, 480, V32)
    table = batch.block_table.clone()
    for column, block_id in enumerate((27_299, 6_822)):
        for part in ("nope", "scales", "rope"):
            far.tensor(part)[block_id].view(torch.uint8).copy_(
                batch.view.tensor(part)[batch.block_table[0, column].item()].view(torch.uint8)
            )
        table[0, column] = block_id
    expect_close(read(replace(batch, view=far, block_table=table), backend), batch.exact(SCALE))


@pytest.mark.parametrize("scale", [2.5, -0.75, 1.0], ids=str)
def test_a_scale_outside_the_cache_is_a_number_or_a_tensor(backend: str, scale: float) -> None:
    batch = quantised_batch(SMALL, 16, (20, 3), 3)
    keys = [rows / 0.3125 * scale for rows in batch.keys]
    exact = attend(batch.q, keys, [rows[..., :24] for rows in keys], SCALE)
    tensor = torch.tensor([scale])
    results = [read(batch, backend, row_scales=scales) for scales in (scale, (scale,), tensor, [tensor])]
    for got in results:
        expect_close(got, exact)
        assert torch.equal(got[0], results[0][0])
        assert torch.equal(got[1], results[0][1])
    if scale == 1.0:
        assert torch.equal(read(batch, backend, row_scales=None)[0], results[0][0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # such scales do that, in the interpreter
@pytest.mark.parametrize("scale", [float("inf"), float("nan")], ids=str)
def test_a_query_without_rows_gives_zero_whatever_the_scale(backend: str, scale: float) -> None:
    batch = quantised_batch(SMALL, 16, (0, 20), 2)
    out, lse = read(batch, backend, row_scales=torch.tensor([scale]))
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()


TWO_OUTSIDE = RowFormat(
    "two_outside",
    (RowPart("nope", FP8, 1, 32), RowPart("rope", FP8, 1, 16, offset_bytes=32)),
    (48,),
    value_dim=32,
    quantised=(Quantised("nope", None, 32, "fp32"), Quantised("rope", None, 16, "fp32")),
)
ARGUMENTS = {
    "view": make_view(V32, 16, 4),
    "block_table": torch.zeros(2, 1, dtype=torch.int32),
    "row_lens": torch.zeros(2, dtype=torch.int32),
    "q": torch.zeros(2, 3, 576, dtype=BF16),
    "softmax_scale": SCALE,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"view": make_view(indexer_format(), 16, 4)}, ValueError, "view: expected latent rows"),
        ({"view": make_view(TWO_OUTSIDE, 16, 4)}, ValueError, "view: expected one part of values where their scale"),
        ({"view": make_view(V4, 16, 4)}, ValueError, r"q: expected shape \[any, any, 512\], got \[2, 3, 576\]"),
        ({"q": torch.zeros(2, 3, 576, dtype=torch.float64)}, ValueError, "q: expected dtype"),
        ({"q": torch.zeros(2, 3, 576).to(FP8)}, ValueError, "q: expected dtype"),
        ({"row_scales": (1.0,)}, ValueError, "row_scales: expected None, for the scales lie in the rows"),
        (
            {"view": make_view(LATENT_FORMATS["latent_fp8"], 16, 4), "row_scales": (1.0, 2.0)},
            ValueError,
            "row_scales: expected one for each of latent",
        ),
        (
            {"view": make_view(LATENT_FORMATS["latent_fp8"], 16, 4), "row_scales": torch.ones(2)},
            ValueError,
            "row_scales of latent: expected one element",
        ),
        (
            {"view": make_view(latent_format(576, 512), 16, 4), "row_scales": 1.0},
            ValueError,
            "row_scales: expected None",
        ),
        ({"out": torch.zeros(2, 3, 576, dtype=BF16)}, ValueError, r"out: expected shape \[2, 3, 512\]"),
        ({"out": torch.zeros(2, 3, 512)}, ValueError, r"out: expected dtype torch\.bfloat16"),
    ],
)
def test_bad_arguments_name_themselves(
    backend: str, change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mla_decode(**ARGUMENTS | change, backend=backend)
