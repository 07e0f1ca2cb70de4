"""A user's type checker: `mypy --strict` finds both packages typed, passes right calls and reports wrong ones."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "data" / "typing"
SOURCES = {"kvstore": ROOT / "kvstore", "kvstore_kernels": ROOT / "kernels" / "kvstore_kernels"}
CACHE = ROOT / ".mypy_cache" / "users"
"""Kept between runs: to read torch's types takes mypy half a minute."""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """{file: {line: kinds of error}} of a user's scripts, checked in a folder and an environment of their own."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    for package, source in SOURCES.items():
        shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    names = sorted(path.name for path in SCRIPTS.glob("*.py"))
    for name in names:
        shutil.copy(SCRIPTS / name, folder)
    python = folder / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", CACHE]
    done = subprocess.run(
        [*command, "--python-executable", python, *names], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(f"(checked {len(names)} source files)"), done.stdout
    found = {name: {} for name in names}
    for line in lines[:-1]:
        file, number, kind = re.fullmatch(r"([^:]+):(\d+): error: .*\[([\w-]+)\]", line).groups()
        found[file].setdefault(int(number), []).append(kind)
    return found


def test_a_right_script_passes(reported):
    assert reported["engine.py"] == {}


def test_mistakes_are_reported_at_their_lines(reported):
    lines = (SCRIPTS / "mistakes.py").read_text().splitlines()
    expected = {number: [line.partition("  # ")[2]] for number, line in enumerate(lines, 1) if "  # " in line}
    assert len(expected) == 3
    assert reported["mistakes.py"] == expected


def test_the_right_script_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "engine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == ["[5, 0, 0]", "torch.Size([1, 1, 576])"]
