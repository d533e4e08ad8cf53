"""Loads a model's file to bfloat16 weights in device memory, converted by the device or the host.

    python -m benchmarks.load [--shape 1B] [--types Q4_0,Q8_0]

The files have random bits in the model's shape; each is written once, and read from the page cache
afterwards.  Lower bound: a copy of the file's bytes to the device (`the bytes alone`).  The ways
take turns:

  device              the file's bytes are copied, and converted on the device
  host, N threads     NumPy converts, in memory that is reused, and bfloat16 is copied
  gguf and torch      `gguf.dequantize`, then torch's copy and conversion, a tensor at a time, as
                      transformers loads GGUF files

All ways' weights are compared bit by bit.  The last line is one JSON object.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ostinato as ost
from benchmarks import common
from ostinato.bench.shapes import shape_named
from ostinato.models import LlamaConfig, StoredCheckpoint
from ostinato.models.config import tensor_shapes
from ostinato.models.cuda.dequantise import convert_on_device
from ostinato.models.files.checkpoint import JsonTokenizerSource, RawTensor
from ostinato.models.files.dequantise import BLOCK_TYPES
from ostinato.models.weights import load_weights

_PIECE = 64 << 20  # bytes
# Bits of an F16 scale of about 0.01, and the offsets of the scales in a block.
_SCALE = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
# For float types: the mask of the bits that stay random, and an exponent for values of about 0.01.
_EXPONENTS = {
    "F32": (np.uint32, 0x807FFFFF, 0x3C000000),
    "F16": (np.uint16, 0x83FF, 0x2000),
    "BF16": (np.uint16, 0x807F, 0x3C00),
}
_SCALES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)
}  # fmt: skip

_BOUND, _HOST, _PEER = "the bytes alone", "host, 4 threads", "gguf and torch"


class RandomFile(StoredCheckpoint):
    """A mapped file of random values, whose matrices have one type."""

    def __init__(self, path: Path, config: LlamaConfig, kind: str) -> None:
        tensors, at = {}, 0
        for name, shape in tensor_shapes(config).items():
            used = kind if len(shape) > 1 else "F32"
            size = math.prod(shape) // BLOCK_TYPES[used].values * BLOCK_TYPES[used].size
            heads = {"wq": config.heads, "wk": config.kv_heads}.get(name.rpartition(".")[2], 0)
            tensors[name] = RawTensor(name, used, shape, path, at, size, heads)
            at += size
        _write(path, tensors.values())
        super().__init__(path, config, JsonTokenizerSource(path), tensors)
        self._values = np.memmap(path, np.uint8, "r")

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        return np.asarray(self._values[raw.offset : raw.offset + raw.size])

    def close(self) -> None:
        super().close()
        del self._values


def _write(path: Path, tensors: Iterable[RawTensor]) -> None:
    rng = np.random.default_rng(5)
    with path.open("wb") as file:
        for raw in tensors:
            stored = np.frombuffer(rng.bytes(raw.size), np.uint8).copy()
            if raw.type in _EXPONENTS:
                dtype, kept, exponent = _EXPONENTS[raw.type]
                words = stored.view(dtype)
                words &= dtype(kept)
                words |= dtype(exponent)
            else:
                blocks = stored.reshape(-1, BLOCK_TYPES[raw.type].size)
                for at in _SCALES[raw.type]:
                    blocks[:, at : at + 2] = _SCALE
            file.write(stored.tobytes())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", default="1B")
    parser.add_argument("--types", default="Q4_0,Q8_0")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args(arguments)
    config = shape_named(chosen.shape)
    rounds = 1 if chosen.quick else chosen.rounds
    rows: list[dict[str, object]] = []
    skipped: dict[str, str] = {}
    with ost.open_device(chosen.device) as device, tempfile.TemporaryDirectory() as folder:
        for kind in chosen.types.split(","):
            with RandomFile(Path(folder, kind), config, kind) as checkpoint:
                rows += compared(device, checkpoint, kind, rounds, skipped)
            Path(folder, kind).unlink()
        columns = ("type", "way", "median_ms", "min_ms", "gigabytes", "of_ceiling")
        print(common.table(f"loading {chosen.shape} on {device.name}", rows, columns))
        bounds = {str(row["type"]): row["median_ms"] for row in rows if row["way"] == _BOUND}
        common.emit(
            "load" + (f"-{chosen.shape}" if chosen.shape != "1B" else ""),
            device,
            chosen.out,
            ceiling={"what": "the file's bytes copied to the device", "ms": bounds},
            settings={"shape": chosen.shape, "rounds": rounds},
            rows=rows,
            skipped=skipped,
        )
    return 0


def compared(
    device: ost.Device, checkpoint: RandomFile, kind: str, rounds: int, skipped: dict[str, str]
) -> Iterator[dict[str, object]]:
    """Measures all ways in turns; yields a row for each."""
    ways: dict[str, Callable[[], Loaded]] = {_BOUND: lambda: copied(device, checkpoint)}
    if not device.capabilities.host_memory_is_device_memory:
        ways["device"] = lambda: ours(device, checkpoint)
    for threads in (4, 16):
        way = partial(ours, device, checkpoint, threads=threads)
        ways[f"host, {threads} threads"] = way
    torch = common.optional(skipped, _PEER, lambda: with_torch(device, checkpoint))
    if callable(torch):
        ways[_PEER] = torch
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers: dict[str, dict[str, str]] = {}
    for turn in range(rounds + 1):  # the first turn warms up, and is checked
        for name, way in ways.items():
            begin = time.perf_counter()
            made = way()
            times[name].append(time.perf_counter() - begin)
            if not turn and made.tensors:
                answers[name] = made.digests()
            made.close()
    for name, digests in answers.items():
        for tensor in digests.keys() & answers[_HOST].keys():
            if digests[tensor] != answers[_HOST][tensor]:
                raise AssertionError(f"{kind}, {name}: {tensor} is not what the host makes of it")
    size = sum(checkpoint.raw(name).size for name in checkpoint.tensor_names())
    bound = statistics.median(times[_BOUND][1:])
    for name, (_, *seconds) in times.items():
        median = statistics.median(seconds)
        yield {
            "type": kind,
            "way": name,
            "median_ms": round(1e3 * median, 2),
            "min_ms": round(1e3 * min(seconds), 2),
            "gigabytes": round(size / 1e9, 3),
            "of_ceiling": round(bound / median, 3),
        }


@dataclass(frozen=True)
class Loaded:
    """The weights that a way loaded: functions that read them back, by name."""

    tensors: dict[str, Callable[[], npt.NDArray[Any]]]
    close: Callable[[], None]

    def digests(self) -> dict[str, str]:
        return {n: hashlib.sha256(read().tobytes()).hexdigest() for n, read in self.tensors.items()}


def ours(device: ost.Device, checkpoint: RandomFile, threads: int | None = None) -> Loaded:
    """Loads with this library.  `threads`: number of host threads that convert; None: the device
    converts."""
    convert = partial(convert_on_device, device) if threads is None else None
    made = load_weights(device, checkpoint, np.uint16, threads=threads, convert=convert)
    reads = {name: partial(device.to_numpy, buffer) for name, buffer in made.tensors.items()}
    return Loaded(reads, made.close)


def copied(device: ost.Device, checkpoint: RandomFile) -> Loaded:
    """Copies the file's bytes to device memory, which is reused."""
    with device.empty(_PIECE, "bytes") as buffer, device.create_stream() as stream:
        for name in checkpoint.tensor_names():
            stored = checkpoint.stored(name)
            for start in range(0, stored.size, _PIECE):
                piece = stored[start : start + _PIECE]
                buffer.view(0, piece.size).set(piece, stream)
    return Loaded({}, lambda: None)


def with_torch(device: ost.Device, checkpoint: RandomFile) -> Callable[[], Loaded]:
    """Makes a function that loads like transformers, without its renaming and its order of rows for
    rope.  Raises ImportError."""
    import torch
    from gguf import GGMLQuantizationType, dequantize

    place = device.name if device.name.startswith("cuda") else "cpu"

    def load() -> Loaded:
        made = {}
        for name in checkpoint.tensor_names():
            raw = checkpoint.raw(name)
            rows = checkpoint.stored(name).reshape(raw.rows, -1)
            found = dequantize(rows, GGMLQuantizationType[raw.type])
            values = torch.from_numpy(np.require(found, requirements="W"))
            made[name] = values.reshape(raw.shape).to(place, torch.bfloat16)
        if place != "cpu":
            torch.cuda.synchronize()
        whole = {n for n, t in made.items() if t.ndim > 1 and n.endswith(("embed", "wo", "w_down"))}
        return Loaded(
            {n: lambda t=made[n]: t.cpu().view(torch.int16).numpy() for n in whole}, made.clear
        )

    return load


if __name__ == "__main__":
    sys.exit(main())
