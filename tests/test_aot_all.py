"""The check under several Tritons: how it sums up what each version says; the compiling itself is in test_aot."""

import json

import pytest

from benchmarks import aot_all


def lines(version, spilled, ok):
    case = {"triton": version, "bench": "aot", "case": "write kv on sm_90", "unit": ""}
    return [
        {**case, "metric": "registers", "value": 30},
        {**case, "metric": "shared_bytes", "value": 0, "target": 232_448, "ok": True},
        {**case, "metric": "spill_bytes", "value": spilled, "target": 0, "ok": ok},
    ]


def test_a_gate_that_fails_under_one_version_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(
        aot_all, "check_version", lambda version, folder: lines(version, 8 * (version == "3.9.0"), version != "3.9.0")
    )
    assert aot_all.main(["--versions", "3.6.0,3.7.1"]) == 0
    assert "0 of 4 gates do not hold" in capsys.readouterr().out
    assert aot_all.main(["--versions", "3.6.0,3.9.0"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "triton 3.9.0: write kv on sm_90: spill_bytes 8, expected 0" in printed
    assert "write kv on sm_90 30 / 0 / 0 30 / 8 / 0" in printed


def test_json_names_the_version(monkeypatch, capsys):
    monkeypatch.setattr(aot_all, "check_version", lambda version, folder: lines(version, 0, True))
    assert aot_all.main(["--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["triton"] for line in printed} == set(aot_all.VERSIONS)


def test_a_version_that_cannot_be_installed_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(aot_all.subprocess, "run", lambda *args, **options: type("Done", (), {"returncode": 1})())
    assert aot_all.main(["--versions", "0.0.1", "--folder", str(tmp_path)]) == 2
    assert "aot-all: expected triton 0.0.1 to be installable" in capsys.readouterr().err


def test_a_check_that_does_not_run_is_said(monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    done = type("Done", (), {"returncode": 139, "stdout": ""})()
    monkeypatch.setattr(aot_all.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(RuntimeError, match=r"the check under triton 3\.6\.0 ended with status 139"):
        aot_all.check_version("3.6.0", tmp_path)
