"""`read`, and `write` with slots: rows that an engine picks itself."""

import pytest
import torch
from store_cases import LAYER, STATE_LAYER, make_hybrid, make_store, state, store_of

from kvstore.layers import latent


def rows(count: int, base: float) -> torch.Tensor:
    return base + torch.arange(count * 16, dtype=torch.float32).reshape(count, 2, 8)


def test_rows_of_any_positions_come_back_and_zeros_for_none() -> None:
    store = make_store()
    seq_ids = store.open([range(10), range(20, 27)]).seq_ids
    batch = store.extend(seq_ids, [10, 7])
    k, v = rows(17, 1.0), rows(17, 1000.0)
    store.write(LAYER, batch, k, v)
    slots = store.slots_of(LAYER, batch, [[9, 0, -1, 4], [6, 7, 3, 0]])
    got_k, got_v = store.read(LAYER, batch, slots.reshape(-1))
    wanted = [9, 0, None, 4, 16, None, 13, 10]
    for got, source in ((got_k, k), (got_v, v)):
        for row, token in zip(got, wanted, strict=True):
            assert torch.equal(row, torch.zeros(2, 8) if token is None else source[token])


def test_rows_can_be_written_again_where_the_caller_says() -> None:
    store = make_store()
    seq_ids = store.open([range(10)]).seq_ids
    batch = store.extend(seq_ids, 10)
    k, v = rows(10, 1.0), rows(10, 1000.0)
    store.write(LAYER, batch, k, v)
    slots = store.slots_of(LAYER, batch, [[8, 9, -1]])[0]
    store.write(LAYER, batch, rows(3, 5.0), rows(3, 7.0), slots=slots)
    k[8:], v[8:] = rows(2, 5.0), rows(2, 7.0)
    got_k, got_v = store.gather(LAYER, batch)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)


def test_rows_of_several_tokens_where_they_close() -> None:
    store = store_of({LAYER: latent(12, 8, dtype=torch.float32, block_size=8, tokens_per_row=4)})
    seq_ids = store.open([range(11)]).seq_ids
    batch = store.extend(seq_ids, 11)
    mapping = store.slot_mapping(LAYER, batch)
    closing = mapping[3::4].contiguous()
    assert closing.tolist() == mapping[mapping >= 0].tolist()
    latents = torch.arange(24, dtype=torch.float32).reshape(2, 12)
    store.write(LAYER, batch, latents, slots=closing)
    (got,) = store.read(LAYER, batch, store.slots_of(LAYER, batch, [[0, 1, 2]])[0])
    assert torch.equal(got.squeeze(1), torch.cat([latents, torch.zeros(1, 12)]))


def test_bad_calls() -> None:
    store = make_hybrid()
    seq_ids = store.open([range(6)]).seq_ids
    batch = store.extend(seq_ids, 6)
    slots = store.slots_of(LAYER, batch, [[0, 1]])[0]
    k = torch.zeros(3, 2, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^k: expected 2 rows, one per slot, got 3"):
        store.write(LAYER, batch, k, k, slots=slots)
    with pytest.raises(ValueError, match="layer: expected a layer of the plan"):
        store.read("layers.9.attn", batch, slots)
    with pytest.raises(ValueError, match=r"slots: expected dtype torch\.int64, got torch\.int32"):
        store.read(LAYER, batch, slots.to(torch.int32))
    with pytest.raises(ValueError, match="slots: expected"):
        store.read(LAYER, batch, slots[None])
    states = store_of({STATE_LAYER: state(4)})
    one = states.extend(states.open([range(4)]).seq_ids, 4)
    with pytest.raises(ValueError, match="expected one with rows"):
        states.read(STATE_LAYER, one, slots)
    store.commit(batch, range(6))
    with pytest.raises(ValueError, match="batch: expected an unfinished batch"):
        store.read(LAYER, batch, slots)
