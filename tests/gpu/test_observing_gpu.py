"""Graphs of programs that know nothing of the observer.  Without a GPU:
tests/interop/test_observing.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import ostinato as ost
from ostinato.device import Device
from tests.gpu.foreign import library

torch: Any = library("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
ROWS, WIDTH = 64, 256


@pytest.fixture(autouse=True)
def observing(cuda_device: Device) -> Iterator[Any]:
    from ostinato.interop.torch import observe

    gc.collect()  # graphs of other tests stay known as long as they live
    with observe() as watch:
        yield watch


def model(dropout: float = 0.0) -> Any:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(dropout), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH)).cuda()


def by_hand(work: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
    """A capture as torch's documentation has it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            work(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = work(x)
    # torch fills seed and offset on the capture's stream, and lets no first replay wait for that.
    torch.cuda.synchronize()

    def replay() -> Any:
        graph.replay()
        return y

    return replay


def test_a_capture_by_hand(observing: Any, tmp_path: Path) -> None:
    from ostinato.interop.torch import observed

    work, x = model(), torch.randn(ROWS, WIDTH, device="cuda")
    replay = by_hand(work, x)
    (one,) = observed()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(replay(), work(x))
    (one,) = observed()
    assert one.nodes >= 3 and one.replays == 2 and one.pool_bytes
    assert Path(__file__).name in one.where
    graph, stream = one.adopt(), one.device.create_stream()
    with graph.instantiate(upload=stream) as run:
        assert ost.first_difference(stream, graph, run) is None
        assert all(node.seconds > 0 for node in run.profile(stream=stream, replays=5).nodes)
    assert any(pointer.address == x.data_ptr() for pointer in graph.audit().pointers)
    observing.export(tmp_path / "graphs.txt")
    assert str(one) in (tmp_path / "graphs.txt").read_text()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_replays_in_a_box_give_the_same_answers(dropout: float) -> None:
    """Random numbers too."""
    x = torch.randn(ROWS, WIDTH, device="cuda")
    work, answers, offsets = model(dropout), list[list[Any]](), list[list[int]]()
    replay = by_hand(work, x)

    def note() -> None:
        offsets[-1].append(torch.cuda.default_generators[0].get_offset())
        answers[-1].append(replay().clone())

    for watched in (False, True):
        torch.manual_seed(11)
        answers.append([])
        offsets.append([])
        with ost.black_box() if watched else nullcontext() as box:
            for _ in range(3):
                note()
            torch.cuda.synchronize()
            assert not watched or "of 1 executables" in repr(box)
        note()
    equal = [[torch.equal(one, other) for other in answers[1]] for one in answers[0]]
    alone = [[dropout == 0 or one == other for other in range(4)] for one in range(4)]
    assert (equal, offsets[1]) == (alone, offsets[0])


def test_make_graphed_callables() -> None:
    from ostinato.interop.torch import observed

    before = {one.number for one in observed()}  # a launch of an earlier test may keep its graph
    work, x = model(), torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    with torch.no_grad():  # else autograd's nodes of the weights keep the stream of this call
        wanted = work(x)
    graphed = torch.cuda.make_graphed_callables(work, (x,))
    y = graphed(x)
    y.sum().backward()
    torch.testing.assert_close(y, wanted)
    found = [one for one in observed() if one.number not in before]
    assert [one.replays for one in found] == [1, 1]  # forward and backward
    assert all(Path(__file__).name in one.where for one in found)


def test_the_graphs_of_a_compiled_function() -> None:
    from ostinato.interop.torch import observed

    @torch.compile(mode="reduce-overhead")  # type: ignore[untyped-decorator]
    def work(x: Any) -> Any:
        return torch.relu(x * 2 + 1).sum(dim=-1)

    x = torch.randn(ROWS, WIDTH, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            found = work(x).clone()
    torch.testing.assert_close(found, torch.relu(x * 2 + 1).sum(dim=-1))
    assert any(one.replays and Path(__file__).name in one.where for one in observed())
