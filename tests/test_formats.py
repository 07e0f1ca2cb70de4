"""RowFormat, PageView and the checks: the bytes they describe, and every message they refuse with."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import make_view

from kvstore_kernels import FORMATS, PageView, RowFormat, RowPart, kv_format, latent_format, resolve_backend, write_rows
from kvstore_kernels.checks import cdiv, expect_device, expect_dtype, expect_int, expect_shape, round_up
from kvstore_kernels.formats import dtype_from_name, dtype_name
from kvstore_kernels.gather import gather_launch
from kvstore_kernels.launch import Launch, Target, lanes_of_16_bytes
from kvstore_kernels.write import write_launch

BF16, FP32 = torch.bfloat16, torch.float32
LATENT = latent_format(576, 512)


class TestRowFormat:
    @pytest.mark.parametrize(
        ("row_format", "pitches", "page_of_16"),
        [
            (kv_format(8, 128), (2048, 2048), 65536),
            (kv_format(2, 192, 128), (768, 512), 20480),
            (kv_format(3, 64, dtype=FP32), (768, 768), 24576),
            (kv_format(2, 192, 128, packed=True), (1280,), 20480),
            (LATENT, (1152,), 18432),
            (latent_format(576, 512, FP32), (2304,), 36864),
        ],
        ids=["kv 8x128", "kv 192/128", "kv fp32", "packed", "latent", "latent fp32"],
    )
    def test_bytes_of_rows_and_pages(self, row_format, pitches, page_of_16):
        assert row_format.area_pitches == pitches
        assert row_format.row_bytes == sum(pitches)
        assert row_format.page_bytes(16) == page_of_16

    def test_pages_are_padded_to_16_bytes(self):
        odd = latent_format(3, 1)
        assert (odd.row_bytes, odd.page_bytes(1), odd.page_bytes(8), odd.page_bytes(9)) == (6, 16, 48, 64)

    def test_places_of_parts(self):
        apart, packed = kv_format(2, 192, 128), kv_format(2, 192, 128, packed=True)
        assert [(part.area, part.offset_bytes) for part in apart.parts] == [(0, 0), (1, 0)]
        assert apart.area_offset_bytes(1, 16) == 16 * 768
        assert [(part.area, part.offset_bytes) for part in packed.parts] == [(0, 0), (0, 768)]
        assert packed.part("v").num_bytes == 512

    @pytest.mark.parametrize(
        "row_format", [kv_format(8, 128), kv_format(1, 80, 64, torch.float16, packed=True), LATENT]
    )
    def test_json_round_trip(self, row_format):
        assert RowFormat.from_dict(json.loads(json.dumps(row_format.to_dict()))) == row_format

    def test_equal_only_when_every_field_is(self):
        assert kv_format(8, 128) == kv_format(8, 128)
        assert len({kv_format(8, 128), kv_format(8, 128, packed=True), kv_format(8, 128, dtype=FP32), LATENT}) == 4
        assert latent_format(576, 448) != LATENT

    def test_formats_by_name(self):
        assert FORMATS["kv"](2, 64) == kv_format(2, 64)
        assert FORMATS["kv_packed"](2, 64) == kv_format(2, 64, packed=True)
        assert FORMATS["latent"](576, 512) == LATENT
        with pytest.raises(TypeError):
            FORMATS["mine"] = kv_format

    @pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, torch.uint8])
    def test_dtype_names(self, dtype):
        assert dtype_from_name(dtype_name(dtype)) is dtype

    @pytest.mark.parametrize("name", ["bf16", "nn", "", 3, None])
    def test_unknown_dtype_name(self, name):
        with pytest.raises(ValueError, match="dtype: expected the name of a torch dtype such as 'bfloat16', got"):
            dtype_from_name(name)


K, V = RowPart("k", BF16, 2, 64), RowPart("v", BF16, 2, 64, area=1)
BAD_FORMATS = {
    "no heads": (lambda: kv_format(0, 64), ValueError, "'k': num_heads: expected an integer >= 1, got 0"),
    "negative head": (lambda: kv_format(2, -64), ValueError, "'k': head_dim: expected an integer >= 1, got -64"),
    "head of bool": (lambda: kv_format(True, 64), TypeError, "num_heads: expected an integer, got True of type bool"),
    "float head": (lambda: kv_format(2, 64.0), TypeError, "head_dim: expected an integer, got 64.0 of type float"),
    "dtype name": (lambda: kv_format(2, 64, dtype="bf16"), TypeError, "dtype: expected a torch.dtype, got 'bf16'"),
    "part offset": (
        lambda: RowPart("k", FP32, 1, 4, offset_bytes=2),
        ValueError,
        "offset_bytes: expected a multiple of 4",
    ),
    "negative area": (lambda: RowPart("k", BF16, 1, 4, area=-1), ValueError, "area: expected an integer >= 0, got -1"),
    "value_dim": (lambda: latent_format(64, 65), ValueError, r"value_dim: expected an integer in \[1, 64\], got 65"),
    "latent_dim": (
        lambda: latent_format("a", 2),
        TypeError,
        "latent_dim: expected an integer, got 'a' of type str",
    ),
    "parts list": (lambda: RowFormat("x", [K], (256,)), TypeError, "'x': parts: expected a tuple, got list"),
    "pitches list": (lambda: RowFormat("x", (K,), [256]), TypeError, "'x': area_pitches: expected a tuple, got list"),
    "part name": (lambda: RowFormat("x", ("k",), (256,)), TypeError, "'x': parts: expected RowPart, got str"),
    "empty area": (
        lambda: RowFormat("x", (K,), (256, 64)),
        ValueError,
        "'x': area_pitches: expected parts in every area, got none in 1",
    ),
    "areas out of order": (
        lambda: RowFormat("x", (replace(K, area=1), replace(V, area=0)), (256, 256)),
        ValueError,
        r"'x': parts: expected them in the order of \(area, offset_bytes\), got \[\(1, 0\), \(0, 0\)\]",
    ),
    "offsets out of order": (
        lambda: RowFormat("x", (replace(K, offset_bytes=256), replace(V, area=0)), (512,)),
        ValueError,
        r"'x': parts: expected them in the order of \(area, offset_bytes\), got \[\(0, 256\), \(0, 0\)\]",
    ),
    "latent of two heads": (
        lambda: RowFormat("x", (RowPart("latent", BF16, 2, 64),), (256,), value_dim=32),
        ValueError,
        "'x': value_dim: expected a first part with one head, got 2 heads",
    ),
    "no fields": (lambda: RowFormat.from_dict({}), ValueError, r"expected the field 'parts', got the fields \[\]"),
    "no pitches": (
        lambda: RowFormat.from_dict({"name": "x", "parts": []}),
        ValueError,
        r"expected the field 'area_pitches', got the fields \['name', 'parts'\]",
    ),
    "part without dtype": (
        lambda: RowFormat.from_dict({"name": "x", "parts": [{"name": "k"}], "area_pitches": [8]}),
        ValueError,
        "dtype: expected the name of a torch dtype such as 'bfloat16', got None",
    ),
    "narrow head pitch": (lambda: replace(K, head_pitch_bytes=126), ValueError, "head_pitch_bytes: .* >= 128, got 126"),
    "odd head pitch": (
        lambda: replace(K, head_pitch_bytes=129),
        ValueError,
        "'k': head_pitch_bytes: expected a multiple of 2, the size of torch.bfloat16, got 129",
    ),
    "shape list": (lambda: RowPart("s", FP32, 1, 6, shape=[2, 3]), TypeError, "'s': shape: expected a tuple, got list"),
    "small shape": (
        lambda: RowPart("s", FP32, 2, 3, shape=(5,)),
        ValueError,
        r"'s': shape: expected dimensions of 6 elements, num_heads \* head_dim, got \(5,\)",
    ),
    "no dimension": (
        lambda: RowPart("s", FP32, 1, 1, shape=()),
        ValueError,
        "shape: expected dimensions of 1 elements",
    ),
    "shape and pitch": (
        lambda: replace(K, head_pitch_bytes=128, shape=(128,)),
        ValueError,
        "'k': head_pitch_bytes: expected None beside a shape, got 128",
    ),
    "no parts": (lambda: RowFormat("x", (), ()), ValueError, "'x': parts: expected at least one, got none"),
    "same names": (lambda: RowFormat("x", (K, K), (512,)), ValueError, r"expected distinct names, got \['k', 'k'\]"),
    "no such area": (lambda: RowFormat("x", (K, V), (256,)), ValueError, "part 'v': expected an area below 1, got 1"),
    "overlap": (
        lambda: RowFormat("x", (K, RowPart("v", BF16, 2, 64, offset_bytes=128)), (512,)),
        ValueError,
        "part 'v' starts at byte 128, inside the part before it, which ends at 256",
    ),
    "overlap of heads": (
        lambda: RowFormat("x", (replace(K, head_pitch_bytes=142), replace(V, area=0, offset_bytes=128)), (512,)),
        ValueError,
        "part 'k' starts at byte 142, inside the part before it, which ends at 384",
    ),
    "last head outside": (
        lambda: RowFormat("x", (replace(K, head_pitch_bytes=256),), (256,)),
        ValueError,
        "part 'k' ends at byte 384, behind the record of 256",
    ),
    "outside": (
        lambda: RowFormat("x", (K,), (254,)),
        ValueError,
        "part 'k' ends at byte 256, behind the record of 254",
    ),
    "odd pitch": (lambda: RowFormat("x", (K,), (257,)), ValueError, "pitch of 257 bytes: expected a multiple of 2"),
    "zero pitch": (lambda: RowFormat("x", (K,), (0,)), ValueError, "'x': area pitch: expected an integer >= 1, got 0"),
    "alignment": (
        lambda: RowFormat("x", (K,), (256,), page_alignment=24),
        ValueError,
        "page_alignment: expected a multiple of 16, got 24",
    ),
    "unknown part": (
        lambda: LATENT.part("k"),
        ValueError,
        r"part: expected one of latent \(format 'latent'\), got 'k'",
    ),
}


@pytest.mark.parametrize("case", BAD_FORMATS)
def test_bad_formats(case):
    make, error, message = BAD_FORMATS[case]
    with pytest.raises(error, match=message):
        make()


class TestPageView:
    def test_numbers(self):
        view = make_view(LATENT, rows_per_block=64, num_blocks=3)
        assert (view.page_bytes, view.num_slots, view.device) == (64 * 1152, 192, torch.device("cpu"))

    @pytest.mark.parametrize("packed", [False, True])
    def test_tensor_is_a_view_of_the_right_bytes(self, packed):
        view = make_view(kv_format(2, 64, 32, packed=packed), rows_per_block=4, num_blocks=3, fill=0)
        view.tensor("v")[2, 3, 1, 31] = 1.0
        row_bytes = 256 + 128
        last = 48 + 2 * view.block_stride_bytes + 4 * row_bytes
        assert view.memory.nonzero().flatten().tolist() == [last - 2, last - 1]
        assert view.tensor("k").shape == (3, 4, 2, 64)

    def test_tensor_of_an_odd_slice_of_memory(self):
        memory = torch.zeros(16 + 96 + 3, dtype=torch.uint8)[16:]
        view = PageView(memory, 16, 32, 2, 4, latent_format(4, 2))
        view.tensor("latent")[1, 0, 0, 0] = -2.0
        assert memory.nonzero().flatten().tolist() == [16 + 32 + 1]

    @pytest.mark.parametrize("offset", range(1, 16))
    def test_aligned_slice_of_an_unaligned_buffer(self, offset):
        buffer = np.zeros(16 + 32 + 32, dtype=np.uint8)
        start = -buffer.ctypes.data % 16 + 16 - offset
        memory = torch.from_numpy(buffer[start:])[offset : offset + 32]
        if offset % 2 == 0:
            PageView(memory, 0, 32, 1, 4, latent_format(4, 2)).tensor("latent")[:] = 1.0
            assert memory.all()
            return
        message = f"memory: expected a slice that starts at a multiple of 2 bytes in its storage, got {offset}"
        with pytest.raises(ValueError, match=message):
            PageView(memory, 0, 32, 1, 4, latent_format(4, 2))

    def test_tensor_of_heads_between_other_parts(self):
        parts = RowPart("k", BF16, 2, 2, 0, 0, head_pitch_bytes=12), RowPart("v", BF16, 2, 4, 0, 4, head_pitch_bytes=12)
        view = make_view(RowFormat("x", parts, (24,)), rows_per_block=2, num_blocks=2, fill=0, gap_bytes=16)
        assert (parts[1].num_bytes, parts[1].span_bytes, parts[1].runs()) == (16, 20, [(4, 12), (16, 24)])
        view.tensor("v")[1, 1, 1, 0] = -2.0  # 0xC000
        assert view.memory.nonzero().flatten().tolist() == [48 + view.block_stride_bytes + 24 + 4 + 12 + 1]
        assert view.tensor("k").shape == (2, 2, 2, 2)

    def test_tensor_of_a_part_with_a_shape(self):
        part = RowPart("state", FP32, 2, 12, shape=(2, 3, 4))
        view = make_view(RowFormat("x", (part,), (96,)), rows_per_block=3, num_blocks=2, fill=0)
        tensor = view.tensor("state")
        assert (tensor.shape, tensor.stride()[2:]) == ((2, 3, 2, 3, 4), (12, 4, 1))
        tensor[1, 2, 1, 0, 3] = -0.0
        assert view.memory.nonzero().flatten().tolist() == [48 + view.block_stride_bytes + 2 * 96 + 15 * 4 + 3]

    def test_part_between_elements(self):
        row_format = RowFormat("x", (RowPart("c", torch.uint8, 1, 3), RowPart("s", FP32, 1, 1, area=1)), (3, 4))
        make_view(row_format, rows_per_block=4)
        message = (
            "rows_per_block: expected one that puts part 's' at a multiple of 4 bytes of a page, got 5, which puts"
        )
        with pytest.raises(ValueError, match=message):
            make_view(row_format, rows_per_block=5)

    def test_unknown_part(self):
        with pytest.raises(ValueError, match="part: expected one of latent"):
            make_view(LATENT).tensor("k")


PAGE = LATENT.page_bytes(16)
GOOD_VIEW = {
    "memory": torch.zeros(3 * PAGE, dtype=torch.uint8),
    "offset_bytes": 0,
    "block_stride_bytes": PAGE,
    "num_blocks": 3,
    "rows_per_block": 16,
    "format": LATENT,
}
BAD_VIEWS = {
    "2-D memory": ({"memory": torch.zeros(3, PAGE, dtype=torch.uint8)}, ValueError, r"memory: expected shape \[any\]"),
    "list memory": ({"memory": [0] * PAGE}, TypeError, "memory: expected a torch.Tensor, got list"),
    "bf16 memory": ({"memory": torch.zeros(3 * PAGE, dtype=BF16)}, ValueError, "memory: expected dtype torch.uint8"),
    "memory with gaps": (
        {"memory": torch.zeros(6 * PAGE, dtype=torch.uint8)[::2]},
        ValueError,
        "memory: expected contiguous bytes whose address is a multiple of 16",
    ),
    "unaligned memory": (
        {"memory": torch.zeros(3 * PAGE + 8, dtype=torch.uint8)[8:]},
        ValueError,
        "memory: expected contiguous bytes whose address is a multiple of 16",
    ),
    "format name": ({"format": "latent"}, TypeError, "format: expected a RowFormat, got str"),
    "no blocks": ({"num_blocks": 0}, ValueError, "num_blocks: expected an integer >= 1, got 0"),
    "no rows": ({"rows_per_block": 0}, ValueError, "rows_per_block: expected an integer >= 1, got 0"),
    "negative offset": ({"offset_bytes": -16}, ValueError, "offset_bytes: expected an integer >= 0, got -16"),
    "odd offset": ({"offset_bytes": 8, "num_blocks": 2}, ValueError, "offset_bytes: expected a multiple of 16, got 8"),
    "small stride": (
        {"block_stride_bytes": PAGE - 16},
        ValueError,
        f"block_stride_bytes: expected an integer >= {PAGE}, got {PAGE - 16}",
    ),
    "odd stride": ({"block_stride_bytes": PAGE + 8}, ValueError, "block_stride_bytes: expected a multiple of 16"),
    "one block too many": (
        {"num_blocks": 4},
        ValueError,
        f"num_blocks: the last of 4 pages ends at byte {4 * PAGE}, expected it inside the memory of {3 * PAGE} bytes",
    ),
    "offset too far": ({"offset_bytes": 16}, ValueError, "num_blocks: the last of 3 pages ends at byte"),
    "float blocks": ({"num_blocks": 3.0}, TypeError, "num_blocks: expected an integer, got 3.0 of type float"),
}


@pytest.mark.parametrize("case", BAD_VIEWS)
def test_bad_views(case):
    changes, error, message = BAD_VIEWS[case]
    with pytest.raises(error, match=message):
        PageView(**{**GOOD_VIEW, **changes})


class TestChecks:
    @pytest.mark.parametrize(
        ("value", "multiple", "divided", "rounded"), [(0, 16, 0, 0), (1, 16, 1, 16), (16, 16, 1, 16)]
    )
    def test_rounding(self, value, multiple, divided, rounded):
        assert (cdiv(value, multiple), round_up(value, multiple)) == (divided, rounded)

    def test_good_values_pass(self):
        assert expect_int("n", 3, 3, 3) == 3
        expect_shape("x", torch.zeros(2, 3), (None, 3))
        expect_dtype("x", torch.zeros(1), BF16, FP32)
        expect_device("x", torch.zeros(1), torch.device("cpu"))

    @pytest.mark.parametrize("shape", [(2,), (2, 3, 1), (3, 3), (None,), ()])
    def test_shape(self, shape):
        with pytest.raises(ValueError, match=r"x: expected shape \[.*\], got \[2, 3\]"):
            expect_shape("x", torch.zeros(2, 3), shape)

    def test_messages(self):
        with pytest.raises(ValueError, match=r"x: expected dtype .*bfloat16 or .*float32, got .*float16"):
            expect_dtype("x", torch.zeros(1, dtype=torch.float16), BF16, FP32)
        with pytest.raises(ValueError, match="x: expected a tensor on meta, got one on cpu"):
            expect_device("x", torch.zeros(1), torch.device("meta"))
        with pytest.raises(ValueError, match=r"n: expected an integer in \[1, 4\], got 5"):
            expect_int("n", 5, 1, 4)


SM90, GFX942 = Target("cuda", 90, 32), Target("hip", "gfx942", 64)


class TestLaunch:
    def test_backend_by_device(self):
        assert resolve_backend(None, torch.device("cpu")) == "reference"
        assert resolve_backend(None, torch.device("cuda")) == "triton"
        assert resolve_backend("triton", torch.device("cpu")) == "triton", "the interpreter reaches a CPU"

    def test_unknown_backend(self):
        with pytest.raises(ValueError, match="backend: expected one of triton, reference or None, got 'cuda'"):
            resolve_backend("cuda", torch.device("cpu"))

    def test_triton_on_a_cpu_without_the_interpreter(self, monkeypatch):
        monkeypatch.setattr("kvstore_kernels.launch.INTERPRETED", False)
        with pytest.raises(ValueError, match="backend: expected 'reference' for tensors on cpu, got 'triton'"):
            resolve_backend("triton", torch.device("cpu"))

    def test_empty_grid_launches_nothing(self):
        Launch(kernel=None, grid=(0,), args={}, constexprs={}, num_warps=1).run()
        Launch(kernel=None, grid=(3, 0), args={}, constexprs={}, num_warps=1).run()

    @pytest.mark.parametrize(
        ("num_bytes", "target", "warps"),
        [(1152, SM90, 4), (1152, GFX942, 2), (512, SM90, 1), (64, SM90, 1), (64, GFX942, 1), (2**20, SM90, 16)],
    )
    def test_lanes_move_16_bytes(self, num_bytes, target, warps):
        assert lanes_of_16_bytes(num_bytes, target) == warps

    @pytest.mark.parametrize("target", [SM90, GFX942], ids=["sm_90", "gfx942"])
    @pytest.mark.parametrize("row_format", [LATENT, kv_format(1, 64), kv_format(8, 128), kv_format(3, 80, dtype=FP32)])
    def test_a_write_tile_gives_every_lane_16_bytes(self, row_format, target):
        view = make_view(row_format)
        parts = [torch.zeros(1, part.num_heads, part.head_dim, dtype=part.dtype) for part in row_format.parts]
        launch = write_launch(view, torch.tensor([0]), parts, target)
        tile_bytes = launch.constexprs["TILE"] * row_format.parts[0].dtype.itemsize
        assert tile_bytes == launch.num_warps * target.warp_size * 16

    def test_launches_from_meta_tensors(self):
        meta = torch.device("meta")
        view = PageView(torch.empty(2**33, dtype=torch.uint8, device=meta), 64, 2**20, 8000, 64, LATENT)
        rows = torch.empty(5, 576, dtype=BF16, device=meta)
        write = write_launch(view, torch.empty(5, dtype=torch.int64, device=meta), (rows,), SM90)
        assert (write.grid, write.args["block_stride_units"], write.args["offset_units"]) == ((5,), 2**16, 4)
        table = torch.empty(2, 9, dtype=torch.int32, device=meta)
        lens = torch.empty(3, dtype=torch.int32, device=meta)
        gather, (latent,) = gather_launch(view, table, lens, 100, None, False, None, SM90)
        assert latent.shape == (100, 1, 576)
        assert gather.grid == (100 // gather.constexprs["TILE_ROWS"] + 2,)


QUANTISED = RowFormat(
    "codes_and_scales", (RowPart("codes", torch.uint8, 1, 128), RowPart("scales", FP32, 1, 1, area=1)), (128, 4)
)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_of_other_formats_are_not_moved(backend):
    view = make_view(QUANTISED)
    with pytest.raises(ValueError, match="view: expected a format of one or two dense parts of one element size"):
        write_rows(view, torch.tensor([0]), torch.zeros(1, 1, 128, dtype=torch.uint8), torch.zeros(1), backend=backend)
