"""The integer codecs: every code and every bf16 pattern, kernel and reference, and the published anchors."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvstore_kernels import codec
from kvstore_kernels.reference import codec as reference

EVERY_BF16 = torch.arange(65_536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


@triton.jit
def _codec_kernel(in_ptr, out_ptr, OP: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = tl.load(in_ptr + at)
    if OP == "encode_e4m3":
        tl.store(out_ptr + at, codec.encode_e4m3(values))
    elif OP == "decode_e4m3":
        tl.store(out_ptr + at, codec.decode_e4m3(values))
    elif OP == "encode_e2m1":
        tl.store(out_ptr + at, codec.encode_e2m1(values))
    elif OP == "decode_e2m1":
        tl.store(out_ptr + at, codec.decode_e2m1(values))
    elif OP == "decode_ue8m0":
        tl.store(out_ptr + at, codec.decode_ue8m0(values))
    elif OP == "scale_exponent":
        tl.store(out_ptr + at, codec.scale_exponent(values, -22))
    elif OP == "bf16_bits":
        tl.store(out_ptr + at, codec.bf16_bits(values))


def run(op, values, dtype):
    out = torch.empty(values.shape, dtype=dtype)
    tile = min(8192, values.numel())
    _codec_kernel[(values.numel() // tile,)](values, out, OP=op, TILE=tile)
    return out


def bits(tensor):
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**12, 1 / 3])
@pytest.mark.parametrize("op", ["encode_e4m3", "encode_e2m1"])
def test_encoders_agree_on_every_bf16_pattern(op, scale):
    values = EVERY_BF16 * scale
    assert torch.equal(run(op, values, torch.uint8), getattr(reference, op)(values))


@pytest.mark.parametrize(("op", "count"), [("decode_e4m3", 256), ("decode_e2m1", 16), ("decode_ue8m0", 256)])
def test_decoders_agree_on_every_code(op, count):
    codes = torch.arange(count, dtype=torch.int32).to(torch.uint8)
    mine, theirs = run(op, codes, torch.float32), getattr(reference, op)(codes)
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(bits(mine)[~mine.isnan()], bits(theirs)[~theirs.isnan()])


def test_e4m3_is_the_nearest_code_with_ties_to_even():
    """Against an independent search over all codes in fp64."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    table = reference.decode_e4m3(codes).double().numpy()
    finite = EVERY_BF16[EVERY_BF16.isfinite()]
    encoded = run("encode_e4m3", torch.nn.functional.pad(finite, (0, -len(finite) % 8192)), torch.uint8)[: len(finite)]
    positive = [code for code in range(128) if not np.isnan(table[code])]
    ladder = table[positive]
    magnitude = np.minimum(np.abs(finite.double().numpy()), 448.0)
    above = np.searchsorted(ladder, magnitude).clip(0, len(ladder) - 1)
    below = np.maximum(above - 1, 0)
    up, down = ladder[above] - magnitude, magnitude - ladder[below]
    best = np.where(up < down, above, np.where(up > down, below, np.where(above % 2 == 0, above, below)))
    best = np.where(ladder[above] == magnitude, above, best)
    sign = np.signbit(finite.numpy()).astype(np.int64) << 7
    np.testing.assert_array_equal(encoded.numpy(), best | sign)


INF, NAN = float("inf"), float("nan")
ANCHORS = [(1.0, 0x38), (16, 0x58), (18, 0x59), (20, 0x5A), (125.06, 0x70), (448, 0x7E), (-3.3, 0xC5), (0.001, 0x01)]
ANCHORS += [(2.0**-10, 0x00), (3 * 2.0**-10, 0x02), (1000, 0x7E), (464, 0x7E), (500, 0x7E), (0.0, 0x00), (-0.0, 0x80)]
ANCHORS += [(INF, 0x7E), (-INF, 0xFE), (NAN, 0x7F), (-NAN, 0x7F)]


def test_anchors_of_e4m3():
    """O29: 1,000 clamps to 448 = 0x7E and never becomes the NaN 0x7F."""
    values = torch.tensor([value for value, _ in ANCHORS], dtype=torch.float32)
    codes = [code for _, code in ANCHORS]
    padded = torch.nn.functional.pad(values, (0, 32 - len(values)))
    assert run("encode_e4m3", padded, torch.uint8)[: len(values)].tolist() == codes
    assert reference.encode_e4m3(values).tolist() == codes


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        *((448, 0), (449, 1), (7.0, -6), (7.0000005, -5), (3.5, -7), (3.0, -7), (1.0, -8), (100, -2), (1024, 2)),
        *((1e-4, -22), (0.0, -22), (2.0**-40, -22), (3.4e38, 120)),
    ],
)
def test_scale_exponents(amax, exponent):
    values = torch.full((16,), amax, dtype=torch.float32)
    assert run("scale_exponent", values, torch.int32)[0] == exponent
    assert reference.scale_exponent(values, -22)[0] == exponent
    assert amax / 2.0**exponent <= 448


def test_scale_exponent_is_the_smallest_that_fits():
    amax = EVERY_BF16[EVERY_BF16.isfinite()].abs()
    exponent = reference.scale_exponent(amax, -300).double()
    nonzero = amax > 2.0**-100
    ratio = amax.double() / 2.0**exponent
    assert ((ratio <= 448) & (ratio > 224))[nonzero].all()


def test_bf16_bits_round_to_nearest_even():
    values = torch.randn(8192) * 10.0 ** torch.randint(-30, 30, (8192,)).float()
    values[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1.0039063])
    rounded = run("bf16_bits", values, torch.uint16)
    assert rounded[0] == 0x7FC0
    assert torch.equal(rounded.int()[1:], values.bfloat16().view(torch.uint16).int()[1:])
