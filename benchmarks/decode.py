"""Decoding with a real model: eager, graphs by capture, graphs by record, in turns in one run.

The floor is the time to read all weights once at the bandwidth that this machine shows for just
that: on the host NumPy's own matrix-vector products over matrices of the model's shapes, on a GPU
a large copy (bytes read and written).  Tokens a second are from median milliseconds a token.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import ostinato as ost
from benchmarks import common
from ostinato.models import Decoder, store
from ostinato.models.tokenizer import load_tokenizer

PROMPT = "Explain in a few sentences why the sky is blue and why sunsets are red."
WAYS = ("eager", "capture", "record")


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    tokens, rounds = (8, 1) if chosen.quick else (chosen.tokens, chosen.rounds)
    path = store.resolve(chosen.model)
    with ost.open_device(chosen.device) as device:
        result = measure(device, path, tokens, rounds)
        common.emit("decode", device, chosen.out, **result)


def measure(device: ost.Device, path: object, tokens: int, rounds: int) -> dict[str, object]:
    decoders = {
        way: Decoder(
            device,
            path,
            max_context=512,
            graphs=way != "eager",
            build="record" if way == "record" else "capture",
            stop_tokens=(),
        )
        for way in WAYS
    }
    from ostinato.models import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        prompt = load_tokenizer(checkpoint.tokenizer).encode(PROMPT)
    times: dict[str, list[int]] = {way: [] for way in WAYS}
    answers: dict[str, list[int]] = {}
    for number in range(rounds + 1):  # the first round warms up
        for way, decoder in decoders.items():
            decoder.reset()
            answer = [decoder.prefill(prompt)]
            for _ in range(tokens):
                begin = time.perf_counter_ns()
                answer.append(decoder.decode())
                if number:
                    times[way].append(time.perf_counter_ns() - begin)
            assert answers.setdefault(way, answer) == answer, f"{way}: not the same every time"
    assert len({tuple(answer) for answer in answers.values()}) == 1, "the ways do not agree"
    weights = decoders["eager"].statistics().weight_bytes
    floor_ms, bandwidth = floor(device, weights)
    rows = []
    for way, decoder in decoders.items():
        numbers, found = decoder.statistics(), common.measured(times[way])
        rows.append(
            {
                "way": way,
                "tokens_per_second": 1e6 / found.median,
                "of_floor": floor_ms * 1e3 / found.median,
                **found.fields("token_"),
                "launches_eager": numbers.launches_eager,
                "launches_replayed": numbers.launches_replayed,
                "launches_per_token": numbers.launches_per_token if way == "eager" else 1,
                "graphs_captured": numbers.graphs_captured,
            }
        )
        decoder.close()
    columns = ("way", "tokens_per_second", "of_floor", "token_median_us", "launches_per_token")
    print(common.table("decoding, batch 1", rows, columns))
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
        source = device.array(rng.integers(0, 255, 2 << 30, np.uint8))
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
