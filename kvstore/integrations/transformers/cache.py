"""KVStoreCache: what `model.generate` takes for its cache, with every row in the pages of a `KVStore`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache

from kvstore import KeepTokens, KVStore, Namespace
from kvstore.integrations.transformers.compressed import WindowLayer
from kvstore.integrations.transformers.forward import Forward, Ints
from kvstore.integrations.transformers.layers import PagedLayer
from kvstore.integrations.transformers.model_layers import make_layers
from kvstore.integrations.transformers.prompts import (
    aligned_hits,
    expect_positions,
    known_tokens,
    prompts_of,
    row_numbers,
)
from kvstore.integrations.transformers.states import StateLayer
from kvstore.sequences import UNKNOWN_TOKEN
from kvstore_kernels.checks import expect_int


class KVStoreCache(Cache):
    """The cache of one call of `generate`, or of several that go on with the same rows.

    Opens a sequence per prompt; what others have computed need not be computed again: `generate` begins behind it.
    Rows of generated tokens can be found by later calls when `commit` has told which tokens they are. A cache must be
    released (`commit` does so), best by using it in a `with` statement.

    All rows of a batch begin at one column, that of the row that has found least; rows that have found more compute
    some tokens again. Models with recurrent states, and DeepSeek V4, begin where every row has a saved state: at
    multiples of the plan's block size where a forward pass ended, for which `generate(prefill_chunk_size=...)` is
    good, and in DeepSeek V4 at every multiple. DeepSeek V4 takes prompts of one length only.

    Args:
        store: of a plan that `plan_model` made for the model, with a device.
        input_ids: int64 [n, L], as given to `generate`. Beams and several returned sequences share a prompt's rows.
        attention_mask: [n, L], 0 for padding, which is on the left. None: no padding.
        namespace, retention: as `KVStore.open`.
        rows_per_prompt: rows that `generate` makes of each prompt: num_beams, or num_return_sequences. Needed only
            where a model with recurrent states goes on from a found state; None: what the first pass shows.

    Attributes:
        length: columns computed so far, padding counted; the next forward pass begins there.
        cached_tokens: int64 [n], tokens of each prompt that need not be computed.

    Raises: ValueError / TypeError that name the argument; SequenceError where the store has no room for n sequences.
    """

    def __init__(
        self,
        store: KVStore,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        namespace: Namespace | Sequence[Namespace | None] | None = None,
        retention: Sequence[KeepTokens] | Sequence[Sequence[KeepTokens]] | None = None,
        rows_per_prompt: int | None = None,
    ) -> None:
        if not isinstance(store, KVStore):
            raise TypeError(f"store: expected a KVStore, got {type(store).__name__}")
        if store.stored != "all":
            raise ValueError(f"store: expected one that stores all rows (stored='all'), got stored={store.stored!r}")
        for layer in store.plan.layers[:1]:
            store.page_view(layer)  # raises where a store keeps books only
        self.store = store
        self.prompts, self.pads = prompts_of(input_ids, attention_mask)
        super().__init__(layers=make_layers(self, store.plan))
        self._moves_as_one = any(not isinstance(layer, PagedLayer) for layer in self.layers)
        if any(isinstance(layer, WindowLayer) for layer in self.layers):
            self._moves_as_one = True
            if self.pads.any():
                raise ValueError(
                    "attention_mask: DeepSeek V4 compresses padding with the tokens behind it, in transformers too: "
                    f"expected prompts of one length, got padding of {self.pads.tolist()} tokens"
                )
        if rows_per_prompt is not None:
            expect_int("rows_per_prompt", rows_per_prompt, 1)
        self._rows_per_prompt = rows_per_prompt
        given = namespace if isinstance(namespace, Sequence) else [namespace]
        self._namespaces = [names or Namespace() for names in given]
        most = aligned_hits(store, self.prompts, self.pads, namespace) if self._moves_as_one else None
        opened = store.open(self.prompts, namespace, retention, max_cached_tokens=most)
        self.seq_ids, self._computed = opened.seq_ids, opened.cached_tokens.copy()
        self.length = int((self.pads + self._computed).min())
        self.cached_tokens: Ints = np.maximum(self.length - self.pads, 0)
        self._forward: Forward | None = None
        self._blocks: dict[str, torch.Tensor] = {}  # per state layer: the blocks to read before a pass has begun
        self._has_begun = self._is_reordered = self._is_released = False

    # What transformers asks for

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back: not from recurrent states and compressors."""
        return not self._moves_as_one

    @property
    def is_compileable(self) -> bool:
        """False: a pass makes tables on the host."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns computed so far, in every layer."""
        return self.length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether recurrent layers go on from a state."""
        return self.length > 0 if layer_idx is None else self.start_of(layer_idx) > 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Inputs of the convolution, [rows, channels, kernel]; None before the first token."""
        return self._state_layer(layer_idx).conv_state()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent tensor, [rows, num_heads, key_dim, value_dim]; None before the first token."""
        return self._state_layer(layer_idx).recurrent_state()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the rows of a layer; see `PagedLayer.update`."""
        self._expect_layer(layer_idx)
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return updated

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Makes row i go on from what row beam_idx[i] holds: the step of a beam search."""
        self.settle()
        chosen = row_numbers("beam_idx", beam_idx, len(self.seq_ids))
        if len(chosen) != len(self.seq_ids):
            raise ValueError(f"beam_idx: expected one row for each of {len(self.seq_ids)}, got {len(chosen)}")
        self.store.reorder(self.seq_ids, self.seq_ids[chosen])
        self._take_rows(self.seq_ids, chosen)
        self._is_reordered = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` tokens of every row back, as assisted generation does with drafts.

        Raises: ValueError for a number above 0, and where a group of the plan cannot go back so far.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected minus the number of tokens, got {tokens_to_remove}")
        if not tokens_to_remove:
            return
        self._expect_open()
        removed = -tokens_to_remove
        forward = self._forward
        if forward is not None and (forward.batch.num_new_tokens >= removed).all():
            self._commit(forward, forward.batch.num_new_tokens - removed)
        else:
            self.settle()
            self.store.truncate(self.seq_ids, self._computed - removed)
            self._computed -= removed
        self.length -= removed
        self.prompts = [prompt[:count] for prompt, count in zip(self.prompts, self._computed, strict=True)]
        self._blocks.clear()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Turns every row into `repeats` rows side by side, which share what is computed."""
        expect_int("repeats", repeats, 1)
        self.settle()
        self._take_copies(np.repeat(np.arange(len(self.seq_ids)), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows that `indices` names, in that order, some of them several times; others are released."""
        self.settle()
        self._take_copies(row_numbers("indices", indices, len(self.seq_ids)))

    def activate_past_recording(self) -> None:
        """Assisted generation begins: its first pass is over whole prompts, so that a hit saves memory only."""
        if not self._has_begun and self.is_croppable:
            self.length, self.cached_tokens = 0, np.zeros_like(self.cached_tokens)

    def reset(self) -> None:
        """Refused: a cache belongs to its prompts."""
        raise ValueError("reset: expected a new KVStoreCache for new prompts")

    # What callers ask for

    def commit(self, output_ids: Any) -> None:
        """Tells which tokens the rows hold, so that later calls find them, and releases the cache.

        Args:
            output_ids: int64 [rows, L], what `generate` returned: the prompts with their padding, and what is new.

        Raises: ValueError for other prompts (what the store holds in their namespaces is forgotten then, for some of
            it is of other tokens), other rows than were computed, and after a beam search, whose rows are
            not those of the sequences it returns: `release` keeps the prompts.
        """
        self.settle()
        if self._is_reordered:
            raise ValueError(
                "output_ids: a beam search returns other sequences than the cache has rows of; "
                "release() keeps the prompts for later calls"
            )
        given = np.asarray(output_ids.cpu() if isinstance(output_ids, torch.Tensor) else output_ids)
        rows = len(self.seq_ids)
        if given.ndim != 2 or len(given) != rows or given.shape[1] < self.length or given.dtype.kind not in "iu":
            raise ValueError(
                f"output_ids: expected integers [{rows}, at least {self.length}], what generate returned, "
                f"got shape {list(given.shape)} of {given.dtype}"
            )
        tokens = [row[pad : pad + count] for row, pad, count in zip(given, self.pads, self._computed, strict=True)]
        for index, (row, prompt) in enumerate(zip(tokens, self.prompts, strict=True)):
            if not np.array_equal(row[: len(prompt)], prompt[: len(row)]):
                self._forget()
                raise ValueError(f"output_ids: expected row {index} to begin with its prompt, got another one")
        self.store.name_tokens(self.seq_ids, tokens)
        self.release()

    def release(self) -> None:
        """Closes the sequences. Their prompts can be found by later calls; what was generated can not."""
        if self._is_released:
            return
        if self._forward is not None:
            if len(self._forward.written) == len(self.store.plan.layers):
                self._commit(self._forward, forks=False)
            else:  # a pass that has failed on its way: none of its rows is ever found
                batch = self._forward.batch
                self.store.commit(batch, np.full(int(batch.num_new_tokens.sum()), UNKNOWN_TOKEN))
                self._forward = None
        self.store.release(self.seq_ids)
        self._is_released = True

    def _forget(self) -> None:
        """The model was given other prompts: what was found under these is of other tokens."""
        for names in self._namespaces:
            self.store.invalidate(names)

    def __enter__(self) -> "KVStoreCache":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    # What layers ask for

    @property
    def forward(self) -> Forward:
        """The pass that has begun."""
        assert self._forward is not None
        return self._forward

    def start_of(self, index: int) -> int:
        """The first column of the pass that layer `index` takes part in, or will next."""
        forward = self._forward
        return self.length if forward is None or index in forward.begun else forward.start

    def begin(self, index: int, num_rows: int, num_columns: int, passed_on: dict[str, Any] | None) -> Forward:
        """Layer `index` hands over its rows: the pass, which begins with the first layer that does.

        Raises: ValueError for other rows than the prompts, padding that the cache was not told of, a model with other
            layers than the plan, a released cache; OutOfBlocks.
        """
        self._expect_open()
        if self._forward is not None and index in self._forward.begun:
            self.settle()
        if self._forward is None:
            self._forward = self._begin(num_rows, num_columns)
        self._forward.begun.add(index)
        self._expect_positions(self._forward, passed_on)
        return self._forward

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        """As `Forward.widen`, before a pass has begun as well."""
        if self._forward is not None:
            return self._forward.widen(rows)
        repeats = 1 if self._has_begun else self._rows_per_prompt or 1
        return rows.repeat_interleave(repeats, dim=0)

    def blocks_to_read(self, index: int, layer: str) -> torch.Tensor:
        """int64 [n], where the state of a layer is before this pass; 0 for a row without one."""
        if self._forward is not None and index in self._forward.begun:
            self.settle()
        if self._forward is not None:
            return self.store.state_blocks(layer, self._forward.batch)[:, 0].long()
        if layer not in self._blocks:
            batch = self.store.extend(self.seq_ids, 0)
            for state in self.layers:
                if isinstance(state, StateLayer):
                    self._blocks[state.name] = self.store.state_blocks(state.name, batch)[:, 0].long()
            self.store.commit(batch, [])
        return self._blocks[layer]

    def settle(self) -> None:
        """Commits the last pass.

        Raises: ValueError for a released cache, and a model with other layers than the plan.
        """
        self._expect_open()
        if self._forward is not None:
            self._commit(self._forward)

    # Inside

    def _begin(self, num_rows: int, num_columns: int) -> Forward:
        width, rest = divmod(num_rows, len(self.seq_ids))
        wanted = 1 if self._has_begun else self._rows_per_prompt or width
        if rest or not width or width != wanted:
            raise ValueError(
                f"input_ids: the cache is of {len(self.seq_ids)} rows"
                + (f" times rows_per_prompt {wanted}" if wanted > 1 else "")
                + f", the model's batch has {num_rows}: expected the input_ids that the cache was made with"
            )
        ends = self.length + num_columns - self.pads
        batch = self.store.extend(self.seq_ids, np.maximum(ends - self._computed, 0))
        forward = Forward(self.store, batch, self.length, num_columns, self.pads, width)
        self.length += num_columns
        self._has_begun = True
        self._blocks.clear()
        return forward

    def _expect_positions(self, forward: Forward, passed_on: dict[str, Any] | None) -> None:
        """Where a module shows its positions: the padding that the model sees is what the cache was told.

        On a GPU decode steps are not looked at, which would wait for the device.
        """
        positions = (passed_on or {}).get("position_ids")
        if forward.has_shown_positions or not isinstance(positions, torch.Tensor) or positions.ndim != 2:
            return
        forward.has_shown_positions = True
        if positions.device.type != "cpu" and forward.num_columns == 1:
            return
        expect_positions(positions, np.repeat(forward.end - self.pads, forward.width))

    def _commit(self, forward: Forward, num_committed: Ints | None = None, *, forks: bool = True) -> None:
        missing = [layer for layer in self.store.plan.layers if layer not in forward.written]
        if missing:
            raise ValueError(
                f"store: the plan has {len(self.layers)} layers, and the last pass has not written {missing[0]!r}: it "
                "failed on its way, or the plan is of another config, plan_model(model) makes its own"
            )
        counts = forward.batch.num_new_tokens if num_committed is None else num_committed
        tokens = [
            known_tokens(prompt, start, count)
            for prompt, start, count in zip(self.prompts, self._computed, counts, strict=True)
        ]
        self.store.commit(forward.batch, np.concatenate(tokens), num_committed)
        self._computed += counts
        self._forward = None
        if forks:
            self._take_copies(np.repeat(np.arange(len(self.seq_ids)), forward.width))

    def _take_copies(self, chosen: Ints) -> None:
        """The rows are copies of the rows `chosen` from here on: the first of each is the row itself, others are forks.

        Raises: SequenceError where the store has no room for them; nothing has changed then.
        """
        if np.array_equal(chosen, np.arange(len(self.seq_ids))):
            return
        seq_ids: list[int] = []
        forks: list[int] = []
        try:
            for at, row in enumerate(chosen.tolist()):
                if row in chosen[:at]:
                    forks += self.store.fork(int(self.seq_ids[row]), 1).tolist()
                    seq_ids.append(forks[-1])
                else:
                    seq_ids.append(int(self.seq_ids[row]))
        except BaseException:
            self.store.release(forks)
            raise
        self.store.release(np.delete(self.seq_ids, np.unique(chosen)))
        self._take_rows(np.array(seq_ids), chosen)

    def _take_rows(self, seq_ids: Ints, chosen: Ints) -> None:
        """The rows are `seq_ids` from here on, and hold what the rows `chosen` held."""
        self.seq_ids = seq_ids
        self.pads, self._computed = self.pads[chosen], self._computed[chosen]
        self.prompts = [self.prompts[row] for row in chosen]
        self._blocks.clear()

    def _state_layer(self, index: int) -> StateLayer:
        self._expect_open()
        self._expect_layer(index)
        layer = self.layers[index]
        if not isinstance(layer, StateLayer):
            raise ValueError(f"store: the plan has no recurrent state for layer {index}: it is of another config")
        return layer

    def _expect_layer(self, index: int) -> None:
        if index >= len(self.layers):
            raise ValueError(
                f"store: the plan has {len(self.layers)} layers, the model writes layer {index}: the plan is of "
                "another config, plan_model(model) makes its own"
            )

    def _expect_open(self) -> None:
        if self._is_released:
            raise ValueError(
                "cache: it was released, by commit, release or the end of its with block: expected a new KVStoreCache"
            )
