"""Events of a store: a router that follows them knows which blocks can be hit, and no other."""

import contextlib
import random

import numpy as np
import torch
from store_cases import make_store, prefill

import kvstore
from kvstore import Item, KVStore, Namespace
from kvstore.digests import content_digests
from kvstore.events import BlocksRemoved, BlocksStored, EventsLost, PrefixesCleared


def digests_of(tokens: object, store: KVStore, namespace: Namespace | None = None) -> list[bytes]:
    group = store.plan.groups[0]
    return [row.tobytes() for row in content_digests(np.asarray(tokens), group.block_size, namespace, group.name)]


def test_stored_blocks_are_named_by_their_content() -> None:
    store = make_store(max_events=100)
    tuned = Namespace(adapter="tuned")
    opened = store.open([range(10)], namespace=tuned)
    assert store.take_events() == []
    store.commit(store.extend(opened.seq_ids, [8]), range(8))
    (event,) = store.take_events()
    assert isinstance(event, BlocksStored)
    assert (event.group, event.block_size, event.namespace, event.parent) == ("full_b4", 4, tuned, None)
    assert list(event.digests) == digests_of(range(8), store, tuned)
    assert event.token_ids.tolist() == list(range(8))
    store.commit(store.extend(opened.seq_ids, [4]), [8, 9, 50, 51])
    store.release(opened.seq_ids)
    (event,) = store.take_events()
    assert isinstance(event, BlocksStored)
    assert event.parent == digests_of(range(8), store, tuned)[-1]
    assert list(event.digests) == digests_of([*range(10), 50, 51], store, tuned)[2:]


def test_a_hit_goes_on_from_the_digests_of_what_it_found() -> None:
    store = make_store(max_events=100)
    store.release(prefill(store, range(8)))
    store.take_events()
    store.release(prefill(store, [*range(8), 70, 71, 72, 73]))
    (event,) = store.take_events()
    assert list(event.digests) == digests_of([*range(8), 70, 71, 72, 73], store)[2:]
    assert event.parent == digests_of(range(8), store)[-1]


def test_items_are_in_the_digests() -> None:
    store = make_store(max_events=100)
    shown = [Namespace(items=(Item(2, name, 4),)) for name in ("cat.png", "dog.png")]
    opened = store.open([range(8), range(8)], namespace=shown)
    store.commit(store.extend(opened.seq_ids, 8), [*range(8), *range(8)])
    events = store.take_events()
    assert [list(event.digests) for event in events] == [digests_of(range(8), store, names) for names in shown]
    assert not set(events[0].digests) & set(events[1].digests)


def test_cleared_namespaces_and_lost_events() -> None:
    store = make_store(max_events=2)
    names = Namespace(salt=1)
    store.release(prefill(store, range(8)))
    opened = store.open([range(8)], namespace=names)
    store.commit(store.extend(opened.seq_ids, 8), range(8))
    store.release(opened.seq_ids)
    store.take_events()
    store.invalidate(names)
    assert store.take_events() == [PrefixesCleared(names)]
    store.drop_prefixes()
    assert store.take_events() == [PrefixesCleared(None)]
    for start in range(3):
        store.release(prefill(store, range(100 * start, 100 * start + 8)))
    assert isinstance(store.take_events()[0], EventsLost)


def findable(store: KVStore) -> dict[str, set[bytes]]:
    """By group, the digests of all blocks that the tree can still give, worked out from its tokens."""
    prefixes = store._books.prefixes
    assert prefixes is not None
    found: dict[str, set[bytes]] = {group.name: set() for group in store.plan.groups}
    pending = [(root, []) for _, root in prefixes.roots.values()]
    while pending:
        node, before = pending.pop()
        tokens = [*before, *node.tokens[: node.num_units * prefixes.rules.unit].tolist()]
        for g, group in enumerate(store.plan.groups):
            held = node.num_units * prefixes.rules.blocks_per_unit[g]
            valid = prefixes._is_valid(g, node.blocks[g][:held], node.generations[g][:held])
            digests = content_digests(tokens, group.block_size, None, group.name)[len(before) // group.block_size :]
            found[group.name] |= {row.tobytes() for row in digests[valid]}
        pending.extend((child, tokens) for child in node.children.values())
    return found


def test_a_follower_knows_exactly_what_can_be_hit() -> None:
    """Random sequences over two groups under eviction: the follower's digests are those of the valid entries."""
    specs = {
        "layers.0.attn": kvstore.full_attention(1, 8, dtype=torch.float16, block_size=4),
        "layers.1.attn": kvstore.sliding_window(1, 8, dtype=torch.float16, block_size=4, window=6),
    }
    store = KVStore(kvstore.plan_cache(specs, num_frames=30), None, 8, 64, 64, max_events=10_000)
    known: dict[str, dict[bytes, int]] = {group.name: {} for group in store.plan.groups}
    draw = random.Random(0)
    for step in range(300):
        prompt = [draw.randrange(2) for _ in range(draw.randrange(5, 30))]
        opened = store.open([prompt])
        count = len(prompt) - int(opened.cached_tokens[0])
        with contextlib.suppress(kvstore.OutOfBlocks):
            store.commit(store.extend(opened.seq_ids, count), prompt[-count:])
        store.release(opened.seq_ids)
        if step % 50 == 49:
            store.drop_prefixes()
        for event in store.take_events():
            if isinstance(event, PrefixesCleared):
                known = {name: {} for name in known}
                continue
            assert isinstance(event, BlocksStored | BlocksRemoved)
            for digest in event.digests:
                change = 1 if isinstance(event, BlocksStored) else -1
                known[event.group][digest] = known[event.group].get(digest, 0) + change
                assert known[event.group][digest] in (0, 1)
        told = {name: {digest for digest, count in digests.items() if count} for name, digests in known.items()}
        assert told == findable(store)
    assert store.stats().evicted > 100
