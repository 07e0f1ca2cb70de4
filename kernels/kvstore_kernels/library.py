"""The ops in torch's registry, so that `torch.compile(fullgraph=True)` traces through a step of an engine.

Each is a function that fills tensors it is given. A PageView is no tensor: an op takes its memory, which it may
change, and its handle, by which the numbers beside it are found again. `Library.define`, `impl` and `register_fake`
cost a tenth of what `custom_op` costs per call.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvstore_kernels import gather, gqa, merge, mla, quant_write, reference, sparse, write
from kvstore_kernels.pages import PageView, view_of_handle

NAMESPACE = "kvstore_kernels"

_READ = "Tensor memory, Tensor block_table, Tensor row_lens, Tensor q, float softmax_scale"
_OUT = "Tensor? sinks, Tensor(a!) out, Tensor(b!) lse, int? num_splits, int view, str backend"

SCHEMAS = {
    "write_rows": "(Tensor(a!) memory, Tensor slot_mapping, Tensor[] parts, Tensor[] row_scales, "
    "int view, str backend) -> ()",
    "gather_rows": "(Tensor memory, Tensor block_table, Tensor cu_row_lens, Tensor? start, SymInt num_rows, "
    "bool wraps, Tensor(a!)[] out, int view, str backend) -> ()",
    "gqa_decode": f"({_READ}, int? window, float? soft_cap, {_OUT}) -> ()",
    "mla_decode": f"({_READ}, {_OUT}) -> ()",
    "sparse_mla_decode": "(Tensor memory, Tensor slots, Tensor q, float softmax_scale, Tensor? second_memory, "
    f"Tensor? second_slots, {_OUT}, int second_view) -> ()",
    "merge_partials": "(Tensor partial_out, Tensor partial_lse, Tensor? sinks, Tensor(a!) out, Tensor(b!) lse, "
    "str backend) -> ()",
}
"""Op name -> schema."""


def _view(memory: torch.Tensor, handle: int) -> PageView:
    """The view of that handle, over `memory`: a compiler may have copied it."""
    view = view_of_handle(handle)
    return view if memory.data_ptr() == view.memory.data_ptr() else replace(view, memory=memory)


def _module(backend: str, module: Any) -> Any:
    return reference if backend == "reference" else module


def _write_rows(
    memory: torch.Tensor,
    slot_mapping: torch.Tensor,
    parts: list[torch.Tensor],
    row_scales: list[torch.Tensor],
    view: int,
    backend: str,
) -> None:
    pages = _view(memory, view)
    if pages.format.quantised:
        writer = _module(backend, quant_write)
        writer.write_quantised(pages, slot_mapping, *parts, row_scales=tuple(row_scales) or None)
    else:
        _module(backend, write).write_rows(pages, slot_mapping, *parts)


def _gather_rows(
    memory: torch.Tensor,
    block_table: torch.Tensor,
    cu_row_lens: torch.Tensor,
    start: torch.Tensor | None,
    num_rows: int,
    wraps: bool,
    out: list[torch.Tensor],
    view: int,
    backend: str,
) -> None:
    _module(backend, gather).gather_rows(
        _view(memory, view), block_table, cu_row_lens, num_rows=num_rows, start=start, wraps=wraps, out=tuple(out)
    )


def _gqa_decode(
    memory: torch.Tensor,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    softmax_scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_splits: int | None,
    view: int,
    backend: str,
) -> None:
    _module(backend, gqa).gqa_decode(
        _view(memory, view),
        block_table,
        row_lens,
        q,
        softmax_scale=softmax_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        out=out,
        lse=lse,
        num_splits=num_splits,
    )


def _mla_decode(
    memory: torch.Tensor,
    block_table: torch.Tensor,
    row_lens: torch.Tensor,
    q: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_splits: int | None,
    view: int,
    backend: str,
) -> None:
    _module(backend, mla).mla_decode(
        _view(memory, view),
        block_table,
        row_lens,
        q,
        softmax_scale=softmax_scale,
        sinks=sinks,
        out=out,
        lse=lse,
        num_splits=num_splits,
    )


def _sparse_mla_decode(
    memory: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    softmax_scale: float,
    second_memory: torch.Tensor | None,
    second_slots: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_splits: int | None,
    view: int,
    backend: str,
    second_view: int,
) -> None:
    second = None
    if second_memory is not None and second_slots is not None:
        second = (_view(second_memory, second_view), second_slots)
    _module(backend, sparse).sparse_mla_decode(
        _view(memory, view),
        slots,
        q,
        softmax_scale=softmax_scale,
        second=second,
        sinks=sinks,
        out=out,
        lse=lse,
        num_splits=num_splits,
    )


def _merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    backend: str,
) -> None:
    _module(backend, merge).merge_partials(partial_out, partial_lse, out, lse, sinks=sinks)


def _fills_what_it_is_given(*args: Any, **kwargs: Any) -> None:
    """What the compiler needs to know of every op: it returns nothing, and makes no tensor."""


_IMPLEMENTATIONS: dict[str, Callable[..., None]] = {
    "write_rows": _write_rows,
    "gather_rows": _gather_rows,
    "gqa_decode": _gqa_decode,
    "mla_decode": _mla_decode,
    "sparse_mla_decode": _sparse_mla_decode,
    "merge_partials": _merge_partials,
}

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _IMPLEMENTATIONS[_name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fills_what_it_is_given, lib=_library)
