"""Any order of calls against a plain model, with real pages: rings and states among the groups."""

from tests.store_machine import case_of
from tests.store_setups import FIXED

TestRings = case_of("Rings", {name: setup for name, setup in FIXED.items() if "state" not in name}, 500, 20)
TestStates = case_of("States", {name: setup for name, setup in FIXED.items() if "state" in name}, 500, 20)
