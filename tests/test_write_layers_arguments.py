"""What write_layers refuses, kernel and reference: nothing is written then."""

import numpy as np
import pytest
import torch
from cases import BACKENDS, make_view
from test_write_layers import BF16, FP8, NUM_BLOCKS, SLOTS, memories, separate

from kvstore_kernels import PageView, bytes_format, fp8_ds_mla_format, kv_format, write_layers

with_backends = pytest.mark.parametrize("backend", BACKENDS)
KV = kv_format(2, 64, 32)
K, V = torch.zeros(3, 5, 2, 64, dtype=BF16), torch.zeros(3, 5, 2, 32, dtype=BF16)
PAIR = kv_format(2, 64, 32, FP8)
MLA, ROW = fp8_ds_mla_format(), torch.zeros(3, 5, 576)
OTHER_ROWS = make_view(KV, 4, NUM_BLOCKS)
BAD_CALLS = {
    "slots of two layers": (
        (KV, SLOTS[:2], K, V),
        ValueError,
        r"slot_mapping: expected shape \[3, any\], got \[2, 5\]",
    ),
    "slots 3-D": ((KV, SLOTS[None], K, V), ValueError, r"slot_mapping: expected shape \[3, any\], got \[1, 3, 5\]"),
    "slots list": ((KV, [0, 1], K, V), TypeError, "slot_mapping: expected a torch.Tensor, got list"),
    "slots int32": ((KV, SLOTS.int(), K, V), ValueError, "slot_mapping: expected dtype torch.int64, got torch.int32"),
    "slots on meta": (
        (KV, SLOTS.to("meta"), K, V),
        ValueError,
        "slot_mapping: expected a tensor on cpu, got one on meta",
    ),
    "slots apart": ((KV, SLOTS.repeat(1, 2)[:, ::2], K, V), ValueError, "slot_mapping: expected elements one behind"),
    "k of two layers": (
        (KV, SLOTS, K[:2], V),
        ValueError,
        r"parts\[0\]: expected shape \[3, any, any, any\], got \[2, 5",
    ),
    "v of two, flat": (
        (KV, SLOTS, K, V.flatten(2)[:2]),
        ValueError,
        r"parts\[1\]: expected shape \[3, any, any\], got \[2, 5, 64\]",
    ),
    "k of no layers": (
        (KV, SLOTS, K[0, 0], V),
        ValueError,
        r"parts\[0\]: expected shape \[3, any, any, any\], got \[2, 64\]",
    ),
    "k is numpy": ((KV, SLOTS, K.float().numpy(), V), TypeError, r"parts\[0\]: expected a torch.Tensor, got ndarray"),
    "no v": ((KV, SLOTS, K), ValueError, "parts: expected one tensor for each of k, v, got 1"),
    "short k": ((KV, SLOTS, K[:, :4], V), ValueError, "slot_mapping: expected at most 4 slots, .* rows in k, got 5"),
    "short v": ((KV, SLOTS[0], K, V[:, :3]), ValueError, "slot_mapping: expected at most 3 slots, .* rows in v, got 5"),
    "v wide": ((KV, SLOTS, K, K), ValueError, r"v: expected shape \[any, 2, 32\], got \[5, 2, 64\]"),
    "k fp16": ((KV, SLOTS, K.half(), V), ValueError, "k: expected dtype torch.bfloat16, got torch.float16"),
    "v on meta": ((KV, SLOTS, K, V.to("meta")), ValueError, "v: expected a tensor on cpu, got one on meta"),
    "k transposed": ((KV, SLOTS, K.mT.contiguous().mT, V), ValueError, "k: expected the elements of a row one behind"),
    "scales of plain": (
        (KV, SLOTS, K, V),
        ValueError,
        "row_scales: rows of format 'kv' have none, got 1.0",
        {"row_scales": 1.0},
    ),
    "short row": ((MLA, SLOTS, ROW[:, :3]), ValueError, r"expected at most 3 slots, .* rows in nope \+ rope, got 5"),
    "row of two layers": (
        (MLA, SLOTS, ROW[:2]),
        ValueError,
        r"parts\[0\]: expected shape \[3, any, any\], got \[2, 5, 576\]",
    ),
    "fp64": ((MLA, SLOTS, ROW.double()), ValueError, "expected dtype torch.bfloat16 or .*, got torch.float64"),
    "scales inside": ((MLA, SLOTS, ROW), ValueError, "row_scales: expected None, for rows of", {"row_scales": 1.0}),
    "scales of two layers": (
        (PAIR, SLOTS, K, V),
        ValueError,
        r"row_scales of v: expected a tensor of one element or of \[3\], got shape \[2\]",
        {"row_scales": (1.0, torch.ones(2))},
    ),
    "scales apart": (
        (PAIR, SLOTS, K, V),
        ValueError,
        "row_scales of k: expected elements one behind the other",
        {"row_scales": (torch.ones(6)[::2], 1.0)},
    ),
    "scales fp16": (
        (PAIR, SLOTS, K, V),
        ValueError,
        "row_scales of k: expected dtype torch.float32, got torch.float16",
        {"row_scales": (torch.ones(3).half(), 1.0)},
    ),
    "one scale of two": (
        (PAIR, SLOTS, K, V),
        ValueError,
        "row_scales: expected one scale for each of k, v, got 1",
        {"row_scales": torch.ones(3)},
    ),
    "bytes": ((bytes_format(16), SLOTS, ROW), ValueError, "view: expected a format of one or two dense parts"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@with_backends
def test_bad_arguments_change_nothing(case, backend):
    (row_format, *arguments), error, message, *options = BAD_CALLS[case]
    views = separate(row_format)
    before = memories(views)
    with pytest.raises(error, match=message):
        write_layers(views, *arguments, backend=backend, **(options[0] if options else {}))
    for got, want in zip(memories(views), before, strict=True):
        np.testing.assert_array_equal(got, want)


FIRST = separate(KV)[0]
BAD_VIEWS = {
    "none": ([], ValueError, "views: expected 1 to 65535 PageViews, got 0"),
    "one view": (FIRST, TypeError, "views: expected a list or tuple of PageViews, or a LayerTable, got PageView"),
    "another block": ([FIRST, OTHER_ROWS], ValueError, "views: expected 3 rows per block in every layer, got 4 in 1"),
    "another dtype": (
        [FIRST, FIRST, make_view(kv_format(2, 64, 32, torch.float16), 3)],
        ValueError,
        r"views: expected RowFormat\(name='kv', .*bfloat16.* in every layer, got RowFormat\(.*float16.* in 2",
    ),
    "another kind": ([FIRST, make_view(MLA, 3)], ValueError, "in every layer, got RowFormat.name='fp8_ds_mla'.* in 1"),
    "more blocks": ([FIRST, make_view(KV, 3, 5)], ValueError, "views: expected 4 blocks in every layer, got 5 in 1"),
}


@pytest.mark.parametrize("case", BAD_VIEWS)
@with_backends
def test_bad_views_change_nothing(case, backend):
    views, error, message = BAD_VIEWS[case]
    listed = views if isinstance(views, list) else [views]
    before = memories(listed)
    count = max(1, len(listed))
    with pytest.raises(error, match=message):
        write_layers(views, SLOTS[0], K[:1].expand(count, -1, -1, -1), V[:1].expand(count, -1, -1, -1), backend=backend)
    for got, want in zip(memories(listed), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_backend():
    views = separate(KV, fill=1)
    write_layers(views, SLOTS, K, V)  # the reference, on a CPU
    assert all(0 in view.memory for view in views)
    with pytest.raises(ValueError, match="backend: expected one of triton, reference or None, got 'numpy'"):
        write_layers(views, SLOTS, K, V, backend="numpy")
    on_meta = [PageView(view.memory.to("meta"), 0, view.block_stride_bytes, 4, 3, KV) for view in views]
    with pytest.raises(ValueError, match="layers on cpu under Triton's interpreter, got them on meta"):
        write_layers(on_meta, SLOTS.to("meta"), K.to("meta"), V.to("meta"), backend="triton")
