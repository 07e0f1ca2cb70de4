"""write_quantised: kernel and reference against a byte-level model; A- and O-numbers name published anchors, faults."""

import numpy as np
import pytest
import quant_model as model
import torch
from cases import POISON, ROW_DTYPES, make_view

from kvstore_kernels import (
    PageView,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    mxfp8_latent_format,
    nvfp4_ds_mla_format,
    nvfp4_latent_format,
    quant_write,
    token_head_format,
)
from kvstore_kernels.reference import quant_write as reference

WRITERS = {"triton": quant_write.write_quantised, "reference": reference.write_quantised}
pytestmark = pytest.mark.parametrize("backend", WRITERS)

FP8, FP32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
K_SCALE, V_SCALE = 0.3, 2.75
SCALES = {"row_scales": (K_SCALE, V_SCALE)}
OUTSIDE = model.scaled_outside((K_SCALE, V_SCALE), False)
# name -> format, columns of each tensor, model of a record, options
FORMATS = {
    "fp8_ds_mla": (fp8_ds_mla_format(), (576,), model.record_656, {}),
    "dsv4": (dsv4_format(), (512,), model.record_584, {}),
    "mxfp8_latent": (mxfp8_latent_format(), (512,), model.record_528, {}),
    "mxfp8_latent_split": (
        mxfp8_latent_format(page_split=True),
        (512,),
        model.split_in_two(model.record_528, 512),
        {},
    ),
    "indexer_fp8": (indexer_format(132, 576), (128,), model.record_132, {}),
    "indexer_mxfp4": (indexer_format(68), (128,), model.record_68, {}),
    "nvfp4_latent": (nvfp4_latent_format(), (512,), model.record_288, {}),
    "nvfp4_latent_split": (
        nvfp4_latent_format(page_split=True),
        (512,),
        model.split_in_two(model.record_288, 256),
        {},
    ),
    "nvfp4_ds_mla": (nvfp4_ds_mla_format(), (576,), model.record_352, {}),
    "kv of fp8": (kv_format(3, 40, 24, FP8), (120, 72), OUTSIDE, SCALES),
    "kv_packed of fp8": (
        kv_format(3, 40, 24, FP8, packed=True),
        (120, 72),
        model.scaled_outside((K_SCALE, V_SCALE), True),
        SCALES,
    ),
    "latent of fp8": (
        latent_format(576, 512, FP8),
        (576,),
        model.scaled_outside((K_SCALE,), True),
        {"row_scales": K_SCALE},
    ),
    "int8_token_head": (token_head_format(3, 72, 40), (216, 120), model.token_head(3, 127, model.int8), {}),
    "fp8_token_head": (token_head_format(3, 72, 40, FP8), (216, 120), model.token_head(3, 448, model.e4m3), {}),
}
NO_TILES = ("kv of fp8", "kv_packed of fp8", "latent of fp8")
SPECIAL = (0.0, -0.0, 448.0, -464.0, 1000.0, float("inf"), -float("inf"), float("nan"), -float("nan"), 0.001, 18.0)


def hostile_rows(width, dtype, seed=0):
    """[12, width]: rows of every size, zeros, subnormals, infinities, NaN, largest values at an edge of the scales."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(12, width // 4, 1, generator=generator)).expand(-1, -1, 4).flatten(1)
    rows = torch.randn(12, width, generator=generator) * sizes
    rows[1] = 0
    rows[2] = torch.tensor(SPECIAL).repeat(width // len(SPECIAL) + 1)[:width]
    rows[3] = float("inf")
    rows[4] = float("nan")
    rows[5] = rows[5].clamp(-7, 7)
    rows[5, ::16] = 7.0
    rows[6] = rows[6].clamp(-7, 7)
    rows[6, 3::16] = -model.next_after(7.0, dtype)
    rows[7] *= 2.0**-30
    rows[8] = torch.finfo(dtype).tiny * torch.linspace(-1, 1, width)
    rows[9] = rows[9].clamp(-6, 6)
    rows[9, 5::16] = 6.0
    rows[10, ::3], rows[10, 1::3] = -float("inf"), float("nan")
    return rows.to(dtype)


def bad_bytes(view, expected):
    return np.flatnonzero(view.memory.numpy() != expected)


def write_and_compare(name, view, slots, rows, backend, sources=None):
    """Writes `sources` (None: `rows`) and compares every byte of the memory with the model's."""
    _, _, record, options = FORMATS[name]
    expected = model.expected_memory(view, slots, rows, record)
    WRITERS[backend](view, torch.tensor(slots, dtype=torch.int64), *(sources or rows), **options)
    assert bad_bytes(view, expected).tolist() == []


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("rows_per_block", [1, 4, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_block_and_dtype(name, rows_per_block, dtype, backend):
    """A10: memory of noise around the rows keeps every byte."""
    row_format, widths, _, _ = FORMATS[name]
    view = make_view(row_format, rows_per_block, num_blocks=16 // min(rows_per_block, 4))
    rows = [hostile_rows(width, dtype, seed) for seed, width in enumerate(widths)]
    last = view.num_slots - 1
    slots = [last, 0, 5, 1, -1, 9, 2, 8, last + 1, 3, 11, 10]
    if rows_per_block == 4:  # the two rows skipped above
        slots[1], slots[4], slots[6], slots[8] = last + 1, 0, -1, 2
    write_and_compare(name, view, slots, rows, backend)


@pytest.mark.parametrize("fill", [0, POISON])
@pytest.mark.parametrize("name", FORMATS)
def test_canaries_around_adjacent_pages(name, fill, backend):
    row_format, widths, _, _ = FORMATS[name]
    view = make_view(row_format, 3, num_blocks=3, fill=fill, gap_bytes=0, offset_bytes=16)
    write_and_compare(name, view, [4, 8, 3], [hostile_rows(width, BF16)[:3] for width in widths], backend)


@pytest.mark.parametrize("name", FORMATS)
def test_o26_slots_outside_are_skipped_and_never_wrap(name, backend):
    row_format, widths, _, _ = FORMATS[name]
    view = make_view(row_format, rows_per_block=4, num_blocks=2)
    slots = [6, -1, -2, -(2**63), 8, 9, 2**31, 2**62]
    write_and_compare(name, view, slots, [hostile_rows(width, BF16)[:8] for width in widths], backend)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_behind_the_last_slot_are_ignored(name, backend):
    row_format, widths, _, _ = FORMATS[name]
    view = make_view(row_format, rows_per_block=4)
    rows = [hostile_rows(width, torch.float16) for width in widths]
    for slots in ([], [-1, -1], [3, 1, 6, 0, 5]):  # O27, O33
        write_and_compare(name, view, slots, rows, backend)


@pytest.mark.parametrize(("gap", "dtype"), [(8, FP32), (1, BF16)], ids=["gap8", "gap1"])
@pytest.mark.parametrize("name", FORMATS)
def test_sources_out_of_wider_rows(name, gap, dtype, backend):
    row_format, widths, _, _ = FORMATS[name]
    view = make_view(row_format, rows_per_block=4)
    rows = [hostile_rows(width, dtype, 3)[:4] for width in widths]
    fused = torch.full((4, gap + sum(widths) + gap * len(widths)), float("nan"), dtype=dtype)
    sources, first = [], gap
    for source, width in zip(rows, widths, strict=True):
        sources.append(fused[:, first : first + width].copy_(source))
        first += width + gap
    write_and_compare(name, view, [6, 0, 7, 3], rows, backend, sources)


HEADS = {"kv of fp8": 3, "kv_packed of fp8": 3, "int8_token_head": 3, "fp8_token_head": 3}


@pytest.mark.parametrize("name", FORMATS)
def test_sources_with_a_head_axis_a_gradient_or_a_lazy_sign(name, backend):
    row_format, widths, _, _ = FORMATS[name]
    view = make_view(row_format, rows_per_block=4)
    rows = [hostile_rows(width, FP32, 5)[5:8] for width in widths]
    by_head = [source.unflatten(1, (HEADS.get(name, 1), -1)).clone().requires_grad_() for source in rows]
    write_and_compare(name, view, [6, 0, 7], rows, backend, by_head)
    write_and_compare(name, view, [1, 5, 4], rows, backend, [torch._neg_view(-source) for source in rows])


TWO_PIECES = {"fp8_ds_mla": 512, "dsv4": 448, "nvfp4_ds_mla": 512, "latent of fp8": 512}


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("name", TWO_PIECES)
def test_nope_and_rope_from_two_tensors(name, dtype, backend):
    row_format, (width,), _, _ = FORMATS[name]
    view = make_view(row_format, rows_per_block=4, num_blocks=4)
    rows = hostile_rows(width, dtype)
    sources = (rows[:, : TWO_PIECES[name]].contiguous(), rows[:, None, TWO_PIECES[name] :])
    write_and_compare(name, view, [15, *range(11)], [rows], backend, sources)


ONES = {"fp8_ds_mla": 576, "dsv4": 512, "indexer_fp8": 128, "indexer_mxfp4": 128}


class TestAnchors:
    def test_a1_scales_of_the_last_token_of_584(self, backend):
        view = PageView(torch.full((2_880,), 0xA5, dtype=torch.uint8), 0, 2_880, 1, 4, dsv4_format())
        rows = torch.ones(1, 512)
        rows[:, 384:448] = 1024.0
        WRITERS[backend](view, torch.tensor([3]), rows)
        assert view.memory[2_328:2_336].tolist() == [119] * 6 + [129, 0]
        assert view.memory[1_728:2_304].tolist() == [0x78] * 448 + [0x80, 0x3F] * 64
        assert set(view.memory[:1_728].tolist() + view.memory[2_304:2_328].tolist()) == {0xA5}
        assert set(view.memory[2_336:].tolist()) == {0xA5}

    @pytest.mark.parametrize(
        ("row_format", "stride", "offset", "slot", "runs"),
        [
            (dsv4_format(), 37_440, 0, 3 * 64 + 5, [(115_200, 576), (149_224, 8)]),
            (fp8_ds_mla_format(), 41_984, 0, 2 * 64 + 1, [(84_624, 512), (85_136, 16), (85_152, 128)]),
            (indexer_format(132, 576), 8_640, 0, 64 + 63, [(16_704, 128), (17_084, 4)]),
            (indexer_format(68, 576), 4_608, 0, 64 + 2, [(4_736, 64), (8_712, 4)]),
            (dsv4_format(), 1_002_240, 74_880, 2 * 64, [(2_079_360, 576), (2_079_360 + 36_864, 8)]),
        ],
        ids=["A2", "A3", "A4", "A5", "A6"],
    )
    def test_places(self, row_format, stride, offset, slot, runs, backend):
        num_blocks = slot // 64 + 1
        size = offset + (num_blocks - 1) * stride + row_format.page_bytes(64)
        written = []
        for fill in (0, POISON):  # a byte that is written like the fill changes in the other memory
            view = PageView(torch.full((size,), fill, dtype=torch.uint8), offset, stride, num_blocks, 64, row_format)
            WRITERS[backend](view, torch.tensor([slot]), torch.ones(1, ONES[row_format.name]))
            written.append(view.memory != fill)
        places = (written[0] | written[1]).nonzero().flatten().tolist()
        assert places == [place for start, count in runs for place in range(start, start + count)]

    @pytest.mark.parametrize(("amax", "dsv4", "mxfp8"), [(7.0, 121, 121), (7.0000005, 121, 122), (7.03125, 122, 122)])
    def test_a7_largest_values_at_the_edge(self, amax, dsv4, mxfp8, backend):
        """Rows of dsv4 are rounded to bf16 first, and the next fp32 number behind 7 becomes 7 again."""
        for row_format, scale in ((dsv4_format(), dsv4), (mxfp8_latent_format(), mxfp8)):
            view = make_view(row_format, 4, fill=0)
            WRITERS[backend](view, torch.tensor([1]), torch.full((1, 512), -amax))
            assert view.tensor("scales")[0, 1, 0, 0] == scale

    def test_a8_o30_zeros_get_the_least_scale_and_codes_0(self, backend):
        least = {"fp8_ds_mla": [0x39000000] * 4, "dsv4": [105] * 7, "mxfp8_latent": [105] * 16}
        least |= {"indexer_fp8": [0x34800000], "indexer_mxfp4": [1] * 4, "nvfp4_latent": [1] * 32}
        least |= {"nvfp4_ds_mla": [1] * 32}
        for name, wanted in least.items():
            row_format, widths, _, _ = FORMATS[name]
            view = make_view(row_format, 4, fill=POISON)
            WRITERS[backend](view, torch.tensor([2]), torch.zeros(1, *widths))
            scales = view.tensor("scales")[0, 2, 0]
            bits = scales.view(torch.int32 if scales.dtype == FP32 else torch.uint8)
            assert bits.tolist() == wanted, name
            assert not view.tensor(row_format.parts[0].name)[0, 2].view(torch.uint8).any(), name

    def test_a9_scales_of_352_are_permuted(self, backend):
        view = make_view(nvfp4_ds_mla_format(), 4, fill=0)
        tiles = 6.0 * 2.0 ** torch.arange(-4, 4).repeat_interleave(
            4
        )  # tile s: 2^(s // 4 - 4), and 1.5 times in odd ones
        tiles[1::2] *= 1.5
        row = torch.cat([tiles.repeat_interleave(16), torch.ones(64)])[None]
        WRITERS[backend](view, torch.tensor([0]), row)
        scales = view.tensor("scales")[0, 0, 0].float()
        for tile, place in ((0, 0), (1, 8), (2, 16), (3, 24), (4, 1), (5, 9), (31, 31)):
            assert scales[place] == tiles[tile] / 6
        assert sorted(8 * (s % 4) + s // 4 for s in range(32)) == list(range(32))
