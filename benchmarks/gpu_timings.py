"""What `python -m benchmarks gpu` times: writes, gathers and reads of more rows than the L2 cache holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton

from benchmarks.timing import Times
from kvstore_kernels import (
    PageView,
    RowFormat,
    dsv4_format,
    fp8_ds_mla_format,
    gather_rows,
    latent_format,
    mla_decode,
    write_rows,
)
from kvstore_kernels.launch import Target
from kvstore_kernels.quant_reads import value_shapes
from kvstore_kernels.quant_write import quant_write_launch

BF16 = torch.bfloat16
ROWS_PER_BLOCK = 64
LATENT, FP8_DS_MLA, DSV4 = latent_format(576, 512), fp8_ds_mla_format(), dsv4_format()

CALLS_PER_GRAPH = 10
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Timing:
    """One op at one size. `gate_us` is the most GPU time it may take on an H200, `num_bytes` what it has to move.

    `by_cast`: by the chip's fp8 cast, where that is a candidate.
    """

    name: str
    num_bytes: int
    gate_us: float
    make: Callable[[torch.device], Callable[[], object]]
    by_cast: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """GPU times of a call and of a copy of the same bytes, each in a graph, and the time of a call from Python."""

    gpu: Times
    copy: Times
    wall_us: float

    @property
    def gpu_us(self) -> float:
        """The least."""
        return 1e6 * min(self.gpu.samples)

    @property
    def of_copy(self) -> float:
        """The least time of a copy / that of the call."""
        return min(self.copy.samples) / min(self.gpu.samples)


def pool(row_format: RowFormat, num_rows: int, device: torch.device) -> tuple[PageView, torch.Tensor, torch.Tensor]:
    """Pages for that many rows, holding zeros; all blocks in random order, and the slots of their rows."""
    num_blocks, page_bytes = num_rows // ROWS_PER_BLOCK, row_format.page_bytes(ROWS_PER_BLOCK)
    memory = torch.zeros(num_blocks * page_bytes, dtype=torch.uint8, device=device)
    view = PageView(memory, 0, page_bytes, num_blocks, ROWS_PER_BLOCK, row_format)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(device)
    slots = (order[:, None] * ROWS_PER_BLOCK + torch.arange(ROWS_PER_BLOCK, device=device)).flatten()
    return view, order.int(), slots


def new_rows(view: PageView, num_rows: int) -> torch.Tensor:
    """bf16 rows of a latent format."""
    ((rows, heads, columns),) = value_shapes(view, num_rows)
    return torch.randn(rows, heads, columns, device=view.device).to(BF16)


def make_write(row_format: RowFormat, num_rows: int, device: torch.device) -> Callable[[], object]:
    """write_rows of that many rows, in a pool of at least 65,536."""
    view, _, slots = pool(row_format, max(num_rows, 65_536), device)
    rows, slots = new_rows(view, num_rows), slots[:num_rows].contiguous()
    return partial(write_rows, view, slots, rows)


def make_cast_write(row_format: RowFormat, num_rows: int, device: torch.device) -> Callable[[], object]:
    """The launch of a quantising write whose codes the chip's own cast makes."""
    view, _, slots = pool(row_format, num_rows, device)
    target = triton.runtime.driver.active.get_current_target()
    chip = Target(target.backend, target.arch, target.warp_size)
    return quant_write_launch(view, slots, [new_rows(view, num_rows)], chip, hardware_cast=True).run


def make_gather(row_format: RowFormat, num_rows: int, device: torch.device) -> Callable[[], object]:
    """gather_rows of all rows of a pool, eight sequences, to bf16."""
    view, order, slots = pool(row_format, num_rows, device)
    rows = new_rows(view, num_rows)
    write_rows(view, slots, rows)
    table = order.view(8, -1)
    cu_row_lens = torch.arange(0, num_rows + 1, num_rows // 8, dtype=torch.int32, device=device)
    return partial(gather_rows, view, table, cu_row_lens, num_rows=num_rows, out=(torch.empty_like(rows),))


def make_decode(
    row_format: RowFormat, num_heads: int, num_seqs: int, row_len: int, device: torch.device
) -> Callable[[], object]:
    """mla_decode, the merge included."""
    view, order, slots = pool(row_format, num_seqs * row_len, device)
    for chunk in slots.split(65_536):
        write_rows(view, chunk, new_rows(view, len(chunk)))
    ((_, _, columns),) = value_shapes(view, 1)
    q = torch.randn(num_seqs, num_heads, columns, device=device).to(BF16)
    out = torch.empty(num_seqs, num_heads, row_format.value_dim or columns, dtype=BF16, device=device)
    lse = torch.empty(num_seqs, num_heads, device=device)
    lens = torch.full((num_seqs,), row_len, dtype=torch.int32, device=device)
    table = order.view(num_seqs, -1)
    return partial(mla_decode, view, table, lens, q, softmax_scale=192**-0.5, out=out, lse=lse)


def timings() -> Iterator[Timing]:
    """The rows of the table. Gates: 3 us for small writes, else 1.25 to 1.7 times what the bytes take at 4.3 TB/s."""
    for what, row_format, row_bytes, gate in (
        ("bf16 1,152", LATENT, 1152, 44.0),
        ("656 from bf16", FP8_DS_MLA, 656, 37.0),
        ("584 from bf16", DSV4, 584, 33.0),
    ):
        read = 2 * (512 if row_format is DSV4 else 576) + 8
        yield Timing(
            f"write {what}, 65,536 rows", 65_536 * (row_bytes + read), gate, partial(make_write, row_format, 65_536)
        )
        if row_format is not LATENT:
            make = partial(make_cast_write, row_format, 65_536)
            yield Timing(f"write {what}, 65,536 rows, by cast", 65_536 * (row_bytes + read), gate, make, by_cast=True)
        yield Timing(f"write {what}, 128 rows", 128 * (row_bytes + read), 3.0, partial(make_write, row_format, 128))
    yield Timing("gather bf16, 65,536 rows", 65_536 * 2 * 1152, 44.0, partial(make_gather, LATENT, 65_536))
    yield Timing(
        "gather 656 to bf16, 98,304 rows", 98_304 * (656 + 1152), 55.0, partial(make_gather, FP8_DS_MLA, 98_304)
    )
    for what, row_format, num_heads, row_bytes, gate in (
        ("bf16, 16 heads", LATENT, 16, 1152, 195.0),
        ("656, 16 heads", FP8_DS_MLA, 16, 656, 135.0),
        ("bf16, 128 heads", LATENT, 128, 1152, 490.0),
    ):
        make = partial(make_decode, row_format, num_heads, 64, 8192)
        yield Timing(f"mla_decode {what}, 64 x 8,192", 64 * 8192 * row_bytes, gate, make)


def time_on_device(timing: Timing, device: torch.device) -> Timed:
    """Times a call warm: in a captured graph of several, and one after the other from Python."""
    call = timing.make(device)
    half = torch.empty(timing.num_bytes // 2, dtype=torch.uint8, device=device)
    other = torch.zeros_like(half)
    gpu, copy = (_graph_times(each) for each in (call, partial(half.copy_, other)))
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(200):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return Timed(gpu, copy, begin.elapsed_time(end) * 1000 / 200)


def _graph_times(call: Callable[[], object]) -> Times:
    """GPU time of a call, in a graph of CALLS_PER_GRAPH replayed ROUNDS times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    samples = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1000 / CALLS_PER_GRAPH)
    return Times(tuple(samples), "graph")
