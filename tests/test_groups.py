"""CacheGroup and group_layers: who shares a block table."""

import re

import pytest

from kvstore.choose import group_layers
from kvstore.errors import PlanError
from kvstore.groups import CacheGroup, cached_layers, check_groups
from kvstore.layers import full_attention, latent, sliding_window
from kvstore.specs import Alias, LayerSpec, NoCache, Retention
from kvstore_kernels.formats import kv_format

FULL = Retention("full")


def test_layers_with_one_block_size_and_retention_form_a_group_in_layer_order():
    specs = {
        "layers.0.attn": sliding_window(2, 64, window=128),
        "layers.1.attn": full_attention(2, 64),
        "layers.2.attn": sliding_window(4, 64, window=128),
        "layers.3.attn": latent(block_size=64),
        "layers.4.attn": latent(block_size=16),
        "layers.5.attn": sliding_window(2, 64, window=64),
    }
    groups = group_layers(specs, "uniform")
    assert [(group.name, list(group.layers)) for group in groups] == [
        ("window128_b16", ["layers.0.attn", "layers.2.attn"]),
        ("full_b16", ["layers.1.attn", "layers.4.attn"]),
        ("full_b64", ["layers.3.attn"]),
        ("window64_b16", ["layers.5.attn"]),
    ]
    assert {layer: spec for group in groups for layer, spec in group.layers.items()} == specs


def test_no_layers_make_no_groups():
    assert group_layers({}) == []


def test_group_bytes_count_padding_apart():
    layers = {"a": full_attention(2, 64, padded_page_bytes=16_384), "b": full_attention(2, 64)}
    group = CacheGroup("g", layers, 16, FULL)
    assert (group.block_bytes, group.payload_bytes) == (16_384 + 8_192, 2 * 8_192)


def test_a_group_does_not_follow_later_changes_of_the_mapping_it_was_given():
    layers = {"a": full_attention(2, 64)}
    group = CacheGroup("g", layers, 16, FULL)
    layers["b"] = full_attention(2, 64, block_size=32)
    assert list(group.layers) == ["a"]
    with pytest.raises(TypeError):
        group.layers["b"] = layers["b"]


A = {"a": full_attention(2, 64)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheGroup("", A, 16, FULL), "CacheGroup: name: expected a non-empty string, got ''"),
        (lambda: CacheGroup("g", A, 0, FULL), "CacheGroup 'g': block_size: expected an integer >= 1, got 0"),
        (lambda: CacheGroup("g", A, 16, "full"), "CacheGroup 'g': retention: expected a Retention, got 'full'"),
        (lambda: CacheGroup("g", ["a"], 16, FULL), "layers: expected a mapping of layer names to LayerSpecs"),
        (lambda: CacheGroup("g", {"": A["a"]}, 16, FULL), "layer name: expected a non-empty string, got ''"),
        (lambda: CacheGroup("g", {7: A["a"]}, 16, FULL), "layer name: expected a non-empty string, got 7"),
        (lambda: CacheGroup("g", {"a": 16}, 16, FULL), "layer 'a': expected a LayerSpec, got 16"),
        (lambda: CacheGroup("g", A, 32, FULL), "layer 'a': expected the group's block size 32, got 16"),
        (
            lambda: CacheGroup("g", A, 16, Retention("sliding_window", 8)),
            "layer 'a': expected the group's Retention(kind='sliding_window', window=8, chunk=None, blocks=None), ",
        ),
        (lambda: group_layers(A, "tight"), "grouping: expected one of auto, uniform, equal, packed, got 'tight'"),
        (lambda: group_layers(A, layout="tight"), "layout: expected one of auto, buckets, bestfit, overlay, frames"),
        (lambda: group_layers([A["a"]]), "specs: layers: expected a mapping of layer names to LayerSpecs"),
        (lambda: check_groups(["g"]), "groups: expected CacheGroups, got 'g'"),
        (
            lambda: check_groups([CacheGroup("g", A, 16, FULL), CacheGroup("g", {"b": A["a"]}, 16, FULL)]),
            "groups: expected distinct names, got 'g' twice",
        ),
        (
            lambda: check_groups([CacheGroup("g", A, 16, FULL), CacheGroup("h", A, 16, FULL)]),
            "layer 'a': expected in one group, got it in 'g' and 'h'",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(make, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        make()


def test_layers_that_differ_only_in_tokens_per_row_share_a_group():
    rows = kv_format(1, 8)
    specs = {"a": LayerSpec("full", 8, rows), "b": LayerSpec("full", 8, rows, tokens_per_row=4)}
    assert [(group.name, list(group.layers)) for group in group_layers(specs, "uniform")] == [("full_b8", ["a", "b"])]


def test_a_group_may_be_empty_on_a_worker_that_owns_none_of_its_layers():
    group = CacheGroup("g", {}, 16, FULL)
    assert (group.block_bytes, group.payload_bytes, group.stride_multiple) == (0, 0, 16)


def test_o06_exactly_the_groups_with_a_draft_layer_are_marked():
    spec = full_attention(1, 8)
    groups = [CacheGroup("g", {"layers.0.attn": spec}, 16, FULL), CacheGroup("h", {"draft.0.attn": spec}, 16, FULL)]
    assert [group.holds_draft for group in groups] == [False, True]


def test_layers_are_sorted_by_what_they_cache():
    spec = full_attention(1, 8)
    layers = cached_layers({"a": spec, "b": Alias("a"), "c": Alias("b"), "d": NoCache()})
    assert layers.owners == {"a": spec}
    assert layers.aliases == {"b": "a", "c": "a"}
    assert layers.uncached == ("d",)


@pytest.mark.parametrize("target", ["a", "b", "gone", "none"])
def test_an_alias_of_no_cache_is_refused(target):
    specs = {"a": Alias(target), "b": Alias("a"), "none": NoCache()}
    with pytest.raises(PlanError, match="layer 'a': alias: expected the name of a layer with a cache, got "):
        cached_layers(specs)
