"""Static figures of public kernels on sm_90 beside those of ours: bf16, Triton 3.7.1, one program of each.

Theirs were read from their compiled code once (vLLM 0.33, SGLang 0.5.23); only figures, no code, are kept here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from benchmarks.aot_report import Result
from benchmarks.record import new_table

CHIP = "sm_90"


@dataclass(frozen=True, slots=True)
class Peer:
    """A public kernel and the case of ours that does the same. Accesses: widest load and store of a lane."""

    name: str
    ours: tuple[str, str]
    registers: int
    spill_bytes: int
    load_bytes: int
    store_bytes: int


PEERS = (
    Peer("vLLM reshape_and_cache_flash, 8 x 128", ("write", "kv 8x128 x 16"), 14, 0, 4, 4),
    Peer("vLLM reshape_and_cache_flash, one row of 576", ("write", "latent 576 x 64"), 14, 0, 4, 4),
    Peer("SGLang set_mla_kv_buffer, 512 + 64", ("write", "latent 512 + 64 x 64"), 20, 0, 16, 16),
    Peer("vLLM reshape_and_cache_flash, fp8 cache, 8 x 128", ("quant_write", "kv fp8 8x128 x 16"), 16, 0, 4, 4),
    Peer("SGLang fused_store_flashmla, V4 fp8", ("quant_write", "584 x 64"), 21, 0, 4, 2),
    Peer("vLLM decode grouped, MLA 576/512", ("mla_decode", "16 heads x 64"), 189, 0, 16, 4),
    Peer("SGLang decode grouped, MLA 576/512", ("mla_decode", "16 heads x 64"), 196, 0, 16, 16),
    Peer("vLLM decode grouped, GQA 32/8 of 128", ("gqa_decode", "32/8 heads of 128 x 16"), 76, 0, 16, 4),
    Peer("SGLang decode grouped, GQA 32/8 of 128", ("gqa_decode", "32/8 heads of 128 x 16"), 72, 4, 16, 16),
    Peer("vLLM decode stage 2, 128", ("merge", "64 parts of 128"), 25, 0, 4, 4),
)


def show_peers(console: Console, results: Sequence[Result]) -> None:
    """A line for each public kernel whose counterpart was compiled for sm_90; nothing without one."""
    ours = {
        (result.case.kernel, result.case.name): result for result in results if result.chip == CHIP and not result.error
    }
    rows = [(peer, ours[peer.ours].figures) for peer in PEERS if peer.ours in ours]
    if not rows:
        return
    title = f"beside public Triton kernels, {CHIP}: theirs / ours"
    table = new_table(title, ("theirs", "ours"), ("regs", "spill", "load B", "store B"))
    for peer, figures in rows:
        pairs = (
            (peer.registers, figures.registers),
            (peer.spill_bytes, figures.spill_bytes),
            (peer.load_bytes, max(figures.loads, default=0)),
            (peer.store_bytes, max(figures.stores, default=0)),
        )
        table.add_row(peer.name, " ".join(peer.ours), *(f"{theirs} / {mine}" for theirs, mine in pairs))
    console.print(table)
