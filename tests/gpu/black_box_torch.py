"""Planted faults in graphs that torch captured: `python -m tests.gpu.black_box_torch NAME DEVICE`.

Each process loses its context, and prints what was found as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ostinato as ost
from ostinato.errors import ContextPoisonedError

PLANTS = {"assert": "index", "freed": "elementwise", "observed": "index"}
"""Each with a part of the name of the kernel that fails."""


def planted(name: str, device: ost.Device, folder: str) -> dict[str, Any]:
    import torch

    from ostinato.interop.torch import adopt_graph, observe, use_stream

    stream = device.create_stream()
    with torch.no_grad(), use_stream(stream):
        table = torch.ones(16 << 20, device="cuda")  # 64 MiB: a segment of its own
        places = torch.zeros(256, dtype=torch.int64, device="cuda")
        out = torch.ones(16 << 20, device="cuda")

        def work() -> None:
            out.add_(1)
            if name != "freed":
                out[:256].copy_(table[places])
            else:
                torch.mul(table, 2, out=out)
            out.add_(1)

        work()
        stream.synchronize()
        if name == "observed":
            observe()
        graph = torch.cuda.CUDAGraph(keep_graph=name != "observed")
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            work()
        run = None if name == "observed" else adopt_graph(device, graph).instantiate()

    def replay() -> None:
        if run is not None:
            run.launch(stream)
            return
        with use_stream(stream):
            graph.replay()

    ended_by_torch = False
    try:
        with ost.black_box(folder=folder):
            replay()
            stream.synchronize()
            if name != "freed":
                with use_stream(stream):
                    places.fill_(1 << 40)
            else:
                del table
                torch.cuda.empty_cache()
            replay()
            torch.cuda.synchronize()
    except ContextPoisonedError as error:
        ended_by_torch = isinstance(error.__cause__, RuntimeError)
        report: Any = error.report
        names = [node.name for replay in report.replays for node in replay.running]
        return {"names": names, "text": str(error), "torch": ended_by_torch}
    return {"names": [], "text": "no fault", "torch": False}


if __name__ == "__main__":
    opened = ost.open_device(sys.argv[2])
    print(json.dumps(planted(sys.argv[1], opened, sys.argv[3])), flush=True)
    os._exit(0)  # torch's own destructors may end a process whose context is lost
