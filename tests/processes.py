"""Processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a Python that can import what this one can: pytest changes `sys.path`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}


def python(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """A Python from its beginning to its end, which can import what this one can.  Both of its
    streams are kept as text."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=child_environment(**environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def printed(*arguments: str, **environ: str) -> str:
    """What a Python prints that ends well."""
    done = python(*arguments, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_by_all(code: str) -> str:
    """What code prints in two processes, whose sets of texts have other orders."""
    one, other = (printed("-c", code, PYTHONHASHSEED=seed) for seed in "12")
    assert one == other
    return one
