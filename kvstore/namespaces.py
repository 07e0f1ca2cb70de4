"""Namespace: what besides its tokens tells prompts apart, and how the items of a prompt cut it into runs.

All encodings here are exact: typed, with lengths in front, nothing hashed, nothing cut short, equal in every process.

    identity := tag (1 byte) | length of payload (uint64) | payload
                "n" None, "s" UTF-8, "b" bytes, "i" two's complement in bit_length // 8 + 1 bytes
    key      := identity of adapter | of salt | of weights
    item     := offset (uint64) | length (uint64) | identity

Numbers are little-endian. No encoding is the beginning of another one of its kind, so a row of them is exact as well.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore_kernels.checks import expect_int

MAX_POSITION = 2**63 - 1

Identity = str | bytes | int

NAMES = ("adapter", "salt", "weights")


@dataclass(frozen=True, slots=True)
class Item:
    """An image, or whatever else replaces tokens by embeddings: tokens [start, start + length) are its placeholders.

    Attributes:
        start: position of the first placeholder.
        identity: a name of the content, whole: items of equal identity and length have equal embeddings.
        length: placeholders, in tokens.

    Raises: TypeError for an identity that is no str, bytes or int, or a position that is no integer; ValueError for
    start < 0, length < 1, or text that is not Unicode.
    """

    start: int
    identity: Identity
    length: int
    encoded: bytes = field(init=False, repr=False, compare=False)  # length and identity, as in the module's docstring

    def __post_init__(self) -> None:
        for name, minimum in (("start", 0), ("length", 1)):
            value: object = getattr(self, name)
            number = int(value) if isinstance(value, np.integer) else value
            object.__setattr__(self, name, expect_int(f"Item: {name}", number, minimum, MAX_POSITION))
        if self.identity is None:
            raise TypeError("Item: identity: expected str, bytes or int, got None")
        identity = encode_identity("Item: identity", self.identity)
        object.__setattr__(self, "encoded", struct.pack("<Q", self.length) + identity)

    @property
    def end(self) -> int:
        """The token behind the last placeholder."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose cache a prompt may share: only that of prompts with the same adapter, salt, weights, and equal items.

    Names keep apart what has the same tokens but other rows. A str, an int and bytes are never equal, and None is a
    name of its own.

    Attributes:
        adapter: name of a LoRA or the like.
        salt: name of a tenant, who shares nothing with others.
        weights: name of a version of the model.
        items: what stands in place of tokens in this one prompt, in order.

    Raises: TypeError naming the field for another type, ValueError for items out of order or overlapping.
    """

    adapter: Identity | None = None
    salt: Identity | None = None
    weights: Identity | None = None
    items: tuple[Item, ...] = ()
    key: bytes = field(init=False, repr=False, compare=False)
    """Exact encoding of adapter, salt and weights, without the items."""

    def __post_init__(self) -> None:
        key = b"".join(encode_identity(f"Namespace: {name}", getattr(self, name)) for name in NAMES)
        object.__setattr__(self, "key", key)
        if not isinstance(self.items, tuple) or not all(isinstance(item, Item) for item in self.items):
            raise TypeError(f"Namespace: items: expected a tuple of Item, got {self.items!r}")
        for before, after in zip(self.items, self.items[1:], strict=False):
            if after.start < before.end:
                raise ValueError(
                    f"Namespace: items: expected each to start behind the one before it, "
                    f"got a start at token {after.start} after an item of tokens [{before.start}, {before.end})"
                )

    @property
    def text(self) -> str:
        """The key for people and logs, as exact as the key: `adapter=s:"tuned" salt=- weights=i:3`, bytes in hex."""
        return " ".join(f"{name}={_text(getattr(self, name))}" for name in NAMES)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, `from_dict` reads them back; bytes are {"hex": ...}."""
        items = [[item.start, _plain(item.identity), item.length] for item in self.items]
        return {name: _plain(getattr(self, name)) for name in NAMES} | {"items": items}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Namespace":
        """The namespace that `to_dict` wrote. Raises: ValueError or TypeError when the values are not a namespace's."""
        try:
            names = {name: _identity(values[name]) for name in NAMES}
            items = tuple(Item(start, _identity(name), length) for start, name, length in values["items"])
        except KeyError as error:
            raise ValueError(f"Namespace: expected the fields that to_dict wrote, got none named {error}") from None
        return cls(**names, items=items)


def segments(items: Sequence[Item], num_tokens: int, unit: int) -> list[tuple[int, int, bytes]]:
    """Cuts the whole units of a prompt into the runs that a radix tree keys.

    A run begins at unit 0 and at every unit in which an item starts. Its key is b"" without an item in its first
    unit, else the encodings of those that start there, offsets counted from the run's first token. Units deeper in an
    item need no key: the way to them leads through the unit where it starts.

    Returns: (first unit, end unit, key) of each run, without gaps from 0 to `num_tokens // unit`; empty for no unit.
    """
    num_units = num_tokens // unit
    if not items:
        return [(0, num_units, b"")] if num_units else []
    runs: list[tuple[int, int, bytes]] = []
    begin, key = 0, b""
    for item in items:
        at = item.start // unit
        if at >= num_units:
            break
        if at != begin:
            runs.append((begin, at, key))
            begin, key = at, b""
        key += struct.pack("<Q", item.start - at * unit) + item.encoded
    if begin < num_units:
        runs.append((begin, num_units, key))
    return runs


def encode_identity(name: str, value: object) -> bytes:
    """The bytes of a str, bytes, int or None, as in the module's docstring.

    Raises: TypeError for another type (bool is one), ValueError for text that is not Unicode (a lone surrogate).
    """
    if value is None:
        tag, payload = b"n", b""
    elif isinstance(value, str):
        try:
            tag, payload = b"s", value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name}: expected Unicode text, got {value!r}") from None
    elif isinstance(value, bytes):
        tag, payload = b"b", bytes(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        tag, payload = b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    else:
        raise TypeError(f"{name}: expected str, bytes, int or None, got {value!r} of type {type(value).__name__}")
    return tag + struct.pack("<Q", len(payload)) + payload


def _text(value: Identity | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return f"s:{json.dumps(value)}"
    return f"b:{value.hex()}" if isinstance(value, bytes) else f"i:{value}"


def _plain(value: Identity | None) -> object:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _identity(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, Mapping) else value
