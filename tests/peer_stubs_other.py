"""SGLang 0.5.23, FlashInfer 0.7.4 and FlashMLA as modules, like those of peer_stubs."""

import math
from typing import Any

import torch
from peer_stubs import attend, decode_656, rows_of

Tensor = torch.Tensor


def set_mla_kv_buffer_triton(
    kv_buffer: Tensor, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor, *, reserved_skip_index: int = 0
) -> None:
    kept = loc != reserved_skip_index
    kv_buffer[loc[kept]] = torch.cat([cache_k_nope, cache_k_rope], 2)[kept]


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
    has_mla: bool = False,
    use_pdl: bool = False,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Any = None,
    enable_lean: bool | None = None,
    lean_Mp: Tensor | None = None,
    lean_Lp: Tensor | None = None,
    lean_Op: Tensor | None = None,
    lean_locks: Tensor | None = None,
    uneven_batch: Tensor | None = None,
) -> None:
    assert attn_lse.shape == (*q.shape[:2], max_kv_splits)
    assert int(num_kv_splits.max()) <= max_kv_splits
    assert attn_logits.shape == (*attn_lse.shape, v_buffer.shape[2])
    for seq_idx, (start, end) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)):
        slots = kv_indices[start:end]
        o[seq_idx], _ = attend(q[seq_idx], k_buffer[slots], v_buffer[slots] * v_scale, sm_scale * k_scale)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    assert isinstance(paged_kv_cache, tuple)
    assert kv_layout == "NHD"
    for cache, rows in zip(paged_kv_cache, (append_key, append_value), strict=True):
        cache[_places(cache, batch_indices, positions, kv_indices, kv_indptr)] = rows


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    assert ckv_cache is not None
    assert kpe_cache is not None
    at = _places(ckv_cache, batch_indices, positions, kv_indices, kv_indptr)
    ckv_cache[at], kpe_cache[at] = append_ckv, append_kpe


def _places(
    cache: Tensor, batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor
) -> tuple[Tensor, Tensor]:
    assert all(each.dtype == torch.int32 for each in (batch_indices, positions, kv_indices, kv_indptr))
    pages = kv_indices[kv_indptr[batch_indices.long()] + positions // cache.shape[1]]
    return pages.long(), (positions % cache.shape[1]).long()


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        assert not deprecated_positional_args
        assert set(kwargs) == {"q_data_type", "kv_data_type", "sm_scale"}
        self.indptr, self.indices, self.scale = indptr.tolist(), indices, kwargs["sm_scale"]
        self.lens = (indptr.diff() - 1) * page_size + last_page_len
        self.shape = (num_qo_heads, num_kv_heads, head_dim)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[Tensor, Tensor]:
        assert out is not None
        assert lse is not None
        assert return_lse
        assert self.shape == (q.shape[1], *paged_kv_cache[0].shape[2:])
        for seq_idx, length in enumerate(self.lens.tolist()):
            pages = self.indices[self.indptr[seq_idx] : self.indptr[seq_idx + 1]]
            keys, values = (rows_of(cache, pages, length) for cache in paged_kv_cache)
            out[seq_idx], natural = attend(q[seq_idx], keys, values, self.scale)
            lse[seq_idx] = natural / math.log(2)
        return out, lse


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None: ...

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
        **kwargs: Any,
    ) -> None:
        assert not kwargs
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1))
        self.indptr, self.indices, self.lens = kv_indptr.tolist(), kv_indices, kv_len_arr
        self.scale = sm_scale

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert out is not None
        assert not kwargs
        query = torch.cat([q_nope, q_pe], 2)
        for seq_idx, length in enumerate(self.lens.tolist()):
            pages = self.indices[self.indptr[seq_idx] : self.indptr[seq_idx + 1]]
            ckv, kpe = (rows_of(cache, pages, length) for cache in (ckv_cache, kpe_cache))
            rows = torch.cat([ckv, kpe], 1)[:, None]
            out[seq_idx], _ = attend(query[seq_idx], rows, ckv[:, None], self.scale)
        return out


class FlashMLASchedMeta: ...


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    assert num_splits is None
    assert softmax_scale is not None
    assert q.shape[1] == 1
    assert k_cache.shape[1:3] == (64, 1)
    assert is_fp8_kvcache == (indices is not None)
    out, lse = torch.zeros_like(q[..., :head_dim_v]), torch.zeros(len(q), q.shape[2], 1)
    for seq_idx in range(len(q)):
        if indices is None:
            assert block_table is not None
            assert cache_seqlens is not None
            rows = rows_of(k_cache, block_table[seq_idx], int(cache_seqlens[seq_idx]))
        else:
            rows = _listed(decode_656(k_cache).flatten(0, 1), indices[seq_idx, 0], 64)
            assert q.shape[2] in (64, 128)
        out[seq_idx, 0], lse[seq_idx, :, 0] = attend(q[seq_idx, 0], rows, rows[..., :head_dim_v], softmax_scale)
    return out, lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    assert q.shape[1] in (64, 128)
    out, lse = torch.zeros_like(q[..., :d_v]), torch.zeros(q.shape[:2])
    for idx, (query, listed) in enumerate(zip(q, indices[:, 0], strict=True)):
        rows = _listed(kv, listed, 128)
        out[idx], lse[idx] = attend(query, rows, rows[..., :d_v], sm_scale)
    return out, lse, lse


def _listed(rows: Tensor, indices: Tensor, multiple: int) -> Tensor:
    assert indices.dtype == torch.int32
    assert len(indices) % multiple == 0
    return rows[indices[indices >= 0].long()]


SGLANG: dict[str, dict[str, Any]] = {
    "sglang.kernels.ops.kvcache.mla_buffer": {"set_mla_kv_buffer_triton": set_mla_kv_buffer_triton},
    "sglang.kernels.ops.attention.decode_attention": {"decode_attention_fwd": decode_attention_fwd},
}
FLASHINFER: dict[str, dict[str, Any]] = {
    "flashinfer.page": {
        "append_paged_kv_cache": append_paged_kv_cache,
        "append_paged_mla_kv_cache": append_paged_mla_kv_cache,
    },
    "flashinfer.decode": {"BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper},
    "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": BatchMLAPagedAttentionWrapper},
}
FLASH_MLA: dict[str, Any] = {
    each.__name__: each for each in (get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd)
}
