"""gather_dequantised and read_rows against numpy in fp64, kernel and reference, bit for bit.

O-numbers name faults other stores have had; A-numbers are the addresses that the formats' descriptions work out.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import POISON, make_view, sparse_memory
from quantised_rows import E2M1, E4M3, FP8, KNOWN, bits_of, expected_outputs, moderate_scales, places

from kvstore_kernels import (
    PageView,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    nvfp4_ds_mla_format,
)
from kvstore_kernels import quant_gather as kernels
from kvstore_kernels.launch import Target
from kvstore_kernels.quantised import FORMATS
from kvstore_kernels.reference import quant_gather as reference

MODULES = {"triton": kernels, "reference": reference}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16
TARGET = Target("cuda", 90, 32)

pytestmark = [
    pytest.mark.parametrize("backend", MODULES),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # random scales do that
]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def bits(tensor):
    """The raw bits of an output, [num_rows, values of a row]."""
    return tensor.contiguous().flatten(1).view({2: torch.uint16, 4: torch.uint32}[tensor.element_size()]).numpy()


def gather(view, table, row_lens, backend, start=None, **options):
    """Calls gather_dequantised with a table and lengths given as lists."""
    return MODULES[backend].gather_dequantised(
        view,
        int32(table).reshape(len(row_lens), len(table[0]) if table else 0),
        int32([0, *np.cumsum(row_lens)]),
        num_rows=sum(row_lens),
        start=None if start is None else int32(start),
        **options,
    )


def compare(known, outputs, expected, num_rows, dtype):
    assert len(outputs) == len(known.shapes)
    for output, want, shape in zip(outputs, expected, known.shapes, strict=True):
        assert output.dtype == dtype
        assert output.shape == (num_rows, *shape)
        np.testing.assert_array_equal(bits(output), want)


def gather_and_compare(name, view, table, row_lens, backend, start=None, wraps=False, dtype=BF16, **options):
    """Gathers, compares every bit with the model's and the memory with itself before; returns the outputs."""
    known = KNOWN[name]
    rows = places(view, table, row_lens, start or [0] * len(row_lens), wraps)
    scales = options.get("row_scales") or ()
    expected = expected_outputs(known, view, rows, dtype, tuple(float(scale) for scale in scales))
    before = view.memory.clone()
    outputs = gather(view, table, row_lens, backend, start, wraps=wraps, dtype=dtype, **options)
    compare(known, outputs, expected, sum(row_lens), dtype)
    assert torch.equal(view.memory, before)
    return outputs


@pytest.mark.parametrize("rows_per_block", [1, 4, 16, 64])
@pytest.mark.parametrize("name", KNOWN)
def test_o32_every_format_and_block_size(name, rows_per_block, backend):
    # Any bytes are legal rows. Lengths 0, 1, R - 1, R, R + 1; empty ones at both ends; blocks in random order.
    view = make_view(KNOWN[name].row_format, rows_per_block, 14)
    moderate_scales(KNOWN[name], view)
    row_lens, start = [0, 1, rows_per_block - 1, 0, rows_per_block, rows_per_block + 1, 0], [0] * 7
    if rows_per_block == 64:  # the same boundaries with fewer rows
        row_lens, start = [0, 1, 2, 0, 3, 65, 0], [0, 63, 63, 0, 61, 0, 0]
    table = np.random.default_rng(0).permutation(14).reshape(-1, 2).tolist()
    outputs = gather_and_compare(name, view, table, row_lens, backend, start=start)
    assert all(output.isfinite().float().mean() > 0.5 for output in outputs), "the case says too little"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_every_format_and_dtype_with_any_scale(name, dtype, backend):
    # fp32 scales are random bits here: subnormal, huge, negative, infinite, NaN.
    view = make_view(KNOWN[name].row_format, 16, 5, seed=3)
    gather_and_compare(name, view, [[4, 0, 2]], [40], backend, start=[5], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_explicit_slots(name, dtype, backend):
    view = make_view(KNOWN[name].row_format, 4, 5, seed=4)
    slots = [0, 19, -1, 20, 7, 7, -(2**63), 2**63 - 1, 2**32 + 1, 3]
    rows = [divmod(slot, 4) if 0 <= slot < 20 else None for slot in slots]
    outputs = MODULES[backend].read_rows(view, torch.tensor(slots), dtype=dtype)
    compare(KNOWN[name], outputs, expected_outputs(KNOWN[name], view, rows, dtype), len(slots), dtype)


@pytest.mark.parametrize("name", KNOWN)
def test_o36_o45_only_the_rows_asked_for_are_read(name, backend):
    # Everything but the records of those rows is NaN: other rows, padding, what lies between and behind the pages.
    known, rows_per_block = KNOWN[name], 4
    view = make_view(known.row_format, rows_per_block, 4, seed=6)
    moderate_scales(known, view)
    wanted = torch.zeros(len(view.memory), dtype=torch.bool)
    places_read = [(3, 2), (3, 3), (1, 0)]
    for block_id, row in places_read:
        area = view.offset_bytes + block_id * view.block_stride_bytes
        for pitch in known.areas:
            wanted[area + row * pitch : area + row * pitch + pitch] = True
            area += rows_per_block * pitch
    expected = expected_outputs(known, view, places_read, BF16)
    view.memory[~wanted] = POISON
    outputs = gather(view, [[3, 1], [0, 0]], [3, 0], backend, start=[2, 0])
    compare(known, outputs, expected, 3, BF16)


@pytest.mark.parametrize("name", KNOWN)
def test_o41_block_size_does_not_change_the_rows(name, backend):
    known, results = KNOWN[name], []
    records = [
        np.random.default_rng(area).integers(0, 256, (33, pitch), np.uint8) for area, pitch in enumerate(known.areas)
    ]
    for rows_per_block in (1, 16, 64):
        view = make_view(known.row_format, rows_per_block, 33 // rows_per_block + 1)
        table = list(range(view.num_blocks))[::-1]
        for position in range(33):
            area = view.offset_bytes + table[position // rows_per_block] * view.block_stride_bytes
            for pitch, record in zip(known.areas, records, strict=True):
                first = area + position % rows_per_block * pitch
                view.memory[first : first + pitch] = torch.from_numpy(record[position])
                area += rows_per_block * pitch
        results.append([bits(output) for output in gather(view, [table], [33], backend)])
    for result in results[1:]:
        for output, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(output, first)


@pytest.mark.parametrize(
    ("start", "row_len"), [(0, 5), (7, 1), (8, 3), (6, 9), (2**31 - 70, 65), (-3, 5), (-(2**31), 4)]
)
@pytest.mark.parametrize("name", ["fp8_ds_mla", "dsv4", "int8_token_head"])
def test_o42_rows_without_a_column_are_zero(name, start, row_len, backend):
    view = make_view(KNOWN[name].row_format, 4, 3, seed=7)
    gather_and_compare(name, view, [[1, 2], [0, 0]], [row_len, 2], backend, start=[start, 5])


@pytest.mark.parametrize("block_id", [-1, -(2**31), 3, 2**31 - 1])
@pytest.mark.parametrize("name", KNOWN)
def test_o43_rows_of_a_block_that_does_not_exist_are_zero(name, block_id, backend):
    # A NaN scale outside the cache must not turn those zeros into NaN.
    view = make_view(KNOWN[name].row_format, 4, 3, fill=POISON)
    scales = (float("nan"), float("inf"))[: KNOWN[name].outside] or None
    outputs = gather_and_compare(name, view, [[1, block_id, 2], [block_id] * 3], [12, 5], backend, row_scales=scales)
    assert not any(bits(output)[4:8].any() or bits(output)[12:].any() for output in outputs)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("name", ["fp8_ds_mla", "dsv4", "kv_fp8"])
def test_columns_wrap_for_window_groups(name, width, backend):
    view = make_view(KNOWN[name].row_format, 4, 6, seed=8)
    table = [[5, 3, 1][:width], [0, 2, 4][:width]]
    gather_and_compare(name, view, table, [4 * width, 3], backend, start=[18, 4 * width - 1], wraps=True)


@pytest.mark.parametrize("row_lens", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("name", KNOWN)
def test_o33_no_rows(name, row_lens, backend):
    view = make_view(KNOWN[name].row_format, 4)
    gather_and_compare(name, view, [[1, 2]] * len(row_lens), row_lens, backend)
    outputs = MODULES[backend].read_rows(view, torch.empty(0, dtype=torch.int64))
    assert [tuple(output.shape) for output in outputs] == [(0, *shape) for shape in KNOWN[name].shapes]


def test_a_table_without_columns_has_no_rows(backend):
    view = make_view(KNOWN["dsv4"].row_format, 4, fill=POISON)
    gather_and_compare("dsv4", view, [[]], [3], backend)
    with pytest.raises(ValueError, match="block_table: expected at least one column when it wraps, got none"):
        gather(view, [[]], [3], backend, wraps=True)


def test_many_short_sequences_and_a_table_with_gaps(backend):
    view = make_view(KNOWN["fp8_ds_mla"].row_format, 4, 9, seed=9)
    generator = np.random.default_rng(1)
    row_lens, table = generator.integers(0, 9, 33).tolist(), generator.integers(0, 9, (33, 5)).tolist()
    rows = places(view, [columns[:2] for columns in table], row_lens, [0] * 33)
    lens = int32([0, *np.cumsum(row_lens)])
    outputs = MODULES[backend].gather_dequantised(view, int32(table)[:, :2], lens, num_rows=sum(row_lens))
    compare(KNOWN["fp8_ds_mla"], outputs, expected_outputs(KNOWN["fp8_ds_mla"], view, rows, BF16), sum(row_lens), BF16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("gap", "first"), [(0, 0), (8, 16), (3, 5)])
@pytest.mark.parametrize("name", ["fp8_ds_mla", "indexer_mxfp4", "int8_token_head", "nvfp4_ds_mla"])
def test_out_with_any_row_stride_and_start(name, gap, first, dtype, backend):
    view = make_view(KNOWN[name].row_format, 4, 5, seed=10)
    buffers, outs = [], []
    for heads, dim in KNOWN[name].shapes:
        stride = heads * dim + gap
        buffers.append(torch.full((first + 7 * stride,), -7.0, dtype=dtype))
        outs.append(buffers[-1].as_strided((7, heads, dim), (stride, dim, 1), first))
    outputs = gather_and_compare(name, view, [[4, 1], [0, 2]], [5, 2], backend, dtype=dtype, out=tuple(outs))
    assert all(output is out for output, out in zip(outputs, outs, strict=True))
    for buffer, out in zip(buffers, outs, strict=True):
        out.fill_(-7.0)
        assert (buffer == -7.0).all(), "elements between the rows of out changed"


def test_o39_offsets_beyond_32_bit(backend):
    # Block 1 lies behind 2^32 bytes, block 2 behind 2^31 units of 16 bytes; the scales lie behind the payload.
    row_format, stride = dsv4_format(), 576 * 2**25
    view = PageView(sparse_memory(48 + 2 * stride + 2**20), 48, stride, 3, 16, row_format)
    near = make_view(row_format, 16, 3, offset_bytes=0, gap_bytes=0)
    for block_id in range(3):
        page = view.memory[48 + block_id * stride :][: view.page_bytes]
        page.copy_(near.memory[block_id * view.page_bytes :][: view.page_bytes])
    rows = places(near, [[2, 1], [0, 2]], [32, 17], [0, 0])
    expected = expected_outputs(KNOWN["dsv4"], near, rows, BF16)
    compare(KNOWN["dsv4"], gather(view, [[2, 1], [0, 2]], [32, 17], backend), expected, 49, BF16)
    slots = torch.tensor([block_id * 16 + row for block_id, row in rows])
    compare(KNOWN["dsv4"], MODULES[backend].read_rows(view, slots), expected, 49, BF16)


def test_o39_output_beyond_32_bit(backend):
    # Rows of the output 1 GiB apart, as in a caller's wide buffer: row 4 starts behind 2^32 bytes and 2^31 elements.
    view = make_view(latent_format(64, 32, FP8), 4, 2)
    stride = 2**29 + 2**20
    out = sparse_memory(2 * (4 * stride + 64)).view(BF16).as_strided((5, 1, 64), (stride, 64, 1))
    near = gather(view, [[1, 0]], [5], backend)
    assert torch.equal(gather(view, [[1, 0]], [5], backend, out=(out,))[0].view(torch.int16), near[0].view(torch.int16))


SPOTS = {
    # name: format, rows per block, offset, stride; block, row; then (address of a code, of its scale, column)
    "A1": (dsv4_format(), 4, 0, 2_880, 0, 3, 1_728 + 384, 2_334, 384),
    "A2": (dsv4_format(), 64, 0, 37_440, 3, 5, 115_200, 149_224, 0),
    "A3": (fp8_ds_mla_format(), 64, 0, 41_984, 2, 1, 84_624, 85_136, 0),
    "A4": (indexer_format(132, 576), 64, 0, 8_640, 1, 63, 16_704, 17_084, 0),
    "A5": (indexer_format(68, 576), 64, 0, 4_608, 1, 2, 4_736, 8_712, 0),
    "A6": (dsv4_format(), 64, 74_880, 1_002_240, 2, 0, 2_079_360, 2_116_224, 0),
    "656, token 3 of 4": (fp8_ds_mla_format(), 4, 0, 2_624, 0, 3, 1_968 + 256, 2_480 + 8, 256),
    "A9": (nvfp4_ds_mla_format(), 1, 0, 352, 0, 0, 2 * 8, 320 + 16, 2 * 16),
    "A9, tile 31": (nvfp4_ds_mla_format(), 1, 0, 352, 0, 0, 31 * 8, 320 + 31, 31 * 16),
}


@pytest.mark.parametrize("spot", SPOTS)
def test_addresses_worked_out_by_hand(spot, backend):
    """A code of 1 and a scale of 2 at these bytes, zeros elsewhere (A1 to A6, A9): one value 2, in that column."""
    row_format, rows_per_block, offset, stride, block_id, row, code_at, scale_at, column = SPOTS[spot]
    memory = torch.zeros(offset + 4 * stride, dtype=torch.uint8)
    view = PageView(memory, offset, stride, 4, rows_per_block, row_format)
    entry = row_format.quantised[0]
    memory[code_at] = 0x02 if entry.values_per_element == 2 else 0x38
    scale = {"ue8m0": [128], "e4m3": [0x40]}.get(entry.encoding, np.float32(2).tobytes())
    memory[scale_at : scale_at + len(scale)] = torch.tensor(list(scale), dtype=torch.uint8)
    if spot == "A1":
        memory[2_335], memory[2_336:2_880] = POISON, POISON
    everything = torch.arange(view.num_slots)
    (values,) = MODULES[backend].read_rows(view, everything, dtype=torch.float32)
    assert values.count_nonzero() == 1
    assert values[block_id * rows_per_block + row, 0, column] == 2.0


def test_a3_rope_is_moved_bit_for_bit(backend):
    memory = torch.zeros(3 * 41_984, dtype=torch.uint8)
    view = PageView(memory, 0, 41_984, 3, 64, fp8_ds_mla_format())
    patterns = torch.tensor([0x7F81, 0xFFC1, 0x0001, 0x8000, 0x7F80], dtype=torch.uint16)
    memory[85_152 : 85_152 + 10] = patterns.view(torch.uint8)
    (row,) = MODULES[backend].read_rows(view, torch.tensor([2 * 64 + 1]))
    np.testing.assert_array_equal(bits(row)[0, 512:517], patterns.numpy())
    assert not bits(row)[0, 517:].any()


@pytest.mark.parametrize(
    ("scale", "codes", "values"),
    [
        (0.0078125, (0x7C, 0xF2), (3.0, -1.25)),
        (float(np.float32(3 / 448)), (0x7E, 0xF4), (448 * np.float32(3 / 448), -192 * np.float32(3 / 448))),
    ],
)
def test_round_trip_by_hand(scale, codes, values, backend):
    """A tile with amax 3 and a value of -1.3, by the power-of-two rule and by the raw one: any fp32 scale is read."""
    view = PageView(torch.zeros(656, dtype=torch.uint8), 0, 656, 1, 1, fp8_ds_mla_format())
    view.memory[:2] = torch.tensor(codes, dtype=torch.uint8)
    view.memory[512:516] = torch.from_numpy(np.frombuffer(np.float32(scale).tobytes(), np.uint8).copy())
    (row,) = MODULES[backend].read_rows(view, torch.tensor([0]), dtype=torch.float32)
    assert row[0, 0, :2].tolist() == [float(value) for value in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ue8m0_bytes_0_and_255_and_the_nan_code(dtype, backend):
    view = PageView(torch.full((528,), 0x38, dtype=torch.uint8), 0, 528, 1, 1, KNOWN["mxfp8_latent"].row_format)
    view.memory[[32, 33, 64]] = torch.tensor([0x7F, 0xFF, 0x40], dtype=torch.uint8)
    view.memory[512:528] = 127
    view.memory[[512, 514, 515]] = torch.tensor([0, 0, 255], dtype=torch.uint8)
    (row,) = MODULES[backend].read_rows(view, torch.tensor([0]), dtype=dtype)
    want = np.ones(512)
    want[:32], want[32:34], want[64:96], want[64], want[96:128] = 2.0**-127, np.nan, 2.0**-127, 2.0**-126, np.nan
    np.testing.assert_array_equal(bits(row)[0], bits_of(want, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "table"), [("latent_fp8", E4M3), ("indexer_mxfp4", E2M1)])
def test_every_code(name, table, dtype, backend):
    """All bytes of e4m3 and all pairs of e2m1, with a scale of 1."""
    view = make_view(KNOWN[name].row_format, 4, 1, fill=127)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    first = view.offset_bytes
    view.memory[first : first + 256] = codes  # of latent_fp8 in one row, of indexer_mxfp4 in the four of the page
    values = np.concatenate(
        [bits(row).reshape(-1) for row in MODULES[backend].read_rows(view, torch.arange(4), dtype=dtype)]
    )
    pairs = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(-1)
    want = table[pairs if len(table) == 16 else codes.numpy()]
    np.testing.assert_array_equal(values[: len(want)], bits_of(want, dtype))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("scales", [(0.5, 3.0), (1 / 3, -1e-40), (float("nan"), float("inf"))])
@pytest.mark.parametrize("name", ["kv_fp8", "kv_packed_fp8", "latent_fp8"])
def test_scales_outside_the_cache(name, scales, as_tensor, backend):
    view = make_view(KNOWN[name].row_format, 16, 3, seed=11)
    scales = scales[: KNOWN[name].outside]
    given = tuple(torch.tensor(scale) if as_tensor else scale for scale in scales)
    for dtype in DTYPES:
        gather_and_compare(name, view, [[2, 0]], [20], backend, row_scales=given, dtype=dtype)


def test_one_scale_as_a_tensor_and_one_as_a_number(backend):
    view = make_view(KNOWN["kv_fp8"].row_format, 16, 3, seed=11)
    gather_and_compare("kv_fp8", view, [[2, 0]], [20], backend, row_scales=[torch.tensor([[0.25]]), 7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["kv", "kv_packed", "latent"])
def test_plain_rows_by_slot(name, own, dtype, backend):
    row_format = (
        latent_format(72, 64, own) if name == "latent" else kv_format(3, 80, 48, dtype=own, packed=name == "kv_packed")
    )
    view = make_view(row_format, 5, 4, seed=12)
    slots = [19, 0, -1, 7, 20]
    outputs = MODULES[backend].read_rows(view, torch.tensor(slots), dtype=dtype)
    for part, output in zip(row_format.parts, outputs, strict=True):
        assert output.shape == (5, part.num_heads, part.head_dim)
        for row, slot in enumerate(slots):
            stored = view.tensor(part.name)[slot // 5, slot % 5].flatten() if 0 <= slot < 20 else None
            if stored is None:
                assert not bits(output)[row].any()
            elif own == dtype:
                assert torch.equal(output[row].flatten().view(torch.uint8), stored.view(torch.uint8))
            else:
                np.testing.assert_array_equal(bits(output)[row], bits_of(stored.double().numpy(), dtype))


def test_the_same_rows_whatever_else_is_in_the_batch(backend):
    view = make_view(KNOWN["nvfp4_latent"].row_format, 16, 6, seed=13)
    (alone,) = gather(view, [[3, 1]], [21], backend, start=[2])
    (among,) = gather(view, [[0, 2], [3, 1], [5, 4]], [5, 21, 30], backend, start=[0, 2, 1])
    assert torch.equal(among[5:26].view(torch.int16), alone.view(torch.int16))


def test_a_program_writes_the_rows_of_its_own_sequence_only(backend):
    if backend == "reference":
        pytest.skip("no programs")
    view, out = make_view(KNOWN["dsv4"].row_format, 4, 3, seed=14), torch.full((9, 1, 512), -7.0, dtype=BF16)
    launch, _ = kernels.dequantise_launch(
        view, int32([[0, 1], [2, 1]]), int32([0, 5, 9]), 9, None, False, BF16, None, (out,), TARGET
    )
    replace(launch, grid=(1,)).run()
    assert (out[:5] != -7.0).any()
    assert (out[5:] == -7.0).all()


def test_every_quantised_format_is_covered(backend):
    named = {known.row_format.name for known in KNOWN.values()}
    assert named >= set(FORMATS) - {"kv_packed", "bytes", "state"}, "a format without a model"
