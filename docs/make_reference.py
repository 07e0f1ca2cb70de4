"""Fills the tables of docs/reference/: every name that a page documents, with the first line of its docstring.

python docs/make_reference.py            writes the tables
python docs/make_reference.py --check    names the pages whose table is stale, and exits with 1
"""

import argparse
import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REFERENCE = DOCS / "reference"
sys.path.insert(0, str(DOCS / "site"))

from docstrings import documented, fields  # noqa: E402 - not installed, but beside this file

TABLE = re.compile(r"^<!-- names of ([\w.]+) -->$.*?^<!-- end of names -->$", flags=re.DOTALL | re.MULTILINE)


def constant_docstring(package: str, name: str) -> str | None:
    """The string below the assignment of a constant, in `package` or in the module that it is imported from."""
    source = inspect.getsource(importlib.import_module(package))
    body = ast.parse(source).body
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return constant_docstring(node.module, name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in {target.id for target in targets if isinstance(target, ast.Name)} and isinstance(below, ast.Expr):
            return ast.literal_eval(below.value)
    return None


def summary(package: str, name: str) -> str:
    """The first line of what documents `package.name`, where `name` may be "Class.member".

    Raises: ValueError for a name without a docstring.
    """
    owner, _, member = name.rpartition(".")
    if owner:
        cls = getattr(importlib.import_module(package), owner)
        text = fields(inspect.getdoc(cls) or "").get(member) or inspect.getattr_static(cls, member, None).__doc__
    else:
        value = getattr(importlib.import_module(package), name)
        text = inspect.getdoc(value) if callable(value) else constant_docstring(package, name)
    if not text:
        raise ValueError(f"{package}.{name}: expected a docstring, got none")
    return text.splitlines()[0].replace("|", r"\|")


def filled(page: str) -> str:
    """The page with its table made anew."""
    match = TABLE.search(page)
    if match is None:
        return page
    package = match[1]
    names = [path.removeprefix(f"{package}.") for path, _ in documented(page) if path != package]
    rows = [f"| `{name}` | {summary(package, name)} |" for name in names]
    table = ["", "| name | what it is |", "|---|---|", *rows, ""]
    return page.replace(match[0], "\n".join([f"<!-- names of {package} -->", *table, "<!-- end of names -->"]))


def stale_pages() -> dict[Path, str]:
    """Pages whose table is not what the docstrings say, with what they should be."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md"))}
    return {path: new for path, text in pages.items() if (new := filled(text)) != text}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Fills the tables of docs/reference/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a table is stale")
    check = parser.parse_args().check
    stale = stale_pages()
    for path, text in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
