"""SleepOps: a store gives its memory away for a while, as during a step of training or while weights are loaded."""

from collections.abc import Sequence

import torch

import kvstore_kernels as kernels
from kvstore.arena import Arena
from kvstore.books import Books
from kvstore.errors import SequenceError
from kvstore.hostcopy import HostCopies
from kvstore.plan import CachePlan
from kvstore_kernels import LayerTable


class SleepOps:
    """The part of a KVStore that frees its pages and has them again; see `KVStore`."""

    plan: CachePlan
    device: torch.device
    _books: Books
    _backend: str
    _arena: Arena | None
    _layer_tables: list[LayerTable | None]
    _zeroed: list[LayerTable | None]
    _zeroed_layers: Sequence[str]  # that are cleared when handed out
    _host: HostCopies
    _has_bytes: bool  # when awake
    _is_asleep: bool

    @property
    def is_asleep(self) -> bool:
        """Whether the store is between `sleep` and `wake`."""
        return self._is_asleep

    def sleep(self) -> int:
        """Forgets all prefixes, as `drop_prefixes` with its events, and frees the bytes of the pages until `wake`.

        The device is waited for. Its memory goes back to torch's allocator (`torch.cuda.empty_cache()` hands it to
        other processes). The plan, the tables and staging buffers stay, and handles of released sequences stay void.
        Page views handed out before, and their tensors, are empty from here on; slices that the engine made of them
        name memory that is gone and must not be used. Until `wake`, `open`, `extend` and all that needs pages raise
        ValueError.

        Returns: the number of blocks that held prefixes.

        Raises: SequenceError while sequences are open, suspended ones included; ValueError while batches are not
            finished, and for a store that sleeps already.
        """
        self._expect_awake()
        books = self._books
        if books.handles.num_open:
            raise SequenceError(f"sleep: expected no open sequences, got {books.handles.num_open}")
        if books.unfinished:
            raise ValueError(f"sleep: expected no unfinished batches, got {len(books.unfinished)}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        given_up = books.forget_prefixes()
        arena = self._arena
        self._name_pages(None)
        self._is_asleep = True
        self._poison()
        if arena is not None:
            _free(arena)
        return given_up

    def wake(self) -> None:
        """Allocates the pages again, zero-filled; the prefix index is empty, and sequences can be opened.

        Pages may have other addresses than before: fetch page views anew, and capture CUDA graphs again. Buffers of
        `graph_batch` stay where they are and are usable on. A wake that raises (no memory) leaves the store asleep.

        Raises: ValueError for a store that is awake.
        """
        if not self._is_asleep:
            raise ValueError("wake: expected a store that sleeps, got one that is awake")
        self._name_pages(Arena(self.plan, self.device) if self._has_bytes else None)
        self._is_asleep = False

    def _expect_awake(self) -> None:
        """Raises ValueError for a store that sleeps."""
        if self._is_asleep:
            raise ValueError("the store sleeps: call wake()")

    def _name_pages(self, arena: Arena | None) -> None:
        """Makes an arena that of the store, with all that names its pages."""
        layer_tables = self._make_layer_tables(arena, self.plan.layers)
        zeroed = self._make_layer_tables(arena, self._zeroed_layers)
        self._host = HostCopies(layer_tables, self.device, self._backend)
        self._arena, self._layer_tables, self._zeroed = arena, layer_tables, zeroed

    def _make_layer_tables(self, arena: Arena | None, layers: Sequence[str]) -> list[LayerTable | None]:
        """The given layers of each group; None for a group with none of them, or without an arena."""
        chosen = [[layer for layer in group.layers if layer in layers] for group in self.plan.groups]
        return [
            None if arena is None or not names else kernels.layer_table([arena.views[layer] for layer in names])
            for names in chosen
        ]

    def _poison(self) -> None:
        """Of a store in debug mode: fills what was given up with NaN."""


def _free(arena: Arena) -> None:
    """Frees the bytes of an arena, whoever has page views: their tensors become empty."""
    storage = arena.memory.untyped_storage()
    tensors = [view.tensor(part.name) for view in arena.views.values() for part in view.format.parts]
    for tensor in (*tensors, *arena.slot_tensors, arena.memory):
        tensor.set_(tensor.new_empty(0).untyped_storage())
    if storage.resizable():  # else a numpy array shares the bytes, and they go with it
        storage.resize_(0)
