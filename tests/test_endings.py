"""What a process says at its end of failures that no call has raised."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from ostinato.device import Device
from tests.processes import python

BEGIN = """
import sys
import time
import numpy as np
import ostinato as ost
from ostinato.driver.api import MemOp, MemOpKind

@ost.host_kernel("x: *f32")
def breaks(launch, x):
    raise ZeroDivisionError("in the kernel")

@ost.host_kernel("x: *f32")
def works(launch, x):
    x[0] += 1

def fails():
    raise ZeroDivisionError("in the function")

device = ost.open_device(sys.argv[1])
stream = device.create_stream()
x = device.zeros(4, np.float32)
source = ost.Source(cuda="", host=[breaks, works], name="endings")

def launch(name):
    kernel = device.modules.get_or_compile(source, name)
    ost.launch(stream, kernel, ost.LaunchConfig(1, 1), x)

def replay(function):
    ost.capture_function(stream, lambda: stream.call(function)).instantiate().launch(stream)
"""

NOTED = "while not device.context.failures: time.sleep(0.001)\n"


def ended(device: str, script: str) -> subprocess.CompletedProcess[str]:
    """The script, run to its end."""
    return python("-c", BEGIN + textwrap.dedent(script), device)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("launch('breaks')", "kernel breaks: ZeroDivisionError: in the kernel"),
        ("replay(fails)", "host function fails of a stream or graph raised ZeroDivisionError"),
        ("replay(fails); print('said', flush=True)", "in the function"),
    ],
)
def test_what_nobody_waited_for_is_said_at_the_end(script: str, words: str) -> None:
    """The status was 0, and there was no word of a kernel."""
    end = ended("host", script)
    assert end.returncode == 1, end.stderr
    assert "no call after it could say so" in end.stderr
    assert words in end.stderr
    assert "Traceback" in end.stderr
    assert "ZeroDivisionError: in the " in end.stderr
    assert end.stdout == ("said\n" if "said" in script else "")


@pytest.mark.gpu
def test_a_host_function_on_a_gpu_is_said_at_the_end(cuda_device: Device) -> None:
    end = ended("cuda", "replay(fails)\n" + NOTED)
    assert end.returncode == 1, end.stderr
    assert "host function fails of a stream or graph raised" in end.stderr


@pytest.mark.parametrize(
    "script",
    [
        "launch('works')",
        "replay(lambda: None)",
        # Work that never ends, and work behind it.
        """
        wait = ost.Graph.create(device)
        wait.add_batch_mem_op([MemOp(MemOpKind.WAIT_GEQ, x.address, 1 << 30)], keep=(x,))
        wait.instantiate().launch(stream)
        launch('works')
        """,
        # Failures that a call has raised.
        """
        launch('breaks')
        try: stream.synchronize()
        except ost.errors.ContextPoisonedError: pass
        """,
        """
        replay(fails)
        try: stream.synchronize()
        except ost.errors.HostFunctionError: pass
        """,
    ],
    ids=["kernel", "function", "endless", "raised kernel", "raised function"],
)
def test_what_is_well_ends_well(script: str) -> None:
    end = ended("host", script)
    assert end.returncode == 0, end.stderr
    assert "no call after it" not in end.stderr


def test_a_device_that_is_closed_says_what_it_has_not_said() -> None:
    end = ended("host", "launch('breaks'); device.close()")
    assert "kernel breaks: ZeroDivisionError" in end.stderr


def test_an_exception_of_the_script_comes_first() -> None:
    end = ended("host", "launch('breaks')\nraise KeyError('of the script')")
    assert end.returncode == 1
    assert end.stderr.index("of the script") < end.stderr.index("kernel breaks")


@pytest.mark.gpu
def test_a_fault_on_a_gpu_is_said_at_the_end(cuda_device: Device) -> None:
    end = ended(
        "cuda",
        """
        wild = ost.Source(cuda='extern "C" __global__ void wild(float* x) { *(float*)8 = 1; }')
        kernel = device.modules.get_or_compile(wild, "wild")
        ost.launch(stream, kernel, ost.LaunchConfig(1, 1), x)
        time.sleep(2)
        """,
    )
    assert end.returncode == 1, end.stderr
    assert "status 700" in end.stderr
