"""gather_dequantised and read_rows refuse what they cannot read, in words, and before anything is written."""

import pytest
import torch
from cases import make_view

from kvstore_kernels import (
    Quantised,
    RowFormat,
    RowPart,
    bytes_format,
    dsv4_format,
    kv_format,
    latent_format,
    state_format,
)
from kvstore_kernels import quant_gather as kernels
from kvstore_kernels.reference import quant_gather as reference

MODULES = {"triton": kernels, "reference": reference}
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

pytestmark = pytest.mark.parametrize("backend", MODULES)

TABLE = torch.tensor([[1, 2]], dtype=torch.int32)
CU = torch.tensor([0, 3], dtype=torch.int32)
SLOTS = torch.tensor([1, 2, 3])
OUT = (torch.zeros(3, 1, 512, dtype=BF16),)
GOOD = {"block_table": TABLE, "cu_row_lens": CU, "num_rows": 3}
BAD_TABLES = {
    "table int64": (
        {"block_table": TABLE.long()},
        ValueError,
        "block_table: expected dtype torch.int32, got torch.int6",
    ),
    "table 1-D": ({"block_table": TABLE[0]}, ValueError, r"block_table: expected shape \[any, any\], got \[2\]"),
    "table list": ({"block_table": [[1, 2]]}, TypeError, "block_table: expected a torch.Tensor, got list"),
    "table on meta": ({"block_table": TABLE.to("meta")}, ValueError, "block_table: expected a tensor on cpu"),
    "table strided": (
        {"block_table": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]},
        ValueError,
        r"block_table: expected elements one behind the other, got strides \(4, 2\)",
    ),
    "lens short": ({"cu_row_lens": CU[:1]}, ValueError, r"cu_row_lens: expected shape \[2\], got \[1\]"),
    "lens from 1": (
        {"cu_row_lens": CU + torch.tensor([1, 0], dtype=torch.int32)},
        ValueError,
        "cu_row_lens: expected 0 and a running sum of lengths",
    ),
    "rows differ": ({"num_rows": 4}, ValueError, r"num_rows: expected cu_row_lens\[-1\], which is 3, got 4"),
    "rows float": ({"num_rows": 3.0}, TypeError, "num_rows: expected an integer, got 3.0 of type float"),
    "start long": ({"start": CU}, ValueError, r"start: expected shape \[1\], got \[2\]"),
    "start int64": ({"start": CU[:1].long()}, ValueError, "start: expected dtype torch.int32, got torch.int64"),
}
BAD_OUTPUTS = {
    "dtype": (
        {"dtype": FP8},
        ValueError,
        "dtype: expected torch.bfloat16 or torch.float16 or torch.float32, got torch",
    ),
    "out tensor": ({"out": OUT[0]}, TypeError, "out: expected a tuple of tensors, got Tensor"),
    "out twice": ({"out": OUT * 2}, ValueError, "out: expected one tensor for each of nope and rope, got 2"),
    "out rows": (
        {"out": (OUT[0][:2],)},
        ValueError,
        r"out of nope and rope: expected shape \[3, 1, 512\], got \[2, 1, 512\]",
    ),
    "out dtype": (
        {"out": (OUT[0].half(),)},
        ValueError,
        "out of nope and rope: expected dtype torch.bfloat16, got torch",
    ),
    "out on meta": ({"out": (OUT[0].to("meta"),)}, ValueError, "out of nope and rope: expected a tensor on cpu"),
    "out negated": ({"out": (torch._neg_view(OUT[0]),)}, ValueError, "out of nope and rope: expected a plain tensor"),
    "out rows overlap": (
        {"out": (OUT[0][:1].expand(3, -1, -1),)},
        ValueError,
        "out of nope and rope: expected rows at least 512 elements apart, got 0",
    ),
    "out strided": (
        {"out": (torch.zeros(3, 1, 1024, dtype=BF16)[..., ::2],)},
        ValueError,
        "out of nope and rope: expected the elements of a row one behind the other",
    ),
    "scales inside": (
        {"row_scales": (1.0,)},
        ValueError,
        r"row_scales: expected None, for the scales lie in the rows \(format 'dsv4'\), got 1",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES | BAD_OUTPUTS)
def test_bad_arguments_of_a_gather(case, backend):
    changes, error, message = (BAD_TABLES | BAD_OUTPUTS)[case]
    view = make_view(dsv4_format(), 4)
    with pytest.raises(error, match=message):
        MODULES[backend].gather_dequantised(view, **{**GOOD, **changes})
    assert not OUT[0].any()


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_bad_arguments_of_a_read(case, backend):
    changes, error, message = BAD_OUTPUTS[case]
    with pytest.raises(error, match=message):
        MODULES[backend].read_rows(make_view(dsv4_format(), 4), SLOTS, **changes)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (SLOTS.int(), ValueError, "slots: expected dtype torch.int64, got torch.int32"),
        (SLOTS[None], ValueError, r"slots: expected shape \[any\], got \[1, 3\]"),
        ([1, 2], TypeError, "slots: expected a torch.Tensor, got list"),
        (SLOTS.to("meta"), ValueError, "slots: expected a tensor on cpu, got one on meta"),
        (
            torch.zeros(6, dtype=torch.int64)[::2],
            ValueError,
            r"slots: expected elements one behind the other, got stri",
        ),
    ],
)
def test_bad_slots(slots, error, message, backend):
    with pytest.raises(error, match=message):
        MODULES[backend].read_rows(make_view(dsv4_format(), 4), slots)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        (0.5, ValueError, "row_scales: expected one for each of k, v .*, got 1"),
        ("1", TypeError, "row_scales: expected a number, a tensor or a tuple of them, got str"),
        ((0.5,), ValueError, "row_scales: expected one for each of k, v .*, got 1"),
        ((0.5, "1"), TypeError, "row_scales of v: expected a number or an fp32 tensor, got str"),
        ((0.5, True), TypeError, "row_scales of v: expected a number or an fp32 tensor, got bool"),
        ((torch.ones(2), 1.0), ValueError, r"row_scales of k: expected one element, got shape \[2\]"),
        ((torch.ones(1).half(), 1.0), ValueError, "row_scales of k: expected dtype torch.float32, got torch.float16"),
        ((torch.ones(1, device="meta"), 1.0), ValueError, "row_scales of k: expected a tensor on cpu, got one on meta"),
    ],
)
def test_bad_scales(scales, error, message, backend):
    with pytest.raises(error, match=message):
        MODULES[backend].gather_dequantised(make_view(kv_format(2, 64, dtype=FP8), 4), **GOOD, row_scales=scales)


ODD_TILE = RowFormat(
    "odd",
    (RowPart("k", FP8, 1, 96), RowPart("scales", torch.float32, 1, 4, offset_bytes=96)),
    (112,),
    quantised=(Quantised("k", "scales", 24, "fp32"),),
)


@pytest.mark.parametrize(
    ("row_format", "message"),
    [
        (bytes_format(64), "view: expected parts of .* or pairs of e2m1, got 'bytes' of uint8 in format 'bytes'"),
        (state_format([("s", (4, 4), torch.float32)]), "view: expected parts of .*, got 's' of float32 in format 'st"),
        (
            kv_format(2, 64, dtype=torch.float8_e5m2),
            "view: expected parts of .*, got 'k' of float8_e5m2 in format 'kv'",
        ),
        (latent_format(64, 48, torch.float8_e4m3fnuz), "view: expected parts of .*, got 'latent' of float8_e4m3fnuz"),
        (ODD_TILE, "view: expected a power of two of values to a scale, got 24 in format 'odd'"),
    ],
    ids=lambda value: value.name if isinstance(value, RowFormat) else "",
)
def test_rows_that_are_no_numbers(row_format, message, backend):
    with pytest.raises(ValueError, match=message):
        MODULES[backend].read_rows(make_view(row_format, 4), SLOTS)


def test_a_gather_takes_quantised_rows_only(backend):
    with pytest.raises(ValueError, match="view: expected a quantised format, got 'kv', whose rows are plain"):
        MODULES[backend].gather_dequantised(make_view(kv_format(2, 64), 4), **GOOD)
    with pytest.raises(TypeError, match="view: expected a PageView, got Tensor"):
        MODULES[backend].gather_dequantised(TABLE, **GOOD)
