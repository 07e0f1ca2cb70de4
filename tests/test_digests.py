"""Content digests: the bytes written down, in every process, and a change for every change of what a block holds."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvstore.digests import content_digests, extend_digests, root_digest
from kvstore.namespaces import Item, Namespace

TOKENS = np.arange(100, 116, dtype=np.int32)


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def tokens_as_bytes(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def by_hand(root: bytes, *blocks: bytes) -> list[bytes]:
    found = [root]
    for block in blocks:
        found.append(sha256(found[-1] + block).digest())
    return found[1:]


def rows(digests: np.ndarray) -> list[bytes]:
    assert digests.dtype == np.uint8
    assert digests.shape[1:] == (32,)
    return [row.tobytes() for row in digests]


def test_the_bytes_are_those_written_down() -> None:
    key = b"s" + number(3) + b"ada" + b"n" + number(0) + b"i" + number(1) + b"\x07"
    root = sha256(b"paged-kvstore/1" + number(4) + b"full" + number(2) + key).digest()
    digests = content_digests([1, -2, 2**31 - 1, 4, 5], 2, Namespace("ada", weights=7), "full")
    assert rows(digests) == by_hand(root, tokens_as_bytes(1, -2), tokens_as_bytes(2**31 - 1, 4))
    assert root_digest(2, Namespace("ada", weights=7), "full") == root


def test_items_enter_the_blocks_they_touch() -> None:
    """Blocks of four: tokens 3 to 9 are a cat, 9 and 10 a dog; the last block holds neither."""
    space = Namespace(items=(Item(3, "cat", 6), Item(9, 5, 2), Item(60, "far", 1)))
    cat, dog = number(6) + b"s" + number(3) + b"cat", number(2) + b"i" + number(1) + b"\x05"
    extras = [
        number(3) + number(0) + cat,
        number(0) + number(1) + cat,
        number(0) + number(5) + cat + number(1) + number(0) + dog,
        b"",
    ]
    parts = [extra + tokens_as_bytes(*TOKENS[4 * i : 4 * i + 4].tolist()) for i, extra in enumerate(extras)]
    assert rows(content_digests(TOKENS, 4, space)) == by_hand(root_digest(4), *parts)


SCRIPT = """
from kvstore.digests import content_digests
from kvstore.namespaces import Item, Namespace
space = Namespace(None, "tenant", 3, (Item(20, "cat", 30),))
for namespace in (None, space):
    print(content_digests(range(256), 16, namespace, "full").tobytes().hex())
"""


def test_o18_equal_bytes_in_every_process() -> None:
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "kernels"), *sys.path])
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].split()[0] == content_digests(range(256), 16, None, "full").tobytes().hex()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((TOKENS, 4, None, "b"), id="group"),
        pytest.param((TOKENS, 4, Namespace(adapter="a"), ""), id="adapter"),
        pytest.param((TOKENS, 4, Namespace(salt="a"), ""), id="salt"),
        pytest.param((TOKENS, 8, None, ""), id="block size"),
        pytest.param((TOKENS[::-1], 4, None, ""), id="order"),
        pytest.param((TOKENS, 4, Namespace(items=(Item(0, "a", 1),)), ""), id="item"),
    ],
)
def test_what_differs_has_other_digests(other: tuple) -> None:
    assert not set(rows(content_digests(TOKENS, 4))) & set(rows(content_digests(*other)))


def test_a_name_cannot_run_into_the_next_one() -> None:
    """A group and a block size, a key and the tokens: lengths stand in front."""
    assert root_digest(4, group="a") != root_digest(4, group="a" + "\4" + "\0" * 7)
    tail = content_digests(TOKENS[4:], 4, group="a")
    assert rows(content_digests(TOKENS, 4, group="a"))[1:] != rows(tail)


def test_o17_images_whose_ids_share_a_suffix() -> None:
    one, other = (
        rows(content_digests(TOKENS, 4, Namespace(items=(Item(5, name, 3),)))) for name in ("0123abcd", "9876abcd")
    )
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_an_item_moved_by_a_token_is_another_prompt() -> None:
    """The same image, whose placeholders fill blocks 1 and 2 either way."""
    one, other = (rows(content_digests(TOKENS, 4, Namespace(items=(Item(at, "x", 8),)))) for at in (3, 4))
    assert not set(one) & set(other)
    inside = [Namespace(items=(Item(4, "x", 8),)), Namespace(items=(Item(4, "x", 4), Item(8, "x", 4)))]
    one, other = (rows(content_digests(TOKENS, 4, space)) for space in inside)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_going_on_from_a_parent() -> None:
    whole = content_digests(TOKENS, 4)
    assert rows(extend_digests(root_digest(4), TOKENS, 4)) == rows(whole)
    assert rows(extend_digests(whole[1].tobytes(), TOKENS[8:15], 4)) == rows(whole)[2:3]
    items = Namespace(items=(Item(2, "x", 4),))
    with_item = content_digests(TOKENS, 4, items)
    assert rows(extend_digests(with_item[1].tobytes(), TOKENS[8:], 4)) == rows(with_item)[2:]


@pytest.mark.parametrize("tokens", [[], np.empty(0, np.int32), [7, 8, 9]], ids=["no list", "no array", "three"])
def test_no_whole_block(tokens: object) -> None:
    assert content_digests(tokens, 4).shape == (0, 32)
    assert content_digests(tokens, 4, Namespace(items=(Item(0, "x", 9),))).shape == (0, 32)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS.tolist(),
        TOKENS.astype(np.int64),
        TOKENS.astype(np.uint16),
        TOKENS.astype(">i4"),
        np.repeat(TOKENS, 2)[::2],
    ],
    ids=["list", "int64", "uint16", "big-endian", "strided"],
)
def test_tokens_of_any_integer_type(tokens: object) -> None:
    assert rows(content_digests(tokens, 4)) == rows(content_digests(TOKENS, 4))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([2**31], 4), ValueError, r"token_ids: expected int32, got values in \[2147483648, 2147483648\]"),
        (([-(2**31) - 1, 5], 4), ValueError, r"token_ids: expected int32, got values in \[-2147483649, 5\]"),
        (([1.0], 4), TypeError, "token_ids: expected integers, got float64"),
        (([True], 4), TypeError, "token_ids: expected integers, got bool"),
        (([[1]], 4), ValueError, r"token_ids: expected a flat array, got shape \[1, 1\]"),
        (([1], 0), ValueError, r"block_size: expected an integer in \[1, "),
        (([1], True), TypeError, "block_size: expected an integer, got True"),
    ],
)
def test_bad_tokens_and_block_sizes(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        content_digests(*arguments)
    with pytest.raises(error, match=message):
        extend_digests(root_digest(4), *arguments)


def test_bad_parents() -> None:
    with pytest.raises(ValueError, match="parent: expected 32 bytes, got 31"):
        extend_digests(b"x" * 31, TOKENS, 4)
    with pytest.raises(TypeError, match="parent: expected 32 bytes, got 'x' of type str"):
        extend_digests("x", TOKENS, 4)
