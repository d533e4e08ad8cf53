"""Which header files a source depends on, found without a compiler.

The answer is conservative.  Every `#include` and `__has_include` counts, also in branches that the
preprocessor would skip; every folder that could answer is asked, and all files that exist are part
of the key, as are the names that were not found: a header that appears later changes the key.

What cannot be followed by reading (`#include MACRO`, `#include_next`, `#embed`) is said by `exact`
being false; such a source is compiled in every process and never kept on disk.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostinato.modules.keys import content_digest

__all__ = [
    "Dependencies",
    "HeaderFile",
    "Read",
    "Scan",
    "find_dependencies",
    "read_before",
]

# A file that changes twice within its clock's grain looks unchanged; the coarsest is 2 s.
_SETTLED_NS = 2_000_000_000

_DIRECTIVE = re.compile(
    r"^[ \t]*(?:\#|%:|\?\?=)[ \t]*(?P<word>include_next|include|import|embed)\b[ \t]*(?P<rest>.*)$",
    re.MULTILINE,
)
_HAS_INCLUDE = re.compile(r"__has_include(?:_next)?\s*\(\s*(?P<rest>[^)\n]*)")
_NAMED = re.compile(r'(?:<(?P<angle>[^>\n]+)>|"(?P<quote>[^"\n]+)")')
_SPLICE = re.compile(r"\\[ \t]*\r?\n")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HeaderFile:
    """A header as it was when it was read."""

    path: str
    digest: bytes
    stamp: tuple[int, int, int]

    def unchanged(self) -> bool:
        """Whether size, time and inode are still those of the file that was read."""
        return _stamp(self.path) == self.stamp


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a source includes.

    `missing` are names that no folder had; `probed` are the paths that were looked for and not
    found, so that a header which appears there later is noticed.
    """

    files: tuple[HeaderFile, ...]
    missing: tuple[str, ...]
    probed: tuple[str, ...]
    exact: bool

    def unchanged(self) -> bool:
        """Whether the same files are there still, and no others have appeared."""
        return all(f.unchanged() for f in self.files) and not any(
            os.path.isfile(path)  # noqa: PTH113
            for path in self.probed
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """The names that a text includes, and whether those are all."""

    names: tuple[str, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Read:
    """A header that was read.  `settled` if its time was well past then, so that it can be told
    by its stamp for good."""

    file: HeaderFile
    scan: Scan
    settled: bool


read_before: dict[str, Read] = {}
"""By path, checked by stamp: the toolkit's headers are read once a process."""


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def _scan(text: str) -> Scan:
    spliced = _SPLICE.sub("", text)
    names: dict[str, None] = {}
    exact = True
    # Both with and without block comments: a "/*" inside a string must not hide an #include, and
    # a comment inside a directive must not either.  Too many names are harmless.
    for version in (spliced, _COMMENT.sub(" ", spliced)):
        for match in _DIRECTIVE.finditer(version):
            named = _NAMED.match(match["rest"])
            if match["word"] != "include" or named is None:
                # A comment between the directive and its name, or real computation: the other
                # version of the text decides.
                exact = exact and version is spliced and "/*" in match["rest"]
                continue
            names[named["angle"] or named["quote"]] = None
        for match in _HAS_INCLUDE.finditer(version):
            named = _NAMED.match(match["rest"])
            if named is not None:
                names[named["angle"] or named["quote"]] = None
    return Scan(tuple(names), exact)


def _read(path: str) -> Read | None:
    stamp = _stamp(path)
    if stamp is None:
        return None
    before = read_before.get(path)
    if before is not None and before.file.stamp == stamp:
        return before
    begin = time.time_ns()
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    read = Read(
        HeaderFile(path, content_digest(data), stamp),
        _scan(data.decode("utf-8", "replace")),
        settled=begin - stamp[1] > _SETTLED_NS,
    )
    read_before[path] = read
    return read


def _join(folder: str, name: str) -> str:
    """In the normal form; `folder` has it already."""
    if "." in name[:1] or "/." in name or "//" in name or name.startswith("/"):
        return os.path.normpath(os.path.join(folder, name))  # noqa: PTH118
    return f"{folder}/{name}"


def find_dependencies(
    text: str,
    headers: Mapping[str, str],
    folders: Iterable[str],
    *,
    first: Iterable[str] = (),
    trusted: str | None = None,
) -> Dependencies:
    """Follows the includes of `text`.

    `headers` are in memory, by name; `folders` are searched for the rest; `first` are names
    included before the source.  Includes that only a macro knows are forgiven in files under
    `trusted`, the compiler's own headers.
    """
    search = [os.path.normpath(folder) for folder in folders]
    files: dict[str, HeaderFile] = {}
    missing: dict[str, None] = {}
    probed: dict[str, None] = {}
    # (name, folder of the file that includes it); "" for texts in memory.
    start = _scan(text)
    exact = start.exact
    work = [(name, "") for name in (*first, *start.names)]
    for header in headers.values():
        scan = _scan(header)
        exact = exact and scan.exact
        work += [(name, "") for name in scan.names]
    seen: set[tuple[str, str]] = set()
    while work:
        item = work.pop()
        if item in seen:
            continue
        seen.add(item)
        name, beside = item
        found = name in headers
        for folder in ([beside] if beside else []) + search:
            path = _join(folder, name)
            read = _read(path)
            if read is None:
                probed[path] = None
                continue
            found = True
            if path in files:
                continue
            files[path] = read.file
            inside = trusted is not None and path.startswith(trusted + os.sep)
            exact = exact and (read.scan.exact or inside)
            folder_of = os.path.dirname(path)  # noqa: PTH120
            work += [(included, folder_of) for included in read.scan.names]
        if not found:
            missing[name] = None
    return Dependencies(
        tuple(files[path] for path in sorted(files)),
        tuple(sorted(missing)),
        tuple(probed),
        exact,
    )
