"""Whether a model gives the same tokens on a store's pages as on transformers' own cache."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.family_models import FAMILIES, VOCABULARY, WINDOW
from kvstore import KVStore
from kvstore.integrations.transformers import KVStoreCache, plan_model, register_attention

NEW_TOKENS = 64
MAX_LENGTH = 512
LAYOUTS = ("buckets", "bestfit", "overlay", "frames")
ATTENTIONS = ("columns", "pages")
"""transformers' own attention function over the columns that the cache gathers, and ours, which reads pages."""

MIXED = ((1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 16, 32, 64, 65),)
"""Lengths of the prompts of one padded batch: around the window, and whole blocks."""

EQUAL = tuple((n, n) for n in (1, 3, 4, 5, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 127, 128, 129, 256))
"""DeepSeek V4: batches of one length each, around the window and the compressed rows of 4 and of 128 tokens."""

SEEDS = {3: 4, 4: 3, WINDOW - 1: 1, WINDOW: 2, 2 * WINDOW: 2, 127: 1, 129: 1, 256: 3}
"""Of batches of one length, where it is not 0: with these prompts no choice among rows, experts or tokens is closer
than 1e-4, so that rounding flips none. A choice that is flipped, as between a token that was decoded and the same token
in a prompt, is another text on any cache; models that choose rows by an indexer have thousands of choices in a run.
"""

BLOCK_SIZES = {"deepseek-v4": 128}

LOGITS_BUDGET = 2e-5
"""The most that a logit may differ, as a part of the largest one: sums in fp32 that are made in another order."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What a model has generated: int64 [rows, columns], and logits [NEW_TOKENS, rows, vocabulary]."""

    output_ids: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """A batch, and a second one that goes on from it, on both caches.

    `equal`: whether all tokens of both are the same. `error`: the largest difference of a logit, as a part of the
    largest logit. `cached`: prompt tokens of the second batch that were found, `asked`: all of them.
    """

    equal: bool
    error: float
    cached: int
    asked: int


@functools.cache
def model_of(family: str) -> Any:
    """The model of a family, made once."""
    return FAMILIES[family]()


def lengths_of(family: str) -> Sequence[tuple[int, ...]]:
    """The lengths of the prompts of each batch that a family is tried with."""
    if family == "deepseek-v4":
        return EQUAL
    return (*MIXED, (40, 40)) if family == "qwen3-next" else MIXED  # unequal lengths have no saved state in common


def store_of(family: str, layout: str, **limits: Any) -> KVStore:
    """A store for the model of a family, with room for some sequences of MAX_LENGTH."""
    plan = plan_model(model_of(family), memory="12MiB", layout=layout, block_size=BLOCK_SIZES.get(family))
    given = {"max_sequences": 16, "max_length": MAX_LENGTH, "max_tokens_per_step": 2048, **limits}
    return KVStore(plan, "cpu", **given)


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random prompts, the same in every process; token 0 is for padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask, padded on the left."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return input_ids, mask


def generate(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS, **options: Any) -> Texts:
    """Greedy texts of a batch."""
    input_ids, mask = padded(prompts)
    asked = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": new_tokens}
    output = model.generate(input_ids, attention_mask=mask, **asked, **options)
    return Texts(output.sequences, torch.stack(output.logits))


@functools.cache
def expected(family: str, lengths: tuple[int, ...]) -> tuple[list[list[int]], Texts, list[list[int]], Texts]:
    """Prompts and texts of a batch on transformers' own cache, and those of a second one that goes on from it."""
    model = model_of(family)
    model.set_attn_implementation(_default_attention(family))
    seed = SEEDS.get(lengths[0], 0) if len(set(lengths)) == 1 else 0
    first = prompts_of(lengths, seed)
    texts = generate(model, first)
    second = continued(first, texts, seed)
    return first, texts, second, generate(model, second)


def continued(prompts: Sequence[Sequence[int]], texts: Texts, seed: int) -> list[list[int]]:
    """The prompts of a second turn: what was said, and a few tokens more."""
    said = [row[-len(prompt) - NEW_TOKENS :].tolist() for prompt, row in zip(prompts, texts.output_ids, strict=True)]
    return [[*text, *more] for text, more in zip(said, prompts_of([5] * len(said), seed), strict=True)]


def compare(family: str, layout: str, attention: str, lengths: tuple[int, ...], **limits: Any) -> Run:
    """Runs a batch and a second one on the pages of a new store, and compares them with transformers' own cache.

    Raises: AssertionError where the books of the store do not add up.
    """
    first, first_texts, second, second_texts = expected(family, lengths)
    store = store_of(family, layout, **limits)
    texts, _ = through_store(family, store, attention, first)
    more, cached = through_store(family, store, attention, second)
    pairs = ((texts, first_texts), (more, second_texts))
    return Run(
        equal=all(torch.equal(ours.output_ids, theirs.output_ids) for ours, theirs in pairs),
        error=max(difference(ours.logits, theirs.logits) for ours, theirs in pairs),
        cached=cached,
        asked=sum(map(len, second)),
    )


def through_store(
    family: str, store: KVStore, attention: str, prompts: Sequence[Sequence[int]], **options: Any
) -> tuple[Texts, int]:
    """Greedy texts on the pages of a store, and how many prompt tokens were found there."""
    model = model_of(family)
    model.set_attn_implementation(register_attention() if attention == "pages" else _default_attention(family))
    with KVStoreCache(store, *padded(prompts)) as cache:
        cached = int(cache.cached_tokens.sum())
        texts = generate(model, prompts, cache=cache, **options)
        cache.commit(texts.output_ids)
    store.check()
    assert store.stats().in_use == 0
    return texts, cached


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference as a part of the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _default_attention(family: str) -> str:
    return "eager" if family in ("gpt-oss", "deepseek-v4") else "sdpa"
