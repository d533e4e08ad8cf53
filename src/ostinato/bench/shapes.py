"""Model shapes by name: a step with random weights takes as long as with a real model's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.errors import InputError
from ostinato.models import LlamaConfig


def _shape(
    layers: int,
    heads: tuple[int, int, int],
    inner: int,
    vocabulary: int,
    context: int,
    theta: float,
) -> LlamaConfig:
    """`heads`: of queries, of keys, and the size of one; together the queries' are as wide as the
    residual."""
    queries, keys, size = heads
    return LlamaConfig(
        hidden=queries * size,
        layers=layers,
        heads=queries,
        kv_heads=keys,
        head_size=size,
        inner=inner,
        vocabulary=vocabulary,
        context_length=context,
        rope_theta=theta,
        tied_embeddings=True,
    )


SHAPES: dict[str, LlamaConfig] = {
    "tiny": _shape(2, (4, 2, 16), 96, 320, 256, 1e4),
    "135M": _shape(30, (9, 3, 64), 1536, 49152, 8192, 1e5),
    "360M": _shape(32, (15, 5, 64), 2560, 49152, 8192, 1e5),
    "1B": _shape(16, (32, 8, 64), 8192, 128256, 131072, 5e5),
    "8B": replace(_shape(32, (32, 8, 128), 14336, 128256, 131072, 5e5), tied_embeddings=False),
}
"""Shapes of SmolLM2-135M, SmolLM2-360M, Llama-3.2-1B and Llama-3.1-8B; "tiny" is for trials."""


def shape_named(name: str) -> LlamaConfig:
    """Returns a shape by its name, in any case.  Raises InputError, which lists the names."""
    for known, config in SHAPES.items():
        if known.lower() == name.lower():
            return config
    raise InputError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The least bytes that one decode step must move through memory.

    `weights`: every weight that the step uses, once, without an embedding table that is not also
    the output head, of which a step reads only a few rows.  `head`: the output head, a part of
    `weights`.  `position`: keys and values of one position of one sequence, in all layers.
    Activations and logits do not count: they fit the cache.
    """

    weights: int
    head: int
    position: int

    def step(self, batch: int, positions: float) -> float:
        """Returns the bytes of a step of `batch` sequences with `positions` positions each in the
        cache, the step's own one included."""
        return self.weights + batch * positions * self.position

    def prompt(self, tokens: int, piece: int) -> int:
        """Returns the bytes of a prompt of one sequence, read `piece` tokens at a time into an
        empty cache: each piece needs every layer's weights, and all keys and values up to its end;
        the output head is needed once."""
        ends = [min(start + piece, tokens) for start in range(0, tokens, piece)]
        layers = self.weights - self.head
        return len(ends) * layers + self.head + sum(ends) * self.position


def traffic(config: LlamaConfig, itemsize: int) -> Traffic:
    """Returns the traffic of a model.  `itemsize`: bytes of an element of matrices, keys and values
    (2 for bfloat16)."""
    c = config
    layer = c.hidden * (2 * c.query_size + 2 * c.kv_size + 3 * c.inner) * itemsize
    norms = (2 * c.layers + 1) * c.hidden * 4
    head = c.vocabulary * c.hidden * itemsize
    return Traffic(
        weights=c.layers * layer + head + norms,
        head=head,
        position=c.layers * 2 * c.kv_size * itemsize,
    )
