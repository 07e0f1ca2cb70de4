"""What tests/store_machine.py has found, each in the fewest calls."""

from dataclasses import replace

import numpy as np
import pytest

from tests.store_parts import Choices
from tests.store_setups import ROOMY, SETUPS
from tests.store_world import NAMESPACES, World

NOTHING = Choices(b"")


def world_of(name: str) -> World:
    return World(SETUPS[name], ROOMY)


def computed(world: World, prompt: list[int], namespace: int = 0) -> int:
    """A sequence whose prompt is committed, in as few steps as may be."""
    seq_id = world.open_prompt(prompt, namespace)
    world.compute(seq_id, NOTHING)
    world.check()
    return seq_id


def step(world: World, seq_ids: list[int], count: int) -> None:
    """Extends, writes, reads back, commits and finishes."""
    flight = world.reserve(seq_ids, count, 0)
    assert flight is not None
    world.settle(flight)
    world.check()


def test_more_blocks_leave_a_window_at_once_than_ghosts_are_kept() -> None:
    """Two of them fell on the same place: one was forgotten twice, another stayed cached though nothing named it."""
    world = world_of("window alone")
    seq_id = computed(world, [0])
    for count in (1, 1, 1, 1, 1, 1, 1, 8, 8):
        step(world, [seq_id], count)
    world.close()


def test_a_hit_takes_no_window_block_that_nobody_has_looked_at() -> None:
    """The blocks kept for taking tokens back were attached although the hit rule had not asked for them."""
    world = world_of("chunked, rollback")
    computed(world, [1, 0] * 4 + [0] * 4)
    assert world.open_[computed(world, [1, 0] * 4 + [1] * 3)].cached == 8
    world.close()


def test_a_truncated_sequence_of_forgotten_prefixes_stays_out_of_the_index() -> None:
    world = world_of("full")
    seq_id = computed(world, [1, 0] * 6, 1)
    world.store.invalidate(NAMESPACES[1])
    world.forget((1,))
    world.store.truncate([seq_id], 2)
    world.shorten([seq_id], [2])
    world.compute(seq_id, NOTHING)
    assert world.store.open([[1, 0] * 6], NAMESPACES[1]).cached_tokens.tolist() == [0]


def test_of_a_tail_whole_blocks_are_stored() -> None:
    """A hit took a block of which the step had stored the last rows only."""
    world = world_of("window, tail, rollback")
    computed(world, [0] * 10)
    seq_id = world.open_prompt([0] * 5, 0)
    assert world.open_[seq_id].cached == 4
    step(world, [seq_id], 1)
    world.close()


@pytest.mark.parametrize("length", range(20, 25))
@pytest.mark.parametrize("name", ["window, rollback", "window, tail, rollback", "window, frames", "chunked, rollback"])
def test_as_much_can_be_taken_back_as_was_asked_for(name: str, length: int) -> None:
    """A window refused it where its reach began a block, since it wanted to keep as much for the next time."""
    world = world_of(name)
    seq_id = computed(world, [1, 0] * 6)
    for _ in range(length - 12):
        step(world, [seq_id], 1)
    kept = length - world.options["rollback"]
    world.store.truncate([seq_id], kept)
    world.shorten([seq_id], [kept])
    for count in (1, 1, 3):
        step(world, [seq_id], count)
    world.close()


def test_nothing_is_taken_back_while_a_ring_is_being_filled() -> None:
    """The ring has no row from before the replay, so that the next token would have met what is left of another's."""
    world = world_of("ring")
    world.give_up([computed(world, [0] * 9)])
    seq_id = world.open_prompt([0] * 9, 0)
    assert world.store.explain_hit(seq_id).replayed == 5
    with pytest.raises(ValueError, match=r"what group 'ring_b5' \(ring\) can roll back to, got 1"):
        world.store.truncate([seq_id], 1)
    step(world, [seq_id], 6)
    world.close()


def test_forks_in_the_middle_of_a_replay_have_states_of_their_own() -> None:
    """Both wrote to one block: it was judged by the end of the replay, but a state is computed again in it."""
    world = world_of("ring, state")
    world.give_up([computed(world, [1, 0] * 4 + [1] * 5)])
    seq_id = world.open_prompt([1, 0] * 4 + [1] * 5, 0)
    step(world, [seq_id], 2)
    world.fork(Choices(b"\0\1"))
    for count in (1, 1, 2):
        for each in list(world.open_):
            step(world, [each], count)
    world.close()


def test_with_a_ring_beside_it_a_state_is_saved_where_the_replay_begins() -> None:
    """It was saved at the end of the longest hit, from which a store with rings goes back by a replay: never hit."""
    world = world_of("ring, state")
    computed(world, [1, 0] * 4 + [1] * 5)
    opened = world.store.open([[1, 0] * 4 + [1] * 5])
    assert opened.cached_tokens.tolist() == [8]
    assert world.store.explain_hit(int(opened.seq_ids[0])).length == 12


def test_debug_accepts_a_batch_whose_prefixes_were_dropped() -> None:
    world = world_of("full, debug")
    seq_id = computed(world, [0] * 8)
    flight = world.reserve([seq_id], 3, 0)
    assert flight is not None
    world.store.drop_prefixes()
    world.settle(flight)
    world.close()


def test_debug_accepts_a_batch_ahead_of_which_a_window_moves_on() -> None:
    """Of the blocks in its table the commit before it gave some up, which it cannot reach."""
    world = World(replace(SETUPS["window alone"], options={"debug": True, "prefix_caching": False}), ROOMY)
    seq_id = computed(world, [0] * 13)
    for _ in range(6):
        first = world.reserve([seq_id], 1, 0)
        second = world.reserve([seq_id], 1, 0)
        assert first is not None
        assert second is not None
        world.settle(first)
        world.settle(second)
        world.check()
    world.close()


def test_debug_still_refuses_a_batch_whose_block_changed_hands() -> None:
    world = world_of("full, debug")
    seq_id = computed(world, [0] * 8)
    flight = world.reserve([seq_id], 1, 0)
    assert flight is not None
    books = world.store._books
    books.allocator.freed.append(np.array([flight.batch.block_table[0][0, 0]], np.int32))  # a fault of the books
    world.store._poison()
    with pytest.raises(ValueError, match="expected blocks that are still the batch's own"):
        world.store.gather("layers.0.attn", flight.batch)


def test_forks_remember_the_same_blocks() -> None:
    """What both had let go was forgotten once for each when it was displaced, and so was free twice."""
    world = world_of("window alone")
    seq_id = computed(world, [0])
    step(world, [seq_id], 7)  # generated: in no index yet
    world.fork(Choices(b"\0\1"))
    for _ in range(20):
        step(world, list(world.open_), 1)
    world.close()
