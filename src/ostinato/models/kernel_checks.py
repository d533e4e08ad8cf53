"""How the decoder's CUDA files are compiled, for the check that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.models.config import LlamaConfig
from ostinato.models.kernels_cuda import CudaLaunch, lower
from ostinato.models.kernels_cuda_library import lower_with_library
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
    tuning, single = (default_tuning(_SHAPE, rows=rows) for rows in (16, 1))
    pieces = lower_with_library(
        program, _SHAPE, rows=16, context=2048, tuning=tuning, single=single
    )
    own = [lower(program, _SHAPE, rows=rows, context=2048) for rows in (1, 16)]
    for launches in (*own, pieces):
        for launch in launches:
            if not isinstance(launch, CudaLaunch):
                continue
            way = (launch.source.name, launch.options)
            if way not in seen:
                seen.add(way)
                yield KernelCheck(launch.source, launch.options)
