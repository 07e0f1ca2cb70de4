"""compute_slot_mapping: the slot in which the row of each new token goes, from block tables and positions."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvstore_kernels.checks import cdiv, expect_bool, expect_dtype, expect_int, expect_shape
from kvstore_kernels.launch import Launch, Target, current_target
from kvstore_kernels.pieces import expect_index

TILE_TOKENS = 256
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["table_stride", "table_width", "num_seqs", "num_tokens"],
    do_not_specialize_on_alignment=["block_table_ptr", "positions_ptr", "seq_idx_ptr", "slots_ptr"],
)
def _slots_kernel(
    block_table_ptr,  # [num_seqs, table_width] int32, rows table_stride apart
    positions_ptr,  # [num_tokens] int64 or int32
    seq_idx_ptr,  # [num_tokens] int32
    slots_ptr,  # [num_tokens] int64
    table_stride: tl.int64,
    table_width: tl.int64,
    num_seqs: tl.int64,
    num_tokens: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    TOKENS_PER_ROW: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr,
    WRAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program = tile of tokens. A token without a slot gets -1."""
    tokens = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_token = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=is_token, other=-1).to(tl.int64)
    seq_idx = tl.load(seq_idx_ptr + tokens, mask=is_token, other=-1).to(tl.int64)

    # Positions below 0 are masked out, for division truncates towards zero.
    block_idx = positions // BLOCK_SIZE
    in_block = positions - block_idx * BLOCK_SIZE
    columns = block_idx % table_width.to(tl.int64) if WRAPS else block_idx
    exists = (positions >= 0) & (columns < table_width) & (seq_idx >= 0) & (seq_idx < num_seqs)
    exists = exists & (in_block % TOKENS_PER_ROW == TOKENS_PER_ROW - 1)
    entry_ptrs = block_table_ptr + seq_idx * table_stride.to(tl.int64) + columns
    block_ids = tl.load(entry_ptrs, mask=is_token & exists, other=0).to(tl.int64)
    slots = block_ids * ROWS_PER_BLOCK + in_block // TOKENS_PER_ROW
    # Block 0 is the null block: what unused entries of a table name.
    tl.store(slots_ptr + tokens, tl.where(block_ids > 0, slots, -1), mask=is_token)


def compute_slot_mapping(
    block_table: torch.Tensor,
    positions: torch.Tensor,
    seq_idx: torch.Tensor,
    block_size: int,
    tokens_per_row: int = 1,
    rows_per_block: int | None = None,
    wraps: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slot of each token: block `block_table[seq_idx, position // block_size]`, then the row in that block.

    A token has no slot, and gets -1, where its position is negative, does not close a row of several tokens or lies
    in a column behind the table, where the table names no block (an id of 0, the null block, or below), and where
    seq_idx is no row of the table.

    Args:
        block_table: int32 [num_seqs, width]; the stride between its rows is free.
        positions: int64 or int32 [num_tokens], each token's place in its sequence.
        seq_idx: int32 [num_tokens], each token's row of the table.
        block_size: tokens of a block.
        tokens_per_row: tokens that share a row, a divisor of `block_size`; the last of them writes it.
        rows_per_block: rows of a page; None: block_size // tokens_per_row, the fewest there may be.
        wraps: whether block i of a sequence is in column i % width (window groups) instead of column i.
        out: int64 [num_tokens] to fill, contiguous; None: a new tensor.

    Returns: int64 [num_tokens], `block_id * rows_per_block + position % block_size // tokens_per_row` or -1.

    Raises: ValueError or TypeError, before anything is written, for a wrong shape, dtype, device or number.
    """
    target = current_target(_slots_kernel)
    rows = BlockRows(block_size, tokens_per_row, rows_per_block)
    launch, slots = slots_launch(block_table, positions, seq_idx, rows, wraps, out, target)
    launch.run()
    return slots


@dataclass(frozen=True, slots=True)
class BlockRows:
    """How the tokens of a block share its rows.

    Raises: TypeError for numbers that are no integers; ValueError for a number out of range and for rows that end in
        the middle of a block.
    """

    block_size: int
    tokens_per_row: int
    rows_per_block: int | None

    def __post_init__(self) -> None:
        expect_int("block_size", self.block_size, 1)
        expect_int("tokens_per_row", self.tokens_per_row, 1)
        if self.block_size % self.tokens_per_row:
            raise ValueError(
                f"tokens_per_row: expected a divisor of the block size {self.block_size}, got {self.tokens_per_row}"
            )
        if self.rows_per_block is not None:
            expect_int("rows_per_block", self.rows_per_block, self.block_size // self.tokens_per_row)

    @property
    def page_rows(self) -> int:
        """Rows of a page: `rows_per_block`, or the fewest there may be."""
        return self.block_size // self.tokens_per_row if self.rows_per_block is None else self.rows_per_block


def slots_launch(
    block_table: torch.Tensor,
    positions: torch.Tensor,
    seq_idx: torch.Tensor,
    rows: BlockRows,
    wraps: bool,
    out: torch.Tensor | None,
    target: Target,
) -> tuple[Launch, torch.Tensor]:
    """The launch of `compute_slot_mapping` on `target` and the tensor it fills; the tensors may be meta tensors."""
    slots = slots_output(block_table, positions, seq_idx, wraps, out)
    num_tokens, (num_seqs, table_width) = len(slots), block_table.shape
    launch = Launch(
        kernel=_slots_kernel,
        grid=(cdiv(num_tokens, TILE_TOKENS),),
        args={
            "block_table_ptr": block_table,
            "positions_ptr": positions,
            "seq_idx_ptr": seq_idx,
            "slots_ptr": slots,
            "table_stride": block_table.stride(0),
            "table_width": table_width,
            "num_seqs": num_seqs,
            "num_tokens": num_tokens,
        },
        constexprs={
            "BLOCK_SIZE": rows.block_size,
            "TOKENS_PER_ROW": rows.tokens_per_row,
            "ROWS_PER_BLOCK": rows.page_rows,
            "WRAPS": wraps,
            "TILE": TILE_TOKENS,
        },
        num_warps=NUM_WARPS,
    )
    return launch, slots


def slots_output(
    block_table: torch.Tensor, positions: torch.Tensor, seq_idx: torch.Tensor, wraps: bool, out: torch.Tensor | None
) -> torch.Tensor:
    """The tensor that is filled: `out`, or a new one.

    Raises: ValueError or TypeError unless the arguments are those of a slot mapping; see `compute_slot_mapping`.
    """
    expect_bool("wraps", wraps)
    expect_shape("block_table", block_table, (None, None))
    device = block_table.device
    expect_index("block_table", block_table, torch.int32, device)
    expect_shape("positions", positions, (None,))
    expect_dtype("positions", positions, torch.int64, torch.int32)
    expect_index("positions", positions, positions.dtype, device)
    num_tokens = positions.shape[0]
    expect_shape("seq_idx", seq_idx, (num_tokens,))
    expect_index("seq_idx", seq_idx, torch.int32, device)
    if wraps and num_tokens and not block_table.shape[1]:
        raise ValueError("block_table: expected at least one column when it wraps, got none")
    if out is None:
        return torch.empty(num_tokens, dtype=torch.int64, device=device)
    expect_shape("out", out, (num_tokens,))
    expect_index("out", out, torch.int64, device)
    return out
