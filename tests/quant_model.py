"""What a quantising write must store, in fp64 and integers, byte by byte from the formats' description.

Nothing here calls the package's codecs: codes are searched in tables, scales are found by trying, places are written
out by hand.
"""

import math

import numpy as np
import torch

E4M3 = np.array([(c & 7) / 512 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) for c in range(127)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values, table, sign_bit, nan_code):
    """Codes of the nearest entries, ties to the even code, larger values the last one; the sign in its bit."""
    magnitude = np.minimum(np.abs(np.nan_to_num(values, nan=0.0, posinf=1e300, neginf=-1e300)), table[-1])
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    codes = np.where(up < down, above, np.where(down < up, below, np.where(above % 2 == 0, above, below)))
    codes = np.where(up == 0, above, codes) | np.where(np.signbit(values), sign_bit, 0)
    return np.where(np.isnan(values), nan_code, codes).astype(np.uint8)


def e4m3(values):
    return nearest(values, E4M3, 0x80, 0x7F)


def e2m1_pairs(values):
    codes = nearest(values, E2M1, 8, 0)
    return codes[0::2] | codes[1::2] << 4


def amax(tile):
    finite = tile[np.isfinite(tile)]
    return float(np.abs(finite).max(initial=0.0))


def exponent(largest, limit, least):
    """The smallest e >= least at which largest <= limit * 2^e, by trying all of them."""
    e = least
    while largest > limit * 2.0**e:
        e += 1
    return e


def powers(row, tile, limit, least, encode):
    """Codes and exponents of the tiles of a row."""
    tiles = row.reshape(-1, tile)
    exponents = [exponent(amax(values), limit, least) for values in tiles]
    codes = [encode(values / 2.0**e) for values, e in zip(tiles, exponents, strict=True)]
    return np.concatenate(codes), np.array(exponents)


def divided(values, scale):
    """The quotient rounded to fp32."""
    return (np.float32(values) / np.float32(scale)).astype(np.float64)


def blocks_of_16(row):
    """Codes of nvfp4 and the codes of its scales."""
    codes, scales = [], []
    for values in row.reshape(-1, 16):
        scale = e4m3(np.maximum(divided([amax(values)], 6.0), 2.0**-9))
        scales.append(scale)
        codes.append(e2m1_pairs(divided(values, E4M3[scale[0]])))
    return np.concatenate(codes), np.concatenate(scales)


def bf16(values):
    """Values rounded to 8 bits of mantissa, ties to even, past the largest to infinity."""
    exponents = np.frexp(values)[1]
    step = 2.0 ** (np.maximum(exponents, -125) - 8.0)
    rounded = np.where(np.isfinite(values), np.rint(values / step) * step, values)
    return np.where(np.isfinite(values) & (np.abs(rounded) >= 2.0**128), np.copysign(np.inf, values), rounded)


def bf16_bytes(source):
    """Bytes of bf16: those of a bf16 tensor as they are, other values rounded."""
    if source.dtype == torch.bfloat16:
        return source.contiguous().view(torch.uint8).numpy()
    rounded = np.float32(bf16(source.double().numpy()))
    bits = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(rounded), 0x7FC0, bits).astype("<u2").view(np.uint8)


def fp32_bytes(values):
    return np.asarray(values, dtype="<f4").view(np.uint8)


def record_656(row):
    codes, exponents = powers(row[:512].double().numpy(), 128, 448, -13, e4m3)
    return [[*codes, *fp32_bytes(2.0**exponents), *bf16_bytes(row[512:])]]


def record_584(row):
    codes, exponents = powers(bf16(row[:448].double().numpy()), 64, 448, -22, e4m3)
    return [[*codes, *bf16_bytes(row[448:])], [*(exponents + 127), 0]]


def record_528(row):
    codes, exponents = powers(row.double().numpy(), 32, 448, -22, e4m3)
    return [[*codes, *(exponents + 127)]]


def record_132(row):
    codes, exponents = powers(row.double().numpy(), 128, 448, -22, e4m3)
    return [codes, fp32_bytes(2.0**exponents)]


def record_68(row):
    codes, exponents = powers(row.double().numpy(), 32, 6, -126, e2m1_pairs)
    return [codes, exponents + 127]


def record_288(row):
    codes, scales = blocks_of_16(row.double().numpy())
    return [[*codes, *scales]]


def record_352(row):
    codes, scales = blocks_of_16(row[:512].double().numpy())
    places = np.zeros(32, dtype=np.uint8)
    for tile in range(32):
        places[8 * (tile % 4) + tile // 4] = scales[tile]
    return [[*codes, *e4m3(row[512:].double().numpy()), *places]]


def split_in_two(record, first):
    """The same bytes in two areas."""
    return lambda row: [record(row)[0][:first], record(row)[0][first:]]


def int8(values):
    whole = np.floor(np.abs(np.nan_to_num(values, nan=0.0, posinf=1e9, neginf=-1e9)) + 0.5)
    return np.copysign(np.minimum(whole, 127), np.where(np.isnan(values), 1.0, values)).astype(np.int8).view(np.uint8)


def token_head(num_heads, qmax, encode):
    """Records of K, its scale, V, its scale for each head; the row is K of all heads, then V of all heads."""

    def record(k, v):
        out = []
        for pair in zip(
            k.double().numpy().reshape(num_heads, -1), v.double().numpy().reshape(num_heads, -1), strict=True
        ):
            for values in pair:
                scale = np.maximum(np.float32(amax(values)) / np.float32(qmax), np.float32(1e-6))
                out += [*encode(divided(values, scale)), *fp32_bytes([scale])]
        return [out]

    return record


def scaled_outside(scales, is_joined):
    """Records of e4m3 codes of value / scale, one area for each tensor or one for all."""

    def record(*rows):
        codes = [e4m3(divided(row.double().numpy(), scale)) for row, scale in zip(rows, scales, strict=True)]
        return [np.concatenate(codes)] if is_joined else codes

    return record


def expected_memory(view, slots, tensors, record):
    """All bytes of the memory after row i of the tensors went to slot i, and nothing else changed."""
    memory = view.memory.numpy().copy()
    for i, slot in enumerate(slots):
        if not 0 <= slot < view.num_blocks * view.rows_per_block:
            continue
        block_id, row_in_block = divmod(slot, view.rows_per_block)
        at = view.offset_bytes + block_id * view.block_stride_bytes
        for area in record(*(tensor[i] for tensor in tensors)):
            assert len(area)
            place = at + row_in_block * len(area)
            memory[place : place + len(area)] = area
            at += view.rows_per_block * len(area)
    return memory


def next_after(value, dtype):
    """The next larger number of a dtype."""
    mantissa_bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    return value + 2.0 ** (math.floor(math.log2(value)) - mantissa_bits)
