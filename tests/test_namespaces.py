"""Namespaces and segments: exact keys, and cuts that tell prompts with other items apart."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.namespaces import Item, Namespace, segments

IDENTITIES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4), st.binary(max_size=4), st.integers(-(2**70), 2**70)
)


def text_item(start: int, length: int, identity: str = "cat") -> bytes:
    """The encoding of an item of text identity, by hand."""
    numbers = start.to_bytes(8, "little") + length.to_bytes(8, "little")
    return numbers + b"s" + len(identity).to_bytes(8, "little") + identity.encode()


def test_the_key_is_the_one_written_down() -> None:
    key = Namespace(adapter="né", salt=b"\0", weights=-129).key
    assert key == b"s\x03\0\0\0\0\0\0\0n\xc3\xa9" + b"b\x01\0\0\0\0\0\0\0\0" + b"i\x02\0\0\0\0\0\0\0\x7f\xff"
    assert Namespace().key == b"n\0\0\0\0\0\0\0\0" * 3


def test_o16_an_adapter_is_no_salt() -> None:
    keys = {Namespace(**{name: value}).key for name in ("adapter", "salt", "weights") for value in ("X", b"X", 88)}
    assert len(keys | {Namespace().key}) == 10
    assert Namespace(adapter="X") != Namespace(salt="X")


def test_a_number_a_text_and_bytes_of_the_same_look_differ() -> None:
    spaces = [Namespace(weights=value) for value in (1, "1", b"1", b"\x01", "", b"", 0, None, 256, -1)]
    for one, other in combinations(spaces, 2):
        assert one != other
        assert one.key != other.key
        assert one.text != other.text


@given(st.lists(st.tuples(*[st.none() | IDENTITIES] * 3), min_size=2, max_size=2))
def test_keys_and_texts_are_equal_only_for_equal_names(names: list[tuple]) -> None:
    one, other = (Namespace(*triple) for triple in names)
    assert (one.key == other.key) == (one == other) == (one.text == other.text)
    assert Namespace(*names[0]).key == one.key
    assert hash(Namespace(*names[0])) == hash(one)


def test_the_text_is_stable() -> None:
    assert Namespace(adapter='a "b"\n', weights=3).text == r'adapter=s:"a \"b\"\n" salt=- weights=i:3'
    assert Namespace(salt=b"\x00\xff").text == "adapter=- salt=b:00ff weights=-"


def test_plain_values_come_back() -> None:
    space = Namespace("x", b"\x00\xff", 7, (Item(3, "cat", 2), Item(5, b"dog", 1), Item(9, 4, 4)))
    assert Namespace.from_dict(space.to_dict()) == space
    with pytest.raises(ValueError, match="expected the fields that to_dict wrote, got none named 'salt'"):
        Namespace.from_dict({"adapter": None})


@pytest.mark.parametrize("value", [True, 1.0, ("x",), bytearray(b"x"), np.int64(1)], ids=repr)
@pytest.mark.parametrize("name", ["adapter", "salt", "weights"])
def test_names_of_another_type_are_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"Namespace: {name}: expected str, bytes, int or None, got "):
        Namespace(**{name: value})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((-1, "cat", 2), ValueError, r"Item: start: expected an integer in \[0, .*\], got -1"),
        ((True, "cat", 2), TypeError, "Item: start: expected an integer, got True"),
        ((0, "cat", 0), ValueError, r"Item: length: expected an integer in \[1, .*\], got 0"),
        ((0, "cat", 2.0), TypeError, "Item: length: expected an integer, got 2.0"),
        ((0, None, 2), TypeError, "Item: identity: expected str, bytes or int, got None"),
        ((0, False, 2), TypeError, "Item: identity: expected str, bytes, int or None, got False"),
        ((0, "\ud800", 2), ValueError, "Item: identity: expected Unicode text, got "),
    ],
)
def test_bad_items_are_refused(fields: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Item(*fields)


def test_items_are_in_order_and_apart() -> None:
    assert Namespace(items=(Item(0, 1, 4), Item(4, 1, 4))).items[1].end == 8
    for items in [(Item(0, 1, 5), Item(4, 1, 4)), (Item(9, 1, 1), Item(4, 1, 1)), (Item(4, 1, 1), Item(4, 2, 1))]:
        with pytest.raises(ValueError, match="Namespace: items: expected each to start behind the one before it"):
            Namespace(items=items)
    for items in ([Item(0, 1, 5)], (5,), None):
        with pytest.raises(TypeError, match="Namespace: items: expected a tuple of Item"):
            Namespace(items=items)


def test_positions_may_come_from_numpy() -> None:
    assert Item(np.int64(3), "cat", np.int32(2)) == Item(3, "cat", 2)


def test_text_is_one_run() -> None:
    assert segments((), 35, 16) == [(0, 2, b"")]
    assert segments((), 15, 16) == []
    assert segments((Item(3, "cat", 5),), 15, 16) == []


def test_a_run_begins_where_an_item_starts() -> None:
    items = (Item(9, "cat", 9), Item(18, "dog", 1), Item(19, "cat", 1))
    assert segments(items, 31, 4) == [
        (0, 2, b""),
        (2, 4, text_item(1, 9)),
        (4, 7, text_item(2, 1, "dog") + text_item(3, 1)),
    ]


def test_an_item_in_unit_0_keys_the_first_run() -> None:
    assert segments((Item(0, "cat", 2),), 8, 4) == [(0, 2, text_item(0, 2))]
    assert segments((Item(3, "cat", 2),), 8, 4) == [(0, 2, text_item(3, 2))]


def test_an_item_beyond_the_whole_units_begins_no_run() -> None:
    assert segments((Item(8, "cat", 2),), 11, 4) == [(0, 2, b"")]
    assert segments((Item(8, "cat", 9),), 12, 4) == [(0, 2, b""), (2, 3, text_item(0, 9))]


def test_o17_whole_identities_enter_the_key() -> None:
    """Two images whose ids agree in the last four hex digits."""
    one, other = (segments((Item(2, identity, 9),), 16, 4) for identity in ("0123abcd", "9876abcd"))
    assert one != other


def cuts(items: tuple[Item, ...], num_tokens: int, unit: int) -> list[tuple[bool, bytes]]:
    """For each whole unit whether a run begins there, and with what key."""
    begins = {begin: key for begin, _, key in segments(items, num_tokens, unit)}
    return [(at in begins, begins.get(at, b"")) for at in range(num_tokens // unit)]


@st.composite
def item_rows(draw: st.DrawFn) -> tuple[Item, ...]:
    items, start = [], 0
    for gap in draw(st.lists(st.integers(0, 6), max_size=4)):
        items.append(Item(start + gap, draw(st.sampled_from(["a", "b", b"a", 97])), draw(st.integers(1, 6))))
        start = items[-1].end
    return tuple(items)


@given(item_rows(), item_rows(), st.integers(0, 40), st.integers(1, 5))
def test_other_items_are_told_apart_before_they_are_used(one, other, num_tokens: int, unit: int) -> None:
    """At or before the first whole unit that holds a placeholder of an item only one of them has."""
    cut_one, cut_other = cuts(one, num_tokens, unit), cuts(other, num_tokens, unit)
    touched = [item.start // unit for item in set(one) ^ set(other) if item.start // unit < num_tokens // unit]
    differ = [at for at, pair in enumerate(zip(cut_one, cut_other, strict=True)) if pair[0] != pair[1]]
    assert differ[:1] == sorted(touched)[:1]


@given(item_rows(), st.integers(0, 40), st.integers(1, 5))
def test_runs_cover_the_whole_units(items: tuple[Item, ...], num_tokens: int, unit: int) -> None:
    runs = segments(items, num_tokens, unit)
    assert [at for begin, end, _ in runs for at in range(begin, end)] == list(range(num_tokens // unit))
    assert all(key for _, _, key in runs[1:])
