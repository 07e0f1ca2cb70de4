"""Stores for the proof of the books: groups of every kind, in every layout, with pools from tiny to roomy."""

from dataclasses import dataclass, field
from typing import Any

import torch

import kvstore
from kvstore import CacheGroup, CachePlan, KVStore, LayerSpec, plan_cache
from kvstore_kernels.formats import kv_format, latent_format

F32, F16 = torch.float32, torch.float16
MAX_LENGTH = 48
MAX_SEQUENCES = 5
MAX_TOKENS = 12  # of a step: few, so that the columns of window tables are used again
ROOMY = 1000  # frames: nothing is ever evicted

FULL = kvstore.full_attention(1, 8, dtype=F32, block_size=4)
FULL_6 = kvstore.latent(12, 8, dtype=F32, block_size=6)
FULL_2 = kvstore.full_attention(2, 8, dtype=F32, block_size=2)
FULL_HALF = kvstore.full_attention(2, 8, dtype=F16, block_size=4)
COMPRESSED = kvstore.latent(12, 8, dtype=F32, block_size=8, tokens_per_row=4)
WINDOW = kvstore.sliding_window(1, 8, dtype=F32, block_size=2, window=5)
WINDOW_4 = kvstore.sliding_window(1, 8, dtype=F16, block_size=4, window=7)
LATENT_WINDOW = LayerSpec("latent_window", 3, latent_format(12, 8, F32), window=4)
CHUNKED = kvstore.chunked_attention(1, 8, dtype=F32, block_size=4, chunk=6)
CHUNKED_2 = kvstore.chunked_attention(1, 8, dtype=F32, block_size=2, chunk=8)
RING = LayerSpec("ring", 5, kv_format(1, 8, dtype=F32))
RING_3 = LayerSpec("ring", 3, kv_format(1, 8, dtype=F32))
RING_4 = LayerSpec("ring", 4, kv_format(1, 8, dtype=F32))  # beside states: these are hit a whole number of blocks back
STATE = kvstore.recurrent_state([("ssm", (2, 4), F32), ("conv", (6,), F16)], block_size=4)
STATE_SAVED = kvstore.recurrent_state([("ssm", (2, 4), F32)], block_size=4, checkpoint_blocks=1)


@dataclass(frozen=True)
class Setup:
    """A plan but for its number of frames, and the options of the store."""

    layers: dict[str, LayerSpec] | list[CacheGroup]
    layout: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    def plan(self, num_frames: int) -> CachePlan:
        return plan_cache(self.layers, num_frames=num_frames, layout=self.layout)

    def store(self, num_frames: int, device: str | None = "cpu", **more: Any) -> KVStore:
        limits = {"max_sequences": MAX_SEQUENCES, "max_length": MAX_LENGTH, "max_tokens_per_step": MAX_TOKENS}
        return KVStore(self.plan(num_frames), device, **{**limits, **self.options, **more})


def _layers(*specs: LayerSpec) -> dict[str, LayerSpec]:
    return {f"layers.{number}.attn": spec for number, spec in enumerate(specs)}


def _mixed_rows() -> list[CacheGroup]:
    """One group whose layers differ in tokens per row, and one of plain rows beside it."""
    plain = kvstore.full_attention(1, 8, dtype=F32, block_size=8)
    layers = {"layers.0.attn": plain, "layers.0.indexer": COMPRESSED}
    return [
        CacheGroup("mixed", layers, 8, plain.retention),
        CacheGroup("full", {"layers.1.attn": FULL}, 4, FULL.retention),
    ]


ROWS = {
    "full": Setup(_layers(FULL, FULL)),
    "full, debug": Setup(_layers(FULL), options={"debug": True}),
    "full, one in flight": Setup(_layers(FULL, FULL_6), options={"max_in_flight": 1}),
    "two full": Setup(_layers(FULL, FULL_6), "bestfit"),
    "full frames": Setup(_layers(FULL, FULL_6, FULL_2), "frames", {"debug": True}),
    "tokens per row": Setup(_mixed_rows()),
    "tokens per row, frames": Setup(_layers(FULL, COMPRESSED), "frames"),
    "no prefixes": Setup(_layers(FULL, WINDOW), options={"prefix_caching": False}),
    "window": Setup(_layers(FULL, WINDOW), "overlay"),
    "window alone": Setup(_layers(WINDOW), options={"debug": True}),
    "window, rollback": Setup(_layers(FULL, WINDOW), options={"rollback": 3}),
    "window, tail": Setup(_layers(FULL, WINDOW), options={"stored": "tail"}),
    "window, tail, rollback": Setup(_layers(FULL, WINDOW_4), options={"stored": "tail", "rollback": 3, "debug": True}),
    "window, frames": Setup(_layers(FULL, WINDOW_4, FULL_2), "frames", {"rollback": 2}),
    "latent window": Setup(_layers(FULL_HALF, LATENT_WINDOW), "bestfit"),
    "chunked": Setup(_layers(FULL, CHUNKED), "buckets"),
    "chunked, rollback": Setup(_layers(CHUNKED_2, WINDOW), options={"rollback": 4, "stored": "tail"}),
}
"""Groups that keep rows of tokens."""

FIXED = {
    "ring": Setup(_layers(FULL, RING), "overlay"),
    "ring, window": Setup(_layers(FULL, RING, WINDOW), options={"debug": True}),
    "two rings, frames": Setup(_layers(RING, RING_3, FULL_6), "frames"),
    "state": Setup(_layers(FULL, STATE)),
    "state alone": Setup(_layers(STATE), options={"debug": True}),
    "state, saved": Setup(_layers(FULL, STATE_SAVED), "overlay"),
    "state, saved, one in flight": Setup(_layers(FULL_6, STATE_SAVED), options={"max_in_flight": 1, "debug": True}),
    "state, frames": Setup(_layers(FULL_6, STATE, WINDOW), "frames", {"debug": True}),
    "state, tail": Setup(_layers(STATE_SAVED, WINDOW), options={"stored": "tail"}),
    "ring, state": Setup(_layers(RING_4, STATE_SAVED, FULL)),
    "all kinds": Setup(_layers(FULL_HALF, WINDOW, CHUNKED, RING_4, STATE), "bestfit"),
    "all kinds, frames": Setup(_layers(FULL, LATENT_WINDOW, CHUNKED_2, RING_4, STATE_SAVED), "frames", {"debug": True}),
    "all kinds, tail": Setup(_layers(COMPRESSED, WINDOW, CHUNKED, RING_4, STATE), options={"stored": "tail"}),
}
"""Groups with rings and states among them."""

SETUPS = {**ROWS, **FIXED}
