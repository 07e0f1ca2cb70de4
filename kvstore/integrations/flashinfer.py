"""Page lists and page tensors for FlashInfer's kernels."""

from dataclasses import dataclass

import numpy as np
import torch

from kvstore import Batch, KVStore
from kvstore.integrations.pages import layer_batch


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """A batch as lists of pages, and the pages; int32 tensors. A padding sequence has one query token and no pages.

    Of a window the list begins with the page that holds the first row in reach, so lengths and positions count from
    that page's first row. Windows and causality are distances from the end and mean the same.

    Attributes:
        qo_indptr: [n + 1], prefix sum of the new tokens.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: [n + 1], [pages], [n]; the last is 1 ... page_size,
            0 for a sequence without pages.
        page_size: rows of a page.
        kv_layout: "NHD" or "HND".
        paged_kv: K and V, views [pages, page_size, heads, dim] (NHD) or [pages, heads, page_size, dim] (HND).
        batch_indices, positions: [T without padding], where `append_paged_kv_cache` puts the new rows.
        window_left: for `plan`, -1 for no window.
    """

    qo_indptr: torch.Tensor
    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    page_size: int
    kv_layout: str
    paged_kv: tuple[torch.Tensor, torch.Tensor]
    batch_indices: torch.Tensor
    positions: torch.Tensor
    window_left: int


def flashinfer_metadata(store: KVStore, layer: str, batch: Batch, kv_layout: str = "NHD") -> FlashInferMetadata:
    """What FlashInfer's wrappers for paged K and V take in `plan` and `run`, and its append kernel.

    Pages are token-major (NHD); "HND" gives the same memory with the axes swapped, for kernels that go by strides.
    Allocates the five index tensors and copies them from the host; FlashInfer's own `plan` reads the offsets back and
    waits for the device. A captured graph copies them into buffers of its wrapper.

    Raises: ValueError for another kv_layout, and as `vllm_metadata`.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}")
    found = layer_batch(store, layer, batch, "flashinfer")
    csr = store.csr_table(layer, batch)
    keys, values = (found.view.tensor(part) for part in ("k", "v"))
    if kv_layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    step, counts = batch.step, found.num_new_tokens
    first = np.zeros_like(step.starts)
    if found.is_bounded:
        first = np.maximum(step.starts - found.window_left, 0) // found.rows_per_block * found.rows_per_block
    index = np.stack([np.repeat(np.arange(len(counts)), counts), step.positions() - np.repeat(first, counts)])
    batch_indices, positions = torch.from_numpy(index.astype(np.int32)).to(store.device)
    return FlashInferMetadata(
        qo_indptr=found.cu_seqlens_q,
        paged_kv_indptr=csr.indptr,
        paged_kv_indices=csr.indices,
        paged_kv_last_page_len=csr.last_page_len,
        page_size=found.rows_per_block,
        kv_layout=kv_layout,
        paged_kv=(keys, values),
        batch_indices=batch_indices,
        positions=positions,
        window_left=found.window_left,
    )


@dataclass(frozen=True, slots=True)
class FlashInferMlaMetadata:
    """A batch of latent rows as lists of pages; int32 tensors, as `FlashInferMetadata`.

    Attributes:
        qo_indptr, kv_indptr, kv_indices: [n + 1], [n + 1], [pages].
        kv_len_arr: [n], rows visible, the new ones included.
        page_size: rows of a page.
        ckv, kpe: views [pages, page_size, 512] and [pages, page_size, 64] of the same rows.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor
    page_size: int
    ckv: torch.Tensor
    kpe: torch.Tensor


def flashinfer_mla_metadata(store: KVStore, layer: str, batch: Batch) -> FlashInferMlaMetadata:
    """What FlashInfer's BatchMLAPagedAttentionWrapper takes in `plan` and `run`.

    Pages of one block lie a whole block apart, so the page stride is larger than the page where other layers share the
    block: try a version of FlashInfer with such strides before relying on it. Allocates the page lists, from the host.

    Raises: as `vllm_metadata`.
    """
    found = layer_batch(store, layer, batch, "flashinfer_mla")
    csr = store.csr_table(layer, batch)
    latent = found.view.tensor("latent").squeeze(2)
    value_dim = found.view.format.value_dim
    return FlashInferMlaMetadata(
        qo_indptr=found.cu_seqlens_q,
        kv_indptr=csr.indptr,
        kv_indices=csr.indices,
        kv_len_arr=found.row_lens,
        page_size=found.rows_per_block,
        ckv=latent[..., :value_dim],
        kpe=latent[..., value_dim:],
    )
