"""NVRTC through ctypes: its calls, and which library of the machine this process uses.

cuda.bindings is not used: the calls here are the same in every NVRTC since 11, importing the
bindings costs 30 ms, and keys must be made from the very file that the calls go to.
cuda.pathfinder finds and loads the library.

Importing pathfinder and loading NVRTC costs 30 to 45 ms, which a disk hit does not need: a key
needs only the identity of the file.  So pathfinder's answer is stored in the cache folder with the
times of the places it searched (0.2 ms to check).  A stored answer may be wrong.  That is harmless:
code is stored under the identity of the library that compiled it, so a wrong expectation finds
nothing, or what that other compiler made of the same source.  `Toolchain` compares when the library
is loaded.

NVRTC needs no driver and no GPU.  Calls release the GIL; any thread may call.

The compiler itself lists the files that a compilation opened.  NVRTC passes `-Xcudafe` options to
its front end, EDG's, which can list what it includes (`--trace_includes`), and write that to a file
(`--error_output`).  NVIDIA documents neither; 12.0 to 13.5 were seen to have them.  A compiler
without them still compiles, with `opened` None.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import site
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ostinato import settings
from ostinato.driver.forking import new_lock
from ostinato.errors import CompileError, NoCudaError, SettingsError
from ostinato.files import UntrustedError, open_regular, replace_file
from ostinato.modules.source import digest_of
from ostinato.records import dataclass

_MOST_REMEMBERED = 1 << 16  # bytes of a file that stores where NVRTC is
_INSTALL = "install it with: pip install 'ostinato[cuda13]' (or 'ostinato[cuda12]')"

# Texts in memory get names in a folder that cannot exist.  Otherwise NVRTC would search their
# #includes in the current folder.  Its flag against that, --no-source-include, also keeps headers
# on disk from including those beside them (as mma.h does).  #line gives each text its own name,
# which messages show.
_NOWHERE = "/proc/ostinato-memory"

# The first and the last text that the compiler lists as included; both are its own.
_FIRST, _LAST = "__nv_nvrtc_builtin_header.h", "__nv_name_map"

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
class Opened:
    """A file that the compiler opened, by the name it used, and the file that includes it.

    `includer` is None for files included by a text in memory or by the command line.
    """

    path: str
    includer: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """NVRTC's result for one program.  `status`: nvrtcResult, 0 for success.

    `lowered`: the entry name of each C++ name expression.  `opened`: every file on disk that was
    read as a header, also before an error; None if the compiler does not list them.
    """

    status: int
    log: str
    data: bytes = b""
    lowered: dict[str, str] = field(default_factory=dict)
    opened: tuple[Opened, ...] | None = None


class Nvrtc:
    """A loaded NVRTC.  `path`: that of cuda.pathfinder, also for a library loaded before by others.

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
        self.file = _loaded_file(path, before)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._ask("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._ask("nvrtcGetNumSupportedArchs", byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._ask("nvrtcGetSupportedArchs", numbers)
        self.architectures: tuple[int, ...] = tuple(sorted(numbers))
        """The architectures it compiles for: 90 is compute capability 9.0."""

    def __repr__(self) -> str:
        return f"<Nvrtc {self}>"

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]}, {self.file.path}"

    def _ask(self, symbol: str, *arguments: object) -> None:
        status = getattr(self._dll, symbol)(*arguments)
        if status:
            raise CompileError(f"{symbol} of {self.file.path} fails: {self.status_text(status)}")

    def status_text(self, status: int) -> str:
        """Returns the status' name, as in "NVRTC_ERROR_COMPILATION"."""
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
        """Compiles one program to a cubin, or to PTX.

        `headers` are found by their names before any file.  Files are searched only in the folders
        that `flags` name.
        """
        from tempfile import TemporaryDirectory  # not needed where nothing is compiled

        program = (text, name, headers)
        with suppress(OSError), TemporaryDirectory(prefix="ostinato-") as folder:
            listing = Path(folder, "opened")
            options = ("--trace_includes", f"--error_output={listing}")
            tracing = [word for option in options for word in ("-Xcudafe", option)]
            answer = self._compile(*program, (*flags, *tracing), expressions, ptx)
            read = listing.read_bytes() if listing.exists() else b""
            opened = _opened(read, headers, whole=not answer.status)
            if opened is not None or not answer.status:
                return replace(answer, opened=opened)
        # There is no folder for the listing, or NVRTC refuses flags, perhaps those of the listing.
        return self._compile(*program, tuple(flags), expressions, ptx)

    def _compile(
        self,
        text: str,
        name: str,
        headers: Mapping[str, str],
        flags: tuple[str, ...],
        expressions: Sequence[str],
        ptx: bool,
    ) -> Answer:
        dll, program = self._dll, _Program()
        files = _files_in_memory(headers)
        try:
            status = dll.nvrtcCreateProgram(
                byref(program),
                _encoded(_named(text, name)),
                f"{_NOWHERE}/source".encode(),
                len(files),
                _texts(files.values()),
                _texts(files),
            )
            if status:
                return Answer(status, "")
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
            if program:
                dll.nvrtcDestroyProgram(byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._ask(f"nvrtcGet{what}Size", program, byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._ask(f"nvrtcGet{what}", program, data)
        return data.raw


def _named(text: str, name: str) -> str:
    """Returns a text for which messages show `name`."""
    # A lone surrogate, from a file name that is not text, would be an invalid character.
    shown = (
        name.encode("utf-8", "replace")
        .decode()
        .replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("\n", " ")
    )
    return f'#line 1 "{shown}"\n{text}'


def _files_in_memory(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns each header under its name, which includes its text by a name in `_NOWHERE`."""
    files = {}
    for number, (name, text) in enumerate(headers.items()):
        files[name] = f'#include "{_NOWHERE}/{number}"\n'
        files[f"{_NOWHERE}/{number}"] = _named(text, name)
    return files


def _opened(
    listing: bytes, headers: Mapping[str, str], *, whole: bool
) -> tuple[Opened, ...] | None:
    """Parses the listing: one name a line, indented by the number of including headers.

    None if it is no listing, or not `whole`.  A name that begins with a space, or has a line end in
    it, would be misread; `plan_compilation` excludes those.
    """
    first, *lines = os.fsdecode(listing).split("\n")
    if first != _FIRST or (whole and lines[-2:] != [_LAST, ""]):
        return None
    found: dict[Opened, None] = {}
    around: list[str | None] = []
    for line in lines:
        name = line.lstrip(" ")
        if name in ("", _LAST):
            continue
        del around[len(line) - len(name) :]
        # A text in memory is found by its exact name, before any file.  A file is listed under such
        # a name only if it is found from a relative folder: then it may be either.
        in_memory = name.startswith(_NOWHERE) or (
            name in headers and not ("/" in name and Path(name).exists())
        )
        if not in_memory:
            found[Opened(name, around[-1] if around else None)] = None
        around.append(None if in_memory else name)
    return tuple(found)


def _texts(values: Any) -> Any:
    encoded = [_encoded(value) for value in values]
    return (_TEXT * len(encoded))(*encoded)


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")  # file names may be any bytes
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


# ----------------------------------------------------------------------------- which file it is


@dataclass(frozen=True, slots=True)
class CompilerFile:
    """The compiler's library as a file.  Other versions and other copies compare unequal.

    `path` has its links resolved, so that the name often includes the version.  `note`
    distinguishes it from the file that has this path now.
    """

    path: str
    nbytes: int
    mtime_ns: int
    note: str = ""

    @classmethod
    def of(cls, path: str) -> CompilerFile:
        """Describes the file as it is now.  Raises OSError."""
        real = os.path.realpath(path)
        status = os.stat(real)  # noqa: PTH116 - half of the time of a Path
        return cls(real, status.st_size, status.st_mtime_ns)

    @property
    def identity(self) -> str:
        """Text that identifies the library, for keys and messages."""
        words = f"nvrtc {self.path} ({self.nbytes} bytes, written at {self.mtime_ns} ns"
        return f"{words}, {self.note})" if self.note else f"{words})"

    def replaced(self) -> CompilerFile:
        """Describes a library whose file was replaced while loaded; equal to no other file."""
        now = time.time_ns()
        return CompilerFile(
            self.path, self.nbytes, self.mtime_ns, f"replaced in process {os.getpid()}, {now}"
        )


def locate() -> str:
    """Loads NVRTC with cuda.pathfinder, and returns its path.

    Stores where pathfinder found it, for `expected_file` in other processes.  Raises ImportError
    without pathfinder, and pathfinder's errors (DynamicLibNotFoundError).
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib

    loaded = load_nvidia_dynamic_lib("nvrtc")
    path = str(loaded.abs_path)
    if not loaded.was_already_loaded_from_elsewhere:
        _remember(path)
    return path


@functools.cache
def installed_headers() -> str | None:
    """Returns the header folder of an installed toolkit, by cuda.pathfinder; None without one."""
    with suppress(Exception):  # without pathfinder, or if it fails, there are none
        from cuda.pathfinder import find_nvidia_header_directory

        for library in ("cudart", "nvrtc"):
            found = find_nvidia_header_directory(library)
            if found:
                return os.path.normpath(str(found))
    return None


def expected_file() -> CompilerFile | None:
    """Returns the file that `locate` would load, without loading it; None if unknown.

    The answer is the file that `locate` loaded before in an environment like this one:
    cuda.pathfinder would search the same places, and none of them has changed.
    """
    path = _remembered()
    return None if path is None else _file_or_none(path)


def _searched() -> dict[str, int]:
    """Returns the places that cuda.pathfinder searches, with their times of change (0: missing).

    Installing or removing a package changes the time of its site-packages folder, and a system
    package that of the linker's cache.
    """
    places = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        places.append(site.getusersitepackages())
    roots = [os.environ.get(name) for name in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME")]
    places += [f"{root}/{folder}" for root in roots if root for folder in ("lib", "lib64", "bin")]
    places += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if os.name == "nt":
        places += os.environ.get("PATH", "").split(";")
    places.append("/etc/ld.so.cache")
    times = {}
    for place in filter(None, places):
        try:
            times[place] = os.stat(place).st_mtime_ns  # noqa: PTH116
        except (OSError, ValueError):
            times[place] = 0
    return times


def _memory(searched: Mapping[str, int]) -> Path:
    """Returns the file that stores the answer for these places.  Raises SettingsError."""
    name = digest_of(searched).hex()[:32]
    return settings.cache_dir() / "compilers" / f"{name}.json"


def _remembered() -> str | None:
    searched = _searched()
    try:
        with open_regular(_memory(searched), private=True) as file:
            record = json.loads(file.read(_MOST_REMEMBERED))
        if record["searched"] == searched:
            return str(record["path"])
    except (OSError, UntrustedError, SettingsError):
        return None
    except (ValueError, TypeError, KeyError, RecursionError):  # the record is damaged
        return None
    return None


def _remember(path: str) -> None:
    """Stores where the compiler was found, unless that is stored; does nothing without a folder."""
    if _remembered() == path:
        return
    searched = _searched()
    with suppress(OSError, SettingsError):
        memory = _memory(searched)
        memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = json.dumps({"path": path, "searched": searched}).encode()
        replace_file(memory, found, private=True)


def _file_or_none(path: str) -> CompilerFile | None:
    try:
        return CompilerFile.of(path)
    except (OSError, ValueError):  # ValueError: not a valid path
        return None


def _loaded_file(path: str, before: CompilerFile | None) -> CompilerFile:
    """Describes the loaded file; equal to no other if the file on disk may be newer."""
    after = _file_or_none(path)
    if after is None:  # loaded by its name, or removed since
        return CompilerFile(path, 0, 0).replaced()
    moved = before is not None and before.path == after.path and before != after
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        moved = moved or f"{after.path} (deleted)" in maps
    return after.replaced() if moved else after


class Toolchain:
    """The compiler of this process: first only its expected file, then the loaded library.

        expected  ──something to compile──>  loaded (for good; `file` is certain from here)

    `locate` loads the library and returns its path.  `find` returns the expected file, or None.
    """

    def __init__(
        self,
        locate: Callable[[], str] = locate,
        find: Callable[[], CompilerFile | None] = expected_file,
    ) -> None:
        self._locate = locate
        self._find = find
        # Reentrant: the garbage collector may run a finaliser that calls this object.
        self._lock = new_lock()
        self._expected: CompilerFile | None = None
        self.loaded: Nvrtc | None = None
        """The library, once it is loaded."""

    def file(self) -> CompilerFile:
        """Returns the compiler's file; loads the library only if the file is not known otherwise.

        Raises NoCudaError if there is no compiler.
        """
        if self.loaded is not None:
            return self.loaded.file
        if self._expected is None:
            self._expected = self._find()
        return self._expected or self.library().file

    def library(self) -> Nvrtc:
        """Returns the loaded compiler.  Raises NoCudaError if there is none, or none that loads."""
        with self._lock:
            if self.loaded is None:
                self.loaded = self._load()
            return self.loaded

    def _load(self) -> Nvrtc:
        try:
            return Nvrtc(self._locate())
        except ImportError as error:
            why = f"cuda.pathfinder, which finds it, is not installed ({error})"
        except Exception as error:  # DynamicLibNotFoundError and pathfinder's other errors
            why = str(error)
        raise NoCudaError(f"NVRTC, the CUDA compiler, cannot be loaded: {why}; {_INSTALL}")
