"""CPU cost of one eager launch: ours beside C, cuda.bindings, cuda.core, CuPy and PyTorch.

All launch the same tiny kernel with four arguments, three of them pointers, on random inputs;
PyTorch adds two vectors of the same size into a third.  Lower bound: the driver's own
`cuLaunchKernelEx` (`C`: timed inside C, with everything prepared).  Each call is timed by itself,
with a wait after every 16, so that none finds the launch queue full.  All take turns, and the
answers of each are compared with NumPy.

Ours: `launch` takes a buffer or number for each argument and packs them, as users call it; `submit`
runs an operation that was prepared before, as the decoder does without graphs.

    python -m benchmarks.launch_cost [--out DIR] [--device cuda:0|host] [--quick]

The last line is one JSON object.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial

import ostinato as ost
from benchmarks import common
from benchmarks.common import BLOCK, CELL, SOURCE, Chain, Measured, measured
from benchmarks.replay_cost import CLoop, Contender, python_contender
from ostinato.driver.api import KernelNodeParams
from ostinato.driver.cuda.launch import launch_block

CALLS, TURNS, BURST = 2000, 5, 16

C_LAUNCH = r"""
typedef int (*launch_kernel)(const void* config, void* function, void** params, void** extra);
struct Prepared { launch_kernel call; const void* config; void* function; void** params; };

int launch(void* prepared, void* stream) {  /* the stream is in the config */
    const struct Prepared* p = prepared;
    return p->call(p->config, p->function, p->params, 0);
}
"""


class _Prepared(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("call", "config", "function", "params"))


class Subject:
    """The kernel and its operands, in the form of each contender."""

    def __init__(self, device: ost.Device) -> None:
        self.device = device
        self.stream = device.create_stream()
        self.chain = Chain(device, 1)
        self.kernel, self.config = self.chain.kernel, self.chain.config
        cells = self.chain.arena
        self.operands = (cells[0], self.chain.other, cells[1], CELL)
        self.prepared = ost.prepare(self.kernel, self.config, *self.operands)


def contenders(subject: Subject, skipped: dict[str, str]) -> list[Contender]:
    """Makes all contenders that can run here; C comes first."""
    stream = subject.stream
    wait = stream.synchronize
    found: list[object] = []
    if cuda := subject.device.capabilities.source_language == "cuda":
        found.append(common.optional(skipped, "C", lambda: _c(subject)))
    else:
        skipped["C, cuda.bindings, cuda.core, CuPy, PyTorch"] = "no GPU"
    launch = partial(ost.launch, stream, subject.kernel, subject.config, *subject.operands)
    submit = partial(stream.submit, subject.prepared)
    found.append(python_contender("ostinato, submit", submit, wait))
    found.append(python_contender("ostinato, launch", launch, wait))
    others: dict[str, Callable[[Subject], Contender]] = {
        "cuda.bindings": _bindings,
        "cuda.core": _cuda_core,
        "CuPy": _cupy,
        "PyTorch": _torch,
    }
    for name, make in others.items() if cuda else ():
        found.append(common.optional(skipped, name, partial(make, subject)))
    return [one for one in found if isinstance(one, Contender)]


def _c(subject: Subject) -> Contender:
    params = subject.prepared.params
    assert isinstance(params, KernelNodeParams)
    block = launch_block(params.config, subject.stream.handle, None, params.arguments)
    libcuda, library = ctypes.CDLL("libcuda.so.1"), common.build_c(C_LAUNCH)
    call = common.address_of_function(libcuda, "cuLaunchKernelEx")
    made = _Prepared(call, ctypes.addressof(block.memory), params.function, block.params)
    launch = common.address_of_function(library, "launch")
    wait = common.address_of_function(libcuda, "cuStreamSynchronize")
    keep = (block, made, libcuda, library)
    handle = subject.stream.handle
    return CLoop().contender("C", launch, wait, ctypes.addressof(made), handle, keep)


def _bindings(subject: Subject) -> Contender:
    from cuda.bindings import driver

    a, b, out, n = subject.operands
    values = (a.address, b.address, out.address, n)
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    function = driver.CUfunction(subject.kernel.function)
    on = driver.CUstream(subject.stream.handle)
    launch = partial(
        driver.cuLaunchKernel, function, 1, 1, 1, BLOCK, 1, 1, 0, on, (values, kinds), 0
    )
    return python_contender("cuda.bindings", launch, subject.stream.synchronize)


def _cuda_core(subject: Subject) -> Contender:
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    owner = Device(0)
    owner.set_current()
    on = owner.create_stream()
    arch = "sm_" + "".join(map(str, owner.compute_capability))
    program = Program(SOURCE.cuda, "c++", ProgramOptions(std="c++17", arch=arch))
    kernel = program.compile("cubin").get_kernel("blend")
    a, b, out, n = subject.operands
    values = (a.address, b.address, out.address, ctypes.c_uint(n))
    config = LaunchConfig(grid=1, block=BLOCK)
    return python_contender(
        "cuda.core", partial(launch, on, config, kernel, *values), on.sync, (kernel, owner)
    )


def _cupy(subject: Subject) -> Contender:
    import cupy

    kernel = cupy.RawModule(code=SOURCE.cuda, options=("-std=c++17",)).get_function("blend")
    a, b, out, n = (cupy.asarray(x) if isinstance(x, ost.Buffer) else x for x in subject.operands)
    on = cupy.cuda.Stream(non_blocking=True)
    on.use()
    values = (a, b, out, cupy.uint32(n))
    return python_contender("CuPy", partial(kernel, (1,), (BLOCK,), values), on.synchronize, kernel)


def _torch(subject: Subject) -> Contender:
    import torch

    a, b, out = (torch.as_tensor(x, device="cuda:0") for x in subject.operands[:3])
    torch.lerp(a, b, 0.5, out=out)
    torch.cuda.synchronize()
    on = torch.cuda.ExternalStream(subject.stream.handle)
    torch.cuda.set_stream(on)
    return python_contender("PyTorch", partial(torch.lerp, a, b, 0.5, out=out), on.synchronize)


def main(argv: Sequence[str] | None = None) -> int:
    options = common.options(__doc__).parse_args(argv)
    calls, turns = (BURST, 1) if options.quick else (CALLS, TURNS)
    skipped: dict[str, str] = {}
    with ost.open_device(options.device) as device:
        subject = Subject(device)
        found = contenders(subject, skipped)
        for contender in found:
            contender.bursts(BURST * 4, BURST)  # warm
            subject.chain.check(contender.name, subject.stream)
        for _ in range(turns):
            for contender in found:
                contender.calls.extend(contender.bursts(calls, BURST))
        rows: list[dict[str, object]] = []
        floor: Measured | None = None
        for contender in found:
            one = measured(contender.calls)
            floor = one if contender.name == "C" else floor
            times = round(one.median / floor.median, 2) if floor else None
            rows.append({"launched by": contender.name, **one.fields(), "times_c": times})
        columns = ("launched by", "median_us", "p90_us", "min_us", "times_c")
        print(common.table(f"One eager launch, {device.properties.name}", rows, columns))
        common.emit(
            "launch_cost",
            device,
            options.out,
            ceiling={
                "what": "cuLaunchKernelEx timed inside C, median, microseconds",
                "us": floor.median if floor else None,
            },
            settings={"turns": turns, "calls": calls, "arguments": len(subject.operands)},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
