"""Batches of quantised latent rows: written by write_rows into pages of NaN, with what they read back as."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvstore_kernels import RowFormat, latent_format, read_rows, write_rows
from kvstore_kernels.quantised import FORMATS, FP8
from tests.attention_oracle import Exact, PagedBatch, attend, expect_within_budget
from tests.cases import POISON, make_view

LATENT_FORMATS: dict[str, RowFormat] = {
    **{
        name: FORMATS[name]()
        for name in (
            "fp8_ds_mla",
            "dsv4",
            "mxfp8_latent",
            "mxfp8_latent_split",
            "nvfp4_latent",
            "nvfp4_latent_split",
            "nvfp4_ds_mla",
        )
    },
    "latent_fp8": latent_format(576, 512, FP8),
}
ROW_SCALE = 0.3125
"""Of rows whose scale lies outside the cache; in fp32 exact."""


def scales_of(row_format: RowFormat) -> dict[str, tuple[float, ...]]:
    """The argument `row_scales` for rows of a format."""
    outside = any(entry.scales is None for entry in row_format.quantised)
    return {"row_scales": (ROW_SCALE,)} if outside else {}


def columns_of(row_format: RowFormat) -> int:
    """The columns of a latent row."""
    scales = {entry.scales for entry in row_format.quantised}
    packed = {entry.values: entry.values_per_element for entry in row_format.quantised}
    return sum(part.width * packed.get(part.name, 1) for part in row_format.parts if part.name not in scales)


def quantised_batch(
    row_format: RowFormat,
    rows_per_block: int,
    row_lens: Sequence[int],
    num_heads: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    fill: int = POISON,
    block_seed: int = 0,
    gap_bytes: int = 80,
    stretch: float = 1.0,
) -> PagedBatch:
    """A batch of random rows in blocks of random order; keys and values are what its rows read back as, in fp32.

    `stretch` multiplies the fp32 scales of the rows: by other numbers than 1 they are no powers of two any more.
    """
    num_columns = [-(-row_len // rows_per_block) for row_len in row_lens]
    num_blocks = sum(num_columns) + 3
    view = make_view(row_format, rows_per_block, num_blocks, fill=fill, gap_bytes=gap_bytes)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(block_seed)).int() + 1
    block_table = torch.zeros(len(row_lens), max(num_columns) + 1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    keys, width = [], columns_of(row_format)
    for seq_idx, (row_len, blocks) in enumerate(zip(row_lens, order.split([*num_columns, 2]), strict=False)):
        block_table[seq_idx, : len(blocks)] = blocks
        positions = torch.arange(row_len)
        slots = block_table[seq_idx, positions // rows_per_block].long() * rows_per_block + positions % rows_per_block
        rows = torch.randn(row_len, width, generator=generator)
        write_rows(view, slots, rows, **scales_of(row_format), backend="reference")
        if stretch != 1.0:
            view.tensor("scales")[slots // rows_per_block, slots % rows_per_block] *= stretch
        keys += read_rows(view, slots, dtype=torch.float32, **scales_of(row_format), backend="reference")
    q = torch.randn(len(row_lens), num_heads, width, generator=generator).to(dtype)
    values = [rows[..., : row_format.value_dim] for rows in keys]
    return PagedBatch(view, block_table, torch.tensor(row_lens, dtype=torch.int32), q, keys, values)


def with_rounded_rows(exact: Exact, batch: PagedBatch, softmax_scale: float) -> Exact:
    """The same result with the error of rows whose numbers the dtype of the queries cannot hold.

    Each number of K and V is rounded to that dtype, by at most u of itself:

        score    |ds_i| <= e_k = scale * max_i sum_d |q_d k_id| * u, more than before
        value    |dv_i| <= u |v_i|

    so |d lse| grows by e_k and |d out| by (2 e_k + u) * sum_i w_i |v_i| / sum_i w_i.
    """
    u = torch.finfo(batch.q.dtype).eps / 2
    products = [
        (q.double().abs() @ keys.squeeze(1).double().abs().mT).amax(1)
        for q, keys in zip(batch.q, batch.keys, strict=True)
    ]
    e_k = softmax_scale * torch.stack(products) * u
    magnitude = attend(batch.q, batch.keys, [values.abs() for values in batch.values], softmax_scale).out
    return replace(
        exact,
        out_budget=exact.out_budget + (2 * e_k[..., None] + u) * magnitude,
        lse_budget=exact.lse_budget + e_k,
    )


def expect_close(got: tuple[torch.Tensor, torch.Tensor], exact: Exact) -> None:
    """`expect_within_budget`; where every value of a column is 0, as e2m1 codes often are, so is the output."""
    expect_within_budget(got, replace(exact, out_budget=exact.out_budget.clamp(min=1e-300)))
