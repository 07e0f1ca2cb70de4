"""What else does the work of our ops: torch, transformers' caches, and libraries that happen to be installed.

A peer works on tensors of its own that hold the same rows, and its result is checked like ours. What it cannot be
compared in is said beside its figures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.kernel_cases import Contender, block_layers
from benchmarks.kernel_data import World
from benchmarks.kernel_shapes import DTYPES
from kvstore_kernels import gather_rows


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that does the work of some ops.

    `make` prepares it for a shape; an exception it raises is its row. `package`: what has to be installed. `needs`: a
    shape that it takes in words, and whether this is one.
    """

    name: str
    package: str
    ops: tuple[str, ...]
    make: Callable[[World], Contender]
    needs_gpu: bool = False
    takes: Callable[[World], bool] = lambda world: True


@dataclass(frozen=True, slots=True)
class Absent:
    """A peer that cannot run here, and why."""

    name: str
    why: str


def contenders(world: World, peers: tuple[Peer, ...]) -> Iterator[Contender | Absent]:
    """The peers of a shape's op, those that are not there too. One that does not take the shape is left out."""
    for peer in peers:
        if world.shape.op not in peer.ops or not peer.takes(world):
            continue
        if not is_installed(peer.package):
            yield Absent(peer.name, f"{peer.package} is not installed")
        elif peer.needs_gpu and world.device.type != "cuda":
            yield Absent(peer.name, "needs a GPU")
        else:
            try:
                yield peer.make(world)
            except Exception as error:  # of another version, say: the others are still compared
                yield Absent(peer.name, f"failed: {type(error).__name__}: {error}"[:200])


def is_installed(package: str) -> bool:
    """Whether it can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def is_plain(world: World) -> bool:
    """Rows that torch can copy as they are."""
    return world.shape.format in ("kv", "latent")


def _torch_write(world: World) -> Contender:
    """index_copy_ into rows that lie side by side."""
    pools = [torch.zeros_like(part) for part in world.rows.parts]

    def call() -> None:
        for rows, part in zip(pools, world.rows.parts, strict=True):
            rows.index_copy_(0, world.slots, part)

    return Contender(
        "torch index_copy_",
        call,
        lambda: [rows[world.slots] for rows in pools],
        lambda: [(part, None) for part in world.rows.parts],
        "dense pools",
    )


def _torch_gather(world: World) -> Contender:
    """index_select of slots that are known before."""
    pools = [torch.zeros_like(part).index_copy_(0, world.slots, part) for part in world.rows.parts]
    out = [torch.zeros_like(part) for part in pools]

    def call() -> None:
        for rows, target in zip(pools, out, strict=True):
            torch.index_select(rows, 0, world.slots, out=target)

    expected = [(part, None) for part in world.rows.read]
    return Contender("torch index_select", call, lambda: out, lambda: expected, "slots given")


def _gather_sdpa(world: World) -> Contender:
    """Our gather, then torch's attention."""
    view, query = world.view(filled=True), world.query
    copies = tuple(torch.zeros_like(part) for part in world.rows.read)
    shape = world.shape
    keys, *values = (each.view(shape.num_seqs, shape.rows, *each.shape[1:]).transpose(1, 2) for each in copies)
    grouped = query.view(shape.num_seqs, keys.shape[1], -1, query.shape[2])
    columns, value_dim = keys.shape[3], world.value_dim
    held: list[torch.Tensor] = []

    def call() -> None:
        gather_rows(view, world.block_table, world.cu_row_lens, num_rows=shape.num_rows, out=copies)
        read = values[0] if values else keys
        if not values and world.device.type == "cuda":  # its kernels want K and V of one width
            read = pad(keys[..., :value_dim], (0, columns - value_dim))
        attended = scaled_dot_product_attention(grouped, keys, read, scale=world.softmax_scale)
        held[:] = [attended[..., :value_dim].flatten(1, 2)]

    return Contender("gather + torch sdpa", call, lambda: held, lambda: world.attention[:1], "no LSE")


def _torch_copy_blocks(world: World) -> Contender:
    """Indexing of whole blocks."""
    _, blocks = block_layers(world)
    half = world.num_blocks // 2
    src, dst = world.order[:half], world.order[half : 2 * half]
    wanted = blocks.clone()
    wanted[dst] = wanted[src]

    def call() -> None:
        blocks[dst] = blocks[src]

    return Contender("torch indexing", call, lambda: [blocks], lambda: [(wanted, None)], "layers in one block")


def _torch_pack(world: World) -> Contender:
    """index_select of whole blocks."""
    _, blocks = block_layers(world)
    chosen = world.order[: world.num_blocks // 2]
    out = torch.zeros_like(blocks[: len(chosen)])
    wanted = blocks[chosen]
    return Contender(
        "torch index_select",
        lambda: torch.index_select(blocks, 0, chosen, out=out),
        lambda: [out],
        lambda: [(wanted, None)],
        "layers in one block",
    )


def _dynamic_cache(world: World) -> Contender:
    """transformers' DynamicCache: the new rows are joined to the old ones, then torch's attention."""
    from transformers import DynamicCache

    shape = world.shape
    keys, values = (each.contiguous() for each in world.keys_values)
    cache = DynamicCache()
    cache.update(keys, values, 0)
    new = (keys[:, :, -1:].contiguous(), values[:, :, -1:].contiguous())
    held: list[torch.Tensor] = []
    query = world.query.view(shape.num_seqs, shape.num_heads, 1, -1)

    def call() -> None:
        cache.crop(-1)
        read = cache.update(*new, 0)
        held[:] = [scaled_dot_product_attention(query, *read, scale=world.softmax_scale, enable_gqa=True).flatten(1, 2)]

    return Contender(
        "transformers DynamicCache",
        call,
        lambda: [held[0].view(shape.num_seqs, shape.num_heads, -1)],
        lambda: world.attention[:1],
        "equal lengths, no LSE",
    )


def _paged_cache(world: World) -> Contender:
    """transformers' paged cache of its continuous batching: rows written and read by index, then torch's attention."""
    from transformers import LlamaConfig
    from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator

    shape, device = world.shape, world.device
    heads = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    allocator: Any = FullAttentionCacheAllocator(
        index=0,
        config=LlamaConfig(num_hidden_layers=1, hidden_size=shape.num_heads * shape.head_dim, **heads),
        num_key_value_heads=shape.kv_heads,
        cache_dtype=DTYPES[shape.dtype],
        page_size=shape.rows_per_block,
        layer_indices=[0],
        allow_block_sharing=False,
    )
    size = allocator.bytes_per_block
    pool = CachePool(world.num_blocks, 1)
    memory = torch.zeros((world.num_blocks + 2) * size, dtype=torch.uint8, device=device)
    allocator.register_cache_tensor(size, world.num_blocks * size, memory, pool)
    for _ in range(world.num_blocks):
        pool.allocate_sector(0)
    names = [str(seq_idx) for seq_idx in range(shape.num_seqs)]
    for name in names:
        allocator.allocate_cache_to_request(name, 0, shape.rows)

    def indices(of: Callable[[str, int, int], list[int]], past: int, new: int) -> torch.Tensor:
        return torch.tensor([row for name in names for row in of(name, past, new)], device=device)

    parts, nothing = world.rows.parts, torch.empty(0, dtype=torch.int64, device=device)
    allocator.update(*parts, 0, nothing, indices(allocator.get_write_indices, 0, shape.rows))
    new, _ = world.last_rows
    read_index = indices(allocator.get_read_indices, shape.rows - 1, 1)
    write_index = indices(allocator.get_write_indices, shape.rows - 1, 1)
    query = world.query.view(shape.num_seqs, shape.num_heads, 1, -1)
    held: list[torch.Tensor] = []

    def call() -> None:
        rows = allocator.update(*new, 0, read_index, write_index)
        read = (each.view(shape.num_seqs, shape.rows, *each.shape[1:]).transpose(1, 2) for each in rows)
        attended = scaled_dot_product_attention(query, *read, scale=world.softmax_scale, enable_gqa=True)
        held[:] = [attended.flatten(1, 2).view_as(world.query)]

    return Contender(
        "transformers paged cache",
        call,
        lambda: held,
        lambda: world.attention[:1],
        "indices made before, no LSE",
    )


TORCH_PEERS = (
    Peer("torch index_copy_", "torch", ("write_rows",), _torch_write, takes=is_plain),
    Peer("torch index_select", "torch", ("gather_rows",), _torch_gather, takes=is_plain),
    Peer("gather + torch sdpa", "torch", ("mla_decode", "gqa_decode"), _gather_sdpa),
    Peer("torch indexing", "torch", ("copy_blocks",), _torch_copy_blocks),
    Peer("torch index_select", "torch", ("pack_blocks",), _torch_pack),
    Peer("transformers DynamicCache", "transformers", ("decode_step",), _dynamic_cache),
    Peer("transformers paged cache", "transformers", ("decode_step",), _paged_cache),
)
