"""How plans are put into words: numbers with their nouns, ranges of layers and groups, row formats, columns of text."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from kvstore.groups import CacheGroup
from kvstore.specs import LayerSpec
from kvstore_kernels.formats import dtype_name


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 layer", "1,024 layers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def reach(group: CacheGroup) -> str:
    """Which rows the group keeps: "full", "window 1,024", "chunk 8,192", "ring, 1 block", "state, 1 block"."""
    kept = group.retention
    if kept.kind in ("ring", "state"):
        return f"{kept.kind}, {counted(kept.blocks or 1, 'block')}"
    number = kept.window or kept.chunk
    return kept.kind if number is None else f"{'window' if kept.window else 'chunk'} {number:,}"


def rows_of(specs: Iterable[LayerSpec]) -> str:
    """The row formats of some layers: "kv bfloat16", "state bfloat16 + float32", "latent bfloat16 /4": tokens a row."""
    names = (
        f"{spec.format.name} {_dtypes(spec)}" + (f" /{spec.tokens_per_row}" if spec.tokens_per_row > 1 else "")
        for spec in specs
    )
    return ", ".join(dict.fromkeys(names))


def _dtypes(spec: LayerSpec) -> str:
    """The dtypes of a row's values; those of scales are part of the format's name."""
    scales = {rule.scales for rule in spec.format.quantised}
    return " + ".join(dict.fromkeys(dtype_name(part.dtype) for part in spec.format.parts if part.name not in scales))


def layer_range(layers: Sequence[str]) -> str:
    """One or two names as they are, more as "first ... last (how many)", with the step between their numbers."""
    if len(layers) <= 2:
        return ", ".join(layers)
    return f"{layers[0]} ... {layers[-1]} ({len(layers)}{_step(layers)})"


def _step(names: Sequence[str]) -> str:
    """ ", every 6th" or ", with gaps" where the one number in which names differ does not simply count up."""
    numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in names]
    if len({re.sub(r"\d+", "", name) for name in names}) > 1:
        return ""
    moving = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if len(moving) != 1:
        return ""
    steps = {later - earlier for earlier, later in pairwise(moving[0])}
    if steps == {1}:
        return ""
    step = steps.pop() if len(steps) == 1 else 0
    return f", every {step}{ {2: 'nd', 3: 'rd'}.get(step, 'th') }" if step > 1 else ", with gaps"


def group_range(names: Sequence[str]) -> str:
    """Names of groups, at most six; those that differ in their last number only as "first ... last (how many)"."""
    runs = [layer_range(list(run)) for _, run in groupby(names, key=stem)]
    return ", ".join(runs if len(runs) <= 6 else [*runs[:5], f"{len(runs) - 5} more"])


def percent_over(value: int, base: int) -> str:
    """How far `value` lies above `base`: "+15.7 %"."""
    return f"{100 * (value - base) / base:+.1f} %" if base else "+0.0 %"


def aligned(grid: Sequence[Sequence[str]]) -> list[str]:
    """Rows of columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return [
        f"  {row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in grid
    ]


def stem(name: str) -> str:
    """The name of a group without the number that tells it from others like it."""
    return re.sub(r"\.\d+$", "", name)
