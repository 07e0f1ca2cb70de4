"""Kernels of a paged KV-cache: pure functions on tensors and page views. No plan, group or sequence is known here."""

from kvstore_kernels.block_ops import compute_slot_mapping, copy_blocks, fill_blocks, pack_blocks, unpack_blocks
from kvstore_kernels.copy import LayerTable, layer_table
from kvstore_kernels.formats import Quantised, RowFormat, RowPart, kv_format, latent_format
from kvstore_kernels.launch import BACKENDS, resolve_backend
from kvstore_kernels.ops import (
    gather_rows,
    gqa_decode,
    merge_partials,
    mla_decode,
    read_rows,
    sparse_mla_decode,
    write_rows,
)
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
    "indexer_format",
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
    "write_rows",
]
