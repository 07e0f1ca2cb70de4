"""The proof that a placement is safe, whatever layout made it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvstore.errors import PlanError, plan_int
from kvstore.groups import CacheGroup, check_groups
from kvstore.placement import LayerSlot, Placement
from kvstore_kernels.formats import ALIGNMENT_BYTES


def prove_placement(
    groups: Sequence[CacheGroup],
    layer_slots: Sequence[LayerSlot],
    placements: Mapping[str, Placement],
    *,
    frame_bytes: int,
    num_frames: int,
    blocks_per_frame: Sequence[int],
) -> None:
    """Proves for every layout that groups cannot touch each other's bytes, nor blocks and layers of a group their own.

    Each layer lies in one slot tensor, a layer slot holds no bytes of two live pages, and slot tensors are disjoint.
    Only corners are looked at: addresses are linear in the block id, so what holds at the ends holds between them.

    Raises: PlanError that names the layer or the layer slot, the numbers and the rule.
    """
    check_groups(groups)
    if len(blocks_per_frame) != len(groups):
        raise PlanError(f"blocks_per_frame: expected {len(groups)} entries, one per group, got {len(blocks_per_frame)}")
    _prove_slot_tensors(layer_slots, frame_bytes, num_frames)
    _prove_listing(groups, layer_slots, placements)
    for group, blocks in zip(groups, blocks_per_frame, strict=True):
        plan_int(f"group {group.name!r}: blocks_per_frame", blocks, 1)
        in_slot: dict[int, list[str]] = {}
        for layer in group.layers:
            in_slot.setdefault(placements[layer].layer_slot, []).append(layer)
            _prove_layer(group, layer, layer_slots, placements[layer], num_frames, blocks)
        for layers in in_slot.values():
            _prove_neighbours(group, layers, placements)


def _prove_slot_tensors(layer_slots: Sequence[LayerSlot], frame_bytes: int, num_frames: int) -> None:
    """Slot tensors hold one page per frame, are aligned and disjoint, and fill `num_frames * frame_bytes` bytes."""
    for slot in layer_slots:
        name = f"layer slot {slot.page_bytes} B/{slot.index}"
        _prove_aligned(name, offset_bytes=slot.offset_bytes, num_bytes=slot.num_bytes)
        if slot.num_bytes != num_frames * slot.page_bytes:
            raise PlanError(
                f"{name}: num_bytes: expected {num_frames} frames x {slot.page_bytes} B = "
                f"{num_frames * slot.page_bytes}, got {slot.num_bytes}"
            )
    in_order = sorted(layer_slots, key=lambda slot: slot.offset_bytes)
    for before, after in pairwise(in_order):
        if before.end_bytes > after.offset_bytes:
            raise PlanError(
                f"layer slot {after.page_bytes} B/{after.index} begins at byte {after.offset_bytes}, inside the one "
                f"before it, {before.page_bytes} B/{before.index}, which ends at {before.end_bytes}"
            )
    arena_bytes = sum(slot.num_bytes for slot in layer_slots)
    if in_order and in_order[-1].end_bytes > arena_bytes:
        raise PlanError(f"layer slots: expected to end inside the {arena_bytes} B arena, got {in_order[-1].end_bytes}")
    if arena_bytes != num_frames * frame_bytes:
        raise PlanError(
            f"arena_bytes: expected num_frames x frame_bytes = {num_frames} x {frame_bytes} = "
            f"{num_frames * frame_bytes}, got {arena_bytes}"
        )


def _prove_listing(
    groups: Sequence[CacheGroup], layer_slots: Sequence[LayerSlot], placements: Mapping[str, Placement]
) -> None:
    """Every layer of the groups is placed exactly once, in the layer slot that lists it, and nothing else is."""
    listed = [(layer, number) for number, slot in enumerate(layer_slots) for layer in slot.layers]
    if len(dict(listed)) != len(listed):
        raise PlanError("layer slots: expected every layer once, got one twice")
    placed = {layer: placement.layer_slot for layer, placement in placements.items()}
    if dict(listed) != placed:
        wrong = sorted(layer for layer in dict(listed).keys() | placed if dict(listed).get(layer) != placed.get(layer))
        raise PlanError(f"placements: expected the layer slots to list the same layers, they differ in {wrong}")
    layers = {layer for group in groups for layer in group.layers}
    if layers != placed.keys():
        raise PlanError(
            f"placements: expected every layer of the groups and no other; missing {sorted(layers - placed.keys())}, "
            f"unknown {sorted(placed.keys() - layers)}"
        )


def _prove_layer(
    group: CacheGroup,
    layer: str,
    layer_slots: Sequence[LayerSlot],
    placement: Placement,
    num_frames: int,
    blocks_per_frame: int,
) -> None:
    """Block b of the layer lies inside frame `b // blocks_per_frame` of its slot tensor, aligned."""
    stride, page_bytes = placement.block_stride_bytes, group.layers[layer].page_bytes
    _prove_aligned(f"layer {layer!r}", offset_bytes=placement.offset_bytes, block_stride_bytes=stride)
    multiple = group.layers[layer].stride_multiple
    if stride % multiple:
        raise PlanError(f"layer {layer!r}: block_stride_bytes: expected a multiple of {multiple}, got {stride}")
    frame_bytes = layer_slots[placement.layer_slot].page_bytes
    for frame in (0, num_frames - 1):
        for in_frame in (0, blocks_per_frame - 1):
            block = frame * blocks_per_frame + in_frame
            start = placement.offset_bytes + block * stride
            if start < frame * frame_bytes or start + page_bytes > (frame + 1) * frame_bytes:
                raise PlanError(
                    f"layer {layer!r}: block {block} takes bytes {start} ... {start + page_bytes} of its slot tensor, "
                    f"expected inside frame {frame}, {frame * frame_bytes} ... {(frame + 1) * frame_bytes}"
                )


def _prove_neighbours(group: CacheGroup, layers: Sequence[str], placements: Mapping[str, Placement]) -> None:
    """Pages of one group in one slot tensor are disjoint: side by side within a stride that all of them share."""
    in_order = sorted(layers, key=lambda layer: placements[layer].offset_bytes)
    first, last = placements[in_order[0]], placements[in_order[-1]]
    for layer, after in pairwise(in_order):
        end = placements[layer].offset_bytes + group.layers[layer].page_bytes
        if end > placements[after].offset_bytes or placements[after].block_stride_bytes != first.block_stride_bytes:
            raise PlanError(
                f"layer {after!r}: expected behind the page of {layer!r}, which ends at byte {end}, and its stride "
                f"{first.block_stride_bytes}; got {placements[after]}"
            )
    span = last.offset_bytes + group.layers[in_order[-1]].page_bytes - first.offset_bytes
    if span > first.block_stride_bytes:
        raise PlanError(
            f"layer {in_order[0]!r}: block_stride_bytes: expected at least the {span} B that one block of group "
            f"{group.name!r} takes in the slot tensor, got {first.block_stride_bytes}"
        )


def _prove_aligned(owner: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if number % ALIGNMENT_BYTES:
            raise PlanError(f"{owner}: {name}: expected a multiple of {ALIGNMENT_BYTES}, got {number}")
