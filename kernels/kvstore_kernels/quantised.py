"""The row formats by name: quantised rows that public readers know, rows of opaque bytes, and rows of states.

Two families place the scales of a row; a name belongs to one of them:

    interleaved:  | codes, scales | codes, scales | ...              one area
    page-split:   | codes | codes | ... | scales | scales | ...      area 0: codes, area 1: scales

Only the bytes are described here; nothing in this module quantises. UE8M0 scales and pairs of e2m1 codes are uint8.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from kvstore_kernels.checks import expect_int, round_up
from kvstore_kernels.formats import ALIGNMENT_BYTES, Quantised, RowFormat, RowPart, kv_format, latent_format

FP8 = torch.float8_e4m3fn
TOKEN_HEAD_NAMES = {torch.int8: "int8_token_head", FP8: "fp8_token_head"}
INDEXER_NAMES = {132: "indexer_fp8", 68: "indexer_mxfp4"}


def fp8_ds_mla_format() -> RowFormat:
    """DeepSeek V3.2: 656 interleaved bytes per row; V is the nope columns.

        | 0: nope, 512 e4m3 | 512: scales, 4 fp32 powers of two, one per 128 | 528: rope, 64 bf16 | 656

    Readers: FlashMLA sparse decode (block stride a multiple of 656), vLLM, SGLang, FlashInfer. Source: FlashMLA's
    description of its fp8 cache, vLLM 0.33 for scales that are powers of two.
    """
    nope = RowPart("nope", FP8, 1, 512)
    scales = RowPart("scales", torch.float32, 1, 4, offset_bytes=512)
    rope = RowPart("rope", torch.bfloat16, 1, 64, offset_bytes=528)
    quantised = (Quantised("nope", "scales", 128, "fp32_pow2"),)
    return RowFormat("fp8_ds_mla", (nope, scales, rope), (656,), 656, 512, quantised)


def dsv4_format() -> RowFormat:
    """DeepSeek V4: 584 page-split bytes per row, pages padded to a multiple of 576; V is the whole row of 512 columns.

        area 0:  | 0: nope, 448 e4m3 | 448: rope, 64 bf16 | 576
        area 1:  | 0: scales, 7 UE8M0, one per 64 | 7: a zero byte | 8

    Readers: FlashMLA sparse decode (block stride a multiple of 576), vLLM, SGLang. Source: FlashMLA, vLLM 0.33 and
    SGLang 0.5.23, which agree on the bytes.
    """
    nope = RowPart("nope", FP8, 1, 448)
    rope = RowPart("rope", torch.bfloat16, 1, 64, offset_bytes=448)
    scales = RowPart("scales", torch.uint8, 1, 7, area=1)
    return RowFormat(
        "dsv4",
        (nope, rope, scales),
        (576, 8),
        576,
        value_dim=512,
        quantised=(Quantised("nope", "scales", 64, "ue8m0"),),
    )


def indexer_format(row_bytes: int = 132, page_alignment: int = ALIGNMENT_BYTES) -> RowFormat:
    """Keys of a sparse indexer, 128 values, page-split: 132 bytes "indexer_fp8" or 68 bytes "indexer_mxfp4".

        132:  area 0: | 128 e4m3 |        area 1: | 1 fp32 scale |
         68:  area 0: | 64 x 2 e2m1 |     area 1: | 4 UE8M0 scales, one per 32 values |

    Engines align the page to 576 or 512 bytes. Readers: DeepGEMM's paged indexer, vLLM, SGLang. Source: DeepGEMM;
    the tiled form that ROCm writes for pages of several rows is another format.

    Raises: ValueError for other row_bytes and for a page_alignment that is no multiple of 16.
    """
    if expect_int("row_bytes", row_bytes, 1) not in INDEXER_NAMES:
        raise ValueError(f"row_bytes: expected one of {', '.join(map(str, INDEXER_NAMES))}, got {row_bytes}")
    if row_bytes == 132:
        key, scales = RowPart("k", FP8, 1, 128), RowPart("scales", torch.float32, 1, 1, area=1)
        quantised = Quantised("k", "scales", 128, "fp32")
    else:
        key, scales = RowPart("k", torch.uint8, 1, 64), RowPart("scales", torch.uint8, 1, 4, area=1)
        quantised = Quantised("k", "scales", 32, "ue8m0", values_per_element=2)
    pitches = (key.num_bytes, scales.num_bytes)
    return RowFormat(INDEXER_NAMES[row_bytes], (key, scales), pitches, page_alignment, quantised=(quantised,))


def mxfp8_latent_format(page_split: bool = False) -> RowFormat:
    """DeepSeek V4.1: 512 e4m3 columns, rope among them, and 16 UE8M0 scales, one per 32: 528 bytes; V is the row.

    "mxfp8_latent" is interleaved, its pages and block strides multiples of 528: FlashMLA since September 2026.
    "mxfp8_latent_split" is page-split, its pages multiples of 512: SGLang and earlier vLLM. Source: those readers.
    """
    quantised = Quantised("latent", "scales", 32, "ue8m0")
    return _latent_and_scales("mxfp8_latent", FP8, 512, torch.uint8, 16, quantised, page_split)


def nvfp4_latent_format(page_split: bool = False) -> RowFormat:
    """DeepSeek V4.1: 512 e2m1 columns in 256 bytes and 32 e4m3 scales, one per 16: 288 bytes; V is the row.

    "nvfp4_latent" is interleaved, its pages multiples of 288; "nvfp4_latent_split" is page-split, its pages multiples
    of 256. Readers and source: vLLM 0.33, SGLang 0.5.23.
    """
    quantised = Quantised("latent", "scales", 16, "e4m3", values_per_element=2)
    return _latent_and_scales("nvfp4_latent", torch.uint8, 256, FP8, 32, quantised, page_split)


def nvfp4_ds_mla_format() -> RowFormat:
    """MLA rows of SM100: 352 interleaved bytes; V is the 512 nope columns.

        | 0: nope, 256 x 2 e2m1 | 256: rope, 64 e4m3 without a scale | 320: scales, 32 e4m3, one per 16 | 352

    The scale of tile s lies at byte 8 * (s % 4) + s // 4 of the scales. Reader and source: vLLM 0.33.
    """
    nope = RowPart("nope", torch.uint8, 1, 256)
    rope = RowPart("rope", FP8, 1, 64, offset_bytes=256)
    scales = RowPart("scales", FP8, 1, 32, offset_bytes=320)
    quantised = (Quantised("nope", "scales", 16, "e4m3", values_per_element=2),)
    return RowFormat("nvfp4_ds_mla", (nope, rope, scales), (352,), value_dim=512, quantised=quantised)


def token_head_format(
    num_kv_heads: int, head_dim: int, head_dim_v: int | None = None, dtype: torch.dtype = torch.int8
) -> RowFormat:
    """K and V of int8 ("int8_token_head") or e4m3 ("fp8_token_head") with one fp32 scale per token and head, inline.

        | K of head 0 | its scale | V of head 0 | its scale | K of head 1 | ...   head_dim + 4 + head_dim_v + 4 per head

    Parts k, k_scales, v, v_scales; `head_dim_v` defaults to `head_dim`. Reader and source: vLLM 0.33, whose kernels
    take the scales as strided fp32 views of the same memory.

    Raises: TypeError or ValueError for numbers out of range; ValueError for another dtype, and for head sizes that are
        no multiples of 4, behind which an fp32 scale could not lie.
    """
    if dtype not in TOKEN_HEAD_NAMES:
        raise ValueError(f"dtype: expected {' or '.join(map(str, TOKEN_HEAD_NAMES))}, got {dtype}")
    expect_int("num_kv_heads", num_kv_heads, 1)
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
    for name, size in sizes.items():
        if expect_int(name, size, 1) % 4:
            raise ValueError(f"{name}: expected a multiple of 4, got {size}")
    pitch = sum(size + 4 for size in sizes.values())
    parts: list[RowPart] = []
    offset = 0
    for name, size in zip("kv", sizes.values(), strict=True):
        parts.append(RowPart(name, dtype, num_kv_heads, size, 0, offset, pitch))
        parts.append(RowPart(f"{name}_scales", torch.float32, num_kv_heads, 1, 0, offset + size, pitch))
        offset += size + 4
    quantised = tuple(
        Quantised(name, f"{name}_scales", size, "fp32") for name, size in zip("kv", sizes.values(), strict=True)
    )
    return RowFormat(TOKEN_HEAD_NAMES[dtype], tuple(parts), (num_kv_heads * pitch,), quantised=quantised)


def bytes_format(row_bytes: int, num_heads: int = 1) -> RowFormat:
    """Rows of `row_bytes` opaque bytes, those of `num_heads` heads one behind the other: to plan memory with.

    No reader: for rows whose inside only their owner knows.

    Raises: TypeError or ValueError for numbers out of range; ValueError for bytes that the heads cannot share evenly.
    """
    expect_int("num_heads", num_heads, 1)
    if expect_int("row_bytes", row_bytes, 1) % num_heads:
        raise ValueError(f"row_bytes: expected a multiple of the {num_heads} heads, got {row_bytes}")
    return RowFormat("bytes", (RowPart("bytes", torch.uint8, num_heads, row_bytes // num_heads),), (row_bytes,))


def state_format(tensors: Sequence[tuple[str, Sequence[int], torch.dtype]]) -> RowFormat:
    """A recurrent state of several tensors per row, each (name, shape, dtype), in one record.

        | tensor 0 | up to 15 bytes unused | tensor 1 | ...      every tensor at a multiple of 16 bytes, the record too

    Readers: kernels of the model that owns the state, through `PageView.tensor`: [num_blocks, rows_per_block, *shape].

    Raises: TypeError for a tensor that is no such triple; ValueError for no tensors, an empty shape, equal names.
    """
    parts: list[RowPart] = []
    end = 0
    for tensor in tensors:
        if not isinstance(tensor, tuple | list) or len(tensor) != 3:
            raise TypeError(f"tensors: expected (name, shape, dtype), got {tensor!r}")
        name, shape, dtype = tensor[0], tuple(tensor[1]), tensor[2]
        if not isinstance(name, str):
            raise TypeError(f"tensors: name: expected a string, got {name!r}")
        for size in shape:
            expect_int(f"tensors: shape of {name!r}", size, 1)
        if not shape:
            raise ValueError(f"tensors: shape of {name!r}: expected at least one dimension, got none")
        part = RowPart(name, dtype, 1, math.prod(shape), 0, end, shape=shape)
        parts.append(part)
        end = round_up(end + part.num_bytes, ALIGNMENT_BYTES)
    if not parts:
        raise ValueError("tensors: expected at least one, got none")
    return RowFormat("state", tuple(parts), (end,))


def _latent_and_scales(
    name: str,
    dtype: torch.dtype,
    num_codes: int,
    scale_dtype: torch.dtype,
    num_scales: int,
    quantised: Quantised,
    page_split: bool,
) -> RowFormat:
    """512 columns in `num_codes` bytes and their one-byte scales, pages aligned to the pitch of the codes' area."""
    codes = RowPart("latent", dtype, 1, num_codes)
    if page_split:
        scales = RowPart("scales", scale_dtype, 1, num_scales, area=1)
        return RowFormat(
            f"{name}_split", (codes, scales), (num_codes, num_scales), num_codes, value_dim=512, quantised=(quantised,)
        )
    scales = RowPart("scales", scale_dtype, 1, num_scales, offset_bytes=num_codes)
    pitch = num_codes + num_scales
    return RowFormat(name, (codes, scales), (pitch,), pitch, value_dim=512, quantised=(quantised,))


FORMATS: Mapping[str, Callable[..., RowFormat]] = MappingProxyType(
    {
        "kv": kv_format,
        "kv_packed": partial(kv_format, packed=True),
        "latent": latent_format,
        "fp8_ds_mla": fp8_ds_mla_format,
        "dsv4": dsv4_format,
        "mxfp8_latent": mxfp8_latent_format,
        "mxfp8_latent_split": partial(mxfp8_latent_format, page_split=True),
        "nvfp4_latent": nvfp4_latent_format,
        "nvfp4_latent_split": partial(nvfp4_latent_format, page_split=True),
        "nvfp4_ds_mla": nvfp4_ds_mla_format,
        "indexer_fp8": partial(indexer_format, 132),
        "indexer_mxfp4": partial(indexer_format, 68),
        "int8_token_head": partial(token_head_format, dtype=torch.int8),
        "fp8_token_head": partial(token_head_format, dtype=FP8),
        "bytes": bytes_format,
        "state": state_format,
    }
)
"""Format name -> the function that makes the format for given heads, head sizes, dtype or alignment."""
