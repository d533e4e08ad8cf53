"""A library's products as operations, with a library that launches host kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.driver.api import KernelNodeParams
from ostinato.errors import NotAvailableError
from ostinato.models.cuda.products import LibraryProducts, MatrixProduct

PRODUCT = MatrixProduct(4, 6, 8, accumulate=True)


class FakeLibrary:
    """Launches through the driver, like a library that does not know this package.

    `calls`: how often it was asked.  `wrong_from`: from this call on it computes something else.
    `synchronizes`: it does what breaks a capture.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls, self.wrong_from, self.synchronizes = 0, 1 << 30, False

    def handle(self, driver: Any) -> Any:
        return self

    def plan(self, driver: Any, product: MatrixProduct, workspace: int) -> Any:
        library = self

        @ost.host_kernel("w: *const bf16, h: *const bf16, y: *f32, factor: f32")
        def multiply(_: Any, w: Any, h: Any, y: Any, factor: float) -> None:
            p = product
            values = [
                (part.astype(np.uint32) << 16).view(np.float32)
                for part in (h[: p.rows * p.inputs], w[: p.outputs * p.inputs])
            ]
            made = values[0].reshape(p.rows, -1) @ values[1].reshape(p.outputs, -1).T
            y[: made.size] += factor * made.reshape(-1)

        kernel = self.device.modules.get_or_compile(multiply, "multiply")

        class Planned:
            workspace_bytes = 64

            def __call__(self, stream: Any, **at: int) -> None:
                library.calls += 1
                if library.synchronizes:
                    driver.stream_synchronize(stream)
                factor = 2.0 if library.calls >= library.wrong_from else 1.0
                arguments = kernel.arguments(at["weight"], at["inputs"], at["out"], factor)
                config = ost.LaunchConfig(1, 1)
                driver.launch_kernel(stream, kernel.function, config, arguments)

        planned = Planned()
        planned.product = product  # type: ignore[attr-defined]
        return planned


def buffers(device: Device) -> dict[str, ost.Buffer]:
    rng = np.random.default_rng(2)
    small = rng.integers(-3, 4, (6, 8)).astype(np.float32)
    return {
        "weight": device.array((small.view(np.uint32) >> 16).astype(np.uint16)),
        "inputs": device.array(
            (np.ones((4, 8), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        ),
        "out": device.array(np.full((4, 6), 10, np.float32)),
        "workspace": device.zeros(64, "bytes"),
    }


def test_what_the_library_launched_is_launched_by_us(host_device: Device) -> None:
    library, given = FakeLibrary(host_device), buffers(host_device)
    products = LibraryProducts(host_device, host_device.driver, library)  # type: ignore[arg-type]
    product = products.product(PRODUCT)
    assert products.product(PRODUCT) is product
    (operation,) = product.operations("qkv", **given)
    assert isinstance(operation.params, KernelNodeParams)
    assert operation.name == "qkv"
    assert given["out"].range in (operation.reads or ())
    assert given["out"].range in (operation.writes or ())
    stream, asked = host_device.create_stream(), library.calls
    assert (given["out"].to_numpy(stream) == 10).all(), "nothing ran on these buffers yet"
    for _ in range(3):
        stream.submit(operation)
    bits = given["weight"].to_numpy(stream)
    sums = (bits.astype(np.uint32) << 16).view(np.float32).sum(axis=1)
    assert np.array_equal(given["out"].to_numpy(stream), np.tile(10 + 3 * sums, (4, 1)))
    assert library.calls == asked, "the library is not asked again"


def test_other_results_are_not_taken(host_device: Device) -> None:
    library = FakeLibrary(host_device)
    library.wrong_from = 2
    product = LibraryProducts(host_device, host_device.driver, library).product(PRODUCT)  # type: ignore[arg-type]
    with pytest.raises(NotAvailableError, match="gives another result when we launch"):
        product.operations("qkv", **buffers(host_device))


def test_what_cannot_be_captured_is_said(host_device: Device) -> None:
    library, given = FakeLibrary(host_device), buffers(host_device)
    product = LibraryProducts(host_device, host_device.driver, library).product(PRODUCT)  # type: ignore[arg-type]
    product.operations("qkv", **given)
    library.synchronizes = True
    with pytest.raises(NotAvailableError, match=r"qkv, .*capture"):
        product.operations("qkv", **given)
    library.synchronizes = False
    assert product.operations("qkv", **given), "the stream works again"
