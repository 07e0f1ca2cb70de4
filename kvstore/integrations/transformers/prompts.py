"""The prompts of a batch without their padding, and the column from which all of them can go on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore import KVStore, Namespace

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


def _matrix(name: str, values: Any) -> Ints:
    array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iub":
        raise ValueError(
            f"{name}: expected integers [rows, columns], at least one of each, got shape {list(array.shape)} of "
            f"{array.dtype}"
        )
    return array.astype(np.int64)
