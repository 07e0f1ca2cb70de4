"""What an engine may do to the kernels without meaning harm: each was wrong once."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from kvstore_kernels import (
    PageView,
    compute_slot_mapping,
    copy_blocks,
    fill_blocks,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    index_checks,
    kv_format,
    latent_format,
    layer_table,
    merge_partials,
    mla_decode,
    pack_blocks,
    sparse_mla_decode,
    warm_up,
    workspace_numel,
    write_layers,
    write_rows,
)
from tests.cases import BACKENDS, make_view

FP32, FP8 = torch.float32, torch.float8_e4m3fn


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def kv_view(key_dim=16, value_dim=16, rows_per_block=4, num_blocks=4, dtype=FP32):
    """Random K and V in every row."""
    view = make_view(kv_format(1, key_dim, value_dim, dtype), rows_per_block, num_blocks)
    rows = [torch.randn(view.num_slots, 1, dim).to(dtype) for dim in (key_dim, value_dim)]
    write_rows(view, torch.arange(view.num_slots), *rows)
    return view


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
class TestCopies:
    def test_a_view_has_its_own_parts_and_handle(self, copied, backend):
        view = kv_view()
        before, other = view.memory.clone(), copied(view)
        assert other.handle != view.handle
        write_rows(other, torch.tensor([5]), *[torch.zeros(1, 1, 16)] * 2, backend=backend)
        assert torch.equal(view.memory, before)
        assert not other.tensor("k")[1, 1].any()
        assert not torch.equal(other.memory, before)

    def test_a_table_has_its_own_addresses(self, copied, backend):
        view = kv_view()
        before, other = view.memory.clone(), copied(layer_table([view]))
        fill_blocks(other, torch.tensor([1]), 5, backend=backend)
        assert torch.equal(view.memory, before)
        assert (other.views[0].tensor("k")[1].view(torch.uint8) == 5).all()


class TestReads:
    def test_lengths_near_the_least_integer_see_no_row(self, backend):
        view, table, q = kv_view(), ints([0, 1]), torch.randn(1, 2, 1, 16)
        for lens in (ints(-(2**31)), ints([-(2**31), 5]), ints([-(2**31) + 1, -7])):
            _, lse = gqa_decode(view, table, lens, q, backend=backend)
            assert torch.equal(lse[0, :, 0].isfinite(), (lens.reshape(-1) > 0).expand(2))

    @pytest.mark.parametrize("cap", [30.0, 1e3, 1e5, 1e8, 3e38])
    def test_a_large_soft_cap_changes_nothing_and_a_small_one_is_exact(self, cap, backend):
        view, q = kv_view(), torch.randn(1, 2, 16)
        capped, lse = gqa_decode(view, ints([0, 1]), ints(7), q, soft_cap=cap, backend=backend)
        keys, values = (view.tensor(part)[:2].reshape(8, 16)[:7].double() for part in ("k", "v"))
        scores = cap * torch.tanh(q[0].double() @ keys.T / 4 / cap)
        torch.testing.assert_close(lse[0].double(), scores.logsumexp(1), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(capped[0].double(), scores.softmax(1) @ values, rtol=2e-5, atol=2e-6)

    def test_nan_of_a_part_with_a_weight_of_zero_is_not_lost(self, backend):
        out, lse = torch.ones(1, 1, 33, 1), torch.full((1, 1, 33), -500.0)
        out[0, 0, 0], lse[0, 0, 32] = math.nan, 0.0
        assert merge_partials(out, lse, backend=backend)[0].isnan().all()
        lse[0, 0, 0] = -math.inf
        assert merge_partials(out, lse, backend=backend)[0].item() == 1.0
        lse[0, 0, 0] = math.inf
        assert merge_partials(out, lse, backend=backend)[0].item() == 1.0

    def test_an_infinite_score_is_no_empty_part(self, backend):
        view = kv_view(4, 8)
        view.tensor("k")[0, 0] = 3e38
        parts = [
            gqa_decode(view, ints([block]), ints(4), torch.full((1, 1, 4), 10.0), backend=backend) for block in (0, 1)
        ]
        assert parts[0][1].isnan().all()
        merged, _ = merge_partials(
            torch.stack([out for out, _ in parts], 2), torch.stack([lse for _, lse in parts], 2), backend=backend
        )
        assert merged.isnan().all()

    def test_one_column_of_a_wider_list(self, backend):
        view = make_view(latent_format(8, 4, FP32), 4, 4)
        write_rows(view, torch.arange(16), torch.randn(16, 1, 8))
        lists, q = torch.randint(0, 16, (2, 6)), torch.randn(2, 1, 8)
        part, _ = sparse_mla_decode(view, lists[:, 2:3], q, softmax_scale=1.0, backend=backend)
        whole, _ = sparse_mla_decode(view, lists[:, 2:3].clone(), q, softmax_scale=1.0, backend=backend)
        assert torch.equal(part, whole)

    def test_a_scale_outside_is_for_the_cache_that_has_it(self, backend):
        views = [make_view(row_format, 4, 4) for row_format in (latent_format(576, 512, FP8), fp8_ds_mla_format())]
        rows, slots = torch.randn(16, 1, 576), torch.arange(16)
        write_rows(views[0], slots, rows, row_scales=0.5)
        write_rows(views[1], slots, rows)
        q = torch.randn(1, 2, 576)
        lists = (views[0], slots[None, :8]), (views[1], slots[None, 8:])
        first, second = (
            sparse_mla_decode(*mine, q, softmax_scale=0.05, second=theirs, row_scales=0.5, backend=backend)
            for mine, theirs in (lists, lists[::-1])
        )
        torch.testing.assert_close(first[0], second[0], rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match="row_scales: expected None, for the scales lie in the rows"):
            sparse_mla_decode(*lists[1], q, softmax_scale=0.05, row_scales=0.5, backend=backend)

    def test_codes_at_any_byte_of_their_storage(self, backend):
        row_format = kv_format(1, 16, dtype=FP8)
        size = 2 * row_format.page_bytes(16)
        array = np.zeros(size + 32, np.uint8)
        storage = torch.from_numpy(array[(1 - array.ctypes.data) % 16 :])  # its aligned addresses are at odd offsets
        view = PageView(storage[15 : 15 + size], 0, size // 2, 2, 16, row_format)
        assert view.memory.storage_offset() == 15
        write_rows(view, torch.arange(32), *[torch.randn(32, 1, 16)] * 2)
        q = torch.randn(1, 1, 16).bfloat16()
        out, _ = gqa_decode(view, ints([0, 1]), ints(20), q, backend=backend)
        assert out.isfinite().all()

    @pytest.mark.parametrize("value", [1, 0, None, "no"])
    def test_whether_columns_wrap_is_a_bool(self, value, backend):
        view = kv_view()
        with pytest.raises(TypeError, match="wraps: expected True or False, got"):
            gather_rows(view, ints([1, 2]), ints(0, 7), num_rows=7, wraps=value, backend=backend)
        with pytest.raises(TypeError, match="wraps: expected True or False, got"):
            compute_slot_mapping(ints([1, 2]), torch.tensor([1]), ints(0), 4, wraps=value, backend=backend)

    def test_lengths_that_are_no_tensor(self, backend):
        with pytest.raises(TypeError, match=r"row_lens: expected a torch.Tensor, got list"):
            gqa_decode(kv_view(), ints([1]), [3], torch.randn(1, 1, 16), backend=backend)


class TestWorkspace:
    @pytest.mark.parametrize("num_splits", [1, 3])
    def test_reads_give_the_same_and_stay_inside(self, num_splits, backend):
        view, table, lens = kv_view(), ints([0, 1, 2]), ints(11)
        latents = make_view(latent_format(24, 16, FP32), 4, 4)
        write_rows(latents, torch.arange(16), torch.randn(16, 1, 24))
        q, latent_q, slots = torch.randn(1, 2, 16), torch.randn(1, 2, 24), torch.arange(16)[None]
        options = {"num_splits": num_splits, "backend": backend}
        twice = {"softmax_scale": 0.2, "second": (latents, slots), **options}
        for needed, read in (
            (1, lambda **given: gqa_decode(view, table, lens, q, **options, **given)),
            (1, lambda **given: mla_decode(latents, table, lens, latent_q, softmax_scale=0.2, **options, **given)),
            (2, lambda **given: sparse_mla_decode(latents, slots, latent_q, **twice, **given)),
        ):
            size = needed * workspace_numel(1, 2, 16, num_splits)
            memory = torch.full((size + 8,), 7.0)
            expected = read()
            results = read(workspace=memory[4 : size + 4])
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, expected, strict=True))
            assert (memory[:4] == 7).all()
            assert (memory[size + 4 :] == 7).all()

    def test_what_is_none_is_refused_by_name(self, backend):
        view = kv_view()
        call = {"num_splits": 3, "backend": backend}
        for workspace, message in (
            (torch.zeros(200, dtype=torch.float64), "workspace: expected dtype torch.float32"),
            (torch.zeros(2, 200), "workspace: expected shape"),
            (torch.zeros(400)[::2], "workspace: expected a contiguous tensor"),
            (3, "workspace: expected a torch.Tensor"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                gqa_decode(view, ints([0, 1]), ints(7), torch.randn(1, 1, 16), workspace=workspace, **call)
        if backend == "triton":  # the reference splits nothing
            out = torch.full((1, 1, 16), 7.0)
            with pytest.raises(ValueError, match="workspace: expected at least 51 elements for 3 splits, got 50"):
                gqa_decode(
                    view, ints([0, 1]), ints(7), torch.randn(1, 1, 16), out=out, workspace=torch.zeros(50), **call
                )
            assert (out == 7).all()


class TestWrites:
    @pytest.mark.parametrize("scale", [1e-38, 1e-46, 1e39, -1.0, math.inf])
    def test_a_scale_that_fp32_has_not(self, scale, backend):
        view = make_view(kv_format(1, 16, dtype=FP8), 4, 4)
        before = view.memory.clone()
        for call in (
            lambda: write_rows(view, torch.tensor([1]), *[torch.ones(1, 1, 16)] * 2, row_scales=(1.0, scale)),
            lambda: write_layers([view], torch.tensor([1]), *[torch.ones(1, 1, 1, 16)] * 2, row_scales=(scale, 1.0)),
        ):
            with pytest.raises(ValueError, match=r"row_scales of .: expected a (positive )?number"):
                call()
        assert torch.equal(view.memory, before)

    def test_warm_up_within_index_checks_and_of_formats_without_a_kernel(self, backend):
        odd = make_view(kv_format(2, 4, dtype=torch.float8_e5m2), 4, 4)
        with index_checks():
            assert warm_up([kv_view(), odd], backend=backend) > 3
        for name in ("num_heads", "windows", "tokens_per_row"):
            with pytest.raises(TypeError, match=f"{name}: expected a list or tuple, got 2"):
                warm_up([odd], **{name: 2}, backend=backend)


class TestIndexChecks:
    def test_they_leave_what_is_no_index_to_the_op(self, backend):
        view = kv_view()
        rows = [torch.zeros(2, 1, 16)] * 2
        with index_checks():
            for slots in ([1, 2], None, torch.tensor(1), torch.tensor([1.5, 99.0]), torch.zeros(2, device="meta")):
                with pytest.raises((ValueError, TypeError), match="slot_mapping: expected"):
                    write_rows(view, slots, *rows, backend=backend)
            with pytest.raises((ValueError, TypeError), match="src: expected"):
                copy_blocks([view], [1], [0], backend=backend)
            with pytest.raises((ValueError, TypeError), match="block_ids: expected"):
                pack_blocks([view], 1, backend=backend)
            with pytest.raises((ValueError, TypeError), match="row_lens: expected"):
                gqa_decode(view, ints([1]), ints(3, 4), torch.zeros(1, 1, 16), backend=backend)

    def test_a_copy_that_is_skipped_counts_for_nothing(self, backend):
        view = kv_view()
        with index_checks():
            copy_blocks([view], torch.tensor([-1, 1]), torch.tensor([2, 2]), backend=backend)
            with pytest.raises(ValueError, match="dst: expected no block that is a source, got 2 at 1"):
                copy_blocks([view], torch.tensor([2, 1]), torch.tensor([3, 2]), backend=backend)
        assert torch.equal(view.tensor("k")[2], view.tensor("k")[1])

    def test_rows_that_only_an_earlier_query_sees_through_its_window(self, backend):
        view, table = kv_view(rows_per_block=1, num_blocks=16), ints([0, 1, 2, 3, -1, 5, 6, 7, 8, 9])
        with index_checks():
            for lens, q in ((ints(10), torch.randn(1, 3, 1, 16)), (ints([8, 10]), torch.randn(1, 2, 1, 16))):
                with pytest.raises(ValueError, match=r"block_table: expected a block .*, got -1 at \[0, 4\]"):
                    gqa_decode(view, table, lens, q, window=4, backend=backend)
            gqa_decode(view, table, ints(10), torch.randn(1, 2, 1, 16), window=4, backend=backend)

    def test_a_position_behind_the_table(self, backend):
        table = ints([1, 2])
        with index_checks():
            compute_slot_mapping(table, torch.tensor([7, -1]), ints(0, 0), 4, backend=backend)
            compute_slot_mapping(table, torch.tensor([99]), ints(0), 4, wraps=True, backend=backend)
            with pytest.raises(ValueError, match=r"positions: expected -1 or a position in \[0, 8\), got 8 at 1"):
                compute_slot_mapping(table, torch.tensor([7, 8]), ints(0, 0), 4, backend=backend)
