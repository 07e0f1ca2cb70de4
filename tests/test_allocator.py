"""BlockAllocator: states, references, fences and the order of eviction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.allocator import BlockAllocator
from kvstore.errors import OutOfBlocks


def test_ids_ascend_and_never_name_the_null_block() -> None:
    allocator = BlockAllocator(num_blocks=6, num_groups=2)
    first, second = allocator.take([2, 3])
    assert first.tolist() == [1, 2]
    assert second.tolist() == [3, 4, 5]
    assert allocator.group.tolist() == [-1, 0, 0, 1, 1, 1]
    allocator.check()


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_pool_of_one_or_two_blocks(num_blocks: int) -> None:
    allocator = BlockAllocator(num_blocks, 1)
    assert allocator.take([0])[0].tolist() == []
    with pytest.raises(OutOfBlocks, match=rf"wanted \[{num_blocks}\], free \[{num_blocks - 1}\]"):
        allocator.take([num_blocks])
    allocator.check()


def test_a_failed_take_changes_nothing() -> None:
    allocator = BlockAllocator(8, 2)
    held, _ = allocator.take([4, 0])
    allocator.index(held[:2])
    allocator.release(held[:2])
    before = [
        array.copy() for array in (allocator.references, allocator.group, allocator.generation, allocator.indexed)
    ]
    counts = allocator.num_free, allocator.num_cached
    with pytest.raises(OutOfBlocks) as caught:
        allocator.take([3, 3])
    assert caught.value.wanted == (3, 3)
    assert caught.value.free == (3, 3)
    assert caught.value.evictable == (2, 0)
    assert caught.value.fenced == (0, 0)
    after = [allocator.references, allocator.group, allocator.generation, allocator.indexed]
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert (allocator.num_free, allocator.num_cached) == counts
    allocator.check()


def test_o10_a_second_release_is_refused() -> None:
    allocator = BlockAllocator(8, 1)
    (ids,) = allocator.take([2])
    allocator.release(ids)
    with pytest.raises(ValueError, match=f"expected blocks in use, got block {ids[0]} without a reference"):
        allocator.release(ids)
    with pytest.raises(ValueError, match="got block 0 without a reference"):
        allocator.release(np.array([0], np.int32))
    assert allocator.num_free == 7
    allocator.check()


def test_blocks_are_evicted_in_the_order_of_release() -> None:
    allocator = BlockAllocator(7, 1)
    (ids,) = allocator.take([6])
    allocator.index(ids)
    allocator.release(ids[[5, 1]])
    allocator.release(ids[[0, 2, 3, 4]])
    assert allocator.num_cached == 6
    assert allocator.take([1])[0].tolist() == [ids[5]]
    assert allocator.take([2])[0].tolist() == [ids[1], ids[0]]
    allocator.check()


def test_a_hit_saves_a_block_from_eviction() -> None:
    allocator = BlockAllocator(4, 1)
    (ids,) = allocator.take([3])
    allocator.index(ids)
    allocator.release(ids)
    allocator.retain(ids[:1])
    assert allocator.num_cached == 2
    allocator.release(ids[:1])
    assert allocator.take([3])[0].tolist() == [ids[1], ids[2], ids[0]]
    allocator.check()


def test_an_evicted_block_has_another_generation() -> None:
    allocator = BlockAllocator(2, 1)
    (ids,) = allocator.take([1])
    allocator.index(ids)
    generation = int(allocator.generation[1])
    allocator.release(ids)
    assert allocator.generation[1] == generation
    allocator.take([1])
    assert allocator.generation[1] != generation
    assert not allocator.indexed[1]


def test_fenced_blocks_are_counted_and_not_handed_out() -> None:
    allocator = BlockAllocator(4, 2)
    first, second = allocator.take([1, 2])
    allocator.fence(second)
    assert allocator.num_fenced().tolist() == [0, 2]
    with pytest.raises(OutOfBlocks, match=r"fenced \[0, 2\]"):
        allocator.take([1, 0])
    allocator.check()
    allocator.unfence(second)
    assert allocator.num_free == 2
    assert allocator.num_fenced().tolist() == [0, 0]
    allocator.release(first)
    allocator.check()


def test_a_shared_block_stays_until_its_last_reference() -> None:
    allocator = BlockAllocator(3, 1)
    (ids,) = allocator.take([1])
    allocator.retain(ids)
    allocator.release(ids)
    assert allocator.num_free == 1
    allocator.release(ids)
    assert allocator.num_free == 2


ACTIONS = ["take", "release", "index", "retain", "fence", "unfence"]


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(1, 24),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=60),
)
def test_any_sequence_of_calls_keeps_every_block_in_one_state(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Against a model that knows references and fences per block as plain numbers."""
    allocator = BlockAllocator(num_blocks, 2)
    references: dict[int, int] = {}
    fences: dict[int, int] = {}
    for action, amount in actions:
        held = [block for block, count in references.items() if count > fences.get(block, 0)]
        chosen = np.array(held[:amount], np.int32)
        if action == "take":
            counts = [amount // 2, amount - amount // 2]
            room = allocator.num_free + allocator.num_cached
            if amount > room:
                with pytest.raises(OutOfBlocks):
                    allocator.take(counts)
            else:
                for block in np.concatenate(allocator.take(counts)).tolist():
                    assert references.get(block, 0) == 0, "a held block was handed out"
                    references[block] = 1
        elif action == "release":
            allocator.release(chosen)
            references.update((block, references[block] - 1) for block in chosen.tolist())
        elif action == "index":
            allocator.index(chosen)
        elif action == "retain":
            allocator.retain(chosen)
            references.update((block, references[block] + 1) for block in chosen.tolist())
        elif action == "fence":
            allocator.fence(chosen)
            fences.update((block, fences.get(block, 0) + 1) for block in chosen.tolist())
        else:
            fenced = [block for block, count in fences.items() if count][:amount]
            allocator.unfence(np.array(fenced, np.int32))
            for block in fenced:
                fences[block] -= 1
                references[block] -= 1
        allocator.check()
        assert allocator.num_held == sum(count > 0 for count in references.values())
        assert allocator.num_fenced().sum() == sum(
            count > 0 and count == fences.get(block, 0) for block, count in references.items()
        )
