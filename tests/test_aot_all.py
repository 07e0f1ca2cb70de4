"""The check under several Tritons: how it sums up what each version says; the compiling itself is in test_aot."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import aot_all
from benchmarks.record import Measure


def figures(version, spilled):
    case = f"write kv on sm_90, triton {version}"
    yield Measure(case, "registers", 30)
    yield Measure(case, "shared_bytes", 0, "B", 232_448, True)
    yield Measure(case, "spill_bytes", spilled, "B", 0, not spilled)


@pytest.fixture
def checked(monkeypatch):
    """Triton 3.9.0 spills, and 3.8.0 does not run."""

    def check_version(version, folder, quick):
        if version == "3.8.0":
            raise RuntimeError("the check under triton 3.8.0 ended with status 139")
        return figures(version, 8 * (version == "3.9.0"))

    monkeypatch.setattr(aot_all, "install", lambda version, folder: None)
    monkeypatch.setattr(aot_all, "check_version", check_version)


def test_a_gate_that_fails_under_one_version_fails_the_check(checked, capsys):
    assert command.main(["aot-all", "--versions", "3.6.0,3.7.1"]) == 0
    assert "4 gates: all hold" in capsys.readouterr().out
    assert command.main(["aot-all", "--versions", "3.6.0,3.9.0"]) == 1
    shown = capsys.readouterr()
    assert "missed: write kv on sm_90, triton 3.9.0: spill_bytes 8 B (target 0)" in shown.err
    assert "write kv on sm_90 30 / 0 / 0 30 / 8 / 0" in " ".join(shown.out.split())
    assert "4 gates: 1 missed" in shown.out


def test_json_names_the_version(checked, capsys):
    assert command.main(["aot-all", "--json"]) == 1
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = {line["case"] for line in printed} - {"machine"}
    assert cases == {f"write kv on sm_90, triton {version}" for version in aot_all.VERSIONS}


def test_a_check_that_does_not_run_leaves_the_others(checked, capsys):
    assert command.main(["aot-all", "--versions", "3.8.0,3.6.0"]) == 1
    shown = capsys.readouterr()
    assert "missed: triton 3.8.0: wrong RuntimeError: the check under triton 3.8.0 ended with status 139" in shown.err
    assert "write kv on sm_90 30 / 0 / 0" in " ".join(shown.out.split())


def test_a_version_that_cannot_be_installed_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(aot_all.subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=1))
    assert command.main(["aot-all", "--versions", "0.0.1", "--folder", str(tmp_path)]) == 2
    assert "aot-all: expected triton 0.0.1 to be installable" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 139])
def test_the_figures_of_a_version_come_as_they_are_printed(status, monkeypatch, tmp_path):
    """A stub prints a figure and ends; behind a status that is no verdict the figure stays, and the rest is said."""
    line = {"bench": "aot", "case": "write", "metric": "spill_bytes", "value": 8, "unit": "B", "target": 0, "ok": False}
    stub = tmp_path / "stub.sh"
    machine = {**line, "case": "machine"}
    stub.write_text(f"#!/bin/sh\necho '{json.dumps(machine)}'\necho '{json.dumps(line)}'\nexit {status}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(aot_all.sys, "executable", str(stub))
    found = aot_all.check_version("3.6.0", tmp_path, True)
    assert next(found) == Measure("write, triton 3.6.0", "spill_bytes", 8, "B", 0, False)
    if status == 139:
        with pytest.raises(RuntimeError, match=r"the check under triton 3\.6\.0 ended with status 139"):
            next(found)
    else:
        assert list(found) == []
