"""What the peers of other libraries share: views of the same pages, and which results are held against what."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import pad

from benchmarks.kernel_cases import Contender
from benchmarks.kernel_data import Call, World
from benchmarks.kernel_peers import Peer
from benchmarks.kernel_shapes import ROPE
from kvstore_kernels import PageView


def gpu_peer(
    name: str,
    package: str,
    ops: tuple[str, ...],
    make: Callable[[str, World], Contender],
    **wanted: tuple[object, ...],
) -> Peer:
    """A peer that needs a GPU. `wanted`: fields of a shape, and the values of each that it takes."""

    def takes(world: World) -> bool:
        return all(getattr(world.shape, field) in known for field, known in wanted.items())

    return Peer(name, package, ops, partial(make, name), needs_gpu=True, takes=takes)


def page_write(name: str, world: World, view: PageView, call: Call, differs: str = "") -> Contender:
    """A contender that fills the pages of a view: they must be the pages of the rows, byte for byte."""
    pages = view.memory.view(world.num_blocks, -1)
    return Contender(name, call, lambda: [pages], lambda: [(world.pages(), None)], differs)


def row_copy(name: str, world: World, out: torch.Tensor, call: Call, differs: str = "") -> Contender:
    """A contender that gathers the first part of all rows into a tensor [num_rows, ...]."""
    wanted = world.rows.read[0].reshape(out.shape)
    return Contender(name, call, lambda: [out], lambda: [(wanted, None)], differs)


def attention(
    name: str, world: World, results: Callable[[], Sequence[torch.Tensor]], call: Call, differs: str = ""
) -> Contender:
    """A contender that reads: its output, and the natural LSE where it has one, [num_seqs, num_heads(, dim)] both."""
    return Contender(name, call, results, lambda: world.attention[: len(results())], differs)


def latent_pages(view: PageView) -> torch.Tensor:
    """[num_blocks, rows_per_block, columns]."""
    return view.tensor("latent")[:, :, 0]


def byte_rows(view: PageView) -> torch.Tensor:
    """uint8 [num_blocks, rows_per_block, bytes of a row] of a format whose scales lie in the row."""
    per_block, pitch = view.rows_per_block, view.format.area_pitches[0]
    return view.memory.as_strided((view.num_blocks, per_block, pitch), (view.block_stride_bytes, pitch, 1))


def split_latent(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns without a position and those with one, as tensors of their own."""
    return rows[..., :-ROPE].contiguous(), rows[..., -ROPE:].contiguous()


def outputs(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of zeros for an output and its LSE."""
    shape, query = world.shape, world.query
    out = torch.zeros(shape.num_seqs, shape.num_heads, world.value_dim, dtype=query.dtype, device=world.device)
    return out, torch.zeros(shape.num_seqs, shape.num_heads, device=world.device)


def before_step(world: World) -> tuple[PageView, list[torch.Tensor], torch.Tensor]:
    """Pages without the last row of each sequence, those rows, and their slots."""
    view = world.view(filled=True)
    world.clear_last_rows(view)
    return view, *world.last_rows


def listed_slots(world: World, multiple: int) -> torch.Tensor:
    """int32 [num_seqs, 1, n]: the slots that each query reads, with -1 up to a multiple."""
    by_seq = world.slots.view(world.shape.num_seqs, -1)
    if world.shape.op == "sparse_mla_decode":
        by_seq = by_seq.gather(1, world.listed)
    return pad(by_seq, (0, -by_seq.shape[1] % multiple), value=-1).int()[:, None].contiguous()


def compute_units(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def power_of_two(number: int) -> int:
    """The least one that is not below it."""
    return int(1 << max(0, number - 1).bit_length())
