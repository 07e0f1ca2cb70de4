"""CachePlan: groups, their places in the arena, and how many frames there are."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.capacity import Capacity, blocks_per_group, capacity, longest_sequence
from kvstore.choose import GROUPINGS
from kvstore.demand import MAX_TOKENS, InFlight
from kvstore.errors import PlanError, plan_int
from kvstore.explain import explain_plan
from kvstore.groups import CacheGroup
from kvstore.memory import parse_memory
from kvstore.placement import LayerSlot, Placement, lower_bound_bytes
from kvstore.proof import prove_placement
from kvstore.score import LAYOUTS, LENGTHS, Considered, check_lengths
from kvstore.specs import LayerSpec, Retention

MIN_FRAMES = 2
"""The null frame and one more: with less nothing can be stored."""

MAX_BLOCK_ID = 2**31 - 1
"""Block tables are int32."""

VERSION = 2
"""Of the JSON form."""


@dataclass(frozen=True, slots=True, repr=False)
class CachePlan:
    """The layout of a cache arena: a value that touches no device.

    A plan is proved (`validate`) whenever one is made or loaded. How the choice was made (the last four fields) is kept
    in JSON, but enters neither equality nor the fingerprint.

    Attributes:
        groups: in the order of the columns of `blocks_needed` and of the tuples of a `Batch`.
        layer_slots: the slot tensors in the order of the arena.
        placements: of every layer with a cache its place in `layer_slots`.
        frame_bytes: bytes of a frame over all slot tensors.
        num_frames: frames in the arena, the null frame counted.
        blocks_per_frame: blocks of each group that fill a frame; 1 unless the layout is "frames".
        layout: "buckets", "bestfit", "overlay" or "frames".
        lower_bound: bytes of the pages of the widest group: the least that a block takes where a block is a frame.
        fingerprint: what two stores compare before they exchange bytes; filled in where it is empty.
        aliases: layers that read another's cache, with the layer that owns it.
        uncached: layers without a cache.
        grouping: how layers were dealt to groups; "given" where the caller did.
        lengths, max_tokens_in_flight: tokens of sequences and of a step, as given to `plan_cache`.
        considered: the layouts that were compared, each at its best.

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
    aliases: Mapping[str, str] = field(default_factory=dict)
    uncached: tuple[str, ...] = ()
    grouping: str = field(default="given", compare=False)
    lengths: tuple[int, ...] = field(default=LENGTHS, compare=False)
    max_tokens_in_flight: int = field(default=0, compare=False)
    considered: tuple[Considered, ...] = field(default=(), compare=False)
    _group_index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("groups", "layer_slots", "blocks_per_frame", "uncached", "lengths", "considered"):
            _set_tuple(self, name)
        for name, kind in (("groups", CacheGroup), ("layer_slots", LayerSlot), ("considered", Considered)):
            if not all(isinstance(item, kind) for item in getattr(self, name)):
                raise PlanError(f"{name}: expected {kind.__name__}s, got {getattr(self, name)!r}")
        for name in ("placements", "aliases"):
            if not isinstance(getattr(self, name), Mapping):
                raise PlanError(f"{name}: expected a mapping, got {getattr(self, name)!r}")
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if not all(isinstance(place, Placement) for place in self.placements.values()):
            raise PlanError("placements: expected Placements")
        index = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        object.__setattr__(self, "_group_index", index)
        if self.fingerprint:
            self.validate()
        else:
            self._prove()
            object.__setattr__(self, "fingerprint", _digest(self._fields()))

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"CachePlan({self.layout}, {len(self.groups)} groups, {len(self._group_index)} layers, "
            f"{self.num_frames} frames of {self.frame_bytes} B, fingerprint {self.fingerprint[:12]})"
        )

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Block ids of each group, those of the null frame counted (id 0 is the null block)."""
        return tuple(self.num_frames * blocks for blocks in self.blocks_per_frame)

    @property
    def block_strides(self) -> tuple[int, ...]:
        """Bytes that one block of each group takes out of the arena."""
        return tuple(self.frame_bytes // blocks for blocks in self.blocks_per_frame)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block where a block is a frame, equal for all groups.

        Raises: PlanError in the layout "frames", where `block_strides` has one number per group.
        """
        if set(self.blocks_per_frame) - {1}:
            raise PlanError("bytes_per_block: blocks of this plan differ by group, see block_strides")
        return self.frame_bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes to allocate: the sum of the slot tensors."""
        return sum(slot.num_bytes for slot in self.layer_slots)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that own a cache, group by group."""
        return tuple(self._group_index)

    def owner(self, layer: str) -> str:
        """The layer whose cache `layer` reads: itself, or another one that it is an alias of.

        Raises: PlanError for a layer the plan does not have.
        """
        try:
            owner = self.aliases.get(layer, layer)
            known = owner in self._group_index
        except TypeError:
            known = False
        if not known:
            raise PlanError(f"layer: expected one of the plan's {len(self._group_index)} layers, got {layer!r}")
        return owner

    def group_index(self, layer: str) -> int:
        """The number of the layer's group. Raises: PlanError for a layer the plan does not have."""
        return self._group_index[self.owner(layer)]

    def spec(self, layer: str) -> LayerSpec:
        """The layer's spec, an alias's that of its owner. Raises: PlanError for a layer the plan does not have."""
        return self.groups[self.group_index(layer)].layers[self.owner(layer)]

    def blocks_needed(
        self,
        lengths: int | Sequence[int],
        *,
        in_flight: int = 0,
        stored: str = "all",
        num_steps: int = 1,
        prefix_caching: bool = True,
    ) -> npt.NDArray[np.int64]:
        """int64 [sequences, groups]: the most blocks that sequences of `lengths` tokens hold; an int is one sequence.

        Columns follow `plan.groups`.

        Args:
            lengths: tokens of each sequence, those in flight included.
            in_flight: tokens of each (at most all it has) that are extended and not yet committed.
            stored: as `KVStore` has it: "all", or "tail" where windows keep the tail of each step in flight only.
            num_steps: steps that the tokens in flight are spread over; counts for tails alone.
            prefix_caching: as `KVStore` has it: a state in flight then takes one more block, since the old one stays.

        Raises: PlanError for a number out of range or another value of `stored`.
        """
        flight = InFlight(in_flight, stored, num_steps, prefix_caching)
        many = isinstance(lengths, Sequence | np.ndarray) and not isinstance(lengths, str | bytes) and np.ndim(lengths)
        given: list[Any] = list(lengths) if many else [lengths]  # type: ignore[arg-type]
        rows = [blocks_per_group(self.groups, plan_int("lengths", length, 0, MAX_TOKENS), flight) for length in given]
        return np.array(rows, dtype=np.int64).reshape(len(given), len(self.groups))

    def capacity(
        self, length: int, in_flight: int = 0, *, stored: str = "all", num_steps: int = 1, prefix_caching: bool = True
    ) -> Capacity:
        """How many sequences of `length` tokens fit at once, while a step has `in_flight` tokens of one of them.

        The other arguments are those of `blocks_needed`.

        Raises: PlanError as `blocks_needed`.
        """
        flight = InFlight(in_flight, stored, num_steps, prefix_caching)
        return capacity(self, plan_int("length", length, 0, MAX_TOKENS), flight)

    def max_length(
        self,
        memory: int | str | None = None,
        *,
        in_flight: int = 0,
        stored: str = "all",
        num_steps: int = 1,
        prefix_caching: bool = True,
    ) -> int | None:
        """The tokens of the longest sequence that fits alone, here or in `memory`; None when any length does.

        0 when not even one token fits. `memory` is bytes, or text such as "80GiB"; the others are as `blocks_needed`.

        Raises: PlanError as `blocks_needed`, and for a memory that is none.
        """
        frames = self.num_frames
        if memory is not None and self.frame_bytes:
            frames = max(parse_memory(memory) // self.frame_bytes, 1)
        return longest_sequence(self, frames, InFlight(in_flight, stored, num_steps, prefix_caching))

    def validate(self) -> None:
        """Proves the plan safe: pages disjoint, inside tensor and frame, aligned; and the fingerprint to be its own.

        Raises: PlanError that names the layer, the numbers and the rule.
        """
        self._prove()
        if self.fingerprint != _digest(self._fields()):
            raise PlanError(f"fingerprint: expected that of the plan's other fields, got {self.fingerprint!r}")

    def _prove(self) -> None:
        plan_int("num_frames", self.num_frames, MIN_FRAMES if self.placements else 1)
        plan_int("frame_bytes", self.frame_bytes, 1 if self.placements else 0)
        plan_int("max_tokens_in_flight", self.max_tokens_in_flight, 0)
        check_lengths(self.lengths)
        for name, known in (("grouping", (*GROUPINGS, "given")), ("layout", LAYOUTS)):
            if getattr(self, name) not in known:
                raise PlanError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        for entry in self.considered:
            if len(entry.bytes_per_sequence) != len(self.lengths):
                raise PlanError(f"considered: expected bytes for {len(self.lengths)} lengths, got {entry}")
        if self.layout != "frames" and set(self.blocks_per_frame) - {1}:
            raise PlanError(
                f"blocks_per_frame: expected 1 for every group in the layout {self.layout!r}, "
                f"got {self.blocks_per_frame}"
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
            plan_int(f"group {group.name!r}: the last block id", blocks - 1, 0, MAX_BLOCK_ID)
        others = (*self.aliases, *self.uncached)
        for layer in others:
            if not isinstance(layer, str) or layer in self._group_index or others.count(layer) > 1:
                raise PlanError(f"aliases, uncached: expected names of layers without a cache, got {layer!r}")
        for layer, owner in self.aliases.items():
            if not isinstance(owner, str) or owner not in self._group_index:
                raise PlanError(f"aliases: layer {layer!r}: expected the name of a layer with a cache, got {owner!r}")
        bound = lower_bound_bytes(self.groups)
        plan_int("lower_bound", self.lower_bound, bound, bound)

    def explain(self) -> str:
        """Readable text: groups, layer slots, layouts compared, bounds, waste, and what fits."""
        return explain_plan(self)

    def to_json(self) -> str:
        """Canonical JSON with a checksum. `from_json` reads it back."""
        document = self._fields() | {
            "fingerprint": self.fingerprint,
            "grouping": self.grouping,
            "lengths": list(self.lengths),
            "max_tokens_in_flight": self.max_tokens_in_flight,
            "considered": [_plain(entry) for entry in self.considered],
        }
        return _canonical(document | {"checksum": _digest(document)})

    @classmethod
    def from_json(cls, text: str) -> "CachePlan":
        """The plan that `to_json` wrote, proved again.

        Raises: PlanError for anything else: no JSON, other fields, other types, an edited plan.
        """
        try:
            document = json.loads(text, object_pairs_hook=_without_repeats)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"plan: expected JSON text, got {error}") from error
        if not isinstance(document, dict):
            raise PlanError(f"plan: expected a JSON object, got {type(document).__name__}")
        if document.get("version") != VERSION:
            raise PlanError(f"version: expected a plan of version {VERSION}, got {document.get('version')!r}")
        try:
            plan = _from_fields(cls, document)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise PlanError(f"plan: expected the fields that to_json wrote: {error!r}") from error
        if plan.to_json() != _canonical(document):
            raise PlanError("plan: expected exactly what to_json wrote, got other fields or values, or its checksum")
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        return CachePlan.from_json, (self.to_json(),)

    def _fields(self) -> dict[str, Any]:
        """What the fingerprint covers, as plain values; lists where order matters, since JSON objects are sorted."""
        specs = list(dict.fromkeys(spec for group in self.groups for spec in group.layers.values()))
        number = {spec: index for index, spec in enumerate(specs)}
        return {
            "version": VERSION,
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
            "aliases": dict(self.aliases),
            "uncached": list(self.uncached),
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
        aliases=document["aliases"],
        uncached=tuple(document["uncached"]),
        grouping=document["grouping"],
        lengths=tuple(document["lengths"]),
        max_tokens_in_flight=document["max_tokens_in_flight"],
        considered=tuple(
            Considered(
                **{
                    **entry,
                    "blocks_per_frame": tuple(entry["blocks_per_frame"]),
                    "bytes_per_sequence": tuple(entry["bytes_per_sequence"]),
                }
            )
            for entry in document["considered"]
        ),
    )


def _set_tuple(plan: CachePlan, name: str) -> None:
    value = getattr(plan, name)
    if not isinstance(value, list | tuple):
        raise PlanError(f"{name}: expected a tuple, got {value!r}")
    object.__setattr__(plan, name, tuple(value))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("an object with one field twice")
    return dict(pairs)


def _plain(record: LayerSlot | Placement | Retention | Considered) -> dict[str, Any]:
    """`dataclasses.asdict` without its deep copies, which are most of the time a large plan takes."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(document).encode()).hexdigest()
