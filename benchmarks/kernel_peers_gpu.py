"""Peers that other environments have: kernels of vLLM, SGLang, FlashInfer and FlashMLA, each where it is installed.

Signatures are those of SGLang 0.5.23 (kernels/ops/attention/decode_attention.py and kernels/ops/kvcache/mla_buffer.py),
of FlashInfer 0.7.4 (page.py, decode.py and mla/_batch_mla/_wrapper.py, in the form that older versions have), and of
FlashMLA's main branch (flash_mla/flash_mla_interface.py, commit 02fe0d0). Another signature ends as a row that says so.
"""

import math
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.kernel_cases import Contender
from benchmarks.kernel_data import World
from benchmarks.kernel_peer_views import (
    attention,
    before_step,
    byte_rows,
    compute_units,
    gpu_peer,
    latent_pages,
    listed_slots,
    outputs,
    page_write,
    power_of_two,
    split_latent,
)
from benchmarks.kernel_peers import Peer
from benchmarks.kernel_peers_vllm import BF16, FP8, KV, LATENT, MLA_COLUMNS, VLLM_PEERS

WORKSPACE_BYTES = 128 * 2**20
HEADS_OF_TILE, MAX_SPLITS, ROWS_OF_SPLIT = 16, 8, 32
"""Of SGLang's decode: heads of a program, splits of a sequence (MLA: as many as the chip takes), rows of a split."""
QUERIES_FOR_TENSOR_CORES = 4
SPARSE_HEADS, FP8_LIST, BF16_LIST = 64, 64, 128
"""Of FlashMLA's sparse kernels: multiples of heads, and of listed rows."""


def _sglang_write(name: str, world: World) -> Contender:
    """set_mla_kv_buffer_triton."""
    write = import_module("sglang.kernels.ops.kvcache.mla_buffer").set_mla_kv_buffer_triton
    view = world.view(filled=False)
    rows = view.tensor("latent").view(world.shape.num_rows, 1, -1)
    nope, rope = split_latent(world.rows.parts[0])

    def call() -> None:
        write(
            kv_buffer=rows,
            loc=world.slots,
            cache_k_nope=nope,
            cache_k_rope=rope,
            reserved_skip_index=-1,
        )

    return page_write(name, world, view, call, "rows given as two tensors")


def _sglang_decode(name: str, world: World) -> Contender:
    """decode_attention_fwd, which takes the slot of every row."""
    decode = import_module("sglang.kernels.ops.attention.decode_attention").decode_attention_fwd
    shape, device = world.shape, world.device
    pools = [torch.zeros_like(part).index_copy_(0, world.slots, part) for part in world.rows.parts]
    keys, values = pools[0], pools[-1][..., : world.value_dim]
    out, _ = outputs(world)
    max_splits, programs = MAX_SPLITS, shape.num_seqs * math.ceil(shape.num_heads / HEADS_OF_TILE)
    if shape.format == "latent":
        most = min(power_of_two(compute_units(device)), power_of_two(math.ceil(shape.rows / ROWS_OF_SPLIT)))
        max_splits = max(MAX_SPLITS, most)
    splits = max(1, min(max_splits, math.ceil(2 * compute_units(device) / programs)))
    num_splits = torch.full((shape.num_seqs,), splits, dtype=torch.int32, device=device)
    partials = torch.zeros(shape.num_seqs, shape.num_heads, max_splits, world.value_dim, device=device)
    lses = torch.zeros(shape.num_seqs, shape.num_heads, max_splits, device=device)

    def call() -> None:
        decode(
            q=world.query,
            k_buffer=keys,
            v_buffer=values,
            o=out,
            kv_indptr=world.cu_row_lens,
            kv_indices=world.slots,
            attn_logits=partials,
            attn_lse=lses,
            num_kv_splits=num_splits,
            max_kv_splits=max_splits,
            sm_scale=world.softmax_scale,
            k_scale=1.0,
            v_scale=1.0,
        )

    pool = "dense latent pool" if shape.format == "latent" else "dense pools of K and of V"
    return attention(name, world, lambda: (out,), call, f"{pool}; slots of all rows given; no LSE")


class _Pages:
    """FlashInfer's description of the pages of all sequences."""

    def __init__(self, world: World) -> None:
        shape, device = world.shape, world.device
        self.indptr = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device) * world.block_table.shape[1]
        self.indices = world.block_table.flatten()
        self.last_page_len = torch.full_like(world.row_lens, shape.rows_per_block)

    def append_arguments(self, sequences: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of both append kernels. `sequences`, `positions`: int32, of each new row."""
        return {
            "batch_indices": sequences.int(),
            "positions": positions.int(),
            "kv_indices": self.indices,
            "kv_indptr": self.indptr,
            "kv_last_page_len": self.last_page_len,
        }


def _flashinfer_write(name: str, world: World) -> Contender:
    """append_paged_kv_cache or append_paged_mla_kv_cache."""
    library: Any = import_module("flashinfer.page")
    shape, view = world.shape, world.view(filled=False)
    rows = torch.arange(shape.num_rows, device=world.device)
    given = _Pages(world).append_arguments(rows // shape.rows, rows % shape.rows)
    if shape.format == "kv":
        keys, values = world.rows.parts
        caches = (view.tensor("k"), view.tensor("v"))

        def call() -> None:
            library.append_paged_kv_cache(append_key=keys, append_value=values, paged_kv_cache=caches, **given)
    else:
        nope, rope = split_latent(world.rows.parts[0][:, 0])
        ckv, kpe = _latent_caches(world, view)

        def call() -> None:
            library.append_paged_mla_kv_cache(append_ckv=nope, append_kpe=rope, ckv_cache=ckv, kpe_cache=kpe, **given)

    return page_write(name, world, view, call, "sequence and position of each row given, not its slot")


def _latent_caches(world: World, view: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pages = latent_pages(view)
    return pages[..., : world.value_dim], pages[..., world.value_dim :]


def _flashinfer_decode(name: str, world: World) -> Contender:
    """BatchDecodeWithPagedKVCacheWrapper; in a decode step behind append_paged_kv_cache."""
    wrapper_of = import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
    shape, device, pages = world.shape, world.device, _Pages(world)
    is_step = shape.op == "decode_step"
    append = import_module("flashinfer.page").append_paged_kv_cache if is_step else None
    view, new, _ = before_step(world) if is_step else (world.view(filled=True), [], None)
    given = pages.append_arguments(torch.arange(shape.num_seqs, device=device), world.row_lens - 1)
    wrapper = wrapper_of(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        kv_layout="NHD",
        use_tensor_cores=shape.num_heads // shape.kv_heads >= QUERIES_FOR_TENSOR_CORES,
    )
    wrapper.plan(
        indptr=pages.indptr,
        indices=pages.indices,
        last_page_len=pages.last_page_len,
        num_qo_heads=shape.num_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.rows_per_block,
        q_data_type=world.query.dtype,
        kv_data_type=world.query.dtype,
        sm_scale=world.softmax_scale,
    )
    caches = (view.tensor("k"), view.tensor("v"))
    out, lse = outputs(world)

    def call() -> None:
        if append is not None:
            append(append_key=new[0], append_value=new[1], paged_kv_cache=caches, **given)
        wrapper.run(world.query, caches, out=out, lse=lse, return_lse=True)

    return attention(name, world, lambda: (out, lse * math.log(2)), call, "planned before; LSE of base 2")


def _flashinfer_mla(name: str, world: World) -> Contender:
    """BatchMLAPagedAttentionWrapper."""
    wrapper_of = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
    shape, device, pages = world.shape, world.device, _Pages(world)
    wrapper = wrapper_of(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="auto")
    wrapper.plan(
        qo_indptr=torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device),
        kv_indptr=pages.indptr,
        kv_indices=pages.indices,
        kv_len_arr=world.row_lens,
        num_heads=shape.num_heads,
        head_dim_ckv=world.value_dim,
        head_dim_kpe=shape.head_dim - world.value_dim,
        page_size=shape.rows_per_block,
        causal=False,
        sm_scale=world.softmax_scale,
        q_data_type=world.query.dtype,
        kv_data_type=world.query.dtype,
    )
    q_nope, q_pe = split_latent(world.query)
    ckv, kpe = _latent_caches(world, world.view(filled=True))
    out, _ = outputs(world)

    def call() -> None:
        wrapper.run(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, out=out)

    return attention(name, world, lambda: (out,), call, "planned before; queries given as two tensors; no LSE")


def _flash_mla_dense(module: str, name: str, world: World) -> Contender:
    """flash_mla_with_kvcache over rows as they are."""
    library: Any = import_module(module)
    heads, query = world.shape.num_heads, world.query[:, None]
    schedule, num_splits = library.get_mla_metadata(world.row_lens, heads, 1)
    pages = world.view(filled=True).tensor("latent")
    held: list[torch.Tensor] = []

    def call() -> None:
        held[:] = library.flash_mla_with_kvcache(
            q=query,
            k_cache=pages,
            block_table=world.block_table,
            cache_seqlens=world.row_lens,
            head_dim_v=world.value_dim,
            tile_scheduler_metadata=schedule,
            num_splits=num_splits,
            softmax_scale=world.softmax_scale,
        )

    return attention(name, world, lambda: (held[0][:, 0], held[1][:, :, 0]), call, "scheduled before")


def _flash_mla_fp8(module: str, name: str, world: World) -> Contender:
    """flash_mla_with_kvcache over listed rows of 656 bytes."""
    library: Any = import_module(module)
    query, heads = _padded_query(world)[:, None], world.shape.num_heads
    pages = byte_rows(world.view(filled=True))[:, :, None]
    indices = listed_slots(world, FP8_LIST)
    schedule, num_splits = library.get_mla_metadata(
        world.row_lens,
        query.shape[2],
        1,
        num_heads_q=query.shape[2],
        is_fp8_kvcache=True,
        topk=indices.shape[2],
    )
    held: list[torch.Tensor] = []

    def call() -> None:
        held[:] = library.flash_mla_with_kvcache(
            q=query,
            k_cache=pages,
            block_table=world.block_table,
            cache_seqlens=world.row_lens,
            head_dim_v=world.value_dim,
            tile_scheduler_metadata=schedule,
            num_splits=num_splits,
            softmax_scale=world.softmax_scale,
            is_fp8_kvcache=True,
            indices=indices,
        )

    return attention(
        name, world, lambda: (held[0][:, 0, :heads], held[1][:, :heads, 0]), call, f"scheduled before{_sparse(world)}"
    )


def _flash_mla_bf16(module: str, name: str, world: World) -> Contender:
    """flash_mla_sparse_fwd, whose pool is one list of rows."""
    library: Any = import_module(module)
    query, heads = _padded_query(world), world.shape.num_heads
    rows = world.view(filled=True).tensor("latent").view(world.shape.num_rows, 1, -1)
    indices = listed_slots(world, BF16_LIST)
    held: list[torch.Tensor] = []

    def call() -> None:
        held[:] = library.flash_mla_sparse_fwd(
            q=query, kv=rows, indices=indices, sm_scale=world.softmax_scale, d_v=world.value_dim
        )

    return attention(name, world, lambda: (held[0][:, :heads],), call, f"its prefill kernel; no LSE{_sparse(world)}")


def _padded_query(world: World) -> torch.Tensor:
    return pad(world.query, (0, 0, 0, -world.shape.num_heads % SPARSE_HEADS)).contiguous()


def _sparse(world: World) -> str:
    """In what the lists and heads of a sparse read are not those of the shape."""
    padded = f"; {world.shape.num_heads} heads padded to {SPARSE_HEADS}" if world.shape.num_heads % SPARSE_HEADS else ""
    return padded + ("; slots of all rows given" if world.shape.op == "mla_decode" else "")


def _flash_mla_peers(name: str, package: str, module: str) -> tuple[Peer, ...]:
    """FlashMLA's reads, from its own package or from one that brings them along."""
    pages: dict[str, tuple[object, ...]] = {"rows_per_block": (64,)}
    plain = {"format": LATENT, **pages, **MLA_COLUMNS}
    return (
        gpu_peer(f"{name} dense", package, ("mla_decode",), partial(_flash_mla_dense, module), **plain),
        gpu_peer(
            f"{name} sparse fp8",
            package,
            ("mla_decode", "sparse_mla_decode"),
            partial(_flash_mla_fp8, module),
            format=FP8,
            dtype=BF16,
            stride=(1,),
            **pages,
        ),
        gpu_peer(
            f"{name} sparse",
            package,
            ("sparse_mla_decode",),
            partial(_flash_mla_bf16, module),
            **{**plain, "dtype": BF16, "stride": (1,)},
        ),
    )


HALF: dict[str, tuple[object, ...]] = {"dtype": ("bf16", "fp16")}

GPU_PEERS: tuple[Peer, ...] = (
    *VLLM_PEERS,
    gpu_peer("SGLang set_mla_kv_buffer_triton", "sglang", ("write_rows",), _sglang_write, format=LATENT, stride=(1,)),
    gpu_peer("SGLang decode_attention_fwd", "sglang", ("mla_decode", "gqa_decode"), _sglang_decode, format=LATENT + KV),
    gpu_peer("FlashInfer append", "flashinfer", ("write_rows",), _flashinfer_write, format=KV, **HALF),
    gpu_peer("FlashInfer append", "flashinfer", ("write_rows",), _flashinfer_write, format=LATENT, **MLA_COLUMNS),
    gpu_peer("FlashInfer decode", "flashinfer", ("gqa_decode", "decode_step"), _flashinfer_decode, format=KV, **HALF),
    gpu_peer("FlashInfer MLA", "flashinfer", ("mla_decode",), _flashinfer_mla, format=LATENT, **MLA_COLUMNS),
    *_flash_mla_peers("FlashMLA", "flash_mla", "flash_mla"),
    *_flash_mla_peers("FlashMLA of vLLM", "vllm", "vllm.v1.attention.ops.flashmla"),
)
