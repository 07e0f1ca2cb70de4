"""mkdocs hooks: pages made of the files at the root of the repository, links that hold there and on the site."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

from docstrings import documented

ROOT = Path(__file__).resolve().parent.parent.parent
ROOT_PAGES = {
    "README.md": "overview.md",
    "DESIGN.md": "design.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
NAME = re.compile(r"^\| `([\w.]+)` \|", flags=re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside of docs/."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links of the repository into links of the site, and names in the tables of the reference into links."""
    here = page.file.src_uri
    sources = {site: source for source, site in ROOT_PAGES.items()}
    source = sources.get(here, f"docs/{here}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(lambda link: _link(link, source, here), part) for part in parts[::2]]
    markdown = "".join(parts)
    if here.startswith("reference/"):
        package = re.search(r"^<!-- names of ([\w.]+) -->$", markdown, flags=re.MULTILINE)
        anchors = dict(documented(markdown))
        if package:
            markdown = NAME.sub(lambda name: f"| [`{name[1]}`][{anchors[f'{package[1]}.{name[1]}']}] |", markdown)
    return markdown


def _link(link: re.Match[str], source: str, here: str) -> str:
    """A link of the file `source` as a link of the page `here`; its text alone where the site has no such page."""
    text, target = link.groups()
    if re.match(r"[a-z]+:|#", target):
        return link[0]
    path, anchor = re.fullmatch(r"([^#]*)(#.*)?", target).groups(default="")  # type: ignore[union-attr]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / path).exists():
        return link[0]
    if path in ROOT_PAGES:
        page = ROOT_PAGES[path]
    elif path.startswith("docs/"):
        page = path.removeprefix("docs/")
    else:
        return text
    return f"[{text}]({posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor})"
