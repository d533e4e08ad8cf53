"""The memory store: loaded modules by key, bounded by count and bytes, least recently used out.

An entry is let go only if nobody else holds the module: no kernel that was handed out, and so no
graph that keeps such a kernel.  The test is to drop the store's own references and to look whether
the module is still there.  Letting go never unloads by itself: the module's finaliser retires it.

The store has no lock of its own; `ModuleCache` calls it under its lock, except `fast`, which is
read without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

from ostinato.driver.signature import Signature
from ostinato.modules.inputs import Inputs
from ostinato.modules.kernel import Kernel, LoadedModule

__all__ = ["MemoryStore", "Stored"]


@dataclass(slots=True, eq=False)
class Stored:
    """A module with the kernels made of it, and the files that its code was made of.

    `nbytes` counts code and remembered source text.
    """

    module: LoadedModule
    inputs: Inputs
    nbytes: int
    kernels: dict[tuple[str, Signature | None], Kernel] = field(default_factory=dict)
    fast_keys: list[Hashable] = field(default_factory=list)


class MemoryStore:
    """Loaded modules by key.  Bounds hold as long as what is over them is not in use."""

    def __init__(self, max_modules: int, max_bytes: int) -> None:
        self.max_modules = max_modules
        self.max_bytes = max_bytes
        self.fast: dict[Hashable, Kernel] = {}
        """From what a caller gives, straight to its kernel."""
        self.evictions = 0
        self._entries: dict[bytes, Stored] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        # Added up each time: a sum that is kept would be wrong for good after an interrupt.
        return sum(entry.nbytes for entry in self._entries.values())

    def get(self, key: bytes) -> Stored | None:
        return self._entries.get(key)

    def kernel(self, key: bytes, name: str, signature: Signature | None) -> Kernel | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.kernels.get((name, signature))

    def add(self, key: bytes, entry: Stored) -> None:
        """Puts a module in, in an older one's place; lets go of others until the bounds hold."""
        older = self._entries.get(key)
        for fast_key in () if older is None else older.fast_keys:
            self.fast.pop(fast_key, None)
        self._entries[key] = entry
        self.shrink(keep=key)

    def add_kernel(
        self, key: bytes, name: str, signature: Signature | None, kernel: Kernel
    ) -> Kernel:
        """Remembers a kernel of a stored module; the one remembered before, if there was one."""
        entry = self._entries.get(key)
        if entry is None or entry.module is not kernel.module:
            return kernel
        return entry.kernels.setdefault((name, signature), kernel)

    def add_fast(self, key: bytes, fast_key: Hashable, kernel: Kernel, text_bytes: int) -> None:
        """Remembers how a caller asked; `text_bytes` are held by the question itself."""
        entry = self._entries.get(key)
        if entry is None or entry.module is not kernel.module or fast_key in self.fast:
            return
        self.fast[fast_key] = kernel
        entry.fast_keys.append(fast_key)
        entry.nbytes += text_bytes

    def shrink(self, keep: bytes | None = None) -> None:
        """Lets go of the least recently used modules that nobody uses, until the bounds hold."""
        if not self._over():
            return
        for key in sorted(self._entries, key=lambda k: self._entries[k].module.last_use):
            if key != keep and key in self._entries and self._let_go(key):
                self.evictions += 1
                if not self._over():
                    return

    def _over(self) -> bool:
        return len(self._entries) > self.max_modules or self.nbytes > self.max_bytes

    def _let_go(self, key: bytes) -> bool:
        """Drops an entry, or puts it back if its module turns out to be used elsewhere."""
        entry = self._entries[key]
        fast = {k: weakref.ref(self.fast.pop(k)) for k in entry.fast_keys if k in self.fast}
        kernels = {k: weakref.ref(kernel) for k, kernel in entry.kernels.items()}
        inputs, nbytes, watched = entry.inputs, entry.nbytes, weakref.ref(entry.module)
        entry.kernels.clear()
        del entry, self._entries[key]  # with it the last of our own references
        module = watched()
        if module is None:
            return True
        entry = self._entries[key] = Stored(module, inputs, nbytes)
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
        """Lets go of everything; what is used elsewhere stays loaded for as long."""
        self.fast.clear()
        self._entries.clear()
