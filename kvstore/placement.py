"""From groups to bytes: the layouts. All are pure functions of groups, and all fill in one address rule.

    buckets   one slot tensor per page size and layer slot: page n of a size, of every group, in slot n of that size
    bestfit   one slot tensor per rank: the largest pages of all groups share slot 0, the next ones slot 1, ...
    overlay   one slot tensor: the pages of a group dense from byte 0 of a block, a block as wide as the widest group
    frames    one slot tensor, cut into frames; each group puts as many blocks into a frame as fit

    groups A: a0 a1 (32 KiB) a2 (8 KiB)   buckets: 32/0 | a0 b0 |  bestfit: 32 | a0 b0 |  overlay: | a0 a1 a2 |
           B: b0 (32 KiB) b1 (16 KiB)              32/1 | a1    |           32 | a1 b1 |           | b0 b1    |
                                                    8/0 | a2    |            8 | a2    |
                                                   16/0 | b1    |

In each of them a block of memory (a frame) belongs to one group at a time, so layers of several groups may lie on the
same bytes. Within a group, the pages of a block are disjoint. `kvstore.proof` proves both of every plan.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from kvstore.errors import PlanError, plan_int
from kvstore.groups import CacheGroup, check_groups
from kvstore.specs import LayerSpec
from kvstore_kernels.checks import round_up
from kvstore_kernels.formats import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class LayerSlot:
    """One layer slot and its slot tensor: bytes `offset_bytes` ... `offset_bytes + num_bytes` of the arena.

    The slot tensor holds `page_bytes` for each frame. `index` counts the layer slots of one page size. In the layouts
    "buckets" and "bestfit" `layers` are at most one of each group; in "overlay" and "frames" the one slot has all.

    Raises: PlanError for a number out of range, and layers that are no list.
    """

    page_bytes: int
    index: int
    layers: tuple[str, ...]
    offset_bytes: int
    num_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.layers, list | tuple):
            raise PlanError(f"LayerSlot: layers: expected a tuple, got {self.layers!r}")
        object.__setattr__(self, "layers", tuple(self.layers))
        for name, minimum in (("page_bytes", 1), ("index", 0), ("offset_bytes", 0), ("num_bytes", 1)):
            plan_int(f"LayerSlot: {name}", getattr(self, name), minimum)

    @property
    def end_bytes(self) -> int:
        """First byte of the arena behind the slot tensor."""
        return self.offset_bytes + self.num_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a layer's pages lie: block b begins at `offset_bytes + b * block_stride_bytes` of its slot tensor.

    Attributes:
        layer_slot: number of the layer slot in the plan's `layer_slots`.
        offset_bytes: from the start of the slot tensor to the page of block 0.
        block_stride_bytes: from one block's page to that of the next.

    Raises: PlanError for a number that is negative, or a stride of 0.
    """

    layer_slot: int
    offset_bytes: int
    block_stride_bytes: int

    def __post_init__(self) -> None:
        for name, minimum in (("layer_slot", 0), ("offset_bytes", 0), ("block_stride_bytes", 1)):
            plan_int(f"Placement: {name}", getattr(self, name), minimum)


Placed = tuple[tuple[LayerSlot, ...], dict[str, Placement]]
"""What a layout makes: the layer slots in the order of the arena, and the place of every layer."""

Buckets = dict[int, list[list[str]]]
"""Bytes per block -> layer slots of that size -> their layers."""


def bucket_layers_by_page_size(groups: Sequence[CacheGroup]) -> Buckets:
    """`{page_bytes: [layers of slot 0, layers of slot 1, ...]}`, the rule of vLLM pull request 44454.

    Within a group, the n-th layer of a page size goes to slot n of that size's bucket. Sizes, slots and layers keep
    the order in which they come. Buckets may differ in their number of slots.

    Raises: PlanError when a layer is in two groups.
    """
    return _bucket(groups, lambda spec: spec.page_bytes)


def pool_bytes_per_block(groups: Sequence[CacheGroup]) -> int:
    """Bytes of one block by the rule of vLLM pull request 44454: page size x number of layer slots, summed.

    Raises: PlanError when a layer is in two groups.
    """
    return sum(page_bytes * len(slots) for page_bytes, slots in bucket_layers_by_page_size(groups).items())


def bytes_before_buckets(groups: Sequence[CacheGroup]) -> int:
    """Bytes per block before vLLM pull request 44454: each page size has as many layer slots as the longest bucket."""
    buckets = bucket_layers_by_page_size(groups)
    return sum(buckets) * max(map(len, buckets.values()), default=0)


def slots_by_stride(groups: Sequence[CacheGroup]) -> Buckets:
    """`bucket_layers_by_page_size` with every page rounded up to the stride that its readers demand."""
    return _bucket(groups, lambda spec: spec.dense_stride_bytes)


def _bucket(groups: Sequence[CacheGroup], size_of: Callable[[LayerSpec], int]) -> Buckets:
    check_groups(groups)
    buckets: Buckets = {}
    for group in groups:
        next_slot: dict[int, int] = {}
        for layer, spec in group.layers.items():
            size = size_of(spec)
            slots = buckets.setdefault(size, [])
            index = next_slot.get(size, 0)
            if index == len(slots):
                slots.append([])
            slots[index].append(layer)
            next_slot[size] = index + 1
    return buckets


def slots_by_rank(groups: Sequence[CacheGroup]) -> list[tuple[int, list[str]]]:
    """(bytes, layers) of each rank: the n-th largest page of every group, as wide as the largest of them.

    Rounded up to the stride demands of the layers in it. Raises: PlanError when a layer is in two groups.
    """
    check_groups(groups)
    specs = {layer: spec for group in groups for layer, spec in group.layers.items()}
    ordered = [sorted(group.layers, key=lambda layer: rank_order(specs[layer])) for group in groups]
    ranks = []
    for rank in range(max(map(len, ordered), default=0)):
        layers = [group[rank] for group in ordered if rank < len(group)]
        multiple = lcm(*(specs[layer].stride_multiple for layer in layers))
        ranks.append((round_up(max(specs[layer].page_bytes for layer in layers), multiple), layers))
    return ranks


def rank_order(spec: LayerSpec) -> tuple[int, int]:
    """The key by which a group's layers are ranked: larger pages first, among equals those with the larger demand."""
    return -spec.page_bytes, -spec.stride_multiple


def stride_multiple(groups: Iterable[CacheGroup]) -> int:
    """What a block stride that all groups share must be a multiple of: the lcm of all demands, at least 16 B."""
    return lcm(ALIGNMENT_BYTES, *(group.stride_multiple for group in groups))


def overlay_bytes(groups: Sequence[CacheGroup]) -> int:
    """Bytes of one block in the layout "overlay": the widest group, rounded up to the stride demands."""
    return round_up(lower_bound_bytes(groups), stride_multiple(groups))


def lower_bound_bytes(groups: Iterable[CacheGroup]) -> int:
    """The widest group's pages: no layout of these groups takes less per block while a block is a frame."""
    return max((group.block_bytes for group in groups), default=0)


def place_buckets(groups: Sequence[CacheGroup], num_frames: int) -> Placed:
    """One slot tensor of `num_frames` pages per layer slot, behind one another in the arena; pages dense in each.

    Raises: PlanError when a layer is in two groups or `num_frames` is below 1.
    """
    slots = [(size, layers) for size, slots in slots_by_stride(groups).items() for layers in slots]
    return _place_slots(slots, num_frames)


def place_bestfit(groups: Sequence[CacheGroup], num_frames: int) -> Placed:
    """One slot tensor per rank; a page narrower than its slot leaves the rest of it unused.

    Raises: PlanError when a layer is in two groups or `num_frames` is below 1.
    """
    return _place_slots(slots_by_rank(groups), num_frames)


def place_overlay(groups: Sequence[CacheGroup], num_frames: int) -> Placed:
    """One slot tensor of blocks as wide as the widest group; each group's pages dense from byte 0 of a block.

    Raises: PlanError when a layer is in two groups or `num_frames` is below 1.
    """
    return place_frames(groups, num_frames, overlay_bytes(groups), (1,) * len(groups))


def place_frames(
    groups: Sequence[CacheGroup], num_frames: int, frame_bytes: int, blocks_per_frame: Sequence[int]
) -> Placed:
    """One slot tensor of frames; a group cuts a frame into `blocks_per_frame` equal blocks, its pages dense in each.

    Raises: PlanError when a layer is in two groups, a frame is no whole number of a group's blocks, a block is
        narrower than its pages, or `num_frames` is below 1.
    """
    check_groups(groups)
    plan_int("num_frames", num_frames, 1)
    placements: dict[str, Placement] = {}
    for group, blocks in zip(groups, blocks_per_frame, strict=True):
        stride, rest = divmod(frame_bytes, blocks)
        if rest or stride < group.block_bytes:
            raise PlanError(
                f"group {group.name!r}: blocks_per_frame: expected a divisor of the frame of {frame_bytes} B that "
                f"leaves at least {group.block_bytes} B a block, got {blocks}"
            )
        offset_bytes = 0
        for layer in _side_by_side(group):
            placements[layer] = Placement(0, offset_bytes, stride)
            offset_bytes += group.layers[layer].page_bytes
    if not placements:
        return (), {}
    return (LayerSlot(frame_bytes, 0, tuple(placements), 0, num_frames * frame_bytes),), placements


def _side_by_side(group: CacheGroup) -> Iterable[str]:
    """The group's layers with those of one spec next to each other: such a run lies at equal distances."""
    runs: dict[LayerSpec, list[str]] = {}
    for layer, spec in group.layers.items():
        runs.setdefault(spec, []).append(layer)
    return (layer for run in runs.values() for layer in run)


def _place_slots(slots: Sequence[tuple[int, Sequence[str]]], num_frames: int) -> Placed:
    plan_int("num_frames", num_frames, 1)
    layer_slots: list[LayerSlot] = []
    placements: dict[str, Placement] = {}
    offset_bytes, of_size = 0, dict.fromkeys((size for size, _ in slots), 0)
    for size, layers in slots:
        for layer in layers:
            placements[layer] = Placement(len(layer_slots), 0, size)
        layer_slots.append(LayerSlot(size, of_size[size], tuple(layers), offset_bytes, num_frames * size))
        of_size[size] += 1
        offset_bytes += num_frames * size
    return tuple(layer_slots), placements


PLACERS: Mapping[str, Callable[[Sequence[CacheGroup], int], Placed]] = {
    "buckets": place_buckets,
    "bestfit": place_bestfit,
    "overlay": place_overlay,
}
"""The layouts in which a block is a frame, in the order in which `auto` prefers them."""
