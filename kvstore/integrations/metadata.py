"""Metadata for attention kernels of others: a store, a layer and a batch in, their arguments out.

    vllm_metadata              block_table, slot_mapping, seq_lens: vLLM's kernels, FlashAttention and their kin
    flashinfer_metadata        CSR pages and the K and V tensors; the arguments of its append kernel
    flashinfer_mla_metadata    CSR pages, ckv and kpe
    flash_mla_metadata         dense decode: pages of 64 rows of bf16 or fp16
    flash_mla_sparse_metadata  sparse decode: rows of 656, 584 or 528 bytes; `flash_mla_indices` names rows to it
    flex_metadata              torch's flex_attention: K and V as one long axis of rows, and a block mask
    export_check               why a reader cannot read a layer's pages, and which argument would change it

None of these libraries is imported. A function raises ValueError with the reasons of `export_check` where its reader
cannot read the pages. What it returns serves all layers of the same group and spec in that batch, but for the page
tensors, and is valid until the batch is finished.

No function waits for the device. Tensors of the batch are handed on as they are, so those of a `graph_batch` keep their
addresses; each docstring says what is allocated beyond them.
"""

from kvstore.integrations.block_tables import VllmMetadata, vllm_metadata
from kvstore.integrations.flash_mla import (
    FlashMlaMetadata,
    flash_mla_indices,
    flash_mla_metadata,
    flash_mla_sparse_metadata,
)
from kvstore.integrations.flashinfer import (
    FlashInferMetadata,
    FlashInferMlaMetadata,
    flashinfer_metadata,
    flashinfer_mla_metadata,
)
from kvstore.integrations.flex import FlexMetadata, flex_finite_value, flex_metadata
from kvstore.integrations.readers import READERS, Demand, export_check

__all__ = [
    "READERS",
    "Demand",
    "FlashInferMetadata",
    "FlashInferMlaMetadata",
    "FlashMlaMetadata",
    "FlexMetadata",
    "VllmMetadata",
    "export_check",
    "flash_mla_indices",
    "flash_mla_metadata",
    "flash_mla_sparse_metadata",
    "flashinfer_metadata",
    "flashinfer_mla_metadata",
    "flex_finite_value",
    "flex_metadata",
    "vllm_metadata",
]
