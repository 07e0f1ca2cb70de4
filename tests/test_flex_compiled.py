"""flex_attention compiled for a CPU: the pages themselves are K and V, and nothing but them is looked at."""

import shutil

import pytest
import torch
from attention_oracle import expect_within_budget
from flex_world import NUM_HEADS, WINDOW, make
from torch.nn.attention.flex_attention import flex_attention

from kvstore.integrations.metadata import flex_metadata


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_it_reads_the_pages_in_place_and_no_nan_of_others() -> None:
    """All memory but the batch's own pages is NaN, and V is the slot tensor itself."""
    world = make("overlay")
    seq_ids = world.open(21, 8, 3)
    for count in (21, 40, 40):
        world.step(seq_ids[:1], [count])
    world.step(seq_ids[1:2], [8])
    batch = world.extend(seq_ids, [20, 1, 3])
    meta = flex_metadata(world.store, WINDOW, batch)
    assert meta.value.isnan().any()
    q = world.random(24, NUM_HEADS, 16)
    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        out = compiled(q.transpose(0, 1)[None], meta.key, meta.value, block_mask=meta.block_mask, enable_gqa=True)
    exact = world.exact(WINDOW, batch, q)
    expect_within_budget((out[0].transpose(0, 1), exact.lse), exact)
