"""Speed of the ops on this device, over sizes: beside a copy of the same bytes, torch, and other libraries.

Each result is checked before it is timed and behind it; a wrong one gets no speed. A time is the median of alternated
rounds. The roofline of a case is the longer of two times: of a copy of the same bytes, measured in the same rounds, and
of its matrix products at the rate of a large one.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from benchmarks.kernel_cases import COPY, OURS, Case, Contender, case_of, copy_of
from benchmarks.kernel_data import Expected, World, difference
from benchmarks.kernel_peers import TORCH_PEERS, Absent, Peer, contenders
from benchmarks.kernel_peers_gpu import GPU_PEERS
from benchmarks.kernel_shapes import FORMATS_OF, Shape, default_shapes, read_shapes
from benchmarks.machine import best_device
from benchmarks.options import count, names_of, new_parser
from benchmarks.record import Measure, Run, UsageError, new_table, shown
from benchmarks.tables import by_case
from benchmarks.timing import Timer, Times, matrix_rate

ROUNDS, QUICK_ROUNDS = 7, 3
COLD_ROUNDS, QUICK_COLD_ROUNDS = 3, 1
PEERS: tuple[Peer, ...] = (*TORCH_PEERS, *GPU_PEERS)

GATED_MOVES = tuple(Shape(op, "latent", 65_536, kv_heads=1, head_dim=576).name for op in ("write_rows", "gather_rows"))
GATED_READS = tuple(
    Shape("mla_decode", "latent", rows, seqs, kv_heads=1, head_dim=576).name for rows, seqs in ((1024, 8), (8192, 1))
)
NOISY = 50
"""Per cent of the median between the quartiles, from which on a time says little."""
MIN_COPY_SHARE, MIN_READ_RATIO = 0.5, 1.0
"""On a CPU: time of a copy / time of the move; time of the fastest torch peer / time of the read."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases of a run share."""

    timer: Timer
    flops_per_s: float
    rounds: int
    cold_rounds: int
    is_gated: bool
    peers: tuple[Peer, ...]


def measure_shape(shape: Shape, bench: Bench) -> Iterator[Measure]:
    """Every figure of a shape: ours, a copy's, and each peer's or why it has none. A wrong result: its difference."""
    device = bench.timer.device
    world = World(shape, device)
    case = case_of(world)
    expected = case.ours.expected()  # before anything runs: an op that changes its inputs cannot change this
    if (wrong := check(case.ours, expected)) is not None:
        yield _difference(shape, wrong)
        return
    found = [_checked(each) for each in contenders(world, bench.peers)]
    running = [each for each in found if isinstance(each, Contender)]
    calls = [case.ours.call, copy_of(case.num_bytes, device), *(peer.call for peer in running)]
    warm = bench.timer.warm(calls, bench.rounds)
    cold = bench.timer.cold(calls[:2], bench.cold_rounds)
    wrong = difference(case.ours.results(), expected) or check(case.ours, expected)
    if wrong is not None:  # right at first, and not while it was timed
        yield _difference(shape, wrong)
        return
    yield from ours(case, warm[0], cold[0], (warm[1], cold[1]), bench.flops_per_s)
    yield from _figures(f"{shape.name} | {COPY}", case.num_bytes, warm[1], cold[1])
    for number, peer in enumerate(running):
        name, times = f"{shape.name} | {peer.name}", warm[2 + number]
        if (wrong := difference(peer.results(), peer.expected())) is not None:
            yield Measure(name, "absent", f"wrong when it was timed: differs by {wrong[0]:g} {wrong[1]}")
            continue
        yield from _figures(name, case.num_bytes, times, None)
        yield Measure(name, "ratio", _digits(times.median / warm[0].median), "x")
        if peer.differs:
            yield Measure(name, "differs", peer.differs)
    for each in found:
        if isinstance(each, Absent):
            yield Measure(f"{shape.name} | {each.name}", "absent", each.why)
    if bench.is_gated and device.type == "cpu":
        yield from gates(shape, warm, [peer.name for peer in running])


def check(contender: Contender, expected: Expected | None = None) -> tuple[float, str] | None:
    """What is wrong with the result of a call that finds none there, None where nothing is.

    `expected`: what it must be, computed before; None: a peer's own, which may depend on how many results there are.
    """
    contender.reset()
    contender.call()
    return difference(contender.results(), contender.expected() if expected is None else expected)


def _difference(shape: Shape, wrong: tuple[float, str]) -> Measure:
    return Measure(shape.name, "difference", *wrong, 0 if wrong[1] == "B" else 1, False)


def _checked(peer: Contender | Absent) -> Contender | Absent:
    """The peer, or why it gets no speed."""
    if isinstance(peer, Absent):
        return peer
    try:
        wrong = check(peer)
    except Exception as error:  # another version of it, say
        return Absent(peer.name, f"failed: {type(error).__name__}: {error}"[:200])
    return peer if wrong is None else Absent(peer.name, f"wrong: differs by {wrong[0]:g} {wrong[1]}")


def ours(case: Case, warm: Times, cold: Times, copies: tuple[Times, Times], flops_per_s: float) -> Iterator[Measure]:
    """The figures of our op, its share of the roofline among them."""
    name = case.shape.name
    yield from _figures(name, case.num_bytes, warm, cold)
    if case.num_flops:
        yield Measure(name, "rate", round(case.num_flops / warm.median / 1e9, 2), "GFLOP/s")
    for metric, times, copy in (("roofline", warm, copies[0]), ("cold_roofline", cold, copies[1])):
        least = max(copy.median, case.num_flops / flops_per_s)
        yield Measure(name, metric, _digits(least / times.median), "of it")


def _figures(name: str, num_bytes: int, warm: Times, cold: Times | None) -> Iterator[Measure]:
    yield Measure(name, "bytes", num_bytes, "B")
    yield Measure(name, "time", round(1e3 * warm.median, 5), "ms")
    yield Measure(name, "spread", round(100 * warm.spread, 1), "%")
    yield Measure(name, "bandwidth", _digits(num_bytes / warm.median / 1e9), "GB/s")
    yield Measure(name, "timed_by", warm.by)
    if cold is not None:
        yield Measure(name, "cold_time", round(1e3 * cold.median, 5), "ms")
        yield Measure(name, "cold_bandwidth", _digits(num_bytes / cold.median / 1e9), "GB/s")


def _digits(value: float) -> float:
    """Four digits that mean something."""
    return float(f"{value:.4g}")


def gates(shape: Shape, warm: Sequence[Times], peers: Sequence[str]) -> Iterator[Measure]:
    """The targets on a CPU. `warm`: of ours, of a copy, of the peers."""
    if shape.name in GATED_MOVES:
        share = round(warm[1].median / warm[0].median, 3)
        yield Measure(shape.name, "of_copy", share, "x", MIN_COPY_SHARE, share >= MIN_COPY_SHARE)
    torch_names = {peer.name for peer in TORCH_PEERS}
    rivals = [times.median for name, times in zip(peers, warm[2:], strict=True) if name in torch_names]
    if shape.name in GATED_READS and rivals:
        ratio = round(min(rivals) / warm[0].median, 3)
        yield Measure(shape.name, "of_torch", ratio, "x", MIN_READ_RATIO, ratio >= MIN_READ_RATIO)


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark. Returns 0 when every target is met, 1 when one is missed, 2 for a caller's mistake."""
    options = _parse(arguments)
    device = best_device() if options.device is None else torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device: expected a device that torch can use, got cuda and no GPU")
    if options.threads:
        torch.set_num_threads(options.threads)
    shapes = read_shapes(options.shapes) if options.shapes else default_shapes(options.quick, device.type == "cuda")
    shapes = [shape for shape in shapes if shape.op in options.ops]
    if not shapes:
        raise UsageError(f"--ops: expected an op that a shape has, got {', '.join(options.ops)}")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with Run("kernels", options) as run:
        bench = Bench(
            Timer(device),
            matrix_rate(device),
            rounds,
            QUICK_COLD_ROUNDS if options.quick else COLD_ROUNDS,
            not options.quick,
            () if options.no_peers else PEERS,
        )
        run.add([Measure("machine", "matrix_rate", round(bench.flops_per_s / 1e9), "GFLOP/s")])
        run.measure([(shape.name, partial(measure_shape, shape, bench)) for shape in shapes])
    return run.finish(partial(show, rounds=rounds), draw)


def draw(measures: Sequence[Measure], path: Path) -> None:
    """Imported only here: matplotlib is an extra."""
    from benchmarks.kernel_plot import draw_bandwidth

    draw_bandwidth(measures, path)


def show(console: Console, measures: Sequence[Measure], rounds: int) -> None:
    """A table for each op: a line for ours, for a copy, and for each peer of a shape."""
    by_shape = by_case(measures)
    machine = by_shape.pop("machine", {})
    for op in FORMATS_OF:
        cases = {case: figures for case, figures in by_shape.items() if case.partition(",")[0] == op}
        if cases:
            _show_op(console, op, cases)
    if machine:
        console.print(
            f"Matrix rate: {shown(machine['matrix_rate'].value)} GFLOP/s, of a large product.", highlight=False
        )
    console.print(
        f"Median of {rounds} alternated rounds after a check of the result; +-: distance of the quartiles. Cold: none\n"
        "of the bytes in a cache. GB/s: bytes that the op must read and write. roofline: the longer of a copy of the\n"
        "same bytes and the products at the matrix rate, over the time. / ours: its time over ours, warm. On a CPU,\n"
        "quantised rows are made and read by integer arithmetic in torch: a reference, not fast.\n",
        highlight=False,
    )
    spreads = [float(figures["spread"].value) for figures in by_shape.values() if "spread" in figures]
    if num_noisy := sum(spread > NOISY for spread in spreads):
        console.print(
            f"{num_noisy} of {len(spreads)} times scatter by more than {NOISY} %: the machine was busy.\n",
            style="yellow",
            highlight=False,
        )


def _show_op(console: Console, op: str, cases: dict[str, dict[str, Measure]]) -> None:
    table = new_table(op, ())
    for column in ("shape", "by"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "+- %", "GB/s", "cold ms", "cold GB/s", "roofline", "cold", "/ ours"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("remarks")
    previous = ""
    absent: dict[tuple[str, str], None] = {}  # the same for every shape
    for case, figures in cases.items():
        shape, _, by = case.partition(" | ")
        if "absent" in figures:
            absent[by, str(figures["absent"].value)] = None
            continue
        label = "" if shape == previous else shape.partition(", ")[2]
        previous = shape
        if "difference" in figures:
            wrong = figures["difference"]
            table.add_row(
                label, OURS, *[""] * 8, f"[red]wrong: differs by {shown(wrong.value)} {escape(wrong.unit)}[/]"
            )
            continue
        if "wrong" in figures:
            table.add_row(label, OURS, *[""] * 8, f"[red]{escape(str(figures['wrong'].value))}[/]")
            continue
        metrics = ("time", "spread", "bandwidth", "cold_time", "cold_bandwidth", "roofline", "cold_roofline", "ratio")
        cells = [shown(figures[metric].value) if metric in figures else "" for metric in metrics]
        gate = next((each for each in figures.values() if each.ok is not None), None)
        remark = str(figures["differs"].value) if "differs" in figures else ""
        if gate is not None:
            remark = f"[{'green' if gate.ok else 'red'}]{gate.metric} {gate.value} (wants {gate.target})[/]"
        table.add_row(label, by or f"[bold]{OURS}[/]", *cells, remark)
    console.print(table)
    for by, why in absent:
        console.print(f" - {by}: {why}", markup=False, highlight=False)
    if absent:
        console.print()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser("kernels", __doc__, "few rows, few rounds, no targets: does it run at all", plots=True)
    parser.add_argument(
        "--ops",
        type=names_of(FORMATS_OF),
        default=tuple(FORMATS_OF),
        metavar="NAME,NAME",
        help=f"of {', '.join(FORMATS_OF)}",
    )
    parser.add_argument("--shapes", metavar="FILE", help="a JSON object on each line, in the place of the usual shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where (default: a GPU if there is one)")
    parser.add_argument("--threads", type=count, metavar="N", help="threads of torch on a CPU")
    parser.add_argument("--no-peers", action="store_true", help="only our ops and the copy")
    return parser.parse_args(arguments)
