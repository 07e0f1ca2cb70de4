"""The command line: tables, JSON, mistakes."""

import json
import runpy
import sys
import types
from pathlib import Path

import pytest

import kvstore
from kvstore import cli
from kvstore.planner import CachePlan, plan_cache

MODELS = Path(__file__).parent / "data/models"
LLAMA, DEEPSEEK = str(MODELS / "llama-3.1-8b.json"), str(MODELS / "deepseek-v3.json")


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_plan_prints_tables(run):
    status, out, err = run("plan", LLAMA, "--memory", "16GiB")
    assert (status, err) == (0, "")
    for title in ("Groups", "Layer slots (layout buckets)", "Bytes per block", "Capacity: 8,192 blocks"):
        assert title in out
    for text in ("full_b16", "kv bfloat16", "65,536 B", "0 ... 31", "2,097,152 B", "131,056 tokens"):
        assert text in out
    for row in (
        "1,024 64 134,217,728 B (128.00 MiB) 127",
        "8,192 512 1,073,741,824 B (1.00 GiB) 15",
        "131,072 8,192 17,179,869,184 B (16.00 GiB) 0",
    ):
        assert row in [" ".join(line.split()) for line in out.splitlines()]
    assert max(map(len, out.splitlines())) <= 80


def test_plan_as_json_is_the_plan(run):
    options = ("--block-size", 32, "--kv-dtype", "fp16", "--tensor-parallel", 2, "--layout", "buckets", "--json")
    status, out, err = run("plan", LLAMA, "--frames", 100, *options)
    assert (status, err) == (0, "")
    expected = plan_cache(LLAMA, num_frames=100, block_size=32, kv_dtype="fp16", tensor_parallel=2)
    assert CachePlan.from_json(out) == expected
    assert json.loads(out)["num_frames"] == 100


def test_plan_of_a_folder(run, tmp_path):
    (tmp_path / "config.json").write_text(Path(DEEPSEEK).read_text())
    status, out, _ = run("plan", tmp_path, "--memory", "64GiB")
    assert status == 0
    assert "latent" in out
    assert "15,279 blocks" in out


def test_plan_of_a_model_without_caches(run, tmp_path):
    config = json.loads(Path(DEEPSEEK).read_text()) | {"num_hidden_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run("plan", tmp_path, "--memory", "1GiB")
    assert (status, out) == (0, "No layer keeps a cache: 0 B, 1 block (the null block).\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kvstore: the following arguments are required: COMMAND"),
        (["plans"], "kvstore: argument COMMAND: invalid choice: 'plans'"),
        (["plan"], "kvstore plan: the following arguments are required: CONFIG"),
        (["plan", LLAMA], "kvstore plan: one of the arguments --memory --frames is required"),
        (["plan", LLAMA, "--memory", "1GiB", "--frames", "3"], "argument --frames: not allowed with argument --memory"),
        (["plan", LLAMA, "--frames", "many"], "kvstore plan: argument --frames: invalid int value: 'many'"),
        (["plan", LLAMA, "--frames", "1"], "kvstore plan: num_frames: expected an integer >= 2, got 1"),
        (["plan", LLAMA, "--memory", "8"], "kvstore plan: memory: expected a number and one of the units B, KiB, KB"),
        (
            ["plan", LLAMA, "--memory", "2MiB"],
            "kvstore plan: memory: one block needs 2,097,152 B (2.00 MiB), and 2 fra",
        ),
        (
            ["plan", LLAMA, "--memory", "8GiB", "--layout", "best"],
            "kvstore plan: layout: expected one of auto, buckets",
        ),
        (["plan", LLAMA, "--memory", "8GiB", "--kv-dtype", "fp8"], "kvstore plan: kv_dtype: expected one of bfloat16"),
        (["plan", LLAMA, "--memory", "8GiB", "--block-size", "0"], "block_size: expected an integer >= 1, got 0"),
        (["plan", LLAMA, "--memory", "8GiB", "--tensor-parallel", "3"], "expected a divisor or a multiple of the 8 KV"),
        (["plan", LLAMA, "--memory", "8GiB", "--mem", "9GiB"], "kvstore: unrecognized arguments: --mem 9GiB"),
        (
            ["plan", "no/such.json", "--memory", "8GiB"],
            "kvstore plan: config: cannot read 'no/such.json': No such file",
        ),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_help_and_version(run):
    status, out, _ = run("--help")
    assert status == 0
    assert "plan" in out
    assert "demo" in out
    status, out, _ = run("plan", "--help")
    assert status == 0
    assert "--tensor-parallel" in out
    assert run("--version")[:2] == (0, f"kvstore {kvstore.__version__}\n")


def test_version_without_an_installed_distribution(run, monkeypatch):
    def missing(name):
        raise cli.PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", missing)
    monkeypatch.setattr(kvstore, "__version__", "7.8.9", raising=False)
    assert run("--version")[:2] == (0, "kvstore 7.8.9\n")


def test_demo_gets_its_arguments_and_gives_its_status(run, monkeypatch):
    seen = []
    fake = types.ModuleType("kvstore.demo.run")
    fake.main = lambda arguments: seen.append(arguments) or 5
    monkeypatch.setitem(sys.modules, "kvstore.demo.run", fake)
    assert run("demo", "--help", "--batch", "3")[0] == 5
    assert seen == [["--help", "--batch", "3"]]


def test_demo_without_its_extra_says_what_to_install(run, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr(cli, "import_module", missing)
    status, _, err = run("demo")
    assert status == 2
    assert err == "kvstore demo: needs the module 'gguf': pip install 'paged-kvstore[demo]'\n"


def test_a_broken_demo_is_not_taken_for_a_missing_extra(run, monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'kvstore.demo.nothing'", name="kvstore.demo.nothing")

    monkeypatch.setattr(cli, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        run("demo")


def test_python_m_kvstore_is_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvstore", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("kvstore", run_name="__main__")
    assert stop.value.code == 0
