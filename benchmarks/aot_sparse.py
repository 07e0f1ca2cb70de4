"""What is compiled ahead of time of the reads of listed rows."""

import torch

from benchmarks.aot_cases import BF16, FP32, LATENT, Case, meta, meta_view, partials, spill_limit, thorough
from kvstore_kernels import RowFormat, latent_format
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.sparse import sparse_launch


def build_sparse(
    row_format: RowFormat,
    rows_per_block: int,
    num_heads: int,
    target: Target,
    *,
    num_seqs: int = 8,
    num_listed: int = 512,
    num_splits: int = 4,
    gap_bytes: int = 0,
    slots_dtype: torch.dtype = torch.int32,
) -> Launch:
    """The launch of a sparse MLA decode; every argument is a meta tensor."""
    latent = row_format.parts[0]
    view = meta_view(row_format, rows_per_block, gap_bytes)
    q = meta(num_seqs, num_heads, latent.head_dim, dtype=latent.dtype)
    out, lse = partials(q, row_format.value_dim or latent.head_dim, num_splits)
    slots = meta(num_seqs, num_listed, dtype=slots_dtype)
    return sparse_launch((view, slots), q, out, lse, 0, num_splits, softmax_scale=0.1, target=target)


def sparse_cases() -> list[Case]:
    """DeepSeek V3.2's and V4's rows, one and many head tiles."""

    def case(name: str, row_format: RowFormat, rows_per_block: int, num_heads: int) -> Case:
        return Case(
            "sparse_mla_decode",
            f"{name}, {num_heads} heads x {rows_per_block}",
            lambda target: build_sparse(row_format, rows_per_block, num_heads, target),
            max_spill_bytes=spill_limit(num_heads),
            wgmma=num_heads > 32,
        )

    return [
        case("576/512", LATENT, 64, 16),
        case("512/512", latent_format(512, 512, BF16), 2, 64),
        *thorough(
            case("576/512", LATENT, 64, 128),
            case("576/512 fp32", latent_format(576, 512, FP32), 64, 16),
        ),
    ]


def sparse_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides and sizes only: one compiled kernel."""
    shapes = [
        {"num_seqs": num_seqs, "num_listed": num_listed, "num_splits": num_splits, "gap_bytes": gap_bytes}
        for num_seqs, num_listed, num_splits, gap_bytes in ((2, 16, 16, 0), (3, 7, 5, 48), (64, 2048, 2, 2**20))
    ]
    return {"sparse_mla_decode": [build_sparse(LATENT, 64, 16, target, **shape) for shape in shapes]}
