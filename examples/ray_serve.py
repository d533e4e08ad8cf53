"""Serves a model with Ray Serve: copies of it behind one address, each on one or several GPUs.

    python examples/ray_serve.py --model smollm2-135m --slots 8 --max-replicas 4
    python examples/ray_serve.py --model llama-3.1-8b.gguf --tensor-parallel 2 --slots 32

Needs `pip install "ostinato[llm,serve,cuda13]" "ray[serve]"`, on all machines, and `nccl` for
several GPUs a copy; without a GPU, copies run on the CPU.  A replica is the server's own ASGI
application in a Ray actor, so the endpoints under /v1 are those of `ostinato serve`.  With
--tensor-parallel, each replica starts further actors on GPUs of its placement group, which repeat
what its decoder does.

Ray starts replicas (up to --max-replicas, by the number of requests that each has), sends a request
to one with few of them, replaces one whose rank or device failed, and completes the answers of one
that it stops.  Running this program again replaces the replicas one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ostinato as ost
from ostinato.distributed import Group, join_group, new_group_id
from ostinato.models import Decoder, TextGenerator


@dataclass(frozen=True)
class Options:
    """What a replica serves.  `slots`: answers that it computes at once.  `ranks`: GPUs of each
    replica.  `host`: on the CPU."""

    model: str
    slots: int = 8
    max_context: int | None = None
    ranks: int = 1
    host: bool = False
    threads: int | None = None

    @property
    def device(self) -> str:
        """Ray sets CUDA_VISIBLE_DEVICES to an actor's own GPU."""
        return "host" if self.host else "cuda:0"

    @property
    def decoder(self) -> dict[str, Any]:
        found = {"sequences": self.slots, "max_context": self.max_context, "threads": self.threads}
        return {name: value for name, value in found.items() if value is not None}


class Rank:
    """An actor with one rank of a replica, other than the first."""

    def follow(self, group_id: str, rank: int, path: str, options: Options) -> None:
        """Repeats what the first rank's decoder does, until that is closed or a rank fails."""
        with (
            join_group(group_id, rank=rank, size=options.ranks) as group,
            ost.open_device(options.device) as device,
            Decoder(device, Path(path), group=group, **options.decoder) as decoder,
        ):
            decoder.follow()


def join_ranks(path: Path, options: Options) -> Group:
    """Starts the actors of the other ranks, in this replica's placement group; returns the group of
    the first."""
    import ray  # type: ignore

    address = ray.util.get_node_ip_address()
    group_id = new_group_id(options.ranks, host=address)
    actor = ray.remote(num_cpus=1, num_gpus=0 if options.host else 1)(Rank)
    for rank in range(1, options.ranks):
        # They end with the actor that has started them, so with this replica.
        actor.remote().follow.remote(group_id, rank, str(path), options)
    return join_group(group_id, rank=0, size=options.ranks)


def application(options: Options) -> Callable[[], Any]:
    """Returns a function that makes the ASGI application of a replica, called in its actor."""

    def make() -> Any:
        from ostinato.models.files.store import resolve
        from ostinato.serve.app import Service, make_app
        from ostinato.serve.engine import ServingEngine
        from ostinato.serve.metrics import Metrics

        path = resolve(options.model)
        with ExitStack() as opened:
            leading: dict[str, Any] = {}
            if options.ranks > 1:
                leading = {"group": opened.enter_context(join_ranks(path, options)), "leads": True}
            device = opened.enter_context(ost.open_device(options.device))
            generator = opened.enter_context(
                TextGenerator(device, path, **options.decoder, **leading)
            )
            metrics = Metrics()
            engine = ServingEngine(
                generator,
                seconds=600,
                post=lambda call: loop[0].call_soon_threadsafe(call),
                over=metrics.answer,
            )
            closing = opened.pop_all()
        loop: list[asyncio.AbstractEventLoop] = []

        @asynccontextmanager
        async def life(app: object) -> AsyncIterator[None]:
            loop.append(asyncio.get_running_loop())
            with closing, engine.start():
                while not engine.ready and engine.failure is None:  # captures its graphs
                    await asyncio.sleep(0.05)
                yield
                # Ray has waited for the answers under way.

        service = Service(engine, metrics, options.model, generator.default_sampling)
        app = make_app(service, life)
        app.state.engine = engine
        return app

    return make


def deployment(options: Options, *, min_replicas: int, max_replicas: int) -> Any:
    """Returns the Ray Serve application."""
    from ray import serve

    class Replica:
        def check_health(self) -> None:
            """Raises once a rank or the device has failed: Ray then starts another replica."""
            failure = self.app.state.engine.failure  # type: ignore[attr-defined]
            if failure is not None:
                raise RuntimeError(str(failure))

    share = {"CPU": 1} if options.host else {"CPU": 1, "GPU": 1}
    return serve.deployment(
        name="ostinato",
        placement_group_bundles=[share] * options.ranks,
        placement_group_strategy="STRICT_PACK",  # one machine
        ray_actor_options={"num_cpus": 1, "num_gpus": share.get("GPU", 0)},
        max_ongoing_requests=2 * options.slots,  # of which half wait for a slot
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": options.slots,
        },
        health_check_period_s=2,
        graceful_shutdown_timeout_s=600,
    )(serve.ingress(application(options))(Replica)).bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--slots", type=int, default=8, help="answers of a replica at once")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each replica")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of each rank on the CPU")
    parser.add_argument("--host", action="store_true", help="on the CPU")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    try:
        import ray  # type: ignore
        from ray import serve
    except ImportError:
        print('Ray Serve is not installed: pip install "ray[serve]"')
        return

    ray.init()
    serve.start(http_options={"port": chosen.port})
    options = Options(
        chosen.model,
        chosen.slots,
        chosen.max_context,
        chosen.tensor_parallel,
        chosen.host or not ray.cluster_resources().get("GPU"),
        chosen.threads,
    )
    target = deployment(options, min_replicas=chosen.min_replicas, max_replicas=chosen.max_replicas)
    serve.run(target, blocking=True)


if __name__ == "__main__":
    main()
