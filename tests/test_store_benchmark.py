"""`python -m benchmarks store` on tiny stores: its lines, its verdicts, and no speed for a wrong result."""

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import store, store_cases, store_memory, store_plot, store_prompts
from benchmarks.machine import facts
from benchmarks.record import Measure
from benchmarks.store_cases import Sizes
from kvstore import KVStore

TINY = Sizes(
    groups=(1, 2),
    sequences=(16,),
    steps=20,
    warm_up=2,
    short=256,
    long=512,
    repeats=3,
    taken=8,
    pool=2_000,
    pool_sequences=8,
    pool_length=64,
    frame_memory=512 << 20,
    operations=300,
    gated=False,
)
KEYS = {"bench", "case", "metric", "value", "unit"}
FAST = "decode,peers,changing,prefill-between,prefill,hit,release,forks,truncate,allocator"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name in ("FULL", "QUICK"):
        monkeypatch.setattr(store, name, TINY)


def lines_of(text):
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert line["bench"] == "store"
        assert line.keys() in (KEYS, KEYS | {"target", "ok"})
    return lines


def run(capsys, *options):
    """The exit status and the figures by case and metric."""
    status = command.main(["store", "--json", *options])
    return status, {(line["case"], line["metric"]): line for line in lines_of(capsys.readouterr().out)}


@pytest.mark.parametrize("case", store.CASES)
def test_every_case_is_right(case, capsys):
    status, figures = run(capsys, "--quick", "--cases", case)
    assert [line for (_, metric), line in figures.items() if metric == "wrong"] == []
    assert status == 0
    assert tuple(metric for name, metric in figures if name == "machine") == tuple(facts())
    timed = {name for name, metric in figures if metric == "min"}
    for name in timed:
        least, median, worst = (figures[name, metric]["value"] for metric in ("min", "median", "worst"))
        assert 0 < least <= median <= worst
        assert figures[name, "min"]["unit"] == "us"
        assert figures[name, "spread"]["value"] >= 0
    assert bool(timed) == (case in FAST.split(","))
    assert {metric for (_, metric), line in figures.items() if "ok" in line} <= {"calls_1024"}


def test_a_decode_step_evicts_what_windows_do_not_free(capsys):
    _, figures = run(capsys, "--cases", "decode")
    for name, per_step in (("1 group", 1), ("2 groups", 2)):
        case = f"decode, {name}, 16 sequences"
        assert figures[case, "handed_out"]["value"] == TINY.steps * per_step
        assert 0 < figures[case, "evicted"]["value"] <= TINY.steps * per_step
    assert figures["decode, 1 group, 16 sequences", "evicted"]["value"] == TINY.steps


def test_a_missed_target_is_named_and_sets_the_exit_status(capsys, monkeypatch):
    monkeypatch.setattr(store, "FULL", replace(TINY, gated=True))
    monkeypatch.setattr(store_cases, "GATED_SEQUENCES", 16)
    for microseconds, is_met in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(store_cases, "STEP_TARGETS", {1: (microseconds, microseconds)})
        status, figures = run(capsys, "--cases", "decode")
        gates = {key: line for key, line in figures.items() if "ok" in line}
        assert gates.keys() == {("decode, 1 group, 16 sequences", metric) for metric in ("min", "worst_cpu")}
        assert all(line["ok"] is is_met and line["target"] == microseconds for line in gates.values())
        assert status == (not is_met)
    assert command.main(["store", "--cases", "decode"]) == 1
    said = capsys.readouterr()
    assert "missed" in said.out
    assert "missed: decode, 1 group, 16 sequences: min" in said.err


@pytest.mark.parametrize(
    ("case", "name", "bound"),
    [
        ("hit", "HIT_TARGET", "hit of 512 tokens, 1 group"),
        ("allocator", "TAKE_TARGET", "take 8 free blocks"),
        ("allocator", "RELEASE_TARGET", "release 8 free blocks"),
    ],
)
def test_the_other_targets_of_time(case, name, bound, capsys, monkeypatch):
    monkeypatch.setattr(store, "FULL", replace(TINY, gated=True))
    for module in (store_cases, store_prompts):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, 0.0)
    status, figures = run(capsys, "--cases", case)
    assert status == 1
    assert figures[bound, "min"]["ok"] is False


def test_the_targets_of_memory(monkeypatch):
    gated = replace(TINY, gated=True)
    monkeypatch.setattr(store_memory, "RSS_TARGET_MIB", 0.0)
    (growth,) = [each for each in store_memory.resident(gated) if each.ok is not None]
    assert (growth.metric, growth.ok) == ("rss_growth", False)
    monkeypatch.setattr(store_memory.Churn, "round", lambda churn: churn.fill())
    for ratio, is_met in ((0.5, True), (9.0, False)):
        monkeypatch.setattr(store_memory, "FRAMES_TARGET", ratio)
        (more,) = [each for each in store_memory.frames(gated) if each.ok is not None]
        assert (more.metric, more.ok) == ("frames_to_overlay", is_met)


def a_wrong_slot(monkeypatch):
    extend = KVStore.extend

    def extended(self, *given):
        batch = extend(self, *given)
        if batch.is_decode:
            batch.slot_mapping[0][7] += 1
        return batch

    monkeypatch.setattr(KVStore, "extend", extended)
    return "decode", "slots of group 0"


def books_that_do_not_add_up(monkeypatch):
    def check(self):
        raise AssertionError("references that no table or fence accounts for")

    monkeypatch.setattr(KVStore, "check", check)
    return "release", "references that no table"


def a_pool_that_is_not_full(monkeypatch):
    monkeypatch.setattr(store_cases.World, "_fill", lambda self: None)
    return "decode", "no block was evicted"


def a_shorter_hit(monkeypatch):
    open_store = KVStore.open

    def opened(self, prompts):
        found = open_store(self, prompts)
        return replace(found, cached_tokens=found.cached_tokens // 2 * 2 - 2 * (found.cached_tokens > 0))

    monkeypatch.setattr(KVStore, "open", opened)
    return "hit", "tokens found"


@pytest.mark.parametrize(
    "break_store", [a_wrong_slot, books_that_do_not_add_up, a_pool_that_is_not_full, a_shorter_hit]
)
def test_a_wrong_result_gets_no_speed(break_store, capsys, monkeypatch):
    case, said = break_store(monkeypatch)
    status, figures = run(capsys, "--cases", f"{case},allocator")
    assert status == 1
    wrong = [line for (_, metric), line in figures.items() if metric == "wrong"]
    assert wrong
    assert any(said in line["value"] for line in wrong)
    assert all(line["ok"] is False for line in wrong)
    timed = [name for name, metric in figures if metric == "min"]
    assert [name for name in timed if " tokens, " in name or " sequences" in name] == []
    assert "take 8 free blocks" in timed  # the other parts have their say

    assert command.main(["store", "--cases", case]) == 1
    shown = capsys.readouterr()
    assert "wrong" in shown.out
    assert said in shown.err


def test_more_calls_for_more_sequences_miss_their_target(capsys, monkeypatch):
    counts: Iterator[int] = iter([10] * 15 + [11] * 15 + [10] * 30)
    monkeypatch.setattr(store_cases, "_count_calls", lambda _: next(counts))
    monkeypatch.setattr(store_cases, "World", lambda *_, **__: SimpleNamespace(step=lambda: None))
    status, figures = run(capsys, "--cases", "calls")
    assert status == 1
    assert figures["calls in a step, 1 group", "calls_1024"]["ok"] is False
    assert figures["calls in a step, 5 groups", "calls_1024"]["ok"] is True


def test_bytes_of_arrays_are_counted_once_each():
    class Holder:
        pass

    Holder.__module__ = "kvstore.anything"
    held = Holder()
    base = np.zeros(100, np.int64)
    held.views = [base[:50], base[50:], base]
    held.tensor = torch.from_numpy(base)
    held.other = {"key": (torch.zeros(10, dtype=torch.int32), held)}
    assert store_memory.array_bytes(held) == 840


def test_the_table_names_the_machine_and_every_case(tmp_path, capsys):
    path = tmp_path / "store.jsonl"
    assert command.main(["store", "--quick", "--cases", "release,allocator", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"numpy {np.__version__}, torch {torch.__version__}" in shown
    assert "last_cache" in shown
    assert "The garbage collector is off" in shown
    for line in lines_of(path.read_text(encoding="utf-8")):
        assert line["case"] in shown or line["case"] == "machine"


def test_the_picture_has_a_line_for_each_number_of_groups(tmp_path, capsys):
    path = tmp_path / "store.png"
    _, figures = run(capsys, "--cases", "decode,allocator", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    steps = store_plot.steps_of([Measure(*key, line["value"]) for key, line in figures.items()])
    assert {groups: [count for count, _, _ in taken] for groups, taken in steps.items()} == {1: [16], 2: [16]}
    ((_, least, median),) = steps[2]
    case = "decode, 2 groups, 16 sequences"
    assert (least, median) == (figures[case, "min"]["value"], figures[case, "median"]["value"])


def test_a_figure_at_its_bound_is_met():
    assert store_cases.at_most("case", "min", 60.004, "us", 60.0) == Measure("case", "min", 60.0, "us", 60.0, True)
    assert store_cases.at_most("case", "min", 60.01, "us", 60.0).ok is False
    assert store_cases.at_most("case", "min", 60.0, "us", None).ok is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--fast"],
            "unrecognized arguments: --fast; known: --help, --quick, --json, --csv, --compare, --plot, --cases",
        ),
        (["--plot", "x.png", "--cases", "hit"], "--plot: draws the case decode, got --cases hit; known: "),
        (["--plot", "x.txt"], "--plot: expected a file that ends in .png, .svg, .pdf, got 'x.txt'; known: "),
        (["--cases", "decode,paint"], "expected names out of decode, peers,"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["store", *arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks store: ")
    assert said in line


def test_a_file_that_cannot_be_written_is_status_2(tmp_path, capsys):
    assert command.main(["store", "--quick", "--cases", "allocator", "--json", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
