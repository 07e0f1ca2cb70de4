"""The guides in docs/: every Python block runs and prints what its comments say, and every link leads somewhere.

A comment behind a `print` is the line that it prints; `line: remark` says more. Blocks in `console` are not run.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
TEXTS = {name: (DOCS / name).read_text() for name in PAGES}
BLOCKS = [
    pytest.param(name, text[: match.start(1)].count("\n"), match[1], id=f"{name.removesuffix('.md')}-{number}")
    for name, text in TEXTS.items()
    for number, match in enumerate(re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
]


def expected_lines(block: str) -> list[str]:
    """The comments behind the prints of a block, in order."""
    tokens = tokenize.generate_tokens(io.StringIO(block).readline)
    comments = {token.start[0]: token.string.removeprefix("# ") for token in tokens if token.type == tokenize.COMMENT}
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    ends = sorted(call.end_lineno or 0 for call in prints)
    return [comments[end] for end in ends if end in comments]


def first_missing(expected: list[str], printed: list[str]) -> str | None:
    """The first expected line that is not printed behind the one before it."""
    lines = iter(printed)
    for text in expected:
        if not any(text == line or (line and text.startswith(f"{line}: ")) for line in lines):
            return text
    return None


@pytest.mark.parametrize(("page", "line", "block"), BLOCKS)
def test_a_block_runs_and_prints_what_its_comments_say(
    page: str, line: int, block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile("\n" * line + block, f"docs/{page}", "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out.splitlines()
    assert first_missing(expected_lines(block), printed) is None, printed


@pytest.mark.parametrize(
    ("block", "printed", "missing"),
    [
        ("print(1)  # 1\nprint(2)  # 2", ["2", "1"], "2"),
        ("for i in range(2):\n    print(i)  # 0: then 1\n", ["0", "1"], None),
        ("print(\n    1,\n)  # 1 2", ["1"], "1 2"),
        ("x = 1  # one\nprint(x)", ["1"], None),
        ("print(1)  # 1, the first", ["1"], "1, the first"),
        ("print()  # nothing: at all", [""], "nothing: at all"),
    ],
    ids=["order", "remark", "several lines", "not a print", "no remark", "an empty line"],
)
def test_the_comparison_can_fail(block: str, printed: list[str], missing: str | None) -> None:
    assert first_missing(expected_lines(block), printed) == missing


def anchors(text: str) -> set[str]:
    """The names by which the headings of a page can be linked to."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (DOCS / path).resolve() if path else DOCS / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_the_index_names_every_page_and_the_readme_the_index() -> None:
    listed = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \|", TEXTS["README.md"], flags=re.MULTILINE)
    assert sorted(listed) == sorted(set(PAGES) - {"README.md"})
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_pages_are_short() -> None:
    assert {name: count for name, text in TEXTS.items() if (count := len(text.splitlines())) > 200} == {}
