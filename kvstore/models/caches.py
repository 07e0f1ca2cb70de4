"""The specs that families are made of: layers of K and V, latent rows, indexers, recurrent states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import PlanError
from kvstore.models.config import Fields, count, named_dtype
from kvstore.models.options import DS_MLA_ROWS, TOKEN_HEAD_ROWS, ModelOptions
from kvstore.models.stages import name_layers
from kvstore.specs import AnySpec, LayerSpec
from kvstore_kernels.formats import RowFormat, kv_format, latent_format
from kvstore_kernels.quantised import fp8_ds_mla_format, indexer_format, token_head_format

KV_BLOCK = 16
LATENT_BLOCK = 64

Tensors = Sequence[tuple[str, tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV heads of all ranks together, and the widths of K and of V (None: as K)."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None


def kv_shape(fields: Fields) -> KvShape:
    """The shape under the usual names. No `num_key_value_heads`: one per query head; no `head_dim`: derived.

    Raises: PlanError when KV heads do not divide the query heads, or query heads the hidden size.
    """
    num_heads = count(fields, "num_attention_heads")
    if fields.get("head_dim") is not None:
        head_dim = count(fields, "head_dim")
    else:
        hidden_size = count(fields, "hidden_size")
        if hidden_size % num_heads:
            raise PlanError(
                f"head_dim: none in the config, and hidden_size {hidden_size} is no multiple of the {num_heads} "
                "num_attention_heads"
            )
        head_dim = hidden_size // num_heads
    return KvShape(kv_heads(fields, "num_key_value_heads", num_heads), head_dim)


def kv_heads(fields: Fields, name: str, default: int) -> int:
    """A number of KV heads. Raises: PlanError when it does not divide the query heads."""
    num_heads = count(fields, "num_attention_heads")
    num_kv_heads = count(fields, name, default)
    if num_heads % num_kv_heads:
        raise PlanError(f"{name}: expected a divisor of the {num_heads} num_attention_heads, got {num_kv_heads}")
    return num_kv_heads


def kv_layer(
    kind: str, shape: KvShape, options: ModelOptions, *, window: int | None = None, chunk: int | None = None
) -> LayerSpec:
    """A layer of K and V as one rank holds it; with fewer KV heads than ranks, several ranks hold the same head."""
    num_heads = shard_heads(shape.num_kv_heads, options.tensor_parallel)
    row_format: RowFormat
    if isinstance(options.rows, torch.dtype):
        row_format = _checked(kv_format, num_heads, shape.head_dim, shape.head_dim_v, options.rows)
    elif options.rows in TOKEN_HEAD_ROWS:
        dtype = TOKEN_HEAD_ROWS[options.rows]
        row_format = _checked(token_head_format, num_heads, shape.head_dim, shape.head_dim_v, dtype)
    else:
        raise PlanError(f"kv_dtype: {options.rows_name!r} rows are latent, but the model has layers of K and V")
    num_shards = shape.num_kv_heads if shape.num_kv_heads < options.tensor_parallel else None
    return LayerSpec(kind, options.block(KV_BLOCK), row_format, window=window, chunk=chunk, num_shards=num_shards)


def attention_layers(
    types: Sequence[str], fields: Fields, options: ModelOptions, shape: KvShape, window_shape: KvShape | None = None
) -> dict[str, AnySpec]:
    """A model of K and V in every layer; a draft layer is like a layer of full attention."""

    def spec(kind: str) -> LayerSpec:
        if kind == "sliding_attention":
            window = count(fields, "sliding_window")
            return kv_layer("sliding_window", window_shape or shape, options, window=window)
        if kind == "chunked_attention":
            return kv_layer("chunked", shape, options, chunk=count(fields, "attention_chunk_size"))
        return kv_layer("full", shape, options)

    specs = {kind: spec(kind) for kind in dict.fromkeys(types)}
    draft = {"attn": specs["full_attention"]} if "full_attention" in specs else {}
    return name_layers([{"attn": specs[kind]} for kind in types], draft, options)


def latent_layer(latent_dim: int, value_dim: int, options: ModelOptions) -> LayerSpec:
    """One MLA row per token, the same on every rank.

    Raises: PlanError for rows of K and V, and for packed rows of another shape than 512 + 64.
    """
    if isinstance(options.rows, torch.dtype):
        row_format = _checked(latent_format, latent_dim, value_dim, options.rows)
    else:
        expect_latent_rows(options)
        if (latent_dim, value_dim) != (576, 512):
            raise PlanError(
                f"kv_dtype: {DS_MLA_ROWS!r} rows are 512 + 64 columns, but the model has {value_dim} + "
                f"{latent_dim - value_dim} (kv_lora_rank + qk_rope_head_dim)"
            )
        row_format = fp8_ds_mla_format()
    return LayerSpec("latent", options.block(LATENT_BLOCK), row_format, num_shards=1)


def expect_latent_rows(options: ModelOptions) -> None:
    """Raises: PlanError when the caller asked for rows that only layers of K and V have."""
    if options.rows in TOKEN_HEAD_ROWS:
        raise PlanError(f"kv_dtype: {options.rows_name!r} rows are of K and V, but the model's rows are latent")


def indexer_rows(
    fields: Fields, options: ModelOptions, known: tuple[int, ...] = (132, 68), page_alignment: int = 16
) -> RowFormat:
    """Rows of the indexer keys. Raises: PlanError for another size, or for heads that are no 128 wide."""
    head_dim = count(fields, "index_head_dim")
    if head_dim != 128:
        raise PlanError(f"index_head_dim: expected 128, the width of an indexer row, got {head_dim}")
    row_bytes = 132 if options.indexer_row_bytes is None else options.indexer_row_bytes
    if row_bytes not in known:
        raise PlanError(
            f"indexer_row_bytes: expected {' or '.join(map(str, known))} (model_type {fields.get('model_type')!r}), "
            f"got {row_bytes!r}"
        )
    return indexer_format(row_bytes, page_alignment)


def recurrent_dtype(fields: Fields, options: ModelOptions, default: torch.dtype) -> torch.dtype:
    """Dtype of the recurrent tensor of a state: the caller's, else the config's, else the family's."""
    if options.state_dtype is not None:
        return options.state_dtype
    for key in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if fields.get(key) is not None:
            return named_dtype(key, fields[key])
    return default


def shard_heads(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank; with fewer heads than ranks a head is replicated.

    Raises: PlanError when neither number divides the other.
    """
    if num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads:
        raise PlanError(
            f"tensor_parallel: expected a divisor or a multiple of the {num_kv_heads} KV heads, got {tensor_parallel}"
        )
    return max(num_kv_heads // tensor_parallel, 1)


def divide(number: int, name: str, tensor_parallel: int) -> int:
    """A rank's part of what only divides evenly. Raises: PlanError when it does not."""
    if number % tensor_parallel:
        raise PlanError(f"tensor_parallel: expected a divisor of the {number} {name}, got {tensor_parallel}")
    return number // tensor_parallel


def _checked(make: Callable[..., RowFormat], *args: Any) -> RowFormat:
    try:
        return make(*args)
    except (TypeError, ValueError) as error:
        raise PlanError(str(error)) from error
