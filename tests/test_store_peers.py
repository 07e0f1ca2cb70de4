"""Block managers of others beside the store: transformers' own, and made-up ones that are right or wrong."""

from typing import Any

import numpy as np
import pytest
import torch
from peer_stubs import install
from vllm_books import VLLM_BOOKS, KVCacheManager

from benchmarks import store_peers as peers
from benchmarks.record import Measure
from benchmarks.store_peers import Ids, StorePeer, store_peers

BLOCK = 4


class Books:
    """A manager that hands out blocks in turn; `skips`: sequences whose tokens it forgets."""

    def __init__(self, lengths: Ids, block: int, num_blocks: int, skips: int = 0) -> None:
        self.block, self.lengths, self.skips, self.used = block, lengths.copy(), skips, 0
        self.tables: list[list[int]] = [[] for _ in lengths]
        self.fill()

    def fill(self) -> None:
        for table, length in zip(self.tables, self.lengths.tolist(), strict=True):
            while len(table) * self.block < length:
                self.used += 1
                table.append(self.used)

    def step(self) -> None:
        self.lengths[self.skips :] += 1
        self.fill()

    def blocks(self) -> list[list[int]]:
        return self.tables

    def slots(self) -> Ids | None:
        last = np.array([table[-1] for table in self.tables])
        return np.asarray(last * self.block + (self.lengths - 1) % self.block)


class Shared(Books):
    def fill(self) -> None:
        super().fill()
        self.tables[1][-1] = self.tables[0][-1]


class Shifted(Books):
    def slots(self) -> Ids | None:
        found = super().slots()
        assert found is not None
        return found + 1


class Slotless(Books):
    def slots(self) -> None:
        return None


class LateSkip(Books):
    """Right while it is warmed up."""

    def step(self) -> None:
        self.skips = int(self.lengths[-1] >= 40)
        super().step()


def figures(monkeypatch: pytest.MonkeyPatch, make: Any, package: str = "numpy") -> list[Measure]:
    monkeypatch.setattr(peers, "STORE_PEERS", (StorePeer("Their", "books", package, make, "a note"),))
    return list(store_peers(6, 33, BLOCK, steps=8, warm_up=2))


@pytest.mark.parametrize("make", [Books, Slotless])
def test_right_books_get_times(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    measures = figures(monkeypatch, make)
    number = np.__version__.removesuffix(".0")
    assert {each.case for each in measures} == {f"decode, 1 group, 6 sequences | Their {number} books"}
    assert [(each.metric, each.unit) for each in measures] == [
        ("min", "us"),
        ("median", "us"),
        ("worst", "us"),
        ("spread", "%"),
        ("note", ""),
    ]
    low, middle, high, _, note = (each.value for each in measures)
    assert isinstance(low, float)
    assert isinstance(middle, float)
    assert isinstance(high, float)
    assert 0 < low <= middle <= high
    assert note == "a note"


def lacks_a_token(lengths: Ids, block: int, num_blocks: int) -> Books:
    return Books(lengths, block, num_blocks, skips=6)


WRONG = [
    pytest.param(Shared, "wrong: 1 blocks are there twice", id="a_block_twice"),
    pytest.param(Shifted, "wrong: 6 of 6 slots are not those of the new tokens", id="slots_of_others"),
    pytest.param(lacks_a_token, "wrong: sequence 2 of 37 tokens has 9 blocks, expected 10", id="no_room"),
    pytest.param(LateSkip, "wrong: sequence 0 of 43 tokens has 10 blocks, expected 11", id="wrong_when_timed"),
]


@pytest.mark.parametrize(("make", "why"), WRONG)
def test_wrong_books_get_no_time(monkeypatch: pytest.MonkeyPatch, make: Any, why: str) -> None:
    (only,) = figures(monkeypatch, make)
    assert (only.metric, only.value) == ("absent", why)


def test_a_missing_package_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = figures(monkeypatch, Books, package="no_such_package")
    assert only.case == "decode, 1 group, 6 sequences | Their books"
    assert (only.metric, only.value) == ("absent", "no_such_package is not installed")


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_another_version_is_a_row(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    install(monkeypatch, {package: {}})
    found = [each for each in store_peers(4, 20, BLOCK, steps=2, warm_up=1) if each.metric == "absent"]
    (row,) = [each for each in found if package in each.case.lower()]
    assert str(row.value).startswith("failed: ModuleNotFoundError: ")


def test_transformers_own_manager_is_right() -> None:
    measures = [each for each in store_peers(8, 33, 16, steps=40, warm_up=4) if "transformers" in each.case]
    assert [each.metric for each in measures] == ["min", "median", "worst", "spread", "note"]


class PagedTokenToKVPoolAllocator:
    """SGLang's, as it is called: pages in ascending order from page 1 on."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: object, need_sort: bool
    ) -> None:
        self.page_size = page_size
        self.free = list(range(size // page_size, 0, -1))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor:
        slots: list[int] = []
        for length in seq_lens_cpu.tolist():
            for position in range(length):
                slots.append(slots[-1] + 1 if position % self.page_size else self.free.pop() * self.page_size)
        assert len(slots) == extend_num_tokens
        return torch.tensor(slots)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        starts = [(length - 1) % self.page_size == 0 for length in seq_lens_cpu.tolist()]
        if sum(starts) > len(self.free):
            return None
        slots = [
            self.free.pop() * self.page_size if new else last + 1
            for new, last in zip(starts, last_loc.tolist(), strict=True)
        ]
        return torch.tensor(slots)


class Exhausted(PagedTokenToKVPoolAllocator):
    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        return None


class Forgetful(KVCacheManager):
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.tables[request_id][:-1],)


def vllm_figures(monkeypatch: pytest.MonkeyPatch, manager: type) -> dict[str, Any]:
    name = "vllm.v1.core.kv_cache_manager"
    install(monkeypatch, {**VLLM_BOOKS, name: {"KVCacheManager": manager}})
    measures = store_peers(6, 33, 16, steps=40, warm_up=4)
    return {each.metric: each.value for each in measures if "vLLM" in each.case}


def test_vllms_manager_with_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(vllm_figures(monkeypatch, KVCacheManager)) == ["min", "median", "worst", "spread", "note"]
    wrong = vllm_figures(monkeypatch, Forgetful)
    assert wrong == {"absent": "wrong: sequence 0 of 37 tokens has 2 blocks, expected 3"}


def sglang_figures(monkeypatch: pytest.MonkeyPatch, allocator: type) -> dict[str, Any]:
    name = "sglang.srt.mem_cache.allocator.paged"
    install(monkeypatch, {name: {"PagedTokenToKVPoolAllocator": allocator}})
    measures = store_peers(6, 33, 16, steps=40, warm_up=4)
    return {each.metric: each.value for each in measures if "SGLang" in each.case}


def test_sglangs_allocator_with_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(sglang_figures(monkeypatch, PagedTokenToKVPoolAllocator)) == [
        "min",
        "median",
        "worst",
        "spread",
        "note",
    ]


def test_a_manager_without_room_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang_figures(monkeypatch, Exhausted) == {"absent": "failed: MemoryError: no room for a token"}
