"""Graphed steps of many kinds, called, held, prepared, changed and broken."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.errors import (
    CaptureError,
    ClosedError,
    EagerRunError,
    InputError,
    NotHeldError,
    OstinatoError,
)
from ostinato.step import Action, Buckets, HeldReplay, Multiples, Reason, StepKey
from tests.property.engine import BYTE, booleans, integers, rule, sampled, tuples
from tests.property.kernels import config, kernel
from tests.property.oracle import SIZE, Box
from tests.property.world import MODES, Lane, World

ROWS, WIDTH = 8, 4
REFUSALS = 3
"""Refused replays in a row after which a key is quarantined: documented."""

Sizes = Mapping[str, int]
Limits = tuple[int | None, int | None]
"""Of a cache: bytes, and graphs."""


class _Interrupted(Exception):
    """What a step's own function raises."""


class Work:
    """What a step does: on a stream, and to its boxes.

    The first operation reads both `x` and `w`, so a call with one of them closed does nothing.
    `c` is a number of the host, which a graph freezes.
    """

    names: tuple[str, ...] = ("rows",)
    verifies: tuple[object, ...] = ("off", "off", "first", 1, 3)
    builds: tuple[str, ...] = ("capture", "capture", "record")

    def __init__(self, world: StepRules, x: Box, w: Box, number: int) -> None:
        self.world = world
        self.x, self.w = x, w
        self.c = number % 7
        self.side = world.device.create_stream()
        self.own = [world.new_memory("plain", number + i) for i in range(self.boxes)]
        self.buffers: dict[Box, ost.Buffer] = {}
        """What it holds, also where the world has let go."""
        for box in (x, w, *self.own):
            self.take(box)
        self.fail = ""
        """Where the function raises: "first", or "captured" for the middle of a capture."""
        self.ran: list[Callable[[], None]] = []
        """What ran of the last run that was no capture."""

    boxes = 1

    # --- of the library
    def slots(self) -> list[ost.Slot]:
        raise NotImplementedError

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        raise NotImplementedError

    def refused(self) -> None:
        """A strict step refused a call: what a check may have left in memory without a rule."""

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        """The step's function."""
        if self.fail == "first" or (self.fail == "captured" and stream.is_capturing()):
            raise _Interrupted("mine")
        self.submit(stream, sizes)

    def take(self, box: Box) -> None:
        buffer = self.world.memories[box].buffer
        assert buffer is not None
        self.buffers[box] = buffer

    def buffer(self, box: Box) -> ost.Buffer:
        return self.buffers[box]

    def launch(self, stream: ost.Stream, name: str, n: int, *arguments: object) -> None:
        given = [self.buffer(a) if isinstance(a, Box) else a for a in arguments]
        ost.launch(stream, kernel(self.world.device, name), config(n), *given)

    def slot(self, name: str, box: Box, role: Any, *, size: str | None = "rows") -> ost.Slot:
        buffer = self.buffer(box)
        if size is not None:
            buffer = buffer.view(0, (ROWS, WIDTH))
        return ost.Slot(name, buffer, role, size=size)

    # --- of the oracle
    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        """One call with these weights; `reached`: the sizes in buckets, if a graph may be used."""
        raise NotImplementedError

    def weighted(self, w: Box, rows: int) -> np.ndarray:
        return self.x.values[: rows * WIDTH] * w.values[:1]


class Pure(Work):
    """out = x * w + c, in the rows in use and no others."""

    def slots(self) -> list[ost.Slot]:
        return [
            self.slot("x", self.x, "input"),
            self.slot("out", self.own[0], "output"),
        ]

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        n, real = sizes.rows * WIDTH, sizes.on_device("rows")
        self.launch(stream, "weigh", n, self.x, self.w, self.own[0], self.c, real, WIDTH)

    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        rows = sizes["rows"]
        self.own[0].write(0, self.weighted(w, rows) + np.int32(self.c))


class Padded(Pure):
    """The same, but all rows that it is given are written: padding of an output may be."""

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        n = sizes.rows * WIDTH
        self.launch(stream, "weigh_all", n, self.x, self.w, self.own[0], self.c, n)

    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        super().apply(w, sizes, reached)
        self.own[0].forget(sizes["rows"] * WIDTH, reached["rows"] * WIDTH)


class Scratch(Work):
    """tmp = x * w, all rows; acc += tmp, the rows in use; and a sum of what is in use."""

    boxes = 3

    def slots(self) -> list[ost.Slot]:
        tmp, acc, total = self.own
        return [
            self.slot("x", self.x, "input"),
            self.slot("tmp", tmp, "scratch"),
            self.slot("acc", acc, "state"),
            self.slot("total", total, "state", size=None),
        ]

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        tmp, _, total = self.own
        n, real = sizes.rows * WIDTH, sizes.on_device("rows")
        self.launch(stream, "weigh_all", n, self.x, self.w, tmp, 0, n)
        self.middle(stream, n, real)
        self.launch(stream, "reduce", n, self.x, self.w, total, real, WIDTH)

    def middle(self, stream: ost.Stream, n: int, real: object) -> None:
        self.launch(stream, "accumulate", n, self.own[0], self.own[1], real, WIDTH)

    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        _, acc, total = self.own
        n = sizes["rows"] * WIDTH
        acc.write(0, acc.values[:n] + self.weighted(w, sizes["rows"]))
        total.values[:1] += self.weighted(w, sizes["rows"]).sum(dtype=np.int32, keepdims=True)
        self.refused()

    def refused(self) -> None:
        self.own[0].forget(0, SIZE)


class Forked(Scratch):
    """The same, half of it on another stream."""

    def middle(self, stream: ost.Stream, n: int, real: object) -> None:
        self.side.wait(stream.record())
        super().middle(self.side, n, real)
        stream.wait(self.side.record())


class Corner(Work):
    """acc[:rows, :columns] += x[:rows, :columns] * w: two sizes."""

    names = ("rows", "columns")

    def slots(self) -> list[ost.Slot]:
        return [
            self.slot("x", self.x, "input"),
            self.slot("acc", self.own[0], "state"),
        ]

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        real = [sizes.on_device(name) for name in self.names]
        n = sizes.rows * WIDTH
        self.launch(stream, "weigh_corner", n, self.x, self.w, self.own[0], *real, WIDTH)

    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        rows, columns = sizes["rows"], sizes["columns"]
        acc = self.own[0].values.reshape(ROWS, WIDTH)[:rows, :columns]
        acc += self.x.values.reshape(ROWS, WIDTH)[:rows, :columns] * w.values[:1]


class Looped(Work):
    """acc += x * w, `times` times: a WHILE node where it is replayed, made by a builder."""

    names = ("times",)
    verifies = ("off",)
    builds = ("capture",)
    boxes = 3

    def slots(self) -> list[ost.Slot]:
        return []

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        acc, tmp, _ = self.own
        self.launch(stream, "weigh_all", SIZE, self.x, self.w, tmp, 0, SIZE)
        for _ in range(sizes.times):
            self.launch(stream, "total", SIZE, acc, acc, tmp, SIZE)

    def build(self, stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
        device = self.world.device
        graph = ost.Graph.create(device)
        condition = graph.condition()
        acc, tmp, count = (self.buffer(box) for box in self.own)
        x, w, real = self.buffer(self.x), self.buffer(self.w), sizes.on_device("times")
        shape = config(SIZE)
        weigh = graph.add_kernel(kernel(device, "weigh_all"), shape, x, w, tmp, 0, SIZE)
        times = graph.add_copy(count[0:1], real.buffer.view(dtype=np.int32, shape=1), after=[weigh])
        begin = kernel(device, "begin_loop"), config(1), count, condition
        decide = graph.add_kernel(*begin, after=[times])
        loop = graph.add_conditional("while", condition, after=[decide])
        last = loop.bodies[0].add_kernel(kernel(device, "total"), shape, acc, acc, tmp, SIZE)
        again = kernel(device, "next_round"), config(1), count, condition
        loop.bodies[0].add_kernel(*again, after=[last])
        return graph.instantiate(upload=stream)

    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        times = np.int32(sizes["times"])
        self.own[0].values[:] += self.weighted(w, ROWS) * times
        for box in self.own[1:]:
            box.forget(0, SIZE)


class Escaping(Work):
    """It waits in the middle, and its second half goes to a stream that no event ties to the first:
    no graph can hold that."""

    boxes = 2

    def slots(self) -> list[ost.Slot]:
        return [
            self.slot("x", self.x, "input"),
            self.slot("a", self.own[0], "state", size=None),
            self.slot("b", self.own[1], "state", size=None),
        ]

    def submit(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        n, real = sizes.rows * WIDTH, sizes.on_device("rows")
        self.launch(stream, "weigh", n, self.x, self.w, self.own[0], self.c, real, WIDTH)
        stream.synchronize()
        self.launch(self.side, "weigh", n, self.x, self.w, self.own[1], self.c, real, WIDTH)

    def apply(self, w: Box, sizes: Sizes, reached: Sizes) -> None:
        for box in self.own:
            box.write(0, self.weighted(w, sizes["rows"]) + np.int32(self.c))


KINDS = (Pure, Padded, Scratch, Forked, Corner, Looped, Escaping)


@dataclass(eq=False)
class Modelled:
    """A step and what is known of it."""

    step: ost.GraphedStep
    work: Work
    lane: Lane
    ready: dict[str, bool]
    refusals: dict[object, int] = field(default_factory=dict)
    closed: bool = False

    @property
    def boxes(self) -> list[Box]:
        return [self.work.x, self.work.w, *self.work.own]

    @property
    def dead(self) -> bool:
        """Whether it will never be called with success again."""
        return self.work.x.closed or not self.lane.open or self.step.cache.closed

    def refusals_of(self, sizes: Sizes) -> tuple[type[Exception], ...]:
        """What a call must raise one of; empty if it must go well."""
        if self.closed:
            return (ClosedError,)
        if sizes.get("rows", 0) > ROWS:
            return (InputError,)
        if not self.lane.open or self.step.cache.closed:
            return (ClosedError, _Interrupted, EagerRunError)
        if self.work.x.closed or self.work.w.closed:
            return (ClosedError, _Interrupted, EagerRunError)
        return ()

    def reached(self, sizes: Sizes) -> dict[str, int]:
        """How far the padding of a call may reach."""
        scheme = self.step.cache.buckets
        return {
            name: min(ROWS, scheme.bucket(size)) if size <= scheme.limit else size
            for name, size in sizes.items()
        }


@dataclass(eq=False)
class Held:
    """A held replay, and what each of its launches does."""

    held: HeldReplay
    of: Modelled
    sizes: Sizes
    reached: Sizes
    w: Box

    @property
    def boxes(self) -> list[Box]:
        return [self.of.work.x, self.w, *self.of.work.own]


class StepRules(World):
    """Rules for graphed steps and their caches."""

    def open(self) -> None:
        super().open()
        self.caches: list[ost.GraphCache] = []
        self.steps: list[Modelled] = []
        self.held: list[Held] = []
        self.limits: list[Limits] = []
        for limits in ((None, None), (40_000, None)):
            self.caches.append(self.new_cache(limits))
            self.limits.append(limits)

    def close_everything(self) -> None:
        for held in [h.held for h in self.held[::2]]:
            held.close()
        for step in [m.step for m in self.steps[::2]]:
            step.close()
        held = step = None
        self.held, self.steps = [], []
        for _ in range(2):  # a held replay that is dropped keeps its step until it is collected
            gc.collect()
            self.device.context.collect()
        for cache in self.caches:
            self.assert_nobody_left_graphs(cache)
            cache.close()
        self.caches, self.limits = [], []
        super().close_everything()

    def assert_nobody_left_graphs(self, cache: ost.GraphCache) -> None:
        """A step that is gone has taken its graphs along."""
        left = list(filter(lambda key: isinstance(key, StepKey), cache.keys()))
        assert not left or self.driver.lost, left

    def calls_of_everything(self) -> Iterator[Callable[[], object]]:
        yield from super().calls_of_everything()
        for modelled in self.steps[:3]:
            sizes = dict.fromkeys(modelled.work.names, 2)
            yield lambda m=modelled, sizes=sizes: m.step(**sizes)
        for held in self.held[:2]:
            yield held.held.launch

    # --- making
    @rule(
        2,
        kind=sampled(*range(len(KINDS))),
        where=BYTE,
        x=BYTE,
        w=BYTE,
        number=BYTE,
        options=BYTE,
        more=BYTE,
    )
    def make_step(
        self, kind: int, where: int, x: int, w: int, number: int, options: int, more: int
    ) -> None:
        if len(self.steps) >= 6:
            self.end_step(number, "drop" if options % 2 else "close")
        for dead in [m for m in self.steps if m.dead][1:]:
            self.forget_step(dead)
        made = KINDS[kind]
        inputs = [box for box in self.open_boxes if len(box) == SIZE and not self.is_own(box)]
        if not inputs:
            return
        cache = self.caches[where % len(self.caches)]
        if cache.closed:
            return
        work = made(self, inputs[x % len(inputs)], inputs[w % len(inputs)], number)
        self.settle()
        self.start(work, self.lane(where), cache, options, more)

    def start(
        self, work: Work, lane: Lane, cache: ost.GraphCache, options: int, more: int
    ) -> Modelled:
        verify: Any = work.verifies[options % len(work.verifies)]
        ready = {"it is ready": True}
        step: list[ost.GraphedStep] = []

        def run(stream: ost.Stream, sizes: ost.Sizes) -> None:
            work.run(stream, sizes)

        def build(stream: ost.Stream, sizes: ost.Sizes) -> ost.GraphExec:
            assert isinstance(work, Looped)
            return work.build(stream, sizes)

        step.append(
            ost.GraphedStep(
                run,
                stream=lane.stream,
                cache=cache,
                name=type(work).__name__,
                slots=work.slots(),
                build=work.builds[more % len(work.builds)],
                warmups=options // 5 % 3,
                verify=verify,
                strict=bool(more // 4 % 2),
                preconditions={"it is ready": lambda: ready["it is ready"]},
                builder=build if isinstance(work, Looped) else None,
                mode=MODES[more // 8 % 3],
                settings=ost.settings.ReplaySettings(
                    upload=bool(more // 16 % 2), synchronize=more // 32 % 4 == 3
                ),
            )
        )
        self.steps.append(Modelled(step[0], work, lane, ready))
        return self.steps[-1]

    def is_own(self, box: Box) -> bool:
        """Whether a step alone uses a box."""
        return any(box in modelled.work.own for modelled in self.steps)

    @property
    def open_boxes(self) -> list[Box]:
        own = {box for m in getattr(self, "steps", ()) for box in m.work.own}
        return [box for box in super().open_boxes if box not in own]

    def modelled(self, which: int) -> Modelled:
        """A step, as a rule one that can be called."""
        sound = [m for m in self.steps if not m.dead] if which % 8 else []
        return (sound or self.steps)[which % len(sound or self.steps)]

    def sizes(self, modelled: Modelled, number: int) -> dict[str, int]:
        """Sizes at and beside the borders of buckets, seldom too large."""
        rows = (0, 1, 2, 3, 4, 5, 7, 8, 3, 6, 8, 1, 5, 4, 2, 9)[number % 16]
        given = {"rows": rows, "columns": number // 16 % (WIDTH + 1), "times": number % 4}
        return {name: given[name] for name in modelled.work.names}

    # --- calling
    @rule(12, when=lambda self: self.steps, which=BYTE, size=BYTE, times=integers(1, 3))
    def call(self, which: int, size: int, times: int) -> None:
        modelled = self.modelled(which)
        for turn in range(times):
            self.call_once(modelled, self.sizes(modelled, size + turn))

    def call_once(self, modelled: Modelled, sizes: Sizes) -> bool:
        """One call: right, or refused as it must be.  Whether it went well."""
        step, work = modelled.step, modelled.work
        refusals = modelled.refusals_of(sizes)
        if refusals:
            self.refuses(lambda: step(**sizes), refusals)
            return False
        self.order(modelled.lane, modelled.boxes)
        try:
            decision = step(**sizes)
        except EagerRunError:
            assert step.strict
            work.refused()
            self.look(modelled.lane, modelled.boxes, "a strict step refused, and nothing ran")
            return False
        except _Interrupted:
            assert work.fail == "first"
            self.look(modelled.lane, modelled.boxes, "the function raised")
            return False
        if isinstance(work, Escaping):
            self.device.synchronize()  # nothing orders its halves
        assert decision.reason is not Reason.MISMATCH, decision
        self.note(modelled, sizes, decision)
        self.counts["calls"] += 1
        work.apply(work.w, sizes, modelled.reached(sizes))
        self.look(modelled.lane, modelled.boxes, f"{type(work).__name__}{dict(sizes)}, {decision}")
        return True

    def note(self, modelled: Modelled, sizes: Sizes, decision: Any) -> None:
        """A key is quarantined after so many refused replays in a row, and not before."""
        try:
            key = modelled.step.key(**sizes)
        except InputError:  # over the largest bucket
            return
        if decision.reason is Reason.REFUSED:
            count = modelled.refusals[key] = modelled.refusals.get(key, 0) + 1
            quarantined = str(key) in modelled.step.statistics().quarantined
            assert quarantined is (count >= REFUSALS), (count, decision)
        elif decision.action is Action.REPLAY or (
            decision.action is Action.BUILD and modelled.step.build == "capture"
        ):
            modelled.refusals[key] = 0

    @rule(3, when=lambda self: self.steps, which=BYTE, size=BYTE)
    def hold(self, which: int, size: int) -> None:
        modelled = self.modelled(which)
        sizes = self.sizes(modelled, size)
        work = modelled.work
        if modelled.refusals_of(sizes) or isinstance(work, Escaping):
            return
        self.order(modelled.lane, modelled.boxes)
        with contextlib.suppress(NotHeldError):
            held = modelled.step.hold(**sizes)
            self.held.append(Held(held, modelled, sizes, modelled.reached(sizes), work.w))
        if len(self.held) > 3:
            self.held.pop(0).held.close()

    @rule(6, when=lambda self: self.held, which=BYTE, times=integers(1, 3))
    def launch_held(self, which: int, times: int) -> None:
        held = self.held[which % len(self.held)]
        lane = held.of.lane
        if not lane.open or held.of.closed or any(box.closed for box in held.boxes):
            try:
                held.held.launch()
            except ClosedError:
                return
            assert held.of.closed and not any(box.closed for box in held.boxes)
            held.of.work.apply(held.w, held.sizes, held.reached)
            return
        for _ in range(times):
            self.order(lane, held.boxes)
            held.held.launch()
            self.counts["launches"] += 1
            held.of.work.apply(held.w, held.sizes, held.reached)
            self.look(lane, held.boxes, f"held, {type(held.of.work).__name__}{held.sizes}")

    @rule(1, when=lambda self: self.held, which=BYTE, drop=booleans())
    def release_held(self, which: int, drop: bool) -> None:
        held = self.held.pop(which % len(self.held))
        if not drop:
            held.held.close()
            self.refuses(held.held.launch)

    @rule(1, when=lambda self: self.steps, which=BYTE, size=BYTE)
    def prepare(self, which: int, size: int) -> None:
        modelled = self.modelled(which)
        sizes = self.sizes(modelled, size)
        if modelled.refusals_of(sizes) or modelled.work.fail or isinstance(modelled.work, Escaping):
            return
        self.order(modelled.lane, modelled.boxes)
        # A recorded step is built by a call, so there is nothing to prepare before one.
        expected = [InputError] if modelled.step.build == "record" else []
        with contextlib.suppress(*expected):
            modelled.step.prepare(**sizes)
        self.look(modelled.lane, modelled.boxes, "prepared")

    @rule(1, when=lambda self: self.steps, which=BYTE, size=BYTE)
    def call_inside_a_capture(self, which: int, size: int) -> None:
        """The work joins the capture, and its graph does what a call does."""
        modelled = self.modelled(which)
        sizes, work, lane = self.sizes(modelled, size), modelled.work, modelled.lane
        if modelled.refusals_of(sizes) or work.fail or isinstance(work, Escaping):
            return
        if isinstance(work, Looped):
            return  # a size on the host: `times` launches
        other = self.sizes(modelled, size + 1)
        if not self.call_once(modelled, sizes) or modelled.refusals_of(other):
            return
        try:
            with ost.capture(lane.stream) as capture:
                modelled.step(**other)
        except CaptureError:  # the sizes on the device are others
            assert other != sizes
            return
        run = capture.graph.instantiate()
        if other != sizes and not isinstance(work, Padded):
            raise AssertionError("a capture cannot write sizes")
        run.launch(lane.stream)
        work.apply(work.w, other, modelled.reached(other))
        self.look(lane, modelled.boxes, f"inside a capture, {type(work).__name__}{other}")

    # --- changing
    @rule(2, when=lambda self: self.steps, which=BYTE, how=sampled("close", "evict"), w=BYTE)
    def replace_weights(self, which: int, how: str, w: int) -> None:
        """The step's function uses other memory from here on: what it used is closed, or all graphs
        that point there are evicted."""
        modelled = self.modelled(which)
        old, new = modelled.work.w, self.open_boxes[w % len(self.open_boxes)]
        memory = self.memories[old]
        if new is old or memory.buffer is None or len(new) != SIZE:
            return
        if how == "close" and memory.pool is None and not old.closed:
            assert memory.owner is not None
            memory.owner.close()
            old.closed = True
            self.refill(w)
        elif not old.closed:
            for cache in self.caches:
                if not cache.closed:
                    cache.evict_touching(memory.buffer)
        modelled.work.w = new
        modelled.work.take(new)
        if old is not modelled.work.x:
            del modelled.work.buffers[old]

    @rule(1, when=lambda self: self.steps, which=BYTE, how=BYTE)
    def switch_step(self, which: int, how: int) -> None:
        modelled = self.modelled(which)
        step = modelled.step
        match how % 4:
            case 0:
                step.graphs = not step.graphs
            case 1:
                step.profiling = not step.profiling
            case 2:
                modelled.ready["it is ready"] ^= True
            case _:
                step.graphs, step.profiling = True, False
                modelled.ready["it is ready"] = True

    @rule(1, when=lambda self: self.steps, which=BYTE, size=BYTE)
    def release(self, which: int, size: int) -> None:
        modelled = self.modelled(which)
        try:
            modelled.step.forget(**self.sizes(modelled, size))
            modelled.refusals.pop(modelled.step.key(**self.sizes(modelled, size)), None)
        except InputError:  # over a bucket, or over a slot
            pass

    @rule(0.7, which=BYTE, scheme=BYTE)
    def change_buckets(self, which: int, scheme: int) -> None:
        schemes: list[Buckets] = [
            ost.PowersOfTwo(ROWS),
            ost.PowersOfTwo(4),
            ost.PowersOfTwo(16, minimum=4),
            ost.ExplicitBuckets([3, 5, 8]),
            Multiples(3, limit=ROWS),
        ]
        self.caches[which % len(self.caches)].buckets = schemes[scheme % len(schemes)]

    @rule(
        2, when=lambda self: self.steps, which=BYTE, size=BYTE, where=sampled("first", "captured")
    )
    def fail_in_the_function(self, which: int, size: int, where: str) -> None:
        modelled = self.modelled(which)
        modelled.work.fail = where
        self.call_once(modelled, self.sizes(modelled, size))
        modelled.work.fail = ""

    FAULTS = (
        "exec_launch",
        "exec_launch",
        "exec_launch",
        "stream_begin_capture",
        "graph_instantiate",
        "exec_upload",
        "graph_nodes",
        "graph_edges",
        "event_create",
        "launch_kernel",
        "memcpy",
        "memcpy_to_host",
        "memcpy_from_host",
        "mem_alloc",
        "stream_synchronize",
        "stream_wait_event",
    )

    @rule(
        4,
        when=lambda self: self.steps,
        which=BYTE,
        size=BYTE,
        call=sampled(*FAULTS),
        at=integers(1, 3),
        status=sampled(1, 2, 999),
    )
    def fail_in_the_driver(self, which: int, size: int, call: str, at: int, status: int) -> None:
        """The call is right all the same; or an error comes out, and then all is as before, or as
        far as the function came by itself."""
        modelled = self.modelled(which)
        sizes, work = self.sizes(modelled, size), modelled.work
        if modelled.refusals_of(sizes) or isinstance(work, Escaping):
            return
        if isinstance(work, Looped) and call == "launch_kernel":
            return  # where its eager loop broke off cannot be told
        self.order(modelled.lane, modelled.boxes)
        self.device.synchronize()
        before = [box.values.copy() for box in modelled.boxes]
        fault = self.faults.fail(call, status=status, at=at)
        try:
            decision = modelled.step(**sizes)
        except EagerRunError:
            assert modelled.step.strict
            self.faults.clear()
            work.refused()
            self.look(modelled.lane, modelled.boxes, "a strict step refused, and nothing ran")
            return
        except OstinatoError as error:
            assert fault.fired, error
            self.faults.clear()
            self.adopt_after(modelled, before, error, sizes)
            return
        self.faults.clear()
        assert decision.reason is not Reason.MISMATCH, decision
        self.note(modelled, sizes, decision)
        work.apply(work.w, sizes, modelled.reached(sizes))
        self.look(modelled.lane, modelled.boxes, f"{call} failed, {type(work).__name__}{sizes}")

    def adopt_after(
        self, modelled: Modelled, before: list[np.ndarray], error: Exception, sizes: Sizes
    ) -> None:
        """After an error: nothing has changed, or, of a function that was interrupted in the middle
        of a run, what came before."""
        self.device.synchronize()
        work = modelled.work
        found = [self.contents(self.memories[box]).copy() for box in modelled.boxes]
        masks = [box.known for box in modelled.boxes]
        as_before = all((f[m] == b[m]).all() for f, b, m in zip(found, before, masks, strict=True))
        if as_before:
            return
        # An eager run that broke off: what it did is what the driver took, each operation once.
        work.apply(work.w, sizes, modelled.reached(sizes))
        for box, now, then in zip(modelled.boxes, found, before, strict=True):
            known = box.known
            whole = (now == box.values) | (now == then)
            assert whole[known].all(), f"{error!r} left {box} as {now.tolist()}"
            box.values[:] = now

    @rule(1.5, when=lambda self: self.steps, which=BYTE, how=sampled("close", "drop", "drop"))
    def end_step(self, which: int, how: str) -> None:
        dead = [m for m in self.steps if m.dead]
        modelled = (dead or self.steps)[which % len(dead or self.steps)]
        self.forget_step(modelled)
        sizes = self.sizes(modelled, which)
        if how == "close":
            modelled.step.close()
            modelled.closed = True
            self.refuses(lambda: modelled.step(**sizes))
        for held in [h for h in self.held if h.of is modelled and which % 2]:
            self.held.remove(held)

    def forget_step(self, modelled: Modelled) -> None:
        """From here on only what is held keeps it and its memory."""
        self.steps.remove(modelled)
        for box in modelled.work.own:
            self.memories[box].owner = self.memories[box].buffer = None

    # --- caches
    @rule(1, which=BYTE, what=BYTE)
    def evict(self, which: int, what: int) -> None:
        cache = self.caches[which % len(self.caches)]
        keys = cache.keys()
        if what % 4 == 0:
            assert cache.evict_all() == len(keys)
        elif keys:
            key = keys[what % len(keys)]
            assert cache.evict(key) and key not in cache and not cache.evict(key)

    @rule(0.3, which=BYTE, limits=tuples(sampled(None, 1, 20_000, 100_000), sampled(None, 1, 4)))
    def close_cache(self, which: int, limits: Limits) -> None:
        """Its graphs go, its steps are refused, and another one takes its place."""
        at = which % len(self.caches)
        self.caches[at].close()
        self.caches[at], self.limits[at] = self.new_cache(limits), limits

    def new_cache(self, limits: Limits) -> ost.GraphCache:
        budget, most = limits
        buckets = ost.PowersOfTwo(ROWS)
        return ost.GraphCache(self.device, buckets=buckets, budget=budget, max_graphs=most)
