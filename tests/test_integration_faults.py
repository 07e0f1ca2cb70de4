"""Faults seen where stores meet an engine, by number (O54 to O60), with the triggers that showed them."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_cases import LAYER, feed, make_hybrid, make_store, prefill, rows_for, store_of, tokens_in
from torch._subclasses.fake_tensor import FakeTensorMode

import kvstore
import kvstore_kernels as kernels
from kvstore import KVStore, OutOfBlocks, StoreStats
from kvstore_kernels import PageView
from kvstore_kernels.launch import Launch
from tests.cases import BACKENDS

ROOT = Path(__file__).parent.parent
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def test_o54_sleep_empties_the_prefix_map() -> None:
    """A prompt of 2 blocks is cached; sleep, wake: the same prompt is a miss, and is computed into zeroed pages."""
    store = make_store()
    prompt = list(range(8))
    first = store.open([prompt]).seq_ids
    feed(store, first, prompt)
    store.release(first)
    assert store.lookup([[*prompt, 9]]).tolist() == [8]
    assert store.sleep() == 2
    store.wake()
    assert not store.page_view(LAYER).memory.any()
    opened = store.open([prompt, [*prompt, 9]])
    assert opened.cached_tokens.tolist() == [0, 0]
    feed(store, opened.seq_ids[:1], prompt)
    assert tokens_in(store, LAYER, opened.seq_ids[:1]) == prompt


def test_o54_sleep_is_refused_while_blocks_are_in_use() -> None:
    store = make_store()
    seq_ids = prefill(store, range(8))
    with pytest.raises(kvstore.SequenceError, match="sleep: expected no open sequences, got 1"):
        store.sleep()
    assert store.lookup([[*range(8), 9]]).tolist() == [8]
    store.release(seq_ids)
    store.sleep()


SCALES = {"float": 0.5, "tensor": torch.tensor([0.5])}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", SCALES)
def test_o55_the_scale_outlives_cleared_pages(scale: str, backend: str) -> None:
    """fp8 rows with scale 0.5, pages discarded and had again; write and read 1.0: 1.0, of the byte 0x40 (2.0).

    A store with a device holds no quantised rows (see the next test) and so has no scale to lose: the scale of a fp8
    tensor is an argument of each write and read, which nothing in the pages can change.
    """
    row_format = kernels.kv_format(1, 8, dtype=FP8)
    page_bytes = row_format.page_bytes(4)
    row_scale = SCALES[scale]
    slots, ones = torch.tensor([5]), torch.ones(1, 1, 8, dtype=FP32)
    for content in (0xA5, 0):  # what memory had before, and what it has after a wake
        memory = torch.full((3 * page_bytes,), content, dtype=torch.uint8)
        view = PageView(memory, 0, page_bytes, 3, 4, row_format)
        kernels.fill_blocks([view], torch.arange(3), 0, backend=backend)
        assert not memory.any()
        kernels.write_rows(view, slots, ones, ones, row_scales=(row_scale, row_scale), backend=backend)
        read = kernels.read_rows(view, slots, dtype=FP32, row_scales=(row_scale, row_scale), backend=backend)
        for part in ("k", "v"):
            assert (view.tensor(part)[1, 1].view(torch.uint8) == 0x40).all()
        for values in read:
            assert torch.equal(values, ones)
    assert float(row_scale) == 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_o55_scales_inside_the_rows_come_back_with_the_rows(backend: str) -> None:
    """int8 rows with a scale per token and head: cleared pages read as zeros, a row written anew as what it was."""
    row_format = kernels.FORMATS["int8_token_head"](2, 64)
    page_bytes = row_format.page_bytes(4)
    view = PageView(torch.zeros(3 * page_bytes, dtype=torch.uint8), 0, page_bytes, 3, 4, row_format)
    slots, ones = torch.tensor([5]), torch.ones(1, 2, 64, dtype=FP32)
    for _ in range(2):
        assert not any(part.any() for part in kernels.read_rows(view, slots, dtype=FP32, backend=backend))
        kernels.write_rows(view, slots, ones, ones, backend=backend)
        for values in kernels.read_rows(view, slots, dtype=FP32, backend=backend):
            assert torch.allclose(values, ones, rtol=1e-6, atol=0)
        kernels.fill_blocks([view], torch.arange(3), 0, backend=backend)


def test_o55_a_store_with_a_device_refuses_rows_that_need_a_scale() -> None:
    layers = {LAYER: kvstore.full_attention(1, 8, dtype=FP8)}
    with pytest.raises(ValueError, match=rf"plan: layer '{LAYER}': expected rows of .*, got torch.float8_e4m3fn"):
        store_of(layers)
    store = store_of(layers, device=None)
    store.sleep()
    store.wake()


def pad_to(store: KVStore) -> dict[str, Any]:
    return {"pad_to": 4}


def in_graph(store: KVStore) -> dict[str, Any]:
    return {"graph": store.graph_batch(4)}


@pytest.mark.parametrize("padded", [pad_to, in_graph], ids=["pad_to", "graph_batch"])
def test_o56_padding_rows_name_the_null_block_and_no_slot(padded: Callable[[KVStore], dict[str, Any]]) -> None:
    """A batch of 4 requests, then one of 2: rows 2 and 3 write nothing, whatever they held the step before."""
    store = make_hybrid(zero_new=False)
    prompts = [list(range(10 * i, 10 * i + 3)) for i in range(4)]
    seq_ids = prefill(store, *prompts)
    arguments = padded(store)
    step = store.extend(seq_ids, 1, **arguments)
    store.commit(step, [1, 2, 3, 4])
    before = store.page_view(LAYER).memory.clone()
    step = store.extend(seq_ids[[1, 0]], 1, **arguments)
    assert (step.num_sequences, step.seq_lens.tolist(), step.positions.tolist()) == (4, [5, 5, 0, 0], [4, 4, 0, 0])
    written = torch.zeros_like(before, dtype=torch.bool)
    for layer in store.plan.layers:
        group = store.plan.group_index(layer)
        assert not step.block_table[group][2:].any()
        assert store.slot_mapping(layer, step)[2:].tolist() == [-1, -1]
        rows = rows_for([101, 102, 103, 104], store.plan.spec(layer).format.parts[0].dtype)
        store.write(layer, step, rows, rows)
        out, lse = store.gqa_decode(layer, step, torch.zeros(4, 2, 8, dtype=rows.dtype))
        assert not out[2:].any()
        assert torch.isneginf(lse[2:]).all()
        view = store.page_view(layer)
        for slot in store.slot_mapping(layer, step)[:2].tolist():
            block, row = divmod(slot, view.rows_per_block)
            for part in ("k", "v"):
                row_view = view.tensor(part)[block, row]
                start = row_view.data_ptr() - view.memory.data_ptr()
                written[start : start + row_view.numel() * row_view.element_size()] = True
    after = store.page_view(LAYER).memory
    assert torch.equal(before[~written], after[~written])
    assert not torch.equal(before[written], after[written])
    store.commit(step, [5, 6])
    store.check()


class Devices:
    """Stands in for torch.cuda.device: which device is current, and which were made current."""

    def __init__(self) -> None:
        self.current: object = torch.device("cuda:0")
        self.entered: list[object] = []

    @contextlib.contextmanager
    def __call__(self, device: object) -> Iterator[None]:
        before, self.current = self.current, device
        self.entered.append(device)
        try:
            yield
        finally:
            self.current = before


class Kernel:
    """Stands in for a compiled kernel: notes the current device of each launch."""

    def __init__(self, devices: Devices, fails: bool) -> None:
        self.devices, self.fails = devices, fails
        self.launched_on: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, **_: object) -> None:
        self.launched_on.append(self.devices.current)
        if self.fails:
            raise RuntimeError("the launch failed")


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
def test_o57_a_launch_runs_on_the_device_of_its_tensors_and_restores_the_current_one(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Pages on device 1 while device 0 is current, by stand-ins for both; also when the launch raises."""
    devices = Devices()
    monkeypatch.setattr(torch.cuda, "device", devices)
    with FakeTensorMode():
        on_device_1 = torch.empty(4, device="cuda:1")
    kernel = Kernel(devices, fails)
    launch = Launch(kernel, (1,), {"absent_ptr": None, "num_rows": 3, "memory_ptr": on_device_1}, {}, 1)
    with pytest.raises(RuntimeError, match="the launch failed") if fails else contextlib.nullcontext():
        launch.run()
    assert kernel.launched_on == [torch.device("cuda:1")]
    assert devices.current == torch.device("cuda:0")
    dataclasses.replace(launch, grid=(0,)).run()
    assert len(kernel.launched_on) == 1


def test_o57_every_op_launches_under_the_device_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here that of the CPU, which leaves the current GPU alone (-1); no kernel is launched beside the guard."""
    page_bytes = kernels.kv_format(1, 16, dtype=BF16).page_bytes(4)
    view = PageView(torch.zeros(4 * page_bytes, dtype=torch.uint8), 0, page_bytes, 4, 4, kernels.kv_format(1, 16))
    rows, ids = torch.ones(2, 1, 16, dtype=BF16), torch.tensor([1, 2])
    table, lens = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    packed = kernels.pack_blocks([view], ids, backend="triton")
    calls: dict[str, Callable[[], Any]] = {
        "write": lambda: kernels.write_rows(view, ids, rows, rows, backend="triton"),
        "gather": lambda: kernels.gather_rows(view, table, torch.tensor([0, 5]).int(), num_rows=5, backend="triton"),
        "decode": lambda: kernels.gqa_decode(view, table, lens, rows[:1], backend="triton"),
        "fill": lambda: kernels.fill_blocks([view], ids, 0, backend="triton"),
        "copy": lambda: kernels.copy_blocks([view], ids[:1], ids[1:], backend="triton"),
        "pack": lambda: kernels.pack_blocks([view], ids, backend="triton"),
        "unpack": lambda: kernels.unpack_blocks([view], ids, packed, backend="triton"),
    }
    for name, call in calls.items():
        devices = Devices()
        monkeypatch.setattr(torch.cuda, "device", devices)
        call()
        assert devices.entered, name
        assert set(devices.entered) == {-1}, name
        assert devices.current == torch.device("cuda:0"), name


WITHOUT_A_DRIVER = """
import torch, kvstore, kvstore_kernels as kernels
assert not torch.cuda.is_initialized()
specs = {"layers.0.attn": kvstore.full_attention(1, 8, dtype=torch.float32, block_size=4)}
plan = kvstore.plan_cache(specs, num_frames=8)
store = kvstore.KVStore(plan, "cpu", max_sequences=2, max_length=16)
batch = store.extend(store.open([[1, 2, 3]]).seq_ids, 3)
rows = torch.arange(3.0)[:, None, None].expand(3, 1, 8).contiguous()
store.write("layers.0.attn", batch, rows, rows)
print(torch.equal(store.gather("layers.0.attn", batch)[0], rows))
store.commit(batch, [1, 2, 3])
batch = store.extend(batch.seq_ids, 1)
store.write("layers.0.attn", batch, rows[:1], rows[:1])
print(list(store.gqa_decode("layers.0.attn", batch, rows[:1])[0].shape))
for call in (
    lambda: kvstore.KVStore(plan, "cuda"),
    lambda: kvstore.KVStore(plan, "cuda:1"),
    lambda: kvstore.KVStore(plan, "cpu", backend="triton"),
    lambda: kernels.fill_blocks([store.page_view("layers.0.attn")], torch.tensor([1]), 0, backend="triton"),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""
NEEDS_A_GPU = "Triton needs a GPU, or TRITON_INTERPRET=1 set before kvstore_kernels is imported"


def test_o58_without_a_driver_the_cpu_works_and_the_first_gpu_call_says_what_is_missing() -> None:
    """A process of its own, with an empty PATH, no GPU to see, and no interpreter."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_DRIVER], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "True",
        "[1, 1, 8]",
        "device: expected one that torch sees (0 CUDA devices), got 'cuda'",
        "device: expected one that torch sees (0 CUDA devices), got 'cuda:1'",
        *[f"backend: expected 'reference' for tensors on cpu, got 'triton': {NEEDS_A_GPU}"] * 2,
    ]


def latent_view(num_rows: int, latent_dim: int, dtype: torch.dtype) -> PageView:
    """One page of latent rows, all of whose columns are V, behind an empty one."""
    row_format = kernels.latent_format(latent_dim, latent_dim, dtype)
    page_bytes = row_format.page_bytes(num_rows)
    return PageView(torch.full((2 * page_bytes,), 0xFF, dtype=torch.uint8), 0, page_bytes, 2, num_rows, row_format)


def test_o59_bf16_is_moved_bit_for_bit_and_read_exactly_under_the_interpreter() -> None:
    """All 65,536 patterns through a write, a gather, and a read as fp32; then [1.0, 2.0] through attention."""
    patterns = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(512, 1, 128)
    view = latent_view(512, 128, BF16)
    slots = torch.arange(512, 1024)
    kernels.write_rows(view, slots, patterns.view(BF16), backend="triton")
    table, cu_row_lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([0, 512], dtype=torch.int32)
    (moved,) = kernels.gather_rows(view, table, cu_row_lens, num_rows=512, backend="triton")
    assert torch.equal(moved.view(torch.int16), patterns)
    (values,) = kernels.read_rows(view, slots, dtype=FP32, backend="triton")
    exact = (patterns.to(torch.int32) << 16).view(FP32)  # what bf16 means, by its bits
    is_nan = torch.isnan(exact)
    assert torch.equal(torch.isnan(values), is_nan)
    assert torch.equal(values[~is_nan].view(torch.int32), exact[~is_nan].view(torch.int32))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_o59_attention_over_equal_bf16_rows_gives_the_row(num_rows: int) -> None:
    view = latent_view(16, 32, BF16)
    row = torch.tensor([1.0, 2.0], dtype=BF16).repeat(16)
    kernels.write_rows(view, torch.arange(16, 16 + num_rows), row.repeat(num_rows, 1), backend="triton")
    table, row_lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([num_rows], dtype=torch.int32)
    q = torch.zeros(1, 2, 32, dtype=BF16)
    out, lse = kernels.mla_decode(view, table, row_lens, q, softmax_scale=1.0, backend="triton")
    assert torch.equal(out, row.expand(1, 2, 32))
    assert torch.allclose(lse, torch.full((1, 2), float(np.log(num_rows))))


class Watcher(threading.Thread):
    """Asks for stats in a thread of its own until it is stopped."""

    def __init__(self, store: KVStore) -> None:
        super().__init__(daemon=True)
        self.store, self.stopped = store, threading.Event()
        self.seen: list[StoreStats] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set() or not self.seen:
                self.seen.append(self.store.stats())
        except Exception as error:
            self.error = error

    def __enter__(self) -> "Watcher":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join(30)
        assert not self.is_alive()


def balance(stats: StoreStats) -> tuple[int, int, int, int]:
    return stats.free, stats.cached, stats.in_use, stats.fenced


def test_o60_blocks_held_by_an_unfinished_batch_are_counted_and_come_back_with_finish() -> None:
    """4 blocks, all of them fenced; a call for 1 more is refused at once, in numbers, and succeeds after finish."""
    store = make_store(num_frames=5, prefix_caching=False)
    holder = store.open([range(16)]).seq_ids
    batch = store.extend(holder, 16)
    store.commit(batch, range(16), finish=False)
    store.release(holder)
    wanting = store.open([[7]]).seq_ids
    with Watcher(store) as watcher:
        for _ in range(20):
            with pytest.raises(OutOfBlocks, match=r"wanted \[1\], free \[0\], evictable \[0\], fenced \[4\]") as caught:
                store.extend(wanting, 1)
            assert (caught.value.wanted, caught.value.free, caught.value.fenced) == ((1,), (0,), (4,))
        assert balance(store.stats()) == (0, 0, 0, 4)
        store.check()
    assert watcher.error is None
    assert {balance(stats) for stats in watcher.seen} == {(0, 0, 0, 4)}
    store.finish(batch)
    feed(store, wanting, [7])
    assert balance(store.stats()) == (3, 0, 1, 0)


def test_o60_blocks_held_by_another_sequence_are_counted_and_come_back_with_its_release() -> None:
    store = make_store(num_frames=5)
    holder = prefill(store, range(16))
    wanting = store.open([[7]]).seq_ids
    with Watcher(store) as watcher:
        for _ in range(20):
            with pytest.raises(OutOfBlocks, match=r"wanted \[1\], free \[0\], evictable \[0\], fenced \[0\]"):
                store.extend(wanting, 1)
        assert balance(store.stats()) == (0, 0, 4, 0)
        store.release(holder)
        assert balance(store.stats()) == (0, 4, 0, 0)
        feed(store, wanting, [7])
    assert watcher.error is None
    assert all(0 <= count <= 4 for stats in watcher.seen for count in balance(stats))
    assert balance(store.stats()) == (0, 3, 1, 0)
    assert store.stats().evicted == 1
