"""`GraphStore`: a folder of graph files by key, for processes that start with the same graphs.

    FOLDER/graphs/<digest of tag and key>.graph     one file a key
    FOLDER/code/<digest>                            what they share: kernels and inputs, each once

The process names its live memory once, for all keys, and a restored graph is bound to that memory:
its weights are those of the model, and its inputs and outputs are the buffers that all keys share.
"""

from __future__ import annotations

import hashlib
import logging
import re
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ostinato.device import Device
from ostinato.driver.context import context_of
from ostinato.driver.forking import new_lock
from ostinato.errors import (
    ContextPoisonedError,
    GraphFileError,
    InputError,
    NotHeldError,
    OstinatoError,
    StateLostError,
)
from ostinato.files import is_temporary
from ostinato.graph import Graph, GraphExec
from ostinato.graphfile.container import open_file
from ostinato.graphfile.loading import LoadedGraph, Loader, without_collection
from ostinato.graphfile.records import GraphManifest, machine_of
from ostinato.graphfile.saving import GraphSaving
from ostinato.graphfile.survey import Twin
from ostinato.memory.ranges import Target
from ostinato.step.work import stable_text

if TYPE_CHECKING:
    from ostinato.step.cache import GraphCache

T = TypeVar("T")
_MISSING = "there is no such file"
_NO_FILE = "there is no file of this key and tag"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """The counts of a store in this process.  `reasons`: why keys were captured, and how often."""

    restored: int
    saved: int
    reasons: Mapping[str, int]


class GraphStore:
    """Graphs of one model and device in a folder, restored instead of captured.

        store = ost.GraphStore(device, folder, tag="llama-1b rev 3", inputs={"ids": ids},
                               outputs={"logits": logits}, constants=weights)
        cache.get_or_capture(key, store.maker(key, capture))    # restored, if it is there
        store.save_cache(cache)                                 # at the end of the first process

    `tag` names everything else that the graphs depend on, such as the model and the code that
    captures; files with another tag are ignored.  Keys are those that have a `stable_text`:
    numbers, texts, enums, and tuples and frozen dataclasses of these.  A file that does not fit
    (device, driver, memory, release) is not restored: `statistics` has the reason.
    """

    def __init__(
        self,
        device: Device,
        folder: str | Path,
        *,
        tag: str = "",
        inputs: Mapping[str, Target] | None = None,
        outputs: Mapping[str, Target] | None = None,
        constants: Mapping[str, Target] | None = None,
    ) -> None:
        self.context = context_of(device)
        self.folder = Path(folder).absolute()  # the process may change its folder
        self.tag = tag
        self._inputs = dict(inputs or {})
        self._outputs = dict(outputs or {})
        self._constants = dict(constants or {})
        self._lock = new_lock()
        self._names: weakref.WeakValueDictionary[str, _Claim] = weakref.WeakValueDictionary()
        self._restored = 0
        self._saved = 0
        self._reasons: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<GraphStore {self.folder} on {self.context.driver.name}>"

    def __contains__(self, key: Hashable) -> bool:
        """True if there is a file for the key, which may not fit."""
        return self.path(key).exists()

    def path(self, key: Hashable) -> Path:
        """Returns the path of a key's file.  Raises InputError for a key without a stable text."""
        return self._path(self._text(key))

    def _path(self, text: str) -> Path:
        # surrogatepass: text of any characters can be a key
        raw = text.encode("utf-8", "surrogatepass")
        return self.folder / "graphs" / f"{hashlib.sha256(raw).hexdigest()}.graph"

    def _text(self, key: Hashable) -> str:
        text = stable_text((self.tag, key))
        if text is None:
            raise InputError(
                f"the key {key!r} is not the same in another process: use numbers, texts, enums, "
                "and tuples and dataclasses of these"
            )
        return text

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
        """Writes a key's graph, as `graphfile.save` does; adds `inputs`, `outputs` to the store's.

        Raises GraphFileError.
        """
        self._write(key, graph, None, inputs, outputs, twin, check)

    def _write(
        self,
        key: Hashable,
        graph: Graph,
        run: GraphExec | None,
        inputs: Mapping[str, Target] | None,
        outputs: Mapping[str, Target] | None,
        twin: Twin | None,
        check: bool,
    ) -> None:
        path = self.path(key)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise GraphFileError(f"{path.parent} cannot be made ({error})") from error
        GraphSaving(
            graph,
            path,
            inputs=_joined(self._inputs, inputs),
            outputs=_joined(self._outputs, outputs),
            constants=self._constants,
            keeping="by name",
            twin=twin,
            check=check,
            code=self.folder / "code",
            key=ascii(self._text(key)),
            run=run,
        ).save()
        with self._lock:
            self._saved += 1

    def save_cache(self, cache: GraphCache, *, check: bool = True) -> dict[Hashable, str]:
        """Writes all graphs of a cache; returns why some were not written, by key.

        An executable that was changed since it was made (patched, rebound) differs from its
        definition, so it is refused.  One that was restored from this store is skipped.
        """
        refused: dict[Hashable, str] = {}
        keys = cache.keys()
        for key in keys:
            with suppress(NotHeldError), cache.hold(key) as executable:
                why = self.save_executable(key, executable, check=check)
                if why:
                    refused[key] = why
        return refused

    def save_executable(
        self,
        key: Hashable,
        executable: GraphExec,
        *,
        inputs: Mapping[str, Target] | None = None,
        outputs: Mapping[str, Target] | None = None,
        check: bool = True,
    ) -> str:
        """Writes the graph that an executable was made of; returns why not, or an empty text.

        Raises StateLostError if memory could not be put back after the check's launches;
        ContextPoisonedError.
        """
        try:
            if executable.changed():
                raise GraphFileError("the executable was changed since it was made")
            if self._has(key, executable.graph):
                return ""
            self._write(key, executable.graph, executable, inputs, outputs, None, check)
        except (ContextPoisonedError, StateLostError):
            raise
        except OstinatoError as error:
            return str(error)
        return ""

    def _has(self, key: Hashable, graph: Graph) -> bool:
        """True if a graph is unchanged since it was loaded from the present file of a key."""
        if not isinstance(graph, LoadedGraph) or not graph.as_saved():
            return False
        try:
            with open_file(self.path(key), self.folder / "code") as contents:
                return contents.raw == graph.raw
        except GraphFileError:
            return False

    def restore(
        self, key: Hashable, memory: Mapping[str, Target] | None = None, *, complete: bool = False
    ) -> LoadedGraph | None:
        """Returns the graph of a key, bound to the store's memory and to `memory`; None, with the
        reason counted, if there is none that fits.

        Inputs and outputs that have no memory here get memory of their own; with `complete` the
        file is refused instead.  Raises InputError as `path` does; ContextPoisonedError.
        """
        return self._tried(key, partial(self._load, memory or {}, complete))

    def executable(
        self, key: Hashable, memory: Mapping[str, Target] | None = None
    ) -> GraphExec | None:
        """Restores and instantiates a key's graph, with all memory named.  Raises as `restore`."""

        def make(text: str, path: Path) -> GraphExec:
            loaded = self._load(memory or {}, True, text, path)
            try:
                return loaded.instantiate()
            except Exception:
                loaded.close()
                raise

        with without_collection():
            return self._tried(key, make)

    def _load(
        self, memory: Mapping[str, Target], complete: bool, text: str, path: Path
    ) -> LoadedGraph:
        live = _joined({**self._inputs, **self._outputs, **self._constants}, memory)
        with without_collection(), open_file(path, self.folder / "code") as contents:
            manifest = contents.manifest
            self._require_match(text, manifest)
            left = [b.name for b in manifest.buffers if b.name not in live]
            if left and complete:
                raise GraphFileError(f"it names {', '.join(left)}, and that is not given here")
            loader = Loader(self.context, contents, live)
            return loader.load(loader.values({}))

    def _require_match(self, text: str, manifest: GraphManifest) -> None:
        if manifest.key != ascii(text):
            raise GraphFileError("it is the file of another key or tag")
        there, here = manifest.machine, machine_of(self.context)
        if there.library != here.library:
            raise GraphFileError(f"it was saved by ostinato {there.library}")
        if there != here:
            raise GraphFileError(
                f"it was saved on {there.device} with driver {there.driver_version}, and this is "
                f"{here.device} with {here.driver_version}"
            )

    def _tried(self, key: Hashable, make: Callable[[str, Path], T]) -> T | None:
        """Returns the result of `make` for a key's text and file, and counts it as restored; None,
        with the reason counted, if `make` raises an OstinatoError or OSError."""
        text = self._text(key)
        path = self._path(text)
        try:
            made = make(text, path)
        except ContextPoisonedError:
            raise
        except (OstinatoError, OSError) as error:
            why = str(error).removeprefix(f"{path}: ")
            with self._lock:
                self._reasons[_NO_FILE if why == _MISSING else why] += 1
            return None
        with self._lock:
            self._restored += 1
        return made

    def maker(self, key: Hashable, make: Callable[[], GraphExec]) -> Callable[[], GraphExec]:
        """Returns a function that restores the key, or calls `make` if that fails.

        The function is for `GraphCache.get_or_capture`.
        """
        return lambda: self.executable(key) or make()

    def prune(self) -> int:
        """Deletes from the shared folder the files that no graph file names, and the unfinished
        files of processes that were killed while saving; returns the number of freed bytes.  No
        other process may save here meanwhile.

        An unreadable graph file (damaged, of a newer version, of another user) may name any file:
        while there is one, only unfinished files are deleted, with a warning that names it.  Files
        with other names than the store gives are left alone.
        """
        code, graphs = self.folder / "code", self.folder / "graphs"
        named: set[str] = set()
        unread = ""
        for path in graphs.glob("*.graph"):
            try:
                with open_file(path) as contents:
                    named.update(f.digest for f in contents.manifest.functions)
                    named.update(contents.manifest.tensors.values())
            except GraphFileError as error:
                unread = str(error)
        if unread:
            _log.warning(
                "nothing is deleted from %s, since a graph file is not read: %s", code, unread
            )
        freed = 0
        for path in (*code.glob("*"), *graphs.glob("*")):
            of_none = path.parent == code and _DIGEST.match(path.name) and path.name not in named
            if not (is_temporary(path) or (of_none and not unread)):
                continue
            with suppress(OSError):
                nbytes = path.lstat().st_size
                path.unlink()
                freed += nbytes
        return freed

    def claim(self, name: str) -> object:
        """Returns the right to keys of a name, held for as long as the returned object is kept.

        Raises InputError while another step has that right: each would restore the other's graphs.
        """
        with self._lock:
            if name in self._names:
                raise InputError(
                    f"the store has the graphs of another {name!r}; give each its own name, or "
                    "close the other one"
                )
            made = self._names[name] = _Claim()
        return made

    def statistics(self) -> StoreStatistics:
        """Returns the counts of restored and saved graphs, and why keys were captured."""
        with self._lock:
            return StoreStatistics(self._restored, self._saved, dict(self._reasons))

    def note_refused(self, why: str) -> None:
        """Counts a graph of `executable` as not restored after all: it could not be kept."""
        with self._lock:
            self._restored -= 1
            self._reasons[why] += 1


class _Claim:
    """The right that `GraphStore.claim` returns."""


def _joined(mine: Mapping[str, Target], more: Mapping[str, Target] | None) -> dict[str, Target]:
    """Joins the store's memory and a call's.  Raises InputError for a name of two things."""
    more = more or {}
    twice = [name for name in more if name in mine and more[name] is not mine[name]]
    if twice:
        raise InputError(
            f"{', '.join(twice)}: the store has other memory of this name; give each its own"
        )
    return {**mine, **more}
