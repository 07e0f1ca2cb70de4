"""Block managers of others in a decode step on the host: one more token for each of many sequences, one group.

Each is looked at before it gets a time: every sequence has the blocks of its length, no block is there twice, and the
slots that a step hands out are those of the new tokens. The sequences reach the ends of their blocks one after the
other, as they do for our store, but the pools have free blocks: nobody evicts.

Signatures are those of transformers 5.24 (generation/continuous_batching/cache.py), vLLM 0.33.0
(vllm/v1/core/kv_cache_manager.py, vllm/v1/request.py, vllm/v1/kv_cache_interface.py) and SGLang 0.5.23
(sglang/srt/mem_cache/allocator/paged.py). What is not installed, or has other ones, is a row that says so.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernel_peers import is_installed
from benchmarks.record import Measure
from benchmarks.timing import Times

Ids = npt.NDArray[np.int64]
STEPS, WARM_UP = 100, 20


class Manager(Protocol):
    """Somebody's books of many sequences of one group."""

    def step(self) -> None:
        """Makes room for one more token of each sequence."""

    def blocks(self) -> list[list[int]]:
        """The blocks of each sequence, the first tokens first."""

    def slots(self) -> Ids | None:
        """block * block size + place of the tokens of the last step; None where the host makes no slots."""


@dataclass(frozen=True, slots=True)
class StorePeer:
    """A manager, `what`, of a library. `make(lengths, block, num_blocks)`: one with sequences of these lengths."""

    library: str
    what: str
    package: str
    make: Callable[[Ids, int, int], Manager]
    note: str


def store_peers(
    num_sequences: int, length: int, block: int, steps: int = STEPS, warm_up: int = WARM_UP
) -> Iterator[Measure]:
    """Microseconds of a decode step in each manager, or why there are none.

    Args:
        num_sequences: how many sequences get a token in each step.
        length: tokens of the shortest of them before the first step; the others have up to `block` - 1 more.
        block: tokens of a block.
        steps, warm_up: steps that are timed, and before them.
    """
    for peer in STORE_PEERS:
        case = f"decode, 1 group, {num_sequences:,} sequences | {_named(peer)}"
        if not is_installed(peer.package):
            yield Measure(case, "absent", f"{peer.package} is not installed")
            continue
        try:
            figures = list(_measure(peer, length + np.arange(num_sequences) % block, block, steps, warm_up))
        except Exception as error:  # of another version, say: the others are still measured
            figures = [("absent", f"failed: {type(error).__name__}: {error}"[:200], "")]
        yield from (Measure(case, metric, value, unit) for metric, value, unit in figures)


def _measure(
    peer: StorePeer, lengths: Ids, block: int, steps: int, warm_up: int
) -> Iterator[tuple[str, float | str, str]]:
    num_blocks = int((-(-(lengths + steps + warm_up + 1) // block)).sum()) + 1
    manager = peer.make(lengths, block, num_blocks)
    for _ in range(warm_up):
        manager.step()
    taken = np.zeros(steps)
    wrong = difference(manager, lengths + warm_up, block)
    gc.collect()
    gc.disable()
    try:
        for number in range(steps if wrong is None else 0):
            begin = time.perf_counter_ns()
            manager.step()
            taken[number] = time.perf_counter_ns() - begin
    finally:
        gc.enable()
    wrong = wrong or difference(manager, lengths + warm_up + steps, block)
    if wrong is not None:
        yield "absent", f"wrong: {wrong}", ""
        return
    for metric, value in (("min", taken.min()), ("median", np.median(taken)), ("worst", taken.max())):
        yield metric, round(float(value) / 1e3, 2), "us"
    yield "spread", round(100 * Times(tuple(taken.tolist())).spread, 1), "%"
    yield "note", peer.note, ""


def difference(manager: Manager, lengths: Ids, block: int) -> str | None:
    """What is wrong with the books after a step that led to these lengths; None where nothing is."""
    tables = manager.blocks()
    wanted = -(-lengths // block)
    for seq_idx, (table, count) in enumerate(zip(tables, wanted.tolist(), strict=True)):
        if len(table) != count:
            return f"sequence {seq_idx} of {lengths[seq_idx]} tokens has {len(table)} blocks, expected {count}"
    every = np.concatenate([np.asarray(table) for table in tables])
    if len(np.unique(every)) != len(every):
        return f"{len(every) - len(np.unique(every))} blocks are there twice"
    slots = manager.slots()
    if slots is None:
        return None
    expected = np.array([table[-1] for table in tables]) * block + (lengths - 1) % block
    if not np.array_equal(slots, expected):
        return f"{int((slots != expected).sum())} of {len(slots)} slots are not those of the new tokens"
    return None


class _Transformers:
    """PagedAttentionCache: a call per sequence to allocate, one for its place, and a tensor of all places."""

    def __init__(self, lengths: Ids, block: int, num_blocks: int) -> None:
        library = "transformers.generation.continuous_batching"
        config = import_module("transformers").LlamaConfig(
            num_hidden_layers=1, hidden_size=2, num_attention_heads=1, num_key_value_heads=1, vocab_size=8
        )
        sizes = import_module("transformers").ContinuousBatchingConfig(
            page_size=block,
            num_blocks=num_blocks,
            max_batch_tokens=1,
            max_memory_percent=0.9,
            allow_block_sharing=False,
        )
        helper = import_module(f"{library}.distributed").DistributedHelper(None, None)
        cache_of = import_module(f"{library}.cache").PagedAttentionCache
        self.cache: Any = cache_of(config, sizes, "cpu", helper, dtype=torch.float16)
        (self.allocator,) = self.cache.cache_allocators.values()
        state_of: Any = import_module(f"{library}.requests").RequestState
        self.states = [state_of(request_id=str(seq_idx), initial_tokens=[0]) for seq_idx in range(len(lengths))]
        for state, length in zip(self.states, lengths.tolist(), strict=True):
            if not self.cache.can_store_request_tokens(state, length):
                raise MemoryError(f"no room for {length} tokens")
            state.position_offset = length
        self.places = torch.empty(0, dtype=torch.int64)

    def step(self) -> None:
        places: list[list[int]] = [[]]
        for state in self.states:
            if not self.cache.can_store_request_tokens(state, 1):
                raise MemoryError("no room for a token")
            self.cache.extend_read_and_write_indices(state.request_id, state.position_offset, 1, None, places)
            state.position_offset += 1
        self.places = torch.tensor(places[0], dtype=torch.int64)

    def blocks(self) -> list[list[int]]:
        return [self.allocator.block_table[state.request_id] for state in self.states]

    def slots(self) -> Ids:
        places, stride = self.places.numpy(), self.allocator.block_physical_stride
        slots: Ids = places // stride * self.allocator.tokens_per_page + places % stride
        return slots


class _Vllm:
    """KVCacheManager with its prefix cache on, as the scheduler calls it: a call per sequence, and its new token."""

    def __init__(self, lengths: Ids, block: int, num_blocks: int) -> None:
        interface: Any = import_module("vllm.v1.kv_cache_interface")
        utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        request_of: Any = import_module("vllm.v1.request").Request
        sampling_of: Any = import_module("vllm.sampling_params").SamplingParams
        spec = interface.FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [interface.KVCacheGroupSpec(["layers.0.attn"], spec)]
        config = interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager: Any = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block,
            hash_block_size=block,
            enable_caching=True,
        )
        hash_of = import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(hash_of)
        hasher = utils.get_request_block_hasher(block, hash_of)
        random = np.random.default_rng(0)
        self.requests = [
            request_of(
                request_id=str(seq_idx),
                prompt_token_ids=random.integers(0, 2**31 - 1, length).tolist(),
                sampling_params=sampling_of(max_tokens=1 << 20),
                pooling_params=None,
                block_hasher=hasher,
            )
            for seq_idx, length in enumerate(lengths.tolist())
        ]
        for request, length in zip(self.requests, lengths.tolist(), strict=True):
            self._allocate(request, length)

    def _allocate(self, request: Any, num_tokens: int) -> None:
        if self.manager.allocate_slots(request, num_tokens) is None:
            raise MemoryError(f"no room for {num_tokens} tokens")
        request.num_computed_tokens += num_tokens
        request.append_output_token_ids(7)

    def step(self) -> None:
        self.manager.new_step_starts()
        for request in self.requests:
            self._allocate(request, 1)

    def blocks(self) -> list[list[int]]:
        return [list(self.manager.get_block_ids(request.request_id)[0]) for request in self.requests]

    def slots(self) -> None:
        return None


class _Sglang:
    """PagedTokenToKVPoolAllocator and a table of the slot of every token, as its decode step uses them."""

    def __init__(self, lengths: Ids, block: int, num_blocks: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        allocator_of = import_module("sglang.srt.mem_cache.allocator.paged").PagedTokenToKVPoolAllocator
        self.allocator: Any = allocator_of(
            num_blocks * block, page_size=block, dtype=torch.float32, device=self.device, kvcache=None, need_sort=False
        )
        self.block = block
        self.lens_cpu = torch.from_numpy(lengths.copy())
        self.lens = self.lens_cpu.to(self.device)
        self.rows = torch.arange(len(lengths), device=self.device)
        self.table = torch.zeros(len(lengths), int(lengths.max()) + (1 << 12), dtype=torch.int32, device=self.device)
        nothing = torch.zeros_like(self.lens_cpu)
        slots = self.allocator.alloc_extend(
            prefix_lens=nothing.to(self.device),
            prefix_lens_cpu=nothing,
            seq_lens=self.lens,
            seq_lens_cpu=self.lens_cpu,
            last_loc=torch.full_like(self.lens, -1),
            extend_num_tokens=int(lengths.sum()),
        )
        if slots is None:
            raise MemoryError(f"no room for {int(lengths.sum())} tokens")
        for seq_idx, own in enumerate(slots.split(lengths.tolist())):
            self.table[seq_idx, : len(own)] = own

    def step(self) -> None:
        last = self.table[self.rows, self.lens - 1].to(torch.int64)
        self.lens_cpu, self.lens = self.lens_cpu + 1, self.lens + 1
        slots = self.allocator.alloc_decode(seq_lens=self.lens, seq_lens_cpu=self.lens_cpu, last_loc=last)
        if slots is None:
            raise MemoryError("no room for a token")
        self.table[self.rows, self.lens - 1] = slots.to(torch.int32)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def blocks(self) -> list[list[int]]:
        table = self.table.cpu().numpy() // self.block
        return [row[: int(length) : self.block].tolist() for row, length in zip(table, self.lens_cpu, strict=True)]

    def slots(self) -> Ids:
        slots: Ids = self.table[self.rows, self.lens - 1].cpu().numpy().astype(np.int64)
        return slots


def _named(peer: StorePeer) -> str:
    """With its version where it is installed."""
    try:
        number = version(peer.package).removesuffix(".0")
    except PackageNotFoundError:
        return f"{peer.library} {peer.what}"
    return f"{peer.library} {number} {peer.what}"


STORE_PEERS = (
    StorePeer(
        "transformers",
        "paged cache",
        "transformers",
        _Transformers,
        "allocation and places to write of each sequence; no prefix index, no lists of what to read",
    ),
    StorePeer(
        "vLLM", "KVCacheManager", "vllm", _Vllm, "allocation, tokens and block hashes; slots are made on the device"
    ),
    StorePeer("SGLang", "paged allocator", "sglang", _Sglang, "allocation, table and slots in torch; no prefix index"),
)
