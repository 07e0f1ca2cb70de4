"""The engine of `python -m benchmarks capacity`: it counts what the store holds, and treats no layout worse."""

import numpy as np
import pytest
import torch

from benchmarks.capacity import OF_VLLM, plan_in
from benchmarks.capacity_plot import draw_places
from benchmarks.record import Measure
from benchmarks.replay import Engine, Replay, WrongReplayError
from benchmarks.traces import Request
from benchmarks.waste import distinct_tokens, needed_blocks
from kvstore import (
    KVStore,
    chunked_attention,
    full_attention,
    plan_cache,
    recurrent_state,
    sliding_window,
)

FULL = {"layers.0.attn": full_attention(2, 64)}
OTHERS = {
    "window": {"layers.1.attn": sliding_window(2, 64, window=40)},
    "chunk": {"layers.1.attn": chunked_attention(2, 64, chunk=64)},
    "uneven-chunk": {"layers.1.attn": chunked_attention(2, 64, chunk=40)},
    "state": {"layers.1.state": recurrent_state([("ssm", (64,), torch.float32)], block_size=32)},
}


@pytest.mark.parametrize("stored", ["all", "tail"])
@pytest.mark.parametrize("layout", ["overlay", "frames"])
@pytest.mark.parametrize("other", sorted(OTHERS))
def test_after_a_commit_the_store_holds_what_was_said_to_be_needed(other, layout, stored, monkeypatch):
    plan = plan_cache(FULL | OTHERS[other], memory=2_000_000, grouping="uniform", layout=layout)
    engine = Engine(max_running=6, tokens_per_step=96, tokens_per_decode=2, stored=stored, sample_every=1)
    lengths = np.random.default_rng(0).integers(1, (200, 30), (10, 2)).tolist()
    requests = [Request(0.0, prompt + 20, output, "system", 20) for prompt, output in lengths]
    served = Replay.of(plan, requests, engine)
    said: list[list[int]] = []
    held: list[list[int]] = []

    def look(self, batch):
        seq_lens = batch.seq_lens.numpy().astype(np.int64)
        tables = [table.numpy().astype(np.int64) for table in batch.block_table]
        said.append([needed_blocks(group, tables[g], seq_lens)[0] for g, group in enumerate(plan.groups)])

    committed = KVStore.commit

    def commit(self, batch, token_ids):
        committed(self, batch, token_ids)
        if len(said) > len(held):
            held.append([group.in_use for group in self.stats().groups])

    monkeypatch.setattr(Replay, "_look", look)
    monkeypatch.setattr(KVStore, "commit", commit)
    served.run()
    assert len(said) > 20
    assert held == said


@pytest.mark.parametrize(("block_size", "found"), [(16, 896), (64, 960)])  # ends of chunks of 112 and of 64 tokens
def test_a_later_question_finds_a_document_in_blocks_of_any_size(block_size, found):
    specs = {
        "layers.0.attn": full_attention(2, 64, block_size=block_size),
        "layers.1.state": recurrent_state([("ssm", (64,), torch.float32)], block_size=16),
    }
    plan = plan_cache(specs, memory=16_000_000, grouping="uniform", layout="overlay")
    requests = [Request(float(at), 1008, 4, "document", 1000) for at in range(3)]
    held = Replay.of(plan, requests, Engine(tokens_per_step=112, tokens_per_decode=1, sample_every=1)).run()
    assert held.hit_rate == pytest.approx(2 * found / (3 * 1008))


def test_a_prompt_that_is_alone_goes_on_in_smaller_steps():
    plan = plan_cache({"layers.0.attn": sliding_window(2, 64, window=33)}, num_frames=1 + 6)
    requests = [Request(0.0, 150, 4)]  # 3 blocks at rest, 10 as one step
    held = Replay.of(plan, requests, Engine(tokens_per_step=256, sample_every=1)).run()
    assert (held.refused, held.generated) == (0, 4)


def test_tokens_of_a_refused_request_are_not_due():
    plan = plan_cache(FULL, num_frames=1 + 4)
    requests = [Request(0.0, 20, 4), Request(0.0, 60, 40)]  # the second one ends after 4 of its tokens
    held = Replay.of(plan, requests, Engine(tokens_per_step=256, sample_every=1)).run()
    assert (held.refused, held.generated) == (1, 4)
    short = Replay.of(plan, requests, Engine(tokens_per_step=256, sample_every=1))
    short.generated = -1
    with pytest.raises(WrongReplayError, match="expected 4 generated tokens, got 3"):
        short.run()


def test_means_begin_when_the_pool_has_filled():
    plan = plan_cache(FULL, num_frames=1 + 60)
    requests = [Request(0.0, 64, 30) for _ in range(40)]  # of 4 to 6 blocks: ten of them, one more in each step
    engine = Engine(tokens_per_step=64, tokens_per_decode=1, sample_every=1)
    held = Replay.of(plan, requests, engine).run()
    assert held.is_full
    assert held.sequences[0] > 8
    assert held.places.shares()["free"] + held.places.shares()["cached"] < 0.15
    engine = Engine(tokens_per_step=256, tokens_per_decode=1, sample_every=1, max_running=4)
    held = Replay.of(plan, requests, engine).run()  # as full as it gets, without a seat
    assert held.is_full
    assert held.sequences[0] == 4


def test_distinct_tokens_count_shared_ones_once():
    plan = plan_cache(FULL | OTHERS["window"], num_frames=61, grouping="uniform", layout="overlay")
    store = KVStore(plan, None, max_sequences=8, max_length=512)
    prompt = np.arange(64)
    first = store.open([prompt]).seq_ids
    store.commit(store.extend(first, 64), prompt)
    second = store.open([np.append(prompt, 7)]).seq_ids
    batch = store.extend(np.append(first, second), 1)
    assert batch.seq_lens.sum() == 2 * 65
    assert distinct_tokens(plan, batch) == 64 + 2
    windows = plan_cache(OTHERS["window"], num_frames=9)
    store = KVStore(windows, None, max_sequences=8, max_length=512)
    assert distinct_tokens(windows, store.extend(store.open([prompt]).seq_ids, 20)) == 20


@pytest.mark.parametrize(
    ("model", "options", "sizes", "block_bytes"),
    [
        ("qwen3-next-80b-a3b", {"state_dtype": "fp32"}, [1056] * 4, 25_952_256),
        ("nemotron-h-8b", {}, [1040] * 7, 17_039_360),
        ("gemma-3-27b", {}, [16] * 7, 1_310_720),
        ("deepseek-v4-flash", {"kv_dtype": "fp8_ds_mla"}, [4, 8, 64, 64, 256], 1_002_240),
    ],
)
def test_the_rows_of_vllm_have_its_groups_and_blocks(model, options, sizes, block_bytes):
    for row in OF_VLLM[1:] if model.startswith("deepseek") else OF_VLLM:
        plan = plan_in(row, model, {**options, "memory": 1 << 36})
        assert sorted(group.block_size for group in plan.groups) == sizes
        assert plan.frame_bytes == block_bytes


def test_the_picture_shows_a_layout_without_figures(tmp_path):
    path = tmp_path / "capacity.svg"
    draw_places([Measure("model, chat, buckets", "absent", "why")], path)
    assert "<!-- buckets -->" in path.read_text(encoding="utf-8")
    assert "<!-- absent -->" in path.read_text(encoding="utf-8")


def test_requests_that_come_between_two_looks_are_seen():
    plan = plan_cache({"layers.0.attn": full_attention(2, 64)}, num_frames=101)
    requests = [Request(0.2 + 0.6 * number, 800, 8) for number in range(30)]
    held = Replay.of(plan, requests, Engine()).run()
    assert held.refused == 0
    assert held.sequences == (1.0, 1)
    assert held.places.rows > 0
