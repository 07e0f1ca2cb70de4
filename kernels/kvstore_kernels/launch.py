"""What a launcher hands to Triton, as a value: run it here, or compile it ahead of time for another chip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from kvstore_kernels.checks import next_power_of_2

BACKENDS = ("triton", "reference")
"""The names that every op takes as `backend`: Triton kernels, or the same in torch."""

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run under Triton's interpreter: TRITON_INTERPRET=1 when this module was imported."""


@dataclass(frozen=True, slots=True)
class Target:
    """A chip to compile for, with Triton's names: ("cuda", 90, 32) or ("hip", "gfx942", 64)."""

    backend: str
    arch: int | str
    warp_size: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: run-time arguments by name (None: absent), and compile-time ones."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, torch.Tensor | int | float | None]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1

    def run(self) -> None:
        """Launches on the current stream of the tensors' device; an empty grid launches nothing."""
        if 0 in self.grid:
            return
        device = next(arg.device for arg in self.args.values() if isinstance(arg, torch.Tensor))
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[self.grid](**self.args, **self.constexprs, num_warps=self.num_warps, num_stages=self.num_stages)


def is_interpreted(kernel: Any) -> bool:
    """Whether this kernel was decorated under TRITON_INTERPRET=1."""
    return isinstance(kernel, InterpretedFunction)


def current_target(kernel: Any) -> Target:
    """The chip a launch of this kernel would run on; the interpreter counts as sm_90."""
    if is_interpreted(kernel):
        return Target("cuda", 90, 32)
    target = triton.runtime.driver.active.get_current_target()
    return Target(target.backend, target.arch, target.warp_size)


def resolve_backend(backend: str | None, device: torch.device) -> str:
    """The backend to use: Triton on a GPU and the reference elsewhere, unless the caller names one.

    Raises: ValueError for an unknown name, or for "triton" on tensors that Triton cannot reach.
    """
    if backend is None:
        return "triton" if device.type == "cuda" else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if backend == "triton" and device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"backend: expected 'reference' for tensors on {device}, got 'triton': "
            "Triton needs a GPU, or TRITON_INTERPRET=1 set before kvstore_kernels is imported"
        )
    return backend


def lanes_of_16_bytes(num_bytes: int, target: Target, max_warps: int = 16) -> int:
    """The number of warps with which a tile of `num_bytes` gives each lane 16 bytes: a power of two."""
    lanes = next_power_of_2(num_bytes) // 16
    return max(1, min(max_warps, lanes // target.warp_size))
