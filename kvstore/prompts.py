"""What `open` is given, checked: prompts, their namespaces, what to keep of them, how much they may find."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.namespaces import Namespace
from kvstore.prefixes import PLAIN
from kvstore.retain import KeepTokens
from kvstore.rules import NEVER
from kvstore.sequences import int_array, token_array


def prompt_arrays(token_arrays: Any, max_length: int) -> list[npt.NDArray[np.int32]]:
    """The prompts as int32. An int32 array that comes alone is the caller's own, and not looked through.

    Raises: ValueError for no list, an empty or too long prompt, and what are no token ids.
    """
    if not isinstance(token_arrays, Iterable) or isinstance(token_arrays, str | bytes):
        raise ValueError(f"token_arrays: expected a sequence of prompts, got {token_arrays!r}")
    given = list(token_arrays)
    if given and all(isinstance(item, int | np.integer) or _is_single(item) for item in given):
        first = ", ".join(str(int(item)) for item in given[:3]) + ", ..." * (len(given) > 3)
        raise ValueError(
            f"token_arrays: expected a list of token arrays, got token ids: one prompt is [[{first}]], not [{first}]"
        )
    prompts = []
    for index, tokens in enumerate(given):
        name = f"token_arrays[{index}]"
        prompt = token_array(name, tokens, skip_range=len(given) == 1)
        if not 1 <= len(prompt) <= max_length:
            raise ValueError(f"{name}: expected 1 to {max_length} tokens (max_length), got {len(prompt)}")
        prompts.append(prompt)
    return prompts


def _is_single(item: Any) -> bool:
    """Whether an array or tensor is a single integer, as one sees when going through a flat one."""
    return getattr(item, "ndim", None) == 0 and hasattr(item, "__index__")


def namespaces_of(
    given: Namespace | Sequence[Namespace | None] | None, prompts: Sequence[npt.NDArray[np.int32]]
) -> list[Namespace]:
    """One namespace per prompt. Raises: TypeError / ValueError for anything else, and items past a prompt's end."""
    if given is None or isinstance(given, Namespace):
        namespaces = [given or PLAIN] * len(prompts)
    elif isinstance(given, Sequence):
        namespaces = [PLAIN if names is None else names for names in given]
    else:
        raise TypeError(f"namespace: expected a Namespace, or one per prompt, got {type(given).__name__}")
    if len(namespaces) != len(prompts):
        raise ValueError(f"namespace: expected one per prompt, {len(prompts)} in all, got {len(namespaces)}")
    for index, (names, prompt) in enumerate(zip(namespaces, prompts, strict=True)):
        if not isinstance(names, Namespace):
            raise TypeError(f"namespace[{index}]: expected a Namespace, got {type(names).__name__}")
        if names.items and names.items[-1].end > len(prompt):
            raise ValueError(
                f"namespace[{index}]: items: expected them inside the prompt of {len(prompt)} tokens, "
                f"got one that ends at {names.items[-1].end}"
            )
    return namespaces


def most_cached(given: Any, num_prompts: int) -> list[int]:
    """The most tokens that each prompt may find. Raises: ValueError for other than one or one per prompt, from 0 on."""
    if given is None:
        return [NEVER] * num_prompts
    is_one = isinstance(given, int | np.integer) and not isinstance(given, bool)
    most = int_array("max_cached_tokens", [given] * num_prompts if is_one else given)
    if len(most) != num_prompts or (most < 0).any():
        raise ValueError(
            f"max_cached_tokens: expected a number >= 0, or one per prompt, {num_prompts} in all, got {given!r}"
        )
    limits: list[int] = most.tolist()
    return limits


def keeps_of(
    given: Sequence[KeepTokens] | Sequence[Sequence[KeepTokens]] | None, num_prompts: int
) -> list[tuple[KeepTokens, ...]]:
    """The ranges to keep of each prompt; a flat list holds for all. Raises: TypeError / ValueError."""
    if given is None:
        return [()] * num_prompts
    if not isinstance(given, Sequence):
        raise TypeError(f"retention: expected KeepTokens, or a list of them per prompt, got {type(given).__name__}")
    flat = all(isinstance(item, KeepTokens) for item in given)
    keeps: list[Any] = [tuple(given)] * num_prompts if flat and given else list(given)
    if len(keeps) != num_prompts:
        raise ValueError(f"retention: expected one list per prompt, {num_prompts} in all, got {len(keeps)}")
    for index, ranges in enumerate(keeps):
        if not isinstance(ranges, Sequence) or not all(isinstance(item, KeepTokens) for item in ranges):
            raise TypeError(f"retention[{index}]: expected a list of KeepTokens, got {ranges!r}")
    return [tuple(ranges) for ranges in keeps]
