"""What all benchmarks share: lines, files, comparison, interruption, failures; `all` with stubs for its benchmarks."""

import csv
import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import everything
from benchmarks.machine import facts
from benchmarks.options import new_parser
from benchmarks.record import FIELDS, Measure, Run, UsageError
from benchmarks.tables import case_table, figure_table

ROOT = Path(__file__).parent.parent
QUIET = {"json": None, "csv": None, "compare": None, "plot": None}
COLUMNS = {"time": "ms", "ratio": "ratio", "remark": "remark"}


def show(console, measures):
    console.print(case_table("Cases", measures, COLUMNS, left=("remark",)))


def run_parts(parts, **options):
    """The exit status of a benchmark of these parts."""
    with Run("toy", Namespace(**{**QUIET, **options})) as run:
        run.measure(parts)
    return run.finish(show)


def part(name, milliseconds, target=None):
    """A part with one figure."""
    met = None if target is None else milliseconds <= target
    return name, lambda: [Measure(name, "time", milliseconds, "ms", target, met)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def figures_of(path):
    return [(line["case"], line["metric"], line["value"]) for line in lines_of(path) if line["case"] != "machine"]


def test_a_line_has_a_target_only_where_there_is_one():
    assert Measure("a", "time", 1.5, "ms").fields("toy") == {
        "bench": "toy", "case": "a", "metric": "time", "value": 1.5, "unit": "ms",
    }  # fmt: skip
    gated = Measure("a", "time", 1.5, "ms", 1.0, False).fields("toy")
    assert (gated["target"], gated["ok"]) == (1.0, False)


def test_figures_go_to_both_files_and_the_tables(tmp_path, capsys):
    lines, table = tmp_path / "toy.jsonl", tmp_path / "toy.csv"
    parts = [part("first, 1 row", 1.25, 2.0), part("second [x]", 3.0)]
    assert run_parts(parts, json=str(lines), csv=str(table)) == 0
    written = lines_of(lines)
    assert [line["metric"] for line in written if line["case"] == "machine"] == list(facts())
    assert figures_of(lines) == [("first, 1 row", "time", 1.25), ("second [x]", "time", 3.0)]
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(written)
    assert tuple(rows[0]) == FIELDS
    assert rows[-2] == {**{name: str(value) for name, value in written[-2].items()}, "target": "2.0", "ok": "True"}
    assert (rows[-1]["target"], rows[-1]["ok"]) == ("", "")
    shown = " ".join(capsys.readouterr().out.split())
    assert "first, 1 row 1.25 2 ok second [x] 3" in shown
    assert f"torch {facts()['torch']}" in shown


def test_json_without_a_file_takes_the_place_of_the_tables(capsys):
    assert run_parts([part("first", 3.0, 2.0)], json="-") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1]) == Measure("first", "time", 3.0, "ms", 2.0, False).fields("toy")
    assert shown.err.splitlines()[-1] == "missed: first: time 3.0 ms (target 2.0)"


def test_the_comparison_has_a_ratio_for_each_row_and_names_another_machine(tmp_path, capsys):
    then, now = tmp_path / "then.jsonl", tmp_path / "now.jsonl"
    remark = ("remarks", lambda: [Measure("remarks", "remark", "graph")])
    run_parts([part("first", 2.0), part("gone", 1.0), remark], json=str(then))
    changed = then.read_text(encoding="utf-8").replace("graph", "events").splitlines()
    other = [{**line, "value": "Other CPU"} if line["metric"] == "cpu" else line for line in map(json.loads, changed)]
    then.write_text("\n".join(map(json.dumps, other)) + "\n\n", encoding="utf-8")
    capsys.readouterr()
    parts = [part("first", 3.0), part("new", 1.0), remark]
    assert run_parts(parts, compare=str(then), json=str(now)) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "first time ms 2 3 1.500" in shown
    assert "remarks remark events graph differs" in shown
    assert "other cpu then: Other CPU" in shown
    assert "0 figures are equal, 1 were only then, 1 are only now" in shown
    assert run_parts(parts, compare=str(now)) == 0
    shown = capsys.readouterr().out
    assert "other cpu" not in shown
    assert "3 figures are equal, 0 were only then, 0 are only now" in shown


HOSTILE = '{"bench": "store", "case": %s, "metric": "min", "value": %s, "unit": "us"}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--compare: cannot read "),
        ("not json", "--compare: expected a file that --json has written, got "),
        ('{"case": "a"}', "--compare: expected lines with bench, case, metric, value, unit in "),
        ("[1]", "--compare: expected lines with bench, case, metric, value, unit in "),
        (HOSTILE % ('"a"', "1" + "0" * 400), "--compare: expected names and a figure in each line of "),
        (HOSTILE % ('["a"]', 1), "--compare: expected names and a figure in each line of "),
        ("[" * 100_000, "--compare: expected a file that --json has written, got "),
    ],
    ids=["missing", "text", "fields", "list", "huge", "unnamed", "deep"],
)
def test_a_bad_file_to_compare_with_is_one_line_and_status_2(text, said, tmp_path, capsys):
    path = tmp_path / "then.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert command.main(["store", "--quick", "--compare", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m benchmarks store: {said}")


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
@pytest.mark.parametrize("bench", ["store", "planner", "all"])
def test_a_file_that_cannot_be_written_is_said_before_anything_runs(bench, option, tmp_path, capsys, monkeypatch):
    def run_nothing(*_, **__):
        raise AssertionError("something ran")

    monkeypatch.setattr(Run, "measure", run_nothing)
    monkeypatch.setattr(everything, "run_one", run_nothing)
    (tmp_path / "file").touch()
    assert command.main([bench, option, str(tmp_path / "file" / "x.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m benchmarks {bench}: ")
    assert "cannot " in line


def test_a_plot_without_matplotlib_is_said_before_anything_runs(monkeypatch):
    monkeypatch.setattr("benchmarks.record.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--plot: needs matplotlib: pip install 'paged-kvstore\[plots\]'"):
        Run("toy", Namespace(**{**QUIET, "plot": "x.png"}))


def test_an_interrupted_run_leaves_what_was_measured(tmp_path, capsys):
    def interrupt():
        yield Measure("second", "time", 2.0, "ms")
        raise KeyboardInterrupt

    path, drawn = tmp_path / "toy.jsonl", []
    with Run("toy", Namespace(**{**QUIET, "json": str(path), "plot": str(tmp_path / "x.png")})) as run:
        run.measure([part("first", 1.0), ("second", interrupt), part("third", 3.0)])
    assert run.finish(show, lambda measures, to: drawn.append((len(measures), to.name))) == 130
    assert figures_of(path) == [("first", "time", 1.0), ("second", "time", 2.0)]
    shown = capsys.readouterr()
    assert "first 1 second 2" in " ".join(shown.out.split())
    assert shown.err.splitlines()[-1] == "toy: interrupted; these are the figures until then"
    assert drawn == [(2, "x.png")]


def test_an_exception_in_a_part_keeps_the_others(tmp_path, capsys):
    def fail():
        yield Measure("second", "time", 2.0, "ms")
        raise ValueError("rows: expected [4, 16], got [4, 8]")

    path = tmp_path / "toy.jsonl"
    assert run_parts([part("first", 1.0), ("second", fail), part("third", 3.0)], json=str(path)) == 1
    what = "ValueError: rows: expected [4, 16], got [4, 8]"
    assert figures_of(path) == [
        ("first", "time", 1.0), ("second", "time", 2.0), ("second", "wrong", what), ("third", "time", 3.0),
    ]  # fmt: skip
    assert f"missed: second: wrong {what} (target a right result)" in capsys.readouterr().err


def test_a_table_shows_text_as_it_is_and_leaves_out_empty_columns(capsys):
    measures = [Measure("a [b]", "remark", "[red]x", "", "y", False), Measure("c", "other", 1234567, "B")]
    table = case_table("Cases", measures, COLUMNS, left=("remark",))
    assert [column.header for column in table.columns] == ["case", "remark", "target", ""]
    with Run("toy", Namespace(**QUIET)) as run:
        run.add(measures)
    run.finish(lambda console, found: console.print(table, figure_table("Figures", found)))
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "a [b] [red]x y missed" in shown
    assert "c other 1,234,567 B" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["store", "--cases", "paint"], "expected names out of decode, "),
        (["all", "--only", "stroe"], "expected names out of kernels, store, planner, "),
        (["all", "--skip", "store,x"], "expected names out of kernels, store, planner, "),
        (["all", "--quick", "--full"], "--quick and --full: expected one of them, got both; known: --help, --quick"),
        (["aot", "--targets", "sm_75"], "expected names out of sm_80, sm_90, sm_100, gfx942, gfx950, got 'sm_75'"),
        (["engine", "--plot", "x.png"], "unrecognized arguments: --plot x.png; known: --help, --quick, --json, --csv"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_the_known_names_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m benchmarks {arguments[0]}: ")
    assert said in line


def test_every_parser_has_the_same_options():
    options = new_parser("toy", "What it does.\n\nMore.", "less", plots=True).parse_args(["--json", "--plot", "x.PDF"])
    assert vars(options) == {"quick": False, "json": "-", "csv": None, "compare": None, "plot": "x.PDF"}


STUB = """
import json, sys, time
name, ends, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
with open(arguments[arguments.index("--json") + 1], "w", encoding="utf-8") as file:
    for case, metric, value, ok in (("machine", "cpu", "x", {}), ("a", "time", 1, {}), ("b", "time", 2, {"ok": False})):
        line = {"bench": name, "case": case, "metric": metric, "value": value, "unit": "ms", **ok}
        print(json.dumps(line), file=file, flush=True)
    print(f"the table of {name}", arguments)
    if ends == "waits":
        print("waiting", file=sys.stderr, flush=True)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print(json.dumps({"bench": name, "case": "c", "metric": "time", "value": 3, "unit": "ms"}), file=file)
            sys.exit(130)
    print('{"bench": "cut off', file=file, end="")
sys.exit(int(ends))
"""


@pytest.fixture
def stubs(monkeypatch):
    """Every benchmark is a stub; by name, with what status it ends."""
    ends, made = {}, everything.command_of

    def command_of(name, options, then):
        return [sys.executable, "-c", STUB, name, ends.get(name, "0"), *made(name, options, then)[4:]]

    monkeypatch.setattr(everything, "command_of", command_of)
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: False)
    return ends


def test_all_gathers_what_each_has_measured_and_sums_up(stubs, tmp_path, capfd):
    stubs["planner"] = "1"
    lines, table = tmp_path / "all.jsonl", tmp_path / "all.csv"
    options = ["--only", "store,planner,gpu,aot", "--skip", "aot", "--json", str(lines), "--csv", str(table)]
    assert command.main(["all", *options]) == 1
    shown = capfd.readouterr()
    assert shown.out.index("the table of store") < shown.out.index("the table of planner")
    summary = [" ".join(line.split()) for line in shown.out.partition("All benchmarks")[2].splitlines()]
    assert "gpu none here" in summary
    assert any(line.startswith("store ") and line.endswith(" 2 1 0 ok") for line in summary)
    assert any(line.startswith("planner ") and line.endswith(" 2 1 1 missed") for line in summary)
    assert "missed: planner: status 1 (target 0)" in shown.err
    for bench in ("store", "planner"):
        of_bench = [line for line in lines_of(lines) if line["bench"] == bench]
        assert [line["case"] for line in of_bench] == ["machine", "a", "b"]
    assert [line["value"] for line in lines_of(lines) if line["metric"] == "status"] == [0, 1, "none here"]
    with table.open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(lines_of(lines))


def test_all_hands_its_options_on(stubs, tmp_path, capfd):
    then, plots = tmp_path / "all.jsonl", tmp_path / "new" / "plots"
    for name in ("store", "aot"):
        assert command.main(["all", "--only", name, "--json", str(then)]) == 0
        assert ("--quick" in capfd.readouterr().out) == (name == "aot")
        assert command.main(["all", "--only", name, "--full"]) == 0
        assert "--quick" not in capfd.readouterr().out
    options = ["--only", "store,aot", "--quick", "--plot", str(plots), "--json", str(then), "--compare", str(then)]
    assert command.main(["all", *options]) == 0
    store, aot = (line for line in capfd.readouterr().out.splitlines() if line.startswith("the table of"))
    assert all(each in store for each in ("'--quick'", "'--compare'", f"'{plots / 'store.png'}'"))
    assert "'--compare'" in aot
    assert "--plot" not in aot
    assert str(then) not in store  # a copy: the file itself is written anew
    assert plots.is_dir()
    assert command.main(["all", "--only", "store", "--json"]) == 0
    assert [line["bench"] for line in map(json.loads, capfd.readouterr().out.splitlines())].count("store") == 3


INTERRUPTED = """
import sys
sys.path[:0] = ["kernels"]
from benchmarks import everything
stub = [sys.executable, "-c", sys.argv[1]]
everything.command_of = lambda name, *_: [*stub, name, "waits" if name == "planner" else "0"]
sys.exit(everything.main(["--only", "store,planner,engine", "--json", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_and_keeps_what_was_measured(number, tmp_path):
    path = tmp_path / "all.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, STUB, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stderr.readline() == "waiting\n"
        time.sleep(0.2)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err.splitlines()[-1] == "all: interrupted; these are the figures until then"
    assert "the table of engine" not in out
    summary = [" ".join(line.split()) for line in out.partition("All benchmarks")[2].splitlines()]
    assert any(line.startswith("planner ") and line.endswith(" 3 1 130 missed") for line in summary)
    assert [line["case"] for line in lines_of(path) if line["bench"] == "planner"] == ["machine", "a", "b", "c"]


def test_two_files_of_one_name_and_a_full_disk(tmp_path, capsys):
    path = str(tmp_path / "figures")
    assert command.main(["store", "--quick", "--json", path, "--csv", path]) == 2
    assert "--json and --csv: expected two files, got" in capsys.readouterr().err
    assert command.main(["store", "--quick", "--json", "/dev/full"]) == 2
    assert "cannot write the figures: No space left on device" in capsys.readouterr().err


def test_ctrl_c_while_a_benchmark_is_loaded(capsys, monkeypatch):
    def main(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.store.main", main)
    assert command.main(["store"]) == 130
    assert capsys.readouterr().err == "python -m benchmarks store: interrupted\n"
