"""LayerOps: what an engine does with the rows of one layer: write, gather, decode, look at the pages."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import kvstore_kernels as kernels
from kvstore.allocator import NULL_BLOCK_ID
from kvstore.arena import Arena
from kvstore.batch import Batch, gather_range
from kvstore.books import Books
from kvstore.export import CsrTable, csr_table
from kvstore.plan import CachePlan
from kvstore.rules import NO_VARIANT
from kvstore.steps import Step, expect_uncommitted, expect_unfinished
from kvstore_kernels import PageView

NOPE_AND_ROPE = ("nope", "rope")
"""A latent row as two tensors."""


class LayerOps:
    """The half of a KVStore that moves bytes; see `KVStore`."""

    plan: CachePlan
    device: torch.device
    _books: Books
    _arena: Arena | None
    _backend: str
    _group_of: dict[str, int]

    def write(self, layer: str, batch: Batch, *parts: torch.Tensor, slots: torch.Tensor | None = None) -> None:
        """Writes the batch's rows of one layer: K and V [T, num_kv_heads, head_dim], or the latent row [T, dim].

        Args:
            slots: int64 [m], where m rows go instead: from `slot_mapping` or `slots_of`, of blocks that the batch
                extends, which nobody else has. None: the layer's slot mapping.

        Raises: ValueError / TypeError for an unknown layer or an alias, a layer with a state (see `state_view`), a
            committed batch, and parts of another shape, dtype or device than the layer's format.
        """
        view, variant = self._rows_of(layer, batch)
        if layer in self.plan.aliases:
            raise ValueError(f"layer: {layer!r} reads the cache of {self.plan.owner(layer)!r} and has none to write")
        expect_uncommitted(self._books, batch.step)
        where = batch.variant_slots[variant] if slots is None else slots
        names = [part.name for part in view.format.parts]
        for name, part in zip(names if len(names) == len(parts) else NOPE_AND_ROPE, parts, strict=False):
            if isinstance(part, torch.Tensor) and part.ndim and part.shape[0] != where.shape[0]:
                what = "token" if slots is None else "slot"
                raise ValueError(f"{name}: expected {where.shape[0]} rows, one per {what}, got {part.shape[0]}")
        kernels.write_rows(view, where, *parts, backend=self._backend)

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

        Returns: tensors [num_rows, num_heads, head_dim]; sequence i has row_lens[i] - start[i] rows. A store that
            keeps tails only gives of a window the rows before a batch of several tokens, without those of the batch.

        Raises: ValueError / TypeError that name the argument.
        """
        view, variant = self._rows_of(layer, batch)
        rules = self._books.rules
        starts, lengths = gather_range(batch, rules, variant, start)
        cu_row_lens = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=cu_row_lens[1:])
        group = rules.variants[variant].group
        return kernels.gather_rows(
            view,
            batch.block_table[group],
            torch.from_numpy(cu_row_lens).to(self.device),
            num_rows=int(cu_row_lens[-1]),
            start=torch.from_numpy(starts.astype(np.int32)).to(self.device),
            wraps=rules.kinds[group] != "full",
            out=out,
            backend=self._backend,
        )

    def read(self, layer: str, batch: Batch, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of explicit slots, from `slots_of`: one tensor [m, num_heads, head_dim] per part of the format.

        Args:
            slots: int64 [m]; below 0 gives zeros.

        Raises: ValueError / TypeError as `write`, and for slots of another shape, dtype or device.
        """
        view, _ = self._rows_of(layer, batch)
        return kernels.read_rows(view, slots, dtype=view.format.parts[0].dtype, backend=self._backend)

    def gather_starts(self, layer: str, batch: Batch) -> npt.NDArray[np.int64]:
        """Per sequence the first row that `gather` fetches by default (a position, where a row is one token)."""
        _, variant = self._rows_of(layer, batch)
        return gather_range(batch, self._books.rules, variant, None)[0]

    def slot_mapping(self, layer: str, batch: Batch) -> torch.Tensor:
        """int64 [T], where the batch's rows of this layer go: `batch.slot_mapping`, for the layer's tokens per row.

        Raises: ValueError / TypeError as `write`.
        """
        _, variant = self._rows_of(layer, batch, moves=False)
        return batch.variant_slots[variant]

    def row_lens(self, layer: str, batch: Batch) -> torch.Tensor:
        """int32 [n], rows of this layer up to seq_lens. Raises: ValueError / TypeError as `write`."""
        _, variant = self._rows_of(layer, batch, moves=False)
        return batch.variant_lens[variant]

    def csr_table(self, layer: str, batch: Batch) -> CsrTable:
        """The batch's block table as CSR, for FlashInfer and its kin. Raises: ValueError / TypeError as `write`."""
        return csr_table(batch, self._books.rules, self._rows_of(layer, batch, moves=False)[1])

    def block_table(self, layer: str, batch: Batch, sentinel: int = NULL_BLOCK_ID) -> torch.Tensor:
        """int32 [n, width], the batch's block table for this layer; unused entries hold `sentinel`, 0 or -1.

        With 0 it is the batch's own tensor, with -1 a copy. Raises: ValueError for another sentinel, and as `write`.
        """
        if sentinel not in (NULL_BLOCK_ID, -1):
            raise ValueError(f"sentinel: expected 0 or -1, got {sentinel!r}")
        variant = self._rows_of(layer, batch, moves=False)[1]
        table = batch.block_table[self._books.rules.variants[variant].group]
        return table if sentinel == NULL_BLOCK_ID else torch.where(table == NULL_BLOCK_ID, sentinel, table)

    def state_blocks(self, layer: str, batch: Batch) -> torch.Tensor:
        """int32 [n, 2], for a layer with a state or a ring: the block to read, and the one to write.

        They index `state_view(layer)`. 0 reads nothing (a sequence's first step), and writes nothing (no new token).

        Raises: ValueError for another layer; ValueError / TypeError as `write`.
        """
        group = self._group(layer)
        expect_unfinished(self._books, step_of(batch))
        blocks = batch.state_blocks[group]
        if blocks is None:
            raise ValueError(f"layer: expected one with a state or a ring, got {layer!r}")
        return blocks

    def slots_of(self, layer: str, batch: Batch, positions: Any) -> torch.Tensor:
        """The slots of positions that the sequences of the batch hold, for kernels that pick rows (sparse attention).

        Args:
            positions: int64 [n, k], row numbers of this layer in each of the batch's n sequences; below 0 is none.

        Returns: int64 [n, k] on the store's device, -1 for none and for rows that are not held.

        Raises: ValueError for another shape; ValueError / TypeError as `write`.
        """
        _, variant_idx = self._rows_of(layer, batch, moves=False)
        rules, step = self._books.rules, batch.step
        wanted = np.asarray(positions.cpu() if isinstance(positions, torch.Tensor) else positions)
        if wanted.ndim != 2 or wanted.shape[0] != len(step.rows) or wanted.dtype.kind not in "iu":
            raise ValueError(
                f"positions: expected integers [{len(step.rows)}, k], got shape {list(wanted.shape)} of {wanted.dtype}"
            )
        variant = rules.variants[variant_idx]
        starts, counts = gather_range(batch, rules, variant_idx, None)
        starts, ends = starts[: len(wanted), None], (starts + counts)[: len(wanted), None]
        held = (wanted >= starts) & (wanted < ends)
        per_block = variant.rows_per_block
        row = np.where(held, wanted, 0).astype(np.int64)
        # By the batch's own table: the store's may have moved on, since the batch was committed or a sequence released.
        table = batch.block_table[variant.group][: len(wanted)]
        column = np.zeros_like(row) if variant.is_ring else row // per_block % table.shape[1]
        blocks = table.gather(1, torch.from_numpy(column).to(self.device)).to(torch.int64)
        slots = blocks * per_block + torch.from_numpy(row % per_block).to(self.device)
        return torch.where(torch.from_numpy(held).to(self.device) & (blocks != NULL_BLOCK_ID), slots, -1)

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
        lse: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query token per sequence over the pages of a K/V layer; the layer's window is applied.

        Args:
            q: [n, num_heads, head_dim]; num_heads is a multiple of the layer's KV heads.
            softmax_scale: None: head_dim ** -0.5.
            soft_cap, sinks, lse, workspace: as of `kvstore_kernels.gqa_decode`.

        Returns: out [n, num_heads, head_dim_v] in q's dtype and lse [n, num_heads] fp32, natural log; a padding
            sequence gives 0 and -inf.

        Raises: ValueError / TypeError for a batch with other than one token per sequence, a chunked layer (gather its
            rows), and as `write`.
        """
        view, variant = self._decode_layer(layer, batch, q)
        return kernels.gqa_decode(
            view,
            batch.block_table[self._books.rules.variants[variant].group],
            batch.variant_lens[variant],
            q,
            softmax_scale=softmax_scale,
            window=self.plan.spec(layer).window,
            soft_cap=soft_cap,
            sinks=sinks,
            out=out,
            lse=lse,
            workspace=workspace,
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
        lse: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query token per sequence over latent rows: K is the row, V its leading value_dim columns.

        Args:
            q: [n, num_heads, latent_dim], the absorbed query (nope columns first).
            softmax_scale: of the model; it cannot be told from the latent row.
            sinks, lse, workspace: as of `kvstore_kernels.mla_decode`.

        Returns: out [n, num_heads, value_dim] in q's dtype and lse [n, num_heads] fp32, as `gqa_decode`.

        Raises: as `gqa_decode`, a layer with a window included (see `sparse_mla_decode`).
        """
        view, variant = self._decode_layer(layer, batch, q)
        if self.plan.spec(layer).window is not None:
            raise ValueError(
                f"layer: expected latent rows without a window, got {layer!r}: name its rows to sparse_mla_decode"
            )
        return kernels.mla_decode(
            view,
            batch.block_table[self._books.rules.variants[variant].group],
            batch.variant_lens[variant],
            q,
            softmax_scale=softmax_scale,
            sinks=sinks,
            out=out,
            lse=lse,
            workspace=workspace,
            backend=self._backend,
        )

    def sparse_mla_decode(
        self,
        layer: str,
        batch: Batch,
        q: torch.Tensor,
        slots: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor | None = None,
        *,
        second: tuple[str, torch.Tensor] | None = None,
        sinks: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of query tokens over the latent rows that a list of slots names for each.

        Args:
            q: [num_queries, num_heads, latent_dim], as `mla_decode`.
            slots: int32 or int64 [num_queries, k], from `slots_of`; below 0 is skipped.
            second: another latent layer, and its slots, attended to as one with the first.
            sinks, lse, workspace: as of `kvstore_kernels.sparse_mla_decode`.

        Returns: out [num_queries, num_heads, value_dim] in q's dtype and lse [num_queries, num_heads] fp32.

        Raises: ValueError / TypeError as `write`.
        """
        view, _ = self._rows_of(layer, batch)
        other = None if second is None else (self._rows_of(second[0], batch)[0], second[1])
        return kernels.sparse_mla_decode(
            view,
            slots,
            q,
            softmax_scale=softmax_scale,
            second=other,
            sinks=sinks,
            out=out,
            lse=lse,
            workspace=workspace,
            backend=self._backend,
        )

    def page_view(self, layer: str) -> PageView:
        """Where the layer's pages lie; `page_view(layer).tensor("k")` is a strided view for outside kernels.

        Raises: ValueError for an unknown layer, or a store that keeps books only or sleeps.
        """
        self._group(layer)
        self._expect_awake()
        if self._arena is None:
            raise ValueError("device: this store keeps books only; give it a device to have pages")
        return self._arena.views[self.plan.owner(layer)]

    def state_view(self, layer: str) -> dict[str, torch.Tensor]:
        """The tensors of a recurrent layer by name: views [num_blocks, *shape], indexed by `batch.state_blocks`.

        Raises: ValueError for a layer without a state, and as `page_view`.
        """
        view = self.page_view(layer)
        spec = self.plan.spec(layer)
        if spec.kind != "state":
            raise ValueError(f"layer: expected one with a recurrent state, got {layer!r} of kind {spec.kind!r}")
        return {part.name: view.tensor(part.name).squeeze(1) for part in spec.format.parts}

    def _group(self, layer: str) -> int:
        group = self._group_of.get(layer) if isinstance(layer, str) else None
        if group is None:
            known = ", ".join(list(self._group_of)[:4])
            raise ValueError(f"layer: expected a layer of the plan ({known}, ...), got {layer!r}")
        return group

    def _rows_of(self, layer: str, batch: Batch, *, moves: bool = True) -> tuple[PageView, int]:
        """The pages of a layer with rows, and its variant; of an unfinished batch only."""
        if moves:
            view: Any = self.page_view(layer)
        else:
            self._group(layer)
            view = None
        variant = self._books.rules.variant_of_layer[self.plan.owner(layer)]
        if variant == NO_VARIANT:
            raise ValueError(f"layer: expected one with rows, got {layer!r}, which keeps a state: see state_view")
        step = step_of(batch)
        expect_unfinished(self._books, step)
        self._expect_fresh(batch)
        return view, variant

    def _decode_layer(self, layer: str, batch: Batch, q: torch.Tensor) -> tuple[PageView, int]:
        view, variant = self._rows_of(layer, batch)
        if not batch.is_decode:
            raise ValueError(
                f"batch: expected one new token per sequence, got {batch.num_tokens} tokens "
                f"of {batch.num_sequences} sequences"
            )
        kind = self.plan.spec(layer).kind
        if kind in ("chunked", "ring"):
            raise ValueError(f"layer: expected pages that a decode kernel reads, got a {kind} layer: gather its rows")
        num_seqs = batch.block_table[self._books.rules.variants[variant].group].shape[0]
        if isinstance(q, torch.Tensor) and q.ndim and q.shape[0] != num_seqs:
            padding = " (padding included)" if num_seqs > len(batch.step.rows) else ""
            raise ValueError(f"q: expected {num_seqs} rows, one per sequence of the batch{padding}, got {q.shape[0]}")
        return view, variant

    def _expect_fresh(self, batch: Batch) -> None:
        """Of a store in debug mode: raises when a block of the batch has changed hands."""

    def _expect_awake(self) -> None:
        """Raises ValueError for a store that sleeps."""


def step_of(batch: Batch) -> Step:
    """The step behind a batch. Raises: TypeError for anything else."""
    if not isinstance(batch, Batch):
        raise TypeError(f"batch: expected a Batch from extend(), got {type(batch).__name__}")
    return batch.step
