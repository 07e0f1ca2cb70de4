"""KVStore: the bytes of a plan and the books of which sequence holds which block, behind one small set of calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import kvstore_kernels as kernels
from kvstore.arena import Arena
from kvstore.audit import audit
from kvstore.batch import Batch, batch_bytes, gather_range, make_batch
from kvstore.books import Books, Step
from kvstore.plan import CachePlan
from kvstore.staging import Staging
from kvstore_kernels import PageView
from kvstore_kernels.checks import expect_int

BATCHES_PER_STEP = 2  # a prefill and a decode


@dataclass(frozen=True, slots=True)
class Opened:
    """What `KVStore.open` returns: int64 arrays over the sequences."""

    seq_ids: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Blocks by state; `num_blocks` is their sum, the null block is not in it. `peak_in_use` counts fenced ones too."""

    num_blocks: int
    free: int
    cached: int
    in_use: int
    fenced: int
    peak_in_use: int
    evicted: int
    open_sequences: int


class KVStore:
    """A paged KV-cache store for one engine.

    A sequence is opened with its prompt, extended step by step (rows are reserved), written and read layer by layer,
    and committed (the rows are confirmed written). Calls take whole batches; a failed call changes nothing. One
    thread uses a store. Handles are equal in every store that sees the same calls, so a store cannot tell another's.

    Args:
        plan: from `plan_cache`.
        device: of the arena and of every tensor returned. None keeps the books only: tables on the CPU, no bytes.
        max_sequences: sequences open at once.
        max_length: tokens of one sequence.
        max_tokens_per_step: new tokens of one batch.
        max_in_flight: batches of one sequence that may be extended and not yet committed.
        zero_new: whether blocks are cleared when handed out; "auto": where layers of different dtypes share bytes,
            so that a reader of whole pages does not meet another group's bytes as NaN.
        backend: "triton", "reference", or None: Triton on a GPU, the reference elsewhere.

    Raises: ValueError / TypeError that name the argument.
    """

    def __init__(
        self,
        plan: CachePlan,
        device: torch.device | str | None = None,
        max_sequences: int = 256,
        max_length: int = 8192,
        max_tokens_per_step: int = 8192,
        max_in_flight: int = 2,
        zero_new: bool | str = "auto",
        backend: str | None = None,
    ) -> None:
        if not isinstance(plan, CachePlan):
            raise TypeError(f"plan: expected a CachePlan, got {type(plan).__name__}")
        limits = {
            "max_sequences": max_sequences,
            "max_length": max_length,
            "max_tokens_per_step": max_tokens_per_step,
            "max_in_flight": max_in_flight,
        }
        for name, value in limits.items():
            expect_int(name, value, 1, 2**31 - 1)
        if not isinstance(zero_new, bool) and not (isinstance(zero_new, str) and zero_new == "auto"):
            raise ValueError(f"zero_new: expected True, False or 'auto', got {zero_new!r}")
        self.plan = plan
        self.device = _checked_device("cpu" if device is None else device)
        self._backend = kernels.resolve_backend(backend, self.device)
        self._books = Books(plan, **limits)
        self._arena = None if device is None else Arena(plan, self.device)
        self._group_of = {layer: plan.group_index(layer) for layer in (*plan.layers, *plan.aliases)}
        self._zeroed_layers = self._layers_to_zero(zero_new)
        num_buffers = BATCHES_PER_STEP * max_in_flight
        self._staging = Staging(
            self.device, batch_bytes(self._books.tables, max_sequences, max_tokens_per_step), num_buffers
        )

    def open(self, token_arrays: Sequence[Any]) -> Opened:
        """Opens one sequence per prompt and gives it the blocks that hold a prefix of the prompt already.

        Args:
            token_arrays: the prompts, each a flat array of at least one token id in [0, 2**31).

        Returns: the handles, and how many leading tokens need not be computed: whole committed blocks of sequences
            that run or ran, always at least one token short of the prompt. Stores with sliding-window groups find no
            prefixes.

        Raises: ValueError for a prompt that is empty, too long, or no integers; SequenceError when more sequences are
            asked for than are left of max_sequences.
        """
        rows, cached_tokens = self._books.open(token_arrays)
        return Opened(self._books.sequences.handles(rows), cached_tokens)

    def extend(self, seq_ids: Any, num_new_tokens: Any, pad_to: int | None = None) -> Batch:
        """Reserves the rows of the next tokens of each sequence, for the whole batch or not at all.

        Args:
            seq_ids: handles from `open`, each once.
            num_new_tokens: one count for all sequences, or one per sequence.
            pad_to: for one token per sequence: the number of sequences to pad the batch to, as CUDA graphs need it.
                A padding sequence has length 0, a table of null blocks, and one token with slot -1.

        Raises: SequenceError for handles that are unknown, released, repeated, or have max_in_flight uncommitted
            batches; ValueError for counts, and lengths over max_length or max_tokens_per_step; OutOfBlocks.
        """
        step = self._books.extend(seq_ids, num_new_tokens, pad_to)
        self._zero(step)
        return make_batch(step, self._books.tables, self._staging, 0 if pad_to is None else pad_to - len(step.rows))

    def commit(self, batch: Batch, token_ids: Any, num_committed: Any = None, *, finish: bool = True) -> None:
        """Confirms that the rows of a batch are written, which makes its full blocks hittable.

        Sequences released since `extend` are passed over. Windows let go of what the next token cannot reach.

        Args:
            batch: of this store and not committed; earlier batches of its sequences are committed first.
            token_ids: the tokens whose rows the batch wrote (never the sampled ones), flat, in the batch's order.
            num_committed: one count per sequence when fewer than extended are kept (speculation); the rows behind
                them are withdrawn. `token_ids` holds the kept tokens only.
            finish: whether the device is done with the batch as well; otherwise call `finish` later.

        Raises: ValueError for a foreign, committed or later batch, wrong counts, and token ids that are no integers
            in [0, 2**31).
        """
        self._books.commit(_step_of(batch), token_ids, num_committed, finish)
        if finish:
            self._staging.give_back(batch.lease)

    def finish(self, batch: Batch) -> None:
        """Says that the device has run a committed batch: blocks that were fenced for it can be handed out again.

        Raises: ValueError for a batch that is foreign, finished already, or not committed.
        """
        self._books.finish(_step_of(batch))
        self._staging.give_back(batch.lease)

    def release(self, seq_ids: Any) -> None:
        """Closes sequences. Their full committed blocks stay hittable until they are evicted, the others are free.

        Blocks of a sequence with an unfinished batch are fenced until that batch is finished.

        Raises: SequenceError / ValueError for handles that are unknown, released, or given twice.
        """
        self._books.release(seq_ids)

    def drop_prefixes(self) -> None:
        """Forgets all prefixes, as after a change of weights: no sequence opened so far is hit from here on."""
        self._books.drop_prefixes()

    def write(self, layer: str, batch: Batch, *parts: torch.Tensor) -> None:
        """Writes the batch's rows of one layer: K and V [T, num_kv_heads, head_dim], or the latent row [T, dim].

        Raises: ValueError / TypeError for an unknown layer or an alias, a committed batch, and parts of another shape,
            dtype or device than the layer's format.
        """
        view, group = self._layer(layer, batch)
        if layer in self.plan.aliases:
            raise ValueError(f"layer: {layer!r} reads the cache of {self.plan.owner(layer)!r} and has none to write")
        self._books.expect_uncommitted(batch.step)
        for part in parts:
            if isinstance(part, torch.Tensor) and part.ndim and part.shape[0] != batch.num_tokens:
                raise ValueError(f"parts: expected {batch.num_tokens} rows, one per token, got {part.shape[0]}")
        kernels.write_rows(view, batch.slot_mapping[group], *parts, backend=self._backend)

    def gather(
        self,
        layer: str,
        batch: Batch,
        start: Any = None,
        out: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Copies the rows of every sequence of the batch, packed one behind the other: one tensor per format part.

        Args:
            start: per sequence the first row to fetch, not before the default. None: 0, or in a window group the
                first row that the batch's first new token can reach (`gather_starts` tells which).
            out: tensors to write to.

        Returns: tensors [num_rows, num_heads, head_dim]; sequence i has row_lens[i] - start[i] rows.

        Raises: ValueError / TypeError that name the argument.
        """
        view, group = self._layer(layer, batch)
        starts, lengths = gather_range(batch, self._books.tables[group], start)
        cu_row_lens = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_row_lens[1:])
        return kernels.gather_rows(
            view,
            batch.block_table[group],
            torch.from_numpy(cu_row_lens).to(self.device),
            num_rows=int(cu_row_lens[-1]),
            start=torch.from_numpy(starts.astype(np.int32)).to(self.device),
            wraps=self.plan.groups[group].retention.window is not None,
            out=out,
            backend=self._backend,
        )

    def gather_starts(self, layer: str, batch: Batch) -> npt.NDArray[np.int64]:
        """Per sequence the position of the first row that `gather` fetches by default."""
        _, group = self._layer(layer, batch)
        return gather_range(batch, self._books.tables[group], None)[0]

    def gqa_decode(
        self,
        layer: str,
        batch: Batch,
        q: torch.Tensor,
        softmax_scale: float | None = None,
        out: torch.Tensor | None = None,
        *,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query token per sequence over the pages of a K/V layer; the layer's window is applied.

        Args:
            q: [n, num_heads, head_dim]; num_heads is a multiple of the layer's KV heads.
            softmax_scale: None: head_dim ** -0.5.
            soft_cap, sinks: as of `kvstore_kernels.gqa_decode`.

        Returns: out [n, num_heads, head_dim_v] in q's dtype and lse [n, num_heads] fp32, natural log; a padding
            sequence gives 0 and -inf.

        Raises: ValueError / TypeError for a batch with other than one token per sequence, and as `write`.
        """
        view, group = self._decode_layer(layer, batch)
        return kernels.gqa_decode(
            view,
            batch.block_table[group],
            batch.row_lens[group],
            q,
            softmax_scale=softmax_scale,
            window=self.plan.spec(layer).window,
            soft_cap=soft_cap,
            sinks=sinks,
            out=out,
            backend=self._backend,
        )

    def mla_decode(
        self,
        layer: str,
        batch: Batch,
        q: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query token per sequence over latent rows: K is the row, V its leading value_dim columns.

        Args:
            q: [n, num_heads, latent_dim], the absorbed query (nope columns first).
            softmax_scale: of the model; it cannot be told from the latent row.
            sinks: as of `kvstore_kernels.mla_decode`.

        Returns: out [n, num_heads, value_dim] in q's dtype and lse [n, num_heads] fp32, as `gqa_decode`.

        Raises: as `gqa_decode`.
        """
        view, group = self._decode_layer(layer, batch)
        return kernels.mla_decode(
            view,
            batch.block_table[group],
            batch.row_lens[group],
            q,
            softmax_scale=softmax_scale,
            sinks=sinks,
            out=out,
            backend=self._backend,
        )

    def page_view(self, layer: str) -> PageView:
        """Where the layer's pages lie; `page_view(layer).tensor("k")` is a strided view for outside kernels.

        Raises: ValueError for an unknown layer, or a store that keeps books only.
        """
        self._group(layer)
        if self._arena is None:
            raise ValueError("device: this store keeps books only; give it a device to have pages")
        return self._arena.views[self.plan.owner(layer)]

    def stats(self) -> StoreStats:
        """Blocks by state, now."""
        allocator = self._books.allocator
        fenced = int(allocator.num_fenced().sum())
        return StoreStats(
            num_blocks=allocator.num_blocks - 1,
            free=allocator.num_free,
            cached=allocator.num_cached,
            in_use=allocator.num_held - fenced,
            fenced=fenced,
            peak_in_use=allocator.peak_held,
            evicted=allocator.num_evicted,
            open_sequences=int(self._books.sequences.is_open.sum()),
        )

    def check(self) -> None:
        """Proves the books: every block in one state, every reference accounted for, every table entry of its group.

        For tests and debugging; its cost grows with the store.

        Raises: AssertionError, which is a fault of this library.
        """
        audit(self._books)

    def _group(self, layer: str) -> int:
        group = self._group_of.get(layer) if isinstance(layer, str) else None
        if group is None:
            known = ", ".join(list(self._group_of)[:4])
            raise ValueError(f"layer: expected a layer of the plan ({known}, ...), got {layer!r}")
        return group

    def _layer(self, layer: str, batch: Batch) -> tuple[PageView, int]:
        view = self.page_view(layer)
        step = _step_of(batch)
        if self._books.unfinished.get(step.serial) is not step:
            raise ValueError("batch: expected an unfinished batch of this store, got a finished or a foreign one")
        return view, self._group_of[layer]

    def _decode_layer(self, layer: str, batch: Batch) -> tuple[PageView, int]:
        view, group = self._layer(layer, batch)
        if not batch.is_decode:
            raise ValueError(
                f"batch: expected one new token per sequence, got {batch.num_tokens} tokens "
                f"of {batch.num_sequences} sequences"
            )
        return view, group

    def _layers_to_zero(self, zero_new: bool | str) -> list[str]:
        if self._arena is None or zero_new is False:
            return []
        chosen: list[str] = []
        for slot in self.plan.layer_slots:
            dtypes = {part.dtype for layer in slot.layers for part in self.plan.spec(layer).format.parts}
            if zero_new is True or len(dtypes) > 1:
                chosen.extend(slot.layers)
        return chosen

    def _zero(self, step: Step) -> None:
        if self._arena is None or not self._zeroed_layers:
            return
        ids = [torch.from_numpy(blocks.astype(np.int64)).to(self.device) for blocks in step.new_blocks]
        for layer in self._zeroed_layers:
            blocks = ids[self._group_of[layer]]
            if blocks.numel():
                self._arena.zero_blocks(layer, blocks)


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected a torch device such as 'cpu' or 'cuda', got {device!r}") from None
    if checked.type == "cuda":
        num_devices = torch.cuda.device_count()
        if not num_devices or (checked.index or 0) >= num_devices:
            raise ValueError(f"device: expected one that torch sees ({num_devices} CUDA devices), got {str(checked)!r}")
        return torch.device("cuda", torch.cuda.current_device() if checked.index is None else checked.index)
    if checked.type != "cpu":
        raise ValueError(f"device: expected 'cpu', a CUDA device or None, got {str(checked)!r}")
    return checked


def _step_of(batch: Batch) -> Step:
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: expected a Batch from extend(), got {type(batch).__name__}")
    return batch.step
