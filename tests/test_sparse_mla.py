"""sparse_mla_decode, Triton under the interpreter and the reference, against fp64 attention over the listed rows."""

import math

import pytest
import torch

from kvstore_kernels import kv_format, latent_format, mla_decode, sparse_mla_decode
from tests.attention_oracle import Exact, PagedBatch, attend, expect_within_budget, paged_batch
from tests.cases import BACKENDS, make_view

SCALE = 0.11


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def slots_of(batch: PagedBatch, listed: list[list[int]], dtype=torch.int64) -> torch.Tensor:
    """The slots of row positions per sequence; -1 stays, and fills up shorter lists."""
    width = max(map(len, listed), default=0)
    slots = torch.full((len(listed), width), -1, dtype=dtype)
    rows = batch.view.rows_per_block
    for seq_idx, positions in enumerate(listed):
        for at, position in enumerate(positions):
            if position >= 0:
                slots[seq_idx, at] = int(batch.block_table[seq_idx, position // rows]) * rows + position % rows
    return slots


def exact_of(batch: PagedBatch, listed: list[list[int]]) -> Exact:
    keep = [torch.tensor([position for position in positions if position >= 0]).long() for positions in listed]
    keys = [keys[rows] for keys, rows in zip(batch.keys, keep, strict=True)]
    return attend(batch.q, keys, [values[rows] for values, rows in zip(batch.values, keep, strict=True)], SCALE)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "rows_per_block", "dims", "num_heads"),
    [
        (torch.bfloat16, 64, (576, 512), 16),
        (torch.bfloat16, 2, (512, 512), 3),
        (torch.float32, 48, (72, 64), 5),
        (torch.float16, 1, (96, 40), 17),
    ],
    ids=str,
)
def test_listed_rows_only(backend, dtype, rows_per_block, dims, num_heads, num_splits):
    batch = paged_batch(latent_format(*dims, dtype), rows_per_block, (70, 1, 40), num_heads)
    listed = [[69, 0, 33, -1, 5, 64], [0], [-1, -1]]
    got = sparse_mla_decode(
        batch.view, slots_of(batch, listed), batch.q, softmax_scale=SCALE, num_splits=num_splits, backend=backend
    )
    assert got[0].dtype is dtype
    expect_within_budget(got, exact_of(batch, listed))


def test_all_rows_in_any_order_are_dense_attention(backend):
    batch = paged_batch(latent_format(72, 64, torch.float32), 16, (33, 70), 4)
    listed = [torch.randperm(33).tolist(), torch.randperm(70).tolist()]
    got = sparse_mla_decode(
        batch.view, slots_of(batch, listed, torch.int32), batch.q, softmax_scale=SCALE, backend=backend
    )
    expect_within_budget(got, batch.exact(SCALE))
    dense = mla_decode(batch.view, batch.block_table, batch.row_lens, batch.q, softmax_scale=SCALE, backend=backend)
    torch.testing.assert_close(got, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slot", [-1, -2, -(2**31), 2**31 - 1])
def test_o42_slots_that_name_no_row_are_skipped(backend, slot):
    """NaN lies in every row nobody wrote: a slot read by mistake would show."""
    batch = paged_batch(latent_format(72, 64, torch.bfloat16), 16, (20,), 4)
    listed = [[3, 7, 19]]
    slots = slots_of(batch, listed, torch.int32)
    got = sparse_mla_decode(
        batch.view,
        torch.cat([torch.full((1, 3), slot, dtype=torch.int32), slots], 1),
        batch.q,
        softmax_scale=SCALE,
        backend=backend,
    )
    expect_within_budget(got, exact_of(batch, listed))


def test_the_first_slot_past_the_last_is_skipped(backend):
    batch = paged_batch(latent_format(72, 64, torch.bfloat16), 16, (20,), 4)
    slots = slots_of(batch, [[3, 19]])
    past = torch.cat([slots, torch.tensor([[batch.view.num_slots, 2**40]])], 1)
    one, other = (
        sparse_mla_decode(batch.view, each, batch.q, softmax_scale=SCALE, num_splits=1, backend=backend)
        for each in (slots, past)
    )
    torch.testing.assert_close(one, other)


def test_a_row_listed_twice_counts_twice(backend):
    batch = paged_batch(latent_format(72, 64, torch.float32), 16, (5,), 4)
    listed = [[2, 2, 4]]
    got = sparse_mla_decode(batch.view, slots_of(batch, listed), batch.q, softmax_scale=SCALE, backend=backend)
    expect_within_budget(got, exact_of(batch, listed))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -math.inf, 3.0, 0.0])])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_two_caches_are_one_list(backend, sinks, num_splits):
    """DeepSeek V4: rows of the window and compressed rows, in pages of their own."""
    window = paged_batch(latent_format(64, 64, torch.float32), 16, (40, 3), 4)
    compressed = paged_batch(latent_format(64, 64, torch.float32), 2, (12, 9), 4, block_seed=5, gap_bytes=1024)
    first, second = [[0, 39, 7], []], [[11, 3], [8, 0, 1]]
    out, lse = sparse_mla_decode(
        window.view,
        slots_of(window, first),
        window.q,
        softmax_scale=SCALE,
        second=(compressed.view, slots_of(compressed, second)),
        sinks=sinks,
        num_splits=num_splits,
        backend=backend,
    )
    keys = [
        torch.cat([window.keys[at][first[at]], compressed.keys[at][second[at]]])  # row positions per sequence
        for at in range(2)
    ]
    exact = attend(window.q, keys, [each[..., :64] for each in keys], SCALE)
    if sinks is not None:
        share = torch.sigmoid(exact.lse - sinks.double())[..., None]
        exact = Exact(exact.out * share, exact.lse, exact.out_budget + 1e-5, exact.lse_budget)
    expect_within_budget((out, lse), exact)


def test_no_slots_and_no_sequences(backend):
    batch = paged_batch(latent_format(72, 64, torch.bfloat16), 16, (5, 6), 4)
    out, lse = sparse_mla_decode(
        batch.view, torch.empty(2, 0, dtype=torch.int32), batch.q, softmax_scale=SCALE, backend=backend
    )
    assert not out.any()
    assert (lse == -math.inf).all()
    empty = sparse_mla_decode(
        batch.view, torch.empty(0, 3, dtype=torch.int64), batch.q[:0], softmax_scale=SCALE, backend=backend
    )
    assert empty[0].shape == (0, 4, 64)


def test_outputs_can_be_given(backend):
    batch = paged_batch(latent_format(72, 64, torch.bfloat16), 16, (5,), 4)
    slots = slots_of(batch, [[0, 4]])
    out, lse = torch.full((1, 4, 64), -7.0, dtype=torch.bfloat16), torch.zeros(1, 4)
    got = sparse_mla_decode(batch.view, slots, batch.q, softmax_scale=SCALE, out=out, lse=lse, backend=backend)
    assert got[0] is out
    assert got[1] is lse
    expect_within_budget(got, exact_of(batch, [[0, 4]]))


LATENT = make_view(latent_format(72, 64), 16, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"slots": torch.zeros(3, 2, dtype=torch.int64)},
            ValueError,
            r"slots: expected shape \[2, any\], got \[3, 2\]",
        ),
        ({"slots": torch.zeros(2, 2)}, ValueError, r"slots: expected dtype torch\.int32 or torch\.int64"),
        (
            {"slots": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]},
            ValueError,
            "slots: expected adjacent slots in a row",
        ),
        ({"slots": [[0]]}, TypeError, r"slots: expected a torch\.Tensor, got list"),
        ({"view": make_view(kv_format(1, 72), 16, 4)}, ValueError, "view: expected latent rows"),
        ({"q": torch.zeros(2, 4, 64, dtype=torch.bfloat16)}, ValueError, r"q: expected shape \[any, any, 72\]"),
        ({"q": torch.zeros(2, 0, 72, dtype=torch.bfloat16)}, ValueError, "q: expected at least one head, got none"),
        ({"q": torch.zeros(2, 4, 72)}, ValueError, r"q: expected dtype torch\.bfloat16"),
        ({"second": LATENT}, TypeError, "second: expected a pair of PageView and slots"),
        (
            {"second": (make_view(latent_format(64, 64), 16, 4), torch.zeros(2, 1, dtype=torch.int64))},
            ValueError,
            r"second: expected rows of 72 torch\.bfloat16 with 64 as V, got 64 torch\.bfloat16 with 64",
        ),
        ({"softmax_scale": None}, TypeError, "softmax_scale: expected a number, got None"),
        ({"num_splits": 0}, ValueError, "num_splits: expected an integer in"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks: expected shape \[4\], got \[3\]"),
        ({"out": torch.zeros(2, 4, 72, dtype=torch.bfloat16)}, ValueError, r"out: expected shape \[2, 4, 64\]"),
    ],
)
def test_bad_arguments_name_themselves(backend, change, error, message):
    arguments = {
        "view": LATENT,
        "slots": torch.zeros(2, 3, dtype=torch.int64),
        "q": torch.zeros(2, 4, 72, dtype=torch.bfloat16),
        "softmax_scale": SCALE,
    } | change
    with pytest.raises(error, match=message):
        sparse_mla_decode(**arguments, backend=backend)
