"""Capacity and waste of a plan, the text that explains it, and memory budgets."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MIXED

from kvstore.errors import PlanError
from kvstore.explain import blocks_per_sequence, capacity, longest_sequence
from kvstore.groups import CacheGroup
from kvstore.memory import UNITS, format_bytes, parse_memory
from kvstore.planner import plan_cache
from kvstore.specs import full_attention, sliding_window

LLAMA = Path(__file__).parent / "data/models/llama-3.1-8b.json"


@pytest.fixture
def plan():
    return plan_cache(MIXED, num_frames=10)


@pytest.mark.parametrize(
    ("window", "block_size", "length", "blocks"),
    [
        (None, 16, 0, 0),
        (None, 16, 16, 1),
        (None, 16, 17, 2),
        (1, 16, 100, 1),
        (2, 16, 100, 2),
        (128, 64, 64, 1),
        (128, 64, 8192, 3),
        (8, 4, 512, 3),
        (128, 8, 131_072, 17),
        (1024, 16, 512, 32),
    ],
)
def test_blocks_per_sequence(window, block_size, length, blocks):
    options = {"window": window, "block_size": block_size} if window else {"block_size": block_size}
    spec = (sliding_window if window else full_attention)(1, 8, **options)
    assert blocks_per_sequence(CacheGroup("g", {"a": spec}, block_size, spec.retention), length) == blocks


@given(st.integers(1, 70), st.integers(1, 17), st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_a_window_never_touches_more_blocks_than_that(window, block_size, length):
    spec = sliding_window(1, 8, window=window, block_size=block_size)
    group = CacheGroup("g", {"a": spec}, block_size, spec.retention)
    touched = [(end - 1) // block_size - max(end - window, 0) // block_size + 1 for end in range(1, length + 1)]
    assert max(touched) == blocks_per_sequence(group, length)


def test_the_null_block_is_not_there_to_use():
    """512 tokens are 32 blocks of 16: 32 frames cannot hold them, 33 can."""
    specs = {"layers.0.attn": full_attention(8, 128)}
    short, enough = plan_cache(specs, num_frames=32), plan_cache(specs, num_frames=33)
    assert (capacity(short, 512).num_sequences, longest_sequence(short)) == (0, 496)
    assert (capacity(enough, 512).num_sequences, longest_sequence(enough)) == (1, 512)
    assert capacity(enough, 256).num_sequences == 2


def test_longest_sequence_of_groups_that_share_the_frames(plan):
    assert (
        longest_sequence(plan) == 64
    )  # 9 frames: 4 of the full group, 2 of the window, 1 latent; 65 tokens take 5 + 3 + 2
    windows = {"layers.0.attn": sliding_window(1, 64, window=32)}
    assert longest_sequence(plan_cache(windows, num_frames=4)) is None
    assert longest_sequence(plan_cache(windows, num_frames=3)) == 32


def test_explain_shows_groups_slots_bytes_waste_and_capacity(plan):
    text = plan.explain()
    for line in (
        "full_b16: 2 layers, full, 16 tokens a block",
        "window1024_b32: 1 layer, window 1,024, 32 tokens a block",
        "layers.0.attn, layers.2.attn",
        "pages of one block 81,920 B: rows 73,728 B, padding 8,192 B; waste 98,304 B of 180,224 B",
        "Layout buckets: 3 layer slots, each with a tensor of 10 pages",
        "bucket of 65,536 B pages x 1 layer slot = 65,536 B a block",
        "layer slot 0: layers.0.attn, layers.1.attn of full_b16, window1024_b32; waste 65,536 B in blocks of full_b64",
        "this layout (buckets): 180,224 B (+83.3 % over the lower bound)",
        "lower bound (the widest group): 98,304 B",
        "rule before vLLM PR #44454 (every page size as often as the longest bucket): 180,224 B (+83.3 %)",
        "Capacity of 1,802,240 B (1.72 MiB): 10 blocks, of which 1 is the null block",
        "longest sequence alone: 64 tokens",
        "1,024 tokens: 0 sequences at once, each of 112 blocks (64 + 32 + 16), 20,185,088 B (19.25 MiB)",
    ):
        assert line in text


def test_explain_names_many_alike_layers_in_one_line():
    lines = plan_cache(LLAMA, memory="16GiB").explain().splitlines()
    assert "    layer slot 0 ... 31: layers.0.attn ... layers.31.attn (32) of full_b16" in lines
    assert len(lines) < 25


def test_explain_of_windows_only():
    plan = plan_cache({"layers.0.attn": sliding_window(1, 64, window=32)}, num_frames=4)
    assert "longest sequence alone: any length" in plan.explain()


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [
        (0, 0),
        (12_345, 12_345),
        ("0B", 0),
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        (" 512MiB ", 2**29),
        ("1.5KiB", 1536),
        ("0.0001KB", 0),
        ("2TiB", 2**41),
        ("3TB", 3 * 10**12),
        ("7MB", 7_000_000),
    ],
)
def test_memory(memory, num_bytes):
    assert parse_memory(memory) == num_bytes


@pytest.mark.parametrize(
    "memory", ["80", "", "GiB", "80 gib", "80Gb", "-1GiB", "nan", "1e3MiB", "8GiB 2", "8  GiB", "٣GiB?"]
)
def test_memory_text_without_a_known_unit_is_refused(memory):
    message = f"memory: expected a number and one of the units {', '.join(UNITS)}, got {memory!r}"
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_cache(MIXED, memory=memory)


@pytest.mark.parametrize("memory", [1e9, float("nan"), True, b"8GiB", [8]], ids=repr)
def test_memory_of_another_type_is_refused(memory):
    message = f"memory: expected bytes as int or text such as '80GiB', got {memory!r} of type {type(memory).__name__}"
    with pytest.raises(PlanError, match=re.escape(message)):
        plan_cache(MIXED, memory=memory)


def test_negative_memory_is_refused():
    with pytest.raises(PlanError, match="memory: expected a number of bytes >= 0, got -1"):
        plan_cache(MIXED, memory=-1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1,536 B (1.50 KiB)"), (2**31, "2,147,483,648 B (2.00 GiB)")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
