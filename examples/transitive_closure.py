"""Transitive closure by semi-naive evaluation: thousands of joins, replayed from a few graphs.

    path(x, y) :- edge(x, y).
    path(x, z) :- path(x, y), edge(y, z).

Each round joins only the paths that the last round found with the edges.  The join runs on the
device, with an index of the edges that is built once; NumPy removes known pairs and duplicates on
the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import ostinato as ost
from ostinato.relational import Joiner

Pairs = npt.NDArray[np.int64]


def closure(joiner: Joiner, edges: Pairs, nodes: int) -> Pairs:
    """Returns all (x, y) such that a path of one edge or more leads from x to y, one row each, in
    order."""
    index = joiner.build_index({"node": edges[:, 0]}, on="node")
    known = np.zeros(nodes * nodes, bool)
    found = edges
    while len(found):
        numbers = np.unique(found[:, 0] * nodes + found[:, 1])
        new = numbers[~known[numbers]]
        known[new] = True
        delta = np.stack([new // nodes, new % nodes], axis=1)
        left, right = joiner.join({"node": delta[:, 1]}, index, on="node").to_numpy()
        found = np.stack([delta[left, 0], edges[right, 1]], axis=1)
    index.close()
    numbers = np.flatnonzero(known)
    return np.stack([numbers // nodes, numbers % nodes], axis=1)


def by_squaring(edges: Pairs, nodes: int) -> Pairs:
    """Computes the same from powers of the adjacency matrix."""
    reach = np.zeros((nodes, nodes), np.float32)
    reach[edges[:, 0], edges[:, 1]] = 1
    for _ in range(nodes.bit_length()):
        reach = np.minimum(reach + reach @ reach, 1)
    return np.argwhere(reach > 0)


def random_edges(rng: np.random.Generator, nodes: int) -> Pairs:
    """Returns a ring of three quarters of the nodes, for long paths, and some other edges."""
    ring = rng.permutation(nodes)[: 3 * nodes // 4]
    others = rng.integers(0, nodes, (nodes // 20, 2))
    return np.concatenate([np.stack([ring, np.roll(ring, -1)], axis=1), others])


def main() -> None:
    rng = np.random.default_rng(20)
    nodes, graphs = 240, 10
    with ost.open_device() as device, Joiner(device) as joiner:
        paths = 0
        for _ in range(graphs):
            edges = random_edges(rng, nodes)
            pairs = closure(joiner, edges, nodes)
            assert np.array_equal(pairs, by_squaring(edges, nodes))
            paths += len(pairs)
        said = joiner.statistics()
        print(f"{graphs} graphs of {nodes} nodes: {paths} paths, as by squaring the matrix")
        print(
            f"{said.joins} joins by {said.replays} replays of {said.cache.captures} captured "
            f"graphs; {said.retries} repeated with more room; {said.kernels_compiled} kernels "
            "compiled on the way"
        )


if __name__ == "__main__":
    main()
