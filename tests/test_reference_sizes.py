"""What the reference does differently for many rows gives what it does for few."""

import threading

import pytest
import torch

from kvstore_kernels import (
    RowFormat,
    dsv4_format,
    fp8_ds_mla_format,
    gather_rows,
    gqa_decode,
    indexer_format,
    kv_format,
    latent_format,
    mla_decode,
    nvfp4_latent_format,
    read_rows,
    token_head_format,
    write_rows,
)
from kvstore_kernels.reference import moves, quant_gather, quant_write, rows
from tests.cases import POISON, make_format, make_view

ROW_COUNTS = (9, 0, 1, 40)
PLAIN = {
    "kv": make_format("kv", 64, torch.bfloat16),
    "kv_packed": make_format("kv_packed", 72, torch.float32),
    "latent": make_format("latent", 576, torch.float16),
    "odd": latent_format(7, 3, torch.bfloat16),
}
QUANTISED = {
    "fp8_ds_mla": (fp8_ds_mla_format(), (576,)),
    "dsv4": (dsv4_format(), (512,)),
    "indexer": (indexer_format(132), (128,)),
    "nvfp4": (nvfp4_latent_format(), (512,)),
    "int8_token_head": (token_head_format(2, 80, 64), (160, 128)),
    "fp8_per_tensor": (kv_format(2, 64, dtype=torch.float8_e4m3fn), (128, 128)),
}


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block table with ids that name no block, cu_row_lens and starts; rows behind the table among them."""
    table = torch.randint(-1, 7, (len(ROW_COUNTS), 3), generator=torch.Generator().manual_seed(0)).int()
    cu_row_lens = torch.tensor([0, *torch.tensor(ROW_COUNTS).cumsum(0)], dtype=torch.int32)
    return table, cu_row_lens, torch.tensor([3, 0, 47, 20], dtype=torch.int32)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("gap", [0, 8, 1], ids="gap{}".format)
@pytest.mark.parametrize("row_format", PLAIN.values(), ids=PLAIN)
def test_a_gather_in_wide_words(row_format: RowFormat, gap: int, wraps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(row_format, 16, 6)
    table, cu_row_lens, start = tables()
    num_rows, results = sum(ROW_COUNTS), []
    for many_bytes in (moves.MANY_BYTES, 0):
        monkeypatch.setattr(moves, "MANY_BYTES", many_bytes)
        wide = [torch.zeros(num_rows, part.width + gap, dtype=part.dtype) for part in row_format.parts]
        out = tuple(
            rows[:, : part.width].unflatten(1, (part.num_heads, part.head_dim))
            for rows, part in zip(wide, row_format.parts, strict=True)
        )
        gather_rows(view, table, cu_row_lens, num_rows=num_rows, start=start, wraps=wraps, out=out)
        results.append([rows.view(torch.uint8) for rows in wide])
    assert all(torch.equal(few, many) for few, many in zip(*results, strict=True))
    assert all(rows.any() for rows in results[0])


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_rows_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row_format, widths = QUANTISED[name]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(50, width, generator=generator) for width in widths]
    slots = torch.randperm(120, generator=generator)[:50] - 10  # in 96 slots: some below 0, some past the last
    table, cu_row_lens, start = tables()
    results = []
    for chunk_bytes in (quant_write.CHUNK_BYTES, 1, 4 * sum(widths) * 7):
        for module in (quant_write, quant_gather):
            monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
        view = make_view(row_format, 16, 6, fill=POISON)
        write_rows(view, slots, *parts)
        gathered = gather_rows(view, table, cu_row_lens, num_rows=sum(ROW_COUNTS), start=start)
        read = read_rows(view, slots, dtype=torch.float32)
        results.append([tensor.contiguous().view(torch.uint8) for tensor in (view.memory, *gathered, *read)])
    for chunked in results[1:]:
        assert all(torch.equal(whole, part) for whole, part in zip(results[0], chunked, strict=True))
    assert (slots < 0).any()
    assert (slots >= 96).any()


CHUNKED = {
    "kv": (kv_format(2, 64, dtype=torch.float32), (2, 64)),
    "kv_odd": (kv_format(1, 7, dtype=torch.bfloat16), (1, 7)),
    "latent": (latent_format(72, 48, torch.float32), (1, 72)),
    "fp8_ds_mla": (fp8_ds_mla_format(), (1, 576)),
}


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_reads_in_chunks(name: str, num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row_format, shape = CHUNKED[name]
    view = make_view(row_format, 16, 40)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if row_format.quantised else row_format.parts[0].dtype
    num_parts = 2 if name.startswith("kv") else 1
    parts = [torch.randn(640, *shape, generator=generator).to(dtype) for _ in range(num_parts)]
    write_rows(view, torch.arange(640), *parts)
    table = torch.randperm(40, generator=generator).int().view(4, 10)
    row_lens = torch.tensor([160, 150, 0, 17]).int()
    q = torch.randn(4, num_queries, 2 * shape[0], shape[1], generator=generator).to(dtype)

    def attend() -> list[torch.Tensor]:
        if num_parts == 2:
            results = [gqa_decode(view, table, row_lens, q, window=window) for window in (None, 45)]
            return [tensor for result in results for tensor in result]
        return [*mla_decode(view, table, row_lens, q, softmax_scale=0.1)]

    monkeypatch.setattr(rows, "_scratch", threading.local())  # made anew: first inside inference mode
    with torch.inference_mode():
        again = attend()
    kept = vars(rows._scratch).values()
    assert bool(kept) != bool(row_format.quantised)
    assert not any(room.is_inference() for room in kept)  # such a one could not be written to outside
    whole = attend()
    for copy_bytes in (1, 12 * view.page_bytes, 10**8):
        monkeypatch.setattr(rows, "COPY_BYTES", copy_bytes)
        for results in (attend(), again):
            assert all(torch.equal(result, expected) for result, expected in zip(results, whole, strict=True))
