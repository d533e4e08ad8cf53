"""Host time of a call of torch code: eager, by hand, as torch graphs it, and through `graphed`.

    python -m benchmarks.torch_graphed [--only mlp,dropout] [--no-compile]

What bounds it: a graph needs its inputs copied and one launch.  The bound is measured: `copy_` of
each input and `replay()` of a graph that was captured by hand (`by hand`).  Ways, in turns:

  eager             the function itself
  by hand           torch.cuda.graph, `copy_` of each input, `replay()`; the result is overwritten
  make_graphed      torch.cuda.make_graphed_callables
  compile           torch.compile(mode="reduce-overhead")
  graphed           `ostinato.interop.torch.graphed`; results are copies
  graphed, static   the same with results="static": as `by hand`

Host time is that of the call alone; the device is waited for between blocks of calls.  `first_ms`
is the time from the first call to the end of the third, with all that is compiled and captured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import ostinato as ost
from benchmarks import common
from benchmarks.torch_works import NAMES, Work, make_work

WAYS = ("eager", "by hand", "make_graphed", "compile", "graphed", "graphed, static")


def _by_hand(work: Work, args: tuple[Any, ...]) -> Callable[..., Any]:
    """What the documentation of torch.cuda.graph says, with static inputs."""
    import torch

    count = len(args) - len(work.static)
    inputs = [a.clone() if isinstance(a, torch.Tensor) else a for a in args[:count]]
    rest = args[count:]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work.function(*inputs, *rest)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work.function(*inputs, *rest)
    places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    copies = [(i, inputs[i].copy_) for i in places]
    replay = graph.replay

    def call(*given: Any) -> Any:
        for i, copy in copies:
            copy(given[i])
        replay()
        return out

    return call


def _way(way: str, work: Work, args: tuple[Any, ...], device: ost.Device) -> Callable[..., Any]:
    import torch

    from ostinato.interop.torch import graphed

    if way == "eager":
        return work.function
    if way == "by hand":
        return _by_hand(work, args)
    if way == "make_graphed":
        if not all(isinstance(a, torch.Tensor) for a in args) or work.static:
            raise ValueError("takes tensors alone, and copies each")
        function: Any = work.function
        if isinstance(function, torch.nn.Module):  # it replaces the forward of a module in place
            function = function.forward
            plain = lambda *a: function(*a)  # noqa: E731
        else:
            plain = function
        made: Any = torch.cuda.make_graphed_callables(plain, args)
        return made
    if way == "compile":
        torch._dynamo.reset()
        compiled: Any = torch.compile(work.function, mode="reduce-overhead", fullgraph=False)

        def call(*given: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*given)

        return call
    results = "static" if way.endswith("static") else "clone"
    return graphed(work.function, device=device, static=work.static, results=results)


def _time(call: Callable[..., Any], args: tuple[Any, ...], calls: int) -> list[int]:
    """Nanoseconds of host time of each call, in blocks between which the device is waited for."""
    import torch

    times = []
    clock = time.perf_counter_ns
    for block in range(max(1, calls // 20)):
        torch.cuda.synchronize()
        for number in range(20):
            began = clock()
            call(*args)
            ended = clock()
            if block or number > 5:
                times.append(ended - began)
    torch.cuda.synchronize()
    return times


def measure(
    name: str, device: ost.Device, calls: int, ways: tuple[str, ...], skipped: dict[str, str]
) -> list[dict[str, object]]:
    """Rows of one work."""
    import torch

    rows: list[dict[str, object]] = []
    bound: float | None = None
    for way in ways:
        work = make_work(name)
        args = (*work.draw(), *work.fresh())
        try:
            with torch.inference_mode(way not in ("make_graphed", "compile")), torch.no_grad():
                torch.cuda.synchronize()
                began = time.perf_counter()
                call = _way(way, work, args, device)
                for _ in range(3):
                    call(*args)
                torch.cuda.synchronize()
                first = 1e3 * (time.perf_counter() - began)
                times = _time(call, args, calls)
        except Exception as error:
            skipped[f"{name}: {way}"] = (
                f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            )
            torch.cuda.synchronize()
            continue
        row: dict[str, object] = {"work": name, "way": way}
        row |= common.measured(times).fields()
        row["first_ms"] = round(first, 2)
        if way == "by hand":
            bound = statistics.median(times)
        if bound is not None:
            row["of_by_hand"] = round(statistics.median(times) / bound, 3)
        if way.startswith("graphed"):
            counts = call.statistics()  # type: ignore[attr-defined]
            row |= {"replays": counts.replays, "eager": counts.eager}
            call.close()  # type: ignore[attr-defined]
        rows.append(row)
    return rows


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--only", default="", help="works, with commas between them")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--calls", type=int, default=400)
    chosen = parser.parse_args()
    skipped: dict[str, str] = {}
    try:
        import torch
    except ImportError as error:
        print(f"torch is not installed: {error}")
        return 0
    if not torch.cuda.is_available() or not chosen.device.startswith("cuda"):
        print("torch has no CUDA device here: nothing is measured")
        return 0
    device = ost.open_device(chosen.device)
    names = tuple(filter(None, chosen.only.split(","))) or NAMES
    ways = tuple(w for w in WAYS if not (chosen.no_compile and w == "compile"))
    calls = 40 if chosen.quick else chosen.calls
    rows = []
    for name in names:
        try:
            rows += measure(name, device, calls, ways, skipped)
        except ImportError as error:
            skipped[name] = str(error)
    columns = ("work", "way", "median_us", "p90_us", "min_us", "of_by_hand", "first_ms", "eager")
    print(common.table("host time of a call", rows, columns))
    common.emit(
        "torch_graphed",
        device,
        chosen.out,
        ceiling={"what": "copy_ of each input and replay() by hand, in the rows `by hand`"},
        settings={"calls": calls, "torch": torch.__version__},
        rows=rows,
        skipped=skipped,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
