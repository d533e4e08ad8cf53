"""What torch shares or ends behind a graph's back, without a GPU: those rules of
`gpu/test_silent_torch.py` that can be seen here."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.interop.captures import clear_caches
from tests.interop.library import ONE, SOURCE

torch: Any = pytest.importorskip("torch")


# --------------------------------------------------------------------- words of their own


def test_a_copy_of_a_graph_reads_elsewhere(host_device: Device) -> None:
    """As graphs that draw random numbers do: torch writes its own words when others draw."""
    from ostinato.interop.torch.adopting import point_elsewhere

    device, stream = host_device, host_device.create_stream()
    line = device.modules.get_or_compile(SOURCE, "line")
    x, own, out, copied = (device.zeros(4, "f4") for _ in range(4))
    with ost.capture(stream) as capture:
        ost.launch(stream, line, ONE, out, x, 4, 2.0, 1.0)
        ost.copy(stream, copied, x)
    copy = capture.graph.clone()
    point_elsewhere(copy, {x.address: own.address})
    first, second = capture.graph.instantiate(), copy.instantiate()
    x.set(np.full(4, 3, "f4"), stream)
    own.set(np.full(4, 5, "f4"), stream)
    for run, value in ((first, 3), (second, 5), (first, 3)):
        run.launch(stream)
        assert [*out.to_numpy(stream)] == [2 * value + 1] * 4
        assert [*copied.to_numpy(stream)] == [value] * 4


def test_launches_on_two_streams_do_not_share_the_state_of_a_generator(
    host_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch must not set the words before the first one has read them."""
    from ostinato.interop.torch import adopting

    device = host_device
    moves, again = threading.Event(), threading.Event()

    @ost.host_kernel("seed: *out u64, offset: *out u64, to: u64, at: u64", name="set_generator")
    def _set_generator(launch: Any, seed: Any, offset: Any, to: int, at: int) -> None:
        seed[0], offset[0] = to, at
        if at:
            again.set()

    monkeypatch.setattr(adopting, "_SOURCE", ost.Source(host=[_set_generator]))
    generator = SimpleNamespace(
        at=0,
        get_offset=lambda: generator.at,
        initial_seed=lambda: 7,
        set_offset=lambda to: move(to),
    )

    def move(to: int) -> None:
        generator.at = to

    torchs, out = device.zeros(2, "u64"), device.zeros(1, "u64")
    graph = ost.Graph.create(device)
    waits = graph.add_call(moves.wait)
    kernel = device.modules.get_or_compile(ost.Source(host=[_draw]), "draw")
    draw = ost.prepare(kernel, ONE, torchs.address, torchs.address + 8, out)
    graph.add_operation(draw, after=[waits])
    places = ((torchs.address, torchs.address + 8),)
    graph = adopting._apart(device, graph, [adopting._Drawn(generator, places, 4)])
    run = graph.instantiate()
    streams = [device.create_stream() for _ in range(2)]
    for stream in streams:
        run.launch(stream)
    again.wait(0.3)  # what a wrong order would need
    moves.set()
    assert out.to_numpy(streams[1]) == [700704]


@ost.host_kernel("seed: *const u64, offset: *const u64, out: *u64", name="draw")
def _draw(launch: Any, seed: Any, offset: Any, out: Any) -> None:
    out[0] = out[0] * np.uint64(1000) + seed[0] * np.uint64(100) + offset[0]


# ------------------------------------------------------------------- streams and workspaces


@pytest.fixture
def captures(host_device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes the captures of a function, on streams of the host device."""
    from ostinato.interop.torch.capturing import Captures

    class Theirs:
        def __init__(self, handle: int, device: int) -> None:
            self.cuda_stream = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.cuda_stream

    monkeypatch.setattr(torch.cuda, "ExternalStream", Theirs)
    return lambda: Captures(host_device, 0, ())


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The segments of torch's allocator, as it tells them."""
    segments: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    return segments


def segment(pool: tuple[int, int], address: int, size: int, stream: int = 0) -> dict[str, Any]:
    block = {"size": 2 * size, "requested_size": size, "state": "active_allocated"}
    named = {"segment_pool_id": pool, "address": address, "total_size": 2 * size}
    return {**named, "stream": stream, "device": 0, "blocks": [block]}


def reading(device: Device, buffer: ost.Buffer) -> ost.Graph:
    """A graph of a kernel that reads a buffer."""
    line = device.modules.get_or_compile(SOURCE, "line")
    graph = ost.Graph.create(device)
    graph.add_operation(ost.prepare(line, ONE, device.zeros(4, "f4"), buffer, 4, 1.0, 0.0))
    return graph


def finished(captures: Any, graph: ost.Graph) -> str:
    from ostinato.interop.torch.capturing import FollowedEvents

    return str(captures.finished([graph], 0, FollowedEvents()))


def test_functions_without_products_share_a_stream(
    host_device: Device,
    captures: Callable[[], Any],
    memory: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ostinato.interop.torch import workspaces

    own, x = (host_device.zeros(1024, "f4") for _ in range(2))
    plain, products, taught = (captures() for _ in range(3))
    side = plain.beside()[1]
    monkeypatch.setattr(workspaces, "_pools", {(0, side.handle): (0, 5)})
    memory.append(segment((0, 5), own.address, 1024, side.handle))
    assert not finished(plain, reading(host_device, x))
    assert products.beside()[1] is side  # nothing of the first function uses its workspace
    assert not finished(products, reading(host_device, own))
    assert products.beside()[1] is side is not plain.beside()[1]
    taught.differentiates = True
    theirs = taught.beside()[1]
    assert not finished(taught, reading(host_device, x))
    assert taught.beside()[1] is theirs  # autograd's nodes remember it


@pytest.mark.parametrize(
    ("where", "refused"),
    [
        ("common memory", True),
        ("a pool", True),
        ("the side stream", False),
        ("the default stream", False),
        ("a tensor", False),
        ("less", False),
        ("torch's stream, outside", False),
        ("torch's stream, in the capture", True),
        ("torch's stream, in a graph that is launched", True),
    ],
)
def test_workspaces_of_other_streams_are_refused(
    host_device: Device,
    captures: Callable[[], Any],
    memory: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    refused: bool,
) -> None:
    """torch may free them, and others would get their memory.  But kernels have arguments that
    nobody sets, with the address of the workspace of an earlier product: that is no use of it if
    its stream took no part in the capture."""
    from ostinato.interop.torch import workspaces

    device, found, tensor = host_device, captures(), torch.zeros(1024)
    own, theirs, out = (device.zeros(1024, "f4") for _ in range(3))
    if where == "a tensor":
        theirs = device.adopt_array(tensor)
    side, other = found.beside()[1], device.create_stream()
    torchs = [torch.cuda.ExternalStream(other.handle, device=0)] if "torch's" in where else []
    monkeypatch.setattr(workspaces, "_streams_of_torch", lambda index: torchs)
    monkeypatch.setattr(workspaces, "_pools", {(0, side.handle): (0, 5)})
    monkeypatch.setattr(workspaces, "make", lambda *given, **named: None)
    pool = (0, 9) if where in ("a pool", "the side stream") else (0, 0)
    on = {"the side stream": side.handle, "the default stream": 0}.get(where, other.handle)
    memory.append(segment((0, 5), own.address, 1024, side.handle))
    memory.append(segment(pool, theirs.address, 512 if where == "less" else 1024, on))
    line, inner = device.modules.get_or_compile(SOURCE, "line"), reading(device, theirs)
    found.own_workspaces(capturing=True)
    with ost.capture(side) as capture:
        ost.launch(side, line, ONE, out, own, 4, 1.0, 0.0)
        if "in the capture" in where:
            other.wait(side.record())
            ost.launch(other, line, ONE, out, theirs, 4, 1.0, 0.0)
            side.wait(other.record())
        elif "launched" not in where:
            ost.launch(side, line, ONE, out, theirs, 4, 1.0, 0.0)
        found.note_streams()
    if "launched" in where:
        capture.graph.add_child(inner)
    reason = finished(found, capture.graph)
    assert bool(reason) is refused, reason
    assert not reason or "workspace of cuBLAS that torch may free (" in reason


def test_backwards_are_noted_in_threads_that_overlap() -> None:
    from ostinato.interop.torch.capturing import noted_backward

    before, noted = torch.autograd.Variable._execution_engine, list[str]()
    begun, ended = threading.Event(), threading.Event()

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.enable_grad():
            (x * 2).sum().backward()

    def other() -> None:
        with noted_backward(lambda: noted.append("other")):
            begun.set()
            assert ended.wait(60)
            backward()

    thread = threading.Thread(target=other)
    with noted_backward(lambda: noted.append("this")):
        thread.start()
        assert begun.wait(60)
        backward()
    backward()  # no longer noted
    ended.set()
    thread.join()
    assert noted == ["this", "other"]
    assert torch.autograd.Variable._execution_engine is before


# ------------------------------------------------------------------------------ cuFFT's plans


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The plans in torch's cache and the most that it keeps; all graphs have transforms."""
    from ostinato.interop.torch import capturing, gradients
    from ostinato.interop.torch import plans as watched

    room, cache = [1, 8], torch.backends.cuda.cuFFTPlanCache
    monkeypatch.setattr(torch, "_cufft_get_plan_cache_size", lambda index: room[0])
    monkeypatch.setattr(torch, "_cufft_get_plan_cache_max_size", lambda index: room[1])
    monkeypatch.setattr(watched, "_watched", False)
    monkeypatch.setattr(cache, "clear", lambda self: None)
    monkeypatch.setattr(vars(cache)["max_size"], "setter", lambda index, size: None)
    for module in (capturing, gradients):
        monkeypatch.setattr(module, "transforms", lambda nodes: True)
    yield room


@torch.no_grad()
def test_graphs_with_transforms_end_with_their_plans(
    host_device: Device, plans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop.torch.plans import watch
    from tests.interop.tape import OnCpu, on_cpu

    # As after a capture that has a transform.
    monkeypatch.setattr(OnCpu._captures, "plans", watch())
    monkeypatch.setattr(OnCpu._captures, "index", 0, raising=False)
    step, x = on_cpu(OnCpu(host_device), lambda x: x * 2), torch.ones(3)
    cache = torch.backends.cuda.cuFFTPlanCache(0)

    def calls(eager: int, replays: int) -> None:
        before = step.statistics()
        assert all(torch.equal(step(x), x * 2) for _ in range(4))
        after = step.statistics()
        assert (after.eager - before.eager, after.replays - before.replays) == (eager, replays)

    with step:
        calls(1, 3)
        calls(0, 4)
        cache.clear()
        calls(1, 3)
        cache.max_size = 2
        calls(1, 3)
        plans[1] = 1  # full: each further plan ends another
        calls(4, 0)
        plans[1] = 8
        calls(0, 4)


def test_plans_that_end_between_a_replay_and_its_backward(
    host_device: Device, plans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.interop.torch.plans import watch
    from tests.interop.tape import OnCpu, on_tape

    cache = torch.backends.cuda.cuFFTPlanCache(0)
    monkeypatch.setattr(OnCpu._captures, "plans", watch())
    monkeypatch.setattr(OnCpu._captures, "index", 0, raising=False)
    step = on_tape(host_device, lambda x: x.sin() * 2, gradients="replay")
    try:
        for number in range(8):
            x = torch.randn(5, requires_grad=True)
            y = step(x)
            if number == 4:
                cache.clear()
                with pytest.raises(RuntimeError, match="plans of cuFFT"):
                    y.sum().backward()
                continue
            y.sum().backward()
            assert torch.equal(x.grad, 2 * x.detach().cos())
        assert step.statistics().replays >= 5, step.explain()
    finally:
        step.close()


@pytest.mark.parametrize("how", ["stays", "ends", "full"])
def test_plans_that_end_in_a_capture(
    host_device: Device,
    captures: Callable[[], Any],
    memory: list[dict[str, Any]],
    plans: list[int],
    how: str,
) -> None:
    from ostinato.interop.torch.capturing import FollowedEvents
    from ostinato.interop.torch.plans import watch

    found, graph = captures(), reading(host_device, host_device.zeros(4, "f4"))
    since = watch()
    if how == "ends":
        torch.backends.cuda.cuFFTPlanCache(0).clear()
    plans[1] = 1 if how == "full" else 8
    reason = found.finished([graph], since, FollowedEvents())
    assert bool(reason) is (how != "stays")
    assert not reason or "cufft_plan_cache" in reason


# --------------------------------------------------------------------------- tensors in caches


@pytest.mark.parametrize("most", [1, None])
def test_caches_with_values_of_a_capture_are_cleared(most: int | None) -> None:
    made: list[Any] = []

    @functools.lru_cache(maxsize=most)
    def table(size: int) -> Any:
        made.append(torch.ones(size))
        return made[-1]

    @functools.lru_cache
    def other(size: int) -> Any:
        return torch.ones(size)

    table(3), other(3)
    clear_caches(lambda value: value is made[0])
    assert table.cache_info().currsize == 0 and other.cache_info().currsize == 1
    clear_caches(lambda value: False)
    table(3)
    assert table.cache_info().currsize == 1 and len(made) == 2


# ------------------------------------------------------- what changes a backward from outside


def _doubled(module: Any, inputs: Any, outputs: Any) -> Any:
    return tuple([None if each is None else 2 * each for each in inputs])


NET = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
AROUND: dict[str, Callable[[], Callable[[], object]]] = {
    "a hook of all modules": lambda: (
        torch.nn.modules.module.register_module_full_backward_hook(_doubled).remove
    ),
    "a hook of a module inside": lambda: NET[1].register_full_backward_hook(_doubled).remove,
    "a hook before it": lambda: (
        NET[1].register_full_backward_pre_hook(lambda module, given: (3 * given[0],)).remove
    ),
    "hooks of saved tensors": lambda: _entered(
        torch.autograd.graph.saved_tensors_hooks(lambda saved: 2 * saved, lambda saved: saved)
    ),
    "the search for anomalies": lambda: _entered(torch.autograd.detect_anomaly(check_nan=True)),
}


def _entered(context: Any) -> Callable[[], object]:
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("inside, on", [(False, True), (True, True), (True, False)])
def test_what_changes_a_backward(host_device: Device, how: str, inside: bool, on: bool) -> None:
    """`inside`: the function computes the gradients, else they are those of a replay's result.
    `on`: they are on around the call, too."""
    from tests.interop.tape import on_tape

    def gradients(x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = NET(x) if inside else step(x) if replayed else NET(x)
            # No number has this root, which is what the search for anomalies reports.
            ends = (y - y.detach() - 1).sqrt() if "anomalies" in how and inside else y * y
            return torch.autograd.grad(ends.sum(), x)[0].nan_to_num()

    step = on_tape(
        host_device, gradients if inside else NET, gradients="eager" if inside else "replay"
    )

    def outcome(ours: bool, x: Any) -> Any:
        nonlocal replayed
        replayed = ours
        try:
            return (step if inside and ours else gradients)(x)
        except RuntimeError as error:
            return str(error)

    replayed, undo = False, None
    try:
        for number in range(12):
            x = torch.randn(3, 4)
            if number == 6:
                assert step.statistics().replays >= 3, step.explain()
                undo = AROUND[how]()
            with torch.set_grad_enabled(on):
                found, wanted = outcome(True, x), outcome(False, x)
            assert type(found) is type(wanted), (number, found, wanted)
            assert found == wanted if isinstance(found, str) else torch.equal(found, wanted), number
    finally:
        if undo is not None:
            undo()
        step.close()


class _Clip:
    """A hook of a weight's gradient, with a state, which counts its calls if `counts`."""

    def __init__(self, counts: bool) -> None:
        self.scale, self.counts, self.calls = 2.0, counts, 0

    def before(self, gradient: Any) -> Any:
        self.calls += self.counts
        return gradient * self.scale + self.calls

    def after(self, weight: Any) -> None:
        weight.grad = self.before(weight.grad)

    def of_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for weight in optimizer.param_groups[0]["params"]:
            weight.data.copy_(self.before(weight.detach()) / 4)


HOOKS: dict[str, Callable[[Any, Any, _Clip], Any]] = {
    "of a gradient": lambda model, _, clip: model.weight.register_hook(clip.before),
    "after a gradient": lambda model, _, clip: model.weight.register_post_accumulate_grad_hook(
        clip.after
    ),
    "before a step": lambda _, optimizer, clip: optimizer.register_step_pre_hook(clip.of_step),
    "after a step": lambda _, optimizer, clip: optimizer.register_step_post_hook(clip.of_step),
}


@pytest.mark.parametrize("how", HOOKS)
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("kind", ["a module", "a list", "an optimiser"])
def test_hooks_of_weights(host_device: Device, how: str, counts: bool, kind: str) -> None:
    """A training step captures what they do; their Python runs in no replay."""
    from tests.interop.tape import on_tape

    def world() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(1)
        model, hook = torch.nn.Linear(4, 2), _Clip(counts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [*model.parameters()]

        def step(x: Any) -> Any:
            weight, bias = weights if kind == "a list" else (None, None)
            if kind == "an optimiser":
                weight, bias = optimizer.param_groups[0]["params"]
            y = model(x) if kind == "a module" else torch.nn.functional.linear(x, weight, bias)
            optimizer.zero_grad()
            loss = y.square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, hook, step, lambda: HOOKS[how](model, optimizer, hook)

    (model, hook, function, put), (theirs, other, eager, their_put) = world(), world()
    step, handles = on_tape(host_device, function), []
    try:
        for number in range(24):
            if number in (4, 16):
                handles = [put(), their_put()]
            if number == 8:
                hook.scale = other.scale = 0.5
            if number == 12:
                for handle in handles:
                    handle.remove()
            x = torch.randn(3, 4)
            assert torch.equal(step(x), eager(x)), number
            assert torch.equal(model.weight, theirs.weight), number
            assert hook.calls == other.calls
        assert counts or step.statistics().replays >= 12, step.explain()
    finally:
        step.close()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_between_recurrent_layers_is_counted(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN draws it from a state that no replay starts anew after a seed."""
    from ostinato.interop.torch import recurrent

    recurrent.watch()
    monkeypatch.setattr(recurrent, "by_cudnn", lambda x: True)
    x: Any = torch.randn(5, 2, 4)
    if packed:
        x = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    model = getattr(torch.nn, kind)(4, 4, num_layers=2, dropout=0.5)
    before = recurrent.draws()
    model(x)
    assert recurrent.draws() == before + 1
    model.eval()(x)
    model.train().dropout = 0.0
    model(x)
    assert recurrent.draws() == before + 1
