"""Any order of calls against a plain model, with real pages: groups that keep rows of tokens."""

from tests.store_machine import case_of
from tests.store_setups import ROWS

TestFull = case_of("Full", {name: setup for name, setup in ROWS.items() if "window" not in name}, 500, 20)
TestWindows = case_of("Windows", {name: setup for name, setup in ROWS.items() if "window" in name}, 500, 20)
