"""Every `OSTINATO_*` variable, read when its value is needed and never at import.

Each use of a variable also has a typed argument, which overrides the variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from ostinato.errors import InputError, SettingsError
from ostinato.records import dataclass

__all__ = [
    "ALL",
    "COLLECTIVE_WAYS",
    "ReplaySettings",
    "ResolvedReplaySettings",
    "Variable",
    "black_box_every",
    "blocking_captures",
    "cache_dir",
    "collectives_way",
    "device_name",
    "graphs_enabled",
    "group_deadline",
    "group_of_process",
    "replay_settings",
]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Variable(Generic[T_co]):
    """One environment variable: its name, its meaning, and its parser."""

    name: str
    doc: str
    parse: Callable[[str | None], T_co]

    def read(self, environ: Mapping[str, str] | None = None) -> T_co:
        """Returns the present value.  Raises SettingsError if the text cannot be read."""
        text = (os.environ if environ is None else environ).get(self.name)
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingsError(f"{self.name}={text!r}: {error}; it is: {self.doc}") from None


_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def _switch(text: str | None) -> bool:
    """Off if the variable is missing or empty."""
    word = (text or "").strip().lower()
    if word not in _ON + _OFF:
        raise ValueError("1, true, yes or on is needed, or 0, false, no or off")
    return word in _ON


def _every(text: str | None) -> int:
    """0 if off, 1 if on; a larger number is itself."""
    word = (text or "").strip()
    return int(word) if word.isdecimal() else int(_switch(text))


def _text_or_none(text: str | None) -> str | None:
    return text or None


def _folder_or_none(text: str | None) -> Path | None:
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError:
        raise ValueError("there is no home folder of that name") from None


def _sample_every(text: str | None) -> int:
    count = _count_or_none(text)
    return 64 if count is None else count


def _count_or_none(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number, 1 or more")
    return int(text)


DEVICE = Variable("OSTINATO_DEVICE", 'the device to open: "host", "cuda:0", …', _text_or_none)
CACHE_DIR = Variable("OSTINATO_CACHE_DIR", "folder for models and kernels", _folder_or_none)
PROFILE = Variable("OSTINATO_PROFILE", "on: replays are profiled", _switch)
PROFILE_EVERY = Variable(
    "OSTINATO_PROFILE_EVERY",
    "the first replay and then one in so many is printed (64)",
    _sample_every,
)
SKIP_UPLOAD = Variable("OSTINATO_SKIP_UPLOAD", "on: no upload before a profiled replay", _switch)
SKIP_SYNC = Variable("OSTINATO_SKIP_SYNC", "on: no wait after a profiled replay", _switch)
THREADS = Variable(
    "OSTINATO_THREADS",
    "threads of a decoder on the CPU (one a processor, 16 at most)",
    _count_or_none,
)
NO_GRAPHS = Variable("OSTINATO_NO_GRAPHS", "on: steps run eagerly, without graphs", _switch)


def _seconds(text: str | None) -> float:
    if text is None:
        return 60.0
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ValueError("must be seconds, more than 0")
    return value


GROUP_DEADLINE = Variable(
    "OSTINATO_GROUP_DEADLINE", "seconds that a rank waits for the others (60)", _seconds
)
GROUP = Variable(
    "OSTINATO_GROUP", "rank/size/id of the group that this process is of", _text_or_none
)
COLLECTIVE_WAYS = ("auto", "exchange", "library")


def _way(text: str | None) -> str:
    if text is not None and text not in COLLECTIVE_WAYS:
        raise ValueError(f"must be one of {', '.join(COLLECTIVE_WAYS)}")
    return text or "auto"


COLLECTIVES = Variable(
    "OSTINATO_COLLECTIVES",
    "what ranks exchange by: auto, exchange (in each other's memory) or library (NCCL)",
    _way,
)
COLLECT_MODULES = Variable(
    "OSTINATO_COLLECT_MODULES",
    "on: opening a CUDA device begins to collect the code of other libraries' kernels",
    _switch,
)
BLOCKING_CAPTURES = Variable(
    "OSTINATO_BLOCKING_CAPTURES",
    "on: new streams wait for the default stream, so that work there breaks captures",
    _switch,
)

BLACK_BOX = Variable(
    "OSTINATO_BLACK_BOX",
    "on: the error of a replay that failed names the node; n: marks after every n-th node only",
    _every,
)

ALL: tuple[Variable[object], ...] = (
    DEVICE,
    CACHE_DIR,
    NO_GRAPHS,
    THREADS,
    PROFILE,
    PROFILE_EVERY,
    SKIP_UPLOAD,
    SKIP_SYNC,
    COLLECT_MODULES,
    BLOCKING_CAPTURES,
    BLACK_BOX,
    GROUP,
    GROUP_DEADLINE,
    COLLECTIVES,
)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of the replays of a graph.

        step = ost.GraphedStep(…, settings=ost.settings.ReplaySettings(profile=True))

    The environment, else the default given here, decides a field that is None.

    `profile` (off; on if OSTINATO_PROFILE is): time upload, launch and synchronise of each
    replay.  `upload`: upload the executable before each launch.  It costs about 1 µs and gains
    nothing after the first, so it is off; on while profiling, unless OSTINATO_SKIP_UPLOAD is on.
    `synchronize`: wait for each replay to finish before returning.  Off; on while profiling, unless
    OSTINATO_SKIP_SYNC is on, because without it the time on the device is not measured.
    `print_every` (64, or OSTINATO_PROFILE_EVERY): the first profiled replay is printed,
    and then one in so many.
    """

    upload: bool | None = None
    synchronize: bool | None = None
    profile: bool | None = None
    print_every: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedReplaySettings:
    """`ReplaySettings` with every field decided.  `printed`: profiles go to standard error, because
    the environment requested them; else to the log."""

    upload: bool
    synchronize: bool
    profile: bool
    print_every: int
    printed: bool

    @property
    def plain(self) -> bool:
        """True if a replay is a launch and nothing else."""
        return not (self.upload or self.synchronize or self.profile)


def replay_settings(
    given: ReplaySettings | None = None, environ: Mapping[str, str] | None = None
) -> ResolvedReplaySettings:
    """Returns the given fields; the environment, or the default, decides those that are None.

    Raises SettingsError for a variable that cannot be read, InputError for `print_every` below 1.
    """
    typed = given or ReplaySettings()
    if typed.print_every is not None and typed.print_every < 1:
        raise InputError(f"print_every={typed.print_every}: 1 or more")
    asked = PROFILE.read(environ)
    profile = asked if typed.profile is None else typed.profile
    every = PROFILE_EVERY.read(environ) if typed.print_every is None else typed.print_every

    def decided(value: bool | None, skip: Variable[bool]) -> bool:
        return profile and not skip.read(environ) if value is None else value

    return ResolvedReplaySettings(
        upload=decided(typed.upload, SKIP_UPLOAD),
        synchronize=decided(typed.synchronize, SKIP_SYNC),
        profile=profile,
        print_every=every,
        printed=asked and typed.profile is None,
    )


def graphs_enabled(given: bool | None = None, environ: Mapping[str, str] | None = None) -> bool:
    """Returns whether steps may use graphs: `given`, else True unless OSTINATO_NO_GRAPHS is on.

    Raises SettingsError if the variable has another word.
    """
    return not NO_GRAPHS.read(environ) if given is None else given


def blocking_captures() -> bool:
    """Returns the default for whether a new stream waits for the legacy default stream."""
    return BLOCKING_CAPTURES.read()


def black_box_every() -> int:
    """Returns after how many nodes a watched replay leaves a mark; 0 if replays are not watched."""
    return BLACK_BOX.read()


def group_deadline() -> float:
    """Returns the default seconds that a rank of a group waits for the others."""
    return GROUP_DEADLINE.read()


def collectives_way() -> str:
    """Returns the default way in which ranks exchange data: one of `COLLECTIVE_WAYS`."""
    return COLLECTIVES.read()


def group_of_process(environ: Mapping[str, str] | None = None) -> str | None:
    """Returns the group that the environment names for this process, as rank/size/id, or None."""
    return GROUP.read(environ)


def device_name() -> str | None:
    """Returns the device that the environment names, or None."""
    return DEVICE.read()


def cache_dir() -> Path:
    """Returns the folder for models and kernels, which may not exist.  Raises SettingsError."""
    named = CACHE_DIR.read()
    if named is not None:
        return named.absolute()
    import platformdirs

    try:
        path = platformdirs.user_cache_path("ostinato")
    except RuntimeError:
        path = Path()
    if not path.is_absolute():  # older releases of platformdirs return "~/.cache/ostinato"
        raise SettingsError(f"this user has no home folder; set {CACHE_DIR.name}")
    return path
