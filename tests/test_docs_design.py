"""DESIGN.md draws every module of both packages at the level that the import test holds it to."""

import re
from pathlib import Path

import pytest
from test_packaging import LEVELS

ROOT = Path(__file__).parent.parent
DRAWING = (ROOT / "DESIGN.md").read_text().partition("\n## Parts and arrows\n")[2].partition("\n- **")[0]


def drawn_levels(drawing: str, package: str) -> dict[int, str]:
    """The text of each level below the name of a package."""
    lines = drawing.splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(rf"    {package}\b", line))
    levels: dict[int, str] = {}
    number = -1
    for line in lines[start + 1 :]:
        if re.match(r"    \w", line):
            break
        if match := re.match(r"      (\d)  ", line):
            number = int(match[1])
        levels[number] = levels.get(number, "") + line + "\n"
    return levels


def not_drawn(drawing: str, package: str, levels: dict[str, int]) -> list[str]:
    """Modules whose name does not stand at their level."""
    drawn = drawn_levels(drawing, package)
    return [module for module, level in levels.items() if not re.search(rf"\b{module}\b", drawn.get(level, ""))]


@pytest.mark.parametrize("package", LEVELS)
def test_every_module_is_drawn_at_its_level(package: str) -> None:
    assert not_drawn(DRAWING, package, LEVELS[package]) == []


def test_the_comparison_can_fail() -> None:
    drawing = "    kvstore\n      0  errors\n         memory\n      1  specs\n    other\n      1  late\n"
    assert not_drawn(drawing, "kvstore", {"errors": 0, "memory": 0, "specs": 0, "late": 1}) == ["specs", "late"]


def test_files_that_the_rules_name_exist() -> None:
    names = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20
    places = [ROOT, ROOT / "kernels" / "kvstore_kernels", ROOT / "kvstore" / "models"]
    missing = {name for name in names if not any((place / name).exists() for place in places)}
    assert missing == {"kernels/__init__.py"}  # the one that must not exist
