"""CUDA C++ to code for one architecture, with NVRTC; the only file of `modules` that knows `cuda`.

NVRTC is called directly and not through cuda.core's Program, which has no way to give headers from
memory, and whose program object wants a device for its default architecture.

A compilation has two steps, so that the key is known before anything is compiled, and before the
compiler is even loaded:

    plan_compilation(source, options, …) -> Plan     reads headers, makes the key
    compile_plan(plan) -> Compiled                   loads the compiler and runs it

A plan is made for the compiler that is expected (`nvrtc_file`); `confirmed` says, once there is
something to compile, whether it was that one, and else plans again.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.errors import CompileError, InputError
from ostinato.modules.header_index import HeaderIndex
from ostinato.modules.headers import Dependencies, find_dependencies
from ostinato.modules.keys import SCHEMA, digest_of
from ostinato.modules.nvrtc import Toolchain
from ostinato.modules.options import (
    CompileOptions,
    flags_of,
    include_dirs,
    pre_includes,
    reads_files,
)
from ostinato.modules.source import Source
from ostinato.modules.toolkit import headers_folder, unpacked_headers

__all__ = [
    "Compiled",
    "Plan",
    "check_ptx",
    "compile_plan",
    "compiler_identity",
    "confirmed",
    "is_expression",
    "plan_compilation",
    "target_arch",
]

_log = logging.getLogger(__name__)

# The compiler reads these itself, so they belong to every key.
_COMPILER_VARIABLES = ("NVRTC_PREPEND_FLAGS", "NVRTC_APPEND_FLAGS")

_PLAIN_NAME = re.compile(r"[A-Za-z_$][\w$]*\Z")
_ERROR_LINE = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error", re.M)


def _load_with_pathfinder() -> str | None:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return None
    path: str | None = load_nvidia_dynamic_lib("nvrtc").abs_path
    return path


toolchain = Toolchain(_load_with_pathfinder)
"""The compiler of this process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one compilation depends on, and the key made of it."""

    source: Source
    options: CompileOptions
    capability: tuple[int, int]
    flags: tuple[str, ...]
    """All but the architecture."""
    expressions: tuple[str, ...]
    dependencies: Dependencies
    compiler: str
    """The identity of the compiler that this was planned for."""
    key: bytes = field(repr=False)
    storable: bool
    """Whether the key covers all that the compiler reads, so that files may be kept."""
    fixed: bool = True
    """Whether the key stays the same for the process: no folder of the caller's is searched."""

    @property
    def arch(self) -> str:
        """What it is compiled for, which the loaded compiler decides; "" for compiled code."""
        return target_arch(self.capability, self.options) if self.source.kind == "cuda" else ""


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


def compiler_identity() -> str:
    """Which compiler it is, part of every key.  Raises NoCudaError without one."""
    return toolchain.file().identity


def target_arch(capability: tuple[int, int], options: CompileOptions) -> str:
    """What to compile for: the device's own architecture, or PTX where the compiler is older.

    Raises InputError if the device is older than anything the compiler knows, NoCudaError.
    """
    if options.arch is not None:
        return options.arch
    wanted = capability[0] * 10 + capability[1]
    library = toolchain.library()
    known = library.architectures
    if wanted in known:
        return f"sm_{wanted}"
    older = [arch for arch in known if arch < wanted]
    if not older:
        raise InputError(
            f"{library} compiles for {known[0]} and later; this device has compute "
            f"capability {capability[0]}.{capability[1]}: install an older CUDA"
        )
    return f"compute_{older[-1]}"


# -------------------------------------------------------------------------------- the toolkit's own


def _toolkit_headers() -> str | None:
    """The folder of cuda_fp16.h and its like, or None.

    For a compiler without its own, cuda.pathfinder looks for an installed toolkit's.
    """
    return _toolkit_headers_of(toolchain.file().identity)


@functools.cache
def _toolkit_headers_of(compiler: str) -> str | None:
    own = unpacked_headers(toolchain)
    if own is not None:
        return own
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        for library in ("cudart", "nvrtc"):
            found = find_nvidia_header_directory(library)
            if found:
                return os.path.normpath(str(found))
    except Exception:
        return None
    return None


@functools.cache
def _index_of(root: str) -> HeaderIndex:
    index = HeaderIndex(root, headers_folder())
    index.recall()
    return index


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
        return Plan(source, options, capability, (), (), nothing, "", key, storable=False)
    assert source.cuda is not None
    flags = flags_of(options)
    from_environment = [os.environ.get(name) for name in _COMPILER_VARIABLES]
    words = (*flags, *(w for text in from_environment if text for w in text.split()))
    folders, first = include_dirs(words), pre_includes(words)
    wanted = find_dependencies(source.cuda, source.headers, folders, first=first)
    if wanted.missing:
        toolkit = _toolkit_headers()
        if toolkit is not None:
            # CUDA 13 keeps <cuda/std/…> and <nv/target> one folder down.
            own = [toolkit, f"{toolkit}/cccl"]
            index = _index_of(toolkit)
            flags = (*flags, *(f"--include-path={folder}" for folder in own))
            wanted = find_dependencies(
                source.cuda, source.headers, (*folders, *own), first=first, trusted=toolkit
            )
            index.remember()
    # Asked for now: looking for headers may have loaded it.
    compiler = compiler_identity()
    parts: list[str | bytes | int | None] = [SCHEMA, compiler, source.text_digest()]
    # The compiler and the device decide on the architecture together.
    parts += [options.arch] if options.arch else list(capability)
    for group in (flags, tuple(sorted(expressions)), wanted.missing):
        parts += [len(group), *group]
    parts += from_environment
    for file in wanted.files:
        parts += [file.path, file.digest]
    return Plan(
        source=source,
        options=options,
        capability=capability,
        flags=flags,
        expressions=tuple(sorted(expressions)),
        dependencies=wanted,
        compiler=compiler,
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


def confirmed(plan: Plan) -> Plan:
    """The plan itself if it was made for the compiler that is really used, else a new one.

    Loads the compiler.  Raises what `plan_compilation` raises.
    """
    if plan.source.kind != "cuda":
        return plan
    used = toolchain.library().file.identity
    if plan.compiler == used:
        return plan
    _log.info("the compiler is %s; %s was expected", used, plan.compiler)
    return plan_compilation(plan.source, plan.options, plan.capability, plan.expressions)


def compile_plan(plan: Plan) -> Compiled:
    """Compiles.  Safe from many threads at once.  Raises CompileError with the compiler's log."""
    source = plan.source
    if source.kind != "cuda":
        return Compiled(source.kind, source.data)
    assert source.cuda is not None
    plan = confirmed(plan)
    library, arch = toolchain.library(), plan.arch
    ptx = arch.startswith("compute_")
    flags = (f"--gpu-architecture={arch}", *plan.flags)
    answer = library.compile(
        source.cuda, source.name, source.headers, flags, plan.expressions, ptx=ptx
    )
    if not answer.status:
        return Compiled("ptx" if ptx else "cubin", answer.data, answer.log, answer.lowered)
    log = answer.log or library.status_text(answer.status)
    raise CompileError(
        f"{source.name} does not compile for {arch} ({library}):\n{log}{_excerpt(source, log)}",
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
