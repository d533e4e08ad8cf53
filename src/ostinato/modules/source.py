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
from types import MappingProxyType

from ostinato.driver.host.kernel import HostKernel
from ostinato.driver.signature import Signature
from ostinato.errors import InputError
from ostinato.modules.keys import digest_of

__all__ = ["BINARY_KINDS", "Source", "as_source"]

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
