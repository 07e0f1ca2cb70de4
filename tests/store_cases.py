"""Small stores, and the steps that tests take with them."""

from typing import Any

import numpy as np
import torch

import kvstore
from kvstore import KVStore

LAYER = "layers.0.attn"


def make_store(num_frames: int = 64, block_size: int = 4, **limits: Any) -> KVStore:
    specs = {
        f"layers.{i}.attn": kvstore.full_attention(2, 8, dtype=torch.float32, block_size=block_size) for i in range(2)
    }
    plan = kvstore.plan_cache(specs, num_frames=num_frames)
    defaults = {"max_sequences": 8, "max_length": 64, "max_tokens_per_step": 128}
    return KVStore(plan, "cpu", **{**defaults, **limits})


def make_hybrid(num_frames: int = 64, window: int = 6, **limits: Any) -> KVStore:
    """A full group with blocks of 4 and a window group with blocks of 2, of another dtype, in one arena."""
    specs = {
        "layers.0.attn": kvstore.full_attention(2, 8, dtype=torch.float16, block_size=4),
        "layers.1.attn": kvstore.sliding_window(2, 8, dtype=torch.float32, block_size=2, window=window),
    }
    plan = kvstore.plan_cache(specs, num_frames=num_frames)
    defaults = {"max_sequences": 8, "max_length": 64, "max_tokens_per_step": 16}
    return KVStore(plan, "cpu", **{**defaults, **limits})


def rows_for(tokens: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row [2, 8] per token that names the token."""
    return torch.as_tensor(np.asarray(tokens), dtype=dtype)[:, None, None].repeat(1, 2, 8)


def prefill(store: KVStore, *prompts: Any) -> np.ndarray:
    """Opens prompts and commits what is not cached, in one step each."""
    opened = store.open(list(prompts))
    counts = [len(prompt) - cached for prompt, cached in zip(prompts, opened.cached_tokens.tolist(), strict=True)]
    batch = store.extend(opened.seq_ids, counts)
    fed = [np.asarray(prompt)[len(prompt) - count :] for prompt, count in zip(prompts, counts, strict=True)]
    store.commit(batch, np.concatenate(fed))
    store.check()
    return opened.seq_ids
