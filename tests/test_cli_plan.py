"""The command line: tables, JSON, mistakes."""

import json
import re
import runpy
import sys
import types

import pytest

import kvstore
from kvstore import cli
from kvstore.models.bundled import CONFIGS
from kvstore.plan import CachePlan
from kvstore.planner import plan_cache

LLAMA, DEEPSEEK, GEMMA = "llama-3.1-8b", "deepseek-v3", "gemma-3-4b"
LLAMA_FILE = str(CONFIGS / f"{LLAMA}.json")


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def squeezed(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_plan_prints_tables(run):
    status, out, err = run("plan", LLAMA, "--memory", "16GiB")
    assert (status, err) == (0, "")
    lines = squeezed(out)
    for row in (
        "Groups (1, grouping auto)",
        "full_b16 full 32 16 2,097,152 0 0.0%",
        "Layer slots (layout buckets): tensors of 8,192 pages",
        "65,536 B layers.0.attn ... full_b16 -",
        "0 ... 31 layers.31.attn (32)",
        "kv bfloat16",
        "Layouts compared: bytes of one sequence, over its own pages",
        "buckets * bestfit overlay frames",
        "8,192 tokens 1.00 GiB 1.00 GiB 1.00 GiB 1.00 GiB",
        "* taken: buckets, the least score and the first in the list that has it",
        "Bytes per block of these groups",
        "buckets (vLLM PR #44454) 2,097,152 +0.0 %",
        "this layout (buckets) 2,097,152 +0.0 %",
        "Capacity: 16.00 GiB, 8,192 blocks with the null block",
        "1,024 64 64 64 128.00 MiB 128.00 MiB 127 130,048",
        "8,192 512 512 512 1.00 GiB 1.00 GiB 15 122,880",
        "131,072 8,192 8,192 8,192 16.00 GiB 16.00 GiB 0 0",
        "longest sequence alone: 131,056 tokens",
    ):
        assert row in lines
    assert "Groupings compared" not in out


@pytest.mark.parametrize("layout", ["auto", "buckets", "bestfit", "overlay", "frames"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-4b", "deepseek-v4-flash", "qwen3-next-80b-a3b"])
def test_no_table_breaks_a_number_at_80_columns(run, model, layout):
    """Digits between commas come in threes, no line begins with a unit, and nothing is cut off."""
    status, out, _ = run("plan", model, "--memory", "64GiB", "--layout", layout)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    for line in squeezed(out):
        for number in re.findall(r"\d[\d,]*,[\d,]*", line):
            assert re.fullmatch(r"\d{1,3}(,\d{3})*,?", number), line
        assert not re.match(r"(B|KiB|MiB|GiB|%)\b", line), line


def test_a_narrow_terminal_cuts_nothing_off(run, monkeypatch):
    wide = run("plan", GEMMA, "--memory", "64GiB")
    monkeypatch.setenv("COLUMNS", "40")
    assert run("plan", GEMMA, "--memory", "64GiB") == wide


def test_a_dozen_groups_keep_their_names_whole(run, tmp_path):
    rows = {"block_size": 16, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"}
    layers = [{"name": f"layers.{i}.attn", "kind": "sliding_window", "window": 64 * (i + 1)} | rows for i in range(12)]
    (tmp_path / "specs.json").write_text(json.dumps(layers))
    options = ("--grouping", "uniform", "--layout", "buckets")
    status, out, _ = run("plan", "--specs", tmp_path / "specs.json", "--memory", "1GiB", *options)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    for i in range(12):
        assert f"window{64 * (i + 1)}_b16 window {64 * (i + 1)} 1 16 4,096 0 0.0%" in squeezed(out)
    assert "7 more" in squeezed(out)


def test_names_that_look_like_markup_are_printed_as_they_are(run, tmp_path):
    layer = {"kind": "full", "block_size": 16, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16"}
    (tmp_path / "specs.json").write_text(json.dumps([{"name": "[bold]a:smile:[/x]", **layer}]))
    status, out, _ = run("plan", "--specs", tmp_path / "specs.json", "--memory", "1GiB")
    assert status == 0
    assert "[bold]a:smile:[/x]" in out


def test_frames_table_of_unequal_groups(run):
    options = ("--grouping", "uniform", "--layout", "frames", "--frame-bytes", "9502720", "--lengths", "512,8192")
    status, out, _ = run("plan", GEMMA, "--memory", "64GiB", "--in-flight", "100", *options)
    assert status == 0
    for row in (
        "Frames (layout frames): 7,231 of 9,502,720 B",
        "window1024_b16 0 65,536 layers.0.attn ...",
        "5 blocks a frame, layers.33.attn (29, with gaps)",
        "1,900,544 B each kv bfloat16",
        "* taken: frames, the only one looked at",
        "this layout (frames), widest group 1,900,544 +0.0 %",
        "a block of the narrowest group takes 327,680 B: each cuts frames its own way",
        "512 64 64 64 68.00 MiB 68.00 MiB 963 493,056",
        "8,192 577 584 584 277.81 MiB 277.81 MiB 235 1,925,120",
        "^ most blocks during a step with up to 100 tokens of it:",
        "blocks by group at 8,192 tokens: 65 + 512",
    ):
        assert row in squeezed(out)


def test_plan_as_json_is_the_plan_and_nothing_else(run):
    options = ("--block-size", 32, "--kv-dtype", "fp16", "--tensor-parallel", 2, "--layout", "buckets", "--json")
    status, out, err = run("plan", LLAMA, "--frames", 100, *options)
    assert (status, err) == (0, "")
    expected = plan_cache(LLAMA, num_frames=100, block_size=32, kv_dtype="fp16", tensor_parallel=2, layout="buckets")
    assert CachePlan.from_json(out) == expected
    assert out == expected.to_json() + "\n"
    assert json.loads(out)["num_frames"] == 100


def test_explain_is_the_text_of_the_plan(run):
    status, out, err = run("plan", DEEPSEEK, "--memory", "64GiB", "--explain")
    assert (status, err) == (0, "")
    assert out == plan_cache(DEEPSEEK, memory="64GiB").explain() + "\n"


@pytest.mark.parametrize(
    ("model", "arguments", "options"),
    [
        ("gemma-3-4b", "--grouping packed --layout overlay", {"grouping": "packed", "layout": "overlay"}),
        ("gemma-3-4b", "--lengths 512,8192", {"lengths": (512, 8192)}),
        (
            "gemma-3-4b",
            "--layout frames --frame-bytes 65536000 --in-flight 64 --grouping equal",
            {"layout": "frames", "frame_bytes": 65_536_000, "max_tokens_in_flight": 64, "grouping": "equal"},
        ),
        (
            "qwen3-next-80b-a3b",
            "--state-dtype fp32 --tensor-parallel 2",
            {"state_dtype": "fp32", "tensor_parallel": 2},
        ),
        (
            "deepseek-v4-flash",
            "--kv-dtype fp8_ds_mla --indexer-row-bytes 68 --draft-layers 1 --ring-states",
            {"kv_dtype": "fp8_ds_mla", "indexer_row_bytes": 68, "num_draft_layers": 1, "ring_states": True},
        ),
        ("llama-3.1-8b", "--pipeline-stages 4 --pipeline-stage 3", {"pipeline_stages": 4, "pipeline_stage": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_option_reaches_the_planner(run, model, arguments, options):
    path = model
    status, out, err = run("plan", path, "--memory", "16GiB", "--json", *arguments.split())
    assert (status, err) == (0, "")
    assert CachePlan.from_json(out) == plan_cache(path, memory="16GiB", **options)


def test_specs_in_the_place_of_a_config(run, tmp_path):
    rows = {"block_size": 16, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    layers = [
        {"name": "layers.0.attn", "kind": "full"} | rows,
        {"name": "layers.1.attn", "kind": "alias", "of": "layers.0.attn"},
    ]
    (tmp_path / "specs.json").write_text(json.dumps(layers))
    status, out, err = run("plan", "--specs", tmp_path / "specs.json", "--memory", "1GiB", "--json")
    assert (status, err) == (0, "")
    assert CachePlan.from_json(out) == plan_cache(kvstore.specs_from_json(layers), memory="1GiB")
    tables = run("plan", "--specs", tmp_path / "specs.json", "--memory", "1GiB")[1]
    assert "layers.1.attn read the cache of layers.0.attn" in tables.splitlines()


def test_plan_of_a_folder(run, tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "deepseek-v3.json").read_text())
    status, out, _ = run("plan", tmp_path, "--memory", "64GiB")
    assert status == 0
    assert "latent bfloat16" in out
    assert "15,279 blocks with the null block" in out


def test_plan_of_a_model_without_caches(run, tmp_path):
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text()) | {"num_hidden_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run("plan", tmp_path, "--memory", "1GiB")
    assert (status, out) == (0, "No layer keeps a cache: 0 B, 1 block (the null block).\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kvstore: expected a command: plan, bench or demo, got none; for example: kvstore plan gemma-3-27b --mem"),
        (["plans"], "kvstore: argument COMMAND: invalid choice: 'plans'"),
        (
            ["plan"],
            "kvstore plan: expected a CONFIG or --specs, got neither; for example: kvstore plan gemma-3-27b --mem",
        ),
        (
            ["plan", "--memory", "1GiB"],
            "got neither; for example: kvstore plan gemma-3-27b --memory 64GiB (kvstore plan --l",
        ),
        (
            ["plan", LLAMA, "--specs", "x", "--frames", "3"],
            "kvstore plan: expected one of CONFIG and --specs, got both",
        ),
        (["plan", "--specs", "no.json", "--frames", "3"], "kvstore plan: specs: cannot read 'no.json': No such file"),
        (["plan", "--specs", LLAMA_FILE, "--frames", "3"], "kvstore plan: specs: expected a list of objects, got dict"),
        (
            ["plan", LLAMA, "--frames", "3", "--lengths", "1k"],
            "kvstore plan: argument --lengths: expected numbers of tokens such as 512,8192, got '1k'",
        ),
        (
            ["plan", LLAMA, "--frames", "3", "--lengths", "0"],
            "lengths: expected an integer in [1, 1099511627776], got 0",
        ),
        (["plan", LLAMA, "--frames", "3", "--in-flight", "-1"], "max_tokens_in_flight: expected an integer >= 0"),
        (["plan", LLAMA, "--frames", "3", "--grouping", "best"], "kvstore plan: grouping: expected one of auto, uni"),
        (["plan", LLAMA, "--frames", "3", "--frame-bytes", "64"], "frame_bytes: expected only with layout 'frames'"),
        (["plan", LLAMA, "--frames", "3", "--json", "--explain"], "--explain: not allowed with argument --json"),
        (["plan", LLAMA, "--frames", "3", "--json", "--compare", "x"], "--compare: not allowed with argument --json"),
        (["plan", LLAMA, "--frames", "3", "--compare", "no.json"], "plan: --compare: cannot read 'no.json': No such"),
        (["plan", LLAMA, "--frames", "3", "--compare", LLAMA_FILE], "version: expected a plan of version 2, got None"),
        (
            ["plan", LLAMA, "--frames", "3", "--plot", "plan.pdf"],
            "kvstore plan: plot: expected a path that ends in .svg or .png, got 'plan.pdf'",
        ),
        (
            ["plan", LLAMA, "--frames", "3", "--plot", "no/such/folder/plan.svg"],
            "kvstore plan: --plot: cannot write 'no/such/folder/plan.svg': No such file or directory",
        ),
        (["plan", LLAMA], "one of --memory and --frames, got neither; for example: kvstore plan llama-3.1-8b --memory"),
        (["plan", LLAMA, "--memory", "1GiB", "--frames", "3"], "argument --frames: not allowed with argument --memory"),
        (["plan", LLAMA, "--frames", "many"], "kvstore plan: argument --frames: expected an integer, got 'many'"),
        (["plan", LLAMA, "--frames", "1"], "kvstore plan: num_frames: expected an integer >= 2, got 1"),
        (["plan", LLAMA, "--memory", "8"], "kvstore plan: memory: expected a number and one of the units B, KiB, KB"),
        (
            ["plan", LLAMA, "--memory", "2MiB"],
            "kvstore plan: memory: one token needs 1",
        ),
        (
            ["plan", LLAMA, "--memory", "8GiB", "--layout", "best"],
            "kvstore plan: layout: expected one of auto, buckets",
        ),
        (["plan", LLAMA, "--memory", "8GiB", "--kv-dtype", "fp7"], "kvstore plan: kv_dtype: expected one of "),
        (["plan", LLAMA, "--memory", "8GiB", "--block-size", "0"], "block_size: expected an integer >= 1, got 0"),
        (["plan", LLAMA, "--memory", "8GiB", "--tensor-parallel", "3"], "expected a divisor or a multiple of the 8 KV"),
        (["plan", "--list", LLAMA], "kvstore plan: --list: expected nothing beside it, got 'llama-3.1-8b'"),
        (["plan", "--list", "--memory", "8GiB"], "kvstore plan: --list: expected nothing beside it, got '8GiB'"),
        (["plan", LLAMA, "--memory", "8GiB", "--mem", "9GiB"], "kvstore: unrecognized arguments: --mem 9GiB"),
        (
            ["plan", "no/such.json", "--memory", "8GiB"],
            "kvstore plan: config: expected the path of a JSON file or of a folder with a config.json, or the name of",
        ),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_plot_without_its_extra_says_what_to_install(run, monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(cli, "import_module", missing)
    status, out, err = run("plan", LLAMA, "--memory", "1GiB", "--plot", tmp_path / "plan.svg")
    assert (status, out) == (2, "")
    assert err == "kvstore plan: --plot: needs the module 'matplotlib': pip install 'paged-kvstore[plots]'\n"


def test_a_broken_plot_is_not_taken_for_a_missing_extra(run, monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'kvstore.plot'", name="kvstore.plot")

    monkeypatch.setattr(cli, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        run("plan", LLAMA, "--memory", "1GiB", "--plot", "plan.svg")


def test_help_and_version(run):
    status, out, _ = run("--help")
    assert status == 0
    for text in ("plan", "demo", "bench", "for example: kvstore plan gemma-3-27b --memory 64GiB"):
        assert text in out
    status, out, _ = run("plan", "--help")
    assert status == 0
    assert out.startswith(
        "usage: kvstore plan CONFIG (--memory SIZE | --frames N) [options]\n       kvstore plan --list\n"
    )
    assert "for example: kvstore plan gemma-3-27b --memory 64GiB" in out
    for option in ("--specs", "--lengths", "--grouping", "--compare", "--plot", "--tensor-parallel", "--ring-states"):
        assert option in out
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
