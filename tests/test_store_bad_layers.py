"""KVStore: layers of a kind that a call cannot serve, and positions that name no rows, are refused or have no slot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from store_cases import (
    CHUNK_LAYER,
    LAYER,
    RING_LAYER,
    STATE_LAYER,
    WINDOW_LAYER,
    mixed_layers,
    prefill,
    refused,
    store_of,
)  # fmt: skip

from kvstore import KVStore
from kvstore.specs import LayerSpec
from kvstore_kernels.formats import latent_format

WRONG_LAYERS: dict[str, tuple[Callable[[KVStore, Any], Any], str]] = {
    "write a state": (
        lambda store, batch: store.write(STATE_LAYER, batch, torch.zeros(2, 4)),
        "layer: expected one with rows, got 'layers.2.state', which keeps a state: see state_view",
    ),
    "gather a state": (lambda store, batch: store.gather(STATE_LAYER, batch), "layer: expected one with rows"),
    "starts of a state": (
        lambda store, batch: store.gather_starts(STATE_LAYER, batch),
        "layer: expected one with rows",
    ),
    "decode a state": (
        lambda store, batch: store.gqa_decode(STATE_LAYER, batch, torch.zeros(2, 2, 8)),
        "layer: expected one with rows",
    ),
    "slots of a state": (lambda store, batch: store.slots_of(STATE_LAYER, batch, [[0], [0]]), "expected one with rows"),
    "slot mapping of a state": (lambda store, batch: store.slot_mapping(STATE_LAYER, batch), "expected one with rows"),
    "row lens of a state": (lambda store, batch: store.row_lens(STATE_LAYER, batch), "expected one with rows"),
    "decode a chunk": (
        lambda store, batch: store.gqa_decode(CHUNK_LAYER, batch, torch.zeros(2, 2, 8)),
        "layer: expected pages that a decode kernel reads, got a chunked layer: gather its rows",
    ),
    "decode a ring": (
        lambda store, batch: store.gqa_decode(RING_LAYER, batch, torch.zeros(2, 2, 8)),
        "got a ring layer: gather its rows",
    ),
    "the state of rows": (
        lambda store, batch: store.state_view(LAYER),
        "layer: expected one with a recurrent state, got 'layers.0.attn' of kind 'full'",
    ),
    "flat positions": (
        lambda store, batch: store.slots_of(LAYER, batch, [0, 1]),
        r"positions: expected integers \[2, k\], got shape \[2\] of int64",
    ),
    "positions of one": (
        lambda store, batch: store.slots_of(LAYER, batch, [[0, 1]]),
        r"positions: expected integers \[2, k\], got shape \[1, 2\] of int64",
    ),
    "half positions": (
        lambda store, batch: store.slots_of(LAYER, batch, torch.zeros(2, 3)),
        r"positions: expected integers \[2, k\], got shape \[2, 3\] of float32",
    ),
}


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_layers_of_another_kind_and_wrong_positions_are_refused(name: str) -> None:
    store = store_of(mixed_layers())
    batch = store.extend(prefill(store, range(6), range(30, 35)), 1)
    call, message = WRONG_LAYERS[name]
    refused(store, lambda: call(store, batch), ValueError, message)


def test_latent_rows_with_a_window_are_no_case_for_mla_decode() -> None:
    store = store_of({"w": LayerSpec("latent_window", 4, latent_format(12, 8, torch.float32), window=6)})
    batch = store.extend(prefill(store, range(5)), 1)
    message = "layer: expected latent rows without a window, got 'w': name its rows to sparse_mla_decode"
    refused(store, lambda: store.mla_decode("w", batch, torch.zeros(1, 2, 12), 1.0), ValueError, message)


def test_positions_that_are_not_held_have_no_slot() -> None:
    store = store_of(mixed_layers())
    seq_ids = prefill(store, range(16))
    batch = store.extend(seq_ids, 1)
    assert store.slots_of(LAYER, batch, [[-1, 0, 16, 17, 99]]).tolist()[0][0] == -1
    assert store.slots_of(LAYER, batch, [[-1, 0, 16, 17, 99]]).tolist()[0][3:] == [-1, -1]
    assert store.slots_of(WINDOW_LAYER, batch, [[10, 17]]).tolist() == [[-1, -1]]
    held = store.slots_of(WINDOW_LAYER, batch, [range(11, 17)])
    assert (held > 0).all()
    assert held[0, -1] == store.slot_mapping(WINDOW_LAYER, batch)[0]


@pytest.mark.parametrize("call", ["write", "gather", "gather_starts", "slot_mapping", "row_lens", "gqa_decode"])
def test_what_is_no_batch_is_refused(call: str) -> None:
    store = store_of(mixed_layers())
    arguments = (torch.zeros(1, 2, 8),) if call == "gqa_decode" else ()
    refused(store, lambda: getattr(store, call)(LAYER, "batch", *arguments), TypeError, "batch: expected a Batch")


@pytest.mark.parametrize("call", ["commit", "finish"])
def test_what_is_no_batch_is_not_committed(call: str) -> None:
    store = store_of(mixed_layers())
    arguments = ([1],) if call == "commit" else ()
    refused(store, lambda: getattr(store, call)(None, *arguments), TypeError, "batch: expected a Batch from extend")
