"""compute_slot_mapping against a plain model, kernel and reference."""

import pytest
import torch
from cases import BACKENDS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_kernels import PageView, latent_format, write_rows
from kvstore_kernels.block_ops import compute_slot_mapping
from kvstore_kernels.slots import TILE_TOKENS

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


def expected_slot(table, position, seq_idx, block_size, tokens_per_row, rows_per_block, wraps):
    """The slot of one token, in Python's unbounded integers."""
    if position < 0 or not 0 <= seq_idx < len(table) or (position + 1) % tokens_per_row:
        return -1
    columns = table[seq_idx]
    column = position // block_size
    if wraps:
        column %= len(columns)
    if column >= len(columns) or columns[column] <= 0:
        return -1
    return columns[column] * rows_per_block + position % block_size // tokens_per_row


def int_tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


@st.composite
def calls(draw):
    """A table of ids of every kind, and tokens on both sides of every bound."""
    tokens_per_row = draw(st.sampled_from([1, 1, 2, 3, 4]))
    block_size = tokens_per_row * draw(st.sampled_from([1, 3, 16, 48, 196]))
    rows_per_block = draw(st.none() | st.integers(block_size // tokens_per_row, 2**20))
    num_seqs, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    block_ids = st.integers(1, 30) | st.sampled_from([0, -1, -(2**31), INT32_MAX])
    columns = st.lists(block_ids, min_size=width, max_size=width)
    table = draw(st.lists(columns, min_size=num_seqs, max_size=num_seqs))
    dtype, largest = draw(st.sampled_from([(torch.int64, INT64_MAX), (torch.int32, INT32_MAX)]))
    end = width * block_size
    bounds = st.sampled_from([-largest - 1, -1, 0, end - 1, end, largest - 1, largest])
    token = st.tuples(st.integers(0, 2 * end) | bounds, st.integers(-1, num_seqs))
    tokens = draw(st.lists(token, max_size=20))
    return table, tokens, dtype, block_size, tokens_per_row, rows_per_block, draw(st.booleans())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(call=calls())
def test_against_a_plain_model(call, backend):
    table, tokens, dtype, block_size, tokens_per_row, rows_per_block, wraps = call
    positions, seq_idx = int_tensor([p for p, _ in tokens], dtype), int_tensor([s for _, s in tokens])
    numbers = (block_size, tokens_per_row, rows_per_block, wraps)
    slots = compute_slot_mapping(int_tensor(table), positions, seq_idx, *numbers, backend=backend)
    rows = rows_per_block or block_size // tokens_per_row
    assert slots.dtype == torch.int64
    assert slots.tolist() == [expected_slot(table, *token, block_size, tokens_per_row, rows, wraps) for token in tokens]


def test_more_tokens_than_a_tile_and_nothing_behind_them(backend):
    num_tokens = 2 * TILE_TOKENS + 3
    table = torch.randperm(60, generator=torch.manual_seed(0)).int().view(3, 20)
    positions = torch.arange(num_tokens) % 330
    seq_idx = (torch.arange(num_tokens) % 3).int()
    buffer = torch.full((num_tokens + 8,), -77)
    out = buffer[4:-4]
    assert compute_slot_mapping(table, positions, seq_idx, 16, out=out, backend=backend) is out
    tokens = zip(positions.tolist(), seq_idx.tolist(), strict=True)
    assert out.tolist() == [expected_slot(table.tolist(), *token, 16, 1, 16, False) for token in tokens]
    assert [*buffer[:4].tolist(), *buffer[-4:].tolist()] == [-77] * 8


def test_rows_of_the_table_may_lie_apart(backend):
    wide = torch.arange(1, 41, dtype=torch.int32).view(4, 10)
    table = wide[::2, 3:5]
    slots = compute_slot_mapping(table, int_tensor([0, 3, 4, 5]), int_tensor([0, 1, 0, 1]), 2, backend=backend)
    assert slots.tolist() == [4 * 2, 25 * 2 + 1, -1, -1]


def test_a_window_wraps_and_a_narrow_table_does_not(backend):
    table, positions, seq_idx = int_tensor([[5, 6]]), int_tensor([0, 7, 8, 15, 16]), int_tensor([0] * 5)
    narrow = compute_slot_mapping(table, positions, seq_idx, 4, backend=backend)
    assert narrow.tolist() == [20, 27, -1, -1, -1]
    window = compute_slot_mapping(table, positions, seq_idx, 4, wraps=True, backend=backend)
    assert window.tolist() == [20, 27, 20, 27, 20]


def test_the_last_token_of_a_row_writes_it(backend):
    table, positions = int_tensor([[3, 9]]), torch.arange(16)
    slots = compute_slot_mapping(table, positions, int_tensor([0] * 16), 8, 4, backend=backend)
    assert slots.tolist() == [-1, -1, -1, 6, -1, -1, -1, 7, -1, -1, -1, 18, -1, -1, -1, 19]


def test_the_null_block_has_no_slots(backend):
    table, positions, seq_idx = int_tensor([[0, 1, -1]]), int_tensor([1, 2, 4]), int_tensor([0, 0, 0])
    assert compute_slot_mapping(table, positions, seq_idx, 2, backend=backend).tolist() == [-1, 2, -1]


def test_slots_beyond_32_bit(backend):
    slots = compute_slot_mapping(
        int_tensor([[INT32_MAX]]), int_tensor([783]), int_tensor([0]), 784, rows_per_block=1000, backend=backend
    )
    assert slots.tolist() == [INT32_MAX * 1000 + 783]


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (3, 4)], ids=str)
def test_no_tokens(shape, wraps, backend):
    none = int_tensor([])
    table = torch.ones(shape, dtype=torch.int32)
    assert compute_slot_mapping(table, none, none, 16, wraps=wraps, backend=backend).shape == (0,)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)], ids=str)
def test_a_table_without_entries_names_no_block(shape, backend):
    table = torch.ones(shape, dtype=torch.int32)
    assert compute_slot_mapping(table, int_tensor([0, 9]), int_tensor([0, 1]), 16, backend=backend).tolist() == [-1, -1]


def test_its_slots_are_what_a_write_takes(backend):
    view = PageView(torch.zeros(6 * 64, dtype=torch.uint8), 0, 64, 6, 4, latent_format(4, 4, torch.float32))
    rows = torch.arange(1.0, 6.0)[:, None].expand(5, 4).contiguous()
    positions, seq_idx = int_tensor([0, 5, 7, 8, 1]), int_tensor([0, 0, 1, 0, 2])
    slots = compute_slot_mapping(int_tensor([[5, 2], [1, 3], [0, 0]]), positions, seq_idx, 4, backend=backend)
    write_rows(view, slots, rows, backend="reference")
    written = view.tensor("latent")[:, :, 0, 0]
    assert written.nonzero().tolist() == [[2, 1], [3, 3], [5, 0]]
    assert written[written > 0].tolist() == [2, 3, 1]


TABLE, POSITIONS, SEQ_IDX = torch.ones(2, 4, dtype=torch.int32), torch.arange(3), torch.zeros(3, dtype=torch.int32)
BAD_CALLS = {
    "table list": ({"block_table": [[1]]}, TypeError, "block_table: expected a torch.Tensor, got list"),
    "table 1-D": ({"block_table": TABLE[0]}, ValueError, r"block_table: expected shape \[any, any\], got \[4\]"),
    "table int64": (
        {"block_table": TABLE.long()},
        ValueError,
        "block_table: expected dtype torch.int32, got torch.int64",
    ),
    "table strided": (
        {"block_table": TABLE[:, ::2]},
        ValueError,
        "block_table: expected elements one behind the other",
    ),
    "table empty": (
        {"block_table": TABLE[:, :0], "wraps": True},
        ValueError,
        "block_table: expected at least one column when it wraps, got none",
    ),
    "positions 2-D": ({"positions": POSITIONS[None]}, ValueError, r"positions: expected shape \[any\], got \[1, 3\]"),
    "positions float": (
        {"positions": POSITIONS.float()},
        ValueError,
        "positions: expected dtype torch.int64 or torch.int32, got torch.float32",
    ),
    "positions strided": (
        {"positions": torch.arange(6)[::2]},
        ValueError,
        "positions: expected elements one behind the other",
    ),
    "positions on meta": (
        {"positions": POSITIONS.to("meta")},
        ValueError,
        "positions: expected a tensor on cpu, got one on meta",
    ),
    "seq_idx short": ({"seq_idx": SEQ_IDX[:2]}, ValueError, r"seq_idx: expected shape \[3\], got \[2\]"),
    "seq_idx int64": ({"seq_idx": SEQ_IDX.long()}, ValueError, "seq_idx: expected dtype torch.int32, got torch.int64"),
    "block_size 0": ({"block_size": 0}, ValueError, "block_size: expected an integer >= 1, got 0"),
    "block_size float": ({"block_size": 16.0}, TypeError, "block_size: expected an integer, got 16.0 of type float"),
    "tokens_per_row 0": ({"tokens_per_row": 0}, ValueError, "tokens_per_row: expected an integer >= 1, got 0"),
    "tokens_per_row 3": (
        {"tokens_per_row": 3},
        ValueError,
        "tokens_per_row: expected a divisor of the block size 16, got 3",
    ),
    "rows_per_block 7": (
        {"tokens_per_row": 2, "rows_per_block": 7},
        ValueError,
        "rows_per_block: expected an integer >= 8, got 7",
    ),
    "out list": ({"out": [0]}, TypeError, "out: expected a torch.Tensor, got list"),
    "out short": ({"out": torch.zeros(2).long()}, ValueError, r"out: expected shape \[3\], got \[2\]"),
    "out int32": ({"out": SEQ_IDX}, ValueError, "out: expected dtype torch.int64, got torch.int32"),
    "out strided": ({"out": torch.zeros(6).long()[::2]}, ValueError, "out: expected elements one behind the other"),
    "backend": ({"backend": "numpy"}, ValueError, "backend: expected one of triton, reference or None, got 'numpy'"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments(case, backend):
    changed, error, message = BAD_CALLS[case]
    call = {"block_table": TABLE, "positions": POSITIONS, "seq_idx": SEQ_IDX, "block_size": 16, "backend": backend}
    out = torch.full((3,), -77)
    with pytest.raises(error, match=message):
        compute_slot_mapping(**{**call, "out": out, **changed})
    assert out.tolist() == [-77] * 3
