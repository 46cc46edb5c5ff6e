"""Content keys of full blocks: who may find whose keys and values.

A block's keys and values depend on every token before it, so its digest chains the digest of the block in front of
it. SHA-256, never Python's `hash()`: whoever could make two prefixes collide would read another request's cache.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROOT = b"kvtui block chain 1"
_LENGTH = struct.Struct("<Q")


def root_digest(extras: Iterable[tuple[str, str]] = ()) -> bytes:
    """The digest in front of a sequence's first block.

    Args:
        extras: What the content depends on besides the tokens, as (kind, value): `("salt", "x")` and
            `("adapter", "x")` are different roots. Both are length-prefixed, so no two lists run together.

    Returns:
        32 bytes.
    """
    state = hashlib.sha256(_ROOT)
    for kind, value in extras:
        for part in (kind.encode(), value.encode("utf-8", "surrogatepass")):
            state.update(_LENGTH.pack(len(part)))
            state.update(part)
    return state.digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The digest of one full block.

    Args:
        parent: Digest of the block in front of it, or a `root_digest`.
        token_ids: The block's tokens, each below 2^63; hashed as eight bytes each, so that 1, 23 is not 12, 3.

    Returns:
        32 bytes.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def trace_key(digest: bytes) -> int:
    """The digest as the trace shows it: its first 63 bits as a positive integer, never 0 ("not hashed")."""
    return (int.from_bytes(digest[:8], "big") >> 1) or 1
