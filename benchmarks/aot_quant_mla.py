"""What is compiled ahead of time of the reads of quantised latent rows: their launch builders, with meta tensors."""

import torch

from benchmarks.aot_cases import BF16, FP32, Case, meta, meta_view, partials, read_tensors, spill_limit
from kvstore_kernels import PageView, latent_format
from kvstore_kernels.latent_rows import latent_row
from kvstore_kernels.launch import Launch, Target
from kvstore_kernels.mla import mla_launch
from kvstore_kernels.quantised import FORMATS, FP8
from kvstore_kernels.sparse import sparse_launch

QUANTISED = {
    **{name: FORMATS[name]() for name in ("fp8_ds_mla", "dsv4", "mxfp8_latent", "mxfp8_latent_split")},
    **{name: FORMATS[name]() for name in ("nvfp4_latent", "nvfp4_latent_split", "nvfp4_ds_mla")},
    "latent fp8 576": latent_format(576, 512, FP8),
}


QUICK = {
    *(("mla_decode", name, 16) for name in ("fp8_ds_mla", "dsv4", "nvfp4_ds_mla", "latent fp8 576")),
    ("mla_decode", "fp8_ds_mla", 128),
    ("sparse_mla_decode", "fp8_ds_mla", 16),
    ("sparse_mla_decode", "dsv4", 64),
}
"""Both kinds of rows, of codes and of pairs, with and without scales, and both head tiles."""


def build_mla(
    view: PageView,
    target: Target,
    num_heads: int = 16,
    dtype: torch.dtype = BF16,
    num_seqs: int = 8,
    width: int = 32,
    num_splits: int = 8,
    num_queries: int = 1,
    row_scale: float = 0.5,
) -> Launch:
    """The launch of an MLA decode's first stage; rows with a scale outside the cache take it as a number."""
    row = latent_row(view)
    q = meta(num_seqs, num_queries, num_heads, row.latent_dim, dtype=dtype)
    table, row_lens = read_tensors(num_seqs, width)
    out, lse = partials(q.flatten(0, 1), row.value_dim, num_splits)
    return mla_launch(view, table, row_lens, q, out, lse, softmax_scale=0.07, row_scale=row_scale, target=target)


def build_sparse(
    view: PageView,
    target: Target,
    num_heads: int = 16,
    dtype: torch.dtype = BF16,
    num_seqs: int = 8,
    num_listed: int = 512,
    num_splits: int = 4,
) -> Launch:
    """The launch of a sparse MLA decode over one list."""
    row = latent_row(view)
    q = meta(num_seqs, num_heads, row.latent_dim, dtype=dtype)
    out, lse = partials(q, row.value_dim, num_splits)
    rows = (view, meta(num_seqs, num_listed, dtype=torch.int32))
    return sparse_launch(rows, q, out, lse, 0, num_splits, softmax_scale=0.1, target=target)


def _case(kernel: str, name: str, num_heads: int, rows_per_block: int, dtype: torch.dtype = BF16) -> Case:
    build = build_mla if kernel == "mla_decode" else build_sparse
    suffix = "" if dtype == BF16 else f" in {str(dtype).removeprefix('torch.')}"
    return Case(
        kernel,
        f"{name}, {num_heads} heads{suffix} x {rows_per_block}",
        lambda target: build(meta_view(QUANTISED[name], rows_per_block), target, num_heads, dtype),
        max_spill_bytes=spill_limit(num_heads, quantised=True),
        wgmma=num_heads > 32,
        is_quick=(kernel, name, num_heads) in QUICK and dtype == BF16,
    )


CASES = (
    *(_case("mla_decode", name, num_heads, 64) for name in QUANTISED for num_heads in (16, 128)),
    _case("mla_decode", "fp8_ds_mla", 16, 1),
    _case("mla_decode", "dsv4", 32, 16),
    _case("mla_decode", "dsv4", 16, 2),
    _case("mla_decode", "fp8_ds_mla", 16, 64, torch.float16),
    _case("mla_decode", "fp8_ds_mla", 16, 64, FP32),
    *(_case("sparse_mla_decode", name, num_heads, 64) for name in QUANTISED for num_heads in (16, 128)),
    _case("sparse_mla_decode", "dsv4", 64, 2),
)


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides, sizes and scales only: each family must be one compiled kernel."""
    gaps = ((0, 2), (16, 3), (48, 64), (1024, 777), (2**20, 64))
    shapes = [
        {"num_seqs": num_seqs, "width": width, "num_splits": num_splits, "num_queries": num_queries}
        for num_seqs, width, num_splits, num_queries in ((2, 16, 16, 1), (3, 7, 5, 2), (64, 33, 2, 4))
    ]
    lists = [
        {"num_seqs": num_seqs, "num_listed": num_listed, "num_splits": num_splits}
        for num_seqs, num_listed, num_splits in ((2, 16, 16), (3, 7, 5), (64, 2048, 2))
    ]
    families: dict[str, list[Launch]] = {}
    for name in ("fp8_ds_mla", "dsv4"):
        views = [meta_view(QUANTISED[name], 64, gap_bytes, num_blocks) for gap_bytes, num_blocks in gaps]
        families[f"mla_decode, {name}"] = [build_mla(view, target, 4, **shape) for view in views for shape in shapes]
        families[f"sparse_mla_decode, {name}"] = [
            build_sparse(view, target, **each) for view in views for each in lists
        ]
    scaled = meta_view(QUANTISED["latent fp8 576"], 64)
    families["mla_decode, scale outside"] = [
        build_mla(scaled, target, row_scale=scale) for scale in (0.0, 0.5, 1.0, 16.0)
    ]
    return families
