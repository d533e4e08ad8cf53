"""How the decoder's CUDA files are compiled, for the check that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.dequantise import dequantise_source
from ostinato.models.cuda.library import library_tuning, lower_with_library
from ostinato.models.cuda.lowering import CudaLaunch, lower
from ostinato.models.cuda.shapes import default_tuning
from ostinato.models.program import SAMPLED_ROWS, decode_program, loop_call
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
    ways = [
        lower(
            program,
            _SHAPE,
            rows=rows,
            context=2048,
            tuning=default_tuning(_SHAPE, rows=rows, context=2048, clusters=clusters),
        )
        for rows, clusters in ((1, False), (1, True), (16, False))
    ]
    single = default_tuning(_SHAPE, context=2048)
    for rows in (16, 512):
        tuning = library_tuning(_SHAPE, rows=rows, context=2048)
        calls = decode_program(_SHAPE, last_row=rows > SAMPLED_ROWS)
        step = lower_with_library(calls, _SHAPE, rows=rows, tuning=tuning, single=single)
        ways.append(tuple(one for one in step if isinstance(one, CudaLaunch)))
    for launches in ways:
        for launch in launches:
            way = (launch.source.name, launch.options)
            if way not in seen:
                seen.add(way)
                yield KernelCheck(launch.source, launch.options)
    yield KernelCheck(dequantise_source())
