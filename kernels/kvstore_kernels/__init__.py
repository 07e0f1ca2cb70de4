"""Kernels of a paged KV-cache: pure functions on tensors and page views. No plan, group or sequence is known here.

- A slot is block_id * rows_per_block + row_in_block, int64 (in lists of sparse reads int32 too). Block tables, lengths
  and prefix sums are int32. -1, or anything else that names nothing, writes nothing and reads as no row.
- Block 0 is a block like any other here, but for `compute_slot_mapping`, which gives its rows no slot: stores keep it
  as the null block. So fill up tables with -1, or keep lengths right: reads do not skip block 0.
- Views and layer tables are made once, outside of compiled functions; a function compiled for views serves any of the
  same format and size.
"""

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
from kvstore_kernels.reads import workspace_numel
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
    "workspace_numel",
    "write_layers",
    "write_rows",
]
