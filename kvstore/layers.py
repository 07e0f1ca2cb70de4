"""Constructors of LayerSpecs, one per kind of layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvstore.errors import PlanError
from kvstore.specs import LayerSpec
from kvstore_kernels.formats import ALIGNMENT_BYTES, ROW_DTYPES, RowFormat, kv_format, latent_format
from kvstore_kernels.quantised import state_format

KV_DTYPES = (*ROW_DTYPES, torch.float8_e4m3fn)
"""Dtypes of rows that are stored as they are; fp8 has one scale for the tensor, outside the cache."""


def full_attention(
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    packed: bool = False,
    padded_page_bytes: int | None = None,
    block_stride_multiple: int = ALIGNMENT_BYTES,
) -> LayerSpec:
    """K and V of every token, `num_kv_heads` vectors of `head_dim` and `head_dim_v` elements.

    Args:
        num_kv_heads: KV heads on this rank.
        head_dim: elements of K per head.
        head_dim_v: elements of V per head; None: `head_dim`.
        dtype: of the rows: bf16, fp16, fp32, or float8_e4m3fn with one scale for the tensor, outside the cache.
        block_size: tokens of a block.
        packed: K and V of a token lie in one row; else a page holds all K rows, then all V rows.
        padded_page_bytes: bytes of a page that shall be wider than its rows need, a multiple of 16.
        block_stride_multiple: a number that the bytes from one block to the next shall be a multiple of.

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(kv_format, dtype, num_kv_heads, head_dim, head_dim_v, dtype, packed=packed)
    pages = _pages(padded_page_bytes, block_stride_multiple)
    return LayerSpec("full", block_size, row_format, **pages)


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
    block_stride_multiple: int = ALIGNMENT_BYTES,
) -> LayerSpec:
    """As `full_attention`, for a layer whose query sees the last `window` tokens, its own included.

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(kv_format, dtype, num_kv_heads, head_dim, head_dim_v, dtype, packed=packed)
    pages = _pages(padded_page_bytes, block_stride_multiple)
    return LayerSpec("sliding_window", block_size, row_format, window=window, **pages)


def chunked_attention(
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    chunk: int,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    packed: bool = False,
    padded_page_bytes: int | None = None,
    block_stride_multiple: int = ALIGNMENT_BYTES,
) -> LayerSpec:
    """As `full_attention`, for a layer whose query sees the tokens since the last multiple of `chunk` (Llama 4).

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(kv_format, dtype, num_kv_heads, head_dim, head_dim_v, dtype, packed=packed)
    pages = _pages(padded_page_bytes, block_stride_multiple)
    return LayerSpec("chunked", block_size, row_format, chunk=chunk, **pages)


def latent(
    latent_dim: int = 576,
    value_dim: int = 512,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    tokens_per_row: int = 1,
    padded_page_bytes: int | None = None,
    block_stride_multiple: int = ALIGNMENT_BYTES,
) -> LayerSpec:
    """One MLA row of `latent_dim` elements per token, whose first `value_dim` are also read as V.

    All tensor-parallel ranks hold the same rows.

    Args:
        latent_dim: elements of a row, nope columns first, then rope.
        value_dim: leading elements that are V.
        dtype, block_size, padded_page_bytes: as `full_attention`.
        tokens_per_row: above 1 for a compressed latent: one row for that many tokens, a divisor of `block_size`.

    Raises: PlanError when a number is out of range.
    """
    row_format = _checked_format(latent_format, dtype, latent_dim, value_dim, dtype)
    pages = _pages(padded_page_bytes, block_stride_multiple)
    return LayerSpec("latent", block_size, row_format, tokens_per_row, num_shards=1, **pages)


def recurrent_state(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    *,
    block_size: int = 16,
    speculative_blocks: int = 0,
    checkpoint_blocks: int = 0,
    padded_page_bytes: int | None = None,
) -> LayerSpec:
    """A recurrent state: `tensors` (name, shape, dtype) of one sequence and layer, side by side in one page.

    `block_size` is the distance, in tokens, at which states can be kept for prefix hits; it adds no bytes. A state is
    kept where a step ends at a multiple of it: an engine that wants hits ends a chunk of a prompt at the last one. With
    `checkpoint_blocks` = 1 it may compute the prompt in one step, and saves the state on the way where
    `Batch.state_checkpoints` says. `speculative_blocks` are planned for engines that keep a state per draft token of
    their own; a store does not hand them out. `padded_page_bytes`: as `full_attention`.

    Raises: PlanError when a number is out of range.
    """
    try:
        row_format = state_format(tensors)
    except (TypeError, ValueError) as error:
        raise PlanError(f"state: {error}") from error
    return LayerSpec(
        "state",
        block_size,
        row_format,
        padded_page_bytes=padded_page_bytes,
        speculative_blocks=speculative_blocks,
        checkpoint_blocks=checkpoint_blocks,
    )


def _pages(padded_page_bytes: int | None, block_stride_multiple: int) -> dict[str, Any]:
    """What outside readers demand of pages, as fields of a spec."""
    return {"padded_page_bytes": padded_page_bytes, "block_stride_multiple": block_stride_multiple}


def _checked_format(make: Callable[..., RowFormat], dtype: object, *args: Any, **kwargs: Any) -> RowFormat:
    if dtype not in KV_DTYPES:
        known = ", ".join(map(str, KV_DTYPES))
        raise PlanError(f"dtype: expected a torch dtype, one of {known}, got {dtype!r}")
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
