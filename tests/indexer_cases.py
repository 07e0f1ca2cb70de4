"""Keys of a sparse indexer in hostile pages, and how far from fp64 their scores may be.

The error budget. With u32 the unit roundoff of fp32, D dims, H heads, and c the scale of a row, applied after the sum:

    score  c * sum_h w_h relu(sum_d q_hd k_d)

Products of bf16 or fp16 with codes, or with each other, are exact in fp32. A sum of D terms errs by (D - 1) u32 times
the sum of their magnitudes a_h = sum_d |q_hd k_d|, and the reference rounds c k_d first, which is one u32 more. relu
shrinks errors. The weight is one rounding, the sum over heads H - 1, the scale one: together at most

    (D + H + 1) u32 * c * sum_h |w_h| a_h,  taken with D + H + 4 for products of these factors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore_kernels import PageView, RowFormat, indexer_scores
from tests.attention_oracle import U32
from tests.cases import POISON, make_view
from tests.quantised_rows import bf16, indexer_68, indexer_132

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Scored:
    """A batch to score; keys: per sequence fp64 [row_len, head_dim], what the bytes of its rows mean."""

    view: PageView
    block_table: torch.Tensor
    row_lens: torch.Tensor
    q: torch.Tensor
    weights: torch.Tensor
    keys: list[np.ndarray]


def decoded(view: PageView, block_id: int, row: int) -> np.ndarray:
    """One row in fp64, from the description of its format."""
    page = view.memory.numpy()[view.offset_bytes + block_id * view.block_stride_bytes :][: view.page_bytes]
    if view.format.name == "indexer_fp8":
        return indexer_132(page, view.rows_per_block, row)[0]
    if view.format.name == "indexer_mxfp4":
        return indexer_68(page, view.rows_per_block, row)[0]
    raw = page[row * view.format.row_bytes : (row + 1) * view.format.row_bytes]
    return raw.view("<f2").astype(np.float64) if view.format.parts[0].dtype == FP16 else bf16(raw)


def scored_batch(
    row_format: RowFormat,
    rows_per_block: int,
    row_lens: Sequence[int],
    num_heads: int,
    dtype: torch.dtype = BF16,
    *,
    num_queries: int | None = None,
    fill: int = POISON,
) -> Scored:
    """Random keys in blocks of random order, all other bytes NaN; the table ends in null blocks."""
    generator = torch.Generator().manual_seed(1)
    num_columns = [-(-row_len // rows_per_block) for row_len in row_lens]
    view = make_view(row_format, rows_per_block, sum(num_columns) + 3, fill=fill)
    order = torch.randperm(view.num_blocks - 1, generator=generator).int() + 1
    block_table = torch.zeros(len(row_lens), max(num_columns) + 1, dtype=torch.int32)
    head_dim = 128 if row_format.quantised else row_format.parts[0].head_dim
    keys = []
    for seq_idx, (row_len, blocks) in enumerate(
        zip(row_lens, order[: sum(num_columns)].split(num_columns), strict=True)
    ):
        block_table[seq_idx, : len(blocks)] = blocks
        positions = torch.arange(row_len)
        where = (block_table[seq_idx, positions // rows_per_block].long(), positions % rows_per_block)
        for part in row_format.parts:
            shape = (row_len, part.num_heads, part.head_dim)
            if part.dtype == FP32:
                rows = torch.rand(shape, generator=generator) * 0.01 + 1e-3
            elif part.name == "scales":
                rows = torch.randint(118, 130, shape, generator=generator, dtype=torch.uint8)
            elif part.dtype in (BF16, FP16):
                rows = torch.randn(shape, generator=generator).to(part.dtype)
            else:
                rows = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
                if row_format.name == "indexer_fp8":
                    rows[(rows & 0x7F) == 0x7F] = 0x31
            target = view.tensor(part.name)
            (target.view(torch.uint8) if rows.dtype == torch.uint8 else target)[where] = rows
        places = zip(where[0].tolist(), where[1].tolist(), strict=True)
        keys.append(np.array([decoded(view, *place) for place in places]).reshape(row_len, head_dim))
    queries = (len(row_lens),) if num_queries is None else (len(row_lens), num_queries)
    q = torch.randn(*queries, num_heads, head_dim, generator=generator).to(dtype)
    weights = torch.randn(*queries, num_heads, generator=generator)
    return Scored(view, block_table, torch.tensor(row_lens, dtype=torch.int32), q, weights, keys)


def score(batch: Scored, backend: str, **options: object) -> torch.Tensor:
    arguments = {name: getattr(batch, name) for name in ("view", "block_table", "row_lens", "q", "weights")}
    return indexer_scores(**arguments | options, backend=backend)


def expect_scores(got: torch.Tensor, batch: Scored, lens: Sequence[Sequence[int]] | None = None) -> None:
    """Fails unless every visible row is within the budget and everything else -inf."""
    q, weights = batch.q.double().numpy(), batch.weights.double().numpy()
    if lens is None:
        q, weights, got = q[:, None], weights[:, None], got[:, None]
        lens = [[row_len] for row_len in batch.row_lens.tolist()]
    assert got.dtype is FP32
    scores = got.double().numpy()
    for seq_idx, seq_lens in enumerate(lens):
        for query, row_len in enumerate(seq_lens):
            keys = batch.keys[seq_idx][: max(0, row_len)]
            heads, factors = q[seq_idx, query], weights[seq_idx, query][:, None]
            wanted = (factors * np.maximum(heads @ keys.T, 0)).sum(0)
            magnitude = (np.abs(factors) * (np.abs(heads) @ np.abs(keys).T)).sum(0)
            budget = (heads.shape[1] + heads.shape[0] + 4) * U32 * magnitude
            row = scores[seq_idx, query]
            error = np.abs(row[: len(keys)] - wanted)
            assert (error <= budget).all(), f"{np.nanmax(error / budget):.3g} of the error budget used"
            assert (row[len(keys) :] == -np.inf).all()
