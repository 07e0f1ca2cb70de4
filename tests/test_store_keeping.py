"""KVStore: what is kept for later prompts and what is not: retention, invalidation, explained hits, stats."""

import sys
import threading

import pytest
from store_cases import (
    LAYER,
    STATE_LAYER,
    expect_rows,
    feed,
    make_hybrid,
    make_store,
    mixed_layers,
    prefill,
    snapshot,
    state,
    store_of,
)

from kvstore import CacheGroup, Item, KeepTokens, KVStore, Namespace, OutOfBlocks
from kvstore.layers import full_attention, latent


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def leave(store: KVStore, tokens: range, *keeps: KeepTokens) -> None:
    """A sequence of these tokens that came and went."""
    opened = store.open([tokens], retention=list(keeps) or None)
    count = len(tokens) - int(opened.cached_tokens[0])
    store.commit(store.extend(opened.seq_ids, count), tokens[-count:])
    store.release(opened.seq_ids)
    store.check()


def found(store: KVStore, *prompts: range) -> list[int]:
    """Whole blocks of each prompt that are still there; the prompts are one token longer."""
    opened = store.open([[*prompt, 999] for prompt in prompts])
    cached = opened.cached_tokens.tolist()
    store.release(opened.seq_ids)
    store.check()
    return cached


A, B, C, D = (range(start, start + 8) for start in (0, 100, 200, 300))

# Retention


def test_the_lowest_priority_goes_first_whatever_its_age() -> None:
    """8 blocks: A, B and C left 2 each. D takes the 2 free ones and 2 of C, which came last but counts least."""
    store = make_store(num_frames=9)
    leave(store, A, KeepTokens(0, priority=90))
    leave(store, B)
    leave(store, C, KeepTokens(0, priority=10))
    leave(store, range(300, 316))
    assert found(store, A, B, C) == [8, 8, 0]
    leave(store, range(400, 424))  # 6 blocks: those of D, and both of B, are older or of lower rank than A
    assert found(store, A, B, range(300, 316)) == [8, 0, 0]


def test_a_pinned_range_is_never_evicted() -> None:
    """The first 4 of 8 tokens are pinned: one block of 4 that nobody gets, though all else is evicted."""
    store = make_store(num_frames=5)
    leave(store, A, KeepTokens(0, 4, pinned=True))
    leave(store, range(100, 112))
    assert found(store, A, range(100, 112)) == [4, 12]
    seq_ids = store.open([range(200, 216)]).seq_ids
    before = snapshot(store)
    with pytest.raises(OutOfBlocks, match=r"wanted \[4\], free \[0\], evictable \[3\]"):
        store.extend(seq_ids, 16)
    assert snapshot(store) == before
    store.drop_prefixes()
    store.commit(store.extend(seq_ids, 16), range(200, 216))
    assert found(store, A) == [0]


def test_a_priority_lapses_after_its_time_to_live() -> None:
    clock = Clock()
    store = make_store(num_frames=7, clock=clock)
    leave(store, A, KeepTokens(0, priority=90, ttl=60.0))
    leave(store, B)
    clock.now = 59.0
    leave(store, C)
    leave(store, D)  # the pool was full: B was the oldest of lowest rank
    assert found(store, A, B, C, D) == [8, 0, 8, 8]
    clock.now = 61.0
    leave(store, range(400, 408))  # now A is the one that was used least lately, but for the look a moment ago
    assert found(store, A, C, D).count(8) == 2


def test_an_expired_priority_counts_as_never_given() -> None:
    clock = Clock()
    store = make_store(num_frames=7, clock=clock)
    leave(store, A, KeepTokens(0, priority=90, ttl=60.0))
    leave(store, B)
    leave(store, C)
    clock.now = 61.0
    leave(store, D)
    assert found(store, A, B, C, D) == [0, 8, 8, 8]


def test_a_pin_with_a_time_to_live_holds_that_long() -> None:
    clock = Clock()
    store = make_store(num_frames=3, clock=clock)
    leave(store, A, KeepTokens(0, pinned=True, ttl=10.0))
    seq_ids = store.open([B]).seq_ids
    with pytest.raises(OutOfBlocks, match=r"free \[0\], evictable \[0\]"):
        store.extend(seq_ids, 8)
    clock.now = 10.0
    store.extend(seq_ids, 8)
    store.check()
    assert store.stats().evicted == 2


def test_prompts_of_one_call_may_be_kept_in_their_own_ways() -> None:
    store = make_store(num_frames=7)
    opened = store.open([A, B, C], retention=[[KeepTokens(0, priority=60)], [], [KeepTokens(4, 8, priority=60)]])
    store.commit(store.extend(opened.seq_ids, 8), [*A, *B, *C])
    for seq_id in opened.seq_ids.tolist():
        store.release([seq_id])
    leave(store, range(300, 304))
    leave(store, range(310, 314))
    assert found(store, A, B, C) == [8, 0, 8]
    leave(store, range(320, 324))
    leave(store, range(330, 334))
    leave(store, range(340, 344))  # of C the head has rank 50 and goes: its tail is of no use then
    assert found(store, A, C) == [8, 0]


# Invalidation while sequences run


@pytest.mark.parametrize("by", ["namespace", "predicate"])
def test_one_namespace_is_invalidated_while_its_sequences_run(by: str) -> None:
    store = store_of(mixed_layers(), 100)
    spaces = [Namespace(adapter="a"), Namespace(adapter="b", items=(Item(3, "cat", 2),)), Namespace(salt=1)]
    seq_ids = store.open([range(13)] * 3, spaces).seq_ids.tolist()
    for start, end in ((0, 8), (8, 12), (12, 13)):
        feed(store, seq_ids, *[range(start, end)] * 3)
    before = store.open([range(13)] * 3, spaces)
    assert before.cached_tokens.tolist() == [8, 8, 8]  # 12, less the ring's 4
    store.release(before.seq_ids)
    if by == "namespace":
        given_up = store.invalidate(Namespace(adapter="b"))
    else:
        given_up = store.invalidate(predicate=lambda known: known.adapter == "b")
    assert given_up > 0
    store.check()
    after = store.open([range(13)] * 3, spaces)
    assert after.cached_tokens.tolist() == [8, 0, 8]
    store.release(after.seq_ids)
    tokens = {seq_id: [*range(13)] for seq_id in seq_ids}
    for token in range(13, 19):
        feed(store, seq_ids, *[[token]] * 3)
        tokens = {seq_id: [*part, token] for seq_id, part in tokens.items()}
        expect_rows(store, tokens)
    store.release(seq_ids)
    assert store.open([range(18)], spaces[1]).cached_tokens.tolist() == [0]
    fresh = store.open([range(13)], spaces[1]).seq_ids
    for start, end in ((0, 8), (8, 12), (12, 13)):
        feed(store, fresh, range(start, end))
    assert store.open([range(13)], spaces[1]).cached_tokens.tolist() == [8]
    store.check()


def test_invalidating_what_is_not_there_gives_up_nothing() -> None:
    store = make_store()
    assert (store.invalidate(Namespace(adapter="a")), store.drop_prefixes()) == (0, 0)
    leave(store, A)
    assert store.invalidate(Namespace(adapter="a")) == 0
    assert store.invalidate(predicate=lambda known: False) == 0
    assert found(store, A) == [8]
    assert store.invalidate(Namespace()) == 2
    assert store.stats().free == store.stats().num_blocks


# Explained hits


def test_hits_are_explained() -> None:
    store = make_store()
    name = store._books.rules.names[0]
    first, *_ = prefill(store, range(10))
    assert str(store.explain_hit(first)) == (
        "0 of 10 tokens cached; nothing cached begins like this prompt in its namespace"
    )
    opened = store.open([[*range(10), 11], [0, 1, 2, 3, 4, 5, 77, 78], [5]]).seq_ids
    assert str(store.explain_hit(opened[0])) == (
        f"8 of 11 tokens cached; tokens equal up to 8; {name}: 8 (end of match)"
    )
    assert str(store.explain_hit(opened[1])) == (
        f"6 of 8 tokens cached; tokens equal up to 6, 2 in copied blocks; {name}: 4 (end of match)"
    )
    report = store.explain_hit(opened[2])
    assert (report.num_tokens, report.matched, report.cached_tokens) == (1, 0, 0)


def test_a_hit_says_which_group_stopped_it_and_why() -> None:
    layers = {LAYER: full_attention(2, 8, block_size=4), STATE_LAYER: state(4)}
    store = store_of(layers)
    full, states = store._books.rules.names
    leave(store, range(11))  # in one step: no state was saved at 4 or 8
    opened = store.open([range(11)])
    assert str(store.explain_hit(opened.seq_ids[0])) == (
        f"0 of 11 tokens cached; tokens equal up to 8; {full}: 8 (end of match), {states}: 0 (no snapshot)"
    )
    store = make_hybrid()
    full, window = store._books.rules.names
    leave(store, range(13))
    store._books.allocator.forget(store._books.allocator._free[:0])
    opened = store.open([range(13)])
    assert str(store.explain_hit(opened.seq_ids[0])) == (
        f"12 of 13 tokens cached; tokens equal up to 12; {full}: 12 (end of match), {window}: 12 (end of match)"
    )


def test_a_hit_says_what_was_evicted_and_what_is_replayed() -> None:
    store = make_store(num_frames=5)
    name = store._books.rules.names[0]
    leave(store, range(12))
    leave(store, range(100, 108))
    opened = store.open([range(12)])
    assert str(store.explain_hit(opened.seq_ids[0])) == (
        f"8 of 12 tokens cached; tokens equal up to 12; {name}: 8 (end of match)"
    )
    store = store_of(mixed_layers())
    running = store.open([range(21)]).seq_ids
    for start in (0, 4, 8, 12, 16):
        feed(store, running, range(start, start + 4))
    text = str(store.explain_hit(store.open([range(21)]).seq_ids[0]))
    assert text.startswith("16 of 21 tokens cached; tokens equal up to 20, 4 replayed for rings; ")
    assert text.count("20 (end of match)") == 5


def test_a_store_without_prefix_caching_finds_nothing_and_says_so() -> None:
    store = make_store(prefix_caching=False)
    leave(store, A)
    assert found(store, A) == [0]
    seq_ids = store.open([A]).seq_ids
    with pytest.raises(ValueError, match="prefix_caching: this store finds no prefixes"):
        store.explain_hit(seq_ids[0])
    assert (store.drop_prefixes(), store.stats().asked_tokens) == (0, 0)


# Stats


def test_stats_count_blocks_by_state_and_group() -> None:
    store = make_hybrid(num_frames=40)
    full, window = store._books.rules.names
    leave(store, range(12))
    running = prefill(store, range(100, 109))
    stats = store.stats()
    assert [group.name for group in stats.groups] == [full, window]
    assert [group.in_use for group in stats.groups] == [3, 3]  # tokens 104 ... 108 of the window
    assert [group.cached for group in stats.groups] == [3, 6 + 2]  # those of the prompt's whole units stay
    assert stats.num_blocks == 39 == stats.free + stats.cached + stats.in_use + stats.fenced
    assert (stats.open_sequences, stats.suspended_sequences, stats.evicted) == (1, 0, 0)
    assert stats.groups[0].held_bytes == 3 * store.plan.block_strides[0]
    assert stats.partly_used_bytes == 0
    assert stats.fragmentation == 0.0
    store.suspend(running)
    assert (store.stats().open_sequences, store.stats().suspended_sequences, store.stats().in_use) == (1, 1, 0)


def test_stats_count_asked_and_cached_tokens() -> None:
    store = make_store()
    assert store.stats().hit_rate == 0.0
    leave(store, range(8))
    store.open([range(9), range(16), [70] * 7])
    stats = store.stats()
    assert (stats.asked_tokens, stats.hit_tokens, stats.hit_rate) == (8 + 9 + 16 + 7, 16, 0.4)
    assert stats.peak_in_use == 2


def test_stats_tell_partly_used_frames_apart() -> None:
    specs = {"wide": full_attention(4, 64, block_size=4), "narrow": latent(16, 8, block_size=4)}
    groups = [CacheGroup(name, {name: spec}, 4, spec.retention) for name, spec in specs.items()]
    store = store_of(groups, 10, layout="frames")
    prefill(store, range(6))
    stats = store.stats()
    per_frame = store.plan.blocks_per_frame
    assert max(per_frame) > 1
    used = [-(-2 // count) for count in per_frame]
    assert stats.free == stats.num_blocks - sum(used)
    assert [group.reserved for group in stats.groups] == [
        frames * count - 2 for frames, count in zip(used, per_frame, strict=True)
    ]
    assert stats.partly_used_bytes == sum(group.reserved * group.block_stride_bytes for group in stats.groups)
    assert stats.fragmentation == stats.partly_used_bytes / (9 * store.plan.frame_bytes)


def test_another_thread_may_ask_for_stats_at_any_time() -> None:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    store = make_hybrid(num_frames=60, max_length=64)
    wrong: list[str] = []
    asked = [0]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                stats = store.stats()
                counts = (stats.free, stats.cached, stats.in_use, stats.fenced, stats.evicted, stats.open_sequences)
                if min(counts) < 0 or stats.num_blocks != 59 or max(counts[:4]) > 59 or len(stats.groups) != 2:
                    wrong.append(f"counts {counts}")
            except Exception as error:  # any at all is what this test looks for
                wrong.append(repr(error))
            asked[0] += 1

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for round_number in range(60):
            seq_ids = store.open(
                [range(round_number, round_number + 9), range(round_number * 7, round_number * 7 + 5)]
            ).seq_ids
            missing = [9, 5] - store._books.state.committed[seq_ids & 0xFF]
            store.commit(store.extend(seq_ids, missing), [1] * int(missing.sum()))
            for token in range(4):
                store.commit(store.extend(seq_ids, 1), [token, token])
            store.suspend(seq_ids[:1])
            store.resume(seq_ids[:1])
            store.release(seq_ids)
    finally:
        done.set()
        sys.setswitchinterval(interval)
        for reader in readers:
            reader.join()
    assert wrong == []
    assert asked[0] > 20
    store.check()


def test_namespaces_that_nobody_asks_for_again_are_forgotten_with_their_blocks() -> None:
    store = make_store(num_frames=9)
    for salt in range(300):
        opened = store.open([range(8)], namespace=Namespace(salt=salt))
        store.commit(store.extend(opened.seq_ids, 8), range(8))
        store.release(opened.seq_ids)
    prefixes = store._books.prefixes
    assert prefixes is not None
    assert len(prefixes.roots) < 30  # four of them have blocks
    assert prefixes.index.num_nodes < 30
    assert store.open([range(8)], namespace=Namespace(salt=299)).cached_tokens.tolist() == [7]
    store.check()


def test_a_pin_holds_for_blocks_that_were_cached_already() -> None:
    store = make_store(num_frames=9)
    leave(store, range(8))
    leave(store, range(8), KeepTokens(0, 4, pinned=True))  # finds the first block, and asks for it to stay
    for start in range(100, 400, 8):
        leave(store, range(start, start + 8))
    assert store.open([range(8)]).cached_tokens.tolist() == [4]
    store.check()
