"""`kvstore bench`: the benchmarks of a checkout. They are not part of the installed package."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BAD_USAGE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m benchmarks` of a checkout in the current directory. Returns its exit status; 2 without one."""
    checkout = find_checkout()
    if checkout is None:
        print(
            "kvstore bench: benchmarks come with the checkout and the sdist, not with the wheel: "
            f"expected one around the package or in the current directory, got none in {Path.cwd()}",
            file=sys.stderr,
        )
        return BAD_USAGE
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # -P: a folder `benchmarks` of the user's own is not taken for that of the checkout.
    command = [sys.executable, "-P", "-m", "benchmarks", *arguments]
    # A group of its own: Ctrl-C of a terminal comes here alone, and goes on to it once.
    with subprocess.Popen(command, env=environment, process_group=0) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            status = _wait(child)
        finally:
            signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Its exit status. At Ctrl-C it prints what it has measured, and ends."""
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        child.wait()
        return INTERRUPTED


def find_checkout() -> Path | None:
    """The folder that holds the package and its benchmarks, or the current directory if it does; else None."""
    for folder in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (folder / "benchmarks" / "__main__.py").is_file() and (folder / "kernels" / "kvstore_kernels").is_dir():
            return folder
    return None
