"""The example of transitive closure, against networkx."""

from __future__ import annotations

import numpy as np
import pytest

from examples import transitive_closure
from ostinato.relational import Joiner


@pytest.mark.parametrize("seed", range(4))
def test_the_closure_is_that_of_networkx(joiner: Joiner, seed: int) -> None:
    networkx = pytest.importorskip("networkx")
    rng, nodes = np.random.default_rng(seed), 40
    edges = transitive_closure.random_edges(rng, nodes)
    graph = networkx.DiGraph(edges.tolist())
    wanted = sorted(networkx.transitive_closure(graph, reflexive=False).edges)
    assert transitive_closure.closure(joiner, edges, nodes).tolist() == [list(e) for e in wanted]
    statistics = joiner.statistics()
    assert statistics.joins > 10
    assert statistics.cache.captures < 12


def test_a_graph_without_edges(host_joiner: Joiner) -> None:
    edges = np.empty((0, 2), np.int64)
    assert len(transitive_closure.closure(host_joiner, edges, 5)) == 0
