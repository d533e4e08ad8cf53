"""`ModuleCache`: every source is compiled once and loaded once.

    get_or_compile ──> fast: the caller's arguments       (a dictionary, no lock)
                  └──> key: digest of source and options  (no file is read)
                        └──> memory: loaded modules       (one lock, held for look-ups only)
                              └──> one maker a key:  disk ──> compiler ──> load

Code compiled with header files is used again only while those are unchanged (`headers`).  A thread
that needs a key which another thread is making waits for it; other keys do not wait.  A cache
belongs to one device, so a kernel of one device is never given to another; devices of one
architecture share the files on disk.

States of a key: unknown -> being made -> loaded (-> evicted -> unknown), or -> failed.  A failed
compilation that read no file is remembered by the process and never written to disk.  Other
failures (no memory, no compiler, a capture under way) are not remembered: the next caller tries
again.  Ctrl-C leaves a key unknown.

The memory store bounds the number and bytes of loaded modules.  It evicts the least recently used
modules without other references: a kernel that was given out, or a graph that keeps it, holds one.
To find out, the store drops its own references and checks whether the module still exists.
Evicting does not unload: the module's finaliser retires it.
"""

from __future__ import annotations

import itertools
import os
import re
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ostinato.driver.api import Image, parse_bytes
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context
from ostinato.driver.forking import new_lock
from ostinato.driver.location import caller_location
from ostinato.driver.signature import Signature
from ostinato.errors import (
    CaptureBrokenError,
    ClosedError,
    CompileError,
    DriverError,
    InputError,
    Status,
    StreamCaptureError,
)
from ostinato.logs import logger
from ostinato.modules.compiler import (
    Compiled,
    CompileFailure,
    Plan,
    Question,
    ask,
    confirmed,
    is_current,
    try_plan,
)
from ostinato.modules.disk import DiskStatistics, DiskStore
from ostinato.modules.headers import Inputs
from ostinato.modules.kernel import Kernel, LoadedModule
from ostinato.modules.source import (
    CompileOptions,
    Source,
    as_options,
    as_source,
    require_entries,
)
from ostinato.records import dataclass

if TYPE_CHECKING:
    from ostinato.driver.host.kernel import HostKernel

AnySource: TypeAlias = "Source | str | HostKernel"
PreloadItem: TypeAlias = Kernel | tuple[AnySource, str | Sequence[str]]

T = TypeVar("T")

_MAX_FAILURES = 256
_COUNTED = ("misses", "waits", "compiles", "failures", "known_failures")

# A zero byte would end the name in C, and lone surrogates are not text.
_NO_NAME = "[\0\ud800-\udfff]"

# Statuses caused by the code, not by the machine.
_BAD_CODE = frozenset(
    {
        Status.INVALID_IMAGE,
        Status.NO_BINARY_FOR_GPU,
        Status.INVALID_PTX,
        Status.UNSUPPORTED_PTX_VERSION,
        Status.INVALID_SOURCE,
    }
)


class _OtherCompilerError(Exception):
    """The key was made for another compiler than the one that was loaded."""


@dataclass(frozen=True, slots=True)
class ModuleCacheStatistics:
    """Counts of a module cache since it was made.

    Calls by outcome: `hits` found the kernel in memory, `waits` waited for another thread's
    compilation, `known_failures` raised a remembered CompileError.  `nbytes`: code and source text
    that the cache holds.
    """

    modules: int
    nbytes: int
    hits: int
    misses: int
    waits: int
    compiles: int
    compile_seconds: float
    failures: int
    known_failures: int
    evictions: int
    disk: DiskStatistics | None


class ModuleCache(Closeable):
    """The kernels of one device: `device.modules`.

    `disk`: a store, a folder, True for the folder of the settings, False for none.  `max_modules`
    and `max_bytes` bound the modules that are kept loaded; those in use are never evicted, and may
    exceed the bounds.  Thread-safe.  `close()` or the end of `with` evicts everything; kernels that
    were given out stay valid.
    """

    def __init__(
        self,
        context: Context,
        *,
        disk: DiskStore | Path | str | bool = True,
        max_modules: int = 1024,
        max_bytes: int | str = "256 MiB",
    ) -> None:
        if max_modules < 1:
            raise InputError(f"max_modules={max_modules}: 1 or more")
        limit = parse_bytes(max_bytes, "max_bytes", 1)
        self.context = context
        self.disk: DiskStore | None = None
        if isinstance(disk, DiskStore):
            self.disk = disk
        elif disk is not False:
            self.disk = DiskStore(None if disk is True else disk)
        self._store = MemoryStore(max_modules, limit)
        self._fast = self._store.fast
        # Reentrant: the garbage collector may run a finaliser here that calls this cache.
        self._lock = new_lock()
        self._makers: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        """Locks of the keys being made; the makers hold them, and other threads wait for them."""
        self._failed: OrderedDict[bytes, CompileFailure] = OrderedDict()
        # Counts hits and numbers them, for the times of last use: one call without a lock.
        self._clock = itertools.count(1)
        self._not_hits = 0
        self._counts: Counter[str] = Counter()
        self._compile_seconds = 0.0
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        kept = f"{len(self._store)} modules, {self._store.nbytes} bytes"
        return f"<ModuleCache {kept} on {self.context.driver.name}{state}>"

    def get_or_compile(
        self,
        source: AnySource,
        name: str,
        *,
        options: CompileOptions | Sequence[str] = (),
        signature: Signature | str | None = None,
    ) -> Kernel:
        """Returns the kernel `name` of `source`, compiling and loading it if needed.

        `source` is a Source, CUDA C++ text, or a host kernel.  `name` is the entry's symbol, its
        plain C++ name, or a C++ name expression ("scale<float>").  `signature` takes precedence
        over the source's own.  Each call checks headers on disk, except the toolkit's.

        Raises CompileError with the compiler's log; InputError for an unknown name (lists the
        existing ones), also for one in the source's signatures if this kernel has no signature
        there; NotAvailableError for a source without this device's language; NoCudaError without a
        compiler; CaptureBrokenError if a capture under way forbids loading now.
        """
        try:
            kernel = self._fast[source, name, options, signature]
        except (KeyError, TypeError):
            return self._get(source, name, options, signature)
        kernel.module.last_use = next(self._clock)
        return kernel

    def preload(
        self,
        items: Iterable[PreloadItem],
        *,
        options: CompileOptions | Sequence[str] = (),
    ) -> tuple[Kernel, ...]:
        """Compiles and loads all of `items`, so that no capture has to load anything.

        Items are (source, name), (source, [names]) or kernels.  Several sources are compiled in
        parallel.  Keep the result as long as captures may use it: a kernel without references may
        be evicted.  Raises what `get_or_compile` raises, for the first item that fails.
        """
        wanted: list[Kernel | tuple[AnySource, str]] = []
        sources: set[int] = set()
        for item in items:
            if isinstance(item, Kernel):
                self.context.driver.function_load(item.function)
                wanted.append(item)
                continue
            if not (isinstance(item, tuple | list) and len(item) == 2):
                raise InputError(
                    "preload takes a list of (source, name), (source, [names]) and kernels; "
                    f"{item!r} is none of these"
                )
            source, names = item
            sources.add(id(source))
            wanted += [(source, n) for n in ([names] if isinstance(names, str) else names)]

        def loaded(one: Kernel | tuple[AnySource, str]) -> Kernel:
            return one if isinstance(one, Kernel) else self.get_or_compile(*one, options=options)

        if len(sources) < 2:
            return tuple(map(loaded, wanted))
        from concurrent.futures import ThreadPoolExecutor  # here, since a start needs none

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            try:
                return tuple(pool.map(loaded, wanted))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # cancels those that have not begun
                raise

    def statistics(self) -> ModuleCacheStatistics:
        """Returns the counts of this cache and of its disk store."""
        with self._lock:
            self._not_hits += 1
            return ModuleCacheStatistics(
                modules=len(self._store),
                nbytes=self._store.nbytes,
                hits=next(self._clock) - self._not_hits,
                **{name: self._counts[name] for name in _COUNTED},
                compile_seconds=self._compile_seconds,
                evictions=self._store.evictions,
                disk=None if self.disk is None else self.disk.statistics(),
            )

    def close(self) -> None:
        """Evicts all modules; those that kernels and graphs still use stay loaded.  Idempotent."""
        with self._lock:
            self._closed = True
            self._store.clear()
            self._failed.clear()
        self.context.collect()

    # --- the path of a kernel that `fast` does not have
    def _get(
        self,
        source: AnySource,
        name: str,
        options: CompileOptions | Sequence[str],
        signature: Signature | str | None,
    ) -> Kernel:
        self.context.require_open()
        if self._closed:
            raise ClosedError("this module cache is closed; open the device again")
        if not isinstance(name, str) or not name or re.search(_NO_NAME, name):
            raise InputError(f"the kernel's name is {name!r}; a name in C++ is needed")
        known = as_source(source)
        chosen = as_options(options)
        if not (signature is None or isinstance(signature, str | Signature)):
            raise InputError(f"signature={signature!r}: give text like 'x: *f32, n: u32'")
        parsed = Signature.parse(signature) if isinstance(signature, str) else signature
        if parsed is None:
            parsed = known.signature(name)
        asked = ask(self.context.driver, known, name, chosen)
        try:
            stored = self._stored(asked, name)
        except _OtherCompilerError:
            # The compiler is loaded now, so its identity is certain.
            asked = ask(self.context.driver, known, name, chosen)
            stored = self._stored(asked, name)
        module = stored.module
        unsigned = signature is None and name not in known.signatures
        if unsigned and known.signatures and asked.plan is not None:
            require_entries(f"source {known.name!r}", known.signatures, module.names)
        with self._lock:
            kernel = self._store.kernel(asked.key, name, parsed)
        if kernel is None or kernel.module is not module:
            kernel = self._loading(name, lambda: module.kernel(name, parsed))
            with self._lock:
                kernel = self._store.add_kernel(asked.key, name, parsed, kernel)
        fast_key: Hashable = (source, name, options, signature)
        if stored.inputs.fixed:
            with self._lock, suppress(TypeError):  # arguments that cannot be hashed
                if not self._closed:
                    self._store.add_fast(asked.key, fast_key, kernel, known.nbytes)
        return kernel

    def _stored(self, asked: Question, name: str) -> CachedModule:
        """Returns the module of a key; if it is not loaded, this thread or another one makes it."""
        stored = self._in_memory(asked.key)
        if stored is not None:
            stored.module.last_use = next(self._clock)
            return stored
        with self._lock:
            maker = self._makers.get(asked.key)
            if maker is None:
                maker = self._makers[asked.key] = new_lock()
            else:
                self._counts["waits"] += 1
        with maker:
            stored = self._in_memory(asked.key)  # made by another thread meanwhile
            if stored is None:
                with self._lock:
                    self._counts["misses"] += 1
                stored = self._loading(name, lambda: self._make(asked))
                with self._lock:
                    if not self._closed:
                        stored.module.last_use = next(self._clock)
                        self._not_hits += 1
                        self._store.add(asked.key, stored)
        self.context.collect()  # unloads what the store evicted
        return stored

    def _in_memory(self, key: bytes) -> CachedModule | None:
        """Returns the loaded module if its headers are unchanged.  Raises a remembered
        CompileError."""
        with self._lock:
            stored = self._store.get(key)
            failure = self._failed.get(key)
            if failure is not None:
                self._failed.move_to_end(key)
                self._counts["known_failures"] += 1
                raise failure.error()
        if stored is None or stored.inputs.fixed or is_current(stored.inputs):
            return stored
        return None

    def _make(self, asked: Question) -> CachedModule:
        source, plan = asked.source, asked.plan
        if plan is None:
            image = Image("host", functions=dict(source.host))
            module = LoadedModule(self.context, image, name=source.name, keep=source)
            return CachedModule(module, Inputs(), module.nbytes + source.nbytes)
        disk = self.disk if plan.storable else None
        compiled = None if disk is None else disk.load(plan.key)
        if compiled is not None and disk is not None and is_current(compiled.inputs):
            try:
                return self._load(source, compiled)
            except DriverError as error:
                if error.status not in _BAD_CODE:
                    raise
                # The file is intact but does not load here: it was made for another machine's
                # driver.
                disk.reject(plan.key, f"the driver refuses it ({error})")
        if confirmed(plan) is not plan:
            raise _OtherCompilerError
        compiled = self._compile(plan)
        why = compiled.inputs.unknown
        if why is None and disk is not None:
            disk.save(plan.key, compiled, name=source.name, arch=plan.arch)
        elif why is not None and self._store.get(plan.key) is None:
            logger(__name__).warning(
                "%s is compiled whenever it is asked for: %s", source.name, why
            )
        try:
            return self._load(source, compiled)
        except DriverError as error:
            if error.status not in _BAD_CODE:
                raise
            message = f"the driver refuses {source.name} ({compiled.kind}): {error}"
            lasting = compiled.inputs.fixed
            raise self._failure(plan, CompileFailure(message, error.detail, lasting)) from error

    def _compile(self, plan: Plan) -> Compiled:
        start = time.perf_counter()
        made = try_plan(plan)
        with self._lock:
            if plan.source.kind == "cuda":
                self._counts["compiles"] += 1
                self._compile_seconds += time.perf_counter() - start
        if isinstance(made, CompileFailure):
            raise self._failure(plan, made)
        return made

    def _failure(self, plan: Plan, failure: CompileFailure) -> CompileError:
        with self._lock:
            self._counts["failures"] += 1
            if failure.lasting:
                self._failed[plan.key] = failure
                while len(self._failed) > _MAX_FAILURES:
                    self._failed.popitem(last=False)
        return failure.error()

    def _load(self, source: Source, compiled: Compiled) -> CachedModule:
        module = LoadedModule(
            self.context,
            Image(compiled.kind, compiled.data),
            name=source.name,
            lowered=compiled.lowered,
            log=compiled.log,
        )
        return CachedModule(module, compiled.inputs, module.nbytes + source.nbytes)

    def _loading(self, name: str, call: Callable[[], T]) -> T:
        """Makes a call that loads code; warns, or raises CaptureBrokenError, during a capture.

        Some drivers refuse to load then and break the capture; 580 was seen to allow it.
        """
        try:
            loaded = call()
            if self.context.captures:
                logger(__name__).warning(
                    "kernel %r was loaded while a capture was under way, at %s; this driver "
                    "allows it, others break the capture: modules.preload it before",
                    name,
                    caller_location(),
                )
            return loaded
        except StreamCaptureError as error:
            self.context.report(error)
            raise CaptureBrokenError(
                f"kernel {name!r} had to be loaded while a capture was under way, which the driver "
                f"refuses ({error}). Load it before the capture: "
                f"modules.preload([(source, {name!r})])",
                location=caller_location(),
            ) from error


# ---------------------------------------------------------------------------------- loaded modules


@dataclass(slots=True, eq=False)
class CachedModule:
    """A loaded module, its kernels, and the header files that its code was compiled from.

    `nbytes`: code and source text that are held.
    """

    module: LoadedModule
    inputs: Inputs
    nbytes: int
    kernels: dict[tuple[str, Signature | None], Kernel] = field(default_factory=dict)
    fast_keys: list[Hashable] = field(default_factory=list)


class MemoryStore:
    """Loaded modules by key.  Modules in use may exceed the bounds.

    Not locked: `ModuleCache` calls it under its own lock, and reads only `fast` without it.
    """

    def __init__(self, max_modules: int, max_bytes: int) -> None:
        self.max_modules = max_modules
        self.max_bytes = max_bytes
        self.fast: dict[Hashable, Kernel] = {}
        """Kernels by the arguments of `get_or_compile`."""
        self.evictions = 0
        self._entries: dict[bytes, CachedModule] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    def get(self, key: bytes) -> CachedModule | None:
        return self._entries.get(key)

    def kernel(self, key: bytes, name: str, signature: Signature | None) -> Kernel | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.kernels.get((name, signature))

    def add(self, key: bytes, entry: CachedModule) -> None:
        """Stores a module, replacing an older one; evicts others until the bounds hold."""
        older = self._entries.get(key)
        for fast_key in () if older is None else older.fast_keys:
            self.fast.pop(fast_key, None)
        self._entries[key] = entry
        self.shrink(keep=key)

    def add_kernel(
        self, key: bytes, name: str, signature: Signature | None, kernel: Kernel
    ) -> Kernel:
        """Adds a kernel of a stored module; returns the older one if there is one."""
        entry = self._entries.get(key)
        if entry is None or entry.module is not kernel.module:
            return kernel
        return entry.kernels.setdefault((name, signature), kernel)

    def add_fast(self, key: bytes, fast_key: Hashable, kernel: Kernel, text_bytes: int) -> None:
        """Adds a caller's arguments to `fast`; they hold `text_bytes` bytes of source text."""
        entry = self._entries.get(key)
        if entry is None or entry.module is not kernel.module or fast_key in self.fast:
            return
        self.fast[fast_key] = kernel
        entry.fast_keys.append(fast_key)
        entry.nbytes += text_bytes

    def shrink(self, keep: bytes | None = None) -> None:
        """Evicts least recently used modules without other references until the bounds hold."""
        if not self._over():
            return
        for key in sorted(self._entries, key=lambda k: self._entries[k].module.last_use):
            if key != keep and key in self._entries and self._evict(key):
                self.evictions += 1
                if not self._over():
                    return

    def _over(self) -> bool:
        return len(self._entries) > self.max_modules or self.nbytes > self.max_bytes

    def _evict(self, key: bytes) -> bool:
        """Evicts an entry; if its module has other references, restores it and returns False."""
        entry = self._entries[key]
        fast = {k: weakref.ref(self.fast.pop(k)) for k in entry.fast_keys if k in self.fast}
        kernels = {k: weakref.ref(kernel) for k, kernel in entry.kernels.items()}
        inputs, nbytes, watched = entry.inputs, entry.nbytes, weakref.ref(entry.module)
        entry.kernels.clear()
        del entry, self._entries[key]  # drops the store's last references
        module = watched()
        if module is None:
            return True
        entry = self._entries[key] = CachedModule(module, inputs, nbytes)
        for name, reference in kernels.items():
            kernel = reference()
            if kernel is not None:
                entry.kernels[name] = kernel
        for fast_key, reference in fast.items():
            kernel = reference()
            if kernel is not None:
                self.fast[fast_key] = kernel
                entry.fast_keys.append(fast_key)
        return False

    def clear(self) -> None:
        """Evicts everything; modules with other references stay loaded."""
        self.fast.clear()
        self._entries.clear()
