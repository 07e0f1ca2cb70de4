"""Small random models of every family that `KVStoreCache` serves, and prompts around their boundaries."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

VOCABULARY = 160
WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_KV: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2


def _make(name: str, fields: Mapping[str, Any]) -> Any:
    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: _make("Llama", _KV),
    "mistral": lambda: _make("Mistral", {**_KV, "sliding_window": WINDOW}),
    "qwen3": lambda: _make("Qwen3", {**_KV, "use_sliding_window": False}),
    "gemma3": lambda: _make(
        "Gemma3", {**_KV, "sliding_window": WINDOW, "layer_types": _WINDOWS, "query_pre_attn_scalar": 16}
    ),
    "gpt-oss": lambda: _make(
        "GptOss",
        {**_KV, "sliding_window": WINDOW, "layer_types": _WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v2": lambda: _make("DeepseekV2", {**_MLA, "topk_method": "greedy"}),
    "deepseek-v3": lambda: _make("DeepseekV3", _MLA),
    "deepseek-v3.2": lambda: _make(
        "DeepseekV32", {**_MLA, "index_topk": 16, "index_n_heads": 32, "index_head_dim": 16}
    ),
    "deepseek-v4": lambda: _make(
        "DeepseekV4",
        {
            **_COMMON,
            **_EXPERTS,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "qk_rope_head_dim": 8,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "sliding_window": WINDOW,
            "index_topk": 8,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
            "num_hash_layers": 1,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
        },
    ),
    "qwen3-next": lambda: _make(
        "Qwen3Next",
        {
            **_KV,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
"""By name, a function that makes the model: fp32, seeded, never ending a text."""
