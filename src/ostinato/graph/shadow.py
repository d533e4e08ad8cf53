"""`Shadow`: the content of the nodes of an executable; the driver has no getters for it.

It stores what was set, makes changes in the driver, and takes them back.  States of a node: as in
the definition, or as it was set since (`Now`).  Kernel nodes whose single arguments are set often
are held as `Live` objects instead, and folded into the record when it is read.

Every change is all or nothing: if the driver refuses a part, the rest is undone node by node before
the error is raised.  If that fails too, the content of the executable is unknown: see `unusable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ostinato.driver.api import (
    AllocNodeParams,
    ChildGraphNodeParams,
    EmptyNodeParams,
    ExecHandle,
    FreeNodeParams,
    FrozenGraph,
    GraphHandle,
    KernelNodeParams,
    KernelSetter,
    NodeHandle,
    NodeParams,
    UpdateVerdict,
)
from ostinato.driver.interrupts import uninterrupted
from ostinato.driver.launcher import set_nodes, set_words
from ostinato.driver.signature import Signature
from ostinato.errors import DriverError, GraphError, InputError, UpdateRefusedError
from ostinato.graph.frozen import Definition, Frozen, Nodes, check_loops, kept_of_graphs
from ostinato.graph.node import Node, every_node, given_reach, index_below
from ostinato.graph.plan import VERDICTS, NodeChange, Rebinding, keeps, refused, require_kept
from ostinato.graph.words import IndexedNode, Setting, WordIndex, WordPlace, first_setting
from ostinato.memory.ranges import KnownRanges

_HALF_DONE = (
    "a change of this executable failed, and so did taking it back, so what it would run is not "
    "known; instantiate its graph again"
)


@dataclass(frozen=True, slots=True)
class Now:
    """The settings since the definition was read."""

    settings: Mapping[NodeHandle, Setting] = field(default_factory=dict)
    updated: tuple[Definition, Frozen] | None = None
    """The graph of the last whole update, and its content at that time."""


class Live:
    """One kernel node whose arguments are set by `KernelSetter`, without a record for each change.

    Its content is here until `Shadow` folds it into a `Setting`.  `gone`: the node was changed
    in another way since, and needs a new `Live`.
    """

    __slots__ = (
        *("_unread", "dirty", "gone", "handle", "node", "owners", "params", "reach", "setter"),
        "signature",
    )
    node: Node
    params: KernelNodeParams
    signature: Signature | None
    reach: dict[int, int]

    def __init__(
        self,
        handle: NodeHandle,
        setter: KernelSetter,
        owners: dict[WordPlace, object],
        content: Setting | tuple[Nodes, int],
    ) -> None:
        """`content`: the setting, or the place at which a node that did not change is read once
        more than its bytes is asked for."""
        self.handle, self.setter = handle, setter
        # Shared with the record: the record must not keep memory alive that was replaced here.
        self.owners = owners
        self.dirty = False
        self.gone = False
        if isinstance(content, Setting):
            self._fill(content)
        else:
            self._unread = content

    def _fill(self, setting: Setting) -> None:
        assert isinstance(setting.params, KernelNodeParams)
        self.node, self.signature, self.reach = setting.node, setting.signature, dict(setting.reach)
        self.params = setting.params

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Called where a slot is empty: reads the node."""
            if name not in Live.__annotations__:
                raise AttributeError(name)
            nodes, index = self._unread
            self._fill(first_setting(nodes.read(index)))
            return getattr(self, name)

    def setting(self) -> Setting:
        """Returns the present content of the node."""
        params = self.params.with_data(self.setter.data)
        return Setting(self.node, params, self.signature, dict(self.reach), self.owners)


class _PlainSetter:
    """A `KernelSetter` that sets the whole node, for drivers without a shorter way.

    Here `set` raises the driver's error.
    """

    def __init__(self, set: Callable[[NodeParams], None], params: KernelNodeParams) -> None:
        self._set, self._params = set, params

    @property
    def data(self) -> bytes:
        return self._params.arguments.data

    def holds(self, offset: int, raw: bytes, /) -> bool:
        return self.data[offset : offset + len(raw)] == raw

    @uninterrupted
    def set(self, offset: int, raw: bytes, /) -> int:
        params = self._params.with_data(self._params.arguments.with_bytes(offset, raw).data)
        self._set(params)
        self._params = params
        return 0


@dataclass(slots=True)  # not frozen: that triples what it costs to make one
class Write:
    """New bytes at one place of a node's arguments.

    `owner` owns the memory at which they point; `nbytes` are known to be used there.
    """

    live: Live
    place: int
    raw: bytes
    owner: object = None
    nbytes: int | None = None


def inner_words(place: int, size: int) -> range:
    """Returns the offsets of the words after the first in these bytes: a struct has several."""
    return range((place + 8) // 8 * 8, place + size, 8)


class Shadow:
    """The nodes of one executable, their settings, and the objects that these keep alive.

    Not thread-safe; changes must not be interrupted.  The definition is frozen when the executable
    is made, and a node is decoded at its first use: later changes of the definition, by this
    library or another one, do not change the executable, nor this record of it.
    """

    def __init__(self, graph: Definition, executable: ExecHandle) -> None:
        self.unusable = ""
        """The reason why the executable must not be launched any more; empty if it may."""
        self._graph, self._executable = graph, executable
        self._driver = graph.context.driver
        self._frozen = frozen_of(graph)
        self._handles = self._frozen.outer.nodes
        self._read: Nodes | None = None
        """The nodes as instantiated, or last updated; read from their first use on."""
        self._now = Now()
        self._changes = 0
        self._live: dict[NodeHandle, Live] = {}
        self._dirty: dict[NodeHandle, Live] = {}
        """The `Live` objects with changes that `_now` does not have."""
        self._words: WordIndex | None = None
        self._stale: set[NodeHandle] = set()
        """Nodes that were changed since the last call of `words`."""

    def changed(self) -> bool:
        """True if anything was set since the definition was read."""
        return bool(self._dirty or self._now.settings) or self._now.updated is not None

    def revision(self) -> int:
        """Returns a number that is another one after each change."""
        self._folded()
        return self._changes

    def switched(self) -> None:
        """Notes that a node was switched on or off."""
        self._changes += 1

    def __len__(self) -> int:
        """Returns the number of nodes, without those inside others."""
        return len(self._handles)

    def grown(self) -> bool:
        """True if the definition has other nodes than when it was read."""
        return self._driver.graph_nodes(self._graph.handle) != self._handles

    def check_loops(self) -> None:
        """Raises GraphError for a WHILE of the definition that cannot end (`frozen`)."""
        check_loops(self._driver, self._frozen)

    def left_allocated(self) -> list[int]:
        """Returns the addresses of the definition's alloc nodes that have no free node in it."""
        found = [
            frozen.params(index)
            for frozen in self._frozen.graphs.values()
            for index in frozen.memory_nodes
        ]
        freed = {params.address for params in found if isinstance(params, FreeNodeParams)}
        return [
            params.address
            for params in found
            if isinstance(params, AllocNodeParams) and params.address not in freed
        ]

    # --- reading
    def nodes(self) -> tuple[Node, ...]:
        """The definition's nodes with the parameters of the next launch."""
        return self._overlaid(self._nodes().all(), self._folded().settings)

    def _overlaid(
        self, nodes: tuple[Node, ...], settings: Mapping[NodeHandle, Setting]
    ) -> tuple[Node, ...]:
        if not settings:
            return nodes
        return tuple(
            replace(
                settings[n.handle].shown() if n.handle in settings else n,
                children=tuple(self._overlaid(body, settings) for body in n.children),
            )
            if n.children or n.handle in settings
            else n
            for n in nodes
        )

    def _nodes(self) -> Nodes:
        """The nodes as instantiated, or last updated, with the handles of the first ones.

        Raises ClosedError if the definition was closed before their first use, UpdateRefusedError
        if an update took a graph whose nodes come in another order.
        """
        if self._read is None:
            graph, frozen = self._now.updated or (self._graph, self._frozen)
            _ = graph.handle  # raises if it was closed
            # CUDA pairs nodes along edges, so it also takes a graph whose nodes come in another
            # order; the settings here belong to a node's index.
            if self._now.updated is not None and self._frozen.shape() != frozen.shape():
                raise UpdateRefusedError(
                    "the executable was updated from a graph whose nodes come in another order, so "
                    "its single nodes cannot be told apart any more; instantiate again to set them"
                )
            find = KnownRanges(self._driver.memory_range)
            self._read = Nodes(graph, graph.reader, frozen, self._frozen, find)
        return self._read

    def node(self, node: Node | int) -> Node:
        """Returns a node as it was in the definition, also inside child graphs and bodies.

        A number is an index of the graph's own nodes.  Raises InputError for other numbers,
        ClosedError if the definition was closed: libcuda may crash on a node that is gone.
        """
        _ = self._graph.handle
        handles = self._handles
        if not isinstance(node, Node):
            return self._nodes().read(index_below(len(handles), node))
        if node.index < len(handles) and handles[node.index] == node.handle:
            return self._nodes().read(node.index)
        inside = every_node(self._nodes().all())
        found = next((n for n in inside if n.handle == node.handle), None)
        if found is None:
            raise InputError(
                f"node {node.index} ({node.name}) is not of the graph that this was made of"
            )
        return found

    def _folded(self, handles: Iterable[NodeHandle] | None = None) -> Now:
        """Returns the record of the settings, including those in the `Live` objects of these nodes,
        or of all."""
        chosen = tuple(self._dirty) if handles is None else self._dirty.keys() & handles
        made = {handle: self._dirty[handle].setting() for handle in chosen}
        if made:
            self._now = replace(self._now, settings={**self._now.settings, **made})
            self._changes += 1
            for folded in made:
                self._dirty.pop(folded).dirty = False
        return self._now

    def setting(self, node: Node) -> Setting:
        """Returns the present setting of one of these nodes."""
        now = self._folded((node.handle,)).settings.get(node.handle)
        return first_setting(node) if now is None else now

    def setting_at(self, entry: IndexedNode) -> Setting:
        """Returns the present setting of a node of `words`."""
        now = self._folded((entry.handle,)).settings.get(entry.handle)
        return first_setting(entry.nodes.read(entry.index)) if now is None else now

    def owners(self, handle: NodeHandle) -> Mapping[WordPlace, object]:
        """Returns the owners of the memory at which words of a node were set, by their places."""
        known = self._live.get(handle) or self._now.settings.get(handle)
        return {} if known is None else known.owners

    def params(self, node: Node) -> NodeParams:
        """Returns the parameters of one of these nodes in the next launch."""
        now = self._folded((node.handle,)).settings.get(node.handle)
        return node.params if now is None else now.params

    def words(self) -> WordIndex:
        """Returns an index of every word that may hold an address in the next launch."""
        index, self._words = self._words, None  # stored again only if no error is raised
        if index is not None and self._stale:
            settings = self._folded(self._stale).settings
            changed = [settings.get(handle) for handle in self._stale]
            # A handle without a setting was updated.
            if None in changed or not index.refresh(one for one in changed if one):
                index = None
        if index is None:
            index = WordIndex(self._nodes().parts(), self._folded().settings)
        self._stale.clear()
        self._words = index
        return index

    # --- nodes that are changed often
    def live(self, node: Node) -> Live:
        """Returns a node to be changed in place."""
        live = self._live.get(node.handle)
        if live is None:
            setting = self.setting(node)
            params = setting.params
            assert isinstance(params, KernelNodeParams)
            made = self._driver.exec_prepare_kernel(self._executable, node.handle, params)
            setter = self._plain_setter(node, params) if made is None else made
            live = self._live[node.handle] = Live(node.handle, setter, setting.owners, setting)
        return live

    def _lives(self, index: WordIndex, entries: Sequence[int]) -> list[Live]:
        """Returns kernel nodes of an index to be changed in place."""
        lives: list[Live] = []
        for nodes, indices in index.kernels(entries):
            keys, handles, known = nodes.frozen.kernels.keys, nodes.handles, self._live
            settings = self._now.settings
            new = [
                i
                for i in indices
                if handles[i] not in known and handles[i] not in settings and keys[i] is not None
            ]
            which = [handles[i] for i in new]
            prepare = self._driver.exec_prepare_kernels
            setters = prepare(self._executable, which, nodes.frozen, new) if new else None
            for i, setter in zip(new, setters or (), strict=False):
                known[handles[i]] = Live(handles[i], setter, {}, (nodes, i))
            lives += [known.get(handles[i]) or self.live(nodes.read(i)) for i in indices]
        return lives

    def _plain_setter(self, node: Node, params: KernelNodeParams) -> _PlainSetter:
        return _PlainSetter(partial(self._set_one, node), params)

    def touch(self, live: Live) -> None:
        """Marks a `Live` node as changed.  Call it before the change."""
        if not live.dirty:
            self._dirty[live.handle] = live
            live.dirty = True
        self._stale.add(live.handle)

    def end_live(self) -> None:
        """Ends the `Live` nodes; what they hold can still be read."""
        for live in self._live.values():
            live.gone = True

    def _end(self, handles: Sequence[NodeHandle]) -> None:
        self._folded(handles)
        self._drop(handles)

    def _drop(self, handles: Iterable[NodeHandle]) -> None:
        """Drops the `Live` objects of these nodes: the driver was given other parameters."""
        for handle in handles:
            live = self._live.pop(handle, None)
            self._dirty.pop(handle, None)
            if live is not None:
                live.gone = True
                live.owners = {}  # a patcher may keep the object for longer

    # --- changing: each returns owners of memory that may not be pointed at any more
    def write(self, writes: Sequence[Write]) -> list[object]:
        """Makes all writes or none; those of one node must be next to each other.

        Raises UpdateRefusedError, and GraphError if the driver refused to take some of them back.
        """
        taken = set_nodes([(w.live.setter, w.place, w.raw) for w in writes])
        gone = self._finished(taken, ((w.live, w.place, w.raw) for w in writes))
        old: list[object] = []
        for write in writes:
            live = write.live
            self.touch(live)
            _note(live, write.place, write.owner, write.nbytes, old)
            if len(write.raw) > 8 or write.place % 8:
                for place in inner_words(write.place, len(write.raw)):
                    _note(live, place, None, None, old)
        self._end(gone)
        return old

    def rebind(self, plan: Rebinding) -> list[object]:
        """Makes a rebinding that was planned from the present `words`.  Raises as `write`."""
        lives, counts = self._lives(plan.index, plan.entries), plan.counts.tolist()
        of_words = [live for live, n in zip(lives, counts, strict=True) for _ in range(n)]
        places, raws = plan.places.tolist(), plan.values.tobytes()
        now = self._after(plan.changes) if plan.changes else None
        self._set([(change.node, change.params) for change in plan.changes])
        try:
            setters = [live.setter for live in lives]
            taken = set_words(setters, plan.counts.tobytes(), plan.places.tobytes(), raws)
            each = (raws[at : at + 8] for at in range(0, len(raws), 8))
            gone = self._finished(taken, zip(of_words, places, each, strict=True))
        except Exception:
            self._undo([change.node for change in plan.changes])
            raise
        old = [] if now is None else self._commit(now)
        for live in lives:
            self.touch(live)
        for live, place, target in zip(of_words, places, plan.targets, strict=True):
            owners = live.owners
            before = owners.get(place)
            if before is not None:
                old.append(before)
            owners[place] = target
        self._end(gone)
        if self._words is plan.index:
            plan.index.move(*plan.moved)
            self._stale.clear()
        return old

    def change(self, changes: Sequence[NodeChange]) -> list[object]:
        """Makes changes in order; undoes them if one is refused."""
        now = self._after(changes)
        self._set([(change.node, change.params) for change in changes])
        return self._commit(now)

    def update(self, graph: Definition) -> list[object]:
        """Takes every parameter from the present content of `graph`.

        Raises UpdateRefusedError, also if the driver would silently take only a part.
        """
        frozen = frozen_of(graph)
        self._require_kept(self._frozen, frozen)
        outcome = self._driver.exec_update(self._executable, graph.handle)
        if outcome.verdict is not UpdateVerdict.SUCCESS:
            blamed = next((n for n in graph.nodes() if n.handle == outcome.node), None)
            where = "" if blamed is None else f" at node {blamed.index} ({blamed.name})"
            raise UpdateRefusedError(
                f"the update was refused{where}: {VERDICTS[outcome.verdict]} "
                f"({outcome.verdict.name}). Instantiate the new graph instead.",
                node_index=None if blamed is None else blamed.index,
            )
        return self._commit(Now(updated=(graph, frozen)))

    # --- in the driver
    def _set(self, nodes: Sequence[tuple[Node, NodeParams]]) -> None:
        """Sets nodes in order; undoes those before a refusal.  Raises UpdateRefusedError."""
        made: list[Node] = []
        for node, params in nodes:
            try:
                self._set_one(node, params)
            except Exception:
                self._undo(made)
                raise
            made.append(node)

    def _set_one(self, node: Node, params: NodeParams) -> None:
        try:
            self._driver.exec_set_params(self._executable, node.handle, params)
        except DriverError as error:
            raise refused(node, error) from error

    def _finished(
        self, taken: tuple[int, int] | None, writes: Iterable[tuple[Live, int, bytes]]
    ) -> list[NodeHandle]:
        """Makes writes node by node, unless the driver has `taken` them: it has no shorter way, or
        refused them, and now raises the reason.  Returns nodes whose setters are out of date: their
        `Live` objects must be dropped."""
        if taken == (0, 0):
            return []
        new: dict[Live, bytearray] = {}
        for live, place, raw in writes:
            data = new.get(live)
            if data is None:
                data = new[live] = bytearray(live.setter.data)
            data[place : place + len(raw)] = raw
        if taken is not None and taken[1]:  # the driver could not take some back
            self._undo([live.node for live in new])
        made = [(live, live.params.with_data(bytes(data))) for live, data in new.items()]
        self._set([(live.node, params) for live, params in made])
        gone = [live.handle for live in new if type(live.setter) is not _PlainSetter]
        for live, params in made:
            live.setter = self._plain_setter(live.node, params)
        return gone

    def _undo(self, nodes: Sequence[Node]) -> None:
        """Gives nodes their recorded parameters again.  If the driver refuses that, makes the
        executable unusable and raises GraphError."""
        failed: DriverError | None = None
        for node in reversed(nodes):
            try:
                self._driver.exec_set_params(self._executable, node.handle, self.params(node))
            except DriverError as error:
                failed = error
        if failed is not None:
            self.unusable = _HALF_DONE
            raise GraphError(_HALF_DONE) from failed

    # --- records after changes
    def _after(self, changes: Sequence[NodeChange]) -> Now:
        """Returns the record of the settings after these changes."""
        made = {change.node.handle: self._changed(change) for change in changes}
        for change in changes:
            if isinstance(change.params, ChildGraphNodeParams):
                made.update(self._changed_inside(change, change.params.graph))
        return replace(self._now, settings={**self._now.settings, **made})

    def _changed(self, change: NodeChange) -> Setting:
        old, params = self.setting(change.node), change.params
        owners = {**({} if change.whole else old.owners), **dict(change.owners)}
        before, signature = old.params, old.signature
        if not (isinstance(params, KernelNodeParams) and isinstance(before, KernelNodeParams)):
            return Setting(old.node, params, None, {}, owners)
        other = params.function != before.function
        same = before.config, before.extra_attributes
        if other or (params.config, params.extra_attributes) != same:
            by_function = other and self._frozen.hides(old.node.handle)
            require_kept(old.node, before, params, by_function=by_function)
        reach = dict(old.reach)
        if change.whole:
            if change.signature is not None or params.function != before.function:
                signature = change.signature
            reach = _kept_reach(before, params, reach)
            reach.update(given_reach(params.arguments.data, owners.values()))
        return Setting(old.node, params, signature, reach, owners)

    def _changed_inside(self, change: NodeChange, child: GraphHandle) -> dict[NodeHandle, Setting]:
        """Returns the settings of the nodes inside a child graph node after it got another child.

        Raises UpdateRefusedError unless the child has the same nodes and edges, in the same order,
        and its kernels the same launch attributes.
        """
        node = change.node
        assert isinstance(node.params, ChildGraphNodeParams)
        before = self._inside(node.params.graph)
        frozen = Frozen(self._driver, child, change.ours)
        self._require_kept(before, frozen, node)
        if before.shape() != frozen.shape():
            raise UpdateRefusedError(
                f"node {node.index} ({node.name}): the child graph that it is to have has other "
                "nodes or edges, or in another order; instantiate again",
                node_index=node.index,
            )
        return dict(self._set_inside(node.children[0], frozen, frozen.outer))

    def _inside(self, graph: GraphHandle) -> Frozen:
        """Returns a graph inside, as it was when the executable was made, or updated."""
        updated = None if self._now.updated is None else self._now.updated[1].at(graph)
        found = updated or self._frozen.at(graph)
        assert found is not None, "a node's child is one of those that were read with it"
        return found

    def _set_inside(
        self, nodes: Sequence[Node], whole: Frozen, frozen: FrozenGraph
    ) -> Iterator[tuple[NodeHandle, Setting]]:
        for index, inner in enumerate(nodes):
            params = frozen.params(index)
            if isinstance(params, EmptyNodeParams):
                continue
            yield inner.handle, self._changed(NodeChange(inner, params, whole=True))
            for body, graph in zip(inner.children, whole.inside(frozen, index), strict=True):
                yield from self._set_inside(body, whole, graph)

    def _require_kept(self, old: Frozen, new: Frozen, around: Node | None = None) -> None:
        """Raises UpdateRefusedError if the driver would accept `new` for `old`, but not all of it.

        `around`: the child graph node that is changed, None for the whole graph.
        """
        kept = kept_of_graphs(old, new)
        if kept is None:
            return
        path = kept.path if around is None else (around.index, *kept.path)
        inside = "".join(f" inside node {index}" for index in reversed(path))
        if kept.index is None or kept.old is None or kept.new is None:
            raise UpdateRefusedError(
                f"the edges{inside} are not the same: programmatic in one graph, plain in the "
                "other. An executable keeps its edges. Instantiate again.",
                node_index=path[0] if path else None,
            )
        params = kept.graph.params(kept.index)
        assert isinstance(params, KernelNodeParams)
        name = self._driver.function_info(params.function).name
        where = f"node {kept.index} ({name}){inside}"
        raise keeps(where, kept.old, kept.new, path[0] if path else kept.index)

    def _commit(self, now: Now) -> list[object]:
        """Stores a record that the driver accepted.  Returns the owners of memory before it, which
        may not be pointed at any more."""
        before = self._now
        self._changes += 1
        if now.updated is not before.updated:
            # Decoded only when a single node is used.
            old: list[object] = [] if before.updated is None else [before.updated[0]]
            every = [one.owners for one in before.settings.values()]
            every += [live.owners for live in self._live.values()]
            old += [owner for owners in every for owner in owners.values()]
            self._drop(tuple(self._live))
            self._now, self._read, self._words = now, None, None
            return old
        settings = before.settings
        changed = [h for h, setting in now.settings.items() if settings.get(h) is not setting]
        self._drop(changed)
        self._now = now
        self._stale.update(changed)
        return [owner for h in changed if h in settings for owner in settings[h].owners.values()]

    def clear(self) -> None:
        """Releases the settings, after the executable was destroyed."""
        self._drop(tuple(self._live))
        self._now = Now()


def _kept_reach(
    before: KernelNodeParams, now: KernelNodeParams, reach: Mapping[int, int]
) -> dict[int, int]:
    """Returns the known extents of words that did not change."""
    old, new = before.arguments.data, now.arguments.data
    same = before.function == now.function and len(old) == len(new)
    return {at: n for at, n in reach.items() if same and old[at : at + 8] == new[at : at + 8]}


def frozen_of(graph: Definition) -> Frozen:
    """Returns the present content of a graph."""
    # In an adopted graph another library may remove a node of this library, and add one that
    # gets its handle.
    return Frozen(graph.context.driver, graph.handle, graph.labels if graph.owned else None)


def _note(live: Live, place: int, owner: object, nbytes: int | None, old: list[object]) -> None:
    """Notes the owner of the memory at which a place points, and the bytes known to be used."""
    before = live.owners.get(place)
    if before is not owner:
        old.append(before)
    live.owners[place] = owner
    live.reach.pop(place, None)
    if nbytes is not None:
        live.reach[place] = nbytes
