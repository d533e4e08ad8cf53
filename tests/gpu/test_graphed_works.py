"""`graphed` on functions and models that torch and transformers ship: the same answers as eager."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.torch_works import MODELS, NAMES, make_work
from ostinato.device import Device
from tests.gpu.foreign import library

torch = library("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def tensors(result: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def farthest(one: list[Any], other: list[Any]) -> float:
    """By how much two results differ; 0 if they are equal, NaN with NaN too."""
    assert [t.shape for t in one] == [t.shape for t in other]
    pairs = zip(one, other, strict=True)
    return max(
        0.0 if torch.equal(a, b) else float((a.double() - b.double()).abs().max()) for a, b in pairs
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_eager(cuda_device: Device, name: str) -> None:
    """Bit-equal, or within what two eager runs differ by."""
    from ostinato.interop.torch import graphed

    if name in MODELS:
        library("transformers")
    work = make_work(name)
    step: Any = graphed(work.function, device=cuda_device, static=work.static)
    statics = [work.fresh() for _ in range(3)]
    with torch.inference_mode():
        for number in range(6):
            args = work.draw()
            runs = []
            for run, static in zip((work.function, work.function, step), statics, strict=True):
                torch.manual_seed(number)
                runs.append([t.clone() for t in tensors(run(*args, *static))])
            assert runs[0], "no tensor in the result"
            allowed = farthest(runs[0], runs[1])
            assert farthest(runs[0], runs[2]) <= allowed, f"call {number}: {step.explain()}"
    statistics = step.statistics()
    assert (statistics.eager, statistics.captures, statistics.replays) == (1, 1, 5), step.explain()
    step.close()
