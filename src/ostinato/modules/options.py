"""How CUDA C++ is compiled: typed options, and what they are called on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

from ostinato.errors import InputError

__all__ = [
    "CompileOptions",
    "as_options",
    "flags_of",
    "include_dirs",
    "pre_includes",
    "reads_files",
]

_ARCH = re.compile(r"(sm|compute)_\d+[af]?\Z")
_OWN_FIELD = re.compile(r"--?(gpu-architecture|arch)\b")
_INCLUDE_DIR = re.compile(r"(?:-I|--include-path)=?\s*(?P<path>.*)\Z", re.DOTALL)
_PRE_INCLUDE = re.compile(r"(?:-include|--pre-include)=?(?P<path>.*)\Z", re.DOTALL)
# Flags that make the compiler, or the assembler after it, read files that it does not list as
# headers, search folders that are not named, or that hand on what is not known here.
_READS_FILES = re.compile(
    r"--?(?:(?:use|create)[-_]pch|pch|use-bundled|options-file|optf|Xcudafe)|@|.*ptxas.*(?:file|@)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _OptionFields:
    """`CompileOptions` as they are kept, every list a tuple."""

    std: str
    defines: tuple[tuple[str, str | None], ...]
    include: tuple[str, ...]
    fast_math: bool
    max_registers: int | None
    line_info: bool
    arch: str | None
    extra: tuple[str, ...]


class CompileOptions(_OptionFields):
    """Options of one compilation; equal options give equal code.

    `std` is the C++ dialect; `defines` macros (a mapping, or pairs; None defines without a value);
    `include` folders searched for headers, in order; `max_registers` a limit for each thread;
    `line_info` keeps source lines for profilers; `arch` overrides the device's own architecture
    ("sm_90a", or "compute_90" for PTX); `extra` goes to the compiler as it is.

    Raises InputError for a value that no compiler takes.
    """

    __slots__ = ()

    def __init__(
        self,
        std: str = "c++17",
        defines: Mapping[str, str | None] | Iterable[tuple[str, str | None]] = (),
        include: Iterable[str | PathLike[str]] = (),
        fast_math: bool = False,
        max_registers: int | None = None,
        line_info: bool = False,
        arch: str | None = None,
        extra: Iterable[str] = (),
    ) -> None:
        for what, value in (("include", include), ("extra", extra)):
            if isinstance(value, str):
                raise InputError(f"{what}={value!r}: a list is needed")
        flags = tuple(str(flag) for flag in extra)
        if arch is not None and not _ARCH.match(arch):
            raise InputError(f"arch={arch!r}: like 'sm_90', 'sm_90a' or 'compute_90'")
        if max_registers is not None and not 16 <= max_registers <= 255:
            raise InputError(f"max_registers={max_registers}: 16 to 255 are possible")
        for flag in flags:
            if _OWN_FIELD.match(flag):
                raise InputError(f"extra flag {flag!r}: the architecture is the option `arch`")
        super().__init__(
            std,
            tuple((k, None if v is None else str(v)) for k, v in dict(defines).items()),
            tuple(str(path) for path in include),
            fast_math,
            max_registers,
            line_info,
            arch,
            flags,
        )


DEFAULT = CompileOptions()


def as_options(value: CompileOptions | Sequence[str]) -> CompileOptions:
    """Options as given, or plain compiler flags as options."""
    if isinstance(value, CompileOptions):
        return value
    if isinstance(value, str):
        raise InputError(f"options={value!r}: give a list of flags, or CompileOptions")
    return CompileOptions(extra=tuple(value)) if value else DEFAULT


def flags_of(options: CompileOptions) -> tuple[str, ...]:
    """The compiler's command line without the architecture, which the compiler has a say in."""
    flags = [f"--std={options.std}"]
    for name, value in dict(options.defines).items():
        flags.append(
            f"--define-macro={name}" if value is None else f"--define-macro={name}={value}"
        )
    flags += [f"--include-path={path}" for path in options.include]
    if options.fast_math:
        flags.append("--use_fast_math")
    if options.max_registers is not None:
        flags.append(f"--maxrregcount={options.max_registers}")
    if options.line_info:
        flags.append("--generate-line-info")
    return (*flags, *options.extra)


def _values(flags: Sequence[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    """The values of a flag that is written as -Ixxx, --flag=xxx, or as two words."""
    found: list[str] = []
    pending = False
    for flag in flags:
        if pending:
            found.append(flag)
            pending = False
            continue
        match = pattern.match(flag)
        if match is None:
            continue
        if match["path"] or flag.endswith("="):
            found.append(match["path"])
        else:
            pending = True
    return tuple(found)


def include_dirs(flags: Sequence[str]) -> tuple[str, ...]:
    """The folders that a command line searches for headers."""
    return _values(flags, _INCLUDE_DIR)


def pre_includes(flags: Sequence[str]) -> tuple[str, ...]:
    """The headers that a command line includes before the source."""
    return _values(flags, _PRE_INCLUDE)


def reads_files(flags: Sequence[str]) -> bool:
    """Whether the compiler would read files that this library cannot follow."""
    return any(_READS_FILES.match(flag) for flag in flags)
