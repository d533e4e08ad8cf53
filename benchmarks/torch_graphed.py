"""The cost of `graphed`: host time of a call, and the time from the first call to steady state.

    python -m benchmarks.torch_graphed [--only host|compile] [--works mlp,dropout] [--out DIR]

Lower bound: a graph needs its inputs copied and one launch.  The bound is measured: `copy_` of each
input and `replay()` of a graph that was captured by hand (`by hand`).  Ways:

  eager             the function itself
  by hand           torch.cuda.graph, `copy_` of each input, `replay()`; the result is overwritten
  make_graphed      torch.cuda.make_graphed_callables
  compile           torch.compile(mode="reduce-overhead"), with empty caches
  graphed           `ostinato.interop.torch.graphed`; results are new tensors
  graphed, static   the same with results="static", overwritten like those of `by hand`
  given up          `graphed` of the function with a wait in it, which cannot be captured; as a
                    ratio of `plainly`, the same function without `graphed`

`--only host`: all ways except `compile`; their calls are timed in turns, block by block.  Host time
is that of the call alone; the host waits for the device between blocks.  Rows of `graphed` have its
parts too: `match_us` the checks, `replay_us` copies and launch, `patch_us` the change of a node,
`bare_us` the launch alone, `patched_us` the launch right after a change; rows `by hand` have
`copy_us` and `replay_us`.  Calls get the same tensors each time, so no node is changed; `moved_us`
is a call with tensors at other addresses than those of the previous call.  `short`: number of calls
by the short way.

`--only compile`: only `compile` and `graphed`, after `eager`, so that torch has loaded its
libraries before both.  `steady_ms` is the time until the end of the last of the first calls that
took more than twice as long as the later ones, including the wait for the device.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import ostinato as ost
from benchmarks import common
from benchmarks.torch_works import NAMES, Work, make_work
from ostinato.interop.graphed import _Work
from ostinato.interop.reading.moves import MOST
from ostinato.interop.reading.records import ReadCall

HOST = ("eager", "by hand", "make_graphed", "graphed", "graphed, static", "plainly", "given up")
COMPILE = ("eager", "compile", "graphed")
BLOCK = 20
FIRST = 12
"""The number of first calls in which the steady state must be reached."""


def _by_hand(work: Work, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Captures as in the documentation of torch.cuda.graph, with static inputs."""
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

    def copy_all(*given: Any) -> None:
        for i, copy in copies:
            copy(given[i])

    call.work = work  # type: ignore[attr-defined]  # keeps the weights: the graph has addresses alone
    call.parts = {"copy_us": copy_all, "replay_us": lambda *_: replay()}  # type: ignore[attr-defined]
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
        if isinstance(function, torch.nn.Module):  # torch would replace a module's forward in place
            function = function.forward
            plain = lambda *a: function(*a)  # noqa: E731
        else:
            plain = function
        made: Any = torch.cuda.make_graphed_callables(plain, args)
        made.work = work  # keeps the weights: the graphs of a function have addresses alone
        return made
    if way == "compile":
        torch._dynamo.reset()
        compiled: Any = torch.compile(work.function, mode="reduce-overhead", fullgraph=False)

        def call(*given: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*given)

        return call
    if way in ("plainly", "given up"):
        function, capturing = work.function, torch.cuda.is_current_stream_capturing

        def waits(*given: Any) -> Any:
            if capturing():
                torch.cuda.current_stream().synchronize()
            return function(*given)

        return waits if way == "plainly" else graphed(waits, device=device)
    results = "static" if way.endswith("static") else "clone"
    return graphed(work.function, device=device, static=work.static, results=results)


@dataclass
class Way:
    """One way to call a work, set up, and the times of its calls in nanoseconds."""

    name: str
    call: Callable[..., Any]
    first_ms: float
    steady_ms: float
    times: list[int] = field(default_factory=list)


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _block(call: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """Times one block.  Returns the host time of each call, in nanoseconds."""
    times, clock = [], time.perf_counter_ns
    _synchronize()
    for _ in range(BLOCK):
        began = clock()
        call(*args)
        times.append(clock() - began)
    _synchronize()
    return times


def _median(call: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """Returns the median host time of a call, in microseconds."""
    times = [t for _ in range(max(1, calls // BLOCK)) for t in _block(call, args)]
    return round(statistics.median(times) / 1e3, 3)


def _start(name: str, work: Work, args: tuple[Any, ...], device: ost.Device) -> Way:
    """Sets up a way, and calls it until it is steady."""
    _synchronize()
    began = time.perf_counter()
    call = _way(name, work, args, device)
    ends = []
    for _ in range(2 * FIRST):
        call(*args)
        _synchronize()
        ends.append(1e3 * (time.perf_counter() - began))
    took = [b - a for a, b in pairwise([0.0, *ends])]
    usual = statistics.median(took[FIRST:])
    slow = [end for end, ms in zip(ends[:FIRST], took, strict=False) if ms > 2 * usual]
    return Way(name, call, ends[2], slow[-1] if slow else 0.0)


def _parts(
    way: Way, args: tuple[Any, ...], moved: tuple[Any, ...], calls: int
) -> dict[str, object]:
    """Times the parts of a call, in microseconds.  `moved`: equal arguments at other addresses."""
    parts = getattr(way.call, "parts", None)
    if parts is not None:
        return {name: _median(part, args, calls) for name, part in parts.items()}
    if not way.name.startswith("graphed"):
        return {}
    step: Any = way.call
    row: dict[str, object] = {"short": sum(hot.way.count for hot in step._hot)}
    turns = itertools.cycle([args, moved])
    row["moved_us"] = _median(lambda: step(*next(turns)), (), calls)
    if step._hot:
        (hot, *_) = step._hot
        captured, stream = hot.line.captured(), step._library.stream()
        work = _Work()
        work.door, work.call, work.options = step, hot.line, step._options
        work.given = ReadCall(args, {}, hot.match(args, {}))
        row["match_us"] = _median(hot.match, (args, {}), calls)

        def replay() -> None:
            step.cache.replay(hot.line.name, stream, work.bind())

        row["replay_us"] = _median(replay, (), calls)
        with step.cache.hold(hot.line.name) as run:
            if captured.moves is not None:
                # Addresses of 0: nothing is copied.  The last word belongs to a 32nd array.
                words = [bytes(16 * MOST - 1) + bytes([last]) for last in range(2)]
                changes = itertools.cycle([*map(captured.moves.change, words)])

                def nothing(run: Any) -> None:
                    next(changes)(run)

                row["patch_us"] = _median(nothing, (run,), calls)
                row["patched_us"] = _median(_after(nothing, run), (stream,), calls)
            row["bare_us"] = _median(run.launch, (stream,), calls)
    counts = step.statistics()
    return row | {"replays": counts.replays, "eager": counts.eager}


def _after(change: Callable[[Any], object], run: Any) -> Callable[..., Any]:
    """Returns a function that makes a change and launches."""

    def call(stream: Any) -> None:
        change(run)
        run.launch(stream)

    return call


def measure(
    name: str, device: ost.Device, calls: int, ways: tuple[str, ...], skipped: dict[str, str]
) -> list[dict[str, object]]:
    """Measures one work in several ways.  Returns the rows."""
    import torch

    made: list[tuple[Way, tuple[Any, ...]]] = []
    grads = ("make_graphed", "compile")  # they do not work in inference mode
    for each in ways:
        work = make_work(name)
        args = (*work.draw(), *work.fresh())
        try:
            with torch.inference_mode(each not in grads), torch.no_grad():
                made.append((_start(each, work, args, device), args))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            skipped[f"{name}: {each}"] = reason
            _synchronize()
    for _ in range(max(1, calls // BLOCK)):
        for way, args in made:
            with torch.inference_mode(way.name not in grads), torch.no_grad():
                way.times += _block(way.call, args)
    bounds = [statistics.median(way.times) for way, _ in made if way.name == "by hand"]
    plain = [statistics.median(way.times) for way, _ in made if way.name == "plainly"]
    rows: list[dict[str, object]] = []
    for way, args in made:
        row: dict[str, object] = {"work": name, "way": way.name}
        row |= common.measured(way.times).fields()
        row |= {"first_ms": round(way.first_ms, 2), "steady_ms": round(way.steady_ms, 2)}
        if bounds:
            row["of_by_hand"] = round(statistics.median(way.times) / bounds[0], 3)
        if way.name == "given up" and plain:
            row["of_plainly"] = round(statistics.median(way.times) / plain[0], 3)
        moved = (*work.draw(), *args[len(args) - len(work.static) :])
        with torch.inference_mode(way.name not in grads), torch.no_grad():
            row |= _parts(way, args, moved, calls // 4)
        if way.name.startswith(("graphed", "given up")):
            way.call.close()  # type: ignore[attr-defined]
        rows.append(row)
    compiled = next((way for way, _ in made if way.name == "compile"), None)
    for row, (way, _) in zip(rows, made, strict=True):
        if compiled is not None and compiled.steady_ms and way is not compiled:
            row["of_compile"] = round(way.steady_ms / compiled.steady_ms, 4)
    return rows


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--only", choices=("host", "compile"), help="one of the two comparisons")
    parser.add_argument("--works", default="", help="some of them, with commas between")
    parser.add_argument("--calls", type=int, default=400)
    chosen = parser.parse_args()
    skipped: dict[str, str] = {}
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # each first call compiles
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    device = ost.open_device(chosen.device)
    names = tuple(filter(None, chosen.works.split(","))) or NAMES
    calls = 80 if chosen.quick else chosen.calls
    columns = (
        "work",
        "way",
        "median_us",
        "p90_us",
        "min_us",
        "of_by_hand",
        "of_plainly",
        "of_compile",
    )
    columns += ("steady_ms", "short", "moved_us", "match_us", "copy_us", "replay_us")
    columns += ("patch_us", "bare_us", "patched_us")
    for part, ways in (("host", HOST), ("compile", COMPILE)):
        if chosen.only not in (None, part):
            continue
        rows = []
        for name in names:
            try:
                rows += measure(name, device, calls, ways, skipped)
            except ImportError as error:
                skipped[name] = str(error)
        print(common.table(f"a call of torch code: {part}", rows, columns))
        common.emit(
            "torch_graphed" if part == "host" else "torch_graphed-compile",
            device,
            chosen.out,
            ceiling={"what": "copy_ of each input and replay() by hand, in the rows `by hand`"},
            settings={"calls": calls, "torch": torch.__version__, "quick": chosen.quick},
            rows=rows,
            skipped=skipped,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
