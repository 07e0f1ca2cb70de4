"""What the benchmark of the kernels times: our op at a shape, a copy of the same bytes, and what others offer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from benchmarks.kernel_data import Call, Expected, World
from benchmarks.kernel_shapes import Shape
from kvstore_kernels import (
    PageView,
    copy_blocks,
    gather_rows,
    gqa_decode,
    mla_decode,
    pack_blocks,
    sparse_mla_decode,
    write_rows,
)

OURS, COPY = "paged-kvstore", "copy"
LAYERS_OF_BLOCK = 4


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do a case's work.

    `call` does it once; `results` are looked at after a call and compared with `expected`. `reset` takes away what an
    earlier call has left. `differs`: in what it is not the same work.
    """

    name: str
    call: Call
    results: Callable[[], Sequence[torch.Tensor]]
    expected: Callable[[], Expected]
    differs: str = ""
    reset: Call = lambda: None


@dataclass(frozen=True, slots=True)
class Case:
    """A shape's work: the bytes that it has to read and write, the operations of its matrix products, and our way."""

    shape: Shape
    num_bytes: int
    num_flops: int
    ours: Contender


def case_of(world: World) -> Case:
    """The case of a shape's op."""
    return CASES[world.shape.op](world)


def copy_of(num_bytes: int, device: torch.device) -> Call:
    """Reads half of the bytes and writes the other half, between buffers that exist."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def _write(world: World) -> Case:
    view, parts = world.view(filled=False), world.rows.parts

    def expected() -> Expected:
        return [(world.pages(), None)]

    return Case(
        world.shape,
        world.rows.num_bytes + world.slots.nbytes,
        0,
        Contender(
            OURS,
            lambda: write_rows(view, world.slots, *parts),
            lambda: [_blocks(view, world.num_blocks)],
            expected,
            reset=view.memory.zero_,
        ),
    )


def _gather(world: World) -> Case:
    view, num_rows = world.view(filled=True), world.shape.num_rows
    out = tuple(torch.zeros_like(part) for part in world.rows.read)
    ours = Contender(
        OURS,
        lambda: gather_rows(view, world.block_table, world.cu_row_lens, num_rows=num_rows, out=out),
        lambda: out,
        lambda: [(part, None) for part in world.rows.read],
        reset=partial(_spoil, *out),
    )
    return Case(world.shape, world.rows.num_bytes, 0, ours)


def _read(world: World) -> Case:
    """A read of all rows, or of the listed ones."""
    shape, query = world.shape, world.query
    view, scale = world.view(filled=True), world.softmax_scale
    out = torch.zeros(shape.num_seqs, shape.num_heads, world.value_dim, dtype=query.dtype, device=world.device)
    lse = torch.zeros(shape.num_seqs, shape.num_heads, device=world.device)
    given = {"softmax_scale": scale, "out": out, "lse": lse}
    if shape.op == "sparse_mla_decode":
        at = torch.arange(shape.num_seqs, device=world.device)[:, None] * shape.rows
        slots = world.slots[at + world.listed]

        def call() -> object:
            return sparse_mla_decode(view, slots, query, **given)
    else:
        decode = mla_decode if shape.op == "mla_decode" else gqa_decode

        def call() -> object:
            return decode(view, world.block_table, world.row_lens, query, **given)

    return Case(shape, *_read_work(world), _reader(world, call, out, lse))


def _step(world: World) -> Case:
    """A decode step: the last row of each sequence is written, then all are read."""
    shape, query = world.shape, world.query
    view = world.view(filled=True)
    new, slots = world.last_rows
    out = torch.zeros_like(query)
    lse = torch.zeros(shape.num_seqs, shape.num_heads, device=world.device)

    def call() -> None:
        write_rows(view, slots, *new)
        gqa_decode(view, world.block_table, world.row_lens, query, softmax_scale=world.softmax_scale, out=out, lse=lse)

    def reset() -> None:
        world.clear_last_rows(view)
        _spoil(out, lse)

    num_bytes, num_flops = _read_work(world)
    num_bytes += 2 * sum(part.nbytes for part in new)
    ours = Contender(OURS, call, lambda: (out, lse), lambda: world.attention, reset=reset)
    return Case(shape, num_bytes, num_flops, ours)


def _reader(world: World, call: Call, out: torch.Tensor, lse: torch.Tensor) -> Contender:
    return Contender(OURS, call, lambda: (out, lse), lambda: world.attention, reset=partial(_spoil, out, lse))


def _spoil(*results: torch.Tensor) -> None:
    """Fills them with NaN."""
    for each in results:
        each.fill_(torch.nan)


def _read_work(world: World) -> tuple[int, int]:
    """Bytes of the rows that are read, of the queries and outputs; operations of the two products."""
    shape = world.shape
    rows = world.listed.numel() if shape.op == "sparse_mla_decode" else shape.num_rows
    row_bytes = sum(area.shape[1] for area in world.rows.areas)
    columns = world.keys_values[0].shape[3] + world.value_dim
    outputs = shape.num_seqs * shape.num_heads * world.value_dim * world.query.element_size()
    return rows * row_bytes + world.query.nbytes + outputs, 2 * rows * shape.num_heads * columns


def _copy_blocks(world: World) -> Case:
    """Half of the blocks of four layers over the other half."""
    views, blocks = block_layers(world)
    half = world.num_blocks // 2
    src, dst = world.order[:half], world.order[half : 2 * half]
    wanted = blocks.clone()
    wanted[dst] = wanted[src]
    ours = Contender(
        OURS,
        lambda: copy_blocks(views, src, dst),
        lambda: [blocks],
        lambda: [(wanted, None)],
        reset=lambda: blocks.index_fill_(0, dst, 0),
    )
    return Case(world.shape, 2 * blocks[:half].nbytes, 0, ours)


def _pack_blocks(world: World) -> Case:
    """Half of the blocks of four layers into a staging buffer that exists."""
    views, blocks = block_layers(world)
    block_ids = world.order[: world.num_blocks // 2]
    wanted = blocks[block_ids]
    out = torch.zeros_like(wanted)
    ours = Contender(
        OURS, lambda: pack_blocks(views, block_ids, out), lambda: [out], lambda: [(wanted, None)], reset=out.zero_
    )
    return Case(world.shape, 2 * wanted.nbytes, 0, ours)


def block_layers(world: World) -> tuple[list[PageView], torch.Tensor]:
    """Layers whose pages lie side by side in blocks of random bytes, and the blocks."""
    shape = world.shape
    page_bytes = shape.row_format.page_bytes(shape.rows_per_block)
    size = (world.num_blocks, LAYERS_OF_BLOCK * page_bytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(world.device)
    views = [
        PageView(blocks.view(-1), layer * page_bytes, size[1], world.num_blocks, shape.rows_per_block, shape.row_format)
        for layer in range(LAYERS_OF_BLOCK)
    ]
    return views, blocks


def _blocks(view: PageView, num_blocks: int) -> torch.Tensor:
    return view.memory.view(num_blocks, -1)


CASES: Mapping[str, Callable[[World], Case]] = MappingProxyType(
    {
        "write_rows": _write,
        "gather_rows": _gather,
        "mla_decode": _read,
        "gqa_decode": _read,
        "sparse_mla_decode": _read,
        "decode_step": _step,
        "copy_blocks": _copy_blocks,
        "pack_blocks": _pack_blocks,
    }
)
