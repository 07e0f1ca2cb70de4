"""What gqa_decode and mla_decode refuse: both check the same arguments, and a refused call writes nothing."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from kvstore_kernels import RowFormat, RowPart, gqa_decode, kv_format, latent_format, mla_decode
from tests.attention_oracle import expect_within_budget, paged_batch
from tests.cases import BACKENDS

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
OPS: dict[str, tuple[Callable[..., object], RowFormat]] = {
    "gqa_decode": (gqa_decode, kv_format(2, 64, 48)),
    "mla_decode": (mla_decode, latent_format(64, 48)),
}


def call(op: str, backend: str, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls with these arguments instead of good ones; returns the tensors a good call would have written, all 7."""
    function, row_format = OPS[op]
    batch = paged_batch(row_format, 16, (20, 33), 4)
    out, lse = torch.full((2, 4, 48), 7.0, dtype=BF16), torch.full((2, 4), 7.0)
    good = {
        "view": batch.view,
        "block_table": batch.block_table,
        "row_lens": batch.row_lens,
        "q": batch.q,
        "softmax_scale": 0.125,
        "out": out,
        "lse": lse,
    }
    function(**good | changes, backend=backend)
    return out, lse


REFUSED = {
    "view": ({"view": "pages"}, "view: expected a PageView, got str"),
    "q-type": ({"q": None}, "q: expected a torch.Tensor, got NoneType"),
    "q-shape": ({"q": torch.zeros(2, 4, 32, dtype=BF16)}, r"q: expected shape \[any, any, 64\], got \[2, 4, 32\]"),
    "q-dtype": ({"q": torch.zeros(2, 4, 64)}, "q: expected dtype torch.bfloat16, got torch.float32"),
    "q-heads": (
        {"q": torch.zeros(2, 0, 64, dtype=BF16)},
        "q: expected a number of heads that is a multiple of .*, got 0",
    ),
    "q-device": (
        {"q": torch.zeros(2, 4, 64, dtype=BF16, device="meta")},
        "q: expected a tensor on cpu, got one on meta",
    ),
    "table-shape": (
        {"block_table": torch.zeros(3, 4, dtype=INT32)},
        r"block_table: expected shape \[2, any\], got \[3, 4\]",
    ),
    "table-width": (
        {"block_table": torch.zeros(2, 0, dtype=INT32)},
        "block_table: expected at least one column, got none",
    ),
    "table-dtype": (
        {"block_table": torch.zeros(2, 4, dtype=torch.int64)},
        "block_table: expected dtype torch.int32, got torch.int64",
    ),
    "table-strides": (
        {"block_table": torch.zeros(4, 2, dtype=INT32).T},
        r"block_table: expected adjacent entries in a row, got strides \(1, 2\)",
    ),
    "table-device": (
        {"block_table": torch.zeros(2, 4, dtype=INT32, device="meta")},
        "block_table: expected a tensor on cpu, got one on meta",
    ),
    "lens-shape": ({"row_lens": torch.zeros(2, 1, dtype=INT32)}, r"row_lens: expected shape \[2\], got \[2, 1\]"),
    "lens-dtype": (
        {"row_lens": torch.zeros(2, dtype=torch.int64)},
        "row_lens: expected dtype torch.int32, got torch.int64",
    ),
    "lens-strides": (
        {"row_lens": torch.zeros(4, dtype=INT32)[::2]},
        r"row_lens: expected a contiguous tensor, got strides \(2,\)",
    ),
    "lens-device": (
        {"row_lens": torch.zeros(2, dtype=INT32, device="meta")},
        "row_lens: expected a tensor on cpu, got one on meta",
    ),
    "scale": ({"softmax_scale": "small"}, "softmax_scale: expected a number, got 'small'"),
    "scale-bool": ({"softmax_scale": True}, "softmax_scale: expected a number, got True"),
    "scale-nan": ({"softmax_scale": float("nan")}, "softmax_scale: expected a finite fp32 number, got nan"),
    "scale-inf": ({"softmax_scale": -float("inf")}, "softmax_scale: expected a finite fp32 number, got -inf"),
    "scale-huge": ({"softmax_scale": 10**400}, "softmax_scale: expected a finite fp32 number, got 1000"),
    "scale-fp64": ({"softmax_scale": 1e39}, r"softmax_scale: expected a finite fp32 number, got 1e\+39"),
    "splits": ({"num_splits": 0}, r"num_splits: expected an integer in \[1, 65535\], got 0"),
    "splits-many": ({"num_splits": 65536}, r"num_splits: expected an integer in \[1, 65535\], got 65536"),
    "splits-type": ({"num_splits": 1.5}, "num_splits: expected an integer, got 1.5 of type float"),
    "out-shape": ({"out": torch.zeros(2, 4, 64, dtype=BF16)}, r"out: expected shape \[2, 4, 48\], got \[2, 4, 64\]"),
    "out-dtype": ({"out": torch.zeros(2, 4, 48)}, "out: expected dtype torch.bfloat16, got torch.float32"),
    "out-strides": (
        {"out": torch.zeros(2, 4, 96, dtype=BF16)[..., ::2]},
        r"out: expected a contiguous tensor, got strides \(384, 96, 2\)",
    ),
    "lse-shape": ({"lse": torch.zeros(2, 5)}, r"lse: expected shape \[2, 4\], got \[2, 5\]"),
    "lse-dtype": ({"lse": torch.zeros(2, 4, dtype=BF16)}, "lse: expected dtype torch.float32, got torch.bfloat16"),
    "lse-device": ({"lse": torch.zeros(2, 4, device="meta")}, "lse: expected a tensor on cpu, got one on meta"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_argument_is_named_and_nothing_is_written(
    op: str, backend: str, changes: dict[str, object], message: str
) -> None:
    out, lse = torch.full((2, 4, 48), 7.0, dtype=BF16), torch.full((2, 4), 7.0)
    with pytest.raises((ValueError, TypeError), match=message):
        call(op, backend, **{"out": out, "lse": lse} | changes)
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_the_arguments_that_are_not_changed_above_are_good(op: str, backend: str) -> None:
    out, lse = call(op, backend)
    assert not (out == 7).any()
    assert not (lse == 7).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("number", [np.float32, np.float64, Fraction])
def test_a_scale_is_any_real_number(op: str, backend: str, number: type) -> None:
    for one, other in zip(call(op, backend, softmax_scale=number(0.125)), call(op, backend), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_a_table_without_rows_has_any_strides(op: str, backend: str) -> None:
    changes = {
        "block_table": torch.zeros(0, dtype=INT32).as_strided((0, 4), (0, 0)),
        "q": torch.zeros(0, 4, 64).to(BF16),
    }
    call(op, backend, **changes, row_lens=torch.zeros(0, dtype=INT32), out=None, lse=None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_results_are_detached(op: str, backend: str, num_splits: int) -> None:
    function, row_format = OPS[op]
    batch = paged_batch(row_format, 16, (20, 33), 4)
    q = batch.q.clone().requires_grad_()
    read = partial(function, batch.view, batch.block_table, batch.row_lens, q, backend=backend)
    plain = read(softmax_scale=0.125, num_splits=num_splits)
    assert not any(result.requires_grad for result in plain)
    out, lse = torch.zeros(2, 4, 48, dtype=BF16, requires_grad=True), torch.zeros(2, 4, requires_grad=True)
    got = read(softmax_scale=0.125, num_splits=num_splits, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert out.is_leaf
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_a_whole_table_may_have_more_than_two_giga_rows(op: str, backend: str) -> None:
    function, row_format = OPS[op]
    batch = paged_batch(row_format, 1 << 16, (20,), 4)
    table = torch.full((1, 1 << 15), -1, dtype=INT32)
    table[0, 0] = batch.block_table[0, 0]
    got = function(batch.view, table, batch.row_lens, batch.q, softmax_scale=0.125, num_splits=1, backend=backend)
    expect_within_budget(got, batch.exact(0.125))


def view_of(row_format: RowFormat) -> object:
    return paged_batch(row_format, 16, (20,), row_format.parts[0].num_heads).view


MIXED = RowFormat("mixed", (RowPart("k", BF16, 2, 64), RowPart("v", FP32, 2, 48, area=1)), (256, 384))
UNEVEN = RowFormat("uneven", (RowPart("k", BF16, 2, 64), RowPart("v", BF16, 1, 48, area=1)), (256, 96))
PLAIN = RowFormat("plain", (RowPart("latent", BF16, 1, 64),), (128,))
BYTES = RowFormat("bytes", (RowPart("latent", torch.int8, 1, 64),), (64,), value_dim=48)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("op", "row_format", "message"),
    [
        ("gqa_decode", OPS["mla_decode"][1], "view: expected rows of K and V .*, got format 'latent'"),
        ("gqa_decode", MIXED, "view: expected rows of K and V .*, got format 'mixed'"),
        ("gqa_decode", UNEVEN, "view: expected rows of K and V .*, got format 'uneven'"),
        ("mla_decode", OPS["gqa_decode"][1], "view: expected latent rows .*, got format 'kv'"),
        ("mla_decode", PLAIN, "view: expected latent rows .*, got format 'plain'"),
        ("mla_decode", BYTES, "view: expected latent rows .*, got format 'bytes'"),
    ],
    ids=["gqa-latent", "gqa-mixed", "gqa-uneven", "mla-kv", "mla-plain", "mla-bytes"],
)
def test_rows_of_another_kind_are_refused(op: str, backend: str, row_format: RowFormat, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(op, backend, view=view_of(row_format))


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_must_share_the_kv_heads_evenly(backend: str) -> None:
    with pytest.raises(ValueError, match="q: expected a number of heads that is a multiple of 2, got 3"):
        call("gqa_decode", backend, q=torch.zeros(2, 3, 64, dtype=BF16), out=None, lse=None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, -3, 2**31])
def test_a_window_is_a_number_of_rows(backend: str, window: int) -> None:
    with pytest.raises(ValueError, match=rf"window: expected an integer in \[1, 2147483647\], got {window}"):
        call("gqa_decode", backend, window=window)
