"""Modules, functions and launches."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ostinato.driver.api import Driver, Image, KernelArguments, LaunchConfig, ParameterSlot
from ostinato.driver.signature import pack_untyped
from ostinato.errors import DriverError, Status
from tests.contract.kernels import KERNELS, Rig, load_image, refused


def test_entries_by_name(driver: Driver) -> None:
    module = driver.module_load(load_image(driver))
    assert set(driver.module_functions(module)) == set(KERNELS)
    function = driver.module_function(module, "add")
    assert driver.function_info(function).name == "add"
    with refused(Status.NOT_FOUND):
        driver.module_function(module, "subtract")
    driver.module_unload(module)


@pytest.mark.parametrize("image", [Image("cubin", b"no such thing"), Image("poem", b"roses")])
def test_images_that_cannot_be_read(driver: Driver, image: Image) -> None:
    with pytest.raises((DriverError, ValueError)):
        driver.module_load(image)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_layouts_are_as_the_signatures_say(rig: Rig, name: str) -> None:
    info = rig.driver.function_info(rig.functions[name])
    assert info.parameters == KERNELS[name].signature.layout
    assert info.max_threads_per_block >= 256


def test_structs_by_value(rig: Rig) -> None:
    value = struct.pack("<difd", 1.5, -7, 2.25, 1e100)[:24]
    value = struct.pack("<dif", 1.5, -7, 2.25) + struct.pack("<d", 1e100)
    out, letter = rig.zeros(24, np.uint8), rig.zeros(1, np.int8)
    rig.launch("copy_struct", -3, value, out, letter)
    assert rig.read(out, 24, np.uint8).tobytes() == value
    assert rig.values(letter, 1, np.int8) == [-3]


def test_numbers_of_every_size(rig: Rig) -> None:
    out = rig.zeros(6, np.float64)
    rig.launch("numbers", -100, 65535, -(2**31), 0.5, -(2**50), 1e-200, out)
    assert rig.values(out, 6, np.float64) == [-100, 65535, -(2**31), 0.5, -(2.0**50), 1e-200]


def test_values_without_a_signature(rig: Rig) -> None:
    x = rig.zeros(4)
    function = rig.functions["fill"]
    slots = rig.driver.function_info(function).parameters
    arguments = pack_untyped(slots, [x, 1.5, 4])
    rig.driver.launch_kernel(rig.stream, function, LaunchConfig(1, 32), arguments)
    assert rig.values(x, 4) == [1.5] * 4


def test_too_many_threads(rig: Rig) -> None:
    most = rig.driver.properties.max_threads_per_block
    params = rig.params("nothing")
    with refused(Status.INVALID_VALUE):
        rig.driver.launch_kernel(
            rig.stream, params.function, LaunchConfig(1, 2 * most), params.arguments
        )
    with refused(Status.INVALID_VALUE):
        rig.driver.launch_kernel(
            rig.stream, params.function, LaunchConfig(1, (1, 1, 128)), params.arguments
        )
    with refused(Status.INVALID_VALUE):
        rig.driver.launch_kernel(
            rig.stream, params.function, LaunchConfig((1, 1 << 17), 1), params.arguments
        )
    rig.launch("nothing")
    rig.driver.stream_synchronize(rig.stream)


def test_shared_memory_must_be_allowed(rig: Rig) -> None:
    driver, params = rig.driver, rig.params("nothing")
    wanted = 64 << 10
    if driver.properties.max_shared_per_block < wanted:
        pytest.skip("not that much shared memory here")
    with refused(Status.INVALID_VALUE):
        driver.launch_kernel(
            rig.stream, params.function, LaunchConfig(1, 32, wanted), params.arguments
        )
    driver.function_allow_shared(params.function, wanted)
    driver.launch_kernel(rig.stream, params.function, LaunchConfig(1, 32, wanted), params.arguments)
    driver.stream_synchronize(rig.stream)
    with refused(Status.INVALID_VALUE):
        driver.function_allow_shared(params.function, 1 << 30)


def test_occupancy(rig: Rig) -> None:
    function = rig.functions["nothing"]
    few = rig.driver.function_occupancy(function, 1024, 0)
    many = rig.driver.function_occupancy(function, 128, 0)
    assert 1 <= few <= many
    assert rig.driver.function_occupancy(function, 128, 32 << 10) <= many


def test_a_kernel_without_parameters(rig: Rig) -> None:
    rig.driver.launch_kernel(
        rig.stream, rig.functions["nothing"], LaunchConfig(2, 64), KernelArguments(b"", ())
    )
    rig.driver.stream_synchronize(rig.stream)


def test_one_packed_buffer(rig: Rig) -> None:
    """As cuBLAS launches: the whole parameter buffer at once."""
    x = rig.zeros(4)
    signature = KERNELS["fill"].signature
    arguments = signature.pack([x, 2.5, 4])
    packed = KernelArguments(arguments.data, arguments.layout, packed=True)
    rig.driver.launch_kernel(rig.stream, rig.functions["fill"], LaunchConfig(1, 32), packed)
    assert rig.values(x, 4) == [2.5] * 4


def test_arguments_that_do_not_fit(rig: Rig) -> None:
    if rig.driver.capabilities.source_language != "host":
        pytest.skip("CUDA reads what the function takes, and cannot check")
    wrong = KernelArguments(bytes(8), (ParameterSlot(0, 8),))
    with refused(Status.INVALID_VALUE):
        rig.driver.launch_kernel(rig.stream, rig.functions["fill"], LaunchConfig(1, 32), wrong)
