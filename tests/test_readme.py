"""The README's example runs as it stands, and its test command is what CI runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.rstrip().endswith("[32]")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "make test" in README
    assert re.search(r"^check: lint test$", makefile, flags=re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make check")
