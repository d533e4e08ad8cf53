"""The launcher without its extension, for tests and to measure its gain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ostinato.driver import launcher


@contextmanager
def without_extension() -> Iterator[None]:
    """Makes executables that are made and used in the block run as without the extension.  One
    thread at a time may enter."""
    kept = launcher._extension
    if kept is None:
        yield
        return
    kind, names = kept.Launcher, ("launch", "_heat", "cool")
    compiled = {name: vars(kind)[name] for name in names}
    for name in ("_hot", *names):
        setattr(kind, name, vars(launcher.PythonLauncher)[name])
    launcher._extension = None
    try:
        yield
    finally:
        launcher._extension = kept
        for name, value in compiled.items():
            setattr(kind, name, value)
        del kind._hot
