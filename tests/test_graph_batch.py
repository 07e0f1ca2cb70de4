"""graph_batch: decode batches at the same addresses, step after step, whoever is in them."""

import numpy as np
import pytest
import torch
from store_cases import make_store, prefill

import kvstore
from kvstore import Batch, KVStore


def hybrid() -> KVStore:
    specs = {
        "layers.0.attn": kvstore.full_attention(1, 8, dtype=torch.float32, block_size=4),
        "layers.1.attn": kvstore.sliding_window(1, 8, dtype=torch.float32, block_size=4, window=6),
        "layers.2.state": kvstore.recurrent_state([("s", (3,), torch.float32)], block_size=8),
    }
    plan = kvstore.plan_cache(specs, num_frames=60, layout="overlay")
    return KVStore(plan, "cpu", max_sequences=6, max_length=64, max_tokens_per_step=64)


def addresses(batch: Batch) -> list[tuple[int, tuple[int, ...]]]:
    tensors = [batch.positions, batch.seq_lens, batch.cu_seqlens_q, *batch.block_table, *batch.row_lens]
    tensors += [*batch.slot_mapping, *batch.state_blocks]
    return [(tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors if tensor is not None]


def test_every_batch_has_the_same_addresses_and_shapes() -> None:
    store = hybrid()
    seq_ids = prefill(store, range(3), range(20, 37), range(40, 45))
    graph = store.graph_batch(4)
    seen = []
    for step in range(12):
        running = seq_ids if step < 5 else seq_ids[[2, 0]]
        batch = store.extend(running, 1, graph=graph)
        seen.append(addresses(batch))
        assert (batch.num_sequences, batch.num_tokens) == (4, 4)
        store.commit(batch, np.zeros(len(running), int))
    assert all(entry == seen[0] for entry in seen)


def test_the_contents_are_those_of_a_padded_batch_and_o56_padding_names_no_live_block() -> None:
    with_graph, without = hybrid(), hybrid()
    graph = with_graph.graph_batch(4)
    for store in (with_graph, without):
        prefill(store, range(3), range(20, 37), range(40, 45))
    rows = {"all": [0, 1, 2], "fewer": [2, 1], "one": [0]}
    seq_ids = (1 << 32) + np.arange(3)
    for chosen in rows.values():
        pair = [with_graph.extend(seq_ids[chosen], 1, graph=graph), without.extend(seq_ids[chosen], 1, pad_to=4)]
        for name in ("positions", "seq_lens", "cu_seqlens_q"):
            assert torch.equal(*(getattr(batch, name) for batch in pair)), name
        for mine, other in zip(pair[0].block_table, pair[1].block_table, strict=True):
            width = other.shape[1]
            assert torch.equal(mine[:, :width], other)
            assert not mine[:, width:].any()
            assert not mine[len(chosen) :].any()
        assert pair[0].slot_mapping[0].tolist() == pair[1].slot_mapping[0].tolist()
        assert pair[0].slot_mapping[0].tolist()[len(chosen) :] == [-1] * (4 - len(chosen))
        assert torch.equal(pair[0].state_blocks[2], pair[1].state_blocks[2])
        for store, batch in zip((with_graph, without), pair, strict=True):
            store.commit(batch, np.zeros(len(chosen), int))


def test_state_blocks_of_a_layer() -> None:
    store = hybrid()
    batch = store.extend(prefill(store, range(3), range(20, 37)), 1)
    blocks = store.state_blocks("layers.2.state", batch)
    assert blocks is batch.state_blocks[store.plan.group_index("layers.2.state")]
    with pytest.raises(ValueError, match=r"layer: expected one with a state or a ring, got 'layers.0.attn'"):
        store.state_blocks("layers.0.attn", batch)
    store.commit(batch, [1, 2])
    with pytest.raises(ValueError, match="batch: expected an unfinished batch"):
        store.state_blocks("layers.2.state", batch)


def test_one_batch_at_a_time_and_no_more_than_the_size() -> None:
    store = make_store()
    seq_ids = prefill(store, range(5), range(10, 13), range(20, 23))
    graph = store.graph_batch(2)
    with pytest.raises(ValueError, match="pad_to: expected"):
        store.extend(seq_ids, 1, graph=graph)
    batch = store.extend(seq_ids[:2], 1, graph=graph)
    with pytest.raises(ValueError, match="graph: expected buffers whose last batch is finished"):
        store.extend(seq_ids[2:], 1, graph=graph)
    store.commit(batch, [1, 2], finish=False)
    with pytest.raises(ValueError, match="graph: expected buffers whose last batch is finished"):
        store.extend(seq_ids[2:], 1, graph=graph)
    store.finish(batch)
    with pytest.raises(ValueError, match="pad_to: expected 2, the size of the graph's batches, got 3"):
        store.extend(seq_ids[2:], 1, 3, graph=graph)
    store.commit(store.extend(seq_ids[2:], 1, 2, graph=graph), [3])
    store.check()


@pytest.mark.parametrize("size", [0, 9, 2.0, True])
def test_sizes_that_cannot_be(size: object) -> None:
    with pytest.raises((TypeError, ValueError), match="num_sequences: expected"):
        make_store().graph_batch(size)  # type: ignore[arg-type]
