"""CachePlan: groups, their places in the arena, and how many frames there are; `plan_cache` makes one."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
from kvstore.explain import explain_plan
from kvstore.groups import CacheGroup, check_groups, group_layers
from kvstore.memory import format_bytes, parse_memory
from kvstore.models import specs_from_config
from kvstore.placement import (
    LayerSlot,
    Placement,
    lower_bound_bytes,
    place_buckets,
    pool_bytes_per_block,
    prove_placement,
)
from kvstore.specs import LayerSpec, Retention

LAYOUTS = ("auto", "buckets")
MIN_FRAMES = 2
"""The null frame and one more: with less nothing can be stored."""

MAX_BLOCK_ID = 2**31 - 1
"""Block tables are int32."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The layout of a cache arena: a value that touches no device.

    `num_frames` counts the null frame. `placements` maps every layer to its place in `layer_slots`. A plan is proved
    (`validate`) whenever one is made or loaded; an empty `fingerprint` is filled in.

    Raises: PlanError when the plan is not safe or its fingerprint belongs to another plan.
    """

    groups: tuple[CacheGroup, ...]
    layer_slots: tuple[LayerSlot, ...]
    placements: Mapping[str, Placement]
    frame_bytes: int
    num_frames: int
    blocks_per_frame: tuple[int, ...]
    layout: str
    lower_bound: int
    fingerprint: str = ""
    _group_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", MappingProxyType(dict(self.placements)))
        index = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        object.__setattr__(self, "_group_index", index)
        if self.fingerprint:
            self.validate()
        else:
            self._prove()
            object.__setattr__(self, "fingerprint", _fingerprint(self._fields()))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Block ids of each group, its null block (id 0) counted."""
        return tuple(self.num_frames * blocks for blocks in self.blocks_per_frame)

    @property
    def bytes_per_block(self) -> int:
        """What a block takes out of the arena, for every group: a block is a frame in this layout."""
        return self.frame_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes to allocate: the sum of the slot tensors."""
        return sum(slot.num_bytes for slot in self.layer_slots)

    def group_index(self, layer: str) -> int:
        """The number of the layer's group. Raises: PlanError for a layer the plan does not have."""
        try:
            return self._group_index[layer]
        except (KeyError, TypeError):
            raise PlanError(
                f"layer: expected one of the plan's {len(self._group_index)} layers, got {layer!r}"
            ) from None

    def spec(self, layer: str) -> LayerSpec:
        """The layer's spec. Raises: PlanError for a layer the plan does not have."""
        return self.groups[self.group_index(layer)].layers[layer]

    def validate(self) -> None:
        """Proves the plan safe in time independent of the number of blocks; see `prove_placement`.

        Raises: PlanError that names the layer, the numbers and the rule.
        """
        self._prove()
        if self.fingerprint != _fingerprint(self._fields()):
            raise PlanError(f"fingerprint: expected that of the plan's other fields, got {self.fingerprint!r}")

    def _prove(self) -> None:
        plan_int("num_frames", self.num_frames, MIN_FRAMES if self.groups else 1)
        plan_int("frame_bytes", self.frame_bytes, 1 if self.groups else 0)
        if self.layout not in LAYOUTS[1:]:
            raise PlanError(f"layout: expected one of {', '.join(LAYOUTS[1:])}, got {self.layout!r}")
        if set(self.blocks_per_frame) - {1}:
            raise PlanError(
                f"blocks_per_frame: expected 1 for every group in the layout 'buckets', got {self.blocks_per_frame}"
            )
        prove_placement(
            self.groups,
            self.layer_slots,
            self.placements,
            frame_bytes=self.frame_bytes,
            num_frames=self.num_frames,
            blocks_per_frame=self.blocks_per_frame,
        )
        for group, blocks in zip(self.groups, self.num_blocks, strict=True):
            plan_int(f"group {group.name!r}: the last block id", blocks - 1, 1, MAX_BLOCK_ID)
        bound = lower_bound_bytes(self.groups)
        plan_int("lower_bound", self.lower_bound, bound, bound)

    def explain(self) -> str:
        """Readable text: groups, layer slots, bytes per block beside their bounds, waste, and what fits."""
        return explain_plan(self)

    def to_json(self) -> str:
        """Canonical JSON; equal plans give equal text. `from_json` reads it back."""
        return _canonical({**self._fields(), "fingerprint": self.fingerprint})

    @classmethod
    def from_json(cls, text: str) -> "CachePlan":
        """The plan that `to_json` wrote, proved again.

        Raises: PlanError for anything else: no JSON, other fields, other types, an edited plan.
        """
        try:
            document = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"plan: expected JSON text, got {error}") from error
        try:
            plan = _from_fields(cls, document)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise PlanError(f"plan: expected the fields that to_json wrote: {error!r}") from error
        if plan.to_json() != _canonical(document):
            raise PlanError("plan: expected exactly what to_json wrote, got other fields or values beside it")
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        return CachePlan.from_json, (self.to_json(),)

    def _fields(self) -> dict[str, Any]:
        """Everything but the fingerprint as plain values; lists where order matters, since JSON objects are sorted."""
        specs = list(dict.fromkeys(spec for group in self.groups for spec in group.layers.values()))
        number = {spec: index for index, spec in enumerate(specs)}
        return {
            "version": 1,
            "specs": [spec.to_dict() for spec in specs],
            "groups": [
                {
                    "name": group.name,
                    "block_size": group.block_size,
                    "retention": _plain(group.retention),
                    "layers": [[layer, number[spec]] for layer, spec in group.layers.items()],
                }
                for group in self.groups
            ],
            "layer_slots": [_plain(slot) for slot in self.layer_slots],
            "placements": {layer: _plain(placement) for layer, placement in self.placements.items()},
            "frame_bytes": self.frame_bytes,
            "num_frames": self.num_frames,
            "blocks_per_frame": list(self.blocks_per_frame),
            "layout": self.layout,
            "lower_bound": self.lower_bound,
        }


def _from_fields(cls: type[CachePlan], document: dict[str, Any]) -> CachePlan:
    specs = [LayerSpec.from_dict(spec) for spec in document["specs"]]
    groups = tuple(
        CacheGroup(
            group["name"],
            {layer: specs[number] for layer, number in group["layers"]},
            group["block_size"],
            Retention(**group["retention"]),
        )
        for group in document["groups"]
    )
    return cls(
        groups=groups,
        layer_slots=tuple(LayerSlot(**{**slot, "layers": tuple(slot["layers"])}) for slot in document["layer_slots"]),
        placements={layer: Placement(**placement) for layer, placement in document["placements"].items()},
        frame_bytes=document["frame_bytes"],
        num_frames=document["num_frames"],
        blocks_per_frame=tuple(document["blocks_per_frame"]),
        layout=document["layout"],
        lower_bound=document["lower_bound"],
        fingerprint=document["fingerprint"],
    )


def _plain(record: LayerSlot | Placement | Retention) -> dict[str, Any]:
    """`dataclasses.asdict` without its deep copies, which are most of the time a large plan takes."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _fingerprint(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(document).encode()).hexdigest()


def plan_cache(
    model: Any,
    *,
    memory: int | str | None = None,
    num_frames: int | None = None,
    kv_dtype: str | torch.dtype | None = None,
    block_size: int | None = None,
    grouping: str = "auto",
    layout: str = "auto",
    tensor_parallel: int = 1,
) -> CachePlan:
    """Plans the cache arena of a model.

    `model` is a Hugging Face config (a mapping, the path of a JSON file or of a folder with a config.json, a
    transformers config object), a mapping {layer name: LayerSpec}, or a list of CacheGroup. `kv_dtype`, `block_size`
    and `tensor_parallel` belong to a config, see `specs_from_config`; `grouping` to a config or specs. Exactly one of
    `memory` (bytes, or text such as "80GiB") and `num_frames` (the null frame counted) is given.

    A model without any cache gets a plan with no groups, no bytes and the null block only.

    Raises: PlanError for arguments that do not fit together, an unreadable model, and too little memory.
    """
    if layout not in LAYOUTS:
        raise PlanError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    if (memory is None) == (num_frames is None):
        raise PlanError(f"expected exactly one of memory and num_frames, got {memory!r} and {num_frames!r}")
    config_options = {"kv_dtype": kv_dtype, "block_size": block_size, "tensor_parallel": tensor_parallel}
    groups = _groups_of(model, grouping, config_options)
    frame_bytes = pool_bytes_per_block(groups)
    frames = _count_frames(groups, frame_bytes, memory, num_frames)
    layer_slots, placements = place_buckets(groups, frames)
    return CachePlan(
        groups=groups,
        layer_slots=layer_slots,
        placements=placements,
        frame_bytes=frame_bytes,
        num_frames=frames,
        blocks_per_frame=(1,) * len(groups),
        layout="buckets",
        lower_bound=lower_bound_bytes(groups),
    )


def _groups_of(model: Any, grouping: str, config_options: dict[str, Any]) -> tuple[CacheGroup, ...]:
    are_specs = isinstance(model, Mapping) and (
        not model or any(isinstance(spec, LayerSpec) for spec in model.values())
    )
    if not are_specs and not isinstance(model, list | tuple):
        return tuple(group_layers(specs_from_config(model, **config_options), grouping))
    for name, default in (("kv_dtype", None), ("block_size", None), ("tensor_parallel", 1)):
        if config_options[name] != default:
            raise PlanError(f"{name}: expected only with a model config, got {config_options[name]!r}")
    if are_specs:
        return tuple(group_layers(model, grouping))
    if grouping != "auto":
        raise PlanError(f"grouping: expected 'auto' with groups that are given, got {grouping!r}")
    check_groups(model)
    return tuple(model)


def _count_frames(
    groups: tuple[CacheGroup, ...], frame_bytes: int, memory: int | str | None, num_frames: int | None
) -> int:
    """Frames to plan, the null frame counted. Raises: PlanError when they are fewer than two."""
    if memory is None:
        frames = plan_int("num_frames", num_frames, MIN_FRAMES if groups else 1)
        return frames if groups else 1
    budget = parse_memory(memory)
    if not groups:
        return 1
    if budget < MIN_FRAMES * frame_bytes:
        raise PlanError(
            f"memory: one block needs {format_bytes(frame_bytes)}, and {MIN_FRAMES} frames (the null frame and one to "
            f"use) are the minimum: expected at least {format_bytes(MIN_FRAMES * frame_bytes)}, "
            f"got {format_bytes(budget)}"
        )
    return budget // frame_bytes
