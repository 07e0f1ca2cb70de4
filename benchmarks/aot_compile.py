"""Compiles a Launch for a chip that is not here, and reads from the result what a GPU would run."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kvstore_kernels.launch import Launch, Target

CHIPS = {
    "sm_80": Target("cuda", 80, 32),
    "sm_90": Target("cuda", 90, 32),
    "sm_100": Target("cuda", 100, 32),
    "gfx942": Target("hip", "gfx942", 64),
    "gfx950": Target("hip", "gfx950", 64),
}

SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536, "gfx950": 163_840}
"""Shared memory a thread block may use. The compiler does not check it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was compiled. `loads` and `stores`: bytes of one lane's access to global memory -> number in the program."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    matrix: str


class _StandInDriver:
    """Answers what Triton asks of a driver on the way to a compiled kernel. A target is its own device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        return self.target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


def compile_launch(launch: Launch, target: Target) -> Figures:
    """Compiles with the specialisation that the launch's own arguments would get on that chip."""
    compiled = _warm_up(launch, target)
    shared_bytes = int(compiled.metadata.shared)
    if target.backend == "cuda":
        return read_ptx(compiled.asm["ptx"], _resource_usage(compiled.asm["cubin"]), shared_bytes)
    return read_amdgcn(compiled.asm["amdgcn"], shared_bytes)


def count_variants(launches: list[Launch], target: Target) -> int:
    """How many kernels Triton would compile for these launches; nothing is compiled."""
    keys = set()

    def note_and_skip(*, key: Any, **_: Any) -> bool:
        keys.add(str(key))
        return True

    triton.knobs.runtime.jit_cache_hook = note_and_skip
    try:
        for launch in launches:
            _warm_up(launch, target)
    finally:
        triton.knobs.runtime.jit_cache_hook = None
    return len(keys)


def _warm_up(launch: Launch, target: Target) -> Any:
    triton.runtime.driver.set_active(_StandInDriver(GPUTarget(target.backend, target.arch, target.warp_size)))
    return launch.kernel.warmup(
        **launch.args,
        **launch.constexprs,
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_ptx(text: str, usage: str, shared_bytes: int) -> Figures:
    """Figures out of PTX and `cuobjdump -res-usage`; a stack frame counts as spilled, for these kernels have no arrays.

    What LLVM reserved of a frame and no instruction uses does not count.

    PTX, because ptxas keeps the widths it is given and disassembling takes longer than compiling.
    """
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources, f"cuobjdump printed no resource usage: {usage}"
    counts = {"ld": Counter[int](), "st": Counter[int]()}
    for access, modifiers in re.findall(r"\b(ld|st)\.global\.([\w.:]+)", text):
        counts[access][_ptx_width(modifiers)] += 1
    for width in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", text):
        counts["ld"][int(width, 0)] += 1
    products = re.findall(r"\b(mma|wgmma|tcgen05)\.(?=mma|sync)([\w.:]+)", text)
    matrix = Counter(" ".join([name, *re.findall(r"m\d+n\d+k\d+", modifiers)]) for name, modifiers in products)
    loads, stores = dict(counts["ld"]), dict(counts["st"])
    frame = re.findall(r"\.local [^;\n]*__local_depot0\[(\d+)\]", text)
    unused = int(frame[0]) if text.count("__local_depot") == 1 else 0
    spilled = int(resources[2]) - unused
    return Figures(int(resources[1]), spilled, shared_bytes, loads, stores, _most_common(matrix))


def _ptx_width(modifiers: str) -> int:
    """The bytes of one lane's access: "L1::evict_first.v4.b32" -> 16."""
    vector, bits = re.search(r"(?:v(\d)\.)?[bsuf](\d+)$", modifiers).groups()
    return int(vector or 1) * int(bits) // 8


AMD_WIDTHS = {
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}


def read_amdgcn(text: str, shared_bytes: int) -> Figures:
    """Figures out of AMD assembly.

    Loads through the scalar unit (s_load) are left out: they fetch arguments and indices, never rows. So are scalar
    registers spilled into lanes of vector registers, which costs no memory.
    """
    counts = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    loads, stores, matrix = Counter[int](), Counter[int](), Counter[str]()
    instruction = r"^\s+(?:(?:global|buffer|flat)_(load|store)_(?:lds_)?([a-wyz]+(?:x\d)?)|(v_s?mfmac?_\w+))"
    for access, width, product in re.findall(instruction, text, re.MULTILINE):
        if product:
            matrix[product] += 1
        else:
            (loads if access == "load" else stores)[AMD_WIDTHS[width]] += 1
    return Figures(
        counts["vgpr_count"],
        max(4 * counts["vgpr_spill_count"], counts["private_segment_fixed_size"]),
        shared_bytes,
        dict(loads),
        dict(stores),
        _most_common(matrix),
    )


def _most_common(counts: Counter[str]) -> str:
    return counts.most_common(1)[0][0] if counts else ""
