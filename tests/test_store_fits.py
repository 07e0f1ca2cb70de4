"""What can never fit is told from what does not fit now: NeverFits, and a warning when the store is made."""

import re
import warnings

import pytest
import torch
from store_cases import LAYER, WINDOW_LAYER, make_hybrid, make_store, prefill, snapshot, store_of

import kvstore
from kvstore import NeverFits, OutOfBlocks
from kvstore.layers import full_attention, sliding_window


def refusal(store, seq_ids, counts):
    """What `extend` raises; nothing changes by it."""
    before = snapshot(store)
    with pytest.raises(OutOfBlocks) as caught:
        store.extend(seq_ids, counts)
    assert snapshot(store) == before
    store.check()
    return caught.value


@pytest.mark.filterwarnings("ignore:max_length")
def test_a_prompt_larger_than_the_plan_never_fits():
    store = make_store(num_frames=5)  # 4 blocks of 4 tokens beside the null block
    seq_ids = store.open([range(17)]).seq_ids
    error = refusal(store, seq_ids, 17)
    assert isinstance(error, NeverFits)
    assert (error.seq_id, error.needed, error.total, error.wanted, error.free) == (seq_ids[0], (5,), (4,), (5,), (4,))
    assert str(error) == (
        "out of blocks, counted per group: wanted [5], free [4], evictable [0], fenced [0]; "
        f"sequence {seq_ids[0]} never fits: alone it needs [5] blocks, and the plan has [4]"
    )
    store.extend(seq_ids, 16)


@pytest.mark.filterwarnings("ignore:max_length")
def test_what_a_sequence_holds_already_counts():
    store = make_store(num_frames=5)
    seq_ids = prefill(store, range(14))
    error = refusal(store, seq_ids, 3)
    assert isinstance(error, NeverFits)
    assert (error.needed, error.total, error.wanted) == ((5,), (4,), (1,))


@pytest.mark.filterwarnings("ignore:max_length")
@pytest.mark.parametrize("others", ["another holds blocks", "two in one batch", "a fork shares blocks"])
def test_what_fits_alone_is_no_such_error(others):
    store = make_store(num_frames=5)
    if others == "two in one batch":
        seq_ids = store.open([range(12), range(50, 60)]).seq_ids
        assert not isinstance(refusal(store, seq_ids, [12, 10]), NeverFits)
        return
    if others == "a fork shares blocks":
        (seq_id,) = prefill(store, range(12))
        forks = store.fork(seq_id, 2)
        assert not isinstance(refusal(store, forks, 1), NeverFits)
        return
    prefill(store, range(50, 55))
    seq_ids = store.open([range(12)]).seq_ids
    assert not isinstance(refusal(store, seq_ids, 12), NeverFits)


@pytest.mark.filterwarnings("ignore:max_length")
def test_one_of_many_is_named():
    store = make_store(num_frames=5)
    short = prefill(store, range(50, 53))
    long = store.open([range(20)]).seq_ids
    error = refusal(store, [*short, *long], [1, 20])
    assert isinstance(error, NeverFits)
    assert (error.seq_id, error.needed) == (long[0], (5,))


@pytest.mark.filterwarnings("ignore:max_length")
def test_a_window_may_fit_in_smaller_steps():
    """Blocks of a window leave as it goes on: what never fits in one step may in several, and the numbers say so."""
    store = store_of({LAYER: sliding_window(2, 8, window=4, dtype=torch.float32, block_size=4)}, num_frames=5)
    seq_ids = store.open([range(24)]).seq_ids
    error = refusal(store, seq_ids, 24)
    assert isinstance(error, NeverFits)
    assert (error.needed, error.total) == ((6,), (4,))
    for start in range(0, 24, 8):
        store.commit(store.extend(seq_ids, 8), range(start, start + 8))


@pytest.mark.filterwarnings("ignore:max_length")
def test_groups_that_share_a_pool_are_counted_together():
    store = make_hybrid(num_frames=8)
    seq_ids = store.open([range(16)]).seq_ids
    error = refusal(store, seq_ids, 16)
    assert isinstance(error, NeverFits)
    assert (error.needed, error.total) == ((4, 8), (7, 7))
    assert str(error).endswith("alone it needs [4, 8] blocks, and the plan has [7, 7], which the groups share")


@pytest.mark.filterwarnings("ignore:max_length")
def test_blocks_in_frames_are_counted_by_their_frames():
    layers = {
        LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4),
        WINDOW_LAYER: sliding_window(1, 8, dtype=torch.float32, block_size=2, window=6),
    }
    plan = kvstore.plan_cache(layers, memory="256KiB", layout="frames")
    assert max(plan.blocks_per_frame) > 1
    store = kvstore.KVStore(plan, "cpu", max_sequences=4, max_length=8192)
    longest = plan.max_length(in_flight=8192)
    fitting, never = store.open([range(longest), range(1000, 1001 + longest)]).seq_ids
    error = refusal(store, [never], longest + 1)
    assert isinstance(error, NeverFits)
    assert error.needed == tuple(plan.blocks_needed(longest + 1, in_flight=8192)[0])
    store.extend([fitting], longest)
    assert not isinstance(refusal(store, [never], longest), NeverFits)


def test_a_store_warns_of_lengths_that_its_plan_has_no_room_for():
    plan = kvstore.plan_cache({LAYER: full_attention(2, 8, block_size=4)}, num_frames=5)
    message = (
        "max_length: 17 tokens are more than the plan has room for, 16 of one sequence: a longer one raises NeverFits"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$") as caught:
        kvstore.KVStore(plan, max_length=17)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("kind", ["full", "window", "no layer"])
def test_a_store_whose_lengths_fit_does_not_warn(kind):
    layers = {
        "full": {LAYER: full_attention(2, 8, block_size=4)},
        "window": {LAYER: sliding_window(2, 8, window=4, block_size=4)},
        "no layer": {},
    }[kind]
    plan = kvstore.plan_cache(layers, num_frames=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvstore.KVStore(plan, max_length=16 if kind == "full" else 100_000, max_tokens_per_step=16)


@pytest.mark.filterwarnings("ignore:max_length")
def test_the_copy_of_a_tail_that_a_fork_shares_is_no_block_beside_it():
    store = make_store(num_frames=2)
    (parent,) = prefill(store, range(2))
    forks = store.fork(parent, 1)
    for seq_ids in (forks, [parent]):
        assert not isinstance(refusal(store, seq_ids, 1), NeverFits)
    store.release([parent])
    store.extend(forks, 1)


@pytest.mark.filterwarnings("ignore:max_length")
def test_a_window_that_a_commit_will_move_on_is_no_reason():
    specs = {WINDOW_LAYER: sliding_window(1, 16, window=16, dtype=torch.float32, block_size=16)}
    store = store_of(specs, 5, max_length=512)
    seq_ids = store.open([range(200)]).seq_ids
    batch = store.extend(seq_ids, 48)
    assert not isinstance(refusal(store, seq_ids, 32), NeverFits)
    store.commit(batch, range(48))
    store.extend(seq_ids, 32)
