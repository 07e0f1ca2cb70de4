"""The matrix: every op x row format x shape class, Triton under the interpreter, against the reference or fp64.

The cells are those that a GPU is checked with, on small worlds. `data/matrix.txt` pins them: a cell that is gone fails.
`python -m tests.test_matrix` writes the list anew, for a change that adds cells.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import run_check
from benchmarks.gpu_checks import Check, checks

PINNED = Path(__file__).parent / "data" / "matrix.txt"

SHAPE_CLASSES = {
    "one row a block": ((1,), (3,), (3,)),
    "empty and full blocks": ((16,), (17, 0, 16), (16,)),
    "blocks of no power of two": ((48,), (1, 49), (20,)),
}
"""Name -> rows per block, rows of each sequence, heads."""


def cells() -> dict[str, Check]:
    """Every cell by its name."""
    return {
        f"{shape}: {check.name}": check
        for shape, (rows_per_block, row_lens, heads) in SHAPE_CLASSES.items()
        for check in checks(row_lens, rows_per_block, heads)
    }


CELLS = cells()


@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str) -> None:
    measure = run_check(CELLS[name], torch.device("cpu"))
    assert measure.ok, f"{measure.value} {measure.unit}"


def test_no_cell_is_missing_and_every_one_is_pinned() -> None:
    assert list(CELLS) == PINNED.read_text(encoding="utf-8").splitlines()


def test_a_cell_names_its_op_format_and_shape_class() -> None:
    assert len(set(CELLS)) == sum(
        len(list(checks(lens, blocks, heads))) for blocks, lens, heads in SHAPE_CLASSES.values()
    )


if __name__ == "__main__":
    PINNED.write_text("\n".join(cells()) + "\n", encoding="utf-8")
    print(f"{len(CELLS)} cells")
