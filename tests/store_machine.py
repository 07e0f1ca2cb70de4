"""The machine of hypothesis over `store_world`: it chooses a setup, a number of frames, and rules with a few bytes."""

from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.store_parts import Choices
from tests.store_setups import ROOMY, Setup
from tests.store_world import RULES, World

DECISIONS = st.binary(min_size=16, max_size=16)
"""Enough for any rule; what is beyond is 0. One draw per step, which is what makes the machine fast."""

WEIGHTED = [name for name, (weight, _) in RULES.items() for _ in range(weight)]


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls on a store of one of `setups`; every step is one of `store_world.RULES`."""

    setups: Mapping[str, Setup] = {}

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        setup = self.setups[data.draw(st.sampled_from(sorted(self.setups)))]
        fewest = len(setup.layers) + 2
        self.world = World(setup, data.draw(st.sampled_from([ROOMY, fewest, 8, 14, 30])))

    @rule(name=st.sampled_from(WEIGHTED), decisions=DECISIONS)
    def step(self, name: str, decisions: bytes) -> None:
        RULES[name][1](self.world, Choices(decisions))

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


def case_of(name: str, setups: Mapping[str, Setup], max_examples: int, num_steps: int) -> type:
    """A TestCase for pytest."""
    machine = type(name, (StoreMachine,), {"setups": setups})
    case = machine.TestCase
    case.settings = settings(
        max_examples=max_examples, stateful_step_count=num_steps, deadline=None, derandomize=True, database=None
    )
    return case
