"""Layers of separate groups share a slot tensor without conflict: the reason this library exists.

Two groups with equal page bytes but different block size, dtype and row format live in one slot tensor; a third
layer, with another page size, has a bucket of its own. Kernels are Triton's, under its interpreter.
"""

import numpy as np
import pytest
import torch

import kvstore
from kvstore import CacheGroup, KVStore, Retention
from kvstore_kernels import PageView, gather_rows, mla_decode, write_rows

CANARY = 0xA5
FULL = Retention("full")

KV = kvstore.full_attention(2, 36, dtype=torch.float16, block_size=16)  # 16 rows x (2 x 36 x 2 B of K and of V)
LATENT = kvstore.latent(72, 64, dtype=torch.bfloat16, block_size=32)  # 32 rows x 72 x 2 B
SMALL = kvstore.full_attention(1, 8, dtype=torch.float32, block_size=16)


def groups() -> list[CacheGroup]:
    return [
        CacheGroup("kv", {"kv.0": KV, "kv.1": KV, "small.0": SMALL}, 16, FULL),
        CacheGroup("latent", {"latent.0": LATENT}, 32, FULL),
    ]


def random_rows(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int16), right.view(torch.int16))


def test_the_two_formats_have_equal_pages_and_share_a_slot_tensor() -> None:
    assert KV.page_bytes == LATENT.page_bytes == 4608
    plan = kvstore.plan_cache(groups(), num_frames=6)
    assert kvstore.bucket_layers_by_page_size(groups()) == {4608: [["kv.0", "latent.0"], ["kv.1"]], 1024: [["small.0"]]}
    assert plan.placements["kv.0"] == plan.placements["latent.0"]
    assert plan.placements["kv.0"].layer_slot != plan.placements["small.0"].layer_slot


def test_buckets_have_layer_slots_of_their_own_number(capsys: pytest.CaptureFixture[str]) -> None:
    buckets = kvstore.bucket_layers_by_page_size(groups())
    slots = {page_bytes: len(layer_slots) for page_bytes, layer_slots in buckets.items()}
    assert slots == {4608: 2, 1024: 1}
    by_bucket = kvstore.pool_bytes_per_block(groups())
    old_rule = sum(buckets) * max(slots.values())
    with capsys.disabled():
        print(
            f"\n  bytes per block: {by_bucket:,} by bucket, {old_rule:,} by the rule before (page sizes x longest list)"
        )
    assert by_bucket == 4608 * 2 + 1024 * 1 == 10_240
    assert old_rule == (4608 + 1024) * 2 == 11_264


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_interleaved_writes_of_two_groups_keep_every_row(backend: str) -> None:
    """Blocks 1, 4, 3 belong to the K/V group and 2, 5 to the latent group; writes alternate between the groups."""
    plan = kvstore.plan_cache(groups(), num_frames=6)
    placement = plan.placements["kv.0"]
    slot = plan.layer_slots[placement.layer_slot]
    memory = torch.full((4608 + slot.num_bytes + 4608,), CANARY, dtype=torch.uint8)
    kv, latent = (
        PageView(memory, 4608, placement.block_stride_bytes, plan.num_frames, spec.rows_per_block, spec.format)
        for spec in (KV, LATENT)
    )
    kv_table = torch.tensor([[1, 4, 3]], dtype=torch.int32)
    latent_table = torch.tensor([[2, 5]], dtype=torch.int32)
    num_kv, num_latent = 41, 45
    key = random_rows(1, num_kv, 2, 36, dtype=torch.float16)
    value = random_rows(2, num_kv, 2, 36, dtype=torch.float16)
    rows = random_rows(3, num_latent, 72, dtype=torch.bfloat16)

    for start in range(0, 48, 9):
        for view, table, parts, length in (
            (kv, kv_table, (key, value), num_kv),
            (latent, latent_table, (rows,), num_latent),
        ):
            positions = torch.arange(min(start, length), min(start + 9, length))
            blocks = table[0, positions // view.rows_per_block].long()
            slots = blocks * view.rows_per_block + positions % view.rows_per_block
            write_rows(view, slots, *(part[positions] for part in parts), backend=backend)

    def prefix_sum(length: int) -> torch.Tensor:
        return torch.tensor([0, length], dtype=torch.int32)

    got_key, got_value = gather_rows(kv, kv_table, prefix_sum(num_kv), num_rows=num_kv, backend=backend)
    (got_rows,) = gather_rows(latent, latent_table, prefix_sum(num_latent), num_rows=num_latent, backend=backend)
    assert same_bits(got_key, key)
    assert same_bits(got_value, value)
    assert same_bits(got_rows.squeeze(1), rows)

    q = random_rows(4, 1, 3, 72, dtype=torch.bfloat16)
    lens = torch.tensor([num_latent], dtype=torch.int32)
    out, lse = mla_decode(latent, latent_table, lens, q, softmax_scale=0.1, backend=backend)
    scores = torch.einsum("hd,nd->hn", q[0].double(), rows.double()) * 0.1
    expected = torch.softmax(scores, -1) @ rows[:, :64].double()
    torch.testing.assert_close(out[0].double(), expected, atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(lse[0].double(), torch.logsumexp(scores, -1), atol=1e-4, rtol=1e-4)

    before, behind = memory[:4608], memory[4608 + slot.num_bytes :]
    assert (before == CANARY).all()
    assert (behind == CANARY).all()
    pages = memory[4608 : 4608 + slot.num_bytes].view(plan.num_frames, 4608)
    assert (pages[0] == CANARY).all(), "the null block was written"
    unused_rows = {3: (num_kv - 32, 144), 5: (num_latent - 32, 144)}
    for block, (used, row_bytes) in unused_rows.items():
        areas = pages[block].view(2, 16, row_bytes) if block == 3 else pages[block].view(1, 32, row_bytes)
        assert (areas[:, used:] == CANARY).all(), f"rows behind the sequence were written in block {block}"


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_store_serves_both_groups_from_one_slot_tensor(backend: str) -> None:
    plan = kvstore.plan_cache(groups(), num_frames=16)
    store = KVStore(plan, "cpu", max_sequences=3, max_length=96, max_tokens_per_step=128, backend=backend)
    assert store.page_view("kv.0").memory.data_ptr() == store.page_view("latent.0").memory.data_ptr()
    seq_ids = store.open([range(1, 20), range(50, 57)]).seq_ids
    written: dict[str, list[list[torch.Tensor]]] = {layer: [[], []] for layer in plan.placements}
    for step, counts in enumerate([(19, 7), (1, 1), (4, 9), (1, 1)]):
        batch = store.extend(seq_ids, counts)
        for number, layer in enumerate(plan.placements):
            spec = plan.spec(layer)
            parts = [
                random_rows(100 * step + number, sum(counts), part.num_heads, part.head_dim, dtype=part.dtype)
                for part in spec.format.parts
            ]
            store.write(layer, batch, *parts)
            for rows, part in zip(written[layer], torch.split(parts[0], counts), strict=True):
                rows.append(part)
        for layer, rows in written.items():
            expected = torch.cat([torch.cat(of_sequence) for of_sequence in rows])
            assert torch.equal(store.gather(layer, batch)[0], expected), layer
        if counts == (1, 1):
            q = random_rows(7, 2, 4, 36, dtype=torch.float16)
            assert store.gqa_decode("kv.1", batch, q)[0].isfinite().all()
            q = random_rows(8, 2, 4, 72, dtype=torch.bfloat16)
            assert store.mla_decode("latent.0", batch, q, softmax_scale=0.1)[0].isfinite().all()
        store.commit(batch, np.arange(sum(counts)) + 1000 * step)
        store.check()
