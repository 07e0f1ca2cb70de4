"""Every op in one compiled graph, on both backends, with the bits of the eager calls; what it costs to dispatch."""

import pytest
import torch

from kvstore_kernels import (
    compute_slot_mapping,
    copy_blocks,
    dsv4_format,
    fill_blocks,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    indexer_format,
    indexer_scores,
    kv_format,
    latent_format,
    layer_table,
    mla_decode,
    pack_blocks,
    read_rows,
    sparse_mla_decode,
    unpack_blocks,
    workspace_numel,
    write_layers,
    write_rows,
)
from kvstore_kernels.library import SCHEMAS, layer_args, view_args
from kvstore_kernels.pages import PageView
from tests.cases import BACKENDS, make_view

FP32, FP8 = torch.float32, torch.float8_e4m3fn


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def same_when_compiled(step, *memories):
    """The step gives the same results, and leaves the same bytes, compiled as called."""
    before = [memory.clone() for memory in memories]
    eager = step()
    written = [memory.clone() for memory in memories]
    for memory, bytes_before in zip(memories, before, strict=True):
        memory.copy_(bytes_before)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled, eager, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(memories, written, strict=True))
    return written


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TABLE = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
LENS = torch.tensor([6, 3], dtype=torch.int32)
CU_LENS = torch.tensor([0, 6, 9], dtype=torch.int32)
SLOTS = torch.tensor([4, 5, 6, 7, 8, 9, 12, 13, 14])


@pytest.mark.parametrize("make_format", [fp8_ds_mla_format, dsv4_format], ids=["656", "584"])
def test_quantised_latent_rows(backend, make_format):
    row_format = make_format()
    width = 576 if row_format.value_dim == 512 and row_format.name == "fp8_ds_mla" else 512
    view = make_view(row_format, 4, 5, fill=0)
    rows, q = randn(9, 1, width).bfloat16(), randn(2, 2, 3, width, seed=1).bfloat16()
    listed = SLOTS[torch.tensor([[0, 3, 5], [8, 2, 1]])]

    def step():
        write_rows(view, SLOTS, rows, backend=backend)
        gathered = gather_rows(view, TABLE, CU_LENS, num_rows=9, dtype=FP32, backend=backend)
        read = read_rows(view, SLOTS[:3], backend=backend)
        several = mla_decode(view, TABLE, LENS, q, softmax_scale=0.05, backend=backend)
        first = q[:, 0].contiguous()
        sparse = sparse_mla_decode(view, listed, first, softmax_scale=0.05, second=(view, listed), backend=backend)
        return *gathered, *read, *several, *sparse

    same_when_compiled(step, view.memory)


def test_scales_outside_the_cache(backend):
    view = make_view(kv_format(2, 64, dtype=FP8), 4, 5, fill=0)
    rows, q = randn(2, 9, 2, 64), randn(2, 4, 64, seed=1).bfloat16()
    scales = (0.5, torch.tensor([0.25]))

    def step():
        write_rows(view, SLOTS, *rows, row_scales=scales, backend=backend)
        gathered = gather_rows(view, TABLE, CU_LENS, num_rows=9, row_scales=scales, backend=backend)
        return *gathered, *gqa_decode(view, TABLE, LENS, q, row_scales=scales, window=4, backend=backend)

    same_when_compiled(step, view.memory)


def test_scores_of_an_indexer(backend):
    view = make_view(indexer_format(132), 4, 5, fill=0)
    rows, q, weights = randn(9, 1, 128).bfloat16(), randn(2, 4, 128, seed=1).bfloat16(), randn(2, 4, seed=2)

    def step():
        write_rows(view, SLOTS, rows, backend=backend)
        scores = indexer_scores(view, TABLE, LENS, q, weights, backend=backend)
        return scores, scores.topk(2).indices

    same_when_compiled(step, view.memory)


def test_layers_of_one_group(backend):
    views = [make_view(latent_format(64, 64, FP32), 4, 6, fill=0, seed=seed) for seed in (1, 2)]
    table = layer_table([*views, views[0]])
    rows = randn(2, 3, 1, 64).repeat(2, 1, 1, 1)[:3]
    ids, others = torch.tensor([1, 3]), torch.tensor([4, 5])

    def step():
        slots = compute_slot_mapping(TABLE, torch.arange(3), torch.zeros(3, dtype=torch.int32), 4, backend=backend)
        write_layers(table, slots, rows, backend=backend)
        copy_blocks(table, ids, others, backend=backend)
        packed = pack_blocks(table, others, backend=backend)
        fill_blocks(table, ids, 255, backend=backend)
        unpack_blocks(table, ids, packed, backend=backend)
        return slots, packed

    assert all(written.any() for written in same_when_compiled(step, *(view.memory for view in views)))


def test_two_layers_in_one_arena(backend):
    arena = torch.zeros(2 * 6 * 1024, dtype=torch.uint8)
    views = [PageView(part, 0, 1024, 6, 4, latent_format(64, 64, FP32)) for part in arena.split(6 * 1024)]
    rows, q = randn(2, 9, 1, 64), randn(2, 2, 64, seed=1)

    def step():
        results = []
        for view, new in zip(views, rows, strict=True):
            write_rows(view, SLOTS, new, backend=backend)
            results += mla_decode(view, TABLE, LENS, q, softmax_scale=0.1, backend=backend)
        return tuple(results)

    (written,) = same_when_compiled(step, arena)
    assert written.view(2, -1).any(1).all()


def test_a_list_of_views_has_no_table_inside_a_graph():
    view = make_view(latent_format(64, 64, FP32), 4, 6)

    def step(ids):
        copy_blocks([view], ids, ids + 1)

    with pytest.raises(Exception, match=r"views: expected a LayerTable inside torch\.compile, got list"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(torch.tensor([1]))


def test_schemas_name_the_tensors_that_change():
    read_only = {"gather_rows", "read_rows", "gqa_decode", "mla_decode", "sparse_mla_decode", "indexer_scores"}
    for name in SCHEMAS:
        arguments = {each.name: each for each in getattr(torch.ops.kvstore_kernels, name).default._schema.arguments}
        written = {key for key, each in arguments.items() if each.alias_info is not None and each.alias_info.is_write}
        memories = {"memory", "memories"} & arguments.keys()
        assert written - memories == {"out", "lse", "workspace"} & arguments.keys()
        assert written & memories == (set() if name in read_only | {"pack_blocks"} else memories)


def test_a_shared_memory_is_handed_over_once():
    view = make_view(latent_format(64, 64, FP32), 4, 6)
    other = PageView(view.memory, view.offset_bytes, view.block_stride_bytes, 6, 4, view.format)
    table = layer_table([view, other])
    memories, handle = layer_args(table)
    assert [memory is view.memory for memory in memories] == [True]
    assert handle == table.handle
    assert view_args(view) == (view.memory, view.handle)


def test_a_step_compiled_for_one_layer_serves_all():
    row_format = kv_format(2, 16, dtype=FP32)
    views = [make_view(row_format, 16, 8) for _ in range(12)]
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count)
    def step(view, slots, rows, table, lens, q):
        write_rows(view, slots, rows, rows)
        return gqa_decode(view, table, lens, q)

    table, lens, slots = torch.tensor([[2]]).int(), torch.tensor([3]).int(), torch.arange(32, 35)
    for idx, view in enumerate(views):
        rows = torch.full((3, 2, 16), float(idx))
        out, _ = step(view, slots, rows, table, lens, torch.ones(1, 4, 16))
        assert torch.equal(out, torch.full_like(out, idx))
    assert len(graphs) <= 2


def test_a_scale_that_no_write_takes_is_refused_in_a_graph_too():
    view = make_view(kv_format(2, 16, dtype=torch.float8_e4m3fn), 4, 6)
    before, rows = view.memory.clone(), torch.randn(1, 2, 16)
    for scales in ((0.0, 1.0), (1.0,), (None, 1.0), (True, 1.0)):

        def step(rows, scales=scales):
            write_rows(view, torch.tensor([1]), rows, rows, row_scales=scales)

        with pytest.raises(Exception, match="row_scales"):
            torch.compile(step, backend="aot_eager", fullgraph=True)(rows)
    assert torch.equal(view.memory, before)


def test_a_read_into_given_tensors_with_a_workspace_in_a_graph():
    view = make_view(latent_format(64, 48, FP32), 4, 6)
    write_rows(view, torch.arange(24), torch.randn(24, 1, 64))
    table, lens, q = torch.tensor([[1, 2, 3]]).int(), torch.tensor([11]).int(), torch.randn(1, 4, 64)
    out, lse, workspace = torch.empty(1, 4, 48), torch.empty(1, 4), torch.empty(workspace_numel(1, 4, 48, 3))

    def step(q):
        mla_decode(
            view,
            table,
            lens,
            q,
            softmax_scale=0.1,
            num_splits=3,
            out=out,
            lse=lse,
            workspace=workspace,
            backend="triton",
        )

    torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    expected = mla_decode(view, table, lens, q, softmax_scale=0.1, num_splits=3, backend="triton")
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
