"""LayerSpec: page bytes that follow from the shape, and what a spec refuses."""

import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from kvstore.errors import PlanError
from kvstore.layers import chunked_attention, full_attention, latent, recurrent_state, sliding_window
from kvstore.specs import KINDS, Alias, LayerSpec, Retention
from kvstore_kernels.formats import RowFormat, RowPart, kv_format, latent_format
from kvstore_kernels.quantised import bytes_format, dsv4_format


@pytest.mark.parametrize(
    ("spec", "page_bytes", "payload_bytes"),
    [
        pytest.param(full_attention(8, 128), 65_536, 65_536, id="full-bf16"),
        pytest.param(full_attention(2, 64, dtype=torch.float32), 16_384, 16_384, id="full-fp32"),
        pytest.param(full_attention(8, 192, 128), 81_920, 81_920, id="v-narrower-than-k"),
        pytest.param(full_attention(3, 64, block_size=48, packed=True), 36_864, 36_864, id="packed-48-tokens"),
        pytest.param(full_attention(1, 3, block_size=1), 16, 12, id="rounded-up-to-16"),
        pytest.param(sliding_window(8, 64, window=128), 32_768, 32_768, id="window"),
        pytest.param(latent(), 73_728, 73_728, id="latent"),
        pytest.param(latent(padded_page_bytes=73_744), 73_744, 73_728, id="latent-padded"),
        pytest.param(LayerSpec("latent", 256, latent_format(576, 512), 128), 2_304, 2_304, id="latent-2-rows"),
    ],
)
def test_page_bytes_follow_from_the_rows(spec, page_bytes, payload_bytes):
    assert (spec.page_bytes, spec.payload_bytes) == (page_bytes, payload_bytes)
    assert spec.page_bytes % 16 == 0


def test_rows_are_fewer_than_tokens_when_a_row_covers_several():
    spec = LayerSpec("latent", 256, latent_format(576, 512), tokens_per_row=4)
    assert spec.rows_per_block == 64


def test_retention_is_what_layers_of_a_group_share():
    assert full_attention(1, 8).retention == latent(24, 16).retention == Retention("full")
    assert sliding_window(1, 8, window=7).retention == Retention("sliding_window", 7)
    assert chunked_attention(1, 8, chunk=64).retention == Retention("chunked", chunk=64)
    assert LayerSpec("ring", 8, latent_format(24, 16)).retention == Retention("ring")
    state = recurrent_state([("conv", (3, 8), torch.bfloat16)], speculative_blocks=2, checkpoint_blocks=1)
    assert state.retention == Retention("state", blocks=4)
    assert [rule.is_fixed for rule in (state.retention, Retention("ring"), Retention("full"))] == [True, True, False]


def test_a_full_layer_may_remember_a_window_that_bounds_reading_only():
    spec = replace(full_attention(1, 8), window=4)
    assert (spec.window, spec.retention) == (4, Retention("full"))


def test_a_state_is_one_row_of_tensors_whatever_its_block_size():
    tensors = [("conv", (3, 8192), torch.bfloat16), ("recurrent", (32, 128, 128), torch.float32)]
    for block_size in (16, 1056):
        spec = recurrent_state(tensors, block_size=block_size)
        assert (spec.rows_per_block, spec.payload_bytes, spec.page_bytes) == (1, 2_146_304, 2_146_304)
    assert spec.format.part("recurrent").shape == (32, 128, 128)
    assert recurrent_state(tensors, padded_page_bytes=2_162_688).page_bytes == 2_162_688


def test_strides_are_whole_multiples_of_what_readers_demand():
    spec = replace(latent(), block_stride_multiple=1152)
    assert (spec.stride_multiple, spec.dense_stride_bytes) == (1152, 73_728)
    odd = replace(latent(block_size=3), block_stride_multiple=1000)
    assert (odd.page_bytes, odd.stride_multiple, odd.dense_stride_bytes) == (3456, 2000, 4000)


@pytest.mark.parametrize(
    "spec",
    [
        full_attention(2, 72, 40, dtype=torch.float16, block_size=5, padded_page_bytes=8192),
        sliding_window(2, 80, window=9, packed=True),
        replace(chunked_attention(1, 8, chunk=48), block_stride_multiple=96, num_shards=2),
        latent(tokens_per_row=4),
        LayerSpec("latent_window", 4, dsv4_format(), window=8),
        LayerSpec("hidden_state", 16, bytes_format(64)),
        LayerSpec("ring", 8, latent_format(24, 16)),
        recurrent_state([("s", (2, 3, 4), torch.float32)], speculative_blocks=1, checkpoint_blocks=2),
    ],
    ids=KINDS,
)
def test_dict_round_trip(spec):
    assert LayerSpec.from_dict(spec.to_dict()) == spec


def test_specs_are_frozen_and_hashable():
    spec = full_attention(1, 8)
    with pytest.raises(FrozenInstanceError):
        spec.block_size = 32
    assert len({spec, full_attention(1, 8), full_attention(1, 8, block_size=32)}) == 2


ROWS = kv_format(2, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec("rotary", 16, ROWS), "kind: expected one of full, sliding_window, chunked, latent, "),
        (lambda: LayerSpec("full", 16, "kv"), "LayerSpec 'full': format: expected a RowFormat, got 'kv'"),
        (
            lambda: LayerSpec("full", 0, ROWS),
            "LayerSpec 'full': block_size: expected an integer in [1, 2147483647], got 0",
        ),
        (lambda: LayerSpec("full", 2**31, ROWS), "block_size: expected an integer in [1, 2147483647], got 2147483648"),
        (
            lambda: full_attention(64, 64, block_size=2**30),
            "block_size: expected pages of at most 1099511627776 B, got",
        ),
        (lambda: LayerSpec("full", 16.0, ROWS), "block_size: expected an integer, got 16.0 of type float"),
        (lambda: LayerSpec("full", True, ROWS), "block_size: expected an integer, got True of type bool"),
        (lambda: LayerSpec("full", 16, ROWS, -2), "tokens_per_row: expected an integer >= 1, got -2"),
        (lambda: LayerSpec("full", 16, ROWS, 3), "tokens_per_row: expected a divisor of the block size 16, got 3"),
        (lambda: LayerSpec("full", 16, ROWS, window=0), "window: expected an integer in [1, 2147483647], got 0"),
        (lambda: LayerSpec("chunked", 16, ROWS, window=4, chunk=8), "window: this kind has none, got 4"),
        (lambda: LayerSpec("chunked", 16, ROWS), "LayerSpec 'chunked': chunk: expected an integer, got None"),
        (lambda: LayerSpec("full", 16, ROWS, chunk=8), "chunk: only chunked layers have one, got 8"),
        (lambda: LayerSpec("ring", 16, ROWS, 2), "tokens_per_row: expected 1 for this kind, got 2"),
        (lambda: LayerSpec("full", 16, ROWS, speculative_blocks=1), "speculative_blocks: expected an integer in"),
        (lambda: LayerSpec("full", 16, ROWS, block_stride_multiple=0), "block_stride_multiple: expected an integer"),
        (lambda: LayerSpec("full", 16, ROWS, num_shards=0), "num_shards: expected an integer >= 1, got 0"),
        (lambda: LayerSpec(["full"], 16, ROWS), "kind: expected one of"),
        (lambda: recurrent_state([]), "state: "),
        (lambda: Alias(""), "Alias: of: expected the name of a layer, got ''"),
        (lambda: LayerSpec("sliding_window", 16, ROWS), "window: expected an integer, got None"),
        (lambda: sliding_window(2, 64, window=0), "window: expected an integer in [1, 2147483647], got 0"),
        (
            lambda: sliding_window(2, 64, window=2**31),
            "window: expected an integer in [1, 2147483647], got 2147483648",
        ),
        (
            lambda: LayerSpec("sliding_window", 4, ROWS, tokens_per_row=2, window=8),
            "tokens_per_row: expected 1 for this kind, got 2",
        ),
        (
            lambda: LayerSpec("sliding_window", 4, latent(24, 16).format, window=8),
            "format: expected rows of K and V, got 'latent', a latent row",
        ),
        (
            lambda: full_attention(2, 64, dtype=torch.float64),
            "dtype: expected a torch dtype, one of torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, "
            "got torch.float64",
        ),
        (lambda: latent(512, 576), "value_dim: expected an integer in [1, 512], got 576"),
        (lambda: full_attention(0, 64), "num_heads: expected an integer >= 1, got 0"),
        (lambda: full_attention(2, 64, dtype="bf16"), "torch.float32, torch.float8_e4m3fn, got 'bf16'"),
        (
            lambda: full_attention(2, 64, padded_page_bytes=8176),
            "padded_page_bytes: expected an integer >= 8192, got 8176",
        ),
        (
            lambda: full_attention(2, 64, padded_page_bytes=8200),
            "padded_page_bytes: expected a multiple of 16, got 8200",
        ),
        (lambda: Retention("full", 4), "Retention 'full': window: expected None, got 4"),
        (lambda: Retention("sliding_window"), "Retention 'sliding_window': window: expected an integer, got None"),
        (lambda: Retention("rotary"), "kind: expected one of full, sliding_window, chunked, ring, state, got"),
        (lambda: LayerSpec.from_dict({"kind": "full"}), "LayerSpec: expected the fields that to_dict wrote"),
        (lambda: LayerSpec.from_dict({**latent().to_dict(), "rows": 3}), "expected the fields that to_dict wrote"),
        (
            lambda: LayerSpec.from_dict({**latent().to_dict(), "block_size": 0}),
            "expected an integer in [1, 2147483647]",
        ),
    ],
)
def test_a_spec_that_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        make()


def test_a_page_cannot_escape_the_16_byte_rule():
    odd = RowFormat("odd", (RowPart("x", torch.uint8, 1, 7),), (7,))
    assert LayerSpec("full", 3, odd).page_bytes == 32
    with pytest.raises(ValueError, match="page_alignment: expected a multiple of 16, got 8"):
        replace(odd, page_alignment=8)
