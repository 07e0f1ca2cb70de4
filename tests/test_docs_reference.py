"""The API reference in docs/reference/: every public name once, tables as the docstrings say, arguments that exist."""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvstore
from kvstore import Batch, CachePlan, KVStore

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvstore", "kvstore_kernels", "kvstore.integrations.metadata", "kvstore.integrations.transformers")
COMMAND = "python docs/make_reference.py"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_reference = load("docs/make_reference.py")
docstrings = sys.modules["docstrings"]


def public_members(cls: type) -> list[str]:
    """Methods, properties and fields of a class and of its bases in this project."""
    classes = [base for base in cls.__mro__ if base.__module__.startswith("kvstore")]
    return sorted({name for base in classes for name in vars(base) if not name.startswith("_")})


def expected_names() -> list[str]:
    names = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    for cls in (KVStore, CachePlan):
        names += [f"kvstore.{cls.__name__}.{name}" for name in public_members(cls)]
    return names + [f"kvstore.Batch.{field.name}" for field in dataclasses.fields(Batch) if field.repr]


def page_names() -> list[str]:
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    return [public for page in pages for public, _ in docstrings.documented(page)]


def test_every_public_name_is_documented_once() -> None:
    found = page_names()
    counts = {name: found.count(name) for name in expected_names()}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_nothing_else_is_documented() -> None:
    owners = {f"kvstore.{cls.__name__}." for cls in (KVStore, CachePlan, Batch)}
    names = [name for name in page_names() if not any(name.startswith(owner) for owner in owners)]
    roots = [name for name in names if name not in PACKAGES and name.rpartition(".")[0] in PACKAGES]
    assert set(roots) <= set(expected_names())


def test_tables_are_current() -> None:
    stale = [path.name for path in make_reference.stale_pages()]
    assert stale == [], f"run: {COMMAND}"
    assert COMMAND in make_reference.__doc__


def test_a_table_is_made_from_docstrings() -> None:
    page = "<!-- names of kvstore -->\nold\n<!-- end of names -->\n\n::: kvstore.Opened\n    members: [seq_ids]\n"
    assert make_reference.filled(page).splitlines()[2:6] == [
        "| name | what it is |",
        "|---|---|",
        "| `Opened` | What `KVStore.open` returns. |",
        "| `Opened.seq_ids` | int64 ndarray [n], the handles, in the order of the prompts. |",
    ]
    assert make_reference.filled("no table") == "no table"


def test_a_name_without_a_docstring_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^kvstore\.Opened\.nothing: expected a docstring, got none$"):
        make_reference.summary("kvstore", "Opened.nothing")


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        (
            "Does.\n\nArgs:\n    a: one,\n        more.\n    b, c: two.",
            "**Arguments**\n\n- `a`: one, more.\n- `b`, `c`: two.",
        ),
        ("Does.\n\nReturns: this\n    and that.\n\nRaises: X.", "**Returns** this\nand that.\n\n**Raises** X."),
        ("Does.\n\nAttributes:\n    a: one.\n\nRaises: X.", "\n**Raises** X."),
        ("Does. Raises: X.\n\n    code: 1", "    code: 1"),
    ],
    ids=["arguments", "paragraphs", "attributes", "code"],
)
def test_docstrings_become_markdown(docstring: str, markdown: str) -> None:
    assert docstrings.markdown(docstring).endswith("\n\n" + markdown)


def test_a_list_with_another_line_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'name: text' or a continuation line, got 'nothing'"):
        docstrings.markdown("Does.\n\nArgs:\n    nothing")


def test_names_become_links() -> None:
    anchors = {"kvstore.plan_cache": "kvstore.plan_cache", "kvstore_kernels.index_checks": "there"}
    linked = docstrings.linked("`plan_cache`, `x`\n    `plan_cache`", "kvstore.planner", anchors)
    assert linked == "[`plan_cache`][kvstore.plan_cache], `x`\n    `plan_cache`"
    assert docstrings.linked("`kvstore_kernels.index_checks`", "kvstore", anchors).endswith("][there]")
    assert docstrings.linked("`plan_cache`", "kvstore.planner.plan_cache", anchors) == "`plan_cache`"


def described() -> Iterator[Any]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if not callable(thing):
                continue
            yield pytest.param(thing, id=f"{package}.{name}")
            if inspect.isclass(thing):
                for member in public_members(thing):
                    if inspect.isfunction(getattr(thing, member)):
                        yield pytest.param(getattr(thing, member), id=f"{package}.{name}.{member}")


@pytest.mark.parametrize("thing", list(described()))
def test_described_arguments_exist(thing: Any) -> None:
    lines = (inspect.getdoc(thing) or "").splitlines()
    assert lines, "expected a docstring"
    if "Args:" in lines:
        listed = docstrings.items(docstrings.block_below(lines, lines.index("Args:") + 1))
        names = [name for names, _ in listed for name in names.split(", ")]
        assert set(names) <= set(inspect.signature(thing).parameters)
        assert len(set(names)) == len(names)
    if dataclasses.is_dataclass(thing) and (fields := docstrings.fields("\n".join(lines))):
        shown = {field.name for field in dataclasses.fields(thing) if field.repr or field.name in fields}
        assert set(fields) == shown - {"mirror", "staging"}


def test_the_site_has_every_page_of_the_guides_and_of_the_reference() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(re.findall(r"(\S+\.md)$", nav, flags=re.MULTILINE)) == sorted(
        [*pages, "overview.md", "examples.md", "design.md", "changelog.md", "contributing.md"]
    )
    index = (ROOT / "docs" / "reference" / "README.md").read_text()
    listed = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \|", index, flags=re.MULTILINE)
    assert sorted(f"reference/{name}" for name in [*listed, "README.md"]) == sorted(
        page for page in pages if page.startswith("reference/")
    )


def test_the_site_builds_without_a_warning_and_has_every_name_once(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install -c constraints.txt -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    inventory = zlib.decompress((tmp_path / "objects.inv").read_bytes().partition(b"zlib.\n")[2]).decode()
    # Priority 2 marks other names of the same place.
    names = [line.split()[0] for line in inventory.splitlines() if line.split()[2] == "1"]
    own = [re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in names]
    counts = {name: own.count(name) for name in expected_names()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert kvstore.__version__ in (tmp_path / "changelog.html").read_text()
