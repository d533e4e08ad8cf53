"""Functions of CuPy that wait for the GPU in the middle, in `graphed`.

    python -m benchmarks.cupy_waits [--works mask,newton] [--calls N] [--out DIR]

Each work is called eagerly and by `graphed`, with new random inputs for each comparison; `answers`
counts the calls whose results are those of an eager call, bit by bit (`right`).  Times are
those of whole calls, with the wait for the GPU at their end, in turns, block by block, on the same
inputs.  There is no bound by hand: CuPy's own captures end where such a function waits.  `how` is
what `graphed` has made of it, with the reason of an eager run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import ostinato as ost
from benchmarks import common

BLOCK = 10
CHECKS = 12
"""Calls whose answers are compared."""


def works_on(cupy: Any) -> dict[str, Callable[..., Any]]:
    """Returns functions of an array of 4,096 float32."""
    from cupyx.scipy import ndimage

    weights = cupy.asarray(np.linspace(-1, 1, 4096, dtype=np.float32))
    square = weights.reshape(64, 64) / 8
    moments = cupy.zeros(4096, np.float32)

    def layer(x: Any) -> Any:
        x = (x - x.mean(axis=1, keepdims=True)) / cupy.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        return x * 0.5 * (1 + cupy.tanh(0.79788 * (x + 0.044715 * x * x * x)))

    def assertion(x: Any) -> Any:
        assert cupy.isfinite(x).all(), "the input is not finite"
        y = layer(x.reshape(64, 64)) + square
        y = layer(y) + square
        assert cupy.isfinite(y).all(), "the output is not finite"
        return y

    def mask(x: Any) -> Any:
        y = cupy.exp(-x * x) + weights
        chosen = y[cupy.arange(4096) % 3 > 0]
        return (chosen - chosen.mean()) / chosen.std()

    def newton(x: Any) -> Any:
        target, root = cupy.abs(x) + 1, cupy.full_like(x, 2)
        for _ in range(20):
            step = (root * root - target) / (2 * root)
            root = root - step
            if (cupy.abs(step) < 1e-3).all():
                break
        return root

    def clipping(x: Any) -> Any:
        gradient = x * weights
        norm = cupy.sqrt((gradient * gradient).sum())
        if norm > 1:
            gradient = gradient / norm
        moments[...] = moments * 0.9 + gradient * 0.1
        return moments / (cupy.sqrt(cupy.abs(moments)) + 1e-8)

    def metrics(x: Any) -> Any:
        y = cupy.tanh(x * weights) + 1
        wrong = (y - weights) ** 2
        return y * 2, float(wrong.mean()), (wrong < 1).mean().item()

    def network(x: Any) -> Any:
        y = layer(x.reshape(64, 64) @ square) + square
        scores = cupy.exp(y @ square - 1)
        scores = scores / scores.sum(axis=1, keepdims=True)
        return layer(scores @ y) + y

    def ridge(x: Any) -> Any:
        design = layer(x.reshape(64, 64))
        gram = design.T @ design + cupy.eye(64, dtype=np.float32)
        found = cupy.linalg.solve(gram, square)
        left = square - gram @ found
        return found, cupy.sqrt((left * left).sum())

    def borders(x: Any) -> Any:
        y = x.reshape(64, 64)[:, [0, 1, 62, 63]] * cupy.asarray([0.4, 0.1, 0.1, 0.4])
        moments[[0, -1]] = [0.5, 0.25]
        return layer(y) + moments[[0, -1]].sum()

    def filters(x: Any) -> Any:
        y = ndimage.gaussian_filter1d(x.reshape(64, 64), 1.5)
        return ndimage.median_filter(y, size=3) - y

    def stages(x: Any) -> Any:
        y = layer(x.reshape(64, 64)) + square
        cupy.cuda.Device().synchronize()
        y = layer(y) + square
        cupy.cuda.get_current_stream().synchronize()
        return y

    works = assertion, mask, newton, clipping, metrics, network, ridge, borders, filters, stages
    return {each.__name__: each for each in works}


def measure(cupy: Any, name: str, calls: int) -> dict[str, object]:
    """Compares and times one work."""
    from ostinato.interop.cupy import graphed

    rng = np.random.default_rng(0)
    # Each function writes arrays of its own.
    eager, function = works_on(cupy)[name], works_on(cupy)[name]
    step = graphed(function, name=name, writes=False)
    answers: dict[str, int] = {}

    def draw() -> Any:
        return cupy.asarray(rng.standard_normal(4096, "f4"))

    def bits(result: Any) -> list[Any]:
        every = result if isinstance(result, tuple) else (result,)
        return [e.get().tobytes() if isinstance(e, cupy.ndarray) else e for e in every]

    for _ in range(CHECKS):
        x = draw()
        answer = "right" if bits(step(x)) == bits(eager(x)) else "WRONG"
        answers[answer] = answers.get(answer, 0) + 1
    ways = {"eager": eager, "graphed": step}
    gpu = SimpleNamespace(cuda=SimpleNamespace(synchronize=cupy.cuda.Device().synchronize))
    us = common.call_times(gpu, ways, (draw(),), max(1, calls // BLOCK), BLOCK)
    row = {"work": name, "answers": answers, **common.of_graphed(step, us)}
    step.close()
    return row


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--works", default="", help="some of them, with commas between")
    parser.add_argument("--calls", type=int, default=200)
    chosen = parser.parse_args()
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except Exception as error:
        print(f"CuPy has no GPU here: {error}")
        return 0
    device = ost.open_device(chosen.device)
    rows = []
    for name in tuple(filter(None, chosen.works.split(","))) or works_on(cupy):
        rows.append(measure(cupy, name, 40 if chosen.quick else chosen.calls))
        print(rows[-1], flush=True)
    columns = ("work", "eager_us", "graphed_us", "of_eager", "replays", "eager", "answers")
    print(common.table("functions of CuPy that wait", rows, columns))
    common.emit(
        "cupy_waits",
        device,
        chosen.out,
        ceiling={"what": "none by hand: CuPy's captures end where a function waits"},
        settings={"calls": chosen.calls, "cupy": cupy.__version__, "quick": chosen.quick},
        rows=rows,
        skipped={},
        summary=common.summary_of_graphed(rows),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
