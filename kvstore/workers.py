"""Plans for several workers that share a model: the same groups and the same number of blocks on every rank.

A block id then means the same on all of them, so that one rank's books serve all. A rank that owns no layer of a
group keeps the group empty: it counts blocks and stores nothing.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import gcd, lcm
from typing import Any

from kvstore.choose import Choice, choose
from kvstore.errors import PlanError, plan_int
from kvstore.frames import choose_frame
from kvstore.grouping import STRATEGIES
from kvstore.groups import CachedLayers, CacheGroup, cached_layers
from kvstore.plan import CachePlan
from kvstore.planner import Request, count_frames, make_request, placed_plan
from kvstore.score import LAYOUTS as CHOICES
from kvstore.score import LENGTHS, Considered, consider, figures, parts_of, preferred, weights
from kvstore.spec_json import specs_from_dicts, specs_to_dicts
from kvstore.specs import Alias, AnySpec, LayerSpec
from kvstore_kernels.checks import round_up


def plan_workers(
    models: Sequence[Mapping[str, AnySpec]],
    *,
    memory: int | str | Sequence[int | str] | None = None,
    num_frames: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    grouping: str = "auto",
    layout: str = "auto",
    max_tokens_in_flight: int = 8192,
) -> list[CachePlan]:
    """One plan per rank, made together. `models[rank]` are the specs of the layers that rank owns.

    From a config, for two pipeline stages: `[specs_from_config(config, pipeline_stages=2, pipeline_stage=i) for i in
    (0, 1)]`. Tensor-parallel ranks of a stage have equal specs. All ranks get the same groups (empty where a rank owns
    no layer of one), blocks per frame and number of frames, so that a block id means the same on each of them.

    `memory` is the budget of every rank, or one per rank; all ranks get the number of frames that fits on each of
    them. The other arguments are those of `plan_cache`.

    Raises: PlanError that names the ranks: a layer with two different specs, an alias whose owner lies on another
        rank, too little memory.
    """
    if not isinstance(models, list | tuple) or not models:
        raise PlanError(f"models: expected a list with the specs of each rank, got {models!r}")
    budgets: list[Any] = list(memory) if isinstance(memory, list | tuple) else [memory] * len(models)
    if len(budgets) != len(models):
        raise PlanError(f"memory: expected one budget or one per rank, {len(models)} in all, got {len(budgets)}")
    requests = [
        make_request(budget, num_frames, lengths, grouping, layout, None, max_tokens_in_flight) for budget in budgets
    ]
    owned = [_layers_of_rank(rank, models) for rank in range(len(models))]
    _check_alike(models)
    merged = {layer: spec for layers in owned for layer, spec in layers.owners.items()}
    if not merged:
        groups: list[tuple[CacheGroup, ...]] = [()] * len(models)
        taken = [Considered(CHOICES[0], 0, 0, (), (0,) * len(requests[0].lengths), 0.0)] * len(models)
        frames = 1
    else:
        whole = _choice(merged, requests, max(_bytes(layers.owners) for layers in owned))
        groups = [tuple(_projected(group, layers.owners) for group in whole.groups) for layers in owned]
        taken = _figures_of_ranks(groups, whole.taken, requests)
        frames = min(
            _frames_of_rank(rank, *of_rank)
            for rank, of_rank in enumerate(zip(groups, taken, requests, strict=True))
            if of_rank[1].frame_bytes
        )
    return [
        placed_plan(Choice(of_rank, entry, (entry,) if merged else ()), request, grouping, layers, frames)
        for of_rank, entry, request, layers in zip(groups, taken, requests, owned, strict=True)
    ]


def plan_distributed(
    specs: Mapping[str, AnySpec], *, memory: int | str, process_group: Any = None, **options: Any
) -> CachePlan:
    """This rank's plan, made together with all ranks of a `torch.distributed` group (default: the world).

    Every rank calls it with the specs of its own layers, its own memory and equal `options`, those of `plan_workers`.

    Raises: PlanError on all ranks when the specs or options of one contradict another's or cannot be.
    """
    import torch.distributed as distributed  # only here: it is not part of every build of torch

    rank, size = distributed.get_rank(process_group), distributed.get_world_size(process_group)
    try:
        own: Any = (specs_to_dicts(specs), memory, options)
        pickle.dumps(own)
    except Exception as error:  # told to all, whatever it is, so that none of them waits for ever
        own = str(error) if isinstance(error, PlanError) else repr(error)
    gathered: list[Any] = [None] * size
    distributed.all_gather_object(gathered, own, group=process_group)
    for other, entry in enumerate(gathered):
        if isinstance(entry, str):
            raise PlanError(f"rank {other}: {entry}")
        if entry[2] != gathered[0][2]:
            raise PlanError(f"options: expected equal ones on every rank, got {gathered[0][2]} and {entry[2]}")
    models = [specs_from_dicts(entry[0]) for entry in gathered]
    return plan_workers(models, memory=[entry[1] for entry in gathered], **options)[rank]


def count_replicas(specs: Mapping[str, AnySpec], tensor_parallel: int) -> int:
    """Ranks that hold equal bytes of every layer: the gcd over the layers of ranks per different shard.

    A layer with `num_shards` None has a shard of its own on every rank. Raises: PlanError for a degree below 1.
    """
    plan_int("tensor_parallel", tensor_parallel, 1)
    owners = cached_layers(specs).owners.values()
    return gcd(*(max(tensor_parallel // (spec.num_shards or tensor_parallel), 1) for spec in owners)) or 1


def _layers_of_rank(rank: int, models: Sequence[Mapping[str, AnySpec]]) -> CachedLayers:
    try:
        return cached_layers(models[rank])
    except PlanError as error:
        specs = models[rank]
        owners = {spec.of for spec in specs.values() if isinstance(spec, Alias) and spec.of not in specs}
        where = {owner: other for other, layers in enumerate(models) for owner in owners if owner in layers}
        hint = "".join(f"; layer {owner!r} lies on rank {other}" for owner, other in where.items())
        raise PlanError(f"rank {rank}: {error}{hint}") from None


def _check_alike(ranks: Sequence[Mapping[str, AnySpec]]) -> None:
    """Raises PlanError when one layer has two specs, names both ranks and what differs."""
    first: dict[str, tuple[int, AnySpec]] = {}
    for rank, specs in enumerate(ranks):
        for layer, spec in specs.items():
            before, known = first.setdefault(layer, (rank, spec))
            if known != spec:
                raise PlanError(
                    f"layer {layer!r}: expected one spec, rank {before} and rank {rank} differ in "
                    f"{_differences(known, spec)}"
                )


def _differences(one: AnySpec, other: AnySpec) -> str:
    """The fields in which two specs differ: "window 128 and 64"."""
    if not isinstance(one, LayerSpec) or not isinstance(other, LayerSpec):
        return f"kind: {one!r} and {other!r}" if type(one) is type(other) else f"kind {one.kind!r} and {other.kind!r}"
    pairs = [(item.name, getattr(one, item.name), getattr(other, item.name)) for item in fields(LayerSpec)]
    return ", ".join(f"{name} {mine!r} and {theirs!r}" for name, mine, theirs in pairs if mine != theirs)


def _choice(merged: Mapping[str, LayerSpec], requests: Sequence[Request], most_bytes: int) -> Choice:
    """Groups and layout for all layers together, as if one rank had as much memory more as it has layers more."""
    request = requests[0]
    memory = None
    if request.memory is not None:
        memory = min(each.memory or 0 for each in requests) * _bytes(merged) // max(most_bytes, 1)
    if request.grouping == "auto":
        return choose(merged, request.layouts, request.lengths, memory)
    groups = tuple(STRATEGIES[request.grouping](merged))
    considered = tuple(consider(groups, layout, request.lengths, memory) for layout in request.layouts)
    return Choice(groups, preferred(considered), considered)


def _bytes(specs: Mapping[str, LayerSpec]) -> int:
    return sum(spec.page_bytes for spec in specs.values())


def _projected(group: CacheGroup, owned: Mapping[str, LayerSpec]) -> CacheGroup:
    layers = {layer: spec for layer, spec in group.layers.items() if layer in owned}
    return CacheGroup(group.name, layers, group.block_size, group.retention)


def _figures_of_ranks(
    ranks: Sequence[tuple[CacheGroup, ...]], taken: Considered, requests: Sequence[Request]
) -> list[Considered]:
    """The layout on every rank; in frames with the same blocks per frame, and frames as large as the rank needs."""
    blocks = taken.blocks_per_frame
    if taken.layout == "frames":
        columns = list(zip(*ranks, strict=True))
        widths = [max(group.block_bytes for group in groups) for groups in columns]
        multiples = [lcm(*(group.stride_multiple for group in groups)) for groups in columns]
        widest = max(ranks, key=lambda groups: sum(group.block_bytes for group in groups))
        memories = [request.memory for request in requests if request.memory is not None]
        least = min(memories) if memories else None
        blocks = choose_frame(widths, multiples, weights(parts_of(widest, requests[0].lengths)), least).blocks_per_frame
    entries = []
    for groups, request in zip(ranks, requests, strict=True):
        if taken.layout == "frames":
            step = lcm(*(count * group.stride_multiple for count, group in zip(blocks, groups, strict=True)))
            most = max(count * group.block_bytes for count, group in zip(blocks, groups, strict=True))
            frame_bytes = round_up(most, step)
        else:
            frame_bytes = consider(groups, taken.layout, request.lengths, None).frame_bytes
        parts = parts_of(groups, request.lengths)
        entries.append(figures(parts, taken.layout, frame_bytes, blocks, request.memory))
    return entries


def _frames_of_rank(rank: int, groups: Sequence[CacheGroup], taken: Considered, request: Request) -> int:
    """Frames that fit on a rank that owns layers."""
    try:
        return count_frames(groups, taken, request)
    except PlanError as error:
        raise PlanError(f"rank {rank}: {error}") from None
