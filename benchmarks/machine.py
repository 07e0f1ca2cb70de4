"""What figures belong to: device, driver, versions, threads."""

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch
import triton

MIB = 2**20
DEFAULT_CACHE_BYTES = 64 * MIB
"""Of a device that does not say how large its last cache is."""


def facts(device: torch.device | None = None) -> dict[str, str | int]:
    """The machine by name, in the order of the header. `device`: where figures are taken (default: a GPU if any)."""
    device = device or best_device()
    named: dict[str, str | int] = {"cpu": cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        named = {"device": torch.cuda.get_device_name(device), **gpu_facts(device), **named}
    return {
        **named,
        "last_cache": f"{cache_bytes(device) // MIB} MiB",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def best_device() -> torch.device:
    """The GPU that torch would take, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def cpu_name() -> str:
    """The processor as Linux names it, and how many of it there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def gpu_facts(device: torch.device) -> dict[str, str]:
    """Architecture, driver and runtime of a GPU."""
    known = torch.cuda.get_device_properties(device)
    is_hip = torch.version.hip is not None
    return {
        "arch": known.gcnArchName if is_hip else f"sm_{known.major}{known.minor}",
        "driver": driver_version(),
        "hip" if is_hip else "cuda": str(torch.version.hip or torch.version.cuda),
    }


def driver_version() -> str:
    """The version of the GPU's driver, "unknown" where no tool says it."""
    for command in (
        ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        ("cat", "/sys/module/amdgpu/version"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        if lines := done.stdout.split():
            return lines[0]
    return "unknown"


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last cache before memory."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or DEFAULT_CACHE_BYTES
    sizes = [_cache_size(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or DEFAULT_CACHE_BYTES


def _cache_size(path: Path) -> int:
    """ "32K" as 32768; 0 for what is no such text."""
    try:
        text = path.read_text(encoding="ascii").strip()
        return int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return 0
