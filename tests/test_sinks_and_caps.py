"""Learned sinks and soft caps of the scores, against fp64 attention; O-numbers name faults other projects have had."""

import math

import pytest
import torch

from kvstore import KVStore, full_attention, plan_cache
from kvstore_kernels import gqa_decode, kv_format, latent_format, merge_partials, mla_decode
from tests.attention_oracle import Exact, PagedBatch, expect_within_budget, paged_batch
from tests.cases import BACKENDS

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

SINKS = torch.tensor([0.0, 3.0, -2.0, -math.inf, 40.0, -40.0])


def with_sinks(exact: Exact, sinks: torch.Tensor) -> Exact:
    """One more key with that score and no value; its share of the budget is that of an exponential."""
    share = torch.where(exact.lse == -math.inf, 0.0, torch.sigmoid(exact.lse - sinks.double()))[..., None]
    budget = exact.out_budget * share + exact.out.abs() * share * (exact.lse_budget[..., None] + 2.0**-15)
    return Exact(exact.out * share, exact.lse, budget + 2.0**-9 * (exact.out * share).abs(), exact.lse_budget)


def read(batch: PagedBatch, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return gqa_decode(batch.view, batch.block_table, batch.row_lens, batch.q, backend=backend, **options)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_o44_a_sink_counts_once_whatever_the_number_of_splits(backend, dtype, num_splits):
    batch = paged_batch(kv_format(2, 64, dtype=dtype), 16, (70, 0, 1, 33), 6)
    got = read(batch, backend, num_splits=num_splits, sinks=SINKS)
    expect_within_budget(got, with_sinks(batch.exact(64**-0.5), SINKS))


def test_o44_by_hand(backend):
    """Sink and one key of score 0 each: the weight of the key is 1/2; a sink per split would make it 1/3."""
    partial_out = torch.tensor([1.0, 7.0]).reshape(1, 1, 2, 1)
    partial_lse = torch.tensor([0.0, -math.inf]).reshape(1, 1, 2)
    out, lse = merge_partials(partial_out, partial_lse, sinks=torch.zeros(1), backend=backend)
    assert (out.item(), lse.item()) == (0.5, 0.0)


def test_latent_rows_with_sinks(backend):
    batch = paged_batch(latent_format(72, 64, torch.bfloat16), 16, (40, 0, 17), 6)
    scale = 72**-0.5
    got = mla_decode(
        batch.view, batch.block_table, batch.row_lens, batch.q, softmax_scale=scale, sinks=SINKS, backend=backend
    )
    expect_within_budget(got, with_sinks(batch.exact(scale), SINKS))


def test_sinks_change_neither_the_lse_nor_a_result_without_keys(backend):
    batch = paged_batch(kv_format(2, 64), 16, (40, 0), 6)
    out, lse = read(batch, backend, num_splits=2)
    sunk, same = read(batch, backend, num_splits=2, sinks=SINKS)
    assert torch.equal(lse, same)
    assert torch.equal(sunk[1], torch.zeros_like(sunk[1]))
    assert torch.equal(sunk[0, 3], out[0, 3])  # a sink of -inf
    assert sunk[0, 4].abs().max() < 1e-8  # e^-40 of the output


def capped(batch: PagedBatch, scale: float, soft_cap: float) -> list[torch.Tensor]:
    """Output in fp64 of each sequence, and its LSE."""
    outs, lses = [], []
    for q, keys, values in zip(batch.q.double(), batch.keys, batch.values, strict=True):
        queries = q.unflatten(0, (keys.shape[1], -1))
        scores = soft_cap * torch.tanh(scale * (queries @ keys.double().permute(1, 2, 0)) / soft_cap)
        outs.append((scores.softmax(2) @ values.double().transpose(0, 1)).flatten(0, 1))
        lses.append(scores.logsumexp(2).flatten())
    return [torch.stack(outs), torch.stack(lses)]


@pytest.mark.parametrize("soft_cap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("window", [None, 20])
def test_soft_caps(backend, soft_cap, window):
    """The fp64 budget of plain scores holds: tanh only shrinks differences; the cap's own rounding is added."""
    batch = paged_batch(kv_format(2, 64, dtype=torch.float32), 16, (70, 1, 33), 4, window=window)
    scale = 1.0
    got = read(batch, backend, softmax_scale=scale, soft_cap=soft_cap, window=window, num_splits=2)
    if window is not None:
        batch.keys[:] = [keys[-window:] for keys in batch.keys]
        batch.values[:] = [values[-window:] for values in batch.values]
    plain = batch.exact(scale)
    out, lse = capped(batch, scale, soft_cap)
    own = soft_cap * 2.0**-20
    weight = max(values.abs().max().item() for values in batch.values)
    exact = Exact(out, lse, plain.out_budget + 2 * own * weight + 4e-6 * weight, plain.lse_budget + own)
    expect_within_budget(got, exact)
    uncapped = read(batch, backend, softmax_scale=scale, window=window, num_splits=2)
    assert (uncapped[1] - got[1])[0].abs().max() > (1e-4 if soft_cap == 50.0 else 0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sinks": torch.zeros(5)}, ValueError, r"sinks: expected shape \[6\], got \[5\]"),
        ({"sinks": torch.zeros(6, dtype=torch.float64)}, ValueError, "sinks: expected dtype torch.float32"),
        ({"sinks": torch.zeros(12)[::2]}, ValueError, "sinks: expected a contiguous tensor"),
        ({"sinks": [0.0] * 6}, TypeError, r"sinks: expected a torch\.Tensor, got list"),
        ({"soft_cap": 0}, ValueError, "soft_cap: expected a positive finite fp32 number, got 0"),
        ({"soft_cap": float("nan")}, ValueError, "soft_cap: expected a positive finite fp32 number, got nan"),
        ({"soft_cap": 1e39}, ValueError, "soft_cap: expected a positive finite fp32 number"),
        ({"soft_cap": "50"}, TypeError, "soft_cap: expected a number or None, got '50'"),
    ],
)
def test_bad_arguments_name_themselves(backend, options, error, message):
    batch = paged_batch(kv_format(2, 64), 16, (3,), 6)
    with pytest.raises(error, match=message):
        read(batch, backend, **options)


def test_a_store_passes_them_on(backend):
    plan = plan_cache({"a": full_attention(2, 64, dtype=torch.float32)}, num_frames=8)
    store = KVStore(plan, "cpu", max_sequences=1, max_length=32, max_tokens_per_step=32, backend=backend)
    seq_ids = store.open([[5]]).seq_ids
    step = store.extend(seq_ids, 1)
    key, value = torch.ones(1, 2, 64), torch.ones(1, 2, 64)
    store.write("a", step, key, value)
    sinks = torch.zeros(2)
    out, lse = store.gqa_decode("a", step, key, softmax_scale=1.0, soft_cap=1e-6, sinks=sinks)
    assert lse.abs().max() < 2e-6  # every score is capped to almost 0
    assert torch.allclose(out, torch.full_like(out, 0.5), atol=1e-4)
