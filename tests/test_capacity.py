"""`python -m benchmarks capacity`: bytes by cause against figures worked out by hand, and whole replays."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import __main__ as command
from benchmarks import capacity, replay
from benchmarks.capacity_tables import rows_of
from benchmarks.record import Measure
from benchmarks.replay import Engine, Replay, WrongReplayError
from benchmarks.traces import Request, draw, to_lines
from benchmarks.waste import Bytes, block_waste, bytes_now, mean
from kvstore import KVStore, full_attention, plan_cache, recurrent_state, sliding_window

ROW = 2 * 2 * 64 * 2  # K and V of 2 heads of 64 in bf16
PAGE = 16 * ROW
BATCH_KEYS = ("sequences", "tokens", "rows", "cached", "tail", "narrow", "in_flight", "wasted")


def mixed_plan(layout, **options):
    """Two layers that keep everything and one with a window of 40 tokens."""
    specs = {
        "layers.0.attn": full_attention(2, 64),
        "layers.1.attn": full_attention(2, 64),
        "layers.2.attn": sliding_window(2, 64, window=40),
    }
    return plan_cache(specs, num_frames=options.pop("num_frames", 21), grouping="uniform", layout=layout, **options)


def places_of(plan, lengths, goes_on=False):
    """The bytes while a step of sequences of these lengths is in flight; `goes_on`: one more token of each."""
    store = KVStore(plan, None, max_sequences=8, max_length=256)
    prompts = [np.arange(length) + 1000 * number for number, length in enumerate(lengths)]
    seq_ids = store.open(prompts).seq_ids
    batch = store.extend(seq_ids, lengths)
    if goes_on:
        store.commit(batch, np.concatenate(prompts))
        batch = store.extend(seq_ids, 1)
    return bytes_now(plan, batch, store.stats())


@pytest.mark.parametrize("layout", ["buckets", "overlay"])
def test_bytes_of_two_groups_that_share_blocks(layout):
    plan = mixed_plan(layout)
    assert plan.frame_bytes == 2 * PAGE
    places = places_of(plan, [20, 100])
    # Full: 2 + 7 blocks with 20 + 100 tokens of 144, two layers. Window, next token 100 reaches 61 ... 99 in blocks
    # 3 ... 6, of which 61 ... 99 are 39 tokens; the short one has all 20 of 2 blocks. One layer in a block of two.
    assert places.rows == (2 * 120 + 39 + 20) * ROW
    assert places.tail == (2 * (144 - 120) + (64 - 39) + (32 - 20)) * ROW
    assert places.narrow == (4 + 2) * PAGE
    assert places.in_flight == (7 - 4) * 2 * PAGE  # blocks 0 ... 2 of the window, until the step is committed
    assert (places.padding, places.cached, places.partial) == (0, 0, 0)
    assert places.null == 2 * PAGE
    assert places.free == (21 - 1 - 9 - 9) * 2 * PAGE
    assert places.total == plan.arena_bytes


def test_blocks_that_a_commit_has_let_go_of_are_cached():
    plan = mixed_plan("overlay")
    before, after = places_of(plan, [100]), places_of(plan, [100], goes_on=True)
    assert before.in_flight == 3 * 2 * PAGE
    assert after.in_flight == 0
    assert after.rows - before.rows == 2 * ROW  # the new token in two layers; the window has moved on
    assert after.cached + after.free == before.free + 3 * 2 * PAGE


def test_narrow_groups_take_little_in_frames():
    plan = mixed_plan("frames", frame_bytes=4 * PAGE, num_frames=21)
    assert plan.blocks_per_frame == (2, 4)
    assert [block_waste(plan, group) for group in plan.groups] == [(0, 0), (0, 0)]
    places = places_of(plan, [100])
    assert places.narrow == 0
    assert places.rows == (2 * 100 + 39) * ROW
    assert places.partial == (4 * 2 - 7) * 2 * PAGE + (2 * 4 - 7) * PAGE  # 7 blocks of each: 4 and 2 frames
    assert places.total == plan.arena_bytes


def test_pages_in_larger_pages_of_a_slot_are_padding():
    specs = {"layers.0.attn": full_attention(4, 64), "layers.1.attn": sliding_window(2, 64, window=40)}
    plan = plan_cache(specs, num_frames=9, grouping="uniform", layout="bestfit")
    assert [block_waste(plan, group) for group in plan.groups] == [(0, 0), (PAGE, 0)]
    plan = plan_cache(specs, num_frames=9, grouping="uniform", layout="buckets")
    assert [block_waste(plan, group) for group in plan.groups] == [(0, PAGE), (0, 2 * PAGE)]


def test_a_block_that_two_sequences_share_counts_once():
    plan = mixed_plan("overlay", num_frames=41)
    store = KVStore(plan, None, max_sequences=8, max_length=512)
    prompt = np.arange(64)
    first = store.open([prompt]).seq_ids
    store.commit(store.extend(first, 64), prompt)
    second = store.open([np.append(prompt, 7)])
    assert second.cached_tokens.tolist() == [64]
    batch = store.extend(np.append(first, second.seq_ids), 1)
    places = bytes_now(plan, batch, store.stats())
    # 4 shared full blocks and one of each sequence with one token; the window reaches 26 ... 64: blocks 1 ... 3 are
    # shared with their tokens 26 ... 63, and each sequence has its token 64.
    assert places.rows == (2 * (64 + 2) + 38 + 2) * ROW
    assert places.total == plan.arena_bytes


def test_a_state_in_flight_takes_a_second_block():
    specs = {"layers.0.state": recurrent_state([("ssm", (64,), torch.float32)], block_size=32)}
    plan = plan_cache(specs, num_frames=9)
    places = places_of(plan, [20], goes_on=True)
    (group,) = plan.groups
    assert places.rows == group.payload_bytes
    assert places.total == plan.arena_bytes


@st.composite
def plans(draw_from):
    heads = draw_from(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
    window = draw_from(st.sampled_from([17, 40, 100]))
    specs = {f"layers.{i}.attn": full_attention(each, 16) for i, each in enumerate(heads)}
    if draw_from(st.booleans()):
        specs |= {f"layers.{i + 5}.attn": sliding_window(each, 16, window=window) for i, each in enumerate(heads[:2])}
    if draw_from(st.booleans()):
        specs["layers.9.state"] = recurrent_state([("ssm", (512,), torch.float32)], block_size=64)
    layout = draw_from(st.sampled_from(["buckets", "bestfit", "overlay", "frames"]))
    return plan_cache(specs, memory=draw_from(st.sampled_from([1, 2, 4])) * 400_000, layout=layout)


@settings(max_examples=40, deadline=None)
@given(plan=plans(), seed=st.integers(0, 99), stored=st.sampled_from(["all", "tail"]), decode=st.sampled_from([1, 3]))
def test_every_byte_has_one_place_and_every_request_ends(plan, seed, stored, decode):
    rng = np.random.default_rng(seed)
    requests = [
        Request(float(number), *rng.integers(1, (300, 40)).tolist(), *(("system", 1) if number % 3 else (None, 0)))
        for number in range(12)
    ]
    engine = Engine(
        max_running=6, tokens_per_step=64, tokens_per_decode=decode, step_s=0.5, stored=stored, sample_every=1
    )
    held = Replay.of(plan, requests, engine).run()  # checks each look, and the store at the end
    assert held.places.total == pytest.approx(plan.arena_bytes)
    assert held.sequences[0] <= held.sequences[1] <= 6
    assert held.refused or held.generated == sum(each.output_tokens for each in requests)


def test_a_full_pool_takes_the_youngest_back_and_it_ends_all_the_same():
    plan = plan_cache({"layers.0.attn": full_attention(2, 64)}, num_frames=1 + 8)
    requests = [Request(0.0, 33, 60) for _ in range(3)]  # 6 blocks each at the end, 3 at first
    held = Replay.of(plan, requests, Engine(tokens_per_step=64, tokens_per_decode=1, sample_every=1)).run()
    assert held.preempted > 0
    assert (held.refused, held.generated) == (0, 180)


def test_a_request_that_does_not_fit_alone_is_refused_and_the_others_are_served():
    plan = plan_cache({"layers.0.attn": full_attention(2, 64)}, num_frames=1 + 4)
    requests = [Request(0.0, 20, 4), Request(0.0, 100, 4), Request(0.0, 20, 4)]
    held = Replay.of(plan, requests, Engine(tokens_per_step=256, sample_every=1)).run()
    assert (held.refused, held.generated) == (1, 8)


def test_a_later_turn_finds_the_earlier_one():
    plan = plan_cache({"layers.0.attn": full_attention(2, 64)}, num_frames=101)
    requests = [Request(0.0, 320, 16, conversation="talk"), Request(9.0, 640, 16, conversation="talk")]
    held = Replay.of(plan, requests, Engine(sample_every=1)).run()
    assert held.hit_rate == pytest.approx(336 / (320 + 640), abs=0.01)  # with what was answered


def test_the_mean_of_places():
    assert mean([Bytes(rows=2.0, free=4.0), Bytes(rows=4.0)]) == Bytes(rows=3.0, free=2.0)


def run(capsys, *options):
    status = command.main(["capacity", "--json", *options])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return status, {(line["case"], line["metric"]): line for line in lines if line["case"] != "machine"}


SMALL = ("--models", "smollm2-135m", "--mixes", "batch", "--requests", "20", "--sequences", "4")


def test_figures_of_layouts_side_by_side(capsys):
    status, figures = run(capsys, *SMALL, "--layouts", "buckets,frames")
    assert status == 0
    for layout in ("buckets", "frames"):
        case = f"smollm2-135m, batch, {layout}"
        assert all((case, metric) in figures for metric in BATCH_KEYS)
        assert sum(figures[case, place]["value"] for place in capacity.CAUSES) == pytest.approx(
            figures[case, "wasted"]["value"], abs=0.01
        )
        assert figures[case, "sequences"]["value"] >= 2


def test_a_layout_that_cannot_plan_a_model_says_why(capsys):
    arguments = ("--models", "deepseek-v4-flash", "--requests", "4", "--layouts", "equal/buckets", "--mixes", "batch")
    status, figures = run(capsys, *arguments)
    assert status == 0
    ((case, metric),) = figures
    assert (case, metric) == ("deepseek-v4-flash, batch, equal/buckets", "absent")
    assert "do not divide" in figures[case, metric]["value"]


def test_a_memory_that_holds_nothing_says_so(capsys):
    status, figures = run(capsys, *SMALL, "--layouts", "buckets", "--memory", "2MiB")
    assert status == 0
    assert "fits" in figures["smollm2-135m, batch, buckets", "absent"]["value"]


def test_a_wrong_replay_has_no_figures(capsys, monkeypatch):
    def run_wrong(self):
        raise WrongReplayError("3 blocks are in use when every sequence is released")

    monkeypatch.setattr(replay.Replay, "run", run_wrong)
    status, figures = run(capsys, *SMALL, "--layouts", "buckets")
    assert status == 1
    ((_, metric),) = figures
    assert metric == "wrong"
    assert command.main(["capacity", *SMALL, "--layouts", "buckets"]) == 1
    assert "3 blocks are in use" in capsys.readouterr().out


def test_lost_blocks_and_tokens_are_wrong(monkeypatch):
    plan = plan_cache({"layers.0.attn": full_attention(2, 64)}, num_frames=20)
    monkeypatch.setattr(replay, "bytes_now", lambda plan, batch, stats: Bytes(rows=1.0))
    with pytest.raises(WrongReplayError, match="expected places of"):
        Replay.of(plan, [Request(0.0, 20, 4)], Engine(sample_every=1)).run()
    monkeypatch.undo()
    short = Replay.of(plan, [Request(0.0, 20, 4)], Engine(sample_every=1))
    short.generated = -1
    with pytest.raises(WrongReplayError, match="expected 4 generated tokens, got 3"):
        short.run()


def test_an_interrupted_run_keeps_what_was_measured(tmp_path, capsys, monkeypatch):
    measured = capacity.measure

    def measure(setting, layout, replays):
        if layout == "frames":
            raise KeyboardInterrupt
        return measured(setting, layout, replays)

    monkeypatch.setattr(capacity, "measure", measure)
    path = tmp_path / "capacity.jsonl"
    assert command.main(["capacity", *SMALL, "--layouts", "buckets,frames", "--json", str(path)]) == 130
    cases = {json.loads(line)["case"] for line in path.read_text(encoding="utf-8").splitlines()}
    assert cases == {"machine", "smollm2-135m, batch, buckets"}
    assert "buckets" in capsys.readouterr().out


def test_tables_plot_and_trace(tmp_path, capsys):
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "capacity.svg"
    assert command.main(["capacity", *SMALL, "--save-trace", str(trace), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "batch: what is held" in shown
    assert "smollm2-135m" in shown
    assert trace.read_text(encoding="utf-8") == to_lines(draw("batch", 20, 0))
    assert "<!-- smollm2-135m, batch: " in plot.read_text(encoding="utf-8")
    assert command.main(["capacity", "--models", "smollm2-135m", "--trace", str(trace), "--layouts", "buckets"]) == 0
    assert "trace: what is held" in capsys.readouterr().out


def test_a_memory_that_is_never_full_is_said(capsys):
    assert command.main(["capacity", *SMALL, "--layouts", "frames", "--memory", "2GiB"]) == 0
    assert "frames: the memory is never full for long; means over all steps" in capsys.readouterr().out


def test_layouts_that_hold_the_same_share_a_row():
    def figures(value, plan="1 groups"):
        measures = (Measure("", "sequences", value), Measure("", "plan", plan), Measure("", "tokens", 1200))
        return {each.metric: each for each in measures}

    metrics = ("sequences", "tokens")
    layouts = {"buckets": figures(1.5, "1 groups, auto"), "bestfit": figures(1.5), "frames": figures(2.0)}
    assert rows_of(layouts, metrics) == [("buckets *, bestfit", ["1.5", "1,200"]), ("frames", ["2.0", "1,200"])]
    assert rows_of({**layouts, "frames": figures(1.5)}, metrics) == [("all", ["1.5", "1,200"])]
    wrong = {"frames": {"wrong": Measure("", "wrong", "why", "", "a right result", False)}}
    assert rows_of(wrong, metrics) == [("frames", ["[red]wrong[/]"])]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mixes", "talk"], "expected names out of chat, long, batch, got 'talk'"),
        (["--layouts", "rows"], "expected names out of equal/buckets, packed/overlay, buckets"),
        (["--models", "gemma-9"], "gemma-9"),
        (["--memory", "much"], "much"),
        (["--rate", "0"], "expected a number from 0.0001 on, got '0'"),
        (["--seed", "-1"], "expected a whole number from 0 on, got '-1'"),
        (["--max-running", "1000000"], "expected at most 65,536, got '1000000'"),
        (["--trace", "x.jsonl", "--rate", "3"], "--rate: expected none with --trace"),
        (["--trace", "x.jsonl", "--mixes", "chat"], "--mixes: expected none with --trace"),
        (["--rate", "nan"], "expected a number from 0.0001 on, got 'nan'"),
        (["--requests", "none"], "expected a whole number of at least 1, got 'none'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["capacity", *arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks capacity: ")
    assert said in line


def test_a_trace_is_of_one_mix_and_has_to_be_writable(tmp_path, capsys):
    assert command.main(["capacity", "--save-trace", str(tmp_path / "trace.jsonl")]) == 2
    assert "--save-trace: expected one of --mixes, got chat, long" in capsys.readouterr().err
    assert command.main(["capacity", *SMALL, "--save-trace", str(tmp_path)]) == 2
    assert "--save-trace: cannot write" in capsys.readouterr().err
