"""Faults seen in public offloading, by number: what `suspend` and `resume` can show of them on a CPU.

Tiers (files, other machines) come later; the tests say what waits for them.
"""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import (
    LAYER,
    RING_LAYER,
    STATE_LAYER,
    WINDOW_LAYER,
    feed,
    make_store,
    mixed_layers,
    prefill,
    ring,
    snapshot,
    state_of,
    store_of,
    tokens_in,
)

import kvstore_kernels as kernels
from kvstore import OutOfBlocks
from kvstore.hostcopy import HostCopies, host_rows
from kvstore.layers import sliding_window

KIB, MIB = 2**10, 2**20


def record_moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The names and block ids of all fills, packs and unpacks from here on, in order."""
    moves: list[tuple[str, list[int]]] = []
    for name in ("fill_blocks", "pack_blocks", "unpack_blocks"):
        original = getattr(kernels, name)

        def recorded(
            views: Any, ids: torch.Tensor, *rest: Any, _of: Any = original, _name: str = name, **more: Any
        ) -> Any:
            moves.append((_name, ids.tolist()))
            return _of(views, ids, *rest, **more)

        monkeypatch.setattr(kernels, name, recorded)
    return moves


def test_o47_bytes_are_saved_before_their_blocks_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In debug mode what is given up is poisoned: first the copy, then the poison. On a GPU streams count as well."""
    store = make_store(debug=True)
    seq_ids = store.open([range(6)]).seq_ids
    feed(store, seq_ids, range(6))
    moves = record_moves(monkeypatch)
    held = []
    original = store._host.save
    monkeypatch.setattr(store._host, "save", lambda ids: held.append(store.stats().in_use) or original(ids))
    store.suspend(seq_ids)
    assert held == [2]
    assert moves == [("pack_blocks", [1, 2]), ("fill_blocks", [2])]  # block 1 is cached
    assert store.stats().in_use == 0
    store.resume(seq_ids)
    assert tokens_in(store, LAYER, seq_ids) == [*range(6)]


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_o48_nothing_clears_a_block_behind_the_load_into_it(monkeypatch: pytest.MonkeyPatch, debug: bool) -> None:
    """New blocks are cleared at `extend`; a resumed block is loaded and not cleared, then or later."""
    store = make_store(num_frames=5, zero_new=True, debug=debug)
    seq_ids = store.open([range(7)]).seq_ids
    feed(store, seq_ids, range(7))
    store.suspend(seq_ids)
    other = store.open([range(50, 66)]).seq_ids
    feed(store, other, range(50, 66))  # takes all four blocks, the cached one too
    store.release(other)
    moves = record_moves(monkeypatch)
    store.resume(seq_ids)
    loaded = store._books.tables.table(0)[seq_ids[0] & 0xFF, :2].tolist()
    assert moves[-1] == ("unpack_blocks", loaded)
    feed(store, seq_ids, [7, 8])
    assert [name for name, ids in moves if set(ids) & set(loaded)] == ["unpack_blocks"]
    assert tokens_in(store, LAYER, seq_ids) == [*range(9)]


class Pinner:
    """Pins pieces of host memory up to a limit a call and a limit in all, and knows which are still pinned."""

    def __init__(self, most: int, in_all: int) -> None:
        self.most, self.in_all = most, in_all
        self.asked: list[int] = []
        self.pinned = 0

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.asked.append(num_bytes)
        if num_bytes > self.most or self.pinned + num_bytes > self.in_all:
            raise RuntimeError("CUDA error: invalid argument")
        piece = torch.empty(num_bytes, dtype=torch.uint8)
        self.pinned += num_bytes
        weakref.finalize(piece.untyped_storage(), self.undo, num_bytes)
        return piece

    def undo(self, num_bytes: int) -> None:
        self.pinned -= num_bytes


def test_o49_a_large_buffer_is_pinned_in_pieces() -> None:
    """Limit 1 MiB a call, 3 MiB of rows of 96 KiB: pieces of whole rows, 10 each, and 2 in the last one."""
    pin = Pinner(most=MIB, in_all=16 * MIB)
    rows = host_rows(32, 96 * KIB, pin, max_pin_bytes=MIB)
    assert rows.is_pinned
    assert [tuple(piece.shape) for piece in rows.pieces] == [(10, 96 * KIB)] * 3 + [(2, 96 * KIB)]
    assert pin.asked == [960 * KIB] * 3 + [192 * KIB]
    assert pin.pinned == 3 * MIB
    del rows
    assert pin.pinned == 0


@pytest.mark.parametrize(
    ("pin", "asked"),
    [(Pinner(MIB, 2 * MIB), [960 * KIB] * 3), (Pinner(MIB // 2, 16 * MIB), [960 * KIB])],
    ids=["the third piece", "the first piece"],
)
def test_o49_where_a_piece_cannot_be_pinned_none_is(pin: Pinner, asked: list[int]) -> None:
    rows = host_rows(32, 96 * KIB, pin, max_pin_bytes=MIB)
    assert not rows.is_pinned
    assert [tuple(piece.shape) for piece in rows.pieces] == [(32, 96 * KIB)]
    assert (pin.asked, pin.pinned) == (asked, 0)


def test_o49_a_row_that_is_more_than_one_call_can_pin_is_not_pinned() -> None:
    pin = Pinner(MIB, 16 * MIB)
    rows = host_rows(2, MIB + 16, pin, max_pin_bytes=MIB)
    assert (rows.is_pinned, len(rows.pieces), pin.asked) == (False, 1, [])
    assert host_rows(0, 64, pin).pieces[0].shape == (0, 64)


@pytest.mark.parametrize("in_all", [MIB, 0], ids=["pinned", "not pinned"])
def test_o49_bytes_in_pieces_come_back(in_all: int) -> None:
    """Two pages of 256 B a row, and pieces of 1 KiB, of two rows each."""
    store = make_store()
    page = store.plan.spec(LAYER).page_bytes
    store._host = HostCopies(store._layer_tables, store.device, "reference", Pinner(MIB, in_all), 4 * page)
    seq_ids = store.open([range(19), range(30, 33)]).seq_ids
    feed(store, seq_ids, range(19), range(30, 33))
    store.suspend(seq_ids)
    (rows,) = store._suspended[int(seq_ids[0]) & 0xFF][1]
    assert rows.is_pinned == bool(in_all)
    assert [len(piece) for piece in rows.pieces] == ([2, 2, 1] if in_all else [5])
    prefill(store, range(60, 100))
    store.resume(seq_ids)
    assert tokens_in(store, LAYER, seq_ids) == [*range(19), *range(30, 33)]


def test_o50_a_load_that_fails_leaves_the_sequence_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the blocks back; a later try finds all bytes. Files that are missing or cut short wait for the tier."""
    store = make_store(num_frames=9)
    seq_ids = store.open([range(6), range(40, 47)]).seq_ids
    feed(store, seq_ids, range(6), range(40, 47))
    store.suspend(seq_ids)
    original, calls = kernels.unpack_blocks, []

    def failing(*arguments: Any, **more: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:  # half of the sequences are loaded by then
            raise RuntimeError("out of host memory")
        original(*arguments, **more)

    before = snapshot(store)
    monkeypatch.setattr(kernels, "unpack_blocks", failing)
    with pytest.raises(RuntimeError, match="out of host memory"):
        store.resume(seq_ids)
    monkeypatch.undo()
    store.check()
    after = snapshot(store)
    for name in ("stats", "suspended", "references", "tables", "on the host", "indexed"):
        assert after[name] == before[name], name
    with pytest.raises(ValueError, match="which is suspended"):
        store.extend(seq_ids, 1)
    store.resume(seq_ids[::-1])
    store.check()
    assert tokens_in(store, LAYER, seq_ids) == [*range(6), *range(40, 47)]


def test_o52_a_save_that_fails_leaves_the_sequence_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """No entry says "on the host" without a copy, and no block is lost. Tiers of one page wait for the tier."""
    store = store_of(mixed_layers())
    seq_ids = store.open([range(9), range(40, 47)]).seq_ids
    feed(store, seq_ids, range(9), range(40, 47))
    original, calls = kernels.pack_blocks, []

    def failing(*arguments: Any, **more: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 7:  # the first sequence is saved, and a group of the second one
            raise RuntimeError("out of host memory")
        return original(*arguments, **more)

    before = snapshot(store)
    monkeypatch.setattr(kernels, "pack_blocks", failing)
    with pytest.raises(RuntimeError, match="out of host memory"):
        store.suspend(seq_ids)
    monkeypatch.undo()
    assert snapshot(store) == before
    assert store.stats().suspended_sequences == 0
    feed(store, seq_ids, [9], [47])
    assert tokens_in(store, LAYER, seq_ids) == [*range(10), *range(40, 48)]


@pytest.mark.parametrize("layout", ["buckets", "bestfit", "overlay", "frames"])
def test_o51_pages_with_any_stride_come_back_by_index(layout: str) -> None:
    """K and V of a page stand one behind the other, pages of a layer apart; all kinds of groups, other blocks.

    What the sequences give up is filled with NaN, and partly written by somebody else.
    """
    store = store_of(mixed_layers(), 40, layout=layout, debug=True)
    if layout == "overlay":
        assert store.page_view(WINDOW_LAYER).block_stride_bytes == 2 * store.page_view(WINDOW_LAYER).page_bytes
    seq_ids = store.open([range(11), range(40, 47)]).seq_ids
    feed(store, seq_ids, range(11), range(40, 47))
    layers = [layer for layer in store.plan.layers if layer != STATE_LAYER]
    before = {layer: tokens_in(store, layer, seq_ids) for layer in layers}
    assert before[LAYER] == [*range(11), *range(40, 47)]
    tables = [store._books.tables.table(g)[:2].copy() for g in range(5)]
    store.suspend(seq_ids)
    assert store.stats().in_use == 0
    blocker = store.open([range(60, 70)]).seq_ids
    feed(store, blocker, range(60, 70))
    store.drop_prefixes()
    store.resume(seq_ids)
    store.check()
    assert any((store._books.tables.table(g)[:2] != tables[g]).any() for g in range(5))
    assert {layer: tokens_in(store, layer, seq_ids) for layer in layers} == before
    assert state_of(store, seq_ids) == [sum(range(11)), sum(range(40, 47))]
    feed(store, seq_ids, [11], [47])
    assert tokens_in(store, LAYER, seq_ids) == [*range(12), *range(40, 48)]
    assert tokens_in(store, LAYER, blocker) == [*range(60, 70)]


@pytest.mark.parametrize("kind", ["window", "ring"])
def test_o53_a_window_is_saved_with_its_place(kind: str) -> None:
    """Window of 128 and 200 tokens; saved, brought back to other blocks, and continued as if nothing had been."""
    layer = WINDOW_LAYER if kind == "window" else RING_LAYER
    spec = sliding_window(2, 8, dtype=torch.float32, block_size=16, window=128) if kind == "window" else ring(128)
    kept, moved = (store_of({layer: spec}, 64, max_length=400, max_tokens_per_step=200) for _ in range(2))
    for store in (kept, moved):
        feed(store, store.open([range(200)]).seq_ids, range(200))
    seq_ids = kept._books.handles.current[:1].copy()
    before = moved._books.tables.table(0)[0].copy()
    moved.suspend(seq_ids)
    prefill(moved, range(1000, 1100))
    moved.resume(seq_ids)
    assert (moved._books.tables.table(0)[0] != before).any()
    assert ((moved._books.tables.table(0)[0] > 0) == (before > 0)).all()  # the same columns
    for token in range(200, 340, 7):
        for store in (kept, moved):
            feed(store, seq_ids, range(token, token + 7))
        expected = [*range(token + 7 - 127, token + 7)] if kind == "window" else [*range(token + 7 - 128, token + 7)]
        assert tokens_in(kept, layer, seq_ids) == tokens_in(moved, layer, seq_ids) == expected
        batches = [store.extend(seq_ids, 0) for store in (kept, moved)]
        starts = [
            store.gather_starts(layer, batch).tolist() for store, batch in zip((kept, moved), batches, strict=True)
        ]
        assert starts[0] == starts[1] == [expected[0]]
        for store, batch in zip((kept, moved), batches, strict=True):
            store.commit(batch, [])


def test_a_resumed_sequence_shares_nothing_and_what_it_left_is_still_found() -> None:
    store = make_store()
    seq_ids = store.open([range(9)]).seq_ids
    feed(store, seq_ids, range(9))
    store.suspend(seq_ids)
    assert (store.stats().cached, store.stats().suspended_sequences) == (2, 1)
    other = store.open([range(9)])
    assert other.cached_tokens.tolist() == [8]
    store.resume(seq_ids)
    assert store.stats().in_use == 2 + 3
    feed(store, seq_ids, [70])
    assert tokens_in(store, LAYER, seq_ids) == [*range(9), 70]
    assert tokens_in(store, LAYER, other.seq_ids) == [*range(8)]
    store.release(np.concatenate([seq_ids, other.seq_ids]))
    store.drop_prefixes()
    assert store.stats().free == store.stats().num_blocks


def test_resume_is_all_or_nothing() -> None:
    store = make_store(num_frames=6)
    seq_ids = store.open([range(8), range(20, 27)]).seq_ids
    feed(store, seq_ids, range(8), range(20, 27))
    store.suspend(seq_ids)
    blocker = store.open([range(40, 52)]).seq_ids
    feed(store, blocker, range(40, 52))
    before = snapshot(store)
    with pytest.raises(OutOfBlocks, match=r"wanted \[4\], free \[0\], evictable \[2\]"):
        store.resume(seq_ids)
    assert snapshot(store) == before
    store.resume(seq_ids[1:])
    assert tokens_in(store, LAYER, seq_ids[1:]) == [*range(20, 27)]
    assert store.stats().suspended_sequences == 1
    store.release(seq_ids)
    store.check()
    assert store.stats().suspended_sequences == 0
