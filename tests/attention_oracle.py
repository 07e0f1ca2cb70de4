"""Attention in fp64, and how far from it a correct read may be.

The error budget, stated once. With u the unit roundoff of the rows' dtype, u32 that of fp32, and for one query

    score    s_i = scale * q . k_i, in fp32:  |ds_i| <= e_s = scale * max_i sum_d |q_d k_id| * (head_dim + 2) * u32,
             and |s_i| * 4 u32 for the change of base and the maximum that is subtracted
    weight   exp(s_i): relative error e_exp = 2^-21 where rows are fp32, 2^-15 where a fast exponential is good enough
             for weights that are rounded to u anyway
    sum      of L weights in fp32, over any tree, and rescaled at most once per tile and split: (L + 16) * u32

    |d lse| <= e_w = e_s + max |s_i| 4 u32 + e_exp + (L + 16) u32 + |lse| 2 u32
    |d out| <= (2 e_w + u) * sum_i w_i |v_i| / sum_i w_i + u |out|

where the u in parentheses is the weights' rounding to the rows' dtype and the last one the output's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore_kernels import PageView, RowFormat
from tests.cases import POISON, make_view

U32 = 2.0**-24


@dataclass(frozen=True)
class Exact:
    """The fp64 result of a batch and its error budget; of a query without keys 0, -inf and no error at all."""

    out: torch.Tensor  # [num_seqs, num_heads, head_dim_v]
    lse: torch.Tensor  # [num_seqs, num_heads]
    out_budget: torch.Tensor
    lse_budget: torch.Tensor


@dataclass(frozen=True)
class PagedBatch:
    """Sequences whose rows lie in pages; everything else in the memory is NaN."""

    view: PageView
    block_table: torch.Tensor
    row_lens: torch.Tensor
    q: torch.Tensor
    keys: list[torch.Tensor]  # per sequence [row_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]  # per sequence [row_len, num_kv_heads, head_dim_v]

    def exact(self, softmax_scale: float, window: int | None = None) -> Exact:
        """What a read of this batch must give."""
        seen = slice(None) if window is None else slice(-window, None)
        return attend(
            self.q, [keys[seen] for keys in self.keys], [values[seen] for values in self.values], softmax_scale
        )


def attend(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], softmax_scale: float
) -> Exact:
    """Attention of each sequence's query [num_heads, head_dim] over its rows, in fp64."""
    queries = [seq_q.unflatten(0, (seq_keys.shape[1], -1)).double() for seq_q, seq_keys in zip(q, keys, strict=True)]
    results = [
        _attend_one(*inputs, softmax_scale, torch.finfo(q.dtype).eps / 2)
        for inputs in zip(queries, keys, values, strict=True)
    ]
    return Exact(*(torch.stack(field).flatten(1, 2) for field in zip(*results, strict=True)))


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float, u: float
) -> tuple[torch.Tensor, ...]:
    if len(keys) == 0:
        out, lse = q.new_zeros((*q.shape[:2], values.shape[2])), q.new_full(q.shape[:2], -torch.inf)
        return out, lse, torch.zeros_like(out), torch.zeros_like(lse)
    keys, values = keys.double().transpose(0, 1), values.double().transpose(0, 1)
    scores = softmax_scale * (q @ keys.mT)
    lse = scores.logsumexp(2)
    weights = torch.exp(scores - lse[..., None])
    out = weights @ values

    e_s = softmax_scale * (q.abs() @ keys.abs().mT).amax(2) * (q.shape[2] + 2) * U32
    e_exp = 2.0**-21 if u == U32 else 2.0**-15
    lse_budget = e_s + (4 * scores.abs().amax(2) + 2 * lse.abs() + keys.shape[1] + 16) * U32 + e_exp
    out_budget = (2 * lse_budget[..., None] + u) * (weights @ values.abs()) + u * out.abs()
    return out, lse, out_budget, lse_budget


def expect_within_budget(got: tuple[torch.Tensor, torch.Tensor], exact: Exact) -> None:
    """Fails unless output and LSE are finite where they should be, and within the budget."""
    out, lse = (tensor.double() for tensor in got)
    empty = exact.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert torch.equal(out[empty], exact.out[empty])
    for name, value, wanted, budget in (
        ("lse", lse[~empty], exact.lse[~empty], exact.lse_budget[~empty]),
        ("out", out[~empty], exact.out[~empty], exact.out_budget[~empty]),
    ):
        used = ((value - wanted).abs() / budget).amax().item() if value.numel() else 0.0
        assert used <= 1.0, f"{name}: {used:.3g} of the error budget used"


def paged_batch(
    row_format: RowFormat,
    rows_per_block: int,
    row_lens: Sequence[int],
    num_heads: int,
    *,
    window: int | None = None,
    fill: int = POISON,
    block_seed: int = 0,
    gap_bytes: int = 80,
) -> PagedBatch:
    """A batch of random rows, stored in blocks of random order; the table ends in null blocks.

    With `window` the table is just wide enough for the window, so that it wraps and older rows do not exist.
    """
    num_columns = [-(-row_len // rows_per_block) for row_len in row_lens]
    width = max(num_columns) + 1 if window is None else -(-window // rows_per_block) + 1
    num_used = [min(columns, width) for columns in num_columns]
    num_blocks = sum(num_used) + 3
    view = make_view(row_format, rows_per_block, num_blocks, fill=fill, gap_bytes=gap_bytes)
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(block_seed)).int() + 1
    block_table = torch.zeros(len(row_lens), width, dtype=torch.int32)
    rows_of = []
    for seq_idx, (row_len, blocks) in enumerate(zip(row_lens, order[: sum(num_used)].split(num_used), strict=True)):
        block_table[seq_idx, : len(blocks)] = blocks
        rows = [
            torch.randn(row_len, part.num_heads, part.head_dim, generator=generator).to(part.dtype)
            for part in row_format.parts
        ]
        rows_of.append(rows)
        positions = torch.arange(0 if window is None else max(0, row_len - window), row_len)
        where = (block_table[seq_idx, positions // rows_per_block % width].long(), positions % rows_per_block)
        for part, part_rows in zip(row_format.parts, rows, strict=True):
            view.tensor(part.name)[where] = part_rows[positions]
    key = row_format.parts[0]
    q = torch.randn(len(row_lens), num_heads, key.head_dim, generator=generator).to(key.dtype)
    values = [rows[-1] if row_format.value_dim is None else rows[0][..., : row_format.value_dim] for rows in rows_of]
    lens = torch.tensor(row_lens, dtype=torch.int32)
    return PagedBatch(view, block_table, lens, q, [rows[0] for rows in rows_of], values)
