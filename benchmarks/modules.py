"""First compile, disk hit in a new process, memory hit: ours, cuda.core's program cache, CuPy.

What bounds it: NVRTC takes some 20 to 40 ms for a small kernel, and loading its library 10 ms; a
disk hit has to read some 5 KiB and hash some 10; a memory hit is a dictionary look-up of 40 ns.

Each first compile and each disk hit is a process of its own, so nothing is warm but the operating
system's page cache.  Two times are taken of it, both medians over the processes:

  call   from the question to the kernel (or to its bytes, without a GPU), libraries imported
  total  the same with imports and opening the device, as a user's program waits for it

Without a GPU nothing can be loaded; then all stop at the compiled bytes, and CuPy is left out.

    python benchmarks/modules.py [--rounds 9] [--no-device]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = r"""
extern "C" __global__ void __launch_bounds__(256) scale(float* x, float factor, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
"""
MEMORY_ROUNDS = 20_000


def per_call(call, rounds: int) -> float:
    """The best of five means, in microseconds."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        best = min(best, (time.perf_counter() - start) / rounds)
    return best * 1e6


def probe_ours(begin: float, folder: str, with_device: bool) -> dict[str, float]:
    if with_device:
        import ostinato as ost

        modules = ost.open_device("cuda:0").modules
        start = time.perf_counter()
        modules.get_or_compile(SOURCE, "scale")
        end = time.perf_counter()
        compiled = modules.statistics().compiles
        hit = per_call(lambda: modules.get_or_compile(SOURCE, "scale"), MEMORY_ROUNDS)
    else:
        from ostinato.modules import CompileOptions, DiskStore, Source
        from ostinato.modules.compiler import compile_plan, plan_compilation

        store = DiskStore(Path(folder) / "kernels")
        start = time.perf_counter()
        plan = plan_compilation(Source(SOURCE), CompileOptions(), (9, 0))
        compiled = 0
        if store.load(plan.key) is None:
            store.save(plan.key, compile_plan(plan))
            compiled = 1
        end = time.perf_counter()
        hit = memory_hit_on_host()
    return {"call": end - start, "total": end - begin, "compiled": compiled, "memory": hit}


def memory_hit_on_host() -> float:
    import ostinato as ost

    @ost.host_kernel("x: *f32, factor: f32, n: u32")
    def scale(launch, x, factor, n):
        x[:n] *= factor

    source = ost.Source(SOURCE, host=[scale])
    with ost.open_device("host") as device:
        return per_call(lambda: device.modules.get_or_compile(source, "scale"), MEMORY_ROUNDS)


def probe_cuda_core(begin: float, folder: str, with_device: bool) -> dict[str, float]:
    from cuda.core import Device, Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

    arch = "sm_90"
    if with_device:
        device = Device()
        device.set_current()
        arch = f"sm_{device.arch}"
    with FileStreamProgramCache(Path(folder) / "core") as cache:

        def ask():
            options = ProgramOptions(arch=arch, std="c++17")
            code = Program(SOURCE, "c++", options).compile("cubin", cache=cache)
            return code.get_kernel("scale") if with_device else code.code

        before = len(list((Path(folder) / "core").rglob("*")))
        start = time.perf_counter()
        ask()
        end = time.perf_counter()
        compiled = int(len(list((Path(folder) / "core").rglob("*"))) > before)
        hit = per_call(ask, 50)  # it keeps no loaded kernels: a hit reads the file again
    return {"call": end - start, "total": end - begin, "compiled": compiled, "memory": hit}


def probe_cupy(begin: float, folder: str, with_device: bool) -> dict[str, float]:
    import cupy

    cupy.cuda.Device(0).use()
    cupy.cuda.Stream.null.synchronize()
    store = Path(folder) / "cupy"
    before = len(list(store.rglob("*")))

    def ask():
        return cupy.RawModule(code=SOURCE, options=("-std=c++17",)).get_function("scale")

    start = time.perf_counter()
    ask()
    end = time.perf_counter()
    compiled = int(len(list(store.rglob("*"))) > before)
    hit = per_call(ask, 50)
    return {"call": end - start, "total": end - begin, "compiled": compiled, "memory": hit}


PROBES = {"ours": probe_ours, "cuda.core": probe_cuda_core, "cupy": probe_cupy}


def run_probe(who: str, folder: str, with_device: bool) -> dict[str, float]:
    words = [sys.executable, __file__, "--probe", who, "--folder", folder]
    environment = {
        **os.environ,
        "OSTINATO_CACHE_DIR": folder,
        "CUPY_CACHE_DIR": str(Path(folder) / "cupy"),
        "CUDA_CACHE_DISABLE": "1",  # the driver's own cache of assembled PTX would flatter CuPy
    }
    answer = subprocess.run(
        words if with_device else [*words, "--no-device"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(f"{who} failed:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


def has_device() -> bool:
    import ostinato as ost
    from ostinato.errors import NotAvailableError

    try:
        ost.open_device("cuda:0").close()
    except NotAvailableError:
        return False
    return True


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-device", action="store_true")
    parser.add_argument("--probe", choices=PROBES)
    parser.add_argument("--folder", default="")
    chosen = parser.parse_args()
    if chosen.probe:
        print(json.dumps(PROBES[chosen.probe](begin, chosen.folder, not chosen.no_device)))
        return

    with_device = not chosen.no_device and has_device()
    who = ["ours", "cuda.core"]
    if with_device and importlib.util.find_spec("cupy"):
        who.append("cupy")
    first: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    second: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    for _ in range(chosen.rounds):  # in turns, so that a slow minute hits all of them
        for name in who:
            with tempfile.TemporaryDirectory() as folder:
                first[name].append(run_probe(name, folder, with_device))
                second[name].append(run_probe(name, folder, with_device))
    for name in who:
        assert all(r["compiled"] for r in first[name]), f"{name}: a first compile was none"
        assert not any(r["compiled"] for r in second[name]), f"{name}: a disk hit compiled"

    def median(rows: list[dict[str, float]], what: str) -> float:
        return statistics.median(row[what] for row in rows)

    table = {
        name: {
            "first_call_ms": 1e3 * median(first[name], "call"),
            "first_total_ms": 1e3 * median(first[name], "total"),
            "disk_call_ms": 1e3 * median(second[name], "call"),
            "disk_total_ms": 1e3 * median(second[name], "total"),
            "again_us": median(second[name], "memory"),
        }
        for name in who
    }
    known: dict[tuple[str, str], int] = {(SOURCE, "scale"): 1}
    question = (SOURCE, "scale")
    lookup = per_call(lambda: known[question], MEMORY_ROUNDS)
    print(f"{'':10} " + " ".join(f"{column:>15}" for column in table["ours"]))
    for name, row in table.items():
        print(f"{name:10} " + " ".join(f"{value:15.3f}" for value in row.values()))
        if name != "ours":
            ratios = [row[c] / table["ours"][c] for c in row]
            print(f"{'  / ours':10} " + " ".join(f"{ratio:14.2f}x" for ratio in ratios))
    over = table["ours"]["again_us"] - lookup
    print(f"memory hit over a dictionary look-up: {over:.3f} us (target: under 1)")
    print(
        json.dumps(
            {
                "benchmark": "modules",
                "device": with_device,
                "rounds": chosen.rounds,
                "dict_lookup_us": lookup,
                "memory_hit_over_dict_us": over,
                **table,
            }
        )
    )


if __name__ == "__main__":
    main()
