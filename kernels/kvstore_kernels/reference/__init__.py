"""Every op again in torch: the CPU backend, and what the kernels are compared with. Same signatures, no Triton."""

from kvstore_kernels.reference.attention import gqa_decode, merge_partials, mla_decode
from kvstore_kernels.reference.moves import gather_rows, write_rows
from kvstore_kernels.reference.quant_gather import gather_dequantised, read_rows
from kvstore_kernels.reference.quant_write import write_quantised
from kvstore_kernels.reference.sparse import sparse_mla_decode

__all__ = [
    "gather_dequantised",
    "gather_rows",
    "gqa_decode",
    "merge_partials",
    "mla_decode",
    "read_rows",
    "sparse_mla_decode",
    "write_quantised",
    "write_rows",
]
