"""Digests: what two compilations must have in common to share a kernel.

A key is 32 bytes of BLAKE2b over parts that are each preceded by their length, so that no two
different lists of parts run into the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["DIGEST_BYTES", "SCHEMA", "content_digest", "digest_of"]

DIGEST_BYTES = 32

# Part of every key and of every file: raised whenever the meaning of either changes.
SCHEMA = 2


def digest_of(parts: Iterable[str | bytes | int | None]) -> bytes:
    """The key of an ordered list of parts.  Text, bytes, numbers and None never collide."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"ostinato-key")
    for part in parts:
        if part is None:
            state.update(b"N")
            continue
        if isinstance(part, bytes):
            kind, raw = b"B", part
        elif isinstance(part, str):
            kind, raw = b"T", part.encode("utf-8", "surrogatepass")
        else:
            kind, raw = b"I", str(int(part)).encode()
        state.update(kind + len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()


def content_digest(data: bytes) -> bytes:
    """The digest of one file's content."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
