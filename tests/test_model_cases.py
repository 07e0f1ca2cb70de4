"""Model configs against a reference planner, cache by cache, and against published bytes per token."""

import json
from pathlib import Path

import pytest

from kvstore.models import specs_from_config

DATA = Path(__file__).parent / "data"
CASES = json.loads((DATA / "planning_models.json").read_text())["cases"]
NAMES = {case["id"] for case in CASES}

FIELDS = ("kind", "block_size", "payload_bytes", "page_bytes", "window", "chunk")

# The reference planner gives all pages of a model one size, so it takes attention blocks of hundreds of tokens and pads
# the state to such a page. Pages of ours differ in size: attention keeps 16 tokens, and a state page has no padding.
STATE_BLOCKS = {
    "qwen3-next-80b-a3b/bf16-step64": 576,
    "qwen3-next-80b-a3b/bf16-step16": 544,
    "qwen3-next-80b-a3b/fp32state-step64": 1088,
    "qwen3-next-80b-a3b/fp32state-step16": 1056,
    "nemotron-h-8b/bf16": 1040,
    "jamba-v0.1/bf16": 80,
}

# The default of latent rows is 64 tokens, the block of FlashMLA; these cases are of a backend that takes 16.
LATENT_BLOCKS = {"deepseek-v2-lite/bf16-b16": 16, "deepseek-v3/bf16-b16": 16}


def specs_of(case, **options):
    named = {key: value for key, value in case["options"].items() if key != "block_step"}
    return specs_from_config(case["config"], **named, **options)


def expected(case):
    """{layer: spec of the reference}, in the order of the case."""
    return {name: case["specs"][spec] for name, _, spec in case["layers"]}


def facts(spec):
    return {name: getattr(spec, name) for name in FIELDS} | {"tokens_per_row": spec.tokens_per_row}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_specs_are_those_of_the_reference_planner(case):
    block_size = STATE_BLOCKS.get(case["id"], LATENT_BLOCKS.get(case["id"]))
    specs = specs_of(case, block_size=block_size)
    wanted = expected(case)
    assert list(specs) == list(wanted)
    for name, reference in wanted.items():
        facts_of_reference = {field: reference.get(field) for field in FIELDS}
        facts_of_reference["tokens_per_row"] = reference.get("tokens_per_row", 1)
        if reference["kind"] == "state":
            facts_of_reference["page_bytes"] = reference["payload_bytes"]
        assert facts(specs[name]) == facts_of_reference, name


@pytest.mark.parametrize("case", [case for case in CASES if case["id"] in STATE_BLOCKS], ids=lambda case: case["id"])
def test_models_with_states_keep_small_attention_blocks(case):
    ours, theirs = specs_of(case), expected(case)
    attention = next(name for name in ours if name.endswith(".attn"))
    state = next(name for name in ours if name.endswith(".state"))
    assert (ours[attention].block_size, theirs[attention]["block_size"]) == (16, STATE_BLOCKS[case["id"]])
    per_token = theirs[attention]["page_bytes"] // theirs[attention]["block_size"]
    assert ours[attention].page_bytes == 16 * per_token
    assert ours[state].page_bytes == theirs[state]["payload_bytes"] < theirs[state]["page_bytes"]
    assert ours[state].block_size == 16


def test_every_state_model_and_every_16_token_model_is_a_case():
    assert set(STATE_BLOCKS) | set(LATENT_BLOCKS) <= NAMES
    kinds = {case["id"]: {spec["kind"] for spec in case["specs"].values()} for case in CASES}
    assert {name for name in NAMES if "state" in kinds[name]} == set(STATE_BLOCKS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_demands_on_the_distance_between_blocks(case):
    """Whole rows under plain V3.2 rows. The 656 of the packed ones is a demand of one chip only: left to the caller."""
    wanted = {name: spec.get("stride_alignment", 16) for name, spec in expected(case).items()}
    if case["id"] == "deepseek-v3.2/fp8_ds_mla-rowaligned":
        assert set(wanted.values()) == {16, 656}
        wanted = dict.fromkeys(wanted, 16)
    specs = specs_of(case)
    assert {name: spec.block_stride_multiple for name, spec in specs.items()} == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_shape_and_dtype_of_rows(case):
    specs = specs_of(case)
    for name, reference in expected(case).items():
        spec = specs[name]
        if spec.kind in ("full", "sliding_window", "chunked"):
            key, value = spec.format.parts
            assert (key.num_heads, key.head_dim) == (reference["kv_heads"], reference["head_dim"])
            assert value.head_dim == reference.get("head_dim_v", reference["head_dim"])
        elif spec.kind == "state":
            sizes = [part.num_bytes for part in spec.format.parts]
            dtypes = [str(part.dtype).removeprefix("torch.") for part in spec.format.parts]
            assert sum(sizes) == reference["payload_bytes"]
            assert dtypes == [tensor["dtype"] for tensor in reference["state"]]
        else:
            assert spec.num_shards == 1


GEMMA3 = {"model_type": "gemma3_text", "num_attention_heads": 16, "head_dim": 256, "sliding_window": 1024}
GEMMA4 = {"model_type": "gemma4_text", "num_attention_heads": 16, "num_key_value_heads": 8, "attention_k_eq_v": True}


@pytest.mark.parametrize(
    ("config", "caches"),
    [
        ("deepseek-v3", {"attn": (61, 1152)}),
        ("llama-3.1-70b", {"attn": (80, 4096)}),
        ("gemma-3-27b", {"attn": (62, 8192)}),
        (
            {**GEMMA3, "num_hidden_layers": 48, "num_key_value_heads": 8},
            {"full": (8, 8192), "sliding_window": (40, 8192)},
        ),
        ("gemma-3-4b", {"full": (5, 4096), "sliding_window": (29, 4096)}),
        (
            {**GEMMA3, "num_hidden_layers": 26, "num_key_value_heads": 1, "sliding_window": 512},
            {"full": (4, 1024), "sliding_window": (22, 1024)},
        ),
        (
            {**GEMMA4, "num_hidden_layers": 30, "num_global_key_value_heads": 2},
            {"full": (5, 4096), "sliding_window": (25, 8192)},
        ),
        (
            {**GEMMA4, "num_hidden_layers": 48, "num_global_key_value_heads": 1},
            {"full": (8, 2048), "sliding_window": (40, 8192)},
        ),
        ("gpt-oss-20b", {"full": (12, 2048), "sliding_window": (12, 2048)}),
        ("llama-4-scout", {"full": (12, 4096), "chunked": (36, 4096)}),
        ("olmo-3-7b", {"full": (8, 16384), "sliding_window": (24, 16384)}),
        ("mistral-small-3.1-24b", {"full": (40, 4096)}),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4", "num_hidden_layers": 36}},
            {"attn": (36, 640)},
        ),
        ("minimax-m2", {"full": (62, 4096)}),
        ("qwen3-next-80b-a3b", {"full": (12, 2048), "state": (36, 1_097_728 / 16)}),
        (
            {
                "model_type": "qwen3_5_moe",
                "text_config": {"num_hidden_layers": 40, "mamba_ssm_dtype": "float32", "dtype": "bfloat16"},
            },
            {"full": (10, 2048), "state": (30, 2_146_304 / 16)},
        ),
        ("nemotron-h-8b", {"full": (4, 4096), "state": (24, 4_255_744 / 16)}),
        ("jamba-v0.1", {"full": (4, 4096), "state": (28, 311_296 / 16)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_bytes_per_token_and_layer(config, caches):
    """Layers of a kind ("attn": of all) and their page bytes / block size; a state has one page, whatever the block."""
    specs = specs_from_config(config)
    for kind, (num_layers, per_token) in caches.items():
        found = [spec for spec in specs.values() if kind in ("attn", spec.kind)]
        assert len(found) == num_layers
        assert {spec.page_bytes / spec.block_size for spec in found} == {per_token}


def test_v32_pairs_cost_788_bytes_a_token():
    specs = specs_from_config("deepseek-v3.2", kv_dtype="fp8_ds_mla")
    assert len(specs) == 122
    assert sum(spec.page_bytes for spec in specs.values()) == 3_076_352 == 61 * 64 * 788


@pytest.mark.parametrize(
    ("indexer_row_bytes", "kv_dtype", "total"),
    [(132, "fp8_ds_mla", 1_002_240), (68, "fp8_ds_mla", 917_568), (132, "fp8", 21 * 32768 + 21 * 8704 + 20 * 1024)],
)
def test_v4_compressed_rows_and_indexers_of_a_block(indexer_row_bytes, kv_dtype, total):
    config = "deepseek-v4-flash"
    specs = specs_from_config(config, kv_dtype=kv_dtype, indexer_row_bytes=indexer_row_bytes)
    assert sum(spec.page_bytes for spec in specs.values() if spec.kind == "latent") == total
