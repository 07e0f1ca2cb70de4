"""`python -m benchmarks gpu`: every op on the device against the reference, a captured graph, and the time of each.

Takes at most four minutes on one GPU. `--dry-run` lists what it would do, and needs none.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.gpu_checks import Check, checks
from benchmarks.gpu_timings import LATENT, Timing, time_on_device, timings
from benchmarks.gpu_world import World, different
from kvstore_kernels import PageView, gather_rows, kv_format, mla_decode, warm_up, write_rows
from kvstore_kernels.casts import CAST_CANDIDATES, HARDWARE_CASTS, check_hardware_cast
from kvstore_kernels.launch import Target

ROW_LENS, ROWS_PER_BLOCK, HEADS = (700, 1, 0, 129, 64), (64, 16), (16, 128)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure; `target` is the bound it is held to, None where it is only reported."""

    case: str
    metric: str
    value: float | str
    unit: str
    target: float | None = None
    ok: bool | None = None

    def to_json(self) -> str:
        """One line; `target` and `ok` only where there is a bound."""
        gate = {} if self.ok is None else {"target": self.target, "ok": self.ok}
        fields = {"bench": "gpu", "case": self.case, "metric": self.metric, "value": self.value, "unit": self.unit}
        return json.dumps({**fields, **gate})


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when everything holds, 1 when something does not, 2 when it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true", help="list the checks and timings, and stop")
    parser.add_argument("--json", action="store_true", help="print one object per line instead of tables")
    options = parser.parse_args(arguments)
    planned = [*checks(ROW_LENS, ROWS_PER_BLOCK, HEADS), *other_checks()]
    if options.dry_run:
        show_plan(planned, list(timings()))
        return 0
    if not torch.cuda.is_available():
        print("gpu: expected a GPU that torch can use, got none; --dry-run lists what would be done", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    measures = [Measure("device", name, value, "") for name, value in facts(device).items()]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("checking", total=len(planned))
        for check in planned:
            measures.append(run_check(check, device))
            progress.advance(bar)
        can_cast = triton.runtime.driver.active.get_current_target().arch in CAST_CANDIDATES
        wanted = [timing for timing in timings() if can_cast or not timing.by_cast]
        bar = progress.add_task("timing", total=len(wanted))
        for timing in wanted:
            measures += run_timing(timing, device)
            progress.advance(bar)
    if options.json:
        print(*(each.to_json() for each in measures), sep="\n")
    else:
        show(measures)
    return 1 if any(each.ok is False for each in measures) else 0


def facts(device: torch.device) -> dict[str, str]:
    """What the figures belong to."""
    driver = torch.cuda.get_device_properties(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "arch": f"sm_{driver.major}{driver.minor}" if torch.version.hip is None else driver.gcnArchName,
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "date": time.strftime("%Y-%m-%d"),
    }


def run_check(check: Check, device: torch.device) -> Measure:
    """A check as a measure; an exception is one that failed, so that the others still run."""
    try:
        value = check.run(device)
    except Exception as error:
        return Measure(check.name, "error", f"{type(error).__name__}: {error}"[:300], "", check.limit, False)
    unit = "B differ" if check.limit == 0 else "of the budget"
    return Measure(check.name, "difference", round(value, 4), unit, check.limit, value <= check.limit)


def run_timing(timing: Timing, device: torch.device) -> list[Measure]:
    """GPU time against its gate, time from Python, and what a copy of the same bytes takes."""
    try:
        timed = time_on_device(timing, device)
    except Exception as error:
        return [Measure(timing.name, "error", f"{type(error).__name__}: {error}"[:300], "", None, False)]
    torch.cuda.empty_cache()
    gb_per_s = timing.num_bytes / timed.gpu_us / 1000
    return [
        Measure(timing.name, "gpu_time", round(timed.gpu_us, 2), "us", timing.gate_us, timed.gpu_us <= timing.gate_us),
        Measure(timing.name, "bandwidth", round(gb_per_s, 1), "GB/s"),
        Measure(timing.name, "of_copy", round(timed.copy_us / timed.gpu_us, 3), "x"),
        Measure(timing.name, "time_from_python", round(timed.wall_us, 2), "us"),
    ]


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
    """What would be checked and timed."""
    print(f"{len(planned)} checks against the reference:")
    for check in planned:
        print(f"  {check.name}" + (" (bit for bit)" if check.limit == 0 else " (error budget)"))
    print(f"{len(timed)} timings, each beside a copy of the same bytes (gates for an H200):")
    for timing in timed:
        print(f"  {timing.name}: {timing.num_bytes / 1e6:,.1f} MB, gate {timing.gate_us:g} us")


def show(measures: Sequence[Measure]) -> None:
    """The device, the checks that failed, and a line for each timing."""
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(", ".join(f"{each.value}" for each in measures if each.case == "device"), highlight=False)
    checked = [each for each in measures if each.metric in ("difference", "error") and each.target is not None]
    failed = [each for each in measures if each.ok is False]
    console.print(f"{sum(each.ok is True for each in checked)} of {len(checked)} checks hold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("timing", no_wrap=True)
    for column in ("GPU us", "gate", "GB/s", "of a copy", "from Python us"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in dict.fromkeys(each.case for each in measures if each.metric == "gpu_time"):
        figures = {each.metric: each for each in measures if each.case == case}
        gpu = figures["gpu_time"]
        style = "green" if gpu.ok else "red"
        values = [figures[metric].value for metric in ("bandwidth", "of_copy", "time_from_python")]
        table.add_row(case, f"[{style}]{gpu.value}[/]", f"{gpu.target:g}", *map(str, values))
    console.print(table)
    for each in failed:
        console.print(
            f"{each.case}: {each.metric} {each.value} {each.unit} (bound {each.target})", style="red", markup=False
        )
