"""Groups for the tests of the planner, random and made by hand, and a check of plans that shares no code with theirs.

Random groups have few layers and small pages, in all the combinations that groups allow.
"""

import numpy as np
import torch
from hypothesis import strategies as st

from kvstore.groups import CacheGroup
from kvstore.layers import full_attention, latent, sliding_window
from kvstore.specs import KINDS, LayerSpec, Retention
from kvstore_kernels.formats import kv_format, latent_format
from kvstore_kernels.quantised import state_format

kv_rows = st.builds(
    kv_format,
    st.integers(1, 3),
    st.sampled_from([1, 5, 8, 64]),
    st.none() | st.sampled_from([1, 8]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    packed=st.booleans(),
)
latent_rows = st.builds(
    latent_format, st.sampled_from([24, 36]), st.just(16), st.sampled_from([torch.bfloat16, torch.float32])
)
row_formats = kv_rows | latent_rows


def padded_group(name, pages, block_size=16, window=None):
    """A group whose layers, named by it and numbered, have the given page bytes, by padding."""
    layers = {}
    for index, page_bytes in enumerate(pages):
        options = {"block_size": block_size, "padded_page_bytes": page_bytes}
        spec = sliding_window(1, 1, window=window, **options) if window else full_attention(1, 1, **options)
        layers[f"{name}{index}"] = spec
    return CacheGroup(name, layers, block_size, Retention("sliding_window", window) if window else Retention("full"))


@st.composite
def layer_specs(draw: st.DrawFn, block_size: int, window: int | None) -> LayerSpec:
    """A spec of that block size and window; some cover two tokens a row, some have padded pages."""
    row_format = draw(kv_rows if window else row_formats)
    kind = "sliding_window" if window else "full" if row_format.value_dim is None else "latent"
    tokens_per_row = draw(st.sampled_from([1, 2])) if block_size % 2 == 0 and not window else 1
    needed = row_format.page_bytes(block_size // tokens_per_row)
    padded = draw(st.none() | st.sampled_from([needed, needed + 16, 2 * needed]))
    return LayerSpec(kind, block_size, row_format, tokens_per_row, window, padded)


@st.composite
def cache_groups(draw: st.DrawFn) -> list[CacheGroup]:
    """One to four groups of one to six layers; equal and different page sizes within and between groups."""
    groups = []
    for number in range(draw(st.integers(1, 4))):
        block_size = draw(st.sampled_from([1, 3, 4, 8]))
        window = draw(st.none() | st.integers(1, 9))
        kinds = draw(st.lists(layer_specs(block_size, window), min_size=1, max_size=3))
        picks = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
        layers = {f"group{number}.layer{index}": spec for index, spec in enumerate(picks)}
        retention = Retention("sliding_window", window) if window else Retention("full")
        groups.append(CacheGroup(f"group{number}", layers, block_size, retention))
    return groups


MIXED = {
    "layers.0.attn": full_attention(8, 128),
    "layers.1.attn": sliding_window(4, 128, window=1024, block_size=32),
    "layers.2.attn": full_attention(8, 64),
    "layers.3.attn": latent(padded_page_bytes=81_920),
}
"""Three groups, three page sizes: 65,536 (full and window), 32,768, 81,920."""


def brute_force_pages_do_not_touch(plan):
    """Marks every 16 bytes of every page with its frame: one frame per mark, and each page its own in its group."""
    units = plan.arena_bytes // 16
    frame_at = np.full(units, -1)
    for group, num_blocks, per_frame in zip(plan.groups, plan.num_blocks, plan.blocks_per_frame, strict=True):
        used = np.zeros(units, dtype=bool)
        for layer, spec in group.layers.items():
            place = plan.placements[layer]
            slot = plan.layer_slots[place.layer_slot]
            for block in range(num_blocks):
                start = place.offset_bytes + block * place.block_stride_bytes
                assert start % 16 == 0
                assert 0 <= start < start + spec.page_bytes <= slot.num_bytes
                page = slice((slot.offset_bytes + start) // 16, (slot.offset_bytes + start + spec.page_bytes) // 16)
                assert not used[page].any()
                used[page] = True
                assert np.isin(frame_at[page], (-1, block // per_frame)).all()
                frame_at[page] = block // per_frame


@st.composite
def specs_of_any_kind(draw: st.DrawFn, demands: bool = False) -> dict[str, LayerSpec]:
    """One to five types of layers of any kind, one to seven layers each, mixed in layer order.

    With `demands` readers of some layers want block strides that are multiples of an odd number of bytes.
    """
    layers: list[tuple[str, LayerSpec]] = []
    for number in range(draw(st.integers(1, 5))):
        block_size = draw(st.sampled_from([1, 3, 4, 8]))
        kind = draw(st.sampled_from(KINDS))
        picks = draw(
            st.lists(st.sampled_from(draw(_kinds_of_pages(kind, block_size, demands))), min_size=1, max_size=7)
        )
        layers += [(f"{number}.{index}.{kind}", spec) for index, spec in enumerate(picks)]
    return dict(draw(st.permutations(layers)))


@st.composite
def _kinds_of_pages(draw: st.DrawFn, kind: str, block_size: int, demands: bool) -> list[LayerSpec]:
    """One to three specs of one kind, block size and retention."""
    reach = {"sliding_window": "window", "latent_window": "window", "chunked": "chunk"}.get(kind)
    options = {reach: draw(st.integers(1, 40))} if reach else {}
    if kind == "state":
        options["speculative_blocks"] = draw(st.integers(0, 2))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        plain = kind in ("full", "sliding_window", "chunked")
        rows = draw(kv_rows if plain else latent_rows)
        if kind == "state":
            rows = state_format([("s", (draw(st.integers(1, 5)), 3), torch.float32)])
        tokens = draw(st.sampled_from([1, 2])) if kind in ("full", "latent") and block_size % 2 == 0 else 1
        multiple = draw(st.sampled_from([16, 48, 72, 656])) if demands else 16
        found.append(
            LayerSpec(kind, block_size, rows, tokens, block_stride_multiple=multiple, **options)  # type: ignore[arg-type]
        )
    return found
