"""Small random models of hybrid families: what they need to be served, without weights and without a network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore import specs_from_config
from kvstore.demo.deepseek_v4 import DeepseekV4, cache_specs
from kvstore.demo.gemma import Gemma3
from kvstore.demo.protocol import Model

VOCAB_SIZE = 199
MAX_LENGTH = 2048
NO_END = {"bos_token_id": None, "eos_token_id": None}

GEMMA3 = NO_END | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}

DEEPSEEK_V4 = NO_END | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 6,
    "hc_mult": 3,
    "max_position_embeddings": MAX_LENGTH,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.2,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """A family: how its transformers model is made, what its layers cache, and what computes it over a store.

    `reference(seed)` is a transformers model in float32, equal for equal seeds. `caches(config, dtype)` are the specs
    of its layers, in blocks of `block_size` tokens where a layer keeps every row. `model(reference, max_length)` is the
    forward pass.
    """

    reference: Callable[[int], Any]
    caches: Callable[[Any, torch.dtype], Mapping[str, Any]]
    model: Callable[[Any, int], Model]
    block_size: int

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Prompts around the family's block size, and two with a common beginning of two blocks and a half."""
        rng = np.random.default_rng(seed)
        size = self.block_size
        lengths = (3 * size, 1, size // 2, size - 1, size, 2 * size + 1, 3 * size)
        prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
        shared = 5 * size // 2
        prompts[-1][:shared] = prompts[0][:shared]
        return prompts


def _gemma3(seed: int) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3)).eval()


def _deepseek_v4(seed: int) -> Any:
    """Sinks, position biases and tables of experts are random as well: transformers leaves zeros, which say nothing."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = DeepseekV4ForCausalLM(DeepseekV4Config(**DEEPSEEK_V4)).eval()
        for name, weight in reference.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                torch.nn.init.normal_(weight, std=0.5)
        for name, table in reference.named_buffers():
            if name.endswith("tid2eid"):
                table.random_(0, reference.config.num_local_experts)
    return reference


TINY = {
    "gemma3-tiny": Tiny(
        _gemma3, lambda config, dtype: specs_from_config(config, kv_dtype=dtype, block_size=16), Gemma3, 16
    ),
    "deepseek-v4-tiny": Tiny(
        _deepseek_v4, lambda config, dtype: cache_specs(config, dtype, block_size=128), DeepseekV4, 128
    ),
}
"""By the name that `kvstore demo --model` knows."""
