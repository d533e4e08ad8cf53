"""The machine, the libraries and the commit of a measurement, which make results comparable."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import ostinato as ost

__all__ = ["SCHEMA", "commit", "machine"]

SCHEMA = "ostinato.benchmark/1"
_LIBRARIES = (
    "ostinato",
    "numpy",
    "cuda-core",
    "cuda-bindings",
    "torch",
    "transformers",
    "cupy-cuda13x",
)


def commit() -> str:
    """OSTINATO_COMMIT, else what git says of the checkout that this file is part of, else
    "unknown"."""
    given = os.environ.get("OSTINATO_COMMIT")
    if given:
        return given
    here = Path(__file__).resolve()
    try:
        # In a virtual environment inside another repository, this file is not tracked.
        for command in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            answer = subprocess.run(
                ["git", *command], cwd=here.parent, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()[:12]


def machine(device: ost.Device) -> dict[str, object]:
    """The machine and the versions, for a result."""
    properties = device.properties
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": properties.name,
        "driver": device.name,
        "driver_version": properties.driver_version,
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
