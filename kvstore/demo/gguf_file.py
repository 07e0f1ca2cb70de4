"""GGUF: metadata and tensors of one file, read in one pass.

The `gguf` package takes the blocks apart; its own reader, which makes an array of every string, needs seconds for a
vocabulary where this one needs a fraction of one.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's name, shape (outermost first), ggml type and place in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    start_bytes: int


class GGUFFile:
    """The metadata of a GGUF file, and its tensors as float32 arrays.

    Raises: ValueError when the file is no GGUF file of a known version, or cut short.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        try:
            magic, version, num_tensors, num_fields = self._read("4sIQQ")
            if magic != MAGIC or version not in VERSIONS:
                raise ValueError(f"{path}: expected a GGUF file of version 2 or 3, got {magic!r}, version {version}")
            self.metadata: dict[str, Any] = dict(self._field() for _ in range(num_fields))
            tensors = [self._tensor() for _ in range(num_tensors)]
        except struct.error as error:
            raise ValueError(f"{path}: expected a whole GGUF file, got one that ends early ({error})") from None
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-self._position // alignment) * alignment
        self.tensors = [GGUFTensor(name, shape, kind, base + offset) for name, shape, kind, offset in tensors]

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Name and values of every tensor, one at a time."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        for tensor in self.tensors:
            kind = GGMLQuantizationType(tensor.ggml_type)
            values_per_block, block_bytes = GGML_QUANT_SIZES[kind]
            *outer, inner = tensor.shape
            row_bytes = inner // values_per_block * block_bytes
            num_bytes = int(np.prod(outer, dtype=np.int64)) * row_bytes
            raw = np.frombuffer(self._data, np.uint8, num_bytes, tensor.start_bytes).reshape(*outer, row_bytes)
            yield tensor.name, dequantize(raw, kind).reshape(tensor.shape)

    def _read(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self._position)
        self._position += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._read("Q")
        (text,) = self._read(f"{length}s")
        return str(text, "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._read("IQ")
            if item in SCALARS:
                return list(self._read(f"{count}{SCALARS[item]}"))
            return [self._value(item) for _ in range(count)]
        return self._read(SCALARS[kind])[0]

    def _field(self) -> tuple[str, Any]:
        name = self._string()
        return name, self._value(self._read("I")[0])

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._read("I")
        shape = self._read(f"{num_dims}Q")[::-1]
        return name, shape, *self._read("IQ")
