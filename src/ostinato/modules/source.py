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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.signature import Signature
from ostinato.errors import InputError
from ostinato.modules.keys import digest_of

__all__ = ["BINARY_KINDS", "Source", "as_source"]

BINARY_KINDS = frozenset({"ptx", "cubin", "fatbin"})
"""Kinds of `Source.data`: code that is compiled already, or that the driver itself assembles."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Content:
    """`Source` as it is kept."""

    cuda: str | None
    data: bytes
    kind: str
    host: Mapping[str, HostKernel]
    signatures: Mapping[str, Signature]
    headers: Mapping[str, str]
    name: str
    _host: tuple[tuple[str, int], ...]
    """Host kernels by identity: the functions live as long as the source."""


class Source(_Content):
    """Kernels under one name, immutable.  Equal sources have the same content.

    `cuda` is CUDA C++ text.  `data` with `kind` "ptx" (text or bytes), "cubin" or "fatbin" is
    compiled code instead.  `host` are the functions for the host driver, by entry name.
    `signatures` gives the parameters of entries (text as in `driver.signature`); those of host
    kernels are known.  `headers` are texts that `#include` finds by name, before any folder.
    `name` is shown in the compiler's messages.

    Raises InputError for a kind that is not known, for text and data together, or for nothing.
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
        parsed = {
            entry: Signature.parse(text) if isinstance(text, str) else text
            for entry, text in (signatures or {}).items()
        }
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

    def __hash__(self) -> int:
        return hash((self.cuda, self.data, self.kind, self.name, self._host, tuple(self.headers)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Source):
            return NotImplemented
        return (
            self.cuda == other.cuda
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
