"""The choice of a tuning for a decoder's CUDA kernels: one that `ostinato tune` stored on this
machine for this GPU and these kernels, or the default rule's (`cuda.shapes.default_tuning`).

A stored tuning is one small JSON file:

    <cache folder>/tunings/<digest of gpu, shape, rows, kernels>.json

    {"schema": "ostinato.tuning/2", "gpu": …, "shape": …, "rows": …, "kernels": …,
     "tuning": {…}, "before_us": {"20": …}, "after_us": {…}}

`kernels` is the digest of the kernels' sources.  Files are not trusted: a file that is damaged, has
another schema, was made for other sources, or has shapes that the kernels do not support is not
used, and the reason is logged.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ostinato import Device, settings
from ostinato.errors import NotAvailableError
from ostinato.files import UntrustedError, open_regular, replace_file
from ostinato.models.config import LlamaConfig
from ostinato.models.cuda.legal import problems_of
from ostinato.models.cuda.shapes import (
    PRODUCTS,
    BlockShape,
    Tuning,
    default_tuning,
    dynamic_shared,
    for_context,
    has_fast_memory,
    has_warpgroups,
    shape_key,
)

_log = logging.getLogger(__name__)

_SCHEMA = "ostinato.tuning/2"
_MAX_BYTES = 1 << 16
_KERNELS = Path(__file__).parent / "kernels"


def choose_tuning(
    config: LlamaConfig,
    *,
    rows: int,
    context: int,
    gpu: str,
    folder: Path | None = None,
    **known: Any,
) -> Tuning:
    """Returns the tuning for steps of `rows` rows on a GPU of this name, of which the rule knows
    `known` (`known_of`).

    `context`: positions of a sequence.  `folder`: see `stored_in`.  A stored tuning that is damaged
    or does not fit is not used; a warning with the reason is logged.  Raises UnsupportedModelError.
    """
    default = default_tuning(config, rows=rows, context=context, **known)
    key = TuningKey.of(config, rows, gpu)
    path = stored_in(folder) / key.name
    try:
        found = decode_tuning(_read(path, key), default)
        has = {name: known.get(name, False) for name in ("clusters", "warpgroups")}
        problem = "; ".join(problems_of(config, rows, found, **has, shared=default.shared))
        if not problem:
            sizes = {"rows": rows, "context": context}
            return for_context(found, config, **sizes, multiprocessors=known["multiprocessors"])
    except FileNotFoundError:
        return default
    except (OSError, UntrustedError, ValueError, RecursionError) as error:
        problem = str(error)
    _log.warning("the tuning %s is not used: %s; `ostinato tune` makes another", path, problem)
    return default


def known_of(device: Device) -> dict[str, Any]:
    """Returns a CUDA device's properties as arguments of `default_tuning`, by parameter name."""
    properties = device.properties
    return {
        "multiprocessors": properties.multiprocessors,
        "clusters": device.capabilities.clusters,
        "warpgroups": has_warpgroups(properties.compute_capability),
        "shared": dynamic_shared(properties.max_shared_per_block),
        "fast_memory": has_fast_memory(properties.memory_bandwidth, properties.multiprocessors),
    }


@functools.cache
def sources_digest() -> str:
    """Returns the digest of all kernels' sources, since a shape is measured in a whole step."""
    state = hashlib.sha256()
    for path in sorted(_KERNELS.glob("*.cu*")):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class TuningKey:
    """The key of a tuning: the GPU's name, the model's sizes, the rows of a step, and the digest of
    the kernels' sources."""

    gpu: str
    shape: str
    rows: int
    kernels: str

    @classmethod
    def of(cls, config: LlamaConfig, rows: int, gpu: str) -> TuningKey:
        return cls(gpu, shape_key(config), rows, sources_digest())

    @property
    def name(self) -> str:
        """The name of the tuning's file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"


_STORED = (*PRODUCTS.values(), "attention", "block", "start_next", "programmatic")
"""The fields of a tuning that a file has; others, such as the shapes of packed products, are set by
the rule."""


def encode_tuning(tuning: Tuning) -> dict[str, Any]:
    """Returns a tuning as JSON data: its fields in `_STORED`."""
    made = asdict(tuning)
    return {name: made[name] for name in _STORED}


def decode_tuning(data: object, base: Tuning) -> Tuning:
    """Builds a tuning from the result of `encode_tuning`; the fields that it leaves out, and the
    kinds of shapes, are those of `base`.

    Raises ValueError for data of another form.  The caller checks the shapes with `problems_of`.
    """
    if not isinstance(data, dict) or set(data) != {*_STORED}:
        raise ValueError(f"a tuning has the fields {', '.join(sorted(_STORED))}")
    made: dict[str, Any] = dict(data)
    kinds = {name: type(getattr(base, name)) for name in (*PRODUCTS.values(), "attention")}
    kinds |= {} if data["block"] is None else {"block": BlockShape}
    for name, kind in kinds.items():
        fields, wanted = data[name], kind.__dataclass_fields__
        if not isinstance(fields, dict) or set(fields) != set(wanted):
            raise ValueError(f"{name} has the fields {', '.join(wanted)}")
        made[name] = kind(**fields)
    if not isinstance(data["start_next"], dict):
        raise ValueError("start_next is not a table of names")
    return replace(base, **made)


def stored_in(folder: Path | None = None) -> Path:
    """Returns the folder of the tunings, which may not exist: `folder`, or "tunings" in the cache
    folder of the settings."""
    return settings.cache_dir() / "tunings" if folder is None else folder


def save_tuning(
    key: TuningKey,
    tuning: Tuning,
    *,
    before: Mapping[int, float],
    after: Mapping[int, float],
    folder: Path | None = None,
) -> Path:
    """Writes a tuning atomically, replacing an older one, and returns its path.

    `before`, `after`: microseconds of a step by context.  `folder`: see `stored_in`.  Raises
    NotAvailableError if the folder cannot be written.
    """
    record = {
        "schema": _SCHEMA,
        **asdict(key),
        "tuning": encode_tuning(tuning),
        "before_us": before,
        "after_us": after,
    }
    path = stored_in(folder) / key.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode(), private=False)
    except OSError as error:
        raise NotAvailableError(
            f"the tuning cannot be written to {path.parent}: {error}; OSTINATO_CACHE_DIR names "
            "another folder"
        ) from error
    return path


def _read(path: Path, key: TuningKey) -> object:
    """Returns the tuning in a file, not decoded yet.  Raises FileNotFoundError; ValueError,
    RecursionError, UntrustedError or OSError for a file that is not used."""
    with open_regular(path, private=False) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    record = json.loads(data)
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
        raise ValueError(f"it is no {_SCHEMA} file")
    if {name: record.get(name) for name in asdict(key)} != asdict(key):
        raise ValueError("it was made for something else than its name says")
    return record.get("tuning")
