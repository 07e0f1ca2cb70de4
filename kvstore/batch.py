"""Batch: what one step of an engine needs to know of its sequences, as tensors on the store's device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.books import Step
from kvstore.staging import ALIGNMENT_BYTES, Staging
from kvstore.tables import GroupTable, int_array


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """The rows that `KVStore.extend` reserved: n sequences, T new tokens, one tuple entry per group g of the plan.

    Attributes:
        seq_ids: int64 ndarray [n], as given to extend; without the padding of `pad_to`, which n and T below count.
        num_new_tokens: int64 ndarray [n], likewise.
        num_sequences, num_tokens: n and T.
        max_seq_len: the largest entry of `seq_lens`, known to the host.
        positions: int64 tensor [T], the position of each new token in its sequence.
        seq_lens: int32 tensor [n], tokens visible to this step, the new ones included.
        cu_seqlens_q: int32 tensor [n + 1], prefix sum of the new tokens.
        row_lens[g]: int32 tensor [n], rows of the group up to seq_lens.
        block_table[g]: int32 tensor [n, width]; block i of a sequence is in column i % width, unused entries are 0.
        slot_mapping[g]: int64 tensor [T], where the row of each new token goes; -1 writes nothing.
    """

    seq_ids: npt.NDArray[np.int64]
    num_new_tokens: npt.NDArray[np.int64]
    num_sequences: int
    num_tokens: int
    max_seq_len: int
    is_decode: bool  # every sequence has exactly one new token
    positions: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    row_lens: tuple[torch.Tensor, ...]
    block_table: tuple[torch.Tensor, ...]
    slot_mapping: tuple[torch.Tensor, ...]
    step: Step = field(repr=False)
    lease: int | None = field(repr=False)  # of the buffers behind the tensors


def make_batch(step: Step, tables: Sequence[GroupTable], staging: Staging, padding: int) -> Batch:
    """The tensors of a step, `padding` sequences of one skipped token behind it."""
    ends = step.starts + step.counts
    positions = step.positions()
    num_sequences, num_tokens = len(ends) + padding, len(positions) + padding
    max_seq_len = int(ends.max(initial=0))
    cu_seqlens_q = np.zeros(num_sequences + 1, np.int32)
    cu_seqlens_q[1 : len(ends) + 1] = np.cumsum(step.counts)
    cu_seqlens_q[len(ends) + 1 :] = cu_seqlens_q[len(ends)] + np.arange(1, padding + 1)
    arrays = [_padded(positions, padding, 0), _padded(ends.astype(np.int32), padding, 0), cu_seqlens_q]
    token_rows = np.repeat(step.rows, step.counts)
    for table in tables:
        arrays.append(_padded((ends // table.tokens_per_row).astype(np.int32), padding, 0))
        arrays.append(_padded(table.batch_table(step.rows, max_seq_len), padding, 0))
        arrays.append(_padded(table.slots(token_rows, positions), padding, -1))
    tensors, lease = staging.upload(arrays)
    return Batch(
        seq_ids=step.seq_ids,
        num_new_tokens=step.counts,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        max_seq_len=max_seq_len,
        is_decode=bool((step.counts == 1).all()),
        positions=tensors[0],
        seq_lens=tensors[1],
        cu_seqlens_q=tensors[2],
        row_lens=tuple(tensors[3::3]),
        block_table=tuple(tensors[4::3]),
        slot_mapping=tuple(tensors[5::3]),
        step=step,
        lease=lease,
    )


def batch_bytes(tables: Sequence[GroupTable], max_sequences: int, max_tokens: int) -> int:
    """The most that the arrays of a batch take, each rounded up for the staging buffer."""
    per_sequence = 4 * (2 + sum(1 + table.width for table in tables))
    per_token = 8 * (1 + len(tables))
    num_arrays = 3 + 3 * len(tables)
    # Padding gives every sequence a token, whatever the most tokens of a step are.
    num_tokens = max(max_tokens, max_sequences)
    return (max_sequences + 1) * per_sequence + num_tokens * per_token + num_arrays * ALIGNMENT_BYTES


def gather_range(batch: Batch, table: GroupTable, start: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row and number of rows to gather per sequence; padding sequences have none.

    Raises: ValueError for a start that is no row of its sequence.
    """
    step = batch.step
    ends = (step.starts + step.counts) // table.tokens_per_row
    reach = np.zeros_like(ends) if table.window is None else np.maximum(step.starts - table.window + 1, 0)
    if start is None:
        starts = reach
    else:
        starts = int_array("start", start)
        if len(starts) != len(ends) or (starts < reach).any() or (starts > ends).any():
            raise ValueError(
                f"start: expected one row per sequence, from the first in reach {reach.tolist()} "
                f"to its row_len {ends.tolist()}, got {starts.tolist()}"
            )
    padding = (0, batch.num_sequences - len(ends))
    return np.pad(starts, padding), np.pad(ends - starts, padding)


def _padded(array: npt.NDArray[Any], padding: int, value: int) -> npt.NDArray[Any]:
    if not padding:
        return array
    tail = np.full((padding, *array.shape[1:]), value, array.dtype)
    return np.concatenate([array, tail])
