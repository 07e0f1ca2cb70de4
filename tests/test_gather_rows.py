"""gather_rows against a byte-level model, kernel and reference; O-numbers name faults other stores have had."""

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
    expected_rows,
    make_format,
    make_view,
    random_parts,
    sparse_memory,
    to_bytes,
)

from kvstore_kernels import PageView, gather_rows, kv_format, latent_format

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def gather(view, table, row_lens, backend, **options):
    """Calls gather_rows with a table and lengths given as lists."""
    cu_row_lens = torch.tensor([0, *np.cumsum(row_lens)], dtype=torch.int32)
    start = options.pop("start", None)
    return gather_rows(
        view,
        torch.tensor(table, dtype=torch.int32).reshape(len(row_lens), len(table[0]) if table else 0),
        cu_row_lens,
        num_rows=sum(row_lens),
        start=None if start is None else torch.tensor(start, dtype=torch.int32),
        backend=backend,
        **options,
    )


def gather_and_compare(view, table, row_lens, backend, start=None, wraps=False, **options):
    """Gathers, compares each part with the model's bytes and the memory with itself before, and returns the parts."""
    starts = start or [0] * len(row_lens)
    positions = [range(first, first + row_len) for first, row_len in zip(starts, row_lens, strict=True)]
    expected, before = expected_rows(view, table, positions, wraps), view.memory.clone()
    parts = gather(view, table, row_lens, backend, start=start, wraps=wraps, **options)
    for part, part_format, expected_part in zip(parts, view.format.parts, expected, strict=True):
        assert part.dtype == part_format.dtype
        assert part.shape == (sum(row_lens), part_format.num_heads, part_format.head_dim)
        np.testing.assert_array_equal(to_bytes(part), expected_part)
    assert torch.equal(view.memory, before)
    return parts


@pytest.mark.parametrize(("dtype", "rows_per_block"), DTYPES_AND_BLOCKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o32_every_format_dtype_head_size_and_block(name, dtype, head_dim, rows_per_block, backend):
    view = make_view(make_format(name, head_dim, dtype), rows_per_block, num_blocks=3)
    start = [0, 2 * rows_per_block - 1]
    gather_and_compare(view, [[1, 0, -1], [0, 1, 2]], [min(2, rows_per_block), 2], backend, start=start)


@pytest.mark.parametrize("rows_per_block", [1, 5, 16, 48])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_sequences_of_every_length(name, rows_per_block, backend):
    # 0, 1, R - 1, R, R + 1, 2R and empty ones at both ends; the table has its blocks in random order.
    view = make_view(make_format(name, 64, torch.bfloat16), rows_per_block, num_blocks=40)
    row_lens = [0, 1, rows_per_block - 1, 0, rows_per_block, rows_per_block + 1, 2 * rows_per_block, 2, 0]
    table = np.random.default_rng(0).permutation(40)[: 3 * len(row_lens)].reshape(-1, 3).tolist()
    gather_and_compare(view, table, row_lens, backend)


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 33])
def test_many_short_sequences(num_seqs, backend):
    view = make_view(make_format("latent", 64, torch.float16), rows_per_block=4, num_blocks=9)
    generator = np.random.default_rng(num_seqs)
    row_lens = generator.integers(0, 5, num_seqs).tolist()
    gather_and_compare(view, generator.integers(0, 9, (num_seqs, 2)).tolist(), row_lens, backend)


@pytest.mark.parametrize("rows_per_block", [1, 16, 64, 544])
def test_o41_block_size_does_not_change_the_rows(rows_per_block, backend):
    row_format = kv_format(2, 64, dtype=torch.bfloat16)
    view = make_view(row_format, rows_per_block, num_blocks=33 // rows_per_block + 2)
    k, v = random_parts(row_format, 33)
    table = list(range(view.num_blocks))[::-1]
    for position in range(33):
        block_id, row = table[position // rows_per_block], position % rows_per_block
        view.tensor("k")[block_id, row] = k[position]
        view.tensor("v")[block_id, row] = v[position]
    got_k, got_v = gather(view, [table], [33], backend)
    assert torch.equal(got_k.view(torch.int16), k.view(torch.int16))
    assert torch.equal(got_v.view(torch.int16), v.view(torch.int16))


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 127])
def test_start_inside_the_table(start, backend):
    view = make_view(make_format("kv", 72, torch.float32), rows_per_block=64, num_blocks=3)
    gather_and_compare(view, [[2, 1]], [128 - start], backend, start=[start])


@pytest.mark.parametrize(
    ("start", "row_len"), [(128, 65), (127, 3), (60, 100), (2**31 - 70, 65), (-3, 5), (-(2**31), 4)]
)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o42_rows_without_a_column_are_zero(name, start, row_len, backend):
    # Neighbours in the table are other sequences' block ids: reading column 2 of a two-column row would find block 0.
    view = make_view(make_format(name, 64, torch.bfloat16), rows_per_block=64, num_blocks=3)
    gather_and_compare(view, [[1, 2], [0, 0]], [row_len, 2], backend, start=[start, 5])


@pytest.mark.parametrize("block_id", [-1, -(2**31), 3, 2**31 - 1])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_of_a_block_that_does_not_exist_are_zero(name, block_id, backend):
    view = make_view(make_format(name, 64, torch.bfloat16), rows_per_block=4, num_blocks=3, fill=POISON)
    gather_and_compare(view, [[1, block_id, 2], [block_id] * 3], [12, 5], backend)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_columns_wrap_for_window_groups(width, backend):
    view = make_view(make_format("kv", 64, torch.bfloat16), rows_per_block=4, num_blocks=6)
    table = [[5, 3, 1][:width], [0, 2, 4][:width]]
    gather_and_compare(view, table, [4 * width, 3], backend, start=[18, 4 * width - 1], wraps=True)


def test_a_table_without_columns_has_no_rows(backend):
    view = make_view(make_format("latent", 64, torch.float32), fill=POISON)
    gather_and_compare(view, [[]], [3], backend)
    with pytest.raises(ValueError, match="block_table: expected at least one column when it wraps, got none"):
        gather(view, [[]], [3], backend, wraps=True)


def test_block_table_rows_may_be_apart(backend):
    view = make_view(make_format("kv_packed", 64, torch.bfloat16), rows_per_block=4, num_blocks=6)
    wide = torch.tensor([[1, 2, 99, 99], [3, 4, 99, 99]], dtype=torch.int32)
    expected = expected_rows(view, [[1, 2], [3, 4]], [range(8), range(7)])
    cu_row_lens = torch.tensor([0, 8, 15], dtype=torch.int32)
    parts = gather_rows(view, wide[:, :2], cu_row_lens, num_rows=15, backend=backend)
    for part, expected_part in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(to_bytes(part), expected_part)


@pytest.mark.parametrize("row_lens", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o33_no_rows(name, row_lens, backend):
    view = make_view(make_format(name, 64, torch.bfloat16))
    gather_and_compare(view, [[1, 2]] * len(row_lens), row_lens, backend)


@pytest.mark.parametrize("head_dim", [1, 3, 7, 65])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_that_are_no_multiple_of_16_bytes(name, dtype, head_dim, backend):
    row_format = latent_format(head_dim, 1, dtype) if name == "latent" else make_format(name, 2 * head_dim, dtype, 1)
    view = make_view(row_format, rows_per_block=5, num_blocks=3)
    gather_and_compare(view, [[2, 0], [1, 1]], [9, 3], backend)


@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("first", [0, 8, 5])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_out_with_any_row_stride_and_start(name, gap, first, backend):
    view = make_view(make_format(name, 64, torch.bfloat16), rows_per_block=4, num_blocks=5)
    buffers, outs = [], []
    for part in view.format.parts:
        stride = part.width + gap
        buffers.append(torch.full((first + 7 * stride,), -7.0, dtype=part.dtype))
        outs.append(buffers[-1].as_strided((7, part.num_heads, part.head_dim), (stride, part.head_dim, 1), first))
    parts = gather_and_compare(view, [[4, 1], [0, 2]], [5, 2], backend, out=tuple(outs))
    assert all(part is out for part, out in zip(parts, outs, strict=True))
    for buffer, out in zip(buffers, outs, strict=True):
        out.fill_(-7.0)
        assert (buffer == -7.0).all(), "elements between the rows of out changed"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_o39_offsets_beyond_32_bit(name, backend):
    # Block 1 lies behind 2^32 bytes and 2^31 elements, block 2 behind 2^31 units of 16 bytes.
    row_format = make_format(name, 64, torch.bfloat16)
    stride = 2**34 + 2**20
    view = PageView(sparse_memory(48 + 2 * stride + 2**20), 48, stride, 3, 16, row_format)
    near = make_view(row_format, 16, 3, offset_bytes=0, gap_bytes=0)
    for block_id in range(3):
        page = view.memory[48 + block_id * stride :][: view.page_bytes]
        page.copy_(near.memory[block_id * view.page_bytes :][: view.page_bytes])
    parts = gather(view, [[2, 1], [0, 2]], [32, 17], backend)
    for part, expected in zip(parts, expected_rows(near, [[2, 1], [0, 2]], [range(32), range(17)]), strict=True):
        np.testing.assert_array_equal(to_bytes(part), expected)


def test_o39_output_beyond_32_bit(backend):
    # Rows of the output 1 GiB apart, as in a caller's wide buffer: row 4 starts behind 2^32 bytes and 2^31 elements.
    view = make_view(latent_format(64, 32), rows_per_block=4, num_blocks=2)
    stride = 2**29 + 2**20
    buffer = sparse_memory(2 * (4 * stride + 64)).view(torch.bfloat16)
    out = buffer.as_strided((5, 1, 64), (stride, 64, 1))
    gather_and_compare(view, [[1, 0]], [5], backend, out=(out,))


def test_rows_further_than_two_gibielements_into_their_block(backend):
    row_format, rows = kv_format(1, 2048), 1_100_000
    view = PageView(sparse_memory(row_format.page_bytes(rows)), 0, row_format.page_bytes(rows), 1, rows, row_format)
    written = random_parts(row_format, 3)
    view.tensor("k")[0, -3:], view.tensor("v")[0, -3:] = written
    for part, expected in zip(gather(view, [[0]], [3], backend, start=[rows - 3]), written, strict=True):
        np.testing.assert_array_equal(to_bytes(part), to_bytes(expected))


TABLE = torch.tensor([[1, 2]], dtype=torch.int32)
CU = torch.tensor([0, 3], dtype=torch.int32)
OUT = (torch.zeros(3, 2, 64, dtype=torch.bfloat16), torch.zeros(3, 2, 32, dtype=torch.bfloat16))
GOOD = {"block_table": TABLE, "cu_row_lens": CU, "num_rows": 3}
BAD_CALLS = {
    "table int64": (
        {"block_table": TABLE.long()},
        ValueError,
        "block_table: expected dtype torch.int32, got torch.int64",
    ),
    "table 1-D": ({"block_table": TABLE[0]}, ValueError, r"block_table: expected shape \[any, any\], got \[2\]"),
    "table list": ({"block_table": [[1, 2]]}, TypeError, "block_table: expected a torch.Tensor, got list"),
    "table on meta": ({"block_table": TABLE.to("meta")}, ValueError, "block_table: expected a tensor on cpu"),
    "table strided": (
        {"block_table": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]},
        ValueError,
        r"block_table: expected elements one behind the other, got strides \(4, 2\)",
    ),
    "lens short": ({"cu_row_lens": CU[:1]}, ValueError, r"cu_row_lens: expected shape \[2\], got \[1\]"),
    "lens int64": ({"cu_row_lens": CU.long()}, ValueError, "cu_row_lens: expected dtype torch.int32, got torch.int64"),
    "lens on meta": ({"cu_row_lens": CU.to("meta")}, ValueError, "cu_row_lens: expected a tensor on cpu"),
    "lens from 1": (
        {"cu_row_lens": torch.tensor([1, 3], dtype=torch.int32)},
        ValueError,
        r"cu_row_lens: expected 0 and a running sum of lengths, got \[1, 3\]",
    ),
    "lens fall": (
        {"block_table": TABLE.expand(2, 2), "cu_row_lens": torch.tensor([0, 4, 3], dtype=torch.int32)},
        ValueError,
        r"cu_row_lens: expected 0 and a running sum of lengths, got \[0, 4, 3\]",
    ),
    "rows differ": ({"num_rows": 4}, ValueError, r"num_rows: expected cu_row_lens\[-1\], which is 3, got 4"),
    "rows negative": ({"num_rows": -1}, ValueError, "num_rows: expected an integer >= 0, got -1"),
    "rows float": ({"num_rows": 3.0}, TypeError, "num_rows: expected an integer, got 3.0 of type float"),
    "start long": ({"start": CU}, ValueError, r"start: expected shape \[1\], got \[2\]"),
    "start int64": ({"start": CU[:1].long()}, ValueError, "start: expected dtype torch.int32, got torch.int64"),
    "start on meta": ({"start": CU[:1].to("meta")}, ValueError, "start: expected a tensor on cpu, got one on meta"),
    "out tensor": ({"out": OUT[0]}, TypeError, "out: expected a tuple of tensors, got Tensor"),
    "out short": ({"out": OUT[:1]}, ValueError, "out: expected one tensor for each of k, v, got 1"),
    "out rows": ({"out": (OUT[0][:2], OUT[1])}, ValueError, r"out of k: expected shape \[3, 2, 64\], got \[2, 2, 64\]"),
    "out dtype": ({"out": (OUT[0], OUT[1].half())}, ValueError, "out of v: expected dtype torch.bfloat16"),
    "out on meta": ({"out": (OUT[0].to("meta"), OUT[1])}, ValueError, "out of k: expected a tensor on cpu"),
    "out negated": ({"out": (OUT[0], torch._neg_view(OUT[1]))}, ValueError, "out of v: expected a plain tensor, got"),
    "out rows overlap": (
        {"out": (OUT[0][:1].expand(3, -1, -1), OUT[1])},
        ValueError,
        "out of k: expected rows at least 128 elements apart, got 0",
    ),
    "out heads apart": (
        {"out": (torch.zeros(3, 4, 64, dtype=torch.bfloat16)[:, ::2], OUT[1])},
        ValueError,
        "out of k: expected the elements of a row one behind the other",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments(case, backend):
    changes, error, message = BAD_CALLS[case]
    view = make_view(make_format("kv", 64, torch.bfloat16))
    with pytest.raises(error, match=message):
        gather_rows(view, **{**GOOD, **changes}, backend=backend)
    assert not any(part.any() for part in OUT)


def test_bad_view(backend):
    with pytest.raises(TypeError, match="view: expected a PageView, got Tensor"):
        gather_rows(TABLE, TABLE, CU, num_rows=3, backend=backend)
