"""The formats by name: every byte of their rows and pages by hand, and what a Quantised or a RowFormat refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from cases import make_view
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_kernels import (
    FORMATS,
    PageView,
    Quantised,
    RowFormat,
    RowPart,
    bytes_format,
    dsv4_format,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    indexer_format,
    kv_format,
    latent_format,
    mla_decode,
    state_format,
    token_head_format,
    write_rows,
)

FP8, FP32, BF16, U8 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.uint8
STATE = (("conv", (3, 5), BF16), ("ssm", (4, 8, 2), FP32), ("steps", (1,), torch.int64))
ARGUMENTS = {
    "kv": (2, 64),
    "kv_packed": (2, 64),
    "latent": (576, 512),
    "int8_token_head": (3, 64, 32),
    "fp8_token_head": (3, 64, 32),
    "bytes": (42,),
    "state": (STATE,),
}
ALL = {name: make(*ARGUMENTS.get(name, ())) for name, make in FORMATS.items()}
ALL["kv of fp8"] = kv_format(2, 64, 32, FP8)
ALL["latent of fp8"] = latent_format(576, 512, FP8)
ALL["indexer_fp8 of 576"] = indexer_format(132, 576)
NOT_MOVED = [name for name in ALL if name not in ("kv", "kv_packed", "latent", "state")]


def address(view: PageView, name: str, *index: int) -> int:
    """The byte of the memory at which an element of a part lies."""
    return view.tensor(name)[index].data_ptr() - view.memory.data_ptr()


def view_of(row_format: RowFormat, rows: int, stride: int | None = None, blocks: int = 4, offset: int = 0) -> PageView:
    stride = row_format.page_bytes(rows) if stride is None else stride
    size = offset + (blocks - 1) * stride + row_format.page_bytes(rows)
    return PageView(torch.zeros(size, dtype=U8), offset, stride, blocks, rows, row_format)


class TestEveryFormat:
    def test_names_and_values_differ(self):
        assert all(ALL[name].name == name for name in FORMATS)
        assert len(set(ALL.values())) == len(ALL)

    @pytest.mark.parametrize("row_format", ALL.values(), ids=ALL)
    def test_json_round_trip(self, row_format):
        again = RowFormat.from_dict(json.loads(json.dumps(row_format.to_dict())))
        assert (again, hash(again)) == (row_format, hash(row_format))

    def test_json_without_the_newer_fields(self):
        fields = kv_format(2, 64).to_dict()
        del fields["quantised"]
        for part in fields["parts"]:
            del part["head_pitch_bytes"], part["shape"]
        assert RowFormat.from_dict(fields) == kv_format(2, 64)

    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("rows", [1, 2, 3, 16, 64, 784])
    def test_pages_hold_their_rows_aligned(self, name, rows):
        row_format = ALL[name]
        page = row_format.page_bytes(rows)
        assert page % 16 == page % row_format.page_alignment == 0
        assert 0 <= page - rows * row_format.row_bytes < row_format.page_alignment

    @pytest.mark.parametrize("name", ALL)
    def test_parts_share_no_byte_and_stay_in_their_rows(self, name):
        """A10 for views: every byte of a row belongs to one part at most, and none outside the rows to any."""
        ones, view = (make_view(ALL[name], rows_per_block=4, num_blocks=2, fill=fill) for fill in (1, 0))
        inside, owners = torch.zeros_like(view.memory), torch.zeros_like(view.memory)
        for part in view.format.parts:
            view.memory.zero_()
            view.tensor(part.name).copy_(ones.tensor(part.name))
            assert int(view.memory.sum()) == 8 * part.num_bytes
            owners += view.memory
        for block_id in range(2):
            page = view.offset_bytes + block_id * view.block_stride_bytes
            inside[page : page + 4 * view.format.row_bytes] = 1
        assert bool((owners <= inside).all())

    @pytest.mark.parametrize("name", NOT_MOVED)
    @pytest.mark.parametrize("backend", ["triton", "reference"])
    def test_a_kernel_refuses_rows_that_it_cannot_read(self, name, backend):
        row_format = ALL[name]
        view = make_view(row_format, rows_per_block=4)
        rows = [torch.zeros(1, part.num_heads, part.head_dim, dtype=part.dtype) for part in row_format.parts]
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        sums, q = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 2, 64)
        refused = []
        if not row_format.quantised:
            refused += [lambda: write_rows(view, torch.tensor([0]), *rows, backend=backend)]
            refused += [lambda: gather_rows(view, table, sums, num_rows=1, backend=backend)]
        if row_format.value_dim is None:
            refused += [lambda: mla_decode(view, table, lens, q, softmax_scale=1.0, backend=backend)]
        if rows[0].shape[1] == 1:
            refused += [lambda: gqa_decode(view, table, lens, q, backend=backend)]
        before = view.memory.clone()
        for call in refused:
            with pytest.raises(ValueError, match=f"view: expected .*'{row_format.name}'"):
                call()
        assert torch.equal(view.memory, before)


# name -> bytes of a row, page alignment, bytes of a page of 4 and of 64 rows
SIZES = {
    "fp8_ds_mla": (656, 656, 2_624, 41_984),
    "dsv4": (584, 576, 2_880, 37_440),
    "mxfp8_latent": (528, 528, 2_112, 33_792),
    "mxfp8_latent_split": (528, 512, 2_560, 33_792),
    "nvfp4_latent": (288, 288, 1_152, 18_432),
    "nvfp4_latent_split": (288, 256, 1_280, 18_432),
    "nvfp4_ds_mla": (352, 16, 1_408, 22_528),
    "indexer_fp8": (132, 16, 528, 8_448),
    "indexer_mxfp4": (68, 16, 272, 4_352),
    "int8_token_head": (312, 16, 1_248, 19_968),
    "bytes": (42, 16, 176, 2_688),
    "latent of fp8": (576, 16, 2_304, 36_864),
    "kv of fp8": (192, 16, 768, 12_288),
}
# name -> per part where it begins in rows 0 ... 3 of a page of four
PLACES = {
    "fp8_ds_mla": "nope 0 656 1312 1968 | scales 512 1168 1824 2480 | rope 528 1184 1840 2496",
    "dsv4": "nope 0 576 1152 1728 | rope 448 1024 1600 2176 | scales 2304 2312 2320 2328",
    "indexer_fp8": "k 0 128 256 384 | scales 512 516 520 524",
    "indexer_mxfp4": "k 0 64 128 192 | scales 256 260 264 268",
    "mxfp8_latent": "latent 0 528 1056 1584 | scales 512 1040 1568 2096",
    "mxfp8_latent_split": "latent 0 512 1024 1536 | scales 2048 2064 2080 2096",
    "nvfp4_latent": "latent 0 288 576 864 | scales 256 544 832 1120",
    "nvfp4_latent_split": "latent 0 256 512 768 | scales 1024 1056 1088 1120",
    "nvfp4_ds_mla": "nope 0 352 704 1056 | rope 256 608 960 1312 | scales 320 672 1024 1376",
    "latent of fp8": "latent 0 576 1152 1728",
    "kv of fp8": "k 0 128 256 384 | v 512 576 640 704",
    "fp8_token_head": "k 0 312 624 936 | k_scales 64 376 688 1000 | v 68 380 692 1004 | v_scales 100 412 724 1036",
}
QUANTISED = {
    "fp8_ds_mla": ("nope", "scales", 128, "fp32_pow2", 1),
    "dsv4": ("nope", "scales", 64, "ue8m0", 1),
    "mxfp8_latent": ("latent", "scales", 32, "ue8m0", 1),
    "mxfp8_latent_split": ("latent", "scales", 32, "ue8m0", 1),
    "nvfp4_latent": ("latent", "scales", 16, "e4m3", 2),
    "nvfp4_latent_split": ("latent", "scales", 16, "e4m3", 2),
    "nvfp4_ds_mla": ("nope", "scales", 16, "e4m3", 2),
    "latent of fp8": ("latent", None, 576, "fp32", 1),
}
DSV4_PAGES = {2: 1_728, 4: 2_880, 8: 5_184, 16: 9_792, 32: 19_008, 64: 37_440, 128: 74_880, 256: 149_760}
# (bytes of a row, rows) -> bytes of a page aligned to 16, 576 and 512
INDEXER_PAGES = {
    (132, 16): (2_112, 2_304, 2_560),
    (132, 32): (4_224, 4_608, 4_608),
    (132, 64): (8_448, 8_640, 8_704),
    (132, 128): (16_896, 17_280, 16_896),
    (68, 64): (4_352, 4_608, 4_608),
}


class TestBytes:
    @pytest.mark.parametrize("name", SIZES)
    def test_sizes(self, name):
        row_format = ALL[name]
        pages = row_format.page_bytes(4), row_format.page_bytes(64)
        assert (row_format.row_bytes, row_format.page_alignment, *pages) == SIZES[name]

    @pytest.mark.parametrize("rows", DSV4_PAGES)
    def test_pages_of_584(self, rows):
        assert dsv4_format().page_bytes(rows) == DSV4_PAGES[rows]
        assert dsv4_format().area_offset_bytes(1, rows) == 576 * rows

    @pytest.mark.parametrize(("row_bytes", "rows"), INDEXER_PAGES)
    def test_pages_of_132_and_68(self, row_bytes, rows):
        pages = tuple(indexer_format(row_bytes, alignment).page_bytes(rows) for alignment in (16, 576, 512))
        assert pages == INDEXER_PAGES[row_bytes, rows]

    @pytest.mark.parametrize("name", PLACES)
    def test_places_in_a_page_of_four_rows(self, name):
        view = view_of(ALL[name], 4)
        places = [words.split() for words in PLACES[name].split(" | ")]
        for part, *starts in places:
            assert [address(view, part, 0, row, 0, 0) for row in range(4)] == list(map(int, starts))
        assert [part for part, *_ in places] == [part.name for part in view.format.parts]

    def test_a1_the_last_scale_of_584(self):
        view = view_of(dsv4_format(), 4, blocks=1)
        assert address(view, "scales", 0, 3, 0, 6) == 2_334
        for part in view.format.parts:
            view.tensor(part.name).view(U8).fill_(0xFF)
        assert (view.page_bytes, len(view.memory)) == (2_880, 2_880)
        assert view.memory[2_335:].count_nonzero() == 0, "the zero byte and the padding"
        assert (view.memory[:2_335] == 0).nonzero().flatten().tolist() == [2_311, 2_319, 2_327]

    @pytest.mark.parametrize(
        ("row_format", "stride", "offset", "page", "row", "places"),
        [
            (dsv4_format(), 37_440, 0, 3, 5, {"nope": 115_200, "scales": 149_224}),
            (fp8_ds_mla_format(), 41_984, 0, 2, 1, {"nope": 84_624, "scales": 85_136, "rope": 85_152}),
            (indexer_format(132, 576), 8_640, 0, 1, 63, {"k": 16_704, "scales": 17_084}),
            (indexer_format(68, 576), 4_608, 0, 1, 2, {"k": 4_736, "scales": 8_712}),
            (dsv4_format(), 1_002_240, 74_880, 2, 0, {"nope": 2_079_360}),
        ],
        ids=["A2", "A3", "A4", "A5", "A6"],
    )
    def test_anchors(self, row_format, stride, offset, page, row, places):
        view = view_of(row_format, 64, stride, blocks=page + 1, offset=offset)
        assert {name: address(view, name, page, row, 0, 0) for name in places} == places

    def test_columns_read_as_v(self):
        assert {name for name, made in ALL.items() if made.value_dim == 512} == {"latent", *QUANTISED}

    @pytest.mark.parametrize("name", QUANTISED)
    def test_scales_of_latent_rows(self, name):
        assert ALL[name].quantised == (Quantised(*QUANTISED[name]),)

    def test_scales_of_other_rows(self):
        assert ALL["indexer_fp8"].quantised == (Quantised("k", "scales", 128, "fp32"),)
        assert ALL["indexer_mxfp4"].quantised == (Quantised("k", "scales", 32, "ue8m0", 2),)
        assert ALL["kv of fp8"].quantised == (Quantised("k", None, 128, "fp32"), Quantised("v", None, 64, "fp32"))
        of_heads = Quantised("k", "k_scales", 64, "fp32"), Quantised("v", "v_scales", 32, "fp32")
        assert ALL["int8_token_head"].quantised == ALL["fp8_token_head"].quantised == of_heads
        assert not any(ALL[name].quantised for name in ("kv", "kv_packed", "latent", "bytes", "state"))


class TestTokenHead:
    @pytest.mark.parametrize("dtype", [torch.int8, FP8])
    def test_the_records_of_eight_heads(self, dtype):
        row_format = token_head_format(8, 128, dtype=dtype)
        assert (row_format.row_bytes, row_format.page_bytes(16)) == (8 * 264, 33_792)
        view = view_of(row_format, 16)
        assert [address(view, part.name, 1, 2, 3, 0) for part in row_format.parts] == [
            33_792 + 2 * 2_112 + 3 * 264 + offset for offset in (0, 128, 132, 260)
        ]
        assert view.tensor("v_scales").stride() == (33_792 // 4, 2_112 // 4, 66, 1)

    @given(heads=st.integers(1, 9), key=st.integers(1, 40), value=st.integers(1, 40), rows=st.integers(1, 5))
    @settings(max_examples=50, deadline=None)
    def test_every_byte_of_a_row_is_of_one_part(self, heads, key, value, rows):
        row_format = token_head_format(heads, 4 * key, 4 * value)
        runs = sorted(run for part in row_format.parts for run in part.runs())
        assert [start for start, _ in runs] == [0, *(end for _, end in runs[:-1])]
        assert runs[-1][1] == row_format.row_bytes == heads * (4 * key + 4 * value + 8)
        view_of(row_format, rows)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


class TestState:
    def test_tensors_start_at_multiples_of_16(self):
        row_format = state_format(STATE)
        places = [(part.name, part.offset_bytes, part.num_bytes, part.shape) for part in row_format.parts]
        assert places == [("conv", 0, 30, (3, 5)), ("ssm", 32, 256, (4, 8, 2)), ("steps", 288, 8, (1,))]
        assert (row_format.area_pitches, row_format.page_bytes(1)) == ((304,), 304)

    def test_views_have_the_shapes(self):
        view = view_of(state_format([("h", (32, 128, 128), FP32), ("conv", (3, 96), BF16)]), 1, blocks=2)
        assert (view.tensor("h").shape, view.tensor("conv").shape) == ((2, 1, 32, 128, 128), (2, 1, 3, 96))
        assert address(view, "h", 1, 0, 31, 127, 127) == view.page_bytes + 4 * 32 * 128 * 128 - 4
        assert address(view, "conv", 0, 0, 1, 0) == 4 * 32 * 128 * 128 + 2 * 96

    @given(st.lists(st.tuples(SHAPES, st.sampled_from((U8, BF16, FP32))), min_size=1, max_size=6))
    @settings(max_examples=50, deadline=None)
    def test_any_tensors(self, tensors):
        row_format = state_format([(str(i), shape, dtype) for i, (shape, dtype) in enumerate(tensors)])
        view = view_of(row_format, 2)
        assert row_format.row_bytes % 16 == 0
        for part, (shape, dtype) in zip(row_format.parts, tensors, strict=True):
            assert part.offset_bytes % 16 == 0
            assert view.tensor(part.name).shape == (4, 2, *shape)
            assert part.num_bytes == math.prod(shape) * dtype.itemsize


@st.composite
def pitched_parts(draw):
    size = draw(st.sampled_from((U8, BF16, FP32)))
    heads, dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    pitch = draw(st.none() | st.integers(dim, 12).map(lambda elements: elements * size.itemsize))
    return RowPart("p", size, heads, dim, 0, draw(st.integers(0, 12)) * size.itemsize, pitch)


@given(st.lists(pitched_parts(), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_parts_are_refused_exactly_when_they_share_a_byte(parts):
    parts = [replace(part, name=str(i)) for i, part in enumerate(sorted(parts, key=lambda part: part.offset_bytes))]
    used = [
        part.offset_bytes + head * part.pitch_bytes + byte
        for part in parts
        for head in range(part.num_heads)
        for byte in range(part.head_bytes)
    ]
    if len(set(used)) == len(used):
        RowFormat("x", tuple(parts), (256,))
    else:
        with pytest.raises(ValueError, match=r"part '\d' starts at byte \d+, inside the part before it, which ends at"):
            RowFormat("x", tuple(parts), (256,))


CODES, SCALES = RowPart("codes", U8, 1, 128), RowPart("scales", FP32, 1, 4, area=1)
ENTRY = Quantised("codes", "scales", 32, "fp32")


def quantised(*entries: object, scales: RowPart = SCALES, codes: RowPart = CODES, **fields: object) -> RowFormat:
    return RowFormat("x", (codes, scales), (codes.num_bytes, scales.num_bytes), quantised=entries, **fields)


BAD_VALUES = {
    "values": (
        lambda: quantised(replace(ENTRY, values="k")),
        r"'x': quantised: expected the name of a part \(codes, scales\), got 'k'",
    ),
    "scales": (lambda: quantised(replace(ENTRY, scales="s")), "the name of a part .*, got 's'"),
    "twice": (
        lambda: quantised(ENTRY, ENTRY),
        r"'x': quantised: expected every part at most once, as values or as scales, got \['codes', 'scales', 'codes'",
    ),
    "own scales": (lambda: quantised(replace(ENTRY, scales="codes")), "expected every part at most once"),
    "too few scales": (
        lambda: quantised(replace(ENTRY, quant_tile=31)),
        r"scales 'scales': expected heads and scales per head \(1, 5\), one scale for 31 of 128 values, got \(1, 4\)",
    ),
    "too many scales": (lambda: quantised(replace(ENTRY, quant_tile=64)), r"\(1, 2\), one scale .*, got \(1, 4\)"),
    "halves": (lambda: quantised(replace(ENTRY, values_per_element=2)), r"\(1, 8\), one scale for 32 of 256"),
    "other heads": (lambda: quantised(ENTRY, codes=RowPart("codes", U8, 4, 32)), r"head \(4, 1\), .*, got \(1, 4\)"),
    "dtype of scales": (
        lambda: quantised(replace(ENTRY, encoding="ue8m0")),
        "scales 'scales': expected torch.uint8, the dtype of ue8m0, got torch.float32",
    ),
    "encoding": (
        lambda: replace(ENTRY, encoding="bf16"),
        "encoding: expected one of fp32, fp32_pow2, ue8m0, e4m3, got 'bf16'",
    ),
    "tile": (lambda: replace(ENTRY, quant_tile=0), "quant_tile: expected an integer >= 1, got 0"),
    "packing": (lambda: replace(ENTRY, values_per_element=0), "values_per_element: expected an integer >= 1, got 0"),
    "wide V": (lambda: quantised(ENTRY, value_dim=129), r"'x': value_dim: expected an integer in \[1, 128\], got 129"),
    "wide V of 584": (lambda: replace(dsv4_format(), value_dim=513), r"value_dim: .* in \[1, 512\], got 513"),
    "V of several heads": (
        lambda: RowFormat("x", (RowPart("a", U8, 1, 4), RowPart("b", U8, 2, 4, 0, 4)), (12,), value_dim=8),
        "'x': value_dim: expected parts with one head, got 2 heads",
    ),
    "indexer row": (lambda: indexer_format(128), "row_bytes: expected one of 132, 68, got 128"),
    "indexer page": (lambda: indexer_format(132, 4), "page_alignment: expected a multiple of 16, got 4"),
    "heads of bf16": (
        lambda: token_head_format(2, 64, dtype=BF16),
        "dtype: expected torch.int8 or torch.float8_e4m3fn, got torch.bfloat16",
    ),
    "heads of 6": (lambda: token_head_format(2, 8, 6), "head_dim_v: expected a multiple of 4, got 6"),
    "bytes of three heads": (lambda: bytes_format(16, 3), "row_bytes: expected a multiple of the 3 heads, got 16"),
    "no state": (lambda: state_format([]), "tensors: expected at least one, got none"),
    "state without dimensions": (lambda: state_format([("h", (), FP32)]), "'h': expected at least one dimension, got"),
    "state of nothing": (
        lambda: state_format([("h", (2, 0), FP32)]),
        "tensors: shape of 'h': expected an integer >= 1",
    ),
}
BAD_TYPES = {
    "entry list": (lambda: replace(dsv4_format(), quantised=[]), "quantised: expected a tuple, got list"),
    "entry": (lambda: quantised("codes"), "'x': quantised: expected Quantised, got str"),
    "name": (lambda: replace(ENTRY, values=3), "Quantised: values: expected str, got int"),
    "scale name": (lambda: replace(ENTRY, scales=3), "Quantised: scales: expected str or NoneType, got int"),
    "state": (lambda: state_format([("h", (2,))]), r"tensors: expected \(name, shape, dtype\), got \('h', \(2,\)\)"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values(case):
    make, message = BAD_VALUES[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("case", BAD_TYPES)
def test_bad_types(case):
    make, message = BAD_TYPES[case]
    with pytest.raises(TypeError, match=message):
        make()


def test_good_entries():
    quantised(replace(ENTRY, values_per_element=2, quant_tile=64))
    quantised(replace(ENTRY, scales=None, quant_tile=128, encoding="e4m3"))
    assert bytes_format(48, 3).part("bytes").head_dim == 16
