"""The number formats of `kvstore_kernels.codec` in torch: the same bytes, the same policy.

`nan_to_num` stands where `where(x.isnan(), ...)` reads better: on a CPU it is ten times as fast.
"""

import math

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> uint8 codes of e4m3fn: saturating, nearest even, NaN as 0x7F."""
    unsigned_nans = values.float().nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    clamped = unsigned_nans.clamp(-448.0, 448.0)  # before the cast: torch's own was not saturating up to 2.11
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes of e4m3fn -> fp32, exact."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.flatten().int()).view(codes.shape)  # five times as fast as a cast of all


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> codes 0 ... 15 of e2m1 as uint8: saturating, nearest even, NaN as 0."""
    magnitude = values.float().abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for limit, is_open in (
        (0.25, True),
        (0.75, False),
        (1.25, True),
        (1.75, False),
        (2.5, True),
        (3.5, False),
        (5, True),
    ):
        codes += (magnitude > limit) if is_open else (magnitude >= limit)
    signed = codes | (torch.signbit(values).to(torch.uint8) << 3)
    return torch.where(values.isnan(), torch.zeros_like(codes), signed)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 ... 15 -> fp32."""
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=codes.device)
    return table[codes.long()]


def finite_amax(values: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude along the last axis, 0 where there is none."""
    return values.float().abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)


def scale_exponent(amax: torch.Tensor, least: int) -> torch.Tensor:
    """The smallest int32 e >= least with amax / 2^e <= 448, from the bits of a finite fp32 amax."""
    bits = amax.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    return exponent.clamp(min=least)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as fp32, for exponents -126 ... 127."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """uint8 scale bytes -> fp32: 2^(code - 127); code 0 is the subnormal 2^-127, code 255 NaN."""
    wide = codes.int()
    values = torch.where(wide == 0, torch.full_like(wide, 0x400000), wide << 23).view(torch.float32)
    return torch.where(wide == 255, torch.full_like(values, float("nan")), values)
