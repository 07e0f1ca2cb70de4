"""Small stores, the steps that tests take with them, and what a store looks like from inside."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore import KVStore
from kvstore.layers import chunked_attention, full_attention, recurrent_state, sliding_window
from kvstore.specs import LayerSpec
from kvstore_kernels.formats import kv_format

LAYER = "layers.0.attn"
WINDOW_LAYER = "layers.1.attn"
STATE_LAYER = "layers.2.state"
RING_LAYER = "layers.3.ring"
CHUNK_LAYER = "layers.4.attn"


def store_of(layers: dict[str, Any], num_frames: int = 64, device: str | None = "cpu", **limits: Any) -> KVStore:
    """A store of layers; what `limits` names of a plan goes to the plan."""
    plan_arguments = {name: limits.pop(name) for name in ("layout", "grouping") if name in limits}
    plan = kvstore.plan_cache(layers, num_frames=num_frames, **plan_arguments)
    defaults = {"max_sequences": 8, "max_length": 64, "max_tokens_per_step": 128}
    return KVStore(plan, device, **{**defaults, **limits})


def make_store(num_frames: int = 64, block_size: int = 4, **limits: Any) -> KVStore:
    specs = {f"layers.{i}.attn": full_attention(2, 8, dtype=torch.float32, block_size=block_size) for i in range(2)}
    return store_of(specs, num_frames, **limits)


def make_hybrid(num_frames: int = 64, window: int = 6, **limits: Any) -> KVStore:
    """A full group with blocks of 4 and a window group with blocks of 2, of another dtype, in one arena."""
    specs = {
        LAYER: full_attention(2, 8, dtype=torch.float16, block_size=4),
        WINDOW_LAYER: sliding_window(2, 8, dtype=torch.float32, block_size=2, window=window),
    }
    return store_of(specs, num_frames, **{"max_tokens_per_step": 16, **limits})


def ring(capacity: int) -> LayerSpec:
    """The last `capacity` rows of a sequence, in one block."""
    return LayerSpec("ring", capacity, kv_format(2, 8, dtype=torch.float32))


def state(block_size: int = 4, **counts: int) -> LayerSpec:
    """A state of four numbers."""
    return recurrent_state([("s", (4,), torch.float32)], block_size=block_size, **counts)


def mixed_layers(window: int = 6, capacity: int = 4, **counts: int) -> dict[str, LayerSpec]:
    """One layer of every kind: full, window, state, ring, chunk; blocks of 4, a window's of 2."""
    return {
        LAYER: full_attention(2, 8, dtype=torch.float32, block_size=4),
        WINDOW_LAYER: sliding_window(2, 8, dtype=torch.float32, block_size=2, window=window),
        STATE_LAYER: state(4, **counts),
        RING_LAYER: ring(capacity),
        CHUNK_LAYER: chunked_attention(2, 8, dtype=torch.float32, block_size=4, chunk=8),
    }


def rows_for(tokens: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row [2, 8] per token that names the token."""
    return torch.as_tensor(np.asarray(tokens), dtype=dtype)[:, None, None].repeat(1, 2, 8)


def prefill(store: KVStore, *prompts: Any) -> np.ndarray:
    """Opens prompts and commits what is not cached, in one step each."""
    opened = store.open(list(prompts))
    counts = [len(prompt) - cached for prompt, cached in zip(prompts, opened.cached_tokens.tolist(), strict=True)]
    batch = store.extend(opened.seq_ids, counts)
    fed = [np.asarray(prompt)[len(prompt) - count :] for prompt, count in zip(prompts, counts, strict=True)]
    store.commit(batch, np.concatenate(fed))
    store.check()
    return opened.seq_ids


def feed(store: KVStore, seq_ids: Any, *tokens: Sequence[int], commit: bool = True, **commit_arguments: Any) -> Any:
    """A step that writes what names the tokens to every layer. Of a state it writes the sum of all tokens so far."""
    batch = store.extend(seq_ids, [len(part) for part in tokens])
    flat = [token for part in tokens for token in part]
    for layer in store.plan.layers:
        spec = store.plan.spec(layer)
        if spec.kind == "state":
            step_state(store, layer, batch, tokens)
        else:
            rows = rows_for(flat, spec.format.parts[0].dtype)
            store.write(layer, batch, rows, rows)
    if commit:
        store.commit(batch, flat, **commit_arguments)
        store.check()
    return batch


def step_state(store: KVStore, layer: str, batch: Any, tokens: Sequence[Sequence[int]]) -> None:
    """What an engine does with a recurrent layer: reads one block, writes another, saves the state where asked to."""
    group = store.plan.group_index(layer)
    (state_tensor,) = store.state_view(layer).values()
    blocks, saves = batch.state_blocks[group].tolist(), batch.state_checkpoints[group]
    saves = [(0, 0)] * len(blocks) if saves is None else saves.tolist()
    starts = (batch.seq_lens.numpy() - batch.num_new_tokens).tolist()
    for (read, write), (length, block), start, part in zip(blocks, saves, starts, tokens, strict=True):
        value = state_tensor[read].clone() if read else torch.zeros(4)
        if length:
            state_tensor[block] = value + sum(part[: length - start])
        if write:
            state_tensor[write] = value + sum(part)


def state_of(store: KVStore, seq_ids: Any, layer: str = STATE_LAYER) -> list[float]:
    """The running state of each sequence, as its next step reads it."""
    batch = store.extend(seq_ids, 0)
    (state_tensor,) = store.state_view(layer).values()
    reads = batch.state_blocks[store.plan.group_index(layer)][:, 0].tolist()
    store.commit(batch, [])
    return [state_tensor[read, 0].item() for read in reads]


def tokens_in(store: KVStore, layer: str, seq_ids: Any, batch: Any = None) -> list[int]:
    """The tokens that the rows of a layer name, K and V agreeing, in the order of `gather`."""
    asked = store.extend(seq_ids, 0) if batch is None else batch
    keys, values = store.gather(layer, asked)
    if batch is None:
        store.commit(asked, [])
    assert torch.equal(keys, values)
    assert (keys == keys[:, :1, :1]).all()
    return [int(token) for token in keys[:, 0, 0].tolist()]


def snapshot(store: KVStore) -> dict[str, Any]:
    """All that the books of a store know and all bytes of its arena; a refused call leaves it equal."""
    books = store._books
    books.flush()
    allocator, handles = books.allocator, books.handles
    arrays = {
        "state": books.state.matrix,
        "tables": books.tables.flat,
        "references": allocator.references,
        "fences": allocator.fences,
        "generation": allocator.generation,
        "indexed": allocator.indexed,
        "priority": allocator.priority,
        "group": allocator.group,
        "free": allocator._free[: allocator.num_free_frames],
        "handles": handles.current,
        "row generations": handles.generation,
        "suspended": handles.suspended,
        "free rows": handles.free,
        "arena": np.empty(0) if store._arena is None else store._arena.memory.numpy(),
    }
    seen: dict[str, Any] = {name: array.tobytes() for name, array in arrays.items()}
    seen["stats"] = store.stats()
    seen["unfinished"] = [(serial, step.committed) for serial, step in books.unfinished.items()]
    seen["fence lists"] = [(serial, cells.tolist()) for serial, cells in books.fences]
    seen["on the host"] = sorted(store._suspended)
    seen["buffers"] = len(store._mirrors._free), list(store._staging._free)
    if books.prefixes is not None:
        seen["tokens"] = books.prefixes.tokens.tobytes()
        seen["edges"] = books.prefixes.index.num_nodes
        seen["namespaces"] = sorted(books.prefixes.roots)
    return seen


def refused(store: KVStore, call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Expects that a call is refused in these words, and that nothing has changed by it."""
    before = snapshot(store)
    with pytest.raises(error, match=message):
        call()
    store.check()
    after = snapshot(store)
    assert [name for name, value in before.items() if after[name] != value] == []


def kept_tokens(spec: LayerSpec, tokens: Sequence[int]) -> list[int]:
    """What the next token of a sequence sees of its tokens in a layer, worked out from the kind alone."""
    length = len(tokens)
    first = {
        "sliding_window": length - (spec.window or 1) + 1,
        "ring": length - spec.block_size,
        "chunked": length // (spec.chunk or 1) * (spec.chunk or 1),
    }.get(spec.kind, 0)
    return list(tokens[max(first, 0) :])


def expect_rows(store: KVStore, sequences: dict[int, list[int]]) -> None:
    """Reads every layer of every sequence, and its state, and compares with the tokens it is made of."""
    seq_ids = list(sequences)
    batch = store.extend(seq_ids, 0)
    for layer in store.plan.layers:
        spec = store.plan.spec(layer)
        if spec.kind == "state":
            (state_tensor,) = store.state_view(layer).values()
            reads = batch.state_blocks[store.plan.group_index(layer)][:, 0].tolist()
            assert [state_tensor[read, 0].item() for read in reads] == [sum(part) for part in sequences.values()]
            continue
        expected = [token for part in sequences.values() for token in kept_tokens(spec, part)]
        assert tokens_in(store, layer, seq_ids, batch) == expected, layer
    store.commit(batch, [])
    store.check()
