"""Pages, rows and queries of a shape, and what the ops must make of them, computed in plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from benchmarks.kernel_shapes import DTYPES, LISTED, Shape
from kvstore_kernels import PageView

FP8 = torch.float8_e4m3fn
BITS = {"bf16": 7, "fp16": 9, "fp32": 9}
"""Of the result of a read, how many bits have to be right: of bf16's 8 one less, of fp16's and TF32's 11 two less."""

Call = Callable[[], object]
Expected = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
"""For each result what it must be, and how far from it it may be: None, bit for bit."""


def difference(results: Sequence[torch.Tensor], expected: Expected) -> tuple[float, str] | None:
    """How far the first wrong result is from what it must be, and the unit of that; None where nothing is wrong."""
    for result, (wanted, allowed) in zip(results, expected, strict=True):
        if result.shape != wanted.shape:
            return float(result.numel()), f"values of shape {tuple(result.shape)}, expected {tuple(wanted.shape)}"
        if allowed is None:
            count = int((as_bytes(result.contiguous()) != as_bytes(wanted.contiguous())).sum())
            if count:
                return float(count), "B"
            continue
        share = ((result.double() - wanted).abs() / allowed).nan_to_num(nan=torch.inf).max().item()
        if share > 1:
            return round(share, 3), "x what rounding may change"
    return None


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [first axis, bytes of the others]."""
    return rows.flatten(1).view(torch.uint8) if rows.ndim > 1 else rows[:, None].view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Rows:
    """What is written: `parts` as `write_rows` takes them, in the order of the slots; the `areas` of bytes they become;
    and the `read` parts that come back."""

    parts: Sequence[torch.Tensor]
    areas: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Read and written when all rows are moved once."""
        return sum(each.nbytes for each in (*self.parts, *self.areas))


class World:
    """The tensors of one shape on one device: all blocks in random order, dealt out to the sequences in turn."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.num_blocks = shape.num_rows // shape.rows_per_block
        self.order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).to(device)
        within = torch.arange(shape.rows_per_block, device=device)
        self.slots = (self.order[:, None] * shape.rows_per_block + within).flatten()  # int64 [num_rows]
        self.block_table = self.order.int().view(shape.num_seqs, -1)
        self.cu_row_lens = torch.arange(0, shape.num_rows + 1, shape.rows, dtype=torch.int32, device=device)
        self.row_lens = self.cu_row_lens.diff()

    @cached_property
    def rows(self) -> Rows:
        """Random rows of the format."""
        shape = self.shape
        if shape.format == "kv":
            size = (shape.num_rows, shape.kv_heads, shape.head_dim)
            parts = [self.random(0, *size), self.random(1, *size)]
        elif shape.format == "latent":
            parts = [self.random(0, shape.num_rows, 1, shape.head_dim)]
        else:
            return self._quantised()
        return Rows(parts, [as_bytes(part) for part in parts], parts)

    @cached_property
    def stride_bytes(self) -> int:
        """From one block to the next."""
        return self.shape.stride * self.shape.row_format.page_bytes(self.shape.rows_per_block)

    def view(self, filled: bool) -> PageView:
        """Pages of a memory of their own: of zeros, or holding the rows."""
        memory = self.pages() if filled else torch.zeros_like(self.pages())
        per_block, row_format = self.shape.rows_per_block, self.shape.row_format
        return PageView(memory.view(-1), 0, self.stride_bytes, self.num_blocks, per_block, row_format)

    @cached_property
    def last_rows(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The last row of each sequence, part by part, and their slots: what a decode step writes."""
        last = torch.arange(1, self.shape.num_seqs + 1, device=self.device) * self.shape.rows - 1
        return [part[last].contiguous() for part in self.rows.parts], self.slots[last].contiguous()

    def clear_last_rows(self, view: PageView) -> None:
        """Fills the last row of each sequence with zeros in pages of K and V."""
        slots, per_block = self.last_rows[1], self.shape.rows_per_block
        for part in ("k", "v"):
            view.tensor(part)[slots // per_block, slots % per_block] = 0

    def pages(self) -> torch.Tensor:
        """uint8 [num_blocks, stride_bytes] with the rows where they belong, zeros elsewhere."""
        memory = torch.zeros(self.num_blocks, self.stride_bytes, dtype=torch.uint8, device=self.device)
        at = 0
        for area in self.rows.areas:
            size = self.shape.rows_per_block * area.shape[1]
            memory[self.order, at : at + size] = area.view(self.num_blocks, size)
            at += size
        return memory

    def random(self, seed: int, *size: int) -> torch.Tensor:
        """Numbers of the shape's dtype, the same on every device."""
        generator = torch.Generator().manual_seed(1 + seed)
        return torch.randn(size, generator=generator).to(DTYPES[self.shape.dtype]).to(self.device)

    @cached_property
    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [num_seqs, kv_heads, rows, dim] as a read must see them."""
        shape, read = self.shape, self.rows.read
        keys, values = (
            each.view(shape.num_seqs, shape.rows, *each.shape[1:]).transpose(1, 2) for each in (read * 2)[:2]
        )
        return keys, values if shape.format == "kv" else values[..., : self.value_dim]

    @property
    def value_dim(self) -> int:
        """Columns of V."""
        return self.shape.row_format.value_dim or self.rows.read[0].shape[2]

    @cached_property
    def softmax_scale(self) -> float:
        """As models of these head dims have it."""
        return float(192**-0.5 if self.shape.format != "kv" else self.shape.head_dim**-0.5)

    @cached_property
    def query(self) -> torch.Tensor:
        """[num_seqs, num_heads, columns of K]."""
        return self.random(2, self.shape.num_seqs, self.shape.num_heads, self.keys_values[0].shape[3])

    @cached_property
    def listed(self) -> torch.Tensor:
        """int64 [num_seqs, listed]: for each sequence some of its rows, in random order."""
        num_listed = min(LISTED, self.shape.rows)
        generator = torch.Generator().manual_seed(3)
        chosen = [torch.randperm(self.shape.rows, generator=generator)[:num_listed] for _ in range(self.shape.num_seqs)]
        return torch.stack(chosen).to(self.device)

    @cached_property
    def attention(self) -> Expected:
        """Output and LSE of the query over all rows, or over the listed ones, and what rounding may change."""
        keys, values = self.keys_values
        if self.shape.op == "sparse_mla_decode":
            keys, values = (
                torch.stack([each[seq_idx][:, chosen] for seq_idx, chosen in enumerate(self.listed)])
                for each in (keys, values)
            )
        return exact_attention(self.query, keys, values, self.softmax_scale, BITS[self.shape.dtype])

    def _quantised(self) -> Rows:
        """e4m3 codes with powers of two for scales: `fp8_ds_mla` has tiles of 128 and fp32 scales in the row, `dsv4` of
        64 and bytes behind the rows of a page."""
        in_row = self.shape.format == "fp8_ds_mla"
        quant_tile, num_tiles, least = (128, 4, -13) if in_row else (64, 7, -22)
        rows = self.random(0, self.shape.num_rows, 1, quant_tile * num_tiles + 64)
        values = rows[:, 0, :-64].float().view(len(rows), num_tiles, quant_tile)
        exponents = torch.log2(values.abs().amax(2, keepdim=True) / 448).ceil().clamp(min=least)
        codes = (values / exponents.exp2()).to(FP8)
        rope = as_bytes(rows[:, 0, -64:].contiguous())
        if in_row:
            areas = [torch.cat([as_bytes(codes), as_bytes(exponents.exp2()), rope], 1)]
        else:
            scales = pad((exponents + 127).to(torch.uint8).flatten(1), (0, 1))
            areas = [torch.cat([as_bytes(codes), rope], 1), scales]
        decoded = rows.clone()
        decoded[:, 0, :-64] = (codes.float() * exponents.exp2()).flatten(1).to(rows.dtype)
        return Rows([rows], areas, [decoded])


def exact_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float, bits: int
) -> Expected:
    """Output and LSE in fp64 of a query [seqs, heads, dim] over K and V [seqs, kv_heads, rows, dim], and the budget:
    2^-bits of the sum of the weighted absolute values; 2^-10 for the LSE."""
    grouped = query.double().view(len(query), keys.shape[1], -1, query.shape[2])
    out, allowed, lse = [], [], []
    for one, seq_keys, seq_values in zip(grouped, keys, values, strict=True):  # fp64 copies of one sequence at a time
        scores = softmax_scale * (one @ seq_keys.double().mT)
        lse.append(scores.logsumexp(2))
        weights, exact_values = torch.exp(scores - lse[-1][..., None]), seq_values.double()
        out.append(weights @ exact_values)
        allowed.append((weights @ exact_values.abs()) * 2.0**-bits)
    outs, budgets, lses = (torch.stack(each).flatten(1, 2) for each in (out, allowed, lse))
    return [(outs, budgets), (lses, torch.full_like(lses, 2.0**-10))]
