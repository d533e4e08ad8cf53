"""A forked child gets a clear error for everything that needs the parent's device, and exits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ostinato.device import Device
from tests.processes import printed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

PROGRAM = Path(__file__).parent / "forked_program.py"


@pytest.mark.parametrize("way", ["idle", "busy", "capturing", "cooling"])
def test_a_forked_child_says_what_is_wrong_and_ends(device: Device, way: str) -> None:
    """In a process of its own: forking this one would copy whatever pytest has open."""
    name = "host" if device.driver.name.startswith("host") else "cuda:0"
    out = printed("-W", "ignore::DeprecationWarning", str(PROGRAM), name, way)
    assert out.endswith("the parent goes on\n")
