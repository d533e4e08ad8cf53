"""Times one decode step as a CUDA graph, whole and kernel by kernel.

The minimum time: the bytes of every weight and of the KV cache up to the position over BANDWIDTH.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.kernels.checks import resolved
from benchmarks.kernels.rig import Gpu, Memory
from ostinato.bench.random_weights import recipe_type
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.bricks import Formats, Packing, formats_of, matrix_bytes
from ostinato.models.cuda.lowering import CudaLaunch, lower, rounded_buffers, workspace_bytes
from ostinato.models.cuda.shapes import ROUNDED_CALLS, Tuning
from ostinato.models.layout import weight_shapes
from ostinato.models.plan import mask_words, rope_table
from ostinato.models.program import (
    ACTIVE,
    FROM_STATE,
    LOGPROBS,
    MOST_BIASES,
    OPTIONS,
    SAMPLE,
    STATE,
    STOP_TOKENS,
    decode_program,
)

CONTEXT = 2048
BANDWIDTH = 3.05e12  # bytes a second, measured on one H100 80GB reading 2 GiB


class StepBench:
    """Random weights and all buffers of one shape on a GPU."""

    def __init__(
        self,
        gpu: Gpu,
        config: LlamaConfig,
        *,
        sequences: int = 1,
        recipe: str | None = None,
    ) -> None:
        """`recipe`: one of `random_weights.RECIPES`, for packed matrices of random bits."""
        self.gpu, self.config, self.sequences, self.context = gpu, config, sequences, CONTEXT
        self.formats: Formats = {}
        if recipe is not None:
            self.formats = formats_of(config, lambda name: recipe_type(recipe, config, name))
        self.ring = 256
        c, context = config, CONTEXT
        random = np.random.default_rng(0)
        noise = random.standard_normal(1 << 24, dtype=np.float32) * 0.02
        bits = (noise.view(np.uint32) >> 16).astype(np.uint16)
        self._noise = gpu.array(bits)
        self._shift = 0
        self._bits: Memory | None = None
        self.where: dict[str, Memory] = {}
        for name, shape in weight_shapes(c).items():
            if len(shape) == 1:
                self.where[name] = gpu.array(np.ones(shape, np.float32))
            elif name in self.formats:
                self.where[name] = self.packed(self.formats[name], shape[1])
            else:
                self.where[name] = self._noisy(shape)
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
        for name, (between, dtype) in rounded_buffers(c, rows).items():
            self.where[name] = gpu.empty(between, dtype)
        self.where["logits"] = gpu.empty((sequences, c.vocabulary), np.float32)
        self.where["kept"] = gpu.empty((sequences, context + MOST_BIASES), np.uint32)
        self.where["history"] = gpu.array(np.zeros((sequences, context), np.int32))
        self.where["rope"] = gpu.array(rope_table(c, context))
        self.where["live"] = gpu.array(np.zeros((rows, 4), np.int32))
        self.where["rows"] = gpu.array(np.zeros((rows, 4), np.int32))
        self.where["state"] = gpu.array(np.zeros((sequences, 4), np.int32))
        self.where["options"] = gpu.array(np.zeros((sequences, OPTIONS.itemsize // 8), np.uint64))
        self.where["stops"] = gpu.array(np.full(STOP_TOKENS, -1, np.int32))
        self.where["biases"] = gpu.array(np.zeros((sequences, MOST_BIASES, 2), np.int32))
        words = np.zeros((sequences, mask_words(c.vocabulary)), np.uint32)
        self.where["masks"] = gpu.array(words)
        self.where["allowed"], _ = gpu.pinned(words)
        logprobs = np.zeros((sequences, self.ring, LOGPROBS.itemsize // 4), np.int32)
        self.where["logprobs"], _ = gpu.pinned(logprobs)
        self.where["ring"], _ = gpu.pinned(np.full((sequences, self.ring, 2), -1, np.int32))
        self.where["workspace"] = gpu.array(np.zeros(1 << 24, np.uint8))

    def packed(self, how: Packing, columns: int) -> Memory:
        """Makes bricks of random bits, in which every float16 is a number below 2^-7."""
        count = matrix_bytes(how, columns) // 2
        made = self._noisy((count,), mask=0x9FFF)
        return Memory(made.address, (2 * count,), np.dtype(np.uint8))

    def _noisy(self, shape: tuple[int, ...], mask: int | None = None) -> Memory:
        """Makes random bits, different for each matrix: small normal bfloat16 numbers, or, with a
        mask, any bits within the mask."""
        made = self.gpu.empty(shape, np.uint16)
        done = 0
        if mask is not None and self._bits is None:
            bits = np.random.default_rng(1).integers(0, 1 << 16, 1 << 24, np.uint16)
            self._bits = self.gpu.array(bits & np.uint16(mask))
        noise = self._noise if mask is None else self._bits
        assert noise is not None
        while done < made.nbytes:
            self._shift = (self._shift + 7_654_320) % (noise.nbytes // 2)
            size = min(noise.nbytes - self._shift, made.nbytes - done)
            self.gpu.copy(made.address + done, noise.address + self._shift, size)
            done += size
        return made

    def floor(self, rows: int, position: int) -> float:
        """Returns the minimum time of a step, in µs."""
        return self.weight_bytes() / BANDWIDTH * 1e6 + (
            rows * (position + 1) * self.config.layers * 4 * self.config.kv_size / BANDWIDTH * 1e6
        )

    def weight_bytes(self, kernel: str | None = None) -> int:
        """Returns the bytes of weights of a step, or of one launch of a kernel (the mean of its
        launches)."""
        c = self.config
        names = {
            "norm_qkv_rope": ("wqkv",),
            "norm_qkv": ("wqkv",),
            "output_residual": ("wo",),
            "norm_gate_up": ("w_gate_up",),
            "down_residual": ("w_down",),
            "attention_block": ("wqkv", "wo"),
        }
        kernel = {new: old for old, new in ROUNDED_CALLS.items()}.get(str(kernel), kernel)
        head = self.where["embed" if c.tied_embeddings else "head"].nbytes
        layers = {
            name: sum(self.where[f"layers.{i}.{name}"].nbytes for i in range(c.layers))
            for name in ("wqkv", "wo", "w_gate_up", "w_down")
        }
        if kernel == "head":
            return head
        if kernel is not None:
            return sum(layers[name] for name in names.get(kernel, ())) // c.layers
        return sum(layers.values()) + head

    def set_position(self, rows: int, position: int, options: tuple[float, ...] = ()) -> None:
        """Sets rows and states so that every row decodes its sequence's token at this position."""
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
        self.gpu.write(self.where["state"], state.view(np.int32).reshape(-1, 4))
        self.gpu.write(self.where["options"], chosen.view(np.uint64).reshape(self.sequences, -1))

    def launches(self, rows: int, tuning: Tuning) -> tuple[CudaLaunch, ...]:
        c, formats = self.config, self.formats
        need = workspace_bytes(c, rows=rows, context=self.context, tuning=tuning, formats=formats)
        assert need <= self.where["workspace"].nbytes
        program = decode_program(c)
        return lower(program, c, rows=rows, context=self.context, tuning=tuning, formats=formats)

    def submit(self, launches: Iterable[CudaLaunch], rows: int) -> None:
        sizes = {
            "rows": rows,
            "sequences": self.sequences,
            "context": self.context,
            "ring": self.ring,
        }
        for launch in launches:
            values = {name: resolved(v, self.where, sizes) for name, v in launch.arguments}
            self.gpu.launch(launch, values)

    def time_step(
        self, rows: int, tuning: Tuning, position: int, *, options: tuple[float, ...] = ()
    ) -> float:
        """Returns µs of one replayed step; positions increase from `position` in each round."""
        launches = self.launches(rows, tuning)
        executable = self.gpu.capture(lambda: self.submit(launches, rows))
        try:
            return self.gpu.time(
                executable,
                repeats=60,
                before=lambda: self.set_position(rows, position, options),
            )
        finally:
            self.gpu.destroy(executable)

    def time_piece(self, rows: int, tuning: Tuning, position: int) -> float:
        """Returns µs of a piece of a prompt: rows of sequence 0 from `position` on, which do not
        sample."""
        program = decode_program(self.config, sampled=False)
        launches = lower(
            program,
            self.config,
            rows=rows,
            context=self.context,
            tuning=tuning,
            formats=self.formats,
        )
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
        """Returns, by kernel, µs alone (its launches in sequence) and µs that it adds to a step.

        A step without `head` needs to leave out `sample` too, which would choose an arbitrary token
        and might make the row inactive: so the time that `head` adds is that of both, less
        `sample`.
        """
        launches = self.launches(rows, tuning)
        whole = self.time_step(rows, tuning, position)
        found: dict[str, dict[str, float]] = {}
        for kernel in dict.fromkeys(one.kernel for one in launches):
            if kernel == "embed":
                continue
            own = [one for one in launches if one.kernel == kernel]
            embed = [one for one in launches if one.kernel == "embed"]
            times = -(-60 // len(own))
            graph = self.gpu.capture(lambda own=own, times=times: self.submit(own * times, rows))

            # Makes rows as in a step; without another `embed` they do not change.
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
