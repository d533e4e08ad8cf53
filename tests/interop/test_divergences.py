"""The plants of `benchmarks.divergences` in models of transformers, on the CPU: the first operation
with another result is the one that each says is planted.  In graphs: the benchmark, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.divergences import TORCH, WORKS
from benchmarks.divergences_torch import Ground, Noted
from ostinato.device import Device

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = [name for name, work in WORKS.items() if work.kind == "transformers"]
OF_GRAPHS = ["llama_tail"]
"""Plants in what only a graph has."""


class Taped(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the result of each operation that computes something, as a graph has its node."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[bytes] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) else result
        if not func.is_view and isinstance(first, torch.Tensor):
            name = func.overloadpacket.__name__
            # Nothing yet, and a whole cache, of which the operation writes a part.
            whole = name.startswith("empty") or name == "index_copy_"
            self.results.append(b"" if whole else first.numpy().tobytes())
        return result


class OnTheCpu(Ground):
    def capture(
        self, wanted: Any = None, run: Callable[[], Any] | None = None, warmups: int = 3
    ) -> Any:
        tape = Taped()
        noted = Noted(lambda: range(len(tape.results)), wanted or (lambda func, leaves: False))
        torch.manual_seed(5)
        token = run.__self__._token.clone() if run else None  # type: ignore[attr-defined]
        with torch.no_grad(), tape, noted:
            (run or self.run)()
        if run:  # as it is after a capture, which runs nothing
            run.__self__._token.copy_(token)  # type: ignore[attr-defined]
        assert noted.found or wanted is None, "no operation was planted"
        return tape.results, tuple(map(str, noted.found))


@pytest.mark.parametrize("name", MODELS)
def test_the_planted_operation_is_the_first_with_another_result(
    name: str, host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Ground.__module__ == TORCH
    # The benchmark sets it for its process; here it is what it was after the test.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    ground = OnTheCpu(host_device, name, "cpu")
    assert ground.nothing().a == ground.nothing().b
    for method in WORKS[name].plants.values():
        if method in OF_GRAPHS:
            continue
        planted = getattr(ground, method)()
        assert len(planted.a) == len(planted.b)
        different = [
            n for n, pair in enumerate(zip(planted.a, planted.b, strict=True)) if len({*pair}) > 1
        ]
        assert planted.paths == (str(different[0]),), method
    assert ground.nothing().a == ground.nothing().b  # nothing is left of a plant
