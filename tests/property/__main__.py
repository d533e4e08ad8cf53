"""Random programs of calls of the library, each compared with an oracle in NumPy.

    python -m tests.property --programs 10000                     # on the host driver
    python -m tests.property --device cuda:0 --minutes 8
    python -m tests.property --programs 20 --length 10000         # long ones

Prints counts, and one line of JSON at the end.  A program that fails is made as short as it can
be, and printed as Python that runs it again; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.device import open_device
from tests.property import engine
from tests.property.engine import Failure, Step
from tests.property.threads import ThreadRules, Uncompiled

LINES = 500
"""Programs between two lines of progress."""
HANG = 300.0
"""Seconds after which a program of a hundred steps is taken to hang."""
PATIENCE = 240.0
"""Seconds that the reduction of a program on a GPU may take: each attempt has its own process."""


def kind_of(device: str, *, compiled: bool = True) -> type[ThreadRules]:
    """The rules on a device: "host", "cuda:0", …"""
    if device == "host":
        return ThreadRules if compiled else Uncompiled
    from tests.property.cuda import CudaRules, UncompiledCuda

    ordinal = int(device.partition(":")[2] or 0)
    made = CudaRules if compiled else UncompiledCuda
    return type(made.__name__, (made,), {"ordinal": ordinal})


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.replay:
        return _replay(given)
    if given.device != "host" and given.journal is None:
        return _guarded(given, sys.argv[1:] if arguments is None else arguments)
    open_device(given.device).close()  # where there is none, that is said, and no program fails
    counts: Counter[str] = Counter()
    begun = time.perf_counter()
    programs = 0
    failed: Failure | None = None
    seed = given.seed
    while failed is None and not _enough(given, programs, begun):
        seed = given.seed + programs
        compiled = seed % 4 != 3
        kind = kind_of(given.device, compiled=compiled)
        failed = _watched(kind, seed, given.length, counts, given.journal)
        programs += 1
        if programs % LINES == 0:
            seconds = time.perf_counter() - begun
            print(
                f"{programs} programs, {counts['launches']} launches, {seconds:.0f} s", flush=True
            )
    summary: dict[str, Any] = {
        "device": given.device,
        "programs": programs,
        "first_seed": given.seed,
        "length": given.length,
        "steps": sum(counts[name] for name in engine.rules_of(ThreadRules)),
        "launches": counts["launches"],
        "calls": counts["calls"],
        "changes": counts["changes"],
        "refused": _named(counts, "refused: "),
        "actions": {name: counts[name] for name in sorted(engine.rules_of(ThreadRules))},
        "seconds": round(time.perf_counter() - begun, 1),
        "failed": None,
    }
    for what in ("programs", "steps", "launches", "calls", "changes"):
        print(f"{what:<28} {summary[what]}")
    for group in ("refused", "actions"):
        print(group)
        for name, count in summary[group].items():
            print(f"  {name:<26} {count}")
    if failed is not None:
        summary["failed"] = {"seed": seed, "kind": failed.kind}
        compiled = seed % 4 != 3
        print(f"seed {seed}, step {len(failed.steps)}: {failed.error!r}", flush=True)
        short = _shortest(given.device, compiled, failed)
        print(f"reduced from {len(failed.steps)} steps to {len(short)}:")
        print(program(given.device, compiled, short), flush=True)
    print(json.dumps(summary))
    return int(failed is not None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.property",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="host", help="host, or cuda:N")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--programs", type=int, default=200, help="how many")
    much.add_argument("--minutes", type=float, help="as many as fit into this time")
    parser.add_argument("--length", type=int, default=40, help="steps of a program")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--uncompiled", action="store_true", help="with --replay")
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--replay", action="store_true", help="run the steps on standard input, as printed"
    )
    return parser


def _enough(given: argparse.Namespace, programs: int, begun: float) -> bool:
    if given.minutes is not None:
        return time.perf_counter() - begun >= 60 * given.minutes
    return programs >= given.programs


def _named(counts: Counter[str], prefix: str) -> dict[str, int]:
    return {n.removeprefix(prefix): c for n, c in sorted(counts.items()) if n.startswith(prefix)}


class _Journal(list[Step]):
    """The steps of a program, also in a file, for whoever finds the process gone."""

    def __init__(self, path: Path, seed: int) -> None:
        self._file = path.open("w", encoding="utf-8")
        print(seed, file=self._file, flush=True)

    def append(self, step: Step) -> None:
        super().append(step)
        print(step, file=self._file, flush=True)


def _guarded(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs the programs in a process of their own; one that ends it by a signal is reduced."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.property", *arguments]
        status = subprocess.run([*command, "--journal", str(journal)], check=False).returncode
        if status >= 0:
            return status
        seed, *lines = journal.read_text(encoding="utf-8").splitlines()
    steps, kind, compiled = (
        engine.read("\n".join(lines)),
        f"exit status {status}",
        int(seed) % 4 != 3,
    )
    print(f"seed {seed}, step {len(steps)}: {kind}", flush=True)

    def run(fewer: Sequence[Step]) -> str | None:
        return _in_a_process(given.device, compiled, fewer)

    if run(steps) == kind:
        steps = engine.shorter(steps, kind, run, PATIENCE)
    else:
        print("the steps alone do not end a process so")
    print(program(given.device, compiled, steps), flush=True)
    print(json.dumps({"device": given.device, "failed": {"seed": int(seed), "kind": kind}}))
    return 1


def _watched(
    kind: type[ThreadRules],
    seed: int,
    length: int,
    counts: Counter[str],
    journal: Path | None = None,
) -> Failure | None:
    """One program, which ends the process with what it had done if it hangs."""
    done: list[Step] = [] if journal is None else _Journal(journal, seed)

    def hangs() -> None:
        print(f"seed {seed} hangs after these steps:", *done, sep="\n    ", flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    watch = threading.Timer(HANG * max(1.0, length / 100), hangs)
    watch.daemon = True
    watch.start()
    try:
        return engine.find(kind, seed, length, counts, done)
    finally:
        watch.cancel()


def program(device: str, compiled: bool, steps: Sequence[Step]) -> str:
    """Python that runs these steps again, from the root of the repository."""
    lines = "\n".join(f"    {step}" for step in steps)
    options = "" if compiled else ", compiled=False"
    return (
        "from tests.property.__main__ import kind_of\n"
        "from tests.property.engine import replay\n\n"
        f'replay(kind_of("{device}"{options}), """\n{lines}\n""")'
    )


def _shortest(device: str, compiled: bool, failure: Failure) -> list[Step]:
    if device == "host":
        return engine.reduce(kind_of(device, compiled=compiled), failure).steps

    def run(steps: Sequence[Step]) -> str | None:
        return _in_a_process(device, compiled, steps)

    return engine.shorter(failure.steps, failure.kind, run, PATIENCE)


def _in_a_process(device: str, compiled: bool, steps: Sequence[Step]) -> str | None:
    """How a program fails in a process of its own: one that failed may have lost the context."""
    command = [sys.executable, "-m", "tests.property", "--device", device, "--replay"]
    if not compiled:
        command.append("--uncompiled")
    text = "\n".join(map(str, steps))
    try:
        ended = subprocess.run(command, input=text, text=True, capture_output=True, timeout=HANG)
    except subprocess.TimeoutExpired:
        return "it hangs"
    try:
        return json.loads(ended.stdout.splitlines()[-1])["failed"]
    except (IndexError, ValueError):
        return f"exit status {ended.returncode}"


def _replay(given: argparse.Namespace) -> int:
    kind = kind_of(given.device, compiled=not given.uncompiled)
    failure = engine.run_again(kind, sys.stdin.read())
    if failure is not None:
        print(repr(failure.error))
    print(json.dumps({"failed": None if failure is None else failure.kind}))
    return int(failure is not None)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # keys are quarantined and faults injected all the time
    gc.collect()
    gc.freeze()  # collections, of which a program makes many, look at its own objects alone
    sys.exit(main())
