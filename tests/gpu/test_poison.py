"""A poisoned context: known as one, never used again, and not taken for a failed capture.

Each script runs in a process of its own, for a poisoned context is of no use to anyone after it.
"""

from __future__ import annotations

import subprocess

import pytest

from ostinato.device import Device
from tests.processes import python

HEAD = """
import sys
import numpy as np
import ostinato as ost
from ostinato.errors import CaptureBrokenError, CaptureError, ContextPoisonedError, explain
from tests.sources import config, kernel, preload

device = preload(ost.open_device(sys.argv[1]))
stream, other = device.create_stream(), device.create_stream()
x = device.array(np.ones(256, np.float32))
fill = kernel(device, "fill")

def poison(on):
    ost.launch(on, fill, config(256), 0x40, 1.0, 256)  # an address that is nobody's

def refused(what, call):
    try:
        call()
    except ContextPoisonedError as error:
        assert error.status == 700, (what, error)
        return str(error)
    except Exception as error:
        raise SystemExit(f"{what}: {type(error).__name__} instead: {error}")
    raise SystemExit(f"{what}: nothing was raised")
"""

TOLD_APART = """
for _ in range(3):  # a failed capture: the context is sound
    try:
        with ost.capture(stream):
            ost.fill(stream, x, 3)
            stream.synchronize()
    except CaptureBrokenError as error:
        assert "900" in str(error)
    else:
        raise SystemExit("the capture was not broken")
    ost.launch(stream, fill, config(256), x, 5.0, 256)
    stream.synchronize()
    assert (x.to_numpy(stream) == 5).all()

poison(stream)  # and this one is not
said = refused("synchronize", stream.synchronize)
assert "700" in said and "memory it does not own" in said and "Every later call" in said, said
"""

NEVER_USED_AGAIN = """
graph = ost.capture_function(stream, lambda: ost.fill(stream, x, 1))
run = graph.instantiate(upload=stream)
run.launch(stream)
event = stream.record()
stream.synchronize()
poison(stream)
refused("synchronize", stream.synchronize)
for _ in range(3):
    refused("synchronize again", stream.synchronize)
    refused("synchronize of another stream", other.synchronize)
    refused("fill", lambda: ost.fill(other, x, 1))
    refused("launch", lambda: ost.launch(other, fill, config(256), x, 1.0, 256))
    refused("graph launch", lambda: run.launch(other))
    refused("prepared graph launch", lambda: run.launch(stream))
    refused("read", lambda: x.to_numpy(stream))
    refused("allocate", lambda: device.empty(16, "f32"))
    refused("event", lambda: event.done())
    refused("memory_info", device.memory_info)
    refused("device", device.synchronize)
    refused("instantiate", graph.instantiate)
    refused("patch", lambda: run.update(graph))
    refused("capture", lambda: ost.capture_function(stream, lambda: ost.fill(stream, x, 1)))
del run, graph, x, event  # finalisers are silent, and so is the end of the process
device.close()
"""

WHILE_CAPTURING = """
import time
scale = kernel(device, "scale")
try:
    with ost.capture(stream):
        ost.fill(stream, x, 3)
        poison(other)
        for _ in range(300):  # until the fault is seen
            ost.launch(stream, scale, config(256), x, 256)
            time.sleep(0.001)
except ContextPoisonedError as error:
    assert error.status == 700
except Exception as error:
    raise SystemExit(f"{type(error).__name__} instead of ContextPoisonedError: {error}")
else:  # a capture runs nothing: the fault may be seen only by who waits
    refused("synchronize", other.synchronize)
refused("synchronize", other.synchronize)
refused("fill", lambda: ost.fill(stream, x, 1))
"""

IN_A_REPLAY = """
graph = ost.capture_function(stream, lambda: poison(stream))
assert stream.capture_info().status == 0
run = graph.instantiate(upload=stream)
stream.synchronize()  # nothing ran yet
run.launch(stream)
refused("synchronize", stream.synchronize)
"""


def run_script(body: str, device: Device) -> subprocess.CompletedProcess[str]:
    return python("-W", "error", "-c", HEAD + body + '\nprint("done")\n', device.name)


@pytest.mark.parametrize(
    "body",
    [TOLD_APART, NEVER_USED_AGAIN, WHILE_CAPTURING, IN_A_REPLAY],
    ids=["told apart", "never used again", "while capturing", "in a replay"],
)
def test_a_poisoned_context(device: Device, body: str) -> None:
    answer = run_script(body, device)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.strip() == "done"
    assert "Traceback" not in answer.stderr, answer.stderr


def test_this_process_is_not_poisoned_by_it(device: Device) -> None:
    stream = device.create_stream()
    before = device.zeros(64, "bytes")
    assert run_script(TOLD_APART, device).returncode == 0
    assert not before.to_numpy(stream).any()
