"""Stores whose pages kernels of others can read, and sequences in them."""

from typing import Any

import numpy as np
import torch
from store_cases import store_of

import kvstore
from kvstore import KVStore, LayerSpec
from kvstore_kernels import dsv4_format, fp8_ds_mla_format, mxfp8_latent_format

BF16 = torch.bfloat16
FULL, WINDOW, LATENT = "layers.0.attn", "layers.1.attn", "layers.2.attn"


def gqa_store(**limits: Any) -> KVStore:
    """Pages of 16 rows: a full layer, and a window of 20; 64 new tokens at most, so the window's ring has 7 columns."""
    specs = {
        FULL: kvstore.full_attention(2, 64, dtype=BF16),
        WINDOW: kvstore.sliding_window(2, 64, dtype=BF16, window=20),
    }
    defaults = {"max_length": 512, "max_tokens_per_step": 64, "max_in_flight": 1, "layout": "overlay"}
    return store_of(specs, 120, **{**defaults, **limits})


def run(store: KVStore, seq_ids: np.ndarray, *counts: Any) -> None:
    for count in counts:
        batch = store.extend(seq_ids, count)
        store.commit(batch, np.zeros(batch.num_tokens, int))


def latent_store(spec: LayerSpec | None = None, **limits: Any) -> KVStore:
    """Pages of 64 latent rows, behind those of a wider layer in blocks of one slot tensor."""
    specs = {LATENT: spec or kvstore.latent(), FULL: kvstore.full_attention(2, 128, dtype=BF16, block_size=128)}
    return store_of(specs, 40, **{"max_length": 512, "max_tokens_per_step": 512, "layout": "overlay", **limits})


FP8_ROWS = {
    "656": (LayerSpec("latent", 64, fp8_ds_mla_format(), block_stride_multiple=656), (64, 656, 41984)),
    "584": (LayerSpec("latent", 64, dsv4_format(), block_stride_multiple=576), (64, 584, 37440)),
    "584, 2 rows": (LayerSpec("latent", 256, dsv4_format(), 128, block_stride_multiple=576), (2, 584, 1728)),
    "528": (LayerSpec("latent", 64, mxfp8_latent_format(), block_stride_multiple=528), (64, 528, 33792)),
}
