"""How many blocks a sequence holds, and how much fits: against a walk over every length, and the published figures."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_data import MODELS, layers_of
from strategies import padded_group

from kvstore.demand import InFlight, blocks_of_sequence
from kvstore.errors import PlanError
from kvstore.layers import full_attention, latent, recurrent_state, sliding_window
from kvstore.planner import plan_cache
from kvstore.specs import LayerSpec, Retention
from kvstore_kernels.checks import cdiv
from kvstore_kernels.formats import latent_format


def reach_of(retention, position):
    """The first position that a query at `position` can see."""
    if retention.kind == "sliding_window":
        return max(position - retention.window + 1, 0)
    if retention.kind == "chunked":
        return position - position % retention.chunk
    return 0


def most_blocks_held(retention, block_size, length, in_flight):
    """Every number of settled tokens, with a step of `in_flight` more behind them: blocks from reach to end."""
    most = 0
    for settled in range(length + 1):
        end = min(settled + in_flight, length)
        if end:
            most = max(most, (end - 1) // block_size - reach_of(retention, settled) // block_size + 1)
    return most


retentions = st.one_of(
    st.just(Retention("full")),
    st.builds(lambda window: Retention("sliding_window", window=window), st.integers(1, 40)),
    st.builds(lambda chunk: Retention("chunked", chunk=chunk), st.integers(1, 40)),
)


@given(retentions, st.integers(1, 9), st.integers(0, 120), st.integers(0, 50))
@settings(max_examples=300, deadline=None)
def test_no_sequence_ever_holds_more_and_long_ones_hold_as_many(retention, block_size, length, in_flight):
    formula = blocks_of_sequence(retention, block_size, length, InFlight(in_flight))
    held = most_blocks_held(retention, block_size, length, in_flight)
    assert held <= formula <= cdiv(length, block_size)
    long = length >= 40 + in_flight + 2 * block_size and (retention.window or 0) + in_flight > 1
    if retention.kind == "full" or (retention.kind == "sliding_window" and long):
        assert formula == held


@given(retentions, st.integers(1, 9), st.integers(0, 200), st.integers(0, 150))
@settings(max_examples=200, deadline=None)
def test_storing_the_tail_only_never_takes_more(retention, block_size, length, in_flight):
    every = blocks_of_sequence(retention, block_size, length, InFlight(in_flight))
    tail = blocks_of_sequence(retention, block_size, length, InFlight(in_flight, "tail"))
    assert tail <= every
    reach = retention.window or retention.chunk
    if reach and length:
        assert tail <= 2 * (cdiv(reach, block_size) + 1)


@pytest.mark.parametrize(
    ("length", "in_flight", "blocks"),
    [
        (8_192, 0, (3, 3, 32, 3, 17)),
        (131_072, 0, (3, 3, 512, 3, 17)),
        (131_072, 2_048, (35, 35, 512, 515, 273)),
        (131_072, 16_384, (259, 259, 512, 4_099, 2_065)),
        (1_048_576, 8_192, (131, 131, 4_096, 2_051, 1_041)),
        (1_048_576, 16_384, (259, 259, 4_096, 4_099, 2_065)),
    ],
)
def test_in_flight_reserve_of_v4_flash(length, in_flight, blocks):
    """Window, window, compressed, ratio-4 states, ratio-128 states; blocks of 1,002,240 B with one MTP layer."""
    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132-mtp1"])
    plan = plan_cache(layers, memory="64GiB", grouping="packed", layout="overlay")
    needed = plan.blocks_needed([length], in_flight=in_flight)
    assert needed.dtype == np.int64
    assert needed.tolist() == [list(blocks)]
    gibibytes = {131_072 + 16_384: 6.71, 1_048_576 + 8_192: 6.95, 1_048_576 + 16_384: 10.06, 131_072 + 2_048: 1.28}
    if length + in_flight in gibibytes:
        assert round(needed.sum() * plan.bytes_per_block / 2**30, 2) == gibibytes[length + in_flight]


def test_a_sequence_cannot_hold_more_blocks_than_it_has_tokens_for():
    """8,192 tokens, all in flight: the reference reserves one block more per window group, since it always adds one."""
    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132-mtp1"])
    plan = plan_cache(layers, memory="64GiB", grouping="packed", layout="overlay")
    reference = np.array([129, 129, 32, 2_049, 1_025])
    assert plan.blocks_needed(8_192, in_flight=8_192)[0].tolist() == [128, 128, 32, 2_048, 1_024]
    assert (reference - plan.blocks_needed(8_192, in_flight=8_192)[0]).tolist() == [1, 1, 0, 1, 1]


def test_the_tail_mode_and_rings_end_the_reserve():
    """131,072 tokens, 16,384 in flight: 7,194 blocks; 1,032 with the states as rings; 564 with tails stored only."""
    layers = layers_of(MODELS["deepseek-v4-flash/fp8_ds_mla-idx132-mtp1"])
    plan = plan_cache(layers, memory="64GiB", grouping="packed", layout="overlay")
    asked = {"lengths": 131_072, "in_flight": 16_384}
    assert plan.blocks_needed(**asked).sum() == 7_194
    assert plan.blocks_needed(**asked, stored="tail")[0].tolist() == [6, 6, 512, 6, 34]
    rings = {
        layer: LayerSpec("ring", spec.window, spec.format) if "state" in layer else spec
        for layer, spec in layers.items()
    }
    ringed = plan_cache(rings, memory="64GiB", grouping="packed", layout="overlay")
    of_kind = {}
    for group, blocks in zip(ringed.groups, ringed.blocks_needed(**asked)[0].tolist(), strict=True):
        of_kind.setdefault(group.retention.kind, []).append(blocks)
    assert of_kind["sliding_window"] == [259, 259]
    assert of_kind["full"] == [512]
    assert set(of_kind["ring"]) == {1}


STATE = recurrent_state([("s", (4, 64), torch.float32)], speculative_blocks=2)


def test_states_hold_their_blocks_at_any_length():
    assert [blocks_of_sequence(STATE.retention, 16, length) for length in (0, 1, 10**6)] == [0, 3, 3]
    assert blocks_of_sequence(STATE.retention, 16, 100, InFlight(1)) == 4
    assert blocks_of_sequence(STATE.retention, 16, 100, InFlight(1, prefix_caching=False)) == 3
    assert [blocks_of_sequence(Retention("ring"), 8, length, InFlight(99)) for length in (0, 1, 10**6)] == [0, 1, 1]


@pytest.mark.parametrize("layout", ["buckets", "frames"])
def test_capacity_is_what_an_allocator_can_hand_out(layout):
    """Counted by handing out frames one by one: a group fills its partly used frame first."""
    groups = [padded_group("a", [512, 512, 512]), padded_group("b", [512], window=32)]
    plan = plan_cache(groups, memory=64 * 1536, layout=layout, **({"frame_bytes": 3072} if layout == "frames" else {}))
    for length in (1, 16, 17, 100, 10**5):
        fits = plan.capacity(length)
        blocks = plan.blocks_needed(length)[0]
        free, room, count = plan.num_frames - 1, [0, 0], 0
        while True:
            for index, (need, per_frame) in enumerate(zip(blocks, plan.blocks_per_frame, strict=True)):
                more = cdiv(max(int(need) - room[index], 0), per_frame)
                free -= more
                room[index] += more * per_frame - int(need)
            if free < 0:
                break
            count += 1
        assert (fits.num_sequences, fits.num_tokens) == (count, count * length)
        assert fits.blocks == tuple(blocks)
        assert fits.num_bytes == sum(blocks * plan.block_strides)


def test_capacity_with_tokens_in_flight_reserves_them_once():
    plan = plan_cache({"w": sliding_window(1, 8, window=32)}, num_frames=101)
    assert plan.capacity(10_000).num_sequences == 100 // 3
    in_flight = plan.blocks_needed(10_000, in_flight=320)[0, 0]
    assert in_flight == 23
    assert plan.capacity(10_000, 320).num_sequences == 1 + (100 - 23) // 3
    assert plan.capacity(10_000, 320, stored="tail").num_sequences == 1 + (100 - 6) // 3
    assert plan.capacity(10_000, 16 * 101).num_sequences == 0
    assert plan.capacity(0).num_sequences == 0


def test_the_longest_sequence():
    plan = plan_cache({"f": full_attention(1, 8), "w": sliding_window(1, 8, window=32)}, num_frames=51)
    longest = plan.max_length()
    assert plan.blocks_needed(longest).sum() == 50 < plan.blocks_needed(longest + 1).sum()
    assert longest == 47 * 16
    assert plan.max_length(plan.frame_bytes) == 0
    assert plan.max_length(10 * plan.frame_bytes + 5) == 6 * 16
    assert plan_cache({"w": sliding_window(1, 8, window=32)}, num_frames=9).max_length() is None
    assert plan_cache({"w": sliding_window(1, 8, window=64)}, num_frames=3).max_length() == 32
    assert plan_cache({"s": STATE}, num_frames=3).max_length() == 0
    assert plan_cache({"s": STATE}, num_frames=5).max_length() is None
    ring = LayerSpec("ring", 8, latent_format(24, 16))
    assert plan_cache({"r": ring, "l": latent(24, 16)}, num_frames=4).max_length() == 2 * 64


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plan: plan.blocks_needed(-1), "lengths: expected an integer in [0, 1099511627776], got -1"),
        (lambda plan: plan.blocks_needed([4.5]), "lengths: expected an integer, got 4.5 of type float"),
        (lambda plan: plan.blocks_needed(["8k"]), "lengths: expected an integer, got '8k' of type str"),
        (
            lambda plan: plan.blocks_needed(4, in_flight=-2),
            "in_flight: expected an integer in [0, 1099511627776], got -2",
        ),
        (lambda plan: plan.blocks_needed(4, stored="head"), "stored: expected one of all, tail, got 'head'"),
        (lambda plan: plan.capacity(4, stored="head"), "stored: expected one of all, tail, got 'head'"),
        (lambda plan: plan.capacity(-4), "length: expected an integer in [0, 1099511627776], got -4"),
        (lambda plan: plan.capacity(4, None), "in_flight: expected an integer, got None"),
        (lambda plan: plan.max_length("80 gigs"), "memory: expected a number and one of the units"),
        (lambda plan: plan.max_length(in_flight=-1), "in_flight: expected an integer in [0, 1099511627776], got -1"),
    ],
)
def test_questions_that_make_no_sense_are_refused(ask, message):
    plan = plan_cache({"f": full_attention(1, 8)}, num_frames=4)
    with pytest.raises(PlanError, match=re.escape(message)):
        ask(plan)
