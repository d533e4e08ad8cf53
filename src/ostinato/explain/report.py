"""The report of a black box: how far each replay came, as text, as data, and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ostinato.driver.api import MemoryRange
from ostinato.errors import InputError
from ostinato.explain.crumbs import State
from ostinato.graph.audit import KnownMemory, PointerReport

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node of a replay that was under way.

    `state`: "finished", "running" (it may have been running), "early" (it may have started before
    the end of a running node that it waits for, as programmatic launch allows) or "waiting" (it had
    not begun).
    `path` as in `PointerReport`; `launch`: grid, block and shared memory of a kernel; `line`: the
    line of Python that made the node, "" if unknown.
    """

    path: str
    name: str
    kind: str
    state: State
    launch: str
    line: str
    pointers: tuple[PointerReport, ...]

    def __str__(self) -> str:
        launch = f", {self.launch}" if self.launch else ""
        line = f"\n    {self.line}" if self.line else ""
        pointers = "".join(f"\n    {pointer}" for pointer in self.pointers)
        return f"node {self.path} ({self.name}), {self.kind}{launch}{line}{pointers}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A replay under way: its nodes, and those inside of nodes that may have been running.

    `file`: a graph file that starts with the inputs of this replay, or None; then `not_saved` says
    why there is none.
    """

    graph: str
    every: int
    """A mark was left after every so many nodes."""
    nodes: tuple[NodeReport, ...]
    file: str | None = None
    not_saved: str = ""

    @property
    def running(self) -> tuple[NodeReport, ...]:
        """The nodes that may have been running; of those around others, only the inner ones."""
        found = [node for node in self.nodes if node.state == "running"]
        return tuple(
            node for node in found if not any(o.path.startswith(f"{node.path}/") for o in found)
        )

    def __str__(self) -> str:
        running = self.running
        early = [node for node in self.nodes if node.state == "early"]
        which = "this node" if len(running) == 1 else f"one of these {len(running)} nodes"
        which += ", or in one that may have started early" * bool(early)
        lines = [f"a replay of {self.graph} was in {which}:"]
        lines += [f"  {line}" for node in running for line in str(node).split("\n")]
        if early:
            lines.append(
                "  may have started early (programmatic launch), and come to its own wait:"
            )
        lines += [f"    {line}" for node in early for line in str(node).split("\n")]
        for state, what in (("finished", "finished"), ("waiting", "not begun")):
            paths = [node.path for node in self.nodes if node.state == state]
            lines.append(f"  {what}: {_folded(paths) or 'none'}")
        if self.file is not None:
            lines.append(f"  graph and inputs: ostinato autopsy {self.file}")
        elif self.not_saved:
            lines.append(f"  graph and inputs are in no file: {self.not_saved}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class BlackBoxReport:
    """A fault, as far as a black box knows it.

    `replays`: the watched replays that were under way; the fault is of one of them, or of work that
    is not watched.  `notes`: replays that could not be watched, and why.  `file`: where this is
    written, or None.
    """

    device: str
    replays: tuple[ReplayReport, ...]
    memory: tuple[KnownMemory, ...]
    notes: tuple[str, ...] = ()
    file: str | None = None

    def __str__(self) -> str:
        lines = [f"black box: {replay}" for replay in self.replays]
        if not lines:
            lines = [
                "black box: no watched replay was under way, so it was work that was launched "
                "eagerly, or a graph that is not watched"
            ]
        lines += [f"not watched: {note}" for note in self.notes]
        if self.file is not None:
            lines.append(f"report: ostinato autopsy {self.file}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {"ostinato_fault": _FORMAT, **asdict(self)}

    @classmethod
    def load(cls, path: str | Path) -> BlackBoxReport:
        """Reads a report file.  Raises InputError for another file, OSError."""
        text = Path(path).read_bytes()
        try:
            found = json.loads(text)
            if found["ostinato_fault"] != _FORMAT:
                raise InputError(f"{path} is of another version of the library")
            replays = (
                ReplayReport(**{**replay, "nodes": tuple(_node(node) for node in replay["nodes"])})
                for replay in found["replays"]
            )
            memory = (
                KnownMemory(**{**one, "range": MemoryRange(**one["range"])})
                for one in found["memory"]
            )
            notes = tuple(found["notes"])
            made = cls(found["device"], tuple(replays), tuple(memory), notes, str(path))
            _ = str(made), made.table()  # values of other types show here
            return made
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path} is no report of a fault ({error}): give the .json or the .graph file that "
                "the error of the fault names"
            ) from error

    def table(self) -> str:
        """Returns the nodes of each replay with their states, and the memory, as text."""
        lines: list[str] = []
        for replay in self.replays:
            lines.append(f"nodes of {replay.graph}")
            for node in replay.nodes:
                lines.append(f"  {node.state:8}  {node.path:>6}  {node.kind:11}  {node.name}")
                lines += [f"{'':20}{pointer}" for pointer in node.pointers]
        lines.append("memory")
        for memory in self.memory:
            lines.append(f"  {'live ' if memory.live else 'freed'}  {memory}")
        return "\n".join(lines)


def _node(found: dict[str, Any]) -> NodeReport:
    return NodeReport(**{**found, "pointers": tuple(PointerReport(**p) for p in found["pointers"])})


def _folded(paths: Sequence[str]) -> str:
    """Returns "nodes 0 to 3, 5": indices in a row as one entry."""
    runs: list[list[str]] = []
    for path in paths:
        last = runs[-1][-1] if runs else ""
        if path.isdecimal() and last.isdecimal() and int(path) == int(last) + 1:
            runs[-1].append(path)
        else:
            runs.append([path])
    texts = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ("node " if len(paths) == 1 else "nodes ") + ", ".join(texts) if paths else ""
