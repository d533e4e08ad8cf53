"""What `ostinato.interop.torch.observe` costs five programs that know nothing of it.

    python -m benchmarks.observe [--programs generate,vision] [--out DIR] [--device cuda:0]

Each program of `observe_programs.py` runs in three processes: without the line, with it, and
without it once more.  All three are on the GPU at once and work by turns, so that clocks and other
load change for all of them; a turn is the median of its steps, with a wait for the GPU after each.
Two equal processes differ by more than the line costs (`control`: the two without it), so the
process with the line also times steps while the observation is closed and while it is open, ten by
ten, on the same executables: `times` is the ratio of their medians, as the median of several.
`processes` is the process with the line by that without it.

`answers`: every array of the fifth step has the same bits in the three.  `listed` are the graphs
that `observed()` knows, of those that were `captured`.  `capture_end_ms` is the time of torch's
`capture_end`, in which a graph is instantiated, of all captures; `observed_…` with `keep_graph` by
the observer.

Without torch and a GPU nothing is measured.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ostinato as ost
from benchmarks import common

_PROGRAM = Path(__file__).with_name("observe_programs.py")
PROGRAMS = (
    "generate",
    "make_graphed_callables",
    "capture by hand",
    "vision model",
    "Triton kernel",
)
WAYS = ("plain", "observed", "again")
MOST = 1.005
"""The most times of a step without the line that was asked for."""
_TURNS, _TURN_SECONDS = 7, 0.15


class Program:
    """One process of a program.  Raises RuntimeError with its last words if it ends."""

    def __init__(self, name: str, observed: bool, log: Path, env: Mapping[str, str]) -> None:
        self._log = log
        command = [sys.executable, str(_PROGRAM), name, *["observe"] * observed]
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **env},
            )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(self._log.read_text(encoding="utf-8", errors="replace")[-400:])

    def ask(self, *words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self.answer()


@contextmanager
def running(name: str, observed: bool, log: Path, env: Mapping[str, str]) -> Iterator[Program]:
    program = Program(name, observed, log, env)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


def measure(ways: Mapping[str, Program], turns: int) -> dict[str, Any]:
    """Returns the row of a program, whose processes have said that they are ready."""
    plain = ways["plain"]
    steps = max(4, min(2000, int(_TURN_SECONDS * 1e6 / plain.ask("turn", 20)["us"])))
    found: dict[str, list[float]] = {way: [] for way in ways}
    pairs = []
    for turn in range(turns):
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            found[way].append(ways[way].ask("turn", steps)["us"])
        pairs.append(ways["observed"].ask("pairs", 2 * steps))

    def times(way: str) -> float:
        ratios = [one / other for one, other in zip(found[way], found["plain"], strict=True)]
        return round(statistics.median(ratios), 4)

    answers = {way: program.ask("answers") for way, program in ways.items()}
    digests = [answer["digests"] for answer in answers.values()]
    observed = answers["observed"]
    return {
        "step_us": round(statistics.median(p["closed_us"] for p in pairs), 2),
        "observed_us": round(statistics.median(p["us"] for p in pairs), 2),
        "times": round(statistics.median(p["us"] / p["closed_us"] for p in pairs), 4),
        "processes": times("observed"),
        "control": times("again"),
        "arrays": len(digests[0]),
        "answers": "equal" if digests.count(digests[0]) == len(digests) else "different",
        "captured": observed["captured"],
        "listed": len(observed["nodes"]),
        "nodes": sum(observed["nodes"]),
        "capture_end_ms": answers["again"]["capture_end_ms"],
        "observed_capture_end_ms": observed["capture_end_ms"],
        "steps": 2 * steps * turns,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--programs", default="", help="some of them, with commas between")
    chosen = parser.parse_args(arguments)
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    names = [n for n in PROGRAMS if not chosen.programs or n in chosen.programs.split(",")]
    turns = 2 if chosen.quick else _TURNS
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TRITON_CACHE_AUTOTUNING": "1",
        }
        programs: dict[str, dict[str, Program]] = {name: {} for name in names}
        # The first ones compile and tune; the others find that in the caches.
        for several in (WAYS[:1], WAYS[1:]):
            started = {
                (name, way): held.enter_context(
                    running(name, way == "observed", folder / f"{name}-{way}.txt", env)
                )
                for name in names
                if name not in skipped
                for way in several
            }
            for (name, way), program in started.items():
                if common.optional(skipped, name, program.answer) is not None:
                    programs[name][way] = program
        for name in names:
            if name in skipped:
                continue
            row = common.optional(skipped, name, partial(measure, programs[name], turns))
            if row is not None:
                rows.append({"program": name, **row})  # type: ignore[dict-item]
    columns = [name for name in rows[0] if name not in ("arrays", "steps")] if rows else []
    print(common.table("Programs under observe()", rows, columns))
    with ost.open_device(chosen.device) as device:
        common.emit(
            "observe",
            device,
            chosen.out,
            ceiling={"what": "a step without the line; at most so many times of it", "times": MOST},
            settings={
                "turns": turns,
                "torch": torch.__version__,
                "quick": chosen.quick,
            },
            rows=rows,
            skipped=skipped,
            summary={
                "programs": len(rows),
                "equal": sum(row["answers"] == "equal" for row in rows),
                "all_listed": sum(row["listed"] == row["captured"] for row in rows),
                "below": sum(row["times"] < MOST for row in rows),
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
