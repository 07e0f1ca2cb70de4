"""copy_blocks, fill_blocks, pack_blocks and unpack_blocks against a byte-level model, kernel and reference."""

import numpy as np
import pytest
import torch
from cases import BACKENDS, make_view, sparse_memory

from kvstore_kernels import PageView, bytes_format, fp8_ds_mla_format, kv_format, latent_format, state_format
from kvstore_kernels.block_ops import copy_blocks, fill_blocks, pack_blocks, unpack_blocks
from kvstore_kernels.copy import MAX_LAYERS, MAX_TILES, TILE_BYTES, LayerTable, layer_table

NUM_BLOCKS = 5
OUTSIDE = (-1, -(2**63), NUM_BLOCKS, NUM_BLOCKS + 1, 2**31, 2**62)

# Pages of several tiles, of one tile and a bit, of less than one, padded, with scales in them, and of 16 bytes.
LAYERS = (
    (latent_format(576, 512), 16),
    (kv_format(2, 64), 17),
    (latent_format(36, 32, torch.float32), 3),
    (kv_format(1, 5, 1), 7),
    (fp8_ds_mla_format(), 2),
    (bytes_format(16), 1),
)


def overlaid(fill=None):
    """All layers in one slot tensor, gaps between their pages, in strides that have room for another group's pages."""
    gap, start = 48, 112
    total = sum(row_format.page_bytes(rows) + gap for row_format, rows in LAYERS)
    stride = total + 4096
    memory = make_view(bytes_format(16), num_blocks=NUM_BLOCKS, fill=fill, gap_bytes=stride, offset_bytes=start).memory
    views = []
    for row_format, rows in LAYERS:
        views.append(PageView(memory, start, stride, NUM_BLOCKS, rows, row_format))
        start += views[-1].page_bytes + gap
    return views


def separate(fill=None):
    """Each layer in a slot tensor of its own; other offsets and strides, one of them dense."""
    return [
        make_view(row_format, rows, NUM_BLOCKS, fill=fill, offset_bytes=32 * index, gap_bytes=80 * index, seed=index)
        for index, (row_format, rows) in enumerate(LAYERS)
    ]


def single(fill=None):
    """A recurrent state, one row a block."""
    tensors = (("conv", (3, 40), torch.bfloat16), ("ssm", (4, 16, 16), torch.float32))
    return [make_view(state_format(tensors), 1, NUM_BLOCKS, fill=fill, gap_bytes=16)]


GROUPS = {"overlaid": overlaid, "separate": separate, "single": single}
with_groups = pytest.mark.parametrize("make_group", GROUPS.values(), ids=GROUPS)
with_backends = pytest.mark.parametrize("backend", BACKENDS)


class Model:
    """All bytes of the memory under some views, before the op; `page` is where a test writes what it expects."""

    def __init__(self, views):
        self.memory = {view.memory.data_ptr(): (view.memory, view.memory.numpy().copy()) for view in views}

    def page(self, view, block_id):
        first = view.offset_bytes + block_id * view.block_stride_bytes
        return self.memory[view.memory.data_ptr()][1][first : first + view.page_bytes]

    def packed(self, views, block_ids):
        rows = [
            [self.page(view, i) if 0 <= i < NUM_BLOCKS else np.zeros(view.page_bytes, np.uint8) for view in views]
            for i in block_ids
        ]
        return np.stack([np.concatenate(row) for row in rows])

    def check(self):
        for memory, expected in self.memory.values():
            np.testing.assert_array_equal(memory.numpy(), expected)


def ids(*block_ids):
    return torch.tensor(block_ids, dtype=torch.int64)


def noise(num_rows, row_bytes):
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, (num_rows, row_bytes), dtype=np.uint8))


@with_groups
@with_backends
def test_copy(make_group, backend):
    views = make_group()
    model = Model(views)
    for view in views:
        for src, dst in ((3, 4), (3, 0), (1, 2)):
            model.page(view, dst)[:] = model.page(view, src)
    copy_blocks(views, ids(3, 3, 1), ids(4, 0, 2), backend=backend)
    model.check()


@pytest.mark.parametrize("outside", OUTSIDE)
@with_backends
def test_copy_skips_ids_outside(outside, backend):
    views = separate()
    model = Model(views)
    for view in views:
        model.page(view, 4)[:] = model.page(view, 0)
    # Skipped entries count for nothing: 0 may be a destination there, 4 a source.
    copy_blocks(views, ids(outside, 0, 4, outside), ids(0, 4, outside, outside), backend=backend)
    model.check()


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (ids(0, 1), ids(3, 3), r"dst: expected every block at most once, got \[3\] again"),
        (ids(0, 1), ids(1, 2), r"dst: expected no block that is a source too, got \[1\]"),
        (ids(0, 2), ids(4, 2), r"dst: expected no block that is a source too, got \[2\]"),
        (ids(0, 1), ids(2, 3, 4), r"dst: expected shape \[2\], got \[3\]"),
    ],
    ids=["destination twice", "chain", "onto itself", "another length"],
)
@with_backends
def test_a_destination_occurs_once_and_is_no_source(src, dst, message, backend):
    views = separate()
    model = Model(views)
    with pytest.raises(ValueError, match=message):
        copy_blocks(views, src, dst, backend=backend)
    model.check()


@pytest.mark.parametrize("value", [0, 1, 0x80, 0xA5, 0xFF])
@with_groups
@with_backends
def test_fill(make_group, value, backend):
    views = make_group(fill=0x5A)
    model = Model(views)
    for view in views:
        for block_id in (0, 4, 2):
            model.page(view, block_id)[:] = value
    fill_blocks(views, ids(4, 0, -1, 2, 0, NUM_BLOCKS), value, backend=backend)
    model.check()


@with_groups
@with_backends
def test_pack(make_group, backend):
    views = make_group()
    model = Model(views)
    block_ids = (4, -1, 0, 4, NUM_BLOCKS, 2)
    packed = pack_blocks(views, ids(*block_ids), backend=backend)
    assert (packed.dtype, packed.is_contiguous()) == (torch.uint8, True)
    np.testing.assert_array_equal(packed.numpy(), model.packed(views, block_ids))
    model.check()


@pytest.mark.parametrize("outside", OUTSIDE)
@with_backends
def test_pack_into_a_given_buffer_and_nothing_beside_it(outside, backend):
    views = separate()
    model = Model(views)
    buffer = noise(5, sum(view.page_bytes for view in views))
    before, out = buffer.clone(), buffer[1:4]
    assert pack_blocks(views, ids(1, outside, 3), out, backend=backend) is out
    np.testing.assert_array_equal(out.numpy(), model.packed(views, (1, outside, 3)))
    assert torch.equal(buffer[[0, 4]], before[[0, 4]])
    model.check()


@with_groups
@with_backends
def test_unpack(make_group, backend):
    views = make_group()
    model = Model(views)
    packed = noise(4, sum(view.page_bytes for view in views))
    rows = packed.clone()
    for view, columns in zip(views, rows.split([view.page_bytes for view in views], dim=1), strict=True):
        for row, block_id in ((0, 4), (2, 0)):
            model.page(view, block_id)[:] = columns[row].numpy()
    unpack_blocks(views, ids(4, -1, 0, NUM_BLOCKS), packed, backend=backend)
    model.check()
    assert torch.equal(packed, rows)


@pytest.mark.parametrize("outside", OUTSIDE)
@with_backends
def test_fill_and_unpack_skip_ids_outside(outside, backend):
    views = separate()
    model = Model(views)
    fill_blocks(views, ids(outside), 0, backend=backend)
    unpack_blocks(views, ids(outside, outside), noise(2, layer_table(views).packed_bytes), backend=backend)
    model.check()


@with_backends
def test_unpack_takes_a_block_once(backend):
    views = single()
    model = Model(views)
    with pytest.raises(ValueError, match=r"block_ids: expected every block at most once, got \[1, 3\] again"):
        unpack_blocks(views, ids(3, 1, 3, 1, 2), noise(5, views[0].page_bytes), backend=backend)
    model.check()


@pytest.mark.parametrize("unpacking", BACKENDS)
@pytest.mark.parametrize("packing", BACKENDS)
def test_pages_travel_from_one_layout_to_another(packing, unpacking):
    source, target = overlaid(), separate(fill=0)
    unpack_blocks(target, ids(2, 0), pack_blocks(source, ids(1, 4), backend=packing), backend=unpacking)
    expected, got = Model(source), Model(target)
    for theirs, ours in zip(source, target, strict=True):
        np.testing.assert_array_equal(got.page(ours, 2), expected.page(theirs, 1))
        np.testing.assert_array_equal(got.page(ours, 0), expected.page(theirs, 4))


@with_groups
@with_backends
def test_no_ids_change_nothing(make_group, backend):
    views = make_group()
    model = Model(views)
    copy_blocks(views, ids(), ids(), backend=backend)
    fill_blocks(views, ids(), 0, backend=backend)
    packed = pack_blocks(views, ids(), backend=backend)
    assert packed.shape == (0, layer_table(views).packed_bytes)
    unpack_blocks(views, ids(), packed, backend=backend)
    model.check()


@with_backends
def test_a_table_stands_for_its_views(backend):
    views = overlaid()
    table = layer_table(views)
    assert layer_table(table) is table
    model = Model(views)
    for view in views:
        model.page(view, 3)[:] = model.page(view, 1)
        model.page(view, 0)[:] = 7
        model.page(view, 4)[:] = model.page(view, 2)
    copy_blocks(table, ids(1), ids(3), backend=backend)
    fill_blocks(table, ids(0), 7, backend=backend)
    unpack_blocks(table, ids(4), pack_blocks(table, ids(2), backend=backend), backend=backend)
    model.check()


def test_a_table_is_made_of_a_tuple_and_keeps_its_memory_alive():
    with pytest.raises(TypeError, match="views: expected a tuple of PageViews, got list"):
        LayerTable(single())
    table = layer_table(single(fill=9))
    assert pack_blocks(table, ids(4), backend="triton").unique().tolist() == [9]


@with_backends
def test_memory_that_starts_at_no_multiple_of_eight_bytes_of_its_storage(backend):
    stride = 64
    buffer = np.random.default_rng(0).integers(0, 256, 32 + NUM_BLOCKS * stride, dtype=np.uint8)
    odd = (4 - buffer.ctypes.data) % 16
    memory = torch.from_numpy(buffer[odd:])[12:][: NUM_BLOCKS * stride]
    assert memory.storage_offset() == 12
    view = PageView(memory, 0, stride, NUM_BLOCKS, 1, bytes_format(48))
    model = Model([view])
    model.page(view, 3)[:] = model.page(view, 4)
    model.page(view, 4)[:] = model.page(view, 1)
    model.page(view, 2)[:] = 200
    unpack_blocks([view], ids(3), pack_blocks([view], ids(4), backend=backend), backend=backend)
    copy_blocks([view], ids(1), ids(4), backend=backend)
    fill_blocks([view], ids(2), 200, backend=backend)
    model.check()


@with_backends
def test_blocks_beyond_32_bit(backend):
    # Block 1 lies behind 2^32 bytes and 2^31 words, block 2 behind 2^31 units of 16 bytes.
    stride = 2**34 + 2**20
    row_format = kv_format(2, 64)
    page_bytes = row_format.page_bytes(17)
    memory = sparse_memory(80 + 2 * stride + 2 * page_bytes)
    views = [PageView(memory, offset, stride, 3, 17, row_format) for offset in (48, 64 + page_bytes)]
    rows = noise(1, 2 * page_bytes)
    unpack_blocks(views, ids(2), rows, backend=backend)
    copy_blocks(views, ids(2), ids(1), backend=backend)
    assert torch.equal(pack_blocks(views, ids(1), backend=backend), rows)
    fill_blocks(views, ids(2), 0xFF, backend=backend)
    # The 16 bytes before, between and behind the two pages stay zero.
    gap = torch.zeros(16, dtype=torch.uint8)
    ones = torch.full((page_bytes,), 0xFF, dtype=torch.uint8)
    pages = {0: (gap.new_zeros(page_bytes),) * 2, 1: rows[0].split(page_bytes), 2: (ones, ones)}
    for block_id, (one, other) in pages.items():
        around = memory[32 + block_id * stride :][: 2 * page_bytes + 48]
        assert torch.equal(around, torch.cat([gap, one, gap, other, gap]))


IDS = ids(0, 1)
BAD_IDS = {
    "list": ([0, 1], TypeError, "{}: expected a torch.Tensor, got list"),
    "int32": (IDS.int(), ValueError, "{}: expected dtype torch.int64, got torch.int32"),
    "2-D": (IDS[None], ValueError, r"{}: expected shape \[any\], got \[1, 2\]"),
    "on meta": (IDS.to("meta"), ValueError, "{}: expected a tensor on cpu, got one on meta"),
    "strided": (torch.arange(4)[::2], ValueError, "{}: expected elements one behind the other"),
}


@pytest.mark.parametrize("case", BAD_IDS)
@with_backends
def test_bad_ids(case, backend):
    bad, error, message = BAD_IDS[case]
    views = single()
    model = Model(views)
    packed = noise(2, views[0].page_bytes)
    for name, call in (
        ("src", lambda: copy_blocks(views, bad, IDS + 2, backend=backend)),
        ("dst", lambda: copy_blocks(views, IDS + 2, bad, backend=backend)),
        ("block_ids", lambda: fill_blocks(views, bad, 0, backend=backend)),
        ("block_ids", lambda: pack_blocks(views, bad, backend=backend)),
        ("block_ids", lambda: unpack_blocks(views, bad, packed, backend=backend)),
    ):
        with pytest.raises(error, match=message.format(name)):
            call()
    model.check()


BAD_VALUES = (
    (256, ValueError, r"value: expected an integer in \[0, 255\], got 256"),
    (0.0, TypeError, "value: expected an integer, got 0.0 of type float"),
)


@pytest.mark.parametrize(("value", "error", "message"), BAD_VALUES)
@with_backends
def test_bad_values(value, error, message, backend):
    with pytest.raises(error, match=message):
        fill_blocks(single(), IDS, value, backend=backend)


ROW = single()[0].page_bytes
BUFFER = torch.zeros(2 * (ROW + 16), dtype=torch.uint8)
MISPLACED = "{}: expected contiguous bytes whose address is a multiple of 16"
BAD_BUFFERS = {
    "list": ([0], TypeError, "{}: expected a torch.Tensor, got list"),
    "flat": (BUFFER, ValueError, r"{}: expected shape \[2, \d+\], got \[\d+\]"),
    "short": (BUFFER[:ROW].view(1, ROW), ValueError, r"{}: expected shape \[2, \d+\], got \[1, \d+\]"),
    "int8": (torch.zeros(2, ROW, dtype=torch.int8), ValueError, "{}: expected dtype torch.uint8, got torch.int8"),
    "meta": (BUFFER[: 2 * ROW].view(2, ROW).to("meta"), ValueError, "{}: expected a tensor on cpu, got one on meta"),
    "strided": (BUFFER.view(2, ROW + 16)[:, :ROW], ValueError, MISPLACED),
    "unaligned": (BUFFER[8 - BUFFER.data_ptr() % 8 :][: 2 * ROW].view(2, ROW), ValueError, MISPLACED),
}


@pytest.mark.parametrize("case", BAD_BUFFERS)
@with_backends
def test_bad_buffers(case, backend):
    bad, error, message = BAD_BUFFERS[case]
    views = single()
    model = Model(views)
    with pytest.raises(error, match=message.format("out")):
        pack_blocks(views, IDS, bad, backend=backend)
    with pytest.raises(error, match=message.format("packed")):
        unpack_blocks(views, IDS, bad, backend=backend)
    model.check()


VIEW = single()[0]
OTHER = make_view(VIEW.format, 1, NUM_BLOCKS + 1)
ON_META = PageView(VIEW.memory.to("meta"), VIEW.offset_bytes, VIEW.block_stride_bytes, NUM_BLOCKS, 1, VIEW.format)
HUGE_BYTES = MAX_TILES * TILE_BYTES + 16
HUGE = PageView(
    torch.empty(HUGE_BYTES, dtype=torch.uint8, device="meta"), 0, HUGE_BYTES, 1, 1, bytes_format(HUGE_BYTES)
)
BAD_VIEWS = {
    "one view": (VIEW, TypeError, "views: expected a list or tuple of PageViews, or a LayerTable, got PageView"),
    "none": ([], ValueError, f"views: expected 1 to {MAX_LAYERS} PageViews, got 0"),
    "too many": ([VIEW] * (MAX_LAYERS + 1), ValueError, f"views: expected 1 to {MAX_LAYERS} PageViews, got 65536"),
    "tensors": ([VIEW, VIEW.memory], TypeError, "views: expected PageViews, got Tensor"),
    "more blocks": ([VIEW, OTHER], ValueError, "views: expected 5 blocks in every layer, got 6 in 1"),
    "two devices": ([VIEW, VIEW, ON_META], ValueError, "views: expected every layer on cpu, got 2 on meta"),
    "huge pages": ([HUGE], ValueError, f"views: expected pages of at most 536862720 bytes, got {HUGE_BYTES} in 0"),
}


@pytest.mark.parametrize("case", BAD_VIEWS)
@with_backends
def test_bad_views(case, backend):
    views, error, message = BAD_VIEWS[case]
    packed = noise(2, ROW)
    for call in (
        lambda: copy_blocks(views, IDS, IDS + 2, backend=backend),
        lambda: fill_blocks(views, IDS, 0, backend=backend),
        lambda: pack_blocks(views, IDS, backend=backend),
        lambda: unpack_blocks(views, IDS, packed, backend=backend),
    ):
        with pytest.raises(error, match=message):
            call()


def test_backend():
    views = single(fill=1)
    fill_blocks(views, IDS, 2)  # the reference, on a CPU
    assert set(views[0].memory.unique().tolist()) == {1, 2}
    with pytest.raises(ValueError, match="backend: expected one of triton, reference or None, got 'numpy'"):
        fill_blocks(views, IDS, 2, backend="numpy")
    with pytest.raises(ValueError, match="layers on cpu under Triton's interpreter, got them on meta"):
        fill_blocks([ON_META], IDS.to("meta"), 2, backend="triton")
