"""What the bytes of quantised rows mean, in numpy and fp64: written from the formats' descriptions, for tests only.

Nothing here is taken from the code under test: addresses, tables of codes and roundings are spelled out again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore_kernels import (
    PageView,
    RowFormat,
    dsv4_format,
    fp8_ds_mla_format,
    indexer_format,
    kv_format,
    latent_format,
    mxfp8_latent_format,
    nvfp4_ds_mla_format,
    nvfp4_latent_format,
    token_head_format,
)

FP8 = torch.float8_e4m3fn


def e4m3_table() -> np.ndarray:
    """fp64 [256]: exponent bias 7, subnormals below 2^-6, NaN at 0x7F and 0xFF."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where((code & 127) == 127, np.nan, values)
    return np.where(code >= 128, -values, values)


E4M3 = e4m3_table()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
UE8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])


def e2m1_pairs(codes: np.ndarray) -> np.ndarray:
    """Two values per byte, the even one in the low nibble."""
    return E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(-1)]


def fp32(raw: np.ndarray) -> np.ndarray:
    """Bytes as little-endian fp32, in fp64."""
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(raw).view("<f4").astype(np.float64)


def bf16(raw: np.ndarray) -> np.ndarray:
    """Bytes as little-endian bf16, in fp64."""
    bits = np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):
        return bits.view(np.float32).astype(np.float64)


def times(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Each scale times its share of the values, exact."""
    with np.errstate(invalid="ignore"):
        return values * np.repeat(scales, len(values) // len(scales))


Decoded = list[np.ndarray]
"""For every output fp64 [values of a row], heads one behind the other."""


def v32(page: np.ndarray, bs: int, o: int) -> Decoded:
    row = page[656 * o : 656 * o + 656]
    return [np.concatenate([times(E4M3[row[:512]], fp32(row[512:528])), bf16(row[528:])])]


def v4(page: np.ndarray, bs: int, o: int) -> Decoded:
    row, scales = page[576 * o : 576 * o + 576], page[576 * bs + 8 * o : 576 * bs + 8 * o + 7]
    return [np.concatenate([times(E4M3[row[:448]], UE8M0[scales]), bf16(row[448:])])]


def mxfp8(page: np.ndarray, bs: int, o: int) -> Decoded:
    return [times(E4M3[page[528 * o : 528 * o + 512]], UE8M0[page[528 * o + 512 : 528 * o + 528]])]


def mxfp8_split(page: np.ndarray, bs: int, o: int) -> Decoded:
    first = 512 * bs + 16 * o
    return [times(E4M3[page[512 * o : 512 * o + 512]], UE8M0[page[first : first + 16]])]


def indexer_132(page: np.ndarray, bs: int, o: int) -> Decoded:
    first = 128 * bs + 4 * o
    return [times(E4M3[page[128 * o : 128 * o + 128]], fp32(page[first : first + 4]))]


def indexer_68(page: np.ndarray, bs: int, o: int) -> Decoded:
    first = 64 * bs + 4 * o
    return [times(e2m1_pairs(page[64 * o : 64 * o + 64]), UE8M0[page[first : first + 4]])]


def nvfp4(page: np.ndarray, bs: int, o: int) -> Decoded:
    return [times(e2m1_pairs(page[288 * o : 288 * o + 256]), E4M3[page[288 * o + 256 : 288 * o + 288]])]


def nvfp4_split(page: np.ndarray, bs: int, o: int) -> Decoded:
    first = 256 * bs + 32 * o
    return [times(e2m1_pairs(page[256 * o : 256 * o + 256]), E4M3[page[first : first + 32]])]


def nvfp4_ds_mla(page: np.ndarray, bs: int, o: int) -> Decoded:
    row = page[352 * o : 352 * o + 352]
    scales = row[320:][[8 * (tile % 4) + tile // 4 for tile in range(32)]]
    return [np.concatenate([times(e2m1_pairs(row[:256]), E4M3[scales]), E4M3[row[256:320]]])]


def kv_fp8(page: np.ndarray, bs: int, o: int) -> Decoded:
    """Three heads of 64, V of 32."""
    return [E4M3[page[192 * o : 192 * o + 192]], E4M3[page[192 * bs + 96 * o : 192 * bs + 96 * o + 96]]]


def kv_packed_fp8(page: np.ndarray, bs: int, o: int) -> Decoded:
    """Two heads of 72, V of 72."""
    row = page[288 * o : 288 * o + 288]
    return [E4M3[row[:144]], E4M3[row[144:]]]


def latent_fp8(page: np.ndarray, bs: int, o: int) -> Decoded:
    return [E4M3[page[576 * o : 576 * o + 576]]]


def token_head(decode: Callable[[np.ndarray], np.ndarray], heads: int, dim: int, dim_v: int) -> Callable[..., Decoded]:
    """Per head: K, its fp32 scale, V, its fp32 scale."""
    pitch = dim + 4 + dim_v + 4

    def read(page: np.ndarray, bs: int, o: int) -> Decoded:
        keys, values = [], []
        for head in range(heads):
            record = page[(o * heads + head) * pitch :][:pitch]
            keys.append(times(decode(record[:dim]), fp32(record[dim : dim + 4])))
            values.append(times(decode(record[dim + 4 : dim + 4 + dim_v]), fp32(record[dim + 4 + dim_v :])))
        return [np.concatenate(keys), np.concatenate(values)]

    return read


def int8(codes: np.ndarray) -> np.ndarray:
    return codes.view(np.int8).astype(np.float64)


@dataclass(frozen=True)
class Known:
    """A format, its meaning, the shape of a row of every output, and what the tests need to place rows by hand.

    `areas`: the pitch of every area. `moved`: columns of the first output that are bf16 in the page, and the area-0
    byte at which they start. `outside`: number of scales outside the cache.
    """

    row_format: RowFormat
    decode: Callable[[np.ndarray, int, int], Decoded]
    shapes: tuple[tuple[int, int], ...]
    areas: tuple[int, ...]
    moved: tuple[int, int] | None = None
    outside: int = 0
    fp32_scales: tuple[str, ...] = field(default=())


KNOWN = {
    "fp8_ds_mla": Known(fp8_ds_mla_format(), v32, ((1, 576),), (656,), (512, 528), fp32_scales=("scales",)),
    "dsv4": Known(dsv4_format(), v4, ((1, 512),), (576, 8), (448, 448)),
    "mxfp8_latent": Known(mxfp8_latent_format(), mxfp8, ((1, 512),), (528,)),
    "mxfp8_latent_split": Known(mxfp8_latent_format(True), mxfp8_split, ((1, 512),), (512, 16)),
    "indexer_fp8": Known(indexer_format(132), indexer_132, ((1, 128),), (128, 4), fp32_scales=("scales",)),
    "indexer_mxfp4": Known(indexer_format(68), indexer_68, ((1, 128),), (64, 4)),
    "kv_fp8": Known(kv_format(3, 64, 32, FP8), kv_fp8, ((3, 64), (3, 32)), (192, 96), outside=2),
    "kv_packed_fp8": Known(
        kv_format(2, 72, dtype=FP8, packed=True), kv_packed_fp8, ((2, 72), (2, 72)), (288,), outside=2
    ),
    "latent_fp8": Known(latent_format(576, 512, FP8), latent_fp8, ((1, 576),), (576,), outside=1),
    "int8_token_head": Known(
        token_head_format(3, 80, 64), token_head(int8, 3, 80, 64), ((3, 80), (3, 64)), (456,),
        fp32_scales=("k_scales", "v_scales"),
    ),
    "fp8_token_head": Known(
        token_head_format(2, 64, dtype=FP8), token_head(lambda codes: E4M3[codes], 2, 64, 64), ((2, 64), (2, 64)),
        (272,), fp32_scales=("k_scales", "v_scales"),
    ),
    "nvfp4_latent": Known(nvfp4_latent_format(), nvfp4, ((1, 512),), (288,)),
    "nvfp4_latent_split": Known(nvfp4_latent_format(True), nvfp4_split, ((1, 512),), (256, 32)),
    "nvfp4_ds_mla": Known(nvfp4_ds_mla_format(), nvfp4_ds_mla, ((1, 576),), (352,)),
}  # fmt: skip


def bits_of(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """fp64 -> fp32 -> the bits of dtype, each step to nearest even; NaN as the positive quiet one."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        if dtype == torch.float32:
            bits, nan = single.view(np.uint32), 0x7FC00000
        elif dtype == torch.float16:
            bits, nan = single.astype(np.float16).view(np.uint16), 0x7E00
        else:
            wide = single.view(np.uint32)
            bits, nan = ((wide + (0x7FFF + ((wide >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16), 0x7FC0
    return np.where(np.isnan(values), nan, bits).astype(bits.dtype)


def expected_outputs(
    known: Known,
    view: PageView,
    rows: list[tuple[int, int] | None],
    dtype: torch.dtype,
    scales: tuple[float, ...] = (),
) -> list[np.ndarray]:
    """The bits of every output for the rows at (block, row in block), zeros for None."""
    memory = view.memory.numpy()
    outputs = [
        np.zeros((len(rows), heads * dim), np.uint32 if dtype == torch.float32 else np.uint16)
        for heads, dim in known.shapes
    ]
    for idx, place in enumerate(rows):
        if place is None:
            continue
        page = memory[view.offset_bytes + place[0] * view.block_stride_bytes :][: view.page_bytes]
        for output, values, scale in zip(
            outputs, known.decode(page, view.rows_per_block, place[1]), scales or (1.0, 1.0), strict=False
        ):
            with np.errstate(invalid="ignore"):
                output[idx] = bits_of(values * float(np.float32(scale)), dtype)
        if known.moved and dtype == torch.bfloat16:
            column, byte = known.moved
            raw = page[known.areas[0] * place[1] + byte :][: 2 * (outputs[0].shape[1] - column)]
            outputs[0][idx, column:] = np.ascontiguousarray(raw).view("<u2")
    return outputs


def places(
    view: PageView, table: list[list[int]], row_lens: list[int], starts: list[int], wraps: bool = False
) -> list[tuple[int, int] | None]:
    """(block, row) of every row to gather, None where there is none."""
    found: list[tuple[int, int] | None] = []
    for columns, first, row_len in zip(table, starts, row_lens, strict=True):
        for position in range(first, first + row_len):
            column = position // view.rows_per_block
            column = column % len(columns) if wraps else column
            exists = position >= 0 and column < len(columns) and 0 <= columns[column] < view.num_blocks
            found.append((columns[column], position % view.rows_per_block) if exists else None)
    return found


def moderate_scales(known: Known, view: PageView) -> None:
    """Replaces random fp32 scales by numbers around one, no powers of two, so that products are finite."""
    generator = np.random.default_rng(5)
    for name in known.fp32_scales:
        scales = view.tensor(name)
        scales.copy_(torch.from_numpy(generator.uniform(1e-3, 3.0, scales.shape).astype(np.float32)))
