"""indexer_scores, Triton under the interpreter and the reference, against fp64; the budget is in `indexer_cases`."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore_kernels import (
    PageView,
    RowFormat,
    compute_slot_mapping,
    gather_rows,
    index_checks,
    indexer_format,
    indexer_scores,
    kv_format,
    latent_format,
)
from tests.cases import BACKENDS, POISON, make_view, sparse_memory
from tests.indexer_cases import decoded, expect_scores, score, scored_batch
from tests.query_cases import causal_lens

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = {"fp8": indexer_format(132), "mxfp4": indexer_format(68), "bf16": latent_format(128, 128)}
every_format = pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


# dtype of q, rows per block, format, heads
SHAPES = [
    (BF16, 64, indexer_format(132), 64),
    (FP16, 16, indexer_format(132, 576), 3),
    (BF16, 1, indexer_format(132, 512), 70),
    (BF16, 64, indexer_format(68), 64),
    (FP16, 48, indexer_format(68, 576), 40),
    (BF16, 1, indexer_format(68), 1),
    (BF16, 16, latent_format(128, 128), 64),
    (FP16, 64, latent_format(128, 64, FP16), 5),
    (BF16, 784, latent_format(72, 72), 2),
    (BF16, 16, latent_format(9, 9), 1),
]


@pytest.mark.parametrize(
    ("dtype", "rows_per_block", "row_format", "num_heads"),
    [pytest.param(*shape, id=f"{shape[2].name}-{shape[0]}-{shape[1]}rows-{shape[3]}heads") for shape in SHAPES],
)
def test_every_format_dtype_and_block_size_is_within_budget(
    backend: str, dtype: torch.dtype, rows_per_block: int, row_format: RowFormat, num_heads: int
) -> None:
    batch = scored_batch(row_format, rows_per_block, (70, 0, 33, 1), num_heads, dtype)
    got = score(batch, backend)
    assert got.shape == (4, batch.block_table.shape[1] * rows_per_block)
    expect_scores(got, batch)


@every_format
def test_the_budget_tells_one_head_from_none(row_format: RowFormat) -> None:
    batch = scored_batch(row_format, 16, (20,), 8)
    got = score(batch, "triton")
    batch.weights[0, 3] *= 1.001
    with pytest.raises(AssertionError, match="of the error budget used"):
        expect_scores(got, batch)


@every_format
@pytest.mark.parametrize("num_queries", [1, 2, 7])
def test_each_query_before_the_last_sees_one_row_less(backend: str, row_format: RowFormat, num_queries: int) -> None:
    batch = scored_batch(row_format, 16, (70, 3, 0), 5, num_queries=num_queries)
    expect_scores(score(batch, backend), batch, causal_lens((70, 3, 0), num_queries))


@every_format
def test_each_query_may_see_its_own_number_of_rows(backend: str, row_format: RowFormat) -> None:
    batch = scored_batch(row_format, 16, (70, 33), 5, num_queries=5)
    lens = [[70, 0, 16, -3, 65], [1, 33, 17, 32, -(2**31)]]
    row_lens = torch.tensor(lens, dtype=torch.int32)
    expect_scores(score(batch, backend, row_lens=row_lens), batch, lens)


def test_one_query_on_an_axis_gives_the_same_bits_as_none(backend: str) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (70, 33), 5)
    one = score(batch, backend, q=batch.q[:, None], weights=batch.weights[:, None])
    assert torch.equal(one[:, 0], score(batch, backend))


@every_format
def test_what_lies_in_rows_never_written_does_not_matter(backend: str, row_format: RowFormat) -> None:
    with_nan, with_zeros = (scored_batch(row_format, 16, (13, 47, 0), 4, fill=fill) for fill in (POISON, 0))
    assert torch.equal(score(with_nan, backend), score(with_zeros, backend))


@every_format
def test_a_row_whose_key_or_scale_is_nan_scores_nan_and_no_other_does(backend: str, row_format: RowFormat) -> None:
    for part in row_format.parts if row_format.name != "indexer_mxfp4" else row_format.parts[1:]:
        batch = scored_batch(row_format, 16, (40,), 4)
        place = batch.view.tensor(part.name)[batch.block_table[0, 1].item(), 3]
        place.view(torch.uint8).fill_(POISON)
        got = score(batch, backend)[0]
        assert got[19].isnan()
        assert got[:40].isnan().sum() == 1


@every_format
@pytest.mark.parametrize("rows_per_block", [16, 64])
@pytest.mark.parametrize("bad_id", [-1, -(2**31), 2**31 - 1, "num_blocks"])
def test_rows_of_an_entry_that_names_no_block_are_minus_infinity(
    backend: str, row_format: RowFormat, rows_per_block: int, bad_id: int | str
) -> None:
    batch = scored_batch(row_format, rows_per_block, (2 * rows_per_block + 9,), 2)
    batch.block_table[0, 1] = batch.view.num_blocks if bad_id == "num_blocks" else bad_id
    got = score(batch, backend)
    assert (got[0, rows_per_block : 2 * rows_per_block] == -math.inf).all()
    others = score(scored_batch(row_format, rows_per_block, (2 * rows_per_block + 9,), 2), backend)
    others[0, rows_per_block : 2 * rows_per_block] = -math.inf
    assert torch.equal(got, others)


def test_rows_of_a_column_past_the_table_have_no_score(backend: str) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (70,), 2)
    whole = score(batch, backend)
    got = score(batch, backend, block_table=batch.block_table[:, :2], out=torch.empty(1, 70))
    assert torch.equal(got[:, :32], whole[:, :32])
    assert (got[:, 32:] == -math.inf).all()


@pytest.mark.parametrize("num_columns", [0, 1, 33, 64, 96, 97, 200])
def test_results_go_to_the_columns_given_and_nowhere_else(backend: str, num_columns: int) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (70, 33), 2, num_queries=3)
    memory = torch.full((2 * 3 * num_columns + 128,), 7.0)
    out = memory[64 : 64 + 6 * num_columns].view(2, 3, num_columns)
    got = score(batch, backend, out=out)
    assert got is out
    lens = [[min(row_len, num_columns) for row_len in seq_lens] for seq_lens in causal_lens((70, 33), 3)]
    expect_scores(out, batch, lens)
    assert (memory[:64] == 7).all()
    assert (memory[64 + 6 * num_columns :] == 7).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_sequences_or_no_queries(backend: str, shape: tuple[int, ...]) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (20, 5), 2)
    got = score(
        batch,
        backend,
        block_table=batch.block_table[: shape[0]],
        row_lens=batch.row_lens[: shape[0]],
        q=torch.zeros(*shape, 2, 128, dtype=BF16),
        weights=torch.zeros(*shape, 2),
    )
    assert got.shape == (*shape, 48)


@pytest.mark.parametrize("gap", [0, 8, 3], ids="gap{}".format)
def test_queries_and_tables_may_be_slices_of_wider_tensors(backend: str, gap: int) -> None:
    batch = scored_batch(FORMATS["mxfp4"], 16, (20, 33), 4)
    fused = torch.full((2, 4 * 128 + gap), torch.nan, dtype=BF16)
    q = fused[:, : 4 * 128].unflatten(1, (4, 128))
    q.copy_(batch.q)
    wide = torch.full((2, 9), 1, dtype=torch.int32)
    wide[:, : batch.block_table.shape[1]] = batch.block_table
    table = wide[:, : batch.block_table.shape[1]]
    expect_scores(score(batch, backend, q=q, block_table=table), batch)


def test_queries_need_not_be_contiguous(backend: str) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (20, 33), 4, num_queries=3)
    q = torch.full((2, 4, 3, 256), torch.nan, dtype=BF16)[..., ::2].transpose(1, 2)
    q.copy_(batch.q)
    expect_scores(score(batch, backend, q=q), batch, causal_lens((20, 33), 3))


@every_format
def test_o39_blocks_further_than_two_gibibytes_into_the_memory(backend: str, row_format: RowFormat) -> None:
    batch = scored_batch(row_format, 16, (40,), 2)
    stride = 2**35 + 48
    far = PageView(sparse_memory(48 + 6 * stride), 48, stride, 6, 16, row_format)
    for column, block_id in enumerate((5, 2, 3)):
        for part in row_format.parts:
            source, target = (view.tensor(part.name).view(torch.uint8) for view in (batch.view, far))
            target[block_id] = source[batch.block_table[0, column].item()]
        batch.block_table[0, column] = block_id
    expect_scores(score(batch, backend, view=far), batch)


def test_extreme_exponents_of_mxfp4_scales(backend: str) -> None:
    """2^-127 and 2^100 in one row: exact in bf16, far out of the range of fp16."""
    for dtype in (BF16, FP16):
        batch = scored_batch(FORMATS["mxfp4"], 16, (5,), 2, dtype)
        scales = batch.view.tensor("scales")[batch.block_table[0, 0].item()]
        scales[:5, 0] = torch.tensor([0, 227, 127, 1], dtype=torch.uint8)
        keys = [decoded(batch.view, batch.block_table[0, 0].item(), row) for row in range(5)]
        expect_scores(score(batch, backend), replace(batch, keys=[np.array(keys)]))


def test_every_fp16_number_is_the_sum_of_two_of_bf16() -> None:
    """What lets fp16 queries meet MXFP4 keys, whose exponents fp16 lacks, without rounding."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FP16)
    numbers = numbers[numbers.isfinite()].float()
    high = numbers.to(BF16).float()
    low = (numbers - high).to(BF16).float()
    assert torch.equal(high + low, numbers)


def test_the_best_rows_become_slots(backend: str) -> None:
    """The example of the docstring: top-k rows of the indexer, looked up in the table of another group."""
    batch = scored_batch(FORMATS["fp8"], 16, (70, 3), 4)
    latent = make_view(latent_format(16, 16), 8, 40)
    latent_table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    num_seqs, k = 2, 5
    top = score(batch, backend).topk(k)
    positions = torch.where(top.values == -math.inf, -1, top.indices)
    seq_idx = torch.arange(num_seqs, dtype=torch.int32).repeat_interleave(k)
    slots = compute_slot_mapping(latent_table, positions.flatten(), seq_idx, latent.rows_per_block, backend=backend)
    q, weights = batch.q.double(), batch.weights.double()
    for found, seq_q, seq_weights, keys, table in zip(
        slots.view(num_seqs, k), q, weights, batch.keys, latent_table, strict=True
    ):
        wanted = (seq_weights[:, None] * (seq_q @ torch.from_numpy(keys).T).relu()).sum(0)
        best = wanted.argsort(descending=True)[:k].tolist()
        expected = [table[row // 8].item() * 8 + row % 8 for row in best]
        assert found.tolist() == expected + [-1] * (k - len(expected))


def test_the_keys_are_those_that_a_gather_gives(backend: str) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (40,), 1)
    (keys,) = gather_rows(
        batch.view,
        batch.block_table,
        torch.tensor([0, 40], dtype=torch.int32),
        num_rows=40,
        dtype=FP32,
        backend=backend,
    )
    assert np.allclose(keys[:, 0].double().numpy(), batch.keys[0], rtol=1e-6, atol=0)


def test_index_checks_look_at_the_table(backend: str) -> None:
    batch = scored_batch(FORMATS["fp8"], 16, (40,), 1)
    batch.block_table[0, 1] = -1
    with index_checks(), pytest.raises(ValueError, match="block_table: expected a block in"):
        score(batch, backend)


TWO_HEADS = kv_format(2, 64)
BAD = {
    "view": ({"view": "pages"}, TypeError, "view: expected a PageView, got str"),
    "format": ({"view": make_view(TWO_HEADS)}, ValueError, "view: expected keys of an indexer .*, got format 'kv'"),
    "fp8-latent": (
        {"view": make_view(latent_format(128, 128, torch.float8_e4m3fn))},
        ValueError,
        "view: expected keys of an indexer .*, got format 'latent'",
    ),
    "fp32": (
        {"view": make_view(latent_format(128, 128, FP32))},
        ValueError,
        "view: expected keys of an indexer .*, got format 'latent'",
    ),
    "q-type": ({"q": None}, TypeError, r"q: expected a torch\.Tensor, got NoneType"),
    "q-dtype": (
        {"q": torch.zeros(2, 4, 128)},
        ValueError,
        "q: expected dtype torch.bfloat16 or torch.float16, got torch.float32",
    ),
    "q-of-plain-keys": (
        {"view": make_view(latent_format(128, 128)), "q": torch.zeros(2, 4, 128, dtype=FP16)},
        ValueError,
        "q: expected dtype torch.bfloat16, got torch.float16",
    ),
    "q-dim": (
        {"q": torch.zeros(2, 4, 64, dtype=BF16)},
        ValueError,
        r"q: expected shape \[any, any, 128\], got \[2, 4, 64\]",
    ),
    "q-heads": ({"q": torch.zeros(2, 0, 128, dtype=BF16)}, ValueError, "q: expected a number of heads .*, got 0"),
    "weights-shape": (
        {"weights": torch.zeros(2, 5)},
        ValueError,
        r"weights: expected shape \[2, 4\], got \[2, 5\]",
    ),
    "weights-dtype": (
        {"weights": torch.zeros(2, 4, dtype=BF16)},
        ValueError,
        "weights: expected dtype torch.float32, got torch.bfloat16",
    ),
    "weights-strides": ({"weights": torch.zeros(4, 2).T}, ValueError, "weights: expected a contiguous tensor"),
    "weights-type": ({"weights": None}, TypeError, r"weights: expected a torch\.Tensor, got NoneType"),
    "lens": (
        {"row_lens": torch.zeros(2, 1, dtype=torch.int32)},
        ValueError,
        r"row_lens: expected shape \[2\], got \[2, 1\]",
    ),
    "table": (
        {"block_table": torch.zeros(2, 0, dtype=torch.int32)},
        ValueError,
        "block_table: expected at least one column, got none",
    ),
    "out-axes": ({"out": torch.zeros(2, 1, 48)}, ValueError, r"out: expected shape \[2, any\], got \[2, 1, 48\]"),
    "out-dtype": (
        {"out": torch.zeros(2, 48, dtype=BF16)},
        ValueError,
        "out: expected dtype torch.float32, got torch.bfloat16",
    ),
    "out-strides": ({"out": torch.zeros(2, 96)[:, ::2]}, ValueError, "out: expected a contiguous tensor"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: expected one of triton, reference or None, got 'cuda'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_name_themselves_and_nothing_is_written(backend: str, case: str) -> None:
    changes, error, message = BAD[case]
    batch = scored_batch(FORMATS["fp8"], 16, (20, 33), 4)
    out = torch.full((2, 48), 7.0)
    options = {"out": out, "backend": backend} | changes
    arguments = {name: getattr(batch, name) for name in ("view", "block_table", "row_lens", "q", "weights")}
    with pytest.raises(error, match=message):
        indexer_scores(**arguments | options)
    assert (out == 7).all()
