"""A look at every index on its device, for debugging: what kernels skip or read as zeros becomes an error.

Each look is one synchronisation. Outside `index_checks` nothing looks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from kvstore_kernels.pages import PageView

_looks: ContextVar[bool] = ContextVar("looks", default=False)


@contextmanager
def index_checks(enabled: bool = True) -> Iterator[None]:
    """Within, every op looks at its indices first, on their device, and raises ValueError for the first bad one.

    Slots, block ids, positions and table entries are held to what exists (-1 still skips), lengths to the table, and
    no row or block may be written twice in one call. Block 0 exists: that it is nobody's is a rule of
    `compute_slot_mapping` alone. Holds for this thread or task. Ops inside a compiled graph do not look, and the switch
    itself is turned outside of one.
    """
    token = _looks.set(enabled)
    try:
        yield
    finally:
        _looks.reset(token)


def looks_at_indices() -> bool:
    """Whether this call is made within `index_checks`."""
    return _looks.get()


def check_ids(name: str, ids: torch.Tensor, limit: int, *, what: str, written: bool = False) -> None:
    """Raises: ValueError for an id that is neither -1 nor in [0, limit); with `written` for one that a row repeats."""
    if not _are_numbers(ids):
        return
    ids = ids.detach().long()
    _refuse(name, (ids < -1) | (ids >= limit), ids, f"-1 or a {what} in [0, {limit})")
    if written and ids.numel():
        ordered, places = ids.sort(dim=-1, stable=True)
        again = torch.zeros_like(ids, dtype=torch.bool)
        again.scatter_(-1, places[..., 1:], (ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0))
        _refuse(name, again, ids, f"every {what} at most once")


def check_copy(src: torch.Tensor, dst: torch.Tensor, num_blocks: int) -> None:
    """Raises: ValueError for ids as `check_ids`, for a destination that occurs twice, and for one that is a source."""
    if not _are_numbers(src, dst) or src.shape != dst.shape:
        return
    check_ids("src", src, num_blocks, what="block")
    check_ids("dst", dst, num_blocks, what="block")
    counts = (src >= 0) & (dst >= 0)  # a skipped copy is none
    check_ids("dst", torch.where(counts, dst, -1), num_blocks, what="block", written=True)
    _refuse("dst", counts & torch.isin(dst, src[counts]), dst, "no block that is a source")


def check_rows(
    view: PageView, block_table: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, wraps: bool, name: str
) -> None:
    """Raises: ValueError unless rows `begins` ... `ends` - 1 of every sequence lie in blocks that the table names.

    Args:
        begins, ends: [num_seqs]; nothing is asked of a sequence whose end is not behind its begin.
        wraps: whether block i is in column i % width.
        name: the argument that the ends come from.
    """
    if not _are_numbers(block_table, begins, ends) or block_table.ndim != 2 or begins.ndim != 1 or ends.ndim != 1:
        return
    if not len(block_table) == len(begins) == len(ends):
        return
    begins, ends = begins.detach().long(), ends.detach().long()
    width, rows_per_block = block_table.shape[1], view.rows_per_block
    _refuse(name, (begins < 0) & (ends > begins), begins, "rows from 0 on")
    first, last = begins // rows_per_block, (ends - 1).clamp(min=-1) // rows_per_block
    if not wraps:
        limit = f"at most {width * rows_per_block} rows, for which the table has columns"
        _refuse(name, (ends > begins) & (last >= width), ends, limit)
    columns = torch.arange(width, device=block_table.device)
    used = (columns - first[:, None]) % max(width, 1) < (last - first + 1)[:, None]
    used &= (ends > begins)[:, None]
    bad = used & ((block_table < 0) | (block_table >= view.num_blocks))
    _refuse("block_table", bad, block_table, f"a block in [0, {view.num_blocks}) where rows are read")


def check_read(
    view: PageView, block_table: torch.Tensor, row_lens: torch.Tensor, q: torch.Tensor, window: int | None = None
) -> None:
    """Raises: ValueError unless every row that a query sees lies in a block that the table names."""
    if not _are_numbers(row_lens) or not isinstance(q, torch.Tensor) or q.ndim not in (3, 4):
        return
    if row_lens.shape != q.shape[: row_lens.ndim] or row_lens.ndim > q.ndim - 2 or 0 in row_lens.shape:
        return
    check_lens("row_lens", row_lens)
    lens = row_lens.detach().long()
    if row_lens.ndim == 1:  # those of the last query, each query before it sees one row less
        lens = lens[:, None] - torch.arange(q.shape[1] if q.ndim == 4 else 1, device=lens.device).flip(0)
    ends, begins = lens.amax(1), torch.zeros_like(row_lens if row_lens.ndim == 1 else row_lens[:, 0])
    if window is not None:
        begins = torch.where(lens > 0, (lens - window).clamp(min=0), ends[:, None]).amin(1)
    check_rows(view, block_table, begins, ends, window is not None, "row_lens")


def check_lens(name: str, lens: torch.Tensor) -> None:
    """Raises: ValueError for a negative length."""
    if not _are_numbers(lens):
        return
    _refuse(name, lens.detach() < 0, lens, "lengths from 0 on")


def _are_numbers(*tensors: object) -> bool:
    """Whether there is something to look at; what else is wrong with an argument, its op says better."""
    return all(
        isinstance(tensor, torch.Tensor)
        and tensor.ndim > 0
        and not tensor.is_meta
        and tensor.dtype in (torch.int32, torch.int64)
        for tensor in tensors
    )


def _refuse(name: str, bad: torch.Tensor, values: torch.Tensor, expected: str) -> None:
    if not bad.numel():
        return
    place = int(torch.where(bad.reshape(-1).any(), bad.reshape(-1).int().argmax(), -1))  # waits for the device
    if place >= 0:
        index = [int(axis) for axis in torch.unravel_index(torch.tensor(place), bad.shape)]
        where = index[0] if len(index) == 1 else index
        raise ValueError(f"{name}: expected {expected}, got {int(values.reshape(-1)[place])} at {where}")
