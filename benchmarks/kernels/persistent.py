"""The persistent step (`kernels/persistent.cu`): checked against NumPy as a whole, and timed.

    python -m benchmarks.kernels.persistent [--shapes 135M,1B] [--skip-checks]

One launch does what the program's calls do, so a step is checked by what it leaves: logits,
residual, cache, state, ring.  Keys and values are rounded to bfloat16 in the reference too, after
each layer's projection, as the cache holds them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from benchmarks.kernels.checks import Bench, Case, Machine, cases, from_bf16, to_bf16
from ostinato.models.config import LlamaConfig
from ostinato.models.kernels_cuda import CudaLaunch, lower
from ostinato.models.kernels_cuda_persistent import (
    PersistentShape,
    exchange_words,
    persistent_shape,
    why_not,
)
from ostinato.models.program import ACTIVE, decode_program

LIMIT = 1e-3
"""Relative error of logits and residual: float32 sums, and keys and values that are rounded to the
other neighbour."""


def _config(heads: int, kv_heads: int, head_size: int, **sizes: Any) -> LlamaConfig:
    values = {"hidden": heads * head_size, "layers": 2, "context_length": 8192, **sizes}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, head_size=head_size, **values)


_AFTER_LOGITS = ("sample", "advance")
_LEFT = ("live", "x", "logits", "cache", "chosen", "state", "ring")


class WholeBench(Bench):
    """A model, and its steps of one row as one launch."""

    def __init__(
        self, machine: Machine, config: LlamaConfig, shape: PersistentShape, *, slots: int,
        context: int, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(machine, config, max_rows=1, slots=slots, context=context, seed=seed)
        self.device["exchange"] = machine.array(np.zeros(exchange_words(config, shape), np.uint32))
        self.step = step_launch(config, shape, context)

    def check_step(self, case: Case) -> dict[str, float]:
        """Runs one step; the largest error of what it leaves, by buffer.  Raises AssertionError."""
        self.set_case(case)
        old = {name: self.read(name) for name in _LEFT}
        program = decode_program(self.config)
        for call in program:
            if call.kernel not in _AFTER_LOGITS:
                self._run_host(call, 1)
            if call.kernel == "norm_qkv_rope":
                self.host["cache"][...] = from_bf16(to_bf16(self.host["cache"]))
        self.launch(self.step, 1)
        self.machine.synchronize()
        errors = {}
        active = bool(self.host["live"][0, 3] & ACTIVE)
        for name in _LEFT:
            if name == "chosen":  # from the device's own logits
                for call in program:
                    if call.kernel in _AFTER_LOGITS:
                        self._run_host(call, 1)
            where = f"{case.name}: {name}"
            new = self.read(name)
            if not active and name in ("x", "logits", "cache", "chosen"):
                assert np.array_equal(new, old[name], equal_nan=True), f"{where}: written"
                self.host[name][...] = new
                continue
            errors[name] = self._compare(name, old[name], new, 1, LIMIT, where)
        return errors


def step_launch(config: LlamaConfig, shape: PersistentShape, context: int) -> CudaLaunch:
    (launch,) = lower(decode_program(config), config, rows=1, context=context, persistent=shape)
    return launch


def check_shape(
    machine: Machine, config: LlamaConfig, shape: PersistentShape, *, slots: int = 3,
    context: int = 150, every: int = 1,
) -> dict[str, float]:  # fmt: skip
    """All cases of one row; the largest error of each buffer."""
    bench = WholeBench(machine, config, shape, slots=slots, context=context)
    worst: dict[str, float] = {}
    for case in list(cases(bench, 1))[::every]:
        for name, error in bench.check_step(case).items():
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def same_bits(bench: WholeBench, case: Case, times: int) -> None:
    """One step again and again from the same state leaves the same bits."""
    first: Any = None
    for _ in range(times):
        bench.set_case(case)
        bench.launch(bench.step, 1)
        bits = [
            bench.machine.read(bench.device[name]).tobytes() for name in ("logits", "x", "cache")
        ]
        first = first or bits
        assert bits == first, "a step differs between repeats"


def main() -> int:
    from benchmarks.kernels.persistent_timing import PersistentTiming
    from benchmarks.kernels.rig import Gpu
    from ostinato.bench.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="135M,1B", help="shapes to time")
    parser.add_argument("--skip-checks", action="store_true")
    chosen = parser.parse_args()
    gpu = Gpu()
    machine = {"multiprocessors": gpu.multiprocessors, "compute_capability": gpu.capability}
    if not chosen.skip_checks:
        for name, config in CHECKED.items():
            shape = persistent_shape(config, **machine)
            if shape is None:
                print(f"{name}: {why_not(config, **machine)}")
                continue
            errors = check_shape(gpu, config, shape)
            print(f"ok {name:18}", " ".join(f"{k} {v:.1e}" for k, v in errors.items() if v))
            gpu.free_all()
    for name in chosen.shapes.split(","):
        shape = persistent_shape(SHAPES[name], **machine)
        if shape is None:
            print(f"{name}: {why_not(SHAPES[name], **machine)}")
            continue
        timing = PersistentTiming(gpu, SHAPES[name])
        for position, us in zip((20, 500), timing.time(shape, (20, 500)), strict=True):
            print(f"{name:5} at {position:4}: {us:8.1f} us", flush=True)
            for span, cycles in timing.spans(shape, position).items():
                print(f"      {span:18} cycles {cycles}")
        gpu.free_all()
    return 0


# Head sizes 16 to 128, grouped heads 1 to 8, odd vocabularies, widths that fill no tile.
CHECKED = {
    "head 128, group 4": _config(8, 2, 128, inner=1432, vocabulary=1003),
    "group 8": _config(8, 1, 64, hidden=328, inner=264, vocabulary=301),
    "group 1": _config(4, 4, 32, inner=88, vocabulary=131),
    "head 80": _config(2, 1, 80, inner=96, vocabulary=64),
    "head 16": _config(5, 1, 16, inner=48, vocabulary=33),
    "135M": _config(9, 3, 64, inner=1536, vocabulary=49152, tied_embeddings=True),
    "1B": _config(32, 8, 64, inner=8192, vocabulary=8191, layers=1),
}


if __name__ == "__main__":
    sys.exit(main())
