"""The command line: `kvstore plan CONFIG --memory 8GiB`, `kvstore demo`, `kvstore bench`, `kvstore --version`."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from rich.console import Console

import kvstore
from kvstore import bench
from kvstore.choose import GROUPINGS
from kvstore.errors import PlanError
from kvstore.model_list import show_models
from kvstore.plan import CachePlan
from kvstore.plan_tables import show_comparison, show_plan
from kvstore.planner import LAYOUTS, plan_cache
from kvstore.score import LENGTHS
from kvstore.spec_json import specs_from_json

BAD_USAGE = 2

EXAMPLE_MODEL = "gemma-3-27b"
EXAMPLE = f"kvstore plan {EXAMPLE_MODEL} --memory 64GiB"

MIN_WIDTH = 80
"""Columns that tables take at least: in fewer, numbers would be cut off."""


class _Parser(argparse.ArgumentParser):
    """Answers a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {_one_line(message)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's). Returns the exit status; 2 for a caller's mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        return _demo(arguments[1:])
    if arguments[:1] == ["bench"]:
        return bench.main(arguments[1:])
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:  # argparse leaves by exception, also after --help
        return stop.code if isinstance(stop.code, int) else 0
    if options.command is None:
        print(f"kvstore: expected a command: plan, bench or demo, got none; for example: {EXAMPLE}", file=sys.stderr)
        return BAD_USAGE
    try:
        if options.list:
            return _list(options)
        plan = _plan(options)
        other = None if options.compare is None else _other(Path(options.compare))
        if options.plot is not None:
            _plot(plan, options.plot)
    except PlanError as error:
        print(f"kvstore plan: {_one_line(str(error))}", file=sys.stderr)
        return BAD_USAGE
    try:
        _print(plan, other, options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"kvstore plan: cannot write: {error.strerror}", file=sys.stderr)
        return BAD_USAGE
    return 0


def _print(plan: CachePlan, other: CachePlan | None, options: argparse.Namespace) -> None:
    console = _console()
    if options.json:
        print(plan.to_json())
    elif options.explain:
        print(plan.explain())
    elif other is not None:
        show_comparison(plan, other, console)
    else:
        show_plan(plan, console)


def _console() -> Console:
    console = Console(markup=False, emoji=False, highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    return console


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvstore",
        description="A paged KV-cache store for LLM inference engines.",
        epilog=f"for example: {EXAMPLE}; kvstore COMMAND --help says more of each",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvstore {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    plan = commands.add_parser(
        "plan",
        usage="kvstore plan CONFIG (--memory SIZE | --frames N) [options]\n       kvstore plan --list",
        help="plan the cache memory of a model",
        description="Shows which layers share memory, in which layout and blocks, and how many sequences fit. "
        "No weights are read and nothing is downloaded.",
        epilog=f"for example: {EXAMPLE}",
        allow_abbrev=False,
    )
    plan.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help=f"a Hugging Face config.json, the folder that holds it, or a bundled model such as {EXAMPLE_MODEL}",
    )
    plan.add_argument("--list", action="store_true", help="show the bundled models, and plan nothing")
    plan.add_argument("--specs", metavar="FILE", help="a JSON list of layer specs, in the place of CONFIG")
    size = plan.add_mutually_exclusive_group()
    size.add_argument("--memory", metavar="SIZE", help="memory to plan for, with its unit: 8GiB, 80GB, 512MiB")
    size.add_argument("--frames", metavar="N", type=_integer, help="number of frames instead, the null frame counted")
    choice = plan.add_argument_group("what is open to choice")
    choice.add_argument("--layout", default="auto", help=f"one of {', '.join(LAYOUTS)} (default: auto)")
    choice.add_argument("--grouping", default="auto", help=f"one of {', '.join(GROUPINGS)} (default: auto)")
    choice.add_argument(
        "--lengths",
        metavar="N,N",
        type=_lengths,
        default=LENGTHS,
        help=f"tokens of the sequences to plan for (default: {','.join(map(str, LENGTHS))})",
    )
    choice.add_argument("--frame-bytes", metavar="N", type=_integer, help="bytes of a frame in the layout frames")
    choice.add_argument(
        "--in-flight", metavar="N", type=_integer, default=8192, help="tokens that one step may write (default: 8192)"
    )
    model = plan.add_argument_group("what the model caches")
    model.add_argument("--block-size", metavar="N", type=_integer, help="tokens a block (default: 16, MLA 64)")
    model.add_argument(
        "--kv-dtype",
        metavar="DTYPE",
        help="bf16, fp16, fp32, fp8, int8_per_token_head, fp8_per_token_head, fp8_ds_mla (default: the config's)",
    )
    model.add_argument("--state-dtype", metavar="DTYPE", help="dtype of recurrent states")
    model.add_argument("--indexer-row-bytes", metavar="N", type=_integer, help="bytes of an indexer's row")
    model.add_argument("--ring-states", action="store_true", help="compressor states of DeepSeek V4 as rings")
    model.add_argument("--draft-layers", metavar="N", type=_integer, default=0, help="draft (MTP) layers that are run")
    model.add_argument("--tensor-parallel", metavar="N", type=_integer, default=1, help="ranks that share the heads")
    model.add_argument("--pipeline-stages", metavar="N", type=_integer, default=1, help="stages that share the layers")
    model.add_argument("--pipeline-stage", metavar="N", type=_integer, help="which of them to plan, from 0")
    output = plan.add_argument_group("what is shown: tables, unless")
    shown = output.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="the plan itself, as CachePlan.from_json reads it")
    shown.add_argument("--explain", action="store_true", help="all of it as text, bytes in full")
    shown.add_argument("--compare", metavar="FILE", help="beside another plan, saved with --json")
    output.add_argument("--plot", metavar="FILE", help="draw it as well, to a .svg or .png")
    commands.add_parser("bench", help="run a benchmark of a checkout", add_help=False)
    commands.add_parser("demo", help="generate text with a small model on the store", add_help=False)
    return parser


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers of tokens such as 512,8192, got {text!r}") from None


def _list(options: argparse.Namespace) -> int:
    for name in ("config", "specs", "memory", "frames"):
        if getattr(options, name) is not None:
            raise PlanError(f"--list: expected nothing beside it, got {getattr(options, name)!r}")
    show_models(_console())
    return 0


def _plan(options: argparse.Namespace) -> CachePlan:
    model = options.config or (f"--specs {options.specs}" if options.specs else EXAMPLE_MODEL)
    example = f"for example: kvstore plan {model} --memory 64GiB"
    if options.config is not None and options.specs is not None:
        raise PlanError("expected one of CONFIG and --specs, got both")
    if options.config is None and options.specs is None:
        raise PlanError(f"expected a CONFIG or --specs, got neither; {example} (kvstore plan --list shows more names)")
    if options.memory is None and options.frames is None:
        raise PlanError(f"expected one of --memory and --frames, got neither; {example}")
    return plan_cache(
        options.config if options.specs is None else specs_from_json(options.specs),
        memory=options.memory,
        num_frames=options.frames,
        lengths=options.lengths,
        grouping=options.grouping,
        layout=options.layout,
        frame_bytes=options.frame_bytes,
        max_tokens_in_flight=options.in_flight,
        kv_dtype=options.kv_dtype,
        state_dtype=options.state_dtype,
        block_size=options.block_size,
        indexer_row_bytes=options.indexer_row_bytes,
        num_draft_layers=options.draft_layers,
        tensor_parallel=options.tensor_parallel,
        pipeline_stages=options.pipeline_stages,
        pipeline_stage=options.pipeline_stage,
        ring_states=options.ring_states,
    )


def _other(path: Path) -> CachePlan:
    try:
        return CachePlan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"--compare: cannot read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # PlanError, and bytes that are no text
        raise PlanError(f"--compare: {str(path)!r}: {error}") from error


def _plot(plan: CachePlan, path: str) -> None:
    """Imported only here: matplotlib is an extra."""
    try:
        import_module("kvstore.plot").plot_plan(plan, path)
    except ModuleNotFoundError as error:
        if (error.name or "kvstore").startswith("kvstore"):
            raise
        raise PlanError(f"--plot: needs the module {error.name!r}: pip install 'paged-kvstore[plots]'") from error
    except OSError as error:
        raise PlanError(f"--plot: cannot write {path!r}: {error.strerror}") from error


def _one_line(message: str) -> str:
    return " ".join(message.split())


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
