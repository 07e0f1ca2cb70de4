"""The arena: one allocation, carved into one tensor per layer slot, seen through one page view per layer."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from kvstore.plan import CachePlan
from kvstore_kernels import PageView
from kvstore_kernels.formats import ROW_DTYPES

PAD_BYTES = 512  # slack to start at an aligned address, whatever the allocator of the device gives


class Arena:
    """The bytes of a plan on one device.

    Attributes:
        memory: uint8 [plan.arena_bytes], the one allocation, zero at first.
        slot_tensors: one uint8 view of it per layer slot of the plan.
        views: layer name -> PageView.

    Raises: ValueError for a layer whose rows no kernel moves.
    """

    def __init__(self, plan: CachePlan, device: torch.device) -> None:
        for layer in plan.placements:
            for part in plan.spec(layer).format.parts:
                if part.dtype not in ROW_DTYPES:
                    raise ValueError(f"plan: layer {layer!r}: expected rows of {ROW_DTYPES}, got {part.dtype}")
        allocated = torch.zeros(plan.arena_bytes + PAD_BYTES, dtype=torch.uint8, device=device)
        start = -allocated.data_ptr() % PAD_BYTES
        self.memory = allocated[start : start + plan.arena_bytes]
        self.slot_tensors = tuple(
            self.memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes] for slot in plan.layer_slots
        )
        views = {}
        for group, num_blocks in zip(plan.groups, plan.num_blocks, strict=True):
            for layer, spec in group.layers.items():
                placement = plan.placements[layer]
                views[layer] = PageView(
                    memory=self.slot_tensors[placement.layer_slot],
                    offset_bytes=placement.offset_bytes,
                    block_stride_bytes=placement.block_stride_bytes,
                    num_blocks=num_blocks,
                    rows_per_block=spec.rows_per_block,
                    format=spec.format,
                )
        self.views: Mapping[str, PageView] = MappingProxyType(views)
