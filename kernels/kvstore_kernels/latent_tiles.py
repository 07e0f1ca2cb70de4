"""A tile of latent rows as numbers: loaded, decoded, times its scales, rounded to the dtype of the products.

What keeps this fast is how the compiler sees it. Codes are loaded as words of several, and a lane keeps the codes of
its words: loads stay 16 bytes wide and in flight, and K and V read one copy of the decoded tile in shared memory.
"""

import triton
import triton.language as tl

from kvstore_kernels.codec import bf16_bits, decode_ue8m0, load_float
from kvstore_kernels.quant_tiles import e2m1_values, e4m3_values
from kvstore_kernels.softmax import load_tile, store_tile


@triton.jit
def page_units(block_ids, offset_units, block_stride_units):
    """Where the pages of blocks begin, in 16 bytes."""
    return offset_units.to(tl.int64) + block_ids.to(tl.int64) * block_stride_units.to(tl.int64)


@triton.jit
def load_query(q_rows, in_heads, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The columns of queries that meet a run of a row's columns, zero in the padding."""
    columns = tl.arange(0, COLUMNS.tile)[None, :]
    mask = in_heads[:, None] & (columns < COLUMNS.width)
    return load_tile(q_rows + COLUMNS.column + columns, mask, INTERPRETED)


@triton.jit
def load_columns(
    columns_ptr,
    scales_ptr,
    dtype,
    pages,
    rows,
    exists,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A run of columns of rows as numbers [rows, COLUMNS.tile], exact zeros in rows that do not exist and as padding.

    Elements that are of the dtype already are taken as they are. Others are decoded and scaled in fp32, then rounded.
    """
    if columns_ptr.dtype.element_ty == dtype:
        word_ptrs, mask = word_pointers(columns_ptr, pages, rows, exists, COLUMNS)
        numbers = load_tile(word_ptrs, mask, INTERPRETED)
    else:
        values = load_values(columns_ptr, pages, rows, exists, COLUMNS)
        if SCALES is not None:
            scales = load_values(scales_ptr, pages, rows, exists, SCALES)
            if SCALES.is_permuted:  # byte 8 a + b holds the scale of tile 4 b + a
                fours = tl.reshape(scales, [scales.shape[0], 4, scales.shape[1] // 4])
                scales = tl.reshape(tl.permute(fours, [0, 2, 1]), scales.shape)
            if SCALES.width < SCALES.tile:  # what lies behind the scales may read as NaN
                scales = tl.where(tl.arange(0, scales.shape[1])[None, :] < SCALES.width, scales, 0.0)
            tiles = tl.reshape(values, [values.shape[0], scales.shape[1], values.shape[1] // scales.shape[1]])
            values = tl.reshape(tiles * scales[:, :, None], values.shape)
        numbers = rounded(values, dtype, INTERPRETED)
    return numbers


@triton.jit
def load_values(words_ptr, pages, rows, exists, RUN: tl.constexpr):
    """A run of values of rows, decoded, fp32 [rows, RUN.tile]; what code 0 says in rows that do not exist."""
    word_ptrs, mask = word_pointers(words_ptr, pages, rows, exists, RUN)
    if RUN.bits == 0:
        values = load_float(word_ptrs, mask)
    else:
        words = tl.load(word_ptrs, mask=mask, other=0).to(tl.int32)
        KIND: tl.constexpr = RUN.kind
        PER_WORD: tl.constexpr = RUN.per_word
        shifts = 32 - RUN.bits - RUN.bits * tl.arange(0, PER_WORD)[None, None, :]
        # Reshaped to a third axis, not indexed: only so does a lane keep the codes of its words.
        codes = tl.reshape(words, [words.shape[0], words.shape[1], 1]) << shifts
        values = tl.reshape(decode_upper(codes, KIND), [words.shape[0], words.shape[1] * PER_WORD])
    return values


@triton.jit
def word_pointers(words_ptr, pages, rows, exists, RUN: tl.constexpr):
    """Pointers to the words of a run of values of rows, and which of them there are."""
    words = tl.arange(0, RUN.tile_words)[None, :]
    row_ptrs = words_ptr + pages * (16 // RUN.size) + RUN.offset + rows * RUN.pitch
    return row_ptrs[:, None] + words, exists[:, None] & (words < RUN.num_words)


@triton.jit
def decode_upper(codes, KIND: tl.constexpr):
    """Codes in the upper bits of int32 -> fp32, whatever lies below."""
    if KIND == "e2m1":
        values = e2m1_values(codes)
    elif KIND == "e4m3":
        values = e4m3_values(codes >> 24)
    elif KIND == "ue8m0":
        values = decode_ue8m0((codes >> 24) & 0xFF)
    else:
        values = (codes >> 24).to(tl.float32)
    return values


@triton.jit
def rounded(values, dtype, INTERPRETED: tl.constexpr):
    """fp32 values to nearest even in `dtype`; in the interpreter widened to fp32 again."""
    if not INTERPRETED:
        numbers = values.to(dtype)
    elif dtype == tl.bfloat16:
        numbers = (bf16_bits(values).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        numbers = values.to(dtype).to(tl.float32)
    return numbers


@triton.jit
def outside_scale(row_scale, row_scale_ptr, IS_SCALED_OUTSIDE: tl.constexpr):
    """The scale of rows that have it outside the cache, 1 for others."""
    if not IS_SCALED_OUTSIDE:
        row_scale = 1.0
    elif row_scale_ptr is not None:
        row_scale = tl.load(row_scale_ptr)
    return row_scale


@triton.jit
def store_values(out_rows, out, in_heads, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Stores the columns of V that a run of a row's columns has given."""
    columns = tl.arange(0, COLUMNS.tile)[None, :]
    num_values: tl.constexpr = min(COLUMNS.width, VALUE_DIM - COLUMNS.column)
    mask = in_heads[:, None] & (columns < num_values)
    store_tile(out_rows + COLUMNS.column + columns, out, mask, INTERPRETED)
