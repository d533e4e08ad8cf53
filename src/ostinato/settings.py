"""Every `OSTINATO_*` variable, read when it is asked for and never at import.

The environment is one source of settings; every use has a typed argument that wins over it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ostinato.errors import SettingsError

__all__ = ["ALL", "ReplaySettings", "Variable", "cache_dir", "device_name", "replay_settings"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Variable(Generic[T_co]):
    """One environment variable: its name, what it means, how it is read."""

    name: str
    doc: str
    parse: Callable[[str | None], T_co]

    def read(self, environ: Mapping[str, str] | None = None) -> T_co:
        """The value now.  Raises SettingsError if the text cannot be read."""
        text = (os.environ if environ is None else environ).get(self.name)
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingsError(f"{self.name}={text!r}: {error}; it is: {self.doc}") from None


def _present(text: str | None) -> bool:
    return text is not None


def _one(text: str | None) -> bool:
    return text == "1"


def _text_or_none(text: str | None) -> str | None:
    return text or None


def _folder_or_none(text: str | None) -> Path | None:
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError:
        raise ValueError("there is no home folder of that name") from None


def _sample_every(text: str | None) -> int:
    if text is None:
        return 64
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number, 1 or more")
    return int(text)


DEVICE = Variable("OSTINATO_DEVICE", 'the device to open: "host", "cuda:0", …', _text_or_none)
CACHE_DIR = Variable("OSTINATO_CACHE_DIR", "folder for models and kernels", _folder_or_none)
PROFILE = Variable("OSTINATO_PROFILE", "present: replays are profiled", _present)
PROFILE_EVERY = Variable(
    "OSTINATO_PROFILE_EVERY", "one replay in so many is printed (64)", _sample_every
)
SKIP_UPLOAD = Variable("OSTINATO_SKIP_UPLOAD", '"1" alone: no upload before a replay', _one)
SKIP_SYNC = Variable("OSTINATO_SKIP_SYNC", '"1" alone: no synchronise after a replay', _one)

ALL: tuple[Variable[object], ...] = (
    DEVICE,
    CACHE_DIR,
    PROFILE,
    PROFILE_EVERY,
    SKIP_UPLOAD,
    SKIP_SYNC,
)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What happens around each replay of a graph.

    `upload`: upload the executable before each launch (it costs about 1 µs and gains nothing after
    the first, which is why it is off).  `synchronize`: wait for the replay to finish before
    returning.  `profile`: time upload, launch and synchronise of each replay.  `print_every`: one
    profiled replay in so many is logged.
    """

    upload: bool = False
    synchronize: bool = False
    profile: bool = False
    print_every: int = 64


def replay_settings(
    environ: Mapping[str, str] | None = None,
    *,
    base: ReplaySettings | None = None,
) -> ReplaySettings:
    """`base` with what the environment says laid over it.

    The two skip variables can only switch off what `base` has on.  Raises SettingsError.
    """
    start = base or ReplaySettings()
    return ReplaySettings(
        upload=start.upload and not SKIP_UPLOAD.read(environ),
        synchronize=start.synchronize and not SKIP_SYNC.read(environ),
        profile=start.profile or PROFILE.read(environ),
        print_every=PROFILE_EVERY.read(environ)
        if PROFILE_EVERY.name in (os.environ if environ is None else environ)
        else start.print_every,
    )


def device_name() -> str | None:
    """The device that the environment names, or None."""
    return DEVICE.read()


def cache_dir() -> Path:
    """The folder for models and compiled kernels; it may not exist yet.  Raises SettingsError."""
    named = CACHE_DIR.read()
    if named is not None:
        return named
    import platformdirs

    try:
        path = platformdirs.user_cache_path("ostinato")
    except RuntimeError:
        path = Path()
    if not path.is_absolute():  # what older ones of platformdirs give: "~/.cache/ostinato"
        raise SettingsError(f"this user has no home folder; set {CACHE_DIR.name}")
    return path
