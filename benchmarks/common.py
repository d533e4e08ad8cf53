"""Code that all benchmarks share: machine descriptions, medians, tables, result files.

A result file is `{out}/{benchmark}-{device}.json`; the same object, on one line, is the last line
on stdout.  Its keys: `schema`, `benchmark`, `ceiling` (the physical limits of the figures, as
numbers), `machine`, `settings`, `rows` (one record for each line of the table), `skipped` (parts
that could not be measured here, with the reasons).
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ostinato as ost
from ostinato.bench.report import Result, machine

ROOT = Path(__file__).resolve().parent


def options(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of result files")
    parser.add_argument("--device", default="cuda:0", help='"cuda:0", or "host" for a dry run')
    parser.add_argument("--quick", action="store_true", help="tiny counts: shows that it runs")
    return parser


# ----------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Measured:
    """Statistics of the times of one thing, in microseconds."""

    median: float
    p90: float
    least: float
    count: int

    def fields(self, prefix: str = "") -> dict[str, float]:
        """Returns the fields of a row: `{prefix}median_us`, `{prefix}p90_us`, …"""
        return {
            f"{prefix}median_us": round(self.median, 3),
            f"{prefix}p90_us": round(self.p90, 3),
            f"{prefix}min_us": round(self.least, 3),
            f"{prefix}count": self.count,
        }


def measured(nanoseconds: Sequence[int]) -> Measured:
    """Returns median, 90th percentile and minimum of samples in nanoseconds."""
    ordered = sorted(nanoseconds)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return Measured(statistics.median(ordered) / 1e3, p90 / 1e3, ordered[0] / 1e3, len(ordered))


def torch_with_cuda(device: str) -> Any:
    """Returns torch if it is installed and has a CUDA device; else prints the reason, and returns
    None."""
    try:
        import torch
    except ImportError as error:
        print(f"torch is not installed: {error}")
        return None
    if not torch.cuda.is_available() or not device.startswith("cuda"):
        print("torch has no CUDA device here: nothing is measured")
        return None
    return torch


# ------------------------------------------------------------------------------------------ output


def table(title: str, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Formats a table as plain text, with numbers aligned to the right."""
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max([len(n), *(len(line[i]) for line in cells)]) for i, n in enumerate(columns)]
    right = [any(isinstance(row.get(n), int | float) for row in rows) for n in columns]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)
        ).rstrip()

    return "\n".join([title, "", line(columns), *map(line, cells), ""])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def emit(
    benchmark: str,
    device: ost.Device,
    out: Path,
    *,
    ceiling: Mapping[str, object],
    settings: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
    skipped: Mapping[str, str],
    summary: Mapping[str, object] | None = None,
) -> Path:
    """Writes the result file, prints its path, and prints the result as the last line."""
    result = Result(benchmark, ceiling, summary or {}, machine(device), settings, rows, skipped)
    path = result.write(out)
    for name, why in skipped.items():
        print(f"not measured: {name}: {why}")
    print(f"results: {path}")
    print(result.line(), flush=True)
    return path


# ------------------------------------------------------------------------------- what is measured

CELL = 256
"""The number of floats that one kernel reads and writes, so few that the launch dominates."""
BLOCK = 256

CUDA = r"""
extern "C" __global__ void blend(const float* a, const float* b, float* out, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 0.5f * a[i] + 0.5f * b[i];
}
extern "C" __global__ void count(unsigned long long* counter, unsigned long long by) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *counter += by;
}
"""


@ost.host_kernel("a: *const f32, b: *const f32, out: *out f32, n: u32")
def blend(launch, a, b, out, n):
    out[:n] = np.float32(0.5) * a[:n] + np.float32(0.5) * b[:n]


@ost.host_kernel("counter: *u64, by: u64")
def count(launch, counter, by):
    counter[0] += np.uint64(by)


SOURCE = ost.Source(cuda=CUDA, host=[blend, count], name="benchmarks")


class Chain:
    """`length` dependent kernels: each makes cell i+1 of an arena, half of cell i and half of a
    second input.

    Inputs are random; halving is exact, so NumPy gives the same bits (`check`).
    """

    def __init__(self, device: ost.Device, length: int) -> None:
        rng = np.random.default_rng(7)
        self.device, self.length = device, length
        self.config = ost.LaunchConfig(grid=1, block=BLOCK)
        self.kernel = device.modules.get_or_compile(SOURCE, "blend")
        self._first = rng.uniform(1, 2, CELL).astype(np.float32)
        self._other = rng.uniform(1, 2, CELL).astype(np.float32)
        self.arena = self.new_arena()
        self.other = device.array(self._other)
        self._operands: dict[int, list[tuple[object, ...]]] = {}
        self._expected = self._first
        for _ in range(length):
            self._expected = np.float32(0.5) * self._expected + np.float32(0.5) * self._other

    def new_arena(self) -> ost.Buffer:
        """Makes the memory of all cells: the first has the input, the others zeros."""
        cells = np.zeros((self.length + 1, CELL), np.float32)
        cells[0] = self._first
        return self.device.array(cells)

    def submit(self, stream: ost.Stream, arena: ost.Buffer | None = None) -> None:
        """Launches the kernels on a stream, eagerly or into the capture that is active there."""
        for operands in self.operands(self.arena if arena is None else arena):
            ost.launch(stream, self.kernel, self.config, *operands)

    def operands(self, arena: ost.Buffer) -> list[tuple[object, ...]]:
        """Returns each kernel's arguments, which are made once for each arena, as in a program."""
        known = self._operands.get(arena.address)
        if known is None:
            cells = list(arena)
            known = [(cells[i], self.other, cells[i + 1], CELL) for i in range(self.length)]
            self._operands[arena.address] = known
        return known

    def check(self, what: str, stream: ost.Stream, arena: ost.Buffer | None = None) -> None:
        """Checks the last cell, and clears it for the next run."""
        last = (self.arena if arena is None else arena)[self.length]
        if not np.array_equal(last.to_numpy(stream), self._expected):
            raise AssertionError(f"{what}: the last cell of {self.length} is wrong")
        ost.fill(stream, last, 0)
        stream.synchronize()


# --------------------------------------------------------------------------------------- C beside


def build_c(source: str) -> ctypes.CDLL:
    """Compiles C to a shared library (gcc -O2).  Raises RuntimeError with the compiler's output."""
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        code.write_text(source, encoding="utf-8")
        try:
            answer = subprocess.run(
                ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, code],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise RuntimeError(f"no C compiler: {error}") from error
        if answer.returncode:
            raise RuntimeError(f"gcc: {answer.stderr.strip()}")
        return ctypes.CDLL(str(library))


def address_of_function(library: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """Returns a C function's address, to pass to other C functions."""
    return ctypes.cast(library[name], ctypes.c_void_p)


def optional(skipped: dict[str, str], name: str, make: Callable[[], object]) -> object | None:
    """Returns the result of `make`, or None if it fails, with the reason in `skipped`, so that a
    missing library does not end a benchmark.  AssertionError, a wrong answer, propagates."""
    try:
        return make()
    except AssertionError:
        raise
    except Exception as error:
        skipped[name] = f"{type(error).__name__}: {error}"
        return None


def call_times(
    torch: Any, ways: Mapping[str, Callable[..., Any]], args: Sequence[Any], turns: int, calls: int
) -> dict[str, float]:
    """Times whole calls with the wait for the GPU at their end, each way `calls` times in a turn.
    Returns medians in microseconds.  The way "compiled" is what torch.compile has made."""
    times: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, call in ways.items():
            for _ in range(calls):
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                if way == "compiled":
                    torch.compiler.cudagraph_mark_step_begin()
                call(*args)
                torch.cuda.synchronize()
                times[way].append(time.perf_counter_ns() - start)
    return {way: statistics.median(found) / 1e3 for way, found in times.items()}


def of_graphed(step: Any, us: Mapping[str, float]) -> dict[str, object]:
    """Returns what the row of a graphed function says: the times of all ways, in microseconds, its
    own as a part of eager's, how often it was captured and replayed, and how each key runs."""
    counts = step.statistics()
    how = [_portable(f"{k.words}: {k.decision} {k.reason}")[:700] for k in counts.keys]
    return {
        **{f"{way}_us": round(value, 1) for way, value in us.items()},
        "of_eager": round(us["graphed"] / us["eager"], 3),
        "captures": counts.captures,
        "replays": counts.replays,
        "eager": counts.eager,
        "how": "; ".join(how),
    }


def _portable(text: str) -> str:
    """Returns a text without the folders of this machine."""
    return re.sub(r"[^\s,;]*/site-packages/", "", text.replace(f"{ROOT.parent}/", ""))


def summary_of_graphed(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Returns the summary of rows of `of_graphed` with `answers`, counts by how they compare."""
    parts = [row["of_eager"] for row in rows if row["replays"]]
    return {
        "works": len(rows),
        "right": sum({*row["answers"]} <= {"right", "close"} for row in rows),
        "replayed": len(parts),
        "times_eager_median": round(1 / statistics.median(parts), 2) if parts else None,
    }
