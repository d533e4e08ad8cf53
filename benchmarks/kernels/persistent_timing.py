"""Times the persistent step as a graph of one node, and shows where its blocks spend their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.kernels.persistent import step_launch
from benchmarks.kernels.rig import Gpu
from benchmarks.kernels.timing import StepBench
from ostinato.models.config import LlamaConfig
from ostinato.models.kernels_cuda import CudaLaunch
from ostinato.models.kernels_cuda_persistent import PersistentShape, exchange_words
from ostinato.modules import CompileOptions

KINDS = ("attn_norm", "wqkv", "wo", "mlp_norm", "w_gate_up", "w_down")
# What a block does between two stamps of persistent.cu, in each layer.
SPANS = (
    "norm, qkv", "attention", "take attended", "output", "take middle", "norm, gate up",
    "take inner", "down",
)  # fmt: skip


class PersistentTiming(StepBench):
    """`StepBench` with the layers' weights of one kind in one buffer, and the exchange."""

    def __init__(self, gpu: Gpu, config: LlamaConfig, *, context: int = 2048) -> None:
        super().__init__(gpu, config, slots=1, context=context)
        for kind in KINDS:
            parts = [self.where[f"layers.{layer}.{kind}"] for layer in range(config.layers)]
            whole = gpu.empty((config.layers, *parts[0].shape), parts[0].dtype)
            for layer, part in enumerate(parts):
                gpu.copy(whole[layer].address, part.address, part.nbytes)
            self.where[kind] = whole

    def step(
        self, shape: PersistentShape, *, stamps: int = 0, limit: int | None = None
    ) -> CudaLaunch:
        """The launch, with a zeroed exchange of its own."""
        made = step_launch(self.config, shape, self.context)
        defines = dict(made.options.defines)
        if stamps:
            defines["PERSISTENT_PROFILE"] = str(stamps)
        if limit:
            defines["PERSISTENT_LIMIT"] = str(limit)
        words = exchange_words(self.config, shape) + 2 * stamps * shape.blocks
        self.where["exchange"] = self.gpu.array(np.zeros(words, np.uint32))
        return replace(made, options=CompileOptions(defines=tuple(defines.items())))

    def time(
        self, shape: PersistentShape, positions: Sequence[int], *, repeats: int = 60,
        rounds: int = 5, limit: int | None = None,
    ) -> list[float]:  # fmt: skip
        """Median µs of a replayed step, the position rising from each of `positions`."""
        launch = self.step(shape, limit=limit)
        executable = self.gpu.capture(lambda: self.submit([launch], 1))
        try:
            return [
                self.gpu.time(
                    executable,
                    repeats=repeats,
                    rounds=rounds,
                    before=lambda at=position: self.set_position(1, at),  # type: ignore[misc]
                )
                for position in positions
            ]
        finally:
            self.gpu.destroy(executable)

    def spans(self, shape: PersistentShape, position: int) -> dict[str, Any]:
        """Cycles between stamps: the median over blocks of the mean over layers, and the extremes
        over blocks."""
        layers = self.config.layers
        stamps = 10 * layers + 8
        launch = self.step(shape, stamps=stamps)
        self.set_position(1, position)
        for _ in range(3):
            self.submit([launch], 1)
        self.gpu.synchronize()
        words = self.gpu.read(self.where["exchange"])[exchange_words(self.config, shape) :]
        table = words.view(np.int64).reshape(shape.blocks, stamps).astype(np.float64)
        found: dict[str, Any] = {}
        steady = np.stack([table[:, 2 + 10 * n : 12 + 10 * n] for n in range(layers)], 1)
        for index, name in enumerate(SPANS):
            found[name] = _three((steady[:, :, index + 1] - steady[:, :, index]).mean(axis=1))
        found["take x"] = _three((steady[:, 1:, 0] - steady[:, :-1, 8]).mean(axis=1))
        found["a layer"] = _three((steady[:, -1, 0] - steady[:, 0, 0]) / (layers - 1))
        found["start"] = _three(table[:, 2] - table[:, 0])
        end = 2 + 10 * layers
        found["head: take x"] = _three(table[:, end] - table[:, end - 2])
        found["head"] = _three(table[:, end + 1] - table[:, end])
        found["block 0: keys"] = float(table[0, end + 2] - table[0, end + 1])
        found["block 0: advance"] = float(table[0, end + 3] - table[0, end + 2])
        found["all but the end"] = _three(table[:, end + 1] - table[:, 0])
        return found


def _three(values: np.ndarray) -> tuple[float, float, float]:
    return float(np.median(values)), float(values.min()), float(values.max())
