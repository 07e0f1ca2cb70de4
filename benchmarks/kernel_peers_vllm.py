"""vLLM's kernels as peers: writes and gathers of its CUDA ops, its Triton write and its two Triton reads.

Signatures are those of vLLM 0.33.0: vllm/_custom_ops.py and triton_reshape_and_cache_flash.py,
triton_decode_attention.py and triton_unified_attention.py under vllm/v1/attention/ops/; scratch and splits as its own
backends choose them (mla/triton_mla.py and triton_attn.py under vllm/v1/attention/backends/). All work on our pages.
"""

from functools import partial
from importlib import import_module

import torch

from benchmarks.kernel_cases import Contender
from benchmarks.kernel_data import World
from benchmarks.kernel_peer_views import (
    attention,
    before_step,
    byte_rows,
    compute_units,
    gpu_peer,
    latent_pages,
    outputs,
    page_write,
    power_of_two,
    row_copy,
    split_latent,
)
from benchmarks.kernel_peers import Peer

OPS = "vllm._custom_ops"
TRITON_OPS = "vllm.v1.attention.ops"
ROWS_OF_SPLIT, SPLITS_OF_UNIT = 512, 2
LEAST_GRID, SEGMENTS = 128, 16
"""Of unified_attention: programs below which it splits a sequence, and into how many parts."""


def _kv_write(module: str, function: str, name: str, world: World) -> Contender:
    """reshape_and_cache_flash, of CUDA or Triton."""
    write = getattr(import_module(module), function)
    view = world.view(filled=False)
    keys, values = world.rows.parts
    given = _kv_write_arguments(world)

    def call() -> None:
        write(
            key=keys,
            value=values,
            key_cache=view.tensor("k"),
            value_cache=view.tensor("v"),
            slot_mapping=world.slots,
            **given,
        )

    return page_write(name, world, view, call)


def _kv_write_arguments(world: World) -> dict[str, object]:
    one = torch.ones(1, device=world.device)
    return {"kv_cache_dtype": "auto", "k_scale": one, "v_scale": one}


def _latent_write(cache_dtype: str, name: str, world: World) -> Contender:
    """concat_and_cache_mla."""
    write = import_module(OPS).concat_and_cache_mla
    view = world.view(filled=False)
    pages = latent_pages(view) if cache_dtype == "auto" else byte_rows(view)
    nope, rope = split_latent(world.rows.parts[0][:, 0])
    scale = torch.ones(1, device=world.device)

    def call() -> None:
        write(
            kv_c=nope,
            k_pe=rope,
            kv_cache=pages,
            slot_mapping=world.slots,
            kv_cache_dtype=cache_dtype,
            scale=scale,
        )

    return page_write(name, world, view, call, "rows given as two tensors")


def _gather(name: str, world: World) -> Contender:
    """cp_gather_cache."""
    gather = import_module(OPS).cp_gather_cache
    pages, out = latent_pages(world.view(filled=True)), _row_tensor(world)

    def call() -> None:
        gather(
            src_cache=pages,
            dst=out,
            block_table=world.block_table,
            cu_seq_lens=world.cu_row_lens,
            batch_size=world.shape.num_seqs,
        )

    return row_copy(name, world, out, call)


def _gather_dequant(name: str, world: World) -> Contender:
    """gather_and_maybe_dequant_cache."""
    gather = import_module(OPS).gather_and_maybe_dequant_cache
    pages, out = latent_pages(world.view(filled=True)), _row_tensor(world)
    sequences = torch.arange(world.shape.num_seqs, dtype=torch.int32, device=world.device)
    token_to_seq, scale = sequences.repeat_interleave(world.shape.rows), torch.ones(1, device=world.device)

    def call() -> None:
        gather(
            src_cache=pages,
            dst=out,
            block_table=world.block_table,
            cu_seq_lens=world.cu_row_lens,
            token_to_seq=token_to_seq,
            num_tokens=world.shape.num_rows,
            kv_cache_dtype="auto",
            scale=scale,
        )

    return row_copy(name, world, out, call, "sequence of each row given")


def _gather_fp8(name: str, world: World) -> Contender:
    """cp_gather_and_upconvert_fp8_kv_cache."""
    gather = import_module(OPS).cp_gather_and_upconvert_fp8_kv_cache
    pages, out = byte_rows(world.view(filled=True)), _row_tensor(world)
    starts = world.cu_row_lens[:-1].contiguous()

    def call() -> None:
        gather(
            src_cache=pages,
            dst=out,
            block_table=world.block_table,
            workspace_starts=starts,
            batch_size=world.shape.num_seqs,
        )

    return row_copy(name, world, out, call)


def _row_tensor(world: World) -> torch.Tensor:
    return torch.zeros_like(world.rows.read[0][:, 0])


def _decode(name: str, world: World) -> Contender:
    """decode_attention_fwd over K and V or latent rows."""
    decode = import_module(f"{TRITON_OPS}.triton_decode_attention").decode_attention_fwd
    shape, view = world.shape, world.view(filled=True)
    is_mla = shape.format == "latent"
    keys = view.tensor("latent" if is_mla else "k")
    values = keys[..., : world.value_dim] if is_mla else view.tensor("v")
    out, lse = outputs(world)
    splits = min(power_of_two(max(1, shape.rows // ROWS_OF_SPLIT)), SPLITS_OF_UNIT * compute_units(world.device))
    partials = torch.zeros(shape.num_seqs, shape.num_heads, splits, world.value_dim + 1, device=world.device)

    def call() -> None:
        decode(
            q=world.query,
            k_buffer=keys,
            v_buffer=values,
            o=out,
            lse=lse,
            req_to_token=world.block_table,
            b_seq_len=world.row_lens,
            attn_logits=partials,
            num_kv_splits=splits,
            sm_scale=world.softmax_scale,
            page_size=shape.rows_per_block,
            is_mla=is_mla,
        )

    return attention(name, world, lambda: (out, lse), call)


def _unified(name: str, world: World) -> Contender:
    """unified_attention; in a decode step behind reshape_and_cache_flash."""
    read = import_module(f"{TRITON_OPS}.triton_unified_attention").unified_attention
    shape, device = world.shape, world.device
    is_step = shape.op == "decode_step"
    write = import_module(OPS).reshape_and_cache_flash if is_step else None
    view, new, slots = before_step(world) if is_step else (world.view(filled=True), [], world.slots)
    given = _kv_write_arguments(world)
    out = torch.zeros_like(world.query)
    cu_seqlens_q = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=device)
    segments = torch.zeros(shape.num_seqs, shape.num_heads, SEGMENTS, power_of_two(shape.head_dim), device=device)
    most, sums = torch.zeros_like(segments[..., 0]), torch.zeros_like(segments[..., 0])

    def call() -> None:
        keys, values = view.tensor("k"), view.tensor("v")
        if write is not None:
            write(key=new[0], value=new[1], key_cache=keys, value_cache=values, slot_mapping=slots, **given)
        read(
            q=world.query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=1,
            seqused_k=world.row_lens,
            max_seqlen_k=shape.rows,
            softmax_scale=world.softmax_scale,
            causal=True,
            window_size=(-1, -1),
            block_table=world.block_table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=LEAST_GRID // shape.kv_heads,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=segments,
            softmax_segm_max=most,
            softmax_segm_expsum=sums,
        )

    return attention(name, world, lambda: (out,), call, "no LSE")


FLASH_WRITE = "reshape_and_cache_flash"
LATENT, KV, FP8, BF16 = ("latent",), ("kv",), ("fp8_ds_mla",), ("bf16",)
MLA_COLUMNS = {"head_dim": (576,), "dtype": ("bf16", "fp16")}

VLLM_PEERS: tuple[Peer, ...] = (
    gpu_peer(f"vLLM {FLASH_WRITE}", "vllm", ("write_rows",), partial(_kv_write, OPS, FLASH_WRITE), format=KV),
    gpu_peer(
        f"vLLM triton_{FLASH_WRITE}",
        "vllm",
        ("write_rows",),
        partial(_kv_write, f"{TRITON_OPS}.triton_{FLASH_WRITE}", f"triton_{FLASH_WRITE}"),
        format=KV,
    ),
    gpu_peer("vLLM concat_and_cache_mla", "vllm", ("write_rows",), partial(_latent_write, "auto"), format=LATENT),
    gpu_peer(
        "vLLM concat_and_cache_mla",
        "vllm",
        ("write_rows",),
        partial(_latent_write, "fp8_ds_mla"),
        format=FP8,
        dtype=BF16,
    ),
    gpu_peer("vLLM cp_gather_cache", "vllm", ("gather_rows",), _gather, format=LATENT),
    gpu_peer(
        "vLLM gather_and_maybe_dequant_cache", "vllm", ("gather_rows",), _gather_dequant, format=LATENT, **MLA_COLUMNS
    ),
    gpu_peer(
        "vLLM cp_gather_and_upconvert_fp8_kv_cache", "vllm", ("gather_rows",), _gather_fp8, format=FP8, dtype=BF16
    ),
    gpu_peer("vLLM decode_attention_fwd", "vllm", ("mla_decode", "gqa_decode"), _decode, format=LATENT + KV),
    gpu_peer("vLLM unified_attention", "vllm", ("gqa_decode", "decode_step"), _unified, format=KV),
)
