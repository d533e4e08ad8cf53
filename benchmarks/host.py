"""Decoding on a CPU beside llama.cpp: idle and with one core busy, prompts, memory.

    python -m benchmarks.host                        SmolLM2-135M as it comes (Q4_1), BF16 and F32
    python -m benchmarks.host --types Q4_1 --quick

Every run is a process of its own, so that its memory can be measured; the two libraries take turns,
and a row has the median of its rounds.  BF16 and F32 are the same model with converted weights.
Busy: another process computes on one core all the time.  `load`: the machine's load average when a
row's last run began, which includes the runs themselves.  Without `llama_cpp` (llama-cpp-python, in
this interpreter) only ours is measured.  `--device` has no effect.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.peers.llama_peer import LLAMA_CPP, LlamaCpp
from ostinato.bench.decode import prompt_tokens
from ostinato.bench.ways import Contestant, DecoderWay, LaunchMode
from ostinato.models import Decoder
from ostinato.models.files.store import pull
from ostinato.models.host.packed_kernels import default_threads, description

OURS = "ostinato"
COLUMNS = (
    "type", "machine", "way", "tokens_per_second", "prompt_tokens_per_second", "cpu_ms_per_token",
    "memory_mb", "load",
)  # fmt: skip
_POSITIONS = 1024
_VOCABULARY = 49152


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--types", default="Q4_1,BF16,F32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--child", nargs=2, help="of this program: a way and a model's file")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rounds, chosen.tokens, chosen.prompt = 1, 8, 32
    if chosen.child:
        print(json.dumps(measure(*chosen.child, tokens=chosen.tokens, prompt=chosen.prompt)))
        return 0
    ways, skipped = [OURS], {}
    if importlib.util.find_spec("llama_cpp") is None:
        skipped[LLAMA_CPP] = "llama_cpp is not installed in this interpreter"
    else:
        ways.append(LLAMA_CPP)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen.types.split(","):
            path = model_of(kind, Path(folder))
            for busy in (False, True):
                rows += compare(kind, path, ways, busy, chosen)
    print(common.table("decoding on a CPU", rows, COLUMNS))
    with ost.open_device("host") as device:
        common.emit(
            "host",
            device,
            chosen.out,
            ceiling={"what": "llama.cpp in the same run" if LLAMA_CPP in ways else "none"},
            settings={
                "rounds": chosen.rounds,
                "tokens": chosen.tokens,
                "prompt": chosen.prompt,
                "threads": default_threads(),
                "kernels": description(),
            },
            rows=rows,
            skipped=skipped,
        )
    return 0


def compare(
    kind: str, path: Path, ways: Sequence[str], busy: bool, chosen: Any
) -> list[dict[str, object]]:
    """Measures all ways in turns.  Returns a row for each."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    loads = {}
    with one_core_busy() if busy else nullcontext():
        for _ in range(chosen.rounds):
            for way in ways:
                loads[way] = os.getloadavg()[0]
                runs[way].append(run_child(way, path, chosen))
    rows: list[dict[str, object]] = []
    for way, found in runs.items():
        medians = {k: round(statistics.median(run[k] for run in found), 2) for k in found[0]}
        machine = "one core busy" if busy else "idle"
        rows.append(
            {"type": kind, "machine": machine, "way": way, **medians, "load": round(loads[way], 2)}
        )
    return rows


def run_child(way: str, path: Path, chosen: Any) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.host", "--child", way, str(path)]
    command += ["--tokens", str(chosen.tokens), "--prompt", str(chosen.prompt)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(way: str, path: str, *, tokens: int, prompt: int) -> dict[str, float]:
    """Measures, in this process, one way's figures and its peak memory."""
    if way == LLAMA_CPP:
        peer = LlamaCpp(Path(path))
        peer.reserve(1, _POSITIONS)
        return numbers(peer, tokens, prompt)
    with (
        ost.open_device("host") as device,
        Decoder(device, path, max_context=_POSITIONS, stop_tokens=()) as decoder,
    ):
        return numbers(DecoderWay(LaunchMode(OURS), decoder), tokens, prompt)


def numbers(one: Contestant, tokens: int, prompt: int) -> dict[str, float]:
    for count in (4, 4, 4):  # launch by launch, captured, replayed
        one.place(1, 20)
        one.decode(count)
    one.place(1, 20)
    before = os.times()
    seconds = one.decode(tokens).seconds
    after = os.times()
    for number in range(2):
        one.prompt(prompt_tokens(_VOCABULARY, prompt, number))
    taken = one.prompt(prompt_tokens(_VOCABULARY, prompt, 2)).seconds
    cpu = after.user + after.system - before.user - before.system
    return {
        "tokens_per_second": tokens / seconds,
        "prompt_tokens_per_second": prompt / taken,
        "cpu_ms_per_token": cpu / tokens * 1e3,
        "memory_mb": peak_bytes() / 1e6,
    }


def peak_bytes() -> int:
    """Returns the peak memory of this process.  getrusage's value would include the parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


@contextmanager
def one_core_busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def model_of(kind: str, folder: Path) -> Path:
    """Returns the file of SmolLM2-135M, or of a copy with its matrices converted to this type."""
    original = pull("smollm2-135m")
    if kind == "Q4_1":
        return original
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader, path = GGUFReader(original), folder / f"{kind}.gguf"
    writer = GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    wanted = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if values.ndim < 2 or kind == "F32":
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    sys.exit(main())
