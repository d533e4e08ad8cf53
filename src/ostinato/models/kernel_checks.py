"""How the decoder's CUDA files are compiled, for the check that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.models.config import LlamaConfig
from ostinato.models.kernels_cuda import lower
from ostinato.models.kernels_cuda_shapes import default_tuning
from ostinato.models.program import decode_program, loop_call
from ostinato.modules.catalog import KernelCheck

__all__ = ["kernel_checks"]

# The shape of SmolLM2-135M in two layers: layers are launches, not code.
_SHAPE = LlamaConfig(
    hidden=576,
    layers=2,
    heads=9,
    kv_heads=3,
    head_size=64,
    inner=1536,
    vocabulary=49152,
    context_length=2048,
    tied_embeddings=True,
)


def kernel_checks() -> Iterator[KernelCheck]:
    """One check for each file and way of compiling it, for one row and for several."""
    seen = set()
    program = (*decode_program(_SHAPE), loop_call())
    for rows, clusters in ((1, False), (1, True), (16, False)):
        tuning = default_tuning(_SHAPE, rows=rows, context=2048, clusters=clusters)
        for launch in lower(program, _SHAPE, rows=rows, context=2048, tuning=tuning):
            way = (launch.source.name, launch.options)
            if way not in seen:
                seen.add(way)
                yield KernelCheck(launch.source, launch.options)
