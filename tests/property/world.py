"""The world of the property test: a device, streams and memory beside their oracle.

On the host driver.  `cuda.py` has what differs on a GPU.

Every rule does something with the library and the same with NumPy.  Answers are compared in stream
order, by a host function behind the work (`look`), so that the host need not wait and much can be
under way at once; what it finds wrong is raised after the rule.  Work on several streams is ordered
by events (`order`), so the oracle may do everything at once, in the order of the rules.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

import ostinato as ost
from benchmarks.uncompiled import without_extension
from ostinato.device import Device
from ostinato.errors import ClosedError, ContextPoisonedError, OstinatoError
from ostinato.testing import FaultyDriver, HeldStream
from tests.property.engine import BYTE, lists, rule, sampled, tuples
from tests.property.kernels import SOURCE, config, kernel
from tests.property.oracle import (
    BLOCK,
    SIZE,
    Affine,
    Box,
    Copy,
    Fill,
    Mark,
    Op,
    Ref,
    Seen,
    Sum,
    Token,
    even,
    refs_of,
    whole,
)
from tests.property.watched import WatchedDriver

MODES: Final = ("global", "thread_local", "relaxed")
"""Of captures."""

SPEC = tuples(BYTE, BYTE, BYTE, BYTE)
"""What `World.op` makes an operation of."""
OPS = lists(SPEC, 1, 4)


@dataclass(eq=False)
class Lane:
    """A stream; `behind` is an event behind its work once it is closed."""

    stream: ost.Stream
    behind: ost.Event | None = None

    @property
    def open(self) -> bool:
        return self.behind is None


@dataclass(eq=False)
class Memory:
    """A box on the device: its owner, the buffer that operations are given, and its bytes."""

    box: Box
    owner: ost.Buffer | ost.DeviceArray | None
    address: int
    pool: ost.CapturePool | None = None
    last: Lane | None = None
    """Where it was used last."""
    buffer: ost.Buffer | None = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = self.owner.buffer if isinstance(self.owner, ost.DeviceArray) else self.owner


def _workers() -> set[threading.Thread]:
    """Threads of host devices: also of those that other tests have left open."""
    return {t for t in threading.enumerate() if t.name.startswith("ostinato-host")}


class World:
    """Device, streams, memory, and the books on them."""

    compiled = True
    """Whether launches take the compiled path, where it was built."""

    # --- beginning and end
    def begin(self) -> None:
        self.counts: Counter[str] = Counter()
        """Launches, changes, and what was refused, by the error."""
        self.around = contextlib.ExitStack()
        if not self.compiled:
            self.around.enter_context(without_extension())
        self.open()

    def open(self) -> None:
        self.driver = self.new_driver()
        self.faults = FaultyDriver(self.driver)
        self.workers_of_others = _workers()
        self.device = Device(self.faults)
        self.device.modules.preload([(SOURCE, list(SOURCE.host))])
        self.device.zeros(1, "bytes").close()  # makes the device's own stream
        self.device.synchronize()
        self.baseline = self.driver.census()
        self.wrong: list[str] = []
        self.standing: list[HeldStream] = []
        self.tokens: list[Token] = []
        self.lanes = [Lane(self.device.create_stream()) for _ in range(3)]
        self.memories: dict[Box, Memory] = {}
        self.pools: list[ost.CapturePool] = []
        for seed in range(4):
            self.new_memory("plain", seed)

    def new_driver(self) -> WatchedDriver:
        """The driver under test, with what this test must see of it."""
        return WatchedDriver()

    def contents(self, memory: Memory) -> np.ndarray:
        """What is in memory now.  All work on it has ended."""
        return self.driver.view(memory.address, len(memory.box))

    def end(self) -> None:
        self.settle()
        self.close_everything()
        self.assert_nothing_is_left()
        self.shut()
        self.around.close()

    def abandon(self) -> None:
        """After a failure."""
        with self.around:
            self.let_go()
            self.device.close()

    def shut(self) -> None:
        """The device goes, and its threads with it."""
        self.device.close()
        names = [t.name for t in _workers() - self.workers_of_others]
        assert not names, f"threads of a closed device: {names}"

    def close_everything(self) -> None:
        """Closes or drops all that this world made.  Mixins add to it."""
        for pool in self.pools:
            pool.close()
        for memory in list(self.memories.values()):
            self.forget(memory)
        for lane in self.lanes:
            lane.stream.close()
        self.pools, self.lanes = [], []

    def assert_nothing_is_left(self) -> None:
        """The driver's tables are as when the device was opened."""
        self.sweep()
        context = self.device.context
        census = self.driver.census()
        assert census == self.baseline, f"{census} is left of {self.baseline}"
        assert context.taps == () and not context.captures
        assert context.retired == 0
        assert not self.driver.early

    def sweep(self) -> None:
        """Destroys whatever is only waiting to be."""
        for _ in range(3):
            gc.collect()
            self.device.synchronize()

    # --- the books
    def check(self) -> None:
        """What holds after each step."""
        assert not self.wrong, self.wrong[0]
        assert not self.driver.early, self.driver.early[0]
        assert self.device.context.taps == (), "something still listens"
        assert not self.device.context.captures

    def look(self, lane: Lane, boxes: Iterable[Box], what: str) -> None:
        """Compares boxes in stream order, from where the stream is now."""
        for box in dict.fromkeys(boxes):
            memory = self.memories.get(box)
            if memory is not None and not box.closed:
                want, known = box.values.copy(), box.known.copy()
                found = self.found_by(lane, memory)
                lane.stream.call(partial(self._compare, found, want, known, f"{what}: {box}"))

    def found_by(self, lane: Lane, memory: Memory) -> np.ndarray:
        """An array that has memory's content when what is submitted next to the lane runs."""
        return self.contents(memory)

    def _compare(self, found: np.ndarray, want: np.ndarray, known: np.ndarray, what: str) -> None:
        if (found[known] != want[known]).any():
            self.wrong.append(f"{what}: {found.tolist()}, not {want.tolist()}")

    def settle(self) -> None:
        """Waits for everything, and compares everything."""
        self.let_go()
        self.device.synchronize()
        for box, memory in self.memories.items():
            if not box.closed and self.driver.memory_range(memory.address) is not None:
                self._compare(self.contents(memory), box.values, box.known, f"in the end, {box}")
        for token in self.tokens:
            if token.seen != token.expected:
                self.wrong.append(f"a function ran {token.seen} times, not {token.expected}")
        assert not self.wrong, self.wrong[0]

    def order(self, lane: Lane, boxes: Iterable[Box]) -> None:
        """Work on this lane from here on comes after the last use of these boxes."""
        befores = []
        for box in dict.fromkeys(boxes):
            memory = self.memories[box]
            if memory.last not in (None, lane, *befores):
                befores.append(memory.last)
            memory.last = lane
        for before in befores:
            event = before.behind or before.stream.record()
            lane.stream.wait(event)

    # --- finding things
    @property
    def open_boxes(self) -> list[Box]:
        return [b for b, m in self.memories.items() if m.owner is not None and not b.closed]

    @property
    def open_lanes(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.open]

    def lane(self, number: int) -> Lane:
        lanes = self.open_lanes
        return lanes[number % len(lanes)]

    def box(self, number: int) -> Box:
        boxes = self.open_boxes
        return boxes[number % len(boxes)]

    def ref(self, number: int, most: int = SIZE) -> Ref:
        """A part of an open box, of at most so many elements."""
        boxes = self.open_boxes
        which, box = divmod(number, len(boxes))
        ref = whole(boxes[box])
        start, stop = [(0, SIZE), (0, SIZE // 2), (4, 20), (SIZE // 2, SIZE)][which % 4]
        stop = min(stop, len(ref.box), start + most)
        if start < stop:
            ref = Ref(ref.box, start, stop)
        return ref if len(ref) <= most else Ref(ref.box, 0, most)

    def op(self, spec: tuple[int, int, int, int]) -> Op:
        """A piece of work on open boxes."""
        kind, first, second, third = spec
        dst, src = self.ref(first), self.ref(second)
        n = min(len(dst), len(src))
        match kind % 6:
            case 0:
                n = min(n, third % SIZE + 1)
                return even(Affine(dst, src, third % 5 - 2, third, n, -(-n // BLOCK)))
            case 1:
                other = self.ref(third)
                return even(Sum(dst, src, other, min(n, len(other))))
            case 2:
                dst, src = self.ref(first, n), self.ref(second, n)
                if dst.box is not src.box and len(dst) == len(src):
                    return Copy(dst, src)
                return Fill(dst, third)
            case 3:
                return Fill(dst, third)
            case 5:
                return self.seen(dst, third)
            case _:
                self.tokens.append(Token())
                return Mark(self.tokens[-1])

    def seen(self, dst: Ref, number: int) -> Seen:
        """A launch with attributes that the device has."""
        can = self.device.capabilities
        cluster = (1, 2, 4, 8)[number % 4] if can.clusters else 1
        extra = number // 4 % 4
        return Seen(
            dst,
            blocks=cluster * (1 + number // 16 % 3),
            cluster=cluster,
            cooperative=extra == 1 and cluster == 1 and can.cooperative_launch,
            programmatic=extra == 2 and can.programmatic_launch,
            priority=-1 if extra == 3 else None,
        )

    # --- operations of the oracle, on the device
    def pointer(self, ref: Ref) -> object:
        """What a launch is given for a part of a box."""
        buffer = self.memories[ref.box].buffer
        assert buffer is not None
        if not ref.reach:
            return buffer.address + 4 * ref.start
        if (ref.start, ref.stop) == (0, len(ref.box)):
            return self.memories[ref.box].owner
        return buffer[ref.start : ref.stop]

    def buffer(self, ref: Ref) -> ost.Buffer:
        buffer = self.memories[ref.box].buffer
        assert buffer is not None
        return buffer[ref.start : ref.stop]

    def launch(self, op: Op) -> tuple[ost.Kernel, ost.LaunchConfig, tuple[object, ...]]:
        """A kernel launch of the oracle's, for `ost.launch`, `prepare` and `add_kernel`."""
        if isinstance(op, Affine):
            blocks = ost.LaunchConfig(grid=op.blocks, block=BLOCK)
            arguments = (self.pointer(op.dst), self.pointer(op.src), op.m, op.c, op.n)
            return kernel(self.device, "affine"), blocks, arguments
        if isinstance(op, Seen):
            return kernel(self.device, "seen"), self.shape(op), (self.pointer(op.dst),)
        assert isinstance(op, Sum)
        pointers = [self.pointer(r) for r in (op.dst, op.a, op.b)]
        return kernel(self.device, "total"), config(op.n), (*pointers, op.n)

    def shape(self, op: Seen) -> ost.LaunchConfig:
        return ost.LaunchConfig(
            grid=op.blocks,
            block=BLOCK,
            cluster=op.cluster if op.cluster > 1 else None,
            cooperative=op.cooperative,
            programmatic=op.programmatic,
            priority=op.priority,
        )

    def submit(self, stream: ost.Stream, op: Op) -> None:
        """One operation onto a stream, or into what is made of it."""
        if isinstance(op, Copy):
            ost.copy(stream, self.buffer(op.dst), self.buffer(op.src))
        elif isinstance(op, Fill):
            ost.fill(stream, self.buffer(op.dst), op.value)
        elif isinstance(op, Mark):
            stream.call(op.token)
        else:
            found, shape, arguments = self.launch(op)
            ost.launch(stream, found, shape, *arguments)

    # --- memory
    def new_memory(self, kind: str, seed: int) -> Box:
        """A new box with content, on the first open lane."""
        size = SIZE // 2 if kind == "small" else SIZE
        lane = self.open_lanes[0]
        box = Box(np.random.default_rng(seed).integers(-100, 100, size))
        owner: ost.Buffer | ost.DeviceArray
        pool = None
        if kind == "state":
            owner = ost.DeviceArray(self.device, size, np.int32, depth=1 + seed % 3)
            owner.set(box.values, lane.stream)
        elif kind == "pool":
            if not self.pools:
                self.pools.append(self.device.pool(reserve=512, slab=512))
            pool = self.pools[0]
            owner = pool.empty(size, np.int32)
            owner.set(box.values, lane.stream)
        else:
            owner = self.device.empty(size, np.int32)
            owner.set(box.values, lane.stream)
        self.take(box, owner, pool)
        self.memories[box].last = lane
        return box

    def take(
        self, box: Box, owner: ost.Buffer | ost.DeviceArray, pool: ost.CapturePool | None = None
    ) -> Memory:
        self.memories[box] = Memory(box, owner, owner.address, pool)
        return self.memories[box]

    def forget(self, memory: Memory) -> None:
        """Takes memory out of the world; what was not closed is dropped."""
        del self.memories[memory.box]

    @rule(kind=sampled("plain", "state", "pool", "small"), seed=BYTE)
    def make_memory(self, kind: str, seed: int) -> None:
        if len(self.open_boxes) < 8:
            self.new_memory(kind, seed)

    @rule(which=BYTE, lane=BYTE, seed=BYTE)
    def write(self, which: int, lane: int, seed: int) -> None:
        box, on = self.box(which), self.lane(lane)
        self.order(on, [box])
        values = np.random.default_rng(seed).integers(-100, 100, len(box)).astype(np.int32)
        owner = self.memories[box].owner
        if isinstance(owner, ost.DeviceArray):
            owner.set(values, on.stream)
        else:
            assert owner is not None
            owner.set(values, on.stream)
        box.write(0, values)
        self.look(on, [box], "written from the host")

    @rule(0.5, which=BYTE, lane=BYTE)
    def read(self, which: int, lane: int) -> None:
        box, on = self.box(which), self.lane(lane)
        self.order(on, [box])
        self.let_go()
        buffer = self.memories[box].buffer
        assert buffer is not None
        self._compare(buffer.to_numpy(on.stream), box.values, box.known, f"read, {box}")

    @rule(specs=OPS, lane=BYTE)
    def work_eagerly(self, specs: list[tuple[int, int, int, int]], lane: int) -> None:
        on = self.lane(lane)
        for spec in specs:
            op = self.op(spec)
            boxes = [ref.box for ref in refs_of(op).values()]
            self.order(on, boxes)
            self.submit(on.stream, op)
            op.apply()
            self.look(on, boxes, f"eagerly, {op}")

    @rule(
        1,
        when=lambda self: len(self.open_boxes) > 3,
        which=BYTE,
        how=sampled("close", "drop", "pool"),
    )
    def lose_memory(self, which: int, how: str) -> None:
        """A box is closed under whatever points at it, or nobody holds it any more but graphs."""
        box = self.box(which)
        memory = self.memories[box]
        if how == "drop":
            memory.owner = memory.buffer = None
        elif memory.pool is None:
            assert memory.owner is not None
            memory.owner.close()
            box.closed = True
        elif how == "pool" and len(self.open_boxes) > 6:
            memory.pool.close()
            self.pools.remove(memory.pool)
            for other in self.memories.values():
                if other.pool is memory.pool:
                    other.box.closed = True
        if box.closed:
            self.refuses(lambda: self.submit(self.lane(0).stream, Fill(whole(box), 1)))
        self.refill(which)

    def refill(self, seed: int) -> None:
        while len(self.open_boxes) < 4:
            self.new_memory("plain", seed)

    def refuses(
        self,
        call: Callable[[], object],
        kinds: type[Exception] | tuple[type[Exception], ...] = ClosedError,
    ) -> None:
        try:
            call()
        except kinds as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            return
        raise AssertionError(f"{kinds} was expected")

    # --- streams
    @rule(0.5, lane=BYTE)
    def make_or_close_lane(self, lane: int) -> None:
        if len(self.open_lanes) < 4:
            self.lanes.append(Lane(self.device.create_stream()))
            return
        closing = self.lane(lane)
        closing.behind = closing.stream.record()
        closing.stream.close()
        self.refuses(closing.stream.synchronize)

    @rule(lane=BYTE)
    def stand(self, lane: int) -> None:
        """A stream does nothing for a while, so that what follows finds work under way."""
        held = HeldStream(self.lane(lane).stream)
        held.__enter__()
        held.release_after(0.01)  # something may wait for it
        self.standing.append(held)

    def let_go(self) -> None:
        while self.standing:
            self.standing.pop().release()

    @rule(0.5)
    def synchronize(self) -> None:
        self.settle()

    @rule(0.5, lane=BYTE)
    def synchronize_stream(self, lane: int) -> None:
        on = self.lane(lane)
        self.let_go()
        on.stream.synchronize()
        assert on.stream.done()

    @rule(0.5)
    def collect(self) -> None:
        gc.collect()
        self.device.context.collect()

    # --- the end of a context
    @rule(0.08, which=BYTE, lane=BYTE)
    def poison(self, which: int, lane: int) -> None:
        """A kernel fails: every later call says so, everything can be closed, and life goes on."""
        self.settle()
        buffer = self.memories[self.box(which)].buffer
        stream = self.lane(lane).stream
        ost.launch(stream, kernel(self.device, "crash"), config(1), buffer)
        self.refuses(stream.synchronize, ContextPoisonedError)
        for call in self.calls_of_everything():
            self.refuses(call, OstinatoError)
        self.close_everything()
        gc.collect()
        self.shut()
        for call in self.calls_of_everything():
            self.refuses(call, OstinatoError)
        self.open()

    def calls_of_everything(self) -> Iterator[Callable[[], object]]:
        """A call of each kind of thing there is.  Mixins add to it."""
        yield self.device.synchronize
        yield lambda: self.device.zeros(4, "bytes")
        yield self.device.create_stream
