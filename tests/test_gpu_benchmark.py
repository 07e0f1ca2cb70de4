"""The script for a GPU, as far as it goes without one: what it lists, and that its checks can fail.

That they hold under the interpreter is `test_matrix.py`.
"""

from io import StringIO

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import gpu, gpu_checks
from benchmarks.gpu_timings import Timed, Timing, timings
from benchmarks.record import Measure, failure
from benchmarks.timing import Times

CPU = torch.device("cpu")


def some_checks(monkeypatch, *names):
    monkeypatch.setattr(gpu_checks, "FORMATS", {name: gpu_checks.FORMATS[name] for name in names})
    return list(gpu_checks.checks((9, 0, 5), (4,), (3,)))


def test_a_wrong_result_is_told(monkeypatch):
    checks = {check.name.partition(":")[0]: check for check in some_checks(monkeypatch, "584")}
    right, write = gpu_checks.mla_decode, gpu_checks.write_rows

    def write_by_the_reference_alone(*args, backend, **kwargs):
        if backend == "reference":
            write(*args, backend=backend, **kwargs)

    monkeypatch.setattr(gpu_checks, "write_rows", write_by_the_reference_alone)
    assert gpu.run_check(checks["write_rows"], CPU).ok is False
    monkeypatch.setattr(
        gpu_checks, "mla_decode", lambda *args, **kwargs: [each * 1.1 for each in right(*args, **kwargs)]
    )
    assert gpu.run_check(checks["mla_decode, 3 heads, 1 queries, 1 splits"], CPU).ok is False


def test_a_timing_has_its_gate_and_what_a_copy_takes(monkeypatch):
    timed = Timed(Times((30e-6, 20e-6, 40e-6)), Times((18e-6, 15e-6)), 25.0)
    monkeypatch.setattr(gpu, "time_on_device", lambda timing, device: timed)
    for gate, is_met in ((20.0, True), (19.9, False)):
        figures = {each.metric: each for each in gpu.measure_timing(Timing("move", 10**6, gate, None), CPU)}
        values = {metric: each.value for metric, each in figures.items()}
        assert values == {
            "gpu_time": 20.0,
            "gpu_median": 30.0,
            "gpu_spread": 33.3,
            "bandwidth": 50.0,
            "of_copy": 0.75,
            "time_from_python": 25.0,
        }
        assert [(each.metric, each.ok) for each in figures.values() if each.ok is not None] == [("gpu_time", is_met)]


def test_the_tables_count_the_checks_and_name_those_that_do_not_hold(monkeypatch):
    timed = Timed(Times((30e-6,)), Times((15e-6,)), 25.0)
    monkeypatch.setattr(gpu, "time_on_device", lambda timing, device: timed)
    text = StringIO()
    measures = [
        Measure("write_rows", "difference", 0.0, "B differ", 0.0, True),
        Measure("gather_rows", "difference", 3.0, "B differ", 0.0, False),
        failure("mla_decode", ValueError("q: expected [4, 16]")),
        *gpu.measure_timing(Timing("move", 10**6, 20.0, None), CPU),
    ]
    gpu.show(Console(file=text, width=150), measures)
    shown = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    for line in (
        "1 of 3 checks hold",
        "gather_rows difference 3 B differ 0 missed",
        "mla_decode wrong ValueError: q: expected [4, 16] a right result missed",
        "move 30 30 0 33.3 0.5 25 20 missed",
    ):
        assert line in shown


def test_dry_run_says_how_many_checks_of_every_op_and_which_formats(capsys):
    assert gpu.main(["--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert len(listed.splitlines()) < 40
    for op in (
        *("write_rows", "write_layers", "gather_rows", "read_rows", "mla_decode", "sparse_mla_decode", "gqa_decode"),
        *("indexer_scores", "copy, pack, fill, unpack", "compute_slot_mapping", "merge_partials", "captured graph"),
        "hardware fp8 cast",
    ):
        assert op in listed
    for name in gpu_checks.FORMATS:
        assert f" {name}" in listed.partition("\n")[0]
    assert "write bf16 1,152, 65,536 rows: 151.5 MB, gate 44 us" in listed
    assert "mla_decode bf16, 16 heads, 64 x 8,192: 604.0 MB, gate 195 us" in listed


def test_timings_have_names_of_their_own():
    names = [timing.name for timing in timings()]
    assert len(names) == len(set(names)) > 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert command.main(["gpu"]) == 2
    assert "gpu: expected a GPU that torch can use, got none; --dry-run" in capsys.readouterr().err
