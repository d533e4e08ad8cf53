"""Runs a model on several Ray actors with one GPU each.

    python examples/ray_generate.py --ranks 2 "Why is the sky blue?"
    python examples/ray_generate.py --ranks 3             # on the CPU, where there is no GPU

Needs Ray (`pip install ray`).  The driver process makes the group's id and passes it to the actors;
it must live as long as they do, and if actors run on other machines, they must be able to reach it
at `--address`.  If an actor dies, the calls of the others fail, so that `ray.get` raises.
"""

from __future__ import annotations

import argparse

import ostinato as ost
from ostinato.distributed import join_group, new_group_id
from ostinato.models import TextGenerator


class Worker:
    """One rank."""

    def __init__(self, group_id: str, rank: int, size: int, model: str, *, host: bool) -> None:
        self.group = join_group(group_id, rank=rank, size=size)
        # Ray sets CUDA_VISIBLE_DEVICES to the actor's own GPU.
        self.device = ost.open_device("host" if host else "cuda:0")
        self.generator = TextGenerator(self.device, model, group=self.group)

    def generate(self, prompt: str, max_tokens: int) -> str:
        """Returns the answer, the same text on all ranks.  Must be called on all ranks."""
        answer = self.generator.generate(prompt, max_tokens=max_tokens)
        return "".join(answer)

    def close(self) -> None:
        """Releases everything.  If a rank closes while others generate, their calls fail."""
        self.generator.close()
        self.group.close()
        self.device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--address", default="127.0.0.1", help="of this machine, for the actors")
    options = parser.parse_args()
    try:
        import ray  # type: ignore
    except ImportError:
        print("Ray is not installed")
        return

    with ost.open_device() as device:
        on_host = device.name == "host"
    group_id = new_group_id(options.ranks, host=options.address)
    ray.init()
    try:
        actor = ray.remote(num_cpus=0, num_gpus=0 if on_host else 1)(Worker)
        workers = [
            actor.remote(group_id, rank, options.ranks, options.model, host=on_host)
            for rank in range(options.ranks)
        ]
        calls = [worker.generate.remote(options.prompt, options.max_tokens) for worker in workers]
        texts = ray.get(calls)
        assert len(set(texts)) == 1, "ranks give the same text"
        print(texts[0])
        ray.get([worker.close.remote() for worker in workers])
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
