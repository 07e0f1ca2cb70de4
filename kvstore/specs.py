"""LayerSpec: what one layer caches, and the page bytes that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
from kvstore_kernels.formats import ALIGNMENT_BYTES, ROW_DTYPES, RowFormat, dtype_name, kv_format, latent_format

KINDS = ("full", "sliding_window", "latent")
"""full: K and V of every token. sliding_window: of the last `window` tokens. latent: one MLA row of every token."""


MAX_WINDOW = 2**31 - 1
"""Kernels take a window as int32."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which rows the layers of a group must keep: kind "full" all of them, "sliding_window" those in reach of `window`.

    Raises: PlanError for another kind, or a window that does not belong to the kind.
    """

    kind: str
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "full":
            if self.window is not None:
                raise PlanError(f"Retention 'full': window: expected None, got {self.window!r}")
        elif self.kind == "sliding_window":
            plan_int("Retention 'sliding_window': window", self.window, 1, MAX_WINDOW)
        else:
            raise PlanError(f"Retention: kind: expected 'full' or 'sliding_window', got {self.kind!r}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer.

    A block covers `block_size` tokens, a row `tokens_per_row` of them. A query sees the last `window` tokens, its own
    included (kind "sliding_window" only). `padded_page_bytes` widens the page beyond what the rows need.

    Raises: PlanError for an unknown kind, a count below 1, a block that is no whole number of rows, a window that does
    not belong to the kind, a latent layer without a latent format, and a padded page that is too small or no multiple
    of 16 bytes.
    """

    kind: str
    block_size: int
    format: RowFormat
    tokens_per_row: int = 1
    window: int | None = None
    padded_page_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"LayerSpec: kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        name = f"LayerSpec {self.kind!r}"
        if not isinstance(self.format, RowFormat):
            raise PlanError(f"{name}: format: expected a RowFormat, got {self.format!r}")
        plan_int(f"{name}: block_size", self.block_size, 1)
        plan_int(f"{name}: tokens_per_row", self.tokens_per_row, 1)
        if self.block_size % self.tokens_per_row:
            raise PlanError(
                f"{name}: tokens_per_row: expected a divisor of the block size {self.block_size}, "
                f"got {self.tokens_per_row}"
            )
        if self.kind == "sliding_window":
            plan_int(f"{name}: window", self.window, 1, MAX_WINDOW)
            if self.tokens_per_row != 1:
                raise PlanError(f"{name}: tokens_per_row: expected 1 beside a window, got {self.tokens_per_row}")
            if self.format.value_dim is not None:
                raise PlanError(f"{name}: format: expected rows of K and V, got {self.format.name!r}, a latent row")
        elif self.window is not None:
            raise PlanError(f"{name}: window: only sliding_window layers have one, got {self.window!r}")
        if self.kind == "latent" and self.format.value_dim is None:
            raise PlanError(f"{name}: format: expected one with a value_dim, got {self.format.name!r} without")
        if self.padded_page_bytes is not None:
            self._check_padding(name, self.padded_page_bytes)

    def _check_padding(self, name: str, padded: object) -> None:
        needed = self.format.page_bytes(self.rows_per_block)
        if plan_int(f"{name}: padded_page_bytes", padded, needed) % ALIGNMENT_BYTES:
            raise PlanError(f"{name}: padded_page_bytes: expected a multiple of {ALIGNMENT_BYTES}, got {padded}")

    @property
    def rows_per_block(self) -> int:
        """Rows of one page."""
        return self.block_size // self.tokens_per_row

    @property
    def payload_bytes(self) -> int:
        """Bytes of the rows of one page, without padding."""
        return self.rows_per_block * self.format.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; a multiple of 16, because every format aligns its pages to that."""
        return self.padded_page_bytes or self.format.page_bytes(self.rows_per_block)

    @property
    def retention(self) -> Retention:
        """Which rows must be kept; layers of one group share it."""
        return Retention("full") if self.window is None else Retention("sliding_window", self.window)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return {
            "kind": self.kind,
            "block_size": self.block_size,
            "format": self.format.to_dict(),
            "tokens_per_row": self.tokens_per_row,
            "window": self.window,
            "padded_page_bytes": self.padded_page_bytes,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LayerSpec":
        """The spec that `to_dict` wrote. Raises: PlanError when the fields are not a spec's."""
        try:
            return cls(**{**fields, "format": RowFormat.from_dict(fields["format"])})
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"LayerSpec: expected the fields that to_dict wrote: {error!r}") from error


def full_attention(
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    packed: bool = False,
    padded_page_bytes: int | None = None,
) -> LayerSpec:
    """K and V of every token, `num_kv_heads` vectors of `head_dim` and `head_dim_v` (default: `head_dim`) elements.

    A page holds all K rows, then all V rows; with `packed` K and V of a token lie in one row.

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(kv_format, num_kv_heads, head_dim, head_dim_v, dtype, packed=packed)
    return LayerSpec("full", block_size, row_format, padded_page_bytes=padded_page_bytes)


def sliding_window(
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    window: int,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    packed: bool = False,
    padded_page_bytes: int | None = None,
) -> LayerSpec:
    """As `full_attention`, for a layer whose query sees the last `window` tokens, its own included.

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(kv_format, num_kv_heads, head_dim, head_dim_v, dtype, packed=packed)
    return LayerSpec("sliding_window", block_size, row_format, window=window, padded_page_bytes=padded_page_bytes)


def latent(
    latent_dim: int = 576,
    value_dim: int = 512,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    padded_page_bytes: int | None = None,
) -> LayerSpec:
    """One MLA row of `latent_dim` elements per token, whose first `value_dim` are also read as V.

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(latent_format, latent_dim, value_dim, dtype)
    return LayerSpec("latent", block_size, row_format, padded_page_bytes=padded_page_bytes)


def _checked_format(make: Any, *args: Any, **kwargs: Any) -> RowFormat:
    try:
        made: RowFormat = make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
    if made.parts[0].dtype not in ROW_DTYPES:
        known = ", ".join(map(dtype_name, ROW_DTYPES))
        raise PlanError(f"dtype: expected one of {known}, got {dtype_name(made.parts[0].dtype)}")
    return made
