"""Time from process start to the first token, by phase: fresh processes, warm caches.

    python -m benchmarks.startup                  the real model (OSTINATO_MODEL_FILE, or fetched)
    python -m benchmarks.startup --shape 135M     random weights of that shape; needs no file

The first process compiles kernels and bytecode that are not on disk yet, and is not counted.  The
others find the file in the page cache and the kernels on disk.  Their phases are: interpreter,
imports, device, file, weights (read, uploaded, converted), buffers, kernels (found and loaded),
prompt, first token.  The tokenizer is built while the weights are read.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ostinato as ost
from benchmarks import common
from ostinato.models.files import store

CONTEXT = 512
_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--model", default=os.environ.get("OSTINATO_MODEL_FILE", "smollm2-135m"))
    parser.add_argument("--shape", help="random weights instead of a model's file, such as 135M")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    rounds = 1 if chosen.quick else chosen.rounds
    model = "" if chosen.shape else str(store.resolve(chosen.model))
    command = [chosen.device, model, chosen.shape or "", str(CONTEXT)]
    found, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        # Installed packages have bytecode, so it is kept here, whatever the environment sets.
        keeping = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        start_up(command, keeping)  # compiles, and brings the file into the page cache
        for _ in range(rounds):
            found.append(start_up(command, keeping))
            begin = time.monotonic_ns()
            subprocess.run([sys.executable, "-c", "import numpy"], check=True, env=keeping)
            bare.append(time.monotonic_ns() - begin)
    assert len({answer["token"] for answer in found}) == 1, "not the same token every time"
    rows = [row(phase, [a["phases_ns"][phase] for a in found]) for phase in found[0]["phases_ns"]]
    rows.append(row("process start to first token", [a["total_ns"] for a in found]))
    title = f"start-up of {chosen.shape or chosen.model} on {chosen.device}"
    print(common.table(title, rows, ("phase", "median_ms", "min_ms", "max_ms")))
    with ost.open_device(chosen.device) as device:
        common.emit(
            "startup" + (f"-{chosen.shape}" if chosen.shape else ""),
            device,
            chosen.out,
            ceiling={
                "what": "a Python process that imports NumPy and ends",
                "us": statistics.median(bare) / 1e3,
            },
            settings={
                "rounds": rounds,
                "context": CONTEXT,
                "prompt_tokens": found[0]["prompt_tokens"],
                "bytecode": "kept by the process that is not counted",
            },
            rows=rows,
            skipped={},
            summary={"seconds": rows[-1]["median_ms"] / 1e3, "target_seconds": 2.0},
        )
    return 0


def start_up(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs one process, and returns its figures.  Raises CalledProcessError; stderr is shown."""
    spawned = time.monotonic_ns()
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup_child", str(spawned), *command],
        cwd=common.ROOT.parent,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def row(phase: str, nanoseconds: Sequence[int]) -> dict[str, Any]:
    """Returns a row of the table, in milliseconds."""
    return {
        "phase": phase,
        "median_ms": round(statistics.median(nanoseconds) / 1e6, 2),
        "min_ms": round(min(nanoseconds) / 1e6, 2),
        "max_ms": round(max(nanoseconds) / 1e6, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
