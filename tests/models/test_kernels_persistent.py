"""A step as one persistent kernel: where it can run, that it compiles clean, what it computes.

On the CPU by the emulator, all blocks at once; on a GPU where there is one.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.kernels.checks import cases
from benchmarks.kernels.emulator import Emulator
from benchmarks.kernels.persistent import CHECKED, WholeBench, check_shape, same_bits, step_launch
from ostinato.device import Device
from ostinato.driver.signature import Signature
from ostinato.models.config import LlamaConfig
from ostinato.models.kernels_cuda import lower
from ostinato.models.kernels_cuda_persistent import (
    DECODE_STEP,
    PersistentShape,
    persistent_shape,
    why_not,
)
from ostinato.models.program import decode_program
from ostinato.modules.compiler import compile_plan, plan_compilation
from ostinato.modules.cubin import kernel_resources

H100 = {"multiprocessors": 132, "compute_capability": (9, 0)}


def config_of(heads: int, kv_heads: int, head_size: int, **sizes: Any) -> LlamaConfig:
    values = {"hidden": heads * head_size, "layers": 2, "context_length": 8192, **sizes}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, head_size=head_size, **values)


# Parts over several warps, splits, idle blocks, odd sizes: what the shapes of a GPU have, in small.
EMULATED = {
    "tied, three splits": (
        config_of(3, 1, 64, inner=136, vocabulary=257, tied_embeddings=True),
        PersistentShape(9, 4, 192, 2, 2, 3, 16, shared=100_000),
    ),
    "parts, odd vocabulary": (
        config_of(8, 2, 32, hidden=328, inner=1000, vocabulary=301, layers=3),
        PersistentShape(17, 3, 320, 1, 1, 2, 32, shared=100_000),
    ),
    "head 16": (
        config_of(5, 1, 16, inner=48, vocabulary=33),
        PersistentShape(12, 4, 64, 4, 1, 1, 32, shared=100_000),
    ),
    "head 80, one layer": (
        config_of(2, 1, 80, inner=96, vocabulary=64, layers=1),
        PersistentShape(6, 4, 128, 1, 2, 3, 10, spread=1, under_way=2, shared=100_000),
    ),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
@pytest.mark.parametrize("name", EMULATED)
def test_a_step_agrees_with_numpy_on_the_emulator(name: str) -> None:
    config, shape = EMULATED[name]
    check_shape(Emulator(), config, shape, slots=2, context=70, every=3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_a_stopped_step_leaves_the_turns_of_the_exchange_as_they_are() -> None:
    config, shape = EMULATED["head 80, one layer"]
    bench = WholeBench(Emulator(), config, shape, slots=2, context=70)
    by_name = {case.name: case for case in cases(bench, 1)}
    for name in ("position 1", "stopped", "padding", "position 2", "no sample", "position 31"):
        before = bench.machine.read(bench.device["exchange"])
        bench.check_step(by_name[name])
        same = (bench.machine.read(bench.device["exchange"]) == before).all()
        assert same == (name in ("stopped", "padding"))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["135M", "1B"])
def test_the_kernel_compiles_without_warnings(name: str, arch: str) -> None:
    config = replace(CHECKED[name], layers=30)
    shape = persistent_shape(config, **H100)
    assert shape is not None
    launch = step_launch(config, shape, 2048)
    options = replace(launch.options, arch=arch)
    made = compile_plan(plan_compilation(launch.source, options, (9, 0)))
    assert made.log == ""
    (kernel,) = (k for k in kernel_resources(made.data) if k.name == DECODE_STEP)
    assert kernel.parameters == Signature.parse(launch.signature).layout
    assert kernel.registers * shape.threads <= 1 << 16


def test_it_is_one_cooperative_launch_of_a_step_that_samples() -> None:
    config = CHECKED["135M"]
    shape = persistent_shape(config, **H100)
    assert shape is not None
    (launch,) = lower(decode_program(config), config, rows=1, context=500, persistent=shape)
    assert launch.config.cooperative
    assert launch.config.grid == (132, 1, 1)
    assert [name for name, _ in launch.arguments] == [
        p.name for p in Signature.parse(launch.signature).parameters
    ]
    chain = lower(decode_program(config), config, rows=1, context=500)
    assert DECODE_STEP not in {one.kernel for one in chain}
    for rows, sampled in ((2, True), (1, False)):
        program = decode_program(config, sampled=sampled)
        launches = lower(program, config, rows=rows, context=500, persistent=shape)
        assert [one.kernel for one in launches] == [call.kernel for call in program]


@pytest.mark.parametrize(
    ("changes", "capability", "said"),
    [
        ({}, (8, 0), "8.0 has no bulk copies"),
        ({"heads": 256, "kv_heads": 256, "head_size": 16}, (9, 0), "256 heads are more than 132"),
        ({"inner": 65536}, (9, 0), "too little shared memory"),
    ],
)
def test_what_it_cannot_do_is_said(
    changes: dict[str, int], capability: tuple[int, int], said: str
) -> None:
    config = replace(CHECKED["135M"], **changes)
    machine = {"multiprocessors": 132, "compute_capability": capability}
    assert said in str(why_not(config, **machine))
    assert persistent_shape(config, **machine) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKED)
def test_a_step_agrees_with_numpy(cuda_device: Device, name: str) -> None:
    from tests.models.test_kernels_cuda import OnDevice

    properties = cuda_device.properties
    shape = persistent_shape(
        CHECKED[name],
        multiprocessors=properties.multiprocessors,
        compute_capability=properties.compute_capability,
    )
    if shape is None:  # the chain's tests are this GPU's
        assert properties.compute_capability < (9, 0)
        return
    machine = OnDevice(cuda_device)
    check_shape(machine, CHECKED[name], shape)
    bench = WholeBench(machine, CHECKED[name], shape, slots=3, context=150)
    same_bits(bench, next(iter(cases(bench, 1))), 50)
