"""LayerSpec: what one layer caches, and the page bytes and the retention that follow from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from kvstore.errors import PlanError, plan_int
from kvstore_kernels.checks import round_up
from kvstore_kernels.formats import ALIGNMENT_BYTES, RowFormat

KINDS = (
    "full",
    "sliding_window",
    "chunked",
    "latent",
    "latent_window",
    "hidden_state",
    "ring",
    "state",
)
"""full: K and V of every token. sliding_window: of the last `window` tokens. chunked: of the current `chunk`.
latent, latent_window: one row without a V of its own (MLA, compressed MLA, indexer). hidden_state: kept for a draft
model, as full. ring: the last `block_size` rows of a sequence, in one block. state: recurrent tensors, one row a block.
"""

RETENTIONS = ("full", "sliding_window", "chunked", "ring", "state")

MAX_WINDOW = 2**31 - 1
"""Kernels take a window, and positions in a block, as int32."""

MAX_PAGE_BYTES = 2**40
"""Beyond any device; keeps sums of pages far inside int64."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which rows the layers of a group must keep.

    "full" all of them, "sliding_window" those in reach of `window`, "chunked" those of the current `chunk`, "ring" one
    block for ever, "state" at most `blocks` blocks: the running state, and those for speculation and checkpoints.

    Raises: PlanError for another kind, or a number that does not belong to the kind.
    """

    kind: str
    window: int | None = None
    chunk: int | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in RETENTIONS:
            raise PlanError(f"Retention: kind: expected one of {', '.join(RETENTIONS)}, got {self.kind!r}")
        owner = {"window": "sliding_window", "chunk": "chunked", "blocks": "state"}
        for name, kind in owner.items():
            value = getattr(self, name)
            if self.kind == kind:
                plan_int(f"Retention {kind!r}: {name}", value, 1, MAX_WINDOW)
            elif value is not None:
                raise PlanError(f"Retention {self.kind!r}: {name}: expected None, got {value!r}")

    @property
    def is_fixed(self) -> bool:
        """Whether a sequence holds the same few blocks at any length (ring and state)."""
        return self.kind in ("ring", "state")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer.

    Kinds: "full", "sliding_window" and "chunked" are K and V; "latent" and "latent_window" one row without a V of its
    own (MLA, compressed MLA, indexer keys); "hidden_state" is kept for a draft model, as "full"; "ring" the last
    `block_size` rows of a sequence in one block; "state" recurrent tensors, one row a block.

    Attributes:
        kind: one of those.
        block_size: tokens of a block; of a ring its capacity, of a state the distance of its checkpoints.
        format: the bytes of a row.
        tokens_per_row: tokens that share a row, a divisor of `block_size`; 1 but for compressed latents.
        window: tokens that a query sees, its own included. A full layer may have one too, which then bounds what is
            read, not what is kept.
        padded_page_bytes: bytes of a page, where it shall be wider than its rows need; a multiple of 16.
        chunk: tokens of a chunk; a query sees those of its own chunk.
        block_stride_multiple: bytes of which outside readers demand the distance between blocks to be a multiple.
        speculative_blocks, checkpoint_blocks: blocks that a state keeps beside the running one.
        num_shards: how many different tensor-parallel shards of this cache there are, beyond which ranks hold copies;
            None: one per rank.
        page_bytes: bytes of one page, a multiple of 16; follows from the others.

    Raises: PlanError for an unknown kind, a count below 1, a block that is no whole number of rows, a number that does
    not belong to the kind, and a padded page or a multiple that is too small or no multiple of 16 bytes.
    """

    kind: str
    block_size: int
    format: RowFormat
    tokens_per_row: int = 1
    window: int | None = None
    padded_page_bytes: int | None = None
    chunk: int | None = None
    block_stride_multiple: int = ALIGNMENT_BYTES
    speculative_blocks: int = 0
    checkpoint_blocks: int = 0
    num_shards: int | None = None
    page_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise PlanError(f"LayerSpec: kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        name = f"LayerSpec {self.kind!r}"
        if not isinstance(self.format, RowFormat):
            raise PlanError(f"{name}: format: expected a RowFormat, got {self.format!r}")
        plan_int(f"{name}: block_size", self.block_size, 1, MAX_WINDOW)
        self._check_rows(name)
        self._check_reach(name)
        plan_int(f"{name}: block_stride_multiple", self.block_stride_multiple, 1, MAX_PAGE_BYTES)
        for count in ("speculative_blocks", "checkpoint_blocks"):
            most = None if self.kind == "state" else 0
            plan_int(f"{name}: {count}", getattr(self, count), 0, most)
        if self.num_shards is not None:
            plan_int(f"{name}: num_shards", self.num_shards, 1)
        if self.padded_page_bytes is not None:
            self._check_padding(name, self.padded_page_bytes)
        page_bytes = self.padded_page_bytes or self.format.page_bytes(self.rows_per_block)
        if page_bytes > MAX_PAGE_BYTES:
            raise PlanError(f"{name}: block_size: expected pages of at most {MAX_PAGE_BYTES} B, got {page_bytes}")
        object.__setattr__(self, "page_bytes", page_bytes)

    def _check_rows(self, name: str) -> None:
        plan_int(f"{name}: tokens_per_row", self.tokens_per_row, 1)
        if self.block_size % self.tokens_per_row:
            raise PlanError(
                f"{name}: tokens_per_row: expected a divisor of the block size {self.block_size}, "
                f"got {self.tokens_per_row}"
            )
        if self.tokens_per_row != 1 and self.kind not in ("full", "latent"):
            raise PlanError(f"{name}: tokens_per_row: expected 1 for this kind, got {self.tokens_per_row}")
        if self.format.value_dim is not None and self.kind in ("sliding_window", "chunked", "state"):
            raise PlanError(f"{name}: format: expected rows of K and V, got {self.format.name!r}, a latent row")

    def _check_reach(self, name: str) -> None:
        may_have_window = self.kind in ("full", "latent") and self.window is not None
        if self.kind in ("sliding_window", "latent_window") or may_have_window:
            plan_int(f"{name}: window", self.window, 1, MAX_WINDOW)
        elif self.window is not None:
            raise PlanError(f"{name}: window: this kind has none, got {self.window!r}")
        if self.kind == "chunked":
            plan_int(f"{name}: chunk", self.chunk, 1, MAX_WINDOW)
        elif self.chunk is not None:
            raise PlanError(f"{name}: chunk: only chunked layers have one, got {self.chunk!r}")

    def _check_padding(self, name: str, padded: object) -> None:
        needed = self.format.page_bytes(self.rows_per_block)
        if plan_int(f"{name}: padded_page_bytes", padded, needed) % ALIGNMENT_BYTES:
            raise PlanError(f"{name}: padded_page_bytes: expected a multiple of {ALIGNMENT_BYTES}, got {padded}")

    @property
    def rows_per_block(self) -> int:
        """Rows of one page."""
        return 1 if self.kind == "state" else self.block_size // self.tokens_per_row

    @property
    def payload_bytes(self) -> int:
        """Bytes of the rows of one page, without padding."""
        return self.rows_per_block * self.format.row_bytes

    @property
    def stride_multiple(self) -> int:
        """What the distance between blocks must be a multiple of: what readers demand, and 16 bytes."""
        return math.lcm(ALIGNMENT_BYTES, self.block_stride_multiple)

    @property
    def dense_stride_bytes(self) -> int:
        """The least distance between blocks in a slot tensor of this layer's own: the page, rounded to the demand."""
        return round_up(self.page_bytes, self.stride_multiple)

    @property
    def retention(self) -> Retention:
        """Which rows must be kept; layers of one group share it."""
        if self.kind in ("sliding_window", "latent_window"):
            return Retention("sliding_window", window=self.window)
        if self.kind == "chunked":
            return Retention("chunked", chunk=self.chunk)
        if self.kind == "state":
            return Retention("state", blocks=1 + self.speculative_blocks + self.checkpoint_blocks)
        return Retention("ring" if self.kind == "ring" else "full")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.init} | {
            "format": self.format.to_dict()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LayerSpec":
        """The spec that `to_dict` wrote. Raises: PlanError when the values are not a spec's."""
        try:
            return cls(**{**values, "format": RowFormat.from_dict(values["format"])})
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"LayerSpec: expected the fields that to_dict wrote: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Alias:
    """A layer that reads the cache of another one and has none of its own (cross-layer sharing).

    Raises: PlanError when `of` is no layer name.
    """

    of: str
    kind: ClassVar[str] = "alias"

    def __post_init__(self) -> None:
        if not isinstance(self.of, str) or not self.of:
            raise PlanError(f"Alias: of: expected the name of a layer, got {self.of!r}")


@dataclass(frozen=True, slots=True)
class NoCache:
    """A layer that caches nothing (encoder-only attention)."""

    kind: ClassVar[str] = "none"


AnySpec = LayerSpec | Alias | NoCache
"""What a mapping of layer names may hold."""
