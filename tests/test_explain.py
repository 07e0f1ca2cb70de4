"""The text that explains a plan, the figures in it, and memory budgets."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from strategies import MIXED, padded_group

from kvstore.errors import PlanError
from kvstore.explain import alike, bounds, page_runs, regrouped, slot_runs, why_taken
from kvstore.groups import CacheGroup
from kvstore.layers import chunked_attention, full_attention, recurrent_state, sliding_window
from kvstore.memory import UNITS, format_bytes, parse_memory
from kvstore.placement import bytes_before_buckets, pool_bytes_per_block
from kvstore.planner import plan_cache
from kvstore.score import LAYOUT_TOLERANCE
from kvstore.spec_json import spec_from_fields
from kvstore.specs import Alias, LayerSpec, NoCache, Retention
from kvstore.wording import group_range, layer_range
from kvstore_kernels.formats import kv_format

DATA = Path(__file__).parent / "data"
LLAMA = "llama-3.1-8b"
CASES = {case["id"]: case for case in json.loads((DATA / "planning_models.json").read_text())["cases"]}


@pytest.fixture(scope="module")
def v4_flash():
    """DeepSeek V4-Flash with its MTP layer, packed rows: five groups of widths from 656,640 to 1,002,240."""
    case = CASES["deepseek-v4-flash/fp8_ds_mla-idx132-mtp1"]
    return {name: spec_from_fields(name, case["specs"][kind]) for name, _, kind in case["layers"]}


@pytest.fixture
def plan():
    return plan_cache(MIXED, num_frames=10, grouping="uniform", layout="buckets")


def squeezed(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_explain_shows_groups_slots_bytes_waste_and_capacity(plan):
    lines = plan.explain().splitlines()
    for line in (
        "Groups (3, grouping uniform): layers that allocate and free together",
        "  full_b16: 2 layers, full, 16 tokens a block",
        "  window1024_b32: 1 layer, window 1,024, 32 tokens a block",
        "    layers.0.attn, layers.2.attn; rows kv bfloat16",
        "    pages of one block 81,920 B: rows 73,728 B, padding 8,192 B; waste 98,304 B of 180,224 B (54.5%)",
        "Layout buckets: 3 layer slots, each with a tensor of 10 pages",
        "  bucket of 65,536 B pages x 1 layer slot = 65,536 B a block",
        "    layer slot 0: layers.0.attn, layers.1.attn of full_b16, window1024_b32; "
        "waste 65,536 B in blocks of full_b64",
        "  * taken: buckets, the only one looked at",
        "  not looked at: bestfit, overlay, frames",
        "  this layout (buckets): 180,224 B (+83.3 %)",
        "Capacity of 1,802,240 B (1.72 MiB): 10 blocks, one of them the null block; "
        "while a step has up to 8,192 tokens of one sequence in flight",
        "  longest sequence alone: 64 tokens",
        "  1,024 tokens: 0 sequences at once (0 tokens), each of 112 blocks (64 + 32 + 16)",
        "    one takes 20,185,088 B (19.25 MiB), its rows 9,568,256 B (9.12 MiB)",
    ):
        assert line in lines


def test_bytes_per_block_beside_their_bounds(plan):
    """98,304 = 65,536 + 32,768; bestfit 81,920 + 32,768; buckets all three sizes once; before them the same."""
    assert dict(bounds(plan.groups)) == {
        "lower bound: pages of the widest group": 98_304,
        "its rows alone": 98_304,
        "overlay": 98_304,
        "bestfit": 114_688,
        "buckets (vLLM PR #44454)": 180_224,
        "the rule before that PR": 180_224,
    }
    for line in ("bestfit 114,688 B +16.7 %", "overlay 98,304 B +0.0 %", "the rule before that PR 180,224 B +83.3 %"):
        assert line in squeezed(plan.explain())


def test_the_rule_before_buckets_pays_every_size_as_often_as_the_longest_bucket():
    """C3: one layer of 65,536 B beside 79 of 4,096 B was 80 x as wide as it need be."""
    groups = [padded_group("a", [65_536]), padded_group("b", [4096] * 79)]
    assert bytes_before_buckets(groups) == 79 * (65_536 + 4096)
    assert pool_bytes_per_block(groups) == 65_536 + 79 * 4096


def test_waste_of_layer_slots_narrower_pages_included():
    groups = [padded_group("a", [8192, 4096]), padded_group("b", [4096], window=32)]
    plan = plan_cache(groups, num_frames=4, layout="bestfit")
    runs = slot_runs(plan)
    assert [(run.page_bytes, run.groups, run.waste) for run in runs] == [
        (8192, ("a", "b"), ((4096, ("b",)),)),
        (4096, ("a",), ((4096, ("b",)),)),
    ]
    assert "    layer slot 0: a0, b0 of a, b; waste 4,096 B in blocks of b" in plan.explain().splitlines()
    unused = sum(waste for run in runs for waste, names in run.waste if "b" in names)
    assert unused == plan.bytes_per_block - groups[1].block_bytes


def test_explain_names_many_alike_layers_in_one_line():
    lines = plan_cache(LLAMA, memory="16GiB").explain().splitlines()
    assert "    layer slot 0 ... 31: layers.0.attn ... layers.31.attn (32) of full_b16" in lines
    assert "  * taken: buckets, the least score and the first in the list that has it" in lines
    assert len(lines) < 60


def test_v4_flash_in_packed_groups(v4_flash):
    """The five groups and their bytes are those that vLLM makes of it; the widest is the block of an overlay."""
    plan = plan_cache(v4_flash, memory="64GiB", grouping="packed", layout="overlay")
    assert [group.block_bytes for group in plan.groups] == [823_680, 823_680, 1_002_240, 870_912, 656_640]
    lines = plan.explain().splitlines()
    pages = "    pages of one block 656,640 B: rows 655,360 B, padding 1,280 B; waste 345,600 B of 1,002,240 B (34.5%)"
    for line in (
        "  window128_b64.1: 22 layers, window 128, 64 tokens a block",
        "    layers.1.window ... draft.0.window (22); rows bytes uint8; draft",
        pages,
        "Layout overlay: 1 slot tensor of 68,565 blocks of 1,002,240 B, "
        "the pages of a group dense from byte 0 of its block",
        "    bytes 0 ... 181,439: layers.2.indexer ... layers.42.indexer (21, every 2nd), "
        "pages of 8,640 B, row uint8 /4",
        "    bytes 656,640 ... 1,002,239: unused",
        "  1,024 tokens: 2,272 sequences at once (2,326,528 tokens), each of 30 blocks (3 + 3 + 4 + 3 + 17)",
        "    with 8,192 of its tokens in flight, stored 'all': 3,866 blocks (131 + 131 + 512 + 2,051 + 1,041)",
        "    with 8,192 of its tokens in flight, stored 'tail': 564 blocks (6 + 6 + 512 + 6 + 34)",
    ):
        assert line in lines
    for line in (
        "groups 5 4 5",
        "frame bytes 1,002,240 1,647,360 1,002,240",
        "1,024 tokens 30,067,200 B (+32.3 %) 44,478,720 B (+95.7 %) 30,067,200 B (+32.3 %)",
        "lower bound: pages of the widest group 1,002,240 B +0.0 %",
        "its rows alone 985,664 B -1.7 %",
        "bestfit 1,031,040 B +2.9 %",
        "buckets (vLLM PR #44454) 1,729,152 B +72.5 %",
        "equal: cannot be, layer 'layers.2.indexer': pages of 8640 B do not divide those of layer 'layers.0.window', "
        "37440 B, and latent pages are not padded",
    ):
        assert line in squeezed(plan.explain())


def test_regrouping_finds_the_groups_again_whatever_order_the_plan_has_them_in(v4_flash):
    plans = [plan_cache(v4_flash, memory="64GiB", grouping=name, layout="overlay") for name in ("uniform", "packed")]
    (first, *_), (second, *_) = (regrouped(plan) for plan in plans)
    assert dict(first[1:]) == dict(second[1:])
    assert (first[0][1], second[0][1]) == (dict(first)["uniform"], dict(second)["packed"])


def test_frames_show_blocks_strides_and_the_cap():
    plan = plan_cache(MIXED, memory="64MiB", grouping="uniform", layout="frames", frame_bytes=983_040)
    assert plan.blocks_per_frame == (10, 15, 12)
    lines = plan.explain().splitlines()
    for line in (
        "Layout frames: 1 slot tensor of 68 frames of 983,040 B, the pages of a group dense from byte 0 of its block",
        "  a frame takes at most 1/256 of the memory (261,120 B), or one block of the widest group where that is more",
        "  window1024_b32: 15 blocks a frame, block stride 65,536 B",
        "    bytes 65,536 ... 98,303: layers.2.attn, pages of 32,768 B, kv bfloat16",
        "  this layout (frames): 65,536 B ... 98,304 B, by group (+0.0 %)",
        "Capacity of 66,846,720 B (63.75 MiB): 68 frames, one of them the null frame; "
        "while a step has up to 8,192 tokens of one sequence in flight",
    ):
        assert line in lines
    assert [(first, end, layers) for first, end, layers, _ in page_runs(plan, 0)] == [
        (0, 65_536, ["layers.0.attn"]),
        (65_536, 98_304, ["layers.2.attn"]),
    ]


def test_the_layout_taken_has_a_star_and_a_reason():
    plan = plan_cache("gemma-3-4b", memory="64GiB", grouping="equal")
    lines = squeezed(plan.explain())
    starred = " ".join(f"{entry.layout}{' *' * (entry.layout == plan.layout)}" for entry in plan.considered)
    assert starred in lines
    assert f"groups {' '.join(str(entry.num_groups) for entry in plan.considered)}" in lines
    assert f"score {' '.join(f'{entry.score:.4f}' for entry in plan.considered)}" in lines
    assert f"* taken: {why_taken(plan)}" in lines


def test_the_three_reasons():
    """Bucket scores of 1, 1.005 and 2: taken as the least, although another is less, and because no other is less."""
    plan = plan_cache(MIXED, memory="64MiB", grouping="uniform")
    buckets, bestfit, overlay, frames = plan.considered
    scored = {}
    for name, scores in (
        ("within", (1.0, 1.1, 1.1, 0.995)),
        ("tie", (1.0, 1.0, 2.0, 2.0)),
        ("least", (1.0, 2.0, 2.0, 2.0)),
    ):
        entries = zip((buckets, bestfit, overlay, frames), scores, strict=True)
        considered = tuple(replace(entry, score=score) for entry, score in entries)
        taken = plan_cache(MIXED, num_frames=10, grouping="uniform", layout="buckets")
        scored[name] = why_taken(replace(taken, considered=considered, fingerprint=""))
    assert LAYOUT_TOLERANCE == 1.01
    assert scored == {
        "within": "buckets, within 1 % of the least score (frames) and earlier in the list",
        "tie": "buckets, the least score and the first in the list that has it",
        "least": "buckets, the least score",
    }


def test_what_is_kept_is_said_in_words():
    specs = {
        "layers.0.attn": full_attention(1, 64),
        "layers.1.attn": chunked_attention(1, 64, chunk=8192),
        "layers.2.ring": LayerSpec("ring", 32, kv_format(1, 64)),
        "layers.3.state": recurrent_state([("ssm", (4, 64), torch.float32)], speculative_blocks=2),
    }
    text = plan_cache(specs, memory="64MiB", grouping="uniform").explain()
    for words in (
        "full_b16: 1 layer, full, 16 tokens a block",
        "chunk8192_b16: 1 layer, chunk 8,192, 16 tokens a block",
        "ring_b32: 1 layer, ring, 1 block, 32 tokens a block",
        "1 layer, state, 3 blocks, 16 tokens a block",
    ):
        assert words in text


def test_layers_that_read_another_cache_or_none():
    full = full_attention(1, 64)
    specs = {"a": full, "b": Alias("a"), "c": Alias("b"), "d": NoCache(), "e": full, "f": Alias("e")}
    lines = plan_cache(specs, memory="1MiB").explain().splitlines()
    at = lines.index("  b, c read the cache of a")
    assert lines[at : at + 3] == ["  b, c read the cache of a", "  f read the cache of e", "  no cache: d"]
    many = {f"layers.{i}": full if i % 2 == 0 else Alias(f"layers.{i - 1}") for i in range(40)}
    text = plan_cache(many, memory="1MiB").explain()
    assert text.count("read the cache of") == 5
    assert "  ... and 15 more layers whose cache others read" in text.splitlines()


def test_many_groups_are_no_wall_of_text():
    """36 groups of one state each are one entry, and a sum of 37 terms is two."""
    plan = plan_cache("qwen3-next-80b-a3b", memory="64GiB", grouping="packed", layout="overlay")
    assert (len(plan.groups), [len(run) for run in alike(plan)]) == (37, [36, 1])
    lines = plan.explain().splitlines()
    assert "  state_b16.0 ... state_b16.35 (36): 36 groups, each of 1 layer, state, 1 block, 16 tokens a block" in lines
    assert any(line.endswith("each of 100 blocks (36 x 1 + 64)") for line in lines)
    assert len(lines) < 60
    windows = {f"layers.{i}.attn": sliding_window(1, 64, window=64 * (i + 1)) for i in range(13)}
    lines = plan_cache(windows, memory="64MiB", grouping="uniform", layout="buckets").explain().splitlines()
    assert max(map(len, lines)) <= 170


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 1], "layers.0.attn, layers.1.attn"),
        ([0, 1, 2], "layers.0.attn ... layers.2.attn (3)"),
        ([5, 11, 17], "layers.5.attn ... layers.17.attn (3, every 6th)"),
        ([1, 3, 5, 7], "layers.1.attn ... layers.7.attn (4, every 2nd)"),
        ([0, 3, 6], "layers.0.attn ... layers.6.attn (3, every 3rd)"),
        ([0, 1, 3], "layers.0.attn ... layers.3.attn (3, with gaps)"),
        ([6, 3, 0], "layers.6.attn ... layers.0.attn (3, with gaps)"),
    ],
    ids=["two", "all", "every 6th", "every 2nd", "every 3rd", "gaps", "backwards"],
)
def test_a_range_of_layers_tells_the_step(numbers, text):
    assert layer_range([f"layers.{number}.attn" for number in numbers]) == text


@pytest.mark.parametrize("names", [["a", "b", "c"], ["layers.0.k", "layers.1.v", "layers.2.k"], ["1.1", "2.2", "3.3"]])
def test_names_that_differ_in_more_than_a_number_have_no_step(names):
    assert layer_range(names) == f"{names[0]} ... {names[-1]} (3)"


def test_groupings_that_are_all_alike_are_not_compared():
    one, two = plan_cache(LLAMA, memory="64GiB"), plan_cache("gemma-3-4b", memory="64GiB")
    assert "Groupings compared" not in one.explain()
    assert "Groupings compared" in two.explain()


def test_names_of_groups():
    assert group_range(["a.0", "a.1", "a.2", "b"]) == "a.0 ... a.2 (3), b"
    assert group_range([f"g{i}" for i in range(6)]) == "g0, g1, g2, g3, g4, g5"
    assert group_range([f"g{i}" for i in range(9)]) == "g0, g1, g2, g3, g4, 4 more"


@pytest.mark.parametrize("layout", ["buckets", "bestfit", "overlay", "frames"])
def test_a_group_without_layers_here(layout):
    full = full_attention(2, 64)
    groups = [
        CacheGroup("here", {"a": full, "b": full}, 16, full.retention),
        CacheGroup("elsewhere", {}, 16, Retention("sliding_window", window=64)),
    ]
    plan = plan_cache(groups, memory="1MiB", layout=layout)
    lines = plan.explain().splitlines()
    at = lines.index("  elsewhere: 0 layers, window 64, 16 tokens a block")
    assert lines[at + 1] == f"    no layer here, and a block of it takes {plan.block_strides[1]:,} B all the same"


def test_nothing_to_keep():
    none = "No layer keeps a cache: 0 B, 1 block (the null block)."
    assert plan_cache({}, memory="1GiB").explain() == none
    assert plan_cache({"a": NoCache(), "b": NoCache()}, memory=0).explain() == f"{none}\n  no cache: a, b"
    empty = [CacheGroup("elsewhere", {}, 16, Retention("full"))]
    assert plan_cache(empty, memory=0).explain() == f"{none}\n  group elsewhere: no layer here"


def test_explain_of_windows_only_and_without_a_step():
    specs = {"layers.0.attn": sliding_window(1, 64, window=32)}
    text = plan_cache(specs, num_frames=4, lengths=[100], max_tokens_in_flight=0).explain()
    assert "longest sequence alone: any length" in text
    assert "in flight" not in text
    assert "  100 tokens: 1 sequence at once (100 tokens), each of 3 blocks (3)" in text.splitlines()


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
    with pytest.raises(PlanError, match=r"memory: expected a number of bytes in \[0, 2\*\*60\], got -1"):
        plan_cache(MIXED, memory=-1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1,536 B (1.50 KiB)"), (2**31, "2,147,483,648 B (2.00 GiB)")],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text
