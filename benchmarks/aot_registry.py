"""Everything that is compiled ahead of time: the cases of every kernel, and the families that must be one variant."""

from benchmarks import (
    aot_blocks,
    aot_cases,
    aot_indexer,
    aot_layers,
    aot_quant_gather,
    aot_quant_gqa,
    aot_quant_mla,
    aot_quantised,
    aot_sparse,
)
from kvstore_kernels.launch import Launch, Target

CASES = (
    *aot_cases.CASES,
    *aot_blocks.block_cases(),
    *aot_sparse.sparse_cases(),
    *aot_quantised.QUANT_CASES,
    *aot_quant_gather.CASES,
    *aot_layers.CASES,
    *aot_quant_gqa.CASES,
    *aot_quant_mla.CASES,
    *aot_indexer.CASES,
)

KERNELS = tuple(dict.fromkeys(case.kernel for case in CASES))


def variant_families(target: Target) -> dict[str, list[Launch]]:
    """Launches that differ in strides and sizes only: each family must be one compiled kernel."""
    families = (
        aot_cases.variant_families,
        aot_blocks.block_families,
        aot_sparse.sparse_families,
        aot_quant_gather.variant_families,
        aot_layers.variant_families,
        aot_quant_gqa.variant_families,
        aot_quant_mla.variant_families,
        aot_indexer.variant_families,
    )
    joined = {kernel: launches for family in families for kernel, launches in family(target).items()}
    return joined | {"quant_write": aot_quantised.quant_variant_family(target)}
