"""What `python -m benchmarks gpu` checks: every op on the device against the torch reference on the host.

Moves are compared as bytes, everything the memory holds beside the rows too; attention with fp64 over the rows as
they were read back, by how much rounding may change it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu_world import BF16, FORMATS, World, different, rows_of_queries, share_of_budget
from kvstore_kernels import (
    compute_slot_mapping,
    copy_blocks,
    dsv4_format,
    fill_blocks,
    gather_rows,
    gqa_decode,
    indexer_scores,
    layer_table,
    merge_partials,
    mla_decode,
    pack_blocks,
    read_rows,
    sparse_mla_decode,
    unpack_blocks,
    write_layers,
    write_rows,
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at: `run` gives bytes that differ, or how much of what rounding may change; up to `limit`."""

    name: str
    run: Callable[[torch.device], float]
    limit: float = 0.0


def check_write(world: World, device: torch.device) -> float:
    """A write into poisoned memory."""
    view = world.on(device, fill=255)
    sources = [source.to(device) for source in world.sources]
    write_rows(view, world.slots.to(device), *sources, row_scales=world.scales, backend="triton")
    return different(view.memory, world.view.memory)


def check_write_layers(world: World, device: torch.device) -> float:
    """The same rows into three layers by one launch."""
    views = [world.on(device, fill=255) for _ in range(3)]
    sources = [source.to(device)[None].expand(3, *[-1] * source.ndim) for source in world.sources]
    write_layers(layer_table(views), world.slots.to(device), *sources, row_scales=world.scales, backend="triton")
    return sum(different(view.memory, world.view.memory) for view in views)


def check_gather(world: World, device: torch.device) -> float:
    """A gather from the second row of every sequence on, and a read of slots."""
    lens = (world.row_lens - 1).clamp(min=0)
    cu_row_lens = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    start, num_rows = torch.ones_like(lens), int(cu_row_lens[-1])
    options = {"row_scales": world.scales} if world.view.format.quantised else {}
    wanted = gather_rows(
        world.view, world.block_table, cu_row_lens, num_rows=num_rows, start=start, backend="reference", **options
    )
    on_device = [tensor.to(device) for tensor in (world.block_table, cu_row_lens, start)]
    got = gather_rows(
        world.on(device), *on_device[:2], num_rows=num_rows, start=on_device[2], backend="triton", **options
    )
    read = [
        read_rows(view, slots, dtype=BF16, row_scales=world.scales, backend=backend)
        for view, slots, backend in (
            (world.view, world.slots, "reference"),
            (world.on(device), world.slots.to(device), "triton"),
        )
    ]
    return sum(different(mine, theirs) for mine, theirs in zip((*got, *read[1]), (*wanted, *read[0]), strict=True))


def check_mla(world: World, num_heads: int, num_queries: int, num_splits: int | None, device: torch.device) -> float:
    """mla_decode with sinks."""
    q, sinks = world.query(num_heads, num_queries), torch.linspace(-2, 2, num_heads)
    got = mla_decode(
        world.on(device),
        world.block_table.to(device),
        world.row_lens.to(device),
        q.to(device),
        softmax_scale=0.05,
        sinks=sinks.to(device),
        row_scales=world.scales,
        num_splits=num_splits,
        backend="triton",
    )
    flat = (got[0].flatten(0, 1), got[1].flatten(0, 1))
    return share_of_budget(flat, q.flatten(0, 1), list(rows_of_queries(world, num_queries)), 0.05, sinks=sinks)


def check_gqa(
    world: World, num_heads: int, num_queries: int, window: int | None, soft_cap: float | None, device: torch.device
) -> float:
    """gqa_decode."""
    q = world.query(num_heads, num_queries)
    got = gqa_decode(
        world.on(device),
        world.block_table.to(device),
        world.row_lens.to(device),
        q.to(device),
        softmax_scale=0.1,
        window=window,
        soft_cap=soft_cap,
        row_scales=world.scales,
        backend="triton",
    )
    flat = (got[0].flatten(0, 1), got[1].flatten(0, 1))
    rows = list(rows_of_queries(world, num_queries, window))
    return share_of_budget(flat, q.flatten(0, 1), rows, 0.1, soft_cap)


def check_sparse(world: World, num_heads: int, device: torch.device) -> float:
    """sparse_mla_decode over two lists with holes, both in one cache."""
    q = world.query(num_heads, 1)[:, 0]
    generator = torch.Generator().manual_seed(9)
    picked = torch.randint(0, len(world.slots), (2, len(q), 96), generator=generator)
    lists = torch.where(torch.rand(picked.shape, generator=generator) < 0.2, -1, world.slots[picked])
    view = world.on(device)
    got = sparse_mla_decode(
        view,
        lists[0].to(device),
        q.to(device),
        softmax_scale=0.05,
        second=(view, lists[1].int().to(device)),
        row_scales=world.scales,
        backend="triton",
    )
    (all_rows,) = world.rows()
    rows = []
    for seq_idx in range(len(q)):
        kept = torch.cat([picked[idx, seq_idx][lists[idx, seq_idx] >= 0] for idx in (0, 1)])
        rows.append((all_rows[kept], all_rows[kept][..., : world.view.format.value_dim]))
    return share_of_budget(got, q, rows, 0.05)


def check_indexer(world: World, device: torch.device) -> float:
    """indexer_scores, as a share of what summing in another order may change."""
    q = world.query(64, 1)[:, 0]
    weights = torch.rand(q.shape[:2], generator=torch.Generator().manual_seed(10))
    got = indexer_scores(
        world.on(device),
        *(tensor.to(device) for tensor in (world.block_table, world.row_lens, q, weights)),
        backend="triton",
    ).cpu()
    (rows,), begin, worst = world.rows(), 0, 0.0
    for seq_idx, row_len in enumerate(world.row_lens.tolist()):
        keys = rows[begin : begin + row_len, 0].double()
        products = q[seq_idx].double() @ keys.mT
        exact = (weights[seq_idx].double()[:, None] * products.relu()).sum(0)
        budget = (weights[seq_idx].double()[:, None] * (q[seq_idx].double().abs() @ keys.abs().mT)).sum(0) * 2.0**-14
        share = (got[seq_idx, :row_len].double() - exact).abs() / (budget + 1e-9)
        worst = max(worst, float(share.nan_to_num(nan=torch.inf).max()) if row_len else 0.0)
        worst = max(worst, float((got[seq_idx, row_len:] != -torch.inf).any()) * 2)
        begin += row_len
    return worst


def check_blocks(world: World, device: torch.device) -> float:
    """copy, pack, fill and unpack of blocks of two layers, on the device and on the host."""
    ids = torch.arange(1, world.view.num_blocks // 2)
    others = ids + len(ids)
    results = []
    for place, backend in ((torch.device("cpu"), "reference"), (device, "triton")):
        views = [replace(world.view, memory=world.view.memory.to(place, copy=True)) for _ in range(2)]
        table, mine, theirs = layer_table(views), ids.to(place), others.to(place)
        copy_blocks(table, mine, theirs, backend=backend)
        packed = pack_blocks(table, theirs, backend=backend)
        fill_blocks(table, mine, 0, backend=backend)
        unpack_blocks(table, mine, packed.flip(0).contiguous(), backend=backend)
        results.append([packed, *(view.memory for view in views)])
    return sum(different(mine, theirs) for mine, theirs in zip(results[1], results[0], strict=True))


def check_slots(world: World, device: torch.device) -> float:
    """compute_slot_mapping."""
    seq_idx = torch.arange(len(world.row_lens), dtype=torch.int32).repeat(40)
    positions = torch.arange(len(seq_idx))
    wanted, got = (
        compute_slot_mapping(
            world.block_table.to(place),
            positions.to(place),
            seq_idx.to(place),
            world.view.rows_per_block,
            backend=backend,
        )
        for place, backend in ((torch.device("cpu"), "reference"), (device, "triton"))
    )
    return different(got, wanted)


def check_merge(device: torch.device) -> float:
    """merge_partials with empty parts and sinks, as a share of 2^-20."""
    generator = torch.Generator().manual_seed(11)
    out, lse = torch.randn(5, 4, 7, 96, generator=generator), torch.randn(5, 4, 7, generator=generator)
    lse[0] = -torch.inf
    lse[1, :, 2:] = torch.inf
    out[1, :, 2:] = torch.nan
    sinks = torch.tensor([0.0, 1.0, -1.0, 3.0])
    wanted = merge_partials(out, lse, sinks=sinks, backend="reference")
    got = merge_partials(out.to(device), lse.to(device), sinks=sinks.to(device), backend="triton")
    apart = [
        (mine.cpu() - theirs).nan_to_num(
            nan=0.0 if torch.equal(mine.cpu() == -torch.inf, theirs == -torch.inf) else 9.0
        )
        for mine, theirs in zip(got, wanted, strict=True)
    ]
    return max(float(each.abs().max()) for each in apart) * 2.0**18


def checks(row_lens: Sequence[int], rows_per_block: Sequence[int], heads: Sequence[int]) -> Iterator[Check]:
    """Every op x format, on worlds of that size."""
    for name, row_format in FORMATS.items():
        for block_rows in rows_per_block:
            world = partial(World.of, row_format, block_rows, row_lens)
            what = f"{name}, blocks of {block_rows}"
            for op, check in (
                ("write_rows", check_write),
                ("write_layers", check_write_layers),
                ("gather_rows, read_rows", check_gather),
            ):
                yield Check(f"{op}: {what}", partial(_with_world, check, world))
            if row_format.value_dim is not None:
                for num_heads in heads:
                    for queries, splits in ((1, None), (1, 1), (3, 4)):
                        check = partial(check_mla_at, num_heads, queries, splits)
                        label = f"mla_decode, {num_heads} heads, {queries} queries, {splits or 'own'} splits"
                        yield Check(f"{label}: {what}", partial(_with_world, check, world), 1.0)
                    check = partial(check_sparse_at, num_heads)
                    yield Check(
                        f"sparse_mla_decode, {num_heads} heads: {what}", partial(_with_world, check, world), 1.0
                    )
            elif any(part.name == "v" for part in row_format.parts):
                for queries, window, cap in ((1, None, None), (1, 33, None), (2, 33, 20.0), (3, None, None)):
                    check = partial(check_gqa_at, 16, queries, window, cap)
                    label = f"gqa_decode, {queries} queries, window {window}, cap {cap}"
                    yield Check(f"{label}: {what}", partial(_with_world, check, world), 1.0)
            else:
                yield Check(f"indexer_scores: {what}", partial(_with_world, check_indexer, world), 1.0)
    blocks = partial(World.of, dsv4_format(), rows_per_block[0], row_lens)
    yield Check("copy, pack, fill, unpack of blocks: 584", partial(_with_world, check_blocks, blocks))
    yield Check("compute_slot_mapping", partial(_with_world, check_slots, blocks))
    yield Check("merge_partials with sinks and empty parts", check_merge, 1.0)


def check_mla_at(num_heads: int, queries: int, splits: int | None, world: World, device: torch.device) -> float:
    """`check_mla` with the world behind its numbers."""
    return check_mla(world, num_heads, queries, splits, device)


def check_gqa_at(
    num_heads: int, queries: int, window: int | None, cap: float | None, world: World, device: torch.device
) -> float:
    """`check_gqa` with the world behind its numbers."""
    return check_gqa(world, num_heads, queries, window, cap, device)


def check_sparse_at(num_heads: int, world: World, device: torch.device) -> float:
    """`check_sparse` with the world behind its number."""
    return check_sparse(world, num_heads, device)


def _with_world(
    check: Callable[[World, torch.device], float], make: Callable[[], World], device: torch.device
) -> float:
    return check(make(), device)
