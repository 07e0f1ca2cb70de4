"""The script for a GPU, as far as it goes without one: what it lists, and that its checks can fail.

That they hold under the interpreter is `test_matrix.py`.
"""

import json

import pytest
import torch

from benchmarks import gpu, gpu_checks
from benchmarks.gpu_timings import timings

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


def test_an_exception_is_a_failed_check():
    def run(device):
        raise ValueError("view: expected something else")

    measure = gpu.run_check(gpu_checks.Check("broken", run), CPU)
    assert (measure.metric, measure.ok) == ("error", False)
    assert measure.value == "ValueError: view: expected something else"
    assert json.loads(measure.to_json()) == {
        "bench": "gpu",
        "case": "broken",
        "metric": "error",
        "value": "ValueError: view: expected something else",
        "unit": "",
        "target": 0.0,
        "ok": False,
    }


def test_dry_run_lists_every_op_and_format(capsys):
    assert gpu.main(["--dry-run"]) == 0
    listed = capsys.readouterr().out
    for op in (
        *("write_rows", "write_layers", "gather_rows", "read_rows", "mla_decode", "sparse_mla_decode", "gqa_decode"),
        *("indexer_scores", "copy, pack, fill, unpack", "compute_slot_mapping", "merge_partials", "captured graph"),
        "hardware fp8 cast",
    ):
        assert op in listed
    for name in gpu_checks.FORMATS:
        assert f": {name}, blocks of 64" in listed
    assert "write bf16 1,152, 65,536 rows: 151.5 MB, gate 44 us" in listed
    assert "mla_decode bf16, 16 heads, 64 x 8,192: 604.0 MB, gate 195 us" in listed


def test_timings_have_names_of_their_own():
    names = [timing.name for timing in timings()]
    assert len(names) == len(set(names)) > 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert "gpu: expected a GPU that torch can use, got none; --dry-run" in capsys.readouterr().err
