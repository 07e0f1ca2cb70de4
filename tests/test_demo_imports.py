"""The demo embeds the store as an outsider would: it imports public names only and reaches into nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore
import kvstore_kernels

DEMO = Path(kvstore.__file__).parent / "demo"
LIBRARIES = {"torch", "numpy", "rich", "transformers", "tokenizers", "gguf"}
PUBLIC = {"kvstore": set(kvstore.__all__), "kvstore_kernels": set(kvstore_kernels.__all__)}


def violations(source: str) -> list[str]:
    """What a module of the demo imports or touches and must not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots = {alias.name.partition(".")[0] for alias in node.names}
            found += [f"import {root}" for root in sorted(roots - LIBRARIES - sys.stdlib_module_names)]
        elif isinstance(node, ast.ImportFrom):
            found += _from_violations(node)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and ast.unparse(node.value) != "self":
            found.append(f".{node.attr}")
    return found


def _from_violations(node: ast.ImportFrom) -> list[str]:
    module = node.module or ""
    if node.level:
        return [f"from {'.' * node.level}{module}"]
    if module in PUBLIC:
        return [f"from {module} import {a.name}" for a in node.names if a.name not in PUBLIC[module]]
    if module == "kvstore.demo" or module.startswith("kvstore.demo."):
        return [f"from {module} import {a.name}" for a in node.names if a.name.startswith("_")]
    root = module.partition(".")[0]
    return [] if root in LIBRARIES | sys.stdlib_module_names else [f"from {module}"]


@pytest.mark.parametrize("path", sorted(DEMO.glob("*.py")), ids=lambda path: path.name)
def test_module_uses_public_names_only(path):
    assert violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from kvstore.store import KVStore",
        "from kvstore import books",
        "import kvstore",
        "import kvstore.store",
        "from kvstore_kernels.ops import gather_rows",
        "from . import model",
        "from kvstore.demo.model import _prefills",
        "import accelerate",
        "store._books",
    ],
)
def test_a_forbidden_use_is_found(source):
    assert len(violations(source)) == 1


def test_importing_the_engine_imports_neither_transformers_nor_gguf():
    modules = ", ".join(f"kvstore.demo.{path.stem}" for path in sorted(DEMO.glob("*.py")) if path.stem != "__init__")
    code = f"import sys, {modules}; print({{'transformers', 'gguf', 'tokenizers'}} & set(sys.modules))"
    folders = [str(DEMO.parents[1]), str(Path(kvstore_kernels.__file__).parents[1])]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}; {code}"], capture_output=True, text=True
    )
    assert (result.stdout.strip(), result.stderr) == ("set()", "")
