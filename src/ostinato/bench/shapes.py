"""Model shapes by name: a step with random weights takes as long as with a real model's."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import InputError
from ostinato.models import LlamaConfig

SHAPES: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        inner=96,
        vocabulary=320,
        context_length=256,
        tied_embeddings=True,
    ),
    "135M": LlamaConfig(
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_size=64,
        inner=1536,
        vocabulary=49152,
        context_length=8192,
        rope_theta=100000.0,
        tied_embeddings=True,
    ),
    "360M": LlamaConfig(
        hidden=960,
        layers=32,
        heads=15,
        kv_heads=5,
        head_size=64,
        inner=2560,
        vocabulary=49152,
        context_length=8192,
        rope_theta=100000.0,
        tied_embeddings=True,
    ),
    "1B": LlamaConfig(
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_size=64,
        inner=8192,
        vocabulary=128256,
        context_length=131072,
        rope_theta=500000.0,
        tied_embeddings=True,
    ),
    "8B": LlamaConfig(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_size=128,
        inner=14336,
        vocabulary=128256,
        context_length=131072,
        rope_theta=500000.0,
        tied_embeddings=False,
    ),
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
