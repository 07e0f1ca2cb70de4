"""The expected planning values: cases of one question each, and plans of whole models, as layer specs of ours."""

import json
from pathlib import Path

from kvstore.groups import CacheGroup
from kvstore.spec_json import spec_from_fields

DATA = Path(__file__).parent / "data"
SMALL = {case["id"]: case for case in json.loads((DATA / "planning_cases.json").read_text())["cases"]}
MODELS = {case["id"]: case for case in json.loads((DATA / "planning_models.json").read_text())["cases"]}

STRATEGY = {"layer_outermost": "equal", "block_outermost": "packed"}
"""The named grouping that reproduces the reference for each of its orders of dimensions."""

LAYOUT = {"layer_outermost": "buckets", "block_outermost": "overlay"}
"""The layout of ours that lays pages where the reference lays them."""

NOT_OURS = {
    "replicated": "a flag of context parallelism, which this planner does not have",
    "tp_replicated": "as above, for recurrent states",
}
"""Fields of the reference's specs that are left out."""


def specs_of(case):
    """{name in the case: LayerSpec}."""
    return {
        name: spec_from_fields(name, {key: value for key, value in fields.items() if key not in NOT_OURS})
        for name, fields in case["specs"].items()
    }


def layers_of(case, listed=None):
    """{layer: LayerSpec} of entries [name, spec], [name, spec, count] or [name, index, spec]."""
    specs, layers = specs_of(case), {}
    for entry in case["layers"] if listed is None else listed:
        if len(entry) == 3 and isinstance(entry[1], str):
            layers |= {entry[0].replace("{i}", str(i)): specs[entry[1]] for i in range(entry[2])}
        else:
            layers[entry[0]] = specs[entry[-1]]
    return layers


def groups_of(case):
    """The groups that a case gives, named by number."""
    groups = []
    for number, listed in enumerate(case["groups"]):
        layers = layers_of(case, listed)
        spec = next(iter(layers.values()))
        groups.append(CacheGroup(f"group{number}", layers, spec.block_size, spec.retention))
    return groups


def kind_of(group):
    """The reference's kind of a group: that of its first layer."""
    return next(iter(group.layers.values())).kind


def assert_runs(plan, runs, name_of=str):
    """Every layer's pages lie where the runs say: compared as addresses."""
    placed = 0
    for run in runs:
        for index, layer in enumerate(run["layers"]):
            place = plan.placements[name_of(layer)]
            start = plan.layer_slots[place.layer_slot].offset_bytes + place.offset_bytes
            assert start == run["offset_bytes"] + index * run["layer_stride_bytes"], layer
            assert place.block_stride_bytes == run["block_stride_bytes"], layer
            placed += 1
    assert placed == len(plan.placements)
