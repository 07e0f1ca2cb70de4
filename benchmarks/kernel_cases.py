"""What the benchmark of the kernels runs: ops on fixed tensors, what they must give, and what they run against."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from kvstore_kernels import (
    PageView,
    RowFormat,
    copy_blocks,
    dsv4_format,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    kv_format,
    latent_format,
    mla_decode,
    pack_blocks,
    write_rows,
)

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS_PER_BLOCK = 64
LATENT_DIM, VALUE_DIM = 576, 512
MLA_SCALE = 192**-0.5
MIN_COPY_SHARE, MIN_DECODE_RATIO = 0.5, 1.0

Call = Callable[[], object]
Expected = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
"""For each result what it must be, and how far from it it may be: None, bit for bit."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of rows, each a multiple of a block, and of sequences."""

    moved: int
    quantised: int
    num_seqs: int
    seq: int
    long_seq: int


FULL = Sizes(moved=65_536, quantised=16_384, num_seqs=8, seq=1_024, long_seq=8_192)
QUICK = Sizes(moved=2_048, quantised=512, num_seqs=2, seq=192, long_seq=512)


@dataclass(frozen=True, slots=True)
class Case:
    """One op on fixed tensors.

    `run` calls it and returns what it has made; `expected` computes that in plain torch. `num_bytes` are those read
    and written, 0 where the time says more. `rivals` do the same work otherwise; the time of the fastest of them has to
    be at least `target` times that of the op, None: any.
    """

    name: str
    run: Callable[[], Sequence[torch.Tensor]]
    expected: Callable[[], Expected]
    num_bytes: int = 0
    rivals: Mapping[str, Call] = field(default_factory=dict)
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Dense pages of zeros and a random order of all of them."""

    view: PageView
    order: torch.Tensor  # int64 [num_blocks]
    slots: torch.Tensor  # int64 [num_rows], those of the rows of the blocks in that order

    @classmethod
    def of(cls, row_format: RowFormat, num_rows: int) -> "Pool":
        """Pages for `num_rows` rows, a multiple of ROWS_PER_BLOCK."""
        num_blocks, page_bytes = num_rows // ROWS_PER_BLOCK, row_format.page_bytes(ROWS_PER_BLOCK)
        memory = torch.zeros(num_blocks * page_bytes, dtype=torch.uint8)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        slots = (order[:, None] * ROWS_PER_BLOCK + torch.arange(ROWS_PER_BLOCK)).flatten()
        return cls(PageView(memory, 0, page_bytes, num_blocks, ROWS_PER_BLOCK, row_format), order, slots)

    @property
    def pages(self) -> torch.Tensor:
        """uint8 [num_blocks, page_bytes], the memory itself."""
        return self.view.memory.view(len(self.order), -1)

    def holding(self, pages: torch.Tensor) -> torch.Tensor:
        """The memory when page i of `pages` [num_blocks, bytes] lies in block `order[i]`."""
        memory = torch.zeros_like(self.pages)
        memory[self.order, : pages.shape[1]] = pages
        return memory

    def tables(self, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_table, cu_row_lens and row_lens of sequences that share the blocks out, in that order."""
        row_len = len(self.slots) // num_seqs
        cu_row_lens = torch.arange(0, len(self.slots) + 1, row_len, dtype=torch.int32)
        return self.order.int().view(num_seqs, -1), cu_row_lens, cu_row_lens.diff()


def make_rows(*shape: int) -> torch.Tensor:
    """Random bf16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(BF16)


def plain_pages(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pages of rows whose parts have an area each: uint8 [num_blocks, bytes]."""
    return torch.cat([as_bytes(part).view(-1, ROWS_PER_BLOCK * as_bytes(part).shape[1]) for part in parts], 1)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [num_rows, bytes of a row]."""
    return rows.flatten(1).view(torch.uint8)


def copies_of(parts: Sequence[torch.Tensor]) -> dict[str, Call]:
    """`copy_` of the same bytes into warm memory."""
    warm = [part.clone() for part in parts]
    return {"copy_": lambda: [to.copy_(part) for to, part in zip(warm, parts, strict=True)]}


def write_case(what: str, row_format: RowFormat, parts: Sequence[torch.Tensor], target: float | None) -> Case:
    """write_rows of plain rows."""
    pool = Pool.of(row_format, len(parts[0]))

    def run() -> list[torch.Tensor]:
        write_rows(pool.view, pool.slots, *parts)
        return [pool.pages]

    return Case(
        f"write_rows, {len(parts[0]):,} {what}",
        run,
        lambda: [(pool.holding(plain_pages(parts)), None)],
        2 * sum(part.nbytes for part in parts),
        copies_of(parts),
        target,
    )


def gather_case(what: str, row_format: RowFormat, parts: Sequence[torch.Tensor], target: float | None) -> Case:
    """gather_rows of plain rows into outputs that exist."""
    pool = Pool.of(row_format, len(parts[0]))
    pool.pages.copy_(pool.holding(plain_pages(parts)))
    block_table, cu_row_lens, _ = pool.tables(1)
    out = tuple(torch.zeros_like(part) for part in parts)
    return Case(
        f"gather_rows, {len(parts[0]):,} {what}",
        lambda: gather_rows(pool.view, block_table, cu_row_lens, num_rows=len(parts[0]), out=out),
        lambda: [(part, None) for part in parts],
        2 * sum(part.nbytes for part in parts),
        copies_of(parts),
        target,
    )


@dataclass(frozen=True, slots=True)
class Quantised:
    """A format of e4m3 codes with powers of two for scales: its rows, and the bytes of its areas in plain torch."""

    row_format: RowFormat
    rows: torch.Tensor  # bf16 [num_rows, 1, columns]
    areas: Sequence[torch.Tensor]
    decoded: torch.Tensor  # bf16, like rows

    @classmethod
    def of(cls, row_format: RowFormat, num_rows: int) -> "Quantised":
        """Random rows: `fp8_ds_mla` has tiles of 128 and fp32 scales in the row, `dsv4` of 64 and bytes behind it."""
        in_row = row_format.name == "fp8_ds_mla"
        quant_tile, num_tiles, least = (128, 4, -13) if in_row else (64, 7, -22)
        rows = make_rows(num_rows, 1, quant_tile * num_tiles + 64)
        values = rows[:, 0, :-64].float().view(num_rows, num_tiles, quant_tile)
        exponents = torch.log2(values.abs().amax(2, keepdim=True) / 448).ceil().clamp(min=least)
        codes = (values / exponents.exp2()).to(FP8)
        rope = as_bytes(rows[:, 0, -64:].contiguous())
        if in_row:
            areas = [torch.cat([as_bytes(codes), as_bytes(exponents.exp2()), rope], 1)]
        else:
            scales = pad((exponents + 127).to(torch.uint8).flatten(1), (0, 1))
            areas = [torch.cat([as_bytes(codes), rope], 1), scales]
        decoded = rows.clone()
        decoded[:, 0, :-64] = (codes.float() * exponents.exp2()).flatten(1).to(BF16)
        return cls(row_format, rows, areas, decoded)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows as bf16 and in their pages."""
        return self.rows.nbytes + sum(area.nbytes for area in self.areas)


def quantised_write_case(row_format: RowFormat, num_rows: int) -> Case:
    """write_rows that quantises."""
    data = Quantised.of(row_format, num_rows)
    pool = Pool.of(row_format, num_rows)

    def run() -> list[torch.Tensor]:
        write_rows(pool.view, pool.slots, data.rows)
        return [pool.pages]

    name = f"write_rows, {num_rows:,} rows to {row_format.name}"
    return Case(name, run, lambda: [(pool.holding(plain_pages(data.areas)), None)], data.num_bytes)


def quantised_gather_case(row_format: RowFormat, num_rows: int) -> Case:
    """gather_rows that dequantises."""
    data = Quantised.of(row_format, num_rows)
    pool = Pool.of(row_format, num_rows)
    pool.pages.copy_(pool.holding(plain_pages(data.areas)))
    block_table, cu_row_lens, _ = pool.tables(1)
    out = (torch.zeros_like(data.rows),)
    return Case(
        f"gather_rows, {num_rows:,} rows from {row_format.name}",
        lambda: gather_rows(pool.view, block_table, cu_row_lens, num_rows=num_rows, out=out),
        lambda: [(data.decoded, None)],
        data.num_bytes,
    )


def exact_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and LSE in fp64 of q [seqs, heads, queries, dim], and what rounding to bf16 may change."""
    q, keys, values = q.double(), keys.double(), values.double()
    scores = softmax_scale * (q @ keys.mT)
    lse = scores.logsumexp(3)
    weights = torch.exp(scores - lse[..., None])
    out, allowed = weights @ values, (weights @ values.abs()) * 2.0**-7
    flat = [each.flatten(1, 2) for each in (out, allowed, lse)]
    return [(flat[0], flat[1]), (flat[2], torch.full_like(flat[2], 2.0**-10))]


def mla_case(num_seqs: int, row_len: int) -> Case:
    """mla_decode against a gather and torch's attention with the heads as query rows."""
    (latent,) = parts = [make_rows(num_seqs * row_len, 1, LATENT_DIM)]
    pool = Pool.of(latent_format(LATENT_DIM, VALUE_DIM, BF16), len(latent))
    pool.pages.copy_(pool.holding(plain_pages(parts)))
    block_table, cu_row_lens, row_lens = pool.tables(num_seqs)
    q = make_rows(num_seqs, 1, 16, LATENT_DIM)
    keys = torch.zeros_like(latent)

    def gathered() -> torch.Tensor:
        gather_rows(pool.view, block_table, cu_row_lens, num_rows=len(keys), out=(keys,))
        return keys.view(num_seqs, 1, row_len, LATENT_DIM)

    def cut() -> torch.Tensor:
        rows = gathered()
        return scaled_dot_product_attention(q, rows, rows, scale=MLA_SCALE)[..., :VALUE_DIM]

    def padded() -> torch.Tensor:
        rows = gathered()
        values = pad(rows[..., :VALUE_DIM], (0, LATENT_DIM - VALUE_DIM))
        return scaled_dot_product_attention(q, rows, values, scale=MLA_SCALE)[..., :VALUE_DIM]

    rows = latent.view(num_seqs, 1, row_len, LATENT_DIM)
    return Case(
        f"mla_decode, {num_seqs} x {row_len:,} rows, 16 heads",
        lambda: mla_decode(pool.view, block_table, row_lens, q[:, 0], softmax_scale=MLA_SCALE),
        lambda: exact_attention(q, rows, rows[..., :VALUE_DIM], MLA_SCALE),
        rivals={"gather + sdpa, V cut": cut, "gather + sdpa, V padded": padded},
        target=MIN_DECODE_RATIO,
    )


def gqa_case(num_seqs: int, row_len: int) -> Case:
    """gqa_decode of 32 query heads over 8 heads of K and V, against a gather and torch's attention."""
    parts = [make_rows(num_seqs * row_len, 8, 128), make_rows(num_seqs * row_len, 8, 128).flip(0)]
    pool = Pool.of(kv_format(8, 128, dtype=BF16), len(parts[0]))
    pool.pages.copy_(pool.holding(plain_pages(parts)))
    block_table, cu_row_lens, row_lens = pool.tables(num_seqs)
    q = make_rows(num_seqs, 8, 4, 128)
    copies = tuple(torch.zeros_like(part) for part in parts)
    keys, values, *exact = (part.view(num_seqs, row_len, 8, 128).transpose(1, 2) for part in (*copies, *parts))

    def gathered() -> torch.Tensor:
        gather_rows(pool.view, block_table, cu_row_lens, num_rows=len(copies[0]), out=copies)
        return scaled_dot_product_attention(q, keys, values)

    return Case(
        f"gqa_decode, {num_seqs} x {row_len:,} rows, 32 / 8 heads",
        lambda: gqa_decode(pool.view, block_table, row_lens, q.flatten(1, 2)),
        lambda: exact_attention(q, exact[0], exact[1], 128**-0.5),
        rivals={"gather + sdpa": gathered},
    )


def block_layers(num_rows: int) -> tuple[list[PageView], torch.Tensor, torch.Tensor]:
    """Four layers whose pages lie side by side in blocks of random bytes, the blocks, and a random order of them."""
    row_format = latent_format(LATENT_DIM, VALUE_DIM, BF16)
    page_bytes, num_blocks = row_format.page_bytes(ROWS_PER_BLOCK), num_rows // ROWS_PER_BLOCK // 2
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(0, 256, (num_blocks * 4 * page_bytes,), dtype=torch.uint8, generator=generator)
    views = [
        PageView(memory, layer * page_bytes, 4 * page_bytes, num_blocks, ROWS_PER_BLOCK, row_format)
        for layer in range(4)
    ]
    return views, memory.view(num_blocks, -1), torch.randperm(num_blocks, generator=generator)


def copy_blocks_case(num_rows: int) -> Case:
    """copy_blocks of half of the blocks over the other half."""
    views, blocks, order = block_layers(num_rows)
    src, dst = order.view(2, -1)
    wanted = blocks.clone()
    wanted[dst] = wanted[src]

    def run() -> list[torch.Tensor]:
        copy_blocks(views, src, dst)
        return [blocks]

    moved = blocks[: len(src)].clone()
    return Case(
        f"copy_blocks, {len(src):,} of 4 layers", run, lambda: [(wanted, None)], 2 * moved.nbytes, copies_of([moved])
    )


def pack_blocks_case(num_rows: int) -> Case:
    """pack_blocks of half of the blocks into a staging buffer that exists."""
    views, blocks, order = block_layers(num_rows)
    block_ids = order[: len(order) // 2]
    wanted = blocks[block_ids]
    out = torch.zeros_like(wanted)
    return Case(
        f"pack_blocks, {len(block_ids):,} of 4 layers",
        lambda: [pack_blocks(views, block_ids, out)],
        lambda: [(wanted, None)],
        2 * wanted.nbytes,
        copies_of([wanted]),
    )


def latent_move(make: Callable[..., Case]) -> Callable[[Sizes], Case]:
    """A write or gather of bf16 latent rows."""
    row_format = latent_format(LATENT_DIM, VALUE_DIM, BF16)
    return lambda sizes: make("latent rows", row_format, [make_rows(sizes.moved, 1, LATENT_DIM)], MIN_COPY_SHARE)


def kv_move(make: Callable[..., Case]) -> Callable[[Sizes], Case]:
    """A write or gather of K and V, 8 heads of 128, half as many rows."""
    row_format = kv_format(8, 128, dtype=BF16)
    return lambda sizes: make(
        "rows of K and V", row_format, [make_rows(sizes.moved // 2, 8, 128), make_rows(sizes.moved // 2, 8, 128)], None
    )


CASES: Mapping[str, Callable[[Sizes], Case]] = MappingProxyType(
    {
        "write": latent_move(write_case),
        "gather": latent_move(gather_case),
        "mla": lambda sizes: mla_case(sizes.num_seqs, sizes.seq),
        "mla-long": lambda sizes: mla_case(1, sizes.long_seq),
        "gqa": lambda sizes: gqa_case(sizes.num_seqs, sizes.seq),
        "write-kv": kv_move(write_case),
        "gather-kv": kv_move(gather_case),
        "write-fp8_ds_mla": lambda sizes: quantised_write_case(fp8_ds_mla_format(), sizes.quantised),
        "gather-fp8_ds_mla": lambda sizes: quantised_gather_case(fp8_ds_mla_format(), sizes.quantised),
        "write-dsv4": lambda sizes: quantised_write_case(dsv4_format(), sizes.quantised),
        "gather-dsv4": lambda sizes: quantised_gather_case(dsv4_format(), sizes.quantised),
        "copy-blocks": lambda sizes: copy_blocks_case(sizes.moved),
        "pack-blocks": lambda sizes: pack_blocks_case(sizes.moved),
    }
)
"""Name -> what makes the case; one at a time, for each holds its own memory."""
