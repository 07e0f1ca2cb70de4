"""Every family of transformers that `KVStoreCache` serves: the same tokens on pages as on transformers' own cache.

Padded batches of prompts around windows and blocks, 64 new tokens, then a second batch that goes on from what the
first one left in the prefix index; logits within the stated budget; the books proved. `python -m benchmarks families`
runs all combinations.
"""

import copy

import pytest
import torch

from benchmarks import family_memory, family_runs
from benchmarks.family_models import FAMILIES, WINDOW
from benchmarks.family_runs import ATTENTIONS, EQUAL, LAYOUTS, LOGITS_BUDGET, MIXED, compare, store_of
from kvstore.integrations import transformers as integration

V4 = "deepseek-v4"
OTHERS = [family for family in FAMILIES if family != V4]


def expect_equal(run: family_runs.Run) -> None:
    assert run.equal
    assert run.error <= LOGITS_BUDGET


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", OTHERS)
def test_tokens_are_those_of_transformers_own_cache(family: str, layout: str) -> None:
    for attention in ATTENTIONS:
        run = compare(family, layout, attention, *MIXED)
        expect_equal(run)
        # Rows of unequal lengths have no saved state in common.
        assert (run.cached > 0) == (family != "qwen3-next")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_deepseek_v4_on_every_layout(layout: str) -> None:
    for attention in ATTENTIONS:
        run = compare(V4, layout, attention, (127, 127))
        expect_equal(run)
        assert run.cached == 2 * 128


@pytest.mark.parametrize("lengths", EQUAL, ids=lambda lengths: str(lengths[0]))
def test_deepseek_v4_around_its_boundaries(lengths: tuple[int, ...]) -> None:
    run = compare(V4, "frames", "pages", lengths)
    expect_equal(run)
    assert run.cached == 2 * ((lengths[0] + 63) // 128 * 128)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", V4])
def test_layers_of_several_groups_lie_on_the_same_bytes(family: str) -> None:
    """What the equal tokens prove is that these do not disturb each other."""
    plan = store_of(family, "buckets").plan
    groups = [{plan.group_index(layer) for layer in slot.layers} for slot in plan.layer_slots]
    assert max(map(len, groups)) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v3", V4, "qwen3-next"])
def test_models_of_two_bytes(family: str, dtype: torch.dtype) -> None:
    """Rows of the dtype: through columns bit for bit, and on pages within twice the error that transformers has."""
    model = FAMILIES[family]().to(dtype)
    exact = FAMILIES[family]().to(dtype).to(torch.float32)
    plan = integration.plan_model(model, memory="12MiB", block_size=family_runs.BLOCK_SIZES.get(family))
    prompts = family_runs.prompts_of((40, 40), 0)
    texts = family_runs.generate(model, prompts, new_tokens=8)
    truth = family_runs.generate(exact, prompts, new_tokens=2).logits[:2]
    budget = 2 * family_runs.difference(texts.logits[:2].float(), truth)
    for attention in (model.config._attn_implementation, integration.register_attention()):
        model.set_attn_implementation(attention)
        store = integration_store(plan)
        with integration.KVStoreCache(store, *family_runs.padded(prompts)) as cache:
            ours = family_runs.generate(model, prompts, new_tokens=8, cache=cache)
        store.check()
        if attention != "kvstore":
            assert torch.equal(ours.logits, texts.logits)
        assert 0 < family_runs.difference(ours.logits[:2].float(), truth) <= budget


def test_one_state_at_the_end_of_each_chunk_is_found_again() -> None:
    """Recurrent states are kept where a pass ends at a multiple of the block size: 16 tokens."""
    model = family_runs.model_of("qwen3-next")
    prompts = family_runs.prompts_of((70, 70), 0)
    expected = family_runs.generate(model, prompts)
    for chunk, found in ((None, 0), (32, 64), (16, 64)):
        store = store_of("qwen3-next", "frames")
        for again in (0, found):
            texts, cached = family_runs.through_store("qwen3-next", store, "pages", prompts, prefill_chunk_size=chunk)
            assert cached == 2 * again
            assert torch.equal(texts.output_ids, expected.output_ids)


def test_a_second_turn_goes_on_from_a_generated_state() -> None:
    expect_equal(run := compare("qwen3-next", "frames", "columns", (40, 40)))
    assert run.cached == 2 * 96


def test_deepseek_v4_in_chunks() -> None:
    prompts = family_runs.prompts_of((150, 150), 0)
    expected = family_runs.generate(family_runs.model_of(V4), prompts)
    store = store_of(V4, "overlay")
    for chunk in (37, 128):
        texts, _ = family_runs.through_store(V4, store, "columns", prompts, prefill_chunk_size=chunk)
        assert torch.equal(texts.output_ids, expected.output_ids)
        store.drop_prefixes()


def test_every_family_of_the_list_has_a_model_here() -> None:
    tried = {family_runs.model_of(family).config.model_type for family in FAMILIES}
    assert tried | {"qwen2"} == set(integration.FAMILIES)


def test_a_plan_of_qwen3_next_without_linear_layers() -> None:
    config = copy.deepcopy(family_runs.model_of("qwen3-next").config)
    assert {spec.kind for spec in integration.model_specs(config).values()} == {"state", "full"}  # type: ignore[union-attr]
    config.layer_types = ["full_attention"] * 4
    assert {spec.kind for spec in integration.model_specs(config).values()} == {"full"}  # type: ignore[union-attr]


def test_windows_that_are_half_of_a_block_or_many_blocks() -> None:
    for block_size in (8, 64):
        plan = integration.plan_model(family_runs.model_of("gemma3"), memory="8MiB", block_size=block_size)
        assert {group.block_size for group in plan.groups} == {block_size}
        store = integration_store(plan)
        first, texts, _, _ = family_runs.expected("gemma3", (WINDOW, 2 * WINDOW))
        ours, _ = family_runs.through_store("gemma3", store, "pages", first)
        assert torch.equal(ours.output_ids, texts.output_ids)


def integration_store(plan: object) -> family_runs.KVStore:
    return family_runs.KVStore(plan, "cpu", max_sequences=8, max_length=256)  # type: ignore[arg-type]


def test_memory_of_deepseek_v4_flash() -> None:
    """By hand, bf16, 4,096 tokens, 43 layers: 2 plain, 21 of ratio 4, 20 of ratio 128; what transformers holds."""
    window = 43 * 127 * 512 * 2
    rows_of_4 = 21 * 1024 * (512 + 128) * 2
    rows_of_128 = 20 * 32 * 512 * 2
    overlap = 21 * 4 * (512 + 128) * (2 + 4)  # K in bf16, the gates with their bias in fp32
    held = family_memory.measure()
    assert held[0].in_transformers == window + rows_of_4 + rows_of_128 + overlap
    assert [(each.length, each.rows) for each in held] == [
        (4096, "bf16"),
        (4096, "fp8_ds_mla"),
        (32768, "bf16"),
        (32768, "fp8_ds_mla"),
    ]
    # Windows and states are held in whole blocks, and states in fp32 for all 128 tokens; packed rows make up for it.
    assert held[1].in_store < held[0].in_transformers < held[0].in_store < 1.4 * held[0].in_transformers
    assert held[3].in_store < held[2].in_transformers < held[2].in_store < 1.06 * held[2].in_transformers
