"""Processes that tests start."""

from __future__ import annotations

import os
import sys


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a Python that can import what this one can: pytest changes `sys.path`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}
