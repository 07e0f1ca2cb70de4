"""`python -m benchmarks families`: what it prints, and that it does not pass over a wrong result."""

import json

import pytest

from benchmarks import families, family_runs
from benchmarks.__main__ import main as run_benchmark


def records(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark(["families", "--families", "mistral", "--quick", "--json"]) == 0
    found = records(capsys.readouterr().out)
    cases = {each["case"] for each in found} - {"machine"}
    assert cases == {
        f"mistral, {layout}, {reads}" for layout in ("buckets", "frames") for reads in ("columns", "pages")
    }
    metrics = {each["metric"] for each in found if each["case"] != "machine"}
    assert metrics == {"groups", "prompts", "tokens equal", "logits differ", "found again", "asked again", "time"}
    assert all(each["ok"] for each in found if "target" in each)


def test_the_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = family_runs.Run(equal=True, error=3e-6, cached=1280, asked=3202)
    monkeypatch.setattr(family_runs, "compare", lambda *args: run)
    assert families.main(["--families", "deepseek-v4"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "deepseek-v4, overlay, pages 7 24 True 3e-06 15,360 38,424",
        "True, 2e-05 ok",
        "MiB that one sequence holds",
        "DeepSeek-V4-Flash, 32768 tokens, fp8_ds_mla",
    ):
        assert " ".join(text.split()) in " ".join(shown.split())


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            family_runs.Run(False, 1e-6, 1, 2),
            "missed: llama, buckets, columns: tokens equal False (target True)",
        ),
        (
            family_runs.Run(True, 3e-5, 1, 2),
            "missed: llama, frames, pages: logits differ 3e-05 of the largest (target 2e-05)",
        ),
        (None, "missed: llama, buckets, columns: wrong RuntimeError: broken (target a right result)"),
    ],
    ids=["tokens", "logits", "error"],
)
def test_a_wrong_result_is_a_failure(
    run: family_runs.Run | None, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*args: object) -> family_runs.Run:
        if run is None:
            raise RuntimeError("broken")
        return run

    monkeypatch.setattr(family_runs, "compare", compare)
    assert families.main(["--families", "llama", "--quick", "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    found = records(printed.out)
    assert not all(each["ok"] for each in found if "ok" in each)
    assert not any(each["metric"] in ("time", "found again") for each in found)


def test_a_logit_that_is_off_is_seen() -> None:
    """The comparison itself: a cache that reads one wrong row would be found."""
    first, texts, _, _ = family_runs.expected("llama", (16, 16))
    off = texts.logits.clone()
    off[5, 0, 7] += 1e-3 * float(off.abs().max())
    assert family_runs.difference(off, texts.logits) > family_runs.LOGITS_BUDGET
    assert family_runs.difference(texts.logits, texts.logits) == 0
    assert [len(prompt) for prompt in first] == [16, 16]


def test_names_that_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failed:
        families.main(["--families", "llama,jamba"])
    assert failed.value.code == 2
    assert "expected names out of llama, mistral, " in capsys.readouterr().err


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_runs, "compare", lambda *args: family_runs.Run(True, 0.0, 0, 1))
    assert run_benchmark(["families", "--families", "llama", "--quick", "--json", "/no/such/folder/out.json"]) == 2
    assert "cannot write '/no/such/folder/out.json'" in capsys.readouterr().err
