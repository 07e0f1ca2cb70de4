"""merge_partials: attention over disjoint sets of keys, merged into attention over all of them."""

import torch
import triton
import triton.language as tl

from kvstore_kernels.launch import INTERPRETED, Launch, Target, current_target, lanes_of_16_bytes
from kvstore_kernels.reads import allocate_outputs, expect_partials, expect_sinks
from kvstore_kernels.softmax import LOG2_E, keep_of_sink, normalise, store_tile
from kvstore_kernels.splits import padded

TILE_SPLITS = 8
"""Parts taken in one step: enough loads in flight to hide their latency, and one variant for any number of splits."""


@triton.jit(
    do_not_specialize=["num_splits", "num_heads"],
    do_not_specialize_on_alignment=["partial_lse_ptr", "lse_ptr", "sinks_ptr"],
)
def _merge_kernel(
    partial_out_ptr,  # [num_rows, num_splits, DIM] fp32
    partial_lse_ptr,  # [num_rows, num_splits] fp32, natural log
    out_ptr,  # [num_rows, DIM]
    lse_ptr,  # [num_rows] fp32
    sinks_ptr,  # [num_heads] fp32, natural log; None: no sinks
    num_splits: tl.int32,
    num_heads: tl.int32,
    DIM: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program = row: a head of a sequence. Parts are the keys of an online softmax, with the LSE as score."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE_DIM)
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, TILE_DIM], tl.float32)
    for first in range(0, num_splits, TILE_S):
        splits = first + tl.arange(0, TILE_S)
        scores = tl.load(partial_lse_ptr + row * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        # Some kernels mark an empty part with +inf.
        scores = tl.where(scores == float("inf"), float("-inf"), scores)[:, None]
        new_max = tl.maximum(running_max, tl.max(scores, 0))
        # A row whose parts are all empty so far has maximum -inf, and -inf - -inf would be NaN.
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
        # The base changes behind the subtraction: an LSE near the largest fp32 would overflow before it.
        weights = tl.exp2((scores - anchor[None, :]) * LOG2_E)
        factor = tl.exp2((running_max - anchor) * LOG2_E)
        running_max, running_sum = new_max, running_sum * factor + tl.sum(weights, 0)
        # Selected, not multiplied away: what an empty part holds may be NaN.
        parts = tl.load(
            partial_out_ptr + (row * num_splits + splits[:, None]) * DIM + columns[None, :],
            mask=(scores != float("-inf")) & (columns < DIM)[None, :],
            other=0.0,
        )
        merged = merged * factor[:, None] + tl.sum(parts * weights, 0)[None, :]
    out, lse_below_max = normalise(merged, tl.zeros([1], tl.float32), running_sum)
    if sinks_ptr is not None:
        # Once, here, and not in every part: a sink is one more key without a value.
        sink = tl.load(sinks_ptr + row % num_heads)
        out = out * keep_of_sink(running_max + lse_below_max, sink)[:, None]
    store_tile(out_ptr + row * DIM + columns[None, :], out, (columns < DIM)[None, :], INTERPRETED)
    tl.store(lse_ptr + row + tl.arange(0, 1), running_max + lse_below_max)


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of keys into attention over all of them.

    Args:
        partial_out: fp32 [num_seqs, num_heads, num_splits, dim], contiguous.
        partial_lse: fp32 [num_seqs, num_heads, num_splits], contiguous, natural logarithm. -inf or +inf: an empty
            part, whose output is not read.
        out: [num_seqs, num_heads, dim] of a row dtype, contiguous; None: fp32, allocated.
        lse: fp32 [num_seqs, num_heads], contiguous; None: allocated.
        sinks: fp32 [num_heads], the score of one more key per head that has no value; None: none.

    Returns: out and lse, of the keys without the sink; 0 and -inf where every part is empty.

    Raises: ValueError or TypeError, before anything is written, for a tensor of wrong type, shape, dtype, device or
        strides.
    """
    expect_partials(partial_out, partial_lse, out, lse)
    expect_sinks(sinks, partial_out.shape[1], partial_out.device)
    out, lse = allocate_outputs(partial_out[:, :, 0], partial_out.shape[3], out, lse)
    merge_launch(partial_out, partial_lse, out, lse, sinks, target=current_target(_merge_kernel)).run()
    return out, lse


def merge_launch(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    target: Target,
) -> Launch:
    """The launch of `merge_partials` on `target`, of checked arguments; the tensors may be meta tensors."""
    num_seqs, num_heads, num_splits, dim = partial_out.shape
    return Launch(
        kernel=_merge_kernel,
        grid=(num_seqs * num_heads,),
        args={
            "partial_out_ptr": partial_out,
            "partial_lse_ptr": partial_lse,
            "out_ptr": out,
            "lse_ptr": lse,
            "sinks_ptr": sinks,
            "num_splits": num_splits,
            "num_heads": num_heads,
        },
        constexprs={"DIM": dim, "TILE_S": TILE_SPLITS, "TILE_DIM": padded(dim), "INTERPRETED": INTERPRETED},
        # 16 bytes of a part's output in each lane.
        num_warps=lanes_of_16_bytes(4 * padded(dim), target, max_warps=8),
    )
