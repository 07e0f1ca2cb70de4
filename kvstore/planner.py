"""`plan_cache`: from a model and a budget to a CachePlan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.capacity import blocks_per_group
from kvstore.choose import GROUPINGS, Choice, choose
from kvstore.errors import PlanError, plan_int
from kvstore.grouping import STRATEGIES
from kvstore.groups import CachedLayers, CacheGroup, cached_layers, check_groups
from kvstore.memory import format_bytes, parse_memory
from kvstore.models import specs_from_config
from kvstore.placement import PLACERS, Placed, lower_bound_bytes, place_frames
from kvstore.plan import MAX_BLOCK_ID, MIN_FRAMES, CachePlan
from kvstore.score import LAYOUTS as CHOICES
from kvstore.score import LENGTHS, Considered, check_lengths, consider, preferred
from kvstore.specs import Alias, AnySpec, LayerSpec, NoCache
from kvstore_kernels.checks import cdiv

LAYOUTS = ("auto", *CHOICES)


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is made for; all of it checked. `memory` in bytes; exactly one of it and `num_frames` is set."""

    memory: int | None
    num_frames: int | None
    lengths: tuple[int, ...]
    grouping: str
    layout: str
    frame_bytes: int | None
    max_tokens_in_flight: int

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts to compare; a number of frames leaves their size to the blocks, so "frames" is not among them."""
        if self.layout != "auto":
            return (self.layout,)
        return CHOICES[:-1] if self.memory is None else CHOICES


def plan_cache(
    model: Any,
    *,
    memory: int | str | None = None,
    num_frames: int | None = None,
    lengths: Sequence[int] = LENGTHS,
    grouping: str = "auto",
    layout: str = "auto",
    frame_bytes: int | None = None,
    max_tokens_in_flight: int = 8192,
    kv_dtype: str | torch.dtype | None = None,
    state_dtype: str | torch.dtype | None = None,
    block_size: int | None = None,
    indexer_row_bytes: int | None = None,
    num_draft_layers: int = 0,
    tensor_parallel: int = 1,
    pipeline_stages: int = 1,
    pipeline_stage: int | None = None,
    ring_states: bool = False,
) -> CachePlan:
    """Plans the cache arena of a model.

    `model` is a Hugging Face config (a mapping, the path of a JSON file or of a folder with a config.json, the name of
    a bundled model such as "gemma-3-27b", a transformers config object), a mapping {layer name: LayerSpec, Alias or
    NoCache}, or a list of CacheGroup. The arguments from `kv_dtype` on belong to a config, see `specs_from_config`;
    `grouping` to a config or specs.

    Args:
        model: as above.
        memory: bytes for the arena, or text such as "80GiB". Either this or `num_frames` is given.
        num_frames: frames of the arena, the null frame counted.
        lengths: tokens of the sequences that are expected: the plan with the fewest bytes per sequence at these is
            made.
        grouping: how layers are dealt to groups: "auto", "uniform", "equal" or "packed", see `group_layers`.
        layout: "auto", "buckets", "bestfit", "overlay" or "frames". With a layout other than "frames", and a config
            without `block_size`, larger blocks may be taken to make pages equal.
        frame_bytes: size of a frame in the layout "frames"; None: the best.
        max_tokens_in_flight: tokens that one step may write, for the capacity that `explain` shows.
        kv_dtype, state_dtype, block_size, indexer_row_bytes, num_draft_layers, ring_states: as `specs_from_config`.
        tensor_parallel, pipeline_stages, pipeline_stage: as `specs_from_config`.

    A model without any cache gets a plan with no groups, no bytes and the null block only.

    Raises: PlanError for arguments that do not fit together, an unreadable model, and too little memory.
    """
    request = make_request(memory, num_frames, lengths, grouping, layout, frame_bytes, max_tokens_in_flight)
    config_options = {
        "kv_dtype": kv_dtype,
        "state_dtype": state_dtype,
        "block_size": block_size,
        "indexer_row_bytes": indexer_row_bytes,
        "num_draft_layers": num_draft_layers,
        "tensor_parallel": tensor_parallel,
        "pipeline_stages": pipeline_stages,
        "pipeline_stage": pipeline_stage,
        "ring_states": ring_states,
    }
    if isinstance(model, list | tuple):
        _refuse_options(config_options)
        if grouping != "auto":
            raise PlanError(f"grouping: expected 'auto' with groups that are given, got {grouping!r}")
        check_groups(model)
        return plan_groups(tuple(model), request, "given")
    specs = specs_of(model, config_options)
    layers = cached_layers(specs)
    if request.grouping == "auto" and layers.owners and request.frame_bytes is None:
        choice = choose(
            layers.owners,
            request.layouts,
            request.lengths,
            request.memory,
            may_grow_blocks=specs is not model and block_size is None,
        )
        return build_plan(choice, request, "auto", layers)
    groups = STRATEGIES["uniform" if grouping == "auto" else grouping](layers.owners)
    return plan_groups(tuple(groups), request, grouping, layers)


def plan_groups(
    groups: tuple[CacheGroup, ...], request: Request, grouping: str, layers: CachedLayers | None = None
) -> CachePlan:
    """The plan of groups that are settled: only the layout is open."""
    if not any(group.layers for group in groups):
        return empty_plan(groups, request, layers)
    if request.frame_bytes is not None:
        considered = [consider(groups, "frames", request.lengths, request.memory, request.frame_bytes)]
    else:
        considered = [consider(groups, layout, request.lengths, request.memory) for layout in request.layouts]
    return build_plan(Choice(groups, preferred(considered), tuple(considered)), request, grouping, layers)


def build_plan(choice: Choice, request: Request, grouping: str, layers: CachedLayers | None) -> CachePlan:
    """Places the groups of a choice in as many frames as fit. Raises: PlanError when these are too few."""
    groups, taken = choice.groups, choice.taken
    frames = count_frames(groups, taken, request)
    return placed_plan(choice, request, grouping, layers, frames)


def placed_plan(choice: Choice, request: Request, grouping: str, layers: CachedLayers | None, frames: int) -> CachePlan:
    """The same for a settled number of frames."""
    groups, taken = choice.groups, choice.taken
    layer_slots, placements = place(groups, taken, frames)
    return CachePlan(
        groups=groups,
        layer_slots=layer_slots,
        placements=placements,
        frame_bytes=taken.frame_bytes,
        num_frames=frames,
        blocks_per_frame=taken.blocks_per_frame,
        layout=taken.layout,
        lower_bound=lower_bound_bytes(groups),
        aliases=layers.aliases if layers else {},
        uncached=layers.uncached if layers else (),
        grouping=grouping,
        lengths=request.lengths,
        max_tokens_in_flight=request.max_tokens_in_flight,
        considered=choice.considered,
    )


def place(groups: Sequence[CacheGroup], taken: Considered, num_frames: int) -> Placed:
    """The groups in the layout taken."""
    if taken.layout == "frames":
        return place_frames(groups, num_frames, taken.frame_bytes, taken.blocks_per_frame)
    return PLACERS[taken.layout](groups, num_frames)


def empty_plan(groups: tuple[CacheGroup, ...], request: Request, layers: CachedLayers | None) -> CachePlan:
    """A plan without bytes: the null block, which every pool has, is all there is."""
    return CachePlan(
        groups=groups,
        layer_slots=(),
        placements={},
        frame_bytes=0,
        num_frames=1,
        blocks_per_frame=(1,) * len(groups),
        layout=CHOICES[0],
        lower_bound=0,
        aliases=layers.aliases if layers else {},
        uncached=layers.uncached if layers else (),
        grouping=request.grouping,
        lengths=request.lengths,
        max_tokens_in_flight=request.max_tokens_in_flight,
    )


def specs_of(model: Any, config_options: Mapping[str, Any]) -> Mapping[str, AnySpec]:
    """The specs of a model that is a config or already a mapping of specs."""
    if isinstance(model, Mapping) and (
        not model or any(isinstance(spec, LayerSpec | Alias | NoCache) for spec in model.values())
    ):
        _refuse_options(config_options)
        return model
    return specs_from_config(model, **config_options)


CONFIG_DEFAULTS: Mapping[str, Any] = {
    "num_draft_layers": 0,
    "tensor_parallel": 1,
    "pipeline_stages": 1,
    "ring_states": False,
}


def _refuse_options(config_options: Mapping[str, Any]) -> None:
    for name, value in config_options.items():
        default = CONFIG_DEFAULTS.get(name)
        if (type(value), value) != (type(default), default):
            raise PlanError(f"{name}: expected only with a model config, got {value!r}")


def make_request(
    memory: int | str | None,
    num_frames: int | None,
    lengths: Sequence[int],
    grouping: str,
    layout: str,
    frame_bytes: int | None,
    max_tokens_in_flight: int,
) -> Request:
    """The arguments of `plan_cache` that are no model's, checked. Raises: PlanError that names one."""
    if layout not in LAYOUTS:
        raise PlanError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    if grouping not in GROUPINGS:
        raise PlanError(f"grouping: expected one of {', '.join(GROUPINGS)}, got {grouping!r}")
    if (memory is None) == (num_frames is None):
        raise PlanError(f"expected exactly one of memory and num_frames, got {memory!r} and {num_frames!r}")
    if frame_bytes is not None:
        plan_int("frame_bytes", frame_bytes, 1)
        if layout != "frames":
            raise PlanError(f"frame_bytes: expected only with layout 'frames', got {frame_bytes} and {layout!r}")
    if num_frames is not None:
        plan_int("num_frames", num_frames, 1, MAX_BLOCK_ID)
    return Request(
        None if memory is None else parse_memory(memory),
        num_frames,
        check_lengths(lengths),
        grouping,
        layout,
        frame_bytes,
        plan_int("max_tokens_in_flight", max_tokens_in_flight, 0),
    )


def count_frames(groups: Sequence[CacheGroup], taken: Considered, request: Request) -> int:
    """Frames to plan, the null frame counted.

    Raises: PlanError when there is no frame beside it, or the memory does not hold one block of every group.
    """
    if request.memory is None:
        return plan_int("num_frames", request.num_frames, MIN_FRAMES)
    one_token = sum(map(cdiv, blocks_per_group(groups, 1), taken.blocks_per_frame))
    most = (MAX_BLOCK_ID + 1) // max(taken.blocks_per_frame)  # block ids are int32, however large the memory
    needed, frames = max(MIN_FRAMES, 1 + one_token), min(request.memory // taken.frame_bytes, most)
    if frames < needed:
        raise PlanError(
            f"memory: one token needs {one_token} frames of {format_bytes(taken.frame_bytes)} ({taken.layout}), beside "
            f"the null frame: expected at least {format_bytes(needed * taken.frame_bytes)}, "
            f"got {format_bytes(request.memory)}"
        )
    return frames
