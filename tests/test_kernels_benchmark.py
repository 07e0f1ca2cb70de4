"""`python -m benchmarks kernels` on tiny tensors: its lines, its verdicts, and no speed for a wrong result."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import kernel_cases, kernel_data, kernel_peers, kernels
from benchmarks.kernel_peers import Peer
from benchmarks.kernel_shapes import FORMATS_OF, LATENT, Shape, default_shapes, read_shapes, to_lines
from benchmarks.record import Measure
from benchmarks.timing import Times

CPU = torch.device("cpu")
KEYS = {"bench", "case", "metric", "value", "unit"}
TINY = (
    Shape("write_rows", rows=128, **LATENT),
    Shape("write_rows", "kv", 128, rows_per_block=16, stride=3, kv_heads=2, head_dim=32, dtype="fp16"),
    Shape("write_rows", "fp8_ds_mla", 128),
    Shape("gather_rows", "dsv4", 128, 2),
    Shape("gather_rows", "kv", 128),
    Shape("mla_decode", rows=128, num_seqs=2, **LATENT),
    Shape("mla_decode", "fp8_ds_mla", 128, 2),
    Shape("mla_decode", "dsv4", 128, 2),
    Shape("sparse_mla_decode", rows=128, num_seqs=2, **LATENT),
    Shape("gqa_decode", "kv", 128, 2, dtype="fp32"),
    Shape("decode_step", "kv", 128, 2),
    Shape("copy_blocks", rows=256, **LATENT),
    Shape("pack_blocks", rows=256, **LATENT),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("ROUNDS", "QUICK_ROUNDS", "COLD_ROUNDS", "QUICK_COLD_ROUNDS"):
        monkeypatch.setattr(kernels, name, 2)
    monkeypatch.setattr(kernels, "default_shapes", lambda quick, on_gpu: list(TINY))
    monkeypatch.setattr("benchmarks.timing.cache_bytes", lambda device: 4096)


def run(capsys, *options):
    """The exit status and the figures by case and metric."""
    status = command.main(["kernels", "--json", *options])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert line["bench"] == "kernels"
        assert line.keys() in (KEYS, KEYS | {"target", "ok"})
    return status, {(line["case"], line["metric"]): line for line in lines}


def test_every_shape_has_a_right_result_and_a_time(capsys):
    status, figures = run(capsys, "--quick")
    assert status == 0
    names = {case for case, _ in figures if " | " not in case} - {"machine"}
    assert names == {shape.name for shape in TINY}
    assert not any(metric in ("difference", "wrong") for _, metric in figures)
    for name in names:
        for metric, unit in (("time", "ms"), ("cold_time", "ms"), ("bandwidth", "GB/s"), ("roofline", "of it")):
            assert figures[name, metric]["value"] > 0
            assert figures[name, metric]["unit"] == unit
        assert ((name, "rate") in figures) == ("decode" in name)
        copy = f"{name} | copy"
        assert figures[copy, "bytes"]["value"] == figures[name, "bytes"]["value"]
        assert figures[copy, "cold_time"]["value"] > 0
    assert not any("ok" in line for line in figures.values())  # so few rows say nothing about a target


def test_every_op_has_a_shape_and_the_usual_shapes_reach_past_a_cache():
    for quick, on_gpu in ((True, False), (False, False), (False, True)):
        shapes = default_shapes(quick, on_gpu)
        assert {shape.op for shape in shapes} == set(FORMATS_OF)
        assert len({shape.name for shape in shapes}) == len(shapes)
    largest = max(shape.num_rows for shape in default_shapes(False, False) if shape.format == "latent")
    assert 2 * 1152 * largest >= 576 * 2**20


def test_bytes_are_those_that_have_to_move():
    write = kernel_cases.case_of(kernel_data.World(TINY[0], CPU))
    assert write.num_bytes == 128 * (2 * 1152 + 8)
    quantised = kernel_cases.case_of(kernel_data.World(TINY[2], CPU))
    assert quantised.num_bytes == 128 * (1152 + 656 + 8)
    read = kernel_cases.case_of(kernel_data.World(TINY[5], CPU))
    assert read.num_bytes == 2 * 128 * 1152 + 2 * 16 * (576 + 512) * 2
    assert read.num_flops == 2 * 256 * 16 * (576 + 512)


def test_torch_and_transformers_are_peers_with_the_same_result(capsys):
    _, figures = run(capsys)
    peers = {case.partition(" | ")[2]: line["value"] for (case, metric), line in figures.items() if metric == "ratio"}
    assert {
        "torch index_copy_",
        "torch index_select",
        "torch indexing",
        "gather + torch sdpa",
        "transformers DynamicCache",
        "transformers paged cache",
    } <= peers.keys()
    assert all(ratio > 0 for ratio in peers.values())
    _, figures = run(capsys, "--no-peers")
    assert not any(metric in ("ratio", "absent") for _, metric in figures)


def test_a_peer_that_is_missing_or_fails_or_is_wrong_is_a_row_without_a_speed(capsys, monkeypatch):
    def wrong(world):
        rows = [part + 1 for part in world.rows.read]
        return kernel_cases.Contender(
            "off by one", lambda: None, lambda: rows, lambda: [(part, None) for part in world.rows.read]
        )

    def broken(world):
        raise TypeError("update() got an unexpected keyword")

    ops = ("gather_rows",)
    peers = (
        Peer("not here", "no_such_package", ops, wrong),
        Peer("on a GPU", "torch", ops, wrong, needs_gpu=True),
        Peer("of another version", "torch", ops, broken),
        Peer("off by one", "torch", ops, wrong),
        Peer("for other shapes", "torch", ops, wrong, takes=lambda world: False),
    )
    monkeypatch.setattr(kernels, "PEERS", peers)
    status, figures = run(capsys, "--ops", "gather_rows")
    assert status == 0
    said = {case.partition(" | ")[2]: line["value"] for (case, metric), line in figures.items() if metric == "absent"}
    assert said.pop("off by one").startswith("wrong: differs by ")
    assert said == {
        "not here": "no_such_package is not installed",
        "on a GPU": "needs a GPU",
        "of another version": "failed: TypeError: update() got an unexpected keyword",
    }
    assert not any(case.endswith("off by one") and metric == "time" for case, metric in figures)
    assert command.main(["kernels", "--ops", "gather_rows"]) == 0
    assert "no_such_package is not installed" in capsys.readouterr().out


def test_a_peer_that_is_wrong_when_it_is_timed_has_no_speed(capsys, monkeypatch):
    def make(world):
        rows, calls = [part.clone() for part in world.rows.read], []

        def call():
            calls.append(1)
            if len(calls) > 1:
                rows[0].zero_()

        return kernel_cases.Contender("tired", call, lambda: rows, lambda: [(part, None) for part in world.rows.read])

    monkeypatch.setattr(kernels, "PEERS", (Peer("tired", "torch", ("gather_rows",), make),))
    _, figures = run(capsys, "--ops", "gather_rows")
    said = {metric: line["value"] for (case, metric), line in figures.items() if case.endswith("| tired")}
    assert list(said) == ["absent"]
    assert said["absent"].startswith("wrong when it was timed: differs by ")


def one_bit_off(monkeypatch):
    write = kernel_cases.write_rows

    def write_rows(view, slot_mapping, *parts):
        write(view, slot_mapping, *parts)
        view.memory[3] ^= 1

    monkeypatch.setattr(kernel_cases, "write_rows", write_rows)
    return "write_rows"


def not_a_number(monkeypatch):
    decode = kernel_cases.mla_decode

    def mla_decode(*args, **options):
        out, lse = decode(*args, **options)
        out[0, 0, 0] = torch.nan
        return out, lse

    monkeypatch.setattr(kernel_cases, "mla_decode", mla_decode)
    return "mla_decode"


def other_scale(monkeypatch):
    decode = kernel_cases.gqa_decode
    monkeypatch.setattr(
        kernel_cases, "gqa_decode", lambda *args, **options: decode(*args, **{**options, "softmax_scale": 0.1})
    )
    return "gqa_decode"


def raises(monkeypatch):
    def sparse_mla_decode(*args, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernel_cases, "sparse_mla_decode", sparse_mla_decode)
    return "sparse_mla_decode"


@pytest.mark.parametrize("break_op", [one_bit_off, not_a_number, other_scale, raises])
def test_a_broken_kernel_yields_no_speed(break_op, capsys, monkeypatch):
    broken = break_op(monkeypatch)
    status, figures = run(capsys, "--ops", f"{broken},pack_blocks")
    assert status == 1
    wrong = {shape.name for shape in TINY if shape.op == broken}
    for name in wrong:
        found = {metric for case, metric in figures if case.partition(" | ")[0] == name}
        assert found == ({"wrong"} if break_op is raises else {"difference"})
        (metric,) = found
        assert figures[name, metric]["ok"] is False
    right = next(shape.name for shape in TINY if shape.op == "pack_blocks")
    assert figures[right, "time"]["value"] > 0

    assert command.main(["kernels", "--ops", broken]) == 1
    said = capsys.readouterr()
    assert ("no such instruction" if break_op is raises else "wrong: differs by") in said.out
    for name in wrong:
        assert f"missed: {name}: " in said.err


def test_a_kernel_that_is_right_only_once_yields_no_speed(capsys, monkeypatch):
    gather, calls = kernel_cases.gather_rows, []

    def gather_rows(*args, **options):
        calls.append(1)
        return gather(*args, **options) if len(calls) % 50 == 1 else None

    monkeypatch.setattr(kernel_cases, "gather_rows", gather_rows)
    monkeypatch.setattr(kernels, "default_shapes", lambda *_: [TINY[4]])
    status, figures = run(capsys, "--no-peers")
    assert status == 1
    assert [metric for case, metric in figures if case == TINY[4].name] == ["difference"]


def test_a_kernel_that_changes_what_it_reads_yields_no_speed(capsys, monkeypatch):
    decode = kernel_cases.gqa_decode

    def gqa_decode(view, *args, **options):
        result = decode(view, *args, **options)
        view.memory.zero_()
        return result

    monkeypatch.setattr(kernel_cases, "gqa_decode", gqa_decode)
    monkeypatch.setattr(kernels, "default_shapes", lambda *_: [TINY[9]])
    status, figures = run(capsys, "--no-peers")
    assert status == 1
    assert [metric for case, metric in figures if case == TINY[9].name] == ["difference"]


def test_a_write_that_empties_its_input_instead_yields_no_speed(capsys, monkeypatch):
    monkeypatch.setattr(kernel_cases, "write_rows", lambda view, slots, *parts: [part.zero_() for part in parts])
    status, figures = run(capsys, "--no-peers", "--ops", "write_rows")
    assert status == 1
    assert {metric for case, metric in figures if case == TINY[0].name} == {"difference"}


@pytest.mark.parametrize("error", [ValueError("odd [/x] text"), SystemExit(0)], ids=["brackets", "exit"])
def test_whatever_a_kernel_raises_is_told(error, capsys, monkeypatch):
    def pack_blocks(*_):
        raise error

    monkeypatch.setattr(kernel_cases, "pack_blocks", pack_blocks)
    assert command.main(["kernels", "--quick", "--ops", "pack_blocks"]) == 1
    assert f"{type(error).__name__}: {error}" in capsys.readouterr().out


def test_ctrl_c_before_anything_is_measured(capsys, monkeypatch):
    def matrix_rate(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "matrix_rate", matrix_rate)
    assert command.main(["kernels", "--quick"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_one_bit_is_one_byte_of_difference(capsys, monkeypatch):
    one_bit_off(monkeypatch)
    _, figures = run(capsys, "--ops", "write_rows")
    assert {line["value"] for (_, metric), line in figures.items() if metric == "difference"} == {1.0}


@pytest.mark.parametrize(
    ("copy_s", "peer_s", "met"), [(0.6, 1.1, (True, True)), (0.4, 0.9, (False, False)), (0.5, 1.0, (True, True))]
)
def test_the_targets_on_a_cpu(copy_s, peer_s, met):
    move = Shape("write_rows", rows=65_536, **LATENT)
    read = Shape("mla_decode", rows=1024, num_seqs=8, **LATENT)
    names = ["vLLM", "gather + torch sdpa"]
    times = [Times((seconds,)) for seconds in (1.0, copy_s, 0.1, peer_s)]  # ours, a copy, a library, torch
    (of_copy,), (of_torch,) = (list(kernels.gates(shape, times, names)) for shape in (move, read))
    assert of_copy == Measure(move.name, "of_copy", copy_s, "x", 0.5, met[0])
    assert of_torch == Measure(read.name, "of_torch", peer_s, "x", 1.0, met[1])
    assert list(kernels.gates(replace(move, stride=2), times, names)) == []


def test_the_roofline_is_the_longer_of_a_copy_and_the_products():
    case = kernel_cases.Case(TINY[5], 1000, 500, None)
    warm, cold, copies = Times((2.0, 2.0)), Times((8.0, 8.0)), (Times((0.5, 0.5)), Times((4.0, 4.0)))
    figures = {each.metric: each.value for each in kernels.ours(case, warm, cold, copies, flops_per_s=500)}
    assert figures["roofline"] == 0.5  # the products take 1 s, a copy half of that
    assert figures["cold_roofline"] == 0.5  # here a copy takes 4 s
    assert figures["bandwidth"] == 5e-7
    assert figures["rate"] == 0.0


def test_median_and_spread():
    assert Times((3.0, 1.0, 2.0)).median == 2.0
    assert Times((1.0, 2.0, 3.0)).spread == 0.5  # quartiles at 1.5 and 2.5
    assert Times((7.0,)).spread == 0.0


def test_the_table_and_the_plot(tmp_path, capsys):
    plot = tmp_path / "kernels.svg"
    assert command.main(["kernels", "--quick", "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    for shape in TINY:
        assert shape.name.partition(", ")[2] in shown
    drawn = plot.read_text(encoding="utf-8")
    for op in FORMATS_OF:
        assert f"<!-- {op} -->" in drawn
    assert "<!-- roofline, warm -->" in drawn
    assert "<!-- transformers DynamicCache, kv bf16 -->" in drawn


@pytest.mark.parametrize(("seconds", "said"), [((1.0, 1.0), False), ((1.0, 9.0), True)])
def test_times_that_scatter_are_said(seconds, said, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.timing.Timer.warm", lambda self, calls, *_: [Times(seconds)] * len(calls))
    assert command.main(["kernels", "--quick", "--ops", "pack_blocks", "--no-peers"]) == 0
    assert ("2 of 2 times scatter by more than 50 %" in capsys.readouterr().out) == said


def test_shapes_from_a_file(tmp_path, capsys):
    path = tmp_path / "shapes.jsonl"
    path.write_text(to_lines(TINY), encoding="utf-8")
    assert read_shapes(str(path)) == list(TINY)
    path.write_text('{"op": "gather_rows", "format": "latent", "rows": 64}\n\n', encoding="utf-8")
    status, figures = run(capsys, "--shapes", str(path))
    assert status == 0
    assert figures["gather_rows, latent bf16, 64 rows", "time"]["value"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fast"], "unrecognized arguments: --fast; known: --help, --quick, --json, --csv, --compare, --plot, --ops"),
        (["--ops", "write_rows,paint"], "expected names out of write_rows, gather_rows, mla_decode,"),
        (["--threads", "0"], "expected a whole number of at least 1, got '0'"),
        (["--plot", "figure.doc"], "expected a file that ends in .png, .svg, .pdf, got 'figure.doc'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["kernels", *arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks kernels: ")
    assert said in line


def test_a_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["kernels", "--device", "cuda"]) == 2
    assert "expected a device that torch can use, got cuda and no GPU" in capsys.readouterr().err


def test_peers_of_a_package_are_looked_for_without_importing_it():
    assert kernel_peers.is_installed("torch")
    assert not kernel_peers.is_installed("no_such_package")
    assert not kernel_peers.is_installed("no_such_package.inner")
