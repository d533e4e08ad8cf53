"""`__all__` says what there is, and every public name has words."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import operator
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ostinato
import ostinato as ost
from ostinato import testing
from ostinato.driver.host.driver import HostDriver
from ostinato.modules import DiskStore

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(
        ostinato.__path__,
        "ostinato.",
        onerror=lambda name: None,  # a package of a library that is not here
    )
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_true(name: str) -> None:
    if name.startswith("ostinato.interop."):
        library = name.split(".")[2]
        if library not in ("captures", "graphed", "reading"):
            pytest.importorskip(library)
    if name.startswith("ostinato.serve."):
        pytest.importorskip("ostinato.serve.server")
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"


PUBLIC = [
    "ostinato",
    *(f"ostinato.{name}" for name in ("errors", "explain", "graph", "graphfile", "lowlevel")),
    *(f"ostinato.{name}" for name in ("memory", "models", "modules", "relational", "state")),
    *(f"ostinato.{name}" for name in ("step", "testing")),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        assert inspect.getdoc(getattr(module, public)), f"{name}.{public} has no docstring"


MADE_ON_A_DEVICE = {"Buffer", "CapturePool", "Event", "Graph", "LoadedGraph", "Stream"}
"""What has a context first, since a device, a capture or a file makes it."""


def _callables(name: str) -> dict[str, tuple[str, list[inspect.Parameter]]]:
    """The public functions, constructors and methods of a module: which it is, its parameters."""
    module, found = importlib.import_module(name), dict[str, tuple[str, list[inspect.Parameter]]]()
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isfunction(value):
            found[public] = "function", list(inspect.signature(value).parameters.values())
        elif inspect.isclass(value) and not issubclass(value, (enum.Enum, Exception)):
            found[public] = "class", list(inspect.signature(value).parameters.values())
            for own, method in vars(value).items():
                method = getattr(method, "__func__", method)
                if inspect.isfunction(method) and not own.startswith("_"):
                    parameters = list(inspect.signature(method).parameters.values())[1:]
                    found[f"{public}.{own}"] = "method", parameters
    return found


@pytest.mark.parametrize("name", ["ostinato", "ostinato.graphfile", "ostinato.state"])
def test_streams_and_devices_stand_where_they_always_do(name: str) -> None:
    """Functions take the stream first, methods by its name; what takes a device takes it first, and
    no user gives a context."""
    for public, (kind, parameters) in _callables(name).items():
        for place, one in enumerate(parameters):
            words = set(re.findall(r"\w+", str(one.annotation)))
            if "Stream" in words:
                assert one.name in ("stream", "upload"), public
                assert kind != "function" or place == 0, public
            if "Device" in words:
                assert (one.name, place) == ("device", 0), public
            if kind == "class" and public not in MADE_ON_A_DEVICE:
                assert not {"Context", "HasContext"} & words, public


FACE = """
Buffer Capture CaptureLimits CapturePool Device DeviceArray DeviceScalar
Event ExplicitBuckets Graph GraphCache GraphExec GraphStore GraphedStep HostKernel Kernel
LaunchConfig MemoryRange Node NodeKind Operation OstinatoError PowersOfTwo Sizes Slot Source
Stream black_box capture capture_function compile copy fill first_difference host_kernel kernel
launch lift
open_device prepare record errors explain graphfile lowlevel settings step testing
"""
LOWLEVEL = """
Call Change Closeable Counts Engine FILL HostLaunch Memory Options Work armed causes
NotLaunched check_runs every_node fill_kernel load_extension new_lock parse_bytes
replace_small_fills table uninterrupted wait_for_streams whole_number
"""


def test_the_faces_have_these_names_and_type_checkers_see_them() -> None:
    from ostinato import lowlevel

    assert ostinato.__all__ == sorted(FACE.split()), "a name for users came or went"
    assert set(lowlevel.__all__) == set(LOWLEVEL.split()), "a name for packages came or went"
    tree = ast.parse(inspect.getsource(ostinato))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(told) == ostinato.__all__
    for name, path in told.items():
        assert getattr(ostinato, name) is pkgutil.resolve_name(path), name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ostinato.no_such_name


def test_dir_lists_the_public_names() -> None:
    assert set(ostinato.__all__) <= set(dir(ostinato))


def test_every_error_is_ours() -> None:
    from ostinato import errors

    for public in errors.__all__:
        value = getattr(errors, public)
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, errors.OstinatoError)
            assert public in (errors.__doc__ or ""), f"{public} is not in the tree at the top"


# ----------------------------------------------------------------------------------- vocabularies
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def declared() -> Iterator[tuple[str, str, str]]:
    """Where, what and how annotated: the parameters and fields of all that the reference names, of
    libraries that are here.  What a function returns has the function's own name; what a dataclass
    is made of are its fields."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    for path in re.findall(r"^::: (\S+)$", "".join(pages), re.M):
        try:
            value = pkgutil.resolve_name(path)
        except (ImportError, ost.OstinatoError):
            assert path.startswith("ostinato.interop."), path
            continue
        if not inspect.isclass(value):
            yield from annotated(path, value)
            continue
        found: set[str] = set()
        for each in value.__mro__:
            if not each.__module__.startswith("ostinato"):
                continue
            yield from annotated(path, each)
            own = {name: member for name, member in vars(each).items() if name not in found}
            found |= own.keys()
            for name, member in own.items():
                if isinstance(member, property):
                    member = member.fget
                generated = "__dataclass_params__" in vars(each) and each.__dataclass_params__.init
                special = ("__call__",) if generated else ("__init__", "__call__")
                if not name.startswith("_") or name in special:
                    yield from annotated(f"{path}.{name}", getattr(member, "__func__", member))


def annotated(path: str, value: object) -> Iterator[tuple[str, str, str]]:
    """What one function or class says of its parameters or fields."""
    if not callable(value) or isinstance(value, operator.attrgetter):  # which has no annotations
        return
    for name, annotation in inspect.get_annotations(inspect.unwrap(value)).items():
        what = path.rpartition(".")[2] if name == "return" else name
        if not what.startswith("_"):
            yield path, what, str(annotation)


def parameters() -> Iterator[tuple[str, str, str]]:
    """Those of `declared` that are parameters of functions."""
    for path, name, annotation in declared():
        value = pkgutil.resolve_name(path)
        if inspect.isroutine(value) and name != value.__name__:
            yield path, name, annotation


def test_the_reference_is_read() -> None:
    found = set(declared())
    for each in (
        ("ostinato.Stream.submit", "operation", "Operation"),
        ("ostinato.Event.elapsed_since", "elapsed_since", "float"),
        ("ostinato.step.CacheStatistics", "nbytes", "int"),
        ("ostinato.CaptureLimits", "seconds", "float | None"),
        ("ostinato.GraphCache.__init__", "max_graphs", "int | None"),
    ):
        assert each in found, each


def test_times_are_in_seconds() -> None:
    unit = re.compile(r"(.*_)?(ms|us|ns|milliseconds|microseconds|nanoseconds)")
    found = [(path, name) for path, name, _ in declared() if unit.fullmatch(name)]
    assert found == [], "fields and parameters have seconds; other units are for texts"


def test_options_are_words_and_results_are_enumerations() -> None:
    """The driver's protocol has the driver's numbers; packages built on the engine make results."""
    modules = [importlib.import_module(name) for name in (*PUBLIC, "ostinato.driver.api")]
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    enums = [name for name, each in public.items() if isinstance(each, enum.EnumMeta)]
    assert {"NodeKind", "CaptureMode", "Reason"} <= {*enums}
    ours = re.compile(rf"\b({'|'.join(enums)})\b")
    found = [
        each
        for each in parameters()
        if ours.search(each[2])
        and not each[0].startswith(("ostinato.driver.", "ostinato.lowlevel."))
    ]
    assert found == []


def test_sizes_in_bytes_are_numbers_or_texts() -> None:
    told = {"nbytes", "max_bytes", "budget", "check_limit", "reserve", "slab", "shared"}
    measured = ("holds", "programmatic", "occupancy")  # of what is there, and not asked for
    found = {
        (path, name): "str" in annotation
        for path, name, annotation in parameters()
        if (name in told or name.endswith("_bytes")) and name != "key_bytes"
        if not path.startswith("ostinato.driver.") and not path.endswith(measured)
    }
    assert {name for _, name in found} == told
    assert [each for each, text in found.items() if not text] == []


def test_a_name_that_may_be_left_out_is_none() -> None:
    """Fields that are empty where a thing has no name are results."""
    named = [path for path, name, _ in parameters() if name == "name"]
    assert "ostinato.Device.empty" in named
    for path in named:
        given = inspect.signature(pkgutil.resolve_name(path)).parameters["name"].default
        assert given in (None, inspect.Parameter.empty) or path.startswith("ostinato.driver."), path


# ------------------------------------------------------------------------------------- properties


def test_no_property_asks_the_driver(tmp_path: Path) -> None:
    calls = testing.FaultyDriver(HostDriver())
    with ost.Device(calls) as device:
        stream, event, x = device.create_stream(), device.create_event(), device.zeros(8, "u4")
        graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 7))
        file = tmp_path / "fill.ostinato"
        ost.graphfile.save(graph, file, outputs={"x": x}, check=False)
        loaded = ost.graphfile.load(device, file)
        run = loaded.instantiate(upload=stream)
        for made in (device, stream, event, graph, loaded, run, device.pool()):
            for name in {n for n in dir(made) if not n.startswith("_")}:
                if isinstance(inspect.getattr_static(type(made), name, None), property):
                    calls.clear()
                    getattr(made, name)
                    assert not calls.calls, f"{type(made).__name__}.{name} is to be a method"


# --------------------------------------------------------------------------------------- __repr__


@ost.host_kernel("x: *f32")
def double(launch: object, x: object) -> None: ...


def faults(device: ost.Device) -> testing.FaultyDriver:
    driver = testing.FaultyDriver(device.driver)
    driver.fail("mem_alloc")
    return driver


HANDLE, HOST = r"0x[0-9a-f]+", "on host"
# A public class: how one is made, how it shows itself, and how it does when it is closed.
# Those of the graph layer are in tests/graph/test_reprs.py.
REPRS: dict[str, tuple[Callable[[ost.Device], object], str, str]] = {
    "Device": (lambda d: d, r"<Device host: .+", r"<Device host: .+ closed>"),
    "Stream": (
        lambda d: d.create_stream(),
        rf"<Stream {HANDLE} {HOST}>",
        rf"<Stream {HANDLE} {HOST} closed>",
    ),
    "Event": (
        lambda d: d.create_event(timing=True),
        rf"<Event {HANDLE} with timing {HOST}>",
        rf"<Event {HANDLE} with timing {HOST} closed>",
    ),
    "Buffer": (
        lambda d: d.empty((2, 3), "f4", name="x"),
        rf"<Buffer 'x' float32\[2, 3\] at {HANDLE} {HOST}>",
        rf"<Buffer 'x' float32\[2, 3\] at {HANDLE} {HOST} closed>",
    ),
    "CapturePool": (
        lambda d: d.pool(reserve=512, name="p"),
        rf"<CapturePool 'p' of 512 bytes {HOST}, open>",
        rf"<CapturePool 'p' of 0 bytes {HOST}, closed>",
    ),
    "DeviceArray": (
        lambda d: ost.DeviceArray(d, 3, "i4"),
        rf"<DeviceArray int32\[3\] at {HANDLE} {HOST}>",
        rf"<DeviceArray int32\[3\] at {HANDLE} {HOST} closed>",
    ),
    "DeviceScalar": (
        lambda d: ost.DeviceScalar(d, "f4"),
        rf"<DeviceScalar float32 at {HANDLE} {HOST}>",
        rf"<DeviceScalar float32 at {HANDLE} {HOST} closed>",
    ),
    "Kernel": (
        lambda d: d.modules.get_or_compile(double, "double"),
        rf"<Kernel 'double' of 'double' {HOST}>",
        "",
    ),
    "Source": (
        lambda d: ost.Source("text", host=[double], name="a.cu"),
        r"<Source 'a\.cu': cuda \+ host\[double\]>",
        "",
    ),
    "ModuleCache": (
        lambda d: d.modules,
        rf"<ModuleCache 1 modules, \d+ bytes {HOST}>",
        rf"<ModuleCache 0 modules, 0 bytes {HOST}, closed>",
    ),
    "DiskStore": (lambda d: DiskStore("/a"), "<DiskStore /a>", ""),
    "FaultyDriver": (faults, "<FaultyDriver over host: 0 calls made, 1 faults to come>", ""),
    "HeldStream": (
        lambda d: testing.HeldStream(d.create_stream()),
        rf"<HeldStream {HANDLE} {HOST}, not held yet>",
        "",
    ),
}


@pytest.mark.parametrize("name", REPRS)
def test_an_object_shows_its_state(name: str, host_device: ost.Device) -> None:
    make, opened, closed = REPRS[name]
    made = make(host_device)
    assert re.fullmatch(opened, repr(made)), repr(made)
    if closed:
        made.close()
        assert re.fullmatch(closed, repr(made)), repr(made)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_class_has_a_repr_of_its_own(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        protocol = getattr(value, "_is_protocol", False)
        if inspect.isclass(value) and not inspect.isabstract(value) and not protocol:
            assert value.__repr__ is not object.__repr__, public
