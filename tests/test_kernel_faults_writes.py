"""Faults that writes of other stores have had, by number (O25 to O35), with the figures that triggered them."""

import numpy as np
import pytest
import torch

import kvstore
from kvstore import KVStore
from kvstore_kernels import (
    PageView,
    bytes_format,
    fill_blocks,
    fp8_ds_mla_format,
    gather_rows,
    index_checks,
    kv_format,
    latent_format,
    read_rows,
    write_rows,
)
from tests.cases import (
    BACKENDS,
    expected_memory,
    make_format,
    make_view,
    random_parts,
    row_places,
    sparse_memory,
    to_bytes,
)

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def row_bytes(view: PageView, slot: int) -> np.ndarray:
    """All bytes of one row, whatever parts it has."""
    memory = view.memory.numpy()
    return np.concatenate([memory[place] for place in row_places(view, *divmod(slot, view.rows_per_block))])


def test_o25_the_offset_of_block_32768_passes_32_bit(backend: str) -> None:
    """32 heads x 128 x 16 tokens are 65,536 elements a block: block 32,768 begins at element 2^31."""
    row_format = latent_format(32 * 128, 32 * 128, BF16)
    page_bytes = row_format.page_bytes(16)
    assert 32_768 * page_bytes // 2 == 2**31
    view = PageView(sparse_memory(32_769 * page_bytes), 0, page_bytes, 32_769, 16, row_format)
    (latent,) = random_parts(row_format, 2)
    slots = (32_768 * 16, 32_768 * 16 + 15)
    write_rows(view, slots_of(*slots), latent, backend=backend)
    for row, slot in enumerate(slots):
        np.testing.assert_array_equal(row_bytes(view, slot), to_bytes(latent)[row])
    for block_id in (0, 1, 16_384, 32_767):  # where an offset of 32 or 31 bits would lead, and the neighbour
        assert not view.memory[block_id * page_bytes :][:page_bytes].any()


def test_o25_quantised_rows_a_stride_of_2_gib_apart(backend: str) -> None:
    """One byte per value: with blocks 2^31 B apart the second already passes 32 bits, block 16 also 2^31 x 16 B."""
    row_format = latent_format(64, 64, FP8)
    stride = 2**31
    view = PageView(sparse_memory(16 * stride + 64), 0, stride, 17, 1, row_format)
    values = torch.tensor([1.0, 2.0, 3.0])[:, None].repeat(1, 64)
    write_rows(view, slots_of(1, 2, 16), values, row_scales=1.0, backend=backend)
    got = [view.memory[block_id * stride :][:64].view(FP8).float() for block_id in (0, 1, 2, 15, 16)]
    assert [page.unique().tolist() for page in got] == [[0.0], [1.0], [2.0], [0.0], [3.0]]


@pytest.mark.parametrize("name", ["kv", "latent", "fp8_ds_mla"])
def test_o26_slot_minus_1_does_not_wrap_to_slot_7(name: str, backend: str) -> None:
    """2 blocks of 4, slots 0, 1 and -1."""
    row_format = fp8_ds_mla_format() if name == "fp8_ds_mla" else make_format(name, 64, BF16)
    view = make_view(row_format, rows_per_block=4, num_blocks=2)
    parts = [torch.ones(3, 1, 576)] if row_format.quantised else random_parts(row_format, 3)
    before = view.memory.numpy().copy()
    write_rows(view, slots_of(0, 1, -1), *parts, backend=backend)
    changed = view.memory.numpy() != before
    assert changed.any()
    for place in (place for slot in (0, 1) for place in row_places(view, 0, slot)):
        changed[place] = False
    assert not changed.any()


@pytest.mark.parametrize("name", ["kv", "fp8_ds_mla"])
def test_o27_5_slots_for_8_rows_and_9_slots_for_8_rows(name: str, backend: str) -> None:
    row_format = fp8_ds_mla_format() if name == "fp8_ds_mla" else make_format(name, 64, BF16)
    padded, cut = make_view(row_format), make_view(row_format)
    parts = [torch.randn(8, 1, 576)] if row_format.quantised else random_parts(row_format, 8)
    slots = slots_of(9, 2, 40, 41, 63)
    write_rows(padded, slots, *parts, backend=backend)
    write_rows(cut, slots, *(part[:5] for part in parts), backend=backend)
    assert torch.equal(padded.memory, cut.memory)
    assert not torch.equal(padded.memory, make_view(row_format).memory)
    with pytest.raises(ValueError, match=r"slot_mapping: expected at most 8 slots, the number of rows in .*, got 9"):
        write_rows(padded, torch.arange(9), *parts, backend=backend)
    assert torch.equal(padded.memory, cut.memory)


def test_o28_k_of_block_1_is_at_offset_8(backend: str) -> None:
    """2 blocks of K and V, 1 token, 1 head, 4 values; K is every other 4 values: V of block 0 lies at offset 4."""
    cache = torch.zeros(16)
    view = PageView(cache.view(torch.uint8), 0, 32, 2, 1, latent_format(4, 4, FP32))
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    write_rows(view, slots_of(1), row, backend=backend)
    assert cache.tolist() == [0.0] * 8 + [1.0, 2.0, 3.0, 4.0] + [0.0] * 4
    assert torch.equal(view.tensor("latent"), cache.view(2, 2, 1, 1, 4)[:, 0])
    table, cu_row_lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    (got,) = gather_rows(view, table, cu_row_lens, num_rows=1, backend=backend)
    assert torch.equal(got[:, 0], row)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_o29_1000_becomes_448_and_never_nan(dtype: torch.dtype, backend: str) -> None:
    """Infinite values become the largest finite ones too; only NaN stays NaN."""
    values = [1000.0, -1000.0, 448.0, 464.0, torch.inf, -torch.inf, 1.0, torch.nan]
    codes = [0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0xFE, 0x38, 0x7F]
    view = make_view(latent_format(8, 8, FP8), 1, 1, fill=0)
    write_rows(view, slots_of(0), torch.tensor([values], dtype=dtype), row_scales=1.0, backend=backend)
    assert row_bytes(view, 0).tolist() == codes


@pytest.mark.parametrize("row_scale", [0.04, 1.0, 0.125, 3.0])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_o30_what_is_written_with_a_scale_comes_back_with_it(row_scale: float, as_tensor: bool, backend: str) -> None:
    """1.0 with a scale of 0.04 is stored as 24 (of 25, ties to even), not as 1.0, which would come back as 0.04."""
    view = make_view(latent_format(16, 16, FP8), 4, 2, fill=0)
    scale = torch.tensor([row_scale]) if as_tensor else row_scale
    write_rows(view, slots_of(5), torch.ones(1, 16), row_scales=scale, backend=backend)
    stored = view.tensor("latent")[1, 1].float().unique().item()
    assert stored == pytest.approx(1 / row_scale, rel=2.0**-4)
    table, cu_row_lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    first_row = torch.tensor([1], dtype=torch.int32)
    (read,) = read_rows(view, slots_of(5), dtype=FP32, row_scales=[scale], backend=backend)
    (gathered,) = gather_rows(
        view, table, cu_row_lens, num_rows=1, start=first_row, dtype=FP32, row_scales=[scale], backend=backend
    )
    assert read.unique().item() == pytest.approx(1.0, rel=2.0**-4)
    assert torch.equal(read, gathered)


def test_o31_a_layer_that_shares_a_cache_cannot_write_to_it(backend: str) -> None:
    """L1 reads the cache of L0: slot 0 keeps the 1.0 of L0 when L1 tries to write 2.0."""
    specs = {"L0": kvstore.full_attention(1, 8, dtype=FP32, block_size=4), "L1": kvstore.Alias("L0")}
    store = KVStore(kvstore.plan_cache(specs, num_frames=8), "cpu", backend=backend)
    batch = store.extend(store.open([[7]]).seq_ids, [1])
    row = torch.ones(1, 1, 8)
    store.write("L0", batch, row, row)
    with pytest.raises(ValueError, match="layer: 'L1' reads the cache of 'L0' and has none to write"):
        store.write("L1", batch, 2 * row, 2 * row)
    for layer in ("L0", "L1"):
        k, v = store.gather(layer, batch)
        assert torch.equal(k, row)
        assert torch.equal(v, row)


@pytest.mark.parametrize("head_dim", [72, 80, 96, 192, 576])
def test_o32_a_head_size_that_is_no_power_of_two_moves_exactly(head_dim: int, backend: str) -> None:
    view = make_view(kv_format(3, head_dim, dtype=BF16), rows_per_block=5, num_blocks=2, gap_bytes=16)
    parts = random_parts(view.format, 3)
    slots = (4, 5, 0)  # the last and the first row of neighbouring pages
    expected = expected_memory(view, slots, parts)
    write_rows(view, slots_of(*slots), *parts, backend=backend)
    np.testing.assert_array_equal(view.memory.numpy(), expected)


@pytest.mark.parametrize("name", ["kv", "fp8_ds_mla"])
def test_o33_no_rows_change_nothing_and_spoil_no_later_call(name: str, backend: str) -> None:
    row_format = fp8_ds_mla_format() if name == "fp8_ds_mla" else make_format(name, 64, BF16)
    view = make_view(row_format, fill=0)
    parts = [torch.ones(1, 1, 576)] if row_format.quantised else random_parts(row_format, 1)
    write_rows(view, slots_of(), *(part[:0] for part in parts), backend=backend)
    assert not view.memory.any()
    write_rows(view, slots_of(3), *parts, backend=backend)
    assert row_bytes(view, 3).any()


def test_o34_clearing_a_block_of_a_packed_slab_leaves_its_neighbours(backend: str) -> None:
    """4 views of 56 B rows, 64 B apart in blocks of 256 B: block 0 of view 3 is bytes 192 to 255, its padding too."""
    memory = torch.full((512,), 0xA5, dtype=torch.uint8)
    views = [PageView(memory, 64 * idx, 256, 2, 1, bytes_format(56)) for idx in range(4)]
    fill_blocks([views[3]], slots_of(0), 0, backend=backend)
    assert memory[192:248].tolist() == [0] * 56
    assert (memory[:192] == 0xA5).all()
    assert (memory[256:] == 0xA5).all()


@pytest.mark.parametrize("are_equal", [True, False], ids=["equal", "different"])
@pytest.mark.parametrize("name", ["kv", "latent", "fp8_ds_mla"])
def test_o35_two_rows_for_one_slot(name: str, are_equal: bool, backend: str) -> None:
    """Slots 3 and 3: equal rows give that row, different ones one of the two as a whole, here; nothing else changes."""
    row_format = fp8_ds_mla_format() if name == "fp8_ds_mla" else make_format(name, 64, BF16)
    parts = [torch.randn(2, 1, 576)] if row_format.quantised else list(random_parts(row_format, 2))
    if are_equal:
        parts = [part[:1].repeat(2, 1, 1) for part in parts]
    each = []
    for row in (0, 1):
        alone = make_view(row_format, rows_per_block=4, num_blocks=2)
        write_rows(alone, slots_of(3), *(part[row : row + 1] for part in parts), backend=backend)
        each.append(alone.memory.numpy())
    assert np.array_equal(*each) == are_equal
    view = make_view(row_format, rows_per_block=4, num_blocks=2)
    write_rows(view, slots_of(3, 3), *parts, backend=backend)
    assert any(np.array_equal(view.memory.numpy(), memory) for memory in each)


def test_o35_two_rows_for_one_slot_are_an_error_where_indices_are_looked_at(backend: str) -> None:
    view = make_view(make_format("kv", 64, BF16))
    before = view.memory.clone()
    with index_checks(), pytest.raises(ValueError, match="slot_mapping: expected every slot at most once"):
        write_rows(view, slots_of(3, 3), *random_parts(view.format, 2), backend=backend)
    assert torch.equal(view.memory, before)
