"""`python -m benchmarks gpu`: every op on the device against the reference, a captured graph, and the time of each.

Takes at most four minutes on one GPU. `--dry-run` lists what it would do, and needs none.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import triton
from rich.console import Console

from benchmarks.gpu_checks import Check, checks
from benchmarks.gpu_timings import LATENT, Timing, time_on_device, timings
from benchmarks.gpu_world import FORMATS, World, different
from benchmarks.options import new_parser
from benchmarks.record import Measure, Run, UsageError
from benchmarks.tables import case_table, figure_table
from kvstore_kernels import PageView, gather_rows, kv_format, mla_decode, warm_up, write_rows
from kvstore_kernels.casts import CAST_CANDIDATES, HARDWARE_CASTS, check_hardware_cast
from kvstore_kernels.launch import Target

ROW_LENS, ROWS_PER_BLOCK, HEADS = (700, 1, 0, 129, 64), (64, 16), (16, 128)


QUICK_ROW_LENS, QUICK_ROWS_PER_BLOCK, QUICK_HEADS = (17, 0, 16), (16,), (16,)
CHECKED = ("difference", "wrong")
COLUMNS = {
    "gpu_time": "GPU us",
    "gpu_median": "median",
    "gpu_spread": "+- %",
    "bandwidth": "GB/s",
    "of_copy": "of a copy",
    "time_from_python": "from Python us",
}
"""Metrics -> headings of their columns."""


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when everything holds, 1 when something does not, 2 when it cannot run, 130 after Ctrl-C."""
    parser = new_parser("gpu", __doc__, "one block size, few rows and heads; every timing")
    parser.add_argument("--dry-run", action="store_true", help="say what would be checked and timed, and stop")
    options = parser.parse_args(arguments)
    worlds = (QUICK_ROW_LENS, QUICK_ROWS_PER_BLOCK, QUICK_HEADS) if options.quick else (ROW_LENS, ROWS_PER_BLOCK, HEADS)
    planned = [*checks(*worlds), *other_checks()]
    if options.dry_run:
        show_plan(planned, list(timings()))
        return 0
    if not torch.cuda.is_available():
        raise UsageError("expected a GPU that torch can use, got none; --dry-run says what would be done")
    device = torch.device("cuda", torch.cuda.current_device())
    can_cast = triton.runtime.driver.active.get_current_target().arch in CAST_CANDIDATES
    wanted = [timing for timing in timings() if can_cast or not timing.by_cast]
    with Run("gpu", options) as run:
        run.measure(
            [
                *((check.name, partial(measure_check, check, device)) for check in planned),
                *((timing.name, partial(measure_timing, timing, device)) for timing in wanted),
            ]
        )
    return run.finish(show)


def run_check(check: Check, device: torch.device) -> Measure:
    """What a check finds, against its bound."""
    value = check.run(device)
    unit = "B differ" if check.limit == 0 else "of the budget"
    return Measure(check.name, "difference", round(value, 4), unit, check.limit, value <= check.limit)


def measure_check(check: Check, device: torch.device) -> Iterator[Measure]:
    """`run_check` as a part."""
    yield run_check(check, device)


def measure_timing(timing: Timing, device: torch.device) -> Iterator[Measure]:
    """GPU time against its gate, time from Python, and what a copy of the same bytes takes."""
    timed = time_on_device(timing, device)
    torch.cuda.empty_cache()
    gb_per_s = timing.num_bytes / timed.gpu_us / 1000
    yield Measure(timing.name, "gpu_time", round(timed.gpu_us, 2), "us", timing.gate_us, timed.gpu_us <= timing.gate_us)
    yield Measure(timing.name, "gpu_median", round(1e6 * timed.gpu.median, 2), "us")
    yield Measure(timing.name, "gpu_spread", round(100 * timed.gpu.spread, 1), "%")
    yield Measure(timing.name, "bandwidth", round(gb_per_s, 1), "GB/s")
    yield Measure(timing.name, "of_copy", round(timed.of_copy, 3), "x")
    yield Measure(timing.name, "time_from_python", round(timed.wall_us, 2), "us")


def other_checks() -> list[Check]:
    """What is no op x format."""
    return [
        Check("hardware fp8 cast equals the codec on all 65,536 bf16 codes", check_cast),
        Check("pages past 2^31 bytes: write, gather and read", check_far_pages),
        Check("a captured graph gives what eager calls give, replayed with other slots and lengths", check_graph),
    ]


def check_cast(device: torch.device) -> float:
    """Codes that differ; 0 as well where the chip is none for which the cast is a candidate."""
    target: Target = triton.runtime.driver.active.get_current_target()
    if target.arch not in CAST_CANDIDATES:
        return float(target.arch in HARDWARE_CASTS)
    return float(check_hardware_cast(device))


def check_far_pages(device: torch.device) -> float:
    """The last blocks of a pool of 4.4 GB."""
    num_blocks, page_bytes = 60_000, LATENT.page_bytes(64)
    memory = torch.zeros(num_blocks * page_bytes, dtype=torch.uint8, device=device)
    view = PageView(memory, 0, page_bytes, num_blocks, 64, LATENT)
    slots = torch.arange(num_blocks * 64 - 100, num_blocks * 64, device=device)
    rows = torch.randn(100, 1, 576, device=device).bfloat16()
    write_rows(view, slots, rows)
    table = torch.tensor([[num_blocks - 2, num_blocks - 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([0, 100], dtype=torch.int32, device=device)
    start = torch.tensor([28], dtype=torch.int32, device=device)
    (gathered,) = gather_rows(view, table, lens, num_rows=100, start=start)
    return float(different(gathered, rows)) + float(int(memory[: -2 * page_bytes].count_nonzero()))


def check_graph(device: torch.device) -> float:
    """A step of writes, a gather and reads, captured after `warm_up`; its static inputs are refilled in place."""
    worlds = [World.of(row_format, 16, ROW_LENS) for row_format in (LATENT, kv_format(8, 128))]
    views = [world.on(device) for world in worlds]
    warm_up(views, num_heads=(16,))
    latent, view = worlds[0], views[0]
    static = [tensor.to(device) for tensor in (latent.slots[:64].contiguous(), latent.block_table, latent.row_lens)]
    rows, q = latent.sources[0][:64].to(device), latent.query(16, 1)[:, 0].to(device)
    out, lse = torch.empty(len(q), 16, 512, dtype=q.dtype, device=device), torch.empty(len(q), 16, device=device)

    def step() -> None:
        write_rows(view, static[0], rows)
        mla_decode(view, *static[1:], q, softmax_scale=0.05, out=out, lse=lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    wrong = 0
    for shift in (1, 2, 3):
        static[0].copy_(latent.slots[shift : shift + 64])
        static[2].copy_((latent.row_lens - shift).clamp(min=0))
        rows.normal_()
        q.normal_()
        before = view.memory.clone()
        graph.replay()
        replayed = [tensor.clone() for tensor in (out, lse, view.memory)]
        view.memory.copy_(before)
        step()
        wrong += sum(different(mine, theirs) for mine, theirs in zip(replayed, (out, lse, view.memory), strict=True))
    return float(wrong)


def show_plan(planned: Sequence[Check], timed: Sequence[Timing]) -> None:
    """How many checks of each op there are, and what would be timed."""
    ops = Counter((re.split(r", \d|: ", check.name)[0], check.limit) for check in planned)
    print(f"{len(planned)} checks against the reference, of these formats: {', '.join(FORMATS)}")
    for (op, limit), number in ops.items():
        print(f"  {number:3} x {op}" + (" (bit for bit)" if limit == 0 else " (error budget)"))
    print(f"{len(timed)} timings, each beside a copy of the same bytes (gates for an H200):")
    for timing in timed:
        print(f"  {timing.name}: {timing.num_bytes / 1e6:,.1f} MB, gate {timing.gate_us:g} us")


def show(console: Console, measures: Sequence[Measure]) -> None:
    """How many checks hold, those that do not, and a line for each timing."""
    checked = [each for each in measures if each.metric in CHECKED]
    failed = [each for each in checked if not each.ok]
    console.print(f"{len(checked) - len(failed)} of {len(checked)} checks hold\n", highlight=False)
    if failed:
        console.print(figure_table("Checks that do not", failed))
    console.print(case_table("Timings: least of the rounds", measures, COLUMNS, case="timing"))
