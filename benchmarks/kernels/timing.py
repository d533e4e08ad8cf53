"""One decode step as a CUDA graph, timed: whole, and kernel by kernel.

The floor: every weight once and the KV cache up to the position, over BANDWIDTH.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.kernels.rig import Gpu, Memory
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.lowering import CudaLaunch, lower, workspace_bytes
from ostinato.models.cuda.shapes import Tuning
from ostinato.models.plan import rope_table
from ostinato.models.program import (
    ACTIVE,
    FROM_STATE,
    OPTIONS,
    SAMPLE,
    STATE,
    STOP_TOKENS,
    Bound,
    decode_program,
)

BANDWIDTH = 3.05e12  # bytes a second, measured on one H100 80GB reading 2 GiB


class StepBench:
    """Random weights and all buffers of one shape on a GPU."""

    def __init__(
        self, gpu: Gpu, config: LlamaConfig, *, sequences: int = 1, context: int = 2048
    ) -> None:
        self.gpu, self.config, self.sequences, self.context = gpu, config, sequences, context
        self.ring = 256
        c = config
        random = np.random.default_rng(0)
        noise = random.standard_normal(1 << 24, dtype=np.float32) * 0.02
        bits = (noise.view(np.uint32) >> 16).astype(np.uint16)
        self._noise = gpu.array(bits)
        self._shift = 0
        width = c.query_size + 2 * c.kv_size
        self.where: dict[str, Memory] = {"embed": self._noisy((c.vocabulary, c.hidden))}
        ones = np.ones(c.hidden, np.float32)
        for layer in range(c.layers):
            at = f"layers.{layer}."
            self.where[at + "attn_norm"] = gpu.array(ones)
            self.where[at + "wqkv"] = self._noisy((width, c.hidden))
            self.where[at + "wo"] = self._noisy((c.hidden, c.query_size))
            self.where[at + "mlp_norm"] = gpu.array(ones)
            self.where[at + "w_gate_up"] = self._noisy((2 * c.inner, c.hidden))
            self.where[at + "w_down"] = self._noisy((c.hidden, c.inner))
        self.where["final_norm"] = gpu.array(ones)
        if not c.tied_embeddings:
            self.where["head"] = self._noisy((c.vocabulary, c.hidden))
        self.where["cache"] = self._noisy(
            (c.layers, 2, sequences, c.kv_heads, context, c.head_size)
        )
        rows = max(sequences, 64)
        for name, count in (
            ("x", c.hidden),
            ("q", c.query_size),
            ("attended", c.query_size),
            ("inner", c.inner),
        ):
            self.where[name] = gpu.empty((rows, count), np.float32)
        for name in ("logits", "adjusted"):
            self.where[name] = gpu.empty((sequences, c.vocabulary), np.float32)
        self.where["history"] = gpu.array(np.zeros((sequences, context), np.int32))
        self.where["rope"] = gpu.array(rope_table(c, context))
        self.where["live"] = gpu.array(np.zeros((rows, 4), np.int32))
        self.where["rows"] = gpu.array(np.zeros((rows, 4), np.int32))
        self.where["chosen"] = gpu.array(np.zeros(rows, np.int32))
        self.where["state"] = gpu.array(np.zeros((sequences, 4), np.int32))
        self.where["options"] = gpu.array(np.zeros((sequences, OPTIONS.itemsize // 8), np.uint64))
        self.where["stops"] = gpu.array(np.full(STOP_TOKENS, -1, np.int32))
        self.where["ring"], self.ring_host = gpu.pinned(
            np.full((sequences, self.ring, 2), -1, np.int32)
        )
        self.where["workspace"] = gpu.array(np.zeros(1 << 24, np.uint8))

    def _noisy(self, shape: tuple[int, ...]) -> Memory:
        """Random bits of small normal numbers, not the same in any two matrices."""
        made = self.gpu.empty(shape, np.uint16)
        done = 0
        while done < made.nbytes:
            self._shift = (self._shift + 7_654_320) % (self._noise.nbytes // 2)
            size = min(self._noise.nbytes - self._shift, made.nbytes - done)
            self.gpu.copy(made.address + done, self._noise.address + self._shift, size)
            done += size
        return made

    def floor(self, rows: int, position: int) -> float:
        """µs."""
        return self.weight_bytes() / BANDWIDTH * 1e6 + (
            rows * (position + 1) * self.config.layers * 4 * self.config.kv_size / BANDWIDTH * 1e6
        )

    def weight_bytes(self, kernel: str | None = None) -> int:
        """Of a step, or of one launch of a kernel."""
        c = self.config
        sizes = {
            "norm_qkv_rope": (c.query_size + 2 * c.kv_size) * c.hidden * 2,
            "output_residual": c.hidden * c.query_size * 2,
            "norm_gate_up": 2 * c.inner * c.hidden * 2,
            "down_residual": c.hidden * c.inner * 2,
        }
        head = c.vocabulary * c.hidden * 2
        if kernel == "attention_block":
            return sizes["norm_qkv_rope"] + sizes["output_residual"]
        if kernel is not None:
            return {**sizes, "head": head}.get(kernel, 0)
        return c.layers * sum(sizes.values()) + head

    def set_position(self, rows: int, position: int, options: tuple[float, ...] = ()) -> None:
        """Every row decodes the next token of its sequence, from this position."""
        table = np.zeros((self.where["rows"].shape[0], 4), np.int32)
        table[:rows, 2] = np.arange(rows)
        table[:rows, 3] = ACTIVE | SAMPLE | FROM_STATE
        state = np.zeros(self.sequences, STATE)
        state["token"], state["position"], state["length"] = 1, position, position + 1
        chosen = np.zeros(self.sequences, OPTIONS)
        chosen["top_p"], chosen["limit"], chosen["repetition_penalty"] = 1.0, 1 << 30, 1.0
        if options:
            chosen["temperature"], chosen["top_p"], chosen["top_k"] = options
        self.gpu.write(self.where["rows"], table)
        # A step without `sample` goes on with this token.
        self.gpu.write(self.where["chosen"], np.ones(self.where["chosen"].shape, np.int32))
        self.gpu.write(self.where["state"], state.view(np.int32).reshape(-1, 4))
        self.gpu.write(self.where["options"], chosen.view(np.uint64).reshape(self.sequences, -1))

    def launches(self, rows: int, tuning: Tuning) -> tuple[CudaLaunch, ...]:
        need = workspace_bytes(self.config, rows=rows, context=self.context, tuning=tuning)
        assert need <= self.where["workspace"].nbytes
        program = decode_program(self.config)
        return lower(program, self.config, rows=rows, context=self.context, tuning=tuning)

    def submit(self, launches: Iterable[CudaLaunch], rows: int) -> None:
        sizes = {
            "rows": rows,
            "sequences": self.sequences,
            "context": self.context,
            "ring": self.ring,
        }
        for launch in launches:
            values: dict[str, Any] = {}
            for name, value in launch.arguments:
                if isinstance(value, Bound):
                    if value.layer is None:
                        value = self.where[value.name]
                    elif value.name == "cache":
                        value = self.where["cache"][value.layer]
                    else:
                        value = self.where[f"layers.{value.layer}.{value.name}"]
                elif isinstance(value, str):
                    value = sizes[value]
                values[name] = value
            self.gpu.launch(launch, values)

    def time_step(
        self, rows: int, tuning: Tuning, position: int, *, repeats: int = 60, rounds: int = 5,
        options: tuple[float, ...] = (),
    ) -> float:  # fmt: skip
        """µs of one replayed step, the position rising from `position` in each round."""
        launches = self.launches(rows, tuning)
        executable = self.gpu.capture(lambda: self.submit(launches, rows))
        try:
            return self.gpu.time(
                executable,
                repeats=repeats,
                rounds=rounds,
                before=lambda: self.set_position(rows, position, options),
            )
        finally:
            self.gpu.destroy(executable)

    def time_piece(self, rows: int, tuning: Tuning, position: int) -> float:
        """µs of a piece of a prompt: rows of sequence 0 from `position`, none of which samples."""
        program = decode_program(self.config, sampled=False)
        launches = lower(program, self.config, rows=rows, context=self.context, tuning=tuning)
        table = np.zeros((self.where["rows"].shape[0], 4), np.int32)
        table[:rows] = [
            (7 * i % self.config.vocabulary, position + i, 0, ACTIVE) for i in range(rows)
        ]
        self.gpu.write(self.where["rows"], table)
        executable = self.gpu.capture(lambda: self.submit(launches, rows))
        try:
            return self.gpu.time(executable, repeats=20)
        finally:
            self.gpu.destroy(executable)

    def profile(self, rows: int, tuning: Tuning, position: int) -> dict[str, dict[str, float]]:
        """By kernel: µs alone (its launches one after the other) and µs that it adds to a step.

        A step without `head` must do without `sample` as well, whose token would be anything, and
        its row then not active: so what `head` adds is what both do, less `sample`.
        """
        launches = self.launches(rows, tuning)
        whole = self.time_step(rows, tuning, position)
        found: dict[str, dict[str, float]] = {}
        for kernel in dict.fromkeys(one.kernel for one in launches):
            if kernel in ("embed", "advance"):
                continue
            own = [one for one in launches if one.kernel == kernel]
            embed = [one for one in launches if one.kernel == "embed"]
            times = -(-60 // len(own))
            graph = self.gpu.capture(lambda own=own, times=times: self.submit(own * times, rows))

            # Rows as they are in a step; no advance, so they stay.
            def before(embed: list[CudaLaunch] = embed) -> None:
                self.set_position(rows, position)
                self.submit(embed, rows)

            alone = self.gpu.time(graph, repeats=10, before=before) / (len(own) * times)
            self.gpu.destroy(graph)
            dropped = {kernel, "sample"} if kernel == "head" else {kernel}
            rest = [one for one in launches if one.kernel not in dropped]
            graph = self.gpu.capture(lambda rest=rest: self.submit(rest, rows))
            without = self.gpu.time(
                graph, repeats=40, before=lambda: self.set_position(rows, position)
            )
            self.gpu.destroy(graph)
            nbytes = self.weight_bytes(kernel)
            found[kernel] = {
                "launches": len(own),
                "alone_us": alone,
                "adds_us": (whole - without) / len(own),
                "floor_us": nbytes / BANDWIDTH * 1e6,
            }
        if {"head", "sample"} <= found.keys():
            found["head"]["adds_us"] -= found["sample"]["adds_us"]
        return found
