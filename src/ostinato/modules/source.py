"""The code of kernels: CUDA C++ text, PTX, cubins, host functions, or several of these.

    SCALE = Source(
        'extern "C" __global__ void scale(float* x, float f, unsigned n) { … }',
        host=[scale],                       # a `host_kernel` of the same name
        name="scale.cu",
    )
    device.kernel(SCALE, "scale")           # on a GPU and on the host device

A source with both languages runs on both drivers, and its host kernels' signatures check and pack
the arguments of the CUDA kernels of the same names.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from math import isfinite
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from ostinato.driver.signature import Signature
from ostinato.errors import InputError
from ostinato.records import dataclass

if TYPE_CHECKING:
    from ostinato.driver.host.kernel import HostKernel

DIGEST_BYTES = 32

# Part of every key and of every file; must be raised whenever the meaning of either changes.
SCHEMA = 2


def digest_of(parts: Iterable[str | bytes | int | None]) -> bytes:
    """Returns the key of an ordered list of parts.  Text, bytes, numbers and None never collide."""
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


# ------------------------------------------------------------------------------------------ sources

_MAGIC = {"cubin": b"\x7fELF", "fatbin": b"\x50\xed\x55\xba"}
# Comments and blank lines may precede the first directive.
_PTX = r"(?s)(?:\s|//[^\n]*\n|/\*.*?\*/)*\.version\s"
_FILE_NAME = r"[^\n;{}()#]*\.(?:cu|cuh|cubin|ptx|fatbin|c|cc|cpp|h|hpp)"

BINARY_KINDS = frozenset({"ptx", "cubin", "fatbin"})
"""Kinds of `Source.data`: code that is compiled already, or that the driver itself assembles."""


@dataclass(frozen=True, slots=True, repr=False)
class _Content:
    """The fields of `Source`."""

    cuda: str | None
    data: bytes
    kind: str
    host: Mapping[str, HostKernel] = field(compare=False)
    signatures: Mapping[str, Signature] = field(hash=False)
    headers: Mapping[str, str] = field(hash=False)
    name: str
    _host: tuple[tuple[str, int], ...]
    """Host kernels by identity: the functions live as long as the source."""


class Source(_Content):
    """Kernels under one name, immutable.  Equal sources have the same content.

        SCALE = ost.Source(CUDA_TEXT, host=[scale], name="scale.cu")
        kernel = device.kernel(SCALE, "scale")

    `cuda`: CUDA C++ text.  `data` with `kind` "ptx" (text or bytes), "cubin" or "fatbin": compiled
    code instead.  `host`: the functions for the host driver, by entry name.  `signatures`: the
    parameters of entries (text as in `driver.signature`); those of host kernels are known.  The
    names of CUDA entries are known once the code is compiled: then a kernel without a signature
    here is refused if one of these signatures is for no entry.  `headers`: texts that `#include`
    finds by name, before any folder.  `name`: shown in the compiler's messages.

    Raises InputError for an unknown kind, for text and data together, for an empty source, for a
    file's name in place of text (`Source.from_file`), for two host kernels of one name, for text
    with a zero byte, where C would cut it, and for a signature of no entry if there are only host
    kernels.
    """

    __slots__ = ()

    def __init__(
        self,
        cuda: str | None = None,
        host: Mapping[str, HostKernel] | Iterable[HostKernel] = (),
        signatures: Mapping[str, str | Signature] | None = None,
        kind: str = "cuda",
        data: str | bytes = b"",
        headers: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        name = "kernels.cu" if name is None else name
        _require_text("a source's name", name)
        functions = _host_functions(name, host)
        if kind != "cuda" and kind not in BINARY_KINDS:
            raise InputError(
                f"source {name!r}: kind {kind!r} is not known; there are: cuda, "
                f"{', '.join(sorted(BINARY_KINDS))}"
            )
        if (kind == "cuda" and data) or (kind != "cuda" and cuda is not None):
            raise InputError(
                f"source {name!r}: give CUDA C++ as `cuda`, or compiled code as `data` with its "
                f"kind ({', '.join(sorted(BINARY_KINDS))}), not a mixture"
            )
        _refuse_file_name(cuda)
        _refuse_file_name(data)
        if not isinstance(data, str | bytes | bytearray | memoryview):
            raise InputError(f"source {name!r}: data is {type(data).__name__}; text or bytes")
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if cuda is None and not raw and not functions:
            raise InputError(f"source {name!r} is empty: give CUDA C++, data or host kernels")
        if cuda is not None:
            _require_code(name, cuda)
        for header, text in dict(headers or {}).items():
            _require_text(f"source {name!r}: a header's name", header)
            _require_text(f"source {name!r}: header {header!r}", text)
        parsed = {
            entry: Signature.parse(text) if isinstance(text, str) else text
            for entry, text in (signatures or {}).items()
        }
        for entry, given in parsed.items():
            if not isinstance(given, Signature):
                raise InputError(
                    f"source {name!r}: the signature of {entry!r} is {type(given).__name__}; "
                    "give text or a Signature"
                )
        if not raw and cuda is None:
            require_entries(f"source {name!r}", parsed, functions)
        super().__init__(
            cuda,
            raw,
            kind,
            MappingProxyType(functions),
            MappingProxyType(parsed),
            MappingProxyType(dict(headers or {})),
            name,
            tuple(sorted((n, id(f)) for n, f in functions.items())),
        )

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        host: Mapping[str, HostKernel] | Iterable[HostKernel] = (),
        signatures: Mapping[str, str | Signature] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Self:
        """Returns a source with a file's content: a cubin, a fatbin, PTX, or CUDA C++ (UTF-8).

        The first bytes determine the kind; for PTX, also the suffix `.ptx`.  The source has the
        file's name.  Headers beside a CUDA C++ file are found if `CompileOptions.include` names
        their folder.  Raises InputError if the file cannot be read.
        """
        try:
            raw = Path(path).read_bytes()
        except (OSError, TypeError, ValueError) as error:
            raise InputError(f"Source.from_file({path!r}): {error}") from None
        kind = next((k for k, magic in _MAGIC.items() if raw.startswith(magic)), "cuda")
        if kind == "cuda" and (
            Path(path).suffix == ".ptx" or re.match(_PTX, raw.decode("latin-1"))
        ):
            kind = "ptx"
        about: dict[str, Any] = {"host": host, "signatures": signatures, "name": Path(path).name}
        if kind != "cuda":
            return cls(kind=kind, data=raw, headers=headers, **about)
        try:
            return cls(raw.decode("utf-8-sig"), headers=headers, **about)
        except UnicodeDecodeError as error:
            raise InputError(
                f"Source.from_file({path!r}): neither CUDA C++ in UTF-8 ({error}) nor a cubin, a "
                "fatbin or PTX"
            ) from None

    @property
    def has_device_code(self) -> bool:
        """True if a GPU can run any of it."""
        return self.cuda is not None or bool(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of text and data, for the bounds of caches."""
        texts = (self.cuda or "", *self.headers.values())
        return sum(len(t) for t in texts) + len(self.data)

    def signature(self, entry: str) -> Signature | None:
        """Returns the parameters of an entry, from `signatures` or the host kernel, or None."""
        given = self.signatures.get(entry)
        if given is not None:
            return given
        function = self.host.get(entry)
        return None if function is None else function.signature

    def text_digest(self) -> bytes:
        """Returns the digest of the device code and in-memory headers alone."""
        parts: list[str | bytes] = [self.kind, self.name, self.cuda or "", self.data]
        for header in sorted(self.headers):
            parts += [header, self.headers[header]]
        return digest_of(parts)

    def __repr__(self) -> str:
        languages = [self.kind] if self.has_device_code else []
        if self.host:
            languages.append(f"host[{', '.join(self.host)}]")
        return f"<Source {self.name!r}: {' + '.join(languages)}>"


def require_entries(
    what: str, signatures: Mapping[str, Signature], entries: Collection[str]
) -> None:
    """Raises InputError for a signature of an entry that is not among `entries`.

    A plain name also matches a C++ entry's symbol.  Names of template instances are not checked:
    code contains only the requested ones.
    """
    for name in signatures:
        mangled = f"_Z{len(name)}{name}"
        if not name.isidentifier() or any(e == name or e.startswith(mangled) for e in entries):
            continue
        raise InputError(
            f"{what}: signatures has {name!r}, which is no entry; there are: "
            f"{', '.join(entries) or 'none'}"
        )


def _require_code(name: str, value: object) -> None:
    """Raises InputError for compiled code and PTX as CUDA C++."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise InputError(
            f"source {name!r}: cuda is text, not {type(value).__name__}; give compiled code as "
            "`data` with its kind, or let Source.from_file read it"
        )
    _require_text(f"source {name!r}: cuda", value)
    if re.match(_PTX, str(value)):
        raise InputError(f'source {name!r} is PTX: Source(kind="ptx", data=text)')


def _refuse_file_name(value: object) -> None:
    """Raises InputError for the name of a file, which is not code."""
    if isinstance(value, PathLike) or (isinstance(value, str) and re.fullmatch(_FILE_NAME, value)):
        raise InputError(
            f"{value!r} is the name of a file, and code is needed: Source.from_file reads files"
        )


def kernel(
    signature: str, cuda: str, *, name: str | None = None
) -> Callable[[Callable[..., object]], Source]:
    """Returns a decorator that makes a `Source` of one kernel in both languages, for both drivers.

        @ost.kernel("x: *f32, factor: f32, n: u32", r\"\"\"
        extern "C" __global__ void scale(float* x, float factor, unsigned n) { … }\"\"\")
        def scale(launch, x, factor, n):
            x[:n] *= factor

        loaded = device.kernel(scale)

    The function is the kernel for the CPU, as for `host_kernel`, and must do the same.  `cuda`:
    CUDA C++ text with a kernel of the function's name, or of `name`.  Raises InputError as
    `host_kernel` and `Source` do.
    """
    from ostinato.driver.host.kernel import host_kernel

    made = host_kernel(signature, name=name)

    def decorate(function: Callable[..., object]) -> Source:
        host = made(function)
        return Source(cuda, host=[host], name=f"{host.name}.cu")

    return decorate


def only_kernel_of(source: Source) -> str:
    """Returns the name of the only kernel that a source is known to have.

    Raises InputError if none is known, or several are.
    """
    names = {*source.host, *source.signatures}
    if len(names) == 1:
        return names.pop()
    known = f": {', '.join(sorted(names))}" if names else ""
    raise InputError(
        f"source {source.name!r}: name the kernel (device.kernel(source, name)), which is only "
        f"known of a source with one host kernel or signature; it has {len(names)}{known}"
    )


def _require_text(what: str, value: object) -> None:
    """Raises InputError unless a value is text without a zero byte, where C would cut it."""
    if not isinstance(value, str):
        raise InputError(f"{what} is {type(value).__name__}; text is needed")
    if "\0" in value:
        raise InputError(f"{what} cannot hold a zero byte: {value[:40]!r}")


def _host_functions(
    name: str, host: Mapping[str, HostKernel] | Iterable[HostKernel]
) -> dict[str, HostKernel]:
    """Returns host kernels by entry name.  Raises InputError."""
    if isinstance(host, Mapping):
        given = list(host.items())
    elif not isinstance(host, Iterable):
        raise InputError(f"source {name!r}: host is a list (host=[f]), not {type(host).__name__}")
    else:
        given = [(getattr(kernel, "name", "?"), kernel) for kernel in host]
    if not given:
        return {}
    from ostinato.driver.host.kernel import HostKernel

    functions: dict[str, HostKernel] = {}
    for entry, function in given:
        if not isinstance(function, HostKernel):
            raise InputError(
                f"source {name!r}: host entry {entry!r} is a {type(function).__name__}; "
                "make it a kernel with @host_kernel('x: *f32, …')"
            )
        if functions.setdefault(entry, function) is not function:
            raise InputError(f"source {name!r}: two host kernels have the name {entry!r}")
    return functions


def as_source(value: Source | str | HostKernel) -> Source:
    """Returns CUDA C++ text or a host kernel as a Source.  Raises InputError for other values."""
    if isinstance(value, Source):
        return value
    _refuse_file_name(value)
    if isinstance(value, str):
        return Source(value)
    from ostinato.driver.host.kernel import HostKernel

    if isinstance(value, HostKernel):
        return Source(host=[value], name=value.name)
    raise InputError(
        f"{type(value).__name__} is no kernel source; give a Source, CUDA C++ text or a host kernel"
    )


# ------------------------------------------------------------------------------------------ options

_ARCH = r"(sm|compute)_\d+[af]?\Z"
_OWN_FIELD = r"--?(gpu-architecture|arch)\b"
_INCLUDE_DIR = ("-I", "--include-path")
_PRE_INCLUDE = ("-include", "--pre-include")
# Flags that make the compiler or the assembler read files that it does not list as headers, search
# folders that are not named, or pass on options that are not known here.
_READS_FILES = (
    r"(?s)--?(?:(?:use|create)[-_]pch|pch|use-bundled|options-file|optf|apply-controls|Xcudafe)|@"
    r"|.*(?:ptxas|nvvm).*(?:file|optf|controls|@)"
)


@dataclass(frozen=True, slots=True)
class _OptionFields:
    """The fields of `CompileOptions`, every list as a tuple."""

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

    `std`: the C++ dialect.  `defines`: macros (a mapping, or pairs, to text or numbers; None
    defines without a value).  `include`: folders searched for headers, in order.  `max_registers`:
    a limit per thread.  `line_info`: keeps source lines for profilers.  `arch`: overrides the
    device's own architecture ("sm_90a", or "compute_90" for PTX).  `extra`: flags passed to the
    compiler unchanged.

    Raises InputError for a value that no compiler accepts.
    """

    __slots__ = ()

    def __init__(
        self,
        std: str = "c++17",
        defines: Mapping[str, str | float | None] | Iterable[tuple[str, str | float | None]] = (),
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
        _require_text("std", std)
        flags = tuple(extra)
        if arch is not None and not (isinstance(arch, str) and re.match(_ARCH, arch)):
            raise InputError(f"arch={arch!r}: like 'sm_90', 'sm_90a' or 'compute_90'")
        if max_registers is not None and not (
            isinstance(max_registers, SupportsIndex) and 16 <= max_registers <= 255
        ):
            raise InputError(f"max_registers={max_registers!r}: 16 to 255 are possible")
        for switch, on in (("fast_math", fast_math), ("line_info", line_info)):
            if not isinstance(on, bool):
                raise InputError(f"{switch}={on!r}: True or False")
        for flag in flags:
            _require_text("an extra flag", flag)
            if re.match(_OWN_FIELD, flag):
                raise InputError(f"extra flag {flag!r}: the architecture is the option `arch`")
        super().__init__(
            std,
            _macros(defines),
            _folders(include),
            fast_math,
            max_registers,
            line_info,
            arch,
            flags,
        )


def _macros(
    defines: Mapping[str, str | float | None] | Iterable[tuple[str, str | float | None]],
) -> tuple[tuple[str, str | None], ...]:
    """Returns macros with their values as text.  Raises InputError.

    True and False, infinities and NaN are refused: written as in Python they are undefined names in
    C++, which #if treats as 0.  Members of an Enum are their values.
    """
    try:
        pairs = dict(defines).items()
    except (TypeError, ValueError):
        raise InputError(f"defines={defines!r}: a mapping, or pairs, of names and values") from None
    macros: list[tuple[str, str | None]] = []
    for name, value in pairs:
        _require_text("a macro's name", name)
        text = None if value is None else _macro_text(value)
        if text is None and value is not None:
            raise InputError(f"defines: {name!r} is {value!r}; text or a number is needed, or None")
        macros.append((name, text))
        _require_text(f"defines: {name!r}", text or "")
    return tuple(macros)


def _macro_text(value: object) -> str | None:
    """Returns a macro's value in C++ syntax; None for what is neither text nor a number."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return str(int(value))
    with suppress(OverflowError):
        number = float(value)  # a Fraction is written as a division of whole numbers
        return str(number) if isfinite(number) else None
    return None


def _folders(include: Iterable[str | PathLike[str]]) -> tuple[str, ...]:
    """Returns the folders as text.  Raises InputError."""
    try:
        folders = tuple(os.fsdecode(path) for path in include)
    except TypeError as error:
        raise InputError(f"include: {error}") from None
    for folder in folders:
        _require_text("a folder of include", folder)
    return folders


DEFAULT = CompileOptions()


def as_options(value: CompileOptions | Sequence[str]) -> CompileOptions:
    """Returns options; plain compiler flags become options."""
    if isinstance(value, CompileOptions):
        return value
    if isinstance(value, str):
        raise InputError(f"options={value!r}: give a list of flags, or CompileOptions")
    return CompileOptions(extra=tuple(value)) if value else DEFAULT


def flags_of(options: CompileOptions) -> tuple[str, ...]:
    """Returns the compiler's flags without the architecture, which depends on the compiler too."""
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


def _values(flags: Sequence[str], names: tuple[str, str]) -> tuple[str, ...]:
    """Returns the values of a flag, of these two names, that is written as -Ixxx, as --flag=xxx, or
    as two words.

    The compiler ignores spaces before a value unless they follow a "="; so does this function.
    """
    found: list[str] = []
    pending = False
    for flag in flags:
        if pending:
            found.append(flag.lstrip())
            pending = False
            continue
        for name in names:
            if flag.startswith(name):
                value = flag.removeprefix(name)
                value = value[1:] if value.startswith("=") else value.lstrip()
                if value or flag.endswith("="):
                    found.append(value)
                else:
                    pending = True
    return tuple(found)


def include_dirs(flags: Sequence[str]) -> tuple[str, ...]:
    """Returns the folders that a command line searches for headers."""
    return _values(flags, _INCLUDE_DIR)


def pre_includes(flags: Sequence[str]) -> tuple[str, ...]:
    """Returns the headers that a command line includes before the source."""
    return _values(flags, _PRE_INCLUDE)


def reads_files(flags: Sequence[str]) -> bool:
    """True if the compiler would read files that this library cannot track."""
    return any(re.match(_READS_FILES, flag) for flag in flags)
