"""Triton kernels run under its interpreter here: set before anything imports kvstore_kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # files of tests run side by side, one per core
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_terminal_summary(terminalreporter):
    """How many cells of the matrix were run."""
    cells = [
        report for report in terminalreporter.stats.get("passed", ()) if "test_matrix.py::test_cell[" in report.nodeid
    ]
    if cells:
        terminalreporter.write_line(f"matrix: {len(cells)} cells of op x row format x shape class hold")
