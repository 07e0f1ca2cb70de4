"""Request and Completion: what an engine is asked for, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue `n` times by at most `max_tokens` tokens.

    Temperature 0 is greedy, infinity draws all tokens alike. The samples of a request differ in their random numbers
    only, which depend on the seed, the number of the sample and the position. `adapter` names one of the model's.

    Raises: ValueError that names the argument.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    n: int = 1
    adapter: str | None = None

    def __post_init__(self) -> None:
        prompt: Any = self.prompt
        if not isinstance(prompt, Sequence) and not np.ndim(prompt):
            raise ValueError(f"prompt: expected a sequence of token ids, got {prompt!r}")
        if not len(prompt):
            raise ValueError("prompt: expected at least one token id, got none")
        for token in prompt:
            if not _is_int(token) or not 0 <= token <= MAX_TOKEN_ID:
                raise ValueError(f"prompt: expected integers in [0, {MAX_TOKEN_ID}], got {token!r}")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected an integer >= 1, got {self.max_tokens!r}")
        is_number = _is_int(self.temperature) or isinstance(self.temperature, float | np.floating)
        if not is_number or not self.temperature >= 0:
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature!r}")
        if not _is_int(self.seed) or self.seed < 0:
            raise ValueError(f"seed: expected an integer >= 0, got {self.seed!r}")
        if not _is_int(self.n) or self.n < 1:
            raise ValueError(f"n: expected an integer >= 1, got {self.n!r}")
        adapter: Any = self.adapter
        if adapter is not None and not isinstance(adapter, str):
            raise ValueError(f"adapter: expected a name or None, got {adapter!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(slots=True)
class Completion:
    """What became of a request: the new tokens of each of its samples, the prompt tokens that were cached, and how
    often its sequences were preempted, all samples together."""

    samples: list[list[int]]
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The new tokens of the first sample, which is the only one of most requests."""
        return self.samples[0]
