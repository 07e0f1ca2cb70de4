"""write_layers in torch: a write into one layer after the other."""

from collections.abc import Sequence

import torch

from kvstore_kernels.copy import Layers, layer_table
from kvstore_kernels.layers import first_layer
from kvstore_kernels.quant_rules import RowScale, row_scale_of
from kvstore_kernels.reference.moves import write_rows
from kvstore_kernels.reference.quant_write import write_quantised


def write_layers(
    views: Layers,
    slot_mapping: torch.Tensor,
    *parts: torch.Tensor,
    row_scales: RowScale | Sequence[RowScale] | None = None,
) -> None:
    """Same as `kvstore_kernels.write_layers`."""
    table = layer_table(views)
    # Layers are alike, so whatever the first one's write accepts, the others' does too.
    first_layer(table, slot_mapping, parts)
    row_format, num_layers = table.views[0].format, len(table.views)
    scales = row_scale_of(row_format, row_scales, table.device, num_layers)
    for layer_idx, view in enumerate(table.views):
        slots = slot_mapping if slot_mapping.ndim == 1 else slot_mapping[layer_idx]
        rows = [part[layer_idx] for part in parts]
        if row_format.quantised:
            write_quantised(view, slots, *rows, row_scales=_of_layer(scales, layer_idx, num_layers))
        else:
            write_rows(view, slots, *rows)


def _of_layer(scales: dict[str, RowScale], layer_idx: int, num_layers: int) -> tuple[RowScale, ...] | None:
    """The scales of one layer in the order of the parts; None for rows that hold theirs."""
    return (
        tuple(
            scale[layer_idx] if isinstance(scale, torch.Tensor) and scale.shape == (num_layers,) else scale
            for scale in scales.values()
        )
        or None
    )
