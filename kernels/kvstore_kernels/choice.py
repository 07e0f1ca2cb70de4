"""What the public ops share: which module serves a call, and the ops as torch's compiler knows them."""

from collections.abc import Sequence
from typing import Any

import torch

from kvstore_kernels import library, reference
from kvstore_kernels.launch import resolve_backend
from kvstore_kernels.pages import PageView
from kvstore_kernels.quant_rules import RowScale

OPS = getattr(torch.ops, library.NAMESPACE)
"""Called while a graph is traced; called directly, they would only cost a dispatch more."""


def expect_view(view: object) -> None:
    """Raises: TypeError when `view` is no PageView."""
    if not isinstance(view, PageView):
        raise TypeError(f"view: expected a PageView, got {type(view).__name__}")


def module_for(backend: str | None, view: PageView, triton_module: Any) -> Any:
    """The module that serves a call on this view."""
    expect_view(view)
    return reference if resolve_backend(backend, view.device) == "reference" else triton_module


def scale_tensors(row_scales: RowScale | Sequence[RowScale] | None, memory: torch.Tensor) -> list[torch.Tensor]:
    """Scales as tensors of one element, as the registered ops take them; none for None.

    Raises: TypeError for one that is neither a number nor a tensor.
    """
    given: list[Any] = list(row_scales) if isinstance(row_scales, tuple | list) else [row_scales]
    if row_scales is None:
        return []
    for scale in given:
        if isinstance(scale, bool) or not isinstance(scale, torch.Tensor | float | int):
            raise TypeError(f"row_scales: expected numbers or fp32 tensors, got {type(scale).__name__}")
    return [
        scale if isinstance(scale, torch.Tensor) else memory.new_full((1,), scale, dtype=torch.float32)
        for scale in given
    ]
