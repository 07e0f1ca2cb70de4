"""write_quantised: single numbers, scales outside the cache, far addresses, and what it refuses."""

import numpy as np
import pytest
import torch
from cases import make_view, sparse_memory
from test_quantised_write import BF16, FORMATS, FP8, FP32, WRITERS

from kvstore_kernels import (
    PageView,
    RowFormat,
    RowPart,
    bytes_format,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    token_head_format,
)
from kvstore_kernels.quant_rules import TILE_RULES

both = pytest.mark.parametrize("backend", WRITERS)
EVERY_BF16 = torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(BF16)
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("kind", ["every bf16", "bits of fp32"])
@pytest.mark.parametrize("name", ["dsv4", "indexer_mxfp4", "nvfp4_latent", "int8_token_head"])
def test_kernel_and_reference_agree_on_any_bits(name, kind):
    """In ascending order, where the magnitudes of a tile are alike, and at random."""
    row_format, widths, _, _ = FORMATS[name]
    generator = torch.Generator().manual_seed(7)
    values = EVERY_BF16
    if kind == "bits of fp32":
        values = torch.randint(-(2**31), 2**31, (2**14,), generator=generator).int().view(FP32)
    width = sum(widths)
    rows = values[: len(values) // width * width].reshape(-1, width).split(widths, dim=1)
    views = [make_view(row_format, 64, num_blocks=len(rows[0]) // 64 + 1) for _ in WRITERS]
    for view, write in zip(views, WRITERS.values(), strict=True):
        write(view, torch.arange(len(rows[0])), *rows)
    assert torch.equal(views[0].memory, views[1].memory)


@both
def test_o29_large_values_saturate_and_nan_stays(backend):
    view = make_view(latent_format(16, 16, FP8), fill=0)
    values = torch.tensor(
        [[1000, -1000, 448, 464, 500, 3e38, INF, -INF, NAN, -NAN, 0, -0.0, 18, 2**-10, 1e-30, -1e-40]]
    )
    WRITERS[backend](view, torch.tensor([3]), values)
    codes = [0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0, 0x80, 0x59, 0, 0, 0x80]
    assert view.tensor("latent")[0, 3, 0].view(torch.uint8).tolist() == codes


@both
@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_o30_values_are_divided_by_the_scale_that_readers_multiply_by(kind, backend):
    view = make_view(kv_format(2, 8, 4, FP8), fill=0)
    scales = (0.04, 3) if kind == "float" else (torch.tensor(0.04), torch.tensor([[3.0]]))
    WRITERS[backend](view, torch.tensor([5]), torch.ones(1, 16), torch.full((1, 2, 4), 30.0), row_scales=scales)
    k, v = (view.tensor(name)[0, 5].float() for name in "kv")
    assert set((k * 0.04).flatten().tolist()) == {float(torch.tensor(24.0) * 0.04)}
    assert set(v.flatten().tolist()) == {10.0}


@both
def test_a_scale_on_the_device_is_read_at_each_call(backend):
    view = make_view(latent_format(16, 16, FP8), fill=0)
    scale = torch.ones(())
    for value, code in ((1.0, 0x38), (2.0, 0x30), (0.0, 0x7E)):
        scale.fill_(value)
        WRITERS[backend](view, torch.tensor([0]), torch.ones(1, 16), row_scales=scale)
        assert set(view.tensor("latent")[0, 0, 0].view(torch.uint8).tolist()) == {code}


@both
@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        *((6.0, 127), (6.0000005, 128), (3.0, 126), (4.0, 127), (1.0, 125), (2.0**-122, 3), (3.4e38, 253)),
        *((6 * 2.0**-126, 1), (1e-40, 1), (0.0, 1), (INF, 1), (NAN, 1)),
    ],
)
def test_exponents_of_e2m1(amax, scale, backend):
    """The smallest power of two at which the largest magnitude is at most 6: 6 = 1.5 x 2^2."""
    view = make_view(indexer_format(68), 4, fill=0)
    WRITERS[backend](view, torch.tensor([1]), torch.full((1, 128), amax))
    assert view.tensor("scales")[0, 1, 0].tolist() == [scale] * 4


@both
def test_int8_rounds_halves_away_from_zero(backend):
    view = make_view(token_head_format(1, 16), fill=0)
    below_half = 0.5 - 2.0**-25
    k = [127, 0.5, -0.5, below_half, -below_half, 1.5, -2.5, 126.5, -126.5, 3.4999998, INF, -INF, NAN, -NAN, 0, -0.0]
    WRITERS[backend](view, torch.tensor([2]), torch.tensor([k]), torch.full((1, 16), NAN))
    codes = [127, 1, -1, 0, 0, 2, -3, 127, -127, 3, 127, -127, 0, 0, 0, 0]
    assert view.tensor("k")[0, 2, 0].tolist() == codes
    assert view.tensor("k_scales")[0, 2].item() == 1.0
    assert view.tensor("v")[0, 2, 0].tolist() == [0] * 16
    assert view.tensor("v_scales")[0, 2].item() == torch.tensor(1e-6).item()


@both
@pytest.mark.parametrize("largest", [INF, NAN])
def test_one_number_that_is_none_does_not_erase_its_tile(largest, backend):
    view = make_view(fp8_ds_mla_format(), 4, fill=0)
    row = torch.ones(1, 576)
    row[0, 5] = largest
    WRITERS[backend](view, torch.tensor([1]), row)
    assert view.tensor("scales")[0, 1, 0].tolist() == [2.0**-8] * 4
    codes = view.tensor("nope")[0, 1, 0].view(torch.uint8)
    assert codes[5] == (0x7F if largest != largest else 0x7E)
    assert set(codes[torch.arange(512) != 5].tolist()) == {0x78}


@both
def test_rope_columns_of_bf16_keep_their_bits(backend):
    view = make_view(dsv4_format(), 64, num_blocks=17, fill=0)
    rows = torch.cat([torch.zeros(1024, 448, dtype=BF16), EVERY_BF16.reshape(1024, 64)], dim=1)
    rows, slots = (rows, torch.arange(1024)) if backend == "reference" else (rows[::64], torch.arange(0, 1024, 64))
    WRITERS[backend](view, slots, rows)
    written = view.tensor("rope").flatten(0, 1)[slots, 0]
    assert torch.equal(written.view(torch.int16), rows[:, 448:].view(torch.int16))


@both
@pytest.mark.parametrize("name", ["fp8_ds_mla", "dsv4", "indexer_fp8", "kv of fp8", "int8_token_head"])
def test_o25_offsets_beyond_32_bit(name, backend):
    # Block 1 lies behind 2^32 bytes, block 2 behind 2^31 units of 16 bytes.
    row_format, widths, _, options = FORMATS[name]
    stride, page_bytes = 2**34 + 2**20, row_format.page_bytes(16)
    view = PageView(sparse_memory(48 + 2 * stride + page_bytes), 48, stride, 3, 16, row_format)
    near = make_view(row_format, 16, 3, fill=0, offset_bytes=0, gap_bytes=0)
    rows = [torch.randn(5, width) for width in widths]
    for each, write in ((view, WRITERS[backend]), (near, WRITERS["reference"])):
        write(each, torch.tensor([2 * 16 + 15, 16, 32, 0, 48]), *rows, **options)
    for block_id in range(3):
        page = view.memory[48 + block_id * stride :][:page_bytes]
        np.testing.assert_array_equal(page.numpy(), near.memory[block_id * page_bytes :][:page_bytes].numpy())


@both
def test_o25_sources_beyond_32_bit(backend):
    stride = 2**29 + 2**20
    source = sparse_memory(2 * (4 * stride + 128)).view(BF16).as_strided((5, 128), (stride, 1))
    source.copy_(torch.randn(5, 128))
    views = [make_view(indexer_format(132), 4) for _ in range(2)]
    WRITERS[backend](views[0], torch.tensor([3, 0, 6, 1, 2]), source)
    WRITERS["reference"](views[1], torch.tensor([3, 0, 6, 1, 2]), source.clone())
    assert torch.equal(views[0].memory, views[1].memory)


def test_every_format_with_scales_has_a_rule_or_is_refused():
    with_scales = {row_format.name for row_format, _, _, _ in FORMATS.values()}
    assert set(TILE_RULES) <= with_scales


ROW, SLOTS = torch.zeros(2, 576), torch.tensor([0, 1])
MLA, OUTSIDE = fp8_ds_mla_format(), latent_format(576, 512, FP8)
K, V = torch.zeros(2, 2, 64), torch.zeros(2, 2, 32)
HEADS, PAIR = token_head_format(2, 64, 32), kv_format(2, 64, 32, FP8)
BAD_CALLS = {
    "plain rows": (latent_format(576, 512), (SLOTS, ROW), {}, ValueError, "got 'latent' with no quantised part"),
    "opaque rows": (bytes_format(64), (SLOTS, ROW), {}, ValueError, "view: expected a format of fp8_ds_mla, dsv4, "),
    "rows of e5m2": (
        latent_format(576, 512, torch.float8_e5m2),
        (SLOTS, ROW),
        {},
        ValueError,
        "or rows of torch.float8_e4m3fn, got 'latent' with torch.float8_e5m2",
    ),
    "slots int32": (MLA, (SLOTS.int(), ROW), {}, ValueError, "slot_mapping: expected dtype torch.int64, got torch.int"),
    "slots 2-D": (MLA, (SLOTS[None], ROW), {}, ValueError, r"slot_mapping: expected shape \[any\], got \[1, 2\]"),
    "more slots": (
        MLA,
        (torch.arange(3), ROW),
        {},
        ValueError,
        r"slot_mapping: expected at most 2 slots, the number of rows in nope \+ rope, got 3",
    ),
    "more slots than v": (HEADS, (SLOTS, K, V[:1]), {}, ValueError, "at most 1 slots, the number of rows in v, got 2"),
    "narrow row": (
        MLA,
        (SLOTS, ROW[:, 1:]),
        {},
        ValueError,
        r"nope \+ rope: expected shape \[any, 1, 576\], got \[2, 5",
    ),
    "narrow rope": (MLA, (SLOTS, ROW[:, :512], ROW[:, 513:]), {}, ValueError, r"rope: expected shape \[any, 1, 64\]"),
    "narrow part": (
        OUTSIDE,
        (SLOTS, ROW[:, :512], ROW[:, :63]),
        {},
        ValueError,
        r"rope: expected shape \[any, 1, 64\]",
    ),
    "bytes of e2m1": (indexer_format(68), (SLOTS, ROW[:, :64]), {}, ValueError, r"k: expected shape \[any, 1, 128\]"),
    "fp64": (MLA, (SLOTS, ROW.double()), {}, ValueError, "expected dtype torch.bfloat16 or .*, got torch.float64"),
    "codes": (OUTSIDE, (SLOTS, ROW.to(FP8)), {}, ValueError, "latent: expected dtype .*, got torch.float8_e4m3fn"),
    "on meta": (
        MLA,
        (SLOTS, ROW.to("meta")),
        {},
        ValueError,
        r"rope: expected a tensor on cpu, got one on meta",
    ),
    "list": (MLA, (SLOTS, [[0.0] * 576] * 2), {}, TypeError, r"nope \+ rope: expected a torch.Tensor, got list"),
    "no v": (HEADS, (SLOTS, K), {}, ValueError, "parts: expected one tensor for each of k, v, got 1"),
    "three": (MLA, (SLOTS, ROW, ROW, ROW), {}, ValueError, "parts: expected one tensor for each of nope, rope, got 3"),
    "two of one": (indexer_format(), (SLOTS, ROW, ROW), {}, ValueError, "expected one tensor for each of k, got 2"),
    "columns apart": (
        MLA,
        (SLOTS, torch.zeros(2, 1152)[:, ::2]),
        {},
        ValueError,
        r"nope \+ rope: expected the elements of a row one behind the other, got strides \(1152, 2\)",
    ),
    "scales inside": (
        MLA,
        (SLOTS, ROW),
        {"row_scales": 1.0},
        ValueError,
        "row_scales: expected None, for rows of",
    ),
    "one scale": (PAIR, (SLOTS, K, V), {"row_scales": 1.0}, ValueError, "expected one scale for each of k, v, got 1"),
    "scales 1-D": (
        OUTSIDE,
        (SLOTS, ROW),
        {"row_scales": torch.ones(2)},
        ValueError,
        r"row_scales of latent: expected a tensor of one element, got shape \[2\]",
    ),
    "scale fp16": (
        PAIR,
        (SLOTS, K, V),
        {"row_scales": (1.0, torch.ones(1).half())},
        ValueError,
        "row_scales of v: expected dtype torch.float32, got torch.float16",
    ),
    "scale on meta": (
        OUTSIDE,
        (SLOTS, ROW),
        {"row_scales": torch.ones(1, device="meta")},
        ValueError,
        "row_scales of latent: expected a tensor on cpu, got one on meta",
    ),
    "scale 0": (OUTSIDE, (SLOTS, ROW), {"row_scales": 0.0}, ValueError, "latent: expected a positive number, got 0.0"),
    "scale NaN": (
        OUTSIDE,
        (SLOTS, ROW),
        {"row_scales": NAN},
        ValueError,
        "expected a positive number, got nan",
    ),
    "scale text": (OUTSIDE, (SLOTS, ROW), {"row_scales": "1"}, TypeError, "a float or a torch.Tensor, got str"),
}


@both
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments(case, backend):
    row_format, arguments, options, error, message = BAD_CALLS[case]
    view = make_view(row_format, 4)
    before = view.memory.clone()
    with pytest.raises(error, match=message):
        WRITERS[backend](view, *arguments, **options)
    assert torch.equal(view.memory, before)


@both
def test_bad_view(backend):
    with pytest.raises(TypeError, match="view: expected a PageView, got Tensor"):
        WRITERS[backend](torch.zeros(4), SLOTS, ROW)
    mixed = RowFormat("x", (RowPart("k", FP8, 1, 16), RowPart("v", BF16, 1, 16, 0, 16)), (48,))
    with pytest.raises(ValueError, match="got 'x' with no quantised part"):
        WRITERS[backend](make_view(mixed), SLOTS, ROW, ROW)
