"""warm_up launches every variant that steps launch, and touches no row."""

import pytest
import torch

from kvstore_kernels import (
    PageView,
    copy_blocks,
    dsv4_format,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    indexer_format,
    indexer_scores,
    kv_format,
    latent_format,
    layer_table,
    mla_decode,
    read_rows,
    sparse_mla_decode,
    state_format,
    token_head_format,
    warm_up,
    write_layers,
    write_rows,
)
from kvstore_kernels.launch import Launch
from tests.cases import make_view

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def variant(launch: Launch) -> tuple[object, ...]:
    """What Triton compiles a kernel anew for: absent arguments, dtypes, compile-time arguments, warps and stages."""
    types = {
        name: arg.dtype if isinstance(arg, torch.Tensor) else arg if arg is None else type(arg)
        for name, arg in launch.args.items()
    }
    constexprs = {name: str(value) for name, value in launch.constexprs.items()}
    return (
        launch.kernel.__name__,
        *sorted(types.items(), key=str),
        *sorted(constexprs.items()),
        launch.num_warps,
        launch.num_stages,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """The variants launched so far; nothing runs."""
    seen: set[tuple[object, ...]] = set()
    monkeypatch.setattr(Launch, "run", lambda launch: seen.add(variant(launch)) if 0 not in launch.grid else None)
    return seen


def step(view: PageView, num_heads: int, num_seqs: int, width: int, splits: int | None) -> None:
    """What an engine does in a step with `num_seqs` sequences, quantised rows from bf16."""
    row_format = view.format
    outside = sum(entry.scales is None for entry in row_format.quantised)
    scales = (torch.ones(1),) * outside or None
    options = {"row_scales": scales, "backend": "triton"}
    rows = [
        torch.zeros(num_seqs, *part.shape[1:], dtype=part.dtype)
        for part in read_rows(view, torch.zeros(1, dtype=torch.int64), dtype=BF16, row_scales=scales, backend="triton")
    ]
    if not row_format.quantised:
        rows = [torch.zeros(num_seqs, p.num_heads, p.head_dim, dtype=p.dtype) for p in row_format.parts]
    slots = torch.arange(num_seqs)
    write_rows(view, slots, *rows, **options)
    write_layers([view, view], slots, *[row.repeat(2, 1, 1, 1) for row in rows], **options)
    table, lens = torch.zeros(num_seqs, width, dtype=torch.int32), torch.ones(num_seqs, dtype=torch.int32)
    read = options if row_format.quantised else {"backend": "triton"}
    gather_rows(view, table, torch.arange(num_seqs + 1, dtype=torch.int32), num_rows=num_seqs, **read)
    copy_blocks(layer_table([view, view]), slots[:1] + 1, slots[:1] + 2, backend="triton")
    columns = rows[0].shape[2]
    dtype = rows[0].dtype
    for queries in (1, 3):
        q = torch.zeros(
            (num_seqs, num_heads, columns) if queries == 1 else (num_seqs, queries, num_heads, columns), dtype=dtype
        )
        if row_format.value_dim is not None:
            mla_decode(view, table, lens, q, softmax_scale=0.3, num_splits=splits, **options)
            if queries == 1:
                sparse_mla_decode(view, slots[:, None].repeat(1, width), q, softmax_scale=0.3, **options)
        elif any(part.name == "v" for part in row_format.parts):
            for window in (None, 100):
                gqa_decode(view, table, lens, q, window=window, soft_cap=30.0, num_splits=splits, **options)
        else:
            indexer_scores(view, table, lens, q, torch.zeros(q.shape[:-1]), backend="triton")


@pytest.mark.parametrize(
    "row_format",
    [
        kv_format(2, 64),
        kv_format(2, 64, dtype=FP8),
        token_head_format(2, 64),
        latent_format(72, 64),
        latent_format(64, 64, FP32),
        latent_format(576, 512, FP8),
        fp8_ds_mla_format(),
        dsv4_format(),
        indexer_format(132),
        indexer_format(68),
    ],
    ids=lambda row_format: row_format.name,
)
def test_steps_launch_nothing_new(row_format, launched):
    view = make_view(row_format, 16, 8)
    warm_up([view], num_heads=(4,), num_queries=(1, 3), windows=(None, 7), soft_cap=20.0, backend="triton")
    warmed = set(launched)
    assert len(warmed) > 5
    other = make_view(row_format, 16, 40, gap_bytes=160)
    for num_seqs, width, splits in ((1, 1, 1), (5, 16, 3), (16, 33, None)):
        step(other, 4, num_seqs, width, splits)
    assert launched - warmed == set()


def test_another_head_count_is_another_variant(launched):
    view = make_view(latent_format(72, 64), 16, 8)
    warm_up([view], num_heads=(4,), backend="triton")
    warmed = set(launched)
    step(view, 64, 2, 4, 1)
    assert launched - warmed


def test_no_row_is_touched_and_equal_layouts_are_warmed_once():
    views = [make_view(latent_format(24, 16), 4, 6, seed=seed) for seed in (1, 2)]
    before = [view.memory.clone() for view in views]
    once = warm_up(views[:1], num_heads=(2,), backend="triton")
    assert warm_up(views, num_heads=(2,), backend="triton") == once > 0
    assert all(torch.equal(view.memory, bytes_before) for view, bytes_before in zip(views, before, strict=True))


def test_rows_that_only_their_owner_knows_have_block_ops_alone(launched):
    view = make_view(state_format([("conv", (3, 8), FP32)]), 1, 4)
    assert warm_up([view], num_heads=(4,), backend="triton") == 3
    assert {kernel for kernel, *_ in launched} == {"_copy_kernel", "_fill_kernel", "_pack_kernel", "_unpack_kernel"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("pages",), TypeError, "views: expected a list or tuple of PageViews, got str"),
        ((["pages"],), TypeError, "views: expected PageViews, got str"),
        (([], {"num_heads": (0,)}), ValueError, "num_heads: expected an integer >= 1, got 0"),
        (([], {"num_queries": (1.5,)}), TypeError, "num_queries: expected an integer, got 1.5"),
        (([], {"dtype": torch.int8}), ValueError, "dtype: expected bfloat16 or float16 or float32, got"),
    ],
)
def test_bad_input(arguments, error, message):
    views, options = (*arguments, {})[:2]
    with pytest.raises(error, match=message):
        warm_up(views, **options)
