"""vLLM 0.33 as modules: functions with the signatures they are known to have, in plain torch.

`install` puts some of them where an import finds them. What they compute is worked out from the documented meaning of
their arguments, in fp64, one sequence at a time.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

Tensor = torch.Tensor


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Makes modules importable until the test ends. `modules`: dotted name -> what is in it."""
    packages = {name.partition(".")[0] for name in modules}
    for name in sorted(packages | set(modules)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query [heads, dim] over rows [n, kv_heads, dim]: output [heads, dim of V] and natural LSE [heads]."""
    groups = query.shape[0] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(groups, 1) for each in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query.double(), keys) * scale
    return torch.einsum("hn,nhd->hd", scores.softmax(1), values), scores.logsumexp(1)


def rows_of(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first rows behind a list of pages; cache [pages, rows, ...]."""
    return cache[pages.long()].flatten(0, 1)[:length]


def decode_656(cache: Tensor) -> Tensor:
    """uint8 [..., 656] -> fp32 [..., 576]."""
    codes = cache[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = cache[..., 512:528].contiguous().view(torch.float32).repeat_interleave(128, -1)
    return torch.cat([codes * scales, cache[..., 528:].contiguous().view(torch.bfloat16).float()], -1)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    assert kv_cache_dtype == "auto"
    assert slot_mapping.dtype == torch.int64
    at = (slot_mapping // key_cache.shape[1], slot_mapping % key_cache.shape[1])
    key_cache[at], value_cache[at] = key, value


def triton_reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    interleaved_v_pack_factor: int = 0,
) -> None:
    reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
    skip_scale: bool = False,
) -> None:
    at = (slot_mapping // kv_cache.shape[1], slot_mapping % kv_cache.shape[1])
    if kv_cache_dtype == "auto":
        kv_cache[at] = torch.cat([kv_c, k_pe], 1)
        return
    assert kv_cache_dtype == "fp8_ds_mla"
    assert kv_cache.dtype == torch.uint8
    tiles = kv_c.float().view(len(kv_c), 4, 128)
    least = (tiles.abs().amax(2) / 448).clamp(min=1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(least)))
    codes = (tiles / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    kv_cache[at] = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), k_pe.view(torch.uint8)], 1)


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    for seq_idx in range(batch_size):
        start, end = cu_seq_lens[seq_idx : seq_idx + 2].tolist()
        dst[start:end] = rows_of(src_cache, block_table[seq_idx], end - start)


def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Tensor,
    seq_starts: Tensor | None = None,
) -> None:
    assert kv_cache_dtype == "auto"
    assert num_tokens == len(token_to_seq)
    lens = torch.bincount(token_to_seq, minlength=len(block_table))
    assert torch.equal(lens, cu_seq_lens.diff())
    cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, len(block_table))


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
    host_cache: Tensor | None = None,
    host_row_ids: Tensor | None = None,
    device_row_ids: Tensor | None = None,
) -> None:
    assert len(workspace_starts) == batch_size
    ends = [*workspace_starts[1:].tolist(), len(dst)]
    for seq_idx, (start, end) in enumerate(zip(workspace_starts.tolist(), ends, strict=True)):
        dst[start:end] = decode_656(rows_of(src_cache, block_table[seq_idx], end - start)).to(dst.dtype)


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    lse: Tensor,
    req_to_token: Tensor,
    b_seq_len: Tensor,
    attn_logits: Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int = 1,
    logit_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    is_mla: bool = False,
) -> None:
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, v_buffer.shape[3] + 1)
    assert page_size == k_buffer.shape[1]
    assert is_mla == (k_buffer.shape[3] != v_buffer.shape[3])
    for seq_idx, length in enumerate(b_seq_len.tolist()):
        keys, values = (rows_of(cache, req_to_token[seq_idx], length) for cache in (k_buffer, v_buffer))
        o[seq_idx], lse[seq_idx] = attend(q[seq_idx], keys, values, sm_scale)


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: Tensor | None = None,
    softmax_segm_max: Tensor | None = None,
    softmax_segm_expsum: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    rswa_prefix_lens: Tensor | None = None,
    rswa_window: int | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: int = 0,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    assert causal
    assert window_size == (-1, -1)
    assert softcap == 0
    assert max_seqlen_q == 1
    assert cu_seqlens_q.tolist() == list(range(len(q) + 1))
    assert max_seqlen_k == int(seqused_k.max())
    assert softmax_segm_max is not None
    assert softmax_segm_max.shape == (*q.shape[:2], num_par_softmax_segments)
    for seq_idx, length in enumerate(seqused_k.tolist()):
        keys, values = (rows_of(cache, block_table[seq_idx], length) for cache in (k, v))
        out[seq_idx], _ = attend(q[seq_idx], keys, values, softmax_scale)


VLLM: dict[str, dict[str, Any]] = {
    "vllm._custom_ops": {
        each.__name__: each
        for each in (
            reshape_and_cache_flash,
            concat_and_cache_mla,
            cp_gather_cache,
            gather_and_maybe_dequant_cache,
            cp_gather_and_upconvert_fp8_kv_cache,
        )
    },
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash": {
        "triton_reshape_and_cache_flash": triton_reshape_and_cache_flash
    },
    "vllm.v1.attention.ops.triton_decode_attention": {"decode_attention_fwd": decode_attention_fwd},
    "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": unified_attention},
}
