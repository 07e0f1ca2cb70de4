"""Batch: what one step of an engine needs to know of its sequences, as tensors on the store's device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.books import Books
from kvstore.mirrors import Mirror
from kvstore.rules import GroupRules
from kvstore.sequences import int_array
from kvstore.staging import ALIGNMENT_BYTES, Staging
from kvstore.steps import Step


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """The rows that `KVStore.extend` reserved: n sequences, T new tokens, one tuple entry per group g of the plan.

    The tensors are buffers of the store: to read, and until the batch is finished.

    Attributes:
        seq_ids: int64 ndarray [n], as given to extend; without the padding of `pad_to`, which n and T below count.
        num_new_tokens: int64 ndarray [n], likewise.
        num_sequences, num_tokens: n and T.
        max_seq_len: the largest entry of `seq_lens`, known to the host.
        is_decode: whether every sequence has exactly one new token.
        positions: int64 tensor [T], the position of each new token in its sequence.
        seq_lens: int32 tensor [n], tokens visible to this step, the new ones included.
        cu_seqlens_q: int32 tensor [n + 1], prefix sum of the new tokens.
        row_lens[g]: int32 tensor [n], rows of the group up to seq_lens; None for a state.
        block_table[g]: int32 tensor [n, width]; block i of a sequence is in column i % width, unused entries are 0.
        slot_mapping[g]: int64 tensor [T], where the row of each new token goes; -1 writes nothing; None for a state.
            Where layers of a group differ in their tokens per row, that of the fewest; `KVStore.slot_mapping` has each.
        state_blocks[g]: int32 tensor [n, 2], the block to read and the block to write, of rings (the same) and states;
            0 reads nothing, a sequence's first step, or writes nothing, without new tokens. None for other groups.
        state_checkpoints[g]: int64 tensor [n, 2], for states with checkpoints: the length at which the state is to be
            saved as well, and the block for it; 0 where there is none. None for other groups.
    """

    seq_ids: npt.NDArray[np.int64]
    num_new_tokens: npt.NDArray[np.int64]
    num_sequences: int
    num_tokens: int
    max_seq_len: int
    is_decode: bool
    positions: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    row_lens: tuple[torch.Tensor | None, ...]
    block_table: tuple[torch.Tensor, ...]
    slot_mapping: tuple[torch.Tensor | None, ...]
    state_blocks: tuple[torch.Tensor | None, ...]
    state_checkpoints: tuple[torch.Tensor | None, ...]
    step: Step = field(repr=False)
    variant_lens: Sequence[torch.Tensor] = field(repr=False)
    variant_slots: Sequence[torch.Tensor] = field(repr=False)
    lease: int | None = field(repr=False)  # of the buffers behind the tensors
    mirror: Mirror | None = field(repr=False)
    graph: "GraphBuffers | None" = field(repr=False, default=None)
    tags: list[npt.NDArray[np.int32]] | None = field(repr=False, default=None)  # debug: generations of the blocks


@dataclass(slots=True, eq=False)
class GraphBuffers:
    """What `KVStore.graph_batch` returns: the tensors of one decode batch at a time, always at the same addresses.

    Attributes:
        num_sequences: the size to which its batches are padded.
    """

    num_sequences: int
    mirror: Mirror = field(repr=False)
    staging: Staging = field(repr=False)
    batch: Batch | None = field(repr=False, default=None)  # that has them now

    def expect_free(self, pad_to: int | None) -> int:
        """What to pad a batch to. Raises: ValueError while another batch has the buffers, or for another `pad_to`."""
        if self.batch is not None:
            raise ValueError("graph: expected buffers whose last batch is finished, got those of an unfinished batch")
        if pad_to not in (None, self.num_sequences):
            raise ValueError(f"pad_to: expected {self.num_sequences}, the size of the graph's batches, got {pad_to!r}")
        return self.num_sequences


class BatchMaker:
    """Turns steps into batches, with what is the same in every step made once."""

    def __init__(self, books: Books, staging: Staging) -> None:
        self._books, self._staging = books, staging
        self._rules = books.rules
        self._cu_single = np.arange(books.limits.max_sequences + 1, dtype=np.int32)
        # Row lengths: number 1 of the arrays where a row is a token, one more array for each other number of tokens.
        others = sorted({variant.tokens_per_row for variant in self._rules.variants} - {1})
        at = {1: 1} | {tokens: 3 + number for number, tokens in enumerate(others)}
        self._tokens_per_row = [np.int32(tokens) for tokens in others]
        self._no_states: tuple[torch.Tensor | None, ...] = (None,) * self._rules.num_groups
        self._lens_at = [at[variant.tokens_per_row] for variant in self._rules.variants]
        self._first_variant = [variants[0] if variants else None for variants in self._rules.variants_of]

    def make(self, step: Step, mirror: Mirror, padding: int, graph: "GraphBuffers | None" = None) -> Batch:
        """The tensors of a step, `padding` sequences of one skipped token behind it; in a graph's buffers if given."""
        if graph is None and step.is_single and not padding and not self._staging.packed and not step.state_blocks:
            return self._make_decode(step, mirror)
        rules = self._rules
        count = len(step.ends)
        num_sequences, num_tokens = count + padding, step.num_tokens + padding
        ends = step.ends.astype(np.int32)
        if step.is_single:
            cu_seqlens_q = self._cu_single[: num_sequences + 1]
        else:
            cu_seqlens_q = np.zeros(count + 1, np.int32)
            np.cumsum(step.counts, out=cu_seqlens_q[1:])
        arrays: list[npt.NDArray[Any]] = [
            step.positions(),
            ends,
            cu_seqlens_q,
            *(ends // tokens for tokens in self._tokens_per_row),
        ]
        slots_at = len(arrays)
        arrays += [step.slots, *step.state_blocks.values(), *step.checkpoints.values()]
        if padding:
            values = (0, 0, None, *(0 for _ in self._tokens_per_row), -1, *(0 for _ in arrays[slots_at + 1 :]))
            arrays = [_padded(array, padding, value) for array, value in zip(arrays, values, strict=True)]
        tensors, lease = (self._staging if graph is None else graph.staging).upload(arrays)
        shown = step.max_length if graph is None else self._books.limits.max_length
        variant_lens = [tensors[at] for at in self._lens_at]
        variant_slots = tensors[slots_at].unbind(0)
        state_blocks = state_checkpoints = self._no_states
        if step.state_blocks:
            saves_at = slots_at + 1 + len(step.state_blocks)
            states = dict(zip(step.state_blocks, tensors[slots_at + 1 : saves_at], strict=True))
            saves = dict(zip(step.checkpoints, tensors[saves_at:], strict=True))
            state_blocks = tuple(states.get(g) for g in range(rules.num_groups))
            state_checkpoints = tuple(saves.get(g) for g in range(rules.num_groups))
        return Batch(
            seq_ids=step.seq_ids,
            num_new_tokens=step.counts,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            max_seq_len=step.max_length,
            is_decode=step.is_single,
            positions=tensors[0],
            seq_lens=tensors[1],
            cu_seqlens_q=tensors[2],
            row_lens=tuple([None if v is None else variant_lens[v] for v in self._first_variant]),
            block_table=mirror.show(step.roster, shown, padding),
            slot_mapping=tuple([None if v is None else variant_slots[v] for v in self._first_variant]),
            state_blocks=state_blocks,
            state_checkpoints=state_checkpoints,
            step=step,
            variant_lens=variant_lens,
            variant_slots=variant_slots,
            lease=lease,
            mirror=mirror,
            graph=graph,
        )

    def _make_decode(self, step: Step, mirror: Mirror) -> Batch:
        """The same for one new token per sequence on a CPU: into tensors that stay with the mirror."""
        count = len(step.ends)
        buffers = mirror.buffers
        if not isinstance(buffers, _DecodeBuffers) or len(buffers.positions) != count:
            buffers = mirror.buffers = self._decode_buffers(count)
        np.copyto(buffers.positions, step.starts)
        np.copyto(buffers.seq_lens, step.ends, casting="same_kind")
        np.copyto(buffers.slots, step.slots)
        for lens, tokens in zip(buffers.row_lens, self._tokens_per_row, strict=True):
            np.floor_divide(buffers.seq_lens, tokens, out=lens)
        return Batch(
            seq_ids=step.seq_ids,
            num_new_tokens=step.counts,
            num_sequences=count,
            num_tokens=count,
            max_seq_len=step.max_length,
            is_decode=True,
            block_table=mirror.show(step.roster, step.max_length, 0),
            state_blocks=self._no_states,
            state_checkpoints=self._no_states,
            step=step,
            lease=None,
            mirror=mirror,
            **buffers.tensors,
        )

    def _decode_buffers(self, count: int) -> "_DecodeBuffers":
        positions, slots = np.empty(count, np.int64), np.empty((len(self._rules.variants), count), np.int64)
        seq_lens, *row_lens = (np.empty(count, np.int32) for _ in (1, *self._tokens_per_row))
        tensors = [torch.from_numpy(array) for array in (positions, seq_lens, self._cu_single[: count + 1], *row_lens)]
        variant_lens = [tensors[at] for at in self._lens_at]
        variant_slots = torch.from_numpy(slots).unbind(0)
        named = {
            "positions": tensors[0],
            "seq_lens": tensors[1],
            "cu_seqlens_q": tensors[2],
            "row_lens": tuple(None if v is None else variant_lens[v] for v in self._first_variant),
            "slot_mapping": tuple(None if v is None else variant_slots[v] for v in self._first_variant),
            "variant_lens": variant_lens,
            "variant_slots": variant_slots,
        }
        return _DecodeBuffers(positions, seq_lens, slots, row_lens, named)


@dataclass(slots=True, eq=False)
class _DecodeBuffers:
    """Arrays of a decode batch, and the tensors that share their memory under their names in a Batch."""

    positions: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    row_lens: list[npt.NDArray[np.int32]]
    tensors: dict[str, Any]


def batch_bytes(rules: GroupRules, max_sequences: int, max_tokens: int) -> int:
    """The most that the arrays of a batch take beside the tables, each rounded up for the staging buffer."""
    num_variants, num_groups = len(rules.variants), rules.num_groups
    per_sequence = 4 * (2 + num_variants + 2 * num_groups) + 16 * num_groups
    per_token = 8 * (1 + num_variants)
    num_arrays = 3 + 2 * num_variants + 2 * num_groups
    # Padding gives every sequence a token, whatever the most tokens of a step are.
    num_tokens = max(max_tokens, max_sequences)
    return (max_sequences + 1) * per_sequence + num_tokens * per_token + num_arrays * ALIGNMENT_BYTES


def gather_range(
    batch: Batch, rules: GroupRules, variant: int, start: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First row and number of rows to gather per sequence; padding sequences have none.

    Of a window, the rows that the first new token reaches; of a ring, those it holds.

    Raises: ValueError for a start that is no row of its sequence.
    """
    step, of = batch.step, rules.variants[variant]
    ends = step.ends // of.tokens_per_row
    w = int(rules.window_of[of.group])
    if of.is_ring:
        reach = np.maximum(step.ends - of.rows_per_block, 0)
    elif w >= 0:
        reach = rules.visible(w, step.starts)
        if rules.tail_only[of.group] and not step.is_single:
            ends = step.starts
    else:
        reach = np.zeros_like(ends)
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


def _padded(array: npt.NDArray[Any], padding: int, value: int | None) -> npt.NDArray[Any]:
    """`array` with `padding` sequences of one token more: slots along their last axis, None leaves it as it is."""
    if value is None:
        return array
    axis = -1 if value == -1 else 0
    shape = [padding if at == axis % array.ndim else size for at, size in enumerate(array.shape)]
    return np.concatenate([array, np.full(shape, value, array.dtype)], axis=axis)
