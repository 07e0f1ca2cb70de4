"""KVStore: the bytes of a plan and the books of which sequence holds which block, behind one small set of calls."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import kvstore_kernels as kernels
from kvstore import steps, swap
from kvstore.allocator import NO_GROUP, Ids
from kvstore.arena import Arena
from kvstore.audit import audit
from kvstore.batch import Batch, BatchMaker, GraphBuffers, batch_bytes
from kvstore.books import Books
from kvstore.events import EventLog
from kvstore.hostcopy import HostRows
from kvstore.layer_ops import LayerOps, step_of
from kvstore.mirrors import Mirror, Mirrors
from kvstore.namespaces import Namespace
from kvstore.plan import CachePlan
from kvstore.retain import KeepTokens
from kvstore.rules import Limits
from kvstore.sequence_ops import SequenceOps
from kvstore.sleep import SleepOps
from kvstore.staging import Staging
from kvstore.stats import StoreStats, collect
from kvstore_kernels import LayerTable
from kvstore_kernels.checks import expect_bool, expect_int

BATCHES_PER_STEP = 2  # a prefill and a decode
POISON = 0xFF
"""A NaN in every float dtype: what given-up blocks hold in debug mode."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What `KVStore.open` returns.

    Attributes:
        seq_ids: int64 ndarray [n], the handles, in the order of the prompts.
        cached_tokens: int64 ndarray [n], leading tokens of each prompt that need not be computed.
    """

    seq_ids: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]


class KVStore(SleepOps, SequenceOps, LayerOps):
    """A paged KV-cache store for one engine.

    A sequence is opened with its prompt, extended step by step (rows are reserved), written and read layer by layer,
    and committed (the rows are confirmed written). Calls take whole batches; a failed call changes nothing. One thread
    calls a store; others may ask for `stats` meanwhile. Handles are equal in every store that sees the same calls, so
    a store cannot tell another's.

    Args:
        plan: from `plan_cache`.
        device: of the arena and of every tensor returned. None keeps the books only: tables on the CPU, no bytes.
        max_sequences: sequences open at once.
        max_length: tokens of one sequence; more than the plan has room for give a warning.
        max_tokens_per_step: new tokens of one batch.
        max_in_flight: batches of one sequence that may be extended and not yet committed.
        zero_new: whether blocks are cleared when handed out; "auto": where layers of different dtypes share bytes,
            or keep a state, so that a reader of whole pages does not meet another group's bytes as NaN.
        backend: "triton", "reference", or None: Triton on a GPU, the reference elsewhere.
        prefix_caching: whether sequences find what others have computed.
        stored: "all", or "tail": of a batch with several new tokens of a sequence, windows store only the rows that a
            later step can read. Attention then reads the old tail (`gather`) and the batch's own K and V. Not for
            batches of which tokens may be withdrawn.
        rollback: tokens that windows keep beyond their reach, so that `truncate` can take so many back.
        max_events: how many events are kept for `take_events`; 0 keeps none and costs nothing.
        debug: blocks given up are filled with NaN, and a batch whose blocks have changed hands is refused.
        clock: seconds, by which times to live run out. Ranks that must agree on block ids need the same times.

    Attributes:
        plan, device, stored: as given; `plan.group_index(layer)` is the number of a layer's group in the tuples of a
            batch.

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
        *,
        prefix_caching: bool = True,
        stored: str = "all",
        rollback: int = 0,
        max_events: int = 0,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
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
        for name, value, most in (("rollback", rollback, max_length), ("max_events", max_events, 2**31 - 1)):
            expect_int(name, value, 0, most)
        for name, flag in (("prefix_caching", prefix_caching), ("debug", debug)):
            expect_bool(name, flag)
        if not isinstance(zero_new, bool) and not (isinstance(zero_new, str) and zero_new == "auto"):
            raise ValueError(f"zero_new: expected True, False or 'auto', got {zero_new!r}")
        if stored not in ("all", "tail"):
            raise ValueError(f"stored: expected 'all' or 'tail', got {stored!r}")
        if not callable(clock):
            raise TypeError(f"clock: expected a function that returns seconds, got {clock!r}")
        self.plan, self.stored = plan, stored
        self.device = _checked_device("cpu" if device is None else device)
        self._backend = kernels.resolve_backend(backend, self.device)
        self._books = Books(
            plan,
            Limits(**limits, rollback=rollback),
            prefix_caching=prefix_caching,
            tail_only=stored == "tail",
            debug=debug,
            clock=clock,
            events=EventLog(max_events) if max_events else None,
        )
        self._has_bytes, self._is_asleep = device is not None, False
        self._group_of = {layer: plan.group_index(layer) for layer in (*plan.layers, *plan.aliases)}
        self._debug = debug
        self._given_up = np.zeros(len(self._books.allocator.references), np.int32)  # of each cell how often; in debug
        self._zeroed_layers = self._layers_to_zero(zero_new)
        self._name_pages(Arena(plan, self.device) if self._has_bytes else None)
        self._suspended: dict[int, tuple[swap.Held, list[HostRows | None] | None]] = {}
        capacity = batch_bytes(self._books.rules, max_sequences, max_tokens_per_step)
        self._staging = Staging(self.device, capacity, BATCHES_PER_STEP * max_in_flight)
        self._mirrors = Mirrors(self._books.tables, self.device, self._staging.packed)
        self._maker = BatchMaker(self._books, self._staging)
        longest = plan.max_length()
        if longest is not None and longest < max_length:
            warnings.warn(
                f"max_length: {max_length} tokens are more than the plan has room for, {longest} of one sequence: a "
                "longer one raises NeverFits",
                stacklevel=2,
            )

    def open(
        self,
        token_arrays: Sequence[Any],
        namespace: Namespace | Sequence[Namespace | None] | None = None,
        retention: Sequence[KeepTokens] | Sequence[Sequence[KeepTokens]] | None = None,
        *,
        max_cached_tokens: Any = None,
    ) -> Opened:
        """Opens one sequence per prompt and gives it the blocks that hold a prefix of the prompt already.

        Args:
            token_arrays: the prompts, each a flat array of at least one token id in [0, 2**31).
            namespace: of all prompts, or one per prompt: only prompts of equal namespaces share anything.
            retention: ranges of tokens to keep longer or shorter than others, for all prompts, or a list per prompt.
            max_cached_tokens: the most tokens to find, one number or one per prompt; None: as many as there are.

        Returns: the handles, and how many leading tokens need not be computed: of committed blocks of sequences that
            run or ran, always at least one token short of the prompt. What a running sequence has generated is found
            from its release on. `explain_hit` tells why it is not more.

        Raises: ValueError for a prompt that is empty, too long, or no integers; TypeError / ValueError for the
            namespace and the retention; SequenceError when more sequences are asked for than are left of max_sequences.
        """
        self._expect_awake()
        rows, cached_tokens = self._books.open(token_arrays, namespace, retention, max_cached_tokens)
        return Opened(self._books.handles.current[rows], cached_tokens)

    def extend(
        self, seq_ids: Any, num_new_tokens: Any, pad_to: int | None = None, *, graph: GraphBuffers | None = None
    ) -> Batch:
        """Reserves the rows of the next tokens of each sequence, for the whole batch or not at all.

        Args:
            seq_ids: handles from `open`, each once.
            num_new_tokens: one count for all sequences, or one per sequence.
            pad_to: for one token per sequence: the number of sequences to pad the batch to, as CUDA graphs need it.
                A padding sequence has length 0, a table of null blocks, and one token with slot -1.
            graph: from `graph_batch`: the batch is padded to its size and fills its tensors.

        Raises: SequenceError for handles that are unknown, released, suspended, repeated, or have max_in_flight
            uncommitted batches; ValueError for counts, lengths over max_length or max_tokens_per_step, and a graph
            whose last batch is not finished; OutOfBlocks, which is NeverFits where a sequence would not fit even alone.
        """
        self._expect_awake()
        if graph is not None:
            pad_to = graph.expect_free(pad_to)
        step = steps.extend(self._books, seq_ids, num_new_tokens, pad_to)
        self._poison()
        if self._arena is not None:
            self._prepare(step)
        padding = 0 if pad_to is None else pad_to - len(step.rows)
        if graph is None:
            batch = self._maker.make(step, self._mirrors.take(len(step.rows)), padding)
        else:
            batch = graph.batch = self._maker.make(step, graph.mirror, padding, graph)
        if self._debug:
            batch.tags = self._tags(batch)
        return batch

    def graph_batch(self, num_sequences: int) -> GraphBuffers:
        """Buffers for decode batches of up to `num_sequences` sequences that a CUDA graph has captured.

        Every `extend(..., graph=buffers)` fills the same tensors, at the same addresses and with the same shapes: block
        tables are as wide as `max_length` needs. One batch at a time, one new token for each sequence. Tensors for
        `write` and the reads have `num_sequences` rows; `commit` takes the tokens of the sequences alone.

        Raises: TypeError / ValueError for a number that is none of 1 ... max_sequences.
        """
        expect_int("num_sequences", num_sequences, 1, self._books.limits.max_sequences)
        capacity = batch_bytes(self._books.rules, num_sequences, num_sequences)
        mirror = Mirror(self._books.tables, self.device, self._staging.packed)
        return GraphBuffers(num_sequences, mirror, Staging(self.device, capacity, 1, packed=True))

    def commit(self, batch: Batch, token_ids: Any, num_committed: Any = None, *, finish: bool = True) -> None:
        """Confirms that the rows of a batch are written, which makes its full blocks hittable.

        Sequences released since `extend` are passed over. Windows let go of what the next token cannot reach.

        Args:
            batch: of this store and not committed; earlier batches of its sequences are committed first.
            token_ids: the tokens whose rows the batch wrote (never the sampled ones), flat, in the batch's order; -1
                for one that is not known yet: a sequence is findable up to the first of these, until `name_tokens`.
            num_committed: one count per sequence when fewer than extended are kept (speculation); the rows behind
                them are withdrawn. `token_ids` holds the kept tokens only. Refused where a group keeps rings, states or
                tails, which a step overwrites.
            finish: whether the device is done with the batch as well; otherwise call `finish` later.

        Raises: ValueError for a foreign, committed or later batch, wrong counts, and token ids that are no integers
            in [-1, 2**31).
        """
        steps.commit(self._books, step_of(batch), token_ids, num_committed, finish)
        if finish:
            self._give_back(batch)

    def finish(self, batch: Batch) -> None:
        """Says that the device has run a committed batch: blocks that were fenced for it can be handed out again.

        Raises: ValueError for a batch that is foreign, finished already, or not committed.
        """
        steps.finish(self._books, step_of(batch))
        self._give_back(batch)

    def release(self, seq_ids: Any) -> None:
        """Closes sequences. Their full committed blocks stay hittable until they are evicted, the others are free.

        Blocks of a sequence with an unfinished batch are fenced until that batch is finished.

        Raises: SequenceError / ValueError for handles that are unknown, released, or given twice.
        """
        _, rows = self._books.handles.resolve(seq_ids)
        self._books.release(seq_ids)
        for row in rows.tolist():
            self._suspended.pop(row, None)
        self._poison()

    def stats(self) -> StoreStats:
        """Blocks by state, now."""
        return collect(self._books, len(self._suspended))

    def check(self) -> None:
        """Proves the books: every block in one state, every reference accounted for, every table entry of its group.

        For tests and debugging; its cost grows with the store.

        Raises: AssertionError, which is a fault of this library.
        """
        audit(self._books, asleep=self._is_asleep)

    # Inside

    def _give_back(self, batch: Batch) -> None:
        if batch.graph is None:
            self._staging.give_back(batch.lease)
            self._mirrors.give_back(batch.mirror)
        else:
            batch.graph.staging.give_back(batch.lease)
            batch.graph.batch = None
        self._poison()

    def _prepare(self, step: steps.Step) -> None:
        """Clears new blocks and fills copies, before anything is written."""
        if self._debug:
            self._fill(self._layer_tables, step.new_blocks, POISON)
        self._fill(self._zeroed, step.new_blocks, 0)
        for table, (sources, copies) in zip(self._layer_tables, step.copies, strict=False):
            if table is not None and len(copies):
                kernels.copy_blocks(table, self._to_ids(sources), self._to_ids(copies), backend=self._backend)

    def _poison(self) -> None:
        """Of a store in debug mode: fills what was given up, and is free still, with NaN."""
        allocator = self._books.allocator
        if not allocator.freed:
            return
        cells = np.unique(np.concatenate(allocator.freed))
        allocator.freed.clear()
        self._given_up[cells] += 1
        if self._arena is None:
            return
        cells = cells[(allocator.references[cells] == 0) & ~allocator.indexed[cells]]
        group, place = allocator.group[cells // allocator.cells_per_frame], cells % allocator.cells_per_frame
        blocks = [
            # A frame that nobody has is filled for all groups: one of them had it.
            allocator.to_ids(cells[((group == g) | (group == NO_GROUP)) & (place < per_frame)], g)
            for g, per_frame in enumerate(allocator.blocks_per_frame)
        ]
        self._fill(self._layer_tables, blocks, POISON)

    def _fill(self, layer_tables: Sequence[LayerTable | None], blocks: Sequence[Ids], value: int) -> None:
        for table, ids in zip(layer_tables, blocks, strict=True):
            if table is not None and len(ids):
                kernels.fill_blocks(table, self._to_ids(ids), value, backend=self._backend)

    def _to_ids(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def _layers_to_zero(self, zero_new: bool | str) -> list[str]:
        if zero_new is False:
            return []
        if zero_new is True:
            return list(self.plan.layers)
        chosen = [layer for layer in self.plan.layers if self.plan.spec(layer).kind == "state"]
        for slot in self.plan.layer_slots:
            dtypes = {part.dtype for layer in slot.layers for part in self.plan.spec(layer).format.parts}
            if len(dtypes) > 1:
                chosen.extend(slot.layers)
        return chosen

    def _tags(self, batch: Batch) -> list[npt.NDArray[np.int32]]:
        """How often each block that a batch can reach was given up so far, per group; -1 for what it cannot reach."""
        allocator, tables, rules, step = self._books.allocator, self._books.tables, self._books.rules, batch.step
        tags = []
        for g in range(rules.num_groups):
            size, width, w = int(rules.block_size[g]), int(tables.width[g]), int(rules.window_of[g])
            first = rules.visible(w, step.starts) // size if w >= 0 else np.zeros_like(step.starts)
            block = first[:, None] + np.arange(width)
            reached = np.zeros(block.shape, np.bool_)
            np.put_along_axis(reached, block % width, block * size < step.ends[:, None], axis=1)
            counts = self._given_up[allocator.to_cells(tables.table(g)[step.rows], g)]
            tags.append(np.where(reached, counts, np.int32(-1)))
        return tags

    def _expect_fresh(self, batch: Batch) -> None:
        if batch.tags is None:
            return
        rules = self._books.rules
        for g, tags in enumerate(batch.tags):
            table = batch.block_table[g].cpu().numpy()[: len(batch.step.rows)]
            cells = self._books.allocator.to_cells(table, g)
            tags = tags[:, : table.shape[1]]
            stale = (self._given_up[cells] != tags) & (tags >= 0) & (table != 0)
            if stale.any():
                seq, column = np.argwhere(stale)[0]
                raise ValueError(
                    f"batch: expected blocks that are still the batch's own, got block {table[seq, column]} of group "
                    f"{rules.names[g]!r} of sequence {batch.seq_ids[seq]}, which was given up since"
                )


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
