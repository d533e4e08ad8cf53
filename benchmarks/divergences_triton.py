"""Plants of `benchmarks.divergences` in graphs of kernels of Triton, captured on our streams."""

# No `from __future__ import annotations`: Triton looks at the annotations of its kernels.

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import triton
import triton.language as tl

import ostinato as ost
from benchmarks.divergences import Planted
from ostinato.interop.triton import as_tensor, use_stream, warm

ROWS, WIDTH, BLOCK, LAYERS = 32, 256, 256, 3


@triton.jit
def triton_norm(x, out, epsilon, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(x + at)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / WIDTH + epsilon)
    tl.store(out + at, row * scale)


@triton.jit
def triton_act(x, out, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    if KIND == 0:
        a = tl.maximum(a, 0.0)
    if KIND == 1:
        a = a * tl.sigmoid(a)
    tl.store(out + at, a, mask=at < n)


@triton.jit
def triton_drop(x, seed, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    tl.store(x + at, tl.where(tl.rand(seed, at) < 0.2, 0.0, a), mask=at < n)


@triton.jit
def triton_blend(x, y, out, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n)
    b = tl.load(y + at, mask=at < n)
    tl.store(out + at, a + factor * b, mask=at < n)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel of Triton."""

    kernel: Any
    grid: int
    args: dict[str, Any]

    def with_(self, **args: Any) -> "Launch":
        return replace(self, args={**self.args, **args})


class Ground:
    """A network of three layers, x = x + factor drop(act(norm(x))), and plants in it.

    A node of the graph has the place of its launch's name in `launches`; node 0 copies the input.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.stream = device, device.create_stream()
        rng = np.random.default_rng(3)

        def noise(name: str) -> Any:
            values = rng.uniform(-1, 1, (ROWS, WIDTH)).astype(np.float32)
            return device.array(values, name=name)

        self.given, self.start = noise("given"), noise("x")
        names = ("h", "z", "older")
        self.h, self.z, self.older = (as_tensor(noise(name)) for name in names)
        self.x = as_tensor(self.start)
        n, grid = ROWS * WIDTH, ROWS * WIDTH // BLOCK
        self.launches: dict[str, Launch] = {}
        for i in range(LAYERS):
            norm = {"x": self.x, "out": self.h, "epsilon": 1e-5, "WIDTH": WIDTH}
            act = {"x": self.h, "out": self.z, "n": n, "KIND": 1, "BLOCK": BLOCK}
            drop = {"x": self.z, "seed": 7 + i, "n": n, "BLOCK": BLOCK}
            blend = {"x": self.x, "y": self.z, "out": self.x, "factor": 0.5, "n": n}
            self.launches |= {
                f"norm{i}": Launch(triton_norm, ROWS, norm),
                f"act{i}": Launch(triton_act, grid, act),
                f"drop{i}": Launch(triton_drop, grid, drop),
                f"blend{i}": Launch(triton_blend, grid, {**blend, "BLOCK": BLOCK}),
            }

    def graph(self, launches: dict[str, Launch]) -> ost.Graph:
        def work() -> None:
            ost.copy(self.stream, self.start, self.given)
            for one in launches.values():
                one.kernel[(one.grid,)](**one.args)

        warm(self.stream, work)
        with use_stream(self.stream):
            return ost.capture_function(self.stream, work)

    def changed(self, name: str, **args: Any) -> Planted:
        wrong = {**self.launches, name: self.launches[name].with_(**args)}
        return Planted(self.graph(self.launches), self.graph(wrong), self.place(name))

    def place(self, name: str) -> tuple[str, ...]:
        return (str([*self.launches].index(name) + 1),)

    def nothing(self) -> Planted:
        return Planted(self.graph(self.launches), self.graph(self.launches), ())

    def constexpr(self) -> Planted:
        return self.changed("act1", KIND=0)

    def scalar(self) -> Planted:
        """In the executable, the argument of one node."""
        graph, (place,) = self.graph(self.launches), self.place("blend1")
        run, raw = graph.instantiate(), np.float32(0.5).tobytes()
        (factor,) = (a.index for a in graph.nodes()[int(place)].arguments if a.raw == raw)
        run.set(int(place), factor, 0.75)
        return Planted(graph, run, (place,))

    def epsilon(self) -> Planted:
        return self.changed("norm1", epsilon=0.1)

    def seed(self) -> Planted:
        return self.changed("drop1", seed=99)

    def tail(self) -> Planted:
        return self.changed("act2", BLOCK=BLOCK // 2)

    def stale_pointer(self) -> Planted:
        return self.changed("blend1", y=self.older)

    def left_out(self) -> Planted:
        less = {name: one for name, one in self.launches.items() if name != "drop1"}
        return Planted(self.graph(self.launches), self.graph(less), self.place("drop1"), in_a=True)
