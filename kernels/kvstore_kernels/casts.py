"""Encoding e4m3 by a chip's own cast instead of the integer codec: where it compiles well, and where it may be used.

The codec gives the same bytes everywhere and is most of the instructions of a quantising write. A cast takes its place
only on chips where it has been seen to give the same bytes.
"""

import torch
import triton
import triton.language as tl

from kvstore_kernels.codec import E4M3_MAX, encode_e4m3
from kvstore_kernels.launch import Launch, Target, current_target

CAST_CANDIDATES = (90, 100, "gfx950")
"""Chips whose cast Triton compiles to instructions. sm_80 has none and does not compile, gfx942 emulates it slowly."""

HARDWARE_CASTS: frozenset[int | str] = frozenset()
"""Chips on which `check_hardware_cast` has returned 0. Empty: none of the candidates has been at hand yet."""

assert set(CAST_CANDIDATES) >= HARDWARE_CASTS

NUM_CODES = 65_536
LOW_BITS = (0x0000, 0x0001, 0x8000, 0xFFFF)
"""What is put behind the 16 bits of bf16: the number itself, the next in fp32, the middle, the last before the next.

Beside a tie of e4m3 they show a cast that rounds twice, by way of fp16.
"""


def encodes_in_hardware(target: Target) -> bool:
    """Whether writes on this chip encode e4m3 with its cast."""
    return target.arch in HARDWARE_CASTS


def hardware_cast_of(target: Target, override: bool | None = None) -> str | None:
    """The compile-time argument HARDWARE_CAST: the backend whose cast encodes e4m3, or None for the codec.

    `override`: whether to cast, None: where `encodes_in_hardware` says so.

    Raises: ValueError for the cast of a chip whose cast does not compile to instructions.
    """
    if not (encodes_in_hardware(target) if override is None else override):
        return None
    if target.arch not in CAST_CANDIDATES:
        raise ValueError(f"casts: expected one of {', '.join(map(str, CAST_CANDIDATES))}, got {target.arch}")
    return target.backend


@triton.jit
def cast_e4m3(values, HARDWARE_CAST: tl.constexpr):
    """fp32 -> uint8 codes of e4m3fn by the chip's cast, with the codec's policy: saturating, NaN as 0x7F."""
    if HARDWARE_CAST == "cuda":
        # NaN passes the clamp, and the cast makes 0x7F of it: a select per value would cost a fifth of a write.
        clamped = tl.maximum(values, -E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        clamped = tl.minimum(clamped, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        clamped = tl.minimum(tl.maximum(values, -E4M3_MAX), E4M3_MAX)
        codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        codes = tl.where(values == values, codes, 0x7F).to(tl.uint8)
    return codes


@triton.jit
def encode_fp8(values, HARDWARE_CAST: tl.constexpr):
    """fp32 -> uint8 codes of e4m3fn, by the codec or by the chip's cast; HARDWARE_CAST as `hardware_cast_of` gives."""
    return encode_e4m3(values) if HARDWARE_CAST is None else cast_e4m3(values, HARDWARE_CAST)


@triton.jit
def _check_kernel(
    codes_ptr,  # [2, 4, 65536] uint8: cast and codec, low bits, bf16 codes
    NUM_CODES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program = TILE codes of bf16."""
    codes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    for low_idx in tl.static_range(4):
        values = ((codes.to(tl.uint32) << 16) | LOW_BITS[low_idx]).to(tl.float32, bitcast=True)
        tl.store(codes_ptr + low_idx * NUM_CODES + codes, cast_e4m3(values, HARDWARE_CAST))
        tl.store(codes_ptr + (4 + low_idx) * NUM_CODES + codes, encode_e4m3(values))


def check_hardware_cast(device: torch.device | str) -> int:
    """The number of bf16 codes, of 65,536, on which the chip's cast and the codec differ; waits for the answer.

    A code counts when they differ on its number, or on one of three fp32 numbers that begin with its bits.

    Raises: ValueError when the device's chip is none whose cast compiles to instructions.
    """
    codes = torch.empty(2, 4, NUM_CODES, dtype=torch.uint8, device=device)
    cast_check_launch(codes, current_target(_check_kernel)).run()
    return count_differences(codes)


def count_differences(codes: torch.Tensor) -> int:
    """The number of bf16 codes in whose column uint8 [2, 4, 65536] holds two different answers."""
    cast, codec = codes.unbind()
    return int((cast != codec).any(0).sum())


def cast_check_launch(codes: torch.Tensor, target: Target) -> Launch:
    """The launch that fills `codes`, uint8 [2, 4, 65536], on `target`; it may be a meta tensor.

    Raises: as `check_hardware_cast`.
    """
    tile = 1024
    constexprs = {
        "NUM_CODES": NUM_CODES,
        "LOW_BITS": LOW_BITS,
        "HARDWARE_CAST": hardware_cast_of(target, override=True),
        "TILE": tile,
    }
    return Launch(_check_kernel, (NUM_CODES // tile,), {"codes_ptr": codes}, constexprs, num_warps=4)
