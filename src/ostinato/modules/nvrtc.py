"""NVRTC through ctypes: its calls, and which library of the machine this process uses.

ctypes and not cuda.bindings, as for the driver: the calls here are the same in every NVRTC since
11, importing the bindings costs 30 ms, and here it is certain which file the calls go to, which is
what keys are made of.  Finding and loading stays cuda.pathfinder's where it is installed: it
knows the quirks of wheels, conda and toolkits, and cuda.bindings gets the same library from it.

NVRTC needs no driver and no GPU.  Calls let go of the GIL; any thread may call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.errors import CompileError, NoCudaError
from ostinato.modules.nvrtc_file import CompilerFile, expected_file, path_of_symbol

__all__ = ["INVALID_OPTION", "Answer", "Nvrtc", "Toolchain"]

_INSTALL = "install it with: pip install 'ostinato[cuda13]' (or 'ostinato[cuda12]')"

INVALID_OPTION = 5  # nvrtcResult

# Texts in memory lie in a folder that cannot exist.  Else NVRTC would look for their #includes in
# the folder that the process happens to stand in; and its flag against that, --no-source-include,
# also keeps headers on disk from finding those beside them (as mma.h has to).  Messages still show
# a text's own name, which #line gives it.
_NOWHERE = "/proc/ostinato-memory"

_Program = ctypes.c_void_p
_POINTER = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (_POINTER, _POINTER),
    "nvrtcGetNumSupportedArchs": (_POINTER,),
    "nvrtcGetSupportedArchs": (_POINTER,),
    "nvrtcCreateProgram": (_POINTER, _TEXT, _TEXT, ctypes.c_int, _POINTER, _POINTER),
    "nvrtcDestroyProgram": (_POINTER,),
    "nvrtcAddNameExpression": (_Program, _TEXT),
    "nvrtcCompileProgram": (_Program, ctypes.c_int, _POINTER),
    "nvrtcGetLoweredName": (_Program, _TEXT, _POINTER),
    "nvrtcGetProgramLogSize": (_Program, _POINTER),
    "nvrtcGetProgramLog": (_Program, _POINTER),
    "nvrtcGetCUBINSize": (_Program, _POINTER),
    "nvrtcGetCUBIN": (_Program, _POINTER),
    "nvrtcGetPTXSize": (_Program, _POINTER),
    "nvrtcGetPTX": (_Program, _POINTER),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What NVRTC says to one program.  `status` is nvrtcResult, 0 for success.

    `lowered` gives the entry name for each C++ name expression.
    """

    status: int
    log: str
    data: bytes = b""
    lowered: dict[str, str] = field(default_factory=dict)


class Nvrtc:
    """A loaded NVRTC.  `file` is what was loaded, to the best of what the system tells.

    Raises OSError if the file cannot be loaded or is no NVRTC.
    """

    def __init__(self, path: str) -> None:
        before = _file_or_none(path)
        self._dll = ctypes.CDLL(path)
        try:
            for symbol, parameters in _PROTOTYPES.items():
                call = getattr(self._dll, symbol)
                call.argtypes = parameters
                call.restype = ctypes.c_int
            self._dll.nvrtcGetErrorString.restype = _TEXT
        except AttributeError as error:
            raise OSError(f"{path} is no NVRTC: {error}") from None
        self.file = _loaded_file(path_of_symbol(self._dll, "nvrtcVersion") or path, before)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._ask("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._ask("nvrtcGetNumSupportedArchs", byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._ask("nvrtcGetSupportedArchs", numbers)
        self.architectures: tuple[int, ...] = tuple(sorted(numbers))
        """What it compiles for: 90 is compute capability 9.0."""

    def __repr__(self) -> str:
        return f"<Nvrtc {self}>"

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}, {self.file.path}"

    def _ask(self, symbol: str, *arguments: object) -> None:
        status = getattr(self._dll, symbol)(*arguments)
        if status:
            raise CompileError(f"{symbol} of {self.file.path} fails: {self.status_text(status)}")

    def status_text(self, status: int) -> str:
        """ "NVRTC_ERROR_COMPILATION" and the like."""
        text = self._dll.nvrtcGetErrorString(status)
        return text.decode() if text else f"status {status}"

    def compile(
        self,
        text: str,
        name: str,
        headers: Mapping[str, str],
        flags: Sequence[str],
        expressions: Sequence[str] = (),
        *,
        ptx: bool = False,
    ) -> Answer:
        """One program from creation to destruction; to a cubin, or to PTX.

        `headers` are found by their names before any file.  The text and they include from disk
        what `flags` name folders of, and nothing beside them.
        """
        dll, program = self._dll, _Program()
        files = _files_in_memory(headers)
        status = dll.nvrtcCreateProgram(
            byref(program),
            _named(text, name).encode("utf-8", "replace"),
            f"{_NOWHERE}/source".encode(),
            len(files),
            _texts(files.values()),
            _texts(files),
        )
        if status:
            return Answer(status, "")
        try:
            for expression in expressions:
                status = dll.nvrtcAddNameExpression(program, expression.encode())
                if status:
                    return Answer(status, f"{expression!r} is no C++ name expression")
            status = dll.nvrtcCompileProgram(program, len(flags), _texts(flags))
            log = self._fetch("ProgramLog", program).rstrip(b"\0").decode("utf-8", "replace")
            log = log.strip().replace(f"{_NOWHERE}/source", name)
            if status:
                return Answer(status, log)
            lowered = {}
            for expression in expressions:
                symbol = _TEXT()
                status = dll.nvrtcGetLoweredName(program, expression.encode(), byref(symbol))
                if status or symbol.value is None:
                    return Answer(status or -1, f"{expression!r} names no kernel of this source")
                lowered[expression] = symbol.value.decode()
            return Answer(0, log, self._fetch("PTX" if ptx else "CUBIN", program), lowered)
        finally:
            dll.nvrtcDestroyProgram(byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._ask(f"nvrtcGet{what}Size", program, byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._ask(f"nvrtcGet{what}", program, data)
        return data.raw


def _named(text: str, name: str) -> str:
    """A text that the compiler calls `name`."""
    shown = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'#line 1 "{shown}"\n{text}'


def _files_in_memory(headers: Mapping[str, str]) -> dict[str, str]:
    """Each header under its name, with nothing in it but an include of its text from nowhere."""
    files = {}
    for number, (name, text) in enumerate(headers.items()):
        files[name] = f'#include "{_NOWHERE}/{number}"\n'
        files[f"{_NOWHERE}/{number}"] = _named(text, name)
    return files


def _texts(values: Any) -> Any:
    encoded = [value.encode("utf-8", "replace") for value in values]
    return (_TEXT * len(encoded))(*encoded)


def _file_or_none(path: str) -> CompilerFile | None:
    try:
        return CompilerFile.of(path)
    except OSError:
        return None


def _loaded_file(path: str, before: CompilerFile | None) -> CompilerFile:
    """The file that is loaded now.  What is on disk may be newer: then it is like no other."""
    after = _file_or_none(path)
    if after is None:  # loaded by its name, or removed since
        return CompilerFile(path, 0, 0).replaced()
    moved = before is not None and before.path == after.path and before != after
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        moved = moved or f"{after.path} (deleted)" in maps
    return after.replaced() if moved else after


class Toolchain:
    """The compiler of this process: first only its file, as expected; then the loaded library.

        expected  ──something to compile──>  loaded (for good; `file` tells the truth from here)

    `find` says which file is expected, None for unknown.  `locate` loads the library and gives its
    path, as cuda.pathfinder does; None if it is not installed.
    """

    def __init__(
        self,
        locate: Callable[[], str | None],
        find: Callable[[], CompilerFile | None] = expected_file,
    ) -> None:
        self._locate = locate
        self._find = find
        # Reentrant: the garbage collector may run a finaliser that asks us.
        self._lock = threading.RLock()
        self._expected: CompilerFile | None = None
        self._library: Nvrtc | None = None

    @property
    def loaded(self) -> Nvrtc | None:
        """The library if it is loaded already."""
        return self._library

    def file(self) -> CompilerFile:
        """The compiler's file; loads the library only if there is no other way to know it.

        Raises NoCudaError if there is no compiler.
        """
        library = self._library
        if library is not None:
            return library.file
        if self._expected is None:
            self._expected = self._find()
        return self._expected or self.library().file

    def library(self) -> Nvrtc:
        """The compiler, loaded.  Raises NoCudaError if there is none, or none that loads."""
        if self._library is not None:
            return self._library
        with self._lock:
            if self._library is None:
                self._library = self._load()
            return self._library

    def _load(self) -> Nvrtc:
        why = "its file is not found, and cuda.pathfinder, which looks further, is not installed"
        try:
            path = self._locate()
            if path is None:
                expected = self._expected or self._find()
                path = None if expected is None else expected.path
            if path is not None:
                return Nvrtc(path)
        except Exception as error:  # pathfinder's DynamicLibNotFoundError and its relatives
            why = str(error)
        raise NoCudaError(f"NVRTC, the CUDA compiler, cannot be loaded: {why}; {_INSTALL}")
