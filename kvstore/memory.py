"""Memory budgets: bytes, or a number with its unit."""

import re
from fractions import Fraction

from kvstore.errors import PlanError

UNITS = {"B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("i", "")
}
_AMOUNT = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([A-Za-z]+)")

MAX_BYTES = 2**60
"""Beyond any machine: a budget above it is a mistake."""


def parse_memory(memory: int | str) -> int:
    """Bytes of a budget: an int is bytes, text is a number and a unit ("80GiB", "1.5 GB"). Fractions are cut off.

    Raises: PlanError for a number below 0 or above an EiB, a number that is no int, and text without a known unit.
    """
    if isinstance(memory, int) and not isinstance(memory, bool):
        return _checked(memory, memory)
    if not isinstance(memory, str):
        raise PlanError(
            f"memory: expected bytes as int or text such as '80GiB', got {memory!r} of type {type(memory).__name__}"
        )
    amount = _AMOUNT.fullmatch(memory.strip())
    if amount is None or amount[2] not in UNITS:
        raise PlanError(f"memory: expected a number and one of the units {', '.join(UNITS)}, got {memory!r}")
    return _checked(int(Fraction(amount[1]) * UNITS[amount[2]]), memory)


def _checked(num_bytes: int, given: int | str) -> int:
    if not 0 <= num_bytes <= MAX_BYTES:
        raise PlanError(f"memory: expected a number of bytes in [0, 2**60], got {given!r}")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """All digits and, from 1 KiB on, the largest binary unit: "1,048,576 B (1.00 MiB)"."""
    exact = f"{num_bytes:,} B"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{exact} ({num_bytes / 1024**power:.2f} {unit})"
    return exact
