"""What is shipped: a wheel of the two packages and nothing else, that works away from the checkout; an sdist of all."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).parent.parent
SHIPPED = ("kvstore", "kernels", "tests", "benchmarks", "examples", "docs", ".ci")
SOURCES = {"kvstore": ROOT / "kvstore", "kvstore_kernels": ROOT / "kernels" / "kvstore_kernels"}
BUILD = "import setuptools.build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder of a wheel and an sdist that were built, without a network, from a copy of the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, source)
    for name in SHIPPED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests" / "__pycache__").mkdir()
    (source / "tests" / "__pycache__" / "left.pyc").touch()
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, timeout=120)
    return source / "dist"


@pytest.fixture(scope="module")
def unpacked(dist, tmp_path_factory):
    """The wheel as pip lays it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def test_the_wheel_holds_every_file_of_the_two_packages_and_nothing_else(unpacked):
    information = f"paged_kvstore-{kvstore.__version__}.dist-info"
    assert {path.name for path in unpacked.iterdir()} == {*SOURCES, information}
    for package, source in SOURCES.items():
        shipped = {str(path.relative_to(unpacked / package)) for path in (unpacked / package).rglob("*.*")}
        expected = {
            str(path.relative_to(source))
            for pattern in ("*.py", "*.json", "py.typed")
            for path in source.rglob(pattern)
        }
        assert shipped == expected
        assert "py.typed" in shipped
    assert (unpacked / information / "licenses" / "LICENSE").is_file()


def test_the_metadata_is_that_of_a_typed_package(unpacked):
    text = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    metadata = message_from_string(text)
    assert metadata["Name"] == "paged-kvstore"
    assert metadata["Version"] == kvstore.__version__
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [line.partition(">")[0] for line in needed] == ["torch", "triton", "numpy", "einops", "rich"]


def test_the_sdist_holds_what_a_checkout_has(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder, pattern in (*((name, "*.py") for name in SHIPPED), ("docs", "*.md"), ("tests/data", "*")):
        paths = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern) if path.is_file()}
        assert paths <= names, folder
    assert {"Makefile", "constraints.txt", "README.md", "DESIGN.md", "CONTRIBUTING.md", "LICENSE", ".ci/run"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build", ".git"))]


def run_away_from_the_checkout(code, unpacked, folder):
    """Runs code in a fresh process that finds the packages in the unpacked wheel, in an empty folder."""
    code = f"import sys; sys.path.insert(0, {str(unpacked)!r}); {code}"
    return subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_wheel_plans_a_bundled_model_away_from_the_checkout(unpacked, tmp_path):
    arguments = ["plan", "gemma-3-27b", "--memory", "64GiB"]
    code = (
        "import kvstore, kvstore_kernels; from kvstore.cli import main; "
        f"print(kvstore.__file__); print(kvstore_kernels.__file__); sys.exit(main({arguments}))"
    )
    done = run_away_from_the_checkout(code, unpacked, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [str(unpacked / name / "__init__.py") for name in SOURCES]
    longest = kvstore.plan_cache("gemma-3-27b", memory="64GiB").max_length(in_flight=8192)
    assert f"longest sequence alone: {longest:,} tokens" in done.stdout
    assert list(tmp_path.iterdir()) == []
