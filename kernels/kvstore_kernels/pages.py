"""PageView: where the pages of one layer lie in a slot tensor."""

from dataclasses import dataclass, field
from itertools import count
from weakref import WeakValueDictionary

import torch

from kvstore_kernels.checks import expect_dtype, expect_int, expect_shape
from kvstore_kernels.formats import ALIGNMENT_BYTES, RowFormat

_handles = count(1)
_views: "WeakValueDictionary[int, PageView]" = WeakValueDictionary()


def view_of_handle(handle: int) -> "PageView":
    """The view with that handle. Raises: ValueError when there is none any more."""
    try:
        return _views[handle]
    except KeyError:
        raise ValueError(f"view: expected the handle of a PageView that is alive, got {handle}") from None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PageView:
    """The pages of one layer: `memory` and the four numbers of the address rule.

        address = memory + offset_bytes + block_id * block_stride_bytes + row_in_block * row_pitch

    `memory` is a flat uint8 tensor, usually a slot tensor that layers of other groups share. The stride may be any
    multiple of 16 bytes that is not below the page, also one that is no multiple of a row. `handle` is the number by
    which torch's ops, whose arguments are tensors and numbers, find the view again.

    Raises: ValueError / TypeError when the memory is no 16-byte aligned flat uint8 tensor, a number is negative or no
    multiple of 16, the stride is smaller than a page, a part of the page starts at no multiple of its element, or the
    last page ends behind the memory.
    """

    memory: torch.Tensor  # [num_bytes] uint8
    offset_bytes: int
    block_stride_bytes: int
    num_blocks: int
    rows_per_block: int
    format: RowFormat
    handle: int = field(init=False, repr=False)
    _tensors: dict[str, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        expect_shape("memory", self.memory, (None,))
        expect_dtype("memory", self.memory, torch.uint8)
        if not self.memory.is_contiguous() or (
            self.memory.device.type != "meta" and self.memory.data_ptr() % ALIGNMENT_BYTES
        ):
            raise ValueError(
                f"memory: expected contiguous bytes whose address is a multiple of {ALIGNMENT_BYTES}, "
                f"got stride {self.memory.stride(0)} and address {self.memory.data_ptr():#x}"
            )
        if not isinstance(self.format, RowFormat):
            raise TypeError(f"format: expected a RowFormat, got {type(self.format).__name__}")
        size = max(part.dtype.itemsize for part in self.format.parts)
        if self.memory.storage_offset() % size:  # torch views whole elements of the storage only
            raise ValueError(
                f"memory: expected a slice that starts at a multiple of {size} bytes in its storage, "
                f"got {self.memory.storage_offset()}"
            )
        expect_int("num_blocks", self.num_blocks, 1)
        expect_int("rows_per_block", self.rows_per_block, 1)
        expect_int("offset_bytes", self.offset_bytes, 0)
        expect_int("block_stride_bytes", self.block_stride_bytes, self.page_bytes)
        for name in ("offset_bytes", "block_stride_bytes"):
            if getattr(self, name) % ALIGNMENT_BYTES:
                raise ValueError(f"{name}: expected a multiple of {ALIGNMENT_BYTES}, got {getattr(self, name)}")
        end = self.offset_bytes + (self.num_blocks - 1) * self.block_stride_bytes + self.page_bytes
        if end > self.memory.numel():
            raise ValueError(
                f"num_blocks: the last of {self.num_blocks} pages ends at byte {end}, "
                f"expected it inside the memory of {self.memory.numel()} bytes"
            )
        object.__setattr__(self, "handle", next(_handles))
        _views[self.handle] = self
        object.__setattr__(self, "_tensors", {part.name: self._strided(part.name) for part in self.format.parts})

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """A copy is made anew, for its parts are views of its own memory, and its handle is its own."""
        return PageView, (
            self.memory,
            self.offset_bytes,
            self.block_stride_bytes,
            self.num_blocks,
            self.rows_per_block,
            self.format,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padding of the format included."""
        return self.format.page_bytes(self.rows_per_block)

    @property
    def num_slots(self) -> int:
        """Slots 0 ... num_slots - 1 exist; others are skipped by every kernel."""
        return self.num_blocks * self.rows_per_block

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.memory.device

    def tensor(self, part: str) -> torch.Tensor:
        """Strided view [num_blocks, rows_per_block, num_heads, head_dim] of one part, for outside kernels; no copy.

        A part with a shape is seen as [num_blocks, rows_per_block, *shape].

        Raises: ValueError for a part the format does not have.
        """
        self.format.part(part)
        return self._tensors[part]

    def _strided(self, name: str) -> torch.Tensor:
        part = self.format.part(name)
        size = part.dtype.itemsize
        start_in_page = self.format.area_offset_bytes(part.area, self.rows_per_block) + part.offset_bytes
        if start_in_page % size:
            raise ValueError(
                f"rows_per_block: expected one that puts part {name!r} at a multiple of {size} bytes of a page, "
                f"got {self.rows_per_block}, which puts it at byte {start_in_page}"
            )
        usable = self.memory[: self.memory.numel() // size * size].view(part.dtype)
        row = usable.as_strided(
            (self.num_blocks, self.rows_per_block, part.num_heads, part.head_dim),
            (self.block_stride_bytes // size, self.format.area_pitches[part.area] // size, part.pitch_bytes // size, 1),
            usable.storage_offset() + (self.offset_bytes + start_in_page) // size,
        )
        return row if part.shape is None else row.flatten(2).unflatten(2, part.shape)
