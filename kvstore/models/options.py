"""ModelOptions: what a caller decides about the caches of a model, beside its config."""

from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import PlanError, plan_int
from kvstore.models.config import DTYPES, MAX_LAYERS, named_dtype
from kvstore_kernels.formats import dtype_name

ROW_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn}
"""Names of dtypes that rows may be stored in as they are; fp8 has one scale for the tensor, outside the cache."""

TOKEN_HEAD_ROWS = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
"""Rows of K and V with a scale per token and head."""

DS_MLA_ROWS = "fp8_ds_mla"
"""DeepSeek's packed latent rows: 656 bytes, 584 on V4."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What the functions of the families are told beside the fields of a config.

    `rows`: the dtype of plain rows, or the name of a packed row. `state_dtype`: of the recurrent tensor of a state.
    `ring_states`: hold the states of V4's compressors as rings, not as windows. A rank is one of `tensor_parallel`,
    and holds the layers of `pipeline_stage`, which may be None when there is one stage. None elsewhere: the default
    of the family.

    Raises: PlanError for a number out of range, and for a stage that is not named or does not exist.
    """

    rows: torch.dtype | str = torch.bfloat16
    state_dtype: torch.dtype | None = None
    block_size: int | None = None
    indexer_row_bytes: int | None = None
    num_draft_layers: int = 0
    tensor_parallel: int = 1
    pipeline_stages: int = 1
    pipeline_stage: int | None = None
    ring_states: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_stages"):
            plan_int(name, getattr(self, name), 1)
        plan_int("num_draft_layers", self.num_draft_layers, 0, MAX_LAYERS)
        if self.block_size is not None:
            plan_int("block_size", self.block_size, 1)
        if self.pipeline_stage is not None:
            plan_int("pipeline_stage", self.pipeline_stage, 0, self.pipeline_stages - 1)
        elif self.pipeline_stages > 1:
            raise PlanError(
                f"pipeline_stage: expected 0 to {self.pipeline_stages - 1}, one of the {self.pipeline_stages} "
                "pipeline_stages, got None"
            )
        if not isinstance(self.ring_states, bool):
            raise PlanError(f"ring_states: expected a bool, got {self.ring_states!r}")

    @property
    def rows_name(self) -> str:
        """`rows` as an error calls it."""
        return self.rows if isinstance(self.rows, str) else dtype_name(self.rows)

    def block(self, default: int) -> int:
        """Tokens of a block: what the caller asked for, else the default of the kind of layer."""
        return default if self.block_size is None else self.block_size


def rows_from(kv_dtype: Any) -> torch.dtype | str:
    """The rows that a caller named: a dtype, or one of the packed rows.

    Raises: PlanError when there is no such row.
    """
    packed = (*TOKEN_HEAD_ROWS, DS_MLA_ROWS)
    if isinstance(kv_dtype, str) and kv_dtype in packed:
        return kv_dtype
    try:
        return named_dtype("kv_dtype", kv_dtype, ROW_DTYPES)
    except PlanError:
        known = ", ".join((*ROW_DTYPES, *packed))
        raise PlanError(f"kv_dtype: expected one of {known}, got {kv_dtype!r}") from None
