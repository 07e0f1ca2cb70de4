"""What the attention kernels share: loads and stores of tiles, the rows of a tile of positions, the online softmax.

The interpreter's bf16 arithmetic is wrong. Under it (INTERPRETED) tiles are widened to fp32 as they are loaded and
rounded with integer arithmetic as they are stored; on a GPU they stay in the rows' dtype, which the tensor cores take.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(pointers, mask, INTERPRETED: tl.constexpr):
    """The masked elements, zero elsewhere; fp32 in the interpreter."""
    if INTERPRETED:
        if pointers.dtype.element_ty == tl.bfloat16:
            bits = tl.load(pointers.to(tl.pointer_type(tl.int16), bitcast=True), mask=mask, other=0)
            values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        values = tl.load(pointers, mask=mask, other=0.0)
    return values


@triton.jit
def store_tile(pointers, values, mask, INTERPRETED: tl.constexpr):
    """Stores fp32 values where `mask` is set, rounded to nearest even."""
    if INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(values == values, bits, 0x7FC0).to(tl.int16)
        tl.store(pointers.to(tl.pointer_type(tl.int16), bitcast=True), bits, mask=mask)
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def visible_ends(row_lens_ptr, seq_idx, queries, is_query, num_queries, lens_per_query):
    """The position behind the last row that each query of a tile sees, 0 or less for none.

    lens_per_query 0: of a length per sequence, which the last of its queries sees; each query before it sees one row
    less. 1: of a length per query.
    """
    lens_of_seq = 1 + (num_queries - 1) * lens_per_query
    lens_ptrs = row_lens_ptr + seq_idx * lens_of_seq + queries * lens_per_query
    lens = tl.maximum(tl.load(lens_ptrs, mask=is_query, other=0), 0)  # -2^31 less the queries behind would be positive
    ends = lens - (num_queries - 1 - queries) * (1 - lens_per_query)
    return tl.where(is_query, ends, 0)


@triton.jit
def mask_scores(scores, tile, ends, window, exists, WINDOWED: tl.constexpr, TILE_N: tl.constexpr):
    """The scores of rows that exist and that the query sees, -inf elsewhere; `window` rows before the end, or all."""
    last_columns = (ends - 1 - tl.cast(tile, tl.int32) * TILE_N)[:, None]
    distances = last_columns - tl.arange(0, TILE_N)[None, :]
    if WINDOWED:  # as unsigned numbers: what lies behind the last column is further away than any window
        seen = distances.to(tl.uint32, bitcast=True) < tl.cast(window, tl.int32).to(tl.uint32, bitcast=True)
    else:
        seen = distances >= 0
    return tl.where(exists[None, :], tl.where(seen, scores, float("-inf")), float("-inf"))


@triton.jit
def table_end(row_len, table_width, ROWS_PER_BLOCK: tl.constexpr):
    """The rows of a sequence that the table has columns for; the rows of a whole table may be 2^31 and more."""
    return tl.minimum(row_len.to(tl.int64), table_width.to(tl.int64) * ROWS_PER_BLOCK).to(tl.int32)


@triton.jit
def split_tiles(begin, end, TILE_N: tl.constexpr):
    """This split's tiles, first and last + 1: program axis 1 shares out those that hold positions begin ... end - 1.

    Tiles start at multiples of TILE_N, so that a tile lies inside a block whose rows are a multiple of it.
    """
    first = begin // TILE_N
    # 64 bit: the end rounded up, and the tiles times the splits, may be 2^31 and more.
    count = tl.maximum(tl.cdiv(end.to(tl.int64), TILE_N) - first, 0)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    first_tile, last_tile = first + count * split // num_splits, first + count * (split + 1) // num_splits
    return first_tile.to(tl.int32), last_tile.to(tl.int32)


@triton.jit
def tile_blocks(
    tile,
    end,
    table_ptr,
    table_width,
    ROWS_PER_BLOCK: tl.constexpr,
    WRAPS: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """The blocks of a tile of positions, -1 for none: one where the tile lies inside a block, else one per row."""
    positions = tl.cast(tile, tl.int32) * TILE_N  # the interpreter counts tiles in Python integers
    if ROWS_PER_BLOCK % TILE_N:
        positions += tl.arange(0, TILE_N)
    columns = positions // ROWS_PER_BLOCK
    if WRAPS:
        columns = columns % table_width
    # A position behind 2^31 - 1 has become a negative one.
    return tl.load(table_ptr + columns, mask=(positions >= 0) & (positions < end), other=-1)


@triton.jit
def tile_rows(tile, begin, end, block_ids, num_blocks, ROWS_PER_BLOCK: tl.constexpr, TILE_N: tl.constexpr):
    """The rows of a tile of positions inside their blocks, and which of them exist."""
    positions = tl.cast(tile, tl.int32) * TILE_N + tl.arange(0, TILE_N)
    exists = (positions >= begin) & (positions < end) & (block_ids >= 0) & (block_ids < num_blocks)
    return (positions % ROWS_PER_BLOCK).to(tl.int64), exists


@triton.jit
def softmax_step(scores, running_max, running_sum):
    """One step of the online softmax in base 2.

    Returns the weights of these scores, the new maximum and sum, and the factor for what was summed so far.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    # A query that has seen no key has maximum -inf, and -inf - -inf would be NaN.
    anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - anchor[:, None])
    factor = tl.exp2(running_max - anchor)
    return weights, new_max, running_sum * factor + tl.sum(weights, 1), factor


@triton.jit
def keep_of_sink(lse, sink):
    """What a sink leaves of the output: e^lse / (e^lse + e^sink), 0 for a query that has seen no key."""
    share = 1.0 / (1.0 + tl.exp2((sink - lse) * LOG2_E))
    return tl.where(lse == float("-inf"), 0.0, share)


@triton.jit
def soften(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap), through a power of two that may overflow without harm.

    Near zero, where that leaves few digits, the series of tanh.
    """
    ratio = scores / soft_cap
    power = tl.exp2(ratio * (2.0 * LOG2_E))
    square = ratio * ratio
    near_zero = ratio - ratio * square * (1.0 / 3.0 - square * (2.0 / 15.0))
    return soft_cap * tl.where(square < 0.01, near_zero, 1.0 - 2.0 / (power + 1.0))


@triton.jit
def normalise(weighted_sum, running_max, running_sum):
    """Output and natural LSE of a finished online softmax; (0, -inf) for a query that has seen no key."""
    empty = running_sum == 0.0
    denominator = tl.where(empty, 1.0, running_sum)
    lse = tl.where(empty, float("-inf"), (running_max + tl.log2(denominator)) * LN_2)
    return weighted_sum / denominator[:, None], lse
