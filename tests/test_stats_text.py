"""str(store.stats()): a table for a person; repr stays the dataclass."""

import kvstore
from kvstore.layers import full_attention, sliding_window


def stats_of(num_window_layers, layout):
    layers = {"layers.0.attn": full_attention(2, 64)}
    layers |= {f"layers.{i}.attn": sliding_window(2, 64, window=64) for i in range(1, 1 + num_window_layers)}
    plan = kvstore.plan_cache(layers, memory="4MiB", layout=layout, grouping="uniform")
    store = kvstore.KVStore(plan, max_sequences=8, max_length=512)
    seq_ids = store.open([range(100)]).seq_ids
    store.commit(store.extend(seq_ids, 100), range(100))
    store.open([range(100)])
    return store.stats()


def test_blocks_by_state_and_group_and_the_hit_rate_are_shown():
    assert str(stats_of(1, "overlay")).splitlines() == [
        "Blocks by group and state",
        "  group         in use  cached  fenced  reserved  bytes in use",
        "  full_b16           7       0       0         0        57,344",
        "  window64_b16       5       2       0         0        40,960",
        "497 of 511 blocks free",
        "14 blocks in use at the peak, 0 evicted",
        "2 sequences open, 0 of them suspended",
        "96 of 200 prompt tokens cached, hit rate 48.0 %",
    ]


def test_frames_of_several_blocks_show_what_only_one_group_can_have():
    stats = stats_of(5, "frames")
    text = str(stats)
    full, window = stats.groups
    assert full.reserved > 0
    line = f"  {full.name}           {full.in_use}       0       0 {full.reserved:>9}  {full.held_bytes:>12,}"
    assert line in text.splitlines()
    assert (
        f"{stats.free} of {stats.num_blocks} frames free; waste {100 * stats.fragmentation:.1f} %: free, but only"
        in text
    )
    assert window.name in text


def test_repr_names_every_field():
    stats = stats_of(1, "overlay")
    assert repr(stats).startswith("StoreStats(num_blocks=511, free=497, cached=2, in_use=12, fenced=0, ")


def test_a_store_without_groups_and_before_the_first_prompt():
    store = kvstore.KVStore(kvstore.plan_cache({}, memory="1MiB"))
    assert str(store.stats()).splitlines()[-2:] == [
        "0 sequences open, 0 of them suspended",
        "0 of 0 prompt tokens cached, hit rate 0.0 %",
    ]
