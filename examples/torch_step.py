"""A PyTorch decode step that is replayed as a graph.

    python examples/torch_step.py

Needs torch and a GPU.  The step writes a key-value cache in place, has sizes that change, and has
dropout, which draws new numbers at each replay.
"""

from __future__ import annotations

import sys
from typing import Any

import ostinato as ost


def main() -> int:
    try:
        import torch  # type: ignore
    except ImportError:
        print("torch is not installed")
        return 0
    if not torch.cuda.is_available():
        print("torch has no GPU here")
        return 0
    from ostinato.interop.torch import graphed

    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True).cuda().eval()

    # One line makes the same call a replay.
    step = graphed(model)
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(2, 32, 256, device="cuda")
            assert torch.equal(step(x), model(x))

    # A cache is static: the graph writes to it in place, and is patched if it moves.
    def decode(x: Any, place: Any, cache: Any) -> Any:
        cache.index_copy_(0, place, x)
        seen = torch.arange(64, device="cuda")[:, None] <= place
        return (cache * seen).sum(0)

    decode_step = graphed(decode, static=("cache",))
    # Sizes share the graph of their bucket; the check also replays it with poisoned padding.
    scale = graphed(
        lambda tokens: torch.relu(tokens) * 2,
        dynamic={"tokens": 0},
        buckets=ost.PowersOfTwo(64),
        verify="first",
    )
    # Each replay draws new random numbers, the same as eager runs from the same seed.
    noisy = graphed(lambda x: torch.nn.functional.dropout(x, 0.5))
    with torch.no_grad():
        for _ in range(2):
            cache = torch.zeros(64, 16, device="cuda")
            for place in range(4):
                x = torch.ones(1, 16, device="cuda")
                total = decode_step(x, torch.tensor([place], device="cuda"), cache)
                assert total.tolist() == [place + 1] * 16
        for n in (5, 6, 7, 8):
            tokens = torch.randn(n, 16, device="cuda")
            assert torch.equal(scale(tokens), torch.relu(tokens) * 2)
        x = torch.ones(1000, device="cuda")
        results = []
        for run in (noisy.__wrapped__, noisy):
            torch.manual_seed(7)
            results.append([run(x) for _ in range(4)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for each in (step, decode_step, scale, noisy):
        print(each.explain(), "\n")
        each.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
