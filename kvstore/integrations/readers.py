"""What kernels of others demand of pages, as one table, and `export_check`, which holds a layer against it.

Nothing here imports a reader: the demands are written down with the version or thread they were taken from. They can be
checked with the plan alone, before there is a device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Any

import torch

from kvstore import KVStore
from kvstore.specs import LayerSpec
from kvstore_kernels.checks import round_up
from kvstore_kernels.formats import ALIGNMENT_BYTES, RowPart, dtype_name

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

CONSTRUCTORS = {
    "full": "full_attention",
    "sliding_window": "sliding_window",
    "chunked": "chunked_attention",
    "latent": "latent",
}
"""Kind of a layer -> the function of kvstore that makes its spec; LayerSpec for the others."""

HINTS = {
    "chunked": "gather its rows with KVStore.gather",
    "ring": "gather its rows with KVStore.gather",
    "state": "it has no rows, see KVStore.state_view",
    "latent_window": "name its rows to a sparse kernel, see flash_mla_indices",
}
"""Kind of a layer -> what to do where a reader does not know the kind."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a demand is held against: a layer's spec, the distance of its blocks, and whether given-up rows are NaN."""

    spec: LayerSpec
    block_stride_bytes: int
    leaves_nan: bool

    @property
    def constructor(self) -> str:
        """Who has the arguments that would change the layer."""
        return CONSTRUCTORS.get(self.spec.kind, "LayerSpec")

    def parts(self, *names: str) -> list[RowPart]:
        """Those of the named parts that the rows have."""
        return [part for part in self.spec.format.parts if part.name in names]

    def pitch_bytes(self, part: RowPart) -> int:
        """Bytes from a part of one row to that of the next."""
        return self.spec.format.area_pitches[part.area]


@dataclass(frozen=True, slots=True)
class Demand:
    """One thing a reader wants: `check(subject, wanted)` says what is wrong; `source` is who says that it is wanted."""

    check: Callable[[Subject, Any], str | None]
    wanted: Any
    source: str


def _any_of(wanted: tuple[object, ...]) -> str:
    return " or ".join(map(str, wanted))


def kind(subject: Subject, wanted: tuple[str, ...]) -> str | None:
    """The layer's kind is one of these."""
    found = subject.spec.kind
    if found in wanted:
        return None
    hint = HINTS.get(found)
    return f"kind: expected {_any_of(wanted)}, got {found}" + (f": {hint}" if hint else "")


def row_format(subject: Subject, wanted: tuple[str, ...]) -> str | None:
    """The rows have one of these formats of kvstore_kernels.FORMATS."""
    found = subject.spec.format.name
    if found in wanted:
        return None
    return f"format: expected rows of {_any_of(wanted)}, got {found}: plan the layer with another format"


def dtype(subject: Subject, wanted: tuple[torch.dtype, ...]) -> str | None:
    """K, V and latent rows are of one of these dtypes."""
    found = [part.dtype for part in subject.parts("k", "v", "latent") if part.dtype not in wanted]
    if not found:
        return None
    names = _any_of(tuple(map(dtype_name, wanted)))
    return f"dtype: expected {names}, got {dtype_name(found[0])}: {subject.constructor}(dtype=)"


def page_rows(subject: Subject, wanted: tuple[int, ...] | Mapping[str, int]) -> str | None:
    """A page has one of these numbers of rows; a mapping tells it per format."""
    spec = subject.spec
    if not isinstance(wanted, tuple):
        wanted = (wanted[spec.format.name],) if spec.format.name in wanted else (spec.rows_per_block,)
    if spec.rows_per_block in wanted:
        return None
    sizes = _any_of(tuple(rows * spec.tokens_per_row for rows in wanted))
    return (
        f"page: expected {_any_of(wanted)} rows, got {spec.rows_per_block}: {subject.constructor}(block_size={sizes})"
    )


def page_rows_multiple(subject: Subject, wanted: int) -> str | None:
    """A page has a multiple of so many rows."""
    spec = subject.spec
    if spec.rows_per_block % wanted == 0:
        return None
    size = round_up(spec.rows_per_block, wanted) * spec.tokens_per_row
    return (
        f"page: expected a multiple of {wanted} rows, got {spec.rows_per_block}: "
        f"{subject.constructor}(block_size={size})"
    )


def stride_multiple(subject: Subject, wanted: Mapping[str, int]) -> str | None:
    """Blocks lie a multiple of so many bytes apart, per format."""
    multiple = wanted.get(subject.spec.format.name, 1)
    if subject.block_stride_bytes % multiple == 0:
        return None
    return (
        f"block stride: expected a multiple of {multiple} B, got {subject.block_stride_bytes}: "
        f"LayerSpec(block_stride_multiple={multiple})"
    )


def whole_rows(subject: Subject, wanted: bool) -> str | None:
    """Blocks lie a whole number of rows apart: every row has a number, block * (stride / row) + row in block."""
    pitches = [subject.pitch_bytes(part) for part in subject.parts("k", "v", "latent")]
    odd = [pitch for pitch in pitches if subject.block_stride_bytes % pitch]
    if not odd:
        return None
    return (
        f"block stride: expected a whole number of rows of {odd[0]} B, got {subject.block_stride_bytes} B: "
        f"LayerSpec(block_stride_multiple={lcm(ALIGNMENT_BYTES, *pitches)})"
    )


def one_pitch(subject: Subject, wanted: bool) -> str | None:
    """K and V of a row have the same number, counted in rows."""
    pitches = [subject.pitch_bytes(part) for part in subject.parts("k", "v")]
    if len(set(pitches)) < 2:
        return None
    return (
        f"rows: expected K and V of one pitch, got {pitches[0]} and {pitches[1]} B: {subject.constructor}(packed=True)"
    )


def same_strides(subject: Subject, wanted: bool) -> str | None:
    """One set of strides serves K and V."""
    strides = [(subject.pitch_bytes(part), part.pitch_bytes) for part in subject.parts("k", "v")]
    if len(set(strides)) < 2:
        return None
    return (
        f"K and V: expected equal strides, got (row, head) of {strides[0]} and {strides[1]} B: "
        f"{subject.constructor}(head_dim_v=None)"
    )


def head_dims(subject: Subject, wanted: tuple[int, ...]) -> str | None:
    """K and V have one of these head dims."""
    found = [part.head_dim for part in subject.parts("k", "v") if part.head_dim not in wanted]
    return f"head_dim: expected {_any_of(wanted)}, got {found[0]}" if found else None


def head_dim_up_to(subject: Subject, wanted: int) -> str | None:
    """K and V have equal head dims, a multiple of 8 and no more than this."""
    dims = [part.head_dim for part in subject.parts("k", "v")]
    if len(set(dims)) > 1:
        return f"head_dim: expected K and V of one head dim, got {dims[0]} and {dims[1]}"
    if not dims or (dims[0] % 8 == 0 and dims[0] <= wanted):
        return None
    return f"head_dim: expected a multiple of 8 up to {wanted}, got {dims[0]}"


def latent_dims(subject: Subject, wanted: tuple[tuple[int, int], ...]) -> str | None:
    """A latent row has so many columns, of which so many are V."""
    found = [(part.head_dim, subject.spec.format.value_dim) for part in subject.parts("latent")]
    if not found or found[0] in wanted:
        return None
    known = _any_of(tuple(f"{width} (V: {value})" for width, value in wanted))
    return f"latent: expected {known} columns, got {found[0][0]} (V: {found[0][1]})"


def unwindowed(subject: Subject, wanted: bool) -> str | None:
    """A query sees all rows."""
    window = subject.spec.window
    if window is None or subject.spec.kind not in ("full", "latent"):
        return None
    return f"window: expected none, got {window}: name its rows to a sparse kernel"


def tokens_per_row(subject: Subject, wanted: int) -> str | None:
    """A row stands for so many tokens."""
    found = subject.spec.tokens_per_row
    return None if found == wanted else f"tokens_per_row: expected {wanted}, got {found}"


def finite_tails(subject: Subject, wanted: bool) -> str | None:
    """Rows of a page behind the last one are multiplied by 0, so they must not be NaN."""
    if not subject.leaves_nan:
        return None
    return (
        "store: expected pages without NaN behind their last row, got debug=True, which fills new blocks with NaN: "
        "KVStore(zero_new=True)"
    )


READERS: Mapping[str, tuple[Demand, ...]] = MappingProxyType(
    {
        "flashinfer": (
            Demand(kind, ("full", "sliding_window"), "FlashInfer 0.7.4, window_left of plan()"),
            Demand(row_format, ("kv", "kv_packed"), "FlashInfer 0.7.4, (k, v) tuple"),
            Demand(dtype, (BF16, FP16, E4M3, E5M2), "FlashInfer 0.7.4, kv_data_type"),
            Demand(head_dims, (64, 128, 256, 512), "FlashInfer, DISPATCH_HEAD_DIM of utils.cuh"),
            Demand(same_strides, True, "FlashInfer, page.cu: k/v strides must be identical"),
            Demand(tokens_per_row, 1, "FlashInfer, causal rule by token"),
            Demand(finite_tails, True, "FlashInfer #941"),
        ),
        "flashinfer_mla": (
            Demand(kind, ("latent",), "FlashInfer 0.7.4, BatchMLAPagedAttentionWrapper"),
            Demand(row_format, ("latent",), "FlashInfer 0.7.4, ckv and kpe"),
            Demand(dtype, (BF16, FP16, E4M3), "FlashInfer 0.7.4; fp8 on SM90 only"),
            Demand(latent_dims, ((576, 512),), "FlashInfer 0.7.4, head_dim_ckv 512 and head_dim_kpe 64"),
            Demand(unwindowed, True, "FlashInfer 0.7.4, no window_left"),
            Demand(finite_tails, True, "FlashInfer #941"),
        ),
        "flash_mla": (
            Demand(kind, ("latent",), "FlashMLA 2026-09, dense decode"),
            Demand(row_format, ("latent",), "FlashMLA 2026-09, dense decode"),
            Demand(dtype, (BF16, FP16), "FlashMLA 2026-09, dense decode"),
            Demand(page_rows, (64,), "FlashMLA 2026-09, dense decode: page_block_size must be 64"),
            Demand(latent_dims, ((576, 512), (512, 512)), "FlashMLA 2026-09, dense decode"),
            Demand(unwindowed, True, "FlashMLA 2026-09, no window argument"),
        ),
        "flash_mla_sparse": (
            Demand(kind, ("latent", "latent_window"), "FlashMLA 2026-09, sparse decode"),
            Demand(row_format, ("fp8_ds_mla", "dsv4", "mxfp8_latent"), "FlashMLA 2026-09, sparse decode"),
            Demand(page_rows, {"fp8_ds_mla": 64}, "FlashMLA 2026-09, V3.2 pages"),
            Demand(
                stride_multiple,
                {"fp8_ds_mla": 656, "dsv4": 576, "mxfp8_latent": 528},
                "FlashMLA 2026-09, block stride by the pitch of its tensor map",
            ),
        ),
        "flash_attention": (
            Demand(kind, ("full", "sliding_window"), "flash-attn 2.8, window_size"),
            Demand(row_format, ("kv", "kv_packed"), "flash-attn 2.8, k_cache and v_cache"),
            Demand(dtype, (BF16, FP16), "flash-attn 2.8"),
            Demand(page_rows_multiple, 256, "flash-attn 2.8, flash_attn_with_kvcache"),
            Demand(head_dim_up_to, 256, "flash-attn 2.8"),
            Demand(tokens_per_row, 1, "flash-attn 2.8, causal rule by token"),
            Demand(finite_tails, True, "flash-attention #1745, #2374"),
        ),
        "vllm": (
            Demand(kind, ("full", "sliding_window", "latent"), "vLLM 0.33, attention backends"),
            Demand(row_format, ("kv", "kv_packed", "latent"), "vLLM 0.33, TRITON_ATTN, FLASH_ATTN, TRITON_MLA"),
            Demand(dtype, (BF16, FP16, FP32), "vLLM 0.33, TRITON_ATTN"),
            Demand(page_rows_multiple, 16, "vLLM 0.33, get_supported_kernel_block_sizes"),
        ),
        "flex": (
            Demand(kind, ("full", "sliding_window", "chunked", "latent", "latent_window"), "mask_mod of this package"),
            Demand(row_format, ("kv", "kv_packed", "latent"), "torch 2.13, key and value are numbers"),
            Demand(dtype, (BF16, FP16, FP32), "torch 2.13, flex_attention on a CPU"),
            Demand(whole_rows, True, "torch 2.13, one stride along the key axis"),
            Demand(one_pitch, True, "torch 2.13, one index for key and value"),
            Demand(finite_tails, True, "torch 2.13, weight 0 times V"),
        ),
    }
)
"""Reader -> what it demands of the pages of a layer."""


def export_check(store: KVStore, layer: str, reader: str) -> list[str]:
    """Why a reader cannot read the pages of a layer in place; empty where it can.

    Each reason names what is demanded, what the plan has, the argument that would change it, and who demands it. No
    device is needed, and nothing is read from one.

    Args:
        store: any store.
        layer: of its plan; an alias is judged by the layer whose cache it reads.
        reader: a key of `READERS`.

    Raises: ValueError for an unknown layer or reader.
    """
    if not isinstance(reader, str) or reader not in READERS:
        raise ValueError(f"reader: expected one of {', '.join(READERS)}, got {reader!r}")
    store._group(layer)
    plan = store.plan
    owner = plan.owner(layer)
    subject = Subject(
        plan.spec(layer), plan.placements[owner].block_stride_bytes, store._debug and owner not in store._zeroed_layers
    )
    reasons = [(demand.check(subject, demand.wanted), demand.source) for demand in READERS[reader]]
    return [f"{reason} [{source}]" for reason, source in reasons if reason]


def expect_readable(store: KVStore, layer: str, reader: str) -> None:
    """Raises: ValueError with all reasons of `export_check`, where there are any."""
    if reasons := export_check(store, layer, reader):
        raise ValueError(f"layer: {layer!r} cannot be read by {reader}: {'; '.join(reasons)}")
