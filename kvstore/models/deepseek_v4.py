"""DeepSeek V4: a window of latent rows in every layer, and beside it compressed rows, an indexer, compressor states.

Caches of a layer by its compression ratio (tokens per compressed row), at 256 tokens a block:

    ratio  window   compressed  indexer   state                       indexer_state
        0  64 rows
        4  64 rows  64 rows     64 rows   window 8, blocks of 4       window 8, blocks of 4
      128  64 rows  2 rows                window 128, blocks of 8
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvstore.errors import PlanError
from kvstore.models.caches import expect_latent_rows, indexer_rows
from kvstore.models.config import Fields, count, layer_types, num_layers_of
from kvstore.models.options import DS_MLA_ROWS, ModelOptions
from kvstore.models.stages import Family, LayerCaches, name_layers
from kvstore.specs import AnySpec, LayerSpec
from kvstore_kernels.formats import RowFormat, RowPart, latent_format
from kvstore_kernels.quantised import dsv4_format

PACKED_ALIGNMENT = 576
PLAIN_ALIGNMENT = 512
"""Pages are multiples of it, indexer and state pages too: what readers of packed and of plain rows expect."""

BLOCK_SIZE = 256
BLOCK_MULTIPLE = 128
"""A block has at least one compressed row of the highest ratio."""

LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Compression ratios under the names that transformers gives them."""

_DEFAULTS = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
}


@dataclass(frozen=True, slots=True)
class _Compressor:
    """The last tokens that a compressor still needs: rows of fp32, K and score of `overlap` rows each."""

    window: int
    block_size: int
    overlap: int


_COMPRESSORS = {4: _Compressor(8, 4, 2), 128: _Compressor(128, 8, 1)}


def _compressed_layers(fields: Fields, options: ModelOptions) -> dict[str, AnySpec]:
    fields = {**_DEFAULTS, **fields}
    num_layers = num_layers_of(fields)
    ratios = _ratios(fields, num_layers, options.num_draft_layers)
    block_size = options.block(BLOCK_SIZE)
    if block_size % BLOCK_MULTIPLE:
        raise PlanError(
            f"block_size: expected a multiple of {BLOCK_MULTIPLE} (model_type 'deepseek_v4'), got {block_size}"
        )
    rows = _latent_rows(fields, options)
    window = LayerSpec("latent_window", block_size // 4, rows, window=count(fields, "sliding_window"), num_shards=1)
    kinds: dict[int, LayerCaches] = {0: {"window": window}}
    for ratio, compressor in _COMPRESSORS.items():
        if ratio not in ratios:
            continue
        state = _state(compressor, count(fields, "head_dim"), rows.page_alignment, options)
        layer = {"window": window, "compressed": LayerSpec("latent", block_size, rows, ratio, num_shards=1)}
        if ratio == 4:
            keys = indexer_rows(fields, options, page_alignment=rows.page_alignment)
            indexer_state = _state(compressor, count(fields, "index_head_dim"), rows.page_alignment, options)
            indexer = LayerSpec("latent", block_size, keys, ratio, num_shards=1)
            layer = {"indexer": indexer, "indexer_state": indexer_state, **layer}
        kinds[ratio] = {**layer, "state": state}
    return name_layers([kinds[ratio] for ratio in ratios], {"window": window}, options)


def _latent_rows(fields: Fields, options: ModelOptions) -> RowFormat:
    """Rows of the window and of the compressed cache, and how their pages are aligned."""
    head_dim = count(fields, "head_dim")
    if isinstance(options.rows, torch.dtype):
        return replace(latent_format(head_dim, head_dim, options.rows), page_alignment=PLAIN_ALIGNMENT)
    expect_latent_rows(options)
    rope_dim = count(fields, "qk_rope_head_dim", maximum=head_dim)
    if (head_dim, rope_dim) != (512, 64):
        raise PlanError(
            f"kv_dtype: {DS_MLA_ROWS!r} rows are 448 + 64 columns, but the model has {head_dim - rope_dim} + "
            f"{rope_dim} (head_dim without qk_rope_head_dim, and qk_rope_head_dim)"
        )
    return replace(dsv4_format(), page_alignment=PACKED_ALIGNMENT)


def _state(compressor: _Compressor, head_dim: int, page_alignment: int, options: ModelOptions) -> LayerSpec:
    part = RowPart("state", torch.float32, 1, 2 * compressor.overlap * head_dim)
    rows = RowFormat("compressor_state", (part,), (part.num_bytes,), page_alignment)
    if options.ring_states:
        return LayerSpec("ring", compressor.window, rows, num_shards=1)
    return LayerSpec("latent_window", compressor.block_size, rows, window=compressor.window, num_shards=1)


def _ratios(fields: Fields, num_layers: int, num_draft_layers: int) -> Sequence[int]:
    """The compression ratio of each layer: `compress_ratios`, else `layer_types`, else V4-Pro's pattern.

    Raises: PlanError for lists of the wrong length, unknown or contradicting entries, and draft layers with a ratio.
    """
    _check_rates(fields)
    pattern = ["heavily_compressed_attention", "compressed_sparse_attention"]
    default = [pattern[0] if layer < 2 else pattern[layer % 2] for layer in range(num_layers)]
    types = layer_types(fields, num_layers, tuple(LAYER_TYPES), default)
    named = [LAYER_TYPES[kind] for kind in types]
    ratios = fields.get("compress_ratios")
    if ratios is None:
        return named
    most = num_layers + count(fields, "num_nextn_predict_layers", minimum=0)
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or not num_layers <= len(ratios) <= most:
        raise PlanError(
            f"compress_ratios: expected a list of num_hidden_layers = {num_layers} entries, and at most "
            f"{most - num_layers} more for num_nextn_predict_layers, got {ratios!r}"
        )
    for layer, ratio in enumerate(ratios):
        if isinstance(ratio, bool) or ratio not in (0, *_COMPRESSORS):
            raise PlanError(f"compress_ratios: layer {layer}: expected 0, 4 or 128, got {ratio!r}")
        if layer >= num_layers and ratio and num_draft_layers:
            raise PlanError(f"compress_ratios: draft layer {layer - num_layers}: expected 0 (window only), got {ratio}")
    if fields.get("layer_types") is not None and named != list(ratios[:num_layers]):
        raise PlanError(f"compress_ratios: expected the same layers as layer_types, got {ratios!r}")
    return list(ratios[:num_layers])


def _check_rates(fields: Fields) -> None:
    """Windows and blocks of the states are known for the ratios 4 and 128 only."""
    given = fields.get("compress_rates") or {}
    if not isinstance(given, Mapping):
        raise PlanError(f"compress_rates: expected a mapping of layer types to ratios, got {given!r}")
    for name, legacy in (
        ("compressed_sparse_attention", "compress_rate_csa"),
        ("heavily_compressed_attention", "compress_rate_hca"),
    ):
        rate = fields.get(legacy) or given.get(name, LAYER_TYPES[name])
        if rate != LAYER_TYPES[name]:
            raise PlanError(f"compress_rates: {name!r}: expected {LAYER_TYPES[name]}, got {rate!r}")


MODEL_TYPES: Mapping[str, Family] = {"deepseek_v4": _compressed_layers}
