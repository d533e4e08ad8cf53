"""What `ostinato.interop.torch.observe` costs five programs that know nothing of it.

    python -m benchmarks.observe [--programs generate,vision] [--out DIR] [--device cuda:0]

Each program of `observe_programs.py` runs in two processes, without the line and with it.  Two
equal processes differ by more than the line costs, so times are of the one with the line alone,
which closes and opens the observation by turns, between blocks of some steps with a wait for the
GPU after each.  `slower_percent` is the median, over all open blocks, of the times of one by the
mean of the closed ones before and behind it; `least` and `most` are the ends of its interval of
95 %.  `closed_percent` is the same of closed blocks beside closed ones, `closed_least` and
`closed_most` with it: what the measurement says of no difference at all.

`replay_us` is the host's time of one call of `replay` while the observation is closed, and
`observed_replay_us` while it is open; `computed_percent` is their difference for the `replays` of
a step, by `step_us`.

`answers`: every array of the fifth step has the same bits in both.  `listed` are the graphs that
`observed()` knows, of those that were `captured`.  `capture_end_ms` is the time of torch's
`capture_end`, in which a graph is instantiated, of all captures; `observed_…` with `keep_graph` by
the observer.

Without torch and a GPU nothing is measured.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import math
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
WAYS = ("plain", "observed")
MOST = 0.5
"""The most percent by which a step may be slower."""
_SECONDS, _QUICK_SECONDS = 4, 1


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


def measure(ways: Mapping[str, Program], seconds: float) -> dict[str, Any]:
    """Returns the row of a program, whose processes have said that they are ready."""
    plain, observed = (ways[way].ask("answers") for way in WAYS)
    cost = ways["observed"].ask("cost", seconds)
    closed, opened = cost["closed_us"], cost["open_us"]
    step = statistics.median(closed)
    added = cost["replays"] * (cost["observed_replay_us"] - cost["replay_us"])
    return {
        "step_us": round(step, 2),
        **_slower("slower_percent", "least", "most", opened, closed),
        **_slower("closed_percent", "closed_least", "closed_most", closed[1::2], closed[::2]),
        "replays": cost["replays"],
        "replay_us": cost["replay_us"],
        "observed_replay_us": cost["observed_replay_us"],
        "computed_percent": round(100 * added / step, 3),
        "arrays": len(plain["digests"]),
        "answers": "equal" if plain["digests"] == observed["digests"] else "different",
        "captured": observed["captured"],
        "listed": len(observed["nodes"]),
        "nodes": sum(observed["nodes"]),
        "capture_end_ms": plain["capture_end_ms"],
        "observed_capture_end_ms": observed["capture_end_ms"],
        "blocks": len(closed) + len(opened),
    }


def _slower(
    median: str, least: str, most: str, between: Sequence[float], around: Sequence[float]
) -> dict[str, float]:
    """Returns by how many percent times are more than those before and behind them: the median,
    and the interval of 95 % in which it is, by order."""
    pairs = zip(between, around, around[1:], strict=False)
    found = sorted(100 * (2 * one / (before + behind) - 1) for one, before, behind in pairs)
    middle, half = (len(found) - 1) / 2, 0.98 * math.sqrt(len(found))
    return {
        median: round(statistics.median(found), 3),
        least: round(found[max(0, math.floor(middle - half))], 3),
        most: round(found[min(len(found) - 1, math.ceil(middle + half))], 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--programs", default="", help="some of them, with commas between")
    chosen = parser.parse_args(arguments)
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    names = [n for n in PROGRAMS if not chosen.programs or n in chosen.programs.split(",")]
    seconds = _QUICK_SECONDS if chosen.quick else _SECONDS
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        env = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }
        programs: dict[str, dict[str, Program]] = {name: {} for name in names}
        started = {
            (name, way): held.enter_context(
                running(name, way == "observed", folder / f"{name}-{way}.txt", env)
            )
            for name in names
            for way in WAYS
        }
        for (name, way), program in started.items():
            if common.optional(skipped, name, program.answer) is not None:
                programs[name][way] = program
        for name in names:
            if name in skipped:
                continue
            row = common.optional(skipped, name, partial(measure, programs[name], seconds))
            if row is not None:
                rows.append({"program": name, **row})  # type: ignore[dict-item]
                print(rows[-1], flush=True)
    columns = [name for name in rows[0] if name not in ("arrays", "blocks")] if rows else []
    print(common.table("Programs under observe()", rows, columns))
    with ost.open_device(chosen.device) as device:
        common.emit(
            "observe",
            device,
            chosen.out,
            ceiling={"what": "slower than without the line, at most, percent", "percent": MOST},
            settings={
                "seconds": seconds,
                "torch": torch.__version__,
                "quick": chosen.quick,
            },
            rows=rows,
            skipped=skipped,
            summary={
                "programs": len(rows),
                "equal": sum(row["answers"] == "equal" for row in rows),
                "all_listed": sum(row["listed"] == row["captured"] for row in rows),
                "below": sum(row["most"] < MOST for row in rows),
                "computed_below": sum(row["computed_percent"] < MOST for row in rows),
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
