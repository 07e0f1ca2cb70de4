"""The command line: `kvstore plan CONFIG --memory 8GiB`, `kvstore demo`, `kvstore --version`."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

import kvstore
from kvstore.errors import PlanError
from kvstore.explain import (
    LENGTHS,
    bucket_sizes,
    bytes_before_buckets,
    capacity,
    layer_range,
    longest_sequence,
    percent_over,
    reach,
    slot_range,
    slot_runs,
)
from kvstore.memory import format_bytes
from kvstore.planner import LAYOUTS, CachePlan, plan_cache
from kvstore_kernels.formats import dtype_name

BAD_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's). Returns the exit status; 2 for a caller's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        return _demo(arguments[1:])
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse leaves by exception, also after --help
        return stop.code if isinstance(stop.code, int) else 0
    try:
        plan = plan_cache(
            options.config,
            memory=options.memory,
            num_frames=options.frames,
            kv_dtype=options.kv_dtype,
            block_size=options.block_size,
            layout=options.layout,
            tensor_parallel=options.tensor_parallel,
        )
    except PlanError as error:
        print(f"kvstore plan: {error}", file=sys.stderr)
        return BAD_USAGE
    if options.json:
        print(plan.to_json())
    else:
        show_plan(plan, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvstore", description="A paged KV-cache store for LLM inference engines.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvstore {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="plan the cache memory of a model", allow_abbrev=False)
    plan.add_argument("config", metavar="CONFIG", help="a Hugging Face config.json, or the folder that holds it")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument("--memory", metavar="SIZE", help="memory to plan for, with its unit: 8GiB, 80GB, 512MiB")
    size.add_argument("--frames", metavar="N", type=int, help="number of frames instead, the null frame counted")
    plan.add_argument("--layout", default="auto", help=f"one of {', '.join(LAYOUTS)} (default: auto)")
    plan.add_argument("--block-size", metavar="N", type=int, help="tokens a block (default: 16, MLA 64)")
    plan.add_argument("--kv-dtype", metavar="DTYPE", help="dtype of cached rows (default: the config's, else bfloat16)")
    plan.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help="ranks that share the heads")
    plan.add_argument("--json", action="store_true", help="print the plan itself, as CachePlan.from_json reads it")
    commands.add_parser("demo", help="generate text with a small model (kvstore demo --help)", add_help=False)
    return parser


def _demo(arguments: list[str]) -> int:
    """Imported only here: planning does without the demo."""
    try:
        run = import_module("kvstore.demo.run")
    except ModuleNotFoundError as error:
        if (error.name or "kvstore").startswith("kvstore"):
            raise
        print(f"kvstore demo: needs the module {error.name!r}: pip install 'paged-kvstore[demo]'", file=sys.stderr)
        return BAD_USAGE
    status: int = run.main(arguments)
    return status


def _version() -> str:
    try:
        return version("paged-kvstore")
    except PackageNotFoundError:
        return str(getattr(kvstore, "__version__", "unknown"))


def show_plan(plan: CachePlan, console: Console) -> None:
    """Prints a plan as tables: groups, layer slots, bytes per block, capacity."""
    if not plan.groups:
        console.print(plan.explain())
        return
    console.print(_groups_table(plan), _slots_table(plan), _bytes_table(plan), _capacity_table(plan))


def _table(title: str, *columns: str) -> Table:
    """A table; columns whose name ends in a number sign are right-aligned and, like the first, never broken."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    for index, column in enumerate(columns):
        number = column.endswith("#")
        table.add_column(
            column.removesuffix("#"),
            justify="right" if number else "left",
            no_wrap=number or not index,
            overflow="fold",
        )
    return table


def _groups_table(plan: CachePlan) -> Table:
    table = _table("Groups", "group", "keeps", "layers#", "rows", "block#", "pages#", "unused#")
    for group in plan.groups:
        formats = dict.fromkeys(
            f"{spec.format.name} {dtype_name(spec.format.parts[0].dtype)}" for spec in group.layers.values()
        )
        table.add_row(
            group.name,
            reach(group),
            f"{len(group.layers):,}",
            ", ".join(formats),
            f"{group.block_size:,} tokens",
            f"{group.block_bytes:,} B",
            f"{(plan.frame_bytes - group.block_bytes) / plan.frame_bytes:.1%}",
        )
    return table


def _slots_table(plan: CachePlan) -> Table:
    table = _table(f"Layer slots (layout {plan.layout})", "page#", "layer slot", "layers", "used by", "unused by")
    for page_bytes in bucket_sizes(plan):
        for run in slot_runs(plan, page_bytes):
            table.add_row(
                f"{page_bytes:,} B",
                slot_range(run),
                layer_range(run.layers),
                "\n".join(run.groups),
                "\n".join(run.unused_by) or "-",
            )
    return table


def _bytes_table(plan: CachePlan) -> Table:
    before = bytes_before_buckets(plan.groups)
    table = _table("Bytes per block", "", "bytes#", "over the bound#")
    table.add_row("lower bound (widest group)", f"{plan.lower_bound:,} B", "")
    table.add_row(
        f"this layout ({plan.layout})",
        f"{plan.bytes_per_block:,} B",
        percent_over(plan.bytes_per_block, plan.lower_bound),
    )
    table.add_row("rule before vLLM PR #44454", f"{before:,} B", percent_over(before, plan.lower_bound))
    return table


def _capacity_table(plan: CachePlan) -> Table:
    longest = longest_sequence(plan)
    alone = "any length" if longest is None else f"{longest:,} tokens"
    table = _table(
        f"Capacity: {plan.num_frames:,} blocks with the null block, {format_bytes(plan.arena_bytes)};\n"
        f"longest sequence alone: {alone}",
        "tokens#",
        "blocks a sequence#",
        "bytes a sequence#",
        "sequences at once#",
    )
    for length in LENGTHS:
        fits = capacity(plan, length)
        table.add_row(f"{length:,}", f"{fits.frames:,}", format_bytes(fits.num_bytes), f"{fits.num_sequences:,}")
    return table
