"""The bundled models as a table: what `kvstore plan --list` shows."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.models import FAMILIES, specs_from_config
from kvstore.models.bundled import CONFIGS, bundled_models
from kvstore.models.config import num_layers_of, read_config, text_fields
from kvstore.specs import KINDS, AnySpec


def show_models(console: Console) -> None:
    """Prints a line for each bundled model: its name, its model type, its layers, and how many caches of which kind."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("name", "model_type", "layers", "caches"):
        table.add_column(column, justify="right" if column == "layers" else "left")
    for name in bundled_models():
        fields = read_config(CONFIGS / f"{name}.json")
        layers = num_layers_of(text_fields(fields, FAMILIES))
        table.add_row(name, fields["model_type"], f"{layers}", caches_of(specs_from_config(fields)))
    console.print(table)
    console.print("Plan one: kvstore plan gemma-3-27b --memory 64GiB")


def caches_of(specs: Mapping[str, AnySpec]) -> str:
    """How many caches of which kind: "10 full, 52 sliding-window"; those not named "attn" by their own name."""
    counts: Counter[tuple[int, str]] = Counter()
    for layer, spec in specs.items():
        part = layer.rpartition(".")[2]
        words = spec.kind if part == "attn" else part
        counts[_order(spec), words.replace("_", "-")] += 1
    return ", ".join(f"{number} {words}" for (_, words), number in sorted(counts.items()))


def _order(spec: Any) -> int:
    return KINDS.index(spec.kind) if spec.kind in KINDS else len(KINDS)
