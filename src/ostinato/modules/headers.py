"""The header files of a compilation: which were read, whether they changed, and the compiler's own.

The compiler itself lists the files that it opened (`Answer.opened`).  From these, and from the
names that `__has_include` asks for, follow the other places where a header would have been found
first: a header that appears there makes the code outdated too.

    files     were read                               valid while their content is the same
    there     were found by __has_include             valid while they exist
    missing   were looked for before, or in vain      valid while they do not exist; of a path
                                                      whose folders are missing too, the highest,
                                                      with a slash at its end

A recent NVRTC bundles its own headers (cuda_fp16.h, mma.h, <cuda/std/…>), which always fit it.
They are unpacked once for each NVRTC, 26 MB, into a folder of the cache, with a file of their
digests.  They are no inputs, because the compiler's identity covers them.  A bundled header that a
compilation reads is compared with its digest, and a folder that does not fit is unpacked again.

`Inputs.unknown` is the reason if the inputs cannot be known; such code is used once and not stored.
So is code that asks `__has_include` otherwise than for a name in a plain `#if` (through a macro).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ostinato import settings
from ostinato.files import UntrustedError, open_regular
from ostinato.modules.nvrtc import CompilerFile, Nvrtc, Opened
from ostinato.modules.source import DIGEST_BYTES, Source, include_dirs, pre_includes
from ostinato.records import dataclass

_DIGESTS = ".digests"
_STALE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder of headers.

    `digests`: those of bundled headers, by their paths in the folder; None for an installed
    toolkit, whose headers may change.
    """

    root: str
    digests: Mapping[str, str] | None = field(default=None, repr=False)

    @property
    def folders(self) -> tuple[str, str]:
        """The folders to search.  CUDA 13 has <cuda/std/…> and <nv/target> one folder down."""
        return (self.root, f"{self.root}/cccl")

    def owns(self, path: str) -> bool:
        """True if a path is that of a bundled header."""
        return self.digests is not None and path.startswith(f"{self.root}/")

    def holds(self, path: str, digest: bytes) -> bool:
        """True if a bundled header has this content."""
        name = os.path.normpath(path)[len(self.root) + 1 :]
        return self.digests is not None and self.digests.get(name) == digest.hex()

    def damaged(self) -> bool:
        """True if a bundled header is missing or has changed.  Reads all of them, in 0.1 s."""
        return self.digests is not None and dict(_digests(self.root)) != self.digests


def bundled_headers(library: Nvrtc, *, unpack: bool = False) -> Toolkit | None:
    """Returns the compiler's own headers, unpacked; None without any, or without a folder for them.

    Without `unpack`, also None if they are not unpacked yet; with it, a damaged folder is replaced.
    """
    import tempfile

    name = _name(library.file)
    for parent in (settings.cache_dir() / "headers", Path(tempfile.gettempdir())):
        try:
            found = _unpacked(parent / name)
            if unpack and (found is None or found.damaged()):
                found = _unpack(library, parent / name)
        except OSError:
            continue
        if found is not None:
            return found
    return None


def _name(file: CompilerFile) -> str:
    user = os.getuid() if hasattr(os, "getuid") else 0
    # Copies of one library have the same size, time and headers, and share a folder.  A file with a
    # note gets a folder of its own.
    note = "".join(c for c in file.note if c.isdecimal())
    return f"ostinato-nvrtc-{file.nbytes:x}-{file.mtime_ns:x}{note and '-' + note}-{user}"


def _unpacked(folder: Path) -> Toolkit | None:
    """Returns the folder that this user unpacked, digests not compared; None without one.

    Raises OSError if the folder cannot be read, or belongs to another user.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user ({status.st_uid})")
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    try:
        with open_regular(folder / _DIGESTS, private=True) as file:
            digests = json.load(file)
    except (OSError, UntrustedError, ValueError):
        return None
    return Toolkit(str(folder), digests) if isinstance(digests, dict) else None


def _unpack(library: Nvrtc, folder: Path) -> Toolkit | None:
    """Unpacks to a temporary folder, which is then renamed to `folder`.  Raises OSError."""
    import shutil
    import tempfile

    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.parent.glob(f"{folder.name}.*"):  # left by a process that died
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary, "made")
        flags = (f"--use-bundled-headers={made}", "--gpu-architecture=sm_90")
        if library.compile("", "unpack.cu", {}, flags).status:
            return None
        (made / _DIGESTS).write_text(json.dumps(dict(_digests(str(made)))), encoding="utf-8")
        made.chmod(0o700)
        (made / _DIGESTS).chmod(0o600)
        try:
            made.rename(folder)
        except OSError:  # the folder exists: from another process, or damaged
            found = _unpacked(folder)
            if found is None or found.damaged():
                folder.rename(Path(temporary, "old"))
                made.rename(folder)
    return _unpacked(folder)


def _digests(root: str) -> Iterator[tuple[str, str]]:
    """Yields the path and digest of each header below a folder.  Raises OSError."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            if not name.startswith("."):
                with suppress(UntrustedError), open_regular(path, private=False) as file:
                    yield path[len(root) + 1 :], _content_digest(file.read()).hex()


def _content_digest(data: bytes) -> bytes:
    """Returns the digest of one file's content."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


# ------------------------------------------------------------------------------------------- inputs

# A file that changes twice within the resolution of file times (2 s at most) seems unchanged.
_SETTLED_NS = 2_000_000_000

_SPLICE = rb"(?:\\|\?\?/)[ \t\f\v]*\r?\n"
_STRING = rb'(?<!\w)(?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\((?s:.*?)\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
# What begins inside of another of them is none.
_NO_CODE = rb"//[^\n]*|/\*(?s:.*?)\*/|(?P<text>" + _STRING + rb"|'(?:\\[^'\n]+|[^'\\\n])')"
_PASTE = rb"##|%:%:|\?\?=\?\?="
# The start of the word, as an identifier that pasting could complete to it.
_PIECE = rb"(?<!\w)_(?:_(?:h(?:a(?:s(?:_\w{0,6})?)?)?)?)?(?!\w)"
_PROBE = rb'__has_include\s*\(\s*(?:<(?P<angle>[^>\n]+)>|"(?P<quote>[^"\n]+)")\s*\)'
# A condition without a macro call, which could change the name.
_PLAIN_LINE = (
    rb"\s*#\s*(?:el)?if(?:n?def)?\b(?:[\s!&|]|\(|\)|defined\b|"
    + re.sub(rb"\?P<\w+>", b"", _PROBE)
    + rb"|\w+\b(?!\s*\())*"
)

Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A header as it was read.

    `stamp`: size, modification time, change time and inode; None if the file changed so recently
    that another change might leave them equal.
    """

    path: str
    digest: bytes
    stamp: Stamp | None

    def unchanged(self) -> bool:
        """True if the content is the same.  Reads the file only if its stamp differs."""
        try:
            if self.stamp is not None and _stamp(os.stat(self.path)) == self.stamp:  # noqa: PTH116
                return True
            with open_regular(self.path, private=False) as file:
                return _content_digest(file.read()) == self.digest
        except (OSError, UntrustedError):
            return False


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files that code was made from, besides what its key covers.

    `toolkit`: the folder of an installed toolkit if its headers were read; `compiler.is_current`
    checks that it is still the installed one.  `unknown`: why this list may be incomplete.
    """

    files: tuple[InputFile, ...] = ()
    there: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    toolkit: str | None = None
    unknown: str | None = None

    def unchanged(self) -> bool:
        """True if the same files exist with the same content, and no others have appeared."""
        return (
            self.unknown is None
            and all(file.unchanged() for file in self.files)
            and all(map(_is_there, self.there))
            and not any(map(_is_there, self.missing))
        )

    @property
    def fixed(self) -> bool:
        """True if the process may reuse the code unchecked: it read a toolkit's headers at most."""
        paths = [*(file.path for file in self.files), *self.there, *self.missing]
        root = self.toolkit
        return self.unknown is None and all(root and path.startswith(f"{root}/") for path in paths)

    def same_content(self, other: Inputs) -> bool:
        """True if both are the same apart from stamps."""
        return _unstamped(self) == _unstamped(other)

    def to_dict(self) -> dict[str, object]:
        return {
            "files": [[f.path, f.digest.hex(), f.stamp] for f in self.files],
            "there": self.there,
            "missing": self.missing,
            "toolkit": self.toolkit,
        }

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Inputs:
        """Reads `to_dict`'s data.  Raises ValueError, TypeError or KeyError for other data."""
        files = []
        for path, digest, stamp in about["files"]:
            size, mtime, ctime, inode = map(int, stamp or (0, 0, 0, 0))
            known = (size, mtime, ctime, inode) if stamp else None
            files.append(InputFile(str(path), bytes.fromhex(digest), known))
        there, missing = (tuple(map(str, about[name])) for name in ("there", "missing"))
        toolkit = about["toolkit"]
        return cls(tuple(files), there, missing, None if toolkit is None else str(toolkit))


@dataclass(frozen=True, slots=True)
class Observation:
    """The inputs of one run of the compiler.

    `settled`: no input changed so recently that the compiler may have read another content.
    `probed`: __has_include was used, or may have been.  `damaged`: a bundled header differs from
    its digest.
    """

    inputs: Inputs
    settled: bool
    probed: bool
    damaged: bool


def observe(
    opened: Sequence[Opened] | None,
    source: Source,
    words: Sequence[str],
    toolkit: Toolkit | None,
    begin: int,
) -> Observation:
    """Returns the inputs of a compilation that began at `begin` (ns since 1970).

    `words`: its command line without the toolkit's folders, which are searched last.
    """
    texts = [*map(_bytes, ("\n".join(words), source.cuda or "", *source.headers.values()))]
    if opened is None:
        silent = Inputs(unknown="the compiler does not tell which headers it reads")
        return Observation(silent, True, _asked(texts) != set(), False)
    folders = include_dirs(words)
    files: list[InputFile] = []
    on_disk = dict.fromkeys(item.path for item in opened)
    settled, damaged, unknown = True, False, None
    names: set[str] = set()
    for path in on_disk:
        file, data = _read(path, begin) or (None, b"")
        bundled = toolkit is not None and toolkit.owns(path)
        if toolkit is not None and bundled:
            damaged = damaged or file is None or not toolkit.holds(path, file.digest)
        elif file is None:
            unknown = f"{path} cannot be read any more"
        else:
            files.append(file)
            settled = settled and file.stamp is not None
        if not _inside(toolkit, path):
            texts.append(data)
        elif folders or not bundled:  # without other folders, these find only one another
            names |= _probed(data)
    asked = _asked(texts)
    if asked is None:
        unknown = "it asks __has_include in a way that cannot be followed"
    names |= asked or set()
    search = [*folders, *(toolkit.folders if toolkit is not None else ())]
    outside = ("",) if pre_includes(words) else ()
    beside = dict.fromkeys(map(_parent, on_disk))
    places = {
        *_earlier_places(opened, search, outside),
        *(name for name in names if _is_absolute(name)),
        *(
            f"{folder}/{name}"
            for folder in (*beside, *search)
            for name in names - {*source.headers}
        ),
    }
    there: set[str] = set()
    missing: set[str] = set()
    for place in map(_absolute, places):
        if toolkit is None or not toolkit.owns(place):
            found = _is_there(place)
            highest, folder = _highest_missing(place)
            (there if found else missing).add(place if found else highest)
            settled = settled and _settled(folder, begin)
    root = None
    if toolkit is not None and toolkit.digests is None:
        inside = any(_inside(toolkit, file.path) for file in files)
        root = toolkit.root if inside or asked != set() else None
    inputs = Inputs(
        files=tuple(sorted(files, key=lambda file: file.path)),
        there=tuple(sorted(there)),
        missing=tuple(sorted(missing)),
        toolkit=root,
        unknown=unknown,
    )
    return Observation(inputs, settled, asked != set(), damaged)


# ------------------------------------------------------------------------------ places for a header


def _earlier_places(
    opened: Iterable[Opened], search: Sequence[str], outside: Sequence[str]
) -> Iterable[str]:
    """Yields the places that were searched before each opened file was found.

    The name that was searched is the path without one of the folders.  If several folders fit, all
    count, for angle brackets and for quotes.
    """
    for item in opened:
        beside = outside if item.includer is None else (_parent(item.includer),)
        for folders in (search, (*beside, *search)):
            prefixes = [f if not f or f.endswith("/") else f"{f}/" for f in folders]
            for found in prefixes:
                name = item.path.removeprefix(found)
                if (found and name == item.path) or _is_absolute(name):
                    continue
                yield from takewhile(item.path.__ne__, (prefix + name for prefix in prefixes))


def _asked(texts: Sequence[bytes]) -> set[str] | None:
    """Returns the names that texts give to __has_include; None if they do not show all of them."""
    spliced = [re.sub(_SPLICE, b"", text) for text in texts]
    # Without comments; and without strings, such as those of PTX, whose sink is a "_".
    codes = [re.sub(_NO_CODE, lambda found: found["text"] or b" ", text) for text in spliced]
    bare = [re.sub(_NO_CODE, b" ", text) for text in codes]
    if any(re.search(_PASTE, text) for text in bare) and any(re.search(_PIECE, t) for t in bare):
        return None
    lines = [line for text in codes for line in text.split(b"\n") if b"has_include" in line]
    if not all(re.fullmatch(_PLAIN_LINE, line) for line in lines):
        return None
    return set().union(*map(_probed, lines))


def _probed(text: bytes) -> set[str]:
    """Returns the names that a text gives to __has_include as they are."""
    return {os.fsdecode(m["angle"] or m["quote"]) for m in re.finditer(_PROBE, text)}


def _inside(toolkit: Toolkit | None, path: str) -> bool:
    return toolkit is not None and path.startswith(f"{toolkit.root}/")


# ------------------------------------------------------------------------------------ files as such


def _read(path: str, begin: int) -> tuple[InputFile, bytes] | None:
    """Reads a file; its stamp is set only if it surely had this content since `begin`."""
    try:
        with open_regular(path, private=False) as file:
            before = _stamp(os.fstat(file.fileno()))
            data = file.read()
            after = _stamp(os.fstat(file.fileno()))
    except (OSError, UntrustedError):
        return None
    known = before if before == after and _settled(before, begin) else None
    return InputFile(_absolute(path), _content_digest(data), known), data


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _settled(stamp: Stamp, begin: int) -> bool:
    return max(stamp[1], stamp[2]) + _SETTLED_NS < begin


def _highest_missing(path: str) -> tuple[str, Stamp]:
    """Returns the highest missing part of a path, and the stamp of the folder above it."""
    folder = _parent(path)
    while True:
        try:
            return path, _stamp(os.stat(folder))  # noqa: PTH116
        except OSError:
            path, folder = f"{folder}/", _parent(folder)


def _is_there(path: str) -> bool:
    """True if the compiler could open a file, or, if "/" ends the path, if a folder exists."""
    if path.endswith("/"):
        return os.path.isdir(path)  # noqa: PTH112
    return os.path.isfile(path) and os.access(path, os.R_OK)  # noqa: PTH113


def _absolute(path: str) -> str:
    # Not normalised: ".." after a symbolic link leads to the parent of the link's target.
    return path if _is_absolute(path) else f"{os.getcwd()}/{path}"  # noqa: PTH109


def _is_absolute(path: str) -> bool:
    return os.path.isabs(path)  # noqa: PTH117 - a Path costs ten times as much


def _parent(path: str) -> str:
    return os.path.dirname(path)  # noqa: PTH120


def _unstamped(inputs: Inputs) -> Inputs:
    return replace(inputs, files=tuple(replace(file, stamp=None) for file in inputs.files))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
