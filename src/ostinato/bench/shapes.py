"""Model shapes by name: random weights of such a shape take as long as a real model's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ostinato.errors import InputError
from ostinato.models import LlamaConfig

_FIELDS = (
    *("hidden", "layers", "heads", "kv_heads", "head_size", "inner", "vocabulary"),
    *("context_length", "rope_theta", "tied_embeddings"),
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "tiny": (64, 2, 4, 2, 16, 96, 320, 256, 1e4, True),
    "135M": (576, 30, 9, 3, 64, 1536, 49152, 8192, 1e5, True),
    "360M": (960, 32, 15, 5, 64, 2560, 49152, 8192, 1e5, True),
    "1B": (2048, 16, 32, 8, 64, 8192, 128256, 131072, 5e5, True),
    "8B": (4096, 32, 32, 8, 128, 14336, 128256, 131072, 5e5, False),
}
SHAPES = {name: LlamaConfig(**dict(zip(_FIELDS, row, strict=True))) for name, row in _ROWS.items()}
"""SmolLM2-135M, SmolLM2-360M, Llama-3.2-1B and Llama-3.1-8B; "tiny" is for trying things out."""


def shape_named(name: str) -> LlamaConfig:
    """A shape by its name, in any case.  Raises InputError that lists the names."""
    for known, config in SHAPES.items():
        if known.lower() == name.lower():
            return config
    raise InputError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one decode step has to move through memory, at the least.

    `weights`: every weight that the step uses, once; of an embedding table that is not the output
    head as well, only the rows of the batch's tokens (left out).  `head`: the output head, a part
    of `weights`.  `position`: keys and values of one position of one sequence, in all layers.
    Activations and logits are not counted: they fit the cache.
    """

    weights: int
    head: int
    position: int

    def step(self, batch: int, positions: float) -> float:
        """A step of `batch` sequences which each have so many positions in the cache, the
        step's own one among them."""
        return self.weights + batch * positions * self.position

    def prompt(self, tokens: int, piece: int) -> int:
        """A prompt of one sequence, taken `piece` tokens at a time into an empty cache: each piece
        needs every layer's weights, and all keys and values up to its end; the output head is
        needed once."""
        ends = [min(start + piece, tokens) for start in range(0, tokens, piece)]
        layers = self.weights - self.head
        return len(ends) * layers + self.head + sum(ends) * self.position


def traffic(config: LlamaConfig, itemsize: int) -> Traffic:
    """`itemsize`: bytes of a matrix element and of a key's or value's (2 for bfloat16)."""
    c = config
    layer = c.hidden * (2 * c.query_size + 2 * c.kv_size + 3 * c.inner) * itemsize
    norms = (2 * c.layers + 1) * c.hidden * 4
    head = c.vocabulary * c.hidden * itemsize
    return Traffic(
        weights=c.layers * layer + head + norms,
        head=head,
        position=c.layers * 2 * c.kv_size * itemsize,
    )
