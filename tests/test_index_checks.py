"""index_checks: every index is looked at on its device, and the first bad one is named; without it nothing looks."""

import pytest
import torch

from kvstore_kernels import (
    compute_slot_mapping,
    copy_blocks,
    fill_blocks,
    gather_rows,
    gqa_decode,
    index_checks,
    indexer_scores,
    kv_format,
    latent_format,
    mla_decode,
    pack_blocks,
    read_rows,
    sparse_mla_decode,
    unpack_blocks,
    write_layers,
    write_rows,
)
from tests.cases import make_view

FP32 = torch.float32
KV = make_view(kv_format(2, 64, dtype=FP32), 4, 6, fill=0)
LATENT = make_view(latent_format(64, 64, FP32), 4, 6, fill=0)
KEYS = make_view(latent_format(64, 64), 4, 6, fill=0)
ROWS = torch.ones(3, 2, 64)
Q = torch.ones(2, 2, 64)
SLOTS = "expected -1 or a slot in \\[0, 24\\), got {} at {}"


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


TABLE = ints([1, 2], [3, 0])

BAD = {
    "write, past the last slot": (
        lambda: write_rows(KV, longs(1, 24, 99), ROWS, ROWS),
        "slot_mapping: " + SLOTS.format(24, 1),
    ),
    "write, below -1": (lambda: write_rows(KV, longs(-2, 1, 2), ROWS, ROWS), "slot_mapping: " + SLOTS.format(-2, 0)),
    "write, a slot twice": (
        lambda: write_rows(KV, longs(5, -1, 5), ROWS, ROWS),
        "slot_mapping: expected every slot at most once, got 5 at 2",
    ),
    "write of layers": (
        lambda: write_layers(
            [KV, KV], longs([1, 2, 3], [4, 5, 24]), ROWS.expand(2, -1, -1, -1), ROWS[None].repeat(2, 1, 1, 1)
        ),
        "slot_mapping: expected -1 or a slot in \\[0, 24\\), got 24 at \\[1, 2\\]",
    ),
    "read": (lambda: read_rows(KV, longs(0, 24), dtype=FP32), "slots: " + SLOTS.format(24, 1)),
    "gather, an entry that names no block": (
        lambda: gather_rows(KV, ints([1, 6]), ints(0, 8), num_rows=8),
        "block_table: expected a block in \\[0, 6\\) where rows are read, got 6 at \\[0, 1\\]",
    ),
    "gather past the table": (
        lambda: gather_rows(KV, TABLE, ints(0, 3, 12), num_rows=12),
        "cu_row_lens: expected at most 8 rows, for which the table has columns, got 9 at 1",
    ),
    "gather before the first row": (
        lambda: gather_rows(KV, TABLE, ints(0, 3, 6), num_rows=6, start=ints(0, -1)),
        "cu_row_lens: expected rows from 0 on, got -1 at 1",
    ),
    "decode, more rows than the table": (
        lambda: gqa_decode(KV, TABLE, ints(8, 9), Q),
        "row_lens: expected at most 8 rows, for which the table has columns, got 9 at 1",
    ),
    "decode, a negative length": (
        lambda: gqa_decode(KV, TABLE, ints(-1, 4), Q),
        "row_lens: expected lengths from 0 on, got -1 at 0",
    ),
    "decode, a hole in the table": (
        lambda: mla_decode(LATENT, ints([1, -1], [3, -1]), ints(4, 5), Q, softmax_scale=1.0),
        "block_table: expected a block in \\[0, 6\\) where rows are read, got -1 at \\[1, 1\\]",
    ),
    "decode, a length for each query": (
        lambda: mla_decode(LATENT, TABLE, ints([1, 9], [2, 3]), Q[:, None].repeat(1, 2, 1, 1), softmax_scale=1.0),
        "row_lens: expected at most 8 rows, for which the table has columns, got 9 at 0",
    ),
    "scores": (
        lambda: indexer_scores(KEYS, TABLE, ints(3, 9), Q.bfloat16(), torch.ones(2, 2)),
        "row_lens: expected at most 8 rows, for which the table has columns, got 9 at 1",
    ),
    "sparse": (
        lambda: sparse_mla_decode(LATENT, longs([3, -1], [24, 2]), Q, softmax_scale=1.0),
        "slots: expected -1 or a slot in \\[0, 24\\), got 24 at \\[1, 0\\]",
    ),
    "sparse, the second list": (
        lambda: sparse_mla_decode(LATENT, longs([3], [2]), Q, softmax_scale=1.0, second=(LATENT, longs([-5], [1]))),
        "slots of second: expected -1 or a slot in \\[0, 24\\), got -5 at \\[0, 0\\]",
    ),
    "copy": (
        lambda: copy_blocks([KV], longs(1, 6), longs(2, 3)),
        "src: expected -1 or a block in \\[0, 6\\), got 6 at 1",
    ),
    "copy onto one block": (
        lambda: copy_blocks([KV], longs(1, 2), longs(3, 3)),
        "dst: expected every block at most once, got 3 at 1",
    ),
    "fill": (lambda: fill_blocks([KV], longs(7), 0), "block_ids: expected -1 or a block in \\[0, 6\\), got 7 at 0"),
    "pack": (lambda: pack_blocks([KV], longs(1, -3)), "block_ids: expected -1 or a block in .*, got -3 at 1"),
    "unpack": (
        lambda: unpack_blocks([KV], longs(1, 1), torch.zeros(2, KV.page_bytes, dtype=torch.uint8)),
        "block_ids: expected every block at most once, got 1 at 1",
    ),
    "slot mapping": (
        lambda: compute_slot_mapping(TABLE, longs(0, 1), ints(0, 2), 4),
        "seq_idx: expected -1 or a sequence in \\[0, 2\\), got 2 at 1",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_the_first_bad_index_is_named_and_nothing_changes(case: str) -> None:
    call, message = BAD[case]
    before = KV.memory.clone(), LATENT.memory.clone()
    with index_checks(), pytest.raises(ValueError, match=f"^{message}"):
        call()
    assert torch.equal(KV.memory, before[0])
    assert torch.equal(LATENT.memory, before[1])


def test_good_indices_pass_and_give_what_they_give_without() -> None:
    def calls() -> list[torch.Tensor]:
        write_rows(KV, longs(4, -1, 23), ROWS, ROWS)
        windowed = gqa_decode(KV, TABLE, ints(11, 0), Q, window=5)  # position 10 is in column 0 again
        causal = gqa_decode(KV, TABLE, ints(1, 0), Q[:, None].repeat(1, 3, 1, 1))
        return [*gather_rows(KV, TABLE, ints(0, 3, 3), num_rows=3), *windowed, *causal]

    plain = calls()
    with index_checks():
        looked = calls()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(looked, plain, strict=True))


def test_a_window_that_wraps_is_held_to_the_columns_it_reads() -> None:
    with index_checks(), pytest.raises(ValueError, match=r"^block_table: .*, got 9 at \[0, 1\]"):
        gqa_decode(KV, ints([1, 9], [3, 0]), ints(15, 2), Q, window=3)  # positions 12 ... 14 are in column 1
    with index_checks():
        gqa_decode(KV, ints([1, 9], [3, 0]), ints(19, 2), Q, window=3)  # positions 16 ... 18 are in column 0


def test_nothing_looks_outside_and_looks_nest() -> None:
    with index_checks():
        with index_checks(enabled=False):
            write_rows(KV, longs(-7, 24, 99), ROWS, ROWS)
        with pytest.raises(ValueError, match="slot_mapping"):
            write_rows(KV, longs(-7, 24, 99), ROWS, ROWS)
    write_rows(KV, longs(-7, 24, 99), ROWS, ROWS)


def test_no_index_at_all_is_no_bad_one() -> None:
    with index_checks():
        write_rows(KV, longs()[:0], ROWS[:0], ROWS[:0])
        gather_rows(KV, torch.zeros(0, 2, dtype=torch.int32), ints(0), num_rows=0)
        copy_blocks([KV], longs()[:0], longs()[:0])
