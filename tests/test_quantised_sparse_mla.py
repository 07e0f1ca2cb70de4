"""sparse_mla_decode over quantised latent rows, Triton under the interpreter and the reference, against fp64 attention.

The rows of the fp64 result and the error budget are those of `test_quantised_mla`.
"""

from dataclasses import replace

import pytest
import torch

from kvstore_kernels import latent_format, mla_decode, sparse_mla_decode
from kvstore_kernels.quantised import FP8
from tests.attention_oracle import PagedBatch, attend
from tests.cases import BACKENDS, make_view
from tests.latent_cases import LATENT_FORMATS, expect_close, quantised_batch, scales_of, with_rounded_rows
from tests.test_sinks_and_caps import with_sinks
from tests.test_sparse_mla import slots_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALE = 0.06
V32, V4 = LATENT_FORMATS["fp8_ds_mla"], LATENT_FORMATS["dsv4"]
MXFP8, NVFP4 = LATENT_FORMATS["mxfp8_latent"], LATENT_FORMATS["nvfp4_latent"]
SMALL = latent_format(40, 24, FP8)
LISTED = [[39, 0, 33, -1, 5, 16, 15], [2], [-1, -1]]
LENS = (40, 3, 5)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def read(
    batch: PagedBatch, listed: list[list[int]], backend: str, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = {"softmax_scale": SCALE, **scales_of(batch.view.format)} | options
    return sparse_mla_decode(batch.view, slots_of(batch, listed), batch.q, backend=backend, **arguments)


def listed_rows(batch: PagedBatch, listed: list[list[int]]) -> PagedBatch:
    """The batch with the rows that are listed alone."""
    keep = [torch.tensor([at for at in positions if at >= 0]).long() for positions in listed]
    keys, values = ([rows[at] for rows, at in zip(each, keep, strict=True)] for each in (batch.keys, batch.values))
    return replace(batch, keys=keys, values=values)


def joined(one: PagedBatch, other: PagedBatch) -> PagedBatch:
    """The queries of one batch over the rows of both."""
    keys = [torch.cat(pair) for pair in zip(one.keys, other.keys, strict=True)]
    values = [torch.cat(pair) for pair in zip(one.values, other.values, strict=True)]
    return replace(one, keys=keys, values=values)


# format, rows per block, heads, dtype of the queries
SHAPES = [
    ("fp8_ds_mla", 64, 16, BF16),
    ("fp8_ds_mla", 1, 2, FP32),
    ("dsv4", 2, 3, BF16),
    ("dsv4", 48, 18, FP16),
    ("mxfp8_latent", 16, 3, BF16),
    ("mxfp8_latent_split", 2, 2, BF16),
    ("nvfp4_latent", 64, 2, BF16),
    ("nvfp4_latent_split", 1, 2, FP16),
    ("nvfp4_ds_mla", 16, 2, BF16),
    ("latent_fp8", 48, 2, BF16),
]


@pytest.mark.parametrize(
    ("name", "rows_per_block", "num_heads", "dtype"),
    [pytest.param(*shape, id="-".join(map(str, shape)).replace("torch.", "")) for shape in SHAPES],
)
def test_listed_rows_only(backend: str, name: str, rows_per_block: int, num_heads: int, dtype: torch.dtype) -> None:
    batch = quantised_batch(LATENT_FORMATS[name], rows_per_block, LENS, num_heads, dtype)
    got = read(batch, LISTED, backend, num_splits=2)
    assert got[0].shape == (3, num_heads, 512)
    assert got[0].dtype is dtype
    expect_close(got, listed_rows(batch, LISTED).exact(SCALE))


@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_all_rows_in_any_order_are_dense_attention(backend: str, num_splits: int | None) -> None:
    batch = quantised_batch(V4, 16, (33, 70), 4, FP32)
    listed: list[list[int]] = [torch.randperm(33).tolist(), torch.randperm(70).tolist()]
    got = read(batch, listed, backend, num_splits=num_splits)
    expect_close(got, batch.exact(SCALE))
    dense = mla_decode(batch.view, batch.block_table, batch.row_lens, batch.q, softmax_scale=SCALE, backend=backend)
    torch.testing.assert_close(got, dense, rtol=1e-4, atol=1e-5)


def test_scales_that_are_no_powers_of_two(backend: str) -> None:
    batch = quantised_batch(V32, 16, LENS[:2], 3, stretch=0.83)
    rows = listed_rows(batch, LISTED[:2])
    expect_close(read(batch, LISTED[:2], backend), with_rounded_rows(rows.exact(SCALE), rows, SCALE))


@pytest.mark.parametrize("slot", [-1, -(2**31), 2**31 - 1, "num_slots"])
@pytest.mark.parametrize("name", ["fp8_ds_mla", "dsv4", "nvfp4_latent"])
def test_o42_slots_that_name_no_row_are_skipped(backend: str, name: str, slot: int | str) -> None:
    """NaN lies in every row nobody wrote: a slot read by mistake would show."""
    batch = quantised_batch(LATENT_FORMATS[name], 16, (20,), 2)
    listed = [[3, 7, 19]]
    bad = torch.full((1, 3), batch.view.num_slots if isinstance(slot, str) else slot)
    slots = torch.cat([bad, slots_of(batch, listed)], 1)
    got = sparse_mla_decode(batch.view, slots, batch.q, softmax_scale=SCALE, backend=backend)
    expect_close(got, listed_rows(batch, listed).exact(SCALE))


CACHES = {
    "V4": (V4, 16, V4, 2),
    "V4.1": (MXFP8, 16, NVFP4, 64),
    "V4.1 split": (LATENT_FORMATS["mxfp8_latent_split"], 64, LATENT_FORMATS["nvfp4_latent_split"], 1),
}


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf, 3.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("caches", CACHES)
def test_two_caches_are_one_list(backend: str, caches: str, sinks: torch.Tensor | None) -> None:
    """The window and the compressed rows, in pages of their own and, in V4.1, of another format."""
    first_format, first_rows, second_format, second_rows = CACHES[caches]
    window = quantised_batch(first_format, first_rows, (40, 3), 3)
    compressed = quantised_batch(second_format, second_rows, (12, 9), 3, block_seed=5, gap_bytes=1024)
    first, second = [[0, 39, 7], []], [[11, 3], [8, 0, 1]]
    got = read(window, first, backend, second=(compressed.view, slots_of(compressed, second)), sinks=sinks)
    exact = joined(listed_rows(window, first), listed_rows(compressed, second)).exact(SCALE)
    expect_close(got, exact if sinks is None else with_sinks(exact, sinks))


def test_two_caches_share_a_scale_outside(backend: str) -> None:
    first = quantised_batch(SMALL, 16, (20,), 2)
    second = quantised_batch(SMALL, 2, (9,), 2, block_seed=5)
    got = read(first, [[3, 19]], backend, second=(second.view, slots_of(second, [[8, 0]])))
    expect_close(got, joined(listed_rows(first, [[3, 19]]), listed_rows(second, [[8, 0]])).exact(SCALE))


def test_a_scale_outside_the_cache_is_a_number_or_a_tensor(backend: str) -> None:
    batch = quantised_batch(SMALL, 16, (20, 3), 3)
    listed = [[3, 19, 4], [0]]
    keys = [rows / 0.3125 * 1.7 for rows in listed_rows(batch, listed).keys]
    exact = attend(batch.q, keys, [rows[..., :24] for rows in keys], SCALE)
    results = [read(batch, listed, backend, row_scales=scales) for scales in (1.7, (1.7,), torch.tensor([1.7]))]
    for got in results:
        expect_close(got, exact)
        assert torch.equal(got[0], results[0][0])


@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_o36_what_lies_in_rows_never_written_does_not_matter(backend: str, name: str) -> None:
    batches = [quantised_batch(LATENT_FORMATS[name], 2, (7,), 2, fill=fill) for fill in (0xFF, 0)]
    with_nan, with_zeros = (read(batch, [[6, -1, 0]], backend) for batch in batches)
    for one, other in zip(with_nan, with_zeros, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("row_format", [SMALL, V32, V4], ids=lambda row_format: row_format.name)
def test_neither_the_batch_nor_the_order_of_blocks_changes_a_bit(row_format) -> None:
    batch, moved = (quantised_batch(row_format, 16, LENS, 4, block_seed=seed) for seed in (0, 1))
    order = torch.tensor([2, 0, 1])
    permuted = replace(batch, block_table=batch.block_table[order], q=batch.q[order])
    plain, again = (read(each, LISTED, "triton", num_splits=2) for each in (batch, moved))
    other = read(permuted, [LISTED[at] for at in order], "triton", num_splits=2)
    for want, same, shuffled in zip(plain, again, other, strict=True):
        assert torch.equal(want, same)
        assert torch.equal(want[order], shuffled)


def test_no_slots(backend: str) -> None:
    batch = quantised_batch(V4, 16, (5, 6), 4)
    out, lse = read(batch, [[], []], backend)
    assert not out.any()
    assert (lse == -torch.inf).all()


ARGUMENTS = {
    "view": make_view(V4, 16, 4),
    "slots": torch.zeros(2, 3, dtype=torch.int64),
    "q": torch.zeros(2, 4, 512, dtype=BF16),
    "softmax_scale": SCALE,
}
ONE_SLOT = torch.zeros(2, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 512, dtype=torch.float64)}, "q: expected dtype"),
        ({"q": torch.zeros(2, 4, 576, dtype=BF16)}, r"q: expected shape \[any, any, 512\], got \[2, 4, 576\]"),
        (
            {"second": (make_view(V32, 16, 4), ONE_SLOT)},
            "second: expected rows of 512 quantised columns with 512 as V, got 576 quantised columns with 512",
        ),
        (
            {"second": (make_view(latent_format(512, 512), 16, 4), ONE_SLOT)},
            r"second: expected rows of 512 quantised columns with 512 as V, got 512 torch\.bfloat16 with 512",
        ),
        ({"row_scales": 1.0}, "row_scales: expected None, for the scales lie in the rows"),
        ({"out": torch.zeros(2, 4, 448, dtype=BF16)}, r"out: expected shape \[2, 4, 512\]"),
    ],
)
def test_bad_arguments_name_themselves(backend: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_mla_decode(**ARGUMENTS | change, backend=backend)
