"""Where the kernels' checks run: on the emulator, some cases of small models, and on a GPU, all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from benchmarks.kernels import checks
from ostinato.device import Device
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda import lowering as kc
from ostinato.models.cuda import shapes
from ostinato.models.cuda.legal import problems_of
from tests.emulator.emulator import Emulator


class OnDevice:
    """A machine for the checks: the library's own device, modules and launches."""

    name = "device"

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.create_stream()
        self._kernels: dict[Any, Any] = {}

    def array(self, values: np.ndarray) -> Any:
        return self.device.array(values)

    def read(self, array: Any) -> np.ndarray:
        return self.device.to_numpy(array)

    def write(self, array: Any, values: np.ndarray) -> None:
        array.set(values, self.stream)
        self.synchronize()

    def launch(self, launch: kc.CudaLaunch, values: Mapping[str, Any]) -> None:
        key = (launch.source, launch.options, launch.kernel)
        kernel = self._kernels.get(key)
        if kernel is None:
            modules = self.device.modules
            kernel = modules.get_or_compile(launch.source, launch.kernel, options=launch.options)
            kernel.allow_shared(max(launch.config.shared, 1 << 15))
            self._kernels[key] = kernel
        arguments = [values[parameter.name] for parameter in launch.signature.parameters]
        # The checks compare bytes, and have arrays of one type for kernels of several.
        given = [a.view(dtype="bytes") if isinstance(a, ost.Buffer) else a for a in arguments]
        ost.launch(self.stream, kernel, launch.config, *given)

    def synchronize(self) -> None:
        self.stream.synchronize()


def require(machine: Any, config: LlamaConfig, rows: int, tuning: shapes.Tuning) -> None:
    """Skips on a GPU that has no clusters or warpgroups where the tuning has."""
    given: Any = {"shared": tuning.shared}
    assert problems_of(config, rows, tuning, **given) == ()
    if isinstance(machine, OnDevice):
        device = machine.device
        given["clusters"] = device.capabilities.clusters
        given["warpgroups"] = shapes.has_warpgroups(device.properties.compute_capability)
        if problems := problems_of(config, rows, tuning, **given):
            pytest.skip(f"no device for it: {problems[0]}")


def bench_on(machine: Any, config: LlamaConfig, rows: int, **options: Any) -> checks.Bench:
    """The kernels' checks on a machine; the emulator builds those of a step together."""
    given = {"sequences": 2, "context": 70, **options}
    for count, tuning in given.get("tunings", {}).items():
        require(machine, config, count, tuning)
    bench = checks.Bench(machine, config, max_rows=rows, **given)
    if isinstance(machine, Emulator):
        machine.expect(*bench.launches(rows))
    return bench


def check_cases(
    bench: checks.Bench, cases: Iterable[checks.Case], some: slice = slice(None, None, 2)
) -> None:
    """`some`: the cases that the emulator runs, which is slow."""
    for case in list(cases)[some if bench.machine.name == "emulator" else slice(None)]:
        bench.check(case)


def on_kernels(
    name: str, both: Iterable[Any] = (), *, emulator: Iterable[Any] = (), cuda: Iterable[Any] = (),
    slow: Iterable[Any] = (), sanitize: bool = True,
) -> pytest.MarkDecorator:  # fmt: skip
    """Cases of a test that takes `kernels`, a machine: on the emulator and on a GPU, or on one of
    them.  `slow`: those that are slow on the emulator."""
    both, slow = list(both), list(slow)
    marks = [pytest.mark.gpu, *([pytest.mark.sanitize] if sanitize else [])]
    cases = [
        pytest.param("emulator", one, id=f"emulator-{_text(one)}",
                     marks=pytest.mark.slow if one in slow else ())
        for one in (*both, *emulator)
    ]  # fmt: skip
    cases += [
        pytest.param("cuda", one, id=f"cuda-{_text(one)}", marks=marks) for one in (*both, *cuda)
    ]
    return pytest.mark.parametrize(("kernels", name), cases, indirect=["kernels"])


def _text(case: Any) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)
