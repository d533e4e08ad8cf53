"""What a kernel is made of: CUDA C++ text, ready PTX or cubin, host functions, or several of them.

    SCALE = Source(
        'extern "C" __global__ void scale(float* x, float f, unsigned n) { … }',
        host=[scale],                       # a `host_kernel` of the same name
        name="scale.cu",
    )
    device.modules.get_or_compile(SCALE, "scale")      # on a GPU and on the host device

A source with both languages runs on both drivers, and its host kernels' signatures check and pack
the arguments of the CUDA kernels of the same names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.signature import Signature
from ostinato.errors import InputError

__all__ = [
    "BINARY_KINDS",
    "DIGEST_BYTES",
    "SCHEMA",
    "CompileOptions",
    "Source",
    "as_options",
    "as_source",
    "digest_of",
    "flags_of",
    "include_dirs",
    "pre_includes",
    "reads_files",
]

DIGEST_BYTES = 32

# Part of every key and of every file: raised whenever the meaning of either changes.
SCHEMA = 2


def digest_of(parts: Iterable[str | bytes | int | None]) -> bytes:
    """The key of an ordered list of parts.  Text, bytes, numbers and None never collide."""
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

BINARY_KINDS = frozenset({"ptx", "cubin", "fatbin"})
"""Kinds of `Source.data`: code that is compiled already, or that the driver itself assembles."""


class Source:
    """Kernels under one name, immutable.  Equal sources have the same content.

    `cuda` is CUDA C++ text.  `data` with `kind` "ptx" (text or bytes), "cubin" or "fatbin" is
    compiled code instead.  `host` are the functions for the host driver, by entry name.
    `signatures` gives the parameters of entries (text as in `driver.signature`); those of host
    kernels are known.  `headers` are texts that `#include` finds by name, before any folder.
    `name` is shown in the compiler's messages.

    Raises InputError for a kind that is not known, for text and data together, or for nothing.
    """

    __slots__ = ("_hash", "_host", "cuda", "data", "headers", "host", "kind", "name", "signatures")

    cuda: str | None
    data: bytes
    kind: str
    host: Mapping[str, HostKernel]
    signatures: Mapping[str, Signature]
    headers: Mapping[str, str]
    name: str

    def __init__(
        self,
        cuda: str | None = None,
        host: Mapping[str, HostKernel] | Iterable[HostKernel] = (),
        signatures: Mapping[str, str | Signature] | None = None,
        kind: str = "cuda",
        data: str | bytes = b"",
        headers: Mapping[str, str] | None = None,
        name: str = "kernels.cu",
    ) -> None:
        functions = dict(host) if isinstance(host, Mapping) else {k.name: k for k in host}
        for entry, function in functions.items():
            if not isinstance(function, HostKernel):
                raise InputError(
                    f"source {name!r}: host entry {entry!r} is a {type(function).__name__}; "
                    "make it a kernel with @host_kernel('x: *f32, …')"
                )
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
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if cuda is None and not raw and not functions:
            raise InputError(f"source {name!r} is empty: give CUDA C++, data or host kernels")
        if cuda is not None and "\0" in cuda:
            raise InputError(f"source {name!r}: CUDA C++ text cannot hold a zero byte")
        put = object.__setattr__
        put(self, "cuda", cuda)
        put(self, "data", raw)
        put(self, "kind", kind)
        put(self, "host", MappingProxyType(functions))
        put(self, "_host", tuple(sorted((n, id(f)) for n, f in functions.items())))
        put(
            self,
            "signatures",
            MappingProxyType(
                {
                    entry: Signature.parse(text) if isinstance(text, str) else text
                    for entry, text in (signatures or {}).items()
                }
            ),
        )
        put(self, "headers", MappingProxyType(dict(headers or {})))
        put(self, "name", name)
        put(self, "_hash", hash((cuda, raw, kind, name, self._host, tuple(self.headers))))

    @property
    def has_device_code(self) -> bool:
        """Whether there is anything a GPU can run."""
        return self.cuda is not None or bool(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes of text and data, for bounds on what is remembered."""
        texts = (self.cuda or "", *self.headers.values())
        return sum(len(t) for t in texts) + len(self.data)

    def signature(self, entry: str) -> Signature | None:
        """The parameters of an entry, where known: given, else those of the host kernel."""
        given = self.signatures.get(entry)
        if given is not None:
            return given
        function = self.host.get(entry)
        return None if function is None else function.signature

    def text_digest(self) -> bytes:
        """The digest of the device code and in-memory headers alone."""
        parts: list[str | bytes] = [self.kind, self.name, self.cuda or "", self.data]
        for header in sorted(self.headers):
            parts += [header, self.headers[header]]
        return digest_of(parts)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Source cannot be changed (tried to set {name!r}); make another")

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Source):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.cuda == other.cuda
            and self.data == other.data
            and self.kind == other.kind
            and self.name == other.name
            and self._host == other._host
            and self.headers == other.headers
            and self.signatures == other.signatures
        )

    def __repr__(self) -> str:
        languages = [self.kind] if self.has_device_code else []
        if self.host:
            languages.append(f"host[{', '.join(self.host)}]")
        return f"<Source {self.name!r}: {' + '.join(languages)}>"

    _hash: int
    _host: tuple[tuple[str, int], ...]


def as_source(value: Source | str | HostKernel) -> Source:
    """CUDA C++ text, or one host kernel, as a Source.  Raises InputError for anything else."""
    if isinstance(value, Source):
        return value
    if isinstance(value, str):
        return Source(value)
    if isinstance(value, HostKernel):
        return Source(host=[value], name=value.name)
    raise InputError(
        f"{type(value).__name__} is no kernel source; give a Source, CUDA C++ text or a host kernel"
    )


# ------------------------------------------------------------------------------------------ options

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
class CompileOptions:
    """Options of one compilation; equal options give equal code.

    `std` is the C++ dialect; `defines` macros (a mapping, or pairs; None defines without a value);
    `include` folders searched for headers, in order; `max_registers` a limit for each thread;
    `line_info` keeps source lines for profilers; `arch` overrides the device's own architecture
    ("sm_90a", or "compute_90" for PTX); `extra` goes to the compiler as it is.

    Raises InputError for a value that no compiler takes.
    """

    std: str = "c++17"
    defines: tuple[tuple[str, str | None], ...] | Mapping[str, str | None] = ()
    include: tuple[str, ...] | Sequence[str] = ()
    fast_math: bool = False
    max_registers: int | None = None
    line_info: bool = False
    arch: str | None = None
    extra: tuple[str, ...] | Sequence[str] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, value in (("include", self.include), ("extra", self.extra)):
            if isinstance(value, str):
                raise InputError(f"{what}={value!r}: a list is needed")
        macros = dict(self.defines)
        put = object.__setattr__
        put(self, "defines", tuple((k, None if v is None else str(v)) for k, v in macros.items()))
        put(self, "include", tuple(str(path) for path in self.include))
        put(self, "extra", tuple(str(flag) for flag in self.extra))
        if self.arch is not None and not _ARCH.match(self.arch):
            raise InputError(f"arch={self.arch!r}: like 'sm_90', 'sm_90a' or 'compute_90'")
        if self.max_registers is not None and not 16 <= self.max_registers <= 255:
            raise InputError(f"max_registers={self.max_registers}: 16 to 255 are possible")
        for flag in self.extra:
            if _OWN_FIELD.match(flag):
                raise InputError(f"extra flag {flag!r}: the architecture is the option `arch`")
        put(
            self,
            "_hash",
            hash(
                (
                    *(self.std, self.defines, self.include, self.fast_math),
                    *(self.max_registers, self.line_info, self.arch, self.extra),
                )
            ),
        )

    def __hash__(self) -> int:
        return self._hash


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
