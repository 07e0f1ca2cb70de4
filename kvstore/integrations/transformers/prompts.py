"""The prompts of a batch without their padding, and the column from which all of them can go on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore import KVStore, Namespace
from kvstore.sequences import UNKNOWN_TOKEN

Ints = npt.NDArray[np.int64]


def prompts_of(input_ids: Any, attention_mask: Any) -> tuple[list[Ints], Ints]:
    """The tokens of each row, and how many tokens of padding are before them.

    Raises: ValueError for ids that are no [n, L] of integers, and a mask of another shape, with padding that is not on
        the left, or nothing but padding.
    """
    ids = _matrix("input_ids", input_ids)
    if attention_mask is None:
        return list(ids), np.zeros(len(ids), np.int64)
    mask = _matrix("attention_mask", attention_mask)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: expected the shape {list(ids.shape)} of input_ids, got {list(mask.shape)}")
    pads = (mask == 0).sum(axis=1)
    wrong = (mask != (np.arange(ids.shape[1]) >= pads[:, None])).any(axis=1) | (pads == ids.shape[1])
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"attention_mask: expected zeros on the left and ones behind them (padding_side='left'), got row {row}: "
            f"{mask[row].tolist()}"
        )
    return [row[pad:] for row, pad in zip(ids, pads, strict=True)], pads


def aligned_hits(
    store: KVStore, prompts: Sequence[Ints], pads: Ints, namespace: Namespace | Sequence[Namespace | None] | None
) -> Ints:
    """How many tokens of each prompt can be found so that all rows go on from one column.

    For layers with a state, which cannot compute a token twice: a row is either found up to that column, or is nothing
    but padding before it. Two tokens are left to compute, so that the first pass is no decode step.
    """
    found = store.lookup(prompts, namespace, max_cached_tokens=[max(len(prompt) - 2, 0) for prompt in prompts])
    while True:
        column = int((pads + found).min())
        wanted = np.maximum(column - pads, 0)
        if (found == wanted).all():
            return found
        found = store.lookup(prompts, namespace, max_cached_tokens=wanted)


def known_tokens(prompt: Ints, start: int, count: int) -> Ints:
    """`count` tokens from position `start` on: those of the prompt, and UNKNOWN_TOKEN behind it."""
    tokens = np.full(count, UNKNOWN_TOKEN, np.int64)
    known = prompt[start : start + count]
    tokens[: len(known)] = known
    return tokens


def expect_positions(positions: torch.Tensor, ends: Ints) -> None:
    """Raises ValueError where the last column of a pass is not where the cache has it.

    Args:
        positions: [rows or 1, columns], as the model sees them.
        ends: int64 [rows], the positions behind the last column; a row that is padding so far has none above 0.
    """
    last = np.broadcast_to(positions[:, -1].cpu().numpy(), len(ends))
    wrong = (last != ends - 1) & (ends > 0)  # padding has any position
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"attention_mask: the model has the last token of row {row} at position {last[row]}, the cache at "
            f"{ends[row] - 1}: expected the mask that the model sees, KVStoreCache(store, input_ids, attention_mask), "
            "and ones for all tokens behind the prompts"
        )


def row_numbers(name: str, indices: torch.Tensor, num_rows: int) -> Ints:
    """Indices or a mask as int64 numbers of rows. Raises: ValueError for rows that there are not."""
    given = np.asarray(indices.cpu())
    if given.dtype == np.bool_ and given.shape == (num_rows,):
        return np.flatnonzero(given)
    if given.ndim != 1 or given.dtype.kind not in "iu" or ((given < 0) | (given >= num_rows)).any():
        raise ValueError(f"{name}: expected rows 0 ... {num_rows - 1}, got {given.tolist()}")
    numbers: Ints = given.astype(np.int64)
    return numbers


def _matrix(name: str, values: Any) -> Ints:
    try:
        array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
    except ValueError as error:
        raise ValueError(f"{name}: expected integers [rows, columns], got {type(values).__name__}: {error}") from None
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iub":
        raise ValueError(
            f"{name}: expected integers [rows, columns], at least one of each, got shape {list(array.shape)} of "
            f"{array.dtype}"
        )
    return array.astype(np.int64)
