"""Kernels of a paged KV-cache: pure functions on tensors and page views. No plan, group or sequence is known here."""

from kvstore_kernels.attention_ops import gqa_decode, merge_partials, mla_decode, sparse_mla_decode
from kvstore_kernels.block_ops import (
    compute_slot_mapping,
    copy_blocks,
    fill_blocks,
    pack_blocks,
    unpack_blocks,
    write_layers,
)
from kvstore_kernels.copy import LayerTable, layer_table
from kvstore_kernels.formats import Quantised, RowFormat, RowPart, kv_format, latent_format
from kvstore_kernels.index_checks import index_checks
from kvstore_kernels.launch import BACKENDS, resolve_backend
from kvstore_kernels.ops import gather_rows, read_rows, write_rows
from kvstore_kernels.pages import PageView
from kvstore_kernels.quantised import (
    FORMATS,
    bytes_format,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    mxfp8_latent_format,
    nvfp4_ds_mla_format,
    nvfp4_latent_format,
    state_format,
    token_head_format,
)
from kvstore_kernels.score_ops import indexer_scores
from kvstore_kernels.warm import warm_up

__all__ = [
    "BACKENDS",
    "FORMATS",
    "LayerTable",
    "PageView",
    "Quantised",
    "RowFormat",
    "RowPart",
    "bytes_format",
    "compute_slot_mapping",
    "copy_blocks",
    "dsv4_format",
    "fill_blocks",
    "fp8_ds_mla_format",
    "gather_rows",
    "gqa_decode",
    "index_checks",
    "indexer_format",
    "indexer_scores",
    "kv_format",
    "latent_format",
    "layer_table",
    "merge_partials",
    "mla_decode",
    "mxfp8_latent_format",
    "nvfp4_ds_mla_format",
    "nvfp4_latent_format",
    "pack_blocks",
    "read_rows",
    "resolve_backend",
    "sparse_mla_decode",
    "state_format",
    "token_head_format",
    "unpack_blocks",
    "warm_up",
    "write_layers",
    "write_rows",
]
