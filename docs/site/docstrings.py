"""Docstrings of this project as Markdown: a griffe extension for the site, and the parser that the tables share.

`Args:` and `Attributes:` head lists of `name: text`; `Returns:` and `Raises:` are paragraphs that may go on in indented
lines. Fields that a class describes under `Attributes:` become documented members, with their types.
"""

import re
from pathlib import Path
from typing import Any

try:
    import griffe
except ImportError:  # the tables need the parser alone
    griffe = None  # type: ignore[assignment]

REFERENCE = Path(__file__).resolve().parent.parent / "reference"
PACKAGES = ("kvstore_kernels", "kvstore", "kvstore.integrations.metadata", "kvstore.integrations.transformers")
OBJECT = re.compile(r"^::: ([\w.]+)\n((?: {4}.*\n)*)", flags=re.MULTILINE)
MEMBERS = re.compile(r"^ +members: \[(.*?)\]", flags=re.DOTALL | re.MULTILINE)
LISTS = ("Args", "Attributes")
PARAGRAPHS = ("Returns", "Raises")
ITEM = re.compile(r"(?P<names>[*\w]+(?:\[g\])?(?:, [*\w]+(?:\[g\])?)*): (?P<text>.*)")


def documented(page: str) -> list[tuple[str, str]]:
    """What a page documents, in its order, objects and the members that it lists: (public path, path of the anchor).

    They differ for a function with the name of its module, which hides it from griffe.
    """
    found = []
    for path, options in OBJECT.findall(page):
        public = re.sub(r"\.(\w+)\.\1$", r".\1", path)
        found.append((public, path))
        if members := MEMBERS.search(options):
            names = members[1].replace(",", " ").split()
            found += [(f"{public}.{name}", f"{path}.{name}") for name in names]
    return found


def linked(text: str, own_path: str, anchors: dict[str, str]) -> str:
    """The text with its names of public things as links; names of the own package count without their package."""
    own = [package for package in PACKAGES if own_path.split(".")[0] == package.split(".")[0]]

    def link(match: re.Match[str]) -> str:
        name = match[1]
        paths = [path for path in (name, *(f"{package}.{name}" for package in own)) if path in anchors]
        is_own = name.rpartition(".")[2] == own_path.rpartition(".")[2]
        return match[0] if is_own or not paths else f"[`{name}`][{anchors[paths[0]]}]"

    lines = text.split("\n")
    return "\n".join(line if line.startswith("    ") else re.sub(r"`([\w.]+)`", link, line) for line in lines)


def block_below(lines: list[str], start: int) -> list[str]:
    """The indented lines from number `start` on, without their indentation."""
    found = []
    for line in lines[start:]:
        if not line.startswith("    "):
            break
        found.append(line[4:])
    return found


def items(block: list[str]) -> list[tuple[str, str]]:
    """(names, text) of a list: `name: text`, whose continuation lines are indented.

    Raises: ValueError for a line that is neither.
    """
    found: list[tuple[str, str]] = []
    for line in block:
        if line.startswith("    ") and found:
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
        elif match := ITEM.fullmatch(line):
            found.append((match["names"], match["text"]))
        else:
            raise ValueError(f"docstring: expected 'name: text' or a continuation line, got {line!r}")
    return found


def fields(docstring: str) -> dict[str, str]:
    """Names of the section `Attributes:` with their texts; "[g]" behind a name belongs to the text."""
    lines = docstring.splitlines()
    if "Attributes:" not in lines:
        return {}
    found = {}
    for names, text in items(block_below(lines, lines.index("Attributes:") + 1)):
        for name in names.split(", "):
            found[name.removesuffix("[g]")] = f"`{name}`, {text}" if name.endswith("[g]") else text
    return found


def markdown(docstring: str) -> str:
    """The docstring without the section `Attributes:`, in Markdown."""
    lines, found, at = docstring.splitlines(), [], 0
    while at < len(lines):
        name, colon, text = lines[at].partition(":")
        below = block_below(lines, at + 1)
        if name in LISTS and colon and not text:
            if name == "Args":
                listed = [f"- {_code(names)}: {text}" for names, text in items(below)]
                found += ["**Arguments**", "", *listed]
            at += 1 + len(below)
        elif name in PARAGRAPHS and text:
            found += [f"**{name}**{text}", *(line.strip() for line in below)]
            at += 1 + len(below)
        else:
            found.append(lines[at])
            at += 1
    return "\n".join(found)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


if griffe is not None:

    class Sections(griffe.Extension):
        """Rewrites every docstring, and gives members the texts that their class has for them."""

        def on_package(self, *, pkg: Any, **_: Any) -> None:
            pages = [path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md"))]
            _rewrite(pkg, dict(pair for page in pages for pair in documented(page)))


def _rewrite(obj: Any, anchors: dict[str, str]) -> None:
    for member in obj.members.values():
        if not member.is_alias:
            _rewrite(member, anchors)
    if obj.docstring is None:
        return
    text = obj.docstring.value
    if obj.is_class:
        for name, description in fields(text).items():
            if name not in obj.members:  # assigned where griffe does not look
                obj.set_member(name, griffe.Attribute(name))
            described = linked(description, obj.path, anchors)
            obj.members[name].docstring = griffe.Docstring(described, parent=obj.members[name])
    obj.docstring.value = linked(markdown(text), obj.path, anchors)
