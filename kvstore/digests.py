"""Content digests: 32 bytes that name a block by all that went into its rows, for tiers, routers and other stores.

    root     = sha256("paged-kvstore/1" | length of group (uint64) | group (UTF-8) | block_size (uint64) | key)
    digest_i = sha256(digest_(i-1) | extras_i | tokens of block i (int32 each)),  digest_(-1) = root
    extras_i = for each item with a placeholder in block i, in order:
               first placeholder's place in the block (uint64) | its place in the item (uint64) | length | identity

Numbers are little-endian. `key`, and an item's length and identity, are encoded as `kvstore.namespaces` says. Nothing
depends on the process, the host or the Python version. Tokens have a fixed width and stand last, so that no extras can
be taken for tokens.
"""

import struct
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvstore.namespaces import Item, Namespace
from kvstore_kernels.checks import expect_int

DIGEST_BYTES = 32

FORMAT_NAME = b"paged-kvstore/1"

MAX_BLOCK_SIZE = 2**31 - 1

Digests = npt.NDArray[np.uint8]


def root_digest(block_size: int, namespace: Namespace | None = None, group: str = "") -> bytes:
    """The parent of a prompt's first block. Raises: TypeError, ValueError for a block size that is none."""
    expect_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
    name = group.encode()
    key = (namespace or Namespace()).key
    return sha256(FORMAT_NAME + struct.pack("<Q", len(name)) + name + struct.pack("<Q", block_size) + key).digest()


def content_digests(
    token_ids: npt.ArrayLike, block_size: int, namespace: Namespace | None = None, group: str = ""
) -> Digests:
    """The digests of the whole blocks of a prompt.

    Args:
        token_ids: flat integers that fit into int32, from the prompt's first token on.
        namespace: adapter, salt, weights and the prompt's items; None as `Namespace()`.

    Returns: uint8 [len(token_ids) // block_size, 32].

    Raises: TypeError for tokens that are no integers, ValueError for those of another shape or range.
    """
    root = root_digest(block_size, namespace, group)
    tokens = int32_tokens(token_ids)
    if namespace is None or not namespace.items:
        return _chain(root, tokens, block_size)
    extras = _extras(namespace.items, block_size, len(tokens) // block_size)
    return _chain_with(root, tokens, block_size, extras)


def extend_digests(parent: bytes, token_ids: npt.ArrayLike, block_size: int) -> Digests:
    """The digests of the whole blocks behind the block named `parent`, none of which holds part of an item.

    `content_digests` in two calls, for tokens that come later: `parent` is the last digest so far, or `root_digest`.

    Returns: uint8 [len(token_ids) // block_size, 32].

    Raises: as `content_digests`; and TypeError or ValueError for a parent that is not 32 bytes.
    """
    expect_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
    return _chain(expect_digest("parent", parent), int32_tokens(token_ids), block_size)


def expect_digest(name: str, value: object) -> bytes:
    """Returns `value` when it is 32 bytes. Raises: TypeError for another type, ValueError for another length."""
    if not isinstance(value, bytes):
        raise TypeError(f"{name}: expected {DIGEST_BYTES} bytes, got {value!r} of type {type(value).__name__}")
    if len(value) != DIGEST_BYTES:
        raise ValueError(f"{name}: expected {DIGEST_BYTES} bytes, got {len(value)}")
    return value


def _chain(digest: bytes, tokens: npt.NDArray[np.int32], block_size: int) -> Digests:
    """digest_i of each block, without extras."""
    step = 4 * block_size
    view = tokens.view(np.uint8).data
    found = []
    for at in range(0, len(tokens) // block_size * step, step):
        digest = sha256(digest + view[at : at + step]).digest()
        found.append(digest)
    return _rows(found)


def _chain_with(digest: bytes, tokens: npt.NDArray[np.int32], block_size: int, extras: dict[int, bytes]) -> Digests:
    step = 4 * block_size
    view = tokens.view(np.uint8).data
    found = []
    for block in range(len(tokens) // block_size):
        digest = sha256(digest + extras.get(block, b"") + view[block * step : (block + 1) * step]).digest()
        found.append(digest)
    return _rows(found)


def _extras(items: tuple[Item, ...], block_size: int, num_blocks: int) -> dict[int, bytes]:
    """extras_i of each block that an item touches."""
    extras: dict[int, bytes] = {}
    for item in items:
        for block in range(item.start // block_size, min((item.end - 1) // block_size + 1, num_blocks)):
            first = max(item.start, block * block_size)
            place = struct.pack("<QQ", first - block * block_size, first - item.start)
            extras[block] = extras.get(block, b"") + place + item.encoded
    return extras


def _rows(found: list[bytes]) -> Digests:
    return np.frombuffer(bytearray().join(found), np.uint8).reshape(len(found), DIGEST_BYTES)


def int32_tokens(token_ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """The tokens as little-endian int32 in a row, copied when need be.

    Raises: TypeError for tokens that are no integers, ValueError for those of another shape or range.
    """
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1:
        raise ValueError(f"token_ids: expected a flat array, got shape {list(tokens.shape)}")
    if tokens.dtype != np.int32:
        if tokens.dtype.kind not in "iu" and tokens.size:
            raise TypeError(f"token_ids: expected integers, got {tokens.dtype}")
        if tokens.size and (int(tokens.min()) < -(2**31) or int(tokens.max()) >= 2**31):
            raise ValueError(f"token_ids: expected int32, got values in [{tokens.min()}, {tokens.max()}]")
    return np.ascontiguousarray(tokens, "<i4")
