"""CachePlan as a value: frozen, proved, to and from JSON; an edited plan is refused."""

import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError, replace

import pytest
from strategies import MIXED, brute_force_pages_do_not_touch

from kvstore.errors import PlanError
from kvstore.groups import CacheGroup
from kvstore.layers import latent
from kvstore.placement import Placement
from kvstore.plan import CachePlan, _digest
from kvstore.planner import plan_cache
from kvstore.specs import Retention


@pytest.fixture
def plan():
    return plan_cache(MIXED, num_frames=10, layout="buckets")


EXPLANATION = ("grouping", "lengths", "max_tokens_in_flight", "considered")
"""Fields that say how a plan came about; the fingerprint does not cover them, the checksum does."""


def resealed(document):
    """The document with the digests that an attentive editor would put in."""
    sealed = {key: value for key, value in document.items() if key != "checksum"}
    if "fingerprint" in sealed:
        layout = {key: value for key, value in sealed.items() if key not in (*EXPLANATION, "fingerprint")}
        sealed["fingerprint"] = _digest(layout)
    return sealed | {"checksum": _digest(sealed)}


def test_plans_are_frozen_values(plan):
    with pytest.raises(FrozenInstanceError):
        plan.num_frames = 11
    with pytest.raises(TypeError):
        plan.placements["layers.0.attn"] = Placement(0, 0, 16)
    for twin in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert twin == plan
        assert twin.fingerprint == plan.fingerprint


def test_json_is_canonical_and_the_fingerprint_covers_the_rest(plan):
    document = json.loads(plan.to_json())
    assert plan.to_json() == json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert document.pop("checksum") == _digest(document)
    for name in EXPLANATION:
        del document[name]
    assert document.pop("fingerprint") == plan.fingerprint == _digest(document)
    assert plan.fingerprint != plan_cache(MIXED, num_frames=11, layout="buckets").fingerprint
    assert plan.to_json() == plan_cache(MIXED, num_frames=10, layout="buckets").to_json()


def edits(node, path=()):
    """(path, value) for every leaf and branch of a JSON document and values of other types and sizes for it."""
    for wrong in ("x", None, 1.5, -1, 3, True, [], {}, [[]], {"a": 1}):
        yield path, wrong
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from edits(value, (*path, key))


def edited(document, path, value):
    if not path:
        return value
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document


def test_every_edit_of_the_json_is_refused():
    plan = plan_cache({name: MIXED[name] for name in ("layers.1.attn", "layers.3.attn")}, num_frames=3)
    document = json.loads(plan.to_json())
    refused = 0
    for path, value in edits(document):
        changed = edited(document, path, value)
        text = json.dumps(changed)
        if text == json.dumps(document):
            continue
        with pytest.raises(PlanError):
            CachePlan.from_json(text)
        refused += 1
        if isinstance(changed, dict) and path not in {("fingerprint",), ("checksum",)}:
            sealed = json.dumps(resealed(changed))
            try:
                loaded = CachePlan.from_json(sealed)
            except PlanError:
                continue
            assert loaded.to_json() == json.dumps(json.loads(sealed), sort_keys=True, separators=(",", ":"))
            loaded.explain()
            brute_force_pages_do_not_touch(loaded)
    assert refused > 500


@pytest.mark.parametrize(
    "key", ["specs", "groups", "layer_slots", "placements", "num_frames", "fingerprint", "considered", "checksum"]
)
def test_missing_fields_are_refused(plan, key):
    document = json.loads(plan.to_json())
    del document[key]
    with pytest.raises(PlanError, match="plan: expected"):
        CachePlan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan: expected JSON text"),
        ("{", "plan: expected JSON text"),
        ("[" * 100_000, "plan: expected JSON text"),
        (None, "plan: expected JSON text"),
        ("[]", "plan: expected a JSON object, got list"),
        ("{}", "version: expected a plan of version 2, got None"),
        ('{"version": 1}', "version: expected a plan of version 2, got 1"),
        ('{"version": 2}', "plan: expected the fields that to_json wrote: KeyError('specs')"),
    ],
    ids=["empty", "cut", "deep", "none", "list", "no-fields", "older", "no-specs"],
)
def test_text_that_is_no_plan_is_refused(text, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        CachePlan.from_json(text)


def test_unknown_fields_are_refused(plan):
    document = json.loads(plan.to_json()) | {"comment": "mine"}
    with pytest.raises(PlanError, match="plan: expected exactly what to_json wrote, got other fields or values"):
        CachePlan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 1}, "num_frames: expected an integer >= 2, got 1"),
        ({"frame_bytes": 0}, "frame_bytes: expected an integer >= 1, got 0"),
        ({"layout": "auto"}, "layout: expected one of buckets, bestfit, overlay, frames, got 'auto'"),
        ({"lower_bound": 16}, "lower_bound: expected an integer in [98304, 98304], got 16"),
        ({"num_frames": 11}, "layer slot 65536 B/0: num_bytes: expected 11 frames x 65536 B = 720896, got 655360"),
        ({"blocks_per_frame": (1, 2, 1)}, "blocks_per_frame: expected 1 for every group in the layout 'buckets'"),
        ({"lengths": ()}, "lengths: expected at least one number of tokens, got ()"),
        ({"grouping": "mine"}, "grouping: expected one of auto, uniform, equal, packed, given, got 'mine'"),
        ({"uncached": ("layers.0.attn",)}, "uncached: expected names of layers without a cache, got 'layers.0.attn'"),
        ({"aliases": {"x": "y"}}, "aliases: layer 'x': expected the name of a layer with a cache, got 'y'"),
        ({"blocks_per_frame": (1, 1)}, "blocks_per_frame: expected 3 entries, one per group, got 2"),
    ],
)
def test_a_plan_made_by_hand_is_proved_too(plan, changes, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        replace(plan, fingerprint="", **changes)


def test_a_plan_with_the_fingerprint_of_another_is_refused(plan):
    other = plan_cache(MIXED, num_frames=11)
    with pytest.raises(PlanError, match="fingerprint: expected that of the plan's other fields, got"):
        replace(plan, fingerprint=other.fingerprint)


def test_group_of_a_plan_may_have_any_name():
    spec = latent()
    plan = plan_cache([CacheGroup("the latents", {"x": spec}, 64, Retention("full"))], num_frames=2)
    assert CachePlan.from_json(plan.to_json()).groups[0].name == "the latents"
