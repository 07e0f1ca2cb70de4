"""What the model of a store is made of: choices, open sequences, batches, and the numbers that rows hold."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvstore import Batch

MODULUS = {torch.float32: 2**22, torch.float16: 2**11}  # what the dtype holds exactly
ANYTHING = np.nan  # of a row that nobody reads


class Choices:
    """What a rule decides, from bytes: 0 once they are used up, so that fewer and smaller bytes are simpler."""

    def __init__(self, source: bytes) -> None:
        self._source = iter(source)

    def number(self, low: int, high: int) -> int:
        """low ... high, at most 256 numbers."""
        return low + next(self._source, 0) % (high - low + 1)

    def one(self, items: Sequence[Any]) -> Any:
        return items[self.number(0, len(items) - 1)]

    def some(self, items: Sequence[Any], most: int) -> list[Any]:
        """1 ... most different ones."""
        left = list(items)
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(self.number(1, min(most, len(left))))]


@dataclass
class Running:
    """An open sequence: `tokens` have reserved rows, `marks[i]` stands for the tokens up to and with number i."""

    namespace: int
    prompt: list[int]
    tokens: list[int]
    marks: list[int]
    cached: int
    replay_end: int  # up to here rows existed when it was opened, and only rings are written
    is_findable: bool = True
    is_shared: bool = False  # its open block may have another holder
    is_suspended: bool = False
    highest: int = 0  # of the lengths it had
    changes: int = 0  # grows when tokens are taken back or replaced

    @property
    def length(self) -> int:
        return len(self.tokens)

    def next_tokens(self, count: int, salt: int) -> list[int]:
        start = self.length
        given = self.prompt[start : start + count]
        return given + [(start + salt) % 2 for _ in range(count - len(given))]


@dataclass
class Part:
    """One sequence's share of a batch."""

    seq_id: int
    sequence: Running
    start: int
    tokens: list[int]
    marks: list[int]  # of the whole sequence up to the end of the batch
    changes: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Flight:
    """A batch that is not finished."""

    batch: Batch
    parts: list[Part]
    is_written: bool = False
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [part.seq_id for part in self.parts]


def marks_of(tokens: Sequence[int], before: list[int], namespace: int) -> list[int]:
    """One number for each token, which tells it with all before it."""
    mark = before[-1] if before else zlib.crc32(b"ab"[namespace : namespace + 1])
    marks = []
    for token in tokens:
        mark = zlib.crc32(bytes((token,)), mark)
        marks.append(mark)
    return marks


def values_of(marks: Sequence[int], layer: int, dtype: torch.dtype) -> np.ndarray:
    """What rows with these marks hold in a layer."""
    return ((np.array(marks, np.int64) + 7919 * layer) % MODULUS[dtype]).astype(np.float64)
