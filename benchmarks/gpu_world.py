"""Sequences in pages of any format for the checks on a GPU, and how far attention over them may be from fp64."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvstore_kernels import (
    PageView,
    RowFormat,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    mxfp8_latent_format,
    nvfp4_ds_mla_format,
    nvfp4_latent_format,
    read_rows,
    token_head_format,
    write_rows,
)
from kvstore_kernels.quant_reads import value_shapes

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
FORMATS: dict[str, RowFormat] = {
    "latent bf16": latent_format(576, 512),
    "latent fp8": latent_format(576, 512, FP8),
    "kv bf16 8x128": kv_format(8, 128),
    "kv fp16 2x72": kv_format(2, 72, dtype=torch.float16),
    "kv fp8 8x128": kv_format(8, 128, dtype=FP8),
    "int8 token head 8x128": token_head_format(8, 128),
    "fp8 token head 2x64": token_head_format(2, 64, dtype=FP8),
    "656": fp8_ds_mla_format(),
    "584": dsv4_format(),
    "528": mxfp8_latent_format(),
    "528 split": mxfp8_latent_format(page_split=True),
    "288": nvfp4_latent_format(),
    "288 split": nvfp4_latent_format(page_split=True),
    "352": nvfp4_ds_mla_format(),
    "132": indexer_format(132),
    "68": indexer_format(68),
}


@dataclass(frozen=True, slots=True)
class World:
    """Sequences whose rows lie in pages of one format on the host, all else NaN, and the rows as they come back."""

    view: PageView
    block_table: torch.Tensor
    row_lens: torch.Tensor
    slots: torch.Tensor
    sources: tuple[torch.Tensor, ...]
    scales: tuple[float, ...] | None

    @classmethod
    def of(cls, row_format: RowFormat, rows_per_block: int, row_lens: Sequence[int]) -> "World":
        """Random rows in random blocks; the reference writes them."""
        generator = torch.Generator().manual_seed(7)
        columns = [-(-row_len // rows_per_block) for row_len in row_lens]
        num_blocks, width = sum(columns) + 3, max(columns) + 1
        stride = row_format.page_bytes(rows_per_block) + 48
        memory = torch.full((64 + num_blocks * stride,), 255, dtype=torch.uint8)
        view = PageView(memory, 64, stride, num_blocks, rows_per_block, row_format)
        order = torch.randperm(num_blocks, generator=generator).int()
        table = torch.zeros(len(row_lens), width, dtype=torch.int32)
        slots = []
        for seq_idx, (row_len, blocks) in enumerate(zip(row_lens, order[: sum(columns)].split(columns), strict=True)):
            table[seq_idx, : len(blocks)] = blocks
            positions = torch.arange(row_len)
            slots.append(blocks.long()[positions // rows_per_block] * rows_per_block + positions % rows_per_block)
        every_slot = torch.cat(slots)
        shapes = value_shapes(view, len(every_slot))
        plain = [part.dtype for part in row_format.parts]
        dtypes = [BF16] * len(shapes) if row_format.quantised else plain
        sources = tuple(
            torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        outside = [entry for entry in row_format.quantised if entry.scales is None]
        scales = (0.25,) * len(outside) if outside else None
        lens = torch.tensor(row_lens, dtype=torch.int32)
        world = cls(view, table, lens, every_slot, sources, scales)
        write_rows(view, every_slot, *sources, row_scales=scales, backend="reference")
        return world

    def rows(self) -> tuple[torch.Tensor, ...]:
        """fp32 rows of all sequences, one behind the other."""
        return read_rows(self.view, self.slots, dtype=FP32, row_scales=self.scales, backend="reference")

    def on(self, device: torch.device, fill: int | None = None) -> PageView:
        """The pages on the device, or as many bytes of `fill`."""
        memory = self.view.memory.to(device) if fill is None else torch.full_like(self.view.memory, fill, device=device)
        return replace(self.view, memory=memory)

    def query(self, num_heads: int, num_queries: int) -> torch.Tensor:
        """bf16 (or the rows' dtype) [num_seqs, num_queries, num_heads, columns]."""
        dtype = BF16 if self.view.format.quantised else self.view.format.parts[0].dtype
        shape = (len(self.row_lens), num_queries, num_heads, value_shapes(self.view, 1)[0][2])
        return torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(dtype)


def different(mine: torch.Tensor, theirs: torch.Tensor) -> int:
    """Bytes that differ."""
    flat = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (mine, theirs)]
    return int((flat[0] != flat[1]).sum())


def share_of_budget(
    got: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,  # [num_queries of all sequences, num_heads, columns]
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],  # of each: K [rows, KV heads, columns] and V
    softmax_scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> float:
    """How far output and LSE are from fp64, at most 1: rounding rows, weights and output to bf16 takes less."""
    worst = 0.0
    for query, out, lse, (keys, values) in zip(q, got[0].cpu(), got[1].cpu(), rows, strict=True):
        if not len(keys):
            worst = max(worst, float(out.abs().max() > 0), float((lse != -torch.inf).any()))
            continue
        grouped = query.double().unflatten(0, (keys.shape[1], -1))
        keys, values = keys.double().transpose(0, 1), values.double().transpose(0, 1)
        scores = softmax_scale * (grouped @ keys.mT)
        rounding = softmax_scale * (grouped.abs() @ keys.abs().mT).amax(2) * 2.0**-8  # K rounded to the query's dtype
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        exact = scores.logsumexp(2)
        weights = torch.exp(scores - exact[..., None])
        exact_out, mass = weights @ values, weights @ values.abs()
        if sinks is not None:
            keep = torch.sigmoid(exact - sinks.double().view_as(exact))[..., None]
            exact_out, mass = exact_out * keep, mass * keep
        lse_budget = rounding + (exact.abs() + 16) * 2.0**-16
        out_budget = mass * (2 * lse_budget[..., None] + 2.0**-6) + 2.0**-20
        shares = [
            (lse.double().view_as(exact) - exact).abs() / lse_budget,
            (out.double().view_as(exact_out) - exact_out).abs() / out_budget,
        ]
        worst = max(worst, *(float(share.nan_to_num(nan=torch.inf).max()) for share in shares))
    return worst


def rows_of_queries(
    world: World, num_queries: int, window: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K and V that each query of each sequence sees."""
    parts = world.rows()
    value_dim = world.view.format.value_dim
    begin = 0
    for row_len in world.row_lens.tolist():
        for query in range(num_queries):
            end = max(row_len - (num_queries - 1 - query), 0)
            first = 0 if window is None else max(end - window, 0)
            keys = parts[0][begin + first : begin + end]
            values = parts[1][begin + first : begin + end] if value_dim is None else keys[..., :value_dim]
            yield keys, values
        begin += row_len
