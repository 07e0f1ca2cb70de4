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

    Slots, block ids and table entries are held to what exists (-1 still skips), lengths to the table, and no row or
    block may be written twice in one call. Holds for this thread or task. Ops inside a compiled graph do not look.
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
    ids = ids.detach().long()
    _refuse(name, (ids < -1) | (ids >= limit), ids, f"-1 or a {what} in [0, {limit})")
    if written and ids.numel():
        ordered, places = ids.sort(dim=-1, stable=True)
        again = torch.zeros_like(ids, dtype=torch.bool)
        again.scatter_(-1, places[..., 1:], (ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0))
        _refuse(name, again, ids, f"every {what} at most once")


def check_rows(
    view: PageView, block_table: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor, wraps: bool, name: str
) -> None:
    """Raises: ValueError unless rows `begins` ... `ends` - 1 of every sequence lie in blocks that the table names.

    Args:
        begins, ends: [num_seqs]; nothing is asked of a sequence whose end is not behind its begin.
        wraps: whether block i is in column i % width.
        name: the argument that the ends come from.
    """
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


def check_read(view: PageView, block_table: torch.Tensor, row_lens: torch.Tensor, window: int | None) -> None:
    """Raises: ValueError unless every row that a query sees lies in a block that the table names."""
    check_lens("row_lens", row_lens)
    ends = row_lens if row_lens.ndim == 1 else row_lens.amax(1)
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    check_rows(view, block_table, begins, ends, window is not None, "row_lens")


def check_lens(name: str, lens: torch.Tensor) -> None:
    """Raises: ValueError for a negative length."""
    _refuse(name, lens.detach() < 0, lens, "lengths from 0 on")


def _refuse(name: str, bad: torch.Tensor, values: torch.Tensor, expected: str) -> None:
    if not bad.numel():
        return
    place = int(torch.where(bad.reshape(-1).any(), bad.reshape(-1).int().argmax(), -1))  # waits for the device
    if place >= 0:
        index = [int(axis) for axis in torch.unravel_index(torch.tensor(place), bad.shape)]
        where = index[0] if len(index) == 1 else index
        raise ValueError(f"{name}: expected {expected}, got {int(values.reshape(-1)[place])} at {where}")
