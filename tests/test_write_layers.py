"""write_layers against a loop of write_rows over the layers, and against the byte-level model; kernel and reference."""

import numpy as np
import pytest
import torch
from cases import BACKENDS, FORMAT_NAMES, POISON, expected_memory, make_format, make_view, random_parts, sparse_memory
from test_quantised_write import FORMATS as QUANTISED
from test_quantised_write import TWO_PIECES, hostile_rows

from kvstore_kernels import (
    PageView,
    bytes_format,
    fp8_ds_mla_format,
    kv_format,
    latent_format,
    layer_table,
    write_layers,
    write_rows,
)
from kvstore_kernels.launch import Target
from kvstore_kernels.quant_write import quant_layers_launch
from kvstore_kernels.write import write_layers_launch

with_backends = pytest.mark.parametrize("backend", BACKENDS)
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
NUM_BLOCKS, ROWS_PER_BLOCK = 4, 3
CAPACITY = NUM_BLOCKS * ROWS_PER_BLOCK
# For each of three layers: the first and the last row, rows of one block, slots that name none.
SLOTS = torch.tensor(
    [[CAPACITY - 1, 0, -1, 4, 3], [5, CAPACITY, 1, -(2**63), 0], [2**62, 2, CAPACITY - 1, 10, CAPACITY + 1]]
)
SHAPES = {"one mapping": SLOTS[0], "a mapping per layer": SLOTS}
with_slots = pytest.mark.parametrize("slots", SHAPES.values(), ids=SHAPES)


def overlaid(row_format, fill=None, num_layers=3):
    """All layers in one memory, each block's pages 48 bytes apart, strides with room for another group's pages."""
    page = row_format.page_bytes(ROWS_PER_BLOCK)
    stride = num_layers * (page + 48) + 1024
    memory = make_view(bytes_format(16), 1, NUM_BLOCKS, fill=fill, gap_bytes=stride, offset_bytes=112).memory
    return [
        PageView(memory, 112 + layer_idx * (page + 48), stride, NUM_BLOCKS, ROWS_PER_BLOCK, row_format)
        for layer_idx in range(num_layers)
    ]


def separate(row_format, fill=None, num_layers=3):
    """Each layer in a memory of its own, with an offset and a stride of its own; those of the first are dense."""
    return [
        make_view(
            row_format,
            ROWS_PER_BLOCK,
            NUM_BLOCKS,
            fill=fill,
            offset_bytes=32 * layer_idx,
            gap_bytes=80 * layer_idx,
            seed=layer_idx,
        )
        for layer_idx in range(num_layers)
    ]


GROUPS = {"overlaid": overlaid, "separate": separate}
with_groups = pytest.mark.parametrize("make_group", GROUPS.values(), ids=GROUPS)


def memories(views):
    """Every byte under some views."""
    return [memory.numpy().copy() for memory in {view.memory.data_ptr(): view.memory for view in views}.values()]


def write_and_compare(
    make_group, row_format, slots, parts, backend, sources=None, scales=None, num_layers=3, **options
):
    """Writes `sources` (None: `parts`) at once and `parts` layer by layer, and compares all bytes of the memories.

    `scales`: for each layer the row scales of its own write; None: those in `options`.
    """
    views, wanted = (make_group(row_format, num_layers=num_layers) for _ in range(2))
    write_layers(views, slots, *(sources or parts), backend=backend, **options)
    for layer_idx, view in enumerate(wanted):
        mapping = slots if slots.ndim == 1 else slots[layer_idx]
        rows = [part[layer_idx] for part in parts]
        own = options if scales is None else {"row_scales": scales[layer_idx]}
        write_rows(view, mapping, *rows, backend="reference", **own)
    for got, want in zip(memories(views), memories(wanted), strict=True):
        np.testing.assert_array_equal(got, want)


def plain_parts(row_format, num_rows=5, num_layers=3):
    """For each part [num_layers, num_rows, num_heads, head_dim] of random bits."""
    return [part.unflatten(0, (num_layers, num_rows)) for part in random_parts(row_format, num_layers * num_rows)]


def quantised_parts(name, num_rows=5, num_layers=3, dtype=BF16):
    """For each tensor of a quantised format [num_layers, num_rows, width] of rows of every kind."""
    _, widths, _, _ = QUANTISED[name]
    rows = [
        torch.cat([hostile_rows(width, dtype, seed), hostile_rows(width, dtype, 9 + seed)])
        for seed, width in enumerate(widths)
    ]
    return [part[: num_layers * num_rows].unflatten(0, (num_layers, num_rows)) for part in rows]


@with_slots
@with_groups
@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 72), (FP32, 64), (torch.float16, 6)], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
@with_backends
def test_plain_rows(name, dtype, head_dim, make_group, slots, backend):
    row_format = make_format(name, head_dim, dtype)
    write_and_compare(make_group, row_format, slots, plain_parts(row_format), backend)


@pytest.mark.parametrize(("make_group", "slots"), list(zip(GROUPS.values(), SHAPES.values(), strict=True)), ids=GROUPS)
@pytest.mark.parametrize("name", QUANTISED)
@with_backends
def test_quantised_rows(name, make_group, slots, backend):
    row_format, _, _, options = QUANTISED[name]
    write_and_compare(make_group, row_format, slots, quantised_parts(name), backend, **options)


@pytest.mark.parametrize("fill", [0, POISON])
@pytest.mark.parametrize("name", FORMAT_NAMES)
@with_backends
def test_canaries_and_the_byte_model(name, fill, backend):
    """Two layers share a memory: what the model expects of one is what the other finds around its pages."""
    views = overlaid(make_format(name, 64, BF16), fill)
    parts = plain_parts(views[0].format)
    twin = overlaid(views[0].format, fill)
    for layer_idx, view in enumerate(twin):
        expected = expected_memory(view, SLOTS[layer_idx].tolist(), [part[layer_idx].contiguous() for part in parts])
        view.memory.numpy()[:] = expected
    write_layers(views, SLOTS, *parts, backend=backend)
    np.testing.assert_array_equal(views[0].memory.numpy(), expected)


STRIDES = {"units": (8, 64, 8), "odd rows": (1, 64, 8), "odd layers": (8, 63, 8), "odd start": (8, 64, 3)}
WIDE = {
    "kv": (kv_format(2, 64, 32), (128, 64)),
    "latent": (latent_format(72, 48), (72,)),
    "nope and rope": (latent_format(72, 48), (48, 24)),
    "fp8_ds_mla": (fp8_ds_mla_format(), (576,)),
    "kv of fp8": (kv_format(2, 40, 24, FP8), (80, 48)),
}


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("name", WIDE)
@with_backends
def test_sources_with_any_stride_of_rows_and_layers(name, kind, backend):
    """Parts of one fused tensor; what lies between the rows is NaN."""
    row_format, widths = WIDE[name]
    row_gap, layer_gap, start = STRIDES[kind]
    row_stride = sum(widths) + row_gap
    layer_stride = 5 * row_stride + layer_gap
    fused = torch.full((start + 3 * layer_stride,), float("nan"), dtype=BF16)
    parts, sources = [], []
    for width in widths:
        rows = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(width)).to(BF16)
        parts.append(rows)
        sources.append(fused.as_strided((3, 5, width), (layer_stride, row_stride, 1), start).copy_(rows))
        start += width
    write_and_compare(overlaid, row_format, SLOTS, parts, backend, sources)


def test_the_strides_of_a_launch_are_those_of_rows_and_layers():
    """In units of 16 bytes where both allow it: an odd layer stride makes single elements of both."""
    for layer_stride, wanted in ((640, (16, 80, 8)), (641, (128, 641, 1))):
        part = torch.zeros(3 * 641, dtype=BF16).as_strided((3, 5, 72), (layer_stride, 128, 1))
        views = layer_table(separate(latent_format(72, 48)))
        launch = write_layers_launch(views, SLOTS, (part,), Target("cuda", 90, 32))
        names = ("first_stride", "first_layer_stride")
        assert (*(launch.args[name] for name in names), launch.constexprs["FIRST_UNIT"]) == wanted
        assert launch.args["slot_layer_stride"] == 5


@with_backends
def test_layers_that_share_their_rows(backend):
    row_format = make_format("kv", 72, BF16)
    parts = [part[:1].expand(3, -1, -1, -1) for part in plain_parts(row_format)]
    write_and_compare(separate, row_format, SLOTS, parts, backend)
    _, _, _, options = QUANTISED["kv of fp8"]
    parts = [part[:1].expand(3, -1, -1) for part in quantised_parts("kv of fp8")]
    write_and_compare(separate, QUANTISED["kv of fp8"][0], SLOTS[0], parts, backend, **options)


@pytest.mark.parametrize("name", TWO_PIECES)
@with_backends
def test_nope_and_rope_of_quantised_rows_from_two_tensors(name, backend):
    row_format, _, _, options = QUANTISED[name]
    (rows,) = quantised_parts(name)
    sources = [rows[..., : TWO_PIECES[name]].contiguous(), rows[:, :, None, TWO_PIECES[name] :]]
    write_and_compare(separate, row_format, SLOTS, [rows], backend, sources, **options)


@pytest.mark.parametrize("name", ["latent", "fp8_ds_mla"])
@with_backends
def test_sources_with_a_head_axis_a_gradient_or_a_lazy_sign(name, backend):
    row_format = fp8_ds_mla_format() if name == "fp8_ds_mla" else latent_format(576, 512)
    rows = torch.randn(3, 5, 576, generator=torch.Generator().manual_seed(3)).to(BF16)
    by_head = rows[:, :, None].clone().requires_grad_()
    write_and_compare(separate, row_format, SLOTS, [rows], backend, [by_head])
    write_and_compare(separate, row_format, SLOTS, [rows], backend, [torch._neg_view(-rows)])


@with_slots
@pytest.mark.parametrize("name", ["kv", "dsv4"])
@with_backends
def test_rows_behind_the_last_slot_are_ignored(name, slots, backend):
    for count in (0, 2):  # O27, O33
        if name == "kv":
            row_format = make_format("kv", 64, BF16)
            write_and_compare(separate, row_format, slots[..., :count], plain_parts(row_format), backend)
        else:
            write_and_compare(separate, QUANTISED[name][0], slots[..., :count], quantised_parts(name), backend)


def test_zero_rows_launch_nothing():
    meta = torch.zeros(3, 0, 2, 72, dtype=BF16)
    plain = write_layers_launch(
        layer_table(separate(kv_format(2, 72))), SLOTS[:, :0], (meta, meta), Target("cuda", 90, 32)
    )
    rows = torch.zeros(3, 0, 576)
    quantised = quant_layers_launch(
        layer_table(separate(fp8_ds_mla_format())), SLOTS[:, :0], (rows,), Target("cuda", 90, 32)
    )
    assert (plain.grid, quantised.grid) == ((0, 3), (0, 1, 3))


@pytest.mark.parametrize("slot", [-1, -2, -(2**63), CAPACITY, 2**31, 2**62])
@with_backends
def test_o26_a_slot_outside_is_skipped_in_every_layer(slot, backend):
    row_format = make_format("kv", 64, BF16)
    slots = torch.tensor([[slot, 1], [0, slot], [slot, slot]])
    write_and_compare(overlaid, row_format, slots, plain_parts(row_format, 2), backend)
    write_and_compare(overlaid, QUANTISED["dsv4"][0], slots, quantised_parts("dsv4", 2), backend)


@with_slots
@with_backends
def test_one_layer(slots, backend):
    slots = slots[:1] if slots.ndim == 2 else slots
    row_format = make_format("latent", 72, BF16)
    write_and_compare(separate, row_format, slots, plain_parts(row_format, num_layers=1), backend, num_layers=1)


@with_backends
def test_slots_of_layers_any_distance_apart(backend):
    row_format = make_format("kv", 64, BF16)
    for slots in (SLOTS.new_zeros(3, 8)[:, 1:6].copy_(SLOTS), SLOTS[:1].expand(3, -1)):
        write_and_compare(separate, row_format, slots, plain_parts(row_format), backend)


PER_LAYER = torch.tensor([0.3, 2.75, 0.04])


@pytest.mark.parametrize(
    ("row_scales", "scales"),
    [
        (None, [None] * 3),
        ((0.3, 3), [(0.3, 3)] * 3),
        ((torch.tensor(0.3), torch.tensor([[2.75]])), [(0.3, 2.75)] * 3),
        ((PER_LAYER, 3.0), [(scale, 3.0) for scale in PER_LAYER.tolist()]),
        ((0.5, PER_LAYER), [(0.5, scale) for scale in PER_LAYER.tolist()]),
        ((PER_LAYER.flip(0), PER_LAYER), list(zip(PER_LAYER.flip(0).tolist(), PER_LAYER.tolist(), strict=True))),
    ],
    ids=["none", "numbers", "one element", "k per layer", "v per layer", "both per layer"],
)
@pytest.mark.parametrize("name", ["kv of fp8", "kv_packed of fp8"])
@with_backends
def test_o30_scales_outside_the_cache(name, row_scales, scales, backend):
    parts = quantised_parts(name)
    write_and_compare(separate, QUANTISED[name][0], SLOTS, parts, backend, scales=scales, row_scales=row_scales)


@with_backends
def test_a_scale_per_layer_of_nope_and_rope(backend):
    (rows,) = quantised_parts("latent of fp8")
    sources = [rows[..., :512].contiguous(), rows[..., 512:].contiguous()]
    scales = PER_LAYER.tolist()
    write_and_compare(
        overlaid, QUANTISED["latent of fp8"][0], SLOTS, [rows], backend, sources, scales, row_scales=PER_LAYER
    )


@with_backends
def test_a_table_serves_many_calls(backend):
    row_format = make_format("kv", 64, BF16)
    views, wanted = separate(row_format), separate(row_format)
    table = layer_table(views)
    for seed in range(3):
        parts = plain_parts(row_format)
        write_layers(table, SLOTS.roll(seed, 1), *parts, backend=backend)
        write_layers(wanted, SLOTS.roll(seed, 1), *parts, backend="reference")
    for got, want in zip(memories(views), memories(wanted), strict=True):
        np.testing.assert_array_equal(got, want)


@with_backends
def test_o25_rows_and_pages_behind_2_gib(backend):
    row_format = latent_format(8, 4)
    layer_stride, block_stride = 2**31 + 8, 2**32 + 32
    rows = sparse_memory(2 * (layer_stride + 64)).view(BF16).as_strided((2, 2, 8), (layer_stride, 8, 1))
    rows.copy_(torch.arange(32).view(2, 2, 8))
    memory = sparse_memory(2 * block_stride + 64)
    views = [PageView(memory, offset, block_stride, 2, 1, row_format) for offset in (0, 16)]
    write_layers(views, torch.tensor([1, 0]), rows, backend=backend)
    for layer_idx, view in enumerate(views):
        assert view.tensor("latent").flatten(1).tolist() == rows[layer_idx].flip(0).tolist()
    assert not memory[32:64].any()
