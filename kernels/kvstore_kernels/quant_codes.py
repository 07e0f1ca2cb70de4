"""Steps of the quantising writes: where rows go, which scale a tile gets, how codes and scales become stores."""

import triton
import triton.language as tl

from kvstore_kernels.codec import bf16_bits, load_float


@triton.jit
def e2m1_exponent(amax, LEAST: tl.constexpr):
    """The smallest e >= LEAST with amax / 2^e <= 6 = 1.5 x 2^2, from the bits of a finite amax."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    return tl.maximum(exponent, LEAST)


@triton.jit
def encode_int8(values):
    """fp32 -> int8 -127 ... 127 as uint8: saturating, nearest, halves away from zero, NaN as 0."""
    magnitude = tl.minimum(tl.where(values == values, tl.abs(values), 0.0), 127.0)
    whole = magnitude.to(tl.int32)
    # Not trunc(x + 0.5), which makes 1 of the number below 0.5.
    whole += (magnitude - whole.to(tl.float32) >= 0.5).to(tl.int32)
    return tl.where(values < 0, -whole, whole).to(tl.uint8)


@triton.jit
def pack_pairs(codes):
    """[.., 2] codes of 4 bits -> [..] bytes, the first in the low nibble."""
    low, high = tl.split(codes)
    return low | (high << 4)


@triton.jit
def locate(slot_mapping_ptr, num_rows, num_slots, ROWS_PER_BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """This program's rows, which of them to write, and the block and the row in it of each; int64 [TOKENS]."""
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_mapping_ptr + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    keep = (slots >= 0) & (slots < num_slots)
    # Skipped slots become 0 before the division, which truncates towards zero.
    slots = tl.where(keep, slots, 0)
    block_ids = slots // ROWS_PER_BLOCK
    return rows, keep, block_ids, slots - block_ids * ROWS_PER_BLOCK


@triton.jit
def load_bf16_bits(pointers, mask):
    """Masked elements as the bits of bf16: those of bf16 as they are, others rounded."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = tl.load(pointers.to(tl.pointer_type(tl.uint16), bitcast=True), mask=mask, other=0)
    else:
        bits = bf16_bits(load_float(pointers, mask))
    return bits


@triton.jit
def store_bytes(record_ptrs, codes, keep, TOKENS: tl.constexpr, COUNT: tl.constexpr, PERMUTED: tl.constexpr):
    """Stores COUNT bytes per record as one word of 4 or as words of 8, which no neighbour shares.

    PERMUTED: byte s goes to 8 * (s % 4) + s // 4, so word s % 4 holds every fourth code.
    """
    if COUNT == 4:
        words = tl.sum(codes.to(tl.uint32) << (tl.arange(0, 4) * 8).to(tl.uint32)[None, :], 1)
        tl.store(record_ptrs.to(tl.pointer_type(tl.uint32), bitcast=True), words, mask=keep)
    else:
        WORDS: tl.constexpr = COUNT // 8
        shifts = (tl.arange(0, 8) * 8).to(tl.uint64)
        if PERMUTED:
            words = tl.sum(tl.reshape(codes.to(tl.uint64), (TOKENS, 8, WORDS)) << shifts[None, :, None], 1)
        else:
            words = tl.sum(tl.reshape(codes.to(tl.uint64), (TOKENS, WORDS, 8)) << shifts[None, None, :], 2)
        word_idx = tl.arange(0, WORDS)
        word_ptrs = record_ptrs[:, None] + word_idx[None, :] * 8
        tl.store(word_ptrs.to(tl.pointer_type(tl.uint64), bitcast=True), words, mask=keep[:, None])
