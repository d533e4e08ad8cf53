"""Trains a small network whose whole step is graphed: forward, backward, clipping, optimiser and
scheduler, written as for any loop.

    pip install ostinato[cuda13] torch
    python examples/train.py                    # a GPU if torch has one, else the CPU (eagerly)

The network learns to tell two spirals apart.  On a GPU a step is a CUDA graph, with the rate and
other numbers of the optimiser set before each launch; the scheduler is called in Python as always.
The table at the end says what became of the calls.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import track

try:
    import torch
except ImportError:
    print("torch is not installed")
    sys.exit(0)

from ostinato.interop.torch import graphed

STEPS = 600
ROWS = 256
_BARS = " ▁▂▃▄▅▆▇█"


def spirals(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws points of two spirals: float32[rows, 2], and which spiral each is of, int64[rows]."""
    which = torch.randint(0, 2, (rows,), generator=generator)
    turn = torch.rand(rows, generator=generator).sqrt() * 3 * math.pi
    angle = turn + which * math.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 10
    return points + torch.randn(rows, 2, generator=generator) * 0.02, which


def plot(losses: list[float], width: int = 40) -> str:
    """Draws losses as a line of bars, each the mean of a part of them."""
    size = max(1, len(losses) // width)
    means = [sum(losses[i : i + size]) / size for i in range(0, size * width, size)]
    most = max(means)
    return "".join([_BARS[round(mean / most * (len(_BARS) - 1))] for mean in means])


def main() -> int:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    nn: Any = torch.nn
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
    )
    model.to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    @graphed
    def step(points: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), which)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    console = Console()
    losses = []
    began = time.perf_counter()
    for _ in track(range(STEPS), f"training on {where}", console=console):
        points, which = spirals(ROWS, generator)
        losses.append(step(points.to(where), which.to(where)))
    seconds = time.perf_counter() - began
    values = torch.stack(losses).tolist()
    points, which = spirals(4096, generator)
    with torch.no_grad():
        right = (model(points.to(where)).argmax(1).cpu() == which).float().mean().item()
    console.print(f"loss  {plot(values)}  {values[0]:.3f} to {values[-1]:.4f}")
    console.print(f"{right:.1%} of 4,096 new points are told right; {seconds:.1f} s")
    print(step.explain())
    return 0 if right > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
