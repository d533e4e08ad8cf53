"""Compares every kernel with the NumPy kernel of the same name, on random inputs.

A machine, which launches kernels, has `array`, `read`, `write`, `launch` and `synchronize`:
rig.Gpu, and the emulator of the tests.  After each launch the kernel's outputs are compared, all
other memory must be unchanged, and the next kernel starts from the device's results, so that errors
do not add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ostinato import LaunchConfig
from ostinato.bench.random_weights import random_blocks
from ostinato.models.config import LlamaConfig, tensor_shapes
from ostinato.models.cuda.bricks import Packing, matrix_bytes, packing, places
from ostinato.models.cuda.dequantise import repack_source
from ostinato.models.cuda.lowering import CudaLaunch, lower, rounded_buffers, workspace_bytes
from ostinato.models.cuda.shapes import ROUNDED_CALLS, Tuning
from ostinato.models.files.dequantise import dequantise_rows
from ostinato.models.host.kernels import HOST_KERNELS
from ostinato.models.layout import part_rows, weight_shapes
from ostinato.models.plan import mask_words, rope_table
from ostinato.models.program import (
    ACTIVE,
    BIAS,
    FROM_STATE,
    LOGPROBS,
    MASKED,
    MOST_BIASES,
    OPTIONS,
    ROW,
    SAMPLE,
    STATE,
    STOP_TOKENS,
    BufferArgument,
    decode_program,
)
from ostinato.modules import CompileOptions

# Accepted relative errors |out - ref| / |ref|: for float32 sums, bfloat16 inputs, and bfloat16
# inputs with packed weights that are rounded to bfloat16.
FLOAT32, BFLOAT16, PACKED = 2e-5, 6e-3, 9e-3


class Machine(Protocol):
    name: str

    def array(self, values: np.ndarray) -> Any: ...
    def read(self, array: Any) -> np.ndarray: ...
    def write(self, array: Any, values: np.ndarray) -> None: ...
    def launch(self, launch: CudaLaunch, values: dict[str, Any]) -> None: ...
    def synchronize(self) -> None: ...


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds float32 values to bfloat16, to nearest even, and returns the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def config_of(heads: int, kv_heads: int, head_size: int, **sizes: Any) -> LlamaConfig:
    """Makes the configuration of a model of two layers: more layers would run the same code."""
    values = {"hidden": heads * head_size, "layers": 2, "context_length": 8192, **sizes}
    return LlamaConfig(heads=heads, kv_heads=kv_heads, head_size=head_size, **values)


def resolved(value: object, where: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """Returns the value of a launch's argument: memory by its name, a size, or the value itself."""
    if isinstance(value, str):
        return sizes[value]
    if not isinstance(value, BufferArgument):
        return value
    if value.layer is None:
        return where[value.name]
    if value.name == "cache":
        return where["cache"][value.layer]
    return where[f"layers.{value.layer}.{value.name}"]


def packed_matrices(
    machine: Machine, config: LlamaConfig, stored: Mapping[str, tuple[str, np.ndarray]]
) -> dict[str, tuple[Packing, Any]]:
    """Packs tensors, given as bytes of a file, to matrices on the machine.  A matrix is left out
    unless all of its tensors are given."""
    made: dict[str, tuple[Packing, Any]] = {}
    for name, shape in weight_shapes(config).items():
        names = [part for part, _ in part_rows(config, name, shape[0])]
        if not all(one in stored for one in names):
            continue
        rows = [len(stored[one][1]) for one in names]
        columns = tensor_shapes(config)[names[0]][1]
        packed = packing(name, [stored[one][0] for one in names], rows, columns)
        if packed is None:
            continue
        bricks = machine.array(np.zeros(matrix_bytes(packed, columns), np.uint8))
        for one, place in zip(names, places(config, name, packed, rows, columns), strict=True):
            kind, values = stored[one]
            kernel, shape = f"{kind}_to_bricks", LaunchConfig(len(values), 64)
            given = {"first": place.first, "head": 0, "size": place.size, "columns": columns}
            given |= {"stored": machine.array(values), "row_bytes": values.shape[1]}
            machine.launch(
                CudaLaunch(kernel, repack_source(), CompileOptions(), shape, ()),
                {"bricks": bricks[place.offset :], **given},
            )
            machine.synchronize()
        made[name] = packed, bricks
    return made


@dataclass
class Case:
    """One step: its rows, and the sampling options of the sequences."""

    name: str
    rows: np.ndarray
    state: np.ndarray
    options: np.ndarray
    masks: np.ndarray | None = None


class Bench:
    """A model with random weights and all buffers of a plan, on the host and on the machine."""

    def __init__(
        self,
        machine: Machine,
        config: LlamaConfig,
        *,
        max_rows: int,
        sequences: int,
        context: int,
        seed: int = 0,
        tunings: dict[int, Tuning] | None = None,
        types: Mapping[str, str] | None = None,
        multiprocessors: int = 132,
    ) -> None:
        """`types`: types of packed tensors, by their names in a layer ("wq", "embed", …)."""
        self.machine, self.config = machine, config
        self.sequences, self.context, self.ring = sequences, context, 16
        self.tunings, self.multiprocessors = tunings or {}, multiprocessors
        self.random = random = np.random.default_rng(seed)
        c = config
        host: dict[str, np.ndarray] = {}
        stored: dict[str, tuple[str, np.ndarray]] = {}
        for name, shape in tensor_shapes(c).items():
            kind = (types or {}).get(name.rpartition(".")[2])
            scale = 1.0 if name == "embed" else shape[-1] ** -0.5
            if len(shape) == 1:
                host[name] = random.uniform(0.5, 1.5, shape).astype(np.float32)
            elif kind is not None:
                stored[name] = kind, random_blocks(kind, shape, random, scale)
                host[name] = np.empty(shape, np.float32)
                dequantise_rows(*stored[name], host[name])
            else:
                host[name] = from_bf16(to_bf16(random.standard_normal(shape) * scale))
        for layer in range(c.layers):
            at = f"layers.{layer}."
            for fused, names in (("wqkv", "wq wk wv"), ("bqkv", "bq bk bv")):
                parts = [host.pop(at + name) for name in names.split() if at + name in host]
                if parts:
                    host[at + fused] = np.concatenate(parts)
            host[at + "w_gate_up"] = np.concatenate(
                [host.pop(at + "w_gate"), host.pop(at + "w_up")]
            )
        packed = packed_matrices(machine, c, stored)
        self.formats = {name: how for name, (how, _) in packed.items()}
        matrices = {name for name, values in host.items() if values.ndim == 2}
        matrices -= packed.keys()
        for name in matrices:  # matrices that are not packed are bfloat16
            host[name] = from_bf16(to_bf16(host[name]))
        cache = random.standard_normal((c.layers, 2, sequences, c.kv_heads, context, c.head_size))
        host["cache"] = from_bf16(to_bf16(cache))
        nan = np.float32(np.nan)
        between = rounded_buffers(c, max_rows)
        for name, (shape, dtype) in between.items():
            host[name] = (
                np.full(shape, nan) if dtype == np.uint16 else np.full(shape, 1 << 62, dtype)
            )
        self.halves = matrices | {"cache"}
        self.halves |= {name for name, (_, dtype) in between.items() if dtype == np.uint16}
        for name, width in (
            ("x", c.hidden),
            ("q", c.query_size),
            ("attended", c.query_size),
            ("inner", c.inner),
            *([("qkv", c.query_size + 2 * c.kv_size)] if c.qk_norm else []),
        ):
            host[name] = np.full((max_rows, width), nan)
        host["logits"] = np.full((sequences, c.vocabulary), nan)
        host["kept"] = np.full((sequences, context + MOST_BIASES), 77, np.uint32)
        host["history"] = random.integers(c.vocabulary, size=(sequences, context), dtype=np.int32)
        host["rope"] = rope_table(c, context)
        host["live"] = np.full((max_rows, 4), 77, np.int32)
        host["rows"] = np.zeros((max_rows, 4), np.int32)
        host["state"] = np.zeros((sequences, 4), np.int32)
        host["options"] = np.zeros((sequences, OPTIONS.itemsize // 8), np.uint64)
        host["stops"] = np.full(STOP_TOKENS, -1, np.int32)
        host["ring"] = np.full((sequences, self.ring, 2), -1, np.int32)
        host["logprobs"] = np.full((sequences, self.ring, LOGPROBS.itemsize // 4), -1, np.int32)
        biases = np.zeros((sequences, MOST_BIASES), BIAS)
        for one in biases:
            count = min(c.vocabulary, MOST_BIASES)
            one["token"][:count] = random.permutation(c.vocabulary)[:count]
        biases["bias"] = random.uniform(-20, 2, biases.shape)  # most lower what was the largest
        host["biases"] = biases.view(np.int32).reshape(sequences, -1, 2)
        words = np.zeros((sequences, mask_words(c.vocabulary)), np.uint32)
        host |= {"allowed": words, "masks": words.copy()}
        self.host = host
        self.device = {
            name: machine.array(to_bf16(values) if name in self.halves else values)
            for name, values in host.items()
            if name not in packed
        }
        self.device |= {name: bricks for name, (_, bricks) in packed.items()}
        widest = max(c.query_size + 2 * c.kv_size, 2 * c.inner, c.hidden)
        self.host["workspace"] = np.full(max_rows * widest, nan)
        need = max(
            workspace_bytes(
                c, rows=r, context=context, tuning=self.tunings.get(r), formats=self.formats
            )
            for r in range(1, max_rows + 1)
        )
        workspace = np.full(need // 4, nan)
        workspace[: 1 << 14] = 0
        self.device["workspace"] = machine.array(workspace)

    def launches(self, rows: int) -> tuple[CudaLaunch, ...]:
        return lower(
            decode_program(self.config),
            self.config,
            rows=rows,
            context=self.context,
            tuning=self.tunings.get(rows),
            multiprocessors=self.multiprocessors,
            formats=self.formats,
        )

    def resolve(self, value: object, rows: int, where: Mapping[str, Any]) -> Any:
        sizes = {"sequences": self.sequences, "context": self.context, "ring": self.ring}
        return resolved(value, where, {"rows": rows, **sizes})

    def launch(self, launch: CudaLaunch, rows: int) -> None:
        values = {name: self.resolve(v, rows, self.device) for name, v in launch.arguments}
        self.machine.launch(launch, values)

    def read(self, name: str) -> np.ndarray:
        values = self.machine.read(self.device[name])
        return from_bf16(values) if name in self.halves else values

    def _stored(self, name: str) -> np.ndarray:
        """Returns a buffer for `_compare`; the cache, which is large, as stored bits."""
        return self.machine.read(self.device[name]) if name == "cache" else self.read(name)

    def set_case(self, case: Case) -> None:
        rows = len(case.rows)
        for name, values in (
            *(() if case.masks is None else [("allowed", case.masks)]),
            ("rows", case.rows.view(np.int32).reshape(-1, 4)),
            ("state", case.state.view(np.int32).reshape(-1, 4)),
            ("options", case.options.view(np.uint64).reshape(self.sequences, -1)),
        ):
            self.host[name][: len(values)] = values
            self.machine.write(self.device[name], self.host[name])
        assert rows <= len(self.host["rows"])

    def check(self, case: Case) -> dict[str, float]:
        """Runs one step, kernel by kernel.  Returns the largest error of each kernel.  Raises
        AssertionError."""
        self.set_case(case)
        rows = len(case.rows)
        program = list(decode_program(self.config))
        errors: dict[str, float] = {}
        parts = 0  # number of parts of the residual in the workspace
        launches = self.launches(rows)
        exact = all(launch.kernel != "norm_rows" for launch in launches)
        for launch in launches:
            if launch.kernel == "norm_rows":  # checked through the product that reads its output
                self.launch(launch, rows)
                continue
            calls, program = program[: launch.calls], program[launch.calls :]
            rounded = ROUNDED_CALLS.get(calls[0].kernel) == launch.kernel
            assert launch.calls > 1 or rounded or calls[0].kernel == launch.kernel
            before = {name: self._stored(name) for call in calls for name in self._written(call)}
            places = self._rounded_places(launch, rows)
            for name in places.keys() & before.keys():  # padding rows become zeros
                before[name] = places[name]()
                if name == "attended" or (self.host["live"][:rows, 3] & ACTIVE).any():
                    before[name][:rows] = 0
            self.launch(launch, rows)
            self.machine.synchronize()
            inside: tuple[str, ...] = ()
            if launch.calls > 1:  # data between its calls stays in shared memory
                active = self.host["live"][0, 3] & ACTIVE
                parts = launch.config.grid[1] if active else 0
                inside = ("q", "attended", *(["qkv"] if self.config.qk_norm else []))
                for name in (*inside, "x"):
                    assert np.array_equal(before[name], self.read(name), equal_nan=True)
            elif launch.kernel == "down_residual":
                parts = 0
            limit = FLOAT32 if exact else PACKED if self.formats else BFLOAT16
            for call in calls:
                self._run_host(call, rows)
                for name in self._written(call):
                    if name in inside:
                        continue
                    new, most = self._stored(name), limit
                    if name == "x" and parts:
                        new += self._parts(parts)
                    if name in places:  # also rounded, by at most half a unit of 8 bits
                        new, most = places[name](), limit + 2.0**-9
                    where = f"{case.name}: {launch.kernel}: {call}: {name}"
                    error = self._compare(name, before[name], new, rows, most, where)
                    errors[launch.kernel] = max(errors.get(launch.kernel, 0.0), error)
            counters = self.machine.read(self.device["workspace"][: 1 << 14])
            assert not counters.view(np.uint32).any(), (
                f"{case.name}: {launch.kernel}: counters left"
            )
        assert not program
        return errors

    def _rounded_places(self, launch: CudaLaunch, rows: int) -> dict[str, Callable[[], np.ndarray]]:
        """Returns functions that read a launch's rounded outputs, by the names of the buffers that
        the program's calls write."""
        names = {value.name for _, value in launch.arguments if isinstance(value, BufferArgument)}
        panels = dict(launch.options.defines).get("PANELS")

        def read(name: str, width: int) -> np.ndarray:
            whole = self.read(name)
            found = whole.reshape(-1)[: len(whole) * width].reshape(-1, width)
            if panels:
                found[:rows] = from_panels(found[:rows], bricks=panels == "2")
            return found

        found: dict[str, Callable[[], np.ndarray]] = {}
        if launch.kernel == "attention" and "product_in" in names:
            found["attended"] = partial(read, "product_in", self.config.query_size)
        if launch.kernel == "rounded_gate_up":
            found["inner"] = partial(read, "product_inner", self.config.inner)
        return found

    def _parts(self, count: int) -> np.ndarray:
        """Returns the sum of the parts of the residual of the only row."""
        end = (1 << 14) + count * self.config.hidden
        workspace = self.machine.read(self.device["workspace"][1 << 14 : end])
        return workspace.reshape(count, -1).sum(axis=0)

    def _run_host(self, call: Any, rows: int) -> None:
        kernel = HOST_KERNELS[call.kernel]
        arguments = dict(call.arguments)
        values = []
        for parameter in kernel.signature.parameters:
            value = self.resolve(arguments[parameter.name], rows, self.host)
            if parameter.pointer and isinstance(value, int):  # ABSENT
                value = None
            elif parameter.pointer:
                value = value.reshape(-1).view(parameter.dtype)
            values.append(value)
        kernel.function(None, *values)

    def _written(self, call: Any) -> list[str]:
        kernel = HOST_KERNELS[call.kernel]
        arguments = dict(call.arguments)
        return [
            arguments[p.name].name
            for p in kernel.pointers
            if p.writable and p.name not in ("workspace", "kept", "masks")
        ]

    def _compare(
        self, name: str, old: np.ndarray, new: np.ndarray, rows: int, limit: float, where: str
    ) -> float:
        """Compares the device's buffer with the host's, then copies it to the host's.  Returns the
        largest error."""
        host = self.host[name]
        live = self.host["live"][:rows]
        active = (live[:, 3] & ACTIVE) != 0
        sampled = active & ((live[:, 3] & SAMPLE) != 0)
        if name in ("live", "state", "ring"):
            assert np.array_equal(
                new[:rows] if name == "live" else new, host[:rows] if name == "live" else host
            ), f"{where}: {new[:rows].tolist()} is not {host[:rows].tolist()}"
            return 0.0
        if name == "history" or (name == "logits" and ": sample: " in where):  # these stay
            wanted = host if name == "history" else old
            same = new.tobytes() == wanted.tobytes()
            assert same, f"{where}: {np.argwhere(new != wanted)[:5].tolist()} differ"
            return 0.0
        if name == "logprobs":
            mine, theirs = new.view(LOGPROBS), host.view(LOGPROBS)
            assert np.array_equal(mine["tokens"], theirs["tokens"]), where
            for part in ("chosen", "top"):
                np.testing.assert_allclose(mine[part], theirs[part], 1e-5, 1e-5, err_msg=where)
            host[...] = new
            return 0.0
        if name == "cache":
            written = slice(None), slice(None), live[active, 2], slice(None), live[active, 1]
            kept = new.copy()
            kept[written] = old[written]
            assert np.array_equal(kept, old), f"{where}: wrote elsewhere"
            # Device and host each round to bfloat16: an error of half a unit of 8 bits and more.
            found, wanted = from_bf16(new[written]), host[written]
            good = np.abs(found - wanted) <= 2.0**-7 * np.abs(wanted) + limit * 2
            assert good.all(), f"{where}: {np.abs(found - wanted).max()}"
            error = float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))
            host[written] = found
            return error / 100  # mostly the cache's own rounding
        mask = np.zeros(len(host), bool)
        if name == "logits":
            mask[live[sampled, 2]] = True
        else:
            mask[:rows] = True if name == "x" and "embed" in where else active
        same = np.array_equal(new[~mask], old[~mask], equal_nan=True)
        assert same, f"{where}: wrote to rows that are not its own"
        error = 0.0
        for row in np.flatnonzero(mask):
            size = np.linalg.norm(host[row].astype(np.float64))
            wrong = np.linalg.norm(new[row].astype(np.float64) - host[row])
            assert np.isfinite(wrong), f"{where}: row {row} is not finite"
            error = max(error, float(wrong / size) if size else float(wrong))
        assert error <= limit, f"{where}: relative error {error:.2e} is above {limit:.0e}"
        host[...] = new
        return error


def from_panels(values: np.ndarray, *, bricks: bool) -> np.ndarray:
    """Returns the rows of panels of 64 columns, whose chunks of 8 are permuted for warpgroups or
    for bricks (common.cuh)."""
    rows, width = values.shape
    chunks = values.reshape(width // 64, rows, 8, 8)
    row, chunk = np.ogrid[:rows, :8]
    swapped = chunk ^ (row % 4 * 2 if bricks else row % 8)
    return chunks[:, row, swapped].transpose(1, 0, 2, 3).reshape(rows, width)


def to_panels(values: np.ndarray) -> np.ndarray:
    """Returns panels for warpgroups: the inverse of `from_panels`."""
    rows, width = values.shape
    chunks = values.reshape(rows, width // 64, 8, 8).transpose(1, 0, 2, 3)
    row, chunk = np.ogrid[:rows, :8]
    return chunks[:, row, chunk ^ row % 8].reshape(rows, width)


# ------------------------------------------------------------------------------------------- cases


def cases(bench: Bench, rows: int) -> Iterator[Case]:
    """Yields steps of `rows` rows: single tokens, batches, pieces of prompts, mixtures, padding."""
    c, random, sequences, context = bench.config, bench.random, bench.sequences, bench.context
    on = ACTIVE | SAMPLE

    def made(name: str, values: Sequence[tuple[int, int, int, int]], stopped: bool = False) -> Case:
        table = np.full((rows, 4), (-5, 1 << 30, 99, SAMPLE), np.int32)
        if values:
            table[: len(values)] = values
        state = np.zeros(sequences, STATE)
        for sequence in range(sequences):
            position = int(random.integers(context))
            state[sequence] = (int(random.integers(c.vocabulary)), position, position + 1, stopped)
        options = np.zeros(sequences, OPTIONS)
        for sequence in range(sequences):
            options[sequence] = _OPTIONS[int(random.integers(len(_OPTIONS)))]
            options[sequence]["seed"] = random.integers(1 << 63)
        options["biased"] = options["biased"].astype(int).clip(max=c.vocabulary)  # no token twice
        return Case(name, table.view(ROW).reshape(-1), state, options)

    def token() -> int:
        return int(random.integers(c.vocabulary))

    if rows == 1:
        edges = {0, 1, 2, 31, 32, 33, 63, 64, 127, 128, context // 2, context - 2, context - 1}
        for position in sorted(p for p in edges if 0 <= p < context):
            yield made(
                f"position {position}", [(token(), position, int(random.integers(sequences)), on)]
            )
        yield made("from state", [(0, 0, sequences - 1, on | FROM_STATE)])
        yield made("stopped", [(0, 0, 0, on | FROM_STATE)], stopped=True)
        yield made("no sample", [(token(), 3, 0, ACTIVE)])
        yield made("padding", [])
        return
    count = min(rows, sequences)
    batch = [(token(), int(random.integers(context)), sequence, on) for sequence in range(count)]
    yield made(f"batch of {count} in {rows}", batch)
    mixed = [(t, p, s, f if i % 3 else f & ~ACTIVE) for i, (t, p, s, f) in enumerate(batch)]
    yield made(f"gaps in {rows}", mixed)
    yield made(
        f"states in {rows}", [(0, 0, sequence, on | FROM_STATE) for sequence in range(count)]
    )
    for start, length in ((0, rows), (min(37, context - rows), rows), (1, max(1, rows // 2))):
        piece = [(token(), start + i, sequences - 1, ACTIVE) for i in range(length)]
        piece[-1] = (*piece[-1][:3], on)
        yield made(f"piece of {length} at {start} in {rows}", piece)
    yield made(f"padding in {rows}", [])


def sampling_cases(bench: Bench) -> Iterator[Case]:
    """Yields steps of a single token with each way to sample, also at the ends of the context.

    Random logits are far apart, especially with a tied embedding, and every draw would give the
    likeliest token: so the temperature is high.
    """
    (model, *_), positions = cases(bench, 1), (0, bench.context // 2, bench.context - 1)
    shape, number = bench.host["allowed"].shape, 0
    for position, values in itertools.product(positions, _OPTIONS):
        for _ in range(4):
            number += 1
            rows, options = model.rows.copy(), model.options.copy()
            rows["position"] = position
            rows["token"] = bench.random.integers(bench.config.vocabulary)
            options[:] = values
            options["biased"] = options["biased"].astype(int).clip(max=bench.config.vocabulary)
            masks = None
            if number % 5 == 0:  # a quarter of the tokens, or a few
                rows["flags"] |= MASKED
                count = 2 if number % 2 else 7
                masks = bench.random.integers(1 << 32, size=(count, *shape), dtype=np.uint32)
                masks = np.bitwise_and.reduce(masks)
            options["temperature"] *= _HOT
            options["seed"] = bench.random.integers(1 << 63)
            yield Case(f"{values} at {position}, {number}", rows, model.state, options, masks)


_HOT = 15.0
_PLAIN = (0.0, 0.0, 0, 0, 0)
_OPTIONS = [
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, *_PLAIN),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.7, *_PLAIN),
    (1.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, *_PLAIN),
    (0.7, 0.9, 0, 0, 1 << 30, 0.02, 1.3, *_PLAIN),
    (1.3, 1.0, 0, 7, 1 << 30, 0.0, 0.6, *_PLAIN),
    (0.9, 0.5, 0, 40, 20, 0.3, 1.0, *_PLAIN),
    (3.0, 1.0, 0, 0, 1 << 30, 0.5, 1.0, *_PLAIN),
    (3.0, 0.2, 0, 0, 1 << 30, 1e-4, 1.0, *_PLAIN),
    (3.0, 0.99, 0, 0, 1 << 30, 0.4, 1.2, *_PLAIN),
    (2.5, 0.99, 0, 1, 1 << 30, 1.0, 1.1, *_PLAIN),
    (1e-50, 0.9, 0, 0, 1 << 30, 0.1, 100.0, *_PLAIN),
    (40.0, 0.3, 0, 0, 1 << 30, 0.0, 1.0, *_PLAIN),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, 1.5, -0.7, 0, 0, 0),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 0.3, *_PLAIN),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, -2.0, 0.0, 60, 0, 0),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.3, 0.8, 0.4, 40, 0, 0),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, 0.0, 0.0, 0, 100, 0),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.2, -1.9, 1.1, 40, 300, 6),
    (1.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, 0.3, 0.0, 3, 0, 1),
    (2.0, 0.9, 0, 20, 1 << 30, 0.1, 0.8, 0.0, 2.0, 60, MOST_BIASES, 21),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, 0.0, 0.0, 0, 5, 0),
    (0.0, 1.0, 0, 0, 1 << 30, 0.0, 1.0, 0.0, 0.0, 0, 0, 21),
]


def run_checks(
    machine: Machine,
    config: LlamaConfig,
    rows: Sequence[int],
    *,
    sequences: int = 3,
    context: int = 150,
    seed: int = 0,
    tunings: dict[int, Tuning] | None = None,
    types: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Checks all cases of all numbers of rows.  Returns each kernel's largest relative error."""
    bench = Bench(
        machine,
        config,
        max_rows=max(rows),
        sequences=sequences,
        context=context,
        seed=seed,
        tunings=tunings,
        types=types,
    )
    worst: dict[str, float] = {}
    for count in rows:
        for case in cases(bench, count):
            for kernel, error in bench.check(case).items():
                worst[kernel] = max(worst.get(kernel, 0.0), error)
    return worst


def small(config: LlamaConfig, **changes: Any) -> LlamaConfig:
    return replace(config, **changes)
