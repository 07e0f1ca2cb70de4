"""vLLM 0.33's KVCacheManager and what it is made with, as modules: their signatures, one group, blocks in turn."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int = field(kw_only=True)
    head_size: int = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: FullAttentionSpec


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[KVCacheGroupSpec]


@dataclass
class SamplingParams:
    max_tokens: int


class Request:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[Any] | None = None,
        lora_request: Any = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Any = None,
        block_hasher: Callable[["Request"], list[bytes]] | None = None,
    ) -> None:
        assert prompt_token_ids is not None
        assert block_hasher is not None
        self.request_id, self.all_token_ids, self.num_computed_tokens = request_id, list(prompt_token_ids), 0
        self.hasher, self.block_hashes = block_hasher, block_hasher(self)

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        self.all_token_ids += [token_ids] if isinstance(token_ids, int) else token_ids
        self.block_hashes = self.hasher(self)


class KVCacheManager:
    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
    ) -> None:
        (group,) = kv_cache_config.kv_cache_groups
        self.block_size = group.kv_cache_spec.block_size
        assert scheduler_block_size == hash_block_size == self.block_size
        self.free = list(range(kv_cache_config.num_blocks - 1, 0, -1))
        self.tables: dict[str, list[int]] = {}

    def new_step_starts(self) -> None: ...

    def allocate_slots(self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0) -> object | None:
        end = request.num_computed_tokens + num_new_tokens
        assert end <= len(request.all_token_ids)
        table = self.tables.setdefault(request.request_id, [])
        while len(table) * self.block_size < end:
            if not self.free:
                return None
            table.append(self.free.pop())
        return table

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.tables[request_id],)


def sha256(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def get_request_block_hasher(
    block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> Callable[[Request], list[bytes]]:
    return lambda request: [
        caching_hash_fn(request.all_token_ids[:end])
        for end in range(block_size, len(request.all_token_ids) + 1, block_size)
    ]


VLLM_BOOKS: dict[str, dict[str, Any]] = {
    "vllm.v1.kv_cache_interface": {
        each.__name__: each for each in (FullAttentionSpec, KVCacheGroupSpec, KVCacheConfig)
    },
    "vllm.v1.core.kv_cache_utils": {
        "init_none_hash": lambda hash_fn: None,
        "get_request_block_hasher": get_request_block_hasher,
    },
    "vllm.v1.core.kv_cache_manager": {"KVCacheManager": KVCacheManager},
    "vllm.v1.request": {"Request": Request},
    "vllm.sampling_params": {"SamplingParams": SamplingParams},
    "vllm.utils.hashing": {"sha256": sha256},
}
