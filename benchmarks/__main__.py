"""`python -m benchmarks NAME [options]`: runs one benchmark of this checkout; it need not be installed."""

import sys
from importlib import import_module
from pathlib import Path

BENCHMARKS = {
    "all": ("benchmarks.everything", "the others one after the other, in under ten minutes on a CPU"),
    "aot": ("benchmarks.aot", "compile every kernel for five chips: registers, spills, access widths, gates"),
    "aot-all": ("benchmarks.aot_all", "the same under Triton 3.6, 3.7 and 3.9, installed apart (about 2 GB)"),
    "capacity": ("benchmarks.capacity", "replays requests against plans: what fits, and what is wasted on what"),
    "engine": ("benchmarks.engine", "the demo's engine against transformers' generate, on a CPU"),
    "families": ("benchmarks.families", "models of transformers on the store's pages, beside its own cache"),
    "gpu": ("benchmarks.gpu", "every op on a GPU against the reference, a captured graph, times beside a copy"),
    "kernels": ("benchmarks.kernels", "speed of the ops over sizes, beside a roofline and other libraries"),
    "planner": (
        "benchmarks.planner",
        "bytes that plans allocate, beside a reference and an exhaustive search; planning time",
    ),
    "soak": ("benchmarks.soak", "a store under random calls for a long time, beside the model of the tests"),
    "store": ("benchmarks.store", "the store's books: steps, prompts, forks, memory; on a CPU, no bytes"),
}
"""Name -> (module with a `main(arguments) -> exit code`, what it does)."""
OURS = ("benchmarks", "kvstore", "kvstore_kernels")


def main(arguments: list[str]) -> int:
    """Runs the benchmark that the first argument names with the arguments behind it."""
    name, *options = arguments or ["--help"]
    if name in BENCHMARKS:
        checkout = Path(__file__).resolve().parent.parent
        sys.path[:0] = [str(checkout), str(checkout / "kernels")]
        try:
            module = import_module(BENCHMARKS[name][0])
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package in OURS:
                raise
            print(
                f"benchmarks: expected the package {package}, got none: use the checkout's environment "
                "(`make`, then `. .venv/bin/activate`), or pip install 'paged-kvstore[demo,plots]'",
                file=sys.stderr,
            )
            return 2
        from benchmarks.record import UsageError

        try:
            return int(module.main(options))
        except UsageError as error:
            print(f"python -m benchmarks {name}: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:  # before or after anything is measured
            print(f"python -m benchmarks {name}: interrupted", file=sys.stderr)
            return 130
    known = "\n".join(f"  {known:<8} {what}" for known, (_, what) in BENCHMARKS.items())
    if name in ("-h", "--help"):
        print(f"usage: python -m benchmarks NAME [options]\n\n{known}\n\nNAME --help shows the options of one.")
        return 0
    print(f"benchmarks: expected one of these names, got {name!r}\n{known}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
