"""The README's example runs as it stands, and its test command is what CI runs."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["twenty_lines"])
def test_examples_run_and_print_what_their_comments_say(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    expected = [line.partition("# ")[2].partition(":")[0] for line in block.splitlines() if line.startswith("print(")]
    assert any(expected)
    for text in filter(None, expected):
        assert f"{text}\n" in printed


@pytest.mark.parametrize("example", ["shared_slots.py", "store_loop.py", "sparse_step.py"])
def test_example_scripts_run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    printed = capsys.readouterr().out
    if example == "sparse_step.py":
        assert "equals dense attention: True" in printed
        assert "the same when compiled: True" in printed
    if example == "shared_slots.py":
        assert printed.count("rows intact: True") == 4
        guide = (ROOT / "docs" / "shared-memory.md").read_text()
        quoted = re.search(r"plan's stride:\n\n((?:    .*\n|\n)+)", guide)
        assert quoted
        for line in set(map(str.strip, quoted[1].splitlines())) - {"", "..."}:
            assert line in printed, line


def test_ci_runs_the_test_command_of_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "make test" in README
    assert re.search(r"^check: lint test$", makefile, flags=re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make check")
