"""The picture of a plan: what is drawn, and the files. Needs matplotlib, which the extra "plots" installs."""

import struct
import subprocess
import sys

import pytest
from strategies import MIXED

from kvstore import cli
from kvstore.choose import group_layers
from kvstore.errors import PlanError
from kvstore.groups import CacheGroup
from kvstore.layers import full_attention, sliding_window
from kvstore.planner import plan_cache
from kvstore.score import consider
from kvstore.specs import Retention

plot = pytest.importorskip("kvstore.plot")

GEMMA = "gemma-3-4b"
HATCH = "////"
NAN = pytest.approx(float("nan"), nan_ok=True)


def bars(plan):
    """Of the left axes: (first byte, bytes, row, hatch) of every filled rectangle."""
    axes = plot.draw_plan(plan).axes[0]
    scale = plan.frame_bytes / axes.get_xlim()[1]
    return [
        (round(patch.get_x() * scale), round(patch.get_width() * scale), round(patch.get_y() + 0.28), patch.get_hatch())
        for patch in axes.patches
        if patch.get_facecolor()[3] > 0
    ]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [text.get_text() for text in figure.texts]


def overlaps(shown):
    boxes = [text.get_window_extent() for text in shown]
    return [
        (shown[index].get_text(), shown[other].get_text())
        for index in range(len(boxes))
        for other in range(index)
        if boxes[index].overlaps(boxes[other])
    ]


def test_pages_lie_where_the_plan_places_them():
    plan = plan_cache(MIXED, num_frames=4, grouping="uniform", layout="buckets")
    assert [bar for bar in bars(plan) if bar[3] is None] == [
        (0, 65_536, 0, None),
        (65_536, 32_768, 0, None),
        (0, 65_536, 1, None),
        (98_304, 81_920, 2, None),
    ]
    assert [bar for bar in bars(plan) if bar[3]] == [(0, 180_224, row, HATCH) for row in range(3)]
    notes = [text for text in texts(plot.draw_plan(plan)) if "waste" in text]
    assert notes == ["waste 45.5%", "waste 63.6%", "waste 54.5%"]


def test_blocks_of_a_frame_are_cells_up_to_a_number():
    plan = plan_cache(MIXED, memory="64MiB", grouping="uniform", layout="frames", frame_bytes=983_040)
    cells = [bar for bar in bars(plan) if bar[3] is None]
    assert [sum(bar[2] == row for bar in cells) for row in range(3)] == [2 * 10, 15, 12]
    assert [bar[0] for bar in cells if bar[2] == 1] == [block * 65_536 for block in range(15)]
    assert "15 blocks of 65,536 B, waste 0.0% of each" in texts(plot.draw_plan(plan))
    large = plan_cache(MIXED, memory="1GiB", grouping="uniform", layout="frames", frame_bytes=983_040 * 3)
    assert large.blocks_per_frame == (30, 45, 36)
    note = "45 blocks of 65,536 B, waste 0.0% of each, summed up: too many to draw one by one"
    assert note in texts(plot.draw_plan(large))


def test_the_curve_is_the_capacity_of_the_plan():
    plan = plan_cache(GEMMA, memory="64GiB", grouping="packed", layout="overlay")
    _, sequences, tokens = plot.draw_plan(plan).axes
    line = sequences.get_lines()[0]
    lengths, counts = line.get_xdata(), line.get_ydata()
    assert (lengths[0], lengths[-1]) == (256, 2**20)
    assert list(counts) == [plan.capacity(int(length)).num_sequences or NAN for length in lengths]
    assert list(tokens.get_lines()[0].get_ydata()[:9]) == list((counts * lengths)[:9])
    assert (sequences.get_xscale(), sequences.get_yscale(), tokens.get_yscale()) == ("log", "log", "log")
    assert line.get_label() == "overlay (this plan) = packed/overlay =\nequal/overlay"


def test_other_layouts_are_tried_with_groups_of_their_own_in_the_same_memory():
    plan = plan_cache(GEMMA, memory="64GiB")
    tried = dict(plot.trials(plan))
    others = [entry.layout for entry in plan.considered if entry.layout != plan.layout]
    assert list(tried) == [f"{plan.layout} (this plan)", *others, "packed/overlay", "equal/overlay"]
    for entry in plan.considered:
        if entry.layout in tried:
            trial = tried[entry.layout]
            assert (len(trial.groups), trial.frame_bytes) == (entry.num_groups, entry.frame_bytes)
            assert trial.num_frames == plan.arena_bytes // entry.frame_bytes
    packed = consider(group_layers({name: plan.spec(name) for name in plan.layers}, "packed"), "overlay", (1024,), None)
    assert tried["packed/overlay"].frame_bytes == packed.frame_bytes


def test_a_grouping_that_cannot_be_is_left_out():
    plan = plan_cache("deepseek-v4-flash", memory="64GiB", grouping="uniform", layout="overlay")
    assert [name for name, _ in plot.trials(plan)] == ["overlay (this plan)", "packed/overlay"]


@pytest.mark.parametrize("layout", ["buckets", "bestfit", "overlay", "frames"])
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "qwen3-next-80b-a3b"])
def test_text_lies_inside_the_picture_and_apart(model, layout):
    figure = plot.draw_plan(plan_cache(model, memory="64GiB", layout=layout))
    figure.canvas.draw()
    axes, right = figure.axes[0], figure.axes[1]
    shown = [*axes.texts, *axes.get_yticklabels(), *axes.get_legend().get_texts(), axes.xaxis.label, *figure.texts]
    shown += [right.title, *(label for label in right.get_yticklabels() if label.get_text())]
    for text in shown:
        box = text.get_window_extent()
        assert min(box.x0, box.y0, 1400 - box.x1, 700 - box.y1) >= 0, text
    assert overlaps([text for text in shown if text not in right.get_yticklabels()]) == []


def test_many_groups_are_drawn_small_and_then_counted():
    specs = {f"layers.{i}.attn": sliding_window(1 + i, 64, window=64 * (i + 1)) for i in range(20)}
    figure = plot.draw_plan(plan_cache(specs, memory="1GiB", grouping="uniform", layout="buckets"))
    axes = figure.axes[0]
    assert len(axes.get_yticklabels()) == plot.MAX_BARS == 16
    assert axes.get_xlabel().endswith("side by side; 4 more kinds of group not shown")
    assert "and 11 more kinds of page" in [text.get_text() for text in axes.get_legend().get_texts()]
    figure.canvas.draw()
    assert overlaps([*axes.texts, *axes.get_yticklabels()]) == []


def test_hostile_names_and_a_group_without_layers(tmp_path):
    full = full_attention(2, 64)
    groups = [
        CacheGroup("$x_{$", {"$a^{$": full}, 16, full.retention),
        CacheGroup("n" * 200, {}, 16, Retention("sliding_window", window=64)),
    ]
    plot.plot_plan(plan_cache(groups, memory="1MiB"), tmp_path / "plan.svg")
    assert "$x_{$" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize("suffix", [".svg", ".png", ".PNG"])
def test_the_command_writes_the_file_and_prints_only_the_plan(tmp_path, capsys, suffix):
    path = tmp_path / f"plan{suffix}"
    arguments = ["plan", GEMMA, "--memory", "64GiB", "--grouping", "uniform", "--json", "--plot", str(path)]
    assert cli.main(arguments) == 0
    output = capsys.readouterr()
    plan = plan_cache(GEMMA, memory="64GiB", grouping="uniform")
    assert (output.out, output.err) == (plan.to_json() + "\n", "")
    if suffix == ".svg":
        text = path.read_text()
        assert text.startswith("<?xml")
        assert "<dc:date>" not in text
        for name in ("window1024_b16", "full_b16", "full: kv bfloat16, pages of 65,536 B", "unused"):
            assert f"<!-- {name}" in text
        assert f"<!-- Layout {plan.layout}, 2 groups (grouping uniform): " in text
    else:
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", content[16:24]) == (1400, 700)


@pytest.mark.parametrize("path", ["plan", "plan.pdf", "plan.svg.txt", ".png"])
def test_a_suffix_that_is_neither(tmp_path, path):
    with pytest.raises(PlanError, match=r"plot: expected a path that ends in \.svg or \.png, got"):
        plot.plot_plan(plan_cache(MIXED, num_frames=4), tmp_path / path)
    assert not list(tmp_path.iterdir())


def test_nothing_to_draw(tmp_path):
    with pytest.raises(PlanError, match="plot: expected a plan with a layer that keeps a cache, got one without"):
        plot.plot_plan(plan_cache({}, memory=0), tmp_path / "plan.png")


def test_a_folder_where_the_file_should_be(tmp_path, capsys):
    (tmp_path / "plan.svg").mkdir()
    arguments = ["plan", GEMMA, "--memory", "8GiB", "--plot", str(tmp_path / "plan.svg")]
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"kvstore plan: --plot: cannot write {arguments[-1]!r}: Is a directory\n"


def test_no_state_of_matplotlib_is_touched():
    """In a fresh process: pyplot stays out, and so does matplotlib until something is drawn."""
    code = (
        "import sys, kvstore.cli\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "import kvstore.plot\n"
        "from kvstore.layers import full_attention\n"
        "kvstore.plot.draw_plan(kvstore.plan_cache({'a': full_attention(1, 64)}, memory='1MiB')).canvas.draw()\n"
        "print('matplotlib.pyplot' in sys.modules, matplotlib.rcParams.copy() == before)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout == "False True\n"
