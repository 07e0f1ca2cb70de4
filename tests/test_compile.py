"""torch.compile(fullgraph=True) traces through a step: writes, gathers and reads, with and without given outputs."""

import gc
import shutil

import pytest
import torch

from kvstore_kernels import (
    gather_rows,
    gqa_decode,
    kv_format,
    latent_format,
    merge_partials,
    mla_decode,
    sparse_mla_decode,
    write_rows,
)
from kvstore_kernels.library import SCHEMAS
from kvstore_kernels.pages import view_of_handle
from tests.cases import BACKENDS, make_view


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def kv_step(view, slots, key, value, table, lens, cu_row_lens, q, num_rows, backend, out=None):
    """What an engine's layer does: rows in, packed rows out, attention over the pages."""
    write_rows(view, slots, key, value, backend=backend)
    rows = gather_rows(view, table, cu_row_lens, num_rows=num_rows, backend=backend)
    scaled = q * 2
    attended = gqa_decode(view, table, lens, scaled, soft_cap=30.0, backend=backend, out=out)
    return rows[0].sum(), *attended, rows[1] + 1


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    view = make_view(kv_format(2, 64, dtype=dtype), 16, 6, fill=0)
    slots = torch.tensor([16, 17, 40, -1, 95])
    key, value = torch.randn(2, 5, 2, 64, generator=generator).to(dtype)
    table = torch.tensor([[1, 0], [2, 5]], dtype=torch.int32)
    lens = torch.tensor([2, 32], dtype=torch.int32)
    cu_row_lens = torch.tensor([0, 2, 34], dtype=torch.int32)
    q = torch.randn(2, 4, 64, generator=generator).to(dtype)
    return view, (slots, key, value, table, lens, cu_row_lens, q, 34)


def test_a_step_is_one_graph_and_gives_the_same_bits(backend):
    view, rest = inputs()
    eager = kv_step(view, *rest, backend)
    written = view.memory.clone()
    view.memory.zero_()
    compiled = torch.compile(kv_step, backend="aot_eager", fullgraph=True)(view, *rest, backend)
    assert torch.equal(view.memory, written)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled, eager, strict=True))


def test_given_outputs_are_filled():
    view, rest = inputs()
    out = torch.full((2, 4, 64), -7.0)
    result = torch.compile(kv_step, backend="aot_eager", fullgraph=True)(view, *rest, "reference", out)
    assert torch.equal(out, kv_step(view, *rest, "reference")[1])
    assert torch.equal(result[1], out)


def test_latent_rows_and_merges(backend):
    view = make_view(latent_format(72, 64, torch.float32), 16, 4, fill=0)
    generator = torch.Generator().manual_seed(1)
    rows, q = torch.randn(3, 1, 72, generator=generator), torch.randn(1, 4, 72, generator=generator)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    slots, sinks = torch.tensor([16, 17, 18]), torch.zeros(4)

    def step():
        write_rows(view, slots, rows, backend=backend)
        out, lse = mla_decode(view, table, lens, q, softmax_scale=0.1, sinks=sinks, backend=backend)
        return merge_partials(out[:, :, None].contiguous(), lse[:, :, None].contiguous(), backend=backend)

    eager = step()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled, eager, strict=True))


def test_listed_rows_of_two_caches(backend):
    views = [make_view(latent_format(64, 64, torch.float32), 16, 4, fill=0, seed=seed) for seed in (1, 2)]
    rows = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(2))
    q, slots = torch.ones(1, 2, 64), torch.tensor([16, 17, 18])

    def step():
        for view in views:
            write_rows(view, slots, rows, backend=backend)
        second = (views[1], slots[None, :1])
        return sparse_mla_decode(views[0], slots[None], q, softmax_scale=0.1, second=second, backend=backend)

    eager = step()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled, eager, strict=True))


def test_quantised_rows(backend):
    view = make_view(kv_format(2, 64, dtype=torch.float8_e4m3fn), 16, 4, fill=0)
    rows, slots = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(3)), torch.tensor([16, 5, -1])

    def step(scale):
        write_rows(view, slots, rows[0], rows[1], row_scales=(0.5, scale), backend=backend)

    step(torch.tensor([0.25]))
    written = view.memory.clone()
    view.memory.zero_()
    torch.compile(step, backend="aot_eager", fullgraph=True)(torch.tensor([0.25]))
    assert written.any()
    assert torch.equal(view.memory, written)


def test_another_view_is_not_mistaken_for_the_first():
    step = torch.compile(kv_step, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        view, rest = inputs()
        eager = kv_step(view, *rest, "reference")
        assert torch.equal(step(view, *rest, "reference")[0], eager[0])


def test_every_op_is_registered_with_a_fake():
    for name in SCHEMAS:
        op = getattr(torch.ops.kvstore_kernels, name).default
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeExplicitAutograd")


def test_handles_live_as_long_as_their_views():
    view = make_view(kv_format(1, 8), 4, 2)
    handle = view.handle
    assert view_of_handle(handle) is view
    del view
    gc.collect()
    with pytest.raises(ValueError, match="view: expected the handle of a PageView that is alive, got"):
        view_of_handle(handle)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    view, rest = inputs()
    eager = kv_step(view, *rest, "reference")
    compiled = torch.compile(kv_step, fullgraph=True)(view, *rest, "reference")
    for mine, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(mine, theirs)
