"""Kernels of a paged KV-cache: pure functions on tensors and page views. No plan, group or sequence is known here."""

from kvstore_kernels.formats import FORMATS, RowFormat, RowPart, kv_format, latent_format
from kvstore_kernels.launch import BACKENDS, resolve_backend
from kvstore_kernels.ops import gather_rows, gqa_decode, merge_partials, mla_decode, write_rows
from kvstore_kernels.pages import PageView

__all__ = [
    "BACKENDS",
    "FORMATS",
    "PageView",
    "RowFormat",
    "RowPart",
    "gather_rows",
    "gqa_decode",
    "kv_format",
    "latent_format",
    "merge_partials",
    "mla_decode",
    "resolve_backend",
    "write_rows",
]
