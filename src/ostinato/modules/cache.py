"""Compiled once, loaded once: sources in, loaded kernels out.

    get_or_compile ──> fast: what the caller gave         (a dictionary, no lock)
                  └──> key: digest of all that matters    (headers are read)
                        └──> memory: loaded modules       (one lock, held for look-ups only)
                              └──> one flight a key:  disk ──> compiler ──> load

Threads that ask for a key under way wait for its flight; other keys are not held up.  A cache
belongs to one device, so a kernel of one device is never handed to another; files on disk are
shared by devices of one architecture.

States of a key: unknown -> in flight -> loaded (-> let go -> unknown), or -> failed.  A failed
compilation is remembered for the process and never written to disk; other failures (no memory, no
compiler, a capture under way) are not remembered: the next caller tries again.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from ostinato.driver.api import Image
from ostinato.driver.closeable import Closeable
from ostinato.driver.context import Context
from ostinato.driver.host_kernel import HostKernel
from ostinato.driver.location import caller_location
from ostinato.driver.signature import Signature
from ostinato.errors import (
    CaptureBrokenError,
    ClosedError,
    CompileError,
    DriverError,
    InputError,
    NotAvailableError,
    Status,
    StreamCaptureError,
)
from ostinato.modules.compiler import Compiled, Plan, compile_plan, confirmed
from ostinato.modules.disk import DiskStore
from ostinato.modules.kernel import Kernel, LoadedModule
from ostinato.modules.options import CompileOptions, as_options
from ostinato.modules.question import Question, ask
from ostinato.modules.source import Source, as_source
from ostinato.modules.statistics import CacheStatistics
from ostinato.modules.store import MemoryStore

__all__ = ["CacheStatistics", "ModuleCache", "PreloadItem"]

AnySource: TypeAlias = Source | str | HostKernel
PreloadItem: TypeAlias = Kernel | tuple[AnySource, str | Sequence[str]]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_MAX_FAILURES = 256
_MAX_ATTEMPTS = 3

# Statuses with which a driver says that the code, and not the machine, is wrong.
_BAD_CODE = frozenset(
    {
        Status.INVALID_IMAGE,
        Status.NO_BINARY_FOR_GPU,
        Status.INVALID_PTX,
        Status.UNSUPPORTED_PTX_VERSION,
        Status.INVALID_SOURCE,
    }
)


class _AskAgainError(Exception):
    """Something is not, or no longer, what the key was made of."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A CompileError to raise again; the error itself would keep its first caller's frames."""

    message: str
    log: str

    def error(self) -> CompileError:
        return CompileError(self.message, log=self.log)


@dataclass(slots=True, eq=False)
class _Flight:
    """One thread makes a module; the others wait."""

    done: threading.Event = field(default_factory=threading.Event)
    module: LoadedModule | None = None


class ModuleCache(Closeable):
    """The kernels of one device: `device.modules`.

    `disk`: a store, a folder, True for the folder of the settings, False for none.  `max_modules`
    and `max_bytes` bound what is kept loaded; modules in use do not count as removable, so the
    bounds can be exceeded by them.  Thread-safe.  `close()` or `with` lets go of everything;
    kernels handed out stay good.
    """

    def __init__(
        self,
        context: Context,
        *,
        disk: DiskStore | Path | str | bool = True,
        max_modules: int = 1024,
        max_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        if max_modules < 1 or max_bytes < 1:
            raise InputError(f"max_modules={max_modules}, max_bytes={max_bytes}: 1 or more")
        self.context = context
        self.disk: DiskStore | None = None
        if isinstance(disk, DiskStore):
            self.disk = disk
        elif disk is not False:
            self.disk = DiskStore(None if disk is True else disk)
        self._store = MemoryStore(max_modules, max_bytes)
        self._fast = self._store.fast
        # Reentrant: the garbage collector may run anyone's finaliser inside, also one that asks us.
        self._lock = threading.RLock()
        self._flights: dict[bytes, _Flight] = {}
        self._failed: OrderedDict[bytes, _Failure] = OrderedDict()
        # Numbers every memory hit: the time of last use, and the count of hits, in one call that
        # needs no lock.
        self._clock = itertools.count(1)
        self._not_hits = 0
        self._misses = self._waits = self._compiles = 0
        self._compile_seconds = 0.0
        self._known_failures = self._failures = 0
        self._closed = False

    def get_or_compile(
        self,
        source: AnySource,
        name: str,
        *,
        options: CompileOptions | Sequence[str] = (),
        signature: Signature | str | None = None,
    ) -> Kernel:
        """The loaded kernel `name` of `source`, compiled and loaded if it is not yet.

        `source` is a Source, CUDA C++ text, or a host kernel.  `name` is the entry's symbol, its
        plain C++ name, or a C++ name expression ("scale<float>").  `signature` wins over the
        source's own.  With include folders their headers are looked at again in each call.

        Raises CompileError with the compiler's log, InputError for a name that is not there (lists
        those that are), NotAvailableError for a source without this device's language, NoCudaError
        without a compiler, CaptureBrokenError if the capture under way forbids to load it now.
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
        """Compiles, loads and keeps ready all of `items`, so that no capture loads anything.

        Items are (source, name), (source, [names]) or kernels.  Several sources compile at once.
        Keep the result as long as captures may use it: what nobody holds may be let go.
        Raises what `get_or_compile` raises, for the first item that fails.
        """
        wanted: list[tuple[AnySource, str]] = []
        ready: dict[int, Kernel] = {}
        for item in items:
            if isinstance(item, Kernel):
                self.context.driver.function_load(item.function)
                ready[len(ready) + len(wanted)] = item
                continue
            source, names = item
            wanted += [(source, n) for n in ([names] if isinstance(names, str) else names)]
        if len({id(source) for source, _ in wanted}) < 2:
            loaded = [self.get_or_compile(s, n, options=options) for s, n in wanted]
        else:
            with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
                loaded = list(
                    pool.map(lambda w: self.get_or_compile(w[0], w[1], options=options), wanted)
                )
        rest = iter(loaded)
        return tuple(
            ready[i] if i in ready else next(rest) for i in range(len(ready) + len(loaded))
        )

    def statistics(self) -> CacheStatistics:
        """Counts of this cache and of its disk store."""
        with self._lock:
            self._not_hits += 1
            return CacheStatistics(
                modules=len(self._store),
                nbytes=self._store.nbytes,
                hits=next(self._clock) - self._not_hits,
                misses=self._misses,
                waits=self._waits,
                compiles=self._compiles,
                compile_seconds=self._compile_seconds,
                failures=self._failures,
                known_failures=self._known_failures,
                evictions=self._store.evictions,
                disk=None if self.disk is None else self.disk.statistics(),
            )

    def close(self) -> None:
        """Lets go of all modules; those still used by kernels and graphs stay.  Idempotent."""
        with self._lock:
            self._closed = True
            self._store.clear()
            self._failed.clear()
        self.context.collect()

    # --- the slow way
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
        known = as_source(source)
        chosen = as_options(options)
        parsed = Signature.parse(signature) if isinstance(signature, str) else signature
        if parsed is None:
            parsed = known.signature(name)
        for attempt in itertools.count(1):
            asked = ask(self.context.driver, known, name, chosen)
            try:
                module = self._module(asked, name)
            except _AskAgainError as error:
                if attempt == _MAX_ATTEMPTS:
                    raise NotAvailableError(f"{known.name}: {error}; try again later") from None
                continue
            break
        with self._lock:
            kernel = self._store.kernel(asked.key, name, parsed)
        if kernel is None:
            kernel = self._loading(name, lambda: module.kernel(name, parsed))
            with self._lock:
                kernel = self._store.add_kernel(asked.key, name, parsed, kernel)
        fast_key: Hashable = (source, name, options, signature)
        if asked.fixed and _hashable(fast_key):
            with self._lock:
                if not self._closed:
                    self._store.add_fast(asked.key, fast_key, kernel, known.nbytes)
        return kernel

    def _module(self, asked: Question, name: str) -> LoadedModule:
        """The loaded module of a key, made by this thread or by the one that is at it."""
        key = asked.key
        while True:
            with self._lock:
                module = self._store.get(key)
                if module is not None:
                    module.last_use = next(self._clock)
                    return module
                failure = self._failed.get(key)
                if failure is not None:
                    self._failed.move_to_end(key)
                    self._known_failures += 1
                    raise failure.error()
                flight = self._flights.get(key)
                mine = flight is None
                if flight is None:
                    flight = self._flights[key] = _Flight()
                    self._misses += 1
                else:
                    self._waits += 1
            if mine:
                return self._fly(asked, name, flight)
            flight.done.wait()
            if flight.module is not None:
                return flight.module
            # It failed.  A CompileError is found above; after anything else this thread tries.

    def _fly(self, asked: Question, name: str, flight: _Flight) -> LoadedModule:
        try:
            module = self._loading(name, lambda: self._make(asked))
        except CompileError as error:
            with self._lock:
                self._failures += 1
                self._failed[asked.key] = _Failure(str(error), error.log)
                while len(self._failed) > _MAX_FAILURES:
                    self._failed.popitem(last=False)
            raise
        else:
            flight.module = module
            with self._lock:
                if not self._closed:
                    module.last_use = next(self._clock)
                    self._not_hits += 1
                    self._store.add(asked.key, module, module.nbytes + asked.source.nbytes)
        finally:
            with self._lock:
                del self._flights[asked.key]
            flight.done.set()
        self.context.collect()  # what the store let go of
        return module

    def _make(self, asked: Question) -> LoadedModule:
        source, plan = asked.source, asked.plan
        if plan is None:
            image = Image("host", functions=dict(source.host))
            return LoadedModule(self.context, image, name=source.name, keep=source)
        disk = self.disk if plan.storable else None
        compiled = None if disk is None else disk.load(plan.key)
        if compiled is not None and disk is not None:
            try:
                return self._load(source, compiled)
            except DriverError as error:
                if error.status not in _BAD_CODE:
                    raise
                # Whole and ours, and yet not loadable: made for another machine's driver.
                disk.reject(plan.key, f"the driver refuses it ({error})")
        if confirmed(plan) is not plan:
            raise _AskAgainError("the compiler is another than its file promised")
        compiled = self._compile(plan)
        if disk is not None:
            disk.save(plan.key, compiled, name=source.name, arch=plan.arch)
        try:
            return self._load(source, compiled)
        except DriverError as error:
            if error.status not in _BAD_CODE:
                raise
            raise CompileError(
                f"the driver refuses {source.name} ({compiled.kind}): {error}", log=error.detail
            ) from error

    def _compile(self, plan: Plan) -> Compiled:
        start = time.perf_counter()
        try:
            compiled = compile_plan(plan)
        finally:
            with self._lock:
                if plan.source.kind == "cuda":
                    self._compiles += 1
                    self._compile_seconds += time.perf_counter() - start
        if not plan.dependencies.unchanged():
            raise _AskAgainError("its header files change while it is compiled")
        return compiled

    def _load(self, source: Source, compiled: Compiled) -> LoadedModule:
        return LoadedModule(
            self.context,
            Image(compiled.kind, compiled.data),
            name=source.name,
            lowered=compiled.lowered,
            log=compiled.log,
        )

    def _loading(self, name: str, call: Callable[[], T]) -> T:
        """Makes a call that loads code; says "preload" if a capture is under way.

        Some drivers refuse it and break the capture; 580 was seen to allow it.  Where it is
        allowed a warning is all, since the same code fails elsewhere.
        """
        try:
            loaded = call()
            if self.context.captures_under_way:
                _log.warning(
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


def _hashable(value: Hashable) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
