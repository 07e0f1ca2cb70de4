"""Encoding by the chip's cast: which chips may, how a launch chooses, and that the check of a chip can fail."""

import pytest
import torch
from cases import make_view

from benchmarks.aot_compile import CHIPS
from benchmarks.aot_layers import CAST_CHIPS
from kvstore_kernels import casts, dsv4_format, kv_format, layer_table, nvfp4_ds_mla_format, token_head_format
from kvstore_kernels.quant_write import quant_layers_launch, quant_write_launch
from kvstore_kernels.reference import codec

FP8 = torch.float8_e4m3fn
FORMATS = {
    "tiles": (dsv4_format(), (512,)),
    "tiles and a tail": (nvfp4_ds_mla_format(), (576,)),
    "heads": (token_head_format(2, 64, dtype=FP8), (128, 128)),
    "scales outside": (kv_format(2, 64, dtype=FP8), (128, 128)),
}


def launch(name, chip, hardware_cast=None):
    row_format, widths = FORMATS[name]
    rows = [torch.zeros(2, width) for width in widths]
    target = CHIPS[chip]
    return quant_write_launch(make_view(row_format), torch.tensor([0, 1]), rows, target, hardware_cast=hardware_cast)


def test_only_candidates_may_ever_cast():
    """sm_80 has no cast to e4m3 and does not compile one; gfx942 would emulate it."""
    assert set(casts.CAST_CANDIDATES) >= casts.HARDWARE_CASTS
    assert not {80, "gfx942"} & {*casts.CAST_CANDIDATES, *casts.HARDWARE_CASTS}
    assert [chip for chip, target in CHIPS.items() if target.arch in casts.CAST_CANDIDATES] == list(CAST_CHIPS)


def test_no_chip_casts_before_it_was_checked():
    assert frozenset() == casts.HARDWARE_CASTS
    assert not any(map(casts.encodes_in_hardware, CHIPS.values()))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_table_chooses_and_the_caller_may_override(name, chip, monkeypatch):
    assert launch(name, chip).constexprs["HARDWARE_CAST"] is None
    assert launch(name, chip, False).constexprs["HARDWARE_CAST"] is None
    if chip in CAST_CHIPS:
        assert launch(name, chip, True).constexprs["HARDWARE_CAST"] == CHIPS[chip].backend
        monkeypatch.setattr(casts, "HARDWARE_CASTS", frozenset({CHIPS[chip].arch}))
        assert launch(name, chip).constexprs["HARDWARE_CAST"] == CHIPS[chip].backend
        assert launch(name, chip, False).constexprs["HARDWARE_CAST"] is None
        assert launch(name, "sm_80").constexprs["HARDWARE_CAST"] is None


@pytest.mark.parametrize("chip", sorted(CHIPS.keys() - set(CAST_CHIPS)))
def test_chips_without_a_cast_are_refused(chip):
    arch = CHIPS[chip].arch
    message = f"casts: expected one of 90, 100, gfx950, got {arch}"
    codes = torch.zeros(2, 4, casts.NUM_CODES, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        casts.cast_check_launch(codes, CHIPS[chip])
    for name in FORMATS:
        with pytest.raises(ValueError, match=message):
            launch(name, chip, True)
    table = layer_table([make_view(dsv4_format())] * 2)
    with pytest.raises(ValueError, match=message):
        quant_layers_launch(table, torch.tensor([0]), (torch.zeros(2, 1, 512),), CHIPS[chip], hardware_cast=True)


def test_writes_into_layers_take_the_override_too():
    table = layer_table([make_view(dsv4_format())] * 2)
    rows = torch.zeros(2, 1, 512)
    for hardware_cast, wanted in ((None, None), (False, None), (True, "cuda")):
        built = quant_layers_launch(table, torch.tensor([0]), (rows,), CHIPS["sm_90"], hardware_cast=hardware_cast)
        assert built.constexprs["HARDWARE_CAST"] == wanted


@pytest.fixture(scope="module")
def checked_codes():
    codes = torch.zeros(2, 4, casts.NUM_CODES, dtype=torch.uint8)
    casts.cast_check_launch(codes, CHIPS["sm_90"]).run()
    return codes


def test_the_check_finds_a_cast_that_rounds_wrongly(checked_codes):
    """Triton's interpreter has one: it takes halves away from zero."""
    wrong = casts.check_hardware_cast("cpu")
    assert 0 < wrong < casts.NUM_CODES
    assert wrong == casts.count_differences(checked_codes)


def test_the_check_asks_about_every_bf16_code_and_three_numbers_behind_it(checked_codes):
    """The codec's half of the answers, against the reference; a tie of e4m3 tells its neighbours apart."""
    _, got = checked_codes
    upper = torch.arange(casts.NUM_CODES, dtype=torch.int64) << 16
    for low_idx, low in enumerate(casts.LOW_BITS):
        values = (upper | low).to(torch.uint32).view(torch.float32)
        assert torch.equal(got[low_idx], codec.encode_e4m3(values))
    tie = torch.tensor(17.0).view(torch.int32).item() >> 16  # between 16 = 0x58 and 18 = 0x59
    assert got[:, tie].tolist() == [0x58, 0x59, 0x59, 0x59]


@pytest.mark.parametrize(("place", "low_idx"), [(0, 0), (0x7FC0, 0), (65_535, 3), (0x4188, 1)])
def test_one_code_that_differs_is_counted(place, low_idx):
    codes = torch.arange(casts.NUM_CODES).to(torch.uint8).repeat(2, 4, 1)
    assert casts.count_differences(codes) == 0
    codes[0, low_idx, place] ^= 1
    assert casts.count_differences(codes) == 1
    codes[0, :, place] ^= 2
    assert casts.count_differences(codes) == 1
