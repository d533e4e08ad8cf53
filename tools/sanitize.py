"""Runs compute-sanitizer over the GPU tests, in parallel parts, and writes one file of results.

    PYTHONPATH=src python3 -m tools.sanitize [--out DIR] [--only NAME ...] [--jobs N] [--gpus N]
        [--within S] [--after FILE] [--keyword WORDS]

A part is one tool over one selection of tests, in a process of its own; the parts share the GPU,
or are distributed over the GPUs in turn.  Tests that are marked `alone` come last, one at a time.
racecheck, initcheck and synccheck run over small cases of the kernels (marked `sanitize`), memcheck
over all tests of drivers, graphs and decoder except those in LEFT_OUT.

`--after FILE`: results of an earlier run of the same code that was cut off.  Its sound parts are
not run again; their rows are taken from FILE, with the commit and the date of that run.

Each part has three files under DIR/sanitize-logs: the output of pytest, its report, and the output
of the tool.  The
result is DIR/sanitize-{device}.json.  Exit status: 0 if every part is complete and sound; 1 if one
reports an error, fails a test, selects none, or was cut off; 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools import suite

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "ostinato.sanitize/1"
FOUND_ERRORS = 9
"""The sanitizer's exit status if it reports an error."""
FIRST_PORT, PORTS = 49152, 16
"""Ports for the connection of the tool to its program: the first one, and the number for each
part."""
GRACE = 10.0
"""Seconds for a part that is cut off to write its summaries."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tool over some tests."""

    name: str
    tool: str
    tests: tuple[str, ...]
    marks: str = "gpu and not alone"
    keyword: str = ""
    timeout: float = 500
    """The time limit, in seconds."""
    alone: bool = False
    """True if no other part may run at the same time."""
    share: tuple[int, int] = (1, 1)
    """(k, n): the k-th of n equal shares of the tests."""

    def command(self, sanitizer: str, log: Path, junit: Path, port: int) -> list[str]:
        """Returns the command; the tool's output goes to `log`, and pytest's report to `junit`.  It
        may use PORTS ports from `port` on."""
        tool = [sanitizer, "--tool", self.tool, "--target-processes", "all"]
        # Tests provoke failed calls and processes on purpose: pytest judges these, and the tool
        # only errors on the device.
        tool += ["--report-api-errors", "no", "--check-exit-code", "no"]
        tool += ["--error-exitcode", str(FOUND_ERRORS), "--log-file", str(log)]
        # By default all parts would try the same ten ports.  Launch timeout 0: no limit, since the
        # part has one.
        tool += ["--port", str(port), "--max-connections", str(PORTS), "--launch-timeout", "0"]
        pytest = [sys.executable, "-m", "pytest", *self.tests, "-v", "--require-gpu"]
        pytest += [f"--junitxml={junit}"]
        pytest += ["-p", "no:cacheprovider", "-m", self.marks, "--timeout", str(int(self.timeout))]
        if self.keyword:
            pytest += ["-k", self.keyword]
        if self.share[1] > 1:
            pytest += ["--share", "{}/{}".format(*self.share)]
        return tool + pytest


_KERNELS = (
    "tests/models/test_kernels_bricks.py",
    "tests/models/test_kernels_cuda.py",
    "tests/models/test_kernels_library.py",
    "tests/models/test_dequantise_cuda.py",
)
_JOIN = "tests/relational/test_join.py"
_JOINS = ("tests/relational/test_columns.py", "tests/relational/test_closure.py")
_RUN, _CONDITIONAL = "tests/models/test_decoder_run.py", "tests/contract/test_driver_conditional.py"
_DECODER = tuple(
    name
    for path in sorted((ROOT / "tests" / "models").glob("test_decoder*.py"))
    if (name := path.relative_to(ROOT).as_posix()) != _RUN
)
_GPU = "tests/gpu/"
_ADOPTION = (_GPU + "test_adoption_handles.py", _GPU + "test_lifetime.py")
_WAYS = _GPU + "test_twelve_ways.py"
# While a host function blocks a stream, memcheck blocks launches on other streams too, and a test
# that waits for such a launch waits until the host function's timeout.  Tests of this behaviour are
# left out by name: `held_stream_holds_nobody`, `two_threads_on_two_streams` and `columns_live`.
# memcheck also reads the Python frames of a launch, whose locals CPython then keeps alive:
# `held_and_dropped`, `comes_back`, `memory_back`, `is_used_again`, `that_is_dropped`,
# `lets_go_of_what` and `leaves_no_graph` test that objects are freed.
LEFT_OUT = {
    _GPU + "test_poison.py": "breaks contexts on purpose",
    _GPU + "test_black_box_gpu.py": "breaks contexts on purpose",
    "tests/explain/test_black_box.py": "breaks contexts on purpose, and has conditional nodes",
    _GPU + "test_bench_gpu.py": "times what the decoder's tests run",
    _GPU + "test_disk_foreign.py": "the tool excludes CUPTI, which collects machine code",
    "tests/test_driver_faults.py": "makes faults on purpose, in other processes",
    "tests/test_endings.py": "makes faults on purpose, in other processes",
    "tests/property/test_property.py": "half of its programs have conditional nodes",
    _CONDITIONAL: "memcheck breaks graphs with conditional nodes (docs/log/tests.md)",
    _RUN: "its loops are conditional nodes",
    _GPU + "test_graphed_works.py": "whole models of other libraries, minutes under the tool",
    _GPU + "test_graphed_generate_gpu.py": "whole models of another library",
    _GPU + "test_accelerate_gpu.py": "the kernels that the decoder's tests run, under transformers",
    _GPU + "test_tensor_parallel_gpu.py": "processes on several GPUs, which wait for each other",
    _GPU + "test_rank_products.py": "kernels of two ranks on one GPU, which wait for each other",
    _GPU + "test_samples_gpu.py": "what the samples of the docs launch other tests launch",
    "tests/models/test_served_answers.py": "batches that the decoder's tests run",
    "tests/step/test_load.py": "a hundred thousand requests by kernels that other tests run",
    "tests/relational/test_peers.py": "thousands of joins by the kernels that test_join.py runs",
    "tests/test_fork.py": "a forked child has no device, and the tool none either",
    "tests/test_benchmarks.py": "times what other tests run",
    "tests/models/test_tuning.py": "runs candidates of the kernels that the decoder's tests run",
    "tests/cli/test_tune.py": "a search for so many seconds; what it launches others launch",
}
"""Files of GPU tests that no part runs, with the reasons."""
# Leaves out the decoder's tests that need their size (a whole model, real widths, hundreds of
# steps), and those that run another library or loops.  The other tests run the same kernels.
_SMALL = " and ".join(
    f"not {name}"
    for name in (
        *("64_greedy", "8b", "real_widths", "same_bits_each_time", "transformers"),
        *("every_way_of_running", "same_bits_for_a_batch", "a_loop_gives"),
    )
)
_MEASURED = (
    "tests/step",
    "tests/contract",
    "tests/footguns",
    _ADOPTION[1],
    _WAYS,
    _KERNELS[-1],
    *_DECODER,
)


def _memcheck(shares: int, name: str, *tests: str, keyword: str = "") -> list[Part]:
    return _shares(Part(f"memcheck {name}", "memcheck", tests, keyword=keyword), shares)


def _kernels(tool: str, shares: int) -> list[Part]:
    tests = (*_KERNELS, _JOIN)
    return _shares(Part(f"{tool} kernels", tool, tests, marks="gpu and sanitize"), shares)


def _shares(part: Part, count: int) -> list[Part]:
    if count == 1:
        return [part]
    each = range(1, count + 1)
    return [replace(part, name=f"{part.name} {k}/{count}", share=(k, count)) for k in each]


PARTS: tuple[Part, ...] = (
    # The longest parts come first, so that none of them begins last.
    *_kernels("racecheck", 24),
    *_memcheck(24, "decoder", *_DECODER, keyword=_SMALL),
    *_memcheck(
        6,
        "footguns",
        "tests/footguns",
        keyword="not two_threads_on_two_streams and not lets_go_of_what and not leaves_no_graph",
    ),
    *_memcheck(12, "kernels", *_KERNELS, keyword="not smollm2 and not same_bits"),
    *_memcheck(3, "planted", "tests/planted"),
    *_memcheck(
        2,
        "explanations",
        "tests/explain/test_audit.py",
        "tests/explain/test_difference_random.py",
        "tests/explain/test_first_difference.py",
        "tests/explain/test_node_times.py",
        keyword="not that_is_dropped",
    ),
    *_memcheck(3, "twelve ways to break a capture", _WAYS),
    *_memcheck(1, "adopted from torch", _GPU + "test_adoption_torch.py"),
    *_memcheck(
        2,
        "graphed in torch",
        _GPU + "test_graphed_torch.py",
        keyword="not soak and not comes_back and not memory_back and not is_dropped",
    ),
    *_memcheck(
        1,
        "graphed in CuPy",
        *(_GPU + "test_graphed_cupy.py", "tests/interop/test_chains_cupy.py"),
    ),
    *_memcheck(1, "graph files", _GPU + "test_disk_gpu.py"),
    *_memcheck(1, "adopted from CuPy", _GPU + "test_adoption_cupy.py"),
    *_memcheck(1, "adopted from Triton", _GPU + "test_adoption_triton.py"),
    *_memcheck(1, "adopted from Numba", _GPU + "test_adoption_numba.py"),
    *_memcheck(1, "lines of others", _GPU + "test_trace_foreign.py"),
    *_memcheck(
        5,
        "contract",
        "tests/contract",
        keyword="not test_driver_conditional and not held_stream_holds_nobody",
    ),
    *_memcheck(2, "graph", "tests/graph"),
    *_memcheck(
        1,
        "state, graph files, steps",
        *("tests/state", "tests/graphfile", "tests/step"),
        keyword="not held_and_dropped",
    ),
    *_memcheck(
        1,
        "tiny",
        *("tests/test_tiny.py", "tests/test_manners.py"),
        *("tests/test_async.py", "tests/test_newcomer.py"),
    ),
    *_memcheck(1, "handles and lifetime", *_ADOPTION),
    *_memcheck(1, "modules", "tests/modules/test_modules_gpu.py"),
    *_memcheck(
        2,
        "joins",
        _JOIN,
        *_JOINS,
        keyword="not columns_live and not is_used_again and not that_is_dropped",
    ),
    *_kernels("initcheck", 4),
    *_kernels("synccheck", 2),
    Part("memcheck alone", "memcheck", _MEASURED, marks="gpu and alone", alone=True),
)


# ------------------------------------------------------------------------------------ what was said


@dataclass(frozen=True, slots=True)
class Found:
    """Numbers from the sanitizer's output, over all processes of a part."""

    errors: int = 0
    warnings: int = 0
    summaries: int = 0
    """Number of summaries; 0 if the tool was cut off, or never began."""
    trouble: str = ""
    """The first message about a failure of the tool itself."""


_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?\s*$")
_RACES = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_TROUBLE = re.compile(
    r"========= ((?:Internal Sanitizer Error|Error:|Target application terminated).*)"
)


def read_tool(text: str) -> Found:
    """Reads the tool's lines, which start with "=========".

    "ERROR SUMMARY: 4 errors were not printed" repeats errors that the line before has counted.
    """
    errors = warnings = summaries = 0
    trouble = ""
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        if found := _ERRORS.search(line):
            errors += int(found[1])
            summaries += 1
        elif found := _RACES.search(line):
            errors += int(found[1])
            warnings += int(found[2])
            summaries += 1
        elif not trouble and (found := _TROUBLE.match(line)):
            trouble = found[1].strip()
    return Found(errors, warnings, summaries, trouble)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part."""

    part: Part
    tests: Counter[str] = field(default_factory=Counter)
    """Number of tests by outcome (`tools.suite`); empty if pytest was killed or never began."""
    found: Found = field(default_factory=Found)
    seconds: float = 0.0
    status: int | None = None
    """The exit status; None if the part was cut off or never began."""
    failures: tuple[str, ...] = ()
    """The names of the tests that failed, each with the first line of its error."""

    @property
    def complete(self) -> bool:
        """True if the part ended by itself, with the summaries of pytest and of the tool."""
        return self.status is not None and bool(self.tests) and self.found.summaries > 0

    @property
    def objections(self) -> list[str]:
        """Returns the reasons why the part is not sound; empty if it is."""
        tests, found = self.tests, self.found
        said = []
        if not self.complete:
            said.append("cut off" if self.status is None else "ended without a summary")
        if found.errors:
            said.append(f"{found.errors} errors reported by {self.part.tool}")
        if tests["failed"]:
            said += [f"{tests['failed']} tests failed", *self.failures]
        if self.complete and not tests["passed"]:
            said.append("no test passed")
        if found.trouble and (said or found.trouble.startswith("Internal")):
            said.append(found.trouble)
        if not said and self.status not in (0, None):
            said.append(f"exit status {self.status}")
        return said

    def row(self) -> dict[str, object]:
        """Returns the part's row of the result file."""
        return {
            "part": self.part.name,
            "tool": self.part.tool,
            "tests": [*self.part.tests],
            "keyword": self.part.keyword,
            "selected": self.tests.total(),
            **{outcome: self.tests[outcome] for outcome in ("passed", "failed", "skipped")},
            "errors": self.found.errors,
            "warnings": self.found.warnings,
            "seconds": round(self.seconds, 1),
            "complete": self.complete,
            "objections": self.objections,
        }


def result(
    outcomes: Sequence[Outcome],
    machine: Mapping[str, object],
    before: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the content of the result file.  `before`: rows of an earlier run (`sound_rows`)."""
    rows: list[Mapping[str, Any]] = [*before, *(o.row() for o in outcomes)]
    return {
        "schema": SCHEMA,
        "benchmark": "sanitize",
        "summary": {
            "sound": bool(rows) and not any(row["objections"] for row in rows),
            **{
                tool: {
                    "passed": sum(row["passed"] for row in rows if row["tool"] == tool),
                    "errors": sum(row["errors"] for row in rows if row["tool"] == tool),
                    "parts": sum(row["tool"] == tool for row in rows),
                    "complete": sum(row["complete"] for row in rows if row["tool"] == tool),
                }
                for tool in sorted({row["tool"] for row in rows})
            },
        },
        "machine": dict(machine),
        "rows": rows,
    }


def sound_rows(path: Path, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the rows of a result file whose parts are sound and select the same tests now.

    Each row has the `commit` and the `date` of its run.  Raises OSError if the file cannot be read,
    ValueError if it is no result file.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result file of this tool")
    now = {(p.name, p.tool, p.tests, p.keyword) for p in parts}
    made = {key: found["machine"].get(key) for key in ("commit", "date")}
    return [
        made | row
        for row in found["rows"]
        if not row["objections"]
        and (row["part"], row["tool"], tuple(row["tests"]), row.get("keyword")) in now
    ]


# ------------------------------------------------------------------------------------------ running


def run_part(
    part: Part,
    logs: Path,
    deadline: float,
    command: Callable[[Part, Path, Path], list[str]],
    gpus: Sequence[int] = (),
) -> Outcome:
    """Runs a part until it ends, or to its time limit or the `deadline` (time.monotonic).

    `gpus`: the order of the GPUs for the part, by default the system's.  A part that is cut off is
    interrupted first, so that it can still write its summaries.
    """
    start = time.monotonic()
    seconds = min(part.timeout, deadline - start)
    if seconds <= 0:
        return Outcome(part)
    slug = re.sub(r"[^a-z0-9]+", "-", part.name.lower()).strip("-")
    words, tool_words, junit = (logs / f"{slug}.{end}" for end in ("txt", "tool.txt", "xml"))
    for path in (tool_words, junit):
        path.unlink(missing_ok=True)
    status: int | None = None
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    with words.open("wb") as out:
        process = subprocess.Popen(
            command(part, tool_words, junit),
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that all of its processes can be ended
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
        except BaseException:
            _end(process)
            raise
    said = tool_words.read_text("utf-8", "replace") if tool_words.exists() else ""
    found = read_tool(said or words.read_text("utf-8", "replace"))
    tests: list[dict[str, object]] = []
    with contextlib.suppress(OSError, ValueError):  # pytest was killed, or ran no test
        tests = suite.read(junit)
    counts = Counter(str(test["outcome"]) for test in tests)
    failures = tuple(f"{t['name']}: {t['why']}" for t in tests if t["outcome"] == "failed")
    return Outcome(part, counts, found, time.monotonic() - start, status, failures)


def _end(process: subprocess.Popen[bytes]) -> None:
    for how, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def run_all(
    parts: Sequence[Part],
    jobs: int,
    run: Callable[[Part], Outcome],
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Runs all parts, `jobs` at a time, and then those marked `alone` one by one."""

    def one(part: Part) -> Outcome:
        outcome = run(part)
        if outcome.status is not None and not outcome.tests:
            # No test was begun, for example because a port was taken.
            say(f"{outcome.seconds:6.1f} s  {part.name}: did not begin, once more")
            outcome = run(part)
        passed, of = outcome.tests["passed"], outcome.tests.total()
        verdict = "; ".join(outcome.objections) or "sound"
        say(f"{outcome.seconds:6.1f} s  {passed:>3} of {of:>3}  {part.name}: {verdict}")
        return outcome

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        done = list(pool.map(one, [p for p in parts if not p.alone]))
    return done + [one(p) for p in parts if p.alone]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, help="folder of the result file")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="parts named so")
    parser.add_argument("--keyword", default="", metavar="WORDS", help="of these, as pytest's -k")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="so many take turns")
    parser.add_argument("--within", type=float, default=570, metavar="S", help="seconds in all")
    parser.add_argument("--after", type=Path, metavar="FILE", help="results of a run cut off")
    parser.add_argument("--sanitizer", default="", help="the program; by default looked for")
    parser.add_argument("--list", action="store_true", help="say which parts there are")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _options().parse_args(argv)
    parts = [p for p in PARTS if not options.only or any(t in p.name for t in options.only)]
    if options.keyword:
        words = f"({options.keyword})"
        parts = [
            replace(part, keyword=words + f" and ({part.keyword})" * bool(part.keyword))
            for part in parts
        ]
    if options.list:
        print("\n".join(part.name for part in parts))
        return 0
    program = options.sanitizer or shutil.which("compute-sanitizer")
    program = program or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not program or not parts:
        print("no part has such a name" if program else "compute-sanitizer was not found")
        return 2
    try:
        before = [] if options.after is None else sound_rows(options.after, parts)
    except (OSError, ValueError) as error:
        print(f"--after: {error}")
        return 2
    parts = [part for part in parts if part.name not in {row["part"] for row in before}]
    deadline = time.monotonic() + options.within
    logs: Path = options.out / "sanitize-logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(parts)} parts, {options.jobs} at a time; logs: {logs}", flush=True)

    def run(part: Part) -> Outcome:
        number, count = parts.index(part), options.gpus
        port = FIRST_PORT + PORTS * number
        gpus = [(number + k) % count for k in range(count)] if count > 1 else ()
        return run_part(part, logs, deadline, lambda p, *to: p.command(program, *to, port), gpus)

    outcomes = run_all(parts, options.jobs, run, lambda line: print(line, flush=True))
    machine = _machine()
    found = result(outcomes, machine, before)
    slug = re.sub(r"[^a-z0-9]+", "-", str(machine["device"]).lower()).strip("-")
    path: Path = options.out / f"sanitize-{slug}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"results: {path}")
    print(json.dumps(found["summary"]), flush=True)
    return 0 if found["summary"]["sound"] else 1


def _machine() -> dict[str, object]:
    import ostinato as ost
    from ostinato.bench.report import commit, machine

    try:
        with ost.open_device("cuda:0") as device:
            return machine(device)
    except ost.OstinatoError as error:  # the outcomes are written nevertheless
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {"device": "unknown", "why": str(error), "commit": commit(), "date": now}


if __name__ == "__main__":
    sys.exit(main())
