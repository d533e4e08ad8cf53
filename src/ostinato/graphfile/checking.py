"""The check of a graph file: loads it, runs it on its stored inputs, and compares bit by bit.

All memory but inputs and constants is filled with zeros before the first launch, with patterns
before the next three, and left as it is before the last: a graph that reads memory which it has not
written gives other results.  Each block lies between guards, because a pointer of unknown reach may
write outside its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.device import Device
from ostinato.driver.api import KernelNodeParams, MemoryRange
from ostinato.driver.context import Context, context_of
from ostinato.driver.stream import Stream
from ostinato.errors import DriverError, GraphFileError, OstinatoError
from ostinato.graphfile.container import Contents, open_file, tensor_bytes
from ostinato.graphfile.loading import Guard, LoadedGraph, Loader, constants_of
from ostinato.graphfile.records import NamedBuffer
from ostinato.graphfile.survey import Stray
from ostinato.memory.ranges import Target

_POISONS = (0xFF, 0x5A, 0)  # 0xFF bytes are a NaN in every floating-point type
_TRIES = 6


def check(
    device: Device,
    path: str | Path,
    *,
    constants: Mapping[str, Target] | str | Path | None = None,
    code: str | Path | None = None,
) -> None:
    """Loads a graph file, launches it on its stored inputs, and compares the results.

    Launches the file's code, so check no file that you would not run.  `constants` and `code` as
    for `load`.  Raises GraphFileError if a result differs or the file has no results.
    """
    with CheckCase.of(context_of(device), Path(path), constants, code, ()) as case:
        what = case.difference() or case.effect(case.unused(), lambda _: None, alone=False)[1]
        if what:
            raise GraphFileError(f"{path} does not give the stored results: {what}")


class CheckCase:
    """A loaded file with its stored inputs and expected results."""

    def __init__(
        self,
        loader: Loader,
        graph: LoadedGraph,
        constants: Mapping[str, npt.NDArray[Any]],
        contents: Contents,
        stream: Stream,
    ) -> None:
        self._loader = loader
        self._driver = graph.context.driver
        self._graph = graph
        self._constants = constants
        self._stream = stream
        self._run = graph.instantiate()
        self._named = {buffer.name: buffer for buffer in loader.manifest.buffers}
        self._inputs = {
            name: self._fitting(buffer, contents.tensor(f"inputs/{name}"))
            for name, buffer in self._named.items()
            if "input" in buffer.roles
        }
        whole = [b for b in loader.manifest.buffers if "constant" in b.roles]
        nbytes = [block.nbytes for block in loader.manifest.blocks]
        self._kept = {b.block for b in whole if b.nbytes == nbytes[b.block]}
        """Blocks that hold one constant and nothing else."""
        self.strays: dict[int, Stray] = {}
        """Blocks outside of which a launch wrote, found by `difference`."""

    @classmethod
    @contextmanager
    def of(
        cls,
        context: Context,
        path: Path,
        given_constants: Mapping[str, Any] | str | Path | None,
        code: str | Path | None,
        avoid: Sequence[MemoryRange],
        rooms: Mapping[int, int] | None = None,
    ) -> Iterator[CheckCase]:
        """Loads a file at addresses outside the ranges `avoid`; `rooms` as for `Loader`."""
        given, stored = constants_of(given_constants)
        before: list[LoadedGraph] = []
        folder = None if code is None else Path(code)
        with (
            open_file(path, folder) as contents,
            Stream(context, context.driver.stream_create(), owned=True) as stream,
        ):
            if not contents.manifest.checked:
                raise GraphFileError("it was saved with check=False, so it has no results")
            values: dict[str, npt.NDArray[Any]] | None = None
            for _ in range(_TRIES):
                loader = Loader(context, contents, given, rooms=rooms or {})
                if values is None:
                    values = loader.values(stored, exact=isinstance(given_constants, Mapping))
                graph = loader.load(values)
                if not loader.overlaps(avoid):
                    break
                before.append(graph)  # kept: forces other addresses for the next one
            else:
                raise GraphFileError(
                    "too little memory is free to load it at other addresses than before"
                )
            names = contents.manifest.names("constant")
            constants = {name: values[name] for name in names if name in values}
            case = cls(loader, graph, constants, contents, stream)
            try:
                yield case
            finally:
                case._run.close()
                for one in (graph, *before):
                    one.close()

    @property
    def blocks(self) -> list[int]:
        """The blocks whose content before a launch must not matter."""
        blocks = self._loader.manifest.blocks
        return [i for i, block in enumerate(blocks) if block.node is None and i not in self._kept]

    def difference(self) -> str:
        """Describes the first difference, with patterns in all memory and then with what the last
        launch left there; empty if there is none."""
        # Zeros come first: a launch that writes outside its blocks may use a pattern as an index
        # and fault, while with zeros it ends and the guards show where it wrote (all bytes but
        # zeros).
        for poison in (0, *_POISONS):
            for block in self.blocks:
                self._fill(block, poison)
            for guard in self._loader.guards:
                self._fill_range(guard.memory, poison)
            try:
                what = self._outcome()
            except DriverError as error:
                if not self.strays:
                    raise GraphFileError(
                        f"a launch with {poison:#04x} in all memory without a name failed: {error}"
                    ) from error
                what = ""
            else:
                for guard in self._loader.guards:
                    self._look_at(guard, poison)
            if self.strays and (poison or what):
                block, stray = next(iter(self.strays.items()))
                return (
                    f"a launch writes outside of its memory, {stray.before} bytes before and "
                    f"{stray.behind} behind block {block}"
                )
            if what:
                return what
        what = self._outcome()
        return f"{what} when it is launched again" if what else ""

    def _look_at(self, guard: Guard, poison: int) -> None:
        """Records how far a launch wrote into a guard."""
        found = np.empty(guard.memory.nbytes, np.uint8)
        self._driver.memcpy_to_host(found.data, guard.memory.address, self._stream.handle)
        touched = found != poison
        if not touched.any():
            return
        known = self.strays.get(guard.block, Stray())
        if guard.behind:
            behind = found.size - int(touched[::-1].argmax())
            known = replace(known, behind=max(known.behind, behind))
        else:
            before = found.size - int(touched.argmax())
            known = replace(known, before=max(known.before, before))
        self.strays[guard.block] = known

    def blamed(
        self, content: Mapping[int, npt.NDArray[np.uint8]], note: Callable[[int], None]
    ) -> int | None:
        """Returns a block whose initial content the results depend on, or None.

        `content`: of all blocks, as in the process that saved.  `note` is called with each block
        before it is tried, since the launch may end the process.
        """

        def restore(but: int | None = None) -> None:
            for block in self.blocks:
                if block in content and block != but:
                    self._write(block, 0, content[block])

        restore()
        if self._outcome():
            return None
        for block in self.blocks:
            for poison in _POISONS:
                restore()
                self._fill(block, poison)
                note(block)
                if self._outcome():
                    return block
            restore()
            self._fill(block, _POISONS[-1])
            self._outcome()
            restore(but=block)  # this block keeps what the launch wrote
            if self._outcome():
                return block
        return None

    def unused(self) -> list[tuple[int, int, bytes]]:
        """Returns the argument bytes that the file declares to have no effect, for `effect`."""
        found = []
        for place, node in enumerate(self._loader.manifest.graph.walk()):
            if isinstance(node.params, KernelNodeParams):
                data = node.params.arguments.data
                found += [
                    (place, s.offset, data[s.offset : s.offset + s.size]) for s in node.unused
                ]
        return found

    def effect(
        self,
        loose: Sequence[tuple[int, int, bytes]],
        note: Callable[[int], None],
        *,
        alone: bool = True,
    ) -> tuple[int, str]:
        """Returns the index of the first bytes in `loose` with an effect, and the difference in
        words, which are empty if none has an effect.

        `loose`: node index in the manifest's `walk`, offset, and the second capture's bytes.  Those
        bytes, arbitrary ones and zeros are tried: each `alone`, since two changes may cancel out,
        and all together.  `note` is called with the index before each trial.
        """
        if not loose:
            return 0, ""
        data = {
            place: node.params.arguments.data
            for place, node in enumerate(self._loader.manifest.graph.walk())
            if isinstance(node.params, KernelNodeParams)
        }

        def arbitrary(place: int, offset: int, other: bytes) -> bytes:
            mine = data[place][offset : offset + len(other)]
            pairs = zip(mine, other, strict=True)
            return bytes(a ^ 0xFF if a ^ 0xFF != b else a ^ 0x5A for a, b in pairs)

        theirs = {(place, offset): other for place, offset, other in loose}
        others = {(p, offset): arbitrary(p, offset, other) for p, offset, other in loose}
        # The second capture's values first: arbitrary ones may act as sizes and end the process.
        zeros = {place: bytes(len(other)) for place, other in theirs.items()}  # flags, counts
        for values in (theirs, others, zeros):
            for index, place in enumerate(theirs) if alone else ():
                note(index)
                what = self._changed({place: values[place]})
                if what:
                    return index, what
            note(0)
            what = self._changed(values)
            if what:
                return 0, what
        return 0, ""

    def _changed(self, values: Mapping[tuple[int, int], bytes]) -> str:
        """Describes the difference with these bytes in the arguments; empty if there is none."""
        before = self._run
        try:
            with self._loader.build(self._loader.manifest.with_data(values).graph) as graph:
                self._run = graph.instantiate()
                with self._run:
                    for block in self.blocks:
                        self._fill(block, _POISONS[0])  # clears the results of the last run
                    return self._outcome()
        except OstinatoError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._run = before

    def _outcome(self) -> str:
        """Runs the graph on the stored inputs; names the first result that differs, if one does."""
        for name, array in self._constants.items():
            buffer = self._named[name]
            if buffer.block not in self._kept:
                self._write(buffer.block, buffer.into, tensor_bytes(array))
        for name, before in self._inputs.items():
            self._write(self._named[name].block, self._named[name].into, before)
        self._run.launch(self._stream)
        self._stream.synchronize()
        for name, buffer in self._named.items():
            wanted = self._loader.manifest.tensors.get(f"results/{name}")
            if wanted is None:
                continue
            found = np.empty(buffer.nbytes, np.uint8)
            address = self._loader.bases[buffer.block] + buffer.into
            if found.size:
                self._driver.memcpy_to_host(found.data, address, self._stream.handle)
            if sha256(found.data).hexdigest() != wanted:
                return f"bytes of {name!r} differ"
        return ""

    @staticmethod
    def _fitting(buffer: NamedBuffer, array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        flat = tensor_bytes(array)
        if flat.nbytes != buffer.nbytes:
            raise GraphFileError(f"the content of {buffer.name!r} has {flat.nbytes} bytes")
        return flat

    def _write(self, block: int, into: int, data: npt.NDArray[np.uint8]) -> None:
        if data.size:
            address = self._loader.bases[block] + into
            self._driver.memcpy_from_host(address, data.data, self._stream.handle)

    def _fill(self, block: int, value: int) -> None:
        nbytes = self._loader.manifest.blocks[block].nbytes
        self._fill_range(MemoryRange(self._loader.bases[block], nbytes), value)

    def _fill_range(self, memory: MemoryRange, value: int) -> None:
        self._driver.memset(memory.address, value, 1, memory.nbytes, self._stream.handle)
