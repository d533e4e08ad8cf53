"""Capture GPU work into CUDA graphs once, and play it again: safely, fast, from Python.

    import ostinato as ost

    device = ost.open_device()
    stream = device.create_stream()
    with ost.capture(stream) as capture:
        ost.launch(stream, kernel, ost.LaunchConfig(grid=8, block=256), x, n)
    run = capture.graph.instantiate(upload=stream)
    run.launch(stream)

Names are loaded when they are first used: importing this package touches no driver, no file and
no other library.  `ostinato.lowlevel` has more names, for packages built on this one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato import errors as errors
    from ostinato import explain as explain
    from ostinato import graphfile as graphfile
    from ostinato import lowlevel as lowlevel
    from ostinato import settings as settings
    from ostinato import step as step
    from ostinato import testing as testing
    from ostinato.device import Device as Device
    from ostinato.driver.api import LaunchConfig as LaunchConfig
    from ostinato.driver.api import MemoryRange as MemoryRange
    from ostinato.driver.api import NodeKind as NodeKind
    from ostinato.driver.host.kernel import HostKernel as HostKernel
    from ostinato.driver.host.kernel import host_kernel as host_kernel
    from ostinato.driver.stream import Event as Event
    from ostinato.driver.stream import Operation as Operation
    from ostinato.driver.stream import Stream as Stream
    from ostinato.errors import OstinatoError as OstinatoError
    from ostinato.explain import first_difference as first_difference
    from ostinato.explain.black_box import black_box as black_box
    from ostinato.graph import Capture as Capture
    from ostinato.graph import Graph as Graph
    from ostinato.graph import GraphExec as GraphExec
    from ostinato.graph import Node as Node
    from ostinato.graph import capture as capture
    from ostinato.graph import capture_function as capture_function
    from ostinato.graph import lift as lift
    from ostinato.graph import record as record
    from ostinato.launching import launch as launch
    from ostinato.launching import prepare as prepare
    from ostinato.memory import Buffer as Buffer
    from ostinato.memory import CapturePool as CapturePool
    from ostinato.memory import copy as copy
    from ostinato.memory import fill as fill
    from ostinato.modules import Kernel as Kernel
    from ostinato.modules import Source as Source
    from ostinato.modules.offline import compile as compile
    from ostinato.modules.source import kernel as kernel
    from ostinato.opening import open_device as open_device
    from ostinato.state import DeviceArray as DeviceArray
    from ostinato.state import DeviceScalar as DeviceScalar
    from ostinato.step import CaptureLimits as CaptureLimits
    from ostinato.step import ExplicitBuckets as ExplicitBuckets
    from ostinato.step import GraphCache as GraphCache
    from ostinato.step import GraphedStep as GraphedStep
    from ostinato.step import PowersOfTwo as PowersOfTwo
    from ostinato.step import Sizes as Sizes
    from ostinato.step import Slot as Slot
    from ostinato.step.store import GraphStore as GraphStore

__version__ = "0.1.0"

_HOMES = {
    "Buffer": "memory",
    "Capture": "graph",
    "CaptureLimits": "step",
    "CapturePool": "memory",
    "Device": "device",
    "DeviceArray": "state",
    "DeviceScalar": "state",
    "Event": "driver.stream",
    "ExplicitBuckets": "step",
    "Graph": "graph",
    "GraphCache": "step",
    "GraphExec": "graph",
    "GraphStore": "step.store",
    "GraphedStep": "step",
    "HostKernel": "driver.host.kernel",
    "Kernel": "modules",
    "LaunchConfig": "driver.api",
    "MemoryRange": "driver.api",
    "Node": "graph",
    "NodeKind": "driver.api",
    "Operation": "driver.stream",
    "OstinatoError": "errors",
    "PowersOfTwo": "step",
    "Sizes": "step",
    "Slot": "step",
    "Source": "modules",
    "Stream": "driver.stream",
    "black_box": "explain.black_box",
    "capture": "graph",
    "capture_function": "graph",
    "compile": "modules.offline",
    "copy": "memory",
    "fill": "memory",
    "first_difference": "explain",
    "host_kernel": "driver.host.kernel",
    "kernel": "modules.source",
    "launch": "launching",
    "lift": "graph",
    "open_device": "opening",
    "prepare": "launching",
    "record": "graph",
}

_MODULES = ("errors", "explain", "graphfile", "lowlevel", "settings", "step", "testing")

__all__ = sorted((*_HOMES, *_MODULES))  # noqa: PLE0605 - one table serves the loader, dir(), this

if not TYPE_CHECKING:  # so that a type checker sees misspelt names

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"ostinato.{name}")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"ostinato.{home}"), name)
        if name == "open_device":
            from ostinato import settings

            if settings.black_box_every():
                from ostinato.explain.black_box import watch_process

                watch_process()
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
