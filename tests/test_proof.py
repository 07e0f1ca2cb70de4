"""prove_placement: what it accepts for layouts of every kind, and every reason to refuse."""

import re
from dataclasses import replace

import pytest
from strategies import padded_group as group

from kvstore.errors import PlanError
from kvstore.placement import LayerSlot, Placement, place_buckets
from kvstore.proof import prove_placement


def prove(groups, layer_slots, placements, num_frames, frame_bytes=None, blocks_per_frame=None):
    prove_placement(
        groups,
        layer_slots,
        placements,
        frame_bytes=sum(slot.page_bytes for slot in layer_slots) if frame_bytes is None else frame_bytes,
        num_frames=num_frames,
        blocks_per_frame=blocks_per_frame or [1] * len(groups),
    )


# The proof, for placements of every kind. Two frames of a dense overlay (one slot tensor, stride 1024):
#     group a: | a0 512 | a1 256 | 256 unused |     group b: | b0 1024 |
OVERLAY_GROUPS = [group("a", [512, 256]), group("b", [1024], block_size=32)]
OVERLAY_SLOTS = (LayerSlot(1024, 0, ("a0", "a1", "b0"), 0, 2048),)
OVERLAY = {"a0": Placement(0, 0, 1024), "a1": Placement(0, 512, 1024), "b0": Placement(0, 0, 1024)}

# Three blocks of group c in a frame of 1,024 bytes, one of group d: | c0 256 | c1 64 | c0 | c1 | c0 | c1 | 64 unused |
FRAME_GROUPS = [group("c", [256, 64]), group("d", [1024], block_size=64)]
FRAME_SLOTS = (LayerSlot(1024, 0, ("c0", "c1", "d0"), 0, 1024),)


def test_the_proof_accepts_a_dense_overlay():
    prove(OVERLAY_GROUPS, OVERLAY_SLOTS, OVERLAY, 2)


def test_the_proof_accepts_several_blocks_of_a_narrow_group_in_a_frame():
    places = {"c0": Placement(0, 0, 320), "c1": Placement(0, 256, 320), "d0": Placement(0, 0, 1024)}
    prove(FRAME_GROUPS, FRAME_SLOTS, places, 1, blocks_per_frame=[3, 1])
    with pytest.raises(PlanError, match=r"layer 'c0': block 3 takes bytes 960 \.\.\. 1216"):
        prove(FRAME_GROUPS, FRAME_SLOTS, places, 1, blocks_per_frame=[4, 1])
    two_frames = (replace(FRAME_SLOTS[0], num_bytes=2048),)
    with pytest.raises(PlanError, match=r"block 3 takes bytes 960 \.\.\. 1216 .* expected inside frame 1"):
        prove(FRAME_GROUPS, two_frames, places, 2, blocks_per_frame=[3, 1])


def test_the_proof_does_not_depend_on_the_number_of_frames():
    frames = 2**60
    layer_slots, placements = place_buckets(OVERLAY_GROUPS, frames)
    prove(OVERLAY_GROUPS, layer_slots, placements, frames)


SLOTS, PLACES = place_buckets(OVERLAY_GROUPS, 2)  # layer slots: 512 B (a0), 256 B (a1), 1,024 B (b0)


def with_slot(number, **changes):
    return tuple(replace(slot, **changes) if at == number else slot for at, slot in enumerate(SLOTS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"layer_slots": with_slot(1, offset_bytes=1008)},
            "layer slot 256 B/0 begins at byte 1008, inside the one before it, 512 B/0, which ends at 1024",
            id="slot-tensors-overlap",
        ),
        pytest.param(
            {"layer_slots": with_slot(2, offset_bytes=1552)},
            "layer slots: expected to end inside the 3584 B arena, got 3600",
            id="slot-tensor-leaves-the-arena",
        ),
        pytest.param(
            {"layer_slots": with_slot(1, offset_bytes=1028)},
            "layer slot 256 B/0: offset_bytes: expected a multiple of 16, got 1028",
            id="slot-tensor-not-aligned",
        ),
        pytest.param(
            {"layer_slots": with_slot(0, num_bytes=512)},
            "layer slot 512 B/0: num_bytes: expected 2 frames x 512 B = 1024, got 512",
            id="slot-tensor-too-small",
        ),
        pytest.param(
            {"frame_bytes": 1808},
            "arena_bytes: expected num_frames x frame_bytes = 2 x 1808 = 3616, got 3584",
            id="frame-bytes-wrong",
        ),
        pytest.param(
            {"blocks_per_frame": [1]}, "blocks_per_frame: expected 2 entries, one per group, got 1", id="group-missing"
        ),
        pytest.param(
            {"blocks_per_frame": [1, 0]},
            "group 'b': blocks_per_frame: expected an integer >= 1, got 0",
            id="no-block-in-a-frame",
        ),
        pytest.param(
            {"layer_slots": with_slot(1, layers=("a0",))},
            "layer slots: expected every layer once, got one twice",
            id="layer-in-two-slots",
        ),
        pytest.param(
            {"placements": {**PLACES, "b0": Placement(0, 0, 512)}},
            "placements: expected the layer slots to list the same layers, they differ in ['b0']",
            id="layer-in-another-slot-than-listed",
        ),
        pytest.param(
            {"layer_slots": with_slot(2, layers=())},
            "placements: expected the layer slots to list the same layers, they differ in ['b0']",
            id="layer-not-listed",
        ),
        pytest.param(
            {"groups": [OVERLAY_GROUPS[0], group("b", [1024, 1024], block_size=32)]},
            "placements: expected every layer of the groups and no other; missing ['b1'], unknown []",
            id="layer-without-place",
        ),
        pytest.param(
            {"groups": [OVERLAY_GROUPS[0], group("c", [1024])]},
            "missing ['c0'], unknown ['b0']",
            id="layer-of-no-group",
        ),
        pytest.param(
            {"placements": {**PLACES, "a0": Placement(0, 8, 512)}},
            "layer 'a0': offset_bytes: expected a multiple of 16, got 8",
            id="offset-not-aligned",
        ),
        pytest.param(
            {"placements": {**PLACES, "a0": Placement(0, 0, 520)}},
            "layer 'a0': block_stride_bytes: expected a multiple of 16, got 520",
            id="stride-not-aligned",
        ),
        pytest.param(
            {"placements": {**PLACES, "a0": Placement(0, 16, 512)}},
            "layer 'a0': block 0 takes bytes 16 ... 528 of its slot tensor, expected inside frame 0, 0 ... 512",
            id="page-leaves-its-frame",
        ),
        pytest.param(
            {"placements": {**PLACES, "a0": Placement(0, 0, 496)}},
            "layer 'a0': block 1 takes bytes 496 ... 1008 of its slot tensor, expected inside frame 1, 512 ... 1024",
            id="stride-below-the-page",
        ),
        pytest.param(
            {"placements": {**PLACES, "a0": Placement(0, 0, 528)}},
            "layer 'a0': block 1 takes bytes 528 ... 1040 of its slot tensor, expected inside frame 1, 512 ... 1024",
            id="last-page-leaves-the-slot-tensor",
        ),
    ],
)
def test_the_proof_refuses(changes, message):
    arguments = {"groups": OVERLAY_GROUPS, "layer_slots": SLOTS, "placements": PLACES, "num_frames": 2}
    prove(**arguments)
    with pytest.raises(PlanError, match=re.escape(message)):
        prove(**arguments | changes)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        pytest.param(
            {"a1": Placement(0, 496, 1024)},
            "layer 'a1': expected behind the page of 'a0', which ends at byte 512, and its stride 1024; got",
            id="pages-of-a-block-overlap",
        ),
        pytest.param({"a1": Placement(0, 512, 1040)}, "and its stride 1024; got", id="strides-differ"),
    ],
)
def test_the_proof_refuses_neighbours(places, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        prove(OVERLAY_GROUPS, OVERLAY_SLOTS, OVERLAY | places, 2)


def test_the_proof_refuses_blocks_that_overlap_inside_a_frame():
    places = {"c0": Placement(0, 0, 304), "c1": Placement(0, 256, 304), "d0": Placement(0, 0, 1024)}
    with pytest.raises(PlanError, match=r"layer 'c0': block_stride_bytes: expected at least the 320 B .* got 304"):
        prove(FRAME_GROUPS, FRAME_SLOTS, places, 1, blocks_per_frame=[3, 1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSlot(0, 0, (), 0, 16), "LayerSlot: page_bytes: expected an integer >= 1, got 0"),
        (lambda: LayerSlot(16, -1, (), 0, 16), "LayerSlot: index: expected an integer >= 0, got -1"),
        (lambda: LayerSlot(16, 0, (), -16, 16), "LayerSlot: offset_bytes: expected an integer >= 0, got -16"),
        (lambda: LayerSlot(16, 0, (), 0, 1.5), "LayerSlot: num_bytes: expected an integer, got 1.5"),
        (lambda: Placement(-1, 0, 16), "Placement: layer_slot: expected an integer >= 0, got -1"),
        (lambda: Placement(0, -16, 16), "Placement: offset_bytes: expected an integer >= 0, got -16"),
        (lambda: Placement(0, 0, 0), "Placement: block_stride_bytes: expected an integer >= 1, got 0"),
    ],
)
def test_records_refuse_numbers_out_of_range(make, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        make()
