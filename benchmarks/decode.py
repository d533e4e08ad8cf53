"""Decoding: eager, graphs by capture, graphs by record, in turns in one run, batch 1.

    python -m benchmarks.decode                  the real model (fetched on first use)
    python -m benchmarks.decode --shape 1B       random weights of that shape; needs no file
    python -m benchmarks.decode --context 500    positions in the cache before the first token

The floor is the time to read all weights once at the bandwidth that this machine shows for just
that: on the host NumPy's own matrix-vector products over matrices of the model's shapes, on a GPU
a large copy (bytes read and written).  Tokens a second are from median milliseconds a token, from
the call to the token in the caller's hand.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ostinato as ost
from benchmarks import common
from ostinato.models import Decoder, open_checkpoint, store
from ostinato.models.checkpoint import Checkpoint, JsonTokenizerSource, RawTensor
from ostinato.models.config import LlamaConfig
from ostinato.models.tokenizer import load_tokenizer

PROMPT = "Explain in a few sentences why the sky is blue and why sunsets are red."
WAYS = ("eager", "capture", "record")
SHAPES = {
    "135M": LlamaConfig(
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_size=64,
        inner=1536,
        vocabulary=49152,
        context_length=8192,
        rope_theta=100000.0,
        tied_embeddings=True,
    ),
    "1B": LlamaConfig(
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_size=64,
        inner=8192,
        vocabulary=128256,
        context_length=131072,
        rope_theta=500000.0,
        tied_embeddings=True,
    ),
}
"""SmolLM2-135M and Llama-3.2-1B."""


class MemoryCheckpoint(Checkpoint):
    """Weights that are made, not read: `fill(name, out)` writes a tensor's values into a float32
    array, or their bits as bfloat16 into a uint16 one."""

    def __init__(
        self, config: LlamaConfig, fill: Callable[[str, npt.NDArray[Any]], None], name: str
    ) -> None:
        super().__init__(Path(name), config, JsonTokenizerSource(Path(name)), {})
        self._fill = fill

    def load(self, into: Mapping[str, npt.NDArray[Any]], *, threads: int = 2) -> None:
        for name, out in into.items():
            self._fill(name, out)

    def _bytes(self, raw: RawTensor) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def _decode(self, kind: str, blocks: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
        raise NotImplementedError

    def _unmap(self) -> None:
        pass


def random_checkpoint(shape: str, seed: int = 11) -> MemoryCheckpoint:
    """Weights of one of `SHAPES`: normal, 0.02 wide, out of one block that is cut differently for
    each tensor, so that gigabytes take a second."""
    rng = np.random.default_rng(seed)
    # Of odd length, so that no two rows of a matrix begin at the same place.
    floats = rng.standard_normal((1 << 20) + 7, np.float32) * np.float32(0.02)
    halves = (floats.view(np.uint32) >> 16).astype(np.uint16)  # truncated: random all the same

    def fill(name: str, out: npt.NDArray[Any]) -> None:
        if out.ndim == 1:
            out[...] = rng.uniform(0.5, 1.5, out.shape)
            return
        flat, at = out.reshape(-1), zlib.crc32(name.encode()) % len(floats)
        block, start = halves if out.dtype == np.uint16 else floats, 0
        while start < flat.size:
            count = min(len(block) - at, flat.size - start)
            flat[start : start + count] = block[at : at + count]
            start, at = start + count, 0

    return MemoryCheckpoint(SHAPES[shape], fill, f"random-{shape}")


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of a model's file")
    parser.add_argument("--context", type=int, help="positions before the first token")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    tokens, rounds = (8, 1) if chosen.quick else (chosen.tokens, chosen.rounds)
    if chosen.shape:
        ids = np.random.default_rng(5).integers(0, SHAPES[chosen.shape].vocabulary, 64).tolist()
    else:
        with open_checkpoint(store.resolve(chosen.model)) as checkpoint:
            ids = load_tokenizer(checkpoint.tokenizer).encode(PROMPT)
    if chosen.context:
        ids = (ids * -(-chosen.context // len(ids)))[: chosen.context]

    def opened() -> Checkpoint:
        if chosen.shape:
            return random_checkpoint(chosen.shape)
        return open_checkpoint(store.resolve(chosen.model))

    name = "decode" if not chosen.shape else f"decode-{chosen.shape}"
    name += f"-{chosen.context}" if chosen.context else ""
    with ost.open_device(chosen.device) as device:
        result = measure(device, opened, ids, tokens, rounds)
        common.emit(name, device, chosen.out, **result)


def measure(
    device: ost.Device,
    opened: Callable[[], Checkpoint],
    prompt: list[int],
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    decoders = {}
    for way in WAYS:
        with opened() as checkpoint:
            decoders[way] = Decoder(
                device,
                checkpoint,
                max_context=max(512, len(prompt) + tokens + 1),
                graphs=way != "eager",
                build="record" if way == "record" else "capture",
                stop_tokens=(),
            )
    times: dict[str, list[int]] = {way: [] for way in WAYS}
    prompts: dict[str, list[int]] = {way: [] for way in WAYS}
    answers: dict[str, list[int]] = {}
    for number in range(rounds + 2):  # the first two warm up: run, then capture
        for way, decoder in decoders.items():
            decoder.reset()
            begin = time.perf_counter_ns()
            answer = [decoder.prefill(prompt)]
            if number > 1:
                prompts[way].append(time.perf_counter_ns() - begin)
            for _ in range(tokens):
                begin = time.perf_counter_ns()
                answer.append(decoder.decode())
                if number > 1:
                    times[way].append(time.perf_counter_ns() - begin)
            assert answers.setdefault(way, answer) == answer, f"{way}: not the same every time"
    assert len({tuple(answer) for answer in answers.values()}) == 1, "the ways do not agree"
    weights = decoders["eager"].statistics().weight_bytes
    rows = []
    floor_ms, bandwidth = floor(device, weights)
    for way, decoder in decoders.items():
        numbers, found = decoder.statistics(), common.measured(times[way])
        rows.append(
            {
                "way": way,
                "tokens_per_second": 1e6 / found.median,
                "of_floor": floor_ms * 1e3 / found.median,
                **found.fields("token_"),
                "prompt_tokens_per_second": len(prompt) * 1e9 / statistics.median(prompts[way]),
                "launches_eager": numbers.launches_eager,
                "launches_replayed": numbers.launches_replayed,
                "launches_per_token": numbers.launches_per_token if way == "eager" else 1,
                "graphs_captured": numbers.graphs_captured,
                "load_seconds": numbers.load_seconds,
                "kernel_seconds": numbers.kernel_seconds,
                "quarantined": numbers.quarantined,
            }
        )
        decoder.close()
    columns = ("way", "tokens_per_second", "of_floor", "token_median_us", "launches_per_token")
    columns = (*columns, "prompt_tokens_per_second", "kernel_seconds")
    print(common.table(f"decoding, batch 1, from position {len(prompt)}", rows, columns))
    return {
        "ceiling": {
            "floor_ms_per_token": floor_ms,
            "tokens_per_second": 1e3 / floor_ms,
            "bandwidth_gb_per_s": bandwidth / 1e9,
            "weight_bytes": weights,
        },
        "settings": {"tokens": tokens, "rounds": rounds, "prompt_tokens": len(prompt)},
        "rows": rows,
        "skipped": {},
        "summary": {"tokens_equal": True},
    }


def floor(device: ost.Device, weight_bytes: int) -> tuple[float, float]:
    """(milliseconds to read the weights once, bytes a second), by the median of several runs."""
    rng = np.random.default_rng(3)
    seconds = []
    if device.capabilities.host_memory_is_device_memory:
        matrices = [rng.standard_normal((1536, 576), np.float32) for _ in range(60)]
        vector, nbytes = rng.standard_normal(576, np.float32), 60 * 1536 * 576 * 4
        for _ in range(9):
            begin = time.perf_counter()
            for matrix in matrices:
                matrix @ vector
            seconds.append(time.perf_counter() - begin)
    else:
        nbytes, stream = 2 * (2 << 30), device.create_stream()
        source = device.array(np.resize(rng.integers(0, 255, 1 << 26, np.uint8), 2 << 30))
        target = device.empty(2 << 30)
        for _ in range(9):
            begin, end = (device.create_event(timing=True) for _ in range(2))
            stream.record(begin)
            ost.copy(stream, target, source)
            stream.record(end)
            stream.synchronize()
            seconds.append(end.elapsed_since(begin) / 1e3)
    bandwidth = nbytes / statistics.median(seconds)
    return weight_bytes / bandwidth * 1e3, bandwidth


if __name__ == "__main__":
    main()
