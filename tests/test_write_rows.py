"""write_rows against a byte-level model, kernel and reference; O-numbers name faults other stores have had."""

import numpy as np
import pytest
import torch
from cases import (
    BACKENDS,
    DTYPES_AND_BLOCKS,
    FORMAT_NAMES,
    HEAD_DIMS,
    POISON,
    ROW_DTYPES,
    expected_memory,
    make_format,
    make_view,
    random_parts,
    sparse_memory,
)

from kvstore_kernels import PageView, kv_format, latent_format, write_rows

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

MANY_ROWS = {"triton": 4, "reference": 300}
"""The reference moves wider words from 64 KiB on; the kernel does the same for every row."""


def write_and_compare(view, slots, parts, backend, sources=None):
    """Writes `sources` (None: `parts`) and compares every byte of the memory with the model's."""
    expected = expected_memory(view, slots, parts)
    write_rows(view, torch.tensor(slots, dtype=torch.int64), *(sources or parts), backend=backend)
    np.testing.assert_array_equal(view.memory.numpy(), expected)


@pytest.mark.parametrize(("dtype", "rows_per_block"), DTYPES_AND_BLOCKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o32_every_format_dtype_head_size_and_block(name, dtype, head_dim, rows_per_block, backend):
    view = make_view(make_format(name, head_dim, dtype), rows_per_block, num_blocks=3)
    last = view.num_slots - 1
    slots = [last, -1, rows_per_block, last + 1]
    write_and_compare(view, slots, random_parts(view.format, len(slots)), backend)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_enough_for_wide_words(name, backend):
    view = make_view(make_format(name, 192, torch.bfloat16), rows_per_block=48, num_blocks=4)
    slots = np.random.default_rng(3).permutation(view.num_slots)[:130].tolist()
    slots[5], slots[77], slots[129] = -1, view.num_slots, -(2**40)
    write_and_compare(view, slots, random_parts(view.format, len(slots)), backend)


@pytest.mark.parametrize("fill", [0, POISON, 0xA5])
def test_canaries_around_pages(fill, backend):
    view = make_view(make_format("kv", 64, torch.bfloat16), rows_per_block=1, num_blocks=6, fill=fill, gap_bytes=16)
    write_and_compare(view, [5, 0, 3], random_parts(view.format, 3), backend)


@pytest.mark.parametrize("slot", [-1, -2, -(2**63), 8, 9, 2**31, 2**62])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o26_a_slot_outside_is_skipped_and_never_wraps(name, slot, backend):
    view = make_view(make_format(name, 64, torch.float32), rows_per_block=4, num_blocks=2)
    write_and_compare(view, [0, 1, slot], random_parts(view.format, 3), backend)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_all_slots_skipped(name, backend):
    view = make_view(make_format(name, 64, torch.float16))
    write_and_compare(view, [-1, -1], random_parts(view.format, 2), backend)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o27_rows_behind_the_last_slot_are_ignored(name, backend):
    view = make_view(make_format(name, 64, torch.bfloat16))
    write_and_compare(view, [9, 2, 40, 41, 63], random_parts(view.format, 8), backend)


def test_o27_more_slots_than_rows_is_an_error(backend):
    view = make_view(make_format("kv", 64, torch.bfloat16))
    k, v = random_parts(view.format, 3)
    before = view.memory.clone()
    with pytest.raises(ValueError, match=r"slot_mapping: expected at most 3 slots, the number of rows in k, got 4"):
        write_rows(view, torch.arange(4), k, v, backend=backend)
    with pytest.raises(ValueError, match=r"slot_mapping: expected at most 2 slots, the number of rows in v, got 3"):
        write_rows(view, torch.arange(3), k, v[:2], backend=backend)
    assert torch.equal(view.memory, before)


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o33_no_slots_write_nothing(name, num_rows, backend):
    view = make_view(make_format(name, 64, torch.bfloat16))
    write_and_compare(view, [], random_parts(view.format, num_rows), backend)


def test_o28_strides_come_from_the_view(backend):
    # K and V interleaved in blocks of one row: V of block 0 lies where a dense K would have block 1.
    key = latent_format(4, 4, torch.float32)
    memory = torch.zeros(2 * 32, dtype=torch.uint8)
    view = PageView(memory, 0, 32, 2, 1, key)
    write_rows(view, torch.tensor([1]), torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), backend=backend)
    assert memory.view(torch.float32).tolist() == [0.0] * 8 + [1.0, 2.0, 3.0, 4.0] + [0.0] * 4


@pytest.mark.parametrize(("offset_bytes", "gap_bytes"), [(0, 0), (16, 0), (0, 16), (4096, 1008)])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_any_offset_and_stride(name, offset_bytes, gap_bytes, backend):
    row_format = make_format(name, 80, torch.bfloat16)
    view = make_view(row_format, 48, 3, offset_bytes=offset_bytes, gap_bytes=gap_bytes)
    write_and_compare(view, [143, 48, 47, 96], random_parts(row_format, 4), backend)


@pytest.mark.parametrize("head_dim", [1, 3, 7, 65])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_that_are_no_multiple_of_16_bytes(name, dtype, head_dim, backend):
    row_format = latent_format(head_dim, 1, dtype) if name == "latent" else make_format(name, 2 * head_dim, dtype, 1)
    view = make_view(row_format, rows_per_block=5, num_blocks=3)
    write_and_compare(view, [14, 0, 6, 5], random_parts(row_format, 4), backend)


@pytest.mark.parametrize("row_stride", [0, 64 * 2, 64 * 2 + 8, 64 * 2 + 1], ids=lambda stride: f"stride{stride}")
@pytest.mark.parametrize("first", [0, 8, 3], ids=lambda first: f"first{first}")
def test_sources_with_any_row_stride_and_start(row_stride, first, backend):
    # Rows out of a fused projection: one tensor of q, k and v; also rows that all lie on one (stride 0).
    num_rows = MANY_ROWS[backend]
    row_format = kv_format(2, 64, dtype=torch.bfloat16)
    view = make_view(row_format, rows_per_block=16, num_blocks=20)
    fused = random_parts(latent_format(first + 512 * num_rows, 1), 1)[0].flatten()
    k = fused.as_strided((num_rows, 2, 64), (row_stride, 64, 1), first)
    v = fused.as_strided((num_rows, 2, 64), (row_stride, 64, 1), first + 128)
    slots = np.random.default_rng(0).permutation(view.num_slots)[:num_rows].tolist()
    write_and_compare(view, slots, (k, v), backend)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_flat_sources(name, backend):
    view = make_view(make_format(name, 72, torch.float16))
    parts = random_parts(view.format, 3)
    write_and_compare(view, [0, 63, 17], parts, backend, sources=[part.flatten(1) for part in parts])


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize(("latent_dim", "value_dim"), [(576, 512), (96, 64), (65, 64), (7, 3), (2, 1)])
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_latent_row_from_two_tensors(dtype, latent_dim, value_dim, many, backend):
    num_rows = MANY_ROWS[backend] if many else 2
    view = make_view(latent_format(latent_dim, value_dim, dtype), rows_per_block=64, num_blocks=6)
    (latent,) = random_parts(view.format, num_rows)
    nope, rope = latent[..., :value_dim].contiguous(), latent[:, 0, value_dim:]
    slots = [383, *range(60, 60 + num_rows - 1)]
    write_and_compare(view, slots, (latent,), backend, sources=(nope, rope))
    write_and_compare(view, slots[::-1], (latent,), backend, sources=(nope.flatten(1), rope[:, None]))


def test_latent_row_without_rope_columns_is_one_tensor(backend):
    view = make_view(latent_format(64, 64))
    (latent,) = random_parts(view.format, 2)
    write_and_compare(view, [3, 5], (latent,), backend)
    with pytest.raises(ValueError, match=r"parts: expected one tensor for each of latent, got 2"):
        write_rows(view, torch.tensor([1]), latent, latent, backend=backend)


def test_strides_of_axes_of_one_element_do_not_matter(backend):
    view = make_view(latent_format(1, 1, torch.float32))
    (latent,) = random_parts(view.format, 3)
    source = latent.expand(3, 1, 2).contiguous().as_strided((3, 1, 1), (2, 7, 5))
    write_and_compare(view, [3, 5, 4], (latent,), backend, sources=(source,))
    write_and_compare(view, [5, 3, 0], (latent,), backend, sources=(source[:, 0],))


def test_equal_rows_may_share_a_slot(backend):
    view = make_view(make_format("kv_packed", 64, torch.bfloat16))
    k, v = (part[:1].expand(2, -1, -1) for part in random_parts(view.format, 1))
    write_and_compare(view, [7, 7], (k, v), backend)


def test_sources_that_require_grad_leave_the_memory_plain(backend):
    view = make_view(make_format("kv", 64, torch.bfloat16))
    sources = [torch.randn(2, part.num_heads, part.head_dim).bfloat16() for part in view.format.parts]
    write_and_compare(view, [1, 0], sources, backend, sources=[source.clone().requires_grad_() for source in sources])
    assert not view.tensor("k").requires_grad


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_lazily_negated_sources(many, backend):
    num_rows = MANY_ROWS[backend] if many else 2
    view = make_view(make_format("kv", 64, torch.bfloat16), num_blocks=20)
    sources = [torch.randn(num_rows, part.num_heads, part.head_dim).bfloat16() for part in view.format.parts]
    negated = [torch._neg_view(source) for source in sources]
    write_and_compare(view, range(num_rows), [-source for source in sources], backend, sources=negated)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o25_offsets_beyond_32_bit(name, backend):
    # Block 1 lies behind 2^32 bytes and 2^31 elements, block 2 behind 2^31 units of 16 bytes.
    row_format = make_format(name, 64, torch.bfloat16)
    stride, page_bytes = 2**34 + 2**20, row_format.page_bytes(16)
    view = PageView(sparse_memory(48 + 2 * stride + page_bytes), 48, stride, 3, 16, row_format)
    near = make_view(row_format, 16, 3, fill=0, offset_bytes=0, gap_bytes=0)
    slots, parts = [2 * 16 + 15, 16, 32, 0, 48, -1], random_parts(row_format, 6)
    write_rows(view, torch.tensor(slots), *parts, backend=backend)
    expected = expected_memory(near, slots, parts)
    for block_id in range(3):
        page = view.memory[48 + block_id * stride :][:page_bytes]
        np.testing.assert_array_equal(page.numpy(), expected[block_id * page_bytes :][:page_bytes])


def test_o25_sources_beyond_32_bit(backend):
    # Rows of a wide activation: row 4 of the source starts behind 2^32 bytes and 2^31 elements.
    view = make_view(latent_format(64, 64))
    (latent,) = random_parts(view.format, 5)
    stride = 2**29 + 2**20
    buffer = sparse_memory(2 * (4 * stride + 64)).view(torch.bfloat16)
    source = buffer.as_strided((5, 1, 64), (stride, 64, 1)).copy_(latent)
    write_and_compare(view, [3, 50, 0, 7, 21], (latent,), backend, sources=(source,))


K = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
V = torch.zeros(2, 2, 32, dtype=torch.bfloat16)
SLOTS = torch.tensor([0, 1])
BAD_CALLS = {
    "slots float": ((SLOTS.float(), K, V), ValueError, "slot_mapping: expected dtype torch.int64, got torch.float32"),
    "slots int32": ((SLOTS.int(), K, V), ValueError, "slot_mapping: expected dtype torch.int64, got torch.int32"),
    "slots 2-D": ((SLOTS[None], K, V), ValueError, r"slot_mapping: expected shape \[any\], got \[1, 2\]"),
    "slots list": (([0, 1], K, V), TypeError, "slot_mapping: expected a torch.Tensor, got list"),
    "slots on meta": ((SLOTS.to("meta"), K, V), ValueError, "slot_mapping: expected a tensor on cpu, got one on meta"),
    "slots strided": ((torch.arange(4)[::2], K, V), ValueError, "slot_mapping: expected elements one behind the other"),
    "no v": ((SLOTS, K), ValueError, "parts: expected one tensor for each of k, v, got 1"),
    "three parts": ((SLOTS, K, V, V), ValueError, "parts: expected one tensor for each of k, v, got 3"),
    "k is numpy": ((SLOTS, K.float().numpy(), V), TypeError, "k: expected a torch.Tensor, got ndarray"),
    "k transposed": ((SLOTS, K.mT, V), ValueError, r"k: expected shape \[any, 2, 64\], got \[2, 64, 2\]"),
    "v wide": ((SLOTS, K, K), ValueError, r"v: expected shape \[any, 2, 32\], got \[2, 2, 64\]"),
    "v flat wide": ((SLOTS, K, K.flatten(1)), ValueError, r"v: expected shape \[any, 2, 32\], got \[2, 128\]"),
    "k fp16": ((SLOTS, K.half(), V), ValueError, "k: expected dtype torch.bfloat16, got torch.float16"),
    "v on meta": ((SLOTS, K, V.to("meta")), ValueError, "v: expected a tensor on cpu, got one on meta"),
    "k heads apart": (
        (SLOTS, torch.zeros(2, 3, 64, dtype=torch.bfloat16)[:, ::2], V),
        ValueError,
        r"k: expected the elements of a row one behind the other, got strides \(192, 128, 1\)",
    ),
    "v dims apart": (
        (SLOTS, K, torch.zeros(2, 2, 64, dtype=torch.bfloat16)[..., ::2]),
        ValueError,
        r"v: expected the elements of a row one behind the other, got strides \(128, 64, 2\)",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments(case, backend):
    arguments, error, message = BAD_CALLS[case]
    view = make_view(make_format("kv", 64, torch.bfloat16))
    before = view.memory.clone()
    with pytest.raises(error, match=message):
        write_rows(view, *arguments, backend=backend)
    assert torch.equal(view.memory, before)


def test_bad_view_and_format(backend):
    with pytest.raises(TypeError, match="view: expected a PageView, got Tensor"):
        write_rows(torch.zeros(4), SLOTS, K, V, backend=backend)
