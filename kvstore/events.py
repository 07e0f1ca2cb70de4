"""Events: what entered and left the cache, for routers and tiers.

`to_dict` writes the field names and type tags of vLLM's KV events, digests as hex, and adds `group` and `namespace`;
readers of that schema skip what they do not know. To them a cleared namespace is a cleared cache, which is safe.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.digests import expect_digest, int32_tokens
from kvstore.namespaces import Namespace
from kvstore_kernels.checks import expect_int

DEVICE = "device"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks of one group, in a row, that can be hit from now on.

    `digests` names them, `parent` the block before them, None at the start of a prompt. `token_ids` are all theirs,
    int32 [len(digests) * block_size]; they take no part in `==`, because the digests follow from them.

    Raises: TypeError or ValueError for a name that is no text, a digest that is not 32 bytes, tokens that do not fit
    into int32, or another number of them.
    """

    group: str
    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids: npt.NDArray[np.int32] = field(compare=False)
    block_size: int
    namespace: Namespace = field(default_factory=Namespace)
    medium: str = DEVICE
    tag: ClassVar[str] = "BlockStored"

    def __post_init__(self) -> None:
        _check_names(self.tag, self.group, self.medium)
        object.__setattr__(self, "digests", _digests(self.tag, self.digests))
        if self.parent is not None:
            expect_digest(f"{self.tag}: parent", self.parent)
        expect_int(f"{self.tag}: block_size", self.block_size, 1)
        tokens = int32_tokens(self.token_ids).copy()
        if tokens.shape != (len(self.digests) * self.block_size,):
            raise ValueError(
                f"{self.tag}: token_ids: expected shape [{len(self.digests) * self.block_size}] for "
                f"{len(self.digests)} blocks of {self.block_size}, got {list(tokens.shape)}"
            )
        tokens.setflags(write=False)
        object.__setattr__(self, "token_ids", tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        adapter = self.namespace.adapter
        return {
            "type": self.tag,
            "block_hashes": [digest.hex() for digest in self.digests],
            "parent_block_hash": None if self.parent is None else self.parent.hex(),
            "token_ids": self.token_ids.tolist(),
            "block_size": self.block_size,
            "lora_id": adapter if isinstance(adapter, int) else None,
            "medium": self.medium,
            "lora_name": adapter if isinstance(adapter, str) else None,
            "group": self.group,
            "namespace": self.namespace.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks of one group that can no longer be hit.

    Raises: TypeError or ValueError for a name that is no text, or a digest that is not 32 bytes.
    """

    group: str
    digests: tuple[bytes, ...]
    medium: str = DEVICE
    tag: ClassVar[str] = "BlockRemoved"

    def __post_init__(self) -> None:
        _check_names(self.tag, self.group, self.medium)
        object.__setattr__(self, "digests", _digests(self.tag, self.digests))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        hashes = [digest.hex() for digest in self.digests]
        return {"type": self.tag, "block_hashes": hashes, "medium": self.medium, "group": self.group}


@dataclass(frozen=True, slots=True)
class PrefixesCleared:
    """Nothing under the namespace's key can be hit any more; None is every namespace."""

    namespace: Namespace | None = None
    tag: ClassVar[str] = "AllBlocksCleared"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"type": self.tag, "namespace": None if self.namespace is None else self.namespace.to_dict()}


@dataclass(frozen=True, slots=True)
class EventsLost:
    """`count` events, older than the one that follows, were dropped: what the reader knows is no longer all true."""

    count: int
    tag: ClassVar[str] = "EventsLost"

    def __post_init__(self) -> None:
        expect_int(f"{self.tag}: count", self.count, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"type": self.tag, "count": self.count}


Event = BlocksStored | BlocksRemoved | PrefixesCleared | EventsLost


def event_from_dict(values: Mapping[str, Any]) -> Event:
    """The event whose `to_dict` gave `values`. Raises: ValueError, TypeError when they are no event's."""
    try:
        match values["type"]:
            case BlocksStored.tag:
                parent = values["parent_block_hash"]
                return BlocksStored(
                    group=values["group"],
                    digests=tuple(map(bytes.fromhex, values["block_hashes"])),
                    parent=None if parent is None else bytes.fromhex(parent),
                    token_ids=values["token_ids"],
                    block_size=values["block_size"],
                    namespace=Namespace.from_dict(values["namespace"]),
                    medium=values["medium"],
                )
            case BlocksRemoved.tag:
                return BlocksRemoved(
                    values["group"], tuple(map(bytes.fromhex, values["block_hashes"])), values["medium"]
                )
            case PrefixesCleared.tag:
                namespace = values["namespace"]
                return PrefixesCleared(None if namespace is None else Namespace.from_dict(namespace))
            case EventsLost.tag:
                return EventsLost(values["count"])
            case other:
                raise ValueError(f"event: type: expected one of {', '.join(TAGS)}, got {other!r}")
    except KeyError as error:
        raise ValueError(f"event: expected the fields that to_dict wrote, got none named {error}") from None


TAGS = (BlocksStored.tag, BlocksRemoved.tag, PrefixesCleared.tag, EventsLost.tag)


class EventLog:
    """The last `max_events` events that nobody has taken yet.

    Raises: TypeError, ValueError for a bound below 1.
    """

    def __init__(self, max_events: int) -> None:
        self.max_events = expect_int("max_events", max_events, 1)
        self._events: deque[Event] = deque()
        self._num_lost = 0

    def __len__(self) -> int:
        return len(self._events)

    def append(self, event: Event) -> None:
        """Adds an event; when there are too many, the oldest is dropped and counted."""
        self._events.append(event)
        if len(self._events) > self.max_events:
            self._events.popleft()
            self._num_lost += 1

    def take(self) -> list[Event]:
        """All events, oldest first, and empties the log. Begins with `EventsLost` when some were dropped."""
        lost: list[Event] = [EventsLost(self._num_lost)] if self._num_lost else []
        taken = [*lost, *self._events]
        self._events.clear()
        self._num_lost = 0
        return taken


def _digests(tag: str, digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(expect_digest(f"{tag}: digests", digest) for digest in digests)


def _check_names(tag: str, group: object, medium: object) -> None:
    for name, value in (("group", group), ("medium", medium)):
        if not isinstance(value, str):
            raise TypeError(f"{tag}: {name}: expected a str, got {value!r}")
