"""An argument of the wrong type, or of another device, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import ostinato as ost
from ostinato.device import Device
from ostinato.errors import InputError
from tests.footguns.common import Borrowed, N, graph_of, ones
from tests.sources import config, kernel, preload

DOORS = {
    "launch": lambda w, x: ost.launch(w.stream, w.scale, config(N), x, N),
    "prepare": lambda w, x: ost.prepare(w.scale, config(N), x, N),
    "node": lambda w, x: w.graph.add_kernel(w.scale, config(N), x, N),
    "capture": lambda w, x: graph_of(w.stream, w.scale, N, x, N),
    "record": lambda w, x: w.record(x),
    "set": lambda w, x: w.run.set(0, "x", x),
    "set by index": lambda w, x: w.run.set(0, 0, x),
    "patcher": lambda w, x: w.run.patcher(0, "x")(x),
    "set_all": lambda w, x: w.run.set_all([(0, "n", 1), (0, "x", x)]),
    "parameters": lambda w, x: w.run.set(0, ost.prepare(w.scale, config(N), x, N)),
    "rebind": lambda w, x: w.run.rebind({w.x: x}),
    "rebind a range": lambda w, x: w.run.rebind({w.x.range: x}),
}
"""The calls that give memory to a kernel, of a `Scaled` and the memory."""


class Scaled:
    """A graph of one kernel that doubles `x`, and executables of one copy and of one fill."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.create_stream()
        self.scale = kernel(device, "scale")
        self.x = ones(device)
        self.graph = ost.Graph.create(device)
        self.graph.add_kernel(self.scale, config(N), self.x, N)
        self.run = self.graph.instantiate()
        copying, filling = ost.Graph.create(device), ost.Graph.create(device)
        copying.add_copy(self.x, ones(device))
        filling.add_fill(self.x, 0)
        self.copying, self.filling = copying.instantiate(), filling.instantiate()

    def record(self, x: object) -> None:
        with ost.record(self.stream):
            ost.launch(self.stream, self.scale, config(N), x, N)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", ["buffer", "view", "scalar", "foreign"])
def test_memory_of_another_type_is_no_argument(device: Device, door: str, way: str) -> None:
    """A kernel of float32 would read the bits of an int64 as other numbers."""
    world = Scaled(device)
    for dtype in ("int64", "float64", "int32", "uint32", "f16", "bf16", "bool", "uint8"):
        values = device.zeros(2 * N, dtype)
        given: object = values
        if way == "view":
            given = device.zeros(8 * N, "bytes").view(dtype=dtype)
        elif way == "scalar":
            given = ost.DeviceArray(device, 2 * N, dtype)
        elif way == "foreign":
            given = Borrowed(values, values.dtype.str)
        with pytest.raises(InputError, match=r"points at f32|holds float32|points at float32"):
            DOORS[door](world, given)
    world.run.launch(world.stream)  # the graph is unchanged
    assert (world.x.to_numpy(world.stream) == 2).all()
    assert len(world.graph) == 1


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", ["same", "bytes", "view", "foreign", "range", "address"])
def test_memory_of_the_type_or_of_none_is_taken(device: Device, door: str, way: str) -> None:
    world = Scaled(device)
    bytes_, wide = device.zeros(4 * N, "bytes"), device.zeros(N // 2, "f64")
    given = {
        "same": lambda: device.zeros(N, "f32"),
        "bytes": lambda: bytes_,
        "view": lambda: wide.view(dtype="f32"),
        "foreign": lambda: Borrowed(device.zeros(N, "f32"), "<f4"),
        "range": lambda: wide.range,
        "address": lambda: wide.address if "rebind" not in door else wide.range,
    }[way]()
    DOORS[door](world, given)
    world.run.launch(world.stream)
    world.stream.synchronize()


MIXED = np.dtype([("a", "<i4"), ("b", "<f4")])


@pytest.mark.parametrize(
    ("word", "fitting"),
    [
        ("u8", ["uint8", "u1", np.bool_, MIXED]),
        ("i8", ["int8", "i1"]),
        ("u16", ["u16", "bf16", np.uint16]),
        ("bf16", ["bf16", "bfloat16", "u16"]),
        ("f16", ["f16", "f2", "half"]),
        ("float32", ["f32", "f4", np.float32, np.dtype("<f4")]),
        ("bytes", ["f32", "u1", "c8", "?", "i64", "i1", "u2", "f2", MIXED]),
        ("i64", ["i64", np.longlong]),
    ],
)
def test_what_a_pointer_may_point_at(host_device: Device, word: str, fitting: list[Any]) -> None:
    """A flag or a struct counts as its bytes, and a bfloat16 as its 16 bits.  The same holds beside
    a number that is not packed as it is: a fault refused memory for a pointer to bytes then."""

    @ost.host_kernel(f"x: *{word}, n: u32", name="takes")
    def takes(launch: object, x: object, n: int) -> None: ...

    made = host_device.modules.get_or_compile(ost.Source(host=[takes]), "takes")
    for dtype in [*fitting, "bytes"]:
        for n in (1, np.uint32(1)):
            made.arguments(host_device.zeros(2, dtype), n)
    mine = {host_device.zeros(2, dtype).dtype for dtype in fitting}
    for dtype in ("bool", MIXED, "u1", "i1", "u2", "f2", "f4", "i64", "c8"):
        memory = host_device.zeros(2, dtype)
        if memory.dtype not in mine:
            with pytest.raises(InputError, match="'x' points at"):
                made.arguments(memory, 1)


def test_a_dtype_is_asked_for(device: Device) -> None:
    """`zeros(1024)` without a dtype made bytes, and a kernel of 1024 numbers ran past their end."""
    pool = device.pool()
    for make in (device.zeros, device.ones, device.empty, device.pinned, pool.empty):
        with pytest.raises(TypeError, match="dtype"):
            make(4)  # type: ignore[call-arg]
        with pytest.raises(InputError, match="dtype None"):
            make(4, None)
        for word in ("f32", "float32", "f4", np.float32, np.dtype(np.float32)):
            assert make(4, word).dtype == np.float32
        assert make(4, "f16").dtype == np.float16  # NumPy's "f16" has 128 bits
        assert make(4, "bytes").nbytes == 4
        for word in ("i8", "u8"):
            with pytest.raises(InputError, match="8 bits in signatures and 8 bytes in NumPy"):
                make(4, word)
    for values in (1.0, [1, 2], ((1, 2), (3, 4))):
        with pytest.raises(InputError, match="has no dtype"):
            device.array(values)
        assert device.array(values, "u32").dtype == np.uint32
    assert device.array(np.float64(1)).dtype == np.float64


ELSEWHERE = {
    **DOORS,
    "copy to": lambda w, x: ost.copy(w.stream, x, w.x),
    "copy from": lambda w, x: ost.copy(w.stream, w.x, x),
    "copy in": lambda w, x: x.set(np.zeros(N, np.float32), w.stream),
    "copy out": lambda w, x: x.to_numpy(w.stream),
    "fill": lambda w, x: ost.fill(w.stream, x, 1),
    "copy node": lambda w, x: w.graph.add_copy(w.x, x),
    "fill node": lambda w, x: w.graph.add_fill(x, 1),
    "set copy": lambda w, x: w.copying.set(0, dst=w.x, src=x),
    "set fill": lambda w, x: w.filling.set(0, dst=x, value=1),
    "slot": lambda w, x: ost.GraphedStep(
        lambda *_: None,
        stream=w.stream,
        cache=ost.GraphCache(w.device),
        slots=[ost.Slot("x", x, "state")],
    ),
}
"""The calls that could get memory of another device."""


@pytest.mark.parametrize("door", ELSEWHERE)
@pytest.mark.parametrize("way", ["buffer", "view", "state"])
def test_memory_of_another_device_is_refused(
    device: Device, other_device: Device, door: str, way: str
) -> None:
    """Such a call broke the context, and the error blamed the kernel."""
    world = Scaled(device)
    there = ones(other_device)
    if way == "view":
        there = other_device.zeros(8 * N, "bytes").view(4 * N, N, "f32")
    elif way == "state":
        there = ost.DeviceArray(other_device, N, "f32").buffer
    ours, theirs = device.context.space.name, other_device.context.space.name
    assert ours != theirs
    with pytest.raises(InputError) as caught:
        ELSEWHERE[door](world, there)
    assert ours in str(caught.value) and theirs in str(caught.value)
    world.run.launch(world.stream)  # the context works, and the graph is unchanged
    assert (world.x.to_numpy(world.stream) == 2).all()
    assert len(world.graph) == 1


@pytest.mark.parametrize(
    "call",
    [
        "launch", "submit", "capture", "replay", "upload", "instantiate", "wait", "record",
        "event node", "set", "child", "update", "pool", "into", "node",
    ],
)  # fmt: skip
def test_what_is_of_another_device_is_refused(
    device: Device, other_device: Device, call: str
) -> None:
    """Each call returned a bare status, or used the wrong stream."""
    here, there = Scaled(device), Scaled(other_device)
    operation = ost.prepare(here.scale, config(N), here.x, N)
    theirs = there.stream
    event = here.stream.record()
    state = ost.DeviceScalar(device, "u32", initial=1, stream=here.stream)
    calls: dict[str, Callable[[], object]] = {
        "launch": lambda: ost.launch(theirs, here.scale, config(N), there.x, N),
        "submit": lambda: theirs.submit(operation),
        "capture": lambda: ost.capture_function(theirs, lambda: theirs.submit(operation)),
        "replay": lambda: here.run.launch(theirs),
        "upload": lambda: here.run.upload(theirs),
        "instantiate": lambda: here.graph.instantiate(upload=theirs),
        "wait": lambda: theirs.wait(event),
        "record": lambda: theirs.record(event),
        "event node": lambda: there.graph.add_event_wait(event),
        "set": lambda: state.set(2, theirs),
        "child": lambda: there.graph.add_child(here.graph),
        "update": lambda: there.run.update(here.graph),
        "pool": lambda: ost.Capture(theirs, pool=device.pool()),
        "into": lambda: ost.Capture(theirs, into=here.graph),
        "node": lambda: there.graph.add_operation(operation),
    }
    with pytest.raises(InputError) as caught:
        calls[call]()
    for opened in (device, other_device):
        assert opened.context.space.name in str(caught.value)
    for world in (here, there):
        world.run.launch(world.stream)
        assert (world.x.to_numpy(world.stream) == 2).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mask": object()}, "has a mask"),
        ({"shape": (-1,)}, "not valid"),
        ({"shape": (8.0,)}, "not valid"),
        ({"shape": 8}, "not valid"),
        ({"data": None}, "not valid"),
        ({"data": (-1, False)}, "not valid"),
        ({"typestr": "zz"}, "not valid"),
        ({"strides": (8, 8)}, "not valid"),
        ({"strides": (16,)}, "strided"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_array_that_kernels_would_read_wrongly_is_refused(
    device: Device, change: dict[str, object], said: str
) -> None:
    class Foreign:
        def __init__(self, **changes: object) -> None:
            plain = {"shape": (8,), "typestr": "<i8", "data": (1 << 40, False), "version": 3}
            self.__cuda_array_interface__ = plain | changes

    assert device.adopt_array(Foreign(mask=None, strides=(8,))).shape == (8,)
    with pytest.raises(InputError, match=said):
        device.adopt_array(Foreign(**change))


@pytest.mark.parametrize("handle", [-5, 1 << 64, "5", None, 5.0], ids=repr)
def test_what_is_no_handle_is_no_stream(device: Device, handle: object) -> None:
    class Foreign:
        def __cuda_stream__(self) -> tuple[int, object]:
            return 0, handle

    with pytest.raises(InputError, match="version, handle"):
        device.adopt_stream(Foreign())


def test_what_is_no_stream_node_slot_or_scheme_is_refused(
    device: Device, stream: ost.Stream
) -> None:
    graph = ost.Graph.create(device)
    loop = graph.add_conditional("while", graph.condition())
    cache, x, some = ost.GraphCache(device), ones(device), cast(Any, None)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ost.capture_function(some, print), "Stream is needed, not NoneType"),
        (lambda: ost.record(some).__enter__(), "Stream is needed, not NoneType"),
        (lambda: ost.Capture(stream, into=cast(Any, loop)), "one of its .bodies"),
        (lambda: graph.add_empty(after=cast(Any, loop.node)), r"after=\[node\]"),
        (lambda: graph.add_empty(after=[cast(Any, loop)]), "a conditional's is its .node"),
        (lambda: graph.add_edges([(loop.node, cast(Any, "b"))]), "not str"),
        (lambda: ost.GraphCache(device, buckets=cast(Any, [1, 2])), "ExplicitBuckets"),
        (lambda: ost.GraphedStep(print, stream=some, cache=cache), "a Stream"),
        (lambda: ost.GraphedStep(some, stream=stream, cache=cache), "a function"),
        (
            lambda: ost.GraphedStep(print, stream=stream, cache=cache, slots=[cast(Any, x)]),
            "a list of Slots",
        ),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=words):
            call()
    assert graph.count() == 1


@pytest.mark.parametrize("word", ["GLOBAL", "IF", "Input", "child graph", "", 1, None, ["if"]])
def test_a_word_that_an_option_does_not_have_is_refused(
    device: Device, stream: ost.Stream, word: Any
) -> None:
    graph, x = ost.Graph.create(device), ones(device)
    cache = ost.GraphCache(device)
    modes = '"global", "thread_local" or "relaxed" is needed'
    calls: list[tuple[str, Callable[[], object], str]] = [
        ("mode", lambda: ost.Capture(stream, mode=word), modes),
        ("mode", lambda: ost.GraphedStep(print, stream=stream, cache=cache, mode=word), modes),
        ("kind", lambda: graph.add_conditional(word, graph.condition()), '"while" or "switch" is'),
        ("slot 'x': role", lambda: ost.Slot("x", x, word), '"input", "output", "state" or "scr'),
        ("build", lambda: ost.GraphedStep(print, stream=stream, cache=cache, build=word), '"rec'),
    ]
    if word is not None:
        calls += [("kind", lambda: graph.count(word), '"kernel", "memcpy",')]
    for what, call, words in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(f"{what}={word!r}: ") and words in str(caught.value)
    assert graph.count() == 0


def test_what_is_no_type_no_array_or_no_buffer_is_refused(
    device: Device, stream: ost.Stream
) -> None:
    x = ones(device)
    for make, words in (
        (lambda: device.empty(N, "f99"), "f99"),
        (lambda: device.array([1.0], "f99"), "f99"),
        (lambda: ost.DeviceScalar(device, "f99"), "f99"),
        (lambda: device.array([[1.0], [1.0, 2.0]], "f32"), "cannot read"),
        (lambda: ost.copy(stream, x, np.ones(N, np.float32)), r"src is ndarray.*buffer\.set"),  # type: ignore[arg-type]
        (lambda: ost.copy(stream, np.ones(N, np.float32), x), "dst is ndarray"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=words):
            make()


def test_an_object_of_the_wrong_type_is_named_in_the_error(
    device: Device, stream: ost.Stream
) -> None:
    x, wrong = ones(device), cast(Any, object())
    graph = ost.Graph.create(device)
    add = kernel(device, "add")
    run = graph.instantiate()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: x.set([1.0] * N, cast(Any, device)), "set.*Stream is needed"),
        (lambda: x.to_numpy(wrong), "to_numpy.*a Stream is needed, not object"),
        (lambda: ost.fill(wrong, x, 0), "fill.*a Stream is needed"),
        (lambda: ost.copy(wrong, x, x), "copy.*a Stream is needed"),
        (lambda: run.upload(wrong), "upload.*a Stream is needed"),
        (lambda: ost.DeviceScalar(device, "u4").set(1, wrong), "set.*a Stream is needed"),
        (lambda: ost.fill(stream, cast(Any, np.ones(N)), 0), "dst is ndarray"),
        (lambda: graph.add_fill(cast(Any, np.ones(N)), 0), "dst is ndarray"),
        (lambda: graph.add_child(cast(Any, run)), "a Graph is needed, not GraphExec.*its .graph"),
        (lambda: graph.add_empty(after=cast(Any, 0)), "a list of nodes"),
        (lambda: ost.Graph.adopt(device, cast(Any, 2.5), owner=None), "2.5 is no handle"),
        (lambda: ost.Graph.adopt(device, -1, owner=None), "-1 is no handle"),
        (
            lambda: ost.lowlevel.replace_small_fills(device, cast(Any, run)),
            "not Device and GraphExec",
        ),
        (lambda: add.allow_shared(cast(Any, 2.5)), "nbytes=2.5"),
        (lambda: add.occupancy(cast(Any, float("nan"))), "threads=nan"),
        (lambda: add.occupancy(32, "1 x"), "shared='1 x'"),
        (lambda: device.pool(reserve="1 Mi"), "reserve='1 Mi'"),
        (lambda: device.pool(slab=cast(Any, 1.5)), "slab=1.5"),
        (lambda: ost.DeviceScalar(device, "u4", depth=cast(Any, 2.5)), "depth=2.5"),
        # A decorator without its parentheses.
        (lambda: ost.host_kernel(cast(Any, print)), "a signature is text.*@host_kernel"),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=words):
            call()
    assert graph.count() == 0


@pytest.mark.gpu
def test_two_devices_on_one_gpu_share_their_memory(cuda_device: Device) -> None:
    with preload(ost.open_device(cuda_device.name)) as second:
        world, x = Scaled(cuda_device), ones(second)
        for give in DOORS.values():
            give(world, x)
        ost.copy(world.stream, world.x, x)
        second.create_stream().wait(world.stream.record())
        cuda_device.synchronize()
