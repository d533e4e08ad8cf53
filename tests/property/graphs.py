"""Graphs and executables: made in every way, changed in every way, closed in any order."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import ostinato as ost
from ostinato.errors import (
    CaptureError,
    ClosedError,
    DriverError,
    GraphError,
    InputError,
    OstinatoError,
    UpdateRefusedError,
)
from tests.property.engine import BYTE, booleans, integers, rule, sampled
from tests.property.kernels import config, kernel
from tests.property.oracle import (
    PLAIN,
    SIZE,
    Affine,
    Box,
    Branch,
    Child,
    Copy,
    Fill,
    Loop,
    Mark,
    Op,
    Ref,
    Seen,
    Signal,
    Sum,
    Switch,
    Through,
    apply,
    changed,
    even,
    inner,
    leaves,
    refs_of,
    rewritten,
    whole,
)
from tests.property.world import MODES, OPS, SPEC, Lane, World

Spec = tuple[int, int, int, int]


def boxes_of(ops: Iterable[Op]) -> list[Box]:
    """All boxes that operations touch, each once."""
    return list(dict.fromkeys(r.box for op in leaves(ops) for r in refs_of(op).values()))


@dataclass(eq=False)
class Definition:
    """A graph and what it does.  `single`: one executable at a time, no clone, no child.

    `apart`: its edges order only what touches the same memory.
    """

    graph: ost.Graph
    ops: tuple[Op, ...]
    single: bool = False
    apart: bool = False

    @property
    def dangling(self) -> bool:
        """Whether it points at closed memory."""
        return any(box.closed for box in boxes_of(self.ops))


@dataclass(eq=False)
class Executable:
    """An executable and what its next launch does."""

    run: ost.GraphExec
    ops: tuple[Op, ...]
    made_of: Definition
    off: set[Op] = field(default_factory=set)
    others: list[Definition] = field(default_factory=list)
    """Whose graphs it was updated from."""
    unusable: bool = False
    cached: object = None
    """The cache that owns it."""
    holds: int = 0

    @property
    def boxes(self) -> list[Box]:
        return boxes_of(self.ops)

    @property
    def readable(self) -> bool:
        """Whether the definitions are there, so that its nodes can be told apart."""
        return not any(d.graph.closed for d in (self.made_of, *self.others))

    @property
    def refusal(self) -> type[OstinatoError] | None:
        """What a launch raises; None if it must go well."""
        if self.unusable:
            return GraphError
        return ClosedError if any(box.closed for box in self.boxes) else None

    def apply(self) -> None:
        apply(rewritten(self.ops, lambda op: Child(()) if op in self.off else op))

    def sane(self, ops: tuple[Op, ...]) -> bool:
        """Whether a change to these operations has one answer.

        No body of a loop uses what the loop counts with, and the edges, which stay, order all that
        touches the same memory.
        """
        loops = [op for op in leaves(ops) if isinstance(op, Loop)]
        if any(loop.on.box in boxes_of(loop.body) for loop in loops):
            return False
        return not self.made_of.apart or conflicts(ops) <= conflicts(self.made_of.ops)

    def place(self, op: Op) -> tuple[int, ...]:
        """Where the node of an operation is: an index, and those inside."""
        return _place(self.ops, op)

    def node(self, op: Op) -> ost.Node | int:
        outer, *rest = self.place(op)
        if not rest:
            return outer
        node = self.run.nodes()[outer]
        for body, index in zip(rest[::2], rest[1::2], strict=True):
            node = node.children[body][index]
        return node


def _place(ops: tuple[Op, ...], wanted: Op) -> tuple[int, ...]:
    at = 0
    for op in ops:
        before = 1 if isinstance(op, Branch | Switch | Loop) else 0  # a kernel decides
        if op is wanted:
            return (at,)
        for which, body in enumerate(inner(op)):
            if any(o is wanted for o in leaves(body)):
                return (at + before, which, *_place(body, wanted))
        at += 4 if isinstance(op, Through) else 1 + before
    raise AssertionError("it is nowhere")


class GraphRules(World):
    """Rules for graphs and executables."""

    def open(self) -> None:
        super().open()
        self.definitions: list[Definition] = []
        self.executables: list[Executable] = []

    def close_everything(self) -> None:
        for turn, executable in enumerate(self.executables):
            if turn % 2:
                executable.run.close()
        for turn, definition in enumerate(self.definitions):
            if turn % 2:
                definition.graph.close()
        self.definitions, self.executables = [], []
        super().close_everything()

    def calls_of_everything(self) -> Iterator[Callable[[], object]]:
        yield from super().calls_of_everything()
        stream = self.lanes[0].stream if self.lanes else None
        if stream is None:
            return
        for executable in self.executables[:2]:
            yield lambda run=executable.run: run.launch(stream)
        for definition in self.definitions[:2]:
            yield definition.graph.instantiate

    # --- making definitions
    def room(self) -> None:
        """Drops or closes the oldest where there are many."""
        if len(self.definitions) > 5:
            self.definitions.pop(0)
        if len(self.executables) > 6:
            oldest = next((e for e in self.executables if e.cached is None), None)
            if oldest is not None:
                oldest.run.close()
                self.executables.remove(oldest)

    def define(
        self, graph: ost.Graph, ops: Iterable[Op], *, single: bool = False, apart: bool = False
    ) -> Definition:
        self.room()
        self.definitions.append(Definition(graph, tuple(ops), single, apart))
        return self.definitions[-1]

    def captured(self, lane: Lane, ops: Iterable[Op]) -> ost.Graph:
        with ost.capture(lane.stream) as capture:
            for op in ops:
                self.submit(lane.stream, op)
        return capture.graph

    @rule(specs=OPS, lane=BYTE, mode=integers(0, 2))
    def capture(self, specs: list[Spec], lane: int, mode: int) -> None:
        on, ops = self.lane(lane), [self.op(spec) for spec in specs]
        how = MODES[mode]
        with ost.capture(on.stream, mode=how, contained=bool(lane % 2)) as capture:
            for op in ops:
                self.submit(on.stream, op)
        self.define(capture.graph, ops)

    @rule(specs=OPS, more=OPS, lane=BYTE, side=BYTE)
    def capture_a_fork(self, specs: list[Spec], more: list[Spec], lane: int, side: int) -> None:
        """The second half on another stream, behind the first half, and joined again."""
        on, off = self.lane(lane), self.lane(side)
        first, second = ([self.op(spec) for spec in part] for part in (specs, more))
        with ost.capture(on.stream) as capture:
            for op in first:
                self.submit(on.stream, op)
            if off is not on:
                off.stream.wait(on.stream.record())
            for op in second:
                self.submit(off.stream, op)
            if off is not on:
                on.stream.wait(off.stream.record())
        self.define(capture.graph, [*first, *second])

    @rule(specs=OPS, lane=BYTE, side=BYTE, serial=booleans())
    def record(self, specs: list[Spec], lane: int, side: int, serial: bool) -> None:
        on, off = self.lane(lane), self.lane(side)
        ops = [self.op(spec) for spec in specs]
        boxes = boxes_of(ops)
        self.order(on, boxes)
        with ost.record(on.stream) as recording:
            if off is not on:
                off.stream.wait(on.stream.record())
            for op in ops:
                self.submit(off.stream, op)
            if off is not on:
                on.stream.wait(off.stream.record())
        apply(ops)
        self.look(on, boxes, "recorded")
        self.define(recording.build(serial=serial), ops, apart=not serial)

    @rule(specs=OPS, edges=booleans())
    def build(self, specs: list[Spec], edges: bool) -> None:
        ops = [self.op(spec) for spec in specs]
        graph = ost.Graph.create(self.device)
        apart = edges and not any(isinstance(op, Mark) for op in ops)
        if apart:
            graph.add_operations([self.prepared(op) for op in ops])
        else:
            self.add_all(graph, ops)
        self.define(graph, ops, apart=apart)

    def prepared(self, op: Op) -> ost.Operation:
        """An operation of the library, which knows what it reads and writes."""
        if isinstance(op, Affine | Sum | Seen):
            found, shape, arguments = self.launch(op)
            return ost.prepare(found, shape, *arguments)
        noted: list[ost.Operation] = []
        graph = ost.Graph.create(self.device)
        node = self.add(graph, op, ())
        label = graph.labels[node.handle].operation
        assert label is not None
        noted.append(label)
        return noted[0]

    def add_all(self, graph: ost.Graph, ops: Iterable[Op]) -> ost.Node | None:
        """Adds operations to a graph one after the other."""
        last = None
        for op in ops:
            last = self.add(graph, op, () if last is None else (last,))
        return last

    def add(self, graph: ost.Graph, op: Op, after: tuple[ost.Node, ...]) -> ost.Node:
        if isinstance(op, Copy):
            return graph.add_copy(self.buffer(op.dst), self.buffer(op.src), after=after)
        if isinstance(op, Fill):
            return graph.add_fill(self.buffer(op.dst), op.value, after=after)
        if isinstance(op, Mark):
            return graph.add_call(op.token, after=after)
        if isinstance(op, Signal):
            assert isinstance(op.event, ost.Event)
            return graph.add_event_record(op.event, after=after)
        if isinstance(op, Through):
            alloc = graph.add_alloc(4 * op.n, after=after)
            between, shape = alloc.alloc.address, config(op.n)
            affine = kernel(self.device, "affine")
            src, dst = self.pointer(op.src), self.pointer(op.dst)
            put = graph.add_kernel(affine, shape, between, src, op.m, 0, op.n, after=[alloc])
            took = graph.add_kernel(affine, shape, dst, between, 1, 0, op.n, after=[put])
            return graph.add_free(between, after=[took])
        found, shape, arguments = self.launch(op)
        return graph.add_kernel(found, shape, *arguments, after=after)

    @rule(0.7, when=lambda self: self.definitions, which=BYTE)
    def clone(self, which: int) -> None:
        of = self.definitions[which % len(self.definitions)]
        if of.graph.closed:
            self.refuses(of.graph.clone)
        elif of.single:
            self.refuses(of.graph.clone, DriverError)
        else:
            self.define(of.graph.clone(), of.ops, apart=of.apart)

    @rule(when=lambda self: self.definitions, which=BYTE, specs=OPS)
    def make_a_parent(self, which: int, specs: list[Spec]) -> None:
        of = self.definitions[which % len(self.definitions)]
        graph, ops = ost.Graph.create(self.device), [self.op(spec) for spec in specs]
        last = self.add_all(graph, ops)
        assert last is not None
        if of.graph.closed or of.dangling:
            self.refuses(lambda: graph.add_child(of.graph, after=[last]))
        elif of.single:
            self.refuses(lambda: graph.add_child(of.graph, after=[last]), GraphError)
        else:
            child = graph.add_child(of.graph, after=[last])
            end = self.op(specs[0])
            self.add(graph, end, (child,))
            ops += [Child(rewritten(of.ops, _again)), end]
        self.define(graph, ops, apart=of.apart)

    @rule(specs=OPS)
    def build_with_an_event(self, specs: list[Spec]) -> None:
        """A graph whose last node records an event, which other streams wait for: `play`."""
        ops: list[Op] = [*(self.op(spec) for spec in specs), Signal(self.device.create_event())]
        graph = ost.Graph.create(self.device)
        self.add_all(graph, ops)
        self.define(graph, ops)

    @rule(
        0.5,
        when=lambda self: self.device.capabilities.memory_nodes,
        specs=OPS,
        dst=BYTE,
        src=BYTE,
        m=BYTE,
    )
    def build_with_memory_of_its_own(self, specs: list[Spec], dst: int, src: int, m: int) -> None:
        """A graph that allocates and frees: it has one executable at a time."""
        into, of = self.ref(dst), self.ref(src)
        ops: list[Op] = [self.op(spec) for spec in specs]
        ops.insert(m % len(ops), even(Through(into, of, m % 7, min(len(into), len(of)))))
        graph = ost.Graph.create(self.device)
        self.add_all(graph, ops)
        self.define(graph, ops, single=True)

    @rule(
        1.5,
        on=BYTE,
        then=OPS,
        otherwise=OPS,
        lane=BYTE,
        kind=sampled("if", "if", "while", "while", "switch"),
    )
    def make_a_condition(
        self, on: int, then: list[Spec], otherwise: list[Spec], lane: int, kind: str
    ) -> None:
        """IF or SWITCH on a box's first element, or WHILE that counts one down; bodies by hand or
        capture."""
        marks = [s for s in then if s[0] % 6 != 4] or [(3, *then[0][1:])]
        others = [s for s in otherwise if s[0] % 6 != 4]
        branches = self.device.capabilities.conditional_branches
        loop = kind == "while"
        graph, at, stream = ost.Graph.create(self.device), self.ref(on), self.lane(lane).stream
        condition = graph.condition()
        if loop:
            body = [self.in_a_body(spec) for spec in marks]
            if at.box in boxes_of(body):
                at = whole(self.new_memory("plain", on))
            pointer = self.pointer(at)
            deciding = kernel(self.device, "begin_loop"), config(1), pointer, condition
            decide = graph.add_kernel(*deciding)
            node = graph.add_conditional("while", condition, after=[decide])
            last = self.add_all(node.bodies[0], body)
            again = kernel(self.device, "next_round"), config(1), pointer, condition
            node.bodies[0].add_kernel(*again, after=[last])
            ops: list[Op] = [Loop(at, tuple(body))]
        elif kind == "switch" and branches:
            deciding = kernel(self.device, "choose_of_four"), config(1), self.pointer(at), condition
            decide = graph.add_kernel(*deciding)
            node = graph.add_conditional("switch", condition, size=3, after=[decide])
            bodies = [[self.in_a_body(s) for s in some] for some in (marks, others, marks[:1])]
            for body_graph, some in zip(node.bodies, bodies, strict=True):
                self.add_all(body_graph, some)
            ops = [Switch(at, tuple(map(tuple, bodies)))]
        else:
            deciding = kernel(self.device, "choose"), config(1), self.pointer(at), condition
            decide = graph.add_kernel(*deciding)
            node = graph.add_conditional("if", condition, size=1 + branches, after=[decide])
            yes = [self.in_a_body(spec) for spec in marks]
            no = [self.in_a_body(s) for s in others] if branches else []
            self.add_all(node.bodies[0], yes)
            if no:
                with ost.capture(stream, into=node.bodies[1]):
                    for op in no:
                        self.submit(stream, op)
            ops = [Branch(at, tuple(yes), tuple(no))]
        end = self.op(then[0])
        self.add(graph, end, (node.node,))
        self.define(graph, [*ops, end], single=True)

    def in_a_body(self, spec: Spec) -> Op:
        """An operation in a body: nothing says that its kernels may have programmatic edges."""
        op = self.op(spec)
        return replace(op, programmatic=False) if isinstance(op, Seen) else op

    @rule(0.5, when=lambda self: self.definitions, which=BYTE, spec=SPEC, lane=BYTE)
    def extend(self, which: int, spec: Spec, lane: int) -> None:
        """A definition grows; executables made before do not."""
        of = self.definitions[which % len(self.definitions)]
        stream, op = self.lane(lane).stream, self.op(spec)
        if of.graph.closed:
            with_capture = ost.Capture(stream, into=of.graph)
            self.refuses(with_capture.begin)
        else:
            with ost.capture(stream, into=of.graph):
                self.submit(stream, op)
            of.ops = (*of.ops, op)

    # --- captures that fail
    @rule(
        0.7,
        specs=OPS,
        lane=BYTE,
        how=sampled("raise", "sync", "empty", "begin", "drop"),
        where=BYTE,
    )
    def fail_to_capture(self, specs: list[Spec], lane: int, how: str, where: int) -> None:
        on, ops = self.lane(lane), [self.op(spec) for spec in specs]
        into = None
        if where % 2 and self.definitions and how != "empty":
            chosen = self.definitions[where % len(self.definitions)]
            if not (chosen.graph.closed or (chosen.single and how == "sync")):
                # With "sync" it goes with the capture.
                into = chosen.graph.clone() if how == "sync" else chosen.graph
        before = None if into is None else [node.handle for node in into.nodes()]

        def attempt() -> None:
            with ost.capture(on.stream, into=into):
                if how != "empty":
                    for op in ops:
                        self.submit(on.stream, op)
                if how == "raise":
                    raise InputError("mine")
                if how == "sync":
                    on.stream.synchronize()

        if how == "begin":
            self.faults.fail("stream_begin_capture" + ("_to_graph" if into else ""))
        if how == "drop":
            under_way = ost.Capture(on.stream, into=into).begin()
            self.submit(on.stream, ops[0])
            del under_way
            gc.collect()
            self.device.context.end_abandoned()
        else:
            self.refuses(attempt, InputError if how == "raise" else CaptureError)
        assert not on.stream.is_capturing()
        assert self.faults.faults == []
        if into is not None and how == "sync":
            self.refuses(lambda: into.nodes(), GraphError)
            into.close()
        elif into is not None and [node.handle for node in into.nodes()] != before:
            # CUDA takes no node out of a graph that allocates: half a capture stays in it.
            assert any(isinstance(op, Through) for op in chosen.ops)
            self.refuses(into.instantiate, GraphError)
            self.definitions.remove(chosen)

    @rule(specs=OPS, lane=BYTE, other=BYTE)
    def capture_while_things_go(self, specs: list[Spec], lane: int, other: int) -> None:
        """Launches elsewhere, closing and collecting inside a capture neither join nor break it."""
        on, aside = self.lane(lane), self.lane(other)
        ops, first = [self.op(spec) for spec in specs], self.op(specs[-1])
        if isinstance(first, Mark):
            return
        boxes = boxes_of([first])
        self.order(aside, boxes)
        with ost.capture(on.stream) as capture:
            for op in ops:
                self.submit(on.stream, op)
            if aside is not on:
                self.submit(aside.stream, first)
            self.room()
            if self.definitions:
                self.definitions.pop(0).graph.close()
            gc.collect()
            ost.Graph.create(self.device).close()
        if aside is not on:
            first.apply()
            self.look(aside, boxes, "beside a capture")
        self.define(capture.graph, ops)

    # --- executables
    @rule(5, when=lambda self: self.definitions, which=BYTE, lane=BYTE, upload=booleans())
    def instantiate(self, which: int, lane: int, upload: bool) -> None:
        of = self.definitions[which % len(self.definitions)]
        stream = self.lane(lane).stream if upload else None
        if of.graph.closed or of.dangling:
            self.refuses(lambda: of.graph.instantiate(upload=stream))
            return
        if of.single and any(e.made_of is of and not e.run.closed for e in self.alive()):
            return
        if of.single:
            self.sweep_quietly()
        self.adopt(of.graph.instantiate(upload=stream), of)

    def alive(self) -> list[Executable]:
        """All executables that somebody has."""
        return self.executables

    def sweep_quietly(self) -> None:
        """What was closed before is destroyed, so that a graph may have another executable."""
        self.let_go()
        self.sweep()

    def adopt(self, run: ost.GraphExec, of: Definition) -> Executable:
        self.room()
        self.executables.append(Executable(run, of.ops, of))
        return self.executables[-1]

    def executable(self, which: int) -> Executable:
        return self.executables[which % len(self.executables)]

    @rule(15, when=lambda self: self.executables, which=BYTE, lane=BYTE, times=integers(1, 3))
    def launch_executable(self, which: int, lane: int, times: int) -> None:
        executable, on = self.executable(which), self.lane(lane)
        for _ in range(times):
            self.play(executable, on, lambda: executable.run.launch(on.stream))

    def play(self, executable: Executable, on: Lane, launch: Callable[[], object]) -> None:
        """One launch: it runs right, or is refused as it must be."""
        if executable.refusal is not None:
            self.refuses(launch, executable.refusal)
            return
        boxes = executable.boxes
        self.order(on, boxes)
        try:
            launch()
        except ClosedError as error:
            # Memory that it pointed at before was closed, and nothing can say where it points now.
            assert not executable.readable and "cannot be read" in str(error), error
            return
        executable.apply()
        self.counts["launches"] += 1
        last = executable.ops[-1] if executable.ops else None
        if isinstance(last, Signal):
            self.see_from_beside(on, last, boxes)
        self.look(on, boxes, f"replayed, {executable.ops}")

    def see_from_beside(self, on: Lane, signal: Signal, boxes: list[Box]) -> None:
        """Another stream waits for the event that the launch records, and sees all of it."""
        beside = next((lane for lane in self.open_lanes if lane is not on), None)
        if beside is not None:
            beside.stream.wait(signal.event)  # type: ignore[arg-type]
            self.look(beside, boxes, "behind an event of a graph")
            on.stream.wait(beside.stream.record())

    @rule(
        when=lambda self: self.executables,
        which=BYTE,
        lane=BYTE,
        call=sampled("exec_launch", "graph_instantiate"),
    )
    def fail_to_launch(self, which: int, lane: int, call: str) -> None:
        """The driver refuses: nothing has run, and nothing is left."""
        executable, on = self.executable(which), self.lane(lane)
        self.faults.fail(call)
        if call == "exec_launch":
            if executable.refusal is None and executable.readable:
                self.refuses(lambda: executable.run.launch(on.stream), DriverError)
        elif not executable.made_of.graph.closed and not executable.made_of.dangling:
            self.refuses(executable.made_of.graph.instantiate, GraphError)
        self.faults.clear()

    @rule(
        0.7,
        when=lambda self: self.executables or self.definitions,
        which=BYTE,
        how=sampled("close", "drop", "drop", "drop graph", "drop graph", "close graph"),
    )
    def end_graph(self, which: int, how: str) -> None:
        if "graph" in how and self.definitions:
            definition = self.definitions[which % len(self.definitions)]
            if how == "close graph":
                definition.graph.close()  # stays among them: it must be refused
                self.refuses(lambda: definition.graph.nodes())
            else:
                self.definitions.remove(definition)
        elif "graph" not in how and self.executables:
            executable = self.executable(which)
            if executable.cached is None:
                self.executables.remove(executable)
                if how == "close":
                    executable.run.close()
                    self.refuses(lambda: executable.run.launch(self.lane(0).stream))

    # --- changes
    def changes(
        self,
        executable: Executable,
        call: Callable[[], object],
        after: Callable[[], tuple[Op, ...]],
        refusal: type[OstinatoError] | None = None,
        *,
        certain: bool = True,
    ) -> None:
        """A change: whole if it goes well, none if it is refused.

        `refusal` must come, or may come if it is not `certain`.
        """
        self.counts["changes"] += 1
        try:
            call()
        except OstinatoError as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            expected = refusal is not None and isinstance(error, refusal)
            assert expected or not executable.readable, error
        else:
            assert refusal is None or not certain, f"{refusal.__name__} was expected"
            executable.ops = after()
        assert not (executable.unusable and executable.run.usable()), (
            "nobody knows what it would run"
        )

    def simple(self, executable: Executable, kinds: type | tuple[type, ...], n: int) -> Op | None:
        """One of its operations of these kinds."""
        found = [op for op in leaves(executable.ops) if isinstance(op, kinds)]
        return found[n % len(found)] if found else None

    def swapped(self, executable: Executable, old: Op, new: Op) -> tuple[Op, ...]:
        """Its operations with one replaced; a switched-off one stays off."""
        if old in executable.off:
            executable.off.add(new)
        return changed(executable.ops, old, new)

    @rule(
        6,
        when=lambda self: self.executables,
        which=BYTE,
        op=BYTE,
        what=sampled("m", "c", "dst", "src", "address"),
        to=BYTE,
    )
    def patch(self, which: int, op: int, what: str, to: int) -> None:
        executable = self.executable(which)
        old = self.simple(executable, Affine, op)
        if not isinstance(old, Affine):
            return
        if what in ("m", "c"):
            new, value = replace(old, **{what: to - 100}), to - 100
        else:
            name = "src" if what == "address" else what
            ref = self.ref(to)
            if len(ref) < old.n:
                return
            ref = replace(ref, reach=what != "address")
            new, value = replace(old, **{name: ref}), self.pointer(ref)
            what = name
        if not executable.sane(changed(executable.ops, old, new)):
            return
        argument: int | str = what if to % 2 else {"dst": 0, "src": 1, "m": 2, "c": 3}[what]

        def change() -> None:
            run, node = executable.run, executable.node(old)
            way = to // 2 % 3
            if way == 0:
                run.set(node, argument, value)
            elif way == 1:
                run.patcher(node, argument)(value)
            else:
                run.set_all([(node, argument, value)])

        self.changes(executable, change, lambda: self.swapped(executable, old, new))

    @rule(4, when=lambda self: self.executables, which=BYTE, op=BYTE, spec=SPEC)
    def set_node(self, which: int, op: int, spec: Spec) -> None:
        """All parameters of one node, by the call for its kind."""
        executable, new = self.executable(which), self.op(spec)
        kernels = isinstance(new, Affine | Sum | Seen)
        old = self.simple(executable, (Affine, Sum, Seen) if kernels else type(new), op)
        if (
            old is None
            or isinstance(new, Mark)
            or not executable.sane(changed(executable.ops, old, new))
        ):
            return
        kept = attributes_of(old) == attributes_of(new)
        sure = kept and not programmatic(old, new)

        def change() -> None:
            node, run = executable.node(old), executable.run
            if isinstance(new, Copy):
                run.set(node, dst=self.buffer(new.dst), src=self.buffer(new.src))
            elif isinstance(new, Fill):
                run.set(node, dst=self.buffer(new.dst), value=new.value)
            else:
                run.set(node, self.prepared(new))

        self.changes(
            executable,
            change,
            lambda: self.swapped(executable, old, new),
            None if sure else UpdateRefusedError,
            certain=False,
        )

    @rule(3, when=lambda self: self.executables, which=BYTE, op=BYTE, number=BYTE)
    def set_attributes(self, which: int, op: int, number: int) -> None:
        """A launch shape with other attributes is refused; with the same it is set."""
        executable = self.executable(which)
        old = self.simple(executable, Seen, op)
        if isinstance(old, Seen):
            new = self.seen(old.dst, number)
            if number % 3 == 0:
                new = replace(old, blocks=2 * old.blocks % 48 or 8)
            kept = old.attributes == new.attributes
            self.changes(
                executable,
                lambda: executable.run.set(executable.node(old), config=self.shape(new)),
                lambda: self.swapped(executable, old, new),
                None if kept and not programmatic(old, new) else UpdateRefusedError,
                certain=not kept and not programmatic(old, new),
            )

    @rule(2, when=lambda self: self.executables, which=BYTE, op=BYTE, blocks=sampled(1, 1, 2, 4))
    def set_config(self, which: int, op: int, blocks: int) -> None:
        executable = self.executable(which)
        old = self.simple(executable, Affine, op)
        if isinstance(old, Affine):
            shape = ost.LaunchConfig(grid=blocks, block=8)
            self.changes(
                executable,
                lambda: executable.run.set(executable.node(old), config=shape),
                lambda: self.swapped(executable, old, replace(old, blocks=blocks)),
            )

    @rule(3, when=lambda self: self.executables, which=BYTE, op=BYTE, on=booleans())
    def switch(self, which: int, op: int, on: bool) -> None:
        executable = self.executable(which)
        kinds = (Affine, Sum, Seen, Copy)  # not a fill: see docs/driver-faults.md
        old = self.simple(executable, (*kinds, Fill) if on else kinds, op)
        if old is None:
            return

        def after() -> tuple[Op, ...]:
            (executable.off.discard if on else executable.off.add)(old)
            return executable.ops

        together = isinstance(old, Seen) and old.cooperative  # docs/driver-faults.md
        self.changes(
            executable,
            lambda: executable.run.set(executable.node(old), enabled=on),
            after,
            UpdateRefusedError if together and not on else None,
        )

    @rule(
        8,
        when=lambda self: self.executables,
        which=BYTE,
        old=BYTE,
        new=BYTE,
        closed=booleans(),
        fault=sampled(0, 0, 1, 2, 2, 3),
        twice=booleans(),
    )
    def rebind(self, which: int, old: int, new: int, closed: bool, fault: int, twice: bool) -> None:
        """From one box, or a part of one, to another; the driver may refuse in the middle."""
        half_done = [e for e in self.executables if e.unusable]
        executable, to = self.executable(which), self.ref(new)
        if half_done and which % 2:
            executable, twice = half_done[0], False
        mine = executable.boxes
        if not mine:
            return
        # A box that is used more than once comes up oftener: its change has a middle.
        uses = [r.box for op in leaves(executable.ops) for r in refs_of(op).values()]
        some = [box for box in uses if box.closed and closed] or uses
        box = some[old % len(some)]
        memory = self.memories.get(box)
        if memory is None or memory.buffer is None:
            return
        start = Ref(box, 4, 20) if old > 200 and len(box) > 20 and not box.closed else whole(box)
        pairs = {self.part(start): self.part(to)}
        ops, fits = self.rebound(executable.ops, start, to)
        refs = [r for op in leaves(executable.ops) for r in refs_of(op).values()]
        if not executable.sane(ops) or any(not r.reach and r.stop > start.stop for r in refs):
            return  # of an address, more is used than the part that is moved
        words = sum(
            a is not b and isinstance(a, Affine | Sum | Seen | Copy | Fill)
            for a, b in zip(leaves(executable.ops), leaves(ops), strict=True)
        )
        several = (Branch, Switch, Loop, Through)  # more than one node, or none of its own
        plain = not any(isinstance(op, several) for op in leaves(executable.ops))
        refusal: type[OstinatoError] | None = None if fits else InputError
        if fault and fits and words and plain and executable.readable:
            fault = min(fault, words)
            self.faults.fail("exec_set_params", at=fault, times=1 + twice)
            refusal = UpdateRefusedError
            if twice and fault > 1:  # the undo is refused as well
                refusal, executable.unusable = GraphError, True
        moved = dict(zip(leaves(executable.ops), leaves(ops), strict=True))

        def after() -> tuple[Op, ...]:
            executable.off |= {moved[op] for op in executable.off if op in moved}
            return ops

        self.changes(executable, lambda: executable.run.rebind(pairs), after, refusal)
        self.faults.clear()

    def part(self, ref: Ref) -> ost.Buffer:
        """A buffer, also a closed one, or a view."""
        buffer = self.memories[ref.box].buffer
        assert buffer is not None
        return buffer if len(ref) == len(ref.box) else buffer[ref.start : ref.stop]

    def rebound(self, ops: tuple[Op, ...], old: Ref, new: Ref) -> tuple[tuple[Op, ...], bool]:
        """The operations afterwards, and whether everything fits and no copy overlaps itself."""
        fits = True

        def move(op: Op) -> Op:
            nonlocal fits
            moved = {}
            for name, ref in refs_of(op).items():
                if ref.box is old.box and old.start <= ref.start < old.stop:
                    shift = new.start - old.start
                    # Where it is not known how much is used, that is the rest of the old range.
                    stop = ref.stop if ref.reach else old.stop
                    fits = fits and stop + shift <= new.stop
                    moved[name] = Ref(new.box, ref.start + shift, ref.stop + shift, ref.reach)
            if not moved:
                return op
            made = replace(op, **moved)
            if isinstance(made, Copy) and made.dst.box is made.src.box:
                # A GPU copies in any order.
                apart = abs(made.dst.start - made.src.start)
                fits = fits and not 0 < apart < len(made.dst)
            return made

        return rewritten(ops, move), fits

    @rule(
        4,
        when=lambda self: self.executables,
        which=BYTE,
        change=BYTE,
        topology=integers(0, 5),
        fault=integers(0, 9),
    )
    def update(self, which: int, change: int, topology: int, fault: int) -> None:
        """From a new graph of the same topology, or of another one."""
        self.room()
        executable = self.executable(which)
        flat = (Affine, Sum, Seen, Copy, Fill)
        ops = [op for op in executable.ops if isinstance(op, flat)]
        if len(ops) != len(executable.ops):
            return
        fresh = [self.alike(op, change + i) for i, op in enumerate(ops)]
        if not topology:
            fresh.append(Fill(self.ref(change), 1))
        graph = ost.Graph.create(self.device)
        self.add_all(graph, fresh)
        made = self.define(graph, fresh)
        if not fault:
            self.faults.fail("exec_update")
        self.counts["changes"] += 1
        try:
            executable.run.update(graph)
        except (UpdateRefusedError, DriverError) as error:
            # Also for edges unlike the chain's, and for other launch attributes.
            self.counts[f"refused: {type(error).__name__}"] += 1
        else:
            assert topology and fault
            moved = dict(zip(ops, fresh, strict=True))
            executable.off = {moved[op] for op in executable.off if op in moved}
            executable.ops = tuple(fresh)
            executable.others = [made]
        self.faults.clear()
        if change % 3 == 0:
            self.definitions.remove(made)
            made.graph.close()

    def alike(self, op: Op, change: int) -> Op:
        """Another operation of the same kind, on open boxes."""
        if isinstance(op, Affine):
            return replace(self.op((0, change, change + 1, change)), blocks=4)
        number = {Sum: 1, Fill: 3, Seen: 5}.get(type(op))
        if number is not None:
            return self.op((number, change, change + 1, change + 2))
        n = SIZE // 2
        first, second = self.open_boxes[change % len(self.open_boxes)], self.open_boxes[0]
        if first is second:
            second = self.open_boxes[1]
        return Copy(Ref(first, 0, n), Ref(second, 0, n))

    @rule(when=lambda self: self.executables, which=BYTE, at=BYTE)
    def ask_what_it_touches(self, which: int, at: int) -> None:
        executable, ref = self.executable(which), self.ref(at)
        mine = [r for op in leaves(executable.ops) for r in refs_of(op).values()]
        if not executable.readable or any(
            not r.reach and self.memories[r.box].pool is not None for r in mine
        ):
            return  # an address in a pool reaches into the next piece
        buffer = self.part(ref)
        touched = any(r.overlaps(ref) for r in mine)
        assert executable.run.touches(buffer) is touched, (ref, executable.ops)


def attributes_of(op: Op) -> tuple[object, ...]:
    """The launch attributes of a kernel."""
    return op.attributes if isinstance(op, Seen) else PLAIN


def programmatic(*ops: Op) -> bool:
    """Whether a launch may begin early.  That is kept in the edges of its node, which may have no
    kernel before it: what can be said of it again differs by graph."""
    return any(isinstance(op, Seen) and op.programmatic for op in ops)


def conflicts(ops: tuple[Op, ...]) -> set[tuple[int, int]]:
    """The places of each two operations of which one writes what the other reads or writes."""
    pairs = itertools.combinations(enumerate(leaves(ops)), 2)
    return {(i, j) for (i, a), (j, b) in pairs if _meet(a, b) or _meet(b, a)}


def _meet(writer: Op, other: Op) -> bool:
    """Whether one writes what the other reads or writes.  Exact: two that read the same have no
    edge, so a change may not make a conflict of them."""
    return any(
        a.box is b.box and a.start < b.stop and b.start < a.stop
        for name, a in refs_of(writer).items()
        if name == "dst" or isinstance(writer, Loop)
        for b in refs_of(other).values()
    )


def _again(op: Op) -> Op:
    """Another operation that does the same: a copy of a graph is changed on its own."""
    return replace(op) if not isinstance(op, Mark) else Mark(op.token)
