"""Number formats in integer arithmetic: e4m3, e2m1, UE8M0 and bf16 give the same bytes in Triton's interpreter, on
every GPU, and in the torch reference (`kvstore_kernels.reference.codec`).

Policy: values saturate, infinities too; NaN becomes 0x7F in e4m3 (its sign is dropped) and 0 in e2m1, which has none.
Rounding is to nearest, ties to even. Source of the formats: OCP 8-bit floating point and microscaling specifications.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def encode_e4m3(values):
    """fp32 -> uint8 codes of e4m3fn."""
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448.0: infinities saturate here
    # Normal codes: the subtraction moves the bias from 127 to 7, the additions round the 20 dropped bits to even.
    normal = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Subnormal codes: 16384 has a last place of 2^-9, so the addition rounds to whole codes.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude >= 0x3C800000, normal, subnormal) | sign
    return tl.where(is_nan, 0x7F, codes).to(tl.uint8)


@triton.jit
def decode_e4m3(codes):
    """uint8 codes of e4m3fn -> fp32, exact."""
    wide = codes.to(tl.uint32)
    magnitude = wide & 0x7F
    # As the upper bits of fp16, whose bias is 15 and not 7: the factor is 2^8, and subnormals come out right.
    halves = (magnitude << 7).to(tl.uint16).to(tl.float16, bitcast=True)
    values = halves.to(tl.float32) * 256.0
    values = tl.where(magnitude == 0x7F, float("nan"), values)
    return with_sign(values, wide >> 7)


@triton.jit
def with_sign(values, sign):
    """Non-negative fp32 values with the lowest bit of `sign` as theirs, zeros too (0 - x would lose -0)."""
    return (values.to(tl.uint32, bitcast=True) | ((sign & 1) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(values):
    """fp32 -> codes 0 ... 15 of e2m1 as uint8; two of them make a byte, the first in the low half."""
    magnitude = tl.abs(values)
    codes = (magnitude > 0.25).to(tl.uint32) + (magnitude >= 0.75).to(tl.uint32) + (magnitude > 1.25).to(tl.uint32)
    codes += (magnitude >= 1.75).to(tl.uint32) + (magnitude > 2.5).to(tl.uint32) + (magnitude >= 3.5).to(tl.uint32)
    codes += (magnitude > 5.0).to(tl.uint32)
    sign = (values.to(tl.uint32, bitcast=True) >> 28) & 8
    return tl.where(values == values, codes | sign, 0).to(tl.uint8)


@triton.jit
def decode_e2m1(codes):
    """Codes 0 ... 15 -> fp32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    wide = codes.to(tl.uint32)
    exponent, mantissa = (wide >> 1) & 3, (wide & 1).to(tl.float32)
    # 2^(exponent - 1) x (1 + mantissa / 2); exponent 0 is subnormal: mantissa / 2.
    power = ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    values = tl.where(exponent == 0, mantissa * 0.5, power * (1.0 + mantissa * 0.5))
    return with_sign(values, wide >> 3)


@triton.jit
def finite_amax(values, axis: tl.constexpr):
    """The largest finite magnitude along an axis; NaN and infinities do not count, 0 where there is nothing else."""
    magnitude = tl.abs(values)
    is_finite = (values.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    return tl.max(tl.where(is_finite, magnitude, 0.0), axis)


@triton.jit
def scale_exponent(amax, LEAST: tl.constexpr):
    """The smallest e >= LEAST with amax / 2^e <= 448, from the bits of a finite amax: no division, no logarithm."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum(exponent, LEAST)


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32, for exponents -126 ... 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_ue8m0(codes):
    """uint8 scale bytes -> fp32: 2^(code - 127); code 0 is the subnormal 2^-127, code 255 NaN."""
    wide = codes.to(tl.uint32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return tl.where(wide == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def load_float(pointers, mask):
    """Masked elements of bf16, fp16 or fp32 as fp32, zero elsewhere; bf16 by its bits, which the interpreter needs."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = tl.load(pointers.to(tl.pointer_type(tl.uint16), bitcast=True), mask=mask, other=0)
        values = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def bf16_bits(values):
    """fp32 -> the bits of bf16 as uint16, rounded to nearest even; NaN is 0x7FC0."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.uint16)
