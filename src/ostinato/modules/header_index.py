"""What was read of a folder of headers, kept between processes.

The toolkit's headers are large: reading two of them for their digests and includes takes 20 ms,
which is more than all else that a process does for a kernel that is on disk.  An entry counts only
as long as the file's size, time and inode are those of when it was read, as within a process.  A
damaged index is no index; one that others could write is not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from ostinato.modules.headers import HeaderFile, Read, Scan, read_before
from ostinato.modules.keys import DIGEST_BYTES, SCHEMA, content_digest
from ostinato.modules.private_file import UntrustedError, read_private

__all__ = ["HeaderIndex"]

_MAX_BYTES = 64 * 1024 * 1024


class HeaderIndex:
    """The headers under `root`, remembered in `folder`.  Never raises for what it finds on disk."""

    def __init__(self, root: str, folder: Path) -> None:
        self.root = root
        self.path = folder / f"index-{content_digest(root.encode())[:12].hex()}.json"
        self._recalled: set[str] = set()
        self._looked_at = 0

    def recall(self) -> None:
        """Makes the process know what earlier ones have read."""
        try:
            about = json.loads(read_private(self.path, _MAX_BYTES))
            if about["schema"] != SCHEMA or about["root"] != self.root:
                return
            for name, (size, time, inode, digest, exact, names) in about["files"].items():
                path = f"{self.root}/{name}"
                file = HeaderFile(path, bytes.fromhex(digest), (int(size), int(time), int(inode)))
                if len(file.digest) != DIGEST_BYTES:
                    raise ValueError(f"{name}: {digest!r} is no digest")
                scan = Scan(tuple(map(str, names)), bool(exact))
                read_before.setdefault(path, Read(file, scan, True))
                self._recalled.add(path)
        except (OSError, UntrustedError, ValueError, TypeError, KeyError, AttributeError):
            return

    def remember(self) -> None:
        """Writes down what this process has read, if that is more than what it was told."""
        if len(read_before) == self._looked_at:
            return
        self._looked_at = len(read_before)
        known = {
            path: read
            for path, read in list(read_before.items())
            if read.settled and path.startswith(self.root + "/")
        }
        if known.keys() <= self._recalled:
            return
        start = len(self.root) + 1
        files = {
            path[start:]: [*r.file.stamp, r.file.digest.hex(), r.scan.exact, r.scan.names]
            for path, r in known.items()
        }
        text = json.dumps({"schema": SCHEMA, "root": self.root, "files": files})
        temporary = self.path.with_name(f".{self.path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(self.path)
            self._recalled |= known.keys()
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
