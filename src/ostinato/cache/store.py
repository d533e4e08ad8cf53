"""`GraphStore`: a folder of graph files by key, for processes that start with the same graphs.

    FOLDER/graphs/<digest of tag and key>.graph     one file a key
    FOLDER/code/<digest>                            the kernels of all of them, each once

The live memory of the process is named once, for all keys, and a restored graph is bound to it: its
weights are the model's own, and its inputs and outputs the buffers that all keys share.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.driver.context import Context, HasContext, context_of
from ostinato.driver.forking import new_lock
from ostinato.errors import DriverError, GraphError, GraphFileError, InputError
from ostinato.graph import Graph, GraphExec, LoadedGraph, Twin, load_graph
from ostinato.graph.disk.save import library_version
from ostinato.memory.ranges import Target

if TYPE_CHECKING:
    from ostinato.cache.graph_cache import GraphCache

__all__ = ["GraphStore", "StoreStatistics"]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store did in this process.  `reasons`: why keys were captured, and how often."""

    restored: int
    saved: int
    reasons: Mapping[str, int]


class GraphStore:
    """Graphs of one model and device in a folder, restored instead of captured.

        store = ost.GraphStore(device, folder, tag="llama-1b rev 3", inputs={"ids": ids},
                               outputs={"logits": logits}, constants=weights)
        cache.get_or_capture(key, store.maker(key, capture))    # restored, if it is there
        store.save_cache(cache)                                 # at the end of the first process

    `tag` says what else the graphs depend on, such as the model and the code that captures; files
    of another tag are not looked at.  Keys are numbers, texts, enums, and tuples and frozen
    dataclasses of these.  A file that does not fit (device, memory, release) is not restored:
    `statistics` says why.
    """

    def __init__(
        self,
        device: Context | HasContext,
        folder: str | Path,
        *,
        tag: str = "",
        inputs: Mapping[str, Target] | None = None,
        outputs: Mapping[str, Target] | None = None,
        constants: Mapping[str, Target] | None = None,
    ) -> None:
        self.context = context_of(device)
        self.folder = Path(folder)
        self.tag = tag
        self._inputs = dict(inputs or {})
        self._outputs = dict(outputs or {})
        self._constants = dict(constants or {})
        self._lock = new_lock()
        self._restored = 0
        self._saved = 0
        self._reasons: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<GraphStore {self.folder} on {self.context.driver.name}>"

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a file for the key.  It may not fit."""
        return self.path(key).exists()

    def path(self, key: Hashable) -> Path:
        """Where a key's file is.  Raises InputError for a key that is another one in every
        process."""
        stable = getattr(key, "stable_key", None)  # of a step's key, which has a number of its own
        text = "\n".join([self.tag, *_words(stable() if callable(stable) else key)])
        return self.folder / "graphs" / f"{hashlib.sha256(text.encode()).hexdigest()}.graph"

    def save(
        self,
        key: Hashable,
        graph: Graph,
        *,
        inputs: Mapping[str, Target] | None = None,
        outputs: Mapping[str, Target] | None = None,
        twin: Twin | None = None,
        check: bool = True,
    ) -> None:
        """Writes a key's graph, as `Graph.save` does; `inputs` and `outputs` besides the store's.

        Raises GraphFileError.
        """
        path = self.path(key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise GraphFileError(f"{path.parent} cannot be made ({error})") from error
        graph.save(
            path,
            inputs={**self._inputs, **(inputs or {})},
            outputs={**self._outputs, **(outputs or {})},
            constants=self._constants,
            keeping="by name",
            twin=twin,
            check=check,
            code=self.folder / "code",
        )
        with self._lock:
            self._saved += 1

    def save_cache(self, cache: GraphCache, *, check: bool = True) -> dict[Hashable, str]:
        """Writes all graphs of a cache; returns why some were not written, by key.

        An executable that was changed since it was made (patched, rebound) is not what its
        definition says, so it is refused.
        """
        refused: dict[Hashable, str] = {}
        keys = cache.keys()
        for key in keys:
            with cache.hold(key) as executable:
                if executable is None:
                    continue
                try:
                    if executable.changed:
                        raise GraphFileError(
                            "the executable was changed since it was made; save its graph before"
                        )
                    self.save(key, executable.graph, check=check)
                except (GraphError, InputError) as error:
                    refused[key] = str(error)
        return refused

    def restore(
        self, key: Hashable, memory: Mapping[str, Target] | None = None
    ) -> LoadedGraph | None:
        """The graph of a key, bound to the store's memory and to `memory`; None, with the reason
        counted, if there is none that fits."""
        path = self.path(key)
        if not path.exists():
            self._count("there is no file of this key and tag")
            return None
        live = {**self._inputs, **self._outputs, **self._constants, **(memory or {})}
        try:
            loaded = load_graph(self.context, path, buffers=live, code=self.folder / "code")
        except (GraphFileError, InputError) as error:
            self._count(str(error).removeprefix(f"{path}: "))
            return None
        release = loaded.manifest.machine.library
        if release != library_version():
            loaded.close()
            self._count(f"it was saved by ostinato {release}")
            return None
        with self._lock:
            self._restored += 1
        return loaded

    def maker(self, key: Hashable, make: Callable[[], GraphExec]) -> Callable[[], GraphExec]:
        """For `GraphCache.get_or_capture`: restores the key, or calls `make` if that cannot be."""

        def restored() -> GraphExec:
            loaded = self.restore(key)
            if loaded is None:
                return make()
            try:
                return loaded.instantiate()
            except (GraphError, DriverError) as error:
                self._count(str(error))
                loaded.close()
                return make()

        return restored

    def statistics(self) -> StoreStatistics:
        """What was restored and saved, and why keys were captured."""
        with self._lock:
            return StoreStatistics(self._restored, self._saved, dict(self._reasons))

    def _count(self, why: str) -> None:
        with self._lock:
            self._reasons[why] += 1


def _words(key: object) -> Iterator[str]:
    """A key as text that is the same in every process."""
    if key is None or isinstance(key, bool | int | float | str | bytes):
        yield f"{type(key).__name__} {key!r}"
    elif isinstance(key, enum.Enum):
        yield f"enum {type(key).__qualname__} {key.name}"
    elif isinstance(key, tuple):
        yield f"( {len(key)}"
        for item in key:
            yield from _words(item)
    elif dataclasses.is_dataclass(key) and not isinstance(key, type):
        yield f"record {type(key).__qualname__}"
        for item in dataclasses.fields(key):
            yield item.name
            yield from _words(getattr(key, item.name))
    else:
        raise InputError(
            f"{type(key).__name__} in a key is not the same in another process: use numbers, "
            "texts, enums, and tuples and dataclasses of these"
        )
