"""Every CUDA file of the library in the ways it is compiled, and what is wrong with the code.

`library_checks` is the one list of them: the decoder's files for several models, the dequantisers,
the joins.  `check` compiles one for an architecture; it needs NVRTC and no GPU.  What was compiled
is kept: a process compiles what changed, as with the emulator.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.kernels.checks import config_of
from ostinato.distributed import exchange, nccl
from ostinato.graph import probes
from ostinato.interop.reading import conditions, moves
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import FORMATS, formats_of
from ostinato.models.cuda.dequantise import dequantise_source, repack_source
from ostinato.models.cuda.library import lower_with_library, unpack_source
from ostinato.models.cuda.lowering import CudaLaunch, Lowering, lower
from ostinato.models.cuda.products import PIECE_ROWS
from ostinato.models.cuda.shapes import LEAST_SHARED, default_tuning, dynamic_shared
from ostinato.models.program import SAMPLED_ROWS, decode_program, loop_call
from ostinato.models.sharding import (
    COLLECTIVES,
    Sharding,
    carrying_sums,
    exchanging_products,
    shard_program,
)
from ostinato.modules import CompileOptions, DiskStore, Source
from ostinato.modules.compiler import Compiled, Plan, compile_plan, is_current, plan_compilation
from ostinato.modules.cubin import KernelResources, kernel_resources
from ostinato.relational import chain
from ostinato.step import fills

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SMALL_ARCHITECTURES = ("sm_86", "sm_89", "sm_120")
"""Whose blocks have LEAST_SHARED bytes of shared memory."""

_REGISTERS_OF_MULTIPROCESSOR = 65536
_MOST_REGISTERS = 255
_MOST_THREADS = 1024
_MOST_SHARED = 200 * 1024
_ALLOCATION_UNIT = 8  # registers a thread are handed out in eights

_SPILLS = re.compile(
    r"Function properties for (?P<name>\S+)\s*\n\s*ptxas\s+[.:]?\s*\d+ bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_WARNING = re.compile(r"^.*\bwarning(?: #|\s*:).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class KernelCheck:
    """One way in which a source is compiled; with `options.arch` for that architecture alone.

    By kernel: `shared`, bytes of dynamic shared memory that a launch asks for; `registers`, the
    most a thread may have on sm_90 where that is less than what launch bounds allow; `spills`, the
    most bytes that a thread may spill, if any.
    """

    name: str
    source: Source
    options: CompileOptions = field(default_factory=CompileOptions)
    shared: Mapping[str, int] = field(default_factory=dict)
    registers: Mapping[str, int] = field(default_factory=dict)
    spills: Mapping[str, int] = field(default_factory=dict)


SPILLS = {
    "head": 12,  # Q5_K of Qwen3 0.6B, Q8_0 of Qwen2.5 7B on sm_80
    "rounded_qkv_rope": 24,  # sm_100 4; Llama 3.2 1B on sm_80, on sm_90 20
    "rounded_output": 4,  # Q5_K of Llama 3.1 8B's widths, 8 rows
    "rounded_gate_up": 4,  # Q5_K; Qwen2.5 0.5B on sm_100
    "rounded_head": 32,  # Q5_K 4; odd sizes on sm_100 32
    "rounded_down": 76,  # Qwen2.5 0.5B on sm_100
}
"""Bytes that a thread of these spills in 25 of their checks: two blocks on a multiprocessor leave
it 128 registers."""

SPILLS_OF_SMALL = SPILLS | {
    "sample": 40,  # of odd sizes
    **dict.fromkeys(("rounded_output", "rounded_down"), 128),
    "rounded_qkv_rope": 120,
    "rounded_qkv": 44,
    "rounded_gate_up": 56,
    "rounded_head": 36,
}
"""The same of `small_checks`: with 64 rows, most of it on sm_120."""


MODELS = {
    "smollm2-135m": config_of(9, 3, 64, inner=1536, vocabulary=49152, tied_embeddings=True),
    "llama-3.2-1b": config_of(32, 8, 64, inner=8192, vocabulary=128256),
    "llama-3.1-8b": config_of(32, 8, 128, inner=14336, vocabulary=128256),
    "qwen2.5-0.5b": config_of(
        14, 2, 64, inner=4864, vocabulary=151936, tied_embeddings=True, qkv_bias=True
    ),
    "qwen2.5-7b": config_of(28, 4, 128, inner=18944, vocabulary=152064, qkv_bias=True),
    "qwen3-0.6b": config_of(
        16, 8, 128, hidden=1024, inner=3072, vocabulary=151936, tied_embeddings=True, qk_norm=True
    ),
    "qwen3-8b": config_of(32, 8, 128, inner=12288, vocabulary=151936, qk_norm=True),
    "mistral-7b": config_of(32, 8, 128, inner=14336, vocabulary=32000, windows=(4096, 4096)),
    "all of it": config_of(
        9, 3, 64, inner=1536, vocabulary=49152, qkv_bias=True, qk_norm=True, windows=(0, 64)
    ),
    "odd": config_of(5, 1, 80, hidden=328, inner=264, vocabulary=301),
}


OF_WARPGROUPS = {
    "llama-3.2-1b": MODELS["llama-3.2-1b"],
    "qwen2.5-1.5b": config_of(12, 2, 128, inner=8960, vocabulary=151936, qkv_bias=True),
    "qwen3-1.7b": config_of(16, 8, 128, inner=6144, vocabulary=151936, qk_norm=True),
    "smollm2-360m": config_of(15, 5, 64, inner=2560, vocabulary=49152, tied_embeddings=True),
    "llama-3.1-8b": MODELS["llama-3.1-8b"],
    "odd": config_of(17, 1, 64, inner=1088, vocabulary=301),
}
"""Whose steps of several rows multiply with warpgroups."""


def library_checks() -> Iterator[KernelCheck]:
    """Every file of the library, once in each way of compiling it."""
    ways = [(model, config, _launches) for model, config in MODELS.items()]
    ways += [(model, config, _of_warpgroups) for model, config in OF_WARPGROUPS.items()]
    for model, config, launches in ways:
        shared: dict[tuple[Source, CompileOptions], dict[str, int]] = {}
        for one in launches(config):
            asked = shared.setdefault((one.source, one.options), {})
            asked[one.kernel] = max(asked.get(one.kernel, 0), one.config.shared)
        for number, ((source, options), asked) in enumerate(shared.items()):
            name = f"{model}-{number}-{options.arch or source.name}"
            yield KernelCheck(name, source, options, asked, spills=SPILLS)
    # All types for real models; two for a small one, which are compiled in every run of the tests.
    for model, config in {
        **MODELS,
        "packed": config_of(4, 1, 64, inner=512, vocabulary=257),
    }.items():
        for kind in ("Q4_1", "Q6_K") if model == "packed" else FORMATS:
            if model != "odd" and (config.hidden % 256 == 0 or not kind.endswith("_K")):
                for rows, one in _packed(config, kind):
                    name, asked = f"{model}-{kind}-{one.kernel}", {one.kernel: one.config.shared}
                    name += f"-{rows}" if rows > 1 else ""
                    name += "-panels" if "PANELS" in dict(one.options.defines) else ""
                    yield KernelCheck(name, one.source, one.options, asked, spills=SPILLS)
    for model in ("llama-3.2-1b", "llama-3.1-8b"):
        for ranks in (2, 8):
            shared = {}
            for one in _launches_of_rank(Sharding(MODELS[model], 0, ranks)):
                asked = shared.setdefault((one.source, one.options), {})
                asked[one.kernel] = max(asked.get(one.kernel, 0), one.config.shared)
            for number, ((source, options), asked) in enumerate(shared.items()):
                name = f"{model} of {ranks} ranks-{number}-{source.name}"
                yield KernelCheck(name, source, options, asked)
    for ranks in (2, 8):
        source = exchange.kernels()
        macros = exchange.Layout(ranks, 512).macros
        options = CompileOptions(defines=tuple(macros.items()))
        shared = dict.fromkeys(source.signatures, 0)
        yield KernelCheck(f"{source.name} of {ranks} ranks", source, options, shared)
    for source in (dequantise_source(), repack_source(), unpack_source(), nccl.kernels()):
        yield KernelCheck(source.name, source, shared=dict.fromkeys(source.signatures, 0))
    yield KernelCheck("moves.cu", moves.source())
    yield KernelCheck("conditions.cu", conditions.source())
    yield KernelCheck("step/fills.cu", fills.source())
    yield KernelCheck("graph/probes.cu", probes.source())
    # A multiprocessor's 2,048 threads all at once: these kernels wait for random reads.
    most = dict.fromkeys(("insert", "probe", "materialize"), 32)
    yield KernelCheck("join.cu", chain.source(), registers=most)


def small_checks() -> Iterator[KernelCheck]:
    """The decoder's files as they are cut for SMALL_ARCHITECTURES, once in each way."""
    models = {name: MODELS[name] for name in ("odd", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b")}
    # A row of this one has more inputs than fit: it is multiplied as several are.
    wide = config_of(40, 8, 128, inner=27648, vocabulary=152064, qkv_bias=True)
    for model, config in {**models, "qwen2.5-32b": wide}.items():
        for kind in ("", "Q8_0") if config.hidden % 256 else ("", "Q8_0", "Q4_K"):
            shared: dict[tuple[Source, CompileOptions], dict[str, int]] = {}
            for one in _on_small(config, kind):
                asked = shared.setdefault((one.source, one.options), {})
                asked[one.kernel] = max(asked.get(one.kernel, 0), one.config.shared)
            for number, ((source, options), asked) in enumerate(shared.items()):
                name = f"small {model}-{kind or 'bf16'}-{number}-{source.name}"
                yield KernelCheck(name, source, options, asked, spills=SPILLS_OF_SMALL)


def _on_small(config: LlamaConfig, kind: str) -> Iterator[CudaLaunch]:
    """`kind`: of packed matrices, whose products alone are given; "" for bfloat16."""
    formats = formats_of(config, lambda _: kind) if kind else {}
    for rows, clusters in ((1, False), (1, True), (16, False), (64, True)):
        given: Any = {"rows": rows, "context": 2048}
        has: Any = {"clusters": clusters, "shared": dynamic_shared(LEAST_SHARED)}
        tuning = default_tuning(config, **given, **has)
        for one in lower(decode_program(config), config, tuning=tuning, formats=formats, **given):
            if not kind or "PACKED" in dict(one.options.defines):
                yield one


def _launches(config: LlamaConfig) -> Iterator[CudaLaunch]:
    """For one row and for several; with clusters and without; with a library's products."""
    ways = ((1, False), (8, False), (16, False), (1, True), (8, True), (16, True), (32, True))
    for rows, clusters in ways:
        tuning = default_tuning(config, rows=rows, context=2048, clusters=clusters)
        program = (*decode_program(config, lookup=rows - 1), loop_call())
        if rows > 1:
            program = (*decode_program(config), *program)
        yield from lower(program, config, rows=rows, context=2048, tuning=tuning)
    single = default_tuning(config, context=2048)
    for rows, warpgroups in ((16, False), (512, False), (512, True)):
        tuning = default_tuning(config, rows=rows, context=2048, most=PIECE_ROWS)
        program = decode_program(config, last_row=rows > SAMPLED_ROWS)
        given: Any = {"tuning": tuning, "single": single, "warpgroups": warpgroups}
        step = lower_with_library(program, config, rows=rows, **given)
        yield from (one for one in step if isinstance(one, CudaLaunch))


def _of_warpgroups(config: LlamaConfig) -> Iterable[CudaLaunch]:
    """What multiplies with warpgroups."""
    made = []
    for rows in (32, 64):
        given: Any = {"clusters": True, "warpgroups": True}
        tuning = default_tuning(config, rows=rows, context=2048, **given)
        step = lower(decode_program(config), config, rows=rows, context=2048, tuning=tuning)
        made += [one for one in step if one.options.arch is not None]
    assert made, "no warpgroups by the rule"
    return made


def _packed(config: LlamaConfig, kind: str) -> Iterator[tuple[int, CudaLaunch]]:
    """What reads matrices, with all of them packed, by the rows of a step: 8 and 32 as devices with
    clusters have them, the others as those without."""
    formats, program = formats_of(config, lambda _: kind), decode_program(config)
    for rows, clusters in ((1, False), (8, False), (64, False), (8, True), (32, True)):
        tuning = default_tuning(config, rows=rows, context=2048, clusters=clusters)
        known = set()
        for one in lower(program, config, rows=rows, context=2048, formats=formats, tuning=tuning):
            if "PACKED" in dict(one.options.defines) and one.kernel not in known:
                known.add(one.kernel)
                if not clusters or "PANELS" in dict(one.options.defines):
                    yield rows, one


def _launches_of_rank(sharding: Sharding) -> Iterator[CudaLaunch]:
    """Of one rank of several, for one row and for several."""
    part = sharding.part
    for rows, warpgroups in ((1, False), (16, False), (32, True), (64, True)):
        has: Any = {"clusters": warpgroups, "warpgroups": warpgroups}
        cut = Lowering(part, rows, default_tuning(part, rows=rows, context=2048, **has))
        for whole_logits in (False, True):
            program = shard_program(decode_program(part), sharding, whole_logits=whole_logits)
            if rows * part.hidden // 2 <= exchange.sum_slots(sharding.size):
                how = exchange.Layout(sharding.size, 512).sum_of(1024, scattered=False)
                program = (*program, *exchanging_products(program, sharding, how))
            if rows == 16:
                for scattered in (False, True):
                    how = exchange.Layout(sharding.size, 512).sum_of(1024, scattered=scattered)
                    program = (*program, *carrying_sums(program, sharding, how))
            for call in program:
                if call.kernel not in COLLECTIVES:
                    yield from cut.launches([call])
    tuning = default_tuning(part, rows=512, context=2048, most=PIECE_ROWS)
    single = default_tuning(part, context=2048)
    program = shard_program(
        decode_program(part, last_row=True), sharding, whole_logits=False, last_row=True
    )
    how = exchange.Layout(sharding.size, 512, 264).shared_sum()
    program = tuple(
        call
        for call in carrying_sums(program, sharding, how, shared=True)
        if call.kernel not in COLLECTIVES
    )
    for one in lower_with_library(program, part, rows=512, tuning=tuning, single=single):
        if isinstance(one, CudaLaunch) and "RANKS" in dict(one.options.defines):
            yield one


@dataclass(frozen=True)
class CheckedKernel:
    """One kernel for one architecture; spills in bytes a thread."""

    resources: KernelResources
    spill_stores: int
    spill_loads: int

    @property
    def registers_allowed(self) -> int:
        """What a block as large as the launch bounds allow (1024 without any) leaves a thread."""
        threads = self.resources.max_threads or _MOST_THREADS
        share = _REGISTERS_OF_MULTIPROCESSOR // threads // _ALLOCATION_UNIT * _ALLOCATION_UNIT
        return min(_MOST_REGISTERS, share)


@dataclass(frozen=True)
class Report:
    """What the compiler made of a source for one architecture; `problems` in words."""

    kernels: tuple[CheckedKernel, ...]
    problems: tuple[str, ...]


@cache
def _store() -> DiskStore:
    return DiskStore(Path(tempfile.gettempdir()) / f"ostinato-checks-{os.getuid()}")


def _compiled(plan: Plan) -> Compiled:
    kept = _store().load(plan.key)
    if kept is None or not is_current(kept.inputs):
        kept = compile_plan(plan)
        if plan.storable:
            _store().save(plan.key, kept)
    return kept


def check(wanted: KernelCheck, arch: str) -> Report:
    """Compiles for `arch` ("sm_90") and says what is wrong.  Raises CompileError, NoCudaError."""
    source, options = wanted.source, wanted.options
    options = replace(
        options, arch=options.arch or arch, extra=(*options.extra, "--ptxas-options=-v")
    )
    compiled = _compiled(plan_compilation(source, options, (0, 0)))
    spills = {m["name"]: m for m in _SPILLS.finditer(compiled.log)}
    problems = [f"the compiler warns: {m[0].strip()}" for m in _WARNING.finditer(compiled.log)]
    kernels = []
    for found in kernel_resources(compiled.data):
        name, spilled = found.name, spills.get(found.name)
        if spilled is None:
            problems.append(f"{name}: the assembler says nothing of its spills")
            continue
        kernel = CheckedKernel(found, int(spilled["stores"]), int(spilled["loads"]))
        kernels.append(kernel)
        allowed = wanted.spills.get(name, 0)  # in a frame of whole 8 bytes
        if kernel.spill_stores > allowed or found.frame > -(-allowed // 8) * 8:
            problems.append(
                f"{name} uses {found.frame} bytes of local memory; it spills "
                f"{kernel.spill_stores} bytes and loads {kernel.spill_loads} again"
            )
        if found.registers > kernel.registers_allowed:
            bound = found.max_threads
            problems.append(
                f"{name} uses {found.registers} registers; "
                + (f"its launch bounds of {bound}" if bound else "1024 threads (no launch bounds)")
                + f" leave {kernel.registers_allowed}"
            )
        most = wanted.registers.get(name)
        if arch == "sm_90" and most is not None and found.registers > most:
            problems.append(f"{name} uses {found.registers} registers, more than {most}")
        shared = found.shared + wanted.shared.get(name, 0)
        if shared > (LEAST_SHARED if arch in SMALL_ARCHITECTURES else _MOST_SHARED):
            problems.append(f"{name} uses {shared} bytes of shared memory")
        signature = source.signature(name)
        if signature is not None and signature.layout != found.parameters:
            problems.append(f"{name} takes {found.parameters}, its signature {signature.layout}")
    if not kernels:
        problems.append("it holds no kernel")
    missing = {*wanted.shared, *source.host} - {kernel.resources.name for kernel in kernels}
    if missing:
        problems.append(f"there is no kernel {', '.join(sorted(missing))}")
    return Report(tuple(kernels), tuple(problems))
