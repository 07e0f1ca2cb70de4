"""KVStore: what a newcomer's first mistakes are answered with: the argument, in the caller's words."""

import re

import numpy as np
import pytest
import torch
from store_cases import LAYER, make_store, prefill, rows_for, store_of

import kvstore
from kvstore import PlanError, SequenceError
from kvstore.layers import chunked_attention, full_attention, latent, sliding_window


def test_a_committed_or_foreign_batch_is_refused() -> None:
    store, other = make_store(), make_store()
    batch = store.extend(store.open([range(4)]).seq_ids, 4)
    for call in (
        lambda of: other.commit(of, range(4)),
        other.finish,
        lambda of: other.gather(LAYER, of),
        lambda of: other.slots_of(LAYER, of, [[0]]),
    ):
        with pytest.raises(ValueError, match="batch: expected a batch of this store, got one of another store"):
            call(batch)
    store.commit(batch, range(4), finish=False)
    with pytest.raises(ValueError, match="expected a batch that is not committed, got one that was committed already"):
        store.commit(batch, range(4))
    with pytest.raises(ValueError, match="expected a batch that is not committed"):
        store.write(LAYER, batch, rows_for(range(4)), rows_for(range(4)))
    store.finish(batch)
    for call in (lambda: store.gather(LAYER, batch), lambda: store.finish(batch)):
        with pytest.raises(ValueError, match="an unfinished batch, got one that was committed and finished already"):
            call()
    with pytest.raises(ValueError, match="expected a batch that is not committed, got one that was committed already"):
        store.commit(batch, range(4))


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_for_another_number_of_tokens_are_refused(rows: int) -> None:
    store = make_store()
    batch = store.extend(store.open([range(2)]).seq_ids, 2)
    with pytest.raises(ValueError, match=f"^k: expected 2 rows, one per token, got {rows}"):
        store.write(LAYER, batch, rows_for(range(rows)), rows_for(range(rows)))
    with pytest.raises(ValueError, match=f"^v: expected 2 rows, one per token, got {rows}"):
        store.write(LAYER, batch, rows_for(range(2)), rows_for(range(rows)))


def test_wrong_rows_of_a_latent_layer_have_the_names_of_its_parts() -> None:
    store = store_of({"mla": latent(12, 8, dtype=torch.float32, block_size=4)})
    batch = store.extend(store.open([range(2)]).seq_ids, 2)
    with pytest.raises(ValueError, match=r"^latent: expected 2 rows, one per token, got 3"):
        store.write("mla", batch, torch.zeros(3, 12))
    with pytest.raises(ValueError, match=r"^rope: expected 2 rows, one per token, got 3"):
        store.write("mla", batch, torch.zeros(2, 8), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("pad_to", "message"),
    [
        (None, "q: expected 2 rows, one per sequence of the batch, got 3"),
        (4, "q: expected 4 rows, one per sequence of the batch (padding included), got 3"),
    ],
    ids=["plain", "padded"],
)
def test_queries_of_another_number_are_called_q(pad_to: int | None, message: str) -> None:
    store = make_store()
    batch = store.extend(prefill(store, range(4), range(10, 15)), 1, pad_to=pad_to)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        store.gqa_decode(LAYER, batch, torch.zeros(3, 2, 8))
    rows = {"mla": latent(12, 8, dtype=torch.float32, block_size=4)}
    store = store_of(rows)
    batch = store.extend(store.open([[1], [2]]).seq_ids, 1, pad_to=pad_to)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        store.mla_decode("mla", batch, torch.zeros(3, 2, 12), 1.0)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ([1, 2, 3], "[1, 2, 3]"),
        (range(5, 90), "[5, 6, 7, ...]"),
        ((np.int64(7),), "[7]"),
        (np.arange(3), "[0, 1, 2]"),
        (torch.arange(4), "[0, 1, 2, ...]"),
    ],
    ids=["list", "range", "numbers", "array", "tensor"],
)
@pytest.mark.parametrize("call", ["open", "lookup"])
def test_token_ids_in_the_place_of_prompts(call: str, given: object, prompt: str) -> None:
    message = f"token_arrays: expected a list of token arrays, got token ids: one prompt is [{prompt}], not {prompt}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(make_store(), call)(given)


def test_a_full_store_says_how_many_are_open() -> None:
    store = make_store(max_sequences=2)
    seq_ids = store.open([[1], [2]]).seq_ids
    message = (
        "token_arrays: expected at most 0 more sequences "
        "(2 of max_sequences 2 are open; release gives places back), got 1"
    )
    with pytest.raises(SequenceError, match=f"^{re.escape(message)}$"):
        store.open([[3]])
    store.release(seq_ids[:1])
    assert len(store.open([[3]]).seq_ids) == 1


def test_a_miss_is_told_from_a_short_match() -> None:
    store = make_store()
    prefill(store, range(10))
    miss, part = store.open([[99, 98, 97], [0, 1, 99]]).seq_ids
    miss_text, part_text = str(store.explain_hit(miss)), str(store.explain_hit(part))
    assert miss_text == "0 of 3 tokens cached; nothing cached begins like this prompt in its namespace"
    assert part_text.startswith("2 of 3 tokens cached; tokens equal up to 2")


@pytest.mark.parametrize("name", ["float32", "fp32"])
def test_a_dtype_of_a_config_may_have_its_short_or_long_name(name: str) -> None:
    plan = kvstore.plan_cache("smollm2-135m", memory="64MiB", kv_dtype=name)
    assert plan.spec("layers.0.attn").format.parts[0].dtype == torch.float32


@pytest.mark.parametrize("make", [full_attention, latent], ids=["full", "latent"])
def test_a_layer_says_which_torch_dtype_to_write(make) -> None:
    known = "torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn"
    message = f"dtype: expected a torch dtype, one of {known}, got 'float32'"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        make(8, 4, dtype="float32")


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: full_attention(2, 24, **more),
        lambda **more: sliding_window(2, 24, window=8, **more),
        lambda **more: chunked_attention(2, 24, chunk=8, **more),
        lambda **more: latent(72, 64, **more),
    ],
    ids=["full", "window", "chunked", "latent"],
)
def test_layers_take_what_readers_demand_of_the_distance_between_blocks(make) -> None:
    spec = make(block_size=1, block_stride_multiple=4096)
    assert spec.dense_stride_bytes == 4096 > make(block_size=1).dense_stride_bytes
    plan = kvstore.plan_cache({"layers.0.attn": spec}, memory="1MiB")
    assert plan.placements["layers.0.attn"].block_stride_bytes % 4096 == 0
    with pytest.raises(PlanError, match="block_stride_multiple: expected an integer"):
        make(block_stride_multiple=0)
