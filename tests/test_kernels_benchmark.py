"""`python -m benchmarks kernels` on tiny tensors: its lines, its verdicts, and no speed for a wrong result."""

import json

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import kernel_cases, kernels

TINY = kernel_cases.Sizes(moved=256, quantised=128, num_seqs=2, seq=64, long_seq=128)
KEYS = {"bench", "case", "metric", "value", "unit"}
FACTS = ("cpu", "threads", "torch", "triton")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name in ("FULL", "QUICK"):
        monkeypatch.setattr(kernels, name, TINY)
    for name in ("ROUNDS", "QUICK_ROUNDS"):
        monkeypatch.setattr(kernels, name, 1)


def lines_of(text):
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert line["bench"] == "kernels"
        assert line.keys() in (KEYS, KEYS | {"target", "ok"})
    return lines


def run(capsys, *options):
    """The exit status and the figures by case and metric."""
    status = command.main(["kernels", "--json", *options])
    return status, {(line["case"], line["metric"]): line for line in lines_of(capsys.readouterr().out)}


def test_every_case_has_a_right_result_and_a_time(capsys):
    status, figures = run(capsys, "--quick")
    assert status == 0
    assert [metric for case, metric in figures if case == "machine"] == list(FACTS)
    cases = {case for case, _ in figures} - {"machine"}
    assert len(cases) == len(kernel_cases.CASES)
    assert not any(metric == "difference" for _, metric in figures)
    for case in cases:
        assert figures[case, "time"]["value"] > 0
        assert figures[case, "time"]["unit"] == "ms"
        moves_bytes = "decode" not in case
        assert ((case, "speed") in figures) == moves_bytes
    assert not any("ok" in line for line in figures.values())  # so few rows say nothing about a target


def test_the_targets(capsys, monkeypatch):
    for seconds, is_met in ((1e-3, True), (1e3, False)):
        monkeypatch.setattr(kernels, "fastest", lambda calls, *_, each=seconds: [each] + [1.0] * (len(calls) - 1))
        status, figures = run(capsys)
        gates = {case: line for (case, _), line in figures.items() if "ok" in line}
        assert {case.partition(",")[0]: line["target"] for case, line in gates.items()} == {
            "write_rows": 0.5,
            "gather_rows": 0.5,
            "mla_decode": 1.0,
        }
        assert len(gates) == 4
        assert all(line["metric"] == "ratio" and line["ok"] is is_met for line in gates.values())
        assert status == (not is_met)


def one_bit_off(monkeypatch):
    write = kernel_cases.write_rows

    def write_rows(view, slot_mapping, *parts):
        write(view, slot_mapping, *parts)
        view.memory[3] ^= 1

    monkeypatch.setattr(kernel_cases, "write_rows", write_rows)
    return "write"


def not_a_number(monkeypatch):
    decode = kernel_cases.mla_decode

    def mla_decode(*args, **options):
        out, lse = decode(*args, **options)
        out[0, 0, 0] = torch.nan
        return out, lse

    monkeypatch.setattr(kernel_cases, "mla_decode", mla_decode)
    return "mla"


def other_scale(monkeypatch):
    decode = kernel_cases.gqa_decode
    monkeypatch.setattr(kernel_cases, "gqa_decode", lambda *args: decode(*args, softmax_scale=0.1))
    return "gqa"


@pytest.mark.parametrize("break_op", [one_bit_off, not_a_number, other_scale])
def test_a_wrong_result_gets_no_speed(break_op, capsys, monkeypatch):
    broken = break_op(monkeypatch)
    status, figures = run(capsys, "--cases", f"{broken},pack-blocks")
    assert status == 1
    wrong, right = dict.fromkeys(case for case, _ in figures if case != "machine")
    assert [metric for case, metric in figures if case == wrong] == ["difference"]
    line = figures[wrong, "difference"]
    assert line["ok"] is False
    assert line["value"] > line["target"]
    assert (right, "time") in figures

    assert command.main(["kernels", "--cases", broken]) == 1
    said = capsys.readouterr()
    assert "wrong: differs by" in said.out
    assert f"missed: {wrong}: difference" in said.err


def test_one_bit_is_one_byte_of_difference(capsys, monkeypatch):
    one_bit_off(monkeypatch)
    _, figures = run(capsys, "--cases", "write")
    assert [line["value"] for (_, metric), line in figures.items() if metric == "difference"] == [1]


def test_the_table_names_the_machine_and_every_case(tmp_path, capsys):
    path = tmp_path / "kernels.jsonl"
    assert command.main(["kernels", "--quick", "--cases", "write-kv,gather-dsv4", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown
    lines = lines_of(path.read_text(encoding="utf-8"))
    for case in {line["case"] for line in lines} - {"machine"}:
        assert case in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fast"], "unrecognized arguments: --fast; known: --help, --cases, --quick, --json"),
        (["--cases", "write,paint"], "expected names out of write, gather, mla,"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["kernels", *arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m benchmarks kernels: ")
    assert said in line


def test_a_file_that_cannot_be_written_is_status_2(tmp_path, capsys):
    assert command.main(["kernels", "--quick", "--cases", "write", "--json", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
