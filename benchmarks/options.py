"""The command line that all benchmarks share: a mistake is answered in one line, with the names that there are."""

import argparse
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.record import BAD_USAGE, UsageError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, without the usage text, and names the options there are."""

    def error(self, message: str) -> NoReturn:
        known = ", ".join(name for action in self._actions for name in action.option_strings if name.startswith("--"))
        self.exit(BAD_USAGE, f"{self.prog}: {message}; known: {known}\n")


def new_parser(bench: str, about: str | None, quick: str, *, plots: bool = False) -> Parser:
    """A parser with the options of every benchmark.

    Args:
        about: the docstring of its module, of which the first paragraph is shown.
        quick: what `--quick` leaves out.
        plots: whether it can draw its figures.
    """
    parser = Parser(
        prog=f"python -m benchmarks {bench}", description=(about or "").partition("\n\n")[0], allow_abbrev=False
    )
    shared = parser.add_argument_group("of every benchmark")
    shared.add_argument("--quick", action="store_true", help=quick)
    shared.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="a JSON object per figure, to FILE or instead of the tables",
    )
    shared.add_argument("--csv", metavar="FILE", help="the same as a table, to FILE")
    shared.add_argument("--compare", metavar="FILE", help="the ratio to the figures of an earlier --json FILE")
    if plots:
        shared.add_argument("--plot", type=plot_path, metavar="FILE", help="draw them, to a .png, .svg or .pdf")
    else:
        parser.set_defaults(plot=None)
    return parser


def plot_path(text: str) -> str:
    """A file that matplotlib can write."""
    if not text.lower().endswith(PLOT_SUFFIXES):
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(PLOT_SUFFIXES)}, got {text!r}")
    return text


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A comma-separated list of some of the known names."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(known)}, got {name!r}")
        return names

    return parse


def count(text: str) -> int:
    """A whole number from 1 on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def read_objects(path: str, option: str, what: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The JSON objects of a file's lines, each with where it stands, for errors about it. Empty lines are passed over.

    Raises: UsageError that names the option, the file and the line for one that cannot be read, a line that is no
        object, and a file without any; `what` says what is expected.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}: cannot read {path!r}: {error}") from error
    filled = [(number, text) for number, text in enumerate(lines, 1) if text.strip()]
    if not filled:
        raise UsageError(f"{option}: expected {what} on each line of {path!r}, got none")
    for number, text in filled:
        where, fault = f"{option}: {path!r}, line {number}", ""
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            record, fault = None, f": {error}"
        if not isinstance(record, dict):
            raise UsageError(f"{where}: expected {what}, got {text!r:.60}{fault}")
        yield record, where
