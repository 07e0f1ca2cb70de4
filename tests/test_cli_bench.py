"""`kvstore bench`: finds the benchmarks of a checkout, runs them in the user's folder, says where they are missing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore import bench, cli

ROOT = Path(__file__).parent.parent


def make_checkout(folder, script):
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "kernels" / "kvstore_kernels").mkdir(parents=True)
    (folder / "benchmarks" / "__main__.py").write_text(script)
    return folder


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if the package lay in site-packages, and the user in an empty folder."""
    user = tmp_path / "user"
    user.mkdir()
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "kvstore" / "bench.py"))
    monkeypatch.chdir(user)
    return user


def test_the_checkout_around_the_package_is_found(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert bench.find_checkout() == ROOT


def test_the_benchmarks_of_this_checkout_are_listed(tmp_path):
    code = "import sys; from kvstore.cli import main; sys.exit(main(['bench', '--help']))"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "planner" in done.stdout


def test_arguments_status_and_folder_are_the_users(installed, tmp_path, monkeypatch, capfd):
    script = "import sys, os\nprint(sys.argv[1:], os.getcwd())\nopen('figures.json', 'w').close()\nsys.exit(3)"
    checkout = make_checkout(tmp_path / "checkout", script)
    monkeypatch.setattr(bench, "__file__", str(checkout / "kvstore" / "bench.py"))
    make_checkout(installed, "raise SystemExit('the folder of the user')")
    assert cli.main(["bench", "store", "--quick", "--json", "figures.json"]) == 3
    output = capfd.readouterr()
    assert output.out == f"['store', '--quick', '--json', 'figures.json'] {installed}\n"
    assert output.err == ""
    assert (installed / "figures.json").exists()


def test_a_checkout_in_the_current_directory_will_do(installed, capfd):
    make_checkout(installed, "print('of the current directory')")
    assert cli.main(["bench"]) == 0
    assert capfd.readouterr().out == "of the current directory\n"


@pytest.mark.parametrize("is_there", [False, True], ids=["nothing", "a stranger's benchmarks"])
def test_without_a_checkout_one_line_says_where_benchmarks_are(installed, capfd, is_there):
    if is_there:
        (installed / "benchmarks").mkdir()
        (installed / "benchmarks" / "__main__.py").write_text("print('not ours')")
    assert cli.main(["bench", "planner"]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err == (
        "kvstore bench: benchmarks come with the checkout and the sdist, not with the wheel: "
        f"expected one around the package or in the current directory, got none in {installed}\n"
    )


def test_a_benchmark_that_a_signal_ends_has_the_status_of_a_shell(installed):
    make_checkout(installed, "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert cli.main(["bench"]) == 128 + 15


WAITS = """import os, signal, sys, time
try:
    open("child", "w").write(str(os.getpid()))
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.6)  # what was measured is printed
    open("kept", "w").write("figures")
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_benchmark_and_is_waited_for(number, installed):
    make_checkout(installed, WAITS)
    code = f"import sys; from kvstore import bench; bench.__file__ = {bench.__file__!r}; sys.exit(bench.main([]))"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=installed, env=environment, stdin=subprocess.DEVNULL
    ) as run:
        name = installed / "child"
        while not (name.exists() and name.read_text()):
            time.sleep(0.05)
        run.send_signal(number)
        status = run.wait(30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(name.read_text()), 0)
    assert status == (130 if number == signal.SIGINT else 128 + signal.SIGTERM)
    assert (installed / "kept").exists() == (number == signal.SIGINT)
