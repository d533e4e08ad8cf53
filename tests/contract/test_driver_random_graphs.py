"""Random graphs: any order that respects the edges gives what one after another gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.driver.api import Edge, NodeHandle
from tests.contract.kernels import Rig

BUFFERS, LENGTH = 4, 8


@dataclass(frozen=True)
class Op:
    kind: str
    target: int
    left: int
    right: int
    value: int

    @property
    def reads(self) -> set[int]:
        return {"add": {self.left, self.right}, "scale": {self.target}}.get(self.kind, set())


OPS = st.builds(
    Op,
    st.sampled_from(["fill", "scale", "add"]),
    st.integers(0, BUFFERS - 1),
    st.integers(0, BUFFERS - 1),
    st.integers(0, BUFFERS - 1),
    st.integers(-2, 2),
)


def sequentially(ops: list[Op]) -> np.ndarray:
    memory = np.ones((BUFFERS, LENGTH), np.float32)
    for op in ops:
        if op.kind == "fill":
            memory[op.target] = op.value
        elif op.kind == "scale":
            memory[op.target] *= np.float32(op.value)
        else:
            memory[op.target] = memory[op.left] + memory[op.right]
    return memory


def hazards(ops: list[Op]) -> set[tuple[int, int]]:
    """The edges that are needed: read after write, write after read, write after write."""
    edges: set[tuple[int, int]] = set()
    for later, op in enumerate(ops):
        for earlier in range(later):
            before = ops[earlier]
            if before.target in op.reads or op.target in before.reads or op.target == before.target:
                edges.add((earlier, later))
    return edges


def params(rig: Rig, op: Op, buffers: list[int]):  # type: ignore[no-untyped-def]
    target = buffers[op.target]
    if op.kind == "add":
        return rig.params("add", buffers[op.left], buffers[op.right], target, LENGTH)
    return rig.params(op.kind, target, float(op.value), LENGTH)


def read(rig: Rig, buffers: list[int]) -> np.ndarray:
    return np.stack([rig.read(buffer, LENGTH) for buffer in buffers])


def reset(rig: Rig, buffers: list[int]) -> None:
    for buffer in buffers:
        rig.launch("fill", buffer, 1.0, LENGTH)


@pytest.fixture
def buffers(rig: Rig) -> list[int]:
    return [rig.zeros(LENGTH) for _ in range(BUFFERS)]


EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@EXAMPLES
@given(ops=st.lists(OPS, max_size=12), data=st.data())
def test_built_in_any_order(
    rig: Rig, buffers: list[int], ops: list[Op], data: st.DataObject
) -> None:
    driver = rig.driver
    creation = data.draw(st.permutations(range(len(ops))))
    graph = rig.new_graph()
    nodes: dict[int, NodeHandle] = {
        i: driver.graph_add_node(graph, (), params(rig, ops[i], buffers)) for i in creation
    }
    driver.graph_add_edges(graph, [Edge(nodes[a], nodes[b]) for a, b in sorted(hazards(ops))])
    reset(rig, buffers)
    rig.run(graph)
    np.testing.assert_array_equal(read(rig, buffers), sequentially(ops))
