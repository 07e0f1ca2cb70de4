"""The ops in torch's registry, so that `torch.compile(fullgraph=True)` traces through a step of an engine.

Each is a function that fills tensors it is given. A PageView is no tensor: an op takes its memory, which it may
change, and its handle, by which the numbers beside it are found again; the layers of a group come as their memories
and the handle of their table. Handles are symbolic, so that one graph serves every view. `Library.define`, `impl` and
`register_fake` cost a tenth of what `custom_op` costs a call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from kvstore_kernels import (
    copy,
    fill,
    gather,
    gqa,
    indexer,
    merge,
    mla,
    pack,
    quant_gather,
    quant_write,
    reference,
    slots,
    sparse,
    write,
)
from kvstore_kernels.copy import LayerTable, table_of_handle
from kvstore_kernels.pages import PageView, view_of_handle
from kvstore_kernels.reference import blocks as reference_blocks
from kvstore_kernels.reference import indexer as reference_indexer
from kvstore_kernels.reference import layers as reference_layers
from kvstore_kernels.reference import slots as reference_slots

NAMESPACE = "kvstore_kernels"

_VIEW = "Tensor memory, SymInt view"
_LAYERS = "Tensor(a!)[] memories, SymInt layers"
_TABLE = "Tensor block_table, Tensor row_lens, Tensor q"
_ROWS = "Tensor slot_mapping, Tensor[] parts, Tensor[] row_scales, str backend"
_OUT = (
    "Tensor? sinks, Tensor[] row_scales, Tensor(b!) out, Tensor(c!) lse, int? num_splits, Tensor(d!)? workspace, "
    "str backend"
)

SCHEMAS: Mapping[str, str] = MappingProxyType(
    {
        "write_rows": f"Tensor(a!) memory, SymInt view, {_ROWS}",
        "write_layers": f"{_LAYERS}, {_ROWS}",
        "gather_rows": f"{_VIEW}, Tensor block_table, Tensor cu_row_lens, SymInt num_rows, Tensor? start, bool wraps, "
        "ScalarType? dtype, Tensor[] row_scales, Tensor(b!)[] out, str backend",
        "read_rows": f"{_VIEW}, Tensor slots, ScalarType dtype, Tensor[] row_scales, Tensor(b!)[] out, str backend",
        "gqa_decode": f"{_VIEW}, {_TABLE}, float softmax_scale, int? window, float? soft_cap, {_OUT}",
        "mla_decode": f"{_VIEW}, {_TABLE}, float softmax_scale, {_OUT}",
        "sparse_mla_decode": f"{_VIEW}, Tensor slots, Tensor q, float softmax_scale, Tensor? second_memory, "
        f"SymInt second_view, Tensor? second_slots, {_OUT}",
        "indexer_scores": f"{_VIEW}, {_TABLE}, Tensor weights, Tensor(b!) out, str backend",
        "merge_partials": "Tensor partial_out, Tensor partial_lse, Tensor? sinks, Tensor(a!) out, Tensor(b!) lse, "
        "str backend",
        "copy_blocks": f"{_LAYERS}, Tensor src, Tensor dst, str backend",
        "fill_blocks": f"{_LAYERS}, Tensor block_ids, int value, str backend",
        "pack_blocks": "Tensor[] memories, SymInt layers, Tensor block_ids, Tensor(b!) out, str backend",
        "unpack_blocks": f"{_LAYERS}, Tensor block_ids, Tensor packed, str backend",
        "compute_slot_mapping": "Tensor block_table, Tensor positions, Tensor seq_idx, int block_size, "
        "int tokens_per_row, int? rows_per_block, bool wraps, Tensor(a!) out, str backend",
    }
)
"""Op name -> its arguments; none returns anything."""


def view_args(view: PageView) -> tuple[torch.Tensor, int]:
    """A view as the ops take it."""
    return view.memory, view.handle


def layer_args(table: LayerTable) -> tuple[list[torch.Tensor], int]:
    """The layers of a group as the ops take them: every memory once, though layers may share one."""
    return list({id(view.memory): view.memory for view in table.views}.values()), table.handle


def _view(memory: torch.Tensor, handle: int) -> PageView:
    """The view of that handle, over `memory`: a compiler may have copied it."""
    view = view_of_handle(handle)
    return view if memory.data_ptr() == view.memory.data_ptr() else replace(view, memory=memory)


def _layers(memories: Sequence[torch.Tensor], handle: int) -> LayerTable:
    """The table of that handle, over `memories`."""
    table = table_of_handle(handle)
    known, _ = layer_args(table)
    if all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(memories, known, strict=True)):
        return table
    given = {id(mine): theirs for mine, theirs in zip(known, memories, strict=True)}
    return LayerTable(tuple(replace(view, memory=given[id(view.memory)]) for view in table.views))


def _write_rows(view: PageView, slot_mapping: Any, parts: Any, row_scales: Any, backend: str) -> None:
    if not view.format.quantised:
        (reference if backend == "reference" else write).write_rows(view, slot_mapping, *parts)
        return
    module = reference if backend == "reference" else quant_write
    module.write_quantised(view, slot_mapping, *parts, row_scales=tuple(row_scales) or None)


def _write_layers(table: LayerTable, slot_mapping: Any, parts: Any, row_scales: Any, backend: str) -> None:
    quantised = bool(table.views[0].format.quantised)
    module: Any = reference_layers if backend == "reference" else quant_write if quantised else write
    scales = {"row_scales": tuple(row_scales)} if row_scales else {}
    module.write_layers(table, slot_mapping, *parts, **scales)


def _gather_rows(
    view: PageView,
    block_table: Any,
    cu_row_lens: Any,
    num_rows: int,
    start: Any,
    wraps: bool,
    dtype: Any,
    row_scales: Any,
    out: Any,
    backend: str,
) -> None:
    read: dict[str, Any] = {"num_rows": num_rows, "start": start, "wraps": wraps, "out": tuple(out)}
    if not view.format.quantised:
        (reference if backend == "reference" else gather).gather_rows(view, block_table, cu_row_lens, **read)
        return
    module = reference if backend == "reference" else quant_gather
    scales = tuple(row_scales) or None
    module.gather_dequantised(view, block_table, cu_row_lens, dtype=dtype, row_scales=scales, **read)


def _read_rows(view: PageView, slots: Any, dtype: torch.dtype, row_scales: Any, out: Any, backend: str) -> None:
    module = reference if backend == "reference" else quant_gather
    module.read_rows(view, slots, dtype=dtype, row_scales=tuple(row_scales) or None, out=tuple(out))


def _sparse_mla_decode(
    view: PageView, slots: Any, q: Any, softmax_scale: float, memory: Any, handle: int, second_slots: Any, *rest: Any
) -> None:
    second = None if memory is None else (_view(memory, handle), second_slots)
    sinks, row_scales, out, lse, num_splits, workspace, backend = rest
    (reference if backend == "reference" else sparse).sparse_mla_decode(
        view,
        slots,
        q,
        softmax_scale=softmax_scale,
        second=second,
        sinks=sinks,
        row_scales=tuple(row_scales) or None,
        out=out,
        lse=lse,
        num_splits=num_splits,
        workspace=workspace,
    )


def _by_name(name: str, triton_module: Any, reference_module: Any = reference) -> Callable[..., None]:
    """A function that hands the arguments of a schema, but for what its view is made of, on by their names."""
    names = [argument.split()[-1] for argument in SCHEMAS[name].split(", ")]
    names = names[2:] if names[0] in ("memory", "memories") else names
    launchers = {"triton": getattr(triton_module, name), "reference": getattr(reference_module, name)}

    def run(*args: Any) -> None:
        kwargs = dict(zip(reversed(names), reversed(args), strict=False))
        if "row_scales" in kwargs:
            kwargs["row_scales"] = tuple(kwargs["row_scales"]) or None
        launchers[kwargs.pop("backend")](*args[: len(args) - len(names)], **kwargs)

    return run


_IMPLEMENTATIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "write_rows": _write_rows,
        "write_layers": _write_layers,
        "gather_rows": _gather_rows,
        "read_rows": _read_rows,
        "gqa_decode": _by_name("gqa_decode", gqa),
        "mla_decode": _by_name("mla_decode", mla),
        "sparse_mla_decode": _sparse_mla_decode,
        "indexer_scores": _by_name("indexer_scores", indexer, reference_indexer),
        "merge_partials": _by_name("merge_partials", merge),
        "copy_blocks": _by_name("copy_blocks", copy, reference_blocks),
        "fill_blocks": _by_name("fill_blocks", fill, reference_blocks),
        "pack_blocks": _by_name("pack_blocks", pack, reference_blocks),
        "unpack_blocks": _by_name("unpack_blocks", pack, reference_blocks),
        "compute_slot_mapping": _by_name("compute_slot_mapping", slots, reference_slots),
    }
)


def _implementation(name: str) -> Callable[..., None]:
    """What torch calls with the arguments of the schema, in their order: the first two make the view or the layers."""
    first, run = SCHEMAS[name].split(", ")[0].split()[-1], _IMPLEMENTATIONS[name]
    rebuild: Any = {"memory": _view, "memories": _layers}.get(first)
    if rebuild is None:
        return run
    return lambda memory, handle, *rest: run(rebuild(memory, handle), *rest)


def _fills_what_it_is_given(*args: Any, **kwargs: Any) -> None:
    """What the compiler needs to know of every op: it returns nothing, and makes no tensor."""


_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _arguments in SCHEMAS.items():
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, _implementation(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fills_what_it_is_given, lib=_library)
