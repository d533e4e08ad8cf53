"""CUDA C++ to code for one architecture, with NVRTC; the only file of `modules` that knows `cuda`.

NVRTC is called through cuda.bindings and not through cuda.core's Program, which has no way to give
headers from memory, and whose program object wants a device for its default architecture.  NVRTC
needs no driver and no GPU; it lets go of the GIL while it compiles.

A compilation has two steps, so that the key is known before anything is compiled:

    plan_compilation(source, options, …) -> Plan     reads headers, makes the key
    compile_plan(plan) -> Compiled                   runs the compiler
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ostinato import settings
from ostinato.errors import CompileError, InputError, NoCudaError
from ostinato.modules.headers import Dependencies, find_dependencies
from ostinato.modules.keys import SCHEMA, digest_of
from ostinato.modules.options import (
    CompileOptions,
    flags_of,
    include_dirs,
    pre_includes,
    reads_files,
)

if TYPE_CHECKING:
    from ostinato.modules.source import Source

__all__ = [
    "Compiled",
    "Plan",
    "check_ptx",
    "compile_plan",
    "compiler_identity",
    "plan_compilation",
    "target_arch",
]

_INSTALL = "install it with: pip install 'ostinato[cuda13]' (or 'ostinato[cuda12]')"

# The compiler reads these itself, so they belong to every key.
_COMPILER_VARIABLES = ("NVRTC_PREPEND_FLAGS", "NVRTC_APPEND_FLAGS")

_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$]*\Z")
_ERROR_LINE = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error", re.M)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one compilation depends on, and the key made of it."""

    source: Source
    arch: str
    flags: tuple[str, ...]
    expressions: tuple[str, ...]
    dependencies: Dependencies
    key: bytes = field(repr=False)
    storable: bool
    """Whether the key covers all that the compiler reads, so that files may be kept."""
    fixed: bool = True
    """Whether the key stays the same for the process: no folder of the caller's is searched."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Code for `Image(kind, data)`.

    `log` is what the compiler said (warnings); `lowered` gives the entry name for each C++ name
    expression that was asked for.
    """

    kind: str
    data: bytes
    log: str = ""
    lowered: dict[str, str] = field(default_factory=dict)


def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        module: ModuleType = nvrtc
    except ImportError as error:
        raise NoCudaError(
            f"the CUDA compiler's bindings are missing ({error}); {_INSTALL}"
        ) from None
    return module


@dataclass(frozen=True, slots=True)
class _Toolchain:
    version: tuple[int, int]
    identity: str
    architectures: tuple[int, ...]


@functools.cache
def _toolchain() -> _Toolchain:
    """The compiler that is installed.  Raises NoCudaError if there is none."""
    nvrtc = _nvrtc()
    try:
        version = _checked(nvrtc.nvrtcVersion())
        architectures = _checked(nvrtc.nvrtcGetSupportedArchs())
    except Exception as error:  # cuda.pathfinder's DynamicLibNotFoundError, and its relatives
        if isinstance(error, NoCudaError | CompileError):
            raise
        raise NoCudaError(
            f"NVRTC, the CUDA compiler, cannot be loaded ({error}); {_INSTALL}"
        ) from None
    major, minor = version
    # Patch releases share a version number; their libraries differ in size.
    size = 0
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        size = Path(path).stat().st_size if path else 0
    except Exception:
        size = 0
    return _Toolchain(
        (int(major), int(minor)),
        f"nvrtc {major}.{minor} ({size} bytes)",
        tuple(sorted(int(a) for a in architectures)),
    )


def _checked(answer: Sequence[object]) -> tuple[int, ...]:
    status, *values = answer
    if int(status) != 0:  # type: ignore[call-overload]
        raise CompileError(f"NVRTC cannot be asked anything: {status!r}")
    value = values[0] if len(values) == 1 else values
    return tuple(value)  # type: ignore[arg-type]


def compiler_identity() -> str:
    """The compiler's version in words, part of every key.  Raises NoCudaError without one."""
    return _toolchain().identity


def target_arch(capability: tuple[int, int], options: CompileOptions) -> str:
    """What to compile for: the device's own architecture, or PTX where the compiler is older.

    Raises InputError if the device is older than anything the compiler knows.
    """
    if options.arch is not None:
        return options.arch
    wanted = capability[0] * 10 + capability[1]
    known = _toolchain().architectures
    if wanted in known:
        return f"sm_{wanted}"
    older = [arch for arch in known if arch < wanted]
    if not older:
        raise InputError(
            f"{compiler_identity()} compiles for {known[0]} and later; this device has compute "
            f"capability {capability[0]}.{capability[1]}: install an older CUDA"
        )
    return f"compute_{older[-1]}"


# -------------------------------------------------------------------------------- the toolkit's own


@functools.cache
def _toolkit_headers() -> str | None:
    """The folder of cuda_fp16.h and its like, or None.

    A recent NVRTC brings its own headers, which fit it by construction; they are unpacked once
    into the cache folder.  For an older one cuda.pathfinder looks for an installed toolkit's.
    """
    version = "-".join(str(part) for part in _toolchain().version)
    for root in (settings.cache_dir() / "headers", Path(tempfile.gettempdir())):
        folder = root / f"ostinato-nvrtc-{version}-{_user()}"
        if _unpack_headers(folder):
            return str(folder)
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        for library in ("cudart", "nvrtc"):
            found = find_nvidia_header_directory(library)
            if found:
                return os.path.normpath(str(found))
    except Exception:
        return None
    return None


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _unpack_headers(folder: Path) -> bool:
    """Makes NVRTC unpack its headers; False if it cannot, or if the folder is not ours."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return False
        done = folder / ".unpacked"
        if done.exists():
            return True
        with FileLock(str(folder / ".lock"), timeout=60):
            if not done.exists():
                answer = _run_nvrtc(
                    "", "unpack.cu", {}, (f"--use-bundled-headers={folder}", "-arch=sm_90"), ()
                )
                if isinstance(answer, _Refusal):
                    return False
                done.touch()
        return True
    except (OSError, Timeout):
        return False


# ----------------------------------------------------------------------------------------- planning


def plan_compilation(
    source: Source,
    options: CompileOptions,
    capability: tuple[int, int],
    expressions: Sequence[str] = (),
) -> Plan:
    """What a compilation depends on.  Reads header files; compiles nothing.

    `expressions` are names of C++ entries ("scale<float>") whose entry names are wanted.
    Raises InputError, NoCudaError, CompileError (bad PTX).
    """
    if source.kind != "cuda":
        if options != CompileOptions():
            raise InputError(
                f"source {source.name!r} is {source.kind} already: options are for CUDA C++"
            )
        if source.kind == "ptx":
            check_ptx(source.data, source.name)
        nothing = Dependencies((), (), (), True)
        key = digest_of([SCHEMA, source.text_digest()])
        return Plan(source, "", (), (), nothing, key, storable=False)
    assert source.cuda is not None
    arch = target_arch(capability, options)
    flags = flags_of(options, arch)
    from_environment = [os.environ.get(name) for name in _COMPILER_VARIABLES]
    words = (*flags, *(w for text in from_environment if text for w in text.split()))
    folders, first = include_dirs(words), pre_includes(words)
    wanted = find_dependencies(source.cuda, source.headers, folders, first=first)
    if wanted.missing:
        toolkit = _toolkit_headers()
        if toolkit is not None:
            # CUDA 13 keeps <cuda/std/…> and <nv/target> one folder down.
            own = [toolkit, os.path.join(toolkit, "cccl")]  # noqa: PTH118
            flags = (*flags, *(f"--include-path={folder}" for folder in own))
            wanted = find_dependencies(
                source.cuda, source.headers, (*folders, *own), first=first, trusted=toolkit
            )
    parts: list[str | bytes | int | None] = [SCHEMA, compiler_identity(), source.text_digest()]
    for group in (flags, tuple(sorted(expressions)), wanted.missing):
        parts += [len(group), *group]
    parts += from_environment
    for file in wanted.files:
        parts += [file.path, file.digest]
    return Plan(
        source=source,
        arch=arch,
        flags=flags,
        expressions=tuple(sorted(expressions)),
        dependencies=wanted,
        key=digest_of(parts),
        storable=wanted.exact and not reads_files(words),
        fixed=wanted.exact and not folders and not reads_files(words),
    )


def is_expression(name: str) -> bool:
    """Whether an entry is named in C++ ("scale<float>", "ns::scale") and not by its symbol."""
    return not _PLAIN_NAME.match(name)


def check_ptx(data: bytes, name: str) -> None:
    """Raises CompileError with line and column of the first byte that is not ASCII.

    The driver's assembler refuses such bytes even in comments, and does not say where they are.
    """
    try:
        data.decode("ascii")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        begin = data.rfind(b"\n", 0, error.start) + 1
        end = data.find(b"\n", error.start)
        text = data[begin : end if end >= 0 else len(data)].decode("utf-8", "replace").rstrip()
        message = (
            f"{name}({line}): column {error.start - begin + 1}: byte {data[error.start]:#04x} is "
            f"not ASCII, which PTX must be also in comments:\n  {line} | {text}"
        )
        raise CompileError(f"PTX {message}", log=message) from None


# ---------------------------------------------------------------------------------------- compiling


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: str
    log: str


def compile_plan(plan: Plan) -> Compiled:
    """Compiles.  Safe from many threads at once.  Raises CompileError with the compiler's log."""
    source = plan.source
    if source.kind != "cuda":
        return Compiled(source.kind, source.data)
    assert source.cuda is not None
    answer = _run_nvrtc(source.cuda, source.name, source.headers, plan.flags, plan.expressions)
    if isinstance(answer, Compiled):
        return answer
    log = answer.log or answer.status
    raise CompileError(
        f"{source.name} does not compile for {plan.arch} ({compiler_identity()}):\n{log}"
        f"{_excerpt(source, log)}",
        log=log,
    )


def _excerpt(source: Source, log: str) -> str:
    """The lines around the first error that lies in the source itself or in a header of it."""
    for match in _ERROR_LINE.finditer(log):
        file, line = match["file"].strip(), int(match["line"])
        text = source.cuda if file == source.name else source.headers.get(file)
        if text is None:
            continue
        lines = text.splitlines()
        shown = [
            f"{'>' if number == line else ' '}{number:5} | {lines[number - 1]}"
            for number in range(max(1, line - 2), min(len(lines), line + 2) + 1)
        ]
        return f"\n\n{file}, line {line}:\n" + "\n".join(shown)
    return ""


def _run_nvrtc(
    text: str,
    name: str,
    headers: dict[str, str] | object,
    flags: Sequence[str],
    expressions: Sequence[str],
) -> Compiled | _Refusal:
    """One NVRTC program from creation to destruction."""
    nvrtc = _nvrtc()
    assert hasattr(headers, "items")
    pairs = [(k.encode(), v.encode("utf-8", "replace")) for k, v in headers.items()]
    status, program = nvrtc.nvrtcCreateProgram(
        text.encode("utf-8", "replace"),
        name.encode("utf-8", "replace"),
        len(pairs),
        [body for _, body in pairs],
        [include for include, _ in pairs],
    )
    if int(status):
        return _Refusal(repr(status), "")
    try:
        for expression in expressions:
            (status,) = nvrtc.nvrtcAddNameExpression(program, expression.encode())
            if int(status):
                return _Refusal(repr(status), f"{expression!r} is no C++ name expression")
        words = [flag.encode() for flag in flags]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if int(result):
            return _Refusal(repr(result), log)
        lowered = {}
        for expression in expressions:
            status, symbol = nvrtc.nvrtcGetLoweredName(program, expression.encode())
            if int(status):
                return _Refusal(repr(status), f"{expression!r} names no kernel of this source")
            lowered[expression] = symbol.decode()
        ptx = any(f.startswith("--gpu-architecture=compute_") for f in flags)
        if ptx:
            data = _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        else:
            data = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Compiled("ptx" if ptx else "cubin", data, log, lowered)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(size_of, fetch, program) -> bytes:  # type: ignore[no-untyped-def]
    status, size = size_of(program)
    if int(status):
        raise CompileError(f"NVRTC does not give its answer: {status!r}")
    data = bytearray(int(size))  # never `bytes`: the binding writes, and short ones are shared
    (status,) = fetch(program, data)
    if int(status):
        raise CompileError(f"NVRTC does not give its answer: {status!r}")
    return bytes(data)


def _text(size_of, fetch, program) -> str:  # type: ignore[no-untyped-def]
    return str(_bytes(size_of, fetch, program).rstrip(b"\0").decode("utf-8", "replace").strip())
