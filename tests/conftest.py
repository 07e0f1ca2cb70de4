"""Triton kernels run under its interpreter here: set before anything imports kvstore_kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(2)
