"""The planner's benchmark: its exhaustive search against a plain one, its JSON lines and its exit status."""

import json
from dataclasses import replace
from itertools import product

import pytest

from benchmarks import __main__ as command
from benchmarks import planner, planner_plot
from benchmarks.planner_search import MAX_FIXED_GROUPS, search, ways_to_count
from benchmarks.record import Measure
from kvstore import bundled_models, plan_cache
from kvstore.capacity import blocks_per_group
from kvstore.choose import MAX_GROUPS
from kvstore.errors import PlanError
from kvstore.frames import max_frame_bytes
from kvstore.grouping import deal_groups, deal_layers, layers_by_type
from kvstore.groups import CacheGroup
from kvstore.score import LAYOUTS, consider
from kvstore.specs import LayerSpec
from kvstore_kernels.quantised import bytes_format

LENGTHS = (20, 300)
KEYS = {"bench", "case", "metric", "value", "unit"}


def layers(name, kind, count, row_bytes, block_size=16, **fields):
    spec = LayerSpec(kind, block_size, bytes_format(row_bytes, 1), **fields)
    return {f"{name}{index}": spec for index in range(count)}


TOYS = {
    "window-beside-full": layers("f", "full", 3, 16) | layers("w", "sliding_window", 4, 16, window=40),
    "mixed-pages": layers("f", "latent", 2, 16)
    | layers("i", "latent", 2, 3)
    | layers("w", "latent_window", 3, 7, window=30),
    "demands": layers("f", "latent", 2, 5, block_stride_multiple=96) | layers("w", "latent_window", 3, 9, window=30),
    "ring": layers("f", "full", 2, 8) | layers("w", "sliding_window", 2, 8, window=40) | layers("r", "ring", 3, 9),
    "one-type": layers("f", "latent", 3, 10, block_stride_multiple=48),
}
MEMORY = 256 * 3000


def score(groups, allocated):
    own = [
        sum(map(int.__mul__, blocks_per_group(groups, length), [group.block_bytes for group in groups]))
        for length in LENGTHS
    ]
    return sum(ours / pages for ours, pages in zip(allocated, own, strict=True)) / len(own)


def all_scores(specs):
    """Every plan's score, one by one, with the planner's own figures of a given layout and frame."""
    types = layers_by_type(specs)
    for counts in product(*(range(1, len(members) + 1) for members in types)):
        if not all(map(all, map(deal_layers, types, counts))):
            continue  # pages of two sizes, dealt size by size, leave a group empty
        groups: list[CacheGroup] = deal_groups(zip(types, counts, strict=True))
        for layout in LAYOUTS[:-1]:
            yield score(groups, consider(groups, layout, LENGTHS, MEMORY).bytes_per_sequence)
        most = max_frame_bytes(MEMORY, max(group.block_bytes for group in groups))
        for frame_bytes in range(16, most + 1, 16):
            try:
                frames = consider(groups, "frames", LENGTHS, MEMORY, frame_bytes)
            except PlanError:  # too small, or not as a reader demands
                continue
            yield score(groups, frames.bytes_per_sequence)


@pytest.mark.parametrize("toy", TOYS)
def test_the_search_finds_the_best_of_all_plans_and_auto_is_near_it(toy):
    specs = TOYS[toy]
    best = search(specs, LENGTHS, MEMORY)
    assert best.score == pytest.approx(min(all_scores(specs)), rel=1e-9)
    plan = plan_cache(specs, memory=MEMORY, lengths=LENGTHS)
    blocks = [blocks_per_group(plan.groups, length) for length in LENGTHS]
    allocated = [sum(map(int.__mul__, row, plan.block_strides)) for row in blocks]
    ours = score(plan.groups, allocated)
    print(
        f"{toy}: auto {ours:.4f} ({plan.layout}), best {best.score:.4f} ({best.layout}, frame {best.frame_bytes:,} B)"
    )
    assert best.score <= ours * (1 + 1e-9)
    assert ours <= best.score * (1 + planner.MAX_EXCESS)


def test_a_plan_that_the_search_names_has_its_score():
    specs = TOYS["mixed-pages"]
    best = search(specs, LENGTHS, MEMORY)
    groups = deal_groups(zip(layers_by_type(specs), best.counts, strict=True))
    frame = best.frame_bytes if best.layout == "frames" else None
    found = consider(groups, best.layout, LENGTHS, MEMORY, frame)
    assert found.frame_bytes == best.frame_bytes
    assert score(groups, found.bytes_per_sequence) == pytest.approx(best.score)


def test_every_number_of_groups_is_looked_at_up_to_the_cap():
    types = layers_by_type(layers("f", "full", 9, 16) | layers("w", "latent_window", 3, 16, window=8))
    assert sorted(ways_to_count(types)) == [(a, b) for a in range(1, 8) for b in (1, 2, 3) if a + b <= MAX_GROUPS]
    rings = layers_by_type(layers("r", "ring", 50, 16) | layers("f", "full", 1, 16))
    assert len(ways_to_count(rings)) == MAX_FIXED_GROUPS


def test_every_model_of_the_test_data_is_planned():
    cases = planner.recorded()
    assert {case["id"].partition("/")[0] for case in cases} == set(bundled_models())
    assert len({made.name for case in cases for made in planner.cases_of(case)}) == len(cases) + 6  # models with states
    assert len(planner.mixed_layers()) == 243


def lines_of(text):
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert line["bench"] == "planner"
        assert line.keys() in (KEYS, KEYS | {"target", "ok"})
    return lines


def test_quick_json_lines(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planner, "RUNS", 1)
    monkeypatch.setattr(planner, "RUNS_OF_MIX", 3)
    path = tmp_path / "planner.jsonl"
    arguments = ["planner", "--quick", "--models", "gemma-3-27b/bf16,jamba-v0.1", "--json", str(path)]
    exit_code = command.main(arguments)
    lines = lines_of(path.read_text(encoding="utf-8"))
    missed = [line for line in lines if line.get("ok") is False]
    assert exit_code == bool(missed)
    assert [line for line in missed if line["metric"] != "planning_time"] == []  # the machine may be busy
    cases = ["gemma-3-27b/bf16", "jamba-v0.1/bf16", "jamba-v0.1/bf16, its blocks"]
    assert [line["case"] for line in lines if line["metric"] == "layout"] == cases
    assert not any(line["metric"] == "excess_over_search" for line in lines)
    figures = {(line["case"], line["metric"]): line["value"] for line in lines}
    assert figures["gemma-3-27b/bf16", "reference_at_512"] == 280 << 20
    assert figures["V4-Flash, pages padded", "buckets"] == 1_039_680
    for metric in ("planning_median", "planning_spread"):
        assert figures["jamba-v0.1/bf16", metric] >= 0
    shown = capsys.readouterr().out
    for text in ("243 caches", "jamba-v0.1/bf16, its blocks", "131,072", "V4-Flash, pages padded"):
        assert text in shown


def test_json_alone_takes_the_place_of_the_tables_and_the_search_is_gated(capsys, monkeypatch):
    monkeypatch.setattr(planner, "RUNS", 1)
    monkeypatch.setattr(planner, "RUNS_OF_MIX", 3)
    command.main(["planner", "--models", "gpt-oss-20b/bf16-draft1", "--json"])
    lines = lines_of(capsys.readouterr().out)
    (excess,) = [line for line in lines if line["metric"] == "excess_over_search"]
    assert excess["target"] == 0.02
    assert 0 <= excess["value"] <= 0.02
    assert excess["ok"] is True


def test_the_picture_names_every_case_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner, "RUNS", 1)
    monkeypatch.setattr(planner, "RUNS_OF_MIX", 1)
    path = tmp_path / "planner.svg"
    command.main(["planner", "--quick", "--models", "gemma-3-27b,qwen3-8b,jamba-v0.1", "--json", "--plot", str(path)])
    assert path.stat().st_size > 10_000
    lines = lines_of(capsys.readouterr().out)
    measures = [Measure(line["case"], line["metric"], line["value"]) for line in lines]
    rows = {tuple(cases): ratios for ratios, cases in planner_plot.rows_of(measures, planner.LENGTHS)}
    assert list(rows) == [
        ("gemma-3-27b/bf16", "fp8"),
        ("qwen3-8b/bf16",),
        ("jamba-v0.1/bf16",),
        ("jamba-v0.1/bf16 in its blocks",),
    ]
    assert set(rows["qwen3-8b/bf16",]) == {1.0}
    assert all(0.8 < ratio < 1 for ratio in rows["gemma-3-27b/bf16", "fp8"])


def test_a_missed_target_is_named_and_sets_the_exit_status(capsys, monkeypatch):
    monkeypatch.setattr(planner, "RUNS", 1)
    monkeypatch.setattr(planner, "RUNS_OF_MIX", 1)
    monkeypatch.setattr(planner, "MAX_MIX_MS", 0.0)
    assert command.main(["planner", "--quick", "--models", "qwen3-8b"]) == 1
    assert "missed: 243 caches of mixed pages: planning_time" in capsys.readouterr().err


def test_a_plan_worse_than_the_reference_or_the_search_misses_its_target():
    (case,) = planner.cases_of(next(case for case in planner.recorded() if case["id"] == "gpt-oss-20b/bf16"))
    good = planner.plan_case(case)
    good = replace(good, optimum=search(case.specs, planner.LENGTHS, planner.MEMORY))
    assert [each.metric for each in planner.measure(good) if each.ok is False] == []
    worse = replace(good, allocated=tuple(size * 103 // 100 for size in good.allocated))
    missed = [each.metric for each in planner.measure(worse) if each.ok is False]
    assert missed == [*(f"ratio_to_reference_at_{length}" for length in planner.LENGTHS), "excess_over_search"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fast"], "unrecognized arguments: --fast"),
        (["--models", "gpt-5"], "expected names out of deepseek-v2-lite,"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["planner", *arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks planner: ")
    assert said in line


def test_a_file_that_cannot_be_written_is_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planner, "RUNS", 1)
    monkeypatch.setattr(planner, "RUNS_OF_MIX", 1)
    assert command.main(["planner", "--quick", "--models", "qwen3-8b", "--json", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
