"""A step behind FastAPI: requests wait for the GPU in asyncio without blocking the event loop.

    python examples/fastapi_step.py           # two requests in this process
    uvicorn examples.fastapi_step:app         # a server

Needs fastapi, and httpx for the requests in this process; no GPU.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import ostinato as ost

ROWS = 64


@ost.kernel(
    "x: *f32, rows: *const u32",
    r"""
    extern "C" __global__ void scale(float* x, const unsigned* rows) {
        if (blockIdx.x < *rows) x[blockIdx.x] *= 2.0f;
    }""",
)
def scale(launch: ost.lowlevel.HostLaunch, x: Any, rows: Any) -> None:
    x[: rows[0]] *= 2


class Model:
    """A step with its memory.  Only one request at a time may use the slots."""

    def __init__(self) -> None:
        self.device = ost.open_device()
        self.stream = self.device.create_stream()
        self.kernel = self.device.kernel(scale)
        self.x = self.device.zeros(ROWS, np.float32, name="x")
        self.answer = self.device.pinned(ROWS, np.float32)
        self.turn = asyncio.Lock()
        graphs = ost.GraphCache(self.device, buckets=ost.PowersOfTwo(ROWS))
        slots = [ost.Slot("x", self.x, "state", size="rows")]
        self.step = ost.GraphedStep(self.run, stream=self.stream, cache=graphs, slots=slots)
        self.step(rows=ROWS)  # warm-up; then build all graphs, so that no request waits for one
        for rows in graphs.buckets:
            self.step.prepare(rows=rows)

    def run(self, stream: ost.Stream, sizes: ost.Sizes) -> None:
        shape = ost.LaunchConfig(max(sizes.rows, 1), 1)
        ost.launch(stream, self.kernel, shape, self.x, sizes.on_device("rows"))

    async def __call__(self, values: list[float]) -> list[float]:
        rows = len(values)
        async with self.turn:
            self.x[:rows].set(np.asarray(values, np.float32), self.stream)
            self.step(rows=rows)
            ost.copy(self.stream, self.answer[:rows], self.x[:rows])
            await self.stream.wait_async()  # other requests are served meanwhile
            answer: list[float] = self.answer.array[:rows].tolist()
            return answer


def make_app() -> Any:
    from fastapi import FastAPI, HTTPException  # type: ignore

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        app.state.model = Model()
        with app.state.model.device:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/scale")  # type: ignore
    async def answer(values: list[float]) -> list[float]:
        if not 1 <= len(values) <= ROWS:
            raise HTTPException(422, f"1 to {ROWS} values")
        model: Model = app.state.model
        return await model(values)

    return app


def __getattr__(name: str) -> Any:
    """Makes `app` when a server first reads it."""
    if name != "app":
        raise AttributeError(name)
    return make_app()


async def two_requests() -> None:
    import httpx  # type: ignore

    app = make_app()
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://here") as client,
    ):
        posts = [client.post("/scale", json=values) for values in ([1, 2, 3], [5])]
        print(*[answer.json() for answer in await asyncio.gather(*posts)])


def main() -> int:
    try:
        import fastapi  # noqa: F401
        import httpx  # noqa: F401
    except ImportError as error:
        print(f"{error.name} is not installed")
        return 0
    asyncio.run(two_requests())
    return 0


if __name__ == "__main__":
    sys.exit(main())
