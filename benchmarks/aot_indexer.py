"""What is compiled ahead of time of the scores of a sparse indexer."""

import torch

from benchmarks.aot_cases import BF16, FP32, Case, meta, meta_view, read_tensors
from kvstore_kernels import PageView, RowFormat, indexer_format, latent_format
from kvstore_kernels.indexer import indexer_launch
from kvstore_kernels.launch import Launch, Target


def indexer_case(name: str, row_format: RowFormat, rows_per_block: int, dtype: torch.dtype = BF16) -> Case:
    """The scores of eight sequences with 64 heads."""

    def build(target: Target) -> Launch:
        return build_indexer(meta_view(row_format, rows_per_block), target, dtype)

    return Case("indexer_scores", f"{name} x {rows_per_block}", build)


def build_indexer(
    view: PageView,
    target: Target,
    dtype: torch.dtype = BF16,
    num_heads: int = 64,
    num_seqs: int = 8,
    width: int = 32,
    num_queries: int | None = None,
    num_columns: int | None = None,
) -> Launch:
    """The launch of a scoring, with one query per sequence where `num_queries` is None."""
    queries = (num_seqs,) if num_queries is None else (num_seqs, num_queries)
    table, row_lens = read_tensors(num_seqs, width)
    q, weights = meta(*queries, num_heads, 128, dtype=dtype), meta(*queries, num_heads, dtype=FP32)
    columns = width * view.rows_per_block if num_columns is None else num_columns
    return indexer_launch(view, table, row_lens, q, weights, meta(*queries, columns, dtype=FP32), target=target)


CASES = (
    indexer_case("64 heads, fp8", indexer_format(132), 64),
    indexer_case("64 heads, fp8, pages of 576", indexer_format(132, 576), 16),
    indexer_case("64 heads, fp8, fp16", indexer_format(132), 64, torch.float16),
    indexer_case("64 heads, mxfp4", indexer_format(68), 64),
    indexer_case("64 heads, mxfp4", indexer_format(68), 16),
    indexer_case("64 heads, mxfp4, fp16", indexer_format(68), 64, torch.float16),
    indexer_case("64 heads, bf16", latent_format(128, 128), 64),
)


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides and sizes only: one compiled kernel."""
    shapes = [
        {"num_seqs": 2, "width": 16, "num_heads": 64, "num_queries": 1},
        {"num_seqs": 3, "width": 7, "num_heads": 32, "num_queries": 5, "num_columns": 100},
        {"num_seqs": 64, "width": 33, "num_heads": 16, "num_queries": None, "num_columns": 1},
    ]
    views = [meta_view(indexer_format(132), 64, gap_bytes, blocks) for gap_bytes, blocks in ((0, 2), (2**20, 65))]
    return {"indexer_scores": [build_indexer(view, target, **shape) for view in views for shape in shapes]}
