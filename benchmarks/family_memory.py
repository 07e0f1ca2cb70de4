"""DeepSeek V4: bytes that one sequence holds in a store's groups, and in transformers' own cache."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from kvstore import KVStore, plan_cache
from kvstore.integrations.transformers import plan_model
from kvstore.models.bundled import CONFIGS

CONFIG = CONFIGS / "deepseek-v4-flash.json"
LENGTHS = (4096, 32768)
CHUNK = 4096

MODEL = DeepseekV4ForCausalLM
"""To import the model is what tells `DynamicCache` of its layers."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one sequence of `length` tokens: by group in the store, and in all in transformers' cache."""

    length: int
    rows: str
    by_group: dict[str, int]
    in_transformers: int | None

    @property
    def in_store(self) -> int:
        """Bytes of all groups."""
        return sum(self.by_group.values())


def flash_config() -> DeepseekV4Config:
    """DeepSeek V4 Flash in bfloat16."""
    fields = json.loads(CONFIG.read_text(encoding="utf-8"))
    return DeepseekV4Config(**{**fields, "dtype": "bfloat16", "quantization_config": None})


def measure() -> list[Held]:
    """Rows of bfloat16 as transformers has them, and beside them the packed rows of 584 bytes."""
    config = flash_config()
    plain = plan_model(config, memory="24GiB")
    packed = plan_cache(CONFIG, memory="24GiB", kv_dtype="fp8_ds_mla")
    return [
        Held(length, rows, held_in_store(plan, length), held if rows == "bf16" else None)
        for length in LENGTHS
        for held in [held_in_transformers(config, length)]
        for rows, plan in (("bf16", plain), ("fp8_ds_mla", packed))
    ]


def held_in_store(plan: Any, length: int) -> dict[str, int]:
    """Bytes of the blocks of one sequence, group by group, after its prompt was computed in chunks."""
    store = KVStore(plan, None, max_sequences=1, max_length=length + 1, max_tokens_per_step=CHUNK, prefix_caching=False)
    (seq_id,) = store.open([range(length)]).seq_ids
    for start in range(0, length, CHUNK):
        store.commit(store.extend([seq_id], CHUNK), range(start, start + CHUNK))
    store.check()
    return {group.name: group.held_bytes for group in store.stats().groups}


def held_in_transformers(config: DeepseekV4Config, length: int) -> int:
    """Bytes of the tensors of a `DynamicCache`, which is given rows without data as the model would.

    The window's rows are counted as they are after one decode step: behind a prefill they are a view that keeps the
    rows of the whole prompt alive.
    """
    cache = DynamicCache(config=config)
    for layer in cache.layers:
        rows = torch.empty(1, 1, length, config.head_dim, dtype=torch.bfloat16, device="meta")
        layer.update(rows, rows)
        for name in getattr(layer, "compressed_kv", ()):
            overlaps = hasattr(layer, "overlap_kv")
            dim = config.index_head_dim if name == "indexer" else config.head_dim
            inputs = torch.empty(1, length, dim * (1 + overlaps), dtype=torch.bfloat16, device="meta")
            kv, gate, _ = layer.store_compression_weights(name, inputs, inputs)
            if overlaps:
                chunks = [part.unflatten(1, (-1, layer.compress_rate)) for part in (kv, gate.float())]
                layer.update_overlap_state(name, *chunks, dim)
            layer.update_compressor_states(name, kv[:, :: layer.compress_rate, :dim])
    return sum(map(_bytes_of, cache.layers))


def _bytes_of(layer: Any) -> int:
    tensors = [layer.keys]  # values are the same tensor
    for states in ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate"):
        tensors += getattr(layer, states, {}).values()
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)
