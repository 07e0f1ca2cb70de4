"""merge_partials, Triton under the interpreter and the reference; and the host tables of tiles and splits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvstore_kernels import kv_format, merge_partials
from kvstore_kernels.launch import Target
from kvstore_kernels.softmax import split_tiles
from kvstore_kernels.splits import SHARED_BYTES, choose_num_splits, key_value_tile, latent_tile
from tests.attention_oracle import U32, attend, expect_within_budget, paged_batch
from tests.cases import BACKENDS

INF, NAN = torch.inf, torch.nan


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def expect_merged(partial_out: torch.Tensor, partial_lse: torch.Tensor, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    """In fp64, with weights that sum over every part: (num_splits + 8) roundings of what the weights sum up."""
    lses, parts = partial_lse.double(), partial_out.double()
    lse = lses.logsumexp(2)
    weights = torch.exp(lses - lse[..., None])[..., None]
    rounding = (lses.shape[2] + 8) * U32
    reach = rounding + 4 * U32 * lses.abs().amax(2)
    output_rounding = torch.finfo(got[0].dtype).eps / 2 if got[0].dtype is not torch.float32 else U32
    out = (weights * parts).sum(2)
    budget = 2 * reach[..., None] * (weights * parts.abs()).sum(2) + output_rounding * out.abs()
    assert ((got[0].double() - out).abs() <= budget).all()
    assert ((got[1].double() - lse).abs() <= reach + 2 * U32 * lse.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_splits", "dim"), [(1, 64), (2, 80), (5, 512), (16, 9), (17, 64), (40, 128)])
def test_parts_merge_into_the_whole(backend: str, num_splits: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    partial_out = torch.randn(2, 3, num_splits, dim, generator=generator)
    partial_lse = torch.randn(2, 3, num_splits, generator=generator) * 3
    out, lse = torch.empty(2, 3, dim, dtype=dtype), torch.empty(2, 3)
    got = merge_partials(partial_out, partial_lse, out, lse, backend=backend)
    assert got[0] is out
    assert got[1] is lse
    expect_merged(partial_out, partial_lse, got)


def test_parts_of_keys_merge_into_attention_over_all_of_them(backend: str) -> None:
    batch = paged_batch(kv_format(1, 16, dtype=torch.float32), 16, (40, 7), 2)
    scale = 0.25
    cuts = [slice(0, 5), slice(5, 33), slice(33, None)]
    parts = [attend(batch.q, [k[cut] for k in batch.keys], [v[cut] for v in batch.values], scale) for cut in cuts]
    got = merge_partials(
        torch.stack([part.out for part in parts], 2).float(),
        torch.stack([part.lse for part in parts], 2).float(),
        backend=backend,
    )
    expect_within_budget(got, batch.exact(scale))


def merge_two(backend: str, *parts: tuple[float, float]) -> tuple[float, float]:
    """Merges (output, LSE) pairs of one query with one column."""
    outs, lses = torch.tensor(parts).T.contiguous()
    out, lse = merge_partials(outs[None, None, :, None].contiguous(), lses[None, None].contiguous(), backend=backend)
    return out.item(), lse.item()


@pytest.mark.parametrize("empty", [(0.0, -INF), (NAN, -INF), (0.0, INF), (NAN, INF)], ids=str)
def test_o37_o38_an_empty_part_counts_for_nothing(backend: str, empty: tuple[float, float]) -> None:
    assert merge_two(backend, empty, empty) == (0.0, -INF)
    assert merge_two(backend, empty) == (0.0, -INF)
    assert merge_two(backend, empty, (3.0, 1.5)) == (3.0, 1.5)
    assert merge_two(backend, (3.0, 1.5), empty) == (3.0, 1.5)
    assert merge_two(backend, *[empty] * 19, (3.0, 1.5), empty) == (3.0, 1.5)


def test_o44_equal_parts_have_equal_weight(backend: str) -> None:
    out, lse = merge_two(backend, (1.0, 0.0), (3.0, 0.0))
    assert out == 2.0
    assert lse == pytest.approx(0.6931472, abs=1e-6)


def test_lse_of_hundreds_do_not_overflow(backend: str) -> None:
    assert merge_two(backend, (1.0, 700.0), (5.0, -700.0)) == (1.0, 700.0)


@pytest.mark.parametrize("lse", [3e38, -3e38])
def test_lse_near_the_largest_fp32_do_not_overflow(backend: str, lse: float) -> None:
    out, merged = merge_two(backend, (1.0, lse), (3.0, lse))
    assert out == 2.0
    assert merged == pytest.approx(lse)
    assert merge_two(backend, (1.0, 3e38), (5.0, lse), (7.0, -3e38)) == merge_two("reference", (1.0, 3e38), (5.0, lse))


def test_results_are_detached(backend: str) -> None:
    parts = torch.ones(2, 3, 4, 8, requires_grad=True), torch.zeros(2, 3, 4, requires_grad=True)
    assert not any(result.requires_grad for result in merge_partials(*parts, backend=backend))
    out, lse = torch.full((2, 3, 8), 7.0, requires_grad=True), torch.full((2, 3), 7.0, requires_grad=True)
    got = merge_partials(*parts, out, lse, backend=backend)
    assert got[0] is out
    assert out.is_leaf
    assert (out == 1).all()
    assert not (lse == 7).any()


@pytest.mark.parametrize("partial_out", [None, np.zeros((2, 3, 4, 8), np.float32)], ids=["None", "numpy"])
@pytest.mark.parametrize("chosen", [*BACKENDS, None])
def test_partial_out_is_a_tensor(chosen: str | None, partial_out: object) -> None:
    with pytest.raises(TypeError, match=r"partial_out: expected a torch\.Tensor, got (NoneType|ndarray)"):
        merge_partials(partial_out, torch.zeros(2, 3, 4), backend=chosen)


def test_without_outputs_the_result_is_fp32(backend: str) -> None:
    out, lse = merge_partials(torch.ones(2, 3, 4, 8), torch.zeros(2, 3, 4), backend=backend)
    assert out.dtype is torch.float32
    assert out.shape == (2, 3, 8)
    assert lse.dtype is torch.float32
    assert lse.shape == (2, 3)


def test_no_sequences(backend: str) -> None:
    out, lse = merge_partials(torch.ones(0, 3, 4, 8), torch.zeros(0, 3, 4), backend=backend)
    assert out.shape == (0, 3, 8)
    assert lse.shape == (0, 3)


BAD_CALLS = {
    "out_axes": (
        {"partial_out": torch.zeros(2, 3, 8)},
        r"partial_out: expected shape \[any, any, any, any\], got \[2, 3, 8\]",
    ),
    "out_dtype": (
        {"partial_out": torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)},
        "partial_out: expected dtype torch.float32, got torch.bfloat16",
    ),
    "out_strides": (
        {"partial_out": torch.zeros(2, 4, 3, 8).transpose(1, 2)},
        "partial_out: expected a contiguous tensor, got strides",
    ),
    "no_splits": (
        {"partial_out": torch.zeros(2, 3, 0, 8), "partial_lse": torch.zeros(2, 3, 0)},
        r"partial_out: expected at least one part and one column, got shape \[2, 3, 0, 8\]",
    ),
    "no_columns": (
        {"partial_out": torch.zeros(2, 3, 4, 0)},
        r"partial_out: expected at least one part and one column, got shape \[2, 3, 4, 0\]",
    ),
    "lse_shape": (
        {"partial_lse": torch.zeros(2, 3, 5)},
        r"partial_lse: expected shape \[2, 3, 4\], got \[2, 3, 5\]",
    ),
    "lse_dtype": (
        {"partial_lse": torch.zeros(2, 3, 4, dtype=torch.float64)},
        "partial_lse: expected dtype torch.float32, got torch.float64",
    ),
    "lse_device": (
        {"partial_lse": torch.zeros(2, 3, 4, device="meta")},
        "partial_lse: expected a tensor on cpu, got one on meta",
    ),
    "result_shape": ({"out": torch.zeros(2, 3, 9)}, r"out: expected shape \[2, 3, 8\], got \[2, 3, 9\]"),
    "result_dtype": (
        {"out": torch.zeros(2, 3, 8, dtype=torch.float64)},
        "out: expected dtype torch.bfloat16 or torch.float16 or torch.float32, got torch.float64",
    ),
    "result_lse_shape": ({"lse": torch.zeros(3, 2)}, r"lse: expected shape \[2, 3\], got \[3, 2\]"),
    "result_lse_dtype": (
        {"lse": torch.zeros(2, 3, dtype=torch.bfloat16)},
        "lse: expected dtype torch.float32, got torch.bfloat16",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_are_named_and_nothing_is_written(
    backend: str, changes: dict[str, torch.Tensor], message: str
) -> None:
    out, lse = torch.full((2, 3, 8), 7.0), torch.full((2, 3), 7.0)
    arguments = {
        "partial_out": torch.zeros(2, 3, 4, 8),
        "partial_lse": torch.zeros(2, 3, 4),
        "out": out,
        "lse": lse,
    } | changes
    with pytest.raises(ValueError, match=message):
        merge_partials(**arguments, backend=backend)
    assert (out == 7).all()
    assert (lse == 7).all()


KNOWN_CHIPS = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "gfx942": "gfx942", "gfx950": "gfx950"}
CHIPS = [
    *(pytest.param(arch, size, id=f"{name}-{size}") for name, arch in KNOWN_CHIPS.items() for size in (2, 4)),
    *(pytest.param(arch, 2, id=f"unlisted-{arch}") for arch in (89, "gfx1100")),
]


@pytest.mark.parametrize(("arch", "element_bytes"), CHIPS)
def test_no_tile_is_offered_that_does_not_fit_a_chip(arch: int | str, element_bytes: int) -> None:
    target = Target("cuda", arch, 32) if isinstance(arch, int) else Target("hip", arch, 64)
    limit = SHARED_BYTES.get(arch, 65_536)
    for num_heads in (1, 16, 17, 33, 128):
        tiles = [
            (latent_dim, latent_tile(target, num_heads, latent_dim, value_dim, element_bytes, rows_per_block))
            for latent_dim, value_dim in ((576, 512), (320, 256), (512, 512), (9, 5))
            for rows_per_block in (1, 16, 48, 64, 784)
        ] + [
            (key_dim + value_dim, key_value_tile(target, num_heads, key_dim, value_dim, element_bytes, 16))
            for key_dim, value_dim in ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
        ]
        for row_width, tile in tiles:
            assert min(tile.heads, tile.rows) >= 16
            assert max(1, tile.num_stages - 1) * tile.rows * row_width * element_bytes <= limit


def test_a_row_too_wide_for_a_chip_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"view: expected rows of which 16 fit into the 65536 bytes .* hip gfx942, got"
    ):
        latent_tile(Target("hip", "gfx942", 64), 16, 4096, 4096, 4, 64)


@pytest.mark.parametrize(
    ("num_programs", "max_rows", "wanted"),
    [(1, 100, 1), (1, 0, 1), (0, 4096, 16), (64, 8192, 4), (1, 1 << 20, 128), (264, 8192, 1), (1000, 8192, 1)],
)
def test_the_number_of_splits_fills_the_chip_but_keeps_parts_long(
    num_programs: int, max_rows: int, wanted: int
) -> None:
    assert choose_num_splits(num_programs, max_rows, num_cores=132) == wanted


@triton.jit
def _split_kernel(end_ptr, tiles_ptr, TILE_N: tl.constexpr):
    first_tile, last_tile = split_tiles(0, tl.load(end_ptr), TILE_N)
    tl.store(tiles_ptr + tl.program_id(1) * 2, first_tile)
    tl.store(tiles_ptr + tl.program_id(1) * 2 + 1, last_tile)


@pytest.mark.parametrize("end", [2**31 - 1, 2**31 - 40, 33, 1, 0, -5])
@pytest.mark.parametrize("num_splits", [1, 3, 128])
def test_splits_share_out_every_tile_of_any_length(end: int, num_splits: int) -> None:
    tiles = torch.full((num_splits, 2), -7, dtype=torch.int32)
    _split_kernel[(1, num_splits)](torch.tensor([end], dtype=torch.int32), tiles, TILE_N=16)
    count = max(0, -(-end // 16))
    edges = [count * split // num_splits for split in range(num_splits + 1)]
    assert tiles.tolist() == [list(pair) for pair in pairwise(edges)]
