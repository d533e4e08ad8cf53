"""Loads the C extensions, each of which may be missing: `driver._launch`, `models._native` and
`interop.reading._recheck`."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def load_extension(name: str) -> tuple[Any, str]:
    """Returns an extension module by its full name, and ""; if it cannot load, None and why."""
    if "t" in getattr(sys, "abiflags", ""):
        # Neither built nor loaded: a free-threaded CPython 3.13 would load the file of another
        # Python (.abi3.so) from a shared tree, and crash.
        return None, "it needs a Python with the GIL, which guards its state"
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError:
        return None, "it was not built: no C compiler, or no Python.h, at installation"
    except ImportError as error:  # built for another processor, or against another libc
        return None, f"it cannot be loaded: {error}"
