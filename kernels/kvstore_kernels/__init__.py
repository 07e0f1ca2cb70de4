"""Kernels of a paged KV-cache: pure functions on tensors and page views. No plan, group or sequence is known here."""

from kvstore_kernels.formats import Quantised, RowFormat, RowPart, kv_format, latent_format
from kvstore_kernels.launch import BACKENDS, resolve_backend
from kvstore_kernels.ops import gather_rows, gqa_decode, merge_partials, mla_decode, write_rows
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
    "PageView",
    "Quantised",
    "RowFormat",
    "RowPart",
    "bytes_format",
    "dsv4_format",
    "fp8_ds_mla_format",
    "gather_rows",
    "gqa_decode",
    "indexer_format",
    "kv_format",
    "latent_format",
    "merge_partials",
    "mla_decode",
    "mxfp8_latent_format",
    "nvfp4_ds_mla_format",
    "nvfp4_latent_format",
    "resolve_backend",
    "state_format",
    "token_head_format",
    "write_rows",
]
