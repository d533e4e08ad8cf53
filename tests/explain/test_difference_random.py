"""Random chains of few kernels on few buffers, so that many nodes are alike; one is changed, left
out or added, and must be named."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.explain import DifferenceCause, first_difference
from tests.sources import config, kernel

N, BUFFERS = 300, 3
SHORT = ost.LaunchConfig(1, 128)


@dataclass(frozen=True)
class Op:
    """A kernel of tests/sources.py, "copy" or "memset"; `at`: the buffers that it gets."""

    name: str
    at: tuple[int, ...]
    value: float = 0.0
    n: int = N
    short: bool = False

    def run(self, state: list[np.ndarray]) -> list[np.ndarray]:
        """What NumPy makes of the buffers."""
        found, n = [x.copy() for x in state], min(self.n, 128) if self.short else self.n
        first, last = state[self.at[0]], found[self.at[-1]]
        match self.name:
            case "fill" | "memset":
                last[:n] = self.value
            case "scale":
                last[:n] *= 2
            case "halve":
                last[:n] /= np.float32(2)
            case "add":
                last[:n] = first[:n] + state[self.at[1]][:n]
            case "axpy":
                last[:n] += state[self.at[1]][0] * first[:n]
            case "copy":
                last[:] = first
        return found

    def add(
        self, graph: ost.Graph, buffers: list[ost.Buffer], device: Device, after: list[ost.Node]
    ) -> ost.Node:
        given = [buffers[at] for at in self.at]
        if self.name == "copy":
            return graph.add_copy(given[1], given[0], after=after)
        if self.name == "memset":
            return graph.add_fill(given[0], self.value, after=after)
        args = [*given, *([self.value] if self.name == "fill" else []), self.n]
        shape = SHORT if self.short else config(N)
        return graph.add_kernel(kernel(device, self.name), shape, *args, after=after)


ARITY = {"fill": 1, "memset": 1, "scale": 1, "halve": 1, "add": 3, "axpy": 3, "copy": 2}


def drawn(rng: random.Random) -> Op:
    name = rng.choice([*ARITY])
    at = tuple(rng.sample(range(BUFFERS), ARITY[name]))
    return Op(name, at, rng.choice([1.0, 2.0]) if name in ("fill", "memset") else 0.0)


def planted(rng: random.Random, ops: list[Op]) -> tuple[list[Op], int, bool]:
    """The operations with a plant, its place, and whether only the first run has it."""
    at = rng.randrange(len(ops))
    one = ops[at]
    changes = [replace(one, at=tuple(rng.sample(range(BUFFERS), len(one.at))))]
    if one.value:
        changes.append(replace(one, value=3.0))
    if one.name not in ("copy", "memset"):
        changes += [replace(one, n=100), replace(one, short=True)]
    if one.name in ("scale", "halve"):
        changes.append(replace(one, name="halve" if one.name == "scale" else "scale"))
    kind = rng.randrange(len(changes) + 2)
    if kind == 0:
        return ops[:at] + ops[at + 1 :], at, True
    if kind == 1:
        return [*ops[:at], drawn(rng), *ops[at:]], at, False
    return [*ops[:at], changes[kind - 2], *ops[at + 1 :]], at, False


def same_without(ops: list[Op], one: int, other: int) -> bool:
    """True if it is the same to leave out the one or the other."""
    return [*ops[:one], *ops[one + 1 :]] == [*ops[:other], *ops[other + 1 :]]


@pytest.mark.parametrize("seed", range(60))
def test_the_planted_node_is_named(device: Device, stream: ost.Stream, seed: int) -> None:
    rng = random.Random(seed)
    layer = [drawn(rng) for _ in range(rng.randint(2, 5))]
    ops = layer * rng.randint(1, 4)
    wrong, at, in_a = planted(rng, ops)
    values = np.random.default_rng(seed).uniform(1, 2, (BUFFERS, N)).astype(np.float32)
    one = [device.array(row) for row in values]
    # With memory of its own an added node may look like one that is there: not drawn then.
    own = len(wrong) == len(ops) and rng.random() < 0.5
    memory = one, [device.array(row) for row in values] if own else one
    graphs = []
    for buffers, nodes in zip(memory, (ops, wrong), strict=True):
        graph, last = ost.Graph.create(device), list[ost.Node]()
        for op in nodes:
            last = [op.add(graph, buffers, device, last)]
        graphs.append(graph)
    state = [*values]
    for op in ops[:at]:
        state = op.run(state)
    after = [state if at >= len(of) else of[at].run(state) for of in (ops, wrong)]
    if len(wrong) != len(ops):  # only one of the two runs something there
        after[in_a] = state
    found = first_difference(stream, *graphs)
    node = found and (found.a if in_a else found.b)
    if node is None:
        assert found is None
        assert all(np.array_equal(x, y) for x, y in zip(*after, strict=True))
        return
    assert found is not None
    other, longer = found.b if in_a else found.a, ops if in_a else wrong
    assert (other is None) == (len(ops) != len(wrong)), str(found)
    assert node.path == str(at) or (other is None and same_without(longer, at, int(node.path)))


@ost.kernel(
    "x: *const f32, out: *f32, given: bytes[24]",
    """
struct Given { unsigned char adds; float value; unsigned n; unsigned long long unset; };
extern "C" __global__ void padded_step(const float* x, float* out, Given given) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < given.n) out[i] = given.adds ? x[i] + given.value : x[i] * given.value;
}
""",
    name="padded_step",
)
def padded_step(launch: Any, x: Any, out: Any, given: Any) -> None:
    step = np.frombuffer(given, STRUCT)[0]
    n, value = step["n"], step["value"]
    out[:n] = x[:n] + value if step["adds"] else x[:n] * value


STRUCT = np.dtype(
    [("adds", "u1"), ("pad", "u1", 3), ("value", "f4"), ("n", "u4"), ("gap", "u4"), ("unset", "u8")]
)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_nobody_set_pair_no_nodes(device: Device, stream: ost.Stream, seed: int) -> None:
    """Of nodes that are alike one is changed, or none; what lies in their structs is not theirs."""
    rng = random.Random(seed)
    layer = [
        (rng.random() < 0.5, rng.choice([1.0, 2.0]), *rng.sample(range(BUFFERS), 2))
        for _ in range(rng.randint(2, 5))
    ]
    ops = layer * rng.randint(1, 4)
    at = rng.randrange(len(ops)) if seed % 4 else None
    wrong = [(adds, 3.0 if i == at else value, *of) for i, (adds, value, *of) in enumerate(ops)]
    values = np.random.default_rng(seed).uniform(1, 2, (BUFFERS, N)).astype(np.float32)
    buffers, graphs = [device.array(row) for row in values], []
    run = device.modules.get_or_compile(padded_step, "padded_step")
    for nodes in (ops, wrong):
        graph, last = ost.Graph.create(device), list[ost.Node]()
        for adds, value, one, other in nodes:
            given = np.zeros(1, STRUCT)
            given["adds"], given["value"], given["n"] = adds, value, N
            given["pad"][0, 0] = rng.randrange(3)
            given["unset"] = rng.choice([0, 1, buffers[0].address])
            args = buffers[one], buffers[other], given.tobytes()
            last = [graph.add_kernel(run, config(N), *args, after=last)]
        graphs.append(ost.Graph.adopt(device, graph.handle, owner=graph))
    found = first_difference(stream, *graphs)
    assert (found and found.b and found.b.path) == (None if at is None else str(at)), str(found)


def test_bytes_that_nobody_set_are_no_cause(device: Device, stream: ost.Stream) -> None:
    run, graphs = device.modules.get_or_compile(padded_step, "padded_step"), []
    for content in (1.0, 2.0):
        given = np.zeros(1, STRUCT)
        given["adds"], given["n"], given["unset"] = 1, N, content
        x, out = (device.full(N, value, np.float32) for value in (content, 0))
        graph = ost.Graph.create(device)
        graph.add_kernel(run, config(N), x, out, given.tobytes())
        graphs.append(ost.Graph.adopt(device, graph.handle, owner=graph))
    found = first_difference(stream, *graphs)
    assert found is not None and found.cause is DifferenceCause.READ_BEFORE_WRITTEN, str(found)
