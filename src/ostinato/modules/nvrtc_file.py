"""Which compiler a process will use, told from its file alone: nothing imported, nothing loaded.

Loading NVRTC costs 10 ms and more, importing bindings for it 30; a key needs only its identity,
and finding its file takes 0.2 ms.  So keys are made of the file that is expected, and the library
is loaded when there is something to compile; then `Toolchain` compares.

Why that is sound: code is written to disk only under the identity of the library that made it.
A wrong expectation therefore finds nothing, or what another compiler of this machine made of the
same source under its own name; never a file that is mislabelled.
"""

from __future__ import annotations

import ctypes
import os
import re
import site
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CompilerFile", "expected_file", "path_of_symbol"]

# The newest first, as cuda.pathfinder has them.
_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")
_TOOLKIT_FOLDERS = ("lib64", "lib")
_LINKER_CACHE = Path("/etc/ld.so.cache")
_IN_LINKER_CACHE = re.compile(rb"\0(/[^\0]*/libnvrtc\.so\.1[0-9])(?=\0)")


@dataclass(frozen=True, slots=True)
class CompilerFile:
    """The compiler's library as a file.  Another version, or another copy, is not equal.

    `path` has its links resolved, so that the name often tells the version.  `note` sets apart
    what is known to be unlike the file that is there now.
    """

    path: str
    nbytes: int
    mtime_ns: int
    note: str = ""

    @classmethod
    def of(cls, path: str) -> CompilerFile:
        """The file as it is now.  Raises OSError."""
        real = os.path.realpath(path)
        status = os.stat(real)  # noqa: PTH116 - half of the time of a Path
        return cls(real, status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """In words, for keys and messages."""
        words = f"nvrtc {self.path} ({self.nbytes} bytes, written at {self.mtime_ns} ns"
        return f"{words}, {self.note})" if self.note else f"{words})"

    def replaced(self) -> CompilerFile:
        """The same for a library whose file was replaced while it is loaded: like no other."""
        now = time.time_ns()
        return CompilerFile(
            self.path, self.nbytes, self.mtime_ns, f"replaced in process {os.getpid()}, {now}"
        )


def expected_file() -> CompilerFile | None:
    """The file that cuda.pathfinder will load, as far as can be told from here; None if unknown.

    In its order: what the process has loaded already, NVIDIA's wheels, conda, the dynamic linker,
    CUDA_PATH.  Only for Linux; elsewhere the library is asked.
    """
    if not sys.platform.startswith("linux"):
        return None
    for path in _candidates():
        try:
            return CompilerFile.of(path)
        except OSError:
            continue
    return None


def _candidates() -> Iterator[str]:
    for name in _NAMES:
        path = _loaded(name)
        if path is not None:
            yield path
    packages = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        packages.insert(sys.prefix != sys.base_prefix, site.getusersitepackages())
    folders = [f"{root}/{folder}" for folder in _WHEEL_FOLDERS for root in packages]
    conda = os.environ.get("CONDA_PREFIX")
    if conda:
        folders += [f"{conda}/{folder}" for folder in _TOOLKIT_FOLDERS]
    yield from _in_folders(folders)
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for name in _NAMES:  # the linker is asked for one name after the other
        yield from (f"{folder or '.'}/{name}" for folder in searched if folder)
        yield from _in_linker_cache(name)
    toolkit = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")
    if toolkit:
        yield from _in_folders([f"{toolkit}/{folder}" for folder in _TOOLKIT_FOLDERS])


def _in_folders(folders: list[str]) -> Iterator[str]:
    return (f"{folder}/{name}" for folder in folders for name in _NAMES)


def _in_linker_cache(name: str) -> Iterator[str]:
    """ld.so.cache is a table of numbers and then strings, ended by zeros; the strings will do."""
    try:
        found = _IN_LINKER_CACHE.findall(_LINKER_CACHE.read_bytes())
    except OSError:
        return
    for raw in found:
        path = os.fsdecode(raw)
        if path.endswith(name):
            yield path


def _loaded(name: str) -> str | None:
    """The path of a library that this process has loaded under that name."""
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    return path_of_symbol(library, "nvrtcVersion")


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def path_of_symbol(library: ctypes.CDLL, name: str) -> str | None:
    """The file that a function of a loaded library lies in, as the dynamic linker knows it."""
    info = _SymbolInfo()
    try:
        function = ctypes.cast(library[name], ctypes.c_void_p)
        tell = ctypes.CDLL(None).dladdr
    except (AttributeError, OSError, TypeError):  # no such function; a system without dladdr
        return None
    tell.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    if not tell(function, ctypes.byref(info)) or not info.path:
        return None
    return os.fsdecode(info.path)
