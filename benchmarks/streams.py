"""The time of a replay before and after a process has put work into one stream, or into two.

On the measured GPUs, launches, fills or copies on the device in a second stream delay every kernel
of a graph for the rest of the process; so each case has a process of its own.  A graph of many
kernels that is uploaded has the same effect until it is launched.  A case measures replays of a
chain of tiny kernels, back to back, by the device's clock: first in a new process, then after some
work in streams, which are idle by then.

    python -m benchmarks.streams [--out DIR] [--device cuda:0|host] [--quick]

The last line is one JSON object.  The physics: a kernel of a chain begins when the one before has
ended; the fastest case shows what that takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common
from benchmarks.common import Chain
from ostinato.bench.floor import device_us

_LENGTH, _REPLAYS, _ROUNDS = 100, 200, 5
_MANY = 300
"""The number of submissions to a stream: a second one, or the graph's own."""
_SECONDS = 120

CASES = {
    "nothing": (),
    "launches in the graph's stream": (("own", "launch"),),
    "launches in another": (("other", "launch"),),
    "launches in both": (("other", "launch"), ("own", "launch")),
    "fills in another, launches": (("other", "fill"), ("own", "launch")),
    "copies from the host in another, launches": (("other", "upload"), ("own", "launch")),
    "graphs in another, launches": (("other", "graph"), ("own", "launch")),
    "launches as graphs in another, launches": (("other", "alone"), ("own", "launch")),
    "launches in another, graphs": (("other", "launch"), ("own", "graph")),
    "a graph uploaded": (("own", "upload a graph"),),
    "a graph uploaded, and launched": (("own", "upload a graph"), ("own", "launch it")),
}
"""The work of each case, in order: pairs of a stream and a kind of work."""


def child(device_name: str, case: str, many: int) -> dict[str, object]:
    """Measures, in this process, the microseconds for a kernel before and after the case's work."""
    with ost.open_device(device_name) as device:
        chain, one = Chain(device, _LENGTH), Chain(device, 1)
        streams = {"own": device.create_stream(), "other": device.create_stream()}
        graph, short = (_graph(each, streams["own"]) for each in (chain, one))
        waiting = _graph(chain, streams["own"], upload=False)
        operation = ost.prepare(one.kernel, one.config, *one.operands(one.arena)[0])
        filled, uploaded = device.empty(1 << 20, "bytes"), np.zeros(1 << 20, np.uint8)
        works: dict[str, Callable[[ost.Stream], object]] = {
            "launch": one.submit,
            "fill": lambda stream: ost.fill(stream, filled, 0),
            "upload": lambda stream: filled.set(uploaded, stream),
            "graph": short.launch,
            "upload a graph": waiting.upload,
            "launch it": waiting.launch,
            "alone": lambda stream: stream.submit_as_graph(operation),
        }
        before = _per_kernel_us(device, streams["own"], graph)
        for name, kind in CASES[case]:
            for _ in range(many):
                works[kind](streams[name])
            streams[name].synchronize()
        after = _per_kernel_us(device, streams["own"], graph)
        chain.check(case, streams["own"])
    return {"work": case, "before_us": round(before, 4), "after_us": round(after, 4)}


def _graph(chain: Chain, stream: ost.Stream, *, upload: bool = True) -> ost.GraphExec:
    graph = ost.capture_function(stream, lambda: chain.submit(stream))
    return graph.instantiate(upload=stream if upload else None)


def _per_kernel_us(device: ost.Device, stream: ost.Stream, graph: ost.GraphExec) -> float:
    def replays() -> None:
        for _ in range(_REPLAYS):
            graph.launch(stream)

    return device_us(device, stream, replays, _ROUNDS) / (_REPLAYS * _LENGTH)


def _of_process(device: str, case: str, many: int) -> dict[str, Any]:
    """Measures a case in a new process.  Raises CalledProcessError with its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.streams", "--child", device, case, str(many)],
        cwd=common.ROOT.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=_SECONDS,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = common.options(__doc__).parse_args(arguments)
    cases = list(CASES)[:2] if chosen.quick else list(CASES)
    many = 3 if chosen.quick else _MANY
    rows = [_of_process(chosen.device, case, many) for case in cases]
    for row in rows:
        row["times"] = round(row["after_us"] / row["before_us"], 3)
    with ost.open_device(chosen.device) as device:
        columns = ["work", "before_us", "after_us", "times"]
        title = f"A kernel of a chain of {_LENGTH} in a graph, {device.properties.name}"
        print(common.table(title, rows, columns))
        common.emit(
            "streams",
            device,
            chosen.out,
            ceiling={
                "what": "the least time of a kernel of the chain in any case, microseconds",
                "us": min(row[name] for row in rows for name in ("before_us", "after_us")),
            },
            settings={"kernels": _LENGTH, "submissions": many, "quick": chosen.quick},
            rows=rows,
            skipped={},
        )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        sys.exit(main())
