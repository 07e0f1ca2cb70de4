"""Events: records, their plain form in vLLM's schema, and a log that says when it lost some."""

import json

import numpy as np
import pytest

from kvstore.digests import content_digests
from kvstore.events import BlocksRemoved, BlocksStored, EventLog, EventsLost, PrefixesCleared, event_from_dict
from kvstore.namespaces import Item, Namespace

TOKENS = np.arange(8, dtype=np.int32)
DIGESTS = tuple(row.tobytes() for row in content_digests(TOKENS, 4))
SPACE = Namespace("ada", b"\xff", 3, (Item(2, "cat", 3),))

EVENTS = [
    BlocksStored("full", DIGESTS, None, TOKENS, 4, SPACE),
    BlocksStored("window", DIGESTS[1:], DIGESTS[0], TOKENS[4:], 4, medium="host"),
    BlocksRemoved("full", DIGESTS),
    PrefixesCleared(SPACE),
    PrefixesCleared(None),
    EventsLost(7),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.tag)
def test_plain_values_come_back_through_json(event) -> None:
    back = event_from_dict(json.loads(json.dumps(event.to_dict())))
    assert back == event
    assert type(back) is type(event)
    if isinstance(event, BlocksStored):
        assert back.token_ids.dtype == np.int32
        assert back.token_ids.tolist() == event.token_ids.tolist()


def test_the_fields_of_vllm_are_all_there() -> None:
    stored = EVENTS[0].to_dict()
    assert stored["type"] == "BlockStored"
    assert stored["block_hashes"] == [digest.hex() for digest in DIGESTS]
    assert stored["parent_block_hash"] is None
    assert stored["token_ids"] == list(range(8))
    assert (stored["block_size"], stored["lora_id"], stored["lora_name"]) == (4, None, "ada")
    assert (stored["medium"], stored["group"]) == ("device", "full")
    assert BlocksStored("", (), None, [], 4, Namespace(5)).to_dict()["lora_id"] == 5
    removed = EVENTS[2].to_dict()
    assert removed == {"type": "BlockRemoved", "block_hashes": stored["block_hashes"], "medium": "device"} | {
        "group": "full"
    }
    assert EVENTS[4].to_dict() == {"type": "AllBlocksCleared", "namespace": None}


def test_a_record_does_not_change_with_the_callers_array() -> None:
    tokens = TOKENS.copy()
    event = BlocksStored("full", list(DIGESTS), None, tokens, 4)
    tokens[:] = 0
    assert event.token_ids.tolist() == list(range(8))
    assert event == BlocksStored("full", DIGESTS, None, TOKENS, 4)
    assert hash(event) == hash(BlocksStored("full", DIGESTS, None, TOKENS, 4))
    with pytest.raises(ValueError, match="read-only"):
        event.token_ids[0] = 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("full", DIGESTS, None, TOKENS[1:], 4), ValueError, r"expected shape \[8\] for 2 blocks of 4, got \[7\]"),
        (("full", (b"x",), None, TOKENS[:4], 4), ValueError, "BlockStored: digests: expected 32 bytes, got 1"),
        (("full", ("x",), None, TOKENS[:4], 4), TypeError, "BlockStored: digests: expected 32 bytes, got 'x'"),
        (("full", DIGESTS, b"x", TOKENS, 4), ValueError, "BlockStored: parent: expected 32 bytes, got 1"),
        (("full", DIGESTS, None, TOKENS, 0), ValueError, "BlockStored: block_size: expected an integer >= 1, got 0"),
        (("full", DIGESTS, None, TOKENS * 1.0, 4), TypeError, "token_ids: expected integers, got float64"),
        ((7, DIGESTS, None, TOKENS, 4), TypeError, "BlockStored: group: expected a str, got 7"),
        (("full", DIGESTS, None, TOKENS, 4, Namespace(), None), TypeError, "medium: expected a str, got None"),
    ],
)
def test_bad_records_are_refused(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlocksStored(*arguments)


def test_values_that_are_no_event() -> None:
    with pytest.raises(ValueError, match=r"event: type: expected one of BlockStored, BlockRemoved, .* got 'Stored'"):
        event_from_dict({"type": "Stored"})
    with pytest.raises(ValueError, match="event: expected the fields that to_dict wrote, got none named 'type'"):
        event_from_dict({})
    with pytest.raises(ValueError, match="got none named 'medium'"):
        event_from_dict({"type": "BlockRemoved", "block_hashes": [], "group": "full"})
    with pytest.raises(ValueError, match="EventsLost: count: expected an integer >= 1, got 0"):
        event_from_dict({"type": "EventsLost", "count": 0})


def test_take_empties_the_log() -> None:
    log = EventLog(10)
    assert log.take() == []
    for event in EVENTS[:3]:
        log.append(event)
    assert len(log) == 3
    assert log.take() == EVENTS[:3]
    assert log.take() == []


def test_an_overfull_log_drops_the_oldest_and_says_so() -> None:
    log = EventLog(2)
    for event in EVENTS[:5]:
        log.append(event)
    assert log.take() == [EventsLost(3), *EVENTS[3:5]]
    log.append(EVENTS[0])
    assert log.take() == EVENTS[:1]


def test_a_log_holds_an_event_at_least() -> None:
    with pytest.raises(ValueError, match="max_events: expected an integer >= 1, got 0"):
        EventLog(0)
