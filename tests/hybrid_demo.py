"""The demo engine with small random models of hybrid families, and what transformers generates from each prompt."""

import functools
from typing import Any

import torch

from kvstore import KVStore, plan_cache
from kvstore.demo.engine import Engine, Request
from kvstore.demo.requests import Completion
from kvstore.demo.tiny import TINY

NEW_TOKENS = 24


@functools.cache
def reference(name: str) -> Any:
    """transformers' own model."""
    return TINY[name].reference(0)


def prompts(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts; the longest and the one after it begin with the same two and a half blocks."""
    own = TINY[name].prompts()
    generator = torch.Generator().manual_seed(7)
    return [*own, *(torch.randint(0, 199, (n,), generator=generator).tolist() for n in lengths)]


@functools.cache
def expected(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    """Greedy continuations, each prompt alone on transformers' own cache."""
    texts = []
    for prompt in prompts(name, lengths):
        input_ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        texts.append(reference(name).generate(input_ids, **options)[0, len(prompt) :].tolist())
    return texts


def make_store(name: str, layout: str, size: int | str, chunk: int, **options: Any) -> KVStore:
    """A store whose pool has `size` frames, or so much memory."""
    specs = TINY[name].caches(reference(name).config, torch.float32)
    pool = {"num_frames": size} if isinstance(size, int) else {"memory": size}
    limits = {"max_sequences": 8, "max_length": 512, "max_tokens_per_step": chunk, "debug": True}
    return KVStore(plan_cache(specs, layout=layout, **pool), "cpu", **{**limits, **options})


def make_engine(name: str, store: KVStore, chunk: int, **options: Any) -> Engine:
    """Eight seats."""
    return Engine(TINY[name].model(reference(name), 512), store, **{"max_running": 8, "chunk": chunk, **options})


def serve(engine: Engine, given: list[list[int]], samples: int = 1) -> list[Completion]:
    """Completions; all books are proved, and nothing is held afterwards."""
    completions = engine.generate([Request(prompt, NEW_TOKENS, n=samples) for prompt in given])
    engine.store.check()
    stats = engine.store.stats()
    assert stats.in_use == stats.fenced == stats.open_sequences == 0
    return completions
