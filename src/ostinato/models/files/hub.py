"""Models of the Hugging Face hub by id, through `huggingface_hub` and its cache.

    org/name                a folder of safetensors; or the GGUF file, if there is only one
    org/name:Q4_K_M         the GGUF file of this quantisation
    org/name:file.gguf      this file

Of a GGUF model in parts, all parts; the path is the first one's.

The hub is not trusted: names of files are checked before they are requested, and downloaded files
are opened like any other file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ostinato.errors import DownloadError, ModelError, NotAvailableError
from ostinato.models.arguments import shown
from ostinato.models.files.reading import gguf_parts, read_json

T = TypeVar("T")

_NAME = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?::(?P<choice>[\w][\w./-]*))?")
_FILE = re.compile(r"(?:[\w][\w.-]*/){0,8}[\w][\w.-]*")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHERS = (
    _INDEX,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of a folder of safetensors that may be needed, besides the shards."""
_SHOWN = 20  # names of files in a message


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and the choice of its file: a name, a quantisation such as "Q4_K_M", or ""."""

    repo: str
    choice: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.choice}" if self.choice else self.repo


def hub_name(text: str) -> HubName | None:
    """Parses an id of the hub; None if the text is none.

    "./x/y" and "x/y.gguf" are paths; no id of the hub begins or ends like that.
    """
    match = _NAME.fullmatch(text)
    if match is None or match["repo"].endswith((".gguf", ".safetensors")):
        return None
    return HubName(match["repo"], match["choice"] or "")


def from_hub(name: HubName, *, download: bool) -> Path:
    """Returns the folder or file, for `open_checkpoint`; with `download`, fetches files that are
    not in the hub's cache.

    Raises ModelError if the repository has no matching file, or several; DownloadError;
    NotAvailableError without the `hub` extra.
    """
    try:
        import huggingface_hub as hub
    except ImportError:
        raise NotAvailableError(
            f"{str(name)!r} looks like a Hugging Face id, which needs the `hub` extra: "
            'pip install "ostinato[hub]"'
        ) from None
    if not download:
        # Only the folder is needed.  Newer versions of huggingface_hub raise if files that match
        # these patterns are missing.
        patterns = ["-"] if name.choice else [*_OTHERS]
        folder = Path(
            _asked(
                name,
                lambda: hub.snapshot_download(
                    name.repo, local_files_only=True, allow_patterns=patterns
                ),
            )
        )
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*")]
        chosen = _choose(name, files)
        if not chosen:
            _require_whole(name, folder)
        return folder / chosen[0] if chosen else folder
    try:
        files = _asked(name, lambda: hub.HfApi().list_repo_files(name.repo))
    except DownloadError:
        with suppress(ModelError):  # without a network the cached files are used
            return from_hub(name, download=False)
        raise
    chosen = _choose(name, files)
    if chosen:
        paths = [_asked(name, partial(hub.hf_hub_download, name.repo, file)) for file in chosen]
        return Path(paths[0])
    files = _listed(files)
    here = {file for file in files if file in _OTHERS}
    if _INDEX in here:
        index = Path(_asked(name, lambda: hub.hf_hub_download(name.repo, _INDEX)))
        here |= _shards(index) & {*files}
    elif _SINGLE in files:
        here.add(_SINGLE)
    else:
        here |= {file for file in files if "/" not in file and file.endswith(".safetensors")}
    # Exact names: the pattern "*.safetensors" would match files in subfolders, too.
    names = sorted(here)
    return Path(_asked(name, lambda: hub.snapshot_download(name.repo, allow_patterns=names)))


def _shards(index: Path) -> set[str]:
    shards = read_json(index).get("weight_map") if index.is_file() else {}
    return {str(shard) for shard in shards.values()} if isinstance(shards, dict) else set()


def _asked(name: HubName, ask: Callable[[], T]) -> T:
    """Calls the hub or its cache; raises DownloadError for any error."""
    try:
        return ask()
    except Exception as error:  # the errors of the hub and of its HTTP library have no common base
        text = str(error).strip().splitlines()
        raise DownloadError(
            f"{str(name)!r} cannot be fetched from the hub: {type(error).__name__}: "
            f"{shown(text[0] if text else '', 500)}. Check the id and the network; a folder at "
            "hand can be given by its path"
        ) from error


def _listed(files: Sequence[Any]) -> list[str]:
    """Returns the valid ones of the hub's file names, sorted."""
    return sorted(file for file in files if isinstance(file, str) and _FILE.fullmatch(file))


def _choose(name: HubName, files: Sequence[Any]) -> list[str]:
    """Returns the GGUF file to use, or all its parts; nothing for the folder of safetensors.
    Raises ModelError."""
    listed = _listed(files)
    if name.choice.lower().endswith(".gguf"):
        if name.choice not in listed:
            raise _none(name, f"has no file {name.choice}", listed)
        return _parts(name.choice, name, listed)
    gguf = [file for file in listed if file.lower().endswith(".gguf")]
    if not name.choice:
        if "config.json" in listed and any(
            "/" not in file and file.endswith(".safetensors") for file in listed
        ):
            return []
        if not gguf:
            raise _none(name, "has neither a GGUF file nor config.json and *.safetensors", listed)
        found = gguf
    else:
        kind = re.compile(rf"(?:^|[-_.]){re.escape(name.choice)}(?=[-.])", re.IGNORECASE)
        found = [file for file in gguf if kind.search(file.rpartition("/")[2])]
        if not found:
            raise _none(name, f"has no GGUF file of {name.choice}", gguf)
    if len({gguf_parts(file)[0] for file in found}) > 1:
        raise _none(name, f"has {len(found)} GGUF files; name one as {name.repo}:file.gguf", found)
    return _parts(found[0], name, listed)


def _parts(file: str, name: HubName, listed: Sequence[str]) -> list[str]:
    """Returns all parts of the model, or the file.  Raises ModelError if a part is missing."""
    parts = gguf_parts(file)
    for part in parts:
        if part not in listed:
            raise _none(name, f"has no file {part}, one of {len(parts)} parts of a model", listed)
    return parts


def _none(name: HubName, what: str, files: Sequence[str]) -> ModelError:
    some = ", ".join(files[:_SHOWN]) + (", …" if len(files) > _SHOWN else "")
    return ModelError(f"{name.repo} on the hub {what}{f': {some}' if some else ''}")


def _require_whole(name: HubName, folder: Path) -> None:
    """Raises DownloadError if a download is incomplete: tokenizer.json or a shard in the index is
    missing."""
    needed = [*sorted(_shards(folder / _INDEX)), "tokenizer.json"]
    missing = [one for one in needed if not (folder / Path(one).name).is_file()]
    if missing:
        raise DownloadError(f"{name}: of the hub's files {missing[0]} is not here yet")
