"""Loading the C extensions, each of which may be missing: `driver._launch` and `models._native`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["load_extension"]


def load_extension(name: str) -> tuple[Any, str]:
    """An extension module by its full name, and "".  If it does not load: None, and the reason."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError:
        return None, "it was not built: no C compiler, or no Python.h, at installation"
    except ImportError as error:  # built for another processor, or against another libc
        return None, f"it cannot be loaded: {error}"
