"""First compile, disk hit in a new process, memory hit: ours, cuda.core's program cache, CuPy.

Lower bounds: a disk hit reads some 5 KiB, authenticates them, and lets the driver load them; a
first compile loads NVRTC (10 ms) and runs it (20 to 40 ms for a small kernel); a memory hit is a
dictionary look-up of 40 ns.

Each first compile and each disk hit has a process of its own, so that only the operating system's
page cache is warm; the libraries take turns, so that a slow minute affects all of them.  Times are
medians over the processes, from the request of the kernel, with the device open and the libraries
imported:

  call      until the library returns its kernel
  loaded    until the code is on the GPU: cuFuncLoad for libraries that load at the first launch
  launched  until a first launch has finished; its answer is compared with NumPy, on random inputs
  total     the same from the start of the process

`again` is the same request in the same process, a memory hit; cuda.core keeps no loaded kernels,
and reads the file again.

With `--device host` nothing can be loaded: all stop at the compiled bytes, CuPy is left out, and
ours has a memory hit of the host driver.

    python -m benchmarks.modules [--out DIR] [--device cuda:0|host] [--quick]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# A probe runs this file in a new process, and must not import modules that it does not measure:
# only the standard library is imported at the top.

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256) scale(float* x, float factor, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
"""
N, BLOCK = 1000, 256
GRID = (N + BLOCK - 1) // BLOCK

PROCESSES = 7
SECONDS = 75.0
"""No round begins later than this, so that a slow machine measures fewer processes."""
AGAIN = 20_000
AGAIN_SLOW = 50

NAMES = {"ours": "ostinato", "cuda.core": "cuda.core", "cupy": "CuPy"}
STEPS = ("call", "loaded", "launched", "total")


def per_call(call: Callable[[], object], rounds: int) -> float:
    """Returns the smallest of five mean times of a call, in microseconds."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        best = min(best, (time.perf_counter() - start) / rounds)
    return best * 1e6


# ------------------------------------------------------------------------------------------ probes


class Clock:
    """The times of one probe in seconds: steps since the request, the total since `begin`."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.start = time.monotonic()
        self.times: dict[str, float] = {}

    def lap(self, step: str) -> None:
        now = time.monotonic()
        self.times[step] = now - self.start
        self.times["total"] = now - self.begin


class Operands:
    """Random inputs, and the expected result."""

    def __init__(self) -> None:
        import numpy as np

        dice = np.random.default_rng()
        self.x = dice.standard_normal(N).astype(np.float32)
        self.factor = np.float32(dice.uniform(1, 2))
        self.n = np.uint32(N)

    def check(self, answer: Any) -> None:
        import numpy as np

        np.testing.assert_array_equal(answer, self.x * self.factor)


class Loader:
    """cuFuncLoad, for libraries that leave loading to the first launch."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")

    def function(self, function: int) -> None:
        status = self.lib.cuFuncLoad(ctypes.c_void_p(function))
        assert status == 0, f"cuFuncLoad: {status}"

    def kernel(self, kernel: int) -> None:
        function = ctypes.c_void_p()
        status = self.lib.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(kernel))
        assert status == 0 and function.value, f"cuKernelGetFunction: {status}"
        self.function(function.value)

    def copy(self, call: Any, address: int, array: Any) -> None:
        """Calls cuMemcpyHtoD or cuMemcpyDtoH for device memory and an array."""
        device, host = ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data)
        pair = (device, host) if call is self.lib.cuMemcpyHtoD_v2 else (host, device)
        status = call(*pair, ctypes.c_size_t(array.nbytes))
        assert status == 0, f"copy: {status}"


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def probe_ours(begin: float, folder: Path, device_name: str) -> dict[str, float]:
    if device_name == "host":
        return probe_ours_bytes(begin, folder)
    import ostinato as ost

    operands = Operands()
    device = ost.open_device(device_name)
    stream, modules = device.create_stream(), device.modules
    x = device.array(operands.x)
    config, launch = ost.LaunchConfig(grid=GRID, block=BLOCK), ost.launch  # imported now
    clock = Clock(begin)
    kernel = modules.get_or_compile(SOURCE, "scale")
    clock.lap("call")
    clock.lap("loaded")  # the kernel is loaded already
    launch(stream, kernel, config, x, operands.factor, operands.n)
    stream.synchronize()
    clock.lap("launched")
    operands.check(x.to_numpy(stream))
    compiled = modules.statistics().compiles
    again = per_call(lambda: modules.get_or_compile(SOURCE, "scale"), AGAIN)
    return {**clock.times, "compiled": compiled, "again": again}


def probe_ours_bytes(begin: float, folder: Path) -> dict[str, float]:
    import ostinato as ost
    from ostinato.modules import CompileOptions, DiskStore
    from ostinato.modules.compiler import compile_plan, plan_compilation

    store = DiskStore(folder / "ours")
    clock = Clock(begin)
    plan = plan_compilation(ost.Source(SOURCE), CompileOptions(), (9, 0))
    compiled = 0
    if store.load(plan.key) is None:
        store.save(plan.key, compile_plan(plan))
        compiled = 1
    clock.lap("call")

    @ost.host_kernel("x: *f32, factor: f32, n: u32")
    def scale(launch: Any, x: Any, factor: Any, n: Any) -> None:
        x[:n] *= factor

    source = ost.Source(SOURCE, host=[scale])
    with ost.open_device("host") as device:
        again = per_call(lambda: device.modules.get_or_compile(source, "scale"), AGAIN)
    return {**clock.times, "compiled": compiled, "again": again}


def probe_cuda_core(begin: float, folder: Path, device_name: str) -> dict[str, float]:
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
    from cuda.core.utils import FileStreamProgramCache

    on_gpu = device_name != "host"
    store = folder / "core"
    arch = "sm_90"
    if on_gpu:
        operands, loader = Operands(), Loader()
        device = Device(int(device_name.partition(":")[2] or 0))
        device.set_current()
        arch = f"sm_{device.arch}"
        stream = device.create_stream()
        x = device.allocate(operands.x.nbytes, stream=stream)
        stream.sync()
        loader.copy(loader.lib.cuMemcpyHtoD_v2, int(x.handle), operands.x)
        config = LaunchConfig(grid=GRID, block=BLOCK)
    with FileStreamProgramCache(store) as cache:

        def ask() -> Any:
            options = ProgramOptions(arch=arch, std="c++17")
            code = Program(SOURCE, "c++", options).compile("cubin", cache=cache)
            return code.get_kernel("scale") if on_gpu else code.code

        before = files_in(store)
        clock = Clock(begin)
        kernel = ask()
        clock.lap("call")
        if on_gpu:
            loader.kernel(int(kernel.handle))
            clock.lap("loaded")
            launch(stream, config, kernel, x, operands.factor, operands.n)
            stream.sync()
            clock.lap("launched")
            answer = operands.x.copy()
            loader.copy(loader.lib.cuMemcpyDtoH_v2, int(x.handle), answer)
            operands.check(answer)
        compiled = int(files_in(store) > before)
        return {**clock.times, "compiled": compiled, "again": per_call(ask, AGAIN_SLOW)}


def probe_cupy(begin: float, folder: Path, device_name: str) -> dict[str, float]:
    import cupy

    operands, loader = Operands(), Loader()
    cupy.cuda.Device(int(device_name.partition(":")[2] or 0)).use()
    x = cupy.asarray(operands.x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Stream.null.synchronize()
    store = folder / "cupy"
    before = files_in(store)

    def ask() -> Any:
        return cupy.RawModule(code=SOURCE, options=("-std=c++17",)).get_function("scale")

    clock = Clock(begin)
    kernel = ask()
    clock.lap("call")
    loader.function(int(kernel.kernel.ptr))
    clock.lap("loaded")
    with stream:
        kernel((GRID,), (BLOCK,), (x, operands.factor, operands.n))
    stream.synchronize()
    clock.lap("launched")
    operands.check(cupy.asnumpy(x))
    compiled = int(files_in(store) > before)
    return {**clock.times, "compiled": compiled, "again": per_call(ask, AGAIN_SLOW)}


PROBES: dict[str, Callable[[float, Path, str], dict[str, float]]] = {
    "ours": probe_ours,
    "cuda.core": probe_cuda_core,
    "cupy": probe_cupy,
}


class ProbeError(Exception):
    """A probe's process failed; the message has the reason."""


def run_probe(who: str, folder: str, device_name: str) -> dict[str, float]:
    """Runs one probe in a process of its own, and returns its times.  Raises ProbeError."""
    words = ["--probe", who, "--folder", folder, "--device", device_name]
    environment = {
        **os.environ,
        "OSTINATO_CACHE_DIR": folder,
        "CUPY_CACHE_DIR": str(Path(folder) / "cupy"),
        "CUDA_CACHE_DISABLE": "1",  # the driver's own cache would favour libraries that load PTX
    }
    begin = time.monotonic()  # one clock for all processes of a machine
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.modules", *words, "--begin", repr(begin)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise ProbeError(answer.stderr.strip()[-400:] or f"exit status {answer.returncode}")
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


# --------------------------------------------------------------------------------------- measuring


class Samples:
    """The times measured by the processes of one library, by kind ("first", "disk")."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[dict[str, float]]] = {"first": [], "disk": []}

    def add(self, who: str, device_name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for kind, rows in self.by_kind.items():
                row = run_probe(who, folder, device_name)
                if bool(row["compiled"]) != (kind == "first"):
                    raise ProbeError(f"{kind}: compiled {row['compiled']} times")
                rows.append(row)

    def median(self, kind: str, step: str, scale: float) -> float | None:
        values = [row[step] for row in self.by_kind[kind] if step in row]
        return round(statistics.median(values) * scale, 4) if values else None


def measure(
    device_name: str, processes: int, skipped: dict[str, str]
) -> tuple[dict[str, Samples], int]:
    """Measures all installed libraries.  Returns the samples, and the number of rounds."""
    who = {"ours": Samples()}
    for name, module in (("cuda.core", "cuda"), ("cupy", "cupy")):
        if name == "cupy" and device_name == "host":
            skipped[NAMES[name]] = "it needs a GPU"
        elif importlib.util.find_spec(module) is None:
            skipped[NAMES[name]] = "not installed"
        else:
            who[name] = Samples()
    start, rounds = time.monotonic(), 0
    while rounds < processes and time.monotonic() - start < SECONDS:
        rounds += 1
        for name, samples in list(who.items()):
            try:
                samples.add(name, device_name)
            except ProbeError as error:
                if name == "ours":
                    raise SystemExit(f"ours cannot be measured: {error}") from None
                skipped[NAMES[name]] = str(error)
                del who[name]
    if rounds < processes:
        skipped["more processes"] = f"{rounds} of {processes} rounds took {SECONDS:.0f} s"
    return who, rounds


def ratios(row: dict[str, object], ours: dict[str, object]) -> dict[str, float]:
    """Returns the ratios of a library's times to ours, by column."""
    found = {}
    for column, value in row.items():
        own = ours.get(column)
        if isinstance(value, float) and isinstance(own, float) and own:
            found[column] = round(value / own, 2)
    return found


def rows_of(who: dict[str, Samples]) -> list[dict[str, object]]:
    """Returns a row for each library, in milliseconds; `again_us` in microseconds."""
    rows: list[dict[str, object]] = []
    for name, samples in who.items():
        row: dict[str, object] = {"library": NAMES[name]}
        for kind in ("first", "disk"):
            for step in STEPS:
                row[f"{kind}_{step}_ms"] = samples.median(kind, step, 1e3)
        row["again_us"] = samples.median("disk", "again", 1)
        row["processes"] = len(samples.by_kind["disk"])
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks import common

    options = common.options(__doc__).parse_args(argv)
    import ostinato as ost

    skipped: dict[str, str] = {}
    processes = 1 if options.quick else PROCESSES
    who, rounds = measure(options.device, processes, skipped)
    rows = rows_of(who)
    known: dict[tuple[str, str], int] = {(SOURCE, "scale"): 1}
    question = (SOURCE, "scale")
    lookup = per_call(lambda: known[question], AGAIN)
    ours = rows[0]
    over = {str(row["library"]): ratios(row, ours) for row in rows[1:]}
    step = "loaded" if ours["disk_loaded_ms"] is not None else "call"
    columns = [f"{kind}_{s}_ms" for kind in ("first", "disk") for s in STEPS]
    with ost.open_device(options.device) as device:
        name = device.properties.name
        print(common.table(f"A kernel, {name}", rows, ["library", *columns, "again_us"]))
        shown = [{"times ours": library, **values} for library, values in over.items()]
        print(common.table("Times as long as ours", shown, ["times ours", *columns, "again_us"]))
        common.emit(
            "modules",
            device,
            options.out,
            ceiling={
                "what": "a dictionary look-up with the same question, microseconds",
                "us": round(lookup, 4),
            },
            settings={"rounds": rounds, "processes": processes, "quick": options.quick},
            rows=rows,
            skipped=skipped,
            summary={
                "memory hit over a dictionary look-up, us (target: under 1)": round(
                    float(str(ours["again_us"])) - lookup, 4
                ),
                f"disk hit, until {step}, times ours (target: 1 or more)": {
                    library: values.get(f"disk_{step}_ms") for library, values in over.items()
                },
                "times ours": over,
            },
        )
    return 0


def probe() -> None:
    parser = argparse.ArgumentParser()
    for word in ("--probe", "--folder", "--device", "--begin"):
        parser.add_argument(word, required=True)
    chosen = parser.parse_args()
    answer = PROBES[chosen.probe](float(chosen.begin), Path(chosen.folder), chosen.device)
    print(json.dumps(answer))


if __name__ == "__main__":
    if "--probe" in sys.argv:
        probe()
    else:
        sys.exit(main())
